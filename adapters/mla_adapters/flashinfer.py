"""FlashInfer's planned wrapper with its two kernels, "fa3" on Hopper and "fa2" from Ampere on.

It plans on the host, from lengths there, and bakes them into a schedule on the device: so `update` plans, waiting for
nothing, and `run` launches what was planned.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_backends.adapter import Adapter, HostLengths, Kernel, Provider, Step, takes_arguments
from mla_backends.cache import PagedCache
from mla_backends.device import Device
from mla_backends.problem import Problem
from mla_backends.query import Query
from mla_backends.support import Conventions, Joint, Limit, OneOf, Range, Speed, Support, one_dtype

PACKAGE = "flashinfer 0.7.4"
FA = f"{PACKAGE} mla/_batch_mla/_backends/_fa_common.py"
PLANNER = f"{PACKAGE} include/flashinfer/attention/scheduler.cuh, MLAPlan"

TILE = 64
"""Query rows of a block. More than these in a request of average length, and two blocks share the work: PLANNER."""

MOST_WORK = 16384
"""Pieces of work that a plan has room for: PLANNER, max_total_num_works."""


@dataclass(frozen=True)
class Planned:
    """The wrapper, its metadata, and its codes of a mask."""

    wrapper: Any
    metadata: Any
    causal: int
    full: int


def _planned(mla: Any) -> Planned:
    mask = importlib.import_module("flashinfer.utils").MaskMode
    takes_arguments(mla.BatchMLAPagedAttentionWrapper.plan, "metadata", "lse_mode", "query_layout", "kv_cache_layout")
    return Planned(mla.BatchMLAPagedAttentionWrapper, mla.MLAPlanMetadata, mask.CAUSAL.value, mask.NON_CAUSAL.value)


class PlannedKernel(Kernel):
    def __init__(self, step: Step, library: Planned, backend: str) -> None:
        problem, table = step.problem, step.block_table
        assert table is not None
        assert step.workspace is not None
        self._step, self._table = step, table
        self._metadata = library.metadata
        self._is_causal = problem.causal and step.q_len > 1

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=step.device)

        self._kv_indptr, self._kv_indices = ints(step.batch + 1), ints(table.numel())
        # Page ids exist on the device alone, and the wrapper reads those that it is given on the host. It gets zeros of the
        # right count; the ids themselves are written over them where the kernel looks.
        self._placeholder = torch.zeros(table.numel(), dtype=torch.int32, pin_memory=step.device.type == "cuda")
        self._row_starts = torch.arange(step.batch, device=step.device) * table.shape[1]
        # Captured graphs keep the addresses of these, and of the plan that the wrapper makes in memory of its own.
        self._wrapper = library.wrapper(
            step.workspace,
            use_cuda_graph=True,
            qo_indptr=ints(step.batch + 1),
            kv_indptr=self._kv_indptr,
            kv_indices=self._kv_indices,
            kv_len_arr=ints(step.batch),
            backend=backend,
        )
        dtype = getattr(torch, problem.q_dtype)
        self._facts = {
            "num_heads": step.heads,
            "head_dim_ckv": problem.kv_lora_rank,
            "head_dim_kpe": problem.qk_rope_head_dim,
            "page_size": problem.page_size,
            "causal": self._is_causal,
            "sm_scale": step.softmax_scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "query_layout": "split",
            "kv_cache_layout": "split",
            "lse_mode": "basee" if problem.needs_lse else "none",
        }
        # Of a launch, what no layer changes: head and page size, a natural lse, the scales of e4m3 caches.
        mask = library.causal if self._is_causal else library.full
        self._tail = (mask, step.heads, problem.page_size, step.softmax_scale, True, 1.0, 1.0, None)
        self._launch: Callable[..., Any] | None = None
        self._plan: tuple[Any, ...] = ()

    def update(self, lengths: HostLengths | None) -> None:
        """Plan on the host. What can fail comes first and leaves the last plan as it was; nothing waits for the device."""
        assert lengths is not None
        pages = (lengths.seq_lens + self._step.problem.page_size - 1) // self._step.problem.page_size
        kv_indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
        used = int(kv_indptr[-1])
        self._wrapper.plan(
            metadata=self._metadata.csr(
                qo_indptr=lengths.cu_q_lens,
                kv_indptr=kv_indptr,
                kv_indices=self._placeholder[:used],
                kv_len_arr=lengths.seq_lens,
            ),
            **self._facts,
        )
        self._list_pages(used)
        # The wrapper's own `run` checks at each layer what the plan has checked already, at several times the launch's cost.
        wrapper = self._wrapper
        self._launch = wrapper._cached_module.run
        self._plan = (self._step.workspace, wrapper._int_workspace_buffer, wrapper._plan_info)

    def _list_pages(self, used: int) -> None:
        """The pages in use, request by request, from the table into what the kernel reads."""
        if not used:
            return
        starts = self._row_starts - self._kv_indptr[:-1]
        places = torch.repeat_interleave(starts, self._kv_indptr.diff(), output_size=used)
        places += torch.arange(used, device=self._step.device)
        torch.index_select(self._table.view(-1), 0, places, out=self._kv_indices[:used])

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        step, problem, launch = self._step, self._step.problem, self._launch
        assert launch is not None
        latent, rope = query.latent, query.rope
        if out is None:
            out = torch.empty((*latent.shape[:-1], problem.kv_lora_rank), dtype=latent.dtype, device=step.device)
        into = out
        if not problem.ragged:
            latent, rope, into = latent.flatten(0, 1), rope.flatten(0, 1), out.flatten(0, 1)
        lse = torch.empty(latent.shape[:2], dtype=torch.float32, device=step.device) if problem.needs_lse else None
        launch(
            *self._plan,
            latent,
            rope,
            cache.latent,
            cache.rope,
            self._kv_indices,
            into,
            lse,
            *self._tail,
        )
        return out, lse

    def describe(self) -> dict[str, Any]:
        return {"kernel": f"BatchMLAPagedAttentionWrapper, {self._wrapper._backend}"}


def _rows(problem: Problem) -> int:
    """Query rows of the longest request, with the heads that several causal rows are padded to."""
    return problem.q_len * (1 << (problem.num_heads - 1).bit_length() if problem.q_len > 1 else problem.num_heads)


def _work(problem: Problem, device: Device) -> int:
    """The most pieces of work that a step can be cut into: a tile each, and as many splits as there are multiprocessors."""
    rows = _rows(problem)
    tile = TILE if rows <= TILE else 2 * TILE
    return (problem.batch or 1) * -(-rows // tile) + device.sm_count


PLANNED_LIMITS: Support = (
    Limit(
        Problem, "cache_format", OneOf("bf16", "fp16"), ("fp8", "fp8_ds_mla"), f"{FA}: an e4m3 cache wants a host scale"
    ),
    Limit(Problem, "q_dtype", OneOf("bfloat16", "float16"), ("float32",), FA),
    one_dtype(f"{FA}: non-FP8 KV dtype must match query dtype"),
    Limit(Problem, "kv_lora_rank", OneOf(512), (256, 448), f"{FA}: a multiple of 128; a run at 512"),
    Limit(Problem, "qk_rope_head_dim", OneOf(64), (0, 32), f"{FA}: a multiple of 64; a run at 64"),
    Limit(Problem, "page_size", Range(1, tested=(64, 1, 16, 32, 128)), (), f"{PACKAGE} attention/mla.cuh"),
    Limit(Problem, "alignment", OneOf(16), (8,), f"{PACKAGE} attention/mla.cuh: load_128b_async"),
    Limit(Problem, "num_heads", Range(1, 128), (129,), f"{FA}: causal tiles hold whole tokens of up to 128 heads"),
    Limit(
        Problem, "q_len", Range(0, 64, tested=(1, 2, 4)), (65,), "attention/mla_hopper.cuh: kv_len - q_len is unsigned"
    ),
    Limit(Problem, "topk", OneOf(None), (64,), "its plan is made of lengths on the host, before slots are selected"),
    Limit(Problem, "attn_sink", OneOf(False), (True,), f"{FA}: sinks are not supported with an fa2/fa3 backend"),
    Limit(Problem, "batch_invariant", OneOf(False), (True,), f"{PLANNER}: splits depend on the whole batch"),
    Joint(
        f"ragged rows of at most {TILE} heads in all, as the launch grid of a captured graph would change with their average",
        reads=("ragged", "q_len", "num_heads"),
        predicate=lambda p, _: not p.ragged or _rows(p) <= TILE,
        inside=({"ragged": True, "q_len": 4, "num_heads": 16},),
        outside=({"ragged": True, "q_len": 5, "num_heads": 12}, {"ragged": True, "num_heads": 128}),
        source=f"{PLANNER}: cluster_size",
    ),
    Joint(
        f"at most {MOST_WORK} pieces of work",
        reads=("batch", "q_len", "num_heads", "device.sm_count"),
        predicate=lambda p, d: _work(p, d) <= MOST_WORK,
        inside=({"batch": 16000, "num_heads": 16}, {"batch": 4000, "q_len": 4, "num_heads": 128}),
        outside=({"batch": 16384, "num_heads": 16}, {"batch": 8192, "q_len": 4, "num_heads": 128}),
        source=f"{PLANNER}: max_total_num_works",
        cure="smaller batches",
    ),
)


class PlannedAdapter(Adapter):
    """What the wrapper's two kernels have in common."""

    backend: ClassVar[str]
    providers = (Provider("flashinfer-python", "flashinfer.mla", _planned),)
    conventions = Conventions(
        query="split",
        lse_axes="TH",
        empty_rows="exact",
        writes_out=True,
        metadata="host",
        allocates=("8 MiB for each plan's schedule", "out and lse, by this adapter"),
    )

    def conventions_of(self, problem: Problem) -> Conventions:
        """Several causal rows of a request: a tile must end between tokens, or the kernel leaves a key out.

        Source: _validate_fa_causal_tile_bound, which raises for lengths where it would.
        """
        if problem.q_len == 1 or not problem.causal:
            return self.conventions
        return replace(self.conventions, heads=(1, 2, 4, 8, 16, 32, 64, 128))

    def workspace_bytes(self, problem: Problem, device: Device, *, max_batch: int, max_seq_len: int) -> int:
        """Partial outputs and their lse, two tiles for every multiprocessor; FlashInfer's usual 128 MiB where they are unknown.

        Source: preflight_plan_from_wrapper in _fa_common.py.
        """
        if not device.sm_count:
            return 128 << 20
        return 2 * device.sm_count * TILE * (2 * problem.kv_lora_rank + 4) + 16

    def plan(self, step: Step, library: Any) -> Kernel:
        return PlannedKernel(step, library, self.backend)


