"""A kernel proves itself before it serves: a tiny problem of the same instantiation against the reference.

A published FlashAttention-3 build without the (64, 512) kernels passes every check and returns
garbage; no signature shows that, one run does.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from mla_backends.absorb import Query
from mla_backends.adapter import Adapter
from mla_backends.cache import PagedCache
from mla_backends.catalogue import Serving
from mla_backends.device import Device
from mla_backends.formats import format_named
from mla_backends.plan import DecodePlan
from mla_backends.problem import Problem
from mla_backends.recipe import Recipe
from mla_backends.reference import reference_decode, reference_sparse
from mla_backends.steps import StepInput
from mla_backends.support import Refusal

__all__ = ["SWITCH", "Proofs", "prove"]

SWITCH = "MLA_BACKENDS_CANARY"
"""Environment variable; 0 turns the canary off."""

TOLERANCE = {"bf16": 2e-2, "fp16": 2e-2, "fp32": 1e-5, "fp8": 8e-2, "fp8_ds_mla": 2e-2}
"""Relative error of out: garbage is off by 0.5 and more, rounding by a quarter of these."""

LSE_TOLERANCE = 0.1
"""Absolute error of lse: another base is off by a third of it, rounding by thousandths."""

MOST_ROWS = 8
"""Query rows a request of the tiny problem: the truth is slow, and no kernel changes its instantiation past them."""

Instance = tuple[object, ...]
_SEQ_LENS = (130, 7)
"""Keys of the two requests: over two pages of 64, and under one."""

_SHORT, _LONG = 256, 512
"""Keys that a request may have: kernels are of another kind where a capacity lets them split a request's keys."""


class Proofs:
    """What has been proved in this process: by instance, the error that was found or why it is refused."""

    def __init__(self) -> None:
        self._known: dict[Instance, float | Refusal] = {}

    def of(
        self, adapter: Adapter, serving: Serving, problem: Problem, device: Device, where: torch.device
    ) -> float | Refusal | None:
        """The relative error of this instance's tiny problem, or its refusal; None where the canary is turned off.

        Raises:
            RuntimeError: while a CUDA graph is being captured and the instance isn't proved yet.
        """
        if os.environ.get(SWITCH) == "0":
            return None
        key = _instance(adapter, problem, where)
        if key not in self._known:
            if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("not proved")
            self._known[key] = prove(adapter, serving, problem, device, where)
        return self._known[key]


PROOFS = Proofs()
"""This process's."""


def _instance(adapter: Adapter, problem: Problem, where: torch.device) -> Instance:
    """What a kernel library picks an instantiation by."""
    return (
        adapter,
        where,
        problem.cache_format,
        problem.q_dtype,
        adapter.conventions_of(problem).padded(problem.num_heads),
        problem.page_size,
        (problem.kv_lora_rank, problem.qk_rope_head_dim),
        min(problem.q_len, MOST_ROWS),
        problem.ragged,
        problem.causal,
        problem.needs_lse,
        problem.topk is not None,
        problem.attn_sink,
        problem.batch_invariant,
        _capacity(problem),
    )


def _capacity(problem: Problem) -> int:
    return _SHORT if problem.max_seq_len is not None and problem.max_seq_len <= _SHORT else _LONG


def prove(adapter: Adapter, serving: Serving, problem: Problem, device: Device, where: torch.device) -> float | Refusal:
    """Run a tiny problem of this instantiation and compare it with the reference.

    Returns:
        The relative error of out, norm of the difference over norm, or a refusal: too large an error, or whatever
        the library raised.
    """
    try:
        error = _error(adapter, serving, problem, device, where)
    except Exception as failure:  # a library may raise anything, and that is the finding
        return Refusal(
            "", f"a tiny problem ended in {type(failure).__name__}: {failure}", "a kernel that runs it", "canary"
        )
    allowed = TOLERANCE[problem.cache_format]
    if not error <= allowed:
        found = f"a tiny problem is off by {error:.2g} of its norm"
        cure = f"another build of {adapter.name}'s library; {SWITCH}=0 serves it unproved"
        return Refusal("", found, f"an error of at most {allowed:g}", "canary: the reference", cure)
    return error


