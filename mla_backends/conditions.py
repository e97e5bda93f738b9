"""What a trial varies and what it finds: the axes of the contract, and the errors that each format allows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from mla_backends.formats import Format

__all__ = ["LSE_TOLERANCE", "OUT_TOLERANCE", "Condition", "Outcome"]

# Relative error of out, norm of the difference over norm; absolute error of lse.
# bf16 and fp16: P and out are rounded to 8 and 11 bits; fp8: P is rounded to e4m3, 4 bits; fp32: eager alone.
OUT_TOLERANCE = {"bf16": 5e-3, "fp16": 5e-3, "fp32": 1e-6, "fp8": 4e-2, "fp8_ds_mla": 5e-3}
LSE_TOLERANCE = {"bf16": 1e-3, "fp16": 1e-3, "fp32": 1e-5, "fp8": 2e-3, "fp8_ds_mla": 2e-3}


@dataclass(frozen=True)
class Condition:
    """What a trial varies.

    Args:
        seq_lens: keys a request.
        layers, layer: of the block-major slot that the cache is a view of.
        neighbours: what the slot's other layers hold, NaN or random bytes.
        query: "packed"; "parts", two tensors; "transposed", nope as a transposed bmm gives it and rope as a slice of a
            192-wide tensor; "padded", `DecodePlan.new_query` with NaN in the padded heads.
        topk: sparse decode over random slots, with duplicates, -1 and slots outside the cache among them.
        kv_scale, q_scale: fp8; a "tensor" suffix of `kv_scale_kind` makes it a device tensor.
        q_amax: the query is scaled up to it.
        q_lens: ragged, query rows a request.
        max_batch: the plan's; None is the step's.
        offset: bytes from a 16-byte boundary at which the slot starts.
    """

    num_heads: int = 16
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None
    causal: bool = True
    cache_format: Format = "bf16"
    page_size: int = 64
    seq_lens: tuple[int, ...] = (130, 1, 0, 64, 65, 63, 200)
    layers: int = 3
    layer: int = 1
    neighbours: Literal["nan", "random"] = "nan"
    query: Literal["packed", "parts", "transposed", "padded"] = "packed"
    topk: int | None = None
    attn_sink: bool = False
    return_lse: bool = True
    kv_scale: float | None = None
    kv_scale_kind: Literal["float", "tensor"] = "float"
    q_scale: float | None = None
    q_amax: float | None = None
    max_batch: int | None = None
    offset: int = 0
    batch_invariant: bool = False

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(changed).replace(" ", "") or "base"

    @property
    def batch(self) -> int:
        return len(self.seq_lens) if self.max_batch is None else self.max_batch


@dataclass(frozen=True)
class Outcome:
    """What a trial found.

    Args:
        out_error: relative error of out over all checked rows.
        lse_error: largest absolute error of lse over rows with keys; 0 where none was asked for.
        is_strided_equal: the layer view of the slot and a contiguous clone gave the same bits, out and lse.
        are_empty_rows_right: rows without keys are out 0 and lse -inf, and nothing is NaN.
        is_selection_equal: sparse: slots selected from positions gave the bits of the same slots given.
        is_of_form: out is of the query's dtype, and the lse is there, in float32, where it was asked for.
        facts: `DecodePlan.describe`.
    """

    out_error: float
    lse_error: float
    is_strided_equal: bool
    are_empty_rows_right: bool
    is_selection_equal: bool
    is_of_form: bool
    facts: dict[str, Any]

    def faults(self, condition: Condition) -> tuple[str, ...]:
        """What is wrong, in words; empty when nothing is."""
        found = []
        out_most = OUT_TOLERANCE[condition.cache_format]
        lse_most = max(LSE_TOLERANCE[condition.cache_format], self.facts.get("lse_precision", 0.0))
        if not self.out_error <= out_most:
            found.append(f"out is off by {self.out_error:.2e} of its norm, allowed {out_most:.0e}")
        if not self.lse_error <= lse_most:
            found.append(f"lse is off by {self.lse_error:.2e}, allowed {lse_most:.0e}")
        if not self.is_strided_equal:
            found.append("the strided view and its contiguous clone gave different bits")
        if not self.are_empty_rows_right:
            found.append("a row without keys is not out 0, lse -inf, or something is NaN")
        if not self.is_of_form:
            found.append("out is not of the query's dtype, or the lse is missing or not float32")
        if not self.is_selection_equal:
            found.append("slots selected from positions and the same slots given gave different bits")
        return tuple(found)
