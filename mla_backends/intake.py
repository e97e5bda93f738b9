"""How a caller's query becomes the kernel's: heads padded, packed, quantised, where the kernel wants that and only there.

What it takes is settled once a Query object and remembered until another one comes, so that 61 layers
with one buffer cost one comparison each. The buffers that queries are brought into live as long as the plan,
whatever queries come between: captured graphs hold their addresses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_backends import ops
from mla_backends.buffers import Buffers
from mla_backends.errors import InvalidInput
from mla_backends.problem import Problem
from mla_backends.query import Query, by_tokens
from mla_backends.support import ALIGNMENT, Conventions

__all__ = ["Intake"]

E4M3 = torch.float8_e4m3fn


class Intake:
    """The queries of one plan.

    Args:
        problem, conventions: what is asked, and how the kernel wants it.
        heads: query heads as the kernel gets them.
        q_dtype: of the caller's queries.
        device: of all tensors.
        buffers: the plan's; lengths tell which rows of a query count for a measured scale.
        q_scale: of an e4m3 query; None: measured at each query.
    """

    def __init__(
        self,
        problem: Problem,
        conventions: Conventions,
        heads: int,
        q_dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers,
        q_scale: float | Tensor | None,
    ) -> None:
        self._problem, self._buffers = problem, buffers
        self._heads, self._q_dtype, self._device = heads, q_dtype, device
        self._is_packed = conventions.query == "packed"
        self._quantizes = conventions.query_dtype == "float8_e4m3fn"
        self._kernel_dtype = E4M3 if self._quantizes else q_dtype
        self._is_measured = self._quantizes and q_scale is None
        self._scale: Tensor | None = None
        """Of every query that is quantised here: the caller's, or where the measured one is written."""
        if isinstance(q_scale, Tensor):
            # The caller's own where it is one already, for a graph that writes it by that name.
            own = q_scale if q_scale.dim() == 1 and not q_scale.requires_grad else q_scale.detach().reshape(1)
            self._scale = own if self._quantizes else None
        elif self._quantizes:
            value = 1.0 if q_scale is None else float(q_scale)
            self._scale = torch.full((1,), value, dtype=torch.float32, device=device)
        self._staged: list[Tensor] = []
        """[rows, H', D] zeros in padded heads; the last one is in use, those outgrown may still be in a captured graph."""
        self._lead = torch.Size((buffers.batch, buffers.q_len))
        self._last: object = self  # no query yet, and nothing that a caller could pass
        self._brought: Query | None = None
        self._copy: Callable[[], None] | None = None

    def over(self, latent: Tensor, rope: Tensor, scale: Tensor | None) -> Query:
        """A query of those tensors: the last one where it is theirs."""
        last = self._last
        if isinstance(last, Query) and last.is_over(latent, rope, scale):
            return last
        return Query(latent, rope, scale=scale)

    def new_query(self) -> Query:
        """A packed buffer in the kernel's heads and dtype, all zeros.

        With a measured scale, `AbsorbWeights.query` writes through a buffer of the model's dtype behind it.
        """
        problem, buffers = self._problem, self._buffers
        lead: tuple[int, ...] = (buffers.batch,) if buffers.q_len == 1 else tuple(self._lead)
        if problem.ragged:
            lead = (buffers.batch * buffers.q_len,)
        shape = (*lead, self._heads, problem.row_width)
        packed = self._zeros(shape, self._kernel_dtype)
        if not self._is_measured:
            return Query.from_packed(packed, problem.kv_lora_rank, scale=self._scale)
        staging = Query.from_packed(self._zeros(shape, self._q_dtype), problem.kv_lora_rank)
        scale = self._zeros((1,), torch.float32).fill_(1.0)
        query = Query.from_packed(packed, problem.kv_lora_rank, scale=scale)
        return query.written_through(staging, lambda: self._quantize(query, staging, scale))

    def bring(self, query: Query) -> Query:
        """The query as the kernel reads it, [B, q, H', D] or ragged [T, H', D]; its current values.

        Raises:
            InvalidInput: where it does not match the plan.
        """
        if query is not self._last:
            self._admit(query)
        if self._problem.ragged and self._device.type == "cpu":
            tokens, wanted = len(query.latent), int(self._buffers.cu_q_lens[-1])
            if tokens < wanted:
                raise InvalidInput(
                    f"the query has {tokens} tokens, cu_q_lens ends at {wanted}; it takes that many or more"
                )
        if self._copy is not None:
            self._copy()
        assert self._brought is not None
        return self._brought

    def _admit(self, query: Query) -> None:
        self._check(query)
        batched = query if self._problem.ragged else query.with_leading(self._lead)
        brought, copy = batched, None
        if query.dtype != self._kernel_dtype:
            brought = self._buffer(batched, self._scale)
            copy = self._quantizer(brought, batched)
        elif query.num_heads != self._heads or (self._is_packed and not query.is_packed) or not _is_aligned(batched):
            brought = self._buffer(batched, query.scale)
            copy = self._copier(brought, batched)
        self._last, self._brought, self._copy = query, brought, copy

    def _buffer(self, query: Query, scale: Tensor | None) -> Query:
        """A packed query of the kernel's heads and dtype, with the leading shape of `query`, in the plan's own memory."""
        lead, problem = query.latent.shape[:-2], self._problem
        rows, room = lead.numel(), self._lead.numel()
        if not self._staged or len(self._staged[-1]) < rows:
            # Ragged queries may have ever more tokens: twice as many each time, so that those outgrown are few.
            outgrown = len(self._staged[-1]) if self._staged else 0
            shape = (max(rows, room, 2 * outgrown), self._heads, problem.row_width)
            self._staged.append(self._zeros(shape, self._kernel_dtype))
        packed = self._staged[-1][:rows].view(*lead, self._heads, problem.row_width)
        return Query.from_packed(packed, problem.kv_lora_rank, scale=scale)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory that can be written in any mode, whichever it is made in."""
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self._device)

    def _copier(self, into: Query, query: Query) -> Callable[[], None]:
        views = tuple(by_tokens(into.packed[..., : query.num_heads, :], query.latent, query.rope))

        def copy() -> None:
            for packed, latent, rope in views:
                ops.concat_nope_rope(packed, latent, rope)

        return copy

    def _quantizer(self, into: Query, query: Query) -> Callable[[], None]:
        scale = into.scale
        assert scale is not None
        return lambda: self._quantize(into, query, scale)

    def _quantize(self, into: Query, query: Query, scale: Tensor) -> None:
        """Store the query's values over `scale`, which is measured first where nobody gave it."""
        heads = query.num_heads
        if self._is_measured:
            buffers = self._buffers
            # Padded heads may hold anything, and their values must not widen the scale.
            latent, rope = (
                part[..., : self._problem.num_heads, :].flatten(0, -3) for part in (query.latent, query.rope)
            )
            lengths = None if self._problem.topk is not None else buffers.seq_lens
            ops.query_scale(
                scale, latent, rope, lengths, buffers.cu_q_lens if self._problem.ragged else None, buffers.q_len
            )
        for to_latent, to_rope, latent, rope in by_tokens(
            into.latent[..., :heads, :], into.rope[..., :heads, :], query.latent, query.rope
        ):
            ops.quantize_query(to_latent, latent, scale)
            ops.quantize_query(to_rope, rope, scale)

    def _check(self, query: Query) -> None:
        problem = self._problem
        if not isinstance(query, Query):
            raise InvalidInput(
                f"query is a {type(query).__name__}, it takes a Query; make one with Query.from_parts or from_packed"
            )
        widths = (query.latent.shape[-1], query.rope.shape[-1])
        if widths != (problem.kv_lora_rank, problem.qk_rope_head_dim):
            raise InvalidInput(
                f"the query is {widths[0]} + {widths[1]} wide, the cache {problem.kv_lora_rank} + {problem.qk_rope_head_dim}; "
                f"fold W_UK in with AbsorbWeights.query"
            )
        if query.num_heads not in (problem.num_heads, self._heads):
            raise InvalidInput(
                f"the query has {query.num_heads} heads, this plan takes {problem.num_heads}; plan with num_heads={query.num_heads}"
            )
        if query.dtype not in (self._q_dtype, self._kernel_dtype):
            # An e4m3 query is the kernel's affair: no plan takes that as the model's dtype.
            cure = (
                f"pass one of {self._q_dtype}, the model's dtype"
                if query.dtype == E4M3
                else f"plan with q_dtype={query.dtype}"
            )
            raise InvalidInput(f"the query is {query.dtype}, this plan's q_dtype is {self._q_dtype}; {cure}")
        if query.device != self._device:
            raise InvalidInput(f"the query is on {query.device}, this plan's tensors are on {self._device}")
        lead = query.latent.shape[:-2]
        if problem.ragged:
            if len(lead) != 1:
                raise InvalidInput(
                    f"the query has shape {list(query.latent.shape)}, a ragged plan takes [T, H, {problem.kv_lora_rank}]"
                )
            return
        if lead != self._lead and not (lead == self._lead[:1] and self._lead[1] == 1):
            raise InvalidInput(
                f"the query has shape {list(query.latent.shape)}, this plan takes {list(self._lead)} before its heads"
                f"{' (or without the 1)' if self._lead[1] == 1 else ''}; with max_batch, pad it to {self._lead[0]} requests"
            )


def _is_aligned(query: Query) -> bool:
    """Addresses and outer strides are multiples of 16 bytes."""
    for part in (query.latent, query.rope):
        size = part.element_size()
        if part.data_ptr() % ALIGNMENT or any(
            s * size % ALIGNMENT for n, s in zip(part.shape[:-1], part.stride()[:-1], strict=True) if n > 1
        ):
            return False
    return True
