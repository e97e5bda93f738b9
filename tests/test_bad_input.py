"""Whatever does not fit is an InvalidInput that names the argument, what was found and what is taken, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_backends import (
    AbsorbWeights,
    Geometry,
    IndexerCache,
    InvalidInput,
    NoAdapterRuns,
    PagedCache,
    Problem,
    Query,
    UnifiedCache,
    Verdicts,
    get_backend,
    ops,
    softmax_scale,
)

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
BACKEND = get_backend("cpu")
CACHE = PagedCache.allocate(8, 64, "bf16", "cpu")
TABLE = torch.zeros(2, 4, dtype=torch.int32)
LENS = torch.tensor([3, 64], dtype=torch.int32)
ABSENT: Any = object()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plan(**given: Any) -> Any:
    given = {"cache": CACHE, "block_table": TABLE, "seq_lens": LENS, "num_heads": 4, "softmax_scale": 0.1, **given}
    return BACKEND.plan(given.pop("cache"), given.pop("block_table"), given.pop("seq_lens"), **given)


def query(*lead: int, heads: int = 4, latent: int = 512, rope: int = 64, dtype: torch.dtype = torch.bfloat16) -> Query:
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randn(*lead, heads, n, generator=generator).to(dtype) for n in (latent, rope))
    return Query.from_parts(*parts)


def sparse(**given: Any) -> Any:
    return plan(block_table=None, seq_lens=None, **{"topk": 5, "max_batch": 2, **given})


def table_with(page: int, dtype: torch.dtype = torch.int32, at: tuple[int, int] = (1, 1)) -> Tensor:
    table = TABLE.to(dtype, copy=True)
    table[at] = page
    return table


# --- plan -----------------------------------------------------------------------------------------------------------------

PLAN: list[tuple[dict[str, Any], str]] = [
    # rank, dtype, kind
    ({"block_table": [[0]]}, r"block_table is a list, it takes an int32 tensor"),
    ({"block_table": TABLE[0]}, r"block_table has shape \[4\], it takes 2 dimensions"),
    ({"block_table": TABLE[None]}, r"block_table has shape \[1, 2, 4\], it takes 2"),
    ({"block_table": TABLE.float()}, r"block_table is torch.float32, it takes int32; convert with .int\(\)"),
    ({"block_table": TABLE.bool()}, r"block_table is torch.bool, it takes int32"),
    ({"block_table": None}, r"block_table and seq_lens are required unless topk is given"),
    ({"block_table": TABLE.to("meta")}, r"block_table is on meta, it takes cpu, where the cache is"),
    ({"seq_lens": [3, 64]}, r"seq_lens is a list, it takes an int32 tensor"),
    ({"seq_lens": np.array([3, 64])}, r"seq_lens is a ndarray, it takes an int32 tensor"),
    ({"seq_lens": torch.tensor(3)}, r"seq_lens has shape \[\], it takes 1 dimensions"),
    ({"seq_lens": LENS[:, None]}, r"seq_lens has shape \[2, 1\], it takes 1"),
    ({"seq_lens": LENS.float()}, r"seq_lens is torch.float32, it takes int32"),
    ({"seq_lens": LENS.bool()}, r"seq_lens is torch.bool, it takes int32"),
    ({"seq_lens": LENS.to("meta")}, r"seq_lens is on meta, it takes cpu"),
    ({"seq_lens": None}, r"block_table and seq_lens are required"),
    ({"seq_lens_cpu": [3, 64]}, r"seq_lens_cpu is a list, it takes an int32 tensor"),
    # values known on the host
    ({"seq_lens": ints(-1, 3)}, r"seq_lens holds -1, it takes lengths of at least 0"),
    ({"seq_lens": ints(-1, 3), "seq_lens_cpu": LENS}, r"seq_lens holds -1, it takes lengths of at least 0"),
    ({"seq_lens_cpu": ints(-1, 3)}, r"seq_lens_cpu holds -1"),
    (
        {"seq_lens": ints(257, 3)},
        r"seq_lens holds 257, but block_table \[2, 4\] with page_size 64 has room for 256; pass a wider table",
    ),
    (
        {"seq_lens": ints(257, 3), "max_seq_len": 512},
        r"holds 257, but block_table \[2, 4\] with page_size 64 has room for 256; pass a wider",
    ),
    ({"seq_lens": torch.tensor([2**40, 3])}, r"seq_lens holds 1099511627776, but block_table .* has room for 256"),
    ({"max_seq_len": 10}, r"seq_lens holds 64, it takes at most 10, this plan's max_seq_len; plan with a larger one"),
    ({"seq_lens": ints(1, 2, 3)}, r"block_table has 2 rows, it takes 3, one a request"),
    (
        {"seq_lens_cpu": ints(3, 65)},
        r"seq_lens_cpu holds 65 for request 1, seq_lens 64; they take the same lengths, leave seq_lens_cpu out",
    ),
    (
        {"seq_lens_cpu": torch.tensor([2**32 + 3, 64])},
        r"seq_lens_cpu holds 4294967299, but block_table .* has room for 256",
    ),
    *[
        (
            {"block_table": table_with(x, dtype), "seq_lens": ints(3, 65)},
            rf"block_table holds page {x} at \[1, 1\], within the 65 keys of its request, it takes 0 to 7, the cache's",
        )
        for x, dtype in ((8, torch.int32), (-1, torch.int32), (2**32 + 1, torch.int64), (255, torch.uint8))
    ],
    (
        {"block_table": table_with(8), "seq_lens": None, "seq_lens_cpu": ints(3, 65)},
        r"block_table holds page 8 at \[1, 1\], within the 65 keys",
    ),
    *[
        ({"max_seq_len": x}, rf"max_seq_len is {x}, it takes a whole number of at least 0 and at most 2147483647")
        for x in (2**31, 2**63)
    ],
    # flags
    *[
        ({name: x}, rf"{name} is .*, it takes True or False")
        for name in ("causal", "return_lse", "batch_invariant")
        for x in (1, None, "no", np.bool_(True), torch.tensor(True))
    ],
    ({"max_batch": 1}, r"the step has 2 requests, this plan holds 1; plan with max_batch=2"),
    # numbers
    *[
        ({"num_heads": x}, r"num_heads is .*, it takes a whole number of at least 1")
        for x in (0, -4, True, 4.0, "4", np.bool_(True), torch.tensor(4), None)
    ],
    *[({"q_len": x}, r"q_len is .*, it takes a whole number of at least 0") for x in (-1, True, 1.0)],
    *[({"max_batch": x}, r"max_batch is .*, it takes a whole number of at least 0") for x in (-1, True, 2.0)],
    *[({"max_seq_len": x}, r"max_seq_len is .*, it takes a whole number of at least 0") for x in (-1, True, 256.0)],
    *[
        (
            {"topk": x, "block_table": None, "seq_lens": None, "max_batch": 2},
            r"topk is .*, it takes a whole number of at least 1",
        )
        for x in (0, -1, True, 64.0)
    ],
    *[
        (
            {"softmax_scale": x},
            r"softmax_scale is .*, it takes a number that is positive and finite in float32; softmax_",
        )
        for x in (0, -0.1, float("nan"), float("inf"), 1e300, 10**400, True, "0.1", np.bool_(True), torch.tensor(0.1))
    ],
    *[
        ({"q_scale": x}, r"q_scale is .*, it takes a number that is positive and finite in float32")
        for x in (0.0, -1.0, float("nan"), float("inf"), True, "1", 1e-300, 1e300)
    ],
    ({"q_scale": torch.tensor([1.0, 2.0])}, r"q_scale is \[2\] torch.float32 on cpu, it takes one float32 on cpu"),
    ({"q_scale": torch.tensor(1.0, dtype=torch.float64)}, r"q_scale is \[\] torch.float64"),
    ({"q_scale": torch.tensor([float("nan")])}, r"q_scale holds nan, it takes a positive finite number"),
    ({"q_dtype": "bfloat16"}, r"q_dtype is 'bfloat16', it takes a torch.dtype"),
    # caches
    ({"cache": torch.zeros(8, 64, 576)}, r"cache is a Tensor, it takes a PagedCache"),
    (
        {"cache": UnifiedCache.allocate(2, 2, 64, "bf16", "cpu")},
        r"cache is a UnifiedCache, .* a UnifiedCache has one at .layer\(i\)",
    ),
    ({"cache": PagedCache.allocate(2, 64, "bf16", "meta")}, r"on meta, this backend is of cpu; make a cache on cpu"),
    # ragged
    ({"cu_q_lens": [0, 1, 2]}, r"cu_q_lens is a list, it takes an int32 tensor"),
    ({"cu_q_lens": ints(1, 2, 3)}, r"cu_q_lens is \[1, 2, 3\], it takes offsets that start at 0 and do not decrease"),
    ({"cu_q_lens": ints(0, 2, 1)}, r"cu_q_lens is \[0, 2, 1\], it takes offsets that start at 0 and do not decrease"),
    ({"cu_q_lens": ints(0, -2, -1)}, r"cu_q_lens is \[0, -2, -1\], it takes offsets"),
    ({"cu_q_lens": ints(0, 2)}, r"cu_q_lens has 2 entries, it takes 3, one a request and one more"),
    ({"cu_q_lens": ints()}, r"cu_q_lens has 0 entries, it takes 3"),
    ({"cu_q_lens": ints(0, 2, 4), "max_q_len": 1}, r"cu_q_lens holds a request of 2 rows, this plan's max_q_len is 1"),
    ({"cu_q_lens": ints(0, 1, 2)[None]}, r"cu_q_lens has shape \[1, 3\], it takes 1"),
    *[
        ({"cu_q_lens": ints(0, 1, 2), "max_q_len": x}, r"max_q_len is .*, it takes a whole number of at least 0")
        for x in (-1, True, 1.5)
    ],
    *[
        ({"cu_q_lens": ints(0, 1, 2), "q_len": x}, rf"q_len is {x} and cu_q_lens is given, .* leave q_len out")
        for x in (0, 2)
    ],
    ({"max_q_len": 3}, r"max_q_len is 3 without cu_q_lens"),
    # sparse
    ({"topk": 64, "max_batch": 2}, r"topk is given, so the plan is sparse: block_table and seq_lens must be None"),
    ({"topk": 64, "block_table": None, "seq_lens": None}, r"topk is given, so max_batch is required: it is B"),
    (
        {"topk": 64, "block_table": None, "seq_lens": None, "max_batch": 2, "cu_q_lens": ints(0, 1, 2)},
        r"a sparse plan takes uniform queries",
    ),
    # sink, workspace
    ({"attn_sink": [0.0] * 4}, r"attn_sink is a list, it takes \[4\] float32"),
    ({"attn_sink": torch.zeros(5)}, r"attn_sink is \[5\] torch.float32 on cpu, it takes \[4\] float32 on cpu"),
    ({"attn_sink": torch.zeros(4, dtype=torch.bfloat16)}, r"attn_sink is \[4\] torch.bfloat16"),
    (
        {"attn_sink": torch.tensor([0.0, 0.0, float("nan"), 0.0])},
        r"attn_sink holds NaN for head 2, it takes a logit a head; -inf is none",
    ),
    ({"workspace": bytearray(8)}, r"workspace is a bytearray, it takes one dimension of contiguous uint8"),
    (
        {"workspace": torch.zeros(8)},
        r"workspace is \[8\] torch.float32 on cpu, it takes one dimension of contiguous uint8",
    ),
    ({"workspace": torch.zeros(8, 8, dtype=torch.uint8)}, r"workspace is \[8, 8\]"),
    ({"workspace": torch.zeros(8, dtype=torch.uint8)[::2]}, r"workspace is \[4\]"),
]


@pytest.mark.parametrize(("given", "says"), PLAN)
def test_a_plan_says_what_does_not_fit(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        plan(**given)


def test_a_page_size_or_a_dtype_that_no_adapter_takes_is_a_page_of_reasons() -> None:
    with pytest.raises(NoAdapterRuns, match="q_dtype is float64, it takes bfloat16, float16 or float32") as refused:
        plan(q_dtype=torch.float64)
    assert isinstance(refused.value.verdicts, Verdicts)
    assert [v.name for v in refused.value.verdicts if v.runs] == []
    problem = refused.value.verdicts.problem
    assert (problem.num_heads, problem.batch, problem.max_seq_len, problem.q_dtype) == (4, 2, 256, "float64")
    for verdict in refused.value.verdicts:
        assert verdict.name in str(refused.value)
        assert all(str(reason) in str(refused.value) for reason in verdict.reasons)


# --- run ------------------------------------------------------------------------------------------------------------------


def out(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*(shape or (2, 4, 512)), dtype=dtype)


RUN: list[tuple[dict[str, Any], str]] = [
    (
        {"query": torch.zeros(2, 4, 576)},
        r"query is a Tensor, it takes a Query; make one with Query.from_parts or from_packed",
    ),
    ({"query": None}, r"query is a NoneType"),
    ({"query": query(2, heads=5)}, r"the query has 5 heads, this plan takes 4; plan with num_heads=5"),
    ({"query": query(3)}, r"the query has shape \[3, 4, 512\], this plan takes \[2, 1\] before its heads"),
    ({"query": query(2, 2)}, r"the query has shape \[2, 2, 4, 512\]"),
    ({"query": query(2, latent=256)}, r"the query is 256 \+ 64 wide, the cache 512 \+ 64"),
    ({"query": query(2, rope=0)}, r"the query is 512 \+ 0 wide, the cache 512 \+ 64"),
    (
        {"query": query(2, dtype=torch.float16)},
        r"the query is torch.float16, this plan's q_dtype is torch.bfloat16; plan with q_dtype=torch.float16",
    ),
    (
        {"query": Query.from_packed(torch.zeros(2, 4, 576).to(torch.float8_e4m3fn), scale=torch.ones(1))},
        r"the query is torch.float8_e4m3fn, this plan's q_dtype is torch.bfloat16; pass one of torch.bfloat16, the model's",
    ),
    (
        {"query": Query.from_packed(torch.zeros(2, 4, 576, dtype=torch.bfloat16, device="meta"))},
        r"the query is on meta",
    ),
    ({"indices": torch.zeros(2, 5, dtype=torch.int32)}, r"this plan is dense, it takes no indices; plan with topk"),
    ({"out": [0]}, r"out is a list, it takes \[2, 4, 512\] torch.bfloat16 on cpu"),
    ({"out": out(2, 4, 576)}, r"out is \[2, 4, 576\] torch.bfloat16 on cpu, it takes \[2, 4, 512\]"),
    ({"out": out(2, 1, 4, 512)}, r"out is \[2, 1, 4, 512\]"),
    ({"out": out().float()}, r"out is \[2, 4, 512\] torch.float32 on cpu, it takes \[2, 4, 512\] torch.bfloat16"),
    ({"out": out().to("meta")}, r"out is .* on meta"),
    (
        {"out": out(1, 4, 512).expand(2, 4, 512)},
        r"out has strides \(0, 512, 1\), it takes memory for each value; clone an expanded",
    ),
    ({"out": torch.nn.Parameter(out())}, r"out requires grad, it takes a tensor to write into; pass out.detach\(\)"),
    ({"lse": [0]}, r"lse is a list, it takes \[2, 4\] torch.float32 on cpu"),
    ({"lse": torch.zeros(2, 5)}, r"lse is \[2, 5\] torch.float32 on cpu, it takes \[2, 4\]"),
    ({"lse": torch.zeros(2, 4).half()}, r"lse is \[2, 4\] torch.float16 on cpu, it takes \[2, 4\] torch.float32"),
    ({"lse": torch.zeros(1, 1).expand(2, 4)}, r"lse has strides \(0, 0\)"),
    ({"lse": torch.zeros(8).as_strided((2, 4), (3, 1))}, r"lse has strides \(3, 1\), it takes memory for each value"),
    ({"lse": torch.zeros(2, 4).to_sparse()}, r"lse is a torch.sparse_coo tensor, it takes a strided \[2, 4\]"),
    (
        {"out": torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged)},
        r"out is a nested tensor, it takes a strided",
    ),
]


def test_a_result_of_inference_mode_is_written_in_it_alone() -> None:
    with torch.inference_mode():
        made, buffers = plan(return_lse=True), {"out": out(), "lse": torch.zeros(2, 4)}
        want = made.run(query(2), CACHE, **buffers)
    for name, buffer in buffers.items():
        with pytest.raises(InvalidInput, match=rf"{name} was made in inference mode.*pass {name}.clone\(\)"):
            made.run(query(2), CACHE, **{name: buffer})
    again = made.run(query(2), CACHE, out=buffers["out"].clone(), lse=buffers["lse"].clone())
    assert torch.equal(again.out, want.out)


@pytest.mark.parametrize(("given", "says"), RUN)
def test_a_run_says_what_does_not_fit_and_writes_nothing(given: dict[str, Any], says: str) -> None:
    buffers = {"out": out().fill_(7), "lse": torch.full((2, 4), 7.0)}
    arguments = {"query": query(2), "cache": CACHE, **buffers, **given}
    made = plan(return_lse=True)
    with pytest.raises(InvalidInput, match=says):
        made.run(arguments.pop("query"), arguments.pop("cache"), **arguments)
    assert (buffers["out"] == 7).all()
    assert (buffers["lse"] == 7).all()


def test_an_lse_that_was_not_planned_for_is_refused_before_out_is_written() -> None:
    buffer = out().fill_(7)
    with pytest.raises(InvalidInput, match="made without it; plan with return_lse=True"):
        plan().run(query(2), CACHE, out=buffer, lse=torch.zeros(2, 4))
    assert (buffer == 7).all()


def test_what_an_empty_plan_is_given_is_checked_too() -> None:
    nobody = plan(block_table=TABLE[:0], seq_lens=LENS[:0])
    for given, says in (({"out": out(3)}, "out is"), ({"lse": torch.zeros(0, 4)}, "without it")):
        with pytest.raises(InvalidInput, match=says):
            nobody.run(query(0), CACHE, **given)


@pytest.mark.parametrize(
    "strided",
    [
        torch.full((2, 4, 1024), 7.0, dtype=torch.bfloat16)[..., ::2],
        torch.full((4, 2, 512), 7.0, dtype=torch.bfloat16).transpose(0, 1),
        torch.full((512, 2, 4), 7.0, dtype=torch.bfloat16).permute(1, 2, 0),
        torch.full((2, 9, 600), 7.0, dtype=torch.bfloat16)[:, 2:6, 8:520],
    ],
    ids=["every second", "heads first", "latent first", "slice"],
)
def test_out_and_lse_of_any_strides_are_written_in_place(strided: Tensor) -> None:
    made = plan(return_lse=True)
    want = made.run(query(2), CACHE)
    lse = torch.zeros(4, 2).t()
    got = made.run(query(2), CACHE, out=strided, lse=lse)
    assert got.out is strided
    assert got.lse is lse
    assert torch.equal(strided, want.out)
    assert torch.equal(lse, want.lse)


def test_tensors_that_are_not_strided_are_named() -> None:
    nested = torch.nested.nested_tensor([ints(1, 2), ints(3)], layout=torch.jagged)
    for given, says in (
        ({"seq_lens": LENS.to_sparse()}, r"seq_lens is a torch.sparse_coo tensor, it takes a strided one"),
        ({"block_table": nested}, r"block_table is a nested tensor"),
    ):
        with pytest.raises(InvalidInput, match=says):
            plan(**given)  # type: ignore[arg-type]
    for indices in (torch.ones(2, 5, dtype=torch.int32).to_sparse(), LENS.to_sparse()):
        with pytest.raises(InvalidInput, match="indices is"):
            sparse().run(query(2), CACHE, indices=indices)
    slots = torch.nn.Parameter(torch.ones(2, 5, dtype=torch.int32), requires_grad=False)
    with pytest.raises(InvalidInput, match=r"indices is a Parameter \[2, 5\] torch.int32 .* a plain tensor"):
        sparse().run(query(2), CACHE, indices=slots)


def test_more_columns_than_a_launch_has_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"topk is 1099511627776, it takes a whole number .*16776960"):
        sparse(topk=2**40)


def test_autocast_changes_no_bit() -> None:
    weights = AbsorbWeights(WEIGHTS.w_uk.float(), WEIGHTS.w_uv.float())
    wide = Query.from_parts(query(2).latent.float(), query(2).rope.float())

    def all_of_it() -> list[Tensor]:
        absorbed = weights.query(Q_NOPE.float(), Q_PE.float()).packed
        decoded = plan(q_dtype=torch.float32, return_lse=True).run(wide, CACHE)
        return [absorbed, decoded.out, decoded.lse, weights.project(wide.latent)]

    want = all_of_it()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = all_of_it()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bf16_decode_is_its_own_under_any_autocast(dtype: torch.dtype) -> None:
    want = plan(return_lse=True).run(query(2), CACHE)
    with torch.autocast("cpu", dtype=dtype):
        got = plan(return_lse=True).run(query(2), CACHE)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_merged_and_finished_rows_have_no_gradient() -> None:
    parts, lses = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    merged = ops.merge_partials(parts, lses)
    assert merged.lse is not None
    assert not merged.out.requires_grad
    assert not merged.lse.requires_grad
    lse = torch.zeros(3, 4)
    ops.finish_rows(None, lse, lses[0], ints(1, 0, 2), q_len=1, causal=True, base2=True, overwrite_out=False)
    assert not lse.requires_grad


def test_facts_that_are_no_names_or_flags_are_refused() -> None:
    for given, says in (
        ({"q_dtype": torch.bfloat16}, 'q_dtype is torch.bfloat16, it takes a name such as "bfloat16"'),
        ({"cache_format": None}, 'cache_format is None, it takes a name such as "bf16" or "fp8"'),
        ({"causal": "no"}, "causal is 'no', it takes True or False"),
        ({"needs_lse": 1}, "needs_lse is 1, it takes True or False"),
        ({"page_stride": 1}, "page_stride is 1 rows, it takes at least page_size, 64; None is packed pages"),
    ):
        with pytest.raises(InvalidInput, match=says):
            Problem(16, **given)  # type: ignore[arg-type]


def test_weights_project_a_latent_of_their_own_dtype() -> None:
    with pytest.raises(InvalidInput, match=r"latent is torch.float32, these weights take their own torch.bfloat16"):
        WEIGHTS.project(torch.zeros(2, 4, 512))
    with pytest.raises(InvalidInput, match=r"latent has stride 2 in its last dimension.*pass latent.contiguous\(\)"):
        WEIGHTS.project(torch.zeros(2, 4, 1024).bfloat16()[..., ::2])
    with pytest.raises(InvalidInput, match=r"the last stride of out is 0, it takes 1; it is written"):
        WEIGHTS.project(out(), out=torch.zeros(1, 1, 1).bfloat16().expand(2, 4, 128))


def test_a_ragged_query_must_hold_every_token() -> None:
    ragged = plan(cu_q_lens=ints(0, 2, 4), return_lse=True)
    with pytest.raises(InvalidInput, match="the query has 3 tokens, cu_q_lens ends at 4; it takes that many or more"):
        ragged.run(query(3), CACHE)
    with pytest.raises(InvalidInput, match=r"a ragged plan takes \[T, H, 512\]"):
        ragged.run(query(2, 2), CACHE)
    assert (ragged.run(query(6), CACHE).lse[4:] == float("-inf")).all()
    ragged.update(cu_q_lens=ints(0, 1, 2))
    assert ragged.run(query(3), CACHE).out.shape == (3, 4, 512)


# --- update ---------------------------------------------------------------------------------------------------------------

UPDATE: list[tuple[dict[str, Any], str]] = [
    (
        {"block_table": torch.zeros(3, 4, dtype=torch.int32), "seq_lens": ints(1, 1, 1)},
        r"the step has 3 requests, this plan holds 2",
    ),
    (
        {"block_table": torch.zeros(2, 400, dtype=torch.int32), "seq_lens": ints(300, 1)},
        r"seq_lens holds 300, it takes at most 256",
    ),
    ({"block_table": TABLE[:, :1], "seq_lens": ints(65, 1)}, r"has room for 64; pass a wider table"),
    ({"block_table": TABLE[:, :1] + 1}, r"seq_lens, as it was, holds 65, but block_table \[2, 1\]"),
    ({"block_table": TABLE, "seq_lens": ints(1)}, r"block_table has 2 rows, it takes 1, one a request"),
    ({"seq_lens": [1, 2]}, r"seq_lens is a list"),
    ({"seq_lens": torch.tensor(1)}, r"seq_lens has shape \[\]"),
    ({"seq_lens": ints(-1, 1)}, r"seq_lens holds -1"),
    ({"seq_lens": LENS, "seq_lens_cpu": ints(1, 2, 3)}, r"seq_lens_cpu has 3 rows, it takes 2"),
    ({"cu_q_lens": ints(0, 1, 2)}, r"cu_q_lens is given, but this plan's queries are uniform; plan with cu_q_lens"),
    *[({"max_seq_len": x}, r"max_seq_len is .*, it takes a whole number of at least 0") for x in (-1, "4", True, 4.0)],
    ({"max_seq_len": 64}, r"max_seq_len is 64, but seq_lens, as it was, holds 65; it takes the longest request"),
    ({"max_seq_len": 4, "seq_lens": ints(5, 3)}, r"max_seq_len is 4, but seq_lens holds 5; it takes the longest"),
    ({"max_seq_len": 4, "seq_lens_cpu": ints(5, 3)}, r"max_seq_len is 4, but seq_lens_cpu holds 5"),
    ({"max_seq_len": 4, "seq_lens": ints(4, 3), "seq_lens_cpu": ints(3, 3)}, r"seq_lens_cpu holds 3 for request 0"),
    (
        {"block_table": table_with(2**32 + 1, torch.int64), "seq_lens": ints(1, 65)},
        r"holds page 4294967297 at \[1, 1\]",
    ),
    ({"block_table": table_with(8, at=(0, 1))}, r"block_table holds page 8 at \[0, 1\], within the 65 keys"),
    ({"max_seq_len": 257}, r"max_seq_len is 257, this plan's is 256; plan with a larger one"),
]


@pytest.mark.parametrize(("given", "says"), UPDATE)
def test_an_update_says_what_does_not_fit_and_changes_nothing(given: dict[str, Any], says: str) -> None:
    made = plan(seq_lens=ints(65, 2))
    table, lens = made.block_table.clone(), made.seq_lens.clone()
    before = made.run(query(2), CACHE).out
    with pytest.raises(InvalidInput, match=says):
        made.update(**given)
    assert torch.equal(made.block_table, table)
    assert torch.equal(made.seq_lens, lens)
    assert torch.equal(made.run(query(2), CACHE).out, before)


def test_a_wider_table_is_taken_as_far_as_the_plan_reaches() -> None:
    wide = torch.full((2, 400), 2**30, dtype=torch.int64)
    wide[:, :4] = 3
    made = plan()
    made.update(wide, ints(256, 1))
    assert made.block_table.tolist() == [[3, 3, 3, 3]] * 2


def test_pages_past_a_requests_length_may_be_anything() -> None:
    table = torch.full((2, 4), 2**40, dtype=torch.int64)
    table[0, 0], table[1, :2] = 3, 7
    made = plan(block_table=table, seq_lens=ints(64, 65), max_batch=3)
    made.update(table, ints(1, 128), seq_lens_cpu=torch.tensor([1, 128]), max_seq_len=128)
    made.update(table[1:], ints(0))
    assert made.seq_lens.tolist() == [0, 0, 0]


def test_lengths_that_grow_into_pages_that_nobody_gave_are_refused() -> None:
    made = plan(block_table=table_with(-1))
    made.update(seq_lens=ints(3, 63))
    with pytest.raises(InvalidInput, match=r"block_table, as it was, holds page -1 at \[1, 1\], within the 65 keys"):
        made.update(seq_lens=ints(3, 65))
    assert made.seq_lens.tolist() == [3, 63]


def test_a_sparse_plan_has_no_table_and_no_lengths() -> None:
    made = sparse()
    assert made.block_table is None
    assert made.seq_lens is None
    for step in (
        {"block_table": TABLE},
        {"seq_lens": LENS},
        {"seq_lens": [1]},
        {"seq_lens_cpu": LENS},
        {"cu_q_lens": ints(0)},
    ):
        with pytest.raises(InvalidInput, match="this plan is sparse: it has no block table and no lengths"):
            made.update(**step)


# --- weights, queries, caches, decode -------------------------------------------------------------------------------------

WEIGHTS = AbsorbWeights(torch.ones(4, 128, 512, dtype=torch.bfloat16), torch.ones(4, 512, 128, dtype=torch.bfloat16))
Q_NOPE, Q_PE = torch.ones(2, 4, 128, dtype=torch.bfloat16), torch.ones(2, 4, 64, dtype=torch.bfloat16)


def decode(q_nope: Any = Q_NOPE, q_pe: Any = Q_PE, table: Any = TABLE, lens: Any = LENS, **given: Any) -> Any:
    return BACKEND.decode(q_nope, q_pe, CACHE, table, lens, **{"softmax_scale": 0.1, "weights": WEIGHTS, **given})


UNIFIED = UnifiedCache.allocate(2, 2, 4, "fp8", "cpu")
WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}


def from_kv_b_proj(dtype: Any) -> AbsorbWeights:
    return AbsorbWeights.from_kv_b_proj(torch.zeros(256, 512), Geometry(1), dtype=dtype)


def select(page_size: Any = 64, seq_lens: Any = None) -> Tensor:
    found = torch.full((1, 2), -7, dtype=torch.int32)
    ops.select_slots(found, torch.tensor([[0, 65]]), ints(3, 1)[None], page_size, seq_lens)
    return found


def select_rows(page_size: Any = 64, seq_lens: Any = None) -> None:
    found, counts = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ops.select_rows(
        found, counts, torch.tensor([[0, 65]]), ints(3, 1)[None], page_size, seq_lens, num_slots=512, rows_per_page=64
    )


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: decode([1]), r"q_nope is a list, it takes a tensor \[B, H, X\]"),
    (lambda: decode(q_pe=[1]), r"q_pe is a list, it takes a tensor"),
    (lambda: decode(Q_NOPE[0], Q_PE[0]), r"q_nope has shape \[4, 128\], it takes \[B, H, X\]"),
    (lambda: decode(Q_NOPE[None, None], Q_PE[None, None]), r"q_nope has shape \[1, 1, 2, 4, 128\]"),
    (lambda: decode(weights=3), r"weights is a int, it takes AbsorbWeights"),
    (lambda: decode(weights=None), r"the query is 128 \+ 64 wide, the cache 512 \+ 64; fold W_UK in"),
    (lambda: decode(Q_NOPE.float(), Q_PE.float()), r"float32"),
    (lambda: decode(q_pe=Q_PE.float()), r"float32"),
    (lambda: decode(table=TABLE[:1], lens=LENS[:1]), r"out is \[1, 4, 512\] .*, the query is \[2\] before its heads"),
    (
        lambda: decode(out=torch.zeros(2, 4, 512, dtype=torch.bfloat16)),
        r"out is \[2, 4, 512\] of torch.bfloat16, it takes \[2, 4, 128\]",
    ),
    (lambda: decode(table=None, lens=None, indices=[1]), r"indices is a list, it takes an int32 tensor"),
    (
        lambda: decode(table=None, lens=None, indices=torch.zeros(7, 5, dtype=torch.int32)),
        r"indices has shape \[7, 5\], it takes \[2, 'topk'\] for q_nope \[2, 4, 128\]",
    ),
    (
        lambda: decode(table=None, lens=None, indices=torch.zeros(2, 0, dtype=torch.int32)),
        r"topk is 0, it takes a whole number of at least 1",
    ),
    (
        lambda: decode(indices=torch.zeros(2, 5, dtype=torch.int32)),
        r"indices is given, so the decode is sparse: block_table",
    ),
    (
        lambda: decode(table=None, lens=None, indices=torch.zeros(5, 2, dtype=torch.int32).T),
        r"indices has stride 2 in its last dimension, it takes 1; pass indices.contiguous\(\)",
    ),
    (lambda: WEIGHTS.copy_(None), r"other is a NoneType, it takes AbsorbWeights"),  # type: ignore[arg-type]
    (lambda: WEIGHTS.query([1], Q_PE), r"q_nope is a list"),
    (lambda: WEIGHTS.query(torch.tensor(1.0), Q_PE), r"q_nope is \[\] of torch.float32"),
    (lambda: WEIGHTS.query(Q_NOPE, Q_PE, out=Q_NOPE), r"out is .*, it takes a Query"),
    (lambda: WEIGHTS.query(Q_NOPE[:, :3], Q_PE[:, :3]), r"these weights take q_nope \[B, \(q,\) 4, 128\]"),
    (lambda: WEIGHTS.project([1]), r"latent is a list"),
    (lambda: WEIGHTS.project(out(), out=[1]), r"out is a list"),
    (lambda: Query.from_packed(out(2, 4, 576), -5), r"kv_lora_rank is -5, it takes a whole number of at least 1"),
    (lambda: Query.from_packed(out(2, 4, 576), True), r"kv_lora_rank is True"),
    (lambda: Query.from_packed(out(2, 4, 1152)[..., ::2]), r"latent has stride 2 in its last dimension, it takes 1"),
    (lambda: Query.from_packed(out(4, 576)), r"packed is \[4, 576\]"),
    (lambda: CACHE.write([1], Q_PE[:, 0], torch.tensor([0])), r"kv_c, k_pe and slot_mapping are a list and"),
    (lambda: CACHE.write(torch.tensor(1.0), Q_PE[:, 0], torch.tensor([0])), r"kv_c is \[\]"),
    (lambda: CACHE.write(out(2, 512), Q_PE[:, 0], [0, 1]), r"they take tensors"),
    (
        lambda: CACHE.write(out(2, 512), Q_PE[:, 0], ints(0, 1)),
        r"slot_mapping is \[2\] torch.int32, it takes \[T\] int64",
    ),
    (
        lambda: CACHE.write(out(2, 512), Q_PE[:, 0], torch.arange(3)),
        r"kv_c is \[2, 512\], it takes \[at least 3, width\]",
    ),
    (lambda: get_backend("volta"), r"capability is 'volta', it takes \(9, 0\), \"sm90\", \"cpu\" or a Device"),
    (lambda: get_backend((True, False)), r"capability is \(True, False\)"),
    (lambda: get_backend([9, 0]), r"capability is \[9, 0\]"),  # type: ignore[arg-type]
    (lambda: get_backend(device="meta"), r"device is meta, it takes cpu or cuda"),
    (lambda: get_backend(device=[]), r"device is \[\], it takes"),  # type: ignore[arg-type]
    (lambda: get_backend(device="cuda:99"), r"device is cuda:99, but torch .* sees \d+ CUDA devices here"),
    (lambda: get_backend(adapter="flashmlaa"), r"adapter is 'flashmlaa', it takes one of .*eager"),
    (lambda: get_backend(adapters=[1]), r"adapters holds 1, it takes objects of mla_backends.adapter.Adapter"),
    (lambda: BACKEND.explain("dense"), r"problem is a str, it takes a Problem"),  # type: ignore[arg-type]
    (lambda: BACKEND.page_sizes("dense"), r"problem is a str, it takes a Problem"),  # type: ignore[arg-type]
    (
        lambda: BACKEND.workspace_bytes("dense", max_batch=1, max_seq_len=1),  # type: ignore[arg-type]
        r"problem is a str, it takes a Problem",
    ),
    (lambda: IndexerCache.allocate(1, 4, "cpu").write([1], ints(0)), r"k and slot_mapping are a list and \[1\]"),  # type: ignore[arg-type]
    (lambda: PagedCache(CACHE.data, ["bf16"]), r"format is \['bf16'\], it takes one of bf16"),  # type: ignore[arg-type]
    (lambda: ops.write_cache(None, out(2, 512), Q_PE[:, 0], torch.arange(2), "bf16"), r"data is a NoneType"),  # type: ignore[arg-type]
    (lambda: ops.write_indexer_cache(None, out(2, 128), torch.arange(2)), r"data is a NoneType"),  # type: ignore[arg-type]
    *[
        (partial(call, x), r"device is .*, (it takes|but torch .* sees)")
        for call in (
            lambda x: PagedCache.allocate(1, 4, "bf16", x),
            lambda x: UnifiedCache.allocate(1, 2, 4, "bf16", x),
            lambda x: IndexerCache.allocate(1, 4, x),
        )
        for x in ("x", 99, [1], None, "mps", "cuda:99")
    ],
    (lambda: UNIFIED.layer(1, kv_scale=[1]), r"kv_scale is \[1\], it takes a float, a tensor of one float32"),  # type: ignore[arg-type]
    (lambda: UNIFIED.layer([1]), r"layer is \[1\], it takes 0 to 1"),  # type: ignore[arg-type]
    (lambda: UNIFIED.layer([1], kv_scale=torch.ones(1)), r"layer is \[1\]"),  # type: ignore[arg-type]
    *[
        (partial(PagedCache, UNIFIED.data[:, 0], "fp8", kv_scale=x), r"kv_scale is .*, it takes")
        for x in (1e300, 10**400, np.bool_(True))
    ],
    (lambda: from_kv_b_proj("x"), r"dtype is 'x', it takes torch.bfloat16, torch.float16 or torch.float32"),
    (lambda: from_kv_b_proj(torch.float64), r"dtype is torch.float64, it takes torch.bfloat16"),
    (lambda: BACKEND.warmup(None), r"problems is a NoneType, it takes Problems"),  # type: ignore[arg-type]
    (lambda: BACKEND.warmup([None]), r"problem is a NoneType, it takes a Problem"),  # type: ignore[list-item]
    (lambda: get_backend(adapters=3), r"adapters is 3, it takes a list of mla_backends.adapter.Adapter"),  # type: ignore[arg-type]
    (
        lambda: decode(Q_NOPE[:, None], Q_PE[:, None], cu_q_lens=ints(0, 1, 2)),
        r"q_nope has shape \[2, 1, 4, 128\], with cu_q_lens it takes \[T, H, X\]",
    ),
    *[
        (partial(BACKEND.workspace_bytes, Problem(16), **{"max_batch": 1, "max_seq_len": 1, name: x}), rf"{name} is")
        for name, x in (("max_batch", None), ("max_seq_len", None), ("max_seq_len", 2**31))
    ],
    *[(partial(select, page_size=x), r"page_size is .*, it takes a whole number") for x in (None, 0, 64.0, True)],
    *[(partial(select_rows, page_size=x), r"page_size is .*, it takes a whole number") for x in (None, 0)],
    *[(partial(call, seq_lens=[1]), r"seq_lens is a list, it takes a tensor") for call in (select, select_rows)],
    (
        lambda: select(seq_lens=torch.tensor([1])),
        r"seq_lens is \[1\] torch.int64 .*, it takes \[1\] int32, contiguous; pass seq_lens.int\(\)",
    ),
    *[
        (
            partial(
                softmax_scale, {**WIDTHS, "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0, key: x}}
            ),
            rf"config's rope_scaling\['{key}'\] is .*, it takes a finite number",
        )
        for key in ("factor", "mscale_all_dim")
        for x in ("40", [40], True, float("nan"))
    ],
    (lambda: softmax_scale({**WIDTHS, "qk_nope_head_dim": "wide"}), r"config's qk_nope_head_dim is 'wide'"),
    (lambda: Problem(None), r"num_heads is None, it takes a whole number of at least 1"),  # type: ignore[arg-type]
    *[
        (partial(Problem, 4, **{name: None}), rf"{name} is None, it takes a whole number")
        for name in ("q_len", "kv_lora_rank", "qk_rope_head_dim", "page_size", "alignment")
    ],
    (lambda: Problem(True), r"num_heads is True, it takes a whole number of at least 1"),
    (lambda: Problem(16, page_size=0), r"page_size is 0"),
]


@pytest.mark.parametrize(("call", "says"), CALLS)
def test_a_call_says_what_does_not_fit(call: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        call()


def test_no_verdict_on_a_stranger() -> None:
    with pytest.raises(KeyError, match="no verdict on 'nobody', there are those on"):
        BACKEND.explain(Problem(16))["nobody"]


@pytest.mark.parametrize("scale", [1e300, 10**400, 1e-300, np.bool_(True)])
def test_a_write_is_refused_a_scale_that_float32_does_not_hold(scale: Any) -> None:
    rows, slots = torch.zeros(2, 3, 576, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InvalidInput, match="kv_scale is"):
        ops.write_cache(rows, torch.zeros(2, 512), torch.zeros(2, 64), slots, "fp8", scale)


# --- odd, and right -------------------------------------------------------------------------------------------------------


def test_numpys_numbers_are_numbers_and_kept_as_plain_ones() -> None:
    problem = Problem(np.int64(4), page_size=np.int32(64), topk=np.uint8(5))  # type: ignore[arg-type]
    assert [type(x) for x in (problem.num_heads, problem.page_size, problem.topk)] == [int] * 3
    assert problem == Problem(4, page_size=64, topk=5)
    geometry = Geometry(np.int64(4))  # type: ignore[arg-type]
    assert type(geometry.num_heads) is int
    assert (
        Geometry.from_config(
            {**WIDTHS, "num_attention_heads": 8, "kv_lora_rank": 512, "v_head_dim": 128}, tp_size=np.int64(2)
        )
        == geometry
    )  # type: ignore[arg-type]
    given = {"num_heads": np.int64(4), "q_len": np.int16(1), "max_batch": np.int64(2), "max_seq_len": np.int64(256)}
    made, want = plan(**given, softmax_scale=np.float32(0.1)), plan(softmax_scale=float(np.float32(0.1)))
    assert made.problem == want.problem
    assert type(made.problem.num_heads) is int
    assert made.at(np.int64(1)) is made.at(1)
    made.update(max_seq_len=np.int64(64))
    assert torch.equal(made.run(query(2), CACHE).out, want.run(query(2), CACHE).out)
    assert select(np.int64(64)).tolist() == select(64).tolist() == [[192, 65]]
    cache = PagedCache(UNIFIED.data[:, 0], "fp8", kv_scale=np.float32(0.5), kv_lora_rank=np.int64(512))  # type: ignore[arg-type]
    assert type(cache.kv_scale) is float
    assert cache.kv_scale == 0.5
    assert type(cache.kv_lora_rank) is int
    assert UNIFIED.layer(np.int64(1)) is UNIFIED.layer(1)  # type: ignore[arg-type]
    written = torch.zeros(2, 4, 576, dtype=torch.float8_e4m3fn)
    ops.write_cache(written, torch.ones(1, 512), torch.ones(1, 64), torch.tensor([0]), "fp8", np.float32(0.5))  # type: ignore[arg-type]
    assert (written[0, 0].float() == 2).all()


def test_slots_outside_the_cache_are_skipped() -> None:
    cache = PagedCache.allocate(2, 4, "bf16", "cpu")
    cache.write(out(6, 512).fill_(1), out(6, 64).fill_(1), torch.tensor([-1, 8, 3, 2**40, -(2**40), 7]))
    assert cache.data[..., 0].flatten().nonzero().flatten().tolist() == [3, 7]


def test_gradients_stop_at_the_door() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 4, 576, generator=generator).bfloat16().requires_grad_()
    cache = PagedCache(torch.nn.Parameter(torch.zeros(8, 64, 576, dtype=torch.bfloat16)), "bf16")
    cache.write(out(2, 512).fill_(1).requires_grad_(), out(2, 64), torch.tensor([0, 5]))
    assert cache.data[0, 5, 0] == 1
    sink = torch.nn.Parameter(torch.zeros(4))
    weights = AbsorbWeights(torch.nn.Parameter(WEIGHTS.w_uk), torch.nn.Parameter(WEIGHTS.w_uv))
    made = plan(cache=cache, return_lse=True, attn_sink=sink)
    results = [
        made.run(Query.from_packed(packed), cache),
        made.run(Query.from_parts(packed[..., :512], packed[..., 512:]), cache),
        made.run(weights.query(Q_NOPE.clone().requires_grad_(), Q_PE), cache, out=out()),
    ]
    assert not any(r.out.requires_grad or r.lse.requires_grad for r in results)
    assert not weights.project(results[0].out).requires_grad


def test_an_expanded_query_is_read_as_it_is() -> None:
    one = query(1)
    wide = Query.from_parts(one.latent.expand(2, 4, 512), one.rope.expand(2, 4, 64))
    dense = Query.from_parts(*(part.contiguous() for part in (wide.latent, wide.rope)))
    assert torch.equal(plan().run(wide, CACHE).out, plan().run(dense, CACHE).out)


def test_a_table_without_columns_holds_requests_without_keys() -> None:
    got = plan(block_table=TABLE[:, :0], seq_lens=LENS * 0, return_lse=True).run(query(2), CACHE)
    assert not got.out.any()
    assert (got.lse == float("-inf")).all()


def test_a_huge_query_length_is_a_plan_like_any_other() -> None:
    made = plan(q_len=3000, block_table=torch.zeros(2, 64, dtype=torch.int32), num_heads=1, return_lse=True)
    got = made.run(query(2, 3000, heads=1), CACHE)
    assert (got.lse[0, : 3000 - 3] == float("-inf")).all()
    assert got.lse[0, 3000 - 3 :].isfinite().all()


def test_a_single_problem_is_warmed_up_as_a_list_of_one() -> None:
    assert str(BACKEND.warmup(Problem(16))).startswith("num_heads=16: eager, error ")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("given", [None, [[0.0]], 3])
def test_an_op_is_refused_what_is_no_tensor(given: object, device: str) -> None:
    zeros = partial(torch.zeros, device=device)
    rows, slots = zeros(2, 3, 576), zeros(2, dtype=torch.int64)
    calls: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (ops.batched_matmul, (zeros(1, 2, 3), given, zeros(1, 2, 3))),
        (ops.concat_nope_rope, (rows, given, rows[..., :64])),
        (ops.write_cache, (rows, given, rows[0, :2, :64], slots, "fp32")),
        (ops.write_indexer_cache, (zeros(2, 4, 132, dtype=torch.uint8), given, slots)),
        (ops.select_slots, (zeros(1, 2, dtype=torch.int32), given, zeros(1, 1, dtype=torch.int32), 64)),
        (ops.merge_partials, (given, zeros(1, 2, 3))),
    ]
    for op, arguments in calls:
        with pytest.raises(InvalidInput, match=rf"is a {type(given).__name__}, it takes a tensor"):
            op(*arguments)


@pytest.mark.parametrize("scale", [True, "x", 0.0, float("nan"), float("inf"), -1.0])
def test_a_write_is_refused_a_scale_that_is_no_positive_number(scale: object) -> None:
    rows, slots = torch.zeros(2, 3, 576, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InvalidInput, match="kv_scale is"):
        ops.write_cache(rows, torch.zeros(2, 512), torch.zeros(2, 64), slots, "fp8", scale)  # type: ignore[arg-type]
