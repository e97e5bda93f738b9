"""Everything that a plan is made from, but for its buffers: what was chosen, by which facts, for which tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mla_backends.adapter import Adapter
from mla_backends.cache import PagedCache
from mla_backends.catalogue import Serving
from mla_backends.device import Device, is_capturing
from mla_backends.errors import InvalidInput
from mla_backends.problem import Problem
from mla_backends.steps import StepInput

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

    def check_cache(self, cache: PagedCache) -> None:
        """Refuse a layer of another layout than the adapter was chosen for, unless it takes that too.

        Raises:
            InvalidInput: saying what differs, or why the adapter refuses.
        """
        if not isinstance(cache, PagedCache):
            raise InvalidInput(
                f"cache is a {type(cache).__name__}, it takes a PagedCache; a UnifiedCache has one at .layer(i)"
            )
        for name in ("format", "page_size", "kv_lora_rank", "qk_rope_head_dim"):
            planned = getattr(self.problem, "cache_format" if name == "format" else name)
            if getattr(cache, name) != planned:
                raise InvalidInput(f"the cache's {name} is {getattr(cache, name)}, this plan was made for {planned}")
        if cache.device != self.where:
            raise InvalidInput(f"the cache is on {cache.device}, this plan's tensors are on {self.where}")
        if cache.num_pages != self.num_pages:
            raise InvalidInput(f"the cache has {cache.num_pages} pages, this plan was made for {self.num_pages}")
        refusals = self.adapter.refusals(replace(self.problem, **cache_facts(cache)), self.device, forced=True)
        if refusals:
            raise InvalidInput(f"{self.adapter.name} does not take this cache: " + "; ".join(map(str, refusals)))

    def check_capture(self, step: StepInput) -> None:
        """Refuse what a CUDA graph that is being captured cannot hold: work of the host.

        Raises:
            InvalidInput: while one is being captured on the current stream.
        """
        if not is_capturing(self.where):
            return
        if self.adapter.conventions_of(self.problem).metadata == "host":
            raise InvalidInput(
                f"{self.adapter.name} plans on the host, which a CUDA graph cannot hold; plan, take views with at and "
                f"update outside of the capture"
            )
        if step.seq_lens is None and step.seq_lens_cpu is not None:
            raise InvalidInput(
                "seq_lens_cpu alone is given while a CUDA graph is being captured, whose replays would not know of it; "
                "pass seq_lens, on the device"
            )
