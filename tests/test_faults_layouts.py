"""Layouts: strides, scales, heads, integer widths, slots (kinds 2, 3, 4, 10 and 12 of what users report)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_backends import (
    AbsorbWeights,
    InvalidInput,
    NoAdapterRuns,
    PagedCache,
    Query,
    UnifiedCache,
    get_backend,
)
from mla_backends.conditions import Condition
from mla_backends.reference import reference_decode
from mla_backends.testing import good_case, installed_adapters, stated
from mla_backends.trials import Trial

INF = float("inf")
ADAPTERS = {a.name: a for a in installed_adapters()}


# --- strides and alignment ------------------------------------------------------------------------------------------------


def slot(world: Any, layers: int) -> UnifiedCache:
    """40 pages of all layers, NaN in every byte."""
    made = UnifiedCache.allocate(40, layers, world.page_size, world.format, world.device)
    made.data.view(torch.uint8).fill_(0xFF)
    return made


@pytest.mark.parametrize(("layers", "layer"), [(1, 0), (2, 0), (2, 1), (61, 0), (61, 30), (61, 60)])
def test_a_layer_of_a_slot_and_its_clone_give_the_same_bits(world: Any, layers: int, layer: int) -> None:
    view = slot(world, layers).layer(layer)
    source = world.cache(40)
    view.data.copy_(source.data)
    clone = PagedCache(view.data.clone(memory_format=torch.contiguous_format), world.format)
    world.need(page_stride=view.page_stride_rows)
    lens, query = world.ints(1, 63, 64, 65, 200), world.query(5)
    pages = torch.randperm(40, generator=torch.Generator().manual_seed(5))
    columns = min(-(-200 // world.page_size), 8)
    table = pages.repeat(5 * columns // 40 + 1)[: 5 * columns].view(5, columns).int().to(world.device)
    lens = lens.clamp(max=columns * world.page_size)
    got, want = (world.plan(c, table, lens).run(query, c) for c in (view, clone))
    assert world.same(got, want)
    world.assert_close(got, world.truth(query, clone, table, lens))


@pytest.mark.parametrize("offset", [8, 16])
def test_a_slot_that_starts_off_the_allocators_boundary_is_right_or_refused(world: Any, offset: int) -> None:
    unused = "finite" if world.adapter.conventions.unused_rows == "read" else "nan"
    condition = Condition(cache_format=world.format, page_size=world.page_size, offset=offset, q_scale=world.q_scale)
    trial = Trial(condition, world.device, unused=unused)
    assert trial.cache.alignment == offset
    reasons = world.adapter.refusals(trial.problem(), world.backend.device, forced=True)
    if reasons:
        assert offset == 8
        assert [r.subject for r in reasons] == ["alignment"]
        with pytest.raises(NoAdapterRuns, match="alignment is 8, it takes"):
            trial.plan(world.backend)
        return
    assert trial.run(world.backend).faults(condition) == ()


def test_only_eager_takes_a_cache_at_an_8_byte_offset() -> None:
    for adapter in ADAPTERS.values():
        problem, device = good_case(adapter)
        reasons = adapter.refusals(replace(problem, alignment=8), device)
        assert (adapter.name == "eager") == (reasons == ()), adapter.name


def test_the_strides_that_models_give_a_query_change_no_bit(world: Any) -> None:
    cache, lens = world.cache(), world.ints(130, 1, 64)
    table = world.table(3, -(-130 // world.page_size))
    weights = AbsorbWeights(world.normal(16, 128, 512) * 0.1, world.normal(16, 512, 128, seed=8))
    q_nope = world.normal(16, 3, 128).transpose(0, 1)
    wide = torch.full((3, 16, 192), torch.nan, dtype=world.dtype, device=world.device)
    wide[..., 128:] = world.normal(3, 16, 64, seed=9)
    q_pe = wide[..., 128:]
    plan = world.plan(cache, table, lens)
    want = plan.run(weights.query(q_nope.contiguous(), q_pe.contiguous()), cache)
    assert world.same(plan.run(weights.query(q_nope, q_pe), cache), want)
    # A kernel with an e4m3 query has it rounded once, straight from the product; a bf16 query was rounded before.
    in_place = plan.run(weights.query(q_nope.contiguous(), q_pe.contiguous(), out=plan.new_query()), cache)
    assert world.same(plan.run(weights.query(q_nope, q_pe, out=plan.new_query()), cache), in_place)
    assert plan.quantizes_query or world.same(in_place, want)
    absorbed = torch.bmm(q_nope.transpose(0, 1).float(), weights.w_uk.float()).to(world.dtype)
    parts = Query.from_parts(absorbed.transpose(0, 1), q_pe)
    packed = Query.from_packed(torch.cat([parts.latent, parts.rope], -1))
    assert world.same(plan.run(parts, cache), plan.run(packed, cache))


# --- scales and formats ---------------------------------------------------------------------------------------------------


def test_a_query_of_3000_over_an_fp8_cache_is_right_and_a_unit_descale_would_not_be(world: Any) -> None:
    world.need(cache_format="fp8")
    condition = Condition(cache_format="fp8", page_size=world.page_size, q_amax=3000.0, kv_scale=0.5, return_lse=False)
    trial = Trial(condition, world.device)
    outcome = trial.run(world.backend)
    assert outcome.faults(condition) == ()
    if world.adapter.conventions.query_dtype is None:
        return
    unit = replace(condition, q_scale=1.0)
    plan = Trial(unit, world.device).plan(world.backend)
    got = plan.run(trial.query(plan), trial.cache).out.double().cpu()
    want = trial.truth(trial.plan(world.backend)).out.cpu()
    assert (got - want).norm() > 2 * 4e-2 * want.norm()


def test_rows_of_656_bytes_are_no_flat_fp8_and_rows_of_576_no_tiles() -> None:
    tiled, flat = torch.zeros(4, 64, 656, dtype=torch.uint8), torch.zeros(4, 64, 576, dtype=torch.uint8)
    with pytest.raises(InvalidInput, match="rows of 656, format 'fp8' takes 576"):
        PagedCache(tiled, "fp8")
    with pytest.raises(InvalidInput, match="rows of 576, format 'fp8_ds_mla' takes 656"):
        PagedCache(flat, "fp8_ds_mla")


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_a_kernel_refuses_the_format_of_the_other_attention(name: str) -> None:
    adapter = ADAPTERS[name]
    problem, device = good_case(adapter)
    if name == "eager":
        pytest.skip("eager takes every format, dense and sparse")
    other = "fp8" if problem.topk is not None else "fp8_ds_mla"
    reasons = adapter.refusals(replace(problem, cache_format=other), device)
    assert reasons
    assert any(other in str(reason) for reason in reasons)


def test_a_plan_refuses_a_cache_of_another_format_page_size_or_size() -> None:
    backend = get_backend("cpu")
    cache = PagedCache.allocate(8, 64, "bf16", "cpu")
    lens = torch.tensor([3, 64], dtype=torch.int32)
    plan = backend.plan(cache, torch.zeros(2, 2, dtype=torch.int32), lens, num_heads=4, softmax_scale=0.1)
    query = Query.from_packed(torch.zeros(2, 4, 576, dtype=torch.bfloat16))
    plan.run(query, cache)
    for other, says in (
        (PagedCache.allocate(8, 64, "fp8", "cpu"), "format is fp8, this plan was made for bf16"),
        (PagedCache.allocate(8, 64, "fp8_ds_mla", "cpu"), "format is fp8_ds_mla, this plan was made for bf16"),
        (PagedCache.allocate(16, 32, "bf16", "cpu"), "page_size is 32, this plan was made for 64"),
        (PagedCache.allocate(7, 64, "bf16", "cpu"), "has 7 pages, this plan was made for 8"),
        (PagedCache.allocate(9, 64, "bf16", "cpu"), "has 9 pages, this plan was made for 8"),
        (PagedCache.allocate(8, 64, "bf16", "cpu", qk_rope_head_dim=0), "qk_rope_head_dim is 0"),
        (UnifiedCache.allocate(8, 1, 64, "bf16", "cpu"), "UnifiedCache has one at .layer"),
        (None, "cache is a NoneType"),
    ):
        with pytest.raises(InvalidInput, match=says):
            plan.run(query, other)  # type: ignore[arg-type]


# --- heads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [8, 12, 16, 20, 40, 64, 96, 128])
def test_every_head_count_of_tensor_parallelism_is_right_and_padded_heads_leak_nothing(world: Any, heads: int) -> None:
    world.need(num_heads=heads)
    cache, lens, query = world.cache(), world.ints(130, 1, 0, 64), world.query(4, heads=heads)
    table = world.table(4, -(-130 // world.page_size))
    plan = world.plan(cache, table, lens, num_heads=heads)
    got = plan.run(query, cache)
    world.assert_close(got, world.truth(query, cache, table, lens))
    padded = plan.describe()["padded_heads"]
    assert padded >= heads
    for poison in (torch.nan, INF, 1e3):
        buffer = torch.full((4, padded, 576), poison, dtype=world.dtype, device=world.device)
        buffer[:, :heads] = query.packed
        assert world.same(plan.run(Query.from_packed(buffer), cache), got)


# --- integer widths -------------------------------------------------------------------------------------------------------


def test_pages_past_2_to_the_31_elements_are_read_where_they_lie(world: Any) -> None:
    near = world.cache(6)
    rows = 2**31 // near.rows.shape[2] // 2 + 1
    world.need(page_stride=rows)
    width = near.rows.shape[2]
    # Six pages, far apart: only what is touched is committed on a CPU.
    memory = torch.empty(5 * rows * width + world.page_size * width, dtype=near.rows.dtype, device=world.device)
    far = PagedCache(memory.as_strided((6, world.page_size, width), (rows * width, width, 1)), world.format)
    for page in range(6):
        far.data[page].copy_(near.data[page])
    lens, query = world.ints(2 * world.page_size, 5), world.query(2)
    table = torch.tensor([[5, 4], [3, 0]], dtype=torch.int32, device=world.device)
    got, want = (world.plan(c, table, lens).run(query, c) for c in (far, near))
    assert world.same(got, want)


@pytest.mark.parametrize(("name", "most"), [("flashmla-fp8", 4095)])
def test_the_batch_that_ends_the_process_is_a_limit(name: str, most: int) -> None:
    if name not in ADAPTERS:
        pytest.skip(f"{name} is not installed")
    problem, device = good_case(ADAPTERS[name])
    assert ADAPTERS[name].refusals(replace(problem, batch=most), device) == ()
    (reason,) = ADAPTERS[name].refusals(replace(problem, batch=most + 1), device)
    assert reason.subject == "batch"
    assert str(most + 1) in reason.found


# --- slots ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 192, 2048])
def test_any_topk_is_right_and_slots_outside_the_cache_are_none(sparse: Any, topk: int) -> None:
    sparse.need(topk=topk)
    cache, query = sparse.cache(), sparse.query(5)
    generator = torch.Generator().manual_seed(topk)
    indices = torch.randint(0, cache.num_slots, (5, topk), generator=generator, dtype=torch.int32)
    bad = torch.tensor([-1, -7, cache.num_slots, 2**31 - 1, -(2**31)], dtype=torch.int32)
    is_bad = torch.rand(5, topk, generator=generator) < 0.3
    indices[is_bad] = bad[torch.randint(5, (int(is_bad.sum()),), generator=generator)]
    indices[0], indices[1] = -1, cache.num_slots
    indices[2] = 7  # every key the same one: as if it were there once
    indices = indices.to(sparse.device)
    plan = sparse.plan(cache, None, None, topk=topk, max_batch=5)
    got = plan.run(query, cache, indices=indices)
    sparse.assert_close(got, sparse.sparse_truth(query, cache, indices))
    assert (got.lse[:2] == -INF).all()
    assert not got.out[:2].any()
    once = torch.full_like(indices, -1)
    once[:, 0] = 7
    single = plan.run(query, cache, indices=once)
    assert (got.out[2] - single.out[2]).abs().max() <= 2e-2 * single.out[2].abs().max()
    assert (got.lse[2] - single.lse[2] - torch.tensor(float(topk)).log()).abs().max() < 2e-3


def test_index_rows_that_are_not_the_querys_are_refused(sparse: Any) -> None:
    cache, query = sparse.cache(), sparse.query(5)
    plan = sparse.plan(cache, None, None, topk=64, max_batch=5)
    right = torch.zeros(5, 64, dtype=torch.int32, device=sparse.device)
    plan.run(query, cache, indices=right)
    for wrong in (
        right.new_zeros(7, 64),
        right[:, :63],
        right[:4],
        right.long(),
        right.float(),
        right[0],
        right[:, None],
    ):
        with pytest.raises(InvalidInput, match=r"indices is .* it takes \[5, 64\] int32"):
            plan.run(query, cache, indices=wrong)
    with pytest.raises(InvalidInput, match="it takes indices"):
        plan.run(query, cache)
    for wrong in (right.new_zeros(7, 64), right[0], right.float()):
        with pytest.raises(InvalidInput, match="indices"):
            sparse.backend.decode(query.latent, query.rope, cache, None, None, softmax_scale=0.1, indices=wrong)


def test_slots_of_several_query_rows_are_each_their_own(sparse: Any) -> None:
    sparse.need(q_len=2, topk=64)
    cache, query = sparse.cache(), sparse.query(3, 2)
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, cache.num_slots, (3, 2, 64), generator=generator, dtype=torch.int32).to(sparse.device)
    plan = sparse.plan(cache, None, None, topk=64, max_batch=3, q_len=2)
    sparse.assert_close(plan.run(query, cache, indices=indices), sparse.sparse_truth(query, cache, indices))
    strided = torch.full((3, 2, 128), -9, dtype=torch.int32, device=sparse.device)
    strided[..., :64] = indices
    assert sparse.same(plan.run(query, cache, indices=strided[..., :64]), plan.run(query, cache, indices=indices))


def test_each_layer_may_have_other_slots(sparse: Any) -> None:
    layers = [sparse.cache(seed=s) for s in (1, 50)]
    query, plan = sparse.query(2), sparse.plan(layers[0], None, None, topk=64, max_batch=2)
    generator = torch.Generator().manual_seed(0)
    for cache in layers:
        indices = torch.randint(0, cache.num_slots, (2, 64), generator=generator, dtype=torch.int32).to(sparse.device)
        kept = indices.clone()
        sparse.assert_close(plan.run(query, cache, indices=indices), sparse.sparse_truth(query, cache, indices))
        assert torch.equal(indices, kept)


def test_the_page_sizes_that_adapters_state_are_those_that_they_take() -> None:
    for adapter in ADAPTERS.values():
        problem, device = good_case(adapter)
        taken = {p for p in range(1, 257) if not adapter.refusals(replace(problem, page_size=p), device)}
        assert set(stated(adapter, "page_size", ())) <= taken


def test_a_fp32_cache_is_decoded_in_float64() -> None:
    backend, cache = get_backend("cpu"), PagedCache.allocate(4, 64, "fp32", "cpu")
    generator = torch.Generator().manual_seed(0)
    cache.write(
        torch.randn(256, 512, generator=generator), torch.randn(256, 64, generator=generator), torch.arange(256)
    )
    latent, rope = torch.randn(1, 4, 512, generator=generator), torch.randn(1, 4, 64, generator=generator)
    table, lens = torch.tensor([[3, 1, 0]], dtype=torch.int32), torch.tensor([130], dtype=torch.int32)
    got = backend.decode(latent, rope, cache, table, lens, softmax_scale=0.05).out
    want = reference_decode(latent, rope, cache.dequantized(), table, lens, softmax_scale=0.05).out
    assert (got - want).norm() <= 1e-6 * want.norm()
