"""Plans as a serving loop uses them on a GPU: graphs over sparse plans, kernels and memory counted, steps that overtake each other.

What a dense plan's updates are held to is in test_faults_graphs.py; here is what needs both a graph and a second look.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_backends import AbsorbWeights, Decoded, DecodePlan, InvalidInput, PagedCache, Query, get_backend, ops
from mla_backends.adapter import Adapter
from mla_backends.catalogue import installed, serving
from mla_backends.testing import good_case
from mla_backends.timing import graph_of, kernel_nodes

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
ADAPTERS = {entry.name: entry for entry in installed() if isinstance(entry, Adapter)}


def captured(run: Callable[[], Decoded]) -> tuple[torch.cuda.CUDAGraph, Decoded]:
    """A graph of `run`, which has run before, and its results' memory."""
    results: list[Decoded] = []
    graph = graph_of([lambda: results.append(run())])
    return graph, results[-1]


def copied(decoded: Decoded) -> Decoded:
    return Decoded(decoded.out.clone(), None if decoded.lse is None else decoded.lse.clone())


def step_of(world: Any, lens: tuple[int, ...], columns: int, seed: int, *, pages: int = 24) -> dict[str, Tensor]:
    host = torch.tensor(lens, dtype=torch.int32)
    table = world.table(len(lens), columns, pages=pages, seed=seed)
    return {"block_table": table, "seq_lens": host.to(world.device), "seq_lens_cpu": host}


