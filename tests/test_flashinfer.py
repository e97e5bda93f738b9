"""FlashInfer's adapters against the package itself, on a CPU: its own wrapper and entry run, with all their checks, up to the
native call, where a stand-in takes over that checks every argument and computes in torch.

flashinfer-python imports without a GPU, and ci/requirements.txt names it: where it is missing, these tests fail.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import flashinfer.mla
import pytest
import torch
from flashinfer.mla import _core
from flashinfer.mla._batch_mla._backends import (
    _fa_common,
    fa2_backend,
    fa3_backend,
    trtllm_gen_backend,
)
from torch import Tensor

from mla_adapters import flashinfer as planned
from mla_adapters import flashinfer_trtllm as trtllm
from mla_backends.adapter import HostLengths
from mla_backends.backend import Backend
from mla_backends.conditions import Condition
from mla_backends.device import Device
from mla_backends.errors import InvalidInput
from mla_backends.plan import DecodePlan
from mla_backends.problem import Problem
from mla_backends.trials import Trial

CPU = torch.device("cpu")
LOG2E = math.log2(math.e)


def forced(adapter: Any, device: Device) -> Backend:
    """The adapter as it is, told that the CPU is `device`."""
    return Backend(device, CPU, (adapter,), adapter.name)


# --- the planned wrapper ---------------------------------------------------------------------------------------------


class NoPinning:
    """torch, but that memory is not pinned, which takes a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return torch.empty(*args, **kwargs)


