"""FlashMLA's adapters against stand-ins for its builds: the schemas are those of the published wheels, the numbers the reference's.

A stand-in refuses what the real op refuses, ends where that would end the process, and fails on a schedule that was
made from other lengths, which the real op turns into wrong numbers.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_adapters.flashmla import FlashMLA, FlashMLAFp8, FlashMLASparse
from mla_backends import Device, PagedCache, Query, get_backend
from mla_backends.adapter import Absent, Adapter, Provider
from mla_backends.catalogue import serving
from mla_backends.conditions import Condition
from mla_backends.problem import Problem
from mla_backends.reference import reference_decode, reference_sparse
from mla_backends.support import Limit
from mla_backends.trials import Trial

# As they stand in sgl_flash_mla 1.0.0 (_C_legacy.abi3.so) and vLLM 0.33.0 (_flashmla_C, _flashmla_extension_C).
DENSE = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, float softmax_scale, "
    "bool is_causal, Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits) "
    "-> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)"
)
DENSE_OF_VLLM = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, float softmax_scale, "
    "bool is_causal, Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor(c!)? out_) "
    "-> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)"
)
DENSE_SCHEDULE = (
    "get_mla_decoding_metadata(Tensor seqlens_k, int num_q_tokens_per_head_k, int h_k, int? h_q, bool is_fp8_kvcache, "
    "int? topk) -> Tensor[]"
)
FP8 = (
    "fwd_kvcache_mla_fp8(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, float softmax_scale, "
    "bool is_causal, Tensor tile_scheduler_metadata, Tensor num_splits, Tensor? descale_q, Tensor? descale_k) -> Tensor[]"
)
FP8_SCHEDULE = (
    "get_mla_decoding_metadata_dense_fp8(Tensor seqlens_k, int num_heads_per_head_k, int num_heads_k) -> Tensor[]"
)
SPARSE = (
    "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits, Tensor? extra_kv, Tensor? extra_indices, "
    "Tensor? extra_topk_length, int d_v, float sm_scale, str? kv_format=None) "
    "-> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)"
)
SPARSE_OF_VLLM = (
    "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor? extra_kv, Tensor? extra_indices, "
    "Tensor? extra_topk_length, int d_v, float sm_scale, Tensor(c!)? out_=None, bool enable_batch_invariant=False) "
    "-> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)"
)

SMS = 132

# --- stand-ins ----------------------------------------------------------------------------------------------------------


def parts(rows: int) -> int:
    return max(SMS // -(-rows // 64), 1)


def schedule(lens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A stand-in for the real one: it says for which lengths and how many parts it was made."""
    tiles = torch.full((parts(rows), 8), int(lens.sum()), dtype=torch.int32)
    return tiles, torch.cat([lens.new_zeros(1), lens])


def check_schedule(tiles: Tensor, splits: Tensor, lens: Tensor, rows: int) -> None:
    wanted = schedule(lens, rows)
    assert tiles.shape == wanted[0].shape, "tile_scheduler_metadata must have shape (num_sm_parts, 8)"
    assert torch.equal(tiles, wanted[0]), "a stale schedule"
    assert torch.equal(splits, wanted[1]), "a stale schedule"


