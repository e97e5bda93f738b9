"""Plans over time: updates, CUDA graphs, streams, memory, workspaces, torch.compile (kinds 6, 11, 16 and 17 of what users report).

What needs a GPU is skipped on a CPU; the updates that a graph would be replayed after are tested on both.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from mla_backends import AbsorbWeights, DecodePlan, InvalidInput, PagedCache, Query, get_backend, ops
from mla_backends.adapter import Adapter, HostLengths, Kernel, Step
from mla_backends.catalogue import installed
from mla_backends.plan import Decoded
from mla_backends.support import Conventions


def step_of(world: Any, lens: tuple[int, ...], columns: int, seed: int) -> dict[str, Tensor]:
    host = torch.tensor(lens, dtype=torch.int32)
    table = world.table(len(lens), columns, seed=seed)
    return {"block_table": table, "seq_lens": host.to(world.device), "seq_lens_cpu": host}


def captured(run: Callable[[], Decoded]) -> tuple[torch.cuda.CUDAGraph, Decoded]:
    """A graph of `run`, which has run before on a side stream, and its results' memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


# --- updates --------------------------------------------------------------------------------------------------------------


def test_a_plan_that_was_updated_equals_one_made_for_the_step(world: Any) -> None:
    cache, query, columns = world.cache(), world.query(6), -(-300 // world.page_size)
    options = {"max_batch": 6, "max_seq_len": columns * world.page_size}
    plan = world.plan(cache, world.table(6, columns), world.ints(*[64] * 6), **options)
    generator = torch.Generator().manual_seed(0)
    for seed in range(12):
        live = int(torch.randint(0, 7, (), generator=generator))
        step = step_of(world, tuple(torch.randint(0, 301, (live,), generator=generator).tolist()), columns, seed)
        plan.update(**step)
        fresh = world.plan(cache, step["block_table"], step["seq_lens"], **options)
        assert world.same(plan.run(query, cache), fresh.run(query, cache))


def test_lengths_alone_or_tables_alone_may_be_updated(world: Any) -> None:
    cache, query, columns = world.cache(), world.query(2), -(-300 // world.page_size)
    first, second = step_of(world, (64, 64), columns, 1), step_of(world, (65, 64), columns, 2)
    plan = world.plan(cache, first["block_table"], first["seq_lens"])
    plan.update(seq_lens=second["seq_lens"])
    want = world.plan(cache, first["block_table"], second["seq_lens"])
    assert world.same(plan.run(query, cache), want.run(query, cache))
    plan.update(second["block_table"])
    want = world.plan(cache, second["block_table"], second["seq_lens"])
    assert world.same(plan.run(query, cache), want.run(query, cache))
    plan.update(seq_lens_cpu=first["seq_lens_cpu"])
    want = world.plan(cache, second["block_table"], first["seq_lens"])
    assert world.same(plan.run(query, cache), want.run(query, cache))


def test_a_plan_keeps_its_addresses(world: Any) -> None:
    cache, columns = world.cache(), 3
    plan = world.plan(cache, world.table(4, columns), world.ints(1, 2, 3, 4))
    addresses = (plan.block_table.data_ptr(), plan.seq_lens.data_ptr())
    for seed, live in enumerate((4, 1, 0, 3)):
        plan.update(**step_of(world, tuple(range(live)), columns, seed))
        assert (plan.block_table.data_ptr(), plan.seq_lens.data_ptr()) == addresses
        assert plan.block_table.shape == (4, columns)


def test_an_engine_may_write_the_plans_buffers_and_refresh(world: Any) -> None:
    cache, query, columns = world.cache(), world.query(3), -(-130 // world.page_size)
    plan = world.plan(cache, world.table(3, columns), world.ints(1, 2, 3))
    step = step_of(world, (130, 0, 64), columns, 9)
    if plan.update_mode == "host":
        with pytest.raises(InvalidInput, match=r"plans on the host.*update\(plan.block_table, seq_lens_cpu=\.\.\.\)"):
            plan.refresh()
        return
    plan.block_table.copy_(step["block_table"])
    plan.seq_lens.copy_(step["seq_lens"])
    plan.refresh()
    want = world.plan(cache, step["block_table"], step["seq_lens"])
    assert world.same(plan.run(query, cache), want.run(query, cache))


def test_views_of_smaller_batches_follow_their_plan(world: Any) -> None:
    cache, columns = world.cache(), -(-130 // world.page_size)
    plan = world.plan(cache, world.table(6, columns), world.ints(1, 2, 3, 4, 5, 6))
    views = {n: plan.at(n) for n in (1, 2, 4)}
    assert plan.at(6) is plan
    assert all(plan.at(n) is view for n, view in views.items())
    for seed, lens in enumerate(((130, 64, 65), (1,), (0, 130, 0, 64, 9, 77))):
        step = step_of(world, lens, columns, seed)
        plan.update(**step)
        for n, view in views.items():
            assert view.problem.batch == n
            padded = (*lens, 0, 0, 0)[:n]
            table = world.table(n, columns, seed=seed)
            table[: min(n, len(lens))] = step["block_table"][:n]
            fresh = world.plan(cache, table, world.ints(*padded), max_seq_len=columns * world.page_size)
            query = world.query(n)
            assert world.same(view.run(query, cache), fresh.run(query, cache))
    for wrong in (0, 7, -1, True, 2.0, "2"):
        with pytest.raises(InvalidInput, match="batch is"):
            plan.at(wrong)


def test_an_update_of_a_view_plans_the_view(world: Any) -> None:
    cache, columns = world.cache(), -(-130 // world.page_size)
    plan = world.plan(cache, world.table(6, columns), world.ints(1, 2, 3, 4, 5, 6))
    view, step, query = plan.at(3), step_of(world, (130, 64), columns, 4), world.query(3)
    view.update(**step)
    fresh = world.plan(cache, step["block_table"], step["seq_lens"], max_batch=3, max_seq_len=columns * world.page_size)
    assert world.same(view.run(query, cache), fresh.run(query, cache))
    with pytest.raises(InvalidInput, match="the last update or refresh was of a view of another batch than 6"):
        plan.run(world.query(6), cache)  # its rows are the view's, its schedule is not
    plan.update(**step)
    assert world.same(plan.at(3).run(query, cache), fresh.run(query, cache))
    plan.run(world.query(6), cache)


def test_many_layers_of_one_step_share_the_plan(world: Any) -> None:
    layers, lens = [world.cache(seed=s) for s in (1, 20, 40)], world.ints(130, 1)
    table, query = world.table(2, -(-130 // world.page_size)), world.query(2)
    plan = world.plan(layers[0], table, lens)
    for cache in layers:
        world.assert_close(plan.run(query, cache), world.truth(query, cache, table, lens))


def test_plans_of_one_stream_share_a_workspace(world: Any) -> None:
    cache, query, columns = world.cache(), world.query(2), -(-130 // world.page_size)
    options: dict[str, Any] = {"max_batch": 2, "max_seq_len": columns * world.page_size}
    size = world.backend.workspace_bytes(world.problem(), **options)
    workspace = torch.zeros(size, dtype=torch.uint8, device=world.device)
    steps = [step_of(world, lens, columns, seed) for seed, lens in enumerate(((130, 64), (1, 100)))]
    made = [world.plan(cache, s["block_table"], s["seq_lens"], workspace=workspace, **options) for s in steps]
    alone = [world.plan(cache, s["block_table"], s["seq_lens"], **options).run(query, cache) for s in steps]
    for _ in range(3):
        for plan, want in zip(made, alone, strict=True):
            assert world.same(plan.run(query, cache), want)
    assert made[0].describe()["workspace_bytes"] == size
    if size:
        with pytest.raises(InvalidInput, match=rf"workspace has {size - 1} bytes, it takes {size}"):
            world.plan(cache, steps[0]["block_table"], steps[0]["seq_lens"], workspace=workspace[1:], **options)


# --- graphs ---------------------------------------------------------------------------------------------------------------


def test_a_replay_after_an_update_equals_eager(graphs: Any) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    cache, query = world.cache(), world.query(2)
    options = {"max_batch": 2, "max_seq_len": columns * world.page_size}
    first = step_of(world, (64, 64), columns, 0)
    plan = world.plan(cache, first["block_table"], first["seq_lens"], **options)
    graph, result = captured(lambda: plan.run(query, cache))
    for seed, lens in enumerate(((64, 64), (65, 64), (640, 1), (1, 1), (0, 640))):
        step = step_of(world, lens, columns, seed)
        plan.update(**step)
        graph.replay()
        fresh = world.plan(cache, step["block_table"], step["seq_lens"], **options).run(query, cache)
        assert world.same(result, fresh)
        world.assert_close(result, world.truth(query, cache, step["block_table"], step["seq_lens"]))


def test_a_replay_with_fewer_live_rows_equals_eager(graphs: Any) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    cache, query = world.cache(), world.query(8)
    options = {"max_batch": 8, "max_seq_len": columns * world.page_size}
    first = step_of(world, (64,) * 8, columns, 0)
    plan = world.plan(cache, first["block_table"], first["seq_lens"], **options)
    graph, result = captured(lambda: plan.run(query, cache))
    for seed, lens in enumerate(((65, 64, 1, 130, 640), (66, 65, 2, 131, 1), (67, 66, 3, 132, 2))):
        step = step_of(world, lens, columns, seed)
        plan.update(**step)
        graph.replay()
        assert world.same(result, world.plan(cache, step["block_table"], step["seq_lens"], **options).run(query, cache))
        live = Query.from_packed(query.packed[:5])
        world.assert_close(
            Decoded(result.out[:5], result.lse[:5]), world.truth(live, cache, step["block_table"], step["seq_lens"])
        )
        assert (result.lse[5:] == float("-inf")).all()
        assert not result.out[5:].any()


def test_two_hundred_random_updates_replay_as_fresh_plans(graphs: Any) -> None:
    world, columns = graphs, -(-8192 // graphs.page_size)
    cache, query = world.cache(pages=256), world.query(64)
    options = {"max_batch": 64, "max_seq_len": columns * world.page_size}
    first = step_of(world, (64,) * 64, columns, 0)
    plan = world.plan(cache, first["block_table"], first["seq_lens"], **options)
    graph, result = captured(lambda: plan.run(query, cache))
    generator = torch.Generator().manual_seed(0)
    for seed in range(200 if world.adapter.name != "eager" else 10):
        live = int(torch.randint(0, 65, (), generator=generator))
        lens = tuple(torch.randint(0, 8193, (live,), generator=generator).tolist())
        table = world.table(live, columns, pages=256, seed=seed)
        host = torch.tensor(lens, dtype=torch.int32)
        plan.update(table, host.to(world.device), seq_lens_cpu=host)
        graph.replay()
        fresh = world.plan(cache, table, host.to(world.device), **options).run(query, cache)
        assert world.same(result, fresh), (seed, live)


def test_refresh_is_captured_with_the_layer(graphs: Any) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    cache, query = world.cache(), world.query(2)
    options = {"max_batch": 2, "max_seq_len": columns * world.page_size}
    first = step_of(world, (64, 64), columns, 0)
    plan = world.plan(cache, first["block_table"], first["seq_lens"], **options)
    if plan.update_mode == "host":
        pytest.skip(f"{plan.adapter} plans on the host")

    def layer() -> Decoded:
        plan.refresh()
        return plan.run(query, cache)

    graph, result = captured(layer)
    for seed, lens in enumerate(((65, 64), (640, 1), (0, 1))):
        step = step_of(world, lens, columns, seed)
        plan.block_table.copy_(step["block_table"])
        plan.seq_lens.copy_(step["seq_lens"])
        graph.replay()
        assert world.same(result, world.plan(cache, step["block_table"], step["seq_lens"], **options).run(query, cache))


def test_other_queries_between_replays_leave_a_graph_valid(graphs: Any) -> None:
    world, columns = graphs, 2
    cache, step = world.cache(), step_of(graphs, (64, 9), columns, 0)
    plan = world.plan(cache, step["block_table"], step["seq_lens"], num_heads=12)
    query = Query.from_parts(world.normal(2, 12, 512), world.normal(2, 12, 64, seed=5))
    want = plan.run(query, cache)
    graph, result = captured(lambda: plan.run(query, cache))
    for seed in range(3):
        plan.run(Query.from_parts(world.normal(2, 12, 512, seed=seed), world.normal(2, 12, 64, seed=seed)), cache)
        torch.cuda.empty_cache()
        torch.full((1 << 22,), torch.nan, device=world.device)
    graph.replay()
    assert world.same(result, want)


def test_one_graph_a_batch_size_over_one_plan(graphs: Any) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    cache, step = world.cache(), step_of(graphs, (64,) * 8, columns, 0)
    plan = world.plan(cache, step["block_table"], step["seq_lens"], max_seq_len=columns * world.page_size)
    queries = {n: world.query(n) for n in (1, 4, 8)}
    made = {n: captured(lambda n=n: plan.at(n).run(queries[n], cache)) for n in queries}
    for seed, lens in enumerate(((640,), (1, 64, 65), (640, 1, 0, 64, 65, 130, 7, 9))):
        step = step_of(world, lens, columns, seed)
        plan.update(**step)
        for n, (graph, result) in made.items():
            graph.replay()
            assert world.same(result, plan.at(n).run(queries[n], cache))
            live = min(n, len(lens))
            part = Query.from_packed(queries[n].packed[:live])
            world.assert_close(
                Decoded(result.out[:live], result.lse[:live]),
                world.truth(part, cache, step["block_table"][:live], step["seq_lens"][:live]),
            )


def test_an_unproved_plan_is_refused_while_a_graph_is_captured(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_backends.canary import PROOFS

    world = graphs
    cache, step = world.cache(), step_of(graphs, (64, 9), 2, 0)
    monkeypatch.setattr(PROOFS, "_known", {})
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(InvalidInput, match="call warmup first"), torch.cuda.graph(graph):
        world.plan(cache, **step)


# --- waits, memory, streams -----------------------------------------------------------------------------------------------


def test_a_step_waits_for_nothing(no_waits: Any, graphs: Any) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    cache, query = world.cache(), world.query(4)
    first = step_of(world, (64,) * 4, columns, 0)
    plan = world.plan(cache, first["block_table"], first["seq_lens"])
    out, lse = torch.empty(4, 16, 512, dtype=world.dtype, device=world.device), torch.empty(4, 16, device=world.device)
    steps = [step_of(world, lens, columns, 1) for lens in ((640, 1, 64, 0), (1, 2), (5, 6, 7, 8))]
    for step in steps:
        plan.update(**step)
        plan.run(query, cache, out=out, lse=lse)
    with no_waits():
        for step in steps * 3:
            plan.update(**step)
            plan.run(query, cache, out=out, lse=lse)
            plan.run(query, cache)


def test_memory_does_not_grow_over_ten_thousand_steps(graphs: Any) -> None:
    world, columns = graphs, 4
    cache, queries = world.cache(), [world.query(4, seed=s) for s in range(3)]
    first = step_of(world, (64,) * 4, columns, 0)
    plan = world.plan(cache, first["block_table"], first["seq_lens"])
    steps = [step_of(world, lens, columns, 1) for lens in ((64, 1, 64, 0), (1, 2), (5, 6, 7, 8))]
    before = 0
    for i in range(10_000 if world.adapter.name != "eager" else 1000):
        plan.update(**steps[i % 3])
        plan.run(queries[i % 3], cache)
        if i == 20:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_lengths_from_the_host_are_not_overwritten_while_a_copy_is_in_flight(graphs: Any) -> None:
    world, columns = graphs, 4
    cache, first = world.cache(), step_of(graphs, (64,) * 4, columns, 0)
    plan = world.plan(cache, first["block_table"], first["seq_lens"])
    plan.update(seq_lens_cpu=first["seq_lens_cpu"])
    torch.cuda._sleep(100_000_000)
    seen, host = [], torch.zeros(4, dtype=torch.int32)
    for i in range(12):
        host.fill_(i)  # an engine has one such tensor, and changes it as soon as update is back
        plan.update(seq_lens_cpu=host)
        seen.append(plan.seq_lens.clone())
    torch.cuda.synchronize()
    assert [lens.tolist() for lens in seen] == [[i] * 4 for i in range(12)]


def test_two_plans_run_on_two_streams(graphs: Any) -> None:
    world, columns = graphs, -(-640 // graphs.page_size)
    cache, query = world.cache(), world.query(2)
    steps = [step_of(world, lens, columns, seed) for seed, lens in enumerate(((640, 64), (1, 100)))]
    plans = [world.plan(cache, s["block_table"], s["seq_lens"]) for s in steps]
    want = [p.run(query, cache) for p in plans]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Decoded]] = [[], []]
    for _ in range(20):
        for i in (0, 1):
            with torch.cuda.stream(streams[i]):
                plans[i].update(**steps[i])
                results[i].append(plans[i].run(query, cache))
    torch.cuda.synchronize()
    assert all(world.same(got, want[i]) for i in (0, 1) for got in results[i])


def test_kernels_run_on_the_current_stream(graphs: Any) -> None:
    world, columns = graphs, 4
    cache, step = world.cache(), step_of(graphs, (64, 100), columns, 0)
    plan, query = world.plan(cache, step["block_table"], step["seq_lens"]), world.query(2)
    late = world.query(2, seed=77)
    want = plan.run(late, cache)
    plan.run(query, cache)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        query.packed.copy_(late.packed)
        got = plan.run(query, cache)
    side.synchronize()
    assert world.same(got, want)


def test_tensors_of_another_gpu_run_there_or_are_refused(graphs: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    world = graphs
    other = get_backend(adapter=world.adapter.name, adapters=[world.adapter], device="cuda:1")
    cache = PagedCache.allocate(8, world.page_size, world.format, "cuda:1")
    table, lens = (
        torch.zeros(2, 2, dtype=torch.int32, device="cuda:1"),
        torch.ones(2, dtype=torch.int32, device="cuda:1"),
    )
    with torch.cuda.device(0):
        plan = other.plan(cache, table, lens, num_heads=16, softmax_scale=0.1, q_scale=world.q_scale)
        query = Query.from_packed(torch.zeros(2, 16, 576, dtype=world.dtype, device="cuda:1"))
        assert plan.run(query, cache).out.device == torch.device("cuda:1")
        with pytest.raises(InvalidInput, match="cuda:0"):
            plan.run(Query.from_packed(query.packed.to("cuda:0")), cache)
        with pytest.raises(InvalidInput, match="cuda:1"):
            world.plan(cache, table.to("cuda:0"), lens.to("cuda:0"))


# --- what a captured graph reads stays where it was -----------------------------------------------------------------------


EAGER = next(entry for entry in installed() if entry.name == "eager")


class Watched(Kernel):
    """The eager kernel behind odd conventions, which notes the address of each query that it reads."""

    def __init__(self, inner: Kernel, step: Step, owner: Watching) -> None:
        self.inner, self.step, self.owner = inner, step, owner

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        self.owner.addresses.append(query.packed.data_ptr())
        return self.inner.run(query, cache, indices, None)

    def update(self, lengths: HostLengths | None) -> None:
        seq_lens = self.step.seq_lens if lengths is None else lengths.seq_lens
        assert seq_lens is not None
        self.owner.planned.append(seq_lens.tolist())
        if self.owner.fails_at is not None and self.owner.fails_at in seq_lens:
            raise RuntimeError("the library fails half way")


class Watching(Adapter):
    name = "watching"
    support = ()

    def __init__(self, metadata: Literal["host", "op"]) -> None:
        self.conventions = Conventions(query="packed", heads=(64, 128), metadata=metadata)  # type: ignore[misc]
        self.addresses: list[int] = []
        self.planned: list[list[int]] = []
        self.fails_at: int | None = None

    def plan(self, step: Step, library: Any) -> Kernel:
        assert isinstance(EAGER, Adapter)
        return Watched(EAGER.plan(step, library), step, self)


def watching(metadata: Literal["host", "op"] = "host") -> tuple[Watching, Callable[..., DecodePlan], PagedCache]:
    adapter = Watching(metadata)
    backend = get_backend("cpu", adapters=[adapter])
    cache = PagedCache.allocate(8, 64, "bf16", "cpu")

    def plan(lens: list[int], **given: Any) -> DecodePlan:
        table = torch.zeros(len(lens), 4, dtype=torch.int32)
        return backend.plan(
            cache, table, torch.tensor(lens, dtype=torch.int32), num_heads=12, softmax_scale=0.1, **given
        )

    return adapter, plan, cache


def parts(*lead: int) -> Query:
    return Query.from_parts(torch.randn(*lead, 12, 512).bfloat16(), torch.randn(*lead, 12, 64).bfloat16())


def test_a_query_is_brought_to_the_same_memory_whatever_came_between() -> None:
    adapter, make, cache = watching()
    plan = make([3, 64])
    first, second = parts(2), parts(2)
    adapter.addresses.clear()
    for query in (first, second, first, parts(2), first):
        plan.run(query, cache)
    assert len(set(adapter.addresses)) == 1


def test_ragged_queries_of_any_length_are_brought_to_the_same_memory() -> None:
    adapter, make, cache = watching()
    plan = make([9, 64], cu_q_lens=torch.tensor([0, 2, 4], dtype=torch.int32), max_q_len=8)
    adapter.addresses.clear()
    for tokens in (4, 12, 7, 16, 5):
        plan.run(parts(tokens), cache)
    assert len(set(adapter.addresses)) == 1
    # Tokens past the last request may be any number; memory that is outgrown is kept, as a graph may hold it.
    for tokens in range(17, 60):
        plan.run(parts(tokens), cache)
    assert len(set(adapter.addresses)) == 3


MODES = pytest.mark.parametrize("metadata", ["host", "op"])


@MODES
def test_a_failed_update_leaves_kernels_planned_for_the_last_step(metadata: Literal["host", "op"]) -> None:
    adapter, make, cache = watching(metadata)
    plan = make([3, 64, 7])
    plan.at(2)
    query = parts(3)
    before = plan.run(query, cache).out
    adapter.planned.clear()
    adapter.fails_at = 65
    with pytest.raises(RuntimeError, match="half way"):
        plan.update(seq_lens=torch.tensor([1, 1, 65], dtype=torch.int32))
    assert adapter.planned[-2:] == [[3, 64, 7], [3, 64]]
    assert plan.seq_lens is not None
    assert plan.seq_lens.tolist() == [3, 64, 7]
    assert torch.equal(plan.run(query, cache).out, before)


def test_a_failed_update_goes_back_to_lengths_that_the_caller_has_overwritten() -> None:
    adapter, make, _ = watching()
    host = torch.tensor([3, 64, 7], dtype=torch.int32)
    plan = make([1, 1, 1])
    plan.update(seq_lens_cpu=host)
    adapter.fails_at = 65
    host.copy_(torch.tensor([1, 1, 65]))  # an engine has one such tensor
    with pytest.raises(RuntimeError, match="half way"):
        plan.update(seq_lens_cpu=host)
    assert adapter.planned[-1] == [3, 64, 7]


@MODES
def test_what_the_host_does_is_refused_while_a_graph_is_captured(
    metadata: Literal["host", "op"], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, make, _ = watching(metadata)
    plan, lens = make([3, 64, 7]), torch.tensor([9, 1], dtype=torch.int32)
    adapter.planned.clear()
    monkeypatch.setattr("mla_backends.recipe.is_capturing", lambda where: True)
    if metadata == "host":
        for work in (lambda: plan.update(seq_lens=lens), lambda: plan.at(2), lambda: make([3])):
            with pytest.raises(InvalidInput, match="watching plans on the host, which a CUDA graph cannot hold"):
                work()
        assert adapter.planned == []
        return
    with pytest.raises(InvalidInput, match="seq_lens_cpu alone is given while a CUDA graph is being captured"):
        plan.update(seq_lens_cpu=lens)
    plan.update(seq_lens=lens)
    assert adapter.planned == [[9, 1, 0]]


def test_a_plan_says_when_an_update_waits_for_the_device() -> None:
    _, make, _ = watching()
    assert make([3, 64]).describe()["waits_for_device"] == "update, unless seq_lens_cpu is given"
    ragged = make([9, 64], cu_q_lens=torch.tensor([0, 2, 4], dtype=torch.int32))
    assert ragged.describe()["waits_for_device"] == "update"
    assert watching("op")[1]([3, 64]).describe()["waits_for_device"] == "never"


def test_lengths_given_on_the_host_are_those_that_a_kernel_plans_with() -> None:
    adapter, make, _ = watching()
    plan = make([3, 64, 7], max_batch=5)
    adapter.planned.clear()
    plan.update(seq_lens_cpu=torch.tensor([9, 1], dtype=torch.int32))
    plan.update(seq_lens=torch.tensor([4], dtype=torch.int64))
    assert adapter.planned == [[9, 1, 0, 0, 0], [4, 0, 0, 0, 0]]


def test_a_plan_made_in_inference_mode_is_updated_outside_of_it() -> None:
    _, make, cache = watching()
    with torch.inference_mode():
        plan = make([3, 64])
        inside = plan.run(parts(2), cache)
    plan.update(seq_lens=torch.tensor([5, 1], dtype=torch.int32))
    query = parts(2)
    assert torch.equal(plan.run(query, cache).out, make([5, 1]).run(query, cache).out)
    assert inside.out.shape == (2, 12, 512)


# --- torch.compile --------------------------------------------------------------------------------------------------------

PLANS: dict[int, tuple[DecodePlan, PagedCache]] = {}
LIBRARY = torch.library.Library("faults_of_an_engine", "DEF")
LIBRARY.define("attention(Tensor latent, Tensor rope, int layer) -> Tensor")


def attention(latent: Tensor, rope: Tensor, layer: int) -> Tensor:
    plan, cache = PLANS[layer]
    return plan.run(Query.from_parts(latent, rope), cache).out


LIBRARY.impl("attention", attention, "CPU")
LIBRARY.impl("attention", attention, "CUDA")
torch.library.register_fake(
    "faults_of_an_engine::attention", lambda latent, rope, layer: torch.empty_like(latent), lib=LIBRARY
)


def test_an_engines_attention_op_compiles_into_one_graph(world: Any) -> None:
    lens, table = world.ints(70, 1), world.table(2, -(-70 // world.page_size))
    for layer, seed in enumerate((1, 30)):
        cache = world.cache(seed=seed)
        PLANS[layer] = (world.plan(cache, table, lens), cache)
    weights = AbsorbWeights(world.normal(16, 128, 512) * 0.1, world.normal(16, 512, 128, seed=8))

    def block(q_nope: Tensor, q_pe: Tensor) -> Tensor:
        latent = torch.bmm(q_nope.transpose(0, 1), weights.w_uk).transpose(0, 1)
        for layer in (0, 1):
            latent = torch.ops.faults_of_an_engine.attention(latent, q_pe, layer)
        return latent

    inputs = (world.normal(2, 16, 128), world.normal(2, 16, 64, seed=4))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), block(*inputs))


def test_the_ops_compile_into_one_graph() -> None:
    generator = torch.Generator().manual_seed(0)
    q_nope, q_pe = (torch.randn(3, 4, n, generator=generator).bfloat16() for n in (128, 64))
    w_uk = torch.randn(4, 128, 512, generator=generator).bfloat16()
    data = torch.zeros(2, 4, 576, dtype=torch.bfloat16)
    kv_c, k_pe = torch.randn(3, 512, generator=generator).bfloat16(), torch.randn(3, 64, generator=generator).bfloat16()

    def step(q_nope: Tensor, q_pe: Tensor, data: Tensor) -> tuple[Tensor, ...]:
        query = torch.zeros(3, 4, 576, dtype=torch.bfloat16)
        ops.absorb_query(query[..., :512], query[..., 512:], q_nope, q_pe, w_uk)
        ops.write_cache(data, kv_c, k_pe, torch.tensor([1, -1, 6]), "bf16")
        slots = torch.zeros(3, 5, dtype=torch.int32)
        ops.select_slots(
            slots, torch.tensor([[0, 1, -1], [2, 3, 9], [7, 0, 0]]), torch.ones(3, 2, dtype=torch.int32), 4
        )
        merged = ops.merge_partials(torch.stack([query, query * 2]), torch.ones(2, 3, 4))
        return query * 2, slots, merged.out, merged.lse

    caches = data.clone(), data.clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(q_nope, q_pe, caches[0]), step(q_nope, q_pe, caches[1]), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(*caches)


def test_run_itself_compiles_without_a_graph_break(world: Any) -> None:
    cache, lens, table = world.cache(), world.ints(70, 1), world.table(2, -(-70 // world.page_size))
    plan, query = world.plan(cache, table, lens), world.query(2)
    want = plan.run(query, cache)

    def layer(gain: Tensor) -> tuple[Tensor, Tensor]:
        decoded = plan.run(query, cache)
        return decoded.out * gain, decoded.lse + gain

    gain = torch.tensor(2.0, dtype=world.dtype, device=world.device)
    out, lse = torch.compile(layer, fullgraph=True, backend="aot_eager")(gain)
    assert torch.equal(out, want.out * gain)
    assert torch.equal(lse, want.lse + gain)


def test_a_whole_layer_compiles_and_reads_what_it_has_just_written(world: Any) -> None:
    lens, table = world.ints(70, 1), world.table(2, -(-70 // world.page_size))
    weights = AbsorbWeights(world.normal(16, 128, 512) * 0.1, world.normal(16, 512, 128, seed=8))
    kv_c, k_pe = world.normal(2, 512, seed=11), world.normal(2, 64, seed=12)
    last = torch.tensor([69, 0])
    slots = table.cpu().long()[torch.arange(2), last // world.page_size] * world.page_size + last % world.page_size
    slots = slots.to(world.device)
    inputs = world.normal(2, 16, 128), world.normal(2, 16, 64, seed=4)

    def layer(plan: DecodePlan, query: Query, cache: PagedCache, q_nope: Tensor, q_pe: Tensor) -> tuple[Tensor, Tensor]:
        cache.write(kv_c, k_pe, slots)
        weights.query(q_nope, q_pe, out=query)
        decoded = plan.run(query, cache)
        assert decoded.lse is not None
        return weights.project(decoded.out), decoded.lse

    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        cache = world.cache()
        plan = world.plan(cache, table, lens)
        query = plan.new_query()
        first = run(plan, query, cache, *inputs)
        second = run(plan, query, cache, *(x * 2 for x in inputs))
        results.append((*first, *second, cache.rows.view(torch.uint8), query.packed.view(torch.uint8)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_the_schema_of_a_run_marks_exactly_what_it_writes(world: Any) -> None:
    cache, lens, table = world.cache(), world.ints(70, 1), world.table(2, -(-70 // world.page_size))
    plan, query = world.plan(cache, table, lens), world.query(2)
    out, lse = torch.zeros(2, 16, 512, dtype=world.dtype, device=world.device), torch.zeros(2, 16, device=world.device)
    parts = (query.latent, query.rope, None, cache.rows, cache.scale, None)
    args = (plan._node.number, plan._node.inputs, *parts, False, out, lse)
    # torch's schema check multiplies what it is given, which float8 has no kernel for
    checks = ("test_faketensor",) if cache.rows.dtype == torch.float8_e4m3fn else ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.mla_backends.run_plan.default, args, test_utils=checks)


def test_a_graph_whose_plan_is_gone_says_so() -> None:
    _, make, cache = watching()
    plan, query = make([3, 64]), parts(2)
    number, held = plan._node.number, plan._node.inputs
    del plan
    gc.collect()
    tensors, out = (query.latent, query.rope, None, cache.rows, None, None), torch.zeros(2, 12, 512).bfloat16()
    with pytest.raises(InvalidInput, match=f"plan {number} of a compiled graph is gone; keep it while the graph runs"):
        torch.ops.mla_backends.run_plan(number, held, *tensors, False, out, None)


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_what_a_graph_writes_into_a_plan_is_what_it_then_decodes(world: Any, backend: str) -> None:
    cache, query, columns = world.cache(), world.query(2), -(-130 // world.page_size)
    plan = world.plan(cache, world.table(2, columns), world.ints(100, 1))
    if plan.update_mode == "host":
        with pytest.raises(Exception, match="plans on the host, so refresh cannot serve it"):
            torch.compile(plan.refresh, backend=backend)()
        return

    def step(table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        plan.block_table.copy_(table)
        plan.seq_lens.copy_(lens)
        plan.refresh()
        decoded = plan.run(query, cache)
        return decoded.out + 0, decoded.lse + 0

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for seed, lens in enumerate(((7, 130), (0, 64), (130, 3))):
        table = world.table(2, columns, seed=seed)
        got = Decoded(*compiled(table, world.ints(*lens)))
        fresh = world.plan(cache, table, world.ints(*lens), max_seq_len=columns * world.page_size)
        assert world.same(got, fresh.run(query, cache))
        assert plan.seq_lens.tolist() == list(lens)


def test_a_kernel_without_metadata_reads_what_a_graph_has_just_written(world: Any) -> None:
    if world.adapter.conventions.metadata != "none":
        pytest.skip(f"{world.adapter.name} has metadata, which refresh renews")
    cache, query = world.cache(), world.query(2)
    plan = world.plan(cache, world.table(2, 2), world.ints(100, 1))

    def step(lens: Tensor) -> Tensor:
        plan.seq_lens.copy_(lens)
        return plan.run(query, cache).out + 0

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for lens in ((7, 100), (0, 64)):
        got = compiled(world.ints(*lens))
        assert torch.equal(got, world.plan(cache, plan.block_table, world.ints(*lens)).run(query, cache).out)


def test_lengths_that_a_graph_writes_are_held_to_the_room(world: Any) -> None:
    plan = world.plan(world.cache(), world.table(2, 2), world.ints(9, 1))
    if world.device.type == "cpu" or plan.update_mode == "host":
        pytest.skip("they are refused on a CPU, and refresh where a plan is made on the host")

    def step(lens: Tensor) -> None:
        plan.seq_lens.copy_(lens)
        plan.refresh()

    torch.compile(step, fullgraph=True, backend="aot_eager")(world.ints(100_000, -3))
    assert plan.seq_lens.tolist() == [2 * world.page_size, 0]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_that_a_graph_writes_is_the_one_that_it_decodes_with(shape: tuple[int, ...]) -> None:
    scale, lens = torch.ones(shape), torch.tensor([70, 1], dtype=torch.int32)
    cache = PagedCache.allocate(4, 64, "fp8", "cpu", kv_scale=scale)
    cache.write(torch.randn(256, 512).bfloat16(), torch.randn(256, 64).bfloat16(), torch.arange(256))
    plan = get_backend("cpu").plan(cache, torch.tensor([[0, 1], [2, 3]]), lens, num_heads=12, softmax_scale=0.1)
    query = parts(2)

    def layer(value: Tensor) -> Tensor:
        scale.copy_(value)
        return plan.run(query, cache).out + 0

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for value in (2.0, 0.5):
        got = compiled(torch.full(shape, value))
        scale.fill_(value)
        assert torch.equal(got, plan.run(query, cache).out)


def test_an_update_is_not_compiled(world: Any) -> None:
    cache, query, columns = world.cache(), world.query(2), -(-130 // world.page_size)
    plan, step = world.plan(cache, world.table(2, columns), world.ints(100, 1)), step_of(world, (9, 130), columns, 7)
    want = world.plan(cache, step["block_table"], step["seq_lens"], max_seq_len=columns * world.page_size)

    def both() -> Tensor:
        plan.update(**step)
        return plan.run(query, cache).out + 0

    torch._dynamo.reset()  # or it is remembered from another adapter that this function is not compiled
    with pytest.raises(Exception, match="call it outside of the compiled function"):
        torch.compile(both, fullgraph=True, backend="aot_eager")()
    assert torch.equal(torch.compile(both, backend="aot_eager")(), want.run(query, cache).out)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_that_a_graph_writes_is_the_one_that_it_stores_with(shape: tuple[int, ...]) -> None:
    scale, rows = torch.ones(shape), (torch.randn(4, 512).bfloat16(), torch.randn(4, 64).bfloat16(), torch.arange(4))
    cache = PagedCache.allocate(1, 64, "fp8", "cpu", kv_scale=scale)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.full((1,), 4, dtype=torch.int32)
    plan, query = get_backend("cpu").plan(cache, table, lens, num_heads=12, softmax_scale=0.1), parts(1)

    def layer(value: Tensor) -> Tensor:
        scale.copy_(value)
        cache.write(*rows)
        return plan.run(query, cache).out + 0

    want = layer(torch.full(shape, 0.25)), cache.data.clone()
    cache.data.zero_()
    scale.fill_(1.0)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.full(shape, 0.25))
    assert torch.equal(got, want[0])
    assert torch.equal(cache.data.view(torch.uint8), want[1].view(torch.uint8))


def test_a_sink_that_is_written_is_the_one_that_counts() -> None:
    _, _, cache = watching("op")
    sink, query = torch.zeros(12), parts(2)
    eager = get_backend("cpu")
    table, lens = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([9, 3], dtype=torch.int32)
    cache.write(torch.randn(64, 512).bfloat16(), torch.randn(64, 64).bfloat16(), torch.arange(64))
    plan = eager.plan(cache, table, lens, num_heads=12, softmax_scale=0.1, attn_sink=sink)

    def layer(value: Tensor) -> Tensor:
        sink.copy_(value)
        return plan.run(query, cache).out + 0

    value = torch.linspace(-2, 2, 12)
    want = eager.plan(cache, table, lens, num_heads=12, softmax_scale=0.1, attn_sink=value).run(query, cache).out
    assert torch.equal(layer(value), want)
    sink.zero_()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(value), want)


def test_what_a_plan_was_not_made_for_is_refused_in_a_graph_too() -> None:
    cache = PagedCache.allocate(4, 64, "bf16", "cpu")
    table, lens = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([9, 3], dtype=torch.int32)
    plan, query = get_backend("cpu").plan(cache, table, lens, num_heads=12, softmax_scale=0.1), parts(2)
    other = PagedCache(cache.data, "bf16", kv_lora_rank=448, qk_rope_head_dim=128)
    run = torch.compile(lambda query, cache: plan.run(query, cache).out + 0, backend="aot_eager")
    run(query, cache)
    with pytest.raises(InvalidInput, match="kv_lora_rank is 448, this plan was made for 512"):
        run(query, other)


def test_a_query_of_the_same_memory_and_another_dtype_is_another() -> None:
    _, make, cache = watching("op")
    plan, query = make([3, 64]), parts(2)
    plan.run(query, cache)
    same = query.latent.view(torch.float16), query.rope.view(torch.float16)
    out = torch.zeros(2, 12, 512).bfloat16()
    with pytest.raises(InvalidInput, match=r"the query is torch.float16, this plan's q_dtype is torch.bfloat16"):
        torch.ops.mla_backends.run_plan(
            plan._node.number, plan._node.inputs, *same, None, cache.rows, None, None, False, out, None
        )


def test_a_query_scale_that_a_graph_writes_is_the_one_that_it_quantises_with() -> None:
    class Quantising(Watching):
        def __init__(self) -> None:
            self.conventions = Conventions(query="packed", query_dtype="float8_e4m3fn")  # type: ignore[misc]

        def plan(self, step: Step, library: Any) -> Kernel:
            assert isinstance(EAGER, Adapter)
            inner = EAGER.plan(step, library)

            class Dequantised(Kernel):
                def run(self, query: Query, *rest: Any) -> Any:
                    assert query.scale is not None
                    out, lse = inner.run(Query.from_packed(query.packed.float() * query.scale), *rest)
                    return out.bfloat16(), lse

            return Dequantised()

    scale, lens = torch.full((1,), 0.01), torch.tensor([9, 3], dtype=torch.int32)
    cache = PagedCache.allocate(4, 64, "fp8", "cpu")
    cache.write(torch.randn(256, 512).bfloat16(), torch.randn(256, 64).bfloat16(), torch.arange(256))
    table, given = torch.zeros(2, 1, dtype=torch.int32), {"num_heads": 12, "softmax_scale": 0.1}
    backend = get_backend("cpu", adapters=[Quantising()])
    plan, query = backend.plan(cache, table, lens, q_scale=scale, **given), parts(2)
    own = plan.new_query()
    own.packed.view(torch.uint8).copy_(torch.randint(0, 100, own.packed.shape, dtype=torch.uint8))

    def layer(value: Tensor) -> tuple[Tensor, Tensor]:
        scale.copy_(value)
        return plan.run(query, cache).out + 0, plan.run(own, cache).out + 0

    want = layer(torch.full((1,), 0.05))
    fresh = backend.plan(cache, table, lens, q_scale=0.05, **given)
    assert torch.equal(want[0], fresh.run(query, cache).out)
    scale.fill_(0.01)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.full((1,), 0.05))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_view_is_made_outside_of_a_graph() -> None:
    _, make, cache = watching("op")
    plan, query = make([3, 64]), parts(1)

    def layer(q: Query) -> Tensor:
        return plan.at(1).run(q, cache).out + 0

    with pytest.raises(Exception, match="call it outside of the compiled function"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(query)
    want = layer(query)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(query), want)


def test_the_host_does_not_think_to_know_what_a_graph_has_written() -> None:
    class Infinite(Watching):
        def __init__(self) -> None:
            self.conventions = Conventions(query="split", empty_rows="lse_inf")  # type: ignore[misc]

        def plan(self, step: Step, library: Any) -> Kernel:
            assert isinstance(EAGER, Adapter)
            inner = EAGER.plan(step, library)

            class Flipped(Kernel):
                def run(self, *given: Any) -> Any:
                    out, lse = inner.run(*given)
                    assert lse is not None
                    return out, lse.masked_fill(lse == float("-inf"), float("inf"))

            return Flipped()

    cache, lens = PagedCache.allocate(4, 64, "bf16", "cpu"), torch.tensor([9, 3], dtype=torch.int32)
    plan = get_backend("cpu", adapters=[Infinite()]).plan(
        cache,
        torch.zeros(2, 1, dtype=torch.int32),
        lens,
        num_heads=12,
        softmax_scale=0.1,
        seq_lens_cpu=lens,
        return_lse=True,
    )
    query = parts(2)

    def layer(lens: Tensor) -> Tensor:
        plan.seq_lens.copy_(lens)  # type: ignore[union-attr]
        decoded = plan.run(query, cache)
        assert decoded.lse is not None
        return decoded.lse + 0

    lse = torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.tensor([0, 3], dtype=torch.int32))
    assert (lse[0] == float("-inf")).all()
    assert lse[1].isfinite().all()


def test_one_compiled_function_serves_many_layers_and_queries(world: Any) -> None:
    lens, table = world.ints(70, 1), world.table(2, -(-70 // world.page_size))
    layers = [world.cache(seed=20 * i) for i in range(12)]
    plan = world.plan(layers[0], table, lens)
    attend = torch.compile(lambda query, cache: plan.run(query, cache).out + 0, fullgraph=True, backend="aot_eager")
    for i, cache in enumerate(layers):
        query = world.query(2, seed=i)
        assert torch.equal(attend(query, cache), plan.run(query, cache).out)


def test_a_query_may_be_made_in_the_graph(world: Any) -> None:
    cache, lens, table = world.cache(), world.ints(70, 1), world.table(2, -(-70 // world.page_size))
    weights = AbsorbWeights(world.normal(16, 128, 512) * 0.1, world.normal(16, 512, 128, seed=8))
    plan = world.plan(cache, table, lens)
    q_nope, q_pe = world.normal(2, 16, 128), world.normal(2, 16, 64, seed=4)

    def absorbed(q_nope: Tensor, q_pe: Tensor) -> Tensor:
        return plan.run(weights.query(q_nope, q_pe), cache).out + 0

    def given(latent: Tensor, rope: Tensor) -> Tensor:
        return plan.run(Query.from_parts(latent, rope), cache).out + 0

    latent, rope = world.normal(2, 16, 512), q_pe
    for function, inputs in ((absorbed, (q_nope, q_pe)), (given, (latent, rope))):
        want = function(*inputs)
        assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), want)
