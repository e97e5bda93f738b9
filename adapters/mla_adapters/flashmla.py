"""FlashMLA: DeepSeek's decode kernels, dense over bf16 and fp16 (sm90), dense over fp8 (sm90), sparse over fp8_ds_mla.

Its C++ ends the process where one of its own asserts or a CUDA call fails, so everything that would get there is
a limit here. The raw ops are called, past the Python entry, with arguments that a plan prepares once.

A schedule, `tile_scheduler_metadata` and `num_splits`, follows from the lengths, and a stale one gives wrong numbers
without an error. `update` makes it and copies it to where captured graphs read it: by an op of its own where the
build has one, else (upstream and vLLM, dense bf16 and fp16) by the decode op itself, over one page that all
requests share. That is the right schedule by construction, and costs about the arithmetic of one more layer a step.
The sparse schedule knows no lengths: it is made once a plan.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_backends.absorb import Query
from mla_backends.adapter import Absent, Adapter, HostLengths, Kernel, Provider, Step, takes_arguments
from mla_backends.cache import PagedCache
from mla_backends.device import Device
from mla_backends.problem import Problem
from mla_backends.support import Conventions, Joint, Limit, OneOf, Range, Speed, one_dtype

# --- where the kernels come from --------------------------------------------------------------------------------------

DENSE = "q kcache head_size_v seqlens_k block_table softmax_scale is_causal tile_scheduler_metadata num_splits"
SPARSE = (
    "q kv indices topk_length attn_sink tile_scheduler_metadata num_splits "
    "extra_kv extra_indices extra_topk_length d_v sm_scale"
)
"""What the ops must take, in this order; they are called by position."""


@dataclass(frozen=True)
class Library:
    """What a provider has.

    Args:
        decode: the op.
        rest: None for each argument of `decode` past the known ones that has no default.
        schedule: (lengths [B], q_len, heads) -> metadata [parts, 8], splits [B + 1]; None: only `decode` makes them.
    """

    decode: Callable[..., Sequence[Any]]
    rest: tuple[None, ...] = ()
    schedule: Callable[[Tensor, int, int], Sequence[Tensor]] | None = None


def _op(namespace: str, name: str, arguments: str) -> Any:
    """The op's one overload.

    Raises:
        Absent: where the build lacks it, or it begins with other arguments.
    """
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise Absent(f"torch.ops.{namespace} has no {name}")
    found = [a.name for a in packet.default._schema.arguments]
    wanted = arguments.split()
    if found[: len(wanted)] != wanted:
        raise Absent(f"torch.ops.{namespace}.{name} takes ({', '.join(found)}), not ({', '.join(wanted)})")
    return packet.default


def _rest(op: Any, arguments: str) -> tuple[None, ...]:
    more = op._schema.arguments[len(arguments.split()) :]
    return tuple(None for argument in more if not argument.has_default_value())


def _dense(namespace: str) -> Library:
    decode = _op(namespace, "dense_decode_fwd", DENSE)
    rest = _rest(decode, DENSE)
    if not hasattr(getattr(torch.ops, namespace), "get_mla_decoding_metadata"):
        return Library(decode, rest)
    arguments = "seqlens_k num_q_tokens_per_head_k h_k h_q is_fp8_kvcache topk"
    plan = _op(namespace, "get_mla_decoding_metadata", arguments)
    return Library(decode, rest, lambda lens, q_len, heads: plan(lens, q_len * heads, 1, heads, False, None))


def _dense_fp8(namespace: str) -> Library:
    arguments = f"{DENSE} descale_q descale_k"
    decode = _op(namespace, "fwd_kvcache_mla_fp8", arguments)
    plan = _op(namespace, "get_mla_decoding_metadata_dense_fp8", "seqlens_k num_heads_per_head_k num_heads_k")
    return Library(decode, _rest(decode, arguments), lambda lens, q_len, heads: plan(lens, q_len * heads, 1))


def _sparse(namespace: str) -> Library:
    decode = _op(namespace, "sparse_decode_fwd", SPARSE)
    return Library(decode, _rest(decode, SPARSE))


def _sgl(load: Callable[[str], Library], package: Any) -> Library:
    """sgl's build: all three are kernels of its legacy half, which a wheel may lack."""
    takes_arguments(package.flash_mla_with_kvcache, "use_legacy")
    if not package.has_legacy():
        raise Absent("built without the legacy kernels: those of sm90, and of rows of 656 bytes")
    return load("flash_mla_legacy")


