"""The ops that make a query: absorption, concatenation, quantisation.

The shape contract of each is checked here, once for both forms. T tokens, H heads; "any outer
strides" means that only the last dimension must be dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_backends import cuda_ops, torch_ops
from mla_backends.op_table import (
    Op,
    are_tensors,
    dense_last,
    one_device,
    one_float,
    refuse,
    register,
    requests,
    writable,
)

__all__ = ["absorb_query", "batched_matmul", "concat_nope_rope", "quantize_query", "query_scale", "rope_tail"]

_E4M3 = torch.float8_e4m3fn
_VALUES = (torch.bfloat16, torch.float16, torch.float32)

# cuBLAS is the CUDA form; FEW_TOKENS in cuda_ops says why.
_batched_matmul = register(
    "batched_matmul(Tensor(a!) out, Tensor a, Tensor b) -> ()", torch_ops.batched_matmul, torch_ops.batched_matmul
)
_absorb_query = Op(
    "absorb_query(Tensor(a!) latent, Tensor(b!) rope, Tensor q_nope, Tensor q_pe, Tensor w_uk, Tensor? scale) -> ()",
    torch_ops.absorb_query,
    cuda_ops.absorb_query,
)
_concat = Op("concat_nope_rope(Tensor(a!) out, Tensor nope, Tensor rope) -> ()", torch_ops.concat_nope_rope)
_rope_tail = Op("rope_tail(Tensor(a!) rope, Tensor q_pe, Tensor? scale) -> ()", torch_ops.rope_tail)
_quantize = Op("quantize_query(Tensor(a!) out, Tensor query, Tensor scale) -> ()", torch_ops.quantize_query)
_query_scale = Op(
    "query_scale(Tensor(a!) out, Tensor latent, Tensor rope, Tensor? seq_lens, Tensor? cu_q_lens, int q_len) -> ()",
    torch_ops.query_scale,
)


def batched_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [G, M, N] = a [G, M, K] @ b [G, K, N], accumulated in float32, the same bits in every run.

    Args:
        out, a, b: one dtype, bf16, fp16 or fp32; any outer strides, last stride 1.

    Raises:
        InvalidInput: if batch or inner dimensions, dtypes, devices or last strides disagree.
    """
    are_tensors(out=out, a=a, b=b)
    if out.dim() != 3 or a.dim() != 3 or b.dim() != 3:
        raise refuse("out, a, b", [list(x.shape) for x in (out, a, b)], "[G, M, N], [G, M, K], [G, K, N]")
    (g, m, n), (ga, ma, k), (gb, kb, nb) = out.shape, a.shape, b.shape
    if g != ga or g != gb:
        raise refuse("the batch dimension of out, a, b", f"{g}, {ga}, {gb}", "one number")
    if k != kb:
        raise refuse("the inner dimension of a and b", f"{k} and {kb}", "one number")
    if m != ma or n != nb:
        raise refuse("out", list(out.shape), f"{[g, ma, nb]}, from a and b")
    if a.dtype not in _VALUES or a.dtype != b.dtype or a.dtype != out.dtype:
        raise refuse("the dtype of out, a, b", f"{out.dtype}, {a.dtype}, {b.dtype}", "one of bf16, fp16, fp32")
    writable(out=out)
    dense_last(a=a, b=b)
    device = out.get_device()
    one_device(device, a=a, b=b)
    if k == 0:
        out.zero_()
    elif out.numel():
        _batched_matmul(device >= 0, out, a, b)


