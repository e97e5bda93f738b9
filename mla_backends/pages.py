"""What a tensor must be to hold a cache: dtype, widths, strides and scale, checked once, when a cache is made.

Whatever passes can be addressed by pages and rows without another look at it.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from mla_backends.device import torch_device
from mla_backends.errors import InvalidInput, real_number, shown, whole_number
from mla_backends.formats import CacheFormat, Field, format_named, is_float32_scale

__all__ = ["alignment_of", "are_apart", "device_scale", "field_values", "layout_of", "rows_of", "zeros"]


def layout_of(format: str, kv_lora_rank: int, qk_rope_head_dim: int) -> CacheFormat:
    layout = format_named(format)
    whole_number("kv_lora_rank", kv_lora_rank)
    whole_number("qk_rope_head_dim", qk_rope_head_dim, least=0)
    if layout.widths not in (None, (kv_lora_rank, qk_rope_head_dim)):
        raise InvalidInput(
            f"widths are {kv_lora_rank} + {qk_rope_head_dim}, format {format!r} is defined for "
            f"{' + '.join(map(str, layout.widths or ()))}; take another format for this model"
        )
    return layout


def are_apart(row: int, *axes: tuple[int, int]) -> bool:
    """Whether rows at these (size, stride) axes lie apart, each axis's whole extent within the next larger stride."""
    extent = row
    for stride, size in sorted((stride, size) for size, stride in axes if size > 1):
        if stride < extent:
            return False
        extent += (size - 1) * stride
    return True


def rows_of(data: Tensor, layout: CacheFormat, kv_lora_rank: int, qk_rope_head_dim: int) -> Tensor:
    """[pages, page_size, row] over the caller's memory, in the kernels' dtype and with strides that mean something."""
    width = layout.row_width(kv_lora_rank, qk_rope_head_dim)
    forms = f"[pages, page_size, {width}], [pages, page_size, 1, {width}] or [pages, 1, page_size, {width}]"
    if not isinstance(data, Tensor) or data.dim() not in (3, 4) or (data.dim() == 4 and 1 not in data.shape[1:3]):
        raise InvalidInput(f"data is {shown(data)}, it takes {forms}")
    given = data.dtype
    if data.dim() == 4:
        data = data.squeeze(2 if data.shape[2] == 1 else 1)
    num_pages, page_size, found = data.shape
    page_stride, row_stride, inner = data.stride()
    wrong = []
    if str(given).removeprefix("torch.") not in layout.dtypes:
        wrong.append(
            f"data is {given}, format {layout.name!r} takes {' or '.join(layout.dtypes)}: name the format it has"
        )
    if found != width:
        wrong.append(
            f"data has rows of {found}, format {layout.name!r} takes {width} ({kv_lora_rank} latent + {qk_rope_head_dim} "
            f"rope values): name the format it has, or pass kv_lora_rank and qk_rope_head_dim"
        )
    if not num_pages * page_size:
        wrong.append(f"data has {num_pages} pages of {page_size} rows, it takes at least one of each")
    if inner != 1:
        wrong.append(f"data has stride {inner} in its last dimension, it takes 1: rows are dense")
    # Torch may report any stride for a dimension of one element.
    row_stride = row_stride if page_size > 1 else found
    page_stride = page_stride if num_pages > 1 else page_size * row_stride
    if not are_apart(found, (num_pages, page_stride), (page_size, row_stride)):
        wrong.append(
            f"data has {page_stride} elements between pages and {row_stride} between rows, {num_pages} pages of {page_size} "
            f"rows of {found} overlap there: it takes rows with memory of their own, so clone an expanded tensor"
        )
    if wrong:
        raise InvalidInput("; ".join(wrong))
    rows = data.detach().as_strided(data.shape, (page_stride, row_stride, 1))
    return rows.view(dtype_named(layout.dtypes[0]))


def device_scale(kv_scale: float | Tensor | None, layout: CacheFormat, device: torch.device) -> Tensor | None:
    """kv_scale as [1] float32 where kernels read it; None for a format that takes no scale."""
    if layout.scale != "tensor":
        if kv_scale is None:
            return None
        where = "its rows hold their own" if layout.scale == "row" else "it stores values as they are"
        raise InvalidInput(f"kv_scale is given, format {layout.name!r} takes none: {where}; leave kv_scale out")
    if isinstance(kv_scale, Tensor):
        if kv_scale.dtype != torch.float32 or kv_scale.numel() != 1 or kv_scale.device != device:
            raise InvalidInput(
                f"kv_scale is {shown(kv_scale)} on {kv_scale.device}, it takes one float32 on {device}, or a float"
            )
        return kv_scale.detach().reshape(1)
    if kv_scale is None:
        return torch.ones(1, dtype=torch.float32, device=device)
    if isinstance(kv_scale, bool) or not isinstance(kv_scale, Real):
        raise InvalidInput(f"kv_scale is {kv_scale!r}, it takes a float, a tensor of one float32, or None for 1.0")
    value = real_number(kv_scale)
    if not is_float32_scale(value):
        raise InvalidInput(f"kv_scale is {kv_scale!r}, it takes a number that is positive and finite in float32")
    return torch.full((1,), value, dtype=torch.float32, device=device)


def dtype_named(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def zeros(shape: tuple[int, ...], layout: CacheFormat, device: torch.device | str) -> Tensor:
    with torch.inference_mode(False):  # what is made in it cannot be written outside of it
        return torch.zeros(shape, dtype=dtype_named(layout.dtypes[0]), device=torch_device(device))


def alignment_of(base: Tensor, *strides: int) -> int:
    """Bytes, up to 16: what the address and all these strides, in elements, are multiples of."""
    size = base.element_size()
    return math.gcd(16, base.data_ptr(), *(stride * size for stride in strides))


def field_values(data: Tensor, field: Field, offset: int) -> Tensor:
    """[.., count] float32 of the field at this offset of dense bytes [.., n]."""
    # The copy is what allows another dtype: the bytes may lie at any address.
    return data[..., offset : offset + field.nbytes].contiguous().view(dtype_named(field.dtype)).float()
