"""The pages of DSA indexer keys, which are blocks of bytes and not rows: all keys of a page, then all their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_backends import ops
from mla_backends.device import torch_device
from mla_backends.errors import InvalidInput, shown, whole_number
from mla_backends.formats import INDEXER, INDEXER_WIDTH, Field
from mla_backends.pages import alignment_of, field_values

__all__ = ["IndexerCache"]

_ROW = sum(field.nbytes for field in INDEXER)


class IndexerCache:
    """DSA indexer keys: data [pages, page_size, 132] uint8, any page stride.

    The last two dimensions are one block of bytes and not rows: a page is page_size * 128 e4m3 and then page_size float32
    scales, so that page_size is a fact of the layout and a page must be dense.

    Raises:
        InvalidInput: where dtype, width or strides are others.
    """

    data: Tensor
    num_pages: int
    page_size: int
    page_stride: int
    alignment: int
    device: torch.device

    def __init__(self, data: Tensor) -> None:
        if not isinstance(data, Tensor) or data.dtype != torch.uint8 or data.dim() != 3 or data.shape[2] != _ROW:
            raise InvalidInput(f"data is {shown(data)}, it takes a tensor [pages, page_size, {_ROW}] of uint8")
        if not data.numel():
            raise InvalidInput(f"data is {shown(data)}, it takes at least one page of at least one token")
        num_pages, page_size, width = data.shape
        page_bytes = page_size * width
        dense = data.stride(2) == 1 and (page_size == 1 or data.stride(1) == width)
        if not dense or (num_pages > 1 and data.stride(0) < page_bytes):
            raise InvalidInput(
                f"data has strides {data.stride()}, it takes (any from {page_bytes}, {width}, 1): the scales of a page lie "
                f"behind all its keys, so a page is one dense block"
            )
        page_stride = data.stride(0) if num_pages > 1 else page_bytes
        self.data = data
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_stride = page_stride
        self.alignment = alignment_of(data, page_stride)
        self.device = data.device
        self._pages = data.as_strided((num_pages, page_bytes), (page_stride, 1))

    @classmethod
    def allocate(cls, num_pages: int, page_size: int, device: torch.device | str) -> IndexerCache:
        """Packed pages of zeros."""
        shape = (whole_number("num_pages", num_pages), whole_number("page_size", page_size), _ROW)
        return cls(torch.zeros(shape, dtype=torch.uint8, device=torch_device(device)))

    def __repr__(self) -> str:
        return f"IndexerCache({self.num_pages} pages of {self.page_size} keys, page stride {self.page_stride}, {self.device})"

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def write(self, k: Tensor, slot_mapping: Tensor) -> None:
        """Quantise keys into their slots.

        Args:
            k: [>=T, 128], any row stride.
            slot_mapping: [T] int64, page * page_size + offset; a slot below 0 or past the end is skipped.

        Raises:
            InvalidInput: where widths, counts, dtypes or devices disagree.
        """
        if not isinstance(k, Tensor) or not isinstance(slot_mapping, Tensor):
            raise InvalidInput(f"k and slot_mapping are {shown(k)} and {shown(slot_mapping)}, they take tensors")
        ops.write_indexer_cache(self.data, k, slot_mapping)

    def dequantized(self) -> Tensor:
        """[pages, page_size, 128] float32, key * scale."""
        part = {
            field.name: field_values(
                self._pages,
                # All tokens of the page at once: their fields follow each other.
                Field(field.name, field.dtype, field.count * self.page_size),
                field.page_offset * self.page_size + field.offset,
            )
            for field in INDEXER
        }
        key, scale = part["key"], part["scale"]
        return key.view(*scale.shape, INDEXER_WIDTH) * scale.unsqueeze(-1)
