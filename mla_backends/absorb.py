"""The two products with W_UK and W_UV that turn MLA decode into attention over latent rows.

`AbsorbWeights.query` writes in place into the buffer that the kernel reads, so that the query is never concatenated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_backends import ops
from mla_backends.errors import InvalidInput, shown, whole_number
from mla_backends.problem import Geometry
from mla_backends.query import Query, merged, tokens

__all__ = ["AbsorbWeights", "Query"]

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = torch.float8_e4m3fn


class AbsorbWeights:
    """W_UK [H, N, L] and W_UV [H, L, V] of one layer, rank-local, detached.

    Args:
        w_uk: [H, N, L], bf16, fp16 or fp32. Kept as it is where it is contiguous, else copied once.
        w_uv: [H, L, V], same dtype and device.

    Raises:
        InvalidInput: where shapes, dtypes or devices disagree.
    """

    __slots__ = ("__weakref__", "w_uk", "w_uv")

    w_uk: Tensor
    w_uv: Tensor

    def __init__(self, w_uk: Tensor, w_uv: Tensor) -> None:
        for name, found in (("w_uk", w_uk), ("w_uv", w_uv)):
            if not isinstance(found, Tensor) or found.dim() != 3 or found.dtype not in _PLAIN:
                raise InvalidInput(
                    f"{name} is {shown(found)}, it takes three dimensions of bfloat16, float16 or float32"
                )
        if (w_uk.shape[0], w_uk.shape[2]) != tuple(w_uv.shape[:2]):
            raise InvalidInput(
                f"w_uk is {shown(w_uk)} and w_uv {shown(w_uv)}, they take [H, N, L] and [H, L, V] of one H and one L"
            )
        if w_uk.dtype != w_uv.dtype or w_uk.device != w_uv.device:
            raise InvalidInput(
                f"w_uk is {w_uk.dtype} on {w_uk.device} and w_uv {w_uv.dtype} on {w_uv.device}, they take one of each"
            )
        self.w_uk = w_uk.detach().contiguous()
        self.w_uv = w_uv.detach().contiguous()

    @classmethod
    def from_kv_b_proj(
        cls,
        weight: Tensor,
        geometry: Geometry,
        *,
        scale: Tensor | None = None,
        block: tuple[int, int] = (128, 128),
        dtype: torch.dtype | None = None,
    ) -> AbsorbWeights:
        """The two weights out of a checkpoint's `kv_b_proj`, copied once.

        Args:
            weight: [H * (N + V), L], rank-local: of each head N rows of W_UK, then V rows of W_UV.
            geometry: its widths and heads.
            scale: float8_e4m3fn weights only, and required there: [ceil(rows / block[0]), ceil(L / block[1])], the
                checkpoint's `weight_scale_inv`: value = stored * scale.
            block: rows and columns that share a scale.
            dtype: of the result; by default the weight's, bfloat16 for e4m3.

        Raises:
            InvalidInput: where the weight or its scales do not fit the geometry.

        Source: DeepSeek-V3's inference/model.py (MLA.wkv_b) and inference/kernel.py (weight_dequant).
        """
        if not isinstance(geometry, Geometry):
            raise InvalidInput(f"geometry is {shown(geometry)}, it takes a Geometry such as Geometry.from_config makes")
        heads, nope, value = geometry.num_heads, geometry.qk_nope_head_dim, geometry.v_head_dim
        shape = (heads * (nope + value), geometry.kv_lora_rank)
        if not isinstance(weight, Tensor) or tuple(weight.shape) != shape:
            raise InvalidInput(
                f"weight is {shown(weight)}, {geometry} takes {list(shape)}: the rows of this rank's heads, transposed "
                f"neither way"
            )
        if weight.dtype not in (*_PLAIN, _E4M3):
            raise InvalidInput(f"weight is {weight.dtype}, it takes bfloat16, float16, float32 or float8_e4m3fn")
        if dtype is not None and dtype not in _PLAIN:
            raise InvalidInput(f"dtype is {dtype!r}, it takes torch.bfloat16, torch.float16 or torch.float32")
        weight = weight.detach()
        if weight.dtype == _E4M3:
            weight, dtype = _dequantized(weight, scale, block), dtype or torch.bfloat16
        elif scale is not None:
            raise InvalidInput(f"scale is given for a {weight.dtype} weight, it belongs to float8_e4m3fn: leave it out")
        split = weight.to(dtype or weight.dtype).view(heads, nope + value, geometry.kv_lora_rank)
        # clone, because a slice of one head is contiguous already and would share the checkpoint's memory
        w_uk = split[:, :nope].clone(memory_format=torch.contiguous_format)
        w_uv = split[:, nope:].transpose(1, 2).clone(memory_format=torch.contiguous_format)
        return cls(w_uk, w_uv)

    def __repr__(self) -> str:
        return f"AbsorbWeights(w_uk={list(self.w_uk.shape)}, w_uv={list(self.w_uv.shape)}, {self.w_uk.dtype}, {self.w_uk.device})"

    def query(self, q_nope: Tensor, q_pe: Tensor, *, out: Query | None = None) -> Query:
        """Fold W_UK into the query, so that attention runs on latent rows: one bmm, written in place.

        No outer stride costs a copy, but for a q axis that does not merge with B (a slice along q).

        Args:
            q_nope: [B, (q,) H, N] in the weights' dtype, any outer strides.
            q_pe: the rotated part, [B, (q,) H, R], any outer strides.
            out: where to; may have more heads than the weights (those are left as they are) and be e4m3 with a scale. By
                default a new packed buffer.

        Returns:
            A Query of q_nope's leading shape, accumulated in float32: `out` itself, or a view of it where it has another rank.

        Raises:
            InvalidInput: if heads, widths, dtypes or devices disagree.

        Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
        """
        heads, nope, rank = self.w_uk.shape
        if not isinstance(q_nope, Tensor) or not isinstance(q_pe, Tensor):
            raise InvalidInput(f"q_nope is {shown(q_nope)} and q_pe {shown(q_pe)}, they take tensors")
        leading = q_nope.shape[:-2]
        if len(leading) not in (1, 2) or q_nope.shape[-2:] != (heads, nope) or q_pe.shape[:-1] != q_nope.shape[:-1]:
            raise InvalidInput(
                f"q_nope is {shown(q_nope)} and q_pe {shown(q_pe)}, these weights take q_nope [B, (q,) {heads}, {nope}] "
                f"and q_pe [B, (q,) {heads}, R]"
            )
        if out is None:
            shape = (*q_nope.shape[:-1], rank + q_pe.shape[-1])
            target = Query.from_packed(torch.empty(shape, dtype=q_nope.dtype, device=q_nope.device), rank)
        elif not isinstance(out, Query):
            raise InvalidInput(f"out is {shown(out)}, it takes a Query such as DecodePlan.new_query makes")
        else:
            target = out.with_leading(leading)
            shape_out, width, _, _ = target.facts
            if shape_out[-2] < heads or shape_out[-1] != rank or width != q_pe.shape[-1]:
                raise InvalidInput(
                    f"out is {out}, these weights and q_pe take at least {heads} heads of {rank} + {q_pe.shape[-1]}"
                )
        if target.staging is not None and target.settle is not None:
            self.query(q_nope, q_pe, out=target.staging)
            target.settle()
            return target
        latent, rope = merged(target.latent), merged(target.rope)
        if latent is None or rope is None:
            shape = (*q_nope.shape[:-1], rank + q_pe.shape[-1])
            buffer = torch.empty(shape, dtype=target.dtype, device=target.device)
            made = self.query(q_nope, q_pe, out=Query.from_packed(buffer, rank, scale=target.scale))
            target.latent[..., :heads, :].copy_(made.latent)
            target.rope[..., :heads, :].copy_(made.rope)
            return target
        ops.absorb_query(latent, rope, tokens(q_nope), tokens(q_pe), self.w_uk, target.scale)
        return target

    def project(self, latent: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Latent outputs to values, one bmm: [B, (q,) H, L] -> [B, (q,) H, V].

        Args:
            latent: in the weights' dtype, any outer strides.
            out: [B, (q,) H, V], any outer strides, written in place.

        Raises:
            InvalidInput: if heads, widths, dtypes or devices disagree.
        """
        heads, rank, value = self.w_uv.shape
        if not isinstance(latent, Tensor) or latent.dim() not in (3, 4) or latent.shape[-2:] != (heads, rank):
            raise InvalidInput(f"latent is {shown(latent)}, these weights take [B, (q,) {heads}, {rank}]")
        if latent.dtype != self.w_uv.dtype:
            raise InvalidInput(
                f"latent is {latent.dtype}, these weights take their own {self.w_uv.dtype}; convert one of them with .to()"
            )
        if latent.stride(-1) != 1 and latent.numel():
            raise InvalidInput(
                f"latent has stride {latent.stride(-1)} in its last dimension, it takes 1; pass latent.contiguous()"
            )
        shape = (*latent.shape[:-1], value)
        if out is None:
            out = torch.empty(shape, dtype=latent.dtype, device=latent.device)
        elif not isinstance(out, Tensor) or out.shape != shape or out.dtype != latent.dtype:
            raise InvalidInput(f"out is {shown(out)}, it takes {list(shape)} of {latent.dtype}, as the latent")
        values = merged(out)
        if values is None:
            return out.copy_(self.project(latent))
        ops.batched_matmul(values.transpose(0, 1), tokens(latent).transpose(0, 1), self.w_uv)
        return out

    def copy_(self, other: AbsorbWeights) -> None:
        """New values at the same addresses, so captured graphs stay valid.

        Raises:
            InvalidInput: if the shapes differ.
        """
        if not isinstance(other, AbsorbWeights):
            raise InvalidInput(f"other is {shown(other)}, it takes AbsorbWeights")
        if self.w_uk.shape != other.w_uk.shape or self.w_uv.shape != other.w_uv.shape:
            raise InvalidInput(f"other is {other}, it takes the shapes of {self}")
        self.w_uk.copy_(other.w_uk)
        self.w_uv.copy_(other.w_uv)


def _dequantized(weight: Tensor, scale: Tensor | None, block: tuple[int, int]) -> Tensor:
    """[rows, columns] float32 of an e4m3 weight with one scale a block."""
    # a list as well, as a checkpoint's config has it
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise InvalidInput(f"block is {block!r}, it takes two numbers, rows and columns")
    for size in block:
        whole_number("block", size)
    rows, columns = weight.shape
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    if not isinstance(scale, Tensor) or tuple(scale.shape) != shape:
        raise InvalidInput(
            f"scale is {shown(scale)}, a float8_e4m3fn weight {list(weight.shape)} with one a {block[0]} x {block[1]} block "
            f"takes {list(shape)}: the checkpoint's weight_scale_inv"
        )
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise InvalidInput("scale holds NaN, an infinite number or one below or at 0, it takes positive finite ones")
    each = scale.detach().float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * each[:rows, :columns]
