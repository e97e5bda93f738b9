"""Plans and their views share one step: whichever is given it, no other runs on what it was planned for before."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_backends import DecodePlan, InvalidInput, PagedCache, get_backend
from mla_backends.adapter import Adapter, HostLengths, Kernel, Step
from mla_backends.catalogue import installed
from mla_backends.problem import Problem
from mla_backends.support import Conventions, Limit, Range

EAGER = next(entry for entry in installed() if entry.name == "eager")
assert isinstance(EAGER, Adapter)
OTHER = "the last update or refresh was of a view of another batch"
PAGES = 24
BATCH = 5


class Snapshot(Kernel):
    """Decodes what was there when it was planned, as kernels with metadata do; fails where a test says so."""

    fails = False

    def __init__(self, step: Step) -> None:
        self.step = step
        self.planned = step

    def update(self, lengths: HostLengths | None) -> None:
        if self.fails:
            raise RuntimeError("no room for the plan")
        step = self.step
        assert step.seq_lens is not None
        assert step.block_table is not None
        lens, starts = step.seq_lens, step.cu_q_lens
        if lengths is not None:
            assert torch.equal(lengths.seq_lens.clamp(min=1), lens.clamp(min=1))
            lens, starts = lengths.seq_lens, lengths.cu_q_lens
        assert bool((starts.diff() >= 0).all())
        self.planned = replace(
            step, seq_lens=lens.clone(), cu_q_lens=starts.clone(), block_table=step.block_table.clone()
        )

    def run(self, *given: Any) -> tuple[Tensor, Tensor | None]:
        assert isinstance(EAGER, Adapter)
        return EAGER.plan(self.planned, None).run(*given)


class Planned(Adapter):
    support = (Limit(Problem, "num_heads", Range(1, tested=(16,)), (), source="a test"),)

    def __init__(self, **conventions: Any) -> None:
        self.name = "planned"  # type: ignore[misc]
        self.conventions = Conventions(query="packed", **conventions)  # type: ignore[misc]

    def plan(self, step: Step, library: Any) -> Kernel:
        return Snapshot(step)


KINDS = (
    {"metadata": "op"},
    {"metadata": "host"},
    {"metadata": "op", "empty_rows": "undefined"},
    {"metadata": "host", "empty_rows": "undefined"},
)


@pytest.fixture(params=KINDS, ids=lambda kind: ",".join(kind.values()))
def planned(request: pytest.FixtureRequest, world_of: Any) -> Any:
    """On a CPU, a kernel that keeps what it was planned for."""
    world = world_of(Planned(**request.param))
    world.backend = get_backend("cpu", adapters=[world.adapter])
    return world


def fresh(world: Any, plan: DecodePlan, batch: int, **given: Any) -> DecodePlan:
    """A plan of its own over what the buffers hold."""
    assert plan.block_table is not None
    assert plan.seq_lens is not None
    table, lens = plan.block_table[:batch].clone(), plan.seq_lens[:batch].clone()
    made = world.plan(world.cache(), table, lens, max_seq_len=plan.describe()["max_seq_len"], **given)
    assert isinstance(made, DecodePlan)
    return made


def assert_fresh(world: Any, plan: DecodePlan, **given: Any) -> None:
    batch = plan.describe()["batch"]
    rows = (batch * 2,) if "cu_q_lens" in given else (batch,)
    cache, query = world.cache(), world.query(*rows)
    assert world.same(plan.run(query, cache), fresh(world, plan, batch, **given).run(query, cache))


def made(world: Any, *lens: int, columns: int = 4, **given: Any) -> DecodePlan:
    plan = world.plan(world.cache(), world.table(len(lens), columns), world.ints(*lens), **given)
    assert isinstance(plan, DecodePlan)
    return plan


def step_of(world: Any, *lens: int, columns: int = 4, seed: int = 9) -> dict[str, Tensor]:
    host = torch.tensor(lens, dtype=torch.int32)
    return {
        "block_table": world.table(len(lens), columns, seed=seed),
        "seq_lens": host.to(world.device),
        "seq_lens_cpu": host,
    }


def refresh_with(plan: DecodePlan, **step: Tensor) -> None:
    assert plan.block_table is not None
    assert plan.seq_lens is not None
    plan.block_table.copy_(step["block_table"])
    plan.seq_lens.copy_(step["seq_lens"])
    plan.refresh()


def check_a_refresh_of_a_view(world: Any) -> None:
    plan = made(world, 130, 64, 65, 9)
    if plan.update_mode == "host":
        pytest.skip(f"{plan.adapter} plans on the host, where refresh is refused")
    view, other = plan.at(2), plan.at(3)
    refresh_with(view, **step_of(world, 0, 200))
    assert_fresh(world, view)
    for stale in (plan, other):
        with pytest.raises(InvalidInput, match=OTHER):
            stale.run(world.query(stale.describe()["batch"]), world.cache())
    plan.refresh()
    for each in (plan, view, other):
        assert_fresh(world, each)


def check_an_update_of_a_view(world: Any) -> None:
    plan = made(world, 130, 64, 65, 9)
    plan.at(2).update(**step_of(world, 7, 0))
    assert plan.seq_lens is not None
    assert plan.seq_lens.tolist() == [7, 0, 0, 0]
    assert_fresh(world, plan.at(2))
    assert_fresh(world, plan.at(3))  # made now, for the same step
    with pytest.raises(InvalidInput, match=OTHER):
        plan.run(world.query(4), world.cache())
    plan.update(seq_lens_cpu=torch.tensor([5, 1], dtype=torch.int32))
    for each in (plan, plan.at(2), plan.at(3)):
        assert_fresh(world, each)


def test_a_refresh_of_a_view_plans_the_view_and_stops_the_others(world: Any) -> None:
    check_a_refresh_of_a_view(world)


def test_an_update_of_a_view_leaves_the_rows_past_it_empty(world: Any) -> None:
    check_an_update_of_a_view(world)


def test_a_kernel_that_keeps_its_plan_is_never_behind_its_views(planned: Any) -> None:
    check_an_update_of_a_view(planned)
    check_a_refresh_of_a_view(planned)


def test_a_step_that_a_view_cannot_plan_is_taken_back_everywhere(planned: Any) -> None:
    plan = made(planned, 130, 64, 65, 9)
    view, other = plan.at(2), plan.at(3)
    view.update(**step_of(planned, 5, 0))
    before = view.run(planned.query(2), planned.cache())
    kernel = other._kernel
    assert isinstance(kernel, Snapshot)
    kernel.fails = True
    with pytest.raises(RuntimeError, match="no room"):
        plan.update(**step_of(planned, 200, 201, 0, 3, seed=5))
    assert plan.seq_lens is not None
    assert plan.seq_lens.tolist() == [5, 0, 0, 0]
    assert planned.same(view.run(planned.query(2), planned.cache()), before)
    with pytest.raises(InvalidInput, match=OTHER):
        other.run(planned.query(3), planned.cache())  # it cannot be planned at all
    assert_fresh(planned, plan)
    kernel.fails = False
    plan.update(**step_of(planned, 200, 201, 0, 3, seed=5))
    for each in (plan, view, other):
        assert_fresh(planned, each)


def test_a_step_that_cannot_be_taken_back_stops_those_that_hold_it(planned: Any) -> None:
    plan = made(planned, 130, 64, 65, 9)
    view, other = plan.at(2), plan.at(3)
    kernels = [p._kernel for p in (plan, view, other)]
    assert all(isinstance(k, Snapshot) for k in kernels)
    before = other.run(planned.query(3), planned.cache())

    def fails_from_now_on(_: HostLengths | None) -> None:
        for kernel in kernels:
            kernel.fails = True  # type: ignore[union-attr]
        raise RuntimeError("no room for the plan")

    kernels[2].update = fails_from_now_on  # type: ignore[method-assign, union-attr]
    with pytest.raises(RuntimeError, match="no room"):
        plan.update(**step_of(planned, 200, 201, 100, 3))
    for stale in (plan, view):
        with pytest.raises(InvalidInput, match=OTHER):
            stale.run(planned.query(stale.describe()["batch"]), planned.cache())
    assert planned.same(other.run(planned.query(3), planned.cache()), before)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: ",".join(kind.values()))
def test_offsets_of_a_view_are_those_of_the_whole(world: Any, kind: dict[str, str]) -> None:
    world.need(ragged=True, needs_lse=True)
    if world.device.type == "cpu":
        world.backend = get_backend("cpu", adapters=[Planned(**kind)])
    starts = world.ints(0, 1, 2, 3)
    plan = world.plan(world.cache(), world.table(3, 4), world.ints(9, 9, 9), cu_q_lens=starts, max_q_len=2)
    plan.at(1).update(**step_of(world, 9), cu_q_lens=world.ints(0, 2))
    assert plan._buffers.cu_q_lens.tolist() == [0, 2, 2, 2]
    plan.update(seq_lens=world.ints(9, 9, 9), block_table=world.table(3, 4))
    assert_fresh(world, plan, cu_q_lens=world.ints(0, 2, 2, 2), max_q_len=2)
    plan.update(**step_of(world, 9, 1), cu_q_lens=world.ints(0, 1, 3))
    assert plan._buffers.cu_q_lens.tolist() == [0, 1, 3, 3]


def test_a_failed_step_brings_the_offsets_back_too(planned: Any) -> None:
    plan = made(planned, 130, 64, 65, cu_q_lens=planned.ints(0, 1, 3, 4), max_q_len=2)
    kernel, query = plan._kernel, planned.query(6)
    before = plan.run(query, planned.cache())
    assert isinstance(kernel, Snapshot)
    kernel.fails = True
    with pytest.raises(RuntimeError, match="no room"):
        plan.update(**step_of(planned, 5, 6), cu_q_lens=planned.ints(0, 2, 3))
    kernel.fails = False
    assert plan._buffers.cu_q_lens.tolist() == [0, 1, 3, 4]
    assert planned.same(plan.run(query, planned.cache()), before)
    plan._replan()  # from the buffers alone: what kernels see of them is back as well
    assert planned.same(plan.run(query, planned.cache()), before)


def test_lengths_reach_no_further_than_the_table_that_was_given_last(world: Any) -> None:
    page = world.page_size
    plan = made(world, 4 * page, 1, 1)
    plan.update(world.table(3, 2, seed=8), world.ints(page, 2, 3))
    lengths = torch.tensor([2 * page + 1, 2, 3], dtype=torch.int32)
    says = rf"holds {2 * page + 1}, but block_table, as it was, \[3, 2\] with page_size {page} has room for {2 * page}"
    with pytest.raises(InvalidInput, match=says):
        plan.update(seq_lens_cpu=lengths)
    plan.update(world.table(1, 2, seed=8), world.ints(5))
    with pytest.raises(InvalidInput, match=r"has 2 requests, but block_table, as it was, has 1 rows; pass block_table"):
        plan.update(seq_lens_cpu=lengths[1:])
    plan.update(seq_lens_cpu=torch.tensor([7, 0, 0], dtype=torch.int32))
    assert_fresh(world, plan)
    if world.device.type == "cuda":
        plan.update(seq_lens=lengths.to(world.device))
        assert plan.seq_lens is not None
        assert plan.seq_lens.tolist()[0] == 2 * page


def test_a_failed_step_leaves_the_table_that_was_given_last(planned: Any) -> None:
    plan = made(planned, 130, 64)
    kernel = plan._kernel
    assert isinstance(kernel, Snapshot)
    kernel.fails = True
    with pytest.raises(RuntimeError, match="no room"):
        plan.update(**step_of(planned, 5, columns=1))
    kernel.fails = False
    plan.update(seq_lens_cpu=torch.tensor([200, 201], dtype=torch.int32))
    assert_fresh(planned, plan)


def test_each_view_knows_whether_its_own_rows_see_keys(planned: Any) -> None:
    plan = made(planned, 5, 6, 0, seq_lens_cpu=torch.tensor([5, 6, 0], dtype=torch.int32))
    views = {n: plan.at(n) for n in (1, 2)}
    assert [plan._buffers.sees_keys, *(v._buffers.sees_keys for v in views.values())] == [False, True, True]
    plan.update(seq_lens_cpu=torch.tensor([5], dtype=torch.int32))
    assert [v._buffers.sees_keys for v in views.values()] == [True, False]


def test_what_an_engine_writes_is_held_to_the_plans_room(world: Any) -> None:
    plan = made(world, 130, 64, 65)
    if plan.update_mode == "host":
        pytest.skip(f"{plan.adapter} plans on the host, where refresh is refused")
    assert plan.seq_lens is not None
    assert plan.block_table is not None
    most = plan.describe()["max_seq_len"]
    plan.seq_lens.copy_(world.ints(100_000, -5, 7))
    if world.device.type == "cuda":
        plan.refresh()
        assert plan.seq_lens.tolist() == [most, 0, 7]
        assert_fresh(world, plan)
        return
    with pytest.raises(InvalidInput, match=r"seq_lens, as it was, holds -5"):
        plan.refresh()
    plan.seq_lens.copy_(world.ints(9, 5, 7))
    plan.block_table[1, 0] = PAGES
    with pytest.raises(InvalidInput, match=rf"block_table, as it was, holds page {PAGES} at \[1, 0\]"):
        plan.refresh()
    with pytest.raises(InvalidInput, match=OTHER):
        plan.run(world.query(3), world.cache())
    plan.block_table[1, 0] = 3
    plan.refresh()
    assert_fresh(world, plan)


def test_offsets_of_small_integers_do_not_wrap() -> None:
    cache = PagedCache.allocate(4, 64, "bf16", "cpu")
    starts = torch.tensor([0, 5, 3, 4], dtype=torch.uint8)
    table, lens = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    for most in (None, 300):
        with pytest.raises(
            InvalidInput, match=r"cu_q_lens is \[0, 5, 3, 4\], it takes offsets that start at 0 and do not"
        ):
            get_backend("cpu").plan(
                cache, table, lens, num_heads=4, softmax_scale=0.1, cu_q_lens=starts, max_q_len=most
            )


class Sequence:
    """Random steps of one plan and its views, some of which fail, and what each may decode after each of them."""

    def __init__(self, world: Any, seed: int, *, ragged: bool) -> None:
        self.world, self.random, self.ragged = world, random.Random(seed), ragged
        step = self.step(BATCH, "block_table", "seq_lens", *(("cu_q_lens",) if ragged else ()))
        given = {"max_q_len": 3, **step} if ragged else step
        self.cache = world.cache()
        table, lens = given.pop("block_table"), given.pop("seq_lens")
        self.plans = [world.plan(self.cache, table, lens, **given)]

    def step(self, live: int, *names: str) -> dict[str, Tensor]:
        """A step of so many requests, and its lengths on the host where it names them."""
        lens = torch.tensor([self.random.choice((0, 1, 2, 64, 65, 200, 256)) for _ in range(live)], dtype=torch.int32)
        starts = [0]
        for _ in range(live):
            starts.append(starts[-1] + self.random.randint(0, 3))
        seed = self.random.randrange(1 << 30)
        made = {
            "block_table": self.world.table(live, 4, pages=PAGES, seed=seed),
            "seq_lens": lens,
            "seq_lens_cpu": lens,
            "cu_q_lens": torch.tensor(starts, dtype=torch.int32),
        }
        return {name: made[name] for name in names}

    def move(self) -> None:
        """One update, refresh or new view, of any of the plans."""
        plan = self.random.choice(self.plans)
        batch, what = plan.describe()["batch"], self.random.random()
        if what < 0.2:
            view = plan.at(self.random.randint(1, batch))
            self.plans = [*self.plans, *([] if view in self.plans else [view])]
        elif what < 0.35 and plan.update_mode == "device":
            refresh_with(plan, **self.step(batch, "block_table", "seq_lens"))
        else:
            names = [n for n in ("block_table", "seq_lens", "seq_lens_cpu") if self.random.random() < 0.6]
            if self.ragged and self.random.random() < 0.6:
                names.append("cu_q_lens")
            self.update(plan, self.step(self.random.randint(0, batch), *names))

    def update(self, plan: DecodePlan, step: dict[str, Tensor]) -> None:
        failing = self.random.choice(self.plans)._kernel if self.random.random() < 0.3 else None
        with pytest.MonkeyPatch.context() as patch:
            if failing is not None:
                patch.setattr(failing, "fails", True)
            with suppress(InvalidInput, RuntimeError):
                plan.update(**step)
        if failing is not None:
            plan.update()  # whatever could not be planned then can be now

    def check(self) -> int:
        """How many plans ran; each decoded what the buffers hold."""
        ran = 0
        for plan in self.plans:
            buffers, kernel = plan._buffers, plan._kernel
            assert isinstance(kernel, Snapshot)
            starts, tokens = buffers.cu_q_lens, int(buffers.cu_q_lens[-1]) if self.ragged else buffers.batch
            query = self.world.query(tokens + 1 if self.ragged else tokens)
            try:
                got = plan.run(query, self.cache)
            except InvalidInput as stale:
                assert OTHER in str(stale)  # noqa: PT017, which of the two it is depends on the moves
                continue
            ran += 1
            table, lens = buffers.block_table, buffers.seq_lens
            want = self.world.truth(query, self.cache, table, lens, **({"cu_q_lens": starts} if self.ragged else {}))
            self.world.assert_close(got, want)
            assert not buffers.sees_keys or bool((lens >= buffers.q_len).all())
        return ran


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_any_moves_leave_each_plan_right_or_refused(planned: Any, seed: int, ragged: bool) -> None:
    sequence = Sequence(planned, seed, ragged=ragged)
    ran = sequence.check()
    for _ in range(12):
        sequence.move()
        ran += sequence.check()
    assert ran > 8