def slots_of(world: Any, cache: PagedCache, batch: int, topk: int, seed: int, *, live: int | None = None) -> Tensor:
    """[batch, topk] slots: of each row a random number inside the cache, then none, some of it absurd; dead rows all -1."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, cache.num_slots, (batch, topk), generator=generator, dtype=torch.int32)
    counts = torch.randint(0, topk + 1, (batch, 1), generator=generator)
    absurd = torch.tensor([-1, -7, cache.num_slots, 2**31 - 1, -(2**31)], dtype=torch.int32)
    none = absurd[torch.randint(5, (batch, topk), generator=generator)]
    slots = torch.where(torch.arange(topk) < counts, slots, none)
    slots[batch if live is None else live :] = -1
    return slots.to(world.device)


# --- sparse plans under graphs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [64, 2048])
def test_two_hundred_random_selections_replay_as_fresh_plans(sparse_graphs: Any, topk: int) -> None:
    world = sparse_graphs
    world.need(topk=topk)
    cache, query = world.cache(pages=128), world.query(64)
    options = {"topk": topk, "max_batch": 64}
    plan, indices = world.plan(cache, None, None, **options), slots_of(world, cache, 64, topk, 0)
    graph, result = captured(lambda: plan.run(query, cache, indices=indices))
    generator = torch.Generator().manual_seed(0)
    for seed in range(200 if world.adapter.name != "eager" else 5):
        live = int(torch.randint(0, 65, (), generator=generator))
        indices.copy_(slots_of(world, cache, 64, topk, seed, live=live))
        graph.replay()
        fresh = world.plan(cache, None, None, **options).run(query, cache, indices=indices)
        assert world.same(result, fresh), (seed, live)
        assert (result.lse[live:] == -torch.inf).all()
        assert not result.out[live:].any()


@pytest.mark.parametrize("topk", [64, 2048])
def test_two_hundred_random_positions_are_selected_and_read_in_one_graph(sparse_graphs: Any, topk: int) -> None:
    world = sparse_graphs
    world.need(topk=topk)
    cache, query = world.cache(pages=128), world.query(64)
    options, columns = {"topk": topk, "max_batch": 64}, 60
    plan, fresh = world.plan(cache, None, None, **options), world.plan(cache, None, None, **options)
    positions = torch.zeros(64, topk, dtype=torch.int32, device=world.device)
    table, lens, slots = world.table(64, columns, pages=128), world.ints(*[0] * 64), torch.empty_like(positions)
    graph, result = captured(lambda: plan.run(query, cache, indices=plan.select_slots(positions, table, lens)))
    for seed in range(200 if world.adapter.name != "eager" else 5):
        generator = torch.Generator().manual_seed(seed)
        room = columns * world.page_size
        positions.copy_(torch.randint(-room // 8, room + room // 8, (64, topk), generator=generator))
        table.copy_(torch.randint(-2, 130, (64, columns), generator=generator))
        lens.copy_(torch.randint(0, room, (64,), generator=generator) * (torch.arange(64) < seed % 65))
        graph.replay()
        ops.select_slots(slots, positions, table, world.page_size, lens)  # pages of 128 and 129 are not in the cache
        assert world.same(result, fresh.run(query, cache, indices=slots)), seed


def test_one_graph_a_batch_size_over_one_sparse_plan(sparse_graphs: Any) -> None:
    world = sparse_graphs
    world.need(topk=64)
    cache = world.cache()
    plan = world.plan(cache, None, None, topk=64, max_batch=8)
    queries = {n: world.query(n) for n in (1, 4, 8)}
    indices = {n: slots_of(world, cache, n, 64, n) for n in queries}
    made = {n: captured(lambda n=n: plan.at(n).run(queries[n], cache, indices=indices[n])) for n in queries}
    for seed in range(3):
        for n, (graph, result) in made.items():
            indices[n].copy_(slots_of(world, cache, n, 64, seed))
            graph.replay()
            world.assert_close(result, world.sparse_truth(queries[n], cache, indices[n]))


def test_a_sparse_step_waits_for_nothing_and_keeps_no_memory(no_waits: Any, sparse_graphs: Any) -> None:
    world = sparse_graphs
    cache, query = world.cache(), world.query(4)
    plan = world.plan(cache, None, None, topk=64, max_batch=4)
    indices = [slots_of(world, cache, 4, 64, seed) for seed in range(3)]
    out, lse = torch.empty(4, 16, 512, dtype=world.dtype, device=world.device), torch.empty(4, 16, device=world.device)
    for slots in indices:
        plan.run(query, cache, indices=slots, out=out, lse=lse)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with no_waits():
        for i in range(10_000 if world.adapter.name != "eager" else 100):
            plan.run(query, cache, indices=indices[i % 3], out=out, lse=lse)
            plan.run(query, cache, indices=indices[i % 3])
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_two_sparse_plans_run_on_two_streams(sparse_graphs: Any) -> None:
    world = sparse_graphs
    cache, query = world.cache(), world.query(8)
    plans = [world.plan(cache, None, None, topk=192, max_batch=8) for _ in range(2)]
    indices = [slots_of(world, cache, 8, 192, seed) for seed in range(2)]
    want = [copied(p.run(query, cache, indices=slots)) for p, slots in zip(plans, indices, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Decoded]] = [[], []]
    for _ in range(20):
        for i in (0, 1):
            with torch.cuda.stream(streams[i]):
                results[i].append(plans[i].run(query, cache, indices=indices[i]))
    torch.cuda.synchronize()
    assert all(world.same(got, want[i]) for i in (0, 1) for got in results[i])


# --- kernels and memory ---------------------------------------------------------------------------------------------------


def assert_only_the_library(
    plan: DecodePlan, query: Query, cache: PagedCache, indices: Tensor | None, *, less: int = 0
) -> None:
    """Of `run`, the kernels past the adapter's own are those declared, `less` of them, and the allocations are the adapter's."""
    kernel = plan._kernel
    assert kernel is not None
    brought = plan._intake.bring(query)
    slots = None if plan._selection is None else plan._selection.kernel_table

    def ours() -> object:
        return plan.run(query, cache, indices=indices)

    def library() -> object:
        return kernel.run(brought, cache, slots, None)

    assert kernel_nodes([ours]) == kernel_nodes([library]) + len(plan.describe()["adds_kernels"]) - less
    assert allocations(ours) == allocations(library)


def allocations(call: Callable[[], object]) -> int:
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"]) - before


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_run_is_the_librarys_kernels_and_those_declared(graphs: Any, heads: int, return_lse: bool) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    cache, step = world.cache(), step_of(graphs, (640, 1, 0, 65), columns, 0)
    plan = world.plan(cache, **step, num_heads=heads, return_lse=return_lse)
    assert_only_the_library(plan, plan.new_query(), cache, None)


@pytest.mark.parametrize("heads", [16, 128])
def test_rows_that_nobody_reads_cost_no_kernel(graphs: Any, heads: int) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    cache, step = world.cache(), step_of(graphs, (640, 1, 0, 65), columns, 0)
    exact, loose = (world.plan(cache, **step, num_heads=heads, empty_rows=rows) for rows in ("exact", "any"))
    base2 = world.adapter.conventions.lse_base == "2"
    assert len(loose.describe()["adds_kernels"]) == base2
    assert_only_the_library(loose, loose.new_query(), cache, None)
    query, live = world.query(4, heads=heads), torch.tensor([True, True, False, True])
    got, want = loose.run(query, cache), exact.run(query, cache)
    assert torch.equal(got.out[live], want.out[live])
    assert torch.equal(got.lse[live], want.lse[live])


def test_an_eager_run_settles_nothing_where_the_host_knows_of_no_empty_row(
    graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    cache, query = world.cache(), world.query(3)
    plan = world.plan(cache, **step_of(world, (640, 5, 65), columns, 0))
    declared = len(plan.describe()["adds_kernels"])
    eager = plan.run(query, cache)
    graph, result = captured(lambda: plan.run(query, cache))
    calls: list[object] = []
    finish = ops.finish_rows
    monkeypatch.setattr(ops, "finish_rows", lambda *given, **named: (calls.append(given), finish(*given, **named))[0])
    assert world.same(plan.run(query, cache), eager)
    assert len(calls) == (world.adapter.conventions.lse_base == "2")
    calls.clear()
    captured(lambda: plan.run(query, cache))
    assert bool(calls) == bool(declared)
    calls.clear()
    plan.update(seq_lens_cpu=torch.tensor([640, 0, 65]))
    graph.replay()
    assert world.same(plan.run(query, cache), result)
    assert len(calls) == declared
    assert (result.lse[1] == -torch.inf).all()
    assert not result.out[1].any()


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_sparse_run_is_the_librarys_kernels_and_those_declared(
    sparse_graphs: Any, heads: int, return_lse: bool
) -> None:
    world, cache = sparse_graphs, sparse_graphs.cache()
    plan = world.plan(cache, None, None, topk=2048, max_batch=4, num_heads=heads, return_lse=return_lse)
    assert_only_the_library(plan, plan.new_query(), cache, slots_of(world, cache, 4, 2048, 0))
    # What is selected has been looked at.
    positions = torch.zeros(4, 2048, dtype=torch.int32, device=world.device)
    selected = plan.select_slots(positions, world.table(4, 40))
    assert_only_the_library(plan, plan.new_query(), cache, selected, less=1)


# --- steps that overtake each other ---------------------------------------------------------------------------------------


def test_a_step_in_flight_does_not_see_the_next_one(graphs: Any) -> None:
    """The host is several steps ahead, and has one tensor of lengths, which it changes as soon as update is back."""
    world, columns = graphs, -(-2048 // graphs.page_size)
    cache, query, host = world.cache(), world.query(8), torch.zeros(8, dtype=torch.int32)
    options = {"max_batch": 8, "max_seq_len": columns * world.page_size}
    first = step_of(world, (64,) * 8, columns, 0)
    plan = world.plan(cache, first["block_table"], first["seq_lens"], **options)
    graph, result = captured(lambda: plan.run(query, cache))
    generator = torch.Generator().manual_seed(0)
    steps = [
        step_of(world, tuple(torch.randint(0, 2049, (8,), generator=generator).tolist()), columns, s) for s in range(12)
    ]
    for step in steps:  # what is allocated and compiled once
        plan.update(step["block_table"], seq_lens_cpu=step["seq_lens_cpu"])
    torch.cuda.synchronize()
    seen = []
    for step in steps:
        torch.cuda._sleep(10_000_000)
        host.copy_(step["seq_lens_cpu"])
        plan.update(step["block_table"], seq_lens_cpu=host)
        graph.replay()
        seen.append(copied(result))
    host.fill_(-1)
    for step, got in zip(steps, seen, strict=True):
        assert world.same(got, world.plan(cache, **step, **options).run(query, cache))


def test_plans_of_one_workspace_replay_in_any_order(graphs: Any) -> None:
    world, columns = graphs, -(-8192 // graphs.page_size)
    cache, query = world.cache(), world.query(4)
    options: dict[str, Any] = {"max_batch": 4, "max_seq_len": columns * world.page_size}
    size = world.backend.workspace_bytes(world.problem(), **options)
    workspace = torch.zeros(size, dtype=torch.uint8, device=world.device)
    # lengths that are split over blocks, so that partial results go through the workspace
    steps = [step_of(world, lens, columns, s) for s, lens in enumerate(((8192, 1, 5000, 64), (3, 8192, 0, 7777)))]
    want = [copied(world.plan(cache, **s, **options).run(query, cache)) for s in steps]
    plans = [world.plan(cache, **s, workspace=workspace, **options) for s in steps]
    made = [captured(lambda p=p: p.run(query, cache)) for p in plans]
    for which in (0, 1, 1, 0, 1, 0, 0):
        made[which][0].replay()
        assert world.same(made[which][1], want[which])
        assert world.same(plans[1 - which].run(query, cache), want[1 - which])


@CUDA
def test_plans_of_two_adapters_share_a_workspace() -> None:
    names = ("flashinfer", "flashinfer-fa2")
    cache = PagedCache.allocate(64, 64, "bf16", "cuda")
    rows = torch.randn(64 * 64, 576, device="cuda").bfloat16()
    cache.write(rows[:, :512], rows[:, 512:], torch.arange(64 * 64, device="cuda"))
    host = torch.tensor([4096, 1, 0, 777], dtype=torch.int32)
    table = torch.randint(0, 64, (4, 64), device="cuda").int()
    query = Query.from_packed(torch.randn(4, 16, 576, device="cuda").bfloat16() * 0.3)
    given: dict[str, Any] = {"num_heads": 16, "softmax_scale": 0.07, "return_lse": True, "seq_lens_cpu": host}
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    plans, want = [], []
    for name in names:
        if name not in ADAPTERS or not serving(ADAPTERS[name]).answered:
            pytest.skip(f"{name} is not installed")
        backend = get_backend(adapter=name)
        want.append(copied(backend.plan(cache, table, host.cuda(), **given).run(query, cache)))
        plans.append(backend.plan(cache, table, host.cuda(), workspace=workspace, **given))
    for which in (0, 1, 1, 0, 0, 1):
        got = plans[which].run(query, cache)
        assert torch.equal(got.out, want[which].out)
        assert torch.equal(got.lse, want[which].lse)


# --- captures of the step itself ------------------------------------------------------------------------------------------


def test_an_update_is_captured_with_the_layer_or_refused(graphs: Any) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    cache, query = world.cache(), world.query(2)
    options = {"max_batch": 2, "max_seq_len": columns * world.page_size}
    fixed = step_of(world, (64, 64), columns, 0)
    table, lens = fixed["block_table"], fixed["seq_lens"]
    plan = world.plan(cache, table, lens, **options)
    before = copied(plan.run(query, cache))
    if plan.update_mode == "host":
        with pytest.raises(InvalidInput, match="plans on the host, which a CUDA graph cannot hold"):
            captured_update(plan, table, lens)
        assert world.same(plan.run(query, cache), before)
        plan.update(table, lens, seq_lens_cpu=lens.cpu())
        assert world.same(plan.run(query, cache), before)
        return

    def layer() -> Decoded:
        plan.update(table, lens)
        return plan.run(query, cache)

    graph, result = captured(layer)
    for seed, next_lens in enumerate(((65, 64), (640, 1), (0, 1))):
        step = step_of(world, next_lens, columns, seed)
        table.copy_(step["block_table"])
        lens.copy_(step["seq_lens"])
        graph.replay()
        assert world.same(result, world.plan(cache, **step, **options).run(query, cache))


def captured_update(plan: DecodePlan, table: Tensor, lens: Tensor) -> None:
    """An update alone, captured on a stream of its own."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        plan.update(table, lens)


