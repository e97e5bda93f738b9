"""The ops that on CUDA tensors are more than one kernel of ours: where cuBLAS is the faster one, it is used.

Each gives False, with nothing done, for arguments that break its contract: the export has looked. They are called
only where the compiled library is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_backends import torch_ops
from mla_backends.compiled import function

__all__ = ["FEW_TOKENS", "FEW_TOKENS_E4M3", "absorb_query", "merge_partials"]

FEW_TOKENS = 48
"""Up to here a query is absorbed by our kernel, one launch, and past it by cuBLAS and a kernel for the rope.

Source: "crossover" of ci/bench-ops on an H200: of their time ours takes 0.85, 0.97 and 1.00 at 48 tokens of 16, 64 and 128
heads, 0.95, 1.08 and 1.07 at 64. With W_UV, [512, 128], a kernel of this kind took 1.07 to 1.8 of cuBLAS's time at every
number of tokens, so that product is cuBLAS's.
"""

FEW_TOKENS_E4M3 = 64
"""The same for an e4m3 query, where cuBLAS needs one more launch, to quantise what it wrote in bf16.

Source: the same table: 0.88, 0.88 and 0.81 at 64 tokens of 16, 64 and 128 heads, 1.04, 0.99 and 0.86 at 96.
"""

REFUSED, DONE, PRODUCT_IS_LEFT = 0, 1, 2
"""What `absorb_query` answers; csrc/query_exports.h."""


def _export(name: str) -> Any:
    export = function(name)
    assert export is not None, "called without a library"
    return export


def absorb_query(
    latent: Tensor, rope: Tensor, q_nope: Tensor, q_pe: Tensor, w_uk: Tensor, scale: Tensor | None
) -> bool:
    few = FEW_TOKENS if scale is None else FEW_TOKENS_E4M3
    outcome = _export("absorb_query")(latent, rope, q_nope, q_pe, w_uk, scale, few)
    if outcome != PRODUCT_IS_LEFT:
        return bool(outcome == DONE)
    heads = q_nope.shape[1]
    if latent.shape[1] != heads:
        latent = latent[:, :heads]
    if scale is None:
        torch_ops.batched_matmul(latent.transpose(0, 1), q_nope.transpose(0, 1), w_uk)
        return True
    with torch.autocast("cuda", enabled=False):  # whose dtype another matrix product would have
        product = torch.bmm(q_nope.detach().transpose(0, 1), w_uk.detach())
    return bool(_export("quantize_query")(latent, product.transpose(0, 1), scale))


def merge_partials(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> bool:
    if outs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        torch_ops.merge_partials(out, lse, outs, lses)
        return True
    return bool(_export("merge_partials")(out, lse, outs.contiguous(), lses.contiguous()))