def given(found: Any, q: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out and lse as FlashMLA gives them: [B, q, H, L], [B, H, q], +inf where a row sees no key."""
    lse = found.lse.view(q.shape[:-1]).float()
    return found.out.view(*q.shape[:-1], 512).to(dtype), lse.masked_fill(lse == -torch.inf, torch.inf).transpose(1, 2)


def check_dense(q: Tensor, kcache: Tensor, lens: Tensor, table: Tensor) -> None:
    assert q.dtype == kcache.dtype
    assert q.dim() == 4
    assert q.shape[-1] == 576
    assert q.stride(-1) == 1
    assert kcache.shape[1:] == (64, 1, 576)
    assert all(s * kcache.element_size() % 16 == 0 for s in kcache.stride()[:3])
    assert lens.dtype == table.dtype == torch.int32
    assert lens.is_contiguous()
    assert table.stride(-1) == 1
    assert len(lens) == len(table) == len(q)


class Calls:
    """The ops of one build, and what they were called with."""

    def __init__(self) -> None:
        self.scheduling = 0
        self.kept: list[int] = []

    def dense(
        self, q: Tensor, kcache: Tensor, width: int, lens: Tensor, table: Tensor, scale: float, causal: bool,
        tiles: Tensor | None, splits: Tensor | None, out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        check_dense(q, kcache, lens, table)
        assert width == 512
        assert out is None
        rows = q.shape[1] * q.shape[2]
        if tiles is None or splits is None:
            self.scheduling += 1
            return torch.empty(*q.shape[:-1], 512), torch.empty(q.shape[:-1]).transpose(1, 2), *schedule(lens, rows)
        check_schedule(tiles, splits, lens, rows)
        self.kept.append(tiles.data_ptr())
        found = reference_decode(q[..., :512], q[..., 512:], kcache.squeeze(2), table, lens, softmax_scale=scale, causal=causal)  # fmt: skip
        return *given(found, q, dtype=q.dtype), tiles.clone(), splits.clone()

    def dense_schedule(
        self, lens: Tensor, rows: int, h_k: int, h_q: int | None, is_fp8: bool, topk: int | None
    ) -> list[Tensor]:
        assert (h_k, is_fp8, topk) == (1, False, None)
        assert h_q is not None
        assert rows % h_q == 0
        self.scheduling += 1
        return list(schedule(lens, rows))

    def fp8_schedule(self, lens: Tensor, rows: int, h_k: int) -> list[Tensor]:
        assert h_k == 1
        self.scheduling += 1
        return list(schedule(lens, rows))

    def fp8(
        self, q: Tensor, kcache: Tensor, width: int, lens: Tensor, table: Tensor, scale: float, causal: bool,
        tiles: Tensor, splits: Tensor, descale_q: Tensor | None, descale_k: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        check_dense(q, kcache, lens, table)
        assert q.dtype == torch.float8_e4m3fn
        assert descale_q is not None
        assert descale_k is not None
        assert descale_q.shape == descale_k.shape == (1,)
        assert descale_q.dtype == descale_k.dtype == torch.float32
        check_schedule(tiles, splits, lens, q.shape[1] * q.shape[2])
        assert int(lens.min()) >= 1, "a length of 0 is undefined"
        assert int(table.min()) >= 0, "page -1 is read"
        assert int(table.max()) < len(kcache), "a page past the cache is read"
        self.kept.append(tiles.data_ptr())
        value, keys = q.float() * descale_q, kcache.squeeze(2).float() * descale_k
        found = reference_decode(value[..., :512], value[..., 512:], keys, table, lens, softmax_scale=scale, causal=causal)  # fmt: skip
        return list(given(found, q, dtype=torch.bfloat16))

    def sparse(
        self, q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, sink: Tensor | None,
        tiles: Tensor | None, splits: Tensor | None, extra_kv: None, extra_indices: None, extra_length: None,
        width: int, scale: float, *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert q.dtype == torch.bfloat16
        assert q.shape[2] in (64, 128), "Unsupported h_q"
        assert kv.dtype == torch.uint8
        assert kv.shape[2:] == (1, 656)
        assert kv.stride(1) == 656, "The whole block must be contiguous"
        assert indices.dtype == torch.int32
        assert indices.shape[:2] == q.shape[:2]
        assert indices.shape[2] % 64 == 0, "process ends: topk % TOPK_BLOCK_SIZE"
        assert bool(((indices >= -1) & (indices < kv.shape[0] * kv.shape[1])).all()), "reads outside the cache"
        assert topk_length is extra_kv is extra_indices is extra_length is None
        assert width == 512
        assert sink is None or sink.shape == (q.shape[2],)
        lens = torch.full((len(q),), indices.shape[2], dtype=torch.int32)
        rows = q.shape[1] * q.shape[2]
        if tiles is None or splits is None:
            self.scheduling += 1
            return torch.empty(*q.shape[:-1], 512), torch.empty(q.shape[:-1]).transpose(1, 2), *schedule(lens, rows)
        check_schedule(tiles, splits, lens, rows)
        self.kept.append(tiles.data_ptr())
        values = PagedCache(kv, "fp8_ds_mla").dequantized()
        found = reference_sparse(q[..., :512], q[..., 512:], values, indices, softmax_scale=scale, attn_sink=sink)
        return *given(found, q, dtype=q.dtype), tiles.clone(), splits.clone()


def stand_in(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def sgl_module(*, has_legacy: bool = True) -> types.ModuleType:
    def flash_mla_with_kvcache(q: Tensor, use_legacy: bool = False) -> None: ...

    return stand_in("flash_mla", flash_mla_with_kvcache=flash_mla_with_kvcache, has_legacy=lambda: has_legacy)


def upstream_modules(**functions: Callable[..., Any]) -> dict[str, types.ModuleType]:
    def flash_mla_with_kvcache(q: Tensor, indices: Tensor | None = None) -> None: ...

    cuda = stand_in("flash_mla.cuda", **functions)
    return {
        "flash_mla": stand_in("flash_mla", flash_mla_with_kvcache=flash_mla_with_kvcache, cuda=cuda, __path__=[]),
        "flash_mla.cuda": cuda,
    }


def pybind(function: Callable[..., Any], arguments: int) -> Callable[..., Any]:
    """A function as pybind11 documents it."""

    def call(*given: Any) -> Any:
        return function(*given)

    call.__doc__ = f"f({', '.join(f'arg{i}: torch.Tensor' for i in range(arguments))}) -> tuple"
    return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """sgl's and vLLM's ops, and no package that brings them."""
    made = Calls()
    for name in ("flash_mla", "flash_mla.cuda", "vllm", "vllm._flashmla_C", "vllm._flashmla_extension_C"):
        monkeypatch.setitem(sys.modules, name, None)
    both = ((FP8, made.fp8), (FP8_SCHEDULE, made.fp8_schedule))
    builds = {
        "flash_mla_legacy": ((DENSE, made.dense), (DENSE_SCHEDULE, made.dense_schedule), (SPARSE, made.sparse), *both),
        "_flashmla_C": ((DENSE_OF_VLLM, made.dense), (SPARSE_OF_VLLM, made.sparse)),
        "_flashmla_extension_C": both,
    }
    libraries = []
    for namespace, ops in builds.items():
        # Under names of their own, as the packages' may be taken: where they are installed, other tests have loaded them.
        library = torch.library.Library(f"stand_in_{namespace}", "DEF")
        for schema, function in ops:
            library.define(schema)
            library.impl(schema.partition("(")[0], function, "CPU")
        libraries.append(library)
        monkeypatch.setattr(torch.ops, namespace, getattr(torch.ops, f"stand_in_{namespace}"))
    yield made
    for library in libraries:
        library._destroy()


def install(monkeypatch: pytest.MonkeyPatch, build: str, calls: Calls) -> None:
    modules = {
        "sgl": {"flash_mla": sgl_module()},
        "upstream": upstream_modules(
            dense_decode_fwd=pybind(calls.dense, 9), sparse_decode_fwd=pybind(calls.sparse, 12)
        ),
        "vllm": {
            "vllm": stand_in("vllm", __path__=[]),
            "vllm._flashmla_C": stand_in("vllm._flashmla_C"),
            "vllm._flashmla_extension_C": stand_in("vllm._flashmla_extension_C"),
        },
    }
    for name, module in modules[build].items():
        monkeypatch.setitem(sys.modules, name, module)


def on_cpu(adapter: type[Adapter]) -> Adapter:
    """The adapter without its limit on the device, so that stand-ins can serve here."""

    support = tuple(rule for rule in adapter.support if not (isinstance(rule, Limit) and rule.of is Device))
    made: Adapter = type(adapter.__name__, (adapter,), {"support": support})()
    return made


# --- numbers ------------------------------------------------------------------------------------------------------------

BF16, FP16, E4M3 = Condition(), Condition(cache_format="fp16"), Condition(cache_format="fp8")
BY_SLOT = Condition(cache_format="fp8_ds_mla", topk=65)

RUNS = [
    (FlashMLA, "sgl", BF16),
    (FlashMLA, "sgl", replace(FP16, num_heads=12, q_len=4, seq_lens=(3, 64, 66, 0, 1))),
    (FlashMLA, "sgl", replace(BF16, num_heads=40, q_len=2, query="transposed", causal=False)),
    (FlashMLA, "vllm", replace(BF16, num_heads=20, q_len=2, query="parts")),
    (FlashMLA, "upstream", replace(BF16, max_batch=12, query="padded")),
    (FlashMLAFp8, "sgl", replace(E4M3, q_len=2, seq_lens=(1, 64, 66, 0), kv_scale=0.5)),
    (FlashMLAFp8, "vllm", replace(E4M3, num_heads=20, q_amax=3000.0, kv_scale=2.0, kv_scale_kind="tensor")),
    (FlashMLAFp8, "sgl", replace(E4M3, q_scale=0.01, query="padded")),
    (FlashMLASparse, "sgl", replace(BY_SLOT, num_heads=12)),
    (FlashMLASparse, "vllm", replace(BY_SLOT, topk=1, num_heads=96, q_len=2)),
    (FlashMLASparse, "upstream", replace(BY_SLOT, topk=64, attn_sink=True, page_size=16, query="parts")),
]


@pytest.mark.parametrize(
    ("adapter", "build", "condition"), RUNS, ids=[f"{a.name}-{build}-{condition}" for a, build, condition in RUNS]
)
def test_the_ops_get_what_they_take_and_give_what_the_reference_does(
    adapter: type[Adapter], build: str, condition: Condition, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, build, calls)
    made = on_cpu(adapter)
    outcome = Trial(condition, "cpu").run(get_backend("cpu", adapter=made.name, adapters=[made]))
    assert outcome.faults(condition) == ()
    package = {"sgl": "sgl-flash-mla", "upstream": "flash-mla", "vllm": "vllm"}[build]
    assert outcome.facts["provider"] == package
    assert outcome.facts["sm_parts"] == parts(condition.q_len * outcome.facts["padded_heads"])


@pytest.mark.parametrize(("adapter", "build"), [(FlashMLA, "sgl"), (FlashMLA, "vllm"), (FlashMLAFp8, "sgl")])
def test_update_makes_the_schedule_once_a_step_at_one_address(
    adapter: type[Adapter], build: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, build, calls)
    monkeypatch.setenv("MLA_BACKENDS_CANARY", "0")
    made = on_cpu(adapter)
    cache = PagedCache.allocate(12, 64, "fp8" if adapter is FlashMLAFp8 else "bf16", "cpu")
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    with torch.inference_mode():
        plan = get_backend("cpu", adapter=made.name, adapters=[made]).plan(
            cache, table, torch.tensor([64, 64], dtype=torch.int32), num_heads=16, softmax_scale=0.1, q_scale=0.01
        )
    query = Query.from_packed(torch.randn(2, 16, 576).bfloat16())
    for step, lens in enumerate(([64, 64], [65, 64], [300, 0], [1, 1])):
        if step:
            plan.update(table, torch.tensor(lens, dtype=torch.int32))
        for _ in range(3):
            plan.run(query, cache)
        assert calls.scheduling == step + 1
    assert len(set(calls.kept)) == 1


def test_the_sparse_schedule_is_made_once_a_plan(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "sgl", calls)
    monkeypatch.setenv("MLA_BACKENDS_CANARY", "0")
    made = on_cpu(FlashMLASparse)
    cache = PagedCache.allocate(4, 64, "fp8_ds_mla", "cpu")
    backend = get_backend("cpu", adapter=made.name, adapters=[made])
    plan = backend.plan(cache, None, None, num_heads=8, softmax_scale=0.1, topk=5, max_batch=3)
    query = Query.from_packed(torch.randn(3, 8, 576).bfloat16())
    for _ in range(3):
        plan.refresh()
        plan.run(query, cache, indices=torch.randint(-9, 999, (3, 5), dtype=torch.int32))
    assert calls.scheduling == 1
    assert plan.describe()["padded_topk"] == 64


# --- who answers ----------------------------------------------------------------------------------------------------------


def ask(adapter: Adapter, package: str) -> Any:
    provider: Provider = next(p for p in adapter.providers if p.package == package)
    return provider.ask()


@pytest.mark.usefixtures("calls")
def test_nothing_installed_is_the_reason_of_each_provider() -> None:
    served = serving(FlashMLA())
    assert not served.answered
    assert [package for package, _ in served.absent] == ["sgl-flash-mla", "flash-mla", "vllm"]


@pytest.mark.usefixtures("calls")
def test_a_build_without_the_legacy_half_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", sgl_module(has_legacy=False))
    with pytest.raises(Absent, match="without the legacy kernels"):
        ask(FlashMLASparse(), "sgl-flash-mla")


def test_two_distributions_of_one_module_are_told_apart(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "sgl", calls)
    with pytest.raises(Absent, match="is sgl-flash-mla's"):
        ask(FlashMLA(), "flash-mla")
    install(monkeypatch, "upstream", calls)
    with pytest.raises(Absent, match="no argument use_legacy"):
        ask(FlashMLA(), "sgl-flash-mla")


@pytest.mark.usefixtures("calls")
def test_an_upstream_build_with_other_arguments_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"sparse_decode_fwd": pybind(print, 13)}
    for name, module in upstream_modules(**functions).items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(Absent, match="takes 13 arguments, not 12"):
        ask(FlashMLASparse(), "flash-mla")
    with pytest.raises(Absent, match="has no dense_decode_fwd"):
        ask(FlashMLA(), "flash-mla")


@pytest.mark.usefixtures("calls")
def test_an_op_with_another_schema_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", stand_in("vllm", __path__=[]))
    monkeypatch.setitem(sys.modules, "vllm._flashmla_C", stand_in("vllm._flashmla_elsewhere"))
    with pytest.raises(Absent, match=r"torch\.ops\._flashmla_elsewhere has no dense_decode_fwd"):
        ask(FlashMLA(), "vllm")
    with torch.library._scoped_library("_flashmla_elsewhere", "DEF") as library:
        library.define("dense_decode_fwd(Tensor q, Tensor kcache, Tensor block_table) -> Tensor")
        with pytest.raises(Absent, match=r"takes \(q, kcache, block_table\), not \(q, kcache, head_size_v, "):
            ask(FlashMLA(), "vllm")


# --- what would end the process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "facts"),
    [
        (FlashMLA, {"cache_format": "bf16", "alignment": 8}),
        (FlashMLA, {"cache_format": "bf16", "qk_rope_head_dim": 0}),
        (FlashMLA, {"cache_format": "bf16", "batch": 11623}),
        (FlashMLAFp8, {"cache_format": "fp8", "batch": 4096}),
        (FlashMLASparse, {"cache_format": "fp8_ds_mla", "topk": 2048, "batch": 11623}),
    ],
)
def test_what_ends_the_process_is_refused(adapter: type[Adapter], facts: dict[str, Any]) -> None:
    reasons = adapter().refusals(Problem(16, **facts), Device((9, 0), "", SMS))
    assert len(reasons) == 1
