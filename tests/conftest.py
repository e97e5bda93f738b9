"""What the tests of known faults share: each installed adapter whose kernel runs here, and made-up steps for it.

On a CPU that is the eager adapter; on a GPU the same tests run for every kernel that answers there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_backends import Backend, Decoded, DecodePlan, PagedCache, Query, get_backend
from mla_backends.adapter import Adapter
from mla_backends.conditions import LSE_TOLERANCE, OUT_TOLERANCE
from mla_backends.formats import FORMATS
from mla_backends.problem import Problem
from mla_backends.reference import reference_decode, reference_sparse
from mla_backends.testing import base_condition, good_case, installed_adapters, require_device

SCALE = 192**-0.5
HEADS = 16


def is_taken(adapter: Adapter, **facts: Any) -> bool:
    """Whether an adapter's limits take a problem, wherever it runs."""
    problem, device = good_case(adapter)
    return not adapter.refusals(replace(problem, **facts), device)


class World:
    """One adapter on this machine: random caches, tables and queries in the first format that it states.

    Every value of a cache is finite. With an e4m3 query the scale is given, so that a row's bits are its own.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.backend: Backend = get_backend(adapter=adapter.name, adapters=[adapter])
        base = base_condition(adapter)
        self.format, self.page_size, self.topk = base.cache_format, base.page_size, base.topk
        self.dtype: torch.dtype = getattr(torch, FORMATS[self.format].query_dtype)
        self.q_scale = 0.01 if adapter.conventions.query_dtype is not None else None

    @property
    def device(self) -> torch.device:
        return self.backend.torch_device

    def require(self) -> None:
        """Skip where the kernel cannot run."""
        require_device(self.adapter, self.backend)

    def need(self, **facts: Any) -> None:
        """Skip, with the adapter's own reasons, where its limits refuse a problem."""
        problem = replace(self.problem(), **facts)
        reasons = self.adapter.refusals(problem, self.backend.device, forced=True)
        if reasons:
            pytest.skip(f"{self.adapter.name} refuses: {'; '.join(map(str, reasons))}")

    def problem(self) -> Problem:
        return Problem(
            HEADS,
            cache_format=self.format,
            page_size=self.page_size,
            topk=self.topk,
            q_dtype=str(self.dtype).removeprefix("torch."),
            measured_q_scale=self.q_scale is None,
        )

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(*shape, generator=generator) * 0.5).to(self.dtype).to(self.device)

    def cache(self, pages: int = 24, *, seed: int = 1) -> PagedCache:
        made = PagedCache.allocate(pages, self.page_size, self.format, self.device)
        slots = torch.arange(made.num_slots, device=self.device)
        made.write(self.normal(made.num_slots, 512, seed=seed), self.normal(made.num_slots, 64, seed=seed + 1), slots)
        return made

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def table(self, batch: int, columns: int, *, pages: int = 24, seed: int = 2) -> Tensor:
        """[batch, columns] page ids, shuffled; two requests may share a page."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, pages, (batch, columns), generator=generator).int().to(self.device)

    def query(self, *lead: int, heads: int = HEADS, seed: int = 3) -> Query:
        return Query.from_packed(self.normal(*lead, heads, 576, seed=seed))

    def plan(self, cache: PagedCache, block_table: Tensor | None, seq_lens: Tensor | None, **given: Any) -> DecodePlan:
        """A plan with the lse; `seq_lens` also go in on the host."""
        given = {"num_heads": HEADS, "softmax_scale": SCALE, "return_lse": True, "q_scale": self.q_scale, **given}
        if seq_lens is not None and "seq_lens_cpu" not in given:
            given["seq_lens_cpu"] = seq_lens.cpu()
        return self.backend.plan(cache, block_table, seq_lens, **given)

    def truth(self, query: Query, cache: PagedCache, table: Tensor, lens: Tensor, **given: Any) -> Decoded:
        """The reference, on the query as the kernel reads it."""
        latent, rope = (self._stored(part) for part in (query.latent, query.rope))
        return reference_decode(latent, rope, cache.dequantized(), table, lens, softmax_scale=SCALE, **given)

    def sparse_truth(self, query: Query, cache: PagedCache, indices: Tensor) -> Decoded:
        latent, rope = (self._stored(part) for part in (query.latent, query.rope))
        return reference_sparse(latent, rope, cache.dequantized(), indices, softmax_scale=SCALE)

    def _stored(self, part: Tensor) -> Tensor:
        if self.q_scale is None:
            return part
        return (part.float() / self.q_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * self.q_scale

    def assert_close(self, got: Decoded, want: Decoded) -> None:
        """Out by its norm and lse by its values, within the format's tolerance; empty rows exactly, and no NaN."""
        assert got.lse is not None
        assert want.lse is not None
        assert got.out.shape == want.out.shape
        assert got.lse.shape == want.lse.shape
        out, lse, true, log = (
            got.out.double().cpu(),
            got.lse.double().cpu(),
            want.out.double().cpu(),
            want.lse.double().cpu(),
        )
        empty = log == float("-inf")
        assert torch.equal(lse == float("-inf"), empty)
        assert not out[empty].any()
        assert (out - true).norm() <= OUT_TOLERANCE[self.format] * true.norm()
        precision = max(LSE_TOLERANCE[self.format], self.adapter.conventions_of(self.problem()).lse_precision)
        assert ((lse - log)[~empty].abs() <= precision).all()

    @staticmethod
    def same(a: Decoded, b: Decoded, rows: slice = slice(None)) -> bool:
        """Equality to the bit of out and lse."""
        assert a.lse is not None
        assert b.lse is not None
        return torch.equal(a.out[rows], b.out[rows]) and torch.equal(a.lse[rows], b.lse[rows])


def is_sparse(adapter: Adapter) -> bool:
    return not is_taken(adapter, topk=None)


DENSE = tuple(a for a in installed_adapters() if not is_sparse(a))
SPARSE = tuple(a for a in installed_adapters() if is_taken(a, topk=192))


@pytest.fixture
def world_of() -> type[World]:
    """For a test with an adapter of its own."""
    return World


@pytest.fixture(params=DENSE, ids=lambda a: a.name)
def world(request: pytest.FixtureRequest) -> World:
    """A dense adapter that runs here."""
    made = World(request.param)
    made.require()
    return made


@pytest.fixture(params=SPARSE, ids=lambda a: a.name)
def sparse(request: pytest.FixtureRequest) -> World:
    """An adapter that decodes over chosen slots, and runs here."""
    made = World(request.param)
    made.topk = 192
    made.require()
    return made


@pytest.fixture
def graphs(world: World) -> World:
    """A dense adapter on a GPU, where CUDA graphs can be captured."""
    if world.device.type != "cuda":
        pytest.skip("there are no CUDA graphs on a CPU")
    return world


@pytest.fixture
def sparse_graphs(sparse: World) -> World:
    """An adapter that decodes over chosen slots, on a GPU, where CUDA graphs can be captured."""
    if sparse.device.type != "cuda":
        pytest.skip("there are no CUDA graphs on a CPU")
    return sparse


@contextmanager
def _no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_waits() -> Callable[[], AbstractContextManager[None]]:
    """A context that raises where the host waits for the device."""
    return _no_waits
