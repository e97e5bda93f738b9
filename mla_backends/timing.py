"""How times are taken: captured graphs in turns on a GPU, a monotonic clock on a CPU, medians always; and kernels counted."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["ceilings", "graph_of", "interleaved", "kernel_nodes", "median_on_cpu"]


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


KERNEL_NODE = 0
"""cudaGraphNodeTypeKernel."""


def kernel_nodes(calls: Sequence[Callable[[], object]]) -> int:
    """How many kernels a capture of the calls holds."""
    graph = graph_of(calls, keep=True)
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert runtime.cudaGraphGetNodes(raw, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert runtime.cudaGraphGetNodes(raw, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        assert runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds.count(KERNEL_NODE)


def interleaved(graphs: Sequence[torch.cuda.CUDAGraph], *, replays: int = 30) -> list[float]:
    """Median microseconds of a replay of each graph, the graphs taking turns, each as often first."""
    times: list[list[float]] = [[] for _ in graphs]
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    marks = []
    for turn in range(replays):
        for place in range(len(graphs)):
            which = (turn + place) % len(graphs)
            graph = graphs[which]
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