class FlashInfer(PlannedAdapter):
    name = "flashinfer"
    backend = "fa3"
    support = (
        Limit(Device, "capability", OneOf((9, 0)), ((8, 0), (8, 9), (10, 0), (12, 0)), f"{FA}: fa3 MLA requires SM90"),
        *PLANNED_LIMITS,
    )
    # Two thirds of the overhead are the host's, which plans each step anew.
    speed = Speed(
        memory=0.63,
        compute=0.52,
        overhead=39.4,
        partial=1.1,
        source="ci/bench-selection on an H200, its first set of problems",
    )


class FlashInferFa2(PlannedAdapter):
    name = "flashinfer-fa2"
    backend = "fa2"
    support = (
        Limit(
            Device,
            "capability",
            OneOf((9, 0), (8, 0), (8, 6), (8, 7), (8, 9), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)),
            ((7, 5), (10, 1)),
            f"{FA}: SM80 or newer with 92672 bytes of shared memory; run on sm90 alone",
        ),
        *PLANNED_LIMITS,
    )
    speed = Speed(
        memory=0.35,
        compute=0.25,
        overhead=40.4,
        partial=1.1,
        source="ci/bench-selection on an H200, its first set of problems",
    )

    def conventions_of(self, problem: Problem) -> Conventions:
        """It sums the weights after rounding them to the query's dtype: bfloat16 has each off by 2**-9 of itself at most.

        Source: compute_mla_qk's m16k16_rowsum_f16f16f32, mla.cuh.
        """
        conventions = super().conventions_of(problem)
        return replace(conventions, lse_precision=2**-9) if problem.q_dtype == "bfloat16" else conventions


ADAPTERS = (FlashInfer(), FlashInferFa2())
