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

__all__ = ["FEW_TOKENS", "absorb_query", "batched_matmul", "merge_partials"]

FEW_TOKENS = 16
"""Up to here our kernel, which reads every weight once, is used instead of cuBLAS. Source: ci/bench-ops, "crossover"."""

REFUSED, DONE, PRODUCT_IS_LEFT = 0, 1, 2
"""What an export for few tokens answers; csrc/query_exports.h."""


def _export(name: str) -> Any:
    export = function(name)
    assert export is not None, "called without a library"
    return export


def batched_matmul(out: Tensor, a: Tensor, b: Tensor) -> bool:
    outcome = _export("batched_matmul")(out, a, b, FEW_TOKENS)
    if outcome == PRODUCT_IS_LEFT:
        torch_ops.batched_matmul(out, a, b)
    return bool(outcome != REFUSED)


def absorb_query(
    latent: Tensor, rope: Tensor, q_nope: Tensor, q_pe: Tensor, w_uk: Tensor, scale: Tensor | None
) -> bool:
    outcome = _export("absorb_query")(latent, rope, q_nope, q_pe, w_uk, scale, FEW_TOKENS)
    if outcome != PRODUCT_IS_LEFT:
        return bool(outcome == DONE)
    heads = q_nope.shape[1]
    if latent.shape[1] != heads:
        latent = latent[:, :heads]
    if scale is None:
        torch_ops.batched_matmul(latent.transpose(0, 1), q_nope.transpose(0, 1), w_uk)
        return True
    product = torch.bmm(q_nope.detach().transpose(0, 1), w_uk.detach())
    return bool(_export("quantize_query")(latent, product.transpose(0, 1), scale))


def merge_partials(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> bool:
    if outs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        torch_ops.merge_partials(out, lse, outs, lses)
        return True
    return bool(_export("merge_partials")(out, lse, outs.contiguous(), lses.contiguous()))
