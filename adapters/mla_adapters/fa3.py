"""FlashAttention-3 on Hopper: q and k are the rope parts, q_v and v the latents, so a latent is loaded once for both.

Three packages register one C++ op under three schemas: its arguments are placed by name, once a plan, and `run` calls
the op itself. The sparse adapter is the same op over pages of one row, whose block table is the selected slots.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_backends.adapter import Absent, Adapter, HostLengths, Kernel, Provider, Step
from mla_backends.cache import PagedCache
from mla_backends.device import Device
from mla_backends.problem import Problem
from mla_backends.query import Query
from mla_backends.support import Conventions, Limit, OneOf, Range, Speed, Support, one_dtype

TILE = 64
"""Query rows and keys of a tile. Source: hopper/tile_size.h, headdim at most 64 with headdim_v 512."""

MOST_SPLITS = 128
"""Of a request's keys. Source: get_num_splits in hopper/flash_api.cpp."""

MOST_SPLIT_BATCH = 992
"""Requests above which nothing is split. Source: PREPARE_VARLEN_MAX_BATCHES_1CTA in hopper/flash.h."""

PARTIAL_BYTES = 512 << 20
"""Float32 partial outputs that a call may allocate. The library's own bound is by capacity alone: 128 requests of 128
heads would take 1.9 GB, for splits that only one long request among short ones could use."""


# --- where it comes from ---------------------------------------------------------------------------------------------

LEADING = ("q", "k", "v", "k_new", "v_new", "q_v", "out")
"""How every build's `fwd` begins: what differs from call to call, so that the rest is placed once."""

PLACED = (
    *("cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table"),
    *("softmax_scale", "is_causal", "scheduler_metadata", "num_splits"),
)

FIXED: Mapping[str, Any] = {
    **dict.fromkeys(("window_size_left", "window_size_right"), -1),
    **dict.fromkeys(("attention_chunk", "softcap", "sm_margin", "max_seqlen_k_new", "cp_rank"), 0),
    **dict.fromkeys(("is_rotary_interleaved", "has_softcap", "only_qv"), False),
    "cp_world_size": 1,
}
"""Arguments of one build or another that a decode leaves alone, and that may have no default."""


@dataclass(frozen=True, eq=False)
class Library:
    """One build's ops; `get_scheduler_metadata` is None where it has none, and each call then prepares itself."""

    fwd: Any
    get_scheduler_metadata: Any | None


def _library(namespace: str) -> Library:
    """The ops of a namespace of `torch.ops`, if their schema is one that this file can call."""
    registered = getattr(torch.ops, namespace)
    arguments = registered.fwd.default._schema.arguments
    names = tuple(a.name for a in arguments)
    if names[: len(LEADING)] != LEADING:
        raise Absent(
            f"{namespace}.fwd begins with {', '.join(names[:7])}, this adapter calls it with {', '.join(LEADING)}"
        )
    if lacking := [name for name in PLACED if name not in names]:
        raise Absent(f"{namespace}.fwd has no argument {', '.join(lacking)}")
    for a in arguments[len(LEADING) :]:
        if not (a.name in PLACED or a.name in FIXED or a.has_default_value() or a.type.kind() == "OptionalType"):
            raise Absent(f"{namespace}.fwd asks for {a.name}, which this adapter does not know")
    metadata = getattr(registered, "get_scheduler_metadata", None)
    return Library(registered.fwd.default, None if metadata is None else metadata.default)


def _placed(op: Any, values: Mapping[str, Any], *, after: int = 0) -> list[Any]:
    """The op's arguments from the `after`-th on, in its order: our values, else what leaves it alone."""
    placed = []
    for argument in op._schema.arguments[after:]:
        default = argument.default_value if argument.has_default_value() else None
        placed.append(values.get(argument.name, FIXED.get(argument.name, default)))
    return placed


def _vllm(interface: Any) -> Library:
    if not interface.FA3_AVAILABLE:
        raise Absent(f"its FlashAttention-3 is unavailable: {interface.FA3_UNAVAILABLE_REASON}")
    return _library("_vllm_fa3_C")


def _upstream(_: Any) -> Library:
    """Upstream's own package and its rebuilds, of which some lack the kernel and return garbage without an error.

    Where a build leaves no flags, the canary is what finds out.
    """
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        flags = {}
    for name, is_set in flags.items():
        if is_set and name.endswith(("_DISABLE_HDIMDIFF64", "_DISABLE_HDIM64", "_DISABLE_PAGEDKV", "_DISABLE_VARLEN")):
            raise Absent(
                f"this build has no paged kernel for heads of 64 and values of 512: flash_attn_config says {name}"
            )
    return _library("flash_attn_3")


