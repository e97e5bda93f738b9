"""One plan over several layers and steps: whatever a kernel keeps from one run to the next shows as a fault.

A single decode proves none of that. Every comparison here is of bits, with a fresh plan or with an earlier run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_backends.backend import Backend
from mla_backends.cache import PagedCache
from mla_backends.conditions import Condition
from mla_backends.formats import format_named
from mla_backends.plan import DecodePlan
from mla_backends.problem import Problem
from mla_backends.query import Query
from mla_backends.recipe import cache_facts
from mla_backends.result import Decoded
from mla_backends.trials import SOFTMAX_SCALE
from mla_backends.unified import UnifiedCache

__all__ = ["Endurance"]

STEPS = ((130, 1, 0, 65), (7, 200, 64, 0), (63, 66), (256, 129, 3, 1))
"""Keys of the live requests, step by step: longer, shorter, none, and requests that are gone."""

BATCH, MOST_KEYS = 4, 256


class Endurance:
    """A cache of two layers, all rows written, and a query; what `faults` runs over them.

    Args:
        condition: its heads, q_len, mask, format, page size, topk, sink and lse are used, and whether layers are of one slot.
        q_scale: of an e4m3 query, where the kernel reads one: a measured one is of the whole batch.
    """

    def __init__(self, backend: Backend, condition: Condition, *, q_scale: float | None) -> None:
        self._backend, self._condition, self._q_scale = backend, condition, q_scale
        self._device = backend.torch_device
        self._generator = torch.Generator().manual_seed(0)
        self._dtype: torch.dtype = getattr(torch, format_named(condition.cache_format).query_dtype)
        self._columns = -(-MOST_KEYS // condition.page_size)
        self._pages = BATCH * self._columns + 3
        self._layers = self._filled()
        lead = (BATCH,) if condition.q_len == 1 else (BATCH, condition.q_len)
        self._query = Query.from_packed(self._normal(*lead, condition.num_heads, 576))
        self._sink = self._normal(condition.num_heads).float() if condition.attn_sink else None

    def _normal(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * 0.3).to(self._dtype).to(self._device)

    def _filled(self) -> list[PagedCache]:
        c = self._condition
        pages, size, where = self._pages, c.page_size, self._device
        # What a layer's values are scaled by is its own.
        scales = (0.5, 2.0) if c.cache_format == "fp8" else (None, None)
        if c.layers == 1:
            layers = [PagedCache.allocate(pages, size, c.cache_format, where, kv_scale=scale) for scale in scales]
        else:
            slot = UnifiedCache.allocate(pages, 2, size, c.cache_format, where)
            layers = [slot.layer(i, kv_scale=scale) for i, scale in enumerate(scales)]
        for layer in layers:
            slots = torch.arange(layer.num_slots, device=self._device)
            layer.write(self._normal(len(slots), 512), self._normal(len(slots), 64), slots)
        return layers

    def problem(self) -> Problem:
        """The facts that its plans are chosen by; a view is of 2 requests."""
        c = self._condition
        return Problem(
            c.num_heads,
            batch=BATCH,
            q_len=c.q_len,
            causal=c.causal,
            q_dtype=str(self._dtype).removeprefix("torch."),
            topk=c.topk,
            needs_lse=c.return_lse,
            attn_sink=c.attn_sink,
            batch_invariant=c.batch_invariant,
            max_seq_len=None if c.topk is not None else MOST_KEYS,
            measured_q_scale=self._q_scale is None,
            **cache_facts(self._layers[0]),
        )

    def _plan(self, step: dict[str, Any], batch: int = BATCH) -> DecodePlan:
        c = self._condition
        is_sparse = c.topk is not None
        return self._backend.plan(
            self._layers[0],
            step.get("block_table"),
            step.get("seq_lens"),
            num_heads=c.num_heads,
            softmax_scale=SOFTMAX_SCALE,
            q_len=c.q_len,
            causal=c.causal,
            q_dtype=self._dtype,
            topk=c.topk,
            attn_sink=self._sink,
            return_lse=c.return_lse,
            batch_invariant=c.batch_invariant,
            max_batch=batch,
            max_seq_len=None if is_sparse else MOST_KEYS,
            seq_lens_cpu=step.get("seq_lens_cpu"),
            q_scale=self._q_scale,
        )

    def _step(self, lens: tuple[int, ...]) -> dict[str, Any]:
        """What plan and update take; nothing where the plan is sparse."""
        if self._condition.topk is not None:
            return {}
        host = torch.tensor(lens, dtype=torch.int32)
        table = torch.randint(0, self._pages, (len(lens), self._columns), generator=self._generator).int()
        return {"block_table": table.to(self._device), "seq_lens": host.to(self._device), "seq_lens_cpu": host}

    def _indices(self, batch: int = BATCH) -> Tensor | None:
        if self._condition.topk is None:
            return None
        end = self._layers[0].num_slots
        lead = (batch, *self._query.latent.shape[1:-2])
        slots = torch.randint(-end // 4, end + end // 4, (*lead, self._condition.topk), generator=self._generator)
        return slots.int().to(self._device)

    def faults(self) -> tuple[str, ...]:
        """What is wrong, in words; empty when nothing is."""
        return tuple(dict.fromkeys((*self._of_runs(), *self._of_steps())))

    def _of_runs(self) -> Iterator[str]:
        """Of one step: a run leaves the query and the results before it alone, and writes what it is given."""
        plan, indices = self._plan(self._step(STEPS[0])), self._indices()
        before = _bytes(self._query.packed).clone()
        first = plan.run(self._query, self._layers[0], indices=indices)
        if not torch.equal(_bytes(self._query.packed), before):
            yield "a run wrote into the query that it was given"
            return
        kept = _copied(first)
        plan.run(self._query, self._layers[1], indices=indices)
        if not _is_same(first, kept):
            yield "a run wrote into the result of the run before it"
        out, lse = (None if x is None else torch.full_like(x, torch.nan) for x in (kept.out, kept.lse))
        got = plan.run(self._query, self._layers[0], indices=indices, out=out, lse=lse)
        if got.out is not out or got.lse is not lse or not _is_same(got, kept):
            yield "what was written into out= and lse= is not what a run gives without them"
        step = self._step(STEPS[0])
        plan = self._plan(step)
        plan.run(self._query, self._layers[0], indices=indices)
        kept = _copied(plan.run(self._query, self._layers[1], indices=indices))
        if not _is_same(kept, self._plan(step).run(self._query, self._layers[1], indices=indices)):
            yield "the second layer of a plan is decoded otherwise than by a plan of its own"
        values = self._query.packed.clone()
        self._query.packed.copy_(values.flip(0).neg())
        want = self._plan(step).run(Query.from_packed(self._query.packed.clone()), self._layers[1], indices=indices)
        if not _is_same(plan.run(self._query, self._layers[1], indices=indices), want):
            yield "a run reads what its query held before, or another query than it was given"
        self._query.packed.copy_(values)

    def _of_steps(self) -> Iterator[str]:
        """Of many: a plan that is updated, refreshed, or viewed at a smaller batch is a fresh one."""
        plan = self._plan(self._step(STEPS[0]))
        for lens in STEPS:
            step, indices = self._step(lens), self._indices()
            if step:
                plan.update(**step)
            for layer in self._layers:
                got = plan.run(self._query, layer, indices=indices)
                if not _is_same(got, self._plan(step).run(self._query, layer, indices=indices)):
                    yield "after update a plan decodes another step than the one that it was given"
        step, indices = self._step(STEPS[0]), self._indices()
        if step and plan.update_mode == "device":
            assert plan.block_table is not None
            assert plan.seq_lens is not None
            plan.block_table.zero_()
            plan.block_table[:, : self._columns] = step["block_table"]
            plan.seq_lens.copy_(step["seq_lens"])
            plan.refresh()
            want = self._plan(step).run(self._query, self._layers[0])
            if not _is_same(plan.run(self._query, self._layers[0]), want):
                yield "after refresh a plan decodes another step than the one in its buffers"
        step, indices = self._step(STEPS[2]), self._indices(2)
        view, query = plan.at(2), Query.from_packed(self._query.packed[:2])
        if step:
            view.update(**step)
        want = self._plan(step, 2).run(query, self._layers[0], indices=indices)
        if not _is_same(view.run(query, self._layers[0], indices=indices), want):
            yield "a view at a smaller batch decodes otherwise than a plan of that batch"


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _copied(decoded: Decoded) -> Decoded:
    return Decoded(decoded.out.clone(), None if decoded.lse is None else decoded.lse.clone())


def _is_same(a: Decoded, b: Decoded) -> bool:
    """Equality to the bit, so that a NaN is equal to itself and to no other."""
    return all(
        x is y if x is None or y is None else torch.equal(_bytes(x.contiguous()), _bytes(y.contiguous()))
        for x, y in ((a.out, b.out), (a.lse, b.lse))
    )
