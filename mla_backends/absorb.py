"""The two products with W_UK and W_UV that turn MLA decode into attention over latent rows, and the query between them.

A `Query` is one buffer wherever it can be, so that packed and split kernels read the same memory and nothing is
concatenated; `AbsorbWeights.query` writes into it in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from mla_backends import ops
from mla_backends.errors import InvalidInput
from mla_backends.problem import Geometry

__all__ = ["AbsorbWeights", "Query"]

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = torch.float8_e4m3fn


class Query:
    """An absorbed query, in one packed buffer or as two tensors. Immutable: its values may change, its addresses do not.

    Made by `from_packed`, `from_parts`, `AbsorbWeights.query` or `DecodePlan.new_query`.

    Attributes:
        latent: [B, (q,) H, L], any outer strides, last dimension dense.
        rope: [B, (q,) H, R], same leading shape, dtype and device.
        scale: an e4m3 query's scale, one float32 on the device: value = stored * scale. None for bf16, fp16, fp32.
        facts: (shape of latent, R, dtype, device), for plans to compare.
        is_packed: latent and rope lie next to each other in one buffer, so that `packed` is a view of it.
    """

    __slots__ = ("__weakref__", "_buffer", "_reshaped", "facts", "is_packed", "latent", "rope", "scale")

    latent: Tensor
    rope: Tensor
    scale: Tensor | None
    facts: tuple[torch.Size, int, torch.dtype, torch.device]
    is_packed: bool
    _buffer: Tensor | None
    _reshaped: dict[torch.Size, Query]

    def __init__(self, latent: Tensor, rope: Tensor, *, packed: Tensor | None = None, scale: Tensor | None = None) -> None:
        """Use `from_parts` or `from_packed`."""
        _check_query(latent, rope, scale)
        buffer = _one_buffer(latent, rope) if packed is None else packed
        put = object.__setattr__
        put(self, "latent", latent)
        put(self, "rope", rope)
        put(self, "scale", scale)
        put(self, "facts", (latent.shape, rope.shape[-1], latent.dtype, latent.device))
        put(self, "is_packed", buffer is not None)
        put(self, "_buffer", buffer)
        put(self, "_reshaped", {})

    @classmethod
    def from_parts(cls, latent: Tensor, rope: Tensor, *, scale: Tensor | None = None) -> Query:
        """A query of two tensors, which split kernels read as they are.

        Args:
            latent: [B, (q,) H, L], bf16, fp16, fp32 or e4m3, any outer strides.
            rope: [B, (q,) H, R], same dtype and device. Both may be slices of one buffer; `packed` is then a view of it.
            scale: e4m3 only, and required there: one float32 on the device.

        Raises:
            InvalidInput: where the two disagree.
        """
        return cls(latent, rope, scale=scale)

    @classmethod
    def from_packed(cls, packed: Tensor, kv_lora_rank: int = 512, *, scale: Tensor | None = None) -> Query:
        """A query of one buffer [B, (q,) H, D]: the latent first, the rope from kv_lora_rank on.

        Raises:
            InvalidInput: if the last dimension is less than kv_lora_rank, and as `from_parts`.
        """
        if not isinstance(packed, Tensor) or packed.dim() not in (3, 4) or packed.shape[-1] < kv_lora_rank:
            raise InvalidInput(f"packed is {_shape(packed)}, it takes [B, (q,) H, D] with D of at least {kv_lora_rank}")
        return cls(packed[..., :kv_lora_rank], packed[..., kv_lora_rank:], packed=packed, scale=scale)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Query is immutable, so {name} cannot be set; write into its tensors, or make another one")

    def __repr__(self) -> str:
        kind = "packed" if self.is_packed else "two tensors"
        return f"Query({list(self.latent.shape)} + {self.rope.shape[-1]}, {self.dtype}, {self.device}, {kind})"

    @property
    def packed(self) -> Tensor:
        """[B, (q,) H, D]: a view where the query is one buffer, else one copy.

        The copy's memory is made once and kept; its values are taken at each access, because the two tensors may have been
        written since, and a captured graph has to take them again in each replay.
        """
        buffer = self._buffer
        if self.is_packed and buffer is not None:
            return buffer
        if buffer is None:
            shape = (*self.latent.shape[:-1], self.latent.shape[-1] + self.rope.shape[-1])
            buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
            object.__setattr__(self, "_buffer", buffer)
        for out, latent, rope in _by_tokens(buffer, self.latent, self.rope):
            ops.concat_nope_rope(out, latent, rope)
        return buffer

    @property
    def num_heads(self) -> int:
        return self.latent.shape[-2]

    @property
    def dtype(self) -> torch.dtype:
        return self.latent.dtype

    @property
    def device(self) -> torch.device:
        return self.latent.device

    def with_leading(self, leading: torch.Size) -> Query:
        """This query as [*leading, H, ..] over the same memory, made once a shape; itself where the shape is that already.

        Raises:
            InvalidInput: where the counts of tokens differ, or no view of that shape exists.
        """
        if self.latent.shape[:-2] == leading:
            return self
        known = self._reshaped.get(leading)
        if known is not None:
            return known
        latent, rope = _view(self.latent, leading), _view(self.rope, leading)
        packed = _view(self._buffer, leading) if self.is_packed and self._buffer is not None else None
        if latent is None or rope is None:
            raise InvalidInput(
                f"out is {_shape(self.latent)} with strides {self.latent.stride()}, the query is {list(leading)} before its "
                f"heads: it takes one that holds as many tokens and can be viewed so, such as a `DecodePlan.new_query`"
            )
        made = Query(latent, rope, packed=packed, scale=self.scale)
        self._reshaped[leading] = made
        return made


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
                raise InvalidInput(f"{name} is {_shape(found)}, it takes three dimensions of bfloat16, float16 or float32")
        if (w_uk.shape[0], w_uk.shape[2]) != tuple(w_uv.shape[:2]):
            raise InvalidInput(
                f"w_uk is {_shape(w_uk)} and w_uv {_shape(w_uv)}, they take [H, N, L] and [H, L, V] of one H and one L"
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
        heads, nope, value = geometry.num_heads, geometry.qk_nope_head_dim, geometry.v_head_dim
        shape = (heads * (nope + value), geometry.kv_lora_rank)
        if not isinstance(weight, Tensor) or tuple(weight.shape) != shape:
            raise InvalidInput(
                f"weight is {_shape(weight)}, {geometry} takes {list(shape)}: the rows of this rank's heads, transposed "
                f"neither way"
            )
        if weight.dtype not in (*_PLAIN, _E4M3):
            raise InvalidInput(f"weight is {weight.dtype}, it takes bfloat16, float16, float32 or float8_e4m3fn")
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
        leading = q_nope.shape[:-2]
        if len(leading) not in (1, 2) or q_nope.shape[-2:] != (heads, nope) or q_pe.shape[:-1] != q_nope.shape[:-1]:
            raise InvalidInput(
                f"q_nope is {_shape(q_nope)} and q_pe {_shape(q_pe)}, these weights take q_nope [B, (q,) {heads}, {nope}] "
                f"and q_pe [B, (q,) {heads}, R]"
            )
        if q_nope.dtype != self.w_uk.dtype or q_pe.dtype != self.w_uk.dtype:
            raise InvalidInput(f"q_nope is {q_nope.dtype} and q_pe {q_pe.dtype}, these weights take {self.w_uk.dtype}")
        if out is None:
            shape = (*q_nope.shape[:-1], rank + q_pe.shape[-1])
            target = Query.from_packed(torch.empty(shape, dtype=q_nope.dtype, device=q_nope.device), rank)
        else:
            target = out.with_leading(leading)
            shape_, width, dtype, _ = target.facts
            if shape_[-2] < heads or shape_[-1] != rank or width != q_pe.shape[-1]:
                raise InvalidInput(
                    f"out is {out}, these weights and q_pe take at least {heads} heads of {rank} + {q_pe.shape[-1]}"
                )
            if dtype not in (q_nope.dtype, _E4M3):
                raise InvalidInput(f"out is {dtype}, it takes {q_nope.dtype} as the query, or float8_e4m3fn with its scale")
        for latent, rope, q, pe in _by_tokens(target.latent, target.rope, q_nope, q_pe):
            ops.absorb_query(latent, rope, q, pe, self.w_uk, target.scale)
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
        if latent.dim() not in (3, 4) or latent.shape[-2:] != (heads, rank) or latent.dtype != self.w_uv.dtype:
            raise InvalidInput(f"latent is {_shape(latent)}, these weights take [B, (q,) {heads}, {rank}] of {self.w_uv.dtype}")
        shape = (*latent.shape[:-1], value)
        if out is None:
            out = torch.empty(shape, dtype=latent.dtype, device=latent.device)
        elif out.shape != shape or out.dtype != latent.dtype:
            raise InvalidInput(f"out is {_shape(out)}, it takes {list(shape)} of {latent.dtype}")
        for values, rows in _by_tokens(out, latent):
            ops.batched_matmul(values.transpose(0, 1), rows.transpose(0, 1), self.w_uv)
        return out

    def copy_(self, other: AbsorbWeights) -> None:
        """New values at the same addresses, so captured graphs stay valid.

        Raises:
            InvalidInput: if the shapes differ.
        """
        if self.w_uk.shape != other.w_uk.shape or self.w_uv.shape != other.w_uv.shape:
            raise InvalidInput(f"other is {other}, it takes the shapes of {self}")
        self.w_uk.copy_(other.w_uk)
        self.w_uv.copy_(other.w_uv)


def _shape(found: Any) -> str:
    return f"{list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else repr(type(found))


def _dense(tensor: Tensor) -> bool:
    """The last dimension has stride 1, or so few values that its stride means nothing."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 or not tensor.numel()


