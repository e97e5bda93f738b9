"""What comes back: output and log-sum-exp in the one convention, whatever the kernel gave."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Decoded"]


class Decoded:
    """The result of one decode.

    Attributes:
        out: [B, (q,) H, L], or [.., V] when `decode` was given weights; ragged [T, H, ..]. The query's dtype
            (bf16 for an fp8 query).
        lse: [B, (q,) H] float32, natural log, any strides; None unless asked for.

    A row that sees no key is out 0, lse -inf.
    """

    __slots__ = ("lse", "out")

    out: Tensor
    lse: Tensor | None

    def __init__(self, out: Tensor, lse: Tensor | None = None) -> None:
        self.out = out
        self.lse = lse

    def __repr__(self) -> str:
        lse = "None" if self.lse is None else f"{list(self.lse.shape)}"
        return f"Decoded(out={list(self.out.shape)} {self.out.dtype}, lse={lse})"
