"""A sparse plan's keys: positions selected into its own buffer against the same slots given, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_backends import Decoded, DecodePlan, InvalidInput, PagedCache, Query, UnifiedCache, ops
from mla_backends.problem import Problem
from mla_backends.selection import Selection
from mla_backends.support import Conventions

TOPK = 64


def positions_of(world: Any, cache: PagedCache, *lead: int, topk: int = TOPK, seed: int = 0) -> tuple[Tensor, Tensor]:
    """[.., topk] positions, some below 0 and some past the table, and a table [B, W] of pages, some of them absurd."""
    generator = torch.Generator().manual_seed(seed)
    columns = 6
    positions = torch.randint(-9, columns * cache.page_size + 9, (*lead, topk), generator=generator).int()
    table = torch.randint(0, cache.num_pages, (lead[0], columns), generator=generator).int()
    absurd = torch.tensor([-1, cache.num_pages, 2**31 - 1, -(2**31)]).int()
    bad = torch.rand(table.shape, generator=generator) < 0.2
    table[bad] = absurd[torch.randint(4, (int(bad.sum()),), generator=generator)]
    return positions.to(world.device), table.to(world.device)


def slots_of(positions: Tensor, table: Tensor, cache: PagedCache, lens: Tensor | None = None) -> Tensor:
    """The same by a loop."""
    flat = positions.view(len(table), -1)
    rows = [
        [_slot(at, pages, cache, None if lens is None else int(lens[b])) for at in flat[b].tolist()]
        for b, pages in enumerate(table.tolist())
    ]
    return torch.tensor(rows, dtype=torch.int32).view(positions.shape).to(positions.device)


def _slot(at: int, pages: list[int], cache: PagedCache, length: int | None) -> int:
    if at < 0 or at >= len(pages) * cache.page_size or (length is not None and at >= length):
        return -1
    page = pages[at // cache.page_size]
    return page * cache.page_size + at % cache.page_size if 0 <= page < cache.num_pages else -1


def plan_of(world: Any, cache: PagedCache, batch: int, **given: Any) -> DecodePlan:
    made = world.plan(cache, None, None, topk=TOPK, max_batch=batch, **given)
    assert isinstance(made, DecodePlan)
    return made


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_what_is_selected_decodes_as_the_same_slots_given(sparse: Any, q_len: int, with_lengths: bool) -> None:
    sparse.need(q_len=q_len, topk=TOPK)
    cache, lead = sparse.cache(), (3,) if q_len == 1 else (3, q_len)
    query = sparse.query(*lead)
    positions, table = positions_of(sparse, cache, *lead)
    lens = sparse.ints(0, 5, 3 * cache.page_size) if with_lengths else None
    slots = slots_of(positions, table, cache, lens)
    plan = plan_of(sparse, cache, 3, q_len=q_len)
    want = plan_of(sparse, cache, 3, q_len=q_len).run(query, cache, indices=slots)
    sparse.assert_close(want, sparse.sparse_truth(query, cache, slots))
    got = plan.run(query, cache, indices=plan.select_slots(positions, table, lens))
    assert sparse.same(got, want)


def test_a_selection_serves_layers_until_the_next(sparse: Any) -> None:
    slot = UnifiedCache.allocate(24, 3, sparse.page_size, sparse.format, sparse.device)
    for layer in range(3):
        rows = slot.layer(layer).num_slots
        kv_c, k_pe = sparse.normal(rows, 512, seed=layer), sparse.normal(rows, 64, seed=layer + 9)
        slot.layer(layer).write(kv_c, k_pe, torch.arange(rows, device=sparse.device))
    layers = [slot.layer(i) for i in range(3)]
    query, plan = sparse.query(4), plan_of(sparse, layers[0], 4)
    for seed in range(2):
        positions, table = positions_of(sparse, layers[0], 4, seed=seed)
        slots = slots_of(positions, table, layers[0])
        selected = plan.select_slots(positions.long(), table.long())
        for layer in layers:
            got = plan.run(query, layer, indices=selected)
            assert sparse.same(got, plan_of(sparse, layer, 4).run(query, layer, indices=slots))


def test_each_batch_size_has_a_selection_of_its_own(sparse: Any) -> None:
    cache, whole = sparse.cache(), plan_of(sparse, sparse.cache(), 4)
    made = {}
    for n in (4, 2):
        positions, table = positions_of(sparse, cache, n, seed=n)
        made[n] = whole.at(n).select_slots(positions, table), slots_of(positions, table, cache)
    for n, (selected, slots) in made.items():
        query = sparse.query(n)
        want = sparse.sparse_truth(query, cache, slots)
        sparse.assert_close(whole.at(n).run(query, cache, indices=selected), want)
        with pytest.raises(InvalidInput, match="indices is another plan's selection"):
            whole.at(6 - n).run(sparse.query(6 - n), cache, indices=selected)


def test_a_selection_that_other_slots_have_overwritten_is_refused(sparse: Any) -> None:
    cache, query = sparse.cache(), sparse.query(3)
    plan = plan_of(sparse, cache, 3)
    assert plan.selected is not None
    with pytest.raises(InvalidInput, match="select_slots was not called"):
        plan.run(query, cache, indices=plan.selected)
    positions, table = positions_of(sparse, cache, 3)
    selected, slots = plan.select_slots(positions, table), slots_of(positions, table, cache)
    want = plan.run(query, cache, indices=selected)
    other = plan.run(query, cache, indices=slots.flip(0))
    sparse.assert_close(other, sparse.sparse_truth(query, cache, slots.flip(0)))
    with pytest.raises(InvalidInput, match="run was given other slots since"):
        plan.run(query, cache, indices=selected)
    assert plan.select_slots(positions, table) is selected
    assert sparse.same(plan.run(query, cache, indices=selected), want)


def test_a_selection_is_its_own_plans_and_no_tensor(sparse: Any) -> None:
    """Its values may be row ids, which as slots would decode other keys."""
    cache, query = sparse.cache(), sparse.query(3)
    plan, other = plan_of(sparse, cache, 3), plan_of(sparse, cache, 3)
    positions, table = positions_of(sparse, cache, 3)
    selection = plan.select_slots(positions, table)
    want = plan.run(query, cache, indices=selection)
    assert selection is plan.selected
    assert not isinstance(selection, Tensor)
    for theirs in (other.select_slots(positions, table), other.selected):
        with pytest.raises(InvalidInput, match="is another plan's selection; call select_slots on this plan"):
            plan.run(query, cache, indices=theirs)
    compiled = torch.compile(lambda s: plan.run(query, cache, indices=s).out, backend="aot_eager")
    assert torch.equal(compiled(selection), want.out)
    with pytest.raises(Exception, match="is another plan's selection"):
        compiled(other.selected)
    assert sparse.same(plan.run(query, cache, indices=selection), want)


def test_positions_that_do_not_fit_are_refused_and_leave_the_selection(sparse: Any) -> None:
    cache, query = sparse.cache(), sparse.query(3)
    plan = plan_of(sparse, cache, 3)
    positions, table = positions_of(sparse, cache, 3)
    selected = plan.select_slots(positions, table)
    want = plan.run(query, cache, indices=selected)
    for bad in (positions[:2], positions[:, :-1], positions[0], None, 3):
        with pytest.raises(InvalidInput, match=r"positions is .* it takes \[3, 64\] int32 or int64"):
            plan.select_slots(bad, table)  # type: ignore[arg-type]
    for arguments, says in (
        ((positions.float(), table), "the dtype of positions is torch.float32"),
        ((positions, table.float()), "the dtype of block_table is torch.float32"),
        ((positions, table[:2]), r"block_table is \[2, 6\], it takes \[3, W\]"),
        ((positions, None), "block_table is a NoneType"),
        ((positions, table, sparse.ints(1, 2)), r"seq_lens is \[2\]"),
        ((positions, table, torch.ones(3, device=sparse.device)), "seq_lens is"),
    ):
        with pytest.raises(InvalidInput, match=says):
            plan.select_slots(*arguments)
    assert sparse.same(plan.run(query, cache, indices=selected), want)


def test_a_dense_plan_selects_nothing(world: Any) -> None:
    cache = world.cache()
    plan = world.plan(cache, world.table(2, 2), world.ints(3, 4))
    assert plan.selected is None
    with pytest.raises(InvalidInput, match="this plan is dense, there is nothing to select"):
        plan.select_slots(world.table(2, 2), world.table(2, 2))
    with pytest.raises(InvalidInput, match="this plan is dense, it takes no indices"):
        plan.run(world.query(2), cache, indices=a_selection())


def test_select_and_run_compile_into_one_graph(sparse: Any) -> None:
    cache, query = sparse.cache(), sparse.query(3)
    plan = plan_of(sparse, cache, 3)
    inputs = [positions_of(sparse, cache, 3, seed=seed) for seed in range(3)]

    def two_layers(first: Tensor, second: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        a = plan.run(query, cache, indices=plan.select_slots(first, table))
        b = plan.run(query, cache, indices=plan.select_slots(second, table))
        return a.out, a.lse, b.out, b.lse

    compiled = torch.compile(two_layers, fullgraph=True, backend="aot_eager")
    for (first, table), (second, _) in zip(inputs, reversed(inputs), strict=True):
        for got, want in zip(compiled(first, second, table), two_layers(first, second, table), strict=True):
            assert torch.equal(got, want)


def test_rows_past_what_a_slot_can_number_are_refused() -> None:
    out, counts = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    positions, table = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(InvalidInput, match="largest row id"):
        ops.select_rows(out, counts, positions, table, 64, num_slots=2**20, rows_per_page=2**18)
    for num_slots in (0, 2**31 + 1):
        with pytest.raises(InvalidInput, match=f"num_slots is {num_slots}, it takes 1 to 2147483648"):
            ops.select_slots(out, positions, table, 64, num_slots=num_slots)


def a_selection() -> Selection:
    """Of one request, over four pages of a slot of two layers, for a kernel that wants row ids."""
    return Selection(
        Problem(16, topk=4, page_stride=128),
        Conventions(query="split", slots="compact_slots"),
        batch=1,
        q_len=1,
        num_pages=4,
        device=torch.device("cpu"),
    )


def test_what_slots_are_written_into_has_memory_for_each() -> None:
    positions, table = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(InvalidInput, match=r"the strides of out is \(0, 1\), it takes memory for each value"):
        ops.select_slots(torch.zeros(1, 3, dtype=torch.int32).expand(2, 3), positions, table, 64)
    for op in (ops.sanitize_slots, lambda out, slots, n: ops.compact_slots(out, positions[:, 0], slots, n)):
        with pytest.raises(InvalidInput, match="slots is a NoneType, it takes a tensor"):
            op(positions, None, 5)
    counts, huge = torch.zeros(2, dtype=torch.int32), 2**31
    with pytest.raises(InvalidInput, match=f"page_size and rows_per_page is {huge} and {huge}"):
        ops.compact_slots(positions.clone(), counts, positions, 5, page_size=huge, rows_per_page=huge)


def test_a_cache_may_have_every_slot_that_an_int32_can_name() -> None:
    slots = torch.tensor([[5, -1, 2**31 - 1]], dtype=torch.int32)
    kept, counts = torch.zeros_like(slots), torch.zeros(1, dtype=torch.int32)
    ops.sanitize_slots(kept, slots, 2**31)
    assert torch.equal(kept, slots)
    ops.compact_slots(kept, counts, slots, 2**31)
    assert kept.tolist() == [[5, 2**31 - 1, 0]]


def test_other_layouts_take_slots_of_their_own() -> None:
    """Rows are numbered for the layout that the plan was made with; slots are not."""
    made = a_selection()
    made.select(torch.tensor([[0, -1, 65, 1]]), torch.tensor([[2, 1]]), None)
    assert made.kernel_table.tolist() == [[[256, 129, 257, 0]]]
    assert made.kernel_counts is not None
    assert made.kernel_counts.tolist() == [3]
    slot, query = UnifiedCache.allocate(4, 2, 64, "bf16", "cpu"), Query.from_packed(torch.zeros(1, 16, 576))
    assert made.bring(made, query, slot.layer(1)) is made.kernel_table
    with pytest.raises(InvalidInput, match="64 rows from page to page, this plan selects for 128"):
        made.bring(made, query, PagedCache.allocate(4, 64, "bf16", "cpu"))


def test_the_query_that_reads_a_selection_may_have_the_axis_of_q(sparse: Any) -> None:
    cache = sparse.cache()
    plan, query = plan_of(sparse, cache, 3), sparse.query(3)
    positions, table = positions_of(sparse, cache, 3)
    want: Decoded = plan.run(query, cache, indices=plan.select_slots(positions, table))
    grouped = Query.from_packed(query.packed.unsqueeze(1))
    got = plan.run(grouped, cache, indices=plan.select_slots(positions.unsqueeze(1), table))
    assert torch.equal(got.out, want.out.unsqueeze(1))


def test_every_slot_that_is_selected_is_none_or_inside_the_cache(sparse: Any) -> None:
    """Kernels read what is selected without a look."""
    cache, plan = sparse.cache(), plan_of(sparse, sparse.cache(), 3)
    positions, table = positions_of(sparse, cache, 3)
    table[:, ::2] = cache.num_pages
    plan.select_slots(positions, table)
    selection = plan.selected
    assert selection is not None
    if selection.kernel_counts is None:
        want, (found,) = slots_of(positions, table, cache), selection.kernel_table.transpose(0, 1)
        assert torch.equal(found[:, :TOPK], want)
        assert (found[:, TOPK:] == -1).all()
    else:
        assert selection.kernel_counts.tolist() == (slots_of(positions, table, cache) >= 0).sum(-1).tolist()


def test_a_node_of_a_graph_may_hold_a_copy_of_what_is_selected(sparse: Any) -> None:
    cache, query = sparse.cache(), sparse.query(3)
    plan = plan_of(sparse, cache, 3)
    positions, table = positions_of(sparse, cache, 3)
    want = plan.run(query, cache, indices=plan.select_slots(positions, table))
    assert plan.selected is not None
    held = plan.selected.kernel_table
    copy, right = torch.full_like(held, 7), held.clone()
    held.fill_(7)
    torch.ops.mla_backends.select_slots_of_plan(copy, plan._node.number, positions, table, None)
    assert torch.equal(copy, right)
    assert torch.equal(held, right)
    out, lse = torch.empty_like(want.out), torch.empty_like(want.lse)
    parts = (query.latent, query.rope, None, cache.rows, cache.scale, copy.fill_(7), True)
    torch.ops.mla_backends.run_plan(plan._node.number, plan._node.inputs, *parts, out, lse)
    assert sparse.same(Decoded(out, lse), want)