def _check_query(latent: Tensor, rope: Tensor, scale: Tensor | None) -> None:
    for name, found in (("latent", latent), ("rope", rope)):
        if not isinstance(found, Tensor) or found.dim() not in (3, 4) or found.dtype not in (*_PLAIN, _E4M3):
            raise InvalidInput(
                f"{name} is {_shape(found)}, it takes [B, (q,) H, ..] of bfloat16, float16, float32 or float8_e4m3fn"
            )
        if not _dense(found):
            raise InvalidInput(f"{name} has stride {found.stride(-1)} in its last dimension, it takes 1: make it contiguous")
    if latent.shape[:-1] != rope.shape[:-1]:
        raise InvalidInput(f"latent is {_shape(latent)} and rope {_shape(rope)}, they take one shape but for the last dimension")
    if latent.dtype != rope.dtype or latent.device != rope.device:
        raise InvalidInput(
            f"latent is {latent.dtype} on {latent.device} and rope {rope.dtype} on {rope.device}, they take one of each"
        )
    if latent.dtype != _E4M3:
        if scale is not None:
            raise InvalidInput(f"scale is given for a {latent.dtype} query, it belongs to float8_e4m3fn: leave it out")
        return
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != latent.device:
        raise InvalidInput(f"scale is {_shape(scale)}, a float8_e4m3fn query takes one float32 on {latent.device}")


