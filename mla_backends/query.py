"""An absorbed query: what attention over latent rows is asked, in one buffer wherever it can be.

Packed and split kernels then read the same memory, and nothing is concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch import Tensor

from mla_backends import ops
from mla_backends.errors import InvalidInput, shown, whole_number
from mla_backends.graph_node import is_same_memory

__all__ = ["Query", "by_tokens", "merged", "tokens"]

_E4M3 = torch.float8_e4m3fn
_is_compiling = torch.compiler.is_compiling
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, _E4M3)


class Query:
    """An absorbed query, in one packed buffer or as two tensors. Immutable: its values may change, its addresses do not.

    Made by `from_packed`, `from_parts`, `AbsorbWeights.query` or `DecodePlan.new_query`.

    Attributes:
        latent: [B, (q,) H, L], any outer strides, last dimension dense.
        rope: [B, (q,) H, R], same leading shape, dtype and device.
        scale: an e4m3 query's scale, [1] float32 on the device: value = stored * scale. None for bf16, fp16, fp32.
        facts: (shape of latent, R, dtype, device), for plans to compare.
        is_packed: latent and rope lie next to each other in one buffer, so that `packed` is a view of it.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_reshaped",
        "facts",
        "is_packed",
        "latent",
        "rope",
        "scale",
        "settle",
        "staging",
    )

    latent: Tensor
    rope: Tensor
    scale: Tensor | None
    facts: tuple[torch.Size, int, torch.dtype, torch.device]
    is_packed: bool
    _buffer: Tensor | None
    _reshaped: dict[torch.Size, Query]
    staging: Query | None
    settle: Callable[[], None] | None

    def __init__(
        self, latent: Tensor, rope: Tensor, *, packed: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """Use `from_parts` or `from_packed`."""
        _check_query(latent, rope, scale)
        latent, rope = _detached(latent), _detached(rope)
        buffer = packed
        if packed is None and not _is_compiling():  # whose tensors have no address yet
            buffer = _one_buffer(latent, rope)
        put = object.__setattr__
        put(self, "latent", latent)
        put(self, "rope", rope)
        # [1], as kernels take it, whatever rank the one value came with
        put(self, "scale", scale if scale is None or scale.dim() == 1 else scale.reshape(1))
        put(self, "facts", (latent.shape, rope.shape[-1], latent.dtype, latent.device))
        put(self, "is_packed", buffer is not None)
        put(self, "_buffer", buffer)
        put(self, "_reshaped", {})
        put(self, "staging", None)
        put(self, "settle", None)

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
        whole_number("kv_lora_rank", kv_lora_rank)
        if not isinstance(packed, Tensor) or packed.dim() not in (3, 4) or packed.shape[-1] < kv_lora_rank:
            raise InvalidInput(f"packed is {shown(packed)}, it takes [B, (q,) H, D] with D of at least {kv_lora_rank}")
        packed = _detached(packed)
        return cls(packed[..., :kv_lora_rank], packed[..., kv_lora_rank:], packed=packed, scale=scale)

    def written_through(self, staging: Query, settle: Callable[[], None]) -> Query:
        """This e4m3 query, whose scale is known only when all its values are: `AbsorbWeights.query` writes `staging`, then
        calls `settle`, which measures the scale and quantises.
        """
        object.__setattr__(self, "staging", staging)
        object.__setattr__(self, "settle", settle)
        return self

    def is_over(self, latent: Tensor, rope: Tensor, scale: Tensor | None) -> bool:
        """Whether this query is of those tensors' memory."""
        mine, given = (self.latent, self.rope, self.scale), (latent, rope, scale)
        return all(is_same_memory(a, b) for a, b in zip(mine, given, strict=True))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"a Query is immutable, so {name} cannot be set; write into its tensors, or make another one"
        )

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
        for out, latent, rope in by_tokens(buffer, self.latent, self.rope):
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
        latent = rope = None
        if len(leading) != self.latent.dim() - 2:
            latent, rope = _view(self.latent, leading), _view(self.rope, leading)
        packed = _view(self._buffer, leading) if self.is_packed and self._buffer is not None else None
        if latent is None or rope is None:
            raise InvalidInput(
                f"out is {shown(self.latent)} with strides {self.latent.stride()}, the query is {list(leading)} before its "
                f"heads: it takes one that holds as many tokens and can be viewed so, such as a `DecodePlan.new_query`"
            )
        made = Query(latent, rope, packed=packed, scale=self.scale)
        if self.staging is not None and self.settle is not None:
            made.written_through(self.staging.with_leading(leading), self.settle)
        self._reshaped[leading] = made
        return made


def _dense(tensor: Tensor) -> bool:
    """The last dimension has stride 1, or so few values that its stride means nothing."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 or not tensor.numel()


def _detached(tensor: Tensor) -> Tensor:
    """Decoding has no gradient; a tensor that wants one would drag its graph along."""
    return tensor.detach() if tensor.requires_grad else tensor


def _check_query(latent: Tensor, rope: Tensor, scale: Tensor | None) -> None:
    for name, found in (("latent", latent), ("rope", rope)):
        if not isinstance(found, Tensor) or found.dim() not in (3, 4) or found.dtype not in _DTYPES:
            raise InvalidInput(
                f"{name} is {shown(found)}, it takes [B, (q,) H, ..] of bfloat16, float16, float32 or float8_e4m3fn"
            )
        if not _dense(found):
            raise InvalidInput(
                f"{name} has stride {found.stride(-1)} in its last dimension, it takes 1: make it contiguous"
            )
    if latent.shape[:-1] != rope.shape[:-1]:
        raise InvalidInput(
            f"latent is {shown(latent)} and rope {shown(rope)}, they take one shape but for the last dimension"
        )
    if latent.dtype != rope.dtype or latent.device != rope.device:
        raise InvalidInput(
            f"latent is {latent.dtype} on {latent.device} and rope {rope.dtype} on {rope.device}, they take one of each"
        )
    if latent.dtype != _E4M3:
        if scale is not None:
            raise InvalidInput(f"scale is given for a {latent.dtype} query, it belongs to float8_e4m3fn: leave it out")
        return
    if (
        not isinstance(scale, Tensor)
        or scale.dtype != torch.float32
        or scale.numel() != 1
        or scale.device != latent.device
    ):
        raise InvalidInput(f"scale is {shown(scale)}, a float8_e4m3fn query takes one float32 on {latent.device}")


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


def by_tokens(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one leading shape as [T, H, X], once; where B and q do not merge, once a position of q.

    Nothing is copied, and there is nothing where there is no token. For ops whose bits don't depend on how many tokens
    they get at once; a product's do.
    """
    if not tensors[0].shape[:-2].numel():
        return
    views = tuple(view for view in map(merged, tensors) if view is not None)
    if len(views) == len(tensors):
        yield views
        return
    for i in range(tensors[0].shape[1]):
        yield tuple(t[:, i] for t in tensors)


def merged(x: Tensor) -> Tensor | None:
    """[B, (q,) H, X] as [T, H, X] over the same memory; None where no single stride leads from token to token."""
    if x.dim() == 3:
        return x
    batch, q_len = x.shape[:2]
    if batch <= 1 or q_len <= 1 or x.stride(0) == q_len * x.stride(1):
        return x.flatten(0, 1)
    return None


def tokens(x: Tensor) -> Tensor:
    """[B, (q,) H, X] as [T, H, X]; copied where B and q do not merge, so that a product's bits do not depend on that."""
    return x if x.dim() == 3 else x.flatten(0, 1)
