"""What is asked: one MLA decode step, and the widths of the model, as plain numbers.

A `Problem` holds no tensor and this module imports no torch, so whatever is decided from it is
decided, and tested, without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Integral
from typing import Any

from mla_backends.errors import InvalidInput, real_number, whole_number

__all__ = ["Geometry", "Problem", "softmax_scale"]


_UNKNOWN = ("batch", "page_stride", "topk", "max_seq_len")
"""The counts of a `Problem` that may be None."""


@dataclass(frozen=True)
class Problem:
    """One decode step as plain facts: everything that dispatch may depend on.

    Built by `Backend.plan`, or by hand for `Backend.explain`.

    Args:
        num_heads: query heads on this rank.
        batch: requests in a step, the plan's `max_batch`; None where it is not known.
        q_len: new tokens a request; the largest one when `ragged`.
        ragged: queries are [T, H, D] with `cu_q_lens`.
        causal: row i of a request sees keys up to seq_len - q_len + i; else all of them.
        kv_lora_rank: width of the latent, which is key and value.
        qk_rope_head_dim: width of the rotated key.
        cache_format: by name, "bf16", "fp16", "fp32", "fp8", "fp8_ds_mla".
        q_dtype: dtype of the model's queries, as torch names it.
        page_size: tokens a page.
        page_stride: rows between the starts of two pages; None for packed pages.
        alignment: bytes, a power of two that divides the cache's base address and outer strides.
        topk: keys a query row selects; None when attention is dense.
        needs_lse: the caller wants the log-sum-exp.
        attn_sink: a sink logit per head is given.
        batch_invariant: a row's bits must not depend on the rest of the batch.
        max_seq_len: tokens, the longest request that the plan must hold; None where it is not known.
        packed_rows: the rows of a page follow each other without a gap.
        whole_rows: every page starts a whole number of rows after the one before.
        measured_q_scale: no `q_scale` is given, so that an e4m3 query's scale would be measured over the batch.

    Raises:
        InvalidInput: for a count that is no whole number or below its least value, and None where a count must be.
    """

    num_heads: int
    _: KW_ONLY
    batch: int | None = None
    q_len: int = 1
    ragged: bool = False
    causal: bool = True
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    cache_format: str = "bf16"
    q_dtype: str = "bfloat16"
    page_size: int = 64
    page_stride: int | None = None
    alignment: int = 16
    topk: int | None = None
    needs_lse: bool = False
    attn_sink: bool = False
    batch_invariant: bool = False
    max_seq_len: int | None = None
    packed_rows: bool = True
    whole_rows: bool = True
    measured_q_scale: bool = True

    def __post_init__(self) -> None:
        at_least_one = ("num_heads", "kv_lora_rank", "page_size", "page_stride", "alignment", "topk")
        at_least_zero = ("q_len", "batch", "qk_rope_head_dim", "max_seq_len")
        for names, least in ((at_least_one, 1), (at_least_zero, 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None or name not in _UNKNOWN:
                    object.__setattr__(self, name, whole_number(name, value, least=least))

        if self.page_stride is not None and self.page_stride < self.page_size:
            raise InvalidInput(
                f"page_stride is {self.page_stride} rows, it takes at least page_size, {self.page_size}; None is packed pages"
            )
        for name in ("cache_format", "q_dtype"):
            if not isinstance(getattr(self, name), str):
                cure = 'a name such as "bfloat16"' if name == "q_dtype" else 'a name such as "bf16" or "fp8"'
                raise InvalidInput(f"{name} is {getattr(self, name)!r}, it takes {cure}")
        for fact in fields(self):
            if isinstance(fact.default, bool) and not isinstance(getattr(self, fact.name), bool):
                raise InvalidInput(f"{fact.name} is {getattr(self, fact.name)!r}, it takes True or False")

    @property
    def row_width(self) -> int:
        """D: latent and rope values of one token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name == "num_heads" or getattr(self, f.name) != f.default
        ]
        return ", ".join(changed)


def _value(config: Any, *names: str) -> Any:
    """The first of `names` that a config (an object or a mapping) has and that is not None."""
    for name in names:
        found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if found is not None:
            return found
    return None


def _required(config: Any, name: str) -> int:
    found = _value(config, name)
    if found is None:
        raise InvalidInput(
            f"the config has no {name}, so it describes no MLA model; it takes a DeepSeek-V2/V3 or kindred config, "
            f"of a multimodal model its text_config"
        )
    try:
        return int(found)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"the config's {name} is {found!r}, it takes a whole number") from None


@dataclass(frozen=True)
class Geometry:
    """Widths of one model on one rank; `num_heads` is rank-local.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; the names are those of its config.
    """

    num_heads: int
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128

    def __post_init__(self) -> None:
        for f in fields(self):
            value = whole_number(f.name, getattr(self, f.name), least=0 if f.name == "qk_rope_head_dim" else 1)
            object.__setattr__(self, f.name, value)

    @classmethod
    def from_config(cls, config: Any, *, tp_size: int = 1) -> Geometry:
        """The geometry of a Hugging Face config (an object or a mapping) under tensor parallelism of `tp_size` ranks.

        Raises:
            InvalidInput: if a width is missing, or `tp_size` does not divide the heads.
        """
        heads = _required(config, "num_attention_heads")
        if not isinstance(tp_size, Integral) or isinstance(tp_size, bool) or tp_size < 1 or heads % tp_size:
            raise InvalidInput(f"tp_size is {tp_size!r}, it takes a divisor of the model's {heads} heads")
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return cls(heads // int(tp_size), **{name: _required(config, name) for name in names})


def softmax_scale(config: Any) -> float:
    """(qk_nope_head_dim + qk_rope_head_dim) ** -0.5, times YaRN's mscale squared.

    mscale = 0.1 * mscale_all_dim * ln(factor) + 1, from `mscale_all_dim` and `factor` of
    `rope_parameters`, else of `rope_scaling`; 1 where there is no YaRN or factor is at most 1.

    Args:
        config: a Hugging Face config, an object or a mapping.

    Raises:
        InvalidInput: if a width is missing, or YaRN's numbers are none.

    Source: DeepseekV3Attention of Hugging Face transformers and DeepSeek-V3's own inference/model.py.
    """
    base = float((_required(config, "qk_nope_head_dim") + _required(config, "qk_rope_head_dim")) ** -0.5)
    for name in ("rope_parameters", "rope_scaling"):
        rope = _value(config, name) or {}
        mscale_all_dim, factor = _value(rope, "mscale_all_dim"), _value(rope, "factor")
        if (_value(rope, "rope_type", "type") or "default") == "default" or not mscale_all_dim or not factor:
            continue
        for key, found in (("mscale_all_dim", mscale_all_dim), ("factor", factor)):
            if not math.isfinite(real_number(found)):
                raise InvalidInput(f"the config's {name}[{key!r}] is {found!r}, it takes a finite number")
        mscale = 0.1 * float(mscale_all_dim) * math.log(float(factor)) + 1.0 if factor > 1 else 1.0
        return base * mscale * mscale
    return base
