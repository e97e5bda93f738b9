"""The ops that write cache rows, wherever a page lies.

A slot is page * page_size + offset; one below 0 or past the end is skipped. Rows of kv_c, k_pe and k
past the slots are not read.
"""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from mla_backends import torch_ops
from mla_backends.errors import real_number
from mla_backends.formats import INDEXER_WIDTH, Format, format_named, is_float32_scale
from mla_backends.op_table import Op, are_tensors, dense_last, one_device, one_float, refuse, writable
from mla_backends.query_ops import rope_tail

__all__ = ["write_cache", "write_cache_and_rope", "write_indexer_cache"]

_VALUES = (torch.bfloat16, torch.float16, torch.float32)
_INDEXER_ROW = INDEXER_WIDTH + 4

_write_cache = Op(
    "write_cache(Tensor(a!) data, Tensor kv_c, Tensor k_pe, Tensor slots, str format, Tensor? kv_scale, "
    "float kv_scale_value) -> ()",
    torch_ops.write_cache,
)
_write_cache_and_rope = Op(
    "write_cache_and_rope(Tensor(a!) rope, Tensor q_pe, Tensor(b!) data, Tensor kv_c, Tensor k_pe, Tensor slots, "
    "str format, Tensor? kv_scale, float kv_scale_value) -> ()",
    torch_ops.write_cache_and_rope,
)
_write_indexer = Op("write_indexer_cache(Tensor(a!) data, Tensor k, Tensor slots) -> ()", torch_ops.write_indexer_cache)


def _checked_slots(slot_mapping: Tensor, device: int, **rows: Tensor) -> int:
    """The number of tokens.

    Raises:
        InvalidInput: unless slots are [T] int64 and every one has a row, all on one device.
    """
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        found = f"{list(slot_mapping.shape)} {slot_mapping.dtype}"
        raise refuse("slot_mapping", found, "[T] int64; pass slot_mapping.flatten().long()")
    tokens = slot_mapping.shape[0]
    for name, x in rows.items():
        if x.dim() != 2 or x.shape[0] < tokens:
            raise refuse(name, list(x.shape), f"[at least {tokens}, width], a row for each of the slots")
        if x.dtype not in _VALUES:
            raise refuse(f"the dtype of {name}", x.dtype, "bf16, fp16 or fp32")
    dense_last(**rows)
    one_device(device, slot_mapping=slot_mapping, **rows)
    return tokens


def _split(kv_scale: float | Tensor | None) -> tuple[Tensor | None, float]:
    """kv_scale as (tensor, number); the number counts where there is no tensor."""
    if kv_scale is None:
        return None, 1.0
    if isinstance(kv_scale, Tensor):
        return kv_scale, 1.0
    if isinstance(kv_scale, bool) or not isinstance(kv_scale, Real):
        raise refuse("kv_scale", repr(kv_scale), "a number, a tensor of one float32, or None")
    value = real_number(kv_scale)
    if not is_float32_scale(value):
        raise refuse("kv_scale", kv_scale, "a number that is positive and finite in float32")
    return None, value


def _check_write(
    data: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor, format: str, kv_scale: float | Tensor | None
) -> None:
    """Raises InvalidInput for whatever does not fit."""
    layout = format_named(format)
    are_tensors(data=data, kv_c=kv_c, k_pe=k_pe, slot_mapping=slot_mapping)
    device = data.get_device()
    if data.dim() != 3:
        raise refuse("data", list(data.shape), "[pages, page_size, row]; squeeze the head dimension")
    _checked_slots(slot_mapping, device, kv_c=kv_c, k_pe=k_pe)
    writable(data=data)
    if kv_c.dtype != k_pe.dtype:
        raise refuse("the dtype of kv_c and k_pe", f"{kv_c.dtype} and {k_pe.dtype}", "one dtype")
    stored = str(data.dtype).removeprefix("torch.")
    if stored not in layout.dtypes:
        raise refuse("the dtype of data", data.dtype, f"{' or '.join(layout.dtypes)} for format {format}")
    if layout.scale == "none" and kv_c.dtype != data.dtype:
        raise refuse(
            "the dtype of kv_c and k_pe", kv_c.dtype, f"{data.dtype}, as format {format} stores them unchanged"
        )
    rank, rope = kv_c.shape[1], k_pe.shape[1]
    if layout.widths is not None and (rank, rope) != layout.widths:
        raise refuse("the width of kv_c and k_pe", f"{rank} + {rope}", "{} + {}".format(*layout.widths))
    if data.shape[2] != layout.row_width(rank, rope):
        raise refuse(
            "the row of data", data.shape[2], f"{layout.row_width(rank, rope)}, format {format} of {rank} + {rope}"
        )
    if kv_scale is None:
        return
    if layout.scale != "tensor":
        raise refuse("kv_scale", kv_scale, f"None: format {format} has no scale of the whole cache")
    if isinstance(kv_scale, Tensor):
        one_float("kv_scale", kv_scale, device)


