"""One step's plan, shared by all layers: it owns the buffers, brings queries into the kernel's form, and results into ours.

What a kernel wants and gives comes from its adapter's `Conventions`; nothing here names a kernel
library. `run` allocates nothing of its own, waits for nothing, and does nothing that grows with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mla_backends import ops
from mla_backends.absorb import Query
from mla_backends.adapter import Adapter, Kernel, Step
from mla_backends.buffers import Buffers, StepInput
from mla_backends.cache import PagedCache
from mla_backends.catalogue import Serving
from mla_backends.device import Device
from mla_backends.errors import InvalidInput
from mla_backends.problem import Problem
from mla_backends.result import Decoded

__all__ = ["DecodePlan", "Recipe", "cache_facts"]


def cache_facts(cache: PagedCache) -> dict[str, Any]:
    """The fields of `Problem` that a cache decides."""
    return {
        "cache_format": cache.format,
        "page_size": cache.page_size,
        "page_stride": cache.page_stride_rows,
        "packed_rows": cache.packed_rows,
        "whole_rows": cache.pages_start_on_rows,
        "alignment": cache.alignment,
        "kv_lora_rank": cache.kv_lora_rank,
        "qk_rope_head_dim": cache.qk_rope_head_dim,
    }


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything that a plan is made from, but for its buffers.

    Args:
        adapter, serving: what was chosen, and who provides it.
        problem, device: the facts that it was chosen by.
        where: the torch device of all tensors.
        num_pages: of the cache.
        softmax_scale: factor on the logits.
        q_dtype: of queries and of out.
        max_seq_len: keys, the capacity of a row.
        attn_sink: [H] float32 or None.
        workspace: uint8 or None.
        why: what decided the choice, and what the canary said, for `describe`.
    """

    adapter: Adapter
    serving: Serving
    problem: Problem
    device: Device
    where: torch.device
    num_pages: int
    softmax_scale: float
    q_dtype: torch.dtype
    max_seq_len: int
    attn_sink: Tensor | None
    workspace: Tensor | None
    why: dict[str, Any]