def _upstream(name: str, arguments: str, package: Any) -> Library:
    """DeepSeek's own build: functions of a pybind11 module, whose docstrings alone tell what they take."""
    if hasattr(package, "has_legacy"):
        raise Absent("the flash_mla installed here is sgl-flash-mla's")
    function = getattr(importlib.import_module("flash_mla.cuda"), name, None)
    if function is None:
        raise Absent(f"flash_mla.cuda has no {name}")
    found, wanted = len(re.findall(r"\barg\d+:", function.__doc__ or "")), len(arguments.split())
    if found != wanted:
        raise Absent(f"flash_mla.cuda.{name} takes {found} arguments, not {wanted}")
    return Library(function)


def _vllm(load: Callable[[str], Library], extension: Any) -> Library:
    return load(extension.__name__.rpartition(".")[2])


# --- what they take in common -----------------------------------------------------------------------------------------

DENSE_H, SPARSE_H = "FlashMLA csrc/api/dense_decode.h", "FlashMLA csrc/api/sparse_decode.h"
FP8_CPP, FP8_KERNEL = "vLLM's FlashMLA dense_fp8/pybind.cpp", "vLLM's FlashMLA dense_fp8/flash_fwd_mla_kernel.h"
HEADS = (16, 1, 8, 12, 20, 40, 64, 96, 128)

COMMON = (
    Limit(Problem, "kv_lora_rank", OneOf(512), (256,), f"{DENSE_H}:61, sparse_decode.h:236"),
    # The host check lets 512 + 0 by; the launcher then ends the process.
    Limit(Problem, "qk_rope_head_dim", OneOf(64), (0,), f"{DENSE_H}:60, splitkv_mla.cuh:1277"),
    # A TMA descriptor at 8 bytes cannot be made, which ends the process.
    Limit(Problem, "alignment", OneOf(16), (8,), "TMA descriptors and 16-byte loads; run on an H200"),
    Limit(Problem, "ragged", OneOf(False), (True,), f"{DENSE_H}:15, q is [B, q_len, H, 576]"),
    Limit(Problem, "batch_invariant", OneOf(False), (True,), "its schedule follows from all lengths"),
)  # fmt: skip
DENSE_COMMON = (
    Limit(Device, "capability", OneOf((9, 0)), ((8, 0), (10, 0), (12, 0)), f"{DENSE_H}:27, dense_fp8/pybind.cpp:30"),
    Limit(Problem, "page_size", OneOf(64), (32, 128), f"{DENSE_H}:67, dense_fp8/pybind.cpp:70"),
    Limit(Problem, "num_heads", Range(1, tested=HEADS), (), f"{DENSE_H}:78, in tiles of 64 rows"),
    Limit(Problem, "topk", OneOf(None), (2048,), f"{DENSE_H}, no indices"),
    Limit(Problem, "attn_sink", OneOf(False), (True,), f"{DENSE_H}, no attn_sink"),
)
# It keeps 5 * B + 1 ints in shared memory, of which there are 227 KiB; where that fails, the process ends.
SCHEDULED = Limit(Problem, "batch", Range(0, 11622, tested=(1, 128)), (11623,), "get_decoding_sched_meta.cu:110")

MOST_PARTS = 160
"""Splits that a step can have beyond one a request. Source: FlashMLA csrc/smxx/decode/combine/combine.cu:183."""