def write_cache(
    data: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    slot_mapping: Tensor,
    format: Format,
    kv_scale: float | Tensor | None = None,
) -> None:
    """Store the rows of T tokens.

    Args:
        data: [pages, page_size, row] of the format's dtype, any page and row stride, last stride 1.
        kv_c: [>= T, L], k_pe [>= T, R], any row stride; bf16, fp16 or fp32; data's dtype for formats that copy.
        slot_mapping: [T] int64.
        format: of the rows.
        kv_scale: fp8 only: stored = value / kv_scale, saturating at 448; None is 1. A tensor is one float32 on the
            device and is never read on the host. fp8_ds_mla finds a power of two for each 128 values: the least
            that brings the largest finite one within 448, at least 2**-13.

    Raises:
        InvalidInput: if shapes, dtypes, devices, last strides or the format disagree.
    """
    scale, value = _split(kv_scale)
    if (kv_scale is None or format == "fp8") and _write_cache.took(
        data, kv_c, k_pe, slot_mapping, format, scale, value
    ):
        return
    _check_write(data, kv_c, k_pe, slot_mapping, format, kv_scale)
    if slot_mapping.shape[0] and data.numel():
        _write_cache(data.is_cuda, data, kv_c, k_pe, slot_mapping, format, scale, value)


def write_cache_and_rope(
    rope: Tensor,
    q_pe: Tensor,
    data: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    slot_mapping: Tensor,
    format: Format,
    kv_scale: float | Tensor | None = None,
) -> None:
    """`write_cache`, and the rope part of a query buffer, in one launch.

    Args:
        rope: [Tq, H', R], any outer strides; heads past H are left as they are.
        q_pe: [Tq, H, R], rope's dtype, any outer strides.
        data, kv_c, k_pe, slot_mapping, format, kv_scale: as in `write_cache`.

    Raises:
        InvalidInput: if shapes, dtypes, devices, last strides or the format disagree.
    """
    scale, value = _split(kv_scale)
    may_take = kv_scale is None or format == "fp8"
    if may_take and _write_cache_and_rope.took(rope, q_pe, data, kv_c, k_pe, slot_mapping, format, scale, value):
        return
    _check_write(data, kv_c, k_pe, slot_mapping, format, kv_scale)
    are_tensors(rope=rope, q_pe=q_pe)
    if rope.dim() != 3 or q_pe.dim() != 3:
        raise refuse("rope and q_pe", [list(x.shape) for x in (rope, q_pe)], "[T, H', R] and [T, H, R]")
    tokens, heads, width = q_pe.shape
    if rope.shape[0] != tokens or rope.shape[1] < heads or rope.shape[2] != width:
        raise refuse("rope", list(rope.shape), f"[{tokens}, at least {heads}, {width}], from q_pe")
    if rope.dtype != q_pe.dtype or q_pe.dtype not in _VALUES:
        raise refuse("the dtype of rope and q_pe", f"{rope.dtype} and {q_pe.dtype}", "one of bf16, fp16, fp32")
    writable(rope=rope)
    dense_last(q_pe=q_pe)
    one_device(data.get_device(), rope=rope, q_pe=q_pe)
    if not slot_mapping.shape[0] or not data.numel():
        rope_tail(rope, q_pe)
    elif not q_pe.numel():
        write_cache(data, kv_c, k_pe, slot_mapping, format, kv_scale)
    else:
        _write_cache_and_rope(data.is_cuda, rope, q_pe, data, kv_c, k_pe, slot_mapping, format, scale, value)


def write_indexer_cache(data: Tensor, k: Tensor, slot_mapping: Tensor) -> None:
    """Store DSA indexer keys as e4m3 with a power-of-two scale each, in the page-split layout of `formats.INDEXER`.

    Args:
        data: [pages, page_size, 132] uint8, dense pages, any page stride.
        k: [>= T, 128] bf16, fp16 or fp32, any row stride.
        slot_mapping: [T] int64.

    Raises:
        InvalidInput: if shapes, dtypes, devices or strides disagree.
    """
    if _write_indexer.took(data, k, slot_mapping):
        return
    are_tensors(data=data, k=k, slot_mapping=slot_mapping)
    if data.dim() != 3 or data.shape[2] != _INDEXER_ROW or data.dtype != torch.uint8:
        raise refuse("data", f"{list(data.shape)} {data.dtype}", f"[pages, page_size, {_INDEXER_ROW}] uint8")
    if data.stride(2) != 1 or (data.shape[1] > 1 and data.stride(1) != _INDEXER_ROW):
        raise refuse(
            "the strides of data", list(data.stride()), f"[any, {_INDEXER_ROW}, 1]: keys and scales are split by page"
        )
    writable(data=data)
    tokens = _checked_slots(slot_mapping, data.get_device(), k=k)
    if k.shape[1] != INDEXER_WIDTH:
        raise refuse("k", list(k.shape), f"[at least {tokens}, {INDEXER_WIDTH}]")
    if tokens and data.numel():
        _write_indexer(data.is_cuda, data, k, slot_mapping)
