"""The ops on slots: DSA's positions, or slots from anywhere, as a sparse kernel reads them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_backends import torch_slots
from mla_backends.errors import whole_number
from mla_backends.op_table import Op, are_tensors, dense_last, one_device, refuse, writable

__all__ = ["compact_slots", "sanitize_slots", "select_rows", "select_slots"]

_INT32_MAX = 2**31 - 1
_MOST_SLOTS = 2**31
"""A slot is an int32."""

_select_slots = Op(
    "select_slots(Tensor(a!) out, Tensor positions, Tensor block_table, int page_size, Tensor? seq_lens, "
    "int num_slots) -> ()",
    torch_slots.select_slots,
)
_select_rows = Op(
    "select_rows(Tensor(a!) out, Tensor(b!) counts, Tensor positions, Tensor block_table, int page_size, "
    "Tensor? seq_lens, int num_slots, int rows_per_page) -> ()",
    torch_slots.select_rows,
)
_sanitize_slots = Op("sanitize_slots(Tensor(a!) out, Tensor slots, int num_slots) -> ()", torch_slots.sanitize_slots)
_compact_slots = Op(
    "compact_slots(Tensor(a!) out, Tensor(b!) counts, Tensor slots, int num_slots, int page_size, "
    "int rows_per_page) -> ()",
    torch_slots.compact_slots,
)


def _checked_count(num_slots: int) -> int:
    num_slots = whole_number("num_slots", num_slots, least=0)
    if not 1 <= num_slots <= _MOST_SLOTS:
        raise refuse("num_slots", num_slots, f"1 to {_MOST_SLOTS}")
    return num_slots


def _check_selection(out: Tensor, positions: Tensor, block_table: Tensor, seq_lens: Tensor | None) -> int:
    """The device of what both selections take."""
    are_tensors(out=out, positions=positions, block_table=block_table)
    if seq_lens is not None:
        are_tensors(seq_lens=seq_lens)
    if positions.dim() not in (2, 3):
        raise refuse("positions", list(positions.shape), "[B, (q,) topk]")
    if block_table.dim() != 2 or block_table.shape[0] != positions.shape[0]:
        raise refuse("block_table", list(block_table.shape), f"[{positions.shape[0]}, W], from positions")
    for name, x in (("positions", positions), ("block_table", block_table)):
        if x.dtype not in (torch.int32, torch.int64):
            raise refuse(f"the dtype of {name}", x.dtype, "int32 or int64")
    if out.dtype != torch.int32:
        raise refuse("the dtype of out", out.dtype, "int32")
    if seq_lens is not None and (
        seq_lens.dtype != torch.int32 or seq_lens.shape != positions.shape[:1] or not seq_lens.is_contiguous()
    ):
        found = f"{list(seq_lens.shape)} {seq_lens.dtype} with strides {list(seq_lens.stride())}"
        taken = f"[{positions.shape[0]}] int32, contiguous"
        is_wide = not seq_lens.is_floating_point() and seq_lens.dtype != torch.int32
        raise refuse("seq_lens", found, f"{taken}; pass seq_lens.int()" if is_wide else taken)
    writable(out=out)
    dense_last(positions=positions, block_table=block_table)
    device = out.get_device()
    one_device(device, positions=positions, block_table=block_table, seq_lens=seq_lens)
    return device


def select_slots(
    out: Tensor,
    positions: Tensor,
    block_table: Tensor,
    page_size: int,
    seq_lens: Tensor | None = None,
    *,
    num_slots: int | None = None,
) -> None:
    """DSA's request-local top-k positions to slots; -1 for none.

    None is a position below 0, past the table's width or at or past its request's length, a page id below 0, and a slot
    at or past num_slots.

    Args:
        out: [B, (q,) >= topk] int32; columns past topk become -1.
        positions: [B, (q,) topk] int32 or int64.
        block_table: [B, W] int32 or int64 page ids, any row stride.
        page_size: tokens a page.
        seq_lens: [B] int32, keys a request.
        num_slots: of the cache; None is every slot that an int32 holds.

    Raises:
        InvalidInput: if shapes, dtypes, devices or last strides disagree.
    """
    most = _MOST_SLOTS if num_slots is None else num_slots
    if _select_slots.took(out, positions, block_table, page_size, seq_lens, most):
        return
    # Plain numbers, as a kernel takes no other; numpy's are.
    page_size, most = whole_number("page_size", page_size), _checked_count(most)
    device = _check_selection(out, positions, block_table, seq_lens)
    if out.shape[:-1] != positions.shape[:-1] or out.shape[-1] < positions.shape[-1]:
        raise refuse(
            "out and positions", [list(x.shape) for x in (out, positions)], "[B, (q,) at least topk] and [B, (q,) topk]"
        )
    if out.numel():
        _select_slots(device >= 0, out, positions, block_table, page_size, seq_lens, most)


def select_rows(
    out: Tensor,
    counts: Tensor,
    positions: Tensor,
    block_table: Tensor,
    page_size: int,
    seq_lens: Tensor | None = None,
    *,
    num_slots: int,
    rows_per_page: int,
) -> None:
    """What `compact_slots` makes of `select_slots`' slots, in one launch.

    Args:
        out: [B * q, >= topk] int32, any row stride: row ids of the valid slots, in their order, then 0.
        counts: [B * q] int32, contiguous: how many.
        positions, block_table, page_size, seq_lens, num_slots: as `select_slots` takes them.
        rows_per_page: as `compact_slots` takes it.

    Raises:
        InvalidInput: as both.
    """
    arguments = (positions, block_table, page_size, seq_lens, num_slots, rows_per_page)
    if _select_rows.took(out, counts, *arguments):
        return
    page_size, num_slots = whole_number("page_size", page_size), _checked_count(num_slots)
    rows_per_page = whole_number("rows_per_page", rows_per_page)
    arguments = (positions, block_table, page_size, seq_lens, num_slots, rows_per_page)
    device = _check_selection(out, positions, block_table, seq_lens)
    rows = math.prod(positions.shape[:-1])
    if out.dim() != 2 or out.shape[0] != rows or out.shape[1] < positions.shape[-1]:
        raise refuse("out", list(out.shape), f"[{rows}, at least {positions.shape[-1]}], from positions")
    _check_rows(counts, rows, num_slots, page_size, rows_per_page, device)
    if not out.shape[1]:
        counts.zero_()
    elif rows:
        _select_rows(device >= 0, out, counts, *arguments)


def _check_rows(counts: Tensor, rows: int, num_slots: int, page_size: int, rows_per_page: int, device: int) -> None:
    """Refuse counts that are not [rows], and row ids that do not fit in int32."""
    are_tensors(counts=counts)
    if counts.dtype != torch.int32 or counts.shape != (rows,) or not counts.is_contiguous():
        raise refuse("counts", f"{list(counts.shape)} {counts.dtype}", f"[{rows}] int32, contiguous")
    one_device(device, counts=counts)
    if not (1 <= page_size <= _INT32_MAX and 1 <= rows_per_page <= _INT32_MAX):
        raise refuse("page_size and rows_per_page", f"{page_size} and {rows_per_page}", f"1 to {_INT32_MAX}")
    largest = (max(num_slots, 1) - 1) // page_size * rows_per_page + page_size - 1
    if largest > _INT32_MAX:
        raise refuse("the largest row id", largest, f"at most {_INT32_MAX}")


def _checked_rows(out: Tensor, slots: Tensor) -> int:
    """The device of two [N, K] int32 tables, out at least as wide as slots."""
    are_tensors(out=out, slots=slots)
    if slots.dim() != 2 or out.dim() != 2 or out.shape[0] != slots.shape[0] or out.shape[1] < slots.shape[1]:
        raise refuse("out and slots", [list(x.shape) for x in (out, slots)], "[N, at least K] and [N, K]")
    if slots.dtype != torch.int32 or out.dtype != torch.int32:
        raise refuse("the dtype of out and slots", f"{out.dtype} and {slots.dtype}", "int32")
    writable(out=out)
    dense_last(slots=slots)
    device = out.get_device()
    one_device(device, slots=slots)
    return device


def sanitize_slots(out: Tensor, slots: Tensor, num_slots: int) -> None:
    """out = slots, -1 for every slot outside [0, num_slots) and in the columns past K.

    Args:
        out: [N, >= K] int32, any row stride. May be slots.
        slots: [N, K] int32, any row stride.

    Raises:
        InvalidInput: if shapes, dtypes, devices or last strides disagree.
    """
    if _sanitize_slots.took(out, slots, num_slots):
        return
    device, num_slots = _checked_rows(out, slots), whole_number("num_slots", num_slots, least=0)
    if out.numel():
        _sanitize_slots(device >= 0, out, slots, num_slots)


def compact_slots(
    out: Tensor, counts: Tensor, slots: Tensor, num_slots: int, *, page_size: int = 1, rows_per_page: int = 1
) -> None:
    """The slots inside [0, num_slots) of each row, moved to its front in their order, as row ids; 0 past them.

    Args:
        out: [N, >= K] int32, any row stride, not slots: (slot // page_size) * rows_per_page + slot % page_size.
        counts: [N] int32, contiguous: how many.
        slots: [N, K] int32, any row stride.
        page_size: tokens a page of the cache.
        rows_per_page: rows between two pages' starts, for a kernel that sees the cache as pages of one row.

    Raises:
        InvalidInput: if shapes, dtypes, devices or last strides disagree, or a row id would not fit in int32.
    """
    if _compact_slots.took(out, counts, slots, num_slots, page_size, rows_per_page):
        return
    device, num_slots = _checked_rows(out, slots), whole_number("num_slots", num_slots, least=0)
    page_size, rows_per_page = whole_number("page_size", page_size), whole_number("rows_per_page", rows_per_page)
    _check_rows(counts, slots.shape[0], num_slots, page_size, rows_per_page, device)
    if not out.shape[1]:
        counts.zero_()
    elif out.shape[0]:
        _compact_slots(device >= 0, out, counts, slots, num_slots, page_size, rows_per_page)
