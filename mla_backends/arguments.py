"""What `Backend.plan` is given besides the step: each argument refused where it is wrong in itself.

Every function raises `InvalidInput` and touches no kernel library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_backends.cache import PagedCache
from mla_backends.errors import InvalidInput, real_number, whole_number
from mla_backends.formats import is_float32_scale
from mla_backends.problem import Problem
from mla_backends.steps import StepInput, check_tensor

__all__ = [
    "check_cache",
    "check_flags",
    "check_kind",
    "check_numbers",
    "check_problem",
    "check_scale",
    "check_sink",
    "check_workspace",
    "longest",
    "workspace_of",
]

MOST_TOPK = 65535 * 256
"""Columns of a row of slots: what one launch over them may have. Source: CUDA's grid limit in y, csrc/slots."""


def check_problem(problem: Problem) -> None:
    """Refuse what is no Problem."""
    if not isinstance(problem, Problem):
        raise InvalidInput(f"problem is a {type(problem).__name__}, it takes a Problem")


def check_cache(cache: PagedCache, where: torch.device) -> None:
    """Refuse what is no layer's cache on the backend's device."""
    if not isinstance(cache, PagedCache):
        raise InvalidInput(
            f"cache is a {type(cache).__name__}, it takes a PagedCache; a UnifiedCache has one at .layer(i)"
        )
    if cache.device != where:
        runs = cache.device.type in ("cpu", "cuda")
        cure = f"get_backend(device={str(cache.device)!r})" if runs else f"make a cache on {where}"
        raise InvalidInput(f"the cache is on {cache.device}, this backend is of {where}; {cure}")


def check_kind(step: StepInput, topk: int | None, max_batch: int | None) -> None:
    """Refuse a step that is neither dense, with a table and lengths, nor sparse, with a topk and a batch."""
    is_paged = step.block_table is not None or step.seq_lens is not None or step.seq_lens_cpu is not None
    if topk is None:
        if step.block_table is None or (step.seq_lens is None and step.seq_lens_cpu is None):
            raise InvalidInput("block_table and seq_lens are required unless topk is given")
        return
    if is_paged:
        raise InvalidInput("topk is given, so the plan is sparse: block_table and seq_lens must be None")
    if max_batch is None:
        raise InvalidInput("topk is given, so max_batch is required: it is B")
    whole_number("topk", topk, most=MOST_TOPK)
    if step.cu_q_lens is not None:
        raise InvalidInput(
            "topk and cu_q_lens are given, a sparse plan takes uniform queries; one token a request is q_len=1"
        )


def check_numbers(*, num_heads: int, softmax_scale: float, q_len: int) -> tuple[int, float, int]:
    """The counts and the scale as plain numbers; refuses those that no decode has."""
    num_heads = whole_number("num_heads", num_heads)
    q_len = whole_number("q_len", q_len, least=0)
    scale = real_number(softmax_scale)
    if not is_float32_scale(scale):
        raise InvalidInput(
            f"softmax_scale is {softmax_scale!r}, it takes a number that is positive and finite in float32; "
            f"softmax_scale(config) knows a model's"
        )
    return num_heads, scale, q_len


def check_flags(**flags: bool) -> None:
    """Refuse what is neither True nor False: a tensor would be asked for its value, and a string is always true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidInput(f"{name} is {value!r}, it takes True or False")


def check_scale(q_scale: float | Tensor | None, where: torch.device) -> float | Tensor | None:
    """An e4m3 query's scale, a plain float where it is no tensor; refuses one that is no positive finite float32, where the
    host can know it.
    """
    if q_scale is None:
        return None
    if isinstance(q_scale, Tensor):
        if q_scale.dtype != torch.float32 or q_scale.numel() != 1 or q_scale.device != where:
            raise InvalidInput(
                f"q_scale is {list(q_scale.shape)} {q_scale.dtype} on {q_scale.device}, it takes one float32 on {where}"
            )
        if where.type == "cpu" and not is_float32_scale(float(q_scale)):
            raise InvalidInput(f"q_scale holds {float(q_scale)}, it takes a positive finite number")
        return q_scale
    scale = real_number(q_scale)
    if not is_float32_scale(scale):
        raise InvalidInput(f"q_scale is {q_scale!r}, it takes a number that is positive and finite in float32")
    return scale


def check_sink(sink: Tensor, num_heads: int, where: torch.device) -> None:
    """Refuse a sink that is no [H] float32, or holds NaN where the host can know it."""
    check_tensor("attn_sink", sink, f"[{num_heads}] float32")
    if sink.shape != (num_heads,) or sink.dtype != torch.float32 or sink.device != where:
        raise InvalidInput(
            f"attn_sink is {list(sink.shape)} {sink.dtype} on {sink.device}, it takes [{num_heads}] float32 on {where}"
        )
    if where.type == "cpu" and bool(sink.isnan().any()):
        raise InvalidInput(
            f"attn_sink holds NaN for head {int(sink.isnan().nonzero()[0])}, it takes a logit a head; -inf is none"
        )


def longest(cu_q_lens: Tensor) -> int:
    """Rows of the largest request; waits for a GPU."""
    q_lens = cu_q_lens.diff()
    return max(int(q_lens.max()), 0) if q_lens.numel() else 0


def check_workspace(given: Tensor | None, where: torch.device) -> None:
    """Refuse a workspace that no kernel could use."""
    if given is None:
        return
    check_tensor("workspace", given, "one dimension of contiguous uint8")
    if given.dtype != torch.uint8 or given.ndim != 1 or given.device != where or not given.is_contiguous():
        raise InvalidInput(
            f"workspace is {list(given.shape)} {given.dtype} on {given.device}, it takes one dimension of contiguous uint8 on {where}"
        )


def workspace_of(given: Tensor | None, needed: int, where: torch.device) -> Tensor | None:
    """The caller's workspace, or one of our own."""
    if given is None:
        return torch.zeros(needed, dtype=torch.uint8, device=where) if needed else None
    if given.numel() < needed:
        raise InvalidInput(f"workspace has {given.numel()} bytes, it takes {needed}; workspace_bytes says how many")
    return given
