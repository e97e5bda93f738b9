"""The plan's own block table and lengths: fixed addresses, filled in place at each step.

What a caller hands in is checked whole before anything is written, so that a refused step leaves
the last one standing. A step that a view is given is written as the whole's, all rows past it empty,
so that there is one step in the memory that they share. Nothing here waits for the device, except
`host_lengths` where the caller gave no lengths on the host, and an upload of lengths for the one
four uploads before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from mla_backends.adapter import HostLengths
from mla_backends.steps import Kept, Room, StepInput

__all__ = ["Buffers"]

_steps = count()

_SLOTS = 4
"""Pinned staging buffers in rotation, so that a copy in flight is not overwritten."""


@dataclass(eq=False)
class Held:
    """What some buffers hold, one object for them and all views of them.

    Args:
        step: its number.
        lengths: of the live requests, on the host; None where only the device knows.
        rows, columns: of the block table that was given last.
    """

    step: int = field(default_factory=lambda: next(_steps))
    lengths: Tensor | None = None
    rows: int = 0
    columns: int = 0


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
        whole: what these are the first rows of; None where they are all.
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
    whole: Buffers | None = None
    held: Held = field(init=False)
    kernel_table: Tensor = field(init=False)
    kernel_lens: Tensor = field(init=False)
    sees_keys: bool = field(init=False, default=False)
    """The host knows that every row of the step that was planned last sees a key; False where it cannot know."""
    _staging: list[tuple[Tensor, torch.cuda.Event]] = field(init=False, default_factory=list)
    _turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.whole is not None:
            self.held = self.whole.held
            self.kernel_table, self.kernel_lens = (
                x[: self.batch] for x in (self.whole.kernel_table, self.whole.kernel_lens)
            )
            return
        self.held = Held()
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
        return Buffers(
            self.block_table[:batch],
            self.seq_lens[:batch],
            self.cu_q_lens[: batch + 1],
            self.max_seq_len,
            self.page_size,
            self.num_pages,
            self.ragged,
            self.q_len,
            self.clamped,
            self if self.whole is None else self.whole,
        )

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
        on_host = self.device.type == "cpu"
        table, lengths = (self.block_table, self.seq_lens) if on_host else (None, None)
        self.room.check(step, Kept(self.held.rows, self.held.columns, table, lengths))

    def fill(self, step: StepInput) -> None:
        """Write a checked step; rows past the live ones become empty, those past a view's too."""
        if self.whole is not None:
            self.whole.fill(step)
            return
        held, live = self.held, step.live
        held.step = next(_steps)
        # Copied, as an engine may have one such tensor and change it while a failed step is taken back.
        held.lengths = None if step.seq_lens_cpu is None else step.seq_lens_cpu.clone()
        table, lengths = self._apart(step.block_table), self._apart(step.seq_lens)
        if live is not None and live < self.batch:
            self.seq_lens[live:].zero_()
        if table is not None:
            held.rows, held.columns = int(table.shape[0]), int(table.shape[1])
            width = min(held.columns, int(self.block_table.shape[1]))
            self.block_table[:live, :width].copy_(table[:, :width])
        # Lengths that only the device knows are held inside the table: a kernel must not read past it.
        room = min(self.max_seq_len, held.columns * self.page_size)
        if lengths is not None:
            if lengths.dtype == torch.int32:
                torch.clamp(lengths, 0, room, out=self.seq_lens[:live])
            else:
                self.seq_lens[:live].copy_(lengths.long().clamp(0, room))
        elif held.lengths is not None:
            self._upload(held.lengths, self.seq_lens[:live])
        elif table is not None:
            self.seq_lens[:live].clamp_(max=room)
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

    def rewritten(self) -> None:
        """The engine wrote into these rows, so the host no longer knows what is in them; capturable.

        Raises:
            InvalidInput: on a CPU, for what a step would be refused for.
        """
        held = self.held
        held.step, held.lengths = next(_steps), None
        held.rows, held.columns = (int(n) for n in (self if self.whole is None else self.whole).block_table.shape)
        self.check(StepInput())
        self.seq_lens.clamp_(0, self.max_seq_len)
        self.clamp()

    def learn(self) -> None:
        """Settle `sees_keys` for the step that is held, which was just planned."""
        lengths = self.held.lengths
        self.sees_keys = (
            lengths is not None
            and not self.ragged
            and len(lengths) >= self.batch > 0
            and int(lengths[: self.batch].min()) >= self.q_len  # else a row before a request's first key, where causal
        )

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Bring every value back if planning the step that is written inside ends in an exception."""
        whole, held = self if self.whole is None else self.whole, self.held
        kept = [(t, t.clone()) for t in (whole.block_table, whole.seq_lens, whole.cu_q_lens)]
        before = replace(held)
        try:
            yield
        except BaseException:
            for tensor, value in kept:
                tensor.copy_(value)
            held.step, held.lengths, held.rows, held.columns = before.step, before.lengths, before.rows, before.columns
            whole.clamp()
            raise

    def host_lengths(self) -> HostLengths:
        """The buffers' lengths on the host. Waits for the device unless the last step gave `seq_lens_cpu`."""
        known = self.held.lengths
        if known is None:
            seq_lens = self.seq_lens.cpu()
        else:
            seq_lens = torch.zeros(self.batch, dtype=torch.int32, device="cpu")
            seq_lens[: len(known)] = known[: self.batch]
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
