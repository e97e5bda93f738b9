"""Which adapter: verdicts on a problem, and the order of those that run.

A pure function of the problem, the device and what is installed, which come as arguments, so that
any machine's choice is made, and tested, on any laptop. The only place that compares two adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mla_backends.adapter import Adapter
from mla_backends.catalogue import Broken, Entry, Serving, is_installed
from mla_backends.device import Device
from mla_backends.errors import InvalidInput
from mla_backends.formats import FORMATS
from mla_backends.problem import Problem
from mla_backends.support import Refusal, Speed
from mla_backends.verdicts import Verdict, Verdicts

__all__ = ["estimate", "forced", "judge"]

COPY_BYTES = 4.3e12
"""Bytes a second that an H200 copies. Source: performance measurements on that card; only ratios decide."""

MATRIX_FLOPS = 790e12
"""bf16 operations a second of an H200, likewise."""

TILE = 64
"""Query rows that the kernels compute together, whether they are there or not; and the keys of a block."""

TYPICAL_BATCH, TYPICAL_SEQ_LEN, TYPICAL_SMS = 32, 4096, 132
"""What a problem is weighed at that does not say how large it is, and a device whose multiprocessors nobody counted."""

TYPICAL_FILL = 0.75
"""Of a plan's capacity, the mean of its requests' lengths: those of ci/bench-selection, which the figures come from."""


def judge(
    problem: Problem,
    device: Device,
    entries: Sequence[Entry],
    *,
    ask: Callable[[Adapter], Serving] | None,
    only: str | None = None,
) -> Verdicts:
    """The verdict of every adapter, those that run first, the fastest of them first.

    Args:
        problem, device: the facts.
        entries: adapters, as `catalogue.installed` gives them.
        ask: which provider serves an adapter here; None to judge for a machine that is not this one, where
            what is installed is not known.
        only: the adapter that the caller names; the others aren't judged, and its preferences are waived.
    """
    if only is not None:
        entries = [forced(entries, only)]
    running: list[tuple[float, Verdict]] = []
    refused: list[Verdict] = []
    for entry in entries:
        if isinstance(entry, Broken):
            refused.append(
                Verdict(entry.name, "none", (Refusal("", entry.error, "an adapter that imports", "its file"),))
            )
            continue
        verdict = _verdict(entry, problem, device, ask, is_forced=only is not None)
        if verdict.runs:
            running.append((estimate(entry, problem, device), verdict))
        else:
            refused.append(verdict)
    running.sort(key=lambda pair: pair[0])
    return Verdicts(problem, device, (*(verdict for _, verdict in running), *refused))


def forced(entries: Sequence[Entry], name: str) -> Entry:
    """The adapter called `name`.

    Raises:
        InvalidInput: if there is none of that name.
    """
    for entry in entries:
        if entry.name == name:
            return entry
    raise InvalidInput(
        f"adapter is {name!r}, it takes one of {', '.join(entry.name for entry in entries) or 'none installed'}"
    )


def _verdict(
    adapter: Adapter, problem: Problem, device: Device, ask: Callable[[Adapter], Serving] | None, *, is_forced: bool
) -> Verdict:
    packages = " or ".join(p.package for p in adapter.providers) or "torch"
    try:
        reasons = adapter.refusals(problem, device, forced=is_forced)
    except Exception as error:  # whatever a plug-in's rules do, it is this adapter's reason and takes nobody down
        found = f"its own rules end in {type(error).__name__}: {error}"
        reasons = (Refusal("", found, "rules that judge any problem", f"support of {adapter.name}", "tell its author"),)
    if ask is None:
        return Verdict(adapter.name, packages, reasons)
    if reasons:
        # No library is imported for a problem that its kernel does not take; finding it is enough.
        if adapter.providers and not any(is_installed(p) for p in adapter.providers):
            reasons = (*reasons, _absent(adapter, tuple((p.package, "not installed") for p in adapter.providers)))
        return Verdict(adapter.name, packages, reasons)
    served = ask(adapter)
    if not served.answered:
        return Verdict(adapter.name, packages, (_absent(adapter, served.absent),))
    return Verdict(adapter.name, str(served), ())


def _absent(adapter: Adapter, absent: tuple[tuple[str, str], ...]) -> Refusal:
    found = "; ".join(f"{package}: {why}" for package, why in absent)
    first = adapter.providers[0].package
    return Refusal("", found, " or ".join(p.package for p in adapter.providers), "import", f"pip install {first}")


def estimate(adapter: Adapter, problem: Problem, device: Device, speed: Speed | None = None) -> float:
    """Microseconds of a layer by the adapter's measured figures, or by `speed`; infinite where nothing was measured."""
    speed = adapter.speed if speed is None else speed
    if speed.memory <= 0 or speed.compute <= 0:
        return float("inf")
    batch = TYPICAL_BATCH if problem.batch is None else max(problem.batch, 1)
    keys = problem.topk or TYPICAL_FILL * (problem.max_seq_len or TYPICAL_SEQ_LEN)
    rows = problem.q_len * adapter.conventions_of(problem).padded(problem.num_heads)
    tiles = max(1, -(-rows // TILE))
    row_bytes = FORMATS[problem.cache_format].row_bytes(problem.kv_lora_rank, problem.qk_rope_head_dim)
    seconds_memory = batch * keys * row_bytes / (COPY_BYTES * speed.memory)
    flops = 2 * batch * tiles * TILE * keys * (problem.row_width + problem.kv_lora_rank)
    seconds_compute = flops / (MATRIX_FLOPS * speed.compute)
    # As many as fill the device, and no more than there are blocks of keys.
    splits = max(1.0, min((device.sm_count or TYPICAL_SMS) / (batch * tiles), keys / TILE))
    partials = batch * rows * splits / 1000 if splits > 1.5 else 0.0
    combining = speed.split * splits + speed.partial * partials
    return 1e6 * max(seconds_memory, seconds_compute) + speed.overhead + combining
