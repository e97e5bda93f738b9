"""One decode on made-up data against the reference: the data would expose a wrong read.

Pages are shuffled, the other layers of the slot hold NaN or random bytes, rows past a length hold NaN (finite garbage
where a kernel is declared to read them), table columns past a length hold absurd ids, query parts
come with the strides that models give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from mla_backends.absorb import AbsorbWeights, Query
from mla_backends.backend import Backend
from mla_backends.cache import PagedCache
from mla_backends.conditions import Condition, Outcome
from mla_backends.formats import E4M3_MAX
from mla_backends.plan import DecodePlan
from mla_backends.problem import Problem
from mla_backends.reference import reference_decode, reference_sparse
from mla_backends.result import Decoded
from mla_backends.unified import UnifiedCache

__all__ = ["Trial"]


SOFTMAX_SCALE = 192**-0.5
"""DeepSeek's, without YaRN."""

ABSURD = (-1, 2**30, -(2**31), 2**31 - 1)
"""Page ids past a length, and slots that are none."""


class Trial:
    """A condition's tensors on a device, and its truth.

    Args:
        unused: what rows past a length hold: NaN, or finite garbage for kernels declared to read them.
        checked: requests whose rows are held against the truth, by number; None is all. Uniform queries alone.
    """

    def __init__(
        self,
        condition: Condition,
        device: torch.device | str,
        *,
        unused: Literal["nan", "finite"] = "nan",
        checked: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.condition = condition
        self.checked = list(range(len(condition.seq_lens)) if checked is None else checked)
        self._truths: dict[bool, Decoded] = {}
        self.device = torch.device(device)
        self.unused = unused
        self._generator = torch.Generator().manual_seed(seed)
        self.q_dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(condition.cache_format, torch.bfloat16)
        self._make_cache()
        self._make_queries()

    def _normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * scale

    def _make_cache(self) -> None:
        c = self.condition
        columns = max((-(-n // c.page_size) for n in c.seq_lens), default=0) + 2
        live = sum(-(-n // c.page_size) for n in c.seq_lens)
        self.num_pages = max(live + 3, 4)
        order = torch.randperm(self.num_pages, generator=self._generator).tolist()
        absurd = torch.tensor(ABSURD)[torch.randint(len(ABSURD), (len(c.seq_lens), columns), generator=self._generator)]
        table = absurd.int()
        used = torch.zeros(self.num_pages, c.page_size, dtype=torch.bool)
        for b, length in enumerate(c.seq_lens):
            for column in range(-(-length // c.page_size)):
                page = order.pop()
                table[b, column] = page
                used[page, : length - column * c.page_size] = True
        self.block_table = table.to(self.device)
        self.seq_lens = torch.tensor(c.seq_lens, dtype=torch.int32, device=self.device)
        self.seq_lens_cpu = torch.tensor(c.seq_lens, dtype=torch.int32)
        kv_scale: float | Tensor | None = c.kv_scale
        if c.kv_scale is not None and c.kv_scale_kind == "tensor":
            kv_scale = torch.tensor([c.kv_scale], device=self.device)
        slot = _slot(self.num_pages, c, self.device)
        _poison(slot.data)
        if c.neighbours == "random":
            mine = slot.data[:, c.layer]
            kept, raw = mine.clone(), slot.data.view(torch.uint8)
            raw.copy_(torch.randint(256, raw.shape, dtype=torch.uint8, generator=self._generator))
            mine.copy_(kept)
        self.cache = slot.layer(c.layer, kv_scale=kv_scale)
        tokens = self.num_pages * c.page_size
        kv_c, k_pe = self._normal(tokens, 512), self._normal(tokens, 64)
        slots = torch.arange(tokens)
        if c.topk is None:
            slots = torch.where(used.flatten(), slots, -1)
            if self.unused == "finite":
                self.cache.data.view(torch.uint8).fill_(0x3C)
        self.cache.write(
            kv_c.to(self.q_dtype).to(self.device), k_pe.to(self.q_dtype).to(self.device), slots.to(self.device)
        )
        self.contiguous = PagedCache(
            self.cache.data.clone(memory_format=torch.contiguous_format), c.cache_format, kv_scale=kv_scale
        )
        self.values = self.contiguous.dequantized()

    def _make_queries(self) -> None:
        c = self.condition
        batch = len(c.seq_lens)
        lead = (sum(c.q_lens) + 2,) if c.q_lens is not None else (batch,) if c.q_len == 1 else (batch, c.q_len)
        self.cu_q_lens = None
        if c.q_lens is not None:
            self.cu_q_lens = torch.tensor(
                [0, *torch.tensor(c.q_lens).cumsum(0).tolist()], dtype=torch.int32, device=self.device
            )
        latent, rope = self._normal(*lead, c.num_heads, 512, scale=0.3), self._normal(*lead, c.num_heads, 64, scale=0.3)
        if c.q_amax is not None:
            largest = latent.abs().max()
            latent, rope = latent * (c.q_amax / largest), rope * (c.q_amax / largest)
        self.latent, self.rope = latent.to(self.q_dtype).to(self.device), rope.to(self.q_dtype).to(self.device)
        self.attn_sink = self._normal(c.num_heads).to(self.device) if c.attn_sink else None
        self.indices = None
        if c.topk is not None:
            picked = torch.randint(0, self.num_pages * c.page_size, (*lead, c.topk), generator=self._generator).int()
            none = torch.rand(*lead, c.topk, generator=self._generator) < 0.2
            absurd = torch.tensor([-1, -7, self.num_pages * c.page_size, 2**31 - 1, -(2**31)]).int()
            picked[none] = absurd[torch.randint(len(absurd), (int(none.sum()),), generator=self._generator)]
            picked[0] = -1
            self.indices = picked.to(self.device)
            self._make_positions(picked)

    def _make_positions(self, slots: Tensor) -> None:
        """Positions that a block table of every page, in an order of each request's own, brings to `slots`."""
        c = self.condition
        pages = torch.stack([torch.randperm(self.num_pages, generator=self._generator) for _ in c.seq_lens])
        is_slot = (slots >= 0) & (slots < self.num_pages * c.page_size)
        page, offset = slots.long() // c.page_size, slots.long() % c.page_size
        column = pages.argsort(-1).gather(1, page.clamp(0, self.num_pages - 1).flatten(1)).view(page.shape)
        positions = torch.where(is_slot, column * c.page_size + offset, slots.long())
        self.positions, self.pages = positions.int().to(self.device), pages.int().to(self.device)

    def query(self, plan: DecodePlan) -> Query:
        """The condition's query, in the layout that it names."""
        kind, latent, rope = self.condition.query, self.latent, self.rope
        if kind == "packed":
            return Query.from_packed(torch.cat([latent, rope], -1))
        if kind == "parts":
            return Query.from_parts(latent, rope)
        if kind == "transposed":
            heads_first = latent.movedim(-2, 0).contiguous().movedim(0, -2)
            wide = torch.full((*rope.shape[:-1], 192), float("nan"), dtype=rope.dtype, device=rope.device)
            wide[..., 128:] = rope
            return Query.from_parts(heads_first, wide[..., 128:])
        query = plan.new_query()
        if query.dtype == torch.float8_e4m3fn:
            # A quantised buffer is written through an identity W_UK.
            return self._absorbed(query)
        query.latent.fill_(torch.nan)
        query.rope.fill_(torch.nan)
        tokens = len(latent)
        query.latent[:tokens, ..., : latent.shape[-2], :].copy_(latent)
        query.rope[:tokens, ..., : latent.shape[-2], :].copy_(rope)
        return query

    def _absorbed(self, query: Query) -> Query:
        latent, rope = self.latent, self.rope
        eye = torch.eye(512, dtype=latent.dtype, device=latent.device).expand(latent.shape[-2], 512, 512)
        missing = query.latent.shape[0] - latent.shape[0]
        latent, rope = (torch.cat([x, x.new_full((missing, *x.shape[1:]), torch.nan)]) for x in (latent, rope))
        return AbsorbWeights(eye, eye).query(latent, rope, out=query)

    def problem(self) -> Problem:
        """The facts that a plan of this trial is chosen by, but for those that only tensors know."""
        c = self.condition
        return Problem(
            c.num_heads,
            batch=c.batch,
            q_len=c.q_len if c.q_lens is None else max(c.q_lens),
            ragged=c.q_lens is not None,
            causal=c.causal,
            cache_format=c.cache_format,
            q_dtype=str(self.q_dtype).removeprefix("torch."),
            page_size=c.page_size,
            page_stride=self.cache.page_stride_rows,
            whole_rows=self.cache.pages_start_on_rows,
            packed_rows=self.cache.packed_rows,
            alignment=self.cache.alignment,
            topk=c.topk,
            needs_lse=c.return_lse,
            attn_sink=c.attn_sink,
            batch_invariant=c.batch_invariant,
            max_seq_len=None if c.topk is not None else self.block_table.shape[1] * c.page_size,
            measured_q_scale=c.q_scale is None,
        )

    def plan(self, backend: Backend, cache: PagedCache | None = None) -> DecodePlan:
        c = self.condition
        is_sparse = c.topk is not None
        return backend.plan(
            self.cache if cache is None else cache,
            None if is_sparse else self.block_table,
            None if is_sparse else self.seq_lens,
            num_heads=c.num_heads,
            softmax_scale=SOFTMAX_SCALE,
            q_len=c.q_len,
            cu_q_lens=self.cu_q_lens,
            max_q_len=None if c.q_lens is None else max(c.q_lens),
            causal=c.causal,
            q_dtype=self.q_dtype,
            topk=c.topk,
            attn_sink=self.attn_sink,
            return_lse=c.return_lse,
            max_batch=c.batch if is_sparse else c.max_batch,
            seq_lens_cpu=None if is_sparse else self.seq_lens_cpu,
            batch_invariant=c.batch_invariant,
            q_scale=c.q_scale,
        )

    def truth(self, plan: DecodePlan) -> Decoded:
        """The reference on the values that the kernel reads: the cache dequantised, and the query where it is quantised.

        Computed once for all plans whose queries are rounded alike; of the checked requests.
        """
        if plan.quantizes_query not in self._truths:
            self._truths[plan.quantizes_query] = self._truth(plan)
        return self._truths[plan.quantizes_query]

    def _truth(self, plan: DecodePlan) -> Decoded:
        latent, rope = self.latent, self.rope
        if plan.quantizes_query:
            packed = torch.cat([latent, rope], -1).float()
            live = packed[self._live_rows()]
            scale = self.condition.q_scale or (float(live.abs().max()) / E4M3_MAX if live.numel() else 1.0)
            stored = (packed / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
            latent, rope = stored[..., :512], stored[..., 512:]
        rows = self._checked_rows()
        latent, rope = latent[rows], rope[rows]
        if self.indices is not None:
            return reference_sparse(
                latent, rope, self.values, self.indices[rows], softmax_scale=SOFTMAX_SCALE, attn_sink=self.attn_sink
            )
        return reference_decode(
            latent,
            rope,
            self.values,
            self.block_table[self.checked],
            self.seq_lens[self.checked],
            softmax_scale=SOFTMAX_SCALE,
            causal=self.condition.causal,
            cu_q_lens=self.cu_q_lens,
            attn_sink=self.attn_sink,
        )

    def _checked_rows(self) -> slice | list[int]:
        """Of the queries: all tokens when ragged."""
        return slice(None) if self.condition.q_lens is not None else self.checked

    def _live_rows(self) -> Tensor:
        """Query rows of requests that have keys."""
        if self.condition.q_lens is None:
            return self.seq_lens > 0
        lens = torch.tensor(self.condition.q_lens, device=self.device)
        live = torch.repeat_interleave(self.seq_lens > 0, lens)
        return torch.nn.functional.pad(live, (0, len(self.latent) - len(live)))

    def run(self, backend: Backend) -> Outcome:
        """Decode the layer view and its contiguous clone, and compare both with the truth."""
        plan = self.plan(backend)
        got = plan.run(self.query(plan), self.cache, indices=self.indices)
        other = self.plan(backend, self.contiguous)
        again = other.run(self.query(other), self.contiguous, indices=self.indices)
        tokens = len(self.latent)
        want = self.truth(plan)
        assert want.lse is not None
        rows = self._checked_rows()
        out = got.out[:tokens][rows].double().cpu()
        is_empty = want.lse == float("-inf")
        lse_error, are_empty_right = 0.0, bool((out[is_empty] == 0).all()) and not bool(out.isnan().any())
        equal = _is_same(got, again, tokens)
        selection_equal = True
        if self.indices is not None:
            selecting = self.plan(backend)
            selected = selecting.select_slots(self.positions, self.pages)
            selection_equal = _is_same(got, selecting.run(self.query(selecting), self.cache, indices=selected), tokens)
        if got.lse is not None:
            lse = got.lse[:tokens][rows].double().cpu()
            are_empty_right = (
                are_empty_right and bool((lse[is_empty] == float("-inf")).all()) and not bool(lse.isnan().any())
            )
            lse_error = _lse_error(lse[~is_empty], want.lse[~is_empty])
        norm = float(want.out.norm())
        out_error = float((out - want.out).norm()) / norm if norm else float(out.norm())
        is_of_form = got.out.dtype == self.q_dtype and (got.lse is not None) == self.condition.return_lse
        if got.lse is not None:
            is_of_form = is_of_form and got.lse.dtype == torch.float32
        return Outcome(out_error, lse_error, equal, are_empty_right, selection_equal, is_of_form, plan.describe())


def _is_same(a: Decoded, b: Decoded, tokens: int) -> bool:
    """Equality to the bit of out and lse."""
    if a.lse is None or b.lse is None:
        return a.lse is b.lse and torch.equal(a.out[:tokens], b.out[:tokens])
    return torch.equal(a.out[:tokens], b.out[:tokens]) and torch.equal(a.lse[:tokens], b.lse[:tokens])


def _lse_error(lse: Tensor, want: Tensor) -> float:
    """The largest absolute error; above 1000, where float32 itself is that coarse, relative to a thousandth of the value."""
    if not want.numel():
        return 0.0
    return float(((lse - want).abs() / (want.abs() / 1000).clamp(min=1.0)).max())


def _slot(num_pages: int, c: Condition, device: torch.device) -> UnifiedCache:
    """A slot that starts `offset` bytes after a 16-byte boundary."""
    made = UnifiedCache.allocate(num_pages, c.layers, c.page_size, c.cache_format, device)
    if not c.offset:
        return made
    data = made.data
    raw = torch.zeros(data.numel() * data.element_size() + 64, dtype=torch.uint8, device=device)
    start = (-raw.data_ptr()) % 16 + c.offset
    return UnifiedCache(
        raw[start : start + data.numel() * data.element_size()].view(data.dtype).view(data.shape), c.cache_format
    )


def _poison(data: Tensor) -> None:
    """NaN in every value: all bits set is NaN in bf16, fp16, fp32 and e4m3."""
    data.view(torch.uint8).fill_(0xFF)
