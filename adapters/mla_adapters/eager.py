"""Eager: the decode in torch operations alone, on any device, for every cache format.

What the definition says, in float32 (float64 for an fp32 cache), vectorised over the batch. Keys come
in whole blocks of fixed size under a running softmax, so that memory is bounded and a row's bits do not
depend on how long the other rows are; with batch_invariant each request is multiplied alone, so that they
depend on nothing else of the batch either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_backends.absorb import Query
from mla_backends.adapter import Adapter, Kernel, Step
from mla_backends.cache import PagedCache
from mla_backends.device import Device
from mla_backends.formats import FORMATS
from mla_backends.problem import Problem
from mla_backends.support import Conventions, Limit, OneOf

KEY_BLOCK = 256
"""Keys under one rescaling of the running softmax."""

MOST_BYTES = 64 << 20
"""Of gathered keys held at a time."""

KeySource = Callable[[int, int, slice], tuple[Tensor, Tensor]]
"""(first key, past the last, groups) -> slots [g, k] inside the cache, and seen [g, q or 1, k]."""


class EagerKernel(Kernel):
    def __init__(self, step: Step) -> None:
        self.step = step

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(self.step.device.type, enabled=False):  # which would round the products' operands
            return self._run(query, cache, indices)

    def _run(self, query: Query, cache: PagedCache, indices: Tensor | None) -> tuple[Tensor, Tensor]:
        step, problem = self.step, self.step.problem
        precision = torch.float64 if cache.format == "fp32" else torch.float32
        rows = torch.cat([query.latent, query.rope], -1).to(precision) * step.softmax_scale
        lead = rows.shape[:-1]
        if indices is not None:
            grouped, (keys, source) = rows.flatten(0, -3).unsqueeze(1), self._selected(indices, cache.num_slots)
        elif problem.ragged:
            grouped, (keys, source) = rows.unsqueeze(1), self._paged(*self._ragged_rows(len(rows)), cache)
        else:
            grouped, (keys, source) = rows, self._paged(*self._uniform_rows(), cache)
        decoded, lse = self._softmax(grouped, cache, keys, source)
        width = problem.kv_lora_rank
        return decoded.reshape(*lead, width).to(query.latent.dtype), lse.reshape(lead).float()

    def _uniform_rows(self) -> tuple[Tensor, Tensor]:
        """The request of each group, and how many keys each of its rows sees: [B], [B, q]."""
        step = self.step
        assert step.seq_lens is not None
        lens = step.seq_lens.long().unsqueeze(1)
        after = (
            torch.arange(1 - step.q_len, 1, device=step.device)
            if step.problem.causal
            else torch.zeros(step.q_len, dtype=torch.long, device=step.device)
        )
        return torch.arange(step.batch, device=step.device), (lens + after).clamp(min=0)

    def _ragged_rows(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The request of each token, and how many keys it sees: [T], [T, 1]; none past the last request."""
        step = self.step
        assert step.seq_lens is not None
        starts = step.cu_q_lens.long()
        token = torch.arange(tokens, device=step.device)
        request = torch.searchsorted(starts[1:].contiguous(), token, right=True)
        is_live = request < step.batch
        request = request.clamp(max=step.batch - 1)
        seen = step.seq_lens.long()[request]
        if step.problem.causal:
            seen = seen - starts[request + 1] + token + 1
        return request, torch.where(is_live, seen, 0).clamp(min=0).unsqueeze(1)

    def _paged(self, request: Tensor, seen: Tensor, cache: PagedCache) -> tuple[int, KeySource]:
        """Keys by block table."""
        step = self.step
        assert step.block_table is not None
        table, page_size = step.block_table, cache.page_size
        # On a CPU the lengths are at hand; elsewhere reading them would wait for the device.
        keys = (
            int(seen.max())
            if step.device.type == "cpu" and seen.numel()
            else min(step.max_seq_len, table.shape[1] * page_size)
        )

        def source(first: int, past: int, groups: slice) -> tuple[Tensor, Tensor]:
            position = torch.arange(first, past, device=step.device)
            column = (position // page_size).clamp_(max=table.shape[1] - 1)
            page = table[request[groups]][:, column].long().clamp(0, cache.num_pages - 1)
            return page * page_size + position % page_size, position < seen[groups].unsqueeze(-1)

        return keys, source

    def _selected(self, indices: Tensor, num_slots: int) -> tuple[int, KeySource]:
        """Keys by slot."""
        topk = indices.shape[-1]
        flat = torch.nn.functional.pad(indices.reshape(-1, topk).long(), (0, -topk % KEY_BLOCK), value=-1)

        def source(first: int, past: int, groups: slice) -> tuple[Tensor, Tensor]:
            slots = flat[groups, first:past]
            return slots.clamp(0, num_slots - 1), ((slots >= 0) & (slots < num_slots)).unsqueeze(1)

        return flat.shape[1], source

    def _softmax(self, rows: Tensor, cache: PagedCache, keys: int, source: KeySource) -> tuple[Tensor, Tensor]:
        """[G, q, H, D] queries -> [G, q, H, L] and lse [G, q, H], by a running softmax over blocks of keys."""
        width, sink = self.step.problem.kv_lora_rank, self.step.attn_sink
        out = rows.new_zeros(*rows.shape[:-1], width)
        lse = rows.new_zeros(rows.shape[:-1])
        at_a_time = max(1, MOST_BYTES // (KEY_BLOCK * rows.shape[-1] * rows.element_size()))
        if self.step.problem.batch_invariant:
            at_a_time = 1  # a library may multiply another number of matrices in another order
        for start in range(0, len(rows), at_a_time):
            groups = slice(start, start + at_a_time)
            part = rows[groups]
            most, total = part.new_full(part.shape[:-1], float("-inf")), part.new_zeros(part.shape[:-1])
            mixed = out[groups]
            for first in range(0, keys, KEY_BLOCK):
                slots, seen = source(first, first + KEY_BLOCK, groups)
                # A row that nobody sees may hold anything, and 0 * NaN is NaN.
                used = cache.gather(slots).to(part.dtype).masked_fill_(~seen.any(1).unsqueeze(-1), 0.0)
                scores = (part.flatten(1, 2) @ used.mT).unflatten(1, part.shape[1:3])
                scores.masked_fill_(~seen.unsqueeze(2), float("-inf"))
                highest = torch.maximum(most, scores.amax(-1))
                shift = highest.masked_fill(highest == float("-inf"), 0.0)
                kept, weights = (most - shift).exp(), (scores - shift.unsqueeze(-1)).exp()
                total = total * kept + weights.sum(-1)
                mixed.mul_(kept.unsqueeze(-1)).add_(
                    (weights.flatten(1, 2) @ used[..., :width]).unflatten(1, part.shape[1:3])
                )
                most = highest
            is_empty = total == 0
            lse[groups] = most + total.log()
            if sink is not None:
                total = total + (sink.to(part.dtype) - most.masked_fill(is_empty, 0.0)).exp()
            mixed.div_(total.unsqueeze(-1)).masked_fill_(is_empty.unsqueeze(-1), 0.0)
        return out, lse


class Eager(Adapter):
    name = "eager"
    support = (
        Limit(
            Device,
            "capability",
            OneOf(None),
            refuses=((9, 0), (12, 1)),
            source="a GPU is not left to torch operations by itself",
            cure='name it, adapter="eager", to have it all the same',
            unless_forced=True,
        ),
        Limit(Problem, "cache_format", OneOf(*FORMATS), refuses=(), source="mla_backends.formats"),
        Limit(
            Problem,
            "q_dtype",
            OneOf("bfloat16", "float16", "float32"),
            refuses=("float64",),
            source="mla_backends.absorb",
        ),
    )
    conventions = Conventions(query="split")

    def plan(self, step: Step, library: Any) -> Kernel:
        return EagerKernel(step)


ADAPTERS = (Eager(),)
