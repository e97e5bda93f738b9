"""Whatever a kernel's conventions are, results come in ours: the eager decode behind each convention, against the reference.

The kernels here keep what they were planned with, so that metadata that a plan forgets to renew shows in the numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_backends import InvalidInput, NoAdapterRuns, PagedCache, Query, canary, get_backend, ops
from mla_backends.adapter import Adapter, HostLengths, Kernel, Step
from mla_backends.catalogue import installed
from mla_backends.conditions import Condition
from mla_backends.device import Device
from mla_backends.problem import Problem
from mla_backends.support import Conventions, Limit, OneOf, Range
from mla_backends.testing import conditions
from mla_backends.trials import Trial

EAGER = next(entry for entry in installed() if entry.name == "eager")
assert isinstance(EAGER, Adapter)
INF = float("inf")


class ContraryKernel(Kernel):
    def __init__(self, step: Step, conventions: Conventions) -> None:
        self.step, self.conventions = step, conventions
        self.planned = step

    def update(self, lengths: HostLengths | None) -> None:
        step = self.step
        if step.seq_lens is None or step.block_table is None:
            return
        assert (lengths is not None) == (self.conventions.metadata == "host")
        if self.conventions.empty_rows == "undefined":
            assert step.seq_lens.min() >= 1
            assert step.block_table.min() >= 0
            assert step.block_table.max() < step.num_pages
        assert step.block_table.shape[1] % self.conventions.table_columns == 0
        lens = step.seq_lens if lengths is None else lengths.seq_lens
        self.planned = replace(step, seq_lens=lens.clone(), block_table=step.block_table.clone())
        if lengths is not None and step.problem.ragged:
            self.planned = replace(self.planned, cu_q_lens=lengths.cu_q_lens.clone())

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        conventions, step = self.conventions, self.step
        assert query.num_heads == step.heads
        assert conventions.heads is None or step.heads in conventions.heads
        dtype = getattr(torch, step.problem.q_dtype)
        if conventions.query == "packed":
            assert query.is_packed
        if conventions.query_dtype is not None:
            assert query.dtype == torch.float8_e4m3fn
            assert query.scale is not None
            query = Query.from_packed(query.packed.float() * query.scale)
        if conventions.slots == "compact_slots":
            indices = self._as_slots(indices, cache)
        if indices is not None:
            assert ((indices >= -1) & (indices < cache.num_slots)).all()
            assert indices.shape[-1] % conventions.topk_multiple == 0
        assert isinstance(EAGER, Adapter)
        result, lse = EAGER.plan(self.planned, None).run(query, cache, indices, None)
        result = result.to(dtype)
        assert lse is not None
        empty = lse == -INF
        if conventions.lse_base == "2":
            lse = lse / math.log(2.0)
        if conventions.empty_rows == "lse_inf":
            lse = lse.masked_fill(empty, INF)
        if conventions.empty_rows in ("unwritten", "undefined"):
            lse, result = lse.masked_fill(empty, torch.nan), result.masked_fill(empty.unsqueeze(-1), torch.nan)
        if step.problem.ragged:  # no kernel writes the rows past the last request
            past = int(self.planned.cu_q_lens[-1])
            result[past:], lse[past:] = torch.nan, torch.nan
        if out is not None:
            assert conventions.writes_out
            result = out.copy_(result)
        return result, self._axes(lse)

    def _as_slots(self, rows: Tensor | None, cache: PagedCache) -> Tensor | None:
        counts, step = self.step.slot_counts, self.step
        if rows is None or counts is None:
            return rows
        assert step.slots is not None
        assert rows.data_ptr() == step.slots.data_ptr()
        page, offset = rows // cache.rows_per_page, rows % cache.rows_per_page
        is_row = torch.arange(rows.shape[-1]) < counts.view(*rows.shape[:-1], 1)
        assert (rows[~is_row] == 0).all()
        return torch.where(is_row, page * cache.page_size + offset, -1)

    def _axes(self, lse: Tensor) -> Tensor:
        if self.conventions.lse_axes == "BHQ":
            return lse.transpose(1, 2).contiguous() if lse.ndim == 3 else lse.t().contiguous()
        by_token = lse.flatten(0, 1) if lse.ndim == 3 else lse
        if self.conventions.lse_axes == "HT":
            return by_token.t().contiguous()
        return by_token if self.conventions.lse_axes == "TH" else lse


class Contrary(Adapter):
    support = (Limit(Problem, "num_heads", Range(1, 128, tested=(16,)), refuses=(129,), source="a test"),)

    def __init__(self, name: str, conventions: Conventions, *limits: Limit) -> None:
        self.name = name  # type: ignore[misc]
        self.conventions = conventions  # type: ignore[misc]
        self.support = (*self.support, *limits)  # type: ignore[misc]

    def plan(self, step: Step, library: Any) -> Kernel:
        return ContraryKernel(step, self.conventions)


UNIFORM = Limit(Problem, "ragged", OneOf(False), refuses=(True,), source="a test")
FP8 = Limit(Problem, "cache_format", OneOf("fp8"), refuses=("bf16",), source="a test")
DENSE = Limit(Problem, "topk", OneOf(None), refuses=(64,), source="a test")
KEPT = tuple(
    Contrary(name, conventions, *limits)
    for name, conventions, limits in (
        ("packed", Conventions(query="packed", heads=(16, 64, 128), metadata="op"), ()),
        ("base 2 by token", Conventions(query="split", lse_base="2", lse_axes="TH", metadata="host"), ()),
        ("heads first", Conventions(query="packed", lse_axes="BHQ", empty_rows="lse_inf", heads=(64, 128)), (UNIFORM,)),
        (
            "tokens last",
            Conventions(query="split", lse_axes="HT", empty_rows="unwritten", lse_base="2", metadata="op"),
            (DENSE,),
        ),
        ("writes out", Conventions(query="split", writes_out=True, metadata="host", empty_rows="exact"), ()),
        (
            "undefined",
            Conventions(query="packed", empty_rows="undefined", writes_out=True, metadata="op", table_columns=4),
            (DENSE,),
        ),
        (
            "e4m3",
            Conventions(
                query="packed", query_dtype="float8_e4m3fn", lse_axes="BHQ", empty_rows="undefined", metadata="op"
            ),
            (UNIFORM, DENSE, FP8),
        ),
        (
            "wide slots",
            Conventions(query="packed", heads=(64,), topk_multiple=64, empty_rows="lse_inf", lse_axes="BHQ"),
            (UNIFORM,),
        ),
        ("rows of slots", Conventions(query="split", slots="compact_slots"), (UNIFORM,)),
    )
)

BASE = Condition()
CONDITIONS = (
    BASE,
    replace(BASE, num_heads=5, q_len=3, seq_lens=(3, 0, 64, 66, 1)),
    replace(BASE, num_heads=12, query="transposed", q_len=2),
    replace(BASE, num_heads=20, query="padded"),
    replace(BASE, q_lens=(3, 0, 2, 1), seq_lens=(2, 64, 65, 0), num_heads=7),
    replace(BASE, max_batch=12, query="padded", num_heads=12),
    replace(BASE, return_lse=False, num_heads=3),
    replace(BASE, attn_sink=True, num_heads=12),
    replace(BASE, topk=65, num_heads=12, q_len=2),
    replace(BASE, cache_format="fp8", kv_scale=0.5, q_scale=0.01, num_heads=12),
    replace(BASE, cache_format="fp8", num_heads=12, q_len=3, query="padded"),
    replace(BASE, cache_format="fp8", q_amax=3000.0, num_heads=12, query="parts"),
    replace(BASE, causal=False, q_len=2),
)


def is_taken(adapter: Contrary, c: Condition) -> bool:
    asked = Problem(c.num_heads, cache_format=c.cache_format, topk=c.topk, ragged=c.q_lens is not None)
    return not adapter.refusals(asked, Device())


TAKEN = [(a, c) for a in KEPT for c in CONDITIONS if is_taken(a, c)]


def test_a_cache_with_gaps_is_refused_where_strides_are_not_honoured() -> None:
    adapter = Contrary("packed pages alone", Conventions(query="packed", strides=False))
    backend = get_backend("cpu", adapters=[adapter])
    packed, slot = Trial(replace(BASE, layers=1, layer=0), "cpu"), Trial(BASE, "cpu")
    assert packed.run(backend).faults(packed.condition) == ()
    says = "other memory between its pages or rows, it takes packed pages"
    with pytest.raises(NoAdapterRuns, match=says):
        slot.plan(backend)
    with pytest.raises(InvalidInput, match=says):
        packed.plan(backend, slot.contiguous).run(slot.query(slot.plan(get_backend("cpu"))), slot.cache)
    # most of what the conformance suite runs is within its reach, the rest is refused there
    assert [c.layers for c in conditions(adapter)].count(1) > 40


@pytest.mark.parametrize(("adapter", "condition"), TAKEN, ids=[f"{a.name}-{c}" for a, c in TAKEN])
def test_every_convention_comes_out_as_ours(adapter: Contrary, condition: Condition) -> None:
    assert Trial(condition, "cpu").run(get_backend("cpu", adapters=[adapter])).faults(condition) == ()


@pytest.mark.parametrize("adapter", KEPT, ids=lambda a: a.name)
def test_metadata_and_clamped_buffers_are_renewed_with_each_step(adapter: Contrary) -> None:
    backend = get_backend("cpu", adapters=[adapter])
    cache = PagedCache.allocate(8, 64, "bf16" if adapter.conventions.query_dtype is None else "fp8", "cpu")
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(512, n, generator=generator).bfloat16() for n in (512, 64))
    cache.write(*rows, torch.arange(512))
    query = Query.from_packed((torch.randn(3, 12, 576, generator=generator) * 0.3).bfloat16())

    def plan(table: Tensor, lens: Tensor) -> Any:
        return backend.plan(
            cache,
            table,
            lens,
            num_heads=12,
            softmax_scale=0.1,
            max_batch=3,
            max_seq_len=256,
            return_lse=True,
            q_scale=0.01,
        )

    kept = plan(torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, dtype=torch.int32))
    out, lse = torch.full((3, 12, 512), torch.nan, dtype=torch.bfloat16), torch.full((3, 12), torch.nan)
    for lens in ([200, 0, 64], [0, 256], [1, 130, 7], []):
        table = torch.randint(0, 8, (len(lens), 4), generator=generator).int()
        table[torch.tensor(lens) == 0] = -1
        lengths = torch.tensor(lens, dtype=torch.int32)
        kept.update(table, lengths)
        fresh = plan(table, lengths).run(query, cache)
        for got in (kept.run(query, cache), kept.run(query, cache, out=out, lse=lse)):
            assert torch.equal(got.out, fresh.out)
            assert torch.equal(got.lse, fresh.lse)
        empty = torch.tensor([*lens, 0, 0, 0][:3]) == 0
        assert not fresh.out[empty].any()
        assert torch.equal(fresh.lse == -INF, empty[:, None].expand(3, 12))
        if kept.update_mode == "device":
            kept.block_table[:], kept.seq_lens[:] = 3, torch.tensor([5, 0, 70])
            kept.refresh()
            want = plan(torch.full((3, 4), 3, dtype=torch.int32), torch.tensor([5, 0, 70])).run(query, cache)
            assert torch.equal(kept.run(query, cache).out, want.out)


def test_a_kernel_writes_straight_into_an_out_that_it_can_write() -> None:
    adapter = next(a for a in KEPT if a.name == "writes out")
    backend = get_backend("cpu", adapters=[adapter])
    cache = PagedCache.allocate(8, 64, "bf16", "cpu")
    lens, table = torch.tensor([3, 64], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    seen: list[Tensor | None] = []
    plan = backend.plan(cache, table, lens, num_heads=4, softmax_scale=0.1)
    inner = plan._kernel
    assert inner is not None
    run = inner.run

    def watched(query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None) -> Any:
        seen.append(out)
        return run(query, cache, indices, out)

    inner.run = watched  # type: ignore[method-assign]
    query = Query.from_packed(torch.randn(2, 4, 576).bfloat16())
    dense, strided = torch.empty(2, 4, 512).bfloat16(), torch.empty(2, 4, 600).bfloat16()[..., :512]
    off_by_two_bytes = torch.empty(1 + 2 * 4 * 512).bfloat16()[1:].view(2, 4, 512)
    results = [plan.run(query, cache, out=out).out for out in (dense, strided, off_by_two_bytes, None)]
    assert seen[0] is not None
    assert seen[0].data_ptr() == dense.data_ptr()
    assert seen[1:] == [None, None, None]
    assert all(torch.equal(result, results[-1]) for result in results)


def made_plan(adapter: Contrary, lens: list[int], **given: Any) -> Any:
    """A plan for three requests of 12 heads with the lengths known on the host, a query, and its cache."""
    cache = PagedCache.allocate(8, 64, "bf16" if adapter.conventions.query_dtype is None else "fp8", "cpu")
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(512, n, generator=generator).bfloat16() for n in (512, 64))
    cache.write(*rows, torch.arange(512))
    query = Query.from_packed((torch.randn(3, 12, 576, generator=generator) * 0.3).bfloat16())
    table, lengths = torch.randint(0, 8, (len(lens), 4), generator=generator).int(), torch.tensor(lens).int()
    options = {"num_heads": 12, "softmax_scale": 0.1, "max_batch": 3, "return_lse": True, "q_scale": 0.01, **given}
    plan = get_backend("cpu", adapters=[adapter]).plan(cache, table, lengths, seq_lens_cpu=lengths, **options)
    return plan, query, cache


@pytest.mark.parametrize("adapter", KEPT, ids=lambda a: a.name)
@pytest.mark.parametrize("lens", [[3, 0, 130], [64]])
def test_rows_that_nobody_reads_may_be_left_as_the_kernel_gives_them(adapter: Contrary, lens: list[int]) -> None:
    exact, query, cache = made_plan(adapter, lens)
    loose, _, _ = made_plan(adapter, lens, empty_rows="any")
    live = torch.tensor([*lens, 0, 0][:3]) > 0
    want, got = exact.run(query, cache), loose.run(query, cache)
    assert torch.equal(got.out[live], want.out[live])
    assert torch.equal(got.lse[live], want.lse[live])
    is_base2 = adapter.conventions.lse_base == "2"
    assert loose.describe()["adds_kernels"] == (("finish_rows",) if is_base2 else ())
    assert loose.describe()["empty_rows"] == "any"
    if adapter.conventions.empty_rows == "unwritten":
        assert got.out[~live].isnan().all()


@pytest.mark.parametrize("adapter", KEPT, ids=lambda a: a.name)
def test_nothing_is_launched_for_empty_rows_where_the_host_knows_of_none(
    adapter: Contrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    finish = ops.finish_rows
    monkeypatch.setattr(ops, "finish_rows", lambda *given, **named: (calls.append(given), finish(*given, **named))[0])
    plan, query, cache = made_plan(adapter, [3, 64, 130])

    def launched(lengths: list[int] | None, **step: Any) -> bool:
        calls.clear()
        if lengths is not None:
            plan.update(seq_lens=torch.tensor(lengths).int(), **step)
        got = plan.run(query, cache)
        assert torch.equal((got.lse == -INF)[:, 0], plan.seq_lens == 0)
        assert not got.out[plan.seq_lens == 0].any()
        return bool(calls)

    settles = plan.describe()["adds_kernels"] == ("finish_rows",)
    is_base2 = adapter.conventions.lse_base == "2"
    assert launched(None) == is_base2
    assert launched([1, 1, 1], seq_lens_cpu=torch.tensor([1, 1, 1])) == is_base2
    assert launched([1, 0, 1], seq_lens_cpu=torch.tensor([1, 0, 1])) == settles
    assert launched([1, 1, 1]) == settles  # only the device knows
    table = torch.zeros(2, 4, dtype=torch.int32)
    assert launched([1, 1], block_table=table, seq_lens_cpu=torch.tensor([1, 1])) == settles  # a third row is empty
    assert launched([5, 6, 7], block_table=torch.zeros(3, 4).int(), seq_lens_cpu=torch.tensor([5, 6, 7])) == is_base2
    if plan.update_mode == "device":
        plan.seq_lens[1] = 0  # the engine writes, which the host does not see
        plan.refresh()
        assert launched(None) == settles


def named(name: str) -> Contrary:
    return next(a for a in KEPT if a.name == name)


def test_a_row_before_a_short_requests_first_key_is_empty_though_the_request_is_not() -> None:
    plan, query, cache = made_plan(named("heads first"), [3, 1, 130], q_len=2)
    got = plan.run(Query.from_packed(torch.stack([query.packed, query.packed], 1)), cache)
    assert (got.lse == -INF)[:, :, 0].tolist() == [[False, False], [True, False], [False, False]]
    assert (got.lse < INF).all()


def test_tokens_past_the_last_ragged_request_are_empty_though_no_request_is() -> None:
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    plan, query, cache = made_plan(named("undefined"), [3, 64, 130], cu_q_lens=starts, max_q_len=1)
    query = Query.from_packed(torch.cat([query.packed, torch.full((2, 12, 576), 3.0).bfloat16()]))
    got = plan.run(query, cache)
    assert (got.lse == -INF)[:, 0].tolist() == [False, False, False, True, True]
    assert not got.out[3:].any()


def test_a_step_that_is_taken_back_takes_back_what_the_host_knew() -> None:
    plan, query, cache = made_plan(named("heads first"), [3, 0, 130])
    want = plan.run(query, cache)
    update, fails = plan._kernel.update, [True]

    def failing(lengths: HostLengths | None) -> None:
        if fails.pop():
            fails.append(False)
            raise RuntimeError("out of luck")
        fails.append(False)
        update(lengths)

    plan._kernel.update = failing
    with pytest.raises(RuntimeError, match="out of luck"):
        plan.update(seq_lens=torch.tensor([3, 4, 5]).int(), seq_lens_cpu=torch.tensor([3, 4, 5]))
    again = plan.run(query, cache)
    assert torch.equal(again.lse, want.lse)
    assert (again.lse[1] == -INF).all()


def test_a_view_knows_of_empty_rows_what_the_whole_plan_was_told() -> None:
    plan, query, cache = made_plan(named("heads first"), [3, 64, 130])
    view, two = plan.at(2), Query.from_packed(query.packed[:2])
    view.update(seq_lens=torch.tensor([8, 9]).int(), seq_lens_cpu=torch.tensor([8, 9]))
    for lens in ([3, 64, 130], [3, 0, 130], [5, 6, 0], [0, 1, 1]):
        plan.update(seq_lens=torch.tensor(lens).int(), seq_lens_cpu=torch.tensor(lens))
        assert (view.run(two, cache).lse == -INF)[:, 0].tolist() == [n == 0 for n in lens[:2]]
        assert (plan.run(query, cache).lse == -INF)[:, 0].tolist() == [n == 0 for n in lens]


def test_what_empty_rows_may_be_is_one_of_two_words() -> None:
    with pytest.raises(InvalidInput, match="empty_rows is 'nan', it takes 'exact' or 'any'"):
        made_plan(KEPT[0], [1, 2, 3], empty_rows="nan")


def test_more_heads_than_a_kernel_has_a_count_for_are_refused() -> None:
    adapter = Contrary("few heads", Conventions(query="packed", heads=(4, 8)))
    assert not adapter.refusals(Problem(8), Device())
    assert [str(r) for r in adapter.refusals(Problem(9), Device())] == [
        "num_heads is 9, it takes at most 8 [conventions of few heads]"
    ]
    assert [r.source for r in adapter.refusals(Problem(129), Device())] == ["a test"]  # its own limit says it once


def test_padded_heads_do_not_widen_a_measured_scale() -> None:
    adapter = Contrary("e4m3 padded", Conventions(query="packed", query_dtype="float8_e4m3fn", heads=(16,)), FP8)
    trial = Trial(replace(BASE, cache_format="fp8", num_heads=12), "cpu")
    backend = get_backend("cpu", adapters=[adapter])
    wide = torch.zeros(len(trial.latent), 16, 576, dtype=torch.bfloat16)
    wide[:, :12] = torch.cat([trial.latent, trial.rope], -1)
    want = trial.plan(backend).run(Query.from_packed(wide.clone()), trial.cache)
    wide[:, 12:] = 1e4
    got = trial.plan(backend).run(Query.from_packed(wide), trial.cache)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_a_coarse_lse_is_given_to_those_who_name_the_adapter() -> None:
    adapter = Contrary("coarse", Conventions(query="packed", lse_precision=2**-9))
    said = (
        "the lse is wanted, which this kernel may have off by 2e-03, it takes problems without one [conventions of coarse]; "
        'name it, adapter="coarse", where that is near enough'
    )
    assert [str(r) for r in adapter.refusals(Problem(16, needs_lse=True), Device())] == [said]
    assert not adapter.refusals(Problem(16), Device())
    trial = Trial(BASE, "cpu")
    with pytest.raises(NoAdapterRuns) as refused:
        trial.plan(get_backend("cpu", adapters=[adapter]))
    assert said in str(refused.value)
    named = get_backend("cpu", adapter="coarse", adapters=[adapter])
    assert trial.plan(named).describe()["lse_precision"] == 2**-9
    assert trial.run(named).faults(BASE) == ()
    assert Trial(replace(BASE, return_lse=False), "cpu").run(get_backend("cpu", adapters=[adapter])).faults(BASE) == ()


def test_float32_is_held_to_float32s_precision() -> None:
    trial = Trial(replace(BASE, cache_format="fp32"), "cpu")
    outcome = trial.run(get_backend("cpu"))
    assert outcome.faults(trial.condition) == ()
    coarse = replace(outcome, lse_error=5e-4)
    assert coarse.faults(trial.condition) == ("lse is off by 5.00e-04, allowed 1e-05",)
    assert replace(coarse, facts={**coarse.facts, "lse_precision": 1e-3}).faults(trial.condition) == ()


def test_each_kind_of_capacity_is_proved_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that may split a request's keys is another than one that may not."""
    proved: list[int | None] = []
    monkeypatch.setattr(
        canary, "prove", lambda adapter, serving, problem, *rest: (proved.append(problem.max_seq_len), 0.0)[1]
    )
    proofs, where = canary.Proofs(), torch.device("cpu")
    adapter = Contrary("proved twice", Conventions(query="packed"))
    for most in (64, 256, 257, 8192, None):
        assert proofs.of(adapter, None, Problem(16, max_seq_len=most), Device(), where) == 0.0  # type: ignore[arg-type]
    assert proved == [64, 257]
