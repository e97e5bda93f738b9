"""vLLM's cache ops, loaded from its library alone, called by the names that their schemas give the arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load() -> Any:
    """The ops in $MLA_KERNEL_SITE/vllm; None where they are not."""
    library = Path(os.environ.get("MLA_KERNEL_SITE", "")) / "vllm/_C_stable_libtorch.abi3.so"
    if not library.is_file():
        return None
    torch.ops.load_library(str(library))
    return torch.ops._C_cache_ops


def _call(op: Any, **given: Any) -> None:
    schema = op.default._schema
    missing = [a.name for a in schema.arguments if a.name not in given and not a.has_default_value()]
    unknown = sorted(set(given) - {a.name for a in schema.arguments})
    if missing or unknown:
        raise SystemExit(f"this vLLM has {schema}: missing {missing}, unknown {unknown}")
    op.default(**given)


def write_cache(vllm: Any, data: Tensor, kv_c: Tensor, k_pe: Tensor, slots: Tensor, format: str, scale: Tensor) -> None:
    """concat_and_cache_mla; the scale is read by fp8 alone."""
    _call(
        vllm.concat_and_cache_mla,
        kv_c=kv_c,
        k_pe=k_pe,
        kv_cache=data,
        slot_mapping=slots,
        kv_cache_dtype="auto" if format == "bf16" else format,
        scale=scale,
    )


def write_indexer(vllm: Any, data: Tensor, k: Tensor, slots: Tensor) -> None:
    """indexer_k_quant_and_cache with power-of-two scales."""
    _call(
        vllm.indexer_k_quant_and_cache,
        k=k,
        kv_cache=data,
        slot_mapping=slots,
        quant_block_size=128,
        kv_cache_dtype="ue8m0",  # the schema's name for what vLLM's own wrapper calls scale_fmt
    )
