"""One step's plan, shared by all layers: it owns the buffers, brings queries into the kernel's form, and results into ours.

What a kernel wants and gives comes from its adapter's `Conventions`; nothing here names a kernel
library. `run` allocates nothing of its own, waits for nothing, and does nothing that grows with the batch.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from mla_backends.absorb import Query
from mla_backends.adapter import Kernel, Step
from mla_backends.buffers import Buffers
from mla_backends.cache import PagedCache
from mla_backends.errors import InvalidInput, whole_number
from mla_backends.graph_node import of_the_host
from mla_backends.intake import Intake
from mla_backends.outlet import Outlet
from mla_backends.plan_node import PlanNode
from mla_backends.problem import Problem
from mla_backends.recipe import Recipe
from mla_backends.result import Decoded
from mla_backends.selection import Selection
from mla_backends.steps import StepInput

__all__ = ["DecodePlan"]

_is_compiling = torch.compiler.is_compiling


class DecodePlan:
    """One step's plan, shared by all layers. It owns its buffers; one stream at a time.

    Made by `Backend.plan`. `run` takes any number of layers; `update` brings the next step into the same
    buffers, so that captured graphs stay valid.

    Attributes:
        problem: the facts that the adapter was chosen by.
        adapter: its name.
        quantizes_query: the kernel reads an e4m3 query.
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
        self._conventions = adapter.conventions_of(problem)
        self._is_sparse = problem.topk is not None
        self.problem = problem
        self.adapter = adapter.name
        self.quantizes_query = self._conventions.query_dtype == "float8_e4m3fn"
        self.update_mode = "host" if self._conventions.metadata == "host" else "device"
        self.block_table = None if self._is_sparse else buffers.block_table
        self.seq_lens = None if self._is_sparse else buffers.seq_lens
        self._heads = self._conventions.padded(problem.num_heads)
        self._views: dict[int, DecodePlan] = {}
        self._planned = -1
        """Which of the steps in the buffers the kernel is planned for."""
        # The facts of the last cache, one object for equal ones; nothing is it before the first.
        self._accepted: object = self
        self._is_cuda = recipe.where.type == "cuda"
        self._intake = Intake(
            problem, self._conventions, self._heads, recipe.q_dtype, recipe.where, buffers, recipe.q_scale
        )
        self._outlet = Outlet(
            problem, self._conventions, self._heads, recipe.q_dtype, recipe.where, buffers, recipe.empty_rows
        )
        self._selection = (
            Selection(
                problem,
                self._conventions,
                batch=buffers.batch,
                q_len=buffers.q_len,
                num_pages=recipe.num_pages,
                device=recipe.where,
            )
            if self._is_sparse
            else None
        )
        self._node = PlanNode(self, recipe, buffers, self._intake, self._selection)
        # Nothing is launched for no requests or no rows, and kernel libraries don't take either.
        self._is_empty = buffers.batch == 0 or buffers.q_len == 0
        self._kernel: Kernel | None = None if self._is_empty else adapter.plan(self._step(), recipe.serving.library)

    @classmethod
    def start(cls, recipe: Recipe, *, batch: int, q_len: int, step: StepInput) -> DecodePlan:
        """A plan with its first step in it.

        Raises:
            InvalidInput: for a step that does not fit.
        """
        # What is made in inference mode cannot be written outside of it, and a plan outlives the mode that it is made in.
        with torch.inference_mode(False):
            return cls._start(recipe, batch, q_len, step)

    @classmethod
    def _start(cls, recipe: Recipe, batch: int, q_len: int, step: StepInput) -> DecodePlan:
        conventions = recipe.adapter.conventions_of(recipe.problem)
        recipe.check_capture(step)
        buffers = Buffers.allocate(
            batch,
            max_seq_len=recipe.max_seq_len,
            page_size=recipe.problem.page_size,
            num_pages=recipe.num_pages,
            q_len=q_len,
            ragged=recipe.problem.ragged,
            clamped=conventions.empty_rows == "undefined",
            columns=conventions.table_columns,
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
            slots=None if self._selection is None else self._selection.kernel_table,
            slot_counts=None if self._selection is None else self._selection.kernel_counts,
        )

    # --- the step -----------------------------------------------------------------------------------------------------

    @of_the_host
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
            max_seq_len: the longest request of this step, where the caller knows it; at most the plan's, and at least the
                lengths that the host knows.
            cu_q_lens: [b + 1], ragged plans only.

        Raises:
            InvalidInput: before anything is changed.
        """
        if max_seq_len is not None:
            max_seq_len = whole_number("max_seq_len", max_seq_len, least=0)
        if max_seq_len is not None and max_seq_len > self._recipe.max_seq_len:
            raise InvalidInput(
                f"max_seq_len is {max_seq_len}, this plan's is {self._recipe.max_seq_len}; plan with a larger one"
            )
        step = StepInput(block_table, seq_lens, seq_lens_cpu, cu_q_lens, max_seq_len)
        if self._is_sparse and step.is_given:
            raise InvalidInput("this plan is sparse: it has no block table and no lengths, pass indices to run")
        self._buffers.check(step)
        self._recipe.check_capture(step)
        try:
            with self._buffers.restored_on_error():
                self._buffers.fill(step)
                self._replan()
        except BaseException:
            # The kernel, or a view before the one that failed, may have planned the step that was taken back.
            self._replan()
            raise

    def refresh(self) -> None:
        """Recompute kernel metadata from the plan's own buffers, on the device; can be captured.

        On a GPU, lengths outside 0 to max_seq_len are held inside it, in the buffer too.

        Raises:
            InvalidInput: where `update_mode` is "host"; on a CPU, for lengths and pages that `update` would refuse.
        """
        if self.update_mode == "host":
            raise InvalidInput(
                f"{self.adapter} plans on the host, so refresh cannot serve it; call update(plan.block_table, seq_lens_cpu=...)"
            )
        if _is_compiling():
            self._node.refresh()
            return
        self._buffers.rewritten()
        self._replan()

    def _replan(self) -> None:
        if self._kernel is not None:
            lengths = self._buffers.host_lengths() if self.update_mode == "host" else None
            with torch.cuda.device(self._recipe.where) if self._is_cuda else nullcontext():
                self._kernel.update(lengths)
        self._buffers.learn()
        self._planned = self._buffers.held.step
        for view in self._views.values():
            view._replan()

    def at(self, batch: int) -> DecodePlan:
        """A view for a smaller batch over the same buffers, for another captured graph size.

        The same view each time. `update` and `refresh` on this plan plan all its views; on a view they plan the view alone,
        which is all that its graph needs. The others refuse to run until they are updated or refreshed too; the rows past
        an updated view's are empty then.

        Raises:
            InvalidInput: for a batch above this plan's, or below 1.
        """
        batch = whole_number("batch", batch)
        if batch == self._buffers.batch:
            return self
        if batch > self._buffers.batch:
            raise InvalidInput(f"batch is {batch}, it takes 1 to {self._buffers.batch}, this plan's")
        if batch not in self._views:
            self._make_view(batch)
        return self._views[batch]

    @of_the_host
    def _make_view(self, batch: int) -> None:
        self._recipe.check_capture(StepInput())
        recipe = replace(self._recipe, problem=replace(self.problem, batch=batch))
        with torch.inference_mode(False):
            view = DecodePlan(recipe, self._buffers.first(batch))
            view._replan()
        self._views[batch] = view

    # --- the layer ----------------------------------------------------------------------------------------------------

    def new_query(self) -> Query:
        """A query buffer as the kernel wants it: padded heads zeroed once, the right dtype.

        Returns:
            A packed Query [B, H', D], [B, q_len, H', D] for q_len above 1, or [B * max_q_len, H', D] when ragged, with H'
            the heads that the kernel runs.
        """
        return self._intake.new_query()

    def select_slots(self, positions: Tensor, block_table: Tensor, seq_lens: Tensor | None = None) -> Selection:
        """DSA's request-local top-k positions of one layer, as this plan's kernel reads them: one launch, in the plan's own
        buffer, and `run` then launches nothing of its own for them.

        They serve any number of layers, until the next selection, or until `run` is given other slots.

        Args:
            positions: [B, (q,) topk] int32 or int64; none is one below 0, past the table, or at or past its request's length.
            block_table: [B, W] int32 or int64; a page outside the cache is none.
            seq_lens: [B] int32, keys a request; None: as many as the table holds.

        Returns:
            For `run(indices=)` of this plan alone, as it is in the kernel's own form; the same object each time.

        Raises:
            InvalidInput: for a dense plan, and for shapes, dtypes, devices or strides that do not fit.
        """
        if self._selection is None:
            raise InvalidInput("this plan is dense, there is nothing to select; plan with topk")
        if _is_compiling():
            self._node.select(self._selection, positions, block_table, seq_lens)
        else:
            self._selection.select(positions, block_table, seq_lens)
        return self._selection

    def run(
        self,
        query: Query,
        cache: PagedCache,
        *,
        indices: Tensor | Selection | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Decoded:
        """Decode one layer on the current stream.

        Args:
            query: from `new_query`, or any Query of q_dtype with H or the padded heads; padded and packed here
                where the kernel wants that.
            cache: the layer; the layout that the plan was made for.
            indices: sparse plans: [B, (q,) topk] int32 slots of this layer; -1 or any slot outside the cache is none,
                which takes a launch to see to. Or what `select_slots` returned, which takes none.
            out: [B, (q,) H, L] of q_dtype to write into.
            lse: [B, (q,) H] float32 to write into; only where the plan was made with return_lse.

        Raises:
            InvalidInput: where query, cache, indices or out do not match the plan.
        """
        if _is_compiling():
            return self._node.run(query, cache, indices, out, lse)
        if getattr(cache, "facts", None) is not self._accepted:
            self._recipe.check_cache(cache)
            self._accepted = cache.facts
        if (indices is None) == self._is_sparse:
            raise InvalidInput(
                "this plan is sparse, it takes indices"
                if self._is_sparse
                else "this plan is dense, it takes no indices; plan with topk"
            )
        if self._planned != self._buffers.held.step:
            raise InvalidInput(
                f"the last update or refresh was of a view of another batch than {self._buffers.batch}, which shares its "
                f"buffers; update this one, or the plan that both are views of"
            )
        kernel_query = self._intake.bring(query)
        kernel = self._kernel
        if lse is not None:
            self._outlet.check_lse(query, lse)
        target = self._outlet.target(query, out)
        selection, slots = self._selection, None
        if selection is not None and indices is not None:
            slots = selection.bring(indices, query, cache)
        if kernel is None or (self.problem.ragged and kernel_query.latent.shape[0] == 0):
            return self._outlet.nothing(query, out, lse)
        if self._is_cuda and torch.cuda.current_device() != self._recipe.where.index:
            with torch.cuda.device(self._recipe.where):
                raw, raw_lse = kernel.run(kernel_query, cache, slots, target)
                return self._outlet.finish(query, raw, raw_lse, out, lse, written=target is not None)
        raw, raw_lse = kernel.run(kernel_query, cache, slots, target)
        return self._outlet.finish(query, raw, raw_lse, out, lse, written=target is not None)

    @property
    def selected(self) -> Selection | None:
        """What `select_slots` returns; None for a dense plan."""
        return self._selection

    @property
    def _waits(self) -> str:
        if self.update_mode == "device":
            return "never"
        # Query offsets have no argument of the host.
        return "update" if self.problem.ragged else "update, unless seq_lens_cpu is given"

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
            "waits_for_device": self._waits,
            "metadata": self._conventions.metadata,
            "library_allocates": self._conventions.allocates,
            "lse_precision": self._conventions.lse_precision,
            "empty_rows": recipe.empty_rows,
            "adds_kernels": (*((self._conventions.slots,) if self._is_sparse else ()), *self._outlet.kernels),
            **recipe.why,
            **({} if self._kernel is None else self._kernel.describe()),
        }
