"""The ops on finished rows: what any kernel wrote, in the one convention or merged with others.

Emptiness is decided from lengths, never from what a kernel left behind, except where there are none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_backends import cuda_ops, torch_ops
from mla_backends.op_table import Op, are_tensors, one_device, own_memory, refuse, requests, writable
from mla_backends.result import Decoded

__all__ = ["finish_rows", "merge_partials"]

_finish_rows = Op(
    "finish_rows(Tensor(a!)? lse, Tensor(b!)? out, Tensor? raw_lse, Tensor? seq_lens, Tensor? cu_q_lens, int q_len, "
    "bool causal, bool base2) -> ()",
    torch_ops.finish_rows,
)
_merge_partials = Op(
    "merge_partials(Tensor(a!) out, Tensor(b!) lse, Tensor outs, Tensor lses) -> ()",
    torch_ops.merge_partials,
    cuda_ops.merge_partials,
)


def finish_rows(
    out: Tensor | None,
    lse: Tensor | None,
    raw_lse: Tensor | None,
    seq_lens: Tensor | None,
    *,
    q_len: int,
    causal: bool,
    base2: bool,
    overwrite_out: bool,
    cu_q_lens: Tensor | None = None,
) -> None:
    """Bring a kernel's rows to the one convention: natural lse, and rows that see no key out 0, lse -inf.

    Row i of a request sees seq_len - q_len + i + 1 keys (causal) or seq_len; it is empty where that is not
    above 0, or past cu_q_lens[-1].

    Args:
        out: [B, q, H, X] or [T, H, X], any outer strides; None if not overwrite_out.
        lse: out's shape without its last dimension, float32, any strides; None if nobody wants it. May be raw_lse.
        raw_lse: lse's shape, float32, any strides, as the kernel gave it; None with lse.
        seq_lens: [B] int32. None (sparse): empty is where raw_lse is infinite.
        q_len: rows a request; ignored with cu_q_lens.
        base2: raw_lse is a base-2 logarithm.
        overwrite_out: write 0 to the empty rows of out.
        cu_q_lens: [B + 1] int32, for ragged rows [T, H].

    Raises:
        InvalidInput: if shapes, dtypes or devices disagree, or nothing says which rows are empty.
    """
    if not overwrite_out:
        out = None
    if _finish_rows.took(lse, out, raw_lse, seq_lens, cu_q_lens, q_len, causal, base2):
        return
    given = {"out": out, "lse": lse, "raw_lse": raw_lse, "seq_lens": seq_lens, "cu_q_lens": cu_q_lens}
    are_tensors(**{name: x for name, x in given.items() if x is not None})
    shape = lse.shape if lse is not None else out.shape[:-1] if out is not None else None
    if shape is None:
        return
    if len(shape) not in (2, 3) or (out is not None and out.shape[:-1] != shape):
        raise refuse(
            "out and lse",
            [list(x.shape) for x in (out, lse) if x is not None],
            "[.., H, X] and [.., H], of T or B, q rows",
        )
    if len(shape) == 3 and (cu_q_lens is not None or shape[1] != q_len):
        raise refuse("lse", list(shape), f"[T, H] with cu_q_lens, else [B, {q_len}, H]")
    if raw_lse is None and (lse is not None or seq_lens is None):
        raise refuse("raw_lse", None, "a tensor of lse's shape, as lse or emptiness comes from it")
    for name, x in (("lse", lse), ("raw_lse", raw_lse)):
        if x is not None and (x.shape != shape or x.dtype != torch.float32):
            raise refuse(name, f"{list(x.shape)} {x.dtype}", f"{list(shape)} float32")
    first = lse if lse is not None else out
    assert first is not None
    device = first.get_device()
    one_device(device, out=out, raw_lse=raw_lse)
    if lse is not None:
        own_memory(lse=lse)
    if out is not None:
        writable(out=out)
    requests(math.prod(shape[:-1]), seq_lens, cu_q_lens, q_len, device)
    if first.numel():
        _finish_rows(device >= 0, lse, out, raw_lse, seq_lens, cu_q_lens, q_len, causal, base2)


def merge_partials(outs: Tensor, lses: Tensor) -> Decoded:
    """Partial results over disjoint keys into one, weighted by exp(lse); parts with an infinite lse are neutral.

    Args:
        outs: [P, B, (q,) H, L], any float dtype.
        lses: [P, B, (q,) H] float32, natural logarithm.

    Returns:
        out [B, (q,) H, L] in the dtype of outs, accumulated in float32; lse [B, (q,) H].

    Raises:
        InvalidInput: if shapes, dtypes or devices disagree, or there is no part.
    """
    are_tensors(outs=outs, lses=lses)
    if outs.dim() < 2 or outs.shape[:-1] != lses.shape or outs.shape[0] < 1:
        raise refuse(
            "outs and lses", [list(x.shape) for x in (outs, lses)], "[P, .., H, L] and [P, .., H], P at least 1"
        )
    if lses.dtype != torch.float32 or not outs.dtype.is_floating_point:
        raise refuse("the dtype of outs and lses", f"{outs.dtype} and {lses.dtype}", "a float dtype and float32")
    device = outs.get_device()
    one_device(device, lses=lses)
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=lses.device)
    if lse.numel():
        _merge_partials(device >= 0, out, lse, outs, lses)
    return Decoded(out, lse)
