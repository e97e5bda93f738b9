"""The plan's own block table and lengths: fixed addresses, filled in place at each step.

What a caller hands in is checked whole before anything is written, so that a refused step leaves
the last one standing. Nothing here waits for the device, except `host_lengths` where the caller
gave no lengths on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_backends.adapter import HostLengths
from mla_backends.errors import InvalidInput

__all__ = ["Buffers", "StepInput", "check_ints"]

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8)
_SLOTS = 4
"""Pinned staging buffers in rotation, so that a copy in flight is not overwritten."""


def check_ints(name: str, tensor: Tensor, ndim: int, device: torch.device) -> None:
    """Refuse what is no integer tensor of that rank on that device.

    Raises:
        InvalidInput: naming the argument, what was found and what is taken.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidInput(f"{name} is a {type(tensor).__name__}, it takes an int32 tensor")
    if tensor.dtype not in _INTEGERS:
        raise InvalidInput(f"{name} is {tensor.dtype}, it takes int32; convert with .int()")
    if tensor.ndim != ndim:
        raise InvalidInput(f"{name} has shape {list(tensor.shape)}, it takes {ndim} dimensions")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device}, it takes {device}, where the cache is")


@dataclass(frozen=True)
class StepInput:
    """One step as the caller gives it; None keeps what the buffers hold.

    Args:
        block_table: [b, w] page ids, any integer dtype and row stride.
        seq_lens: [b] keys a request.
        seq_lens_cpu: [b] the same, on the host.
        cu_q_lens: [b + 1] query rows before each request, ragged plans only.
    """

    block_table: Tensor | None = None
    seq_lens: Tensor | None = None
    seq_lens_cpu: Tensor | None = None
    cu_q_lens: Tensor | None = None

    @property
    def live(self) -> int | None:
        """Requests of this step, None where nothing says how many."""
        for tensor in (self.seq_lens, self.seq_lens_cpu, self.block_table):
            if tensor is not None:
                return int(tensor.shape[0])
        return None if self.cu_q_lens is None else int(self.cu_q_lens.shape[0]) - 1


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
    kernel_table: Tensor = field(init=False)
    kernel_lens: Tensor = field(init=False)
    _staging: list[tuple[Tensor, torch.cuda.Event]] = field(init=False, default_factory=list)
    _turn: int = field(init=False, default=0)
    _known: Tensor | None = field(init=False, default=None)

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
        )
        view.clamped, view.kernel_table, view.kernel_lens = (
            self.clamped,
            self.kernel_table[:batch],
            self.kernel_lens[:batch],
        )
        return view

    def check(self, step: StepInput) -> None:
        """Refuse a step that these buffers cannot hold; writes nothing.

        Raises:
            InvalidInput: for a wrong dtype, rank, device or batch, and for lengths outside 0 to max_seq_len
                where the host knows them.
        """
        if step.block_table is not None:
            check_ints("block_table", step.block_table, 2, self.device)
        if step.seq_lens is not None:
            check_ints("seq_lens", step.seq_lens, 1, self.device)
        if step.seq_lens_cpu is not None:
            check_ints("seq_lens_cpu", step.seq_lens_cpu, 1, torch.device("cpu"))
        self._check_batch(step)
        self._check_lengths(step)
        self._check_ragged(step)

    def _check_batch(self, step: StepInput) -> None:
        live = step.live
        if live is None:
            return
        if live > self.batch:
            raise InvalidInput(
                f"the step has {live} requests, this plan holds {self.batch}; plan with max_batch={live}"
            )
        for name in ("block_table", "seq_lens", "seq_lens_cpu"):
            tensor = getattr(step, name)
            if tensor is not None and tensor.shape[0] != live:
                raise InvalidInput(f"{name} has {tensor.shape[0]} rows, it takes {live}, one a request")

    def _check_lengths(self, step: StepInput) -> None:
        known = step.seq_lens_cpu
        if known is None and step.seq_lens is not None and step.seq_lens.device.type == "cpu":
            known = step.seq_lens
        if known is None or known.numel() == 0:
            return
        least, most = (int(v) for v in torch.aminmax(known))
        if least < 0:
            raise InvalidInput(f"seq_lens holds {least}, it takes lengths of at least 0")
        if most > self.max_seq_len:
            raise InvalidInput(
                f"seq_lens holds {most}, it takes at most {self.max_seq_len}, this plan's max_seq_len; plan with a larger one"
            )
        width = None if step.block_table is None else int(step.block_table.shape[1])
        if width is not None and most > width * self.page_size:
            raise InvalidInput(
                f"seq_lens holds {most}, but block_table [{step.live}, {width}] with page_size {self.page_size} "
                f"has room for {width * self.page_size}; pass a wider table"
            )

    def _check_ragged(self, step: StepInput) -> None:
        if step.cu_q_lens is None:
            return
        if not self.ragged:
            raise InvalidInput("cu_q_lens is given, but this plan's queries are uniform; plan with cu_q_lens")
        check_ints("cu_q_lens", step.cu_q_lens, 1, self.device)
        live = step.live
        if step.cu_q_lens.shape[0] != (live or 0) + 1:
            raise InvalidInput(
                f"cu_q_lens has {step.cu_q_lens.shape[0]} entries, it takes {(live or 0) + 1}, one a request and one more"
            )
        if step.cu_q_lens.device.type == "cpu":
            q_lens = step.cu_q_lens.diff()
            if int(step.cu_q_lens[0]) != 0 or bool((q_lens < 0).any()):
                raise InvalidInput("cu_q_lens must start at 0 and not decrease")
            if q_lens.numel() and int(q_lens.max()) > self.q_len:
                raise InvalidInput(
                    f"cu_q_lens holds a request of {int(q_lens.max())} rows, this plan's max_q_len is {self.q_len}"
                )

    def fill(self, step: StepInput) -> None:
        """Write a checked step; rows past the live ones become empty."""
        live = step.live
        self._known = step.seq_lens_cpu
        if live is not None and live < self.batch:
            self.seq_lens[live:].zero_()
        if step.block_table is not None:
            width = min(int(step.block_table.shape[1]), int(self.block_table.shape[1]))
            self.block_table[:live, :width].copy_(step.block_table[:, :width])
        if step.seq_lens is not None:
            # Lengths that only the device knows are held inside the table: a kernel must not read past it.
            room = self.max_seq_len
            if step.block_table is not None:
                room = min(room, int(step.block_table.shape[1]) * self.page_size)
            torch.clamp(step.seq_lens, 0, room, out=self.seq_lens[:live])
        elif step.seq_lens_cpu is not None:
            self._upload(step.seq_lens_cpu, self.seq_lens[:live])
        if step.cu_q_lens is not None:
            self.cu_q_lens[: len(step.cu_q_lens)].copy_(step.cu_q_lens)
            if len(step.cu_q_lens) < len(self.cu_q_lens):
                self.cu_q_lens[len(step.cu_q_lens) :].copy_(
                    step.cu_q_lens[-1:].expand(len(self.cu_q_lens) - len(step.cu_q_lens))
                )
        self.clamp()

    def clamp(self) -> None:
        """Recompute what kernels see from the buffers, on the device; capturable."""
        if self.clamped:
            torch.clamp(self.seq_lens, min=1, out=self.kernel_lens)
            torch.clamp(self.block_table, 0, self.num_pages - 1, out=self.kernel_table)

    def follow(self, whole: Buffers) -> None:
        """A view of `whole`'s first rows has the step that `whole` was just given."""
        self._known = None if whole._known is None else whole._known[: self.batch]

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Bring every value back if planning the step that is written inside ends in an exception."""
        kept = [(t, t.clone()) for t in (self.block_table, self.seq_lens, self.cu_q_lens)]
        known = self._known
        try:
            yield
        except BaseException:
            for tensor, value in kept:
                tensor.copy_(value)
            self._known = known
            self.clamp()
            raise

    def host_lengths(self) -> HostLengths:
        """The buffers' lengths on the host. Waits for the device unless the last step gave `seq_lens_cpu`."""
        if self._known is None:
            seq_lens = self.seq_lens.cpu()
        else:
            seq_lens = torch.zeros(self.batch, dtype=torch.int32)
            seq_lens[: len(self._known)] = self._known
        cu_q_lens = (
            self.cu_q_lens.cpu() if self.ragged else torch.arange(self.batch + 1, dtype=torch.int32) * self.q_len
        )
        return HostLengths(seq_lens, cu_q_lens)

    def _upload(self, values: Tensor, into: Tensor) -> None:
        if into.device.type == "cpu":
            into.copy_(values)
            return
        if not self._staging:
            for _ in range(_SLOTS):
                self._staging.append((torch.empty(self.batch, dtype=torch.int32, pin_memory=True), torch.cuda.Event()))
        staging, done = self._staging[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        done.synchronize()
        staging[: len(values)].copy_(values)
        into.copy_(staging[: len(values)], non_blocking=True)
        done.record()
