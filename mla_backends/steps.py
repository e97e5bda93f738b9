"""One step as the caller gives it, and the room that a plan has for it: what does not fit is refused whole, before anything is written.

Only what the host knows is looked at, so that nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_backends.errors import InvalidInput

__all__ = ["MOST_KEYS", "Kept", "Room", "StepInput", "check_ints", "check_tensor"]

MOST_KEYS = 2**31 - 1
"""Of a request: lengths are int32."""

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8)


def check_tensor(name: str, found: Any, taken: str) -> None:
    """Refuse what is no tensor.

    Raises:
        InvalidInput: naming the argument, what was found and what is taken.
    """
    if not isinstance(found, Tensor):
        raise InvalidInput(f"{name} is a {type(found).__name__}, it takes {taken}")


def check_ints(name: str, tensor: Tensor, ndim: int, device: torch.device) -> None:
    """Refuse what is no integer tensor of that rank on that device.

    Raises:
        InvalidInput: naming the argument, what was found and what is taken.
    """
    check_tensor(name, tensor, "an int32 tensor")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise InvalidInput(f"{name} is a {kind} tensor, it takes a strided one; pass {name}.to_dense()")
    if tensor.dtype not in _INTEGERS:
        raise InvalidInput(f"{name} is {tensor.dtype}, it takes int32; convert with .int()")
    if tensor.ndim != ndim:
        raise InvalidInput(f"{name} has shape {list(tensor.shape)}, it takes {ndim} dimensions")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device}, it takes {device}, where the cache is")


@dataclass(frozen=True, eq=False)
class StepInput:
    """One step as the caller gives it; None keeps what the buffers hold.

    Args:
        block_table: [b, w] page ids, any integer dtype and row stride.
        seq_lens: [b] keys a request.
        seq_lens_cpu: [b] the same, on the host.
        cu_q_lens: [b + 1] query rows before each request, ragged plans only.
        max_seq_len: keys of the longest request, as the caller knows it.
    """

    block_table: Tensor | None = None
    seq_lens: Tensor | None = None
    seq_lens_cpu: Tensor | None = None
    cu_q_lens: Tensor | None = None
    max_seq_len: int | None = None

    @property
    def is_given(self) -> bool:
        return any(part is not None for part in (self.block_table, self.seq_lens, self.seq_lens_cpu, self.cu_q_lens))

    @property
    def live(self) -> int | None:
        """Requests of this step, None where nothing says how many."""
        for tensor in (self.seq_lens, self.seq_lens_cpu, self.block_table):
            if tensor is not None:
                return int(tensor.shape[0])
        return None if self.cu_q_lens is None else int(self.cu_q_lens.shape[0]) - 1

    def check(self, device: torch.device) -> None:
        """Refuse what is no integer tensor of the right rank on the right device.

        Raises:
            InvalidInput: naming the argument.
        """
        host = torch.device("cpu")
        for name, ndim, where in (
            ("block_table", 2, device),
            ("seq_lens", 1, device),
            ("seq_lens_cpu", 1, host),
            ("cu_q_lens", 1, device),
        ):
            tensor = getattr(self, name)
            if tensor is not None:
                check_ints(name, tensor, ndim, where)


@dataclass(frozen=True, eq=False)
class Kept:
    """What stays in force where a step brings none.

    Args:
        rows, columns: of the block table that was given last.
        block_table: [batch, W] page ids where the host knows them, else None.
        seq_lens: [batch] keys a request, likewise.
    """

    rows: int
    columns: int
    block_table: Tensor | None
    seq_lens: Tensor | None


@dataclass(frozen=True)
class Room:
    """What a plan can hold.

    Args:
        batch: requests.
        max_seq_len: keys a request.
        page_size: tokens a page.
        num_pages: of the cache.
        q_len: query rows a request, the most of one when ragged.
        ragged: queries come with `cu_q_lens`.
        device: of all tensors but those for the host.
    """

    batch: int
    max_seq_len: int
    page_size: int
    num_pages: int
    q_len: int
    ragged: bool
    device: torch.device

    def check(self, step: StepInput, kept: Kept | None = None) -> None:
        """Refuse a step that does not fit; writes nothing.

        Args:
            kept: None for a plan's first step.

        Raises:
            InvalidInput: for a wrong dtype, rank, device or batch; where the host knows them, for lengths that contradict
                each other, are outside 0 to max_seq_len or past the table, and for a page within them that the cache
                does not have.
        """
        step.check(self.device)
        self._check_batch(step)
        for name in ("seq_lens", "seq_lens_cpu"):
            lengths = getattr(step, name)
            if lengths is not None and lengths.device.type == "cpu":
                self._check_lengths(name, lengths, step, kept)
        self._check_agreement(step)
        lengths = step.seq_lens if step.seq_lens is not None else step.seq_lens_cpu
        if lengths is None and kept is not None and kept.seq_lens is not None:
            lengths = kept.seq_lens[: step.live]
            self._check_lengths("seq_lens, as it was,", lengths, step, kept)
        if lengths is not None:
            if step.block_table is not None:
                self._check_pages("block_table", step.block_table, lengths)
            elif kept is not None and kept.block_table is not None:
                self._check_pages("block_table, as it was,", kept.block_table[: len(lengths)], lengths)
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

    def _check_lengths(self, name: str, lengths: Tensor, step: StepInput, kept: Kept | None) -> None:
        if lengths.numel() == 0:
            return
        least, most = (int(v) for v in torch.aminmax(lengths))
        if least < 0:
            raise InvalidInput(f"{name} holds {least}, it takes lengths of at least 0")
        self._check_table(name, lengths, most, step, kept)
        if most > self.max_seq_len:
            raise InvalidInput(
                f"{name} holds {most}, it takes at most {self.max_seq_len}, this plan's max_seq_len; plan with a larger one"
            )
        if step.max_seq_len is not None and most > step.max_seq_len:
            raise InvalidInput(
                f"max_seq_len is {step.max_seq_len}, but {name} holds {most}; it takes the longest request of the step, "
                f"leave it out where that is not known"
            )

    def _check_table(self, name: str, lengths: Tensor, most: int, step: StepInput, kept: Kept | None) -> None:
        """Refuse lengths, `most` the longest, past the table that they are read by."""
        table, rows, columns = "block_table", 0, 0
        if step.block_table is not None:
            rows, columns = (int(n) for n in step.block_table.shape)
        elif kept is not None:
            table, rows, columns = "block_table, as it was,", kept.rows, kept.columns
        if most > columns * self.page_size:
            raise InvalidInput(
                f"{name} holds {most}, but {table} [{rows}, {columns}] with page_size {self.page_size} "
                f"has room for {columns * self.page_size}; pass a wider table"
            )
        if bool((lengths[rows:] > 0).any()):
            raise InvalidInput(f"{name} has {len(lengths)} requests, but {table} has {rows} rows; pass block_table")

    def _check_agreement(self, step: StepInput) -> None:
        """The host plans by the one, the kernel reads the other."""
        lengths, on_host = step.seq_lens, step.seq_lens_cpu
        if lengths is None or on_host is None or lengths is on_host or lengths.device.type != "cpu":
            return
        differs = lengths != on_host
        if bool(differs.any()):
            at = int(differs.nonzero()[0])
            raise InvalidInput(
                f"seq_lens_cpu holds {int(on_host[at])} for request {at}, seq_lens {int(lengths[at])}; they take the same "
                f"lengths, leave seq_lens_cpu out on a CPU"
            )

    def _check_pages(self, name: str, table: Tensor, lengths: Tensor) -> None:
        """Ids past a request's length may be anything. In the table's own dtype: 2**32 + 1 is page 1 once it is int32."""
        if table.device.type != "cpu" or lengths.device.type != "cpu" or not table.numel():
            return
        lengths = lengths.long()
        columns = min(-(-int(lengths.max()) // self.page_size), int(table.shape[1]))
        ids = table[:, :columns].long()
        is_read = torch.arange(columns, device="cpu") * self.page_size < lengths[:, None]
        wrong = is_read & ((ids < 0) | (ids >= self.num_pages))
        if bool(wrong.any()):
            request, column = wrong.nonzero()[0].tolist()
            raise InvalidInput(
                f"{name} holds page {int(ids[request, column])} at [{request}, {column}], within the {int(lengths[request])} "
                f"keys of its request, it takes 0 to {self.num_pages - 1}, the cache's pages"
            )

    def _check_ragged(self, step: StepInput) -> None:
        starts = step.cu_q_lens
        if starts is None:
            return
        if not self.ragged:
            raise InvalidInput("cu_q_lens is given, but this plan's queries are uniform; plan with cu_q_lens")
        entries = (step.live or 0) + 1
        if starts.shape[0] != entries:
            raise InvalidInput(
                f"cu_q_lens has {starts.shape[0]} entries, it takes {entries}, one a request and one more"
            )
        if starts.device.type != "cpu":
            return
        q_lens = starts.long().diff()
        if int(starts[0]) != 0 or bool((q_lens < 0).any()):
            raise InvalidInput(f"cu_q_lens is {starts.tolist()}, it takes offsets that start at 0 and do not decrease")
        if q_lens.numel() and int(q_lens.max()) > self.q_len:
            raise InvalidInput(
                f"cu_q_lens holds a request of {int(q_lens.max())} rows, this plan's max_q_len is {self.q_len}"
            )