def _one_buffer(latent: Tensor, rope: Tensor) -> Tensor | None:
    """The packed view of two tensors that lie next to each other in one piece of memory; None where they do not."""
    rank, size = latent.shape[-1], latent.element_size()
    if latent.untyped_storage().data_ptr() != rope.untyped_storage().data_ptr():
        return None
    strides = latent.stride()[:-1]
    same = all(n <= 1 or a == b for n, a, b in zip(latent.shape, strides, rope.stride()[:-1], strict=False))
    if not same or latent.data_ptr() + rank * size != rope.data_ptr():
        return None
    return latent.as_strided((*latent.shape[:-1], rank + rope.shape[-1]), (*strides, 1))


def _view(tensor: Tensor, leading: torch.Size) -> Tensor | None:
    """[*leading, H, X] over the same memory, None where there is no such view."""
    try:
        return tensor.view(*leading, *tensor.shape[-2:])
    except RuntimeError:
        return None


def _by_tokens(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one leading shape as [T, H, X], once; where B and q do not merge, once a position of q.

    Nothing is copied, and there is nothing where there is no token.
    """
    if not tensors[0].shape[:-2].numel():
        return
    if tensors[0].dim() == 3:
        yield tensors
        return
    batch, q_len = tensors[0].shape[:2]
    if all(batch == 1 or q_len == 1 or t.stride(0) == q_len * t.stride(1) for t in tensors):
        yield tuple(t.flatten(0, 1) for t in tensors)
        return
    for i in range(q_len):
        yield tuple(t[:, i] for t in tensors)


def _dequantized(weight: Tensor, scale: Tensor | None, block: tuple[int, int]) -> Tensor:
    """[rows, columns] float32 of an e4m3 weight with one scale a block."""
    rows, columns = weight.shape
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    if not isinstance(scale, Tensor) or tuple(scale.shape) != shape:
        raise InvalidInput(
            f"scale is {_shape(scale)}, a float8_e4m3fn weight {list(weight.shape)} with one a {block[0]} x {block[1]} block "
            f"takes {list(shape)}: the checkpoint's weight_scale_inv"
        )
    each = scale.detach().float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * each[:rows, :columns]
