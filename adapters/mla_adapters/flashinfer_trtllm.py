"""FlashInfer's entry to trtllm-gen, the MLA decode kernels of Blackwell that NVIDIA publishes as binaries.

It could not be run where this was written: its arguments are checked up to the launch, against the package
itself (tests/test_flashinfer.py), and whether it serves is the canary's to say.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_backends.adapter import Adapter, Kernel, Provider, Step, takes_arguments
from mla_backends.cache import PagedCache
from mla_backends.device import Device
from mla_backends.problem import Problem
from mla_backends.query import Query
from mla_backends.support import Conventions, Joint, Limit, OneOf, Range, Speed

TRTLLM = "flashinfer 0.7.4 mla/_batch_mla/_backends/trtllm_gen_backend.py"

QK_NOPE_HEAD_DIM = 128
"""DeepSeek's, which the entry asks for and no kernel reads once the query is absorbed."""


@dataclass(frozen=True)
class TrtllmGen:
    """The entry, and how many bytes of counters it needs."""

    decode: Callable[..., Any]
    counter_bytes: Callable[[int, int, int], int]


def _trtllm_gen(mla: Any) -> TrtllmGen:
    decode = mla.trtllm_batch_decode_with_kv_cache_mla
    takes_arguments(decode, "multi_ctas_kv_counter_buffer", "return_lse_base", "cum_seq_lens_q", "max_q_len", "backend")
    return TrtllmGen(decode, importlib.import_module("flashinfer.utils").get_trtllm_gen_multi_ctas_kv_counter_bytes)


class TrtllmGenKernel(Kernel):
    def __init__(self, step: Step, library: TrtllmGen) -> None:
        problem = step.problem
        self._decode = library.decode
        self._softmax_scale = step.softmax_scale
        self._needs_lse = problem.needs_lse
        self._bmm1_scale = torch.zeros(1, dtype=torch.float32, device=step.device)
        self._zero = torch.zeros(1, dtype=torch.float32, device=step.device)
        # Each kernel resets the counters that it used, so they are zeroed here and never again, and never shared: in the
        # workspace another library's kernel would leave its partial results in them, and the next launch would wait forever.
        counters = library.counter_bytes(step.batch, step.heads, step.sm_count)
        self._arguments: dict[str, Any] = {
            "workspace_buffer": step.workspace,
            "qk_nope_head_dim": QK_NOPE_HEAD_DIM,
            "kv_lora_rank": problem.kv_lora_rank,
            "qk_rope_head_dim": problem.qk_rope_head_dim,
            "block_tables": step.block_table,
            "seq_lens": step.seq_lens,
            "max_seq_len": max(1, step.max_seq_len),
            "bmm1_scale": step.softmax_scale,
            "bmm2_scale": 1.0,
            # Left to itself it chooses by timing, and on other devices downloads for 40 seconds before it refuses.
            "backend": "trtllm-gen",
            "multi_ctas_kv_counter_buffer": torch.zeros(counters, dtype=torch.uint8, device=step.device),
        }
        if problem.ragged:
            self._arguments.update(cum_seq_lens_q=step.cu_q_lens, max_q_len=step.q_len)
        if problem.needs_lse:
            self._arguments.update(return_lse=True, return_lse_base="basee")

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        arguments = self._arguments
        if query.scale is not None and cache.scale is not None:
            # one launch: softmax_scale * query scale * cache scale, on the device
            torch.addcmul(self._zero, query.scale, cache.scale, value=self._softmax_scale, out=self._bmm1_scale)
            arguments = {**arguments, "bmm1_scale": self._bmm1_scale, "bmm2_scale": cache.scale}
        given = self._decode(query=query.packed, kv_cache=cache.rows, out=out, **arguments)
        if not self._needs_lse:
            return given, None
        decoded, lse = given
        return decoded, lse

    def describe(self) -> dict[str, Any]:
        return {"kernel": "trtllm_batch_decode_with_kv_cache_mla, trtllm-gen"}


class FlashInferTrtllm(Adapter):
    name = "flashinfer-trtllm"
    providers = (Provider("flashinfer-python", "flashinfer.mla", _trtllm_gen),)
    support = (
        Limit(
            Device,
            "capability",
            OneOf((10, 0), (10, 3)),
            ((9, 0), (11, 0), (12, 0), (12, 1)),
            f"{TRTLLM}: SM100, SM103; its arguments are checked, it was not run",
        ),
        Limit(
            Problem, "cache_format", OneOf("bf16", "fp8"), ("fp16", "fp8_ds_mla"), f"{TRTLLM}: bfloat16 or e4m3 alike"
        ),
        Limit(Problem, "q_dtype", OneOf("bfloat16"), ("float16", "float32"), f"{TRTLLM}: out is bfloat16"),
        Limit(Problem, "kv_lora_rank", OneOf(512), (256, 448), f"{TRTLLM}: 512 + 64 or 256 + 64"),
        Limit(Problem, "qk_rope_head_dim", OneOf(64), (0, 32), f"{TRTLLM}: 512 + 64 or 256 + 64"),
        Limit(Problem, "page_size", OneOf(64, 32), (1, 16, 128), f"{TRTLLM}: block_size in (32, 64)"),
        Limit(Problem, "alignment", OneOf(16), (8,), "TMA"),
        Limit(Problem, "num_heads", Range(1, 128), (129,), f"{TRTLLM}: heads are a multiple of a block's"),
        Limit(Problem, "topk", OneOf(None), (64,), "dense"),
        Limit(Problem, "attn_sink", OneOf(False), (True,), "not checked on a device"),
        Limit(Problem, "batch_invariant", OneOf(False), (True,), "how it splits is not said"),
        Joint(
            "causal rows where there are several",
            reads=("causal", "q_len"),
            predicate=lambda p, _: p.causal or p.q_len <= 1,
            inside=({"causal": False}, {"q_len": 4}),
            outside=({"causal": False, "q_len": 2},),
            source=f"{TRTLLM}: multi-Q only with causal=True",
        ),
        Joint(
            "no lse of ragged rows",
            reads=("needs_lse", "ragged"),
            predicate=lambda p, _: not (p.needs_lse and p.ragged),
            inside=({"needs_lse": True}, {"ragged": True}),
            outside=({"needs_lse": True, "ragged": True},),
            source=f"{TRTLLM}: no return_lse/lse with cum_seq_lens_q",
        ),
    )
    conventions = Conventions(
        query="packed",
        # Powers of two divide by whatever a block takes; between 64 and 128 there is no kernel.
        heads=(8, 16, 32, 64, 128),
        lse_axes="TH",
        # What it does with a request of no keys is not said.
        empty_rows="undefined",
        writes_out=True,
        # 128 keys of a page table are fetched at once, of pages of 32 or 64.
        table_columns=4,
        allocates=("lse",),
    )

    speed = Speed(
        memory=0.8,
        compute=0.6,
        source="not measured: ranked before flashinfer-fa2, which leaves Blackwell's matrix units idle",
    )

    def conventions_of(self, problem: Problem) -> Conventions:
        """An e4m3 cache is read with an e4m3 query."""
        return (
            replace(self.conventions, query_dtype="float8_e4m3fn")
            if problem.cache_format == "fp8"
            else self.conventions
        )

    def workspace_bytes(self, problem: Problem, device: Device, *, max_batch: int, max_seq_len: int) -> int:
        """128 MiB, as its documentation has it."""
        return 128 << 20

    def plan(self, step: Step, library: Any) -> Kernel:
        return TrtllmGenKernel(step, library)


ADAPTERS = (FlashInferTrtllm(),)
