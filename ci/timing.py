"""What the benchmarks count besides times on the GPU: the host's own microseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from mla_backends.timing import ceilings, graph_of, interleaved, kernel_nodes

__all__ = ["ceilings", "graph_of", "host_times", "interleaved", "kernel_nodes"]


def host_times(calls: Sequence[Callable[[], object]], *, passes: int = 3) -> list[float]:
    """Median host microseconds of one eager call of each: of some passes the one whose sum is least, as a host has slow spells."""
    return min((_host_times(calls) for _ in range(passes)), key=sum)


def _host_times(calls: Sequence[Callable[[], object]], *, rounds: int = 40, burst: int = 16) -> list[float]:
    """One pass, the calls taking turns in bursts short enough not to fill the launch queue."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(burst):
            call()
    for _ in range(rounds):
        for which, call in enumerate(calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(burst):
                call()
            times[which].append(1e6 * (time.perf_counter() - start) / burst)
    torch.cuda.synchronize()
    return [statistics.median(found) for found in times]