def test_lengths_of_the_host_alone_are_refused_while_a_graph_is_captured(graphs: Any) -> None:
    world, columns = graphs, 2
    cache, query, step = world.cache(), world.query(2), step_of(graphs, (64, 9), columns, 0)
    plan = world.plan(cache, **step)
    want = copied(plan.run(query, cache))
    with (
        pytest.raises(InvalidInput, match=r"plans on the host|seq_lens_cpu alone"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        plan.update(seq_lens_cpu=torch.tensor([1, 1], dtype=torch.int32))
    for _ in range(6):
        plan.update(seq_lens_cpu=step["seq_lens_cpu"])
    assert world.same(plan.run(query, cache), want)


def test_updates_inside_and_outside_of_inference_mode_follow_each_other(world: Any) -> None:
    cache, query, columns = world.cache(), world.query(2), 2
    first = step_of(world, (64, 9), columns, 0)
    plan = world.plan(cache, **first)
    for seed in range(6):
        step = step_of(world, (1 + seed, 60 - seed), columns, seed)
        with torch.inference_mode(seed % 2 == 0):
            plan.update(step["block_table"], seq_lens_cpu=step["seq_lens_cpu"])
            got = plan.run(query, cache)
        assert world.same(got, world.plan(cache, **step).run(query, cache))


# --- a measured scale -----------------------------------------------------------------------------------------------------


def test_a_query_with_a_measured_scale_is_captured_and_knows_the_live_rows(no_waits: Any, graphs: Any) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    world.need(measured_q_scale=True)
    world.q_scale = None
    if not world.adapter.conventions.query_dtype:
        pytest.skip(f"{world.adapter.name} reads the model's own query")
    cache, weights = world.cache(), AbsorbWeights(world.normal(16, 128, 512) * 0.1, world.normal(16, 512, 128, seed=8))
    q_nope, q_pe = world.normal(4, 16, 128), world.normal(4, 16, 64, seed=4)
    options = {"max_batch": 4, "max_seq_len": columns * world.page_size}
    first = step_of(world, (64,) * 4, columns, 0)
    plan = world.plan(cache, **first, **options)
    query = plan.new_query()

    def layer() -> Decoded:
        return plan.run(weights.query(q_nope, q_pe, out=query), cache)

    graph, result = captured(layer)
    for seed, lens in enumerate(((640, 1, 64, 65), (1, 130), (0, 7, 9))):
        step = step_of(world, lens, columns, seed)
        q_nope.copy_(world.normal(4, 16, 128, seed=seed) * 10**seed)
        q_nope[len(lens) :] = torch.nan
        q_pe[len(lens) :] = torch.inf
        with no_waits():
            plan.update(**step)
            graph.replay()
            layer()
        fresh = world.plan(cache, **step, **options)
        want = fresh.run(weights.query(q_nope, q_pe, out=fresh.new_query()), cache)
        graph.replay()
        assert world.same(result, want)
        assert not result.out.isnan().any()


# --- schedules ------------------------------------------------------------------------------------------------------------


def flashmla(name: str) -> Any:
    """The library that serves it here."""
    adapter = ADAPTERS.get(name)
    if adapter is None or not torch.cuda.is_available():
        pytest.skip(f"{name} is not installed" if adapter is None else "there is no CUDA device")
    verdict = get_backend(adapter=name).explain(good_case(adapter)[0])[name]
    if not verdict.runs:
        pytest.skip(f"{name} cannot run here: {'; '.join(map(str, verdict.reasons))}")
    return serving(adapter).library


@pytest.mark.parametrize("lens", [(1, 64, 65, 0), (8192, 1, 0, 4000, 63), (0, 0), tuple(range(0, 6400, 50))], ids=len)
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (16, 4), (64, 2), (128, 1), (128, 4)])
def test_the_schedule_op_makes_what_the_decode_op_makes(lens: tuple[int, ...], heads: int, q_len: int) -> None:
    library = flashmla("flashmla")
    if library.schedule is None:
        pytest.skip("this build has no op of its own for the schedule")
    host = torch.tensor(lens, dtype=torch.int32)
    table = torch.zeros(len(lens), 128, dtype=torch.int32, device="cuda")
    page = torch.zeros(1, 64, 1, 576, dtype=torch.bfloat16, device="cuda")
    query = torch.zeros(len(lens), q_len, heads, 576, dtype=torch.bfloat16, device="cuda")
    arguments = (query, page, 512, host.cuda(), table, 0.1, True, None, None, *library.rest)
    tiles, splits = library.decode(*arguments)[2:4]
    made = library.schedule(host.cuda(), q_len, heads)
    assert made[0].shape == tiles.shape
    assert torch.equal(made[0][:, :7], tiles[:, :7])  # the eighth is padding
    assert torch.equal(made[1], splits)


