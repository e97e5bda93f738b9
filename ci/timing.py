"""What the benchmarks count besides times on the GPU: the kernels of a captured graph, and the host's own microseconds."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from mla_backends.timing import ceilings, graph_of, interleaved

__all__ = ["ceilings", "graph_of", "host_times", "interleaved", "kernel_nodes"]

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
