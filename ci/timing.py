"""How times are taken on a GPU: captured graphs, interleaved variants, medians, and the spread of a variant against itself."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence

import torch

KERNEL_NODE = 0
"""cudaGraphNodeTypeKernel."""


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


def host_times(calls: Sequence[Callable[[], object]], *, rounds: int = 40, burst: int = 16) -> list[float]:
    """Median host microseconds of one eager call of each, taking turns in bursts short enough not to fill the launch queue."""
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


def ceilings() -> tuple[float, float]:
    """This run's copy bandwidth in TB/s, bytes read and written, and bf16 matrix rate in TFLOP/s on random data."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(a)
    copy, matmul = graph_of([lambda: target.copy_(source)]), graph_of([lambda: torch.mm(a, a, out=product)])
    seconds_copy, seconds_matmul = (1e-6 * t for t in interleaved([copy, matmul]))
    return 2 * source.numel() / seconds_copy / 1e12, 2 * 8192**3 / seconds_matmul / 1e12