@pytest.mark.parametrize(("heads", "q_len", "topk"), [(64, 1, 64), (64, 2, 192), (128, 1, 2048), (128, 4, 64)])
def test_the_sparse_schedule_knows_no_slots(heads: int, q_len: int, topk: int) -> None:
    library = flashmla("flashmla-sparse")
    pages = torch.zeros(8, 64, 1, 656, dtype=torch.uint8, device="cuda")
    query = torch.zeros(5, q_len, heads, 576, dtype=torch.bfloat16, device="cuda")
    made = []
    for slots in (torch.full((5, q_len, topk), -1), torch.randint(0, 512, (5, q_len, topk))):
        arguments = (query, pages, slots.int().cuda(), None, None, None, None, None, None, None, 512, 0.1)
        made.append(library.decode(*arguments, *library.rest)[2:4])
    (tiles, splits), (other_tiles, other_splits) = made
    if tiles is None:
        assert splits is other_tiles is other_splits is None  # a build that splits no row of this many slots
        return
    assert torch.equal(tiles[:, :7], other_tiles[:, :7])
    assert torch.equal(splits, other_splits)


@CUDA
@pytest.mark.parametrize(
    "selected",
    [
        "test_faults_graphs.py and not fp8",
        "test_faults_graphs.py and fp8",
        "test_serving.py and not provider",
        "test_faults_rows.py or test_faults_layouts.py",
    ],
)
def test_vllms_provider_of_flashmla_serves_where_sgls_is_hidden(selected: str) -> None:
    """The same tests in a process that cannot import `flash_mla`."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm._flashmla_C") is None:
        pytest.skip("vLLM's FlashMLA is not installed")
    if importlib.util.find_spec("flash_mla") is None:
        pytest.skip("there is no flash_mla to hide: the other tests run vLLM's already")
    code = f"""
        import sys
        sys.modules["flash_mla"] = None
        import pytest
        from mla_backends.catalogue import installed, serving
        served = {{a.name: serving(a).provider for a in installed() if a.name.startswith("flashmla")}}
        for name in ("flashmla", "flashmla-sparse", *(["flashmla-fp8"] if served["flashmla-fp8"] else [])):
            assert served[name].package == "vllm", (name, served)
        print("served by vllm:", sorted(n for n, p in served.items() if p))
        sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-k",
                              "flashmla and ({selected})", {str(Path(__file__).parent)!r}]))
    """
    root = Path(__file__).parent.parent
    environment = {**os.environ, "MLA_MUST_RUN": "flashmla,flashmla-sparse"}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=root,
        env=environment,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "served by vllm: ['flashmla'" in ended.stdout
    assert " passed" in ended.stdout


# --- gradients ------------------------------------------------------------------------------------------------------------


@CUDA
@pytest.mark.parametrize("tokens", [4, 300])
def test_gradients_stop_at_the_door_of_compiled_ops_too(tokens: int) -> None:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    caches = [
        PagedCache.allocate(8, 64, fmt, "cuda") for fmt in ("bf16", "bf16", "fp8", "fp8", "fp8_ds_mla", "fp8_ds_mla")
    ]
    kv_c, k_pe, slots = normal(tokens, 512), normal(tokens, 64), torch.arange(tokens, device="cuda")
    for plain, asked in zip(caches[::2], caches[1::2], strict=True):
        plain.write(kv_c, k_pe, slots)
        asked.write(torch.nn.Parameter(kv_c), k_pe.clone().requires_grad_(), slots)
        assert torch.equal(plain.rows.view(torch.uint8), asked.rows.view(torch.uint8))
    weights = AbsorbWeights(normal(16, 128, 512), normal(16, 512, 128))
    q_nope, q_pe = normal(tokens, 16, 128), normal(tokens, 16, 64)
    want = weights.query(q_nope, q_pe)
    got = weights.query(q_nope.clone().requires_grad_(), q_pe.clone().requires_grad_())
    assert torch.equal(got.packed, want.packed)
    assert not got.packed.requires_grad
