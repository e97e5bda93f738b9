"""FlashAttention-3's adapters against a stand-in of its ops: the three published schemas, computing in torch on a CPU.

The stand-in reads exactly what the kernel reads, and refuses scheduler metadata of other lengths than it is given.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mla_adapters import fa3
from mla_backends.adapter import Absent, Provider
from mla_backends.backend import Backend, get_backend
from mla_backends.conditions import Condition
from mla_backends.problem import Problem
from mla_backends.trials import Trial

# As the binaries register them: vLLM 0.33.0, sglang-kernel, tokenspeed-fa3 3.0.0.post20260810 (upstream and sinks).
SCHEMAS = {
    "vllm": (
        "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
        "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
        "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
        "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
        "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
        "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
        "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]",
        "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
        "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, "
        "int max_seqlen_k_new, bool is_causal, int window_size_left, int window_size_right, bool has_softcap, "
        "int num_splits, bool? pack_gqa, int sm_margin) -> Tensor",
    ),
    "sglang": (
        "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
        "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
        "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
        "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
        "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
        "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
        "int sm_margin) -> Tensor[]",
    ),
    "upstream": (
        "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,Tensor? q_v = None,"
        "Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,"
        "Tensor? cu_seqlens_k_new = None,Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,"
        "int? max_seqlen_k = None,Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,"
        "Tensor? rotary_cos = None,Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,"
        "Tensor? k_descale = None,Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,"
        "int window_size_left = -1,int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,"
        "bool is_rotary_interleaved = False,Tensor? scheduler_metadata = None,int num_splits = 0,"
        "bool? pack_gqa = None,int sm_margin = 0,Tensor? sinks = None) -> (Tensor(out!), Tensor, Tensor, Tensor)",
        "get_scheduler_metadata(int batch_size,int max_seqlen_q,int max_seqlen_k,int num_heads,int num_heads_k,"
        "int headdim,int headdim_v,ScalarType qkv_dtype,Tensor seqused_k,Tensor? cu_seqlens_q = None,"
        "Tensor? cu_seqlens_k = None,Tensor? cu_seqlens_k_new = None,Tensor? seqused_q = None,"
        "Tensor? leftpad_k = None,int? page_size = None,int max_seqlen_k_new = 0,bool is_causal = False,"
        "int window_size_left = -1,int window_size_right = -1,int attention_chunk = 0,bool has_softcap = False,"
        "int num_splits = 0,bool? pack_gqa = None,int sm_margin = 0) -> Tensor",
    ),
}
NEUTRAL = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "attention_chunk": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "has_softcap": False,
    "max_seqlen_k_new": 0,
}


class Build:
    """A namespace of `torch.ops` with one build's schema, and a record of the calls to it."""

    def __init__(self, kind: str, *schemas: str) -> None:
        self.namespace = f"fa3_stand_in_{kind}"
        self.calls: list[dict[str, Any]] = []
        self._torch = torch.library.Library(self.namespace, "DEF")
        for schema in schemas:
            name = schema.partition("(")[0]
            self._torch.define(schema)
            self._torch.impl(name, self._recorded(name), "CPU")

    def _recorded(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            schema = getattr(getattr(torch.ops, self.namespace), name).default._schema
            # torch leaves out trailing arguments that equal their default
            given = {a.name: a.default_value for a in schema.arguments}
            given.update(zip(given, args, strict=False))
            self.calls.append({"op": name, **given})
            for a in schema.arguments:
                if a.name in NEUTRAL:
                    assert given[a.name] == NEUTRAL[a.name]
            return _fwd(given) if name == "fwd" else _metadata(given)

        return call

    def last(self, op: str) -> dict[str, Any]:
        return next(c for c in reversed(self.calls) if c["op"] == op)


def _metadata(given: dict[str, Any]) -> torch.Tensor:
    assert (given["headdim"], given["headdim_v"], given["num_heads_k"]) == (64, 512, 1)
    assert given["batch_size"] == len(given["seqused_k"])
    facts = [given["max_seqlen_q"], given["max_seqlen_k"], given["num_heads"], given["page_size"], given["num_splits"]]
    return torch.cat([given["seqused_k"], torch.tensor([*facts, int(given["is_causal"])], dtype=torch.int32)])


def _fwd(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    q, k, v, q_v, lens = (given[name] for name in ("q", "k", "v", "q_v", "seqused_k"))
    offsets, table, metadata = given["cu_seqlens_q"], given["page_table"], given["scheduler_metadata"]
    assert k.shape[2:] == (1, 64)
    assert v.shape[2:] == (1, 512)
    assert lens.is_contiguous()
    heads, page_size = q.shape[-2], k.shape[1]
    if metadata is not None:
        facts = [given["max_seqlen_q"], given["max_seqlen_k"], heads, page_size, given["num_splits"]]
        assert metadata.tolist() == [*lens.tolist(), *facts, int(given["is_causal"])]
    out = given["out"]
    if out is None:
        out = torch.full_like(q_v, torch.nan)
    lse = torch.full(q.shape[:-1], torch.nan).transpose(-1, -2).contiguous()
    for b, n in enumerate(lens.tolist()):
        rows = b if offsets is None else slice(int(offsets[b]), int(offsets[b + 1]))
        assert n <= given["max_seqlen_k"]
        pages = table[b, : -(-n // page_size)].long()
        keys = torch.cat([v[pages], k[pages]], -1).reshape(-1, 576)[:n].float()
        query = torch.cat([q_v[rows], q[rows]], -1).float()
        scores = torch.einsum("qhd,kd->qhk", query, keys) * given["softmax_scale"]
        if given["is_causal"]:
            seen = torch.arange(n) <= torch.arange(len(query)).unsqueeze(1) + n - len(query)
            scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
        out[rows] = (scores.softmax(-1).nan_to_num(0.0) @ keys[:, :512]).to(out.dtype)
        lse_rows = scores.logsumexp(-1).transpose(0, 1)
        if offsets is None:
            lse[b] = lse_rows
        else:
            lse[:, rows] = lse_rows
    return out, lse, q.new_empty(0), q.new_empty(0)


BUILDS = {kind: Build(kind, *schemas) for kind, schemas in SCHEMAS.items()}


def on_cpu(kind: str, adapter: type[Any] = fa3.Fa3) -> tuple[Backend, Build]:
    """The adapter on a CPU, served by a stand-in."""
    build = BUILDS[kind]
    build.calls.clear()
    provider = Provider("torch", "torch", lambda _: fa3._library(build.namespace))
    rules = tuple(rule for rule in adapter.support if getattr(rule, "subject", "") != "capability")
    made = type(f"{adapter.__name__}OnCpu", (adapter,), {"providers": (provider,), "support": rules})()
    return get_backend(device="cpu", adapter=made.name, adapters=[made]), build


DENSE = (
    Condition(num_heads=16),
    Condition(num_heads=12, q_len=3, seq_lens=(3, 64, 66, 0, 1), query="transposed"),
    Condition(num_heads=8, page_size=16, layers=61, layer=60, cache_format="fp16"),
    Condition(num_heads=4, page_size=1, q_len=2, causal=False),
    Condition(q_lens=(3, 0, 2, 1), seq_lens=(2, 64, 65, 0), num_heads=20),
    Condition(max_batch=12, query="padded", batch_invariant=True),
    Condition(seq_lens=(1000, 0, 333), num_heads=8),
)
SPARSE = (
    Condition(topk=65, num_heads=16),
    Condition(topk=192, num_heads=8, q_len=2, page_size=16, layers=61, layer=30, query="transposed"),
    Condition(topk=1, num_heads=5, cache_format="fp16"),
    Condition(topk=700, num_heads=8, page_size=1),
)


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("condition", DENSE, ids=str)
def test_every_published_schema_gives_the_numbers(kind, condition):
    backend, build = on_cpu(kind)
    assert Trial(condition, "cpu").run(backend).faults(condition) == ()
    assert build.last("fwd")["q"].dim() == (3 if condition.q_lens else 4)


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("condition", SPARSE, ids=str)
def test_selected_slots_are_read_in_place_by_row(kind, condition):
    backend, build = on_cpu(kind, fa3.Fa3Sparse)
    trial = Trial(condition, "cpu")
    assert trial.run(backend).faults(condition) == ()
    plan = trial.plan(backend)
    plan.run(trial.query(plan), trial.cache, indices=trial.indices)
    call = build.last("fwd")
    assert call["k"].shape[1] == 1
    assert call["v"].data_ptr() == trial.cache.data.data_ptr()
    assert call["max_seqlen_k"] == condition.topk
    assert plan.describe()["adds_kernels"] == ("compact_slots",)


def test_a_step_is_planned_once_into_one_tensor_and_stays_equal_to_a_fresh_plan():
    backend, build = on_cpu("vllm")
    trial = Trial(Condition(seq_lens=(700, 0, 64, 65)), "cpu", unused="finite")
    plan = trial.plan(backend)
    query = trial.query(plan)
    plan.run(query, trial.cache)
    planned = build.last("fwd")["scheduler_metadata"].data_ptr()
    for lens in ((640, 1, 0, 65), (1, 0, 64, 0)):
        step = torch.tensor(lens, dtype=torch.int32)
        build.calls.clear()
        plan.update(trial.block_table.clamp(0, trial.num_pages - 1), step)
        got = [plan.run(query, trial.cache) for _ in range(3)]
        assert [c["op"] for c in build.calls] == ["get_scheduler_metadata", *["fwd"] * 3]
        assert build.last("fwd")["scheduler_metadata"].data_ptr() == planned
        fresh = backend.plan(
            trial.cache,
            trial.block_table.clamp(0, trial.num_pages - 1),
            step,
            num_heads=16,
            softmax_scale=192**-0.5,
            return_lse=True,
        ).run(query, trial.cache)
        assert torch.equal(fresh.out, got[-1].out)
        assert fresh.lse is not None
        assert torch.equal(fresh.lse, got[-1].lse)


def test_an_engine_that_writes_lengths_itself_refreshes_the_metadata():
    backend, build = on_cpu("upstream")
    trial = Trial(Condition(seq_lens=(700, 0, 64, 65)), "cpu", unused="finite")
    plan = trial.plan(backend)
    assert plan.seq_lens is not None
    plan.seq_lens.copy_(torch.tensor([1, 0, 3, 5]))
    with pytest.raises(AssertionError):
        plan.run(trial.query(plan), trial.cache)
    plan.refresh()
    plan.run(trial.query(plan), trial.cache)
    assert build.last("fwd")["seqused_k"].tolist() == [1, 0, 3, 5]


@pytest.mark.parametrize(("adapter", "topk"), [(fa3.Fa3, None), (fa3.Fa3Sparse, 65)])
@pytest.mark.parametrize("q_len", [1, 2])
def test_the_callers_out_is_what_the_kernel_writes(adapter, topk, q_len):
    backend, build = on_cpu("vllm", adapter)
    trial = Trial(Condition(topk=topk, q_len=q_len), "cpu")
    plan = trial.plan(backend)
    out = torch.full_like(trial.latent, torch.nan)
    decoded = plan.run(trial.query(plan), trial.cache, indices=trial.indices, out=out)
    assert decoded.out is out
    assert build.last("fwd")["out"].data_ptr() == out.data_ptr()
    assert not out.isnan().any()


@pytest.mark.parametrize(
    ("problem", "rows", "requests", "keys", "splits"),
    [
        (Problem(16), 16, 1, 65536, 0),
        (Problem(16), 16 * 128, 128, 65536, 127),
        (Problem(128), 128 * 128, 128, 65536, 15),
        (Problem(128), 128 * 128, 128, 512, 8),
        (Problem(128), 128 * 992 * 8, 992, 65536, 1),
        (Problem(16), 16, 1, 256, 1),
        (Problem(16), 16 * 993, 993, 65536, 1),
        (Problem(16, batch_invariant=True), 16, 1, 65536, 1),
    ],
)
def test_splits_depend_on_capacity_and_bound_the_partial_outputs(problem, rows, requests, keys, splits):
    found = fa3._num_splits(problem, rows=rows, requests=requests, keys=keys)
    assert found == splits
    assert (found or fa3.MOST_SPLITS) * rows * 513 * 4 <= fa3.PARTIAL_BYTES or found == 1


def test_without_splits_there_is_no_metadata_to_keep():
    backend, build = on_cpu("vllm")
    condition = Condition(batch_invariant=True, seq_lens=(1000, 3))
    trial = Trial(condition, "cpu")
    plan = trial.plan(backend)
    plan.run(trial.query(plan), trial.cache)
    assert {c["op"] for c in build.calls} == {"fwd"}
    assert build.last("fwd")["num_splits"] == 1


@pytest.mark.parametrize(
    ("change", "reads"),
    [({}, False), ({"num_heads": 65}, True), ({"q_len": 5}, True), ({"num_heads": 128, "page_size": 32}, False),
     ({"num_heads": 128, "page_size": 128}, True)],
)  # fmt: skip
def test_unused_rows_reach_the_kernel_where_it_loads_whole_pages(change, reads):
    problem = replace(Problem(16), **change)
    assert (fa3.Fa3().conventions_of(problem).unused_rows == "read") is reads


# --- builds that do not serve ----------------------------------------------------------------------------------------


def _config(monkeypatch: pytest.MonkeyPatch, **flags: bool) -> None:
    module = ModuleType("flash_attn_config")
    module.CONFIG = {"build_flags": flags}
    monkeypatch.setitem(sys.modules, "flash_attn_config", module)


@pytest.mark.parametrize("flag", ["FLASH_ATTENTION_DISABLE_HDIMDIFF64", "FLASHATTENTION_DISABLE_PAGEDKV"])
def test_a_build_whose_flags_say_that_the_kernel_is_missing_is_refused_with_the_flag(monkeypatch, flag):
    _config(monkeypatch, **{flag: True, "FLASHATTENTION_DISABLE_BACKWARD": True})
    with pytest.raises(Absent, match=f"flash_attn_config says {flag}"):
        fa3._upstream(None)


def test_a_build_with_the_kernel_or_without_flags_is_left_to_the_canary(monkeypatch):
    monkeypatch.setattr(fa3, "_library", lambda namespace: namespace)
    _config(monkeypatch, FLASH_ATTENTION_DISABLE_HDIMDIFF64=False, FLASH_ATTENTION_DISABLE_HDIMDIFF192=True)
    assert fa3._upstream(None) == "flash_attn_3"
    monkeypatch.setitem(sys.modules, "flash_attn_config", None)
    assert fa3._upstream(None) == "flash_attn_3"


def test_a_vllm_without_the_extension_says_why():
    interface = SimpleNamespace(FA3_AVAILABLE=False, FA3_UNAVAILABLE_REASON="undefined symbol: _ZN3c104cuda9SetDevice")
    with pytest.raises(Absent, match="undefined symbol: _ZN3c104cuda9SetDevice"):
        fa3._vllm(interface)


@pytest.mark.parametrize(
    ("kind", "schema", "says"),
    [
        ("no_values", "fwd(Tensor q, Tensor k, Tensor v, Tensor? out) -> Tensor[]", "begins with q, k, v, out"),
        ("no_pages", SCHEMAS["vllm"][0].replace("page_table", "pages"), "has no argument page_table"),
        ("more", SCHEMAS["vllm"][0].replace("int cp_rank", "int ring_id, int cp_rank"), "asks for ring_id"),
    ],
)
def test_an_op_of_another_schema_is_refused_by_name(kind, schema, says):
    build = Build(kind, schema)
    with pytest.raises(Absent, match=says):
        fa3._library(build.namespace)


def test_a_namespace_without_the_op_is_a_reason():
    with pytest.raises(Absent, match="has no attribute 'fwd'"):
        Provider("torch", "torch", lambda _: fa3._library("fa3_stand_in_of_nothing")).ask()


@pytest.mark.parametrize("provider", fa3.PROVIDERS, ids=lambda p: p.package)
def test_a_package_that_is_not_there_is_a_reason(monkeypatch, provider):
    top = provider.module.partition(".")[0]
    for name in [n for n in sys.modules if n == top or n.startswith(f"{top}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, top, None)
    with pytest.raises(Absent, match="not installed"):
        provider.ask()
