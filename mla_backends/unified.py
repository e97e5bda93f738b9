"""One block-major slot for all layers of a model, each of which is a `PagedCache` that views it where it lies."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from mla_backends.cache import PagedCache
from mla_backends.errors import InvalidInput, shown, whole_number
from mla_backends.formats import Format
from mla_backends.pages import are_apart, layout_of, zeros

__all__ = ["UnifiedCache"]


class UnifiedCache:
    """One block-major slot for all layers: data [pages, layers, page_size, row].

    A page of all layers is one piece of memory, which moves and frees as one; each layer is a view of it whose page stride
    is a slot and not a page.

    Raises:
        InvalidInput: as `PagedCache`, for the layers' views.
    """

    data: Tensor
    format: Format
    num_layers: int

    def __init__(self, data: Tensor, format: Format, *, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64) -> None:
        if not isinstance(data, Tensor) or data.dim() != 4 or not data.numel():
            raise InvalidInput(
                f"data is {shown(data)}, it takes a tensor [pages, layers, page_size, row] that has rows"
            )
        if not are_apart(data.shape[3], *zip(data.shape[:3], data.stride()[:3], strict=True)):
            raise InvalidInput(f"data has strides {data.stride()} for {shown(data)}, it takes rows that do not overlap")
        self.data = data
        self.format = format
        self.num_layers = data.shape[1]
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self._layers: dict[tuple[int, type, float | None], PagedCache] = {}
        # By layer, the last one whose scale is a tensor: an engine has one a layer, and must not collect all it ever gave.
        self._tensor_scaled: dict[int, PagedCache] = {}
        # All at once, so that a compiled function may ask for a layer: making one reads an address, which it could not.
        for i in range(self.num_layers):
            self.layer(i)

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        num_layers: int,
        page_size: int,
        format: Format,
        device: torch.device | str,
        *,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
    ) -> UnifiedCache:
        """A slot of zeros."""
        layout = layout_of(format, kv_lora_rank, qk_rope_head_dim)
        shape = (
            whole_number("num_pages", num_pages),
            whole_number("num_layers", num_layers),
            whole_number("page_size", page_size),
        )
        data = zeros((*shape, layout.row_width(kv_lora_rank, qk_rope_head_dim)), layout, device)
        return cls(data, format, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)

    def __repr__(self) -> str:
        pages, layers, page_size, _ = self.data.shape
        return f"UnifiedCache({self.format}, {layers} layers, {pages} pages of {page_size} rows, {self.data.device})"

    def layer(self, i: int, *, kv_scale: float | Tensor | None = None) -> PagedCache:
        """The view of one layer; the same object for the same layer and scale. Negative i counts from the last.

        Raises:
            InvalidInput: for a layer that is not there, and for a `kv_scale` as `PagedCache`.
        """
        try:
            if isinstance(kv_scale, Tensor):
                known = self._tensor_scaled.get(i)
                if known is not None and known.kv_scale is kv_scale:
                    return known
            else:
                # The type is part of the key because True == 1.0, and a bool is refused.
                known = self._layers.get((i, type(kv_scale), kv_scale))
                if known is not None:
                    return known
        except TypeError:  # what has no hash is neither a layer nor a scale, and refused
            pass
        return self._make(i, kv_scale)

    def _make(self, i: Any, kv_scale: float | Tensor | None) -> PagedCache:
        if not hasattr(i, "__index__") or not -self.num_layers <= operator.index(i) < self.num_layers:
            raise InvalidInput(
                f"layer is {i!r}, it takes 0 to {self.num_layers - 1}, or -{self.num_layers} to -1 from the end"
            )
        i = operator.index(i)
        if i < 0:
            return self.layer(i + self.num_layers, kv_scale=kv_scale)
        made = PagedCache(
            self.data[:, i],
            self.format,
            kv_scale=kv_scale,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
        )
        if isinstance(kv_scale, Tensor):
            self._tensor_scaled[i] = made
        else:
            self._layers[i, type(kv_scale), kv_scale] = made
        return made
