"""Where one layer's cache rows lie.

Nothing is copied: a cache keeps the caller's tensor, checks once that every row of it can be addressed, and holds the
views and facts that plans and adapters read in every step. Which bytes a row has is `formats.py`'s affair.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mla_backends import ops
from mla_backends.errors import InvalidInput, shown, whole_number
from mla_backends.formats import Format, format_named
from mla_backends.pages import (
    alignment_of,
    device_scale,
    field_values,
    layout_of,
    rows_of,
    zeros,
)

__all__ = ["CacheFacts", "PagedCache"]


class CacheFacts(NamedTuple):
    """What a kernel sees of a cache besides its address; a plan compares them in every `run`.

    Strides are in elements of `PagedCache.rows`. alignment: bytes, the largest power of two up to 16 that divides the base
    address and both strides. A single page or a single row a page counts as packed, whatever stride torch reports.
    """

    format: Format
    num_pages: int
    page_size: int
    page_stride: int
    row_stride: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    alignment: int
    device: torch.device


_KNOWN_FACTS: dict[CacheFacts, CacheFacts] = {}
"""One object for equal facts, so that a plan knows a layer's layout again by identity."""


_LIVING: WeakValueDictionary[Hashable, PagedCache] = WeakValueDictionary()


def _place(rows: Tensor, scale: Tensor | None, format: str, kv_lora_rank: int) -> Hashable:
    """What tells two layers apart: a layer's memory, how it is laid out and read, and where its scale is."""
    where = None if scale is None else scale.data_ptr()
    return rows.data_ptr(), rows.shape, rows.stride(), where, format, kv_lora_rank


