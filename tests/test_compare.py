"""The workload of a comparison: its lengths, its cost, and how much of it the reference is given."""

import json
from dataclasses import replace

import pytest

from mla_backends import InvalidInput
from mla_backends.compare import REFERENCE_FLOPS, Comparison, Row, Workload, _floor
from mla_backends.conditions import Outcome


def test_heads_are_the_models_and_shared_by_its_ranks() -> None:
    assert [Workload(m).geometry.num_heads for m in ("deepseek-v3", "deepseek-v2-lite", "kimi-k2")] == [128, 16, 64]
    assert Workload("kimi-k2", tp=8).condition().num_heads == 8
    with pytest.raises(InvalidInput, match="tp_size is 5"):
        Workload("kimi-k2", tp=5)


@pytest.mark.parametrize("batch", [1, 2, 4, 7, 8, 32])
@pytest.mark.parametrize("seq", [1, 63, 500])
def test_mixed_lengths_have_the_longest_and_stay_below_it(batch: int, seq: int) -> None:
    lens = Workload(batch=batch, seq=seq).seq_lens
    assert len(lens) == batch
    assert max(lens) == lens[0] == seq
    assert min(lens) >= 0
    assert lens == Workload(batch=batch, seq=seq).seq_lens


def test_mixed_lengths_have_an_empty_row_and_page_edges() -> None:
    assert {0, 64, 65, 63, 1} <= set(Workload(batch=20, seq=500).seq_lens)
    assert len(set(Workload(batch=20, seq=500).seq_lens)) > 15


def test_equal_lengths_are_equal() -> None:
    assert Workload(batch=3, seq=70, lengths="equal").seq_lens == (70, 70, 70)


def test_the_layer_is_the_middle_one_of_three() -> None:
    condition = Workload().condition()
    assert (condition.layers, condition.layer) == (3, 1)


def test_bytes_and_operations_are_those_of_the_roofline() -> None:
    dense = Workload("deepseek-v2-lite", batch=128, seq=4096, lengths="equal")
    assert dense.nbytes() == 128 * 4096 * 1152
    assert sum(map(dense.flops, range(128))) == 2 * 128 * 16 * 4096 * (576 + 512)
    assert sum(map(replace(dense, q_len=2).flops, range(128))) == 2 * 128 * 2 * 16 * 4096 * (576 + 512)
    assert replace(dense, q_len=2).nbytes() == dense.nbytes()
    sparse = replace(dense, cache_format="fp8_ds_mla", topk=2048, q_len=2)
    assert sparse.nbytes() == 128 * 2 * 2048 * 656
    assert sum(map(sparse.flops, range(128))) == 2 * 128 * 2 * 16 * 2048 * (576 + 512)


def test_the_floor_is_the_larger_of_reading_and_multiplying() -> None:
    read = Workload("deepseek-v2-lite", batch=128, seq=4096, lengths="equal")
    assert _floor(read, 4.0, 800.0) == pytest.approx(128 * 4096 * 1152 / 4e12 * 1e6)
    multiplied = replace(read, model="deepseek-v3")
    assert _floor(multiplied, 4.0, 800.0) == pytest.approx(2 * 128 * 128 * 4096 * 1088 / 800e12 * 1e6)


def test_the_reference_is_given_all_of_a_small_workload_and_a_part_of_a_large_one() -> None:
    assert Workload().checked() == list(range(8))
    large = Workload(batch=512, seq=32768, lengths="equal")
    few = large.checked()
    assert 1 <= len(few) < 512
    assert sum(map(large.flops, few)) <= REFERENCE_FLOPS
    assert Workload(batch=2, seq=1 << 24, lengths="equal").checked() == [0]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"seq": 0}, {"q_len": 0}, {"topk": 0}, {"page_size": 0}, {"tp": 0}])
def test_counts_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=f"{next(iter(wrong))}.* is 0"):
        Workload(**wrong)  # type: ignore[arg-type]


def test_an_error_that_is_no_number_is_text_in_json() -> None:
    facts = {"lse_precision": 1e-3, "allocates": ("lse",), "kernel": object}
    outcome = Outcome(float("nan"), float("inf"), False, False, False, False, facts)
    row = Row("a", "torch", outcome=outcome, faults=outcome.faults(Workload().condition()))
    found = Comparison("cpu", Workload(), 8, None, None, (row,))
    assert not found.is_right
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["rows"][0]["outcome"]["out_error"] == "nan"
    assert told["rows"][0]["outcome"]["lse_error"] == "inf"
    assert len(told["rows"][0]["faults"]) == 6
