"""Rows: empty and padded ones, lse, several queries a request, block tables (kinds 1, 5, 8 and 9 of what users report)."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_backends import Decoded, InvalidInput, Query, get_backend, ops
from mla_backends.conditions import Condition
from mla_backends.trials import Trial

INF = float("inf")


def filled(world: Any, *lead: int, heads: int = 16) -> dict[str, Tensor]:
    """out and lse that nobody has written."""
    out = torch.full((*lead, heads, 512), torch.nan, dtype=world.dtype, device=world.device)
    return {"out": out, "lse": torch.full((*lead, heads), torch.nan, device=world.device)}


# --- empty and padded rows ------------------------------------------------------------------------------------------------


def test_dead_rows_are_empty_and_their_ids_never_matter(world: Any) -> None:
    cache, query, lens = world.cache(), world.query(4), world.ints(130, 1, 0, 0)
    valid = world.table(4, -(-130 // world.page_size))
    dead = valid.clone()
    dead[2:] = -1
    got, other = (world.plan(cache, t, lens).run(query, cache, **filled(world, 4)) for t in (dead, valid))
    assert not got.out.isnan().any()
    assert not got.out[2:].any()
    assert (got.lse[2:] == -INF).all()
    world.assert_close(got, world.truth(query, cache, valid, lens))
    assert world.same(got, other)


def test_nan_in_the_queries_of_dead_rows_poisons_nobody(world: Any) -> None:
    cache, lens, table = world.cache(), world.ints(130, 1, 0, 0), world.table(4, -(-130 // world.page_size))
    query = world.query(4)
    clean = world.plan(cache, table, lens).run(query, cache)
    query.packed[2:] = torch.nan
    assert world.same(world.plan(cache, table, lens).run(query, cache), clean)


def test_a_measured_query_scale_looks_at_live_rows_only(world: Any) -> None:
    world.need(measured_q_scale=True)
    cache, lens, table = world.cache(), world.ints(130, 1, 0, 0), world.table(4, -(-130 // world.page_size))
    query = world.query(4)
    clean = world.plan(cache, table, lens, q_scale=None).run(query, cache)
    for poison in (torch.nan, INF, 3e4):
        query.packed[2:] = poison
        assert world.same(world.plan(cache, table, lens, q_scale=None).run(query, cache), clean)


def test_rows_past_the_live_ones_are_empty_after_any_update(world: Any) -> None:
    cache, query, columns = world.cache(), world.query(6), -(-200 // world.page_size)
    plan = world.plan(cache, world.table(6, columns), world.ints(1, 64, 65, 130, 200, 3), max_batch=6)
    generator = torch.Generator().manual_seed(0)
    for live in (6, 2, 5, 0, 1, 6):
        lens = torch.randint(0, 201, (live,), generator=generator).int().to(world.device)
        table = world.table(live, columns, seed=live)
        plan.update(table, lens, seq_lens_cpu=lens.cpu())
        got = plan.run(query, cache, **filled(world, 6))
        fresh = world.plan(cache, table, lens, max_batch=6, max_seq_len=columns * world.page_size)
        assert world.same(got, fresh.run(query, cache))
        assert not got.out[live:].any()
        assert (got.lse[live:] == -INF).all()
        part = Query.from_packed(query.packed[:live].contiguous())
        world.assert_close(Decoded(got.out[:live], got.lse[:live]), world.truth(part, cache, table, lens))


def test_no_requests_and_no_rows_give_empty_results(world: Any) -> None:
    cache, table = world.cache(), world.table(3, 2)
    none = world.plan(cache, table[:0], world.ints()).run(world.query(0), cache)
    assert none.out.shape == (0, 16, 512)
    assert none.lse.shape == (0, 16)
    rowless = world.plan(cache, table, world.ints(1, 2, 3), q_len=0).run(world.query(3, 0), cache)
    assert rowless.out.shape == (3, 0, 16, 512)
    assert rowless.lse.shape == (3, 0, 16)


def test_tokens_past_the_last_request_are_empty_even_without_any_request(world: Any) -> None:
    world.need(ragged=True, needs_lse=True)
    cache, table, lens = world.cache(), world.table(3, 2), world.ints(5, 64, 9)
    for starts in ((0, 0, 0, 0), (0, 1, 1, 2)):
        plan = world.plan(cache, table, lens, cu_q_lens=world.ints(*starts))
        got = plan.run(world.query(5), cache, **filled(world, 5))
        assert not got.out[starts[-1] :].any()
        assert (got.lse[starts[-1] :] == -INF).all()
        assert got.lse[: starts[-1]].isfinite().all()
    nobody = world.plan(cache, table[:0], lens[:0], cu_q_lens=world.ints(0))
    got = nobody.run(world.query(5), cache, **filled(world, 5))
    assert not got.out.any()
    assert (got.lse == -INF).all()


# --- lse ------------------------------------------------------------------------------------------------------------------


def test_two_calls_over_parts_of_the_keys_merge_into_one(world: Any) -> None:
    cache, query = world.cache(), world.query(2)
    cut = 192 // world.page_size
    table, lens = world.table(2, -(-300 // world.page_size)), world.ints(300, 100)
    whole = world.plan(cache, table, lens).run(query, cache)
    first = lens.clamp(max=cut * world.page_size)
    parts = [
        world.plan(cache, table[:, :cut], first).run(query, cache),
        world.plan(cache, table[:, cut:], lens - first).run(query, cache),
    ]
    assert (parts[1].lse[1] == -INF).all()
    merged = ops.merge_partials(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    world.assert_close(merged, world.truth(query, cache, table, lens))
    assert (merged.lse - whole.lse).abs().max() < 2e-3
    wrong = ops.merge_partials(torch.stack([p.out for p in parts]), torch.stack([p.lse / 0.6931 for p in parts]))
    with pytest.raises(AssertionError):
        world.assert_close(wrong, world.truth(query, cache, table, lens))


def test_batch_rows_and_heads_of_the_lse_are_in_that_order(world: Any) -> None:
    world.need(q_len=2, num_heads=5)
    cache, query, lens = world.cache(), world.query(3, 2, heads=5), world.ints(7, 70, 130)
    table = world.table(3, -(-130 // world.page_size))
    got = world.plan(cache, table, lens, num_heads=5, q_len=2).run(query, cache)
    assert got.lse.shape == (3, 2, 5)
    assert got.lse.dtype == torch.float32
    world.assert_close(got, world.truth(query, cache, table, lens))


# --- several queries a request --------------------------------------------------------------------------------------------


def test_a_query_row_equals_a_call_of_its_own_at_its_length(world: Any) -> None:
    world.need(q_len=3, num_heads=8)
    cache, query, lens = world.cache(), world.query(3, 3, heads=8), world.ints(3, 64, 66)
    table = world.table(3, -(-66 // world.page_size))
    got = world.plan(cache, table, lens, num_heads=8, q_len=3).run(query, cache)
    for i in range(3):
        alone = Query.from_packed(query.packed[:, i].contiguous())
        single = world.plan(cache, table, lens - 3 + i + 1, num_heads=8).run(alone, cache)
        world.assert_close(Decoded(got.out[:, i], got.lse[:, i]), Decoded(single.out, single.lse))


def test_rows_that_come_before_the_first_key_are_empty(world: Any) -> None:
    world.need(q_len=3)
    cache, query, lens = world.cache(), world.query(3, 3), world.ints(1, 2, 5)
    got = world.plan(cache, world.table(3, 1), lens, q_len=3).run(query, cache, **filled(world, 3, 3))
    assert torch.equal((got.lse == -INF).all(-1).cpu(), torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool())
    world.assert_close(got, world.truth(query, cache, world.table(3, 1), lens))


# --- block tables ---------------------------------------------------------------------------------------------------------


def test_columns_past_the_length_never_matter(world: Any) -> None:
    cache, query, lens = world.cache(), world.query(4), world.ints(130, 1, 0, 64)
    table = world.table(4, 8)
    used = torch.arange(8, device=world.device) < (lens.unsqueeze(1) + world.page_size - 1) // world.page_size
    clean = world.plan(cache, table, lens).run(query, cache)
    world.assert_close(clean, world.truth(query, cache, table, lens))
    for garbage in (-1, 2**30, -(2**31), 2**31 - 1, cache.num_pages, 7):
        poisoned = table.masked_fill(~used, garbage)
        assert world.same(world.plan(cache, poisoned, lens).run(query, cache), clean), garbage
    noise = torch.randint(-(2**31), 2**31 - 1, table.shape, generator=torch.Generator().manual_seed(0))
    poisoned = torch.where(used, table, noise.int().to(world.device))
    assert world.same(world.plan(cache, poisoned, lens).run(query, cache), clean)


def test_any_integer_table_and_any_stride_equal_contiguous_int32(world: Any) -> None:
    cache, query, lens = world.cache(), world.query(3), world.ints(130, 1, 64)
    columns = -(-130 // world.page_size)
    table = world.table(3, columns)
    plan = world.plan(cache, table, lens)
    want = plan.run(query, cache)
    wide = torch.full((3, columns + 5), -7, dtype=torch.int32, device=world.device)
    wide[:, :columns] = table
    every_second = torch.stack([lens, lens + 9], 1).flatten()[::2]
    for other, lengths in (
        (table.long(), lens),
        (wide[:, :columns], lens),
        (table.t().contiguous().t(), lens),
        (table.short(), lens.short()),
        (table, lens.long()),
        (table, every_second),
    ):
        assert world.same(world.plan(cache, other, lengths).run(query, cache), want)
        plan.update(table * 0, lens * 0, seq_lens_cpu=(lens * 0).cpu())
        plan.update(other, lengths, seq_lens_cpu=lengths.cpu())
        assert world.same(plan.run(query, cache), want)


def test_requests_may_share_one_row_of_a_table(world: Any) -> None:
    cache, query, lens = world.cache(), world.query(3), world.ints(130, 1, 64)
    table = world.table(1, -(-130 // world.page_size)).expand(3, -1)
    got = world.plan(cache, table, lens).run(query, cache)
    assert world.same(got, world.plan(cache, table.contiguous(), lens).run(query, cache))
    world.assert_close(got, world.truth(query, cache, table, lens))


@pytest.mark.parametrize(
    "kept", [slice(2, None), slice(None, None, 2), slice(0, 2)], ids=["last", "every other", "first"]
)
def test_an_engine_that_drops_requests_may_pass_the_plans_own_buffers(world: Any, kept: slice) -> None:
    cache, query, lens = world.cache(), world.query(5), world.ints(130, 1, 64, 65, 3)
    table = world.table(5, -(-130 // world.page_size))
    plan = world.plan(cache, table, lens)
    plan.update(plan.block_table[kept], plan.seq_lens[kept], seq_lens_cpu=lens[kept].cpu())
    fresh = world.plan(cache, table[kept], lens[kept], max_batch=5)
    assert world.same(plan.run(query, cache), fresh.run(query, cache))


def test_a_row_has_the_same_bits_alone_and_in_any_batch(world: Any) -> None:
    world.need(batch_invariant=True, measured_q_scale=False)
    cache, columns = world.cache(), -(-300 // world.page_size)
    table, lens, query = world.table(7, columns), world.ints(300, 1, 0, 64, 65, 130, 7), world.query(7)
    options = {"batch_invariant": True, "max_seq_len": columns * world.page_size, "q_scale": 0.01}
    batched = world.plan(cache, table, lens, **options).run(query, cache)
    for row in range(7):
        alone = Query.from_packed(query.packed[row : row + 1].contiguous())
        single = world.plan(cache, table[row : row + 1], lens[row : row + 1], **options).run(alone, cache)
        assert torch.equal(single.out[0], batched.out[row])
        assert torch.equal(single.lse[0], batched.lse[row])


# --- anything at all ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    condition=st.builds(
        Condition,
        num_heads=st.integers(1, 9),
        q_len=st.integers(1, 4),
        causal=st.booleans(),
        cache_format=st.sampled_from(["bf16", "fp16", "fp32", "fp8", "fp8_ds_mla"]),
        page_size=st.sampled_from([1, 3, 16, 64]),
        seq_lens=st.lists(st.integers(0, 150), min_size=1, max_size=5).map(tuple),
        layers=st.just(3),
        layer=st.integers(0, 2),
        query=st.sampled_from(["packed", "parts", "transposed", "padded"]),
        offset=st.sampled_from([0, 8, 16]),
    ),
    seed=st.integers(0, 2**16),
)
def test_any_lengths_tables_and_strides_match_the_reference(condition: Condition, seed: int) -> None:
    assert Trial(condition, "cpu", seed=seed).run(get_backend("cpu")).faults(condition) == ()


@pytest.mark.parametrize("cache_format", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("num_heads", "q_len"), [(1, 1), (3, 2), (7, 3), (13, 4), (33, 5), (65, 6), (127, 7), (128, 8)]
)
def test_odd_head_counts_and_every_q_len_match_the_reference(
    num_heads: int, q_len: int, cache_format: Literal["bf16", "fp32"]
) -> None:
    condition = Condition(num_heads=num_heads, q_len=q_len, cache_format=cache_format)
    assert Trial(condition, "cpu").run(get_backend("cpu")).faults(condition) == ()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cache_format", ["bf16", "fp32"])
def test_ragged_rows_from_none_to_eight_match_the_reference(
    cache_format: Literal["bf16", "fp32"], causal: bool
) -> None:
    condition = Condition(num_heads=5, q_lens=(8, 1, 0, 5, 7, 2, 6), cache_format=cache_format, causal=causal)
    assert Trial(condition, "cpu").run(get_backend("cpu")).faults(condition) == ()


def test_an_update_that_does_not_fit_leaves_the_last_step_standing(world: Any) -> None:
    cache, query, lens = world.cache(), world.query(3), world.ints(130, 1, 64)
    columns = -(-130 // world.page_size)
    table = world.table(3, columns)
    plan = world.plan(cache, table, lens)
    before = plan.run(query, cache)
    room = columns * world.page_size
    host = lens.cpu()
    wrong: tuple[dict[str, Any], ...] = (
        {"block_table": world.table(4, columns), "seq_lens": world.ints(1, 2, 3, 4)},
        {"block_table": table * 0, "seq_lens": lens[:2]},
        {"block_table": table[:, :1], "seq_lens": lens, "seq_lens_cpu": host + world.page_size},
        {"block_table": table * 0, "seq_lens": lens, "seq_lens_cpu": host + room},
        {"block_table": table * 0, "seq_lens": lens, "seq_lens_cpu": -host},
        {"block_table": table * 0, "seq_lens": lens.float()},
        {"block_table": table.float(), "seq_lens": lens * 0},
        {"block_table": table[0], "seq_lens": lens * 0},
        {"block_table": table * 0, "seq_lens": lens * 0, "max_seq_len": room + 1},
        {"block_table": table * 0, "seq_lens": lens * 0, "cu_q_lens": world.ints(0, 1, 2, 3)},
    )
    for step in wrong:
        with pytest.raises(InvalidInput):
            plan.update(**step)
        assert world.same(plan.run(query, cache), before)