PROVIDERS = (
    Provider("vllm", "vllm.vllm_flash_attn.flash_attn_interface", _vllm),
    Provider("sglang-kernel", "sgl_kernel.flash_attn", lambda _: _library("sgl_kernel")),
    Provider("flash_attn_3", "flash_attn_interface", _upstream),
)


# --- what it takes ---------------------------------------------------------------------------------------------------

API = "flash-attention hopper/flash_api.cpp"
LOADS = "flash-attention hopper/paged_kv.h"

LIMITS: Support = (
    Limit(Device, "capability", OneOf((9, 0)), ((8, 0), (8, 9), (10, 0), (12, 0)), f"{API}: q_v is for Hopper only"),
    Limit(Problem, "cache_format", OneOf("bf16", "fp16"), ("fp8", "fp8_ds_mla"), f"{API}: q_v is for fp16 and bf16"),
    Limit(Problem, "q_dtype", OneOf("bfloat16", "float16"), ("float32",), API),
    one_dtype(f"{API}: query and key must have the same dtype"),
    Limit(Problem, "kv_lora_rank", OneOf(512), (256, 448), f"{API}: v of 256 to 512; a run at 512"),
    Limit(Problem, "qk_rope_head_dim", OneOf(64), (0, 128), f"{API}: q_v wants a head of at most 64"),
    Limit(Problem, "page_size", Range(1, tested=(64, 1, 16, 32, 128)), (), LOADS),
    Limit(Problem, "alignment", OneOf(16), (8,), f"{LOADS}: 16 bytes a load"),
    Limit(Problem, "attn_sink", OneOf(False), (True,), f"{API}: no s_aux where k and v differ in width"),
)


# --- how it is called ------------------------------------------------------------------------------------------------


