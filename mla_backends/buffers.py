"""The plan's own block table and lengths: fixed addresses, filled in place at each step.

What a caller hands in is checked whole before anything is written, so that a refused step leaves
the last one standing. Nothing here waits for the device, except `host_lengths` where the caller
gave no lengths on the host, and an upload of lengths for the one four uploads before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from mla_backends.adapter import HostLengths
from mla_backends.steps import Room, StepInput

__all__ = ["Buffers"]

_steps = count()

_SLOTS = 4
"""Pinned staging buffers in rotation, so that a copy in flight is not overwritten."""


@dataclass(eq=False)
class Buffers:
    """Block table, lengths and query offsets of a plan.

    Args:
        block_table: [B, W] int32, contiguous.
        seq_lens: [B] int32; rows past the live ones are 0.
        cu_q_lens: [B + 1] int32; where queries are uniform, a ramp that never changes.
        max_seq_len: keys that a row may have, at most W * page_size.
        page_size: tokens a page.
        num_pages: of the cache.
        ragged: cu_q_lens changes from step to step.
        q_len: query rows a request, the most when ragged.
        clamped: kernels must see lengths of at least 1 and ids inside the cache: `kernel_table` and `kernel_lens`
            are copies that hold them, else the buffers themselves.
        holds: [1] the number of the step that was written last, one list for these buffers and all views of them.
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_q_lens: Tensor
    max_seq_len: int
    page_size: int
    num_pages: int
    ragged: bool
    q_len: int
    clamped: bool
    holds: list[int] = field(default_factory=lambda: [next(_steps)])
    kernel_table: Tensor = field(init=False)
    kernel_lens: Tensor = field(init=False)
    _staging: list[tuple[Tensor, torch.cuda.Event]] = field(init=False, default_factory=list)
    _turn: int = field(init=False, default=0)
    _known: Tensor | None = field(init=False, default=None)
    sees_keys: bool = field(init=False, default=False)
    """The host knows that every row sees a key; False where it cannot know."""

    def __post_init__(self) -> None:
        self.kernel_table = torch.zeros_like(self.block_table) if self.clamped else self.block_table
        self.kernel_lens = torch.ones_like(self.seq_lens) if self.clamped else self.seq_lens

    @classmethod
    def allocate(
        cls,
        batch: int,
        *,
        max_seq_len: int,
        page_size: int,
        num_pages: int,
        q_len: int,
        ragged: bool,
        clamped: bool,
        columns: int,
        device: torch.device,
    ) -> Buffers:
        """Empty buffers: every length 0, every id 0.

        Args:
            columns: what the table's width must be a multiple of.
        """
        width = -(-max(1, -(-max_seq_len // page_size)) // columns) * columns
        ramp = torch.arange(batch + 1, dtype=torch.int32, device=device) * q_len
        return cls(
            block_table=torch.zeros(batch, width, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(batch, dtype=torch.int32, device=device),
            cu_q_lens=torch.zeros_like(ramp) if ragged else ramp,
            max_seq_len=max_seq_len,
            page_size=page_size,
            num_pages=num_pages,
            ragged=ragged,
            q_len=q_len,
            clamped=clamped,
        )

    @property
    def batch(self) -> int:
        return int(self.seq_lens.shape[0])

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    def first(self, batch: int) -> Buffers:
        """The first `batch` rows, in the same memory."""
        view = Buffers(
            self.block_table[:batch],
            self.seq_lens[:batch],
            self.cu_q_lens[: batch + 1],
            self.max_seq_len,
            self.page_size,
            self.num_pages,
            self.ragged,
            self.q_len,
            False,
            self.holds,
        )
        view.clamped, view.kernel_table, view.kernel_lens = (
            self.clamped,
            self.kernel_table[:batch],
            self.kernel_lens[:batch],
        )
        return view

    @property
    def room(self) -> Room:
        return Room(
            batch=self.batch,
            max_seq_len=self.max_seq_len,
            page_size=self.page_size,
            num_pages=self.num_pages,
            q_len=self.q_len,
            ragged=self.ragged,
            device=self.device,
        )

    def check(self, step: StepInput) -> None:
        """Refuse a step that these buffers cannot hold; writes nothing.

        Raises:
            InvalidInput: as `Room.check`.
        """
        self.room.check(step, (self.block_table, self.seq_lens) if self.device.type == "cpu" else None)

    def fill(self, step: StepInput) -> None:
        """Write a checked step; rows past the live ones become empty."""
        self.holds[0] = next(_steps)
        live = step.live
        # Copied, as an engine may have one such tensor and change it while a failed step is taken back.
        self._learn(None if step.seq_lens_cpu is None else step.seq_lens_cpu.clone())
        table, lengths = self._apart(step.block_table), self._apart(step.seq_lens)
        if live is not None and live < self.batch:
            self.seq_lens[live:].zero_()
        if table is not None:
            width = min(int(table.shape[1]), int(self.block_table.shape[1]))
            self.block_table[:live, :width].copy_(table[:, :width])
        if lengths is not None:
            # Lengths that only the device knows are held inside the table: a kernel must not read past it.
            room = self.max_seq_len
            if table is not None:
                room = min(room, int(table.shape[1]) * self.page_size)
            if lengths.dtype == torch.int32:
                torch.clamp(lengths, 0, room, out=self.seq_lens[:live])
            else:
                self.seq_lens[:live].copy_(lengths.long().clamp(0, room))
        elif self._known is not None:
            self._upload(self._known, self.seq_lens[:live])
        elif table is not None:
            self.seq_lens[:live].clamp_(max=min(self.max_seq_len, int(table.shape[1]) * self.page_size))
        if step.cu_q_lens is not None:
            self.cu_q_lens[: len(step.cu_q_lens)].copy_(step.cu_q_lens)
            if len(step.cu_q_lens) < len(self.cu_q_lens):
                self.cu_q_lens[len(step.cu_q_lens) :].copy_(
                    step.cu_q_lens[-1:].expand(len(self.cu_q_lens) - len(step.cu_q_lens))
                )
        self.clamp()

    def _apart(self, given: Tensor | None) -> Tensor | None:
        """What the caller gave, copied where it is a part of these buffers, as an engine that drops requests may give it.

        The first rows as they lie are the one part that what is written here leaves as it was.
        """
        if given is None:
            return None
        mine = self.block_table if given.ndim == 2 else self.seq_lens
        if given.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr():
            return given
        in_place = given.data_ptr() == mine.data_ptr() and given.stride() == mine.stride()
        return given if in_place else given.clone()

    def clamp(self) -> None:
        """Recompute what kernels see from the buffers, on the device; capturable."""
        if self.clamped:
            torch.clamp(self.seq_lens, min=1, out=self.kernel_lens)
            torch.clamp(self.block_table, 0, self.num_pages - 1, out=self.kernel_table)

    def follow(self, whole: Buffers) -> None:
        """A view of `whole`'s first rows has the step that `whole` was just given."""
        self._learn(None if whole._known is None else whole._known[: self.batch])

    def rewritten(self) -> None:
        """The engine wrote into the buffers, so the host no longer knows what is in them; capturable."""
        self._learn(None)
        self.clamp()

    def _learn(self, lengths: Tensor | None) -> None:
        self._known = lengths
        self.sees_keys = (
            lengths is not None
            and not self.ragged
            and len(lengths) == self.batch
            and self.batch > 0
            and int(lengths.min()) >= self.q_len  # else a row before a request's first key, where causal
        )

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Bring every value back if planning the step that is written inside ends in an exception."""
        kept = [(t, t.clone()) for t in (self.block_table, self.seq_lens, self.cu_q_lens)]
        known, held = self._known, self.holds[0]
        try:
            yield
        except BaseException:
            for tensor, value in kept:
                tensor.copy_(value)
            self._learn(known)
            self.holds[0] = held
            self.clamp()
            raise

    def host_lengths(self) -> HostLengths:
        """The buffers' lengths on the host. Waits for the device unless the last step gave `seq_lens_cpu`."""
        if self._known is None:
            seq_lens = self.seq_lens.cpu()
        else:
            seq_lens = torch.zeros(self.batch, dtype=torch.int32, device="cpu")
            seq_lens[: len(self._known)] = self._known
        cu_q_lens = (
            self.cu_q_lens.cpu()
            if self.ragged
            else torch.arange(self.batch + 1, dtype=torch.int32, device="cpu") * self.q_len
        )
        return HostLengths(seq_lens, cu_q_lens)

    def _upload(self, values: Tensor, into: Tensor) -> None:
        if into.device.type == "cpu":
            into.copy_(values)
            return
        if not self._staging:
            with torch.inference_mode(False):  # what is made in it cannot be written outside of it
                pinned = torch.empty(_SLOTS, self.batch, dtype=torch.int32, device="cpu", pin_memory=True)
            self._staging.extend((part, torch.cuda.Event()) for part in pinned)
        staging, done = self._staging[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        done.synchronize()
        staging[: len(values)].copy_(values)
        into.copy_(staging[: len(values)], non_blocking=True)
        done.record(torch.cuda.current_stream(into.device))
