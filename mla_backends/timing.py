"""How times are taken: captured graphs in turns on a GPU, a monotonic clock on a CPU, medians always."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["ceilings", "graph_of", "interleaved", "median_on_cpu"]


def graph_of(calls: Sequence[Callable[[], object]], *, keep: bool = False) -> torch.cuda.CUDAGraph:
    """One graph of all the calls, in order; each is called once before, outside the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def interleaved(graphs: Sequence[torch.cuda.CUDAGraph], *, replays: int = 30) -> list[float]:
    """Median microseconds of a replay of each graph, the graphs taking turns."""
    times: list[list[float]] = [[] for _ in graphs]
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    marks = []
    for _ in range(replays):
        for which, graph in enumerate(graphs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            marks.append((which, start, end))
    torch.cuda.synchronize()
    for which, start, end in marks:
        times[which].append(1e3 * start.elapsed_time(end))
    return [statistics.median(found) for found in times]


def ceilings() -> tuple[float, float]:
    """This run's copy bandwidth in TB/s, bytes read and written, and bf16 matrix rate in TFLOP/s on random data."""
    source = torch.randn(2 << 28, device="cuda")  # 2 GiB
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(a)
    # a kernel, because a copy is a node of its own kind in a graph, which ran at 2.8 TB/s on an H200 where kernels reach 3.9
    copy = graph_of([lambda: torch.neg(source, out=target)])
    matmul = graph_of([lambda: torch.mm(a, a, out=product)])
    seconds_copy, seconds_matmul = (1e-6 * t for t in interleaved([copy, matmul]))
    return 2 * source.numel() * source.element_size() / seconds_copy / 1e12, 2 * 8192**3 / seconds_matmul / 1e12


def median_on_cpu(call: Callable[[], object], *, seconds: float = 2.0, least: int = 3) -> float:
    """Median microseconds of a call, repeated for about so many seconds and at least so often."""
    times: list[float] = []
    call()
    began = time.perf_counter()
    while len(times) < least or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
