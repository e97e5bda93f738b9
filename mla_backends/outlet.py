"""How the kernel's results become ours: padded heads sliced off, the lse in our axes and base, rows without keys settled.

From the adapter's `Conventions` alone; one launch, in place, and only where they differ from ours.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mla_backends import ops
from mla_backends.absorb import Query
from mla_backends.buffers import Buffers
from mla_backends.device import is_capturing
from mla_backends.errors import InvalidInput
from mla_backends.pages import are_apart
from mla_backends.problem import Problem
from mla_backends.result import Decoded
from mla_backends.support import ALIGNMENT, Conventions

__all__ = ["Outlet"]


class Outlet:
    """The results of one plan.

    Args:
        problem, conventions: what is asked, and how the kernel gives it.
        heads: query heads as the kernel gets them.
        out_dtype, device: of out.
        buffers: the plan's; its lengths say which rows are empty.
        empty_rows: "any": rows without keys stay as the kernel leaves them.
    """

    def __init__(
        self,
        problem: Problem,
        conventions: Conventions,
        heads: int,
        out_dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers,
        empty_rows: Literal["exact", "any"],
    ) -> None:
        self._problem, self._conventions, self._buffers = problem, conventions, buffers
        self._out_dtype, self._device = out_dtype, device
        self._num_heads = problem.num_heads
        self._is_padded = heads != problem.num_heads
        self._can_write = conventions.writes_out and not self._is_padded
        settles = empty_rows == "exact"
        # Ragged tensors may have tokens past the last request, which no kernel writes.
        self._overwrites = settles and (conventions.empty_rows in ("unwritten", "undefined") or problem.ragged)
        self._base2 = problem.needs_lse and conventions.lse_base == "2"
        self._converts = self._base2 or (settles and problem.needs_lse and (conventions.empty_rows != "exact"))
        self._lengths = None if problem.topk is not None else buffers.seq_lens
        self._cu_q_lens = buffers.cu_q_lens if problem.ragged else None

    @property
    def kernels(self) -> tuple[str, ...]:
        """What `finish` launches at each run, where the caller gives no buffer that must be copied into.

        In an eager run it launches nothing where the host knows that there is nothing to settle.
        """
        return ("finish_rows",) if self._overwrites or self._converts else ()

    def target(self, query: Query, out: Tensor | None) -> Tensor | None:
        """The caller's `out` as the kernel can write it, [B, q, H, L] or [T, H, L]; None where it cannot.

        Raises:
            InvalidInput: for an `out` of another shape, dtype or device, or that cannot be written in place.
        """
        if out is None:
            return None
        shape = (*query.latent.shape[:-2], self._num_heads, self._problem.kv_lora_rank)
        _check_result("out", out, shape, self._out_dtype, self._device)
        # An address off a kernel's vector stores is an error of the device, which ends every later call too.
        if not self._can_write or not out.is_contiguous() or out.data_ptr() % ALIGNMENT:
            return None
        return out if self._problem.ragged or out.ndim == 4 else out.unsqueeze(1)

    def finish(
        self,
        query: Query,
        raw: Tensor,
        raw_lse: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        *,
        written: bool,
    ) -> Decoded:
        """What the kernel gave, [B, q, H', L] or [T, H', L] and its lse, in our convention.

        Args:
            query: the caller's, whose leading shape the results have.
            out, lse: the caller's buffers.
            written: raw is the caller's out already.
        """
        is_flat = query.latent.ndim == 3
        rows = out if written and out is not None else self._rows(raw, is_flat)
        ours = None if raw_lse is None or not self._problem.needs_lse else self._ordered(raw_lse, is_flat)
        if (self._overwrites or self._converts) and not self._is_settled():
            ops.finish_rows(
                rows if self._overwrites else None,
                ours if lse is None else lse,
                ours,
                self._lengths,
                q_len=self._buffers.q_len,
                causal=self._problem.causal,
                cu_q_lens=self._cu_q_lens,
                base2=self._base2,
                overwrite_out=self._overwrites,
            )
        elif lse is not None and ours is not None:
            lse.copy_(ours)
        if out is not None and not written:
            out.copy_(rows)
        return Decoded(rows if out is None else out, ours if lse is None else lse)

    def _is_settled(self) -> bool:
        """No row is empty in this run, and in none that a graph captured from it may replay."""
        return self._buffers.sees_keys and not self._base2 and not is_capturing(self._device)

    def nothing(self, query: Query, out: Tensor | None, lse: Tensor | None) -> Decoded:
        """The result where no row sees a key, without a kernel. Only a ragged plan may have rows then."""
        shape = (*query.latent.shape[:-2], self._num_heads)
        if out is None:
            out = torch.empty(*shape, self._problem.kv_lora_rank, dtype=self._out_dtype, device=self._device)
        if lse is None and self._problem.needs_lse:
            lse = torch.empty(shape, dtype=torch.float32, device=self._device)
        if out.numel():
            out.zero_()
        if lse is not None and lse.numel():
            lse.fill_(float("-inf"))
        return Decoded(out, lse)

    # One view at most of each: on a slow host it costs as much as half a launch.

    def _rows(self, raw: Tensor, is_flat: bool) -> Tensor:
        """The kernel's out [B, q, H', L] or [T, H', L] with our heads; [B, H, L] for a query without the axis of q."""
        if is_flat and raw.ndim == 4:
            if not self._is_padded:
                return raw.squeeze_(1)  # nobody else has this tensor, and a view costs the host more
            batch, _, head, value = raw.stride()
            return raw.as_strided((raw.shape[0], self._num_heads, raw.shape[3]), (batch, head, value))
        return raw.narrow(-2, 0, self._num_heads) if self._is_padded else raw

    def _ordered(self, lse: Tensor, is_flat: bool) -> Tensor:
        """The kernel's lse with our axes and heads, [B, q, H], [B, H] or [T, H]."""
        heads_first = self._conventions.lse_axes in ("BHQ", "HT")
        strides = lse.stride()
        if lse.ndim == 2:
            row, head = (1, 0) if heads_first else (0, 1)
            if is_flat:
                return lse.as_strided((lse.shape[row], self._num_heads), (strides[row], strides[head]))
            batch, q_len = self._buffers.batch, self._buffers.q_len
            by_request = (q_len * strides[row], strides[row], strides[head])
            return lse.as_strided((batch, q_len, self._num_heads), by_request)
        row, head = (2, 1) if heads_first else (1, 2)
        if is_flat:
            return lse.as_strided((lse.shape[0], self._num_heads), (strides[0], strides[head]))
        size = (lse.shape[0], lse.shape[row], self._num_heads)
        return lse.as_strided(size, (strides[0], strides[row], strides[head]))

    def check_lse(self, query: Query, lse: Tensor) -> None:
        """Refuse an `lse` that nothing can be written into.

        Raises:
            InvalidInput: as for `out`, and where the plan was made without return_lse.
        """
        if not self._problem.needs_lse:
            raise InvalidInput("lse is given, but this plan was made without it; plan with return_lse=True")
        shape = (*query.latent.shape[:-2], self._num_heads)
        _check_result("lse", lse, shape, torch.float32, self._device)


def _check_result(name: str, given: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what a result cannot be written into."""
    taken = f"{list(shape)} {dtype} on {device}"
    if not isinstance(given, Tensor):
        raise InvalidInput(f"{name} is a {type(given).__name__}, it takes {taken}")
    if given.is_nested or given.layout is not torch.strided:
        raise InvalidInput(
            f"{name} is a {'nested' if given.is_nested else given.layout} tensor, it takes a strided {taken}"
        )
    if given.shape != shape or given.dtype != dtype or given.device != device:
        raise InvalidInput(f"{name} is {list(given.shape)} {given.dtype} on {given.device}, it takes {taken}")
    if given.requires_grad:
        raise InvalidInput(f"{name} requires grad, it takes a tensor to write into; pass {name}.detach()")
    if given.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidInput(
            f"{name} was made in inference mode, which only lets it be written there; pass {name}.clone()"
        )
    if not given.is_contiguous() and not are_apart(1, *zip(given.shape, given.stride(), strict=True)):
        raise InvalidInput(
            f"{name} has strides {given.stride()}, it takes memory for each value; clone an expanded tensor"
        )
