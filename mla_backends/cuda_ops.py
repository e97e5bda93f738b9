"""The ops that on CUDA tensors are more than one kernel of ours: where cuBLAS is the faster one, it is used.

Nothing here checks a shape: `ops` has done it. Without the compiled library the torch forms serve.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_backends import torch_ops
from mla_backends.compiled import function

__all__ = ["FEW_TOKENS", "absorb_query", "batched_matmul", "merge_partials"]

FEW_TOKENS = 16
"""Up to here our kernel, which reads every weight once, is used instead of cuBLAS. Source: ci/bench-ops, "crossover"."""


def batched_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    few = function("matmul_few")
    if few is not None and a.shape[1] <= FEW_TOKENS and few(out, a, b):
        return
    torch_ops.batched_matmul(out, a, b)


def absorb_query(
    latent: Tensor, rope: Tensor, q_nope: Tensor, q_pe: Tensor, w_uk: Tensor, scale: Tensor | None
) -> None:
    few, tail, quantize = function("absorb_few"), function("rope_tail"), function("quantize_query")
    if few is None or tail is None or quantize is None:
        torch_ops.absorb_query(latent, rope, q_nope, q_pe, w_uk, scale)
        return
    tokens, heads, _ = q_nope.shape
    if tokens <= FEW_TOKENS and few(latent, rope, q_nope, q_pe, w_uk, scale):
        return
    if latent.shape[1] != heads:
        latent = latent[:, :heads]
    if scale is None:
        torch_ops.batched_matmul(latent.transpose(0, 1), q_nope.transpose(0, 1), w_uk)
    else:
        product = torch.bmm(q_nope.detach().transpose(0, 1), w_uk.detach())
        quantize(latent, product.transpose(0, 1), scale)
    if q_pe.shape[2]:
        tail(rope, q_pe, scale)


def merge_partials(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
    merge = function("merge_partials")
    if merge is None or outs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        torch_ops.merge_partials(out, lse, outs, lses)
        return
    merge(out, lse, outs.contiguous(), lses.contiguous())