def _error(adapter: Adapter, serving: Serving, problem: Problem, device: Device, where: torch.device) -> float:
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").mul_(0.5).to(where)

    page_size, heads = problem.page_size, problem.num_heads
    width, rope_width = problem.kv_lora_rank, problem.qk_rope_head_dim
    capacity = _capacity(problem)
    columns = -(-capacity // page_size)
    layout = format_named(problem.cache_format)
    cache = PagedCache.allocate(
        2 * columns + 1,
        page_size,
        layout.name,
        where,
        kv_lora_rank=width,
        qk_rope_head_dim=rope_width,
    )
    slots = torch.arange(cache.num_slots, device=where)
    stored: torch.dtype = getattr(torch, layout.query_dtype)
    cache.write(normal(len(slots), width).to(stored), normal(len(slots), rope_width).to(stored), slots)
    tiny = replace(problem, batch=2, q_len=min(problem.q_len, MOST_ROWS), max_seq_len=capacity)
    recipe = Recipe(
        adapter=adapter,
        serving=serving,
        problem=tiny,
        device=device,
        where=where,
        num_pages=cache.num_pages,
        softmax_scale=(width + rope_width) ** -0.5 * 4,
        q_dtype=_model_dtype(problem),
        max_seq_len=capacity,
        attn_sink=normal(heads) if problem.attn_sink else None,
        workspace=_workspace(adapter, tiny, device, where),
        q_scale=None if problem.measured_q_scale else 0.01,
        why={},
    )
    step = StepInput()
    if problem.topk is None:
        step = StepInput(
            (torch.randperm(2 * columns, generator=generator, device="cpu") + 1).view(2, columns).int().to(where),
            torch.tensor(_SEQ_LENS, dtype=torch.int32, device=where),
            torch.tensor(_SEQ_LENS, dtype=torch.int32, device="cpu"),
            torch.tensor([0, tiny.q_len, tiny.q_len + 1], dtype=torch.int32, device=where) if problem.ragged else None,
        )
    plan = DecodePlan.start(recipe, batch=2, q_len=tiny.q_len, step=step)
    lead = (tiny.q_len + 1,) if problem.ragged else (2, tiny.q_len)
    query = Query.from_parts(*(normal(*lead, heads, w).to(recipe.q_dtype) for w in (width, rope_width)))
    indices = None
    if problem.topk is not None:
        shape = (*lead, problem.topk)
        picked = torch.randint(0, cache.num_slots, shape, generator=generator, dtype=torch.int32, device="cpu")
        indices = picked.to(where)
    decoded = plan.run(query, cache, indices=indices)
    if decoded.out.dtype != recipe.q_dtype:
        raise ArithmeticError(f"out is {decoded.out.dtype}, the query's dtype is {recipe.q_dtype}")
    if problem.needs_lse and (decoded.lse is None or decoded.lse.dtype != torch.float32):
        raise ArithmeticError(
            f"lse is {'missing' if decoded.lse is None else decoded.lse.dtype}, it is asked for in float32"
        )
    got = decoded.out.double().cpu()
    values = cache.dequantized()
    if indices is not None:
        want = reference_sparse(
            query.latent, query.rope, values, indices, softmax_scale=recipe.softmax_scale, attn_sink=recipe.attn_sink
        )
    else:
        assert step.block_table is not None
        assert step.seq_lens is not None
        want = reference_decode(
            query.latent,
            query.rope,
            values,
            step.block_table,
            step.seq_lens,
            softmax_scale=recipe.softmax_scale,
            causal=problem.causal,
            cu_q_lens=step.cu_q_lens,
            attn_sink=recipe.attn_sink,
        )
    truth = want.out.cpu()
    if decoded.lse is not None:
        assert want.lse is not None
        _compare_lse(decoded.lse.double().cpu(), want.lse.cpu())
    return float((got - truth).norm() / truth.norm())


def _compare_lse(got: torch.Tensor, want: torch.Tensor) -> None:
    """Raises ArithmeticError where rows without keys differ, or a logarithm is far off."""
    is_empty = want.isinf()
    if not torch.equal(got[is_empty], want[is_empty]):
        raise ArithmeticError("the lse of a row without keys is not -inf")
    error = (got - want)[~is_empty].abs()
    if error.numel() and not float(error.max()) <= LSE_TOLERANCE:
        raise ArithmeticError(f"lse is off by {float(error.max()):.2g}, allowed {LSE_TOLERANCE:g}")


def _model_dtype(problem: Problem) -> torch.dtype:
    dtype = getattr(torch, problem.q_dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _workspace(adapter: Adapter, problem: Problem, device: Device, where: torch.device) -> torch.Tensor | None:
    size = adapter.workspace_bytes(problem, device, max_batch=2, max_seq_len=_capacity(problem))
    return torch.zeros(size, dtype=torch.uint8, device=where) if size else None