def _indexed(conventions: Conventions, source: str) -> Joint:
    """Partial results [B + parts, q_len, heads, 512] are indexed with 32 bits."""
    most = 2**31 // 512

    def fits(problem: Problem, device: Device) -> bool:
        rows = problem.q_len * conventions.padded(problem.num_heads)
        return problem.batch is None or (problem.batch + MOST_PARTS) * rows <= most

    return Joint(
        f"(batch + {MOST_PARTS}) * q_len * num_heads of at most {most}",
        reads=("batch", "q_len", "num_heads"),
        predicate=fits,
        inside=({"batch": 3936, "q_len": 8, "num_heads": 128},),
        outside=({"batch": 3937, "q_len": 8, "num_heads": 128},),
        source=source,
        cure="plan for fewer requests",
    )


def _kept(kept: Tensor | None, made: Tensor) -> Tensor:
    """`made`, at the address that captured graphs read."""
    if kept is None:
        # One made in inference mode could not be written outside of it, and a plan outlives the mode it was made in.
        with torch.inference_mode(False):
            kept = torch.empty_like(made)
    return kept.copy_(made)


ALLOCATES = ("out", "lse", "partial out and lse in float32")

# --- dense ------------------------------------------------------------------------------------------------------------


class DenseKernel(Kernel):
    name = "dense_decode_fwd"

    def __init__(self, step: Step, library: Library) -> None:
        assert step.block_table is not None
        assert step.seq_lens is not None
        self.step, self.library = step, library
        self.tiles: Tensor | None = None
        self.splits: Tensor | None = None
        self.decode, self.rest = library.decode, library.rest
        # head_size_v, seqlens_k, block_table, softmax_scale, is_causal
        self.facts = (
            step.problem.kv_lora_rank,
            step.seq_lens,
            step.block_table,
            step.softmax_scale,
            step.problem.causal,
        )
        if library.schedule is None:
            shape, dtype = (1, step.problem.page_size, 1, step.problem.row_width), getattr(torch, step.problem.q_dtype)
            self.page = torch.zeros(shape, dtype=dtype, device=step.device)
            self.page_0 = torch.zeros_like(step.block_table[:1]).expand(step.batch, -1)

    def update(self, lengths: HostLengths | None) -> None:
        step, schedule = self.step, self.library.schedule
        made = self._over_one_page() if schedule is None else schedule(self.facts[1], step.q_len, step.heads)
        self.tiles, self.splits = _kept(self.tiles, made[0]), _kept(self.splits, made[1])

    def _over_one_page(self) -> Sequence[Tensor]:
        step, (width, lens, _, scale, causal) = self.step, self.facts
        # The values of the query do not matter, so they are neither set nor kept.
        query = self.page.new_empty(step.batch, step.q_len, step.heads, step.problem.row_width)
        return self.decode(query, self.page, width, lens, self.page_0, scale, causal, None, None, *self.rest)[2:4]

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        made = self.decode(query.packed, cache.heads, *self.facts, self.tiles, self.splits, *self.rest)
        return made[0], made[1]

    def describe(self) -> dict[str, Any]:
        has_op = self.library.schedule is not None
        return {
            "kernel": self.name,
            "sm_parts": 0 if self.tiles is None else len(self.tiles),
            "schedule": "an op of its own" if has_op else "a decode over one page, once a step",
        }


class DenseFp8Kernel(DenseKernel):
    name = "fwd_kvcache_mla_fp8"

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        scales = (query.scale, cache.scale)
        made = self.decode(query.packed, cache.heads, *self.facts, self.tiles, self.splits, *scales, *self.rest)
        return made[0], made[1]


