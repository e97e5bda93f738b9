"""The bytes of a cache row: each format is a set of fields, so that a page-split layout is fields too.

A cache carries its format by name, never inferred from its width: 528 bytes mean two things already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mla_backends.errors import InvalidInput

__all__ = ["E4M3_MAX", "FORMATS", "INDEXER", "CacheFormat", "Field", "Format", "format_named", "is_float32_scale"]

Format = Literal["bf16", "fp16", "fp32", "fp8", "fp8_ds_mla"]

E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn; writes saturate here."""

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True)
class Field:
    """Where one part of a token lies: at page_offset * page_size + offset + token * stride bytes from its page's start.

    Args:
        name: "latent", "scale", "rope" or "key".
        dtype: of the stored values, as torch names it.
        count: values a token.
        offset: bytes, from the token's row.
        page_offset: bytes a token of the page that come before this field in a page-split layout.
        stride: bytes between two tokens of a page; None where it is the row's pitch, whatever the cache has.
    """

    name: str
    dtype: str
    count: int
    offset: int = 0
    page_offset: int = 0
    stride: int | None = None

    @property
    def nbytes(self) -> int:
        return self.count * _BYTES[self.dtype]


@dataclass(frozen=True)
class CacheFormat:
    """One layout of a token.

    Args:
        name: what a `PagedCache` carries.
        dtypes: torch dtypes that the storage may have, the one that `allocate` makes first.
        scale: who scales a stored value: "none"; "tensor", by the cache's kv_scale; "row", by the row's own scales.
        widths: the one (kv_lora_rank, qk_rope_head_dim) that the format is defined for; None for any.
        query_dtype: of the model's queries by default, as torch names it.
    """

    name: Format
    dtypes: tuple[str, ...]
    scale: Literal["none", "tensor", "row"]
    widths: tuple[int, int] | None = None
    query_dtype: str = "bfloat16"

    def fields(self, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64) -> tuple[Field, ...]:
        """The parts of a row of these widths, in the order of their bytes."""
        if self.name == "fp8_ds_mla":
            tiles = kv_lora_rank // FP8_DS_MLA_TILE
            return (
                Field("latent", "float8_e4m3fn", kv_lora_rank),
                Field("scale", "float32", tiles, offset=kv_lora_rank),
                Field("rope", "bfloat16", qk_rope_head_dim, offset=kv_lora_rank + 4 * tiles),
            )
        latent = Field("latent", self.dtypes[0], kv_lora_rank)
        return (latent, Field("rope", self.dtypes[0], qk_rope_head_dim, offset=latent.nbytes))

    def row_bytes(self, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64) -> int:
        """Bytes of one row without padding: 1152 for bf16, 576 for fp8, 656 for fp8_ds_mla at 512 + 64."""
        return sum(field.nbytes for field in self.fields(kv_lora_rank, qk_rope_head_dim))

    def row_width(self, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64) -> int:
        """The last dimension of the cache tensor: values of dtypes[0]."""
        return self.row_bytes(kv_lora_rank, qk_rope_head_dim) // _BYTES[self.dtypes[0]]


FP8_DS_MLA_TILE = 128
"""Latent values that share one scale in an fp8_ds_mla row."""

FORMATS: dict[str, CacheFormat] = {
    f.name: f
    for f in (
        CacheFormat("bf16", ("bfloat16",), "none"),
        CacheFormat("fp16", ("float16",), "none", query_dtype="float16"),
        CacheFormat("fp32", ("float32",), "none", query_dtype="float32"),
        CacheFormat("fp8", ("float8_e4m3fn", "uint8"), "tensor"),
        # Source: FlashMLA's README, "FP8 KV cache": 512 e4m3, 4 float32 scales, 64 bf16.
        CacheFormat("fp8_ds_mla", ("uint8",), "row", widths=(512, 64)),
    )
}

INDEXER_WIDTH = 128
"""Values of a DSA indexer key."""

INDEXER: tuple[Field, ...] = (
    Field("key", "float8_e4m3fn", INDEXER_WIDTH, stride=INDEXER_WIDTH),
    Field("scale", "float32", 1, page_offset=INDEXER_WIDTH, stride=4),
)
"""A page of indexer keys: page_size * 128 e4m3, then page_size float32 scales.

Source: indexer_k_quant_and_cache of vLLM, csrc/cache_kernels.cu.
"""


LEAST_SCALE, MOST_SCALE = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""The least normal and the largest float32."""


def is_float32_scale(value: float) -> bool:
    """Whether a scale stays positive and finite as the float32 that kernels read."""
    return LEAST_SCALE <= value <= MOST_SCALE


def format_named(name: str) -> CacheFormat:
    """The format of that name.

    Raises:
        InvalidInput: for a name that is no format.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise InvalidInput(f"format is {name!r}, it takes one of {', '.join(FORMATS)}")
    return FORMATS[name]
