"""The torch forms of the ops on slots: which rows of a cache a sparse kernel reads.

As in `torch_ops`, arguments are checked already, and nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["compact_slots", "sanitize_slots", "select_rows", "select_slots"]


def _selected(
    positions: Tensor, block_table: Tensor, page_size: int, seq_lens: Tensor | None, num_slots: int
) -> Tensor:
    """[B, (q,) topk] int32, -1 for none."""
    requests, width = block_table.shape
    at = positions.long().reshape(requests, -1)
    column = at.div(page_size, rounding_mode="floor")
    found = (at >= 0) & (column < width)
    if seq_lens is not None:
        found &= at < seq_lens[:, None]
    page = block_table.long().gather(1, column.clamp(0, max(width - 1, 0))) if width else at
    # Before the product, which may not fit.
    found &= (page >= 0) & (page <= (num_slots - 1) // page_size)
    slot = torch.where(found, page, 0) * page_size + at.remainder(page_size)
    found &= slot < num_slots
    return torch.where(found, slot, -1).view(positions.shape).to(torch.int32)


def select_slots(
    out: Tensor, positions: Tensor, block_table: Tensor, page_size: int, seq_lens: Tensor | None, num_slots: int
) -> None:
    topk = positions.shape[-1]
    out[..., topk:] = -1
    out[..., :topk].copy_(_selected(positions, block_table, page_size, seq_lens, num_slots))


def select_rows(
    out: Tensor,
    counts: Tensor,
    positions: Tensor,
    block_table: Tensor,
    page_size: int,
    seq_lens: Tensor | None,
    num_slots: int,
    rows_per_page: int,
) -> None:
    slots = _selected(positions, block_table, page_size, seq_lens, num_slots).flatten(0, -2)
    compact_slots(out, counts, slots, num_slots, page_size, rows_per_page)


def sanitize_slots(out: Tensor, slots: Tensor, num_slots: int) -> None:
    topk = slots.shape[-1]
    inside = (slots >= 0) & (slots.long() < num_slots)  # an int32 is not compared with 2**31
    out[..., :topk].copy_(torch.where(inside, slots, -1))
    out[..., topk:] = -1


def compact_slots(
    out: Tensor, counts: Tensor, slots: Tensor, num_slots: int, page_size: int, rows_per_page: int
) -> None:
    topk = slots.shape[-1]
    slot = slots.long()
    valid = (slot >= 0) & (slot < num_slots)
    order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
    row = torch.where(valid, slot // page_size * rows_per_page + slot % page_size, 0)
    out[..., :topk].copy_(row.gather(-1, order))
    out[..., topk:] = 0
    counts.copy_(valid.sum(-1))