def _num_splits(problem: Problem, *, rows: int, requests: int, keys: int) -> int:
    """The most splits of a request's keys; 0 leaves that to the library, which bounds it by capacity and never by lengths.

    How many of them a step uses is decided on the device, from its lengths.

    Args:
        rows: query rows times heads, each with a partial output for every split.
        keys: the capacity of a request.
    """
    tiles = -(-keys // TILE)
    # Up to four tiles are never split: num_splits_heuristic in hopper/heuristics.h.
    if problem.batch_invariant or requests > MOST_SPLIT_BATCH or tiles <= 4:
        return 1
    fitting = PARTIAL_BYTES // (rows * (problem.kv_lora_rank + 1) * 4)
    return 0 if fitting >= MOST_SPLITS else max(1, min(fitting, tiles))


class DenseKernel(Kernel):
    def __init__(self, step: Step, library: Library) -> None:
        problem = step.problem
        assert step.seq_lens is not None
        capacity = max(1, step.max_seq_len)
        self._splits = _num_splits(
            problem, rows=step.batch * step.q_len * step.heads, requests=step.batch, keys=capacity
        )
        self._needs_lse = problem.needs_lse
        values: dict[str, Any] = {
            "cu_seqlens_q": step.cu_q_lens if problem.ragged else None,
            "seqused_k": step.seq_lens,
            "max_seqlen_q": step.q_len,
            "max_seqlen_k": capacity,
            "page_table": step.block_table,
            "softmax_scale": step.softmax_scale,
            "is_causal": problem.causal,
            "num_splits": self._splits,
            # of get_scheduler_metadata alone
            "batch_size": step.batch,
            "num_heads": step.heads,
            "num_heads_k": 1,
            "headdim": problem.qk_rope_head_dim,
            "headdim_v": problem.kv_lora_rank,
            "qkv_dtype": getattr(torch, problem.q_dtype),
            "page_size": problem.page_size,
        }
        self._metadata: Tensor | None = None
        self._make_metadata: Callable[[], Tensor] | None = None
        # Without splits a call's own preparation is one launch, and so is resetting metadata that it was given.
        if self._splits != 1 and library.get_scheduler_metadata is not None:
            self._make_metadata = partial(
                library.get_scheduler_metadata, *_placed(library.get_scheduler_metadata, values)
            )
            self._metadata = self._make_metadata()
        self._fwd = library.fwd
        self._rest = _placed(library.fwd, {**values, "scheduler_metadata": self._metadata}, after=len(LEADING))

    def update(self, lengths: HostLengths | None) -> None:
        if self._metadata is not None and self._make_metadata is not None:
            self._metadata.copy_(self._make_metadata())

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        decoded, lse, *_ = self._fwd(
            query.rope, cache.rope_heads, cache.latent_heads, None, None, query.latent, out, *self._rest
        )
        return decoded, lse if self._needs_lse else None

    def describe(self) -> dict[str, Any]:
        return {"kernel": "fwd, hdim 64, hdim_v 512", "most_splits": self._splits or "the library's, by capacity"}


class Fa3(Adapter):
    name = "fa3"
    providers = PROVIDERS
    support = (
        *LIMITS,
        Limit(Problem, "topk", OneOf(None), refuses=(64,), source="dense; fa3-sparse takes a topk"),
    )
    conventions = Conventions(
        query="split",
        lse_axes="BHQ",
        empty_rows="exact",
        unused_rows="read",
        writes_out=True,
        metadata="op",
        allocates=("lse", "float32 partial outputs, one a split"),
    )
    speed = Speed(
        memory=0.70,
        compute=0.57,
        overhead=12.0,
        partial=0.66,
        source="ci/bench-selection on an H200, its first set of problems",
    )

    def conventions_of(self, problem: Problem) -> Conventions:
        """TMA loads whole pages, where a NaN in an unused row meets a weight of 0; elsewhere such rows are filled with 0.

        Source: get_pagedkv_tma in hopper/flash_api.cpp, PagedKVManager::load_V in hopper/paged_kv.h.
        """
        loads_pages = problem.page_size % TILE == 0 and problem.q_len * problem.num_heads > TILE
        return self.conventions if loads_pages else replace(self.conventions, unused_rows="ignored")

    def plan(self, step: Step, library: Any) -> Kernel:
        return DenseKernel(step, library)


class SparseKernel(Kernel):
    """Each query row is a request of one query, whose block table is its slots as pages of one row."""

    def __init__(self, step: Step, library: Library) -> None:
        problem, rows = step.problem, step.batch * step.q_len
        topk = problem.topk
        assert topk is not None
        assert step.slots is not None
        self._lead = (step.batch, step.q_len)
        self._needs_lse = problem.needs_lse
        self._splits = _num_splits(problem, rows=rows * step.heads, requests=rows, keys=topk)
        self._fwd = library.fwd
        self._rest = _placed(
            library.fwd,
            {
                "seqused_k": step.slot_counts,
                "max_seqlen_q": 1,
                "max_seqlen_k": topk,
                "page_table": step.slots.flatten(0, 1),
                "softmax_scale": step.softmax_scale,
                "is_causal": False,
                "num_splits": self._splits,
            },
            after=len(LEADING),
        )

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rows = cache.by_row
        rope, latent, given = _by_row(query.rope), _by_row(query.latent), None if out is None else _by_row(out)
        decoded, lse, *_ = self._fwd(rope, rows.rope_heads, rows.latent_heads, None, None, latent, given, *self._rest)
        if self._lead[1] != 1:
            decoded = decoded.view(*self._lead, *decoded.shape[2:])
        return decoded, lse.squeeze(2) if self._needs_lse else None

    def describe(self) -> dict[str, Any]:
        return {
            "kernel": "fwd over pages of one row",
            "most_splits": self._splits or "the library's, by topk",
        }


def _by_row(x: Tensor) -> Tensor:
    """[B, q, H, X] as [B * q, 1, H, X]."""
    return x if x.shape[1] == 1 else x.flatten(0, 1).unsqueeze(1)


class Fa3Sparse(Adapter):
    name = "fa3-sparse"
    providers = PROVIDERS
    support = (
        *LIMITS,
        Limit(
            Problem,
            "topk",
            Range(1, tested=(192, 1, 63, 64, 65, 2048), unknown=False),
            refuses=(None,),
            source="sparse; fa3 takes no topk",
        ),
        Limit(Problem, "ragged", OneOf(False), refuses=(True,), source="slots are [B, q, topk]"),
        Limit(Problem, "packed_rows", OneOf(True), refuses=(False,), source="a slot is found by whole rows"),
        Limit(Problem, "whole_rows", OneOf(True), refuses=(False,), source="a slot is found by whole rows"),
    )
    conventions = Conventions(
        query="split",
        lse_axes="TH",
        empty_rows="exact",
        writes_out=True,
        slots="compact_slots",
        allocates=("lse", "float32 partial outputs, one a split"),
    )

    def plan(self, step: Step, library: Any) -> Kernel:
        return SparseKernel(step, library)


ADAPTERS = (Fa3(), Fa3Sparse())