def absorb_query(
    latent: Tensor, rope: Tensor, q_nope: Tensor, q_pe: Tensor, w_uk: Tensor, scale: Tensor | None = None
) -> None:
    """latent [T, :H] = q_nope @ w_uk per head, rope [T, :H] = q_pe, into the views of one query buffer.

    Args:
        latent: [T, H', L], H' >= H; heads past H are left as they are.
        rope: [T, H', R]; R may be 0.
        q_nope: [T, H, N] bf16, fp16 or fp32; all of latent, rope, q_nope, q_pe take any outer strides.
        q_pe: [T, H, R], q_nope's dtype.
        w_uk: [H, N, L], q_nope's dtype.
        scale: one float32 on the device, for an e4m3 latent and rope: both are divided by it and saturate at 448.
            None: latent and rope have q_nope's dtype. At many tokens on CUDA the product is rounded to q_nope's dtype
            before it is divided, as cuBLAS writes it: float32 would double the bytes for a 16th of e4m3's own rounding.

    Raises:
        InvalidInput: if shapes, dtypes, devices or last strides disagree.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    if _absorb_query.took(latent, rope, q_nope, q_pe, w_uk, scale):
        return
    are_tensors(latent=latent, rope=rope, q_nope=q_nope, q_pe=q_pe, w_uk=w_uk)
    if latent.dim() != 3 or rope.dim() != 3 or q_nope.dim() != 3 or q_pe.dim() != 3 or w_uk.dim() != 3:
        found = [list(x.shape) for x in (latent, rope, q_nope, q_pe, w_uk)]
        raise refuse("latent, rope, q_nope, q_pe, w_uk", found, "[T, H, L], [T, H, R], [T, H, N], [T, H, R], [H, N, L]")
    (tokens, heads, width), (rank, rope_width) = q_nope.shape, (latent.shape[2], rope.shape[2])
    if width < 1 or rank < 1:
        raise refuse("the widths of q_nope and latent", f"{width} and {rank}", "at least 1")
    if w_uk.shape != (heads, width, rank):
        raise refuse("w_uk", list(w_uk.shape), f"{[heads, width, rank]}, from q_nope and latent")
    if q_pe.shape != (tokens, heads, rope_width):
        raise refuse("q_pe", list(q_pe.shape), f"{[tokens, heads, rope_width]}, from q_nope and rope")
    if latent.shape[0] != tokens or rope.shape[:2] != latent.shape[:2] or latent.shape[1] < heads:
        raise refuse(
            "latent and rope",
            f"{list(latent.shape)} and {list(rope.shape)}",
            f"{tokens} tokens and at least {heads} heads",
        )
    dtype = q_nope.dtype
    if dtype not in _VALUES or q_pe.dtype != dtype or w_uk.dtype != dtype:
        raise refuse(
            "the dtype of q_nope, q_pe, w_uk", f"{dtype}, {q_pe.dtype}, {w_uk.dtype}", "one of bf16, fp16, fp32"
        )
    stored = dtype if scale is None else _E4M3
    if latent.dtype != stored or rope.dtype != stored:
        raise refuse(
            "the dtype of latent and rope",
            f"{latent.dtype} and {rope.dtype}",
            f"{stored} {'without' if scale is None else 'with'} a scale",
        )
    writable(latent=latent, rope=rope)
    dense_last(q_nope=q_nope, q_pe=q_pe, w_uk=w_uk)
    device = latent.get_device()
    one_device(device, rope=rope, q_nope=q_nope, q_pe=q_pe, w_uk=w_uk)
    if scale is not None:
        one_float("scale", scale, device)
    if tokens and heads:
        _absorb_query(device >= 0, latent, rope, q_nope, q_pe, w_uk, scale)


def concat_nope_rope(out: Tensor, nope: Tensor, rope: Tensor) -> None:
    """out [T, H, X + R] from nope [T, H, X] and rope [T, H, R] or [T, 1, R], to the bit.

    Args:
        out, nope, rope: one dtype of 1, 2 or 4 bytes, any outer strides.

    Raises:
        InvalidInput: if shapes, dtypes, devices or last strides disagree.
    """
    if _concat.took(out, nope, rope):
        return
    are_tensors(out=out, nope=nope, rope=rope)
    if out.dim() != 3 or nope.dim() != 3 or rope.dim() != 3:
        raise refuse(
            "out, nope, rope", [list(x.shape) for x in (out, nope, rope)], "[T, H, X + R], [T, H, X], [T, H or 1, R]"
        )
    (tokens, heads, width), (rope_tokens, rope_heads, rope_width) = nope.shape, rope.shape
    if rope_tokens != tokens or rope_heads not in (1, heads):
        raise refuse("rope", list(rope.shape), f"[{tokens}, {heads} or 1, R], from nope")
    if out.shape != (tokens, heads, width + rope_width):
        raise refuse("out", list(out.shape), f"{[tokens, heads, width + rope_width]}, from nope and rope")
    if nope.dtype != out.dtype or rope.dtype != out.dtype or out.dtype.itemsize > 4:
        raise refuse(
            "the dtype of out, nope, rope", f"{out.dtype}, {nope.dtype}, {rope.dtype}", "one of 1, 2 or 4 bytes"
        )
    writable(out=out)
    dense_last(nope=nope, rope=rope)
    device = out.get_device()
    one_device(device, nope=nope, rope=rope)
    if out.numel():
        _concat(device >= 0, out, nope, rope)


def rope_tail(rope: Tensor, q_pe: Tensor, scale: Tensor | None = None) -> None:
    """rope [T, :H] = q_pe: the rope part of a query buffer whose latent part something else writes.

    Args:
        rope: [T, H', R], H' >= H, any outer strides; heads past H are left as they are.
        q_pe: [T, H, R], any outer strides, bf16, fp16 or fp32.
        scale: one float32 on the device for an e4m3 rope, as in `absorb_query`; None: rope has q_pe's dtype.

    Raises:
        InvalidInput: if shapes, dtypes, devices or last strides disagree.
    """
    if _rope_tail.took(rope, q_pe, scale):
        return
    are_tensors(rope=rope, q_pe=q_pe)
    if rope.dim() != 3 or q_pe.dim() != 3:
        raise refuse("rope and q_pe", [list(x.shape) for x in (rope, q_pe)], "[T, H', R] and [T, H, R]")
    tokens, heads, width = q_pe.shape
    if rope.shape[0] != tokens or rope.shape[1] < heads or rope.shape[2] != width:
        raise refuse("rope", list(rope.shape), f"[{tokens}, at least {heads}, {width}], from q_pe")
    stored = q_pe.dtype if scale is None else _E4M3
    if q_pe.dtype not in _VALUES or rope.dtype != stored:
        raise refuse(
            "the dtype of rope and q_pe", f"{rope.dtype} and {q_pe.dtype}", f"{stored}, and bf16, fp16 or fp32"
        )
    writable(rope=rope)
    dense_last(q_pe=q_pe)
    device = rope.get_device()
    one_device(device, q_pe=q_pe)
    if scale is not None:
        one_float("scale", scale, device)
    if q_pe.numel():
        _rope_tail(device >= 0, rope, q_pe, scale)


def quantize_query(out: Tensor, query: Tensor, scale: Tensor) -> None:
    """out [T, H, D] e4m3 = query / scale, saturating at 448; a NaN stays NaN.

    Args:
        out: float8_e4m3fn, any outer strides.
        query: bf16, fp16 or fp32, any outer strides.
        scale: one float32 on the device.

    Raises:
        InvalidInput: if shapes, dtypes, devices or last strides disagree.
    """
    if _quantize.took(out, query, scale):
        return
    are_tensors(out=out, query=query, scale=scale)
    if out.dim() != 3 or out.shape != query.shape:
        raise refuse("out and query", [list(x.shape) for x in (out, query)], "one [T, H, D]")
    if out.dtype != _E4M3 or query.dtype not in _VALUES:
        raise refuse("the dtype of out and query", f"{out.dtype} and {query.dtype}", f"{_E4M3}, and bf16, fp16 or fp32")
    writable(out=out)
    dense_last(query=query)
    device = out.get_device()
    one_device(device, query=query)
    one_float("scale", scale, device)
    if out.numel():
        _quantize(device >= 0, out, query, scale)


def query_scale(
    out: Tensor, latent: Tensor, rope: Tensor, seq_lens: Tensor | None, cu_q_lens: Tensor | None = None, q_len: int = 1
) -> None:
    """out [1] = max |q| / 448 over the finite values of live rows, on the device; never 0.

    A row is live if its request has keys: request t // q_len, or by `cu_q_lens`, and past its end none.

    Args:
        out: [1] float32.
        latent, rope: [T, H, L] and [T, H, R], bf16, fp16 or fp32, any outer strides.
        seq_lens: [B] int32; None: every request is live.
        cu_q_lens: [B + 1] int32, for ragged batches.
        q_len: tokens a request, else.

    Raises:
        InvalidInput: if shapes, dtypes, devices or last strides disagree.
    """
    if _query_scale.took(out, latent, rope, seq_lens, cu_q_lens, q_len):
        return
    are_tensors(out=out, latent=latent, rope=rope)
    if latent.dim() != 3 or rope.dim() != 3 or latent.shape[:2] != rope.shape[:2]:
        raise refuse("latent and rope", [list(x.shape) for x in (latent, rope)], "[T, H, L] and [T, H, R]")
    if latent.dtype not in _VALUES or latent.dtype != rope.dtype:
        raise refuse("the dtype of latent and rope", f"{latent.dtype} and {rope.dtype}", "one of bf16, fp16, fp32")
    dense_last(latent=latent, rope=rope)
    device = out.get_device()
    one_device(device, latent=latent, rope=rope)
    one_float("out", out, device)
    requests(latent.shape[0], seq_lens, cu_q_lens, q_len, device)
    if latent.shape[0] and latent.shape[1]:
        _query_scale(device >= 0, out, latent, rope, seq_lens, cu_q_lens, q_len)
    else:
        out.fill_(torch_ops.QUERY_SCALE_FLOOR)