class FlashMLA(Adapter):
    name = "flashmla"
    providers = (
        Provider("sgl-flash-mla", "flash_mla", partial(_sgl, _dense)),
        Provider("flash-mla", "flash_mla", partial(_upstream, "dense_decode_fwd", DENSE)),
        Provider("vllm", "vllm._flashmla_C", partial(_vllm, _dense)),
    )
    conventions = Conventions(
        query="packed", lse_axes="BHQ", empty_rows="lse_inf", metadata="op", allocates=ALLOCATES
    )  # fmt: skip
    support = (
        *DENSE_COMMON,
        Limit(Problem, "cache_format", OneOf("bf16", "fp16"), ("fp32", "fp8"), f"{DENSE_H}:33"),
        Limit(Problem, "q_dtype", OneOf("bfloat16", "float16"), ("float32",), f"{DENSE_H}:33"),
        one_dtype(f"{DENSE_H}:35"),
        Limit(Problem, "q_len", Range(0, tested=(1, 2, 4)), (), f"{DENSE_H}:57"),
        SCHEDULED,
        _indexed(conventions, "FlashMLA csrc/sm90/decode/dense/splitkv_mla.cuh:1243, combine.cu:64"),
        *COMMON,
    )
    speed = Speed(
        memory=0.91,
        compute=0.70,
        overhead=12.7,
        split=0.13,
        source="ci/bench-selection on an H200, its first set of problems",
    )

    def plan(self, step: Step, library: Any) -> Kernel:
        return DenseKernel(step, library)


