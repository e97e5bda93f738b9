"""Everything that a plan is made from, but for its buffers: what was chosen, by which facts, for which tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mla_backends.adapter import Adapter
from mla_backends.cache import PagedCache
from mla_backends.catalogue import Serving
from mla_backends.device import Device
from mla_backends.problem import Problem

__all__ = ["Recipe", "cache_facts"]


def cache_facts(cache: PagedCache) -> dict[str, Any]:
    """The fields of `Problem` that a cache decides."""
    return {
        "cache_format": cache.format,
        "page_size": cache.page_size,
        "page_stride": cache.page_stride_rows,
        "packed_rows": cache.packed_rows,
        "whole_rows": cache.pages_start_on_rows,
        "alignment": cache.alignment,
        "kv_lora_rank": cache.kv_lora_rank,
        "qk_rope_head_dim": cache.qk_rope_head_dim,
    }


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything that a plan is made from, but for its buffers.

    Args:
        adapter, serving: what was chosen, and who provides it.
        problem, device: the facts that it was chosen by.
        where: the torch device of all tensors.
        num_pages: of the cache.
        softmax_scale: factor on the logits.
        q_dtype: of queries and of out.
        max_seq_len: keys, the capacity of a row.
        attn_sink: [H] float32 or None.
        workspace: uint8 or None.
        q_scale: of an e4m3 query, None where it is measured at each query.
        empty_rows: "any": rows that see no key stay as the kernel leaves them.
        why: what decided the choice, and what the canary said, for `describe`.
    """

    adapter: Adapter
    serving: Serving
    problem: Problem
    device: Device
    where: torch.device
    num_pages: int
    softmax_scale: float
    q_dtype: torch.dtype
    max_seq_len: int
    attn_sink: Tensor | None
    workspace: Tensor | None
    q_scale: float | Tensor | None
    why: dict[str, Any]
    empty_rows: Literal["exact", "any"] = "exact"