class DecodePlan:
    """One step's plan, shared by all layers. It owns its buffers; one stream at a time.

    Made by `Backend.plan`. `run` takes any number of layers; `update` brings the next step into the same
    buffers, so that captured graphs stay valid.

    Attributes:
        problem: the facts that the adapter was chosen by.
        adapter: its name.
        update_mode: "host": `update` plans on the host and cannot be captured; else "device".
        block_table: [B, W] int32, the plan's own, None when sparse.
        seq_lens: [B] int32, the plan's own, None when sparse. An engine may write into both, then `refresh()`.
    """

    problem: Problem
    adapter: str
    update_mode: Literal["device", "host"]
    block_table: Tensor | None
    seq_lens: Tensor | None

    def __init__(self, recipe: Recipe, buffers: Buffers) -> None:
        adapter, problem = recipe.adapter, recipe.problem
        self._recipe = recipe
        self._buffers = buffers
        self._conventions = adapter.conventions
        self._is_sparse = problem.topk is not None
        self.problem = problem
        self.adapter = adapter.name
        self.update_mode = "host" if self._conventions.metadata == "host" else "device"
        self.block_table = None if self._is_sparse else buffers.block_table
        self.seq_lens = None if self._is_sparse else buffers.seq_lens
        self._heads = self._conventions.padded(problem.num_heads)
        self._lead = torch.Size((buffers.batch, buffers.q_len))
        self._views: dict[int, DecodePlan] = {}
        self._accepted: set[Any] = set()
        self._last_query: Query | None = None
        self._kernel_query: Query | None = None
        self._bring: Callable[[], None] | None = None
        # Nothing is launched for no requests or no rows, and kernel libraries don't take either.
        self._is_empty = buffers.batch == 0 or buffers.q_len == 0
        self._kernel: Kernel | None = None if self._is_empty else adapter.plan(self._step(), recipe.serving.library)

    @classmethod
    def start(cls, recipe: Recipe, *, batch: int, q_len: int, step: StepInput) -> DecodePlan:
        """A plan with its first step in it.

        Raises:
            InvalidInput: for a step that does not fit.
        """
        buffers = Buffers.allocate(
            batch,
            max_seq_len=recipe.max_seq_len,
            page_size=recipe.problem.page_size,
            num_pages=recipe.num_pages,
            q_len=q_len,
            ragged=recipe.problem.ragged,
            clamped=recipe.adapter.conventions.empty_rows == "undefined",
            columns=recipe.adapter.conventions.table_columns,
            device=recipe.where,
        )
        buffers.check(step)
        buffers.fill(step)
        plan = cls(recipe, buffers)
        plan._replan()
        return plan

    def _step(self) -> Step:
        recipe, buffers = self._recipe, self._buffers
        sink = recipe.attn_sink
        if sink is not None and self._heads > len(sink):
            # A padded head's result is thrown away; -inf leaves it as it would be without a sink.
            sink = torch.nn.functional.pad(sink, (0, self._heads - len(sink)), value=float("-inf"))
        return Step(
            problem=recipe.problem,
            device=recipe.where,
            sm_count=recipe.device.sm_count,
            heads=self._heads,
            batch=buffers.batch,
            block_table=None if self._is_sparse else buffers.kernel_table,
            seq_lens=None if self._is_sparse else buffers.kernel_lens,
            cu_q_lens=buffers.cu_q_lens,
            q_len=buffers.q_len,
            max_seq_len=recipe.max_seq_len,
            num_pages=recipe.num_pages,
            softmax_scale=recipe.softmax_scale,
            attn_sink=sink,
            workspace=recipe.workspace,
        )

    # --- the step -----------------------------------------------------------------------------------------------------

    def update(
        self,
        block_table: Tensor | None = None,
        seq_lens: Tensor | None = None,
        *,
        seq_lens_cpu: Tensor | None = None,
        max_seq_len: int | None = None,
        cu_q_lens: Tensor | None = None,
    ) -> None:
        """The next step, in the same buffers: captured graphs stay valid.

        Every view made by `at` is planned with it. Waits for the device only where `update_mode` is "host" and
        `seq_lens_cpu` is not given.

        Args:
            block_table: [b, w] page ids, b up to the plan's batch; None keeps the last.
            seq_lens: [b] keys per request with the new tokens. On a GPU, lengths outside 0 to the room of the table
                are held inside it; on the host they are refused.
            seq_lens_cpu: [b], the same lengths on the host; enough without `seq_lens`.
            max_seq_len: the longest request of this step, where the caller knows it; at most the plan's.
            cu_q_lens: [b + 1], ragged plans only.

        Raises:
            InvalidInput: before anything is changed.
        """
        if max_seq_len is not None and max_seq_len > self._recipe.max_seq_len:
            raise InvalidInput(f"max_seq_len is {max_seq_len}, this plan's is {self._recipe.max_seq_len}; plan with a larger one")
        step = StepInput(block_table, seq_lens, seq_lens_cpu, cu_q_lens)
        if self._is_sparse and step.live is not None:
            raise InvalidInput("this plan is sparse: it has no block table and no lengths, pass indices to run")
        self._buffers.check(step)
        if self.update_mode == "device":
            self._buffers.fill(step)
            self._replan()
            return
        with self._buffers.restored_on_error():
            self._buffers.fill(step)
            self._replan()

    def refresh(self) -> None:
        """Recompute kernel metadata from the plan's own buffers, on the device; can be captured.

        Raises:
            InvalidInput: where `update_mode` is "host".
        """
        if self.update_mode == "host":
            raise InvalidInput(f"{self.adapter} plans on the host, so refresh cannot serve it; call update(seq_lens_cpu=...)")
        self._buffers.clamp()
        self._replan()

    def _replan(self) -> None:
        if self._kernel is None:
            return
        lengths = self._buffers.host_lengths() if self.update_mode == "host" else None
        with on(self._recipe.where):
            self._kernel.update(lengths)
        for view in self._views.values():
            view._buffers.follow(self._buffers)
            view._replan()

    def at(self, batch: int) -> DecodePlan:
        """A view for a smaller batch over the same buffers, for another captured graph size.

        The same view each time. `update` on this plan plans all its views; `update` on a view plans the view alone.

        Raises:
            InvalidInput: for a batch above this plan's, or below 1.
        """
        if batch == self._buffers.batch:
            return self
        if not 1 <= batch < self._buffers.batch:
            raise InvalidInput(f"batch is {batch}, it takes 1 to {self._buffers.batch}, this plan's")
        if batch not in self._views:
            recipe = replace(self._recipe, problem=replace(self.problem, batch=batch))
            view = DecodePlan(recipe, self._buffers.first(batch))
            view._replan()
            self._views[batch] = view
        return self._views[batch]

    # --- the layer ----------------------------------------------------------------------------------------------------

    def new_query(self) -> Query:
        """A query buffer as the kernel wants it: padded heads zeroed once, the right dtype.

        Returns:
            A packed Query [B, H', D], [B, q_len, H', D] for q_len above 1, or [B * max_q_len, H', D] when ragged, with H'
            the heads that the kernel runs.
        """
        problem, buffers = self.problem, self._buffers
        lead = [buffers.batch] if buffers.q_len == 1 else [buffers.batch, buffers.q_len]
        if problem.ragged:
            lead = [buffers.batch * buffers.q_len]
        packed = torch.zeros(*lead, self._heads, problem.row_width, dtype=self._recipe.q_dtype, device=self._recipe.where)
        return Query.from_packed(packed, problem.kv_lora_rank)

    def run(
        self,
        query: Query,
        cache: PagedCache,
        *,
        indices: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Decoded:
        """Decode one layer on the current stream.

        Args:
            query: from `new_query`, or any Query of q_dtype with H or the padded heads; padded and packed here
                where the kernel wants that.
            cache: the layer; the layout that the plan was made for.
            indices: sparse plans: [B, (q,) topk] int32 slots of this layer; -1 or any slot outside the cache is none.
            out: [B, (q,) H, L] of q_dtype to write into.
            lse: [B, (q,) H] float32 to write into; only where the plan was made with return_lse.

        Raises:
            InvalidInput: where query, cache, indices or out do not match the plan.
        """
        if cache.facts not in self._accepted:
            self._accept_cache(cache)
        if query is not self._last_query:
            self._admit(query)
        kernel, kernel_query = self._kernel, self._kernel_query
        if kernel is None or kernel_query is None or kernel_query.latent.shape[0] == 0:
            return self._empty(query, out, lse)
        if self._bring is not None:
            self._bring()
        if (indices is None) == self._is_sparse:
            raise InvalidInput("a sparse plan takes indices, a dense one none" if self._is_sparse else "this plan is dense, it takes no indices; plan with topk")
        given = out
        if given is not None:
            self._check_out(query, given)
        direct = given if given is not None and self._conventions.writes_out and self._heads == self.problem.num_heads else None
        if direct is not None and direct.ndim < kernel_query.latent.ndim:
            direct = direct.unsqueeze(1)
        with on(self._recipe.where):
            raw, raw_lse = kernel.run(kernel_query, cache, indices, direct)
        return self._finish(query, raw, raw_lse, given, lse, written=direct is not None)

    def _accept_cache(self, cache: PagedCache) -> None:
        """Admit a layer whose layout the adapter takes; remembered by its facts."""
        if not isinstance(cache, PagedCache):
            raise InvalidInput(f"cache is a {type(cache).__name__}, it takes a PagedCache; a UnifiedCache has one at .layer(i)")
        problem, recipe = self.problem, self._recipe
        for name in ("format", "page_size", "kv_lora_rank", "qk_rope_head_dim"):
            planned = getattr(problem, "cache_format" if name == "format" else name)
            if getattr(cache, name) != planned:
                raise InvalidInput(f"the cache's {name} is {getattr(cache, name)}, this plan was made for {planned}")
        if cache.device != recipe.where:
            raise InvalidInput(f"the cache is on {cache.device}, this plan's tensors are on {recipe.where}")
        if cache.num_pages < recipe.num_pages:
            raise InvalidInput(f"the cache has {cache.num_pages} pages, this plan was made for {recipe.num_pages}")
        refusals = recipe.adapter.refusals(replace(problem, **cache_facts(cache)), recipe.device, forced=True)
        if refusals:
            raise InvalidInput(f"{self.adapter} does not take this cache: " + "; ".join(map(str, refusals)))
        self._accepted.add(cache.facts)

    def _admit(self, query: Query) -> None:
        """Check a query and settle how it is brought into the kernel's form; remembered until another one comes."""
        if not isinstance(query, Query):
            raise InvalidInput(f"query is a {type(query).__name__}, it takes a Query; make one with Query.from_parts or from_packed")
        self._check_query(query)
        batched = query if self.problem.ragged else query.with_leading(self._lead)
        kernel_query, bring = batched, None
        if query.num_heads != self._heads or (self._conventions.query == "packed" and not query.is_packed):
            kernel_query, bring = self._staged(batched)
        self._last_query, self._kernel_query, self._bring = query, kernel_query, bring

    def _staged(self, query: Query) -> tuple[Query, Callable[[], None]]:
        """A buffer of the kernel's own heads and packing, and the copy that fills it from `query` at each run."""
        lead = query.latent.shape[:-2]
        width = query.latent.shape[-1]
        packed = query.latent.new_zeros(*lead, self._heads, width + query.rope.shape[-1])
        staged = Query.from_packed(packed, width)
        heads = min(query.num_heads, self._heads)
        target = packed.flatten(0, -3)[:, :heads]
        latent, rope = query.latent.flatten(0, -3), query.rope.flatten(0, -3)
        return staged, lambda: ops.concat_nope_rope(target, latent, rope)

    def _check_query(self, query: Query) -> None:
        problem, recipe, buffers = self.problem, self._recipe, self._buffers
        widths = (query.latent.shape[-1], query.rope.shape[-1])
        if widths != (problem.kv_lora_rank, problem.qk_rope_head_dim):
            raise InvalidInput(f"the query is {widths[0]} + {widths[1]} wide, the cache {problem.kv_lora_rank} + {problem.qk_rope_head_dim}")
        if query.num_heads not in (problem.num_heads, self._heads):
            raise InvalidInput(f"the query has {query.num_heads} heads, this plan has {problem.num_heads}")
        if query.dtype != recipe.q_dtype:
            raise InvalidInput(f"the query is {query.dtype}, this plan's q_dtype is {recipe.q_dtype}; plan with q_dtype={query.dtype}")
        if query.device != recipe.where:
            raise InvalidInput(f"the query is on {query.device}, this plan's tensors are on {recipe.where}")
        lead = tuple(query.latent.shape[:-2])
        if problem.ragged:
            if len(lead) != 1:
                raise InvalidInput(f"the query has shape {list(query.latent.shape)}, a ragged plan takes [T, H, L]")
            return
        wanted = (buffers.batch, buffers.q_len)
        if lead != wanted and not (lead == wanted[:1] and buffers.q_len == 1):
            raise InvalidInput(f"the query has shape {list(query.latent.shape)}, this plan takes [{wanted[0]}, {wanted[1]}, H, L]; with max_batch, pad it to {wanted[0]} rows")

    def _check_out(self, query: Query, out: Tensor) -> None:
        shape = (*query.latent.shape[:-2], self.problem.num_heads, self.problem.kv_lora_rank)
        if tuple(out.shape) != shape or out.dtype != self._recipe.q_dtype or out.device != self._recipe.where:
            raise InvalidInput(f"out is {list(out.shape)} {out.dtype} on {out.device}, it takes {list(shape)} {self._recipe.q_dtype} on {self._recipe.where}")

    # --- the kernel's conventions into ours ---------------------------------------------------------------------------

    def _finish(
        self, query: Query, raw: Tensor, raw_lse: Tensor | None, out: Tensor | None, lse: Tensor | None, *, written: bool
    ) -> Decoded:
        """Slice padded heads off, order the lse, and settle rows without keys: one launch, only where conventions differ."""
        conventions, problem = self._conventions, self.problem
        if self._heads != problem.num_heads:
            raw = raw[..., : problem.num_heads, :]
        ordered = None
        if problem.needs_lse:
            assert raw_lse is not None
            ordered = self._ordered(raw_lse)[..., : problem.num_heads]
        overwrite = conventions.empty_rows in ("unwritten", "undefined") or problem.ragged
        convert = ordered is not None and (conventions.lse_base == "2" or conventions.empty_rows != "exact" or problem.ragged)
        if overwrite or convert:
            into = torch.empty(ordered.shape, dtype=torch.float32, device=raw.device) if ordered is not None else None
            ops.finish_rows(
                raw if overwrite else None,
                into,
                ordered,
                None if self._is_sparse else self._buffers.seq_lens,
                q_len=self._buffers.q_len,
                causal=problem.causal,
                cu_q_lens=self._buffers.cu_q_lens if problem.ragged else None,
                base2=conventions.lse_base == "2",
                overwrite_out=overwrite,
            )
            ordered = into
        if query.latent.ndim < raw.ndim:
            raw = raw.squeeze(1)
            ordered = None if ordered is None else ordered.squeeze(1)
        if out is not None and not written:
            out.copy_(raw)
        if lse is not None:
            if ordered is None or lse.shape != ordered.shape:
                raise InvalidInput("lse is given, but this plan was made without return_lse" if ordered is None else f"lse has shape {list(lse.shape)}, it takes {list(ordered.shape)}")
            ordered = lse.copy_(ordered)
        return Decoded(raw if out is None else out, ordered)

    def _ordered(self, lse: Tensor) -> Tensor:
        """A view of the kernel's lse with our axes, [B, q, H] or [T, H]."""
        axes = self._conventions.lse_axes
        if axes == "BHQ":
            return lse.transpose(1, 2)
        if axes in ("TH", "HT"):
            by_token = lse if axes == "TH" else lse.transpose(0, 1)
            return by_token if self.problem.ragged else by_token.unflatten(0, (self._buffers.batch, self._buffers.q_len))
        return lse

    def _empty(self, query: Query, out: Tensor | None, lse: Tensor | None) -> Decoded:
        """No rows: nothing is launched."""
        shape = (*query.latent.shape[:-2], self.problem.num_heads)
        if out is None:
            out = query.latent.new_empty(*shape, self.problem.kv_lora_rank)
        if lse is None and self.problem.needs_lse:
            lse = torch.empty(shape, dtype=torch.float32, device=out.device)
        return Decoded(out, lse)

    def describe(self) -> dict[str, Any]:
        """Adapter, provider and version, padding, workspace, update mode, what the library allocates, what decided the choice."""
        recipe = self._recipe
        provider = recipe.serving.provider
        return {
            "adapter": self.adapter,
            "provider": provider.package if provider else "torch",
            "version": provider.version if provider else torch.__version__,
            "heads": self.problem.num_heads,
            "padded_heads": self._heads,
            "batch": self._buffers.batch,
            "max_seq_len": recipe.max_seq_len,
            "workspace_bytes": 0 if recipe.workspace is None else recipe.workspace.numel(),
            "update_mode": self.update_mode,
            "waits_for_device": "update, unless seq_lens_cpu is given" if self.update_mode == "host" else "never",
            "metadata": self._conventions.metadata,
            "library_allocates": self._conventions.allocates,
            **recipe.why,
            **({} if self._kernel is None else self._kernel.describe()),
        }


class on:
    """The current CUDA device is the tensors' own while a kernel library is called; free where it is already."""

    __slots__ = ("_device", "_guard")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._guard: Any = None

    def __enter__(self) -> None:
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            self._guard = torch.cuda.device(self._device)
            self._guard.__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self._guard is not None:
            self._guard.__exit__(*exc)
