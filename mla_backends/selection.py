"""Which keys the rows of a sparse plan read: slots from anywhere, or DSA's positions, as the plan's kernel reads them.

The plan's own buffers hold them, at addresses that captured graphs may keep. Slots from anywhere cost `run` a launch that
looks at each one; positions cost none there, as selecting them leaves nothing to look at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_backends import ops
from mla_backends.cache import PagedCache
from mla_backends.errors import InvalidInput
from mla_backends.problem import Problem
from mla_backends.query import Query
from mla_backends.steps import check_tensor
from mla_backends.support import Conventions

__all__ = ["Selection"]


class Selection:
    """The keys of one sparse plan, in its kernel's own form: what `DecodePlan.select_slots` gives to `run(indices=)`.

    No tensor, as row ids taken for slots would decode other keys.

    Args:
        problem, conventions: what is asked, and how the kernel wants it.
        batch, q_len: query rows, B and q.
        num_pages: of the cache.
        device: of all tensors.

    Attributes:
        kernel_table: [B, q, topk'] int32, topk rounded up to what the kernel takes: slots, -1 for none. With
            `kernel_counts`, row ids of the valid ones moved to the front, then 0.
        kernel_counts: [B * q] int32, the valid ones of each row; None where the kernel wants slots.
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
        self.kernel_table = self._flat.view(batch, q_len, width)
        self.kernel_counts = torch.zeros(rows, dtype=torch.int32, device=device) if is_by_row else None
        self._topk, self._device = topk, device
        self._lead = torch.Size((batch, q_len))
        self._page_size, self._num_slots = problem.page_size, num_pages * problem.page_size
        self._rows_per_page = problem.page_stride or problem.page_size
        self._is_selected = False

    def select(self, positions: Tensor, block_table: Tensor, seq_lens: Tensor | None) -> None:
        """Fill the table from positions; one launch.

        Raises:
            InvalidInput: for shapes, dtypes, devices or strides that do not fit.
        """
        shape = getattr(positions, "shape", None)
        if shape is None or not self._fits(shape):
            lead = self._lead if self._lead[1] != 1 else self._lead[:1]
            wanted = f"{[*lead, self._topk]} int32 or int64"
            check_tensor("positions", positions, wanted)
            raise InvalidInput(f"positions is {list(positions.shape)}, it takes {wanted}")
        if self.kernel_counts is None:
            out = self._flat if positions.ndim == 2 else self.kernel_table
            ops.select_slots(out, positions, block_table, self._page_size, seq_lens, num_slots=self._num_slots)
        else:
            ops.select_rows(
                self._flat,
                self.kernel_counts,
                positions,
                block_table,
                self._page_size,
                seq_lens,
                num_slots=self._num_slots,
                rows_per_page=self._rows_per_page,
            )
        self._is_selected = True

    def bring(self, indices: Tensor | Selection, query: Query, cache: PagedCache) -> Tensor:
        """`kernel_table`, with what `select` was last given, or with slots that are looked at here; one launch for those.

        Args:
            query: whose leading shape slots from anywhere have too.

        Raises:
            InvalidInput: for slots that do not fit, or a selection that is gone or was made for another layout.
        """
        if isinstance(indices, Selection):
            if indices is not self:
                indices.check_owner(self)
            if not self._is_selected or self.kernel_counts is not None:
                self._check_selection(cache)
            return self.kernel_table
        lead = query.latent.shape[:-2]
        if (
            type(indices) is not Tensor
            or indices.layout is not torch.strided
            or indices.dtype is not torch.int32
            or indices.device != self._device
            or indices.shape[:-1] != lead
            or indices.shape[-1] != self._topk
        ):
            wanted = f"{[*lead, self._topk]} int32"
            check_tensor("indices", indices, wanted)
            kind = "" if type(indices) is Tensor else f" a {type(indices).__name__}"
            raise InvalidInput(
                f"indices is{kind} {list(indices.shape)} {indices.dtype} on {indices.device}, "
                f"it takes {wanted} on {self._device}, a plain tensor with a row of slots for each query row"
            )
        if indices.stride(-1) != 1 and indices.shape[-1] > 1:
            raise InvalidInput(
                f"indices has stride {indices.stride(-1)} in its last dimension, it takes 1; pass indices.contiguous()"
            )
        self._is_selected = False
        slots = indices if indices.ndim == 2 else indices.flatten(0, 1)
        if self.kernel_counts is None:
            ops.sanitize_slots(self._flat, slots, cache.num_slots)
        else:
            ops.compact_slots(
                self._flat,
                self.kernel_counts,
                slots,
                cache.num_slots,
                page_size=self._page_size,
                rows_per_page=cache.rows_per_page,
            )
        return self.kernel_table

    def check_owner(self, owner: Selection | None) -> None:
        """Refuse a selection of another plan.

        Raises:
            InvalidInput: unless this is `owner`.
        """
        if owner is not self:
            raise InvalidInput("indices is another plan's selection; call select_slots on this plan")

    def _check_selection(self, cache: PagedCache) -> None:
        if not self._is_selected:
            raise InvalidInput(
                "indices is this plan's selection, which nothing is in: run was given other slots since, or select_slots was "
                "not called; call it first"
            )
        if self.kernel_counts is not None and cache.rows_per_page != self._rows_per_page:
            raise InvalidInput(
                f"the cache has {cache.rows_per_page} rows from page to page, this plan selects for {self._rows_per_page}, "
                f"those of the cache that it was made with; pass slots, or plan with this cache"
            )

    def _fits(self, shape: torch.Size) -> bool:
        return shape[-1:] == (self._topk,) and (
            shape[:-1] == self._lead or (self._lead[1] == 1 and shape[:-1] == self._lead[:1])
        )
