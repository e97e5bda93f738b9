"""Which keys the rows of a sparse plan read: slots from anywhere, or DSA's positions, as the plan's kernel reads them.

The plan's own buffers hold them, at addresses that captured graphs may keep. Slots from anywhere cost `run` a launch that
looks at each one; positions cost none there, as selecting them leaves nothing to look at.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mla_backends import ops
from mla_backends.cache import PagedCache
from mla_backends.errors import InvalidInput
from mla_backends.problem import Problem
from mla_backends.steps import check_tensor
from mla_backends.support import Conventions

__all__ = ["Selection"]

_LIVING: WeakValueDictionary[int, Selection] = WeakValueDictionary()
"""By the address of their table's memory, which every view of it has."""


class Selection:
    """The keys of one sparse plan.

    Args:
        problem, conventions: what is asked, and how the kernel wants it.
        batch, q_len: query rows, B and q.
        num_pages: of the cache.
        device: of all tensors.

    Attributes:
        table: [B, q, topk'] int32, topk rounded up to what the kernel takes: slots, -1 for none. With `counts`, row ids of
            the valid ones moved to the front, then 0.
        counts: [B * q] int32, the valid ones of each row; None where the kernel wants slots.
        selected: `table` without the axis of q for a q of 1: what `select` returns, the same object each time.
    """

    def __init__(
        self,
        problem: Problem,
        conventions: Conventions,
        *,
        batch: int,
        q_len: int,
        num_pages: int,
        device: torch.device,
    ) -> None:
        topk, multiple = problem.topk, conventions.topk_multiple
        assert topk is not None
        is_by_row = conventions.slots == "compact_slots"
        rows, width = batch * q_len, -(-topk // multiple) * multiple
        self._flat = torch.full((rows, width), 0 if is_by_row else -1, dtype=torch.int32, device=device)
        self.table = self._flat.view(batch, q_len, width)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device) if is_by_row else None
        self.selected = self._flat if q_len == 1 else self.table
        self._topk, self._device = topk, device
        self._lead = torch.Size((batch, q_len))
        self._page_size, self._num_slots = problem.page_size, num_pages * problem.page_size
        self._rows_per_page = problem.page_stride or problem.page_size
        self._is_selected = False
        _LIVING[self._flat.untyped_storage().data_ptr()] = self

    def select(self, positions: Tensor, block_table: Tensor, seq_lens: Tensor | None) -> Tensor:
        """Fill the table from positions; one launch.

        Raises:
            InvalidInput: for shapes, dtypes, devices or strides that do not fit.
        """
        shape = getattr(positions, "shape", None)
        if shape is None or not self._fits(shape):
            wanted = f"{[*self.selected.shape[:-1], self._topk]} int32 or int64"
            check_tensor("positions", positions, wanted)
            raise InvalidInput(f"positions is {list(positions.shape)}, it takes {wanted}")
        if self.counts is None:
            out = self._flat if positions.ndim == 2 else self.table
            ops.select_slots(out, positions, block_table, self._page_size, seq_lens, num_slots=self._num_slots)
        else:
            ops.select_rows(
                self._flat,
                self.counts,
                positions,
                block_table,
                self._page_size,
                seq_lens,
                num_slots=self._num_slots,
                rows_per_page=self._rows_per_page,
            )
        self._is_selected = True
        return self.selected

    def bring(self, indices: Tensor, lead: torch.Size, cache: PagedCache) -> Tensor:
        """`table`, with what `select` was last given, or with slots that are looked at here; one launch for those.

        Args:
            lead: the query's leading shape, which slots from anywhere have too.

        Raises:
            InvalidInput: for slots that do not fit, or a selection that is gone or was made for another layout.
        """
        if indices is self.selected:
            self._check_selection(cache)
            return self.table
        if isinstance(indices, Tensor) and indices.numel():
            owner = _LIVING.get(indices.untyped_storage().data_ptr())
            if owner is not None:
                return self._of_a_selection(indices, owner, cache)
        if (
            type(indices) is not Tensor
            or indices.dtype is not torch.int32
            or indices.device != self._device
            or indices.shape[:-1] != lead
            or indices.shape[-1] != self._topk
        ):
            wanted = f"{[*lead, self._topk]} int32"
            check_tensor("indices", indices, wanted)
            raise InvalidInput(
                f"indices is {list(indices.shape)} {indices.dtype} on {indices.device}, "
                f"it takes {wanted} on {self._device}, a row of slots for each query row"
            )
        if indices.stride(-1) != 1 and indices.shape[-1] > 1:
            raise InvalidInput(
                f"indices has stride {indices.stride(-1)} in its last dimension, it takes 1; pass indices.contiguous()"
            )
        self._is_selected = False
        slots = indices if indices.ndim == 2 else indices.flatten(0, 1)
        if self.counts is None:
            ops.sanitize_slots(self._flat, slots, cache.num_slots)
        else:
            ops.compact_slots(
                self._flat,
                self.counts,
                slots,
                cache.num_slots,
                page_size=self._page_size,
                rows_per_page=cache.rows_per_page,
            )
        return self.table

    def _of_a_selection(self, indices: Tensor, owner: Selection, cache: PagedCache) -> Tensor:
        """The table, where `indices` is all of it under another shape."""
        if owner is not self:
            raise InvalidInput("indices is another plan's selection; call select_slots on this plan")
        if indices.numel() != self._flat.numel() or not indices.is_contiguous():
            raise InvalidInput(
                f"indices is a part of this plan's selection, {list(indices.shape)} of {list(self.selected.shape)}, "
                f"it takes what select_slots returned"
            )
        self._check_selection(cache)
        return self.table

    def _check_selection(self, cache: PagedCache) -> None:
        if not self._is_selected:
            raise InvalidInput(
                "indices is this plan's selection, which nothing is in: run was given other slots since, or select_slots was "
                "not called; call it first"
            )
        if self.counts is not None and cache.rows_per_page != self._rows_per_page:
            raise InvalidInput(
                f"the cache has {cache.rows_per_page} rows from page to page, this plan selects for {self._rows_per_page}, "
                f"those of the cache that it was made with; pass slots, or plan with this cache"
            )

    def _fits(self, shape: torch.Size) -> bool:
        return shape[-1:] == (self._topk,) and (
            shape[:-1] == self._lead or (self._lead[1] == 1 and shape[:-1] == self._lead[:1])
        )