class FlashMLAFp8(Adapter):
    name = "flashmla-fp8"
    providers = (
        Provider("sgl-flash-mla", "flash_mla", partial(_sgl, _dense_fp8)),
        Provider("vllm", "vllm._flashmla_extension_C", partial(_vllm, _dense_fp8)),
    )
    conventions = Conventions(
        query="packed",
        query_dtype="float8_e4m3fn",
        lse_axes="BHQ",
        empty_rows="undefined",  # a length of 0 reads the table before its row, and the softmax is never started
        metadata="op",
        allocates=ALLOCATES,
    )
    support = (
        *DENSE_COMMON,
        Limit(Problem, "cache_format", OneOf("fp8"), ("bf16", "fp8_ds_mla"), f"{FP8_CPP}:33"),
        Limit(Problem, "q_dtype", OneOf("bfloat16"), ("float16",), f"{FP8_CPP}:177, out is bf16"),
        # A causal row 0 leaves out the last q_len - 1 keys, and two blocks are sure to hold the last 65.
        Limit(Problem, "q_len", Range(0, 66, tested=(1, 2, 4)), (67,), f"{FP8_KERNEL}:347, masks two blocks of 64"),
        Joint(
            "ceil(q_len * num_heads / 64) of at most sm_count",
            reads=("q_len", "num_heads", "device.sm_count"),
            predicate=lambda p, device: not device.sm_count or -(-p.q_len * p.num_heads // 64) <= device.sm_count,
            inside=({"q_len": 66, "num_heads": 128, "device.sm_count": 132},),
            outside=({"q_len": 66, "num_heads": 128, "device.sm_count": 131},),
            source=f"{FP8_CPP}:207, else there are 0 parts",
        ),
        # The schedule's own assert, which ends the process.
        Limit(Problem, "batch", Range(0, 4095, tested=(1, 128)), (4096,), "flash_fwd_mla_metadata.cu:74; run on H200"),
        _indexed(conventions, f"{FP8_KERNEL}:229 and 647"),
        *COMMON,
    )  # fmt: skip
    speed = Speed(
        memory=0.59, compute=0.82, source="H200, 128 requests of 4096 keys: 119 us at 16 heads, 225 us at 128"
    )  # fmt: skip

    def plan(self, step: Step, library: Any) -> Kernel:
        return DenseFp8Kernel(step, library)


# --- sparse -----------------------------------------------------------------------------------------------------------

BLACKWELL = ((10, 0), (10, 3))


class SparseKernel(Kernel):
    def __init__(self, step: Step, library: Library, topk: int) -> None:
        self.step, self.topk = step, topk
        self.decode, self.rest = library.decode, library.rest
        self.schedule: tuple[Tensor | None, Tensor | None] = (None, None)
        self.is_scheduled = False
        # extra_kv, extra_indices, extra_topk_length, d_v, sm_scale
        self.facts = (None, None, None, step.problem.kv_lora_rank, step.softmax_scale)

    def update(self, lengths: HostLengths | None) -> None:
        """The schedule of this batch, q_len, heads and topk: what a decode of no key, over one page, makes."""
        if self.is_scheduled:
            return
        step, lead = self.step, (self.step.batch, self.step.q_len)
        query = torch.zeros(*lead, step.heads, step.problem.row_width, dtype=torch.bfloat16, device=step.device)
        page = torch.zeros(1, step.problem.page_size, 1, 656, dtype=torch.uint8, device=step.device)
        none = torch.full((*lead, self.topk), -1, dtype=torch.int32, device=step.device)
        tiles, splits = self.decode(query, page, none, None, step.attn_sink, None, None, *self.facts, *self.rest)[2:4]
        # A build that never splits at this topk makes none.
        self.schedule = (None, None) if tiles is None else (_kept(None, tiles), _kept(None, splits))
        # What is made in a capture holds from the graph's replay on, so the next call makes it again.
        self.is_scheduled = step.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        sink = self.step.attn_sink
        made = self.decode(query.packed, cache.heads, indices, None, sink, *self.schedule, *self.facts, *self.rest)
        return made[0], made[1]

    def describe(self) -> dict[str, Any]:
        tiles = self.schedule[0]
        return {
            "kernel": "sparse_decode_fwd",
            "sm_parts": 0 if tiles is None else len(tiles),
            "padded_topk": self.topk,
            "schedule": "a decode of no key, once a plan",
        }


class FlashMLASparse(Adapter):
    name = "flashmla-sparse"
    providers = (
        Provider("sgl-flash-mla", "flash_mla", partial(_sgl, _sparse)),
        Provider("flash-mla", "flash_mla", partial(_upstream, "sparse_decode_fwd", SPARSE)),
        Provider("vllm", "vllm._flashmla_C", partial(_vllm, _sparse)),
    )
    conventions = Conventions(
        query="packed", heads=(64, 128), lse_axes="BHQ", empty_rows="lse_inf", topk_multiple=64, allocates=ALLOCATES
    )  # fmt: skip
    support = (
        Limit(Device, "capability", OneOf((9, 0), *BLACKWELL), ((8, 0), (11, 0), (12, 0)), f"{SPARSE_H}:363"),
        Limit(Problem, "cache_format", OneOf("fp8_ds_mla"), ("bf16", "fp8"), f"{SPARSE_H}:292"),
        Limit(Problem, "q_dtype", OneOf("bfloat16"), ("float16",), f"{SPARSE_H}:259"),
        Limit(Problem, "page_size", Range(1, tested=(64, 1, 16, 128)), (), f"{SPARSE_H}:299"),
        Limit(Problem, "packed_rows", OneOf(True), (False,), f"{SPARSE_H}:301"),
        Joint(
            "pages that start a whole number of rows apart, on sm100",
            reads=("whole_rows", "device.capability"),
            predicate=lambda p, device: p.whole_rows or device.capability not in BLACKWELL,
            inside=({"whole_rows": False}, {"device.capability": (10, 0)}),
            outside=({"whole_rows": False, "device.capability": (10, 3)},),
            source="FlashMLA csrc/sm100/decode/head64/kernel.cuh:912",
        ),
        Limit(Problem, "num_heads", Range(1, 128, tested=HEADS), (129,), f"{SPARSE_H}:333"),
        Limit(Problem, "q_len", Range(0, tested=(1, 2, 4)), (), f"{SPARSE_H}:232"),
        Limit(Problem, "topk", Range(1, tested=(192, 1, 63, 64, 65, 2048), unknown=False), (None,), f"{SPARSE_H}:237"),
        SCHEDULED,
        _indexed(conventions, "FlashMLA csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh:347, combine.cu:64"),
        Limit(Problem, "attn_sink", OneOf(False, True), (), f"{SPARSE_H}:308"),
        *COMMON,
    )
    # One figure, bound by arithmetic; reads are not known to be slower than that.
    speed = Speed(memory=0.51, compute=0.51, source="H200, 128 requests, topk 2048: 182 us at 128 heads")

    def plan(self, step: Step, library: Any) -> Kernel:
        multiple = self.conventions.topk_multiple
        return SparseKernel(step, library, -(-(step.problem.topk or 0) // multiple) * multiple)


ADAPTERS = (FlashMLA(), FlashMLAFp8(), FlashMLASparse())