class PagedCache:
    """One layer's paged rows, wherever they lie: no copy, any page and row stride, last dimension dense. Immutable.

    Args:
        data: [pages, page_size, row], [pages, page_size, 1, row] or [pages, 1, page_size, row] in the format's dtype;
            "fp8" in float8_e4m3fn or uint8.
        format: what the bytes of a row mean; never inferred from its width.
        kv_scale: "fp8" only, None is 1.0: value = stored * kv_scale, for keys and values alike. A tensor is one float32 on
            the cache's device and is never read on the host.
        kv_lora_rank, qk_rope_head_dim: the model's widths; qk_rope_head_dim is 0 without positions in the key.

    Attributes:
        facts: what plans compare.
        rows: [pages, page_size, row], in the dtype that kernels take.
        heads: [pages, page_size, 1, row], the same rows with the one KV head as an axis.
        latent, rope: [pages, page_size, L] and [.., R], views of `rows`; None for "fp8_ds_mla", whose rows mix dtypes.
        latent_heads, rope_heads: [pages, page_size, 1, L] and [.., R], the same with the one KV head as an axis.
        scale: kv_scale as [1] float32 on the device; None for formats other than "fp8".
        own_scale: the caller's own tensor, where kv_scale is one, else `scale`: one name of it, whoever reads or writes it in a
            compiled graph.

    Raises:
        InvalidInput: where dtype, widths, strides or scale are not those of the format.
    """

    __slots__ = (
        "__weakref__",
        "_by_row",
        "data",
        "facts",
        "format",
        "heads",
        "kv_scale",
        "latent",
        "latent_heads",
        "own_scale",
        "page_size",
        "rope",
        "rope_heads",
        "rows",
        "scale",
    )

    data: Tensor
    format: Format
    page_size: int
    kv_scale: float | Tensor | None
    facts: CacheFacts
    rows: Tensor
    heads: Tensor
    latent: Tensor | None
    rope: Tensor | None
    latent_heads: Tensor | None
    rope_heads: Tensor | None
    scale: Tensor | None
    own_scale: Tensor | None
    _by_row: PagedCache | None

    def __init__(
        self,
        data: Tensor,
        format: Format,
        *,
        kv_scale: float | Tensor | None = None,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
    ) -> None:
        # A view that is made in inference mode can only be written there, and caches outlive it.
        with torch.inference_mode(False):
            self._make(data, format, kv_scale, kv_lora_rank, qk_rope_head_dim)

    def _make(
        self, data: Tensor, format: Format, kv_scale: float | Tensor | None, kv_lora_rank: int, qk_rope_head_dim: int
    ) -> None:
        layout = layout_of(format, kv_lora_rank, qk_rope_head_dim)
        # As plain numbers, as layout_of takes numpy's too.
        kv_lora_rank, qk_rope_head_dim = operator.index(kv_lora_rank), operator.index(qk_rope_head_dim)
        rows = rows_of(data, layout, kv_lora_rank, qk_rope_head_dim)
        num_pages, page_size, _ = rows.shape
        page_stride, row_stride, _ = rows.stride()
        mixed = layout.scale == "row"
        put = object.__setattr__
        put(self, "data", data)
        put(self, "format", format)
        put(self, "page_size", page_size)
        put(self, "scale", device_scale(kv_scale, layout, rows.device))
        # numpy's numbers as plain ones
        if kv_scale is not None and not isinstance(kv_scale, Tensor) and type(kv_scale) not in (int, float):
            kv_scale = float(kv_scale)
        put(self, "kv_scale", kv_scale)
        is_own = isinstance(kv_scale, Tensor) and not kv_scale.requires_grad
        put(self, "own_scale", kv_scale if is_own else self.scale)
        put(self, "rows", rows)
        put(self, "heads", rows.unsqueeze(2))
        put(self, "latent", None if mixed else rows[..., :kv_lora_rank])
        put(self, "rope", None if mixed else rows[..., kv_lora_rank:])
        put(self, "latent_heads", None if self.latent is None else self.latent.unsqueeze(2))
        put(self, "rope_heads", None if self.rope is None else self.rope.unsqueeze(2))
        put(self, "_by_row", None)
        facts = CacheFacts(
            format=format,
            num_pages=num_pages,
            page_size=page_size,
            page_stride=page_stride,
            row_stride=row_stride,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            alignment=alignment_of(rows, page_stride, row_stride),
            device=rows.device,
        )
        put(self, "facts", _KNOWN_FACTS.setdefault(facts, facts))
        _LIVING[_place(rows, self.scale, format, kv_lora_rank)] = self

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        page_size: int,
        format: Format,
        device: torch.device | str,
        *,
        kv_scale: float | Tensor | None = None,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
    ) -> PagedCache:
        """Packed pages of zeros: some kernels let what lies in unused rows through, so it must be finite."""
        layout = layout_of(format, kv_lora_rank, qk_rope_head_dim)
        shape = (whole_number("num_pages", num_pages), whole_number("page_size", page_size))
        data = zeros((*shape, layout.row_width(kv_lora_rank, qk_rope_head_dim)), layout, device)
        return cls(data, format, kv_scale=kv_scale, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)

    @classmethod
    def over(
        cls, rows: Tensor, scale: Tensor | None, format: Format, *, kv_lora_rank: int, qk_rope_head_dim: int
    ) -> PagedCache:
        """A cache of these `rows` with this `scale`: the living one that lies there, or a new one."""
        found = _LIVING.get(_place(rows, scale, format, kv_lora_rank))
        if found is not None:
            return found
        return cls(rows, format, kv_scale=scale, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a PagedCache is immutable, so {name} cannot be set; make another one over the same data")

    def __repr__(self) -> str:
        f = self.facts
        return f"PagedCache({f.format}, {f.num_pages} pages of {f.page_size} rows, page stride {f.page_stride}, {f.device})"

    @property
    def num_pages(self) -> int:
        return self.facts.num_pages

    @property
    def num_slots(self) -> int:
        """Slots are 0 <= slot < num_slots."""
        return self.facts.num_pages * self.facts.page_size

    @property
    def kv_lora_rank(self) -> int:
        return self.facts.kv_lora_rank

    @property
    def qk_rope_head_dim(self) -> int:
        return self.facts.qk_rope_head_dim

    @property
    def alignment(self) -> int:
        return self.facts.alignment

    @property
    def device(self) -> torch.device:
        return self.facts.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `rows`."""
        return self.rows.dtype

    @property
    def packed_rows(self) -> bool:
        """The rows of a page follow each other without a gap."""
        return self.facts.row_stride == self.rows.shape[2]

    @property
    def packed_pages(self) -> bool:
        """The pages follow each other at the rows' own pitch."""
        return self.facts.page_stride == self.facts.page_size * self.facts.row_stride

    @property
    def page_stride_rows(self) -> int | None:
        """Whole rows (of the row's width) between the starts of two pages, rounded down; None for packed pages."""
        return None if self.packed_pages else self.facts.page_stride // self.rows.shape[2]

    @property
    def pages_start_on_rows(self) -> bool:
        """The page stride is a whole number of rows, as kernels need that address pages by row."""
        return self.facts.page_stride % self.rows.shape[2] == 0

    def write(self, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Put tokens into their slots: one launch, no copy.

        Args:
            kv_c: [>=T, L], the compressed latent, any row stride.
            k_pe: [>=T, R], the rotated shared key, any row stride.
            slot_mapping: [T] int64, page * page_size + offset; a slot below 0 or past the end is skipped.

        e4m3 saturates at 448.

        Raises:
            InvalidInput: where widths, counts, dtypes or devices disagree.
        """
        f = self.facts
        if not isinstance(kv_c, Tensor) or not isinstance(k_pe, Tensor) or not isinstance(slot_mapping, Tensor):
            found = " and ".join(map(shown, (kv_c, k_pe, slot_mapping)))
            raise InvalidInput(f"kv_c, k_pe and slot_mapping are {found}, they take tensors")
        if kv_c.shape[1:] != (f.kv_lora_rank,) or k_pe.shape[1:] != (f.qk_rope_head_dim,):
            raise InvalidInput(
                f"kv_c is {list(kv_c.shape)} and k_pe {list(k_pe.shape)}, this cache takes kv_c [>=T, {f.kv_lora_rank}] "
                f"and k_pe [>=T, {f.qk_rope_head_dim}]; squeeze a head axis, and make the cache with the model's widths"
            )
        ops.write_cache(self.rows, kv_c, k_pe, slot_mapping, f.format, self.own_scale)

    def dequantized(self) -> Tensor:
        """[pages, page_size, D] float32, the values as a kernel reads them."""
        return self._values(self.rows)

    def gather(self, slots: Tensor) -> Tensor:
        """The values of some slots: int64 [..] -> [.., D] float32.

        Every slot must lie in 0 <= slot < num_slots; on a GPU nothing here looks.
        """
        page_size = self.page_size
        return self._values(self.rows[slots.div(page_size, rounding_mode="floor"), slots.remainder(page_size)])

    def split_pages(self, page_size: int) -> PagedCache:
        """The same rows as smaller pages, page id -> id * ratio + i.

        Raises:
            InvalidInput: where page_size does not divide this one's, or pages do not follow each other, so that no single
                stride leads from each small page to the next.
        """
        f = self.facts
        page_size = whole_number("page_size", page_size)
        if page_size == f.page_size:
            return self
        if page_size > f.page_size or f.page_size % page_size:
            raise InvalidInput(f"page_size is {page_size}, it takes a divisor of the cache's {f.page_size}")
        if not self.packed_pages:
            raise InvalidInput(
                f"the cache has {f.page_stride} elements between pages of {f.page_size} rows at {f.row_stride} elements, "
                f"split_pages takes pages that follow each other; allocate the cache with page_size {page_size}"
            )
        rows = self.rows
        shape = (f.num_pages * (f.page_size // page_size), page_size, rows.shape[2])
        return PagedCache(
            rows.as_strided(shape, (page_size * f.row_stride, f.row_stride, 1)),
            f.format,
            kv_scale=self.kv_scale,
            kv_lora_rank=f.kv_lora_rank,
            qk_rope_head_dim=f.qk_rope_head_dim,
        )

    @property
    def rows_per_page(self) -> int:
        """Rows between the starts of two pages, those of other layers included.

        Raises:
            InvalidInput: where pages don't start on rows.
        """
        f = self.facts
        if f.page_stride % f.row_stride:
            raise InvalidInput(
                f"the cache has {f.page_stride} elements between pages and {f.row_stride} between rows, "
                f"a kernel that reads it by row takes a whole number of rows a page"
            )
        return f.page_stride // f.row_stride

    @property
    def by_row(self) -> PagedCache:
        """The same memory as pages of one row, for kernels that take a page for each key; made once.

        Row id * `rows_per_page` + offset is the row `offset` of page `id`; what other layers have in between has ids too.

        Raises:
            InvalidInput: where pages don't start on rows.
        """
        known = self._by_row
        if known is not None:
            return known
        f = self.facts
        shape = ((f.num_pages - 1) * self.rows_per_page + f.page_size, 1, self.rows.shape[2])
        made = PagedCache(
            self.rows.as_strided(shape, (f.row_stride, f.row_stride, 1)),
            f.format,
            kv_scale=self.kv_scale,
            kv_lora_rank=f.kv_lora_rank,
            qk_rope_head_dim=f.qk_rope_head_dim,
        )
        object.__setattr__(self, "_by_row", made)
        return made

    def _values(self, rows: Tensor) -> Tensor:
        """[.., row] as stored -> [.., D] float32."""
        if self.latent is not None:
            return rows.float() if self.scale is None else rows.float() * self.scale
        fields = format_named(self.format).fields(self.kv_lora_rank, self.qk_rope_head_dim)
        part = {field.name: field_values(rows, field, field.offset) for field in fields}
        latent, scale = part["latent"], part["scale"]
        tile = latent.shape[-1] // scale.shape[-1]
        tiles = latent.view(*scale.shape, tile) * scale.unsqueeze(-1)
        return torch.cat((tiles.view(latent.shape), part["rope"]), -1)