class Native:
    """What FlashInfer compiles: `plan` writes a schedule into the integer workspace, `run` reads it from there alone."""

    def __init__(self) -> None:
        self.planned: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def plan(self, *args: Any) -> list[int]:
        floats, ints, pinned, q_offsets, page_offsets, lens, heads, width, causal = args
        self.planned.append(args)
        assert floats.dtype == ints.dtype == pinned.dtype == torch.uint8
        for host in (q_offsets, page_offsets, lens):
            assert host.dtype == torch.int32
            assert host.device == CPU
        schedule = torch.cat([torch.tensor([len(lens), heads, width, causal]).int(), q_offsets, page_offsets, lens])
        ints.view(torch.int32)[: len(schedule)] = schedule
        return [2 if (int(q_offsets[-1]) * heads) // len(lens) > 64 else 1, 132]

    def run(self, *args: Any) -> None:
        self.launched.append(args)
        _, ints, _, latent, rope, keys, key_rope, pages, out, lse, mask, heads, page_size, scale, *scales = args
        assert scales == [True, 1.0, 1.0, None]
        schedule = ints.view(torch.int32)
        batch, planned_heads, width, causal = schedule[:4].tolist()
        q_offsets, page_offsets, lens = schedule[4 : 6 + 3 * batch].split([batch + 1, batch + 1, batch])
        assert (heads, width, mask) == (planned_heads, 512, causal)
        assert latent.shape == out.shape == (len(latent), heads, 512)
        assert rope.shape == (len(latent), heads, 64)
        assert keys.shape[1:] == (page_size, 512)
        assert key_rope.shape[1:] == (page_size, 64)
        for vectors in (latent, rope, keys, key_rope, out):
            assert vectors.stride(-1) == 1
            assert all(s * vectors.element_size() % 16 == 0 for s in vectors.stride()[:-1])
        assert lse is None or lse.is_contiguous()
        for b in range(batch):
            rows = slice(int(q_offsets[b]), int(q_offsets[b + 1]))
            used = pages[int(page_offsets[b]) : int(page_offsets[b + 1])].long()
            n = int(lens[b])
            assert len(used) == -(-n // page_size)
            values = torch.cat([keys[used], key_rope[used]], -1).reshape(-1, 576)[:n].float()
            query = torch.cat([latent[rows], rope[rows]], -1).float()
            scores = torch.einsum("qhd,kd->qhk", query, values) * scale
            if causal:
                seen = torch.arange(n) <= torch.arange(len(query)).unsqueeze(1) + n - len(query)
                scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
            out[rows] = (scores.softmax(-1).nan_to_num(0.0) @ values[:, :512]).to(out.dtype)
            if lse is not None:
                lse[rows] = scores.logsumexp(-1)


@pytest.fixture
def native(monkeypatch):
    """FlashInfer's wrapper believes in an H200, and its compiler gives the stand-in."""
    made = Native()
    monkeypatch.setattr(_fa_common, "torch", NoPinning())
    monkeypatch.setattr(_fa_common, "get_compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(_fa_common, "is_sm90a_supported", lambda _: True)
    monkeypatch.setattr(_fa_common, "get_device_sm_count", lambda _: 132)
    monkeypatch.setattr(_fa_common, "_get_fa_shared_memory_limits", lambda _: (233472, 232448))
    for module in (fa2_backend, fa3_backend):
        monkeypatch.setattr(module, "get_batch_mla_module", lambda *_: made)
    return made


def hopper(adapter: type[planned.PlannedAdapter] = planned.FlashInfer) -> Backend:
    return forced(adapter(), Device((9, 0), "stand-in", 132))


PLANNED = (
    Condition(num_heads=16),
    Condition(num_heads=12, q_len=3, seq_lens=(3, 64, 66, 0, 1), query="transposed"),
    Condition(num_heads=40, q_len=2, causal=False),
    Condition(num_heads=8, page_size=16, layers=61, layer=60, cache_format="fp16", query="parts"),
    Condition(num_heads=4, page_size=1, return_lse=False),
    Condition(q_lens=(1, 4, 2, 1, 3, 1, 4), num_heads=12),
    Condition(max_batch=12, query="padded", q_len=2, num_heads=20),
    Condition(seq_lens=(0, 0, 0)),
)


@pytest.mark.parametrize("adapter", [planned.FlashInfer, planned.FlashInferFa2])
@pytest.mark.parametrize("condition", PLANNED, ids=str)
def test_the_wrapper_takes_what_is_planned_and_the_numbers_are_right(native, adapter, condition):
    assert Trial(condition, "cpu").run(hopper(adapter)).faults(condition) == ()
    assert native.launched


@pytest.mark.parametrize("problem", [Problem(16, needs_lse=True), Problem(16, q_len=4, needs_lse=True)], ids=str)
def test_fa2s_bf16_lse_is_not_given_unasked(problem):
    """It adds up weights that are rounded to 8 bits, and so misses the 1e-3 that all other kernels keep."""
    adapter, ampere = planned.FlashInferFa2(), Device((8, 0), "", 108)
    (reason,) = adapter.refusals(problem, ampere)
    assert "which this kernel may have off by 2e-03" in str(reason)
    assert not adapter.refusals(problem, ampere, forced=True)
    for fine in ({"needs_lse": False}, {"q_dtype": "float16", "cache_format": "fp16"}):
        assert not adapter.refusals(replace(problem, **fine), ampere)
    assert not planned.FlashInfer().refusals(problem, Device((9, 0), "", 132))


def test_what_a_captured_graph_holds_keeps_its_address_and_the_next_step_is_in_it(native):
    """A captured graph is the arguments of one launch: they must serve the next step too."""
    trial = Trial(Condition(seq_lens=(700, 0, 64, 65), max_batch=6), "cpu", unused="finite")
    backend = hopper()
    plan = trial.plan(backend)
    query = plan.new_query()
    query.packed.normal_()
    plan.run(query, trial.cache)
    captured = native.launched[-1]
    for lens in ((640, 1, 0, 65), (1, 0, 64, 0), (0, 0, 0, 1)):
        step = torch.tensor(lens, dtype=torch.int32)
        table = trial.block_table.clamp(0, trial.num_pages - 1).flip(0)
        plan.update(table, seq_lens_cpu=step)
        fresh = plan.run(query, trial.cache).out
        assert native.launched[-1][1].data_ptr() == captured[1].data_ptr()
        replayed = captured[8].fill_(torch.nan)
        native.run(*captured)
        assert torch.equal(replayed.view(torch.int16), fresh.flatten(0, -3).view(torch.int16))
        other = backend.plan(
            trial.cache,
            table,
            step,
            num_heads=16,
            softmax_scale=192**-0.5,
            max_batch=6,
            max_seq_len=832,
            return_lse=True,
        )
        assert torch.equal(other.run(query, trial.cache).out, fresh)


def test_a_step_that_cannot_be_planned_leaves_the_last_one(native, monkeypatch):
    trial = Trial(Condition(seq_lens=(130, 7)), "cpu")
    plan = trial.plan(hopper())
    query = trial.query(plan)
    before = plan.run(query, trial.cache).out.clone()

    def fails(*_: Any) -> None:
        raise RuntimeError("no room for the plan")

    monkeypatch.setattr(native, "plan", fails)
    with pytest.raises(RuntimeError, match="no room for the plan"):
        plan.update(trial.block_table.clamp(min=0), torch.tensor([1, 1], dtype=torch.int32))
    assert torch.equal(plan.run(query, trial.cache).out, before)
    assert plan.seq_lens is not None
    assert plan.seq_lens.tolist() == [130, 7]


def test_planning_reads_no_page_id_on_the_host(native):
    """Ids lie on the device; the wrapper, which reads what it is given, is given zeros."""
    trial = Trial(Condition(seq_lens=(130, 7)), "cpu")
    plan = trial.plan(hopper())
    plan.run(trial.query(plan), trial.cache)
    kernel = plan._kernel
    assert isinstance(kernel, planned.PlannedKernel)
    assert kernel._wrapper._planned_backend._planned_kv_page_range == (0, 1)
    assert native.launched[-1][7][:4].tolist() == [*trial.block_table[0, :3].tolist(), int(trial.block_table[1, 0])]


def test_a_callers_out_is_written_in_place(native):
    trial = Trial(Condition(q_len=2, seq_lens=(130, 7)), "cpu")
    plan = trial.plan(hopper())
    out = torch.full_like(trial.latent, torch.nan)
    assert plan.run(trial.query(plan), trial.cache, out=out).out is out
    assert native.launched[-1][8].data_ptr() == out.data_ptr()


@pytest.mark.parametrize("heads", [1, 3, 12, 16, 20, 40, 64, 96, 128])
@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_padded_heads_never_leave_a_key_out(heads, q_len):
    """FlashInfer's own check of causal tiles raises for some lengths where heads don't divide a tile."""
    padded = planned.FlashInfer().conventions_of(Problem(heads, q_len=q_len)).padded(heads)
    assert padded >= heads
    if q_len == 1:
        assert padded == heads
    for length in range(q_len, 400):
        _fa_common._validate_fa_causal_tile_bound([q_len], [length], padded, "fa3", torch.bfloat16, CPU)


def test_the_workspace_is_what_the_wrapper_asks_for(native):
    """One byte less, and its own check refuses."""
    device = Device((9, 0), "stand-in", 132)
    adapter = planned.FlashInfer()
    problem = Problem(128, batch=2, max_seq_len=256)
    size = adapter.workspace_bytes(problem, device, max_batch=2, max_seq_len=256)
    partials = 2 * 132 * 64 * (2 * 512 + 4)
    assert size == partials + 16

    def plan(workspace: Tensor) -> None:
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
        wrapper.plan(
            metadata=flashinfer.mla.MLAPlanMetadata.csr(offsets, offsets, offsets[:2], offsets[1:]),
            num_heads=128, head_dim_ckv=512, head_dim_kpe=64, page_size=64, causal=False, sm_scale=1.0,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, query_layout="split", kv_cache_layout="split",
        )  # fmt: skip

    aligned = torch.zeros(size + 64, dtype=torch.uint8)
    aligned = aligned[-aligned.data_ptr() % 16 :]
    plan(aligned[1 : 1 + size])
    with pytest.raises(ValueError, match=f"needs {partials} float workspace bytes"):
        plan(aligned[: partials - 1])


@pytest.mark.parametrize(
    ("heads", "q_len", "batch"),
    [(16, 1, 16252), (16, 1, 16300), (16, 1, 16253), (128, 1, 16252), (128, 4, 4063), (128, 4, 4064), (20, 3, 8126)],
)
def test_the_limit_on_work_holds_for_any_lengths(heads, q_len, batch):
    """Counted by FlashInfer's own mirror of its planner, at lengths that split as much as any can."""
    problem, device = Problem(heads, q_len=q_len, batch=batch), Device((9, 0), "", 132)
    taken = not planned.FlashInfer().refusals(problem, device)
    padded = planned.FlashInfer().conventions_of(problem).padded(heads)
    counts = [
        _fa_common._fa_plan_work_count([q_len] * batch, lens, padded, 132, q_len > 1)
        for lens in ([1] * batch, [100000] * batch, [10**6] + [0] * (batch - 1), [100] * 131 + [1] * (batch - 131))
    ]
    if taken:
        assert max(counts) <= planned.MOST_WORK
    else:
        assert max(counts) + 132 > planned.MOST_WORK


def test_ragged_rows_keep_the_launch_grid_of_a_captured_graph(native):
    plan = Trial(Condition(q_lens=(4, 4), seq_lens=(130, 7), num_heads=16), "cpu").plan(hopper())
    kernel = plan._kernel
    assert isinstance(kernel, planned.PlannedKernel)
    grids = []
    for offsets in ([0, 4, 8], [0, 1, 1], [0, 0, 4]):
        kernel.update(HostLengths(torch.tensor([130, 7]).int(), torch.tensor(offsets).int()))
        grids.append(kernel._plan[2])
    assert grids == [[1, 132]] * 3
    refused = planned.FlashInfer().refusals(Problem(12, q_len=5, ragged=True), Device((9, 0), "", 132))
    assert [r.found for r in refused] == ["ragged is True and q_len is 5 and num_heads is 12"]


def test_an_older_wrapper_is_refused_for_what_it_lacks():
    class Wrapper:
        def plan(self, qo_indptr: Tensor, kv_indptr: Tensor) -> None: ...

    with pytest.raises(Exception, match="has no argument metadata, lse_mode"):
        planned._planned(SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper))


# --- trtllm-gen ------------------------------------------------------------------------------------------------------

PARAMETERS = (
    "out", "out_scale_factor", "query", "key_cache", "value_cache", "workspace", "counters", "block_tables", "seq_lens",
    "max_q_len", "max_kv_len", "bmm1_scale", "bmm2_scale", "o_sf_scale", "o_sf_vec_size", "o_sf_start_index",
    "batch_size", "window_left", "sparse_mla_top_k", "sm_count", "enable_pdl", "workspace_size", "sinks",
    "cum_seq_lens_q", "key_block_scales", "value_block_scales", "skip_softmax", "shared_idx", "lse", "lse_scale",
    "lse_stride_tokens", "lse_stride_heads", "block_sparse", "sparse_lens", "transform_mode", "fp16_softmax",
)  # fmt: skip
"""Of trtllm_paged_attention_decode. Source: csrc/trtllm_fmha_kernel_launcher.cu."""


class Launcher:
    """trtllm_paged_attention_decode as its C++ reads its arguments; it computes what the kernel is documented to."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def trtllm_paged_attention_decode(self, *args: Any) -> None:
        call = SimpleNamespace(**dict(zip(PARAMETERS, args, strict=True)))
        self.calls.append(call)
        tokens, heads, width = call.query.shape
        pages, kv_heads, page_size, kv_width = call.key_cache.shape
        assert (width, kv_width, kv_heads) == (576, 576, 1)
        assert page_size in (32, 64)
        assert heads in (8, 16, 32, 64, 128)
        assert call.key_cache is call.value_cache
        assert call.query.dtype == call.key_cache.dtype
        assert call.out.dtype == torch.bfloat16
        assert call.out.is_contiguous()
        assert call.out.numel() == tokens * heads * 512
        assert (call.query.stride(-1), call.key_cache.stride(-1)) == (1, 1)
        for strided in (call.query, call.key_cache):
            assert all(s * strided.element_size() % 16 == 0 for s in strided.stride()[:-1])
            assert strided.data_ptr() % 16 == 0
        # The row pitch of the table is its width, whatever its strides say.
        assert call.block_tables.is_contiguous()
        assert call.block_tables.dtype == call.seq_lens.dtype == torch.int32
        assert call.block_tables.shape[1] % (128 // page_size) == 0
        assert call.block_tables.shape[0] == call.seq_lens.shape[0] == call.batch_size
        assert bool((call.seq_lens >= 1).all())
        assert bool(((call.block_tables >= 0) & (call.block_tables < pages)).all())
        assert call.workspace_size == call.workspace.numel() >= 128 << 20
        assert call.counters.numel() >= 4 * max(call.batch_size * heads, call.sm_count)
        assert not call.counters.any()
        assert call.counters.data_ptr() % 16 == 0
        assert (call.window_left, call.sparse_mla_top_k, call.shared_idx, call.block_sparse) == (-1, 0, True, False)
        assert call.sinks is call.sparse_lens is call.skip_softmax is call.fp16_softmax is None
        self._decode(call)

    def _decode(self, call: SimpleNamespace) -> None:
        scale = call.bmm1_scale
        if isinstance(scale, Tensor):
            assert scale.shape == call.bmm2_scale.shape == (1,)
            assert scale.dtype == call.bmm2_scale.dtype == torch.float32
            scale = scale / LOG2E  # a tensor comes in units of log2
        offsets = call.cum_seq_lens_q
        if offsets is None:
            assert call.query.shape[0] == call.batch_size * call.max_q_len
            offsets = torch.arange(call.batch_size + 1) * call.max_q_len
        out = call.out.view(-1, *call.out.shape[-2:])
        for b, n in enumerate(call.seq_lens.tolist()):
            assert n <= call.max_kv_len
            rows = slice(int(offsets[b]), int(offsets[b + 1]))
            used = call.block_tables[b, : -(-n // call.key_cache.shape[2])].long()
            values = call.key_cache[used].reshape(-1, 576)[:n].float()
            query = call.query[rows].float()
            assert len(query) <= call.max_q_len
            scores = torch.einsum("qhd,kd->qhk", query, values) * scale
            seen = torch.arange(n) <= torch.arange(len(query)).unsqueeze(1) + n - len(query)
            scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
            out[rows] = (scores.softmax(-1).nan_to_num(0.0) @ values[:, :512] * call.bmm2_scale).to(out.dtype)
            if call.lse is not None:
                assert (call.lse_stride_tokens, call.lse_stride_heads) == (call.lse.stride(0), call.lse.stride(1))
                call.lse[rows] = scores.logsumexp(-1) * LOG2E * call.lse_scale


@pytest.fixture
def launcher(monkeypatch):
    """FlashInfer's entry believes in a B200, and the binary is the stand-in."""
    made = Launcher()
    monkeypatch.setattr(_core, "get_device_sm_count", lambda _: 148)
    monkeypatch.setattr(_core, "device_support_pdl", lambda _: True)
    monkeypatch.setattr(trtllm_gen_backend, "get_trtllm_gen_fmha_module", lambda: made)
    return made


def blackwell() -> Backend:
    return forced(trtllm.FlashInferTrtllm(), Device((10, 0), "stand-in", 148))


TRTLLM = (
    Condition(num_heads=16),
    Condition(num_heads=20, page_size=32, layers=61, layer=30, query="transposed"),
    Condition(num_heads=96, q_len=2, seq_lens=(3, 64, 66, 0, 1)),
    Condition(num_heads=128, return_lse=False, query="parts", causal=False),
    Condition(q_lens=(3, 0, 2, 1), seq_lens=(2, 64, 65, 0), num_heads=12, return_lse=False),
    Condition(max_batch=12, query="padded"),
    Condition(cache_format="fp8", kv_scale=0.5, num_heads=16),
    Condition(cache_format="fp8", kv_scale=2.0, kv_scale_kind="tensor", num_heads=12, q_len=2, page_size=32),
    Condition(cache_format="fp8", q_scale=0.01, max_batch=9, query="padded"),
    Condition(cache_format="fp8", q_amax=3000.0, kv_scale=0.5, query="transposed"),
)


@pytest.mark.parametrize("condition", TRTLLM, ids=str)
def test_every_argument_reaches_the_launch_as_its_launcher_reads_it(launcher, condition):
    assert Trial(condition, "cpu").run(blackwell()).faults(condition) == ()
    assert launcher.calls[-1].sm_count == 148


def test_the_call_binds_to_the_entrys_signature(launcher, monkeypatch):
    """By name, and with every shape check of FlashInfer's that the adapter's own data should make unreachable."""
    real = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla
    signature = inspect.signature(real)
    calls: list[inspect.BoundArguments] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(signature.bind(*args, **kwargs))
        return real(*args, **kwargs)

    spy.__signature__ = signature
    monkeypatch.setattr(flashinfer.mla, "trtllm_batch_decode_with_kv_cache_mla", spy)
    trial = Trial(Condition(num_heads=16, q_len=2, page_size=32), "cpu")
    plan = trial.plan(blackwell())
    plan.run(trial.query(plan), trial.cache)
    given = calls[-1].arguments
    assert given["backend"] == "trtllm-gen"
    assert given["return_lse_base"] == "basee"
    assert given["query"].shape == (7, 2, 16, 576)
    assert given["kv_cache"].data_ptr() == trial.cache.data.data_ptr()
    _core._check_mla_functional_shape(
        given["query"], given["kv_cache"], 512, 64, 0, given["block_tables"], 32, require_aligned_block_table=True
    )
    assert _core._trtllm_gen_mla_incompatibility_reason(16, 32, lse_requested=True, max_q_len=2) is None


def test_each_plan_has_counters_of_its_own_and_a_view_too(launcher):
    trial = Trial(Condition(seq_lens=(130, 7, 1)), "cpu")
    backend = blackwell()
    plans: list[DecodePlan] = [trial.plan(backend), trial.plan(backend)]
    plans.append(plans[0].at(2))
    for plan in plans:
        query = plan.new_query()
        plan.run(query, trial.cache)
        plan.run(query, trial.cache)
    used = [call.counters.data_ptr() for call in launcher.calls[-6:]]
    assert used[0::2] == used[1::2]
    assert len(set(used)) == 3


def test_scales_stay_on_the_device_and_keep_their_address(launcher):
    kv_scale = torch.tensor([0.5])
    trial = Trial(Condition(cache_format="fp8", kv_scale=0.5, kv_scale_kind="tensor"), "cpu")
    plan = trial.plan(blackwell())
    query = trial.query(plan)
    plan.run(query, trial.cache)
    first = launcher.calls[-1]
    assert first.bmm2_scale.data_ptr() == trial.cache.scale.data_ptr()
    assert torch.equal(first.bmm2_scale, kv_scale)
    plan.run(query, trial.cache)
    assert launcher.calls[-1].bmm2_scale.data_ptr() == first.bmm2_scale.data_ptr()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (11, 0), (12, 0), (12, 1), None])
def test_off_blackwell_it_refuses_before_flashinfer_is_asked(monkeypatch, capability):
    """Its entry would spend 40 seconds on downloads first."""

    def touched(_: Any) -> None:
        raise AssertionError("the provider was asked")

    adapter = trtllm.FlashInferTrtllm()
    monkeypatch.setattr(type(adapter), "providers", (replace(adapter.providers[0], load=touched),))
    backend = forced(adapter, Device(capability, "", 132))
    verdict = backend.explain(Problem(16))[adapter.name]
    assert [r.subject for r in verdict.reasons] == ["capability"]
    trial = Trial(Condition(), "cpu")
    with pytest.raises((RuntimeError, InvalidInput), match="capability is"):
        trial.plan(backend)
