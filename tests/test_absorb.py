"""Queries and the two weight products: values against float64, memory left where it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_backends.absorb import AbsorbWeights, Query
from mla_backends.errors import InvalidInput
from mla_backends.problem import Geometry

H, N, L, R, V = 5, 128, 512, 64, 96
GEOMETRY = Geometry(H, kv_lora_rank=L, qk_nope_head_dim=N, qk_rope_head_dim=R, v_head_dim=V)
# Sums of 128 or 512 products in float32 (error about 1e-6 of the terms' size), then one rounding to the dtype:
# half a step is 2**-9 for bf16 and 2**-12 for fp16.
RTOL = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}
DTYPES = tuple(RTOL)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> AbsorbWeights:
    return AbsorbWeights(randn(H, N, L, dtype=dtype, seed=seed) / 8, randn(H, L, V, dtype=dtype, seed=seed + 1) / 8)


def close(found: Tensor, expected: Tensor, rtol: float) -> bool:
    if not expected.numel():
        return found.shape == expected.shape
    # Cancelled sums are judged against the size of what was summed.
    return torch.allclose(found.double(), expected, rtol=rtol, atol=rtol * float(expected.abs().mean()))


# --- Query -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(3,), (2, 4), (0,), (0, 4)])
def test_a_packed_query_is_two_views_of_its_buffer(lead):
    packed = randn(*lead, H, L + R)
    query = Query.from_packed(packed)
    assert query.packed is packed
    assert query.is_packed
    assert torch.equal(query.latent, packed[..., :L])
    assert torch.equal(query.rope, packed[..., L:])
    assert query.latent.data_ptr() == packed.data_ptr()
    assert (query.num_heads, query.dtype, query.device) == (H, torch.bfloat16, torch.device("cpu"))
    assert query.facts == ((*lead, H, L), R, torch.bfloat16, torch.device("cpu"))


def test_facts_of_equal_queries_are_equal_and_hash_alike():
    a, b = Query.from_packed(randn(3, H, 576)), Query.from_parts(randn(3, H, L), randn(3, H, R))
    assert a.facts == b.facts
    assert hash(a.facts) == hash(b.facts)
    assert a.facts != Query.from_packed(randn(4, H, 576)).facts


@pytest.mark.parametrize("lead", [(3,), (2, 4), (1,)])
def test_two_slices_that_lie_next_to_each_other_are_one_buffer(lead):
    packed = randn(*lead, H, L + R)
    query = Query.from_parts(packed[..., :L], packed[..., L:])
    assert query.is_packed
    assert query.packed.data_ptr() == packed.data_ptr()
    assert torch.equal(query.packed, packed)


def test_slices_of_a_wider_strided_buffer_are_one_buffer():
    wide = randn(H, 3, 700).transpose(0, 1)
    query = Query.from_parts(wide[..., 10:522], wide[..., 522:586])
    assert query.is_packed
    assert query.packed.data_ptr() == wide[..., 10:].data_ptr()
    assert torch.equal(query.packed, wide[..., 10:586])


@pytest.mark.parametrize("kind", ["apart", "a gap", "other order", "other strides", "q not mergeable"])
def test_parts_that_are_no_one_buffer_are_copied_into_one_that_is_kept(kind):
    wide = randn(3, 2, H, 700)
    latent, rope = {
        "apart": (randn(3, H, L), randn(3, H, R)),
        "a gap": (wide[:, 0, :, :L], wide[:, 0, :, 520:584]),
        "other order": (wide[:, 0, :, 64:576], wide[:, 0, :, :64]),
        "other strides": (wide[:, 0, :, :L], wide[:, 0, :1, L:576].expand(3, H, R)),
        "q not mergeable": (wide.transpose(1, 0)[..., :L], randn(2, 3, H, R)),
    }[kind]
    query = Query.from_parts(latent, rope)
    assert not query.is_packed
    assert query.latent is latent
    first = query.packed
    assert first.is_contiguous()
    assert torch.equal(first, torch.cat((latent, rope), -1))
    assert query.packed is first


def test_the_copy_shows_what_was_written_since():
    query = Query.from_parts(randn(3, H, L), randn(3, H, R))
    before = query.packed.data_ptr()
    query.latent.fill_(2.0)
    query.rope.fill_(3.0)
    assert query.packed.data_ptr() == before
    assert torch.equal(query.packed, torch.cat((query.latent, query.rope), -1))


def test_neighbours_by_address_in_different_allocations_are_not_one_buffer():
    # Two storages over one piece of memory: adjacent, but a view cannot reach from one into the other.
    memory = bytearray(576 * 4)
    latent = torch.frombuffer(memory, dtype=torch.float32, count=512).view(1, 1, 512)
    rope = torch.frombuffer(memory, dtype=torch.float32, count=64, offset=2048).view(1, 1, 64)
    assert latent.data_ptr() + 2048 == rope.data_ptr()
    rope.fill_(3.0)
    assert torch.equal(Query.from_parts(latent, rope).packed, torch.cat((latent, rope), -1))


def test_a_query_without_rope_is_its_latent():
    packed = randn(3, H, L)
    query = Query.from_packed(packed)
    assert query.rope.shape == (3, H, 0)
    assert query.packed is packed
    parts = Query.from_parts(packed, packed.new_empty(3, H, 0))
    assert torch.equal(parts.packed, packed)


def test_an_e4m3_query_carries_its_scale():
    scale = torch.tensor([0.5])
    packed = randn(3, H, 576).to(torch.float8_e4m3fn)
    query = Query.from_packed(packed, scale=scale)
    assert query.scale is scale
    for shaped in (scale[0], scale.view(1, 1)):
        kept = Query.from_packed(packed, scale=shaped).scale
        assert kept.shape == (1,)
        assert kept.data_ptr() == scale.data_ptr()
    apart = Query.from_parts(packed[..., :L].clone(), packed[..., L:].clone(), scale=scale)
    assert torch.equal(apart.packed.view(torch.uint8), packed.view(torch.uint8))


@pytest.mark.parametrize(
    ("latent", "rope", "scale", "says"),
    [
        (randn(3, H, L), randn(4, H, R), None, "one shape"),
        (randn(3, H, L), randn(3, 1, H, R), None, "one shape"),
        (randn(3, H, L), randn(3, H, R).half(), None, "torch.bfloat16.*torch.float16"),
        (randn(3, L), randn(3, R), None, r"latent is \[3, 512\]"),
        (randn(3, H, L).double(), randn(3, H, R).double(), None, "float64"),
        (randn(3, H, L).int(), randn(3, H, R).int(), None, "int32"),
        (randn(3, L, H).transpose(1, 2), randn(3, H, R), None, "latent has stride 5"),
        (randn(3, H, L), randn(3, R, H).transpose(1, 2), None, "rope has stride 5"),
        (randn(3, H, L), randn(3, H, R), torch.ones(1), "leave it out"),
        (randn(3, H, L).to(torch.float8_e4m3fn), randn(3, H, R).to(torch.float8_e4m3fn), None, "takes one float32"),
        (
            randn(3, H, L).to(torch.float8_e4m3fn),
            randn(3, H, R).to(torch.float8_e4m3fn),
            torch.ones(2),
            "takes one float32",
        ),
    ],
)
def test_parts_that_disagree_are_refused(latent, rope, scale, says):
    with pytest.raises(InvalidInput, match=says):
        Query.from_parts(latent, rope, scale=scale)


@pytest.mark.parametrize("packed", [randn(3, H, 500), randn(3, 576), randn(2, 2, 2, H, 576), None])
def test_a_packed_query_that_is_too_narrow_or_of_another_rank_is_refused(packed):
    with pytest.raises(InvalidInput, match="packed is"):
        Query.from_packed(packed)


def test_a_query_cannot_be_changed():
    query = Query.from_packed(randn(3, H, 576))
    with pytest.raises(AttributeError, match="latent"):
        query.latent = randn(3, H, L)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_b_proj_is_split_by_head_into_keys_then_values(dtype):
    weight = randn(H * (N + V), L, dtype=dtype)
    made = AbsorbWeights.from_kv_b_proj(weight, GEOMETRY)
    assert made.w_uk.shape == (H, N, L)
    assert made.w_uv.shape == (H, L, V)
    assert made.w_uk.dtype == made.w_uv.dtype == dtype
    assert made.w_uk.is_contiguous()
    assert made.w_uv.is_contiguous()
    for h in range(H):
        rows = weight[h * (N + V) : (h + 1) * (N + V)]
        assert torch.equal(made.w_uk[h], rows[:N])
        assert torch.equal(made.w_uv[h], rows[N:].T)


def test_weights_are_detached_and_do_not_share_the_checkpoints_memory():
    geometry = Geometry(1, kv_lora_rank=16, qk_nope_head_dim=4, v_head_dim=8)
    weight = torch.nn.Parameter(randn(12, 16))
    made = AbsorbWeights.from_kv_b_proj(weight, geometry)
    assert not made.w_uk.requires_grad
    before = made.w_uk.clone()
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(made.w_uk, before)


def test_dtype_converts_the_weights():
    weight = randn(H * (N + V), L, dtype=torch.float32)
    made = AbsorbWeights.from_kv_b_proj(weight, GEOMETRY, dtype=torch.bfloat16)
    assert torch.equal(made.w_uk[0], weight[:N].bfloat16())


@pytest.mark.parametrize("block", [(128, 128), (64, 256), (100, 100)])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_an_fp8_checkpoint_is_stored_times_the_scale_of_its_block(block, dtype):
    rows = H * (N + V)  # 1120, no multiple of 128
    stored = randn(rows, L).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-L // block[1]), generator=torch.Generator().manual_seed(1)) + 0.5
    made = AbsorbWeights.from_kv_b_proj(stored, GEOMETRY, scale=scale, block=block, dtype=dtype)
    assert made.w_uk.dtype == (dtype or torch.bfloat16)
    full = torch.empty(rows, L)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            at = slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1])
            full[at] = stored.float()[at] * scale[r, c]
    expected = full.to(made.w_uk.dtype).view(H, N + V, L)
    assert torch.equal(made.w_uk, expected[:, :N])
    assert torch.equal(made.w_uv, expected[:, N:].transpose(1, 2))


@pytest.mark.parametrize(
    ("weight", "scale", "says"),
    [
        (randn(H * (N + V) + 1, L), None, r"weight is \[1121, 512\].*takes \[1120, 512\]"),
        (randn(L, H * (N + V)), None, r"weight is \[512, 1120\]"),
        (randn(H * (N + V), L), torch.ones(9, 4), "leave it out"),
        (randn(H * (N + V), L).to(torch.float8_e4m3fn), None, r"takes \[9, 4\].*weight_scale_inv"),
        (randn(H * (N + V), L).to(torch.float8_e4m3fn), torch.ones(8, 4), r"scale is \[8, 4\].*takes \[9, 4\]"),
        (randn(H * (N + V), L).double(), None, "float64"),
    ],
)
def test_a_kv_b_proj_that_does_not_fit_is_refused(weight, scale, says):
    with pytest.raises(InvalidInput, match=says):
        AbsorbWeights.from_kv_b_proj(weight, GEOMETRY, scale=scale)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_block_scale_is_positive_and_finite(wrong):
    scale = torch.ones(9, 4)
    scale[3, 2] = wrong
    with pytest.raises(InvalidInput, match=r"scale holds .*it takes positive finite ones"):
        AbsorbWeights.from_kv_b_proj(randn(H * (N + V), L).to(torch.float8_e4m3fn), GEOMETRY, scale=scale)


@pytest.mark.parametrize("block", [128, (128,), (0, 128), (128.0, 128), None])
def test_a_block_is_two_counts(block):
    with pytest.raises(InvalidInput, match=r"block is .*, it takes"):
        AbsorbWeights.from_kv_b_proj(
            randn(H * (N + V), L).to(torch.float8_e4m3fn), GEOMETRY, scale=torch.ones(9, 4), block=block
        )


@pytest.mark.parametrize(
    ("w_uk", "w_uv", "says"),
    [
        (randn(4, N, L), randn(H, L, V), "one H and one L"),
        (randn(H, N, 256), randn(H, L, V), "one H and one L"),
        (randn(H, N, L), randn(H, L, V).half(), "float16"),
        (randn(H * N, L), randn(H, L, V), "w_uk is"),
        (randn(H, N, L).double(), randn(H, L, V).double(), "float64"),
    ],
)
def test_weights_that_disagree_are_refused(w_uk, w_uv, says):
    with pytest.raises(InvalidInput, match=says):
        AbsorbWeights(w_uk, w_uv)


def test_copy_gives_new_values_at_the_same_addresses():
    made, other = weights(), weights(seed=20)
    at = made.w_uk.data_ptr(), made.w_uv.data_ptr()
    uk, uv = made.w_uk, made.w_uv
    made.copy_(other)
    assert (made.w_uk.data_ptr(), made.w_uv.data_ptr()) == at
    assert made.w_uk is uk
    assert made.w_uv is uv
    assert torch.equal(uk, other.w_uk)
    assert torch.equal(uv, other.w_uv)
    with pytest.raises(InvalidInput, match="other is"):
        made.copy_(AbsorbWeights(randn(4, N, L), randn(4, L, V)))


# --- query and project -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(1,), (3,), (2, 3), (0,), (0, 2), (2, 0)])
def test_the_query_is_q_nope_times_w_uk_beside_q_pe(dtype, lead):
    w = weights(dtype)
    q_nope, q_pe = randn(*lead, H, N, dtype=dtype, seed=1), randn(*lead, H, R, dtype=dtype, seed=2)
    query = w.query(q_nope, q_pe)
    expected = torch.einsum("...hn,hnl->...hl", q_nope.double(), w.w_uk.double())
    assert query.latent.shape == (*lead, H, L)
    assert query.is_packed
    assert query.dtype == dtype
    assert close(query.latent, expected, RTOL[dtype])
    assert torch.equal(query.rope, q_pe)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(1,), (3,), (2, 3), (0,), (0, 2), (2, 0)])
def test_project_is_the_latent_times_w_uv(dtype, lead):
    w = weights(dtype)
    latent = randn(*lead, H, L, dtype=dtype, seed=3)
    expected = torch.einsum("...hl,hlv->...hv", latent.double(), w.w_uv.double())
    found = w.project(latent)
    assert found.shape == (*lead, H, V)
    assert found.dtype == dtype
    assert close(found, expected, RTOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
def test_transposed_and_sliced_inputs_give_the_same_bits_as_contiguous_ones(dtype, tokens):
    w = weights(dtype)
    q_nope, q_pe = randn(tokens, H, N, dtype=dtype, seed=1), randn(tokens, H, R, dtype=dtype, seed=2)
    expected = w.query(q_nope, q_pe).packed
    by_bmm = q_nope.transpose(0, 1).contiguous().transpose(0, 1)
    of_projection = torch.cat((q_nope, q_pe), -1)
    for nope, pe in (
        (by_bmm, of_projection[..., N:]),
        (of_projection[..., :N], of_projection[..., N:]),
        (q_nope, q_pe[:, :1].expand(-1, H, -1)),
    ):
        found = w.query(nope, pe)
        assert torch.equal(found.latent, expected[..., :L])
        assert torch.equal(found.rope, pe)
    latent = expected[..., :L]
    by_head = latent.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(w.project(by_head), w.project(latent.contiguous()))


def test_a_q_axis_that_does_not_merge_is_read_in_place():
    w = weights()
    longer_nope, longer_pe = randn(2, 5, H, N, seed=1), randn(2, 5, H, R, seed=2)
    nope, pe = longer_nope[:, 1:4], longer_pe[:, 1:4]
    query, contiguous = w.query(nope, pe), w.query(nope.contiguous(), pe.contiguous())
    assert torch.equal(query.packed, contiguous.packed)
    longer = randn(2, 5, H, L)
    out = torch.full((2, 7, H, V), 9.0).bfloat16()
    assert w.project(longer[:, :3], out=out[:, 2:5]).data_ptr() == out[:, 2:5].data_ptr()
    assert torch.equal(out[:, 2:5], w.project(longer[:, :3].contiguous()))
    assert bool((out[:, :2] == 9).all())
    assert bool((out[:, 5:] == 9).all())


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_out_is_written_in_place_and_padded_heads_stay(lead):
    w = weights()
    q_nope, q_pe = randn(*lead, H, N, seed=1), randn(*lead, H, R, seed=2)
    buffer = torch.full((*lead, 16, L + R), 7.0).bfloat16()
    out = Query.from_packed(buffer)
    assert w.query(q_nope, q_pe, out=out) is out
    assert torch.equal(buffer[..., :H, :], w.query(q_nope, q_pe).packed)
    assert bool((buffer[..., H:, :] == 7).all())


def test_out_may_be_two_tensors():
    w = weights()
    q_nope, q_pe = randn(3, H, N, seed=1), randn(3, H, R, seed=2)
    out = Query.from_parts(torch.zeros(H, 3, L).bfloat16().transpose(0, 1), torch.zeros(3, H, R).bfloat16())
    assert w.query(q_nope, q_pe, out=out) is out
    assert torch.equal(out.packed, w.query(q_nope, q_pe).packed)


@pytest.mark.parametrize(("given", "asked"), [((3, 1), (3,)), ((3,), (3, 1)), ((2, 3), (6,)), ((6,), (2, 3))])
def test_the_result_has_the_inputs_rank_over_the_memory_of_out(given, asked):
    w = weights()
    q_nope, q_pe = randn(*asked, H, N, seed=1), randn(*asked, H, R, seed=2)
    buffer = torch.zeros(*given, 8, L + R).bfloat16()
    out = Query.from_packed(buffer)
    found = w.query(q_nope, q_pe, out=out)
    assert found.latent.shape == (*asked, 8, L)
    assert found.is_packed
    assert found.packed.data_ptr() == buffer.data_ptr()
    assert torch.equal(found.packed[..., :H, :], w.query(q_nope, q_pe).packed)
    assert w.query(q_nope, q_pe, out=out) is found


def test_an_e4m3_out_is_divided_by_its_scale_and_saturates():
    w = weights()
    q_nope, q_pe = randn(3, H, N, seed=1), randn(3, H, R, seed=2)
    plain = w.query(q_nope, q_pe)
    q_pe[1, 2, 3] = 1e4
    for scale in (0.25, 2.0**-10):
        out = Query.from_packed(torch.zeros(3, 16, 576).to(torch.float8_e4m3fn), scale=torch.tensor([scale]))
        found = w.query(q_nope, q_pe, out=out)
        assert found is out
        wanted = (torch.einsum("thn,hnl->thl", q_nope.double(), w.w_uk.double()) / scale).clamp(-448, 448)
        # e4m3: 4 significant bits, so half a step is 1/16 at most; half the least step is 2**-10.
        assert torch.allclose(found.latent[:, :H].double(), wanted, rtol=1 / 16, atol=2**-10)
        assert float(found.rope[1, 2, 3].float()) == 448.0
        assert not found.packed[:, H:].float().any()
    assert not torch.equal(plain.rope, q_pe)  # the large value is only in what was quantised


def test_a_measured_e4m3_out_is_written_through_its_staging():
    # The scale depends on all values, so that the plan's own step runs once they are known.
    w = weights()
    q_nope, q_pe = randn(3, 1, H, N, seed=1), randn(3, 1, H, R, seed=2)
    staging = Query.from_packed(torch.zeros(3, 8, 576).bfloat16())
    out = Query.from_packed(torch.zeros(3, 8, 576).to(torch.float8_e4m3fn), scale=torch.ones(1))
    settled = []
    out.written_through(staging, lambda: settled.append(staging.packed.clone()))
    found = w.query(q_nope, q_pe, out=out)
    assert found.latent.shape == (3, 1, 8, L)
    assert found.packed.data_ptr() == out.packed.data_ptr()
    assert len(settled) == 1
    assert torch.equal(settled[0][:, :H], w.query(q_nope, q_pe).packed[:, 0])


@pytest.mark.parametrize(
    ("q_nope", "q_pe", "out", "says"),
    [
        (randn(3, 4, N), randn(3, 4, R), None, r"q_nope is \[3, 4, 128\].*\[B, \(q,\) 5, 128\]"),
        (randn(3, H, 64), randn(3, H, R), None, "q_nope is"),
        (randn(3, H, N), randn(4, H, R), None, "q_pe"),
        (randn(3, H, N), randn(3, 1, H, R), None, "q_pe"),
        (randn(H, N), randn(H, R), None, "q_nope is"),
        (randn(3, H, N).half(), randn(3, H, R).half(), None, "float16"),
        (randn(3, H, N), randn(3, H, R), Query.from_packed(randn(3, 4, 576)), "at least 5 heads"),
        (randn(3, H, N), randn(3, H, R), Query.from_packed(randn(3, H, 544)), r"512 \+ 64"),
        (randn(3, H, N), randn(3, H, R), Query.from_packed(randn(4, H, 576)), "as many tokens"),
        (randn(2, 3, H, N), randn(2, 3, H, R), Query.from_packed(randn(3, 2, H, 576)), "as many tokens"),
        (randn(3, H, N), randn(3, H, R), Query.from_packed(randn(3, H, 576).half()), "float16"),
        (randn(3, N, H).transpose(1, 2), randn(3, H, R), None, "q_nope"),
    ],
)
def test_a_query_that_does_not_fit_is_refused(q_nope, q_pe, out, says):
    with pytest.raises(InvalidInput, match=says):
        weights().query(q_nope, q_pe, out=out)


def test_a_compiled_function_absorbs_and_projects_in_one_graph():
    w = weights()
    out = Query.from_packed(torch.zeros(3, 8, 576).bfloat16())
    q_nope, q_pe = randn(3, H, N, seed=1), randn(3, H, R, seed=2)

    def step(q_nope: Tensor, q_pe: Tensor) -> Tensor:
        query = w.query(q_nope, q_pe, out=out)
        return w.project(query.latent[:, :H])

    found = torch.compile(step, backend="eager", fullgraph=True)(q_nope, q_pe)
    assert torch.equal(out.packed[:, :H], w.query(q_nope, q_pe).packed)
    assert torch.equal(found, w.project(out.latent[:, :H]))


def test_project_writes_into_a_transposed_out():
    w = weights()
    latent = randn(3, H, L)
    buffer = torch.zeros(H, 3, V).bfloat16()
    found = w.project(latent, out=buffer.transpose(0, 1))
    assert found.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer.transpose(0, 1), w.project(latent))
    flat = torch.zeros(3, H * V).bfloat16()
    w.project(latent, out=flat.view(3, H, V))
    assert torch.equal(flat.view(3, H, V), w.project(latent))


@pytest.mark.parametrize(
    ("latent", "out", "says"),
    [
        (randn(3, 4, L), None, r"latent is \[3, 4, 512\]"),
        (randn(3, H, 500), None, "latent is"),
        (randn(H, L), None, "latent is"),
        (randn(3, H, L).half(), None, "float16"),
        (randn(3, H, L), torch.zeros(3, H, V + 1).bfloat16(), r"out is \[3, 5, 97\]"),
        (randn(3, H, L), torch.zeros(3, H, V), "float32"),
        (randn(3, H, L), torch.zeros(3, V, H).bfloat16().transpose(1, 2), "stride"),
    ],
)
def test_a_projection_that_does_not_fit_is_refused(latent, out, says):
    with pytest.raises(InvalidInput, match=says):
        weights().project(latent, out=out)


def test_absorbed_attention_is_the_attention_of_the_definition():
    # Scores and values of one head, with and without the weights folded in, in float64.
    w = weights(torch.float32)
    q_nope, q_pe = randn(1, H, N, dtype=torch.float32, seed=1), randn(1, H, R, dtype=torch.float32, seed=2)
    kv_c, k_pe = randn(9, L, dtype=torch.float32, seed=3), randn(9, R, dtype=torch.float32, seed=4)
    query = w.query(q_nope, q_pe)
    k_nope = torch.einsum("kl,hnl->khn", kv_c.double(), w.w_uk.double())
    values = torch.einsum("kl,hlv->khv", kv_c.double(), w.w_uv.double())
    scores = torch.einsum("hn,khn->hk", q_nope[0].double(), k_nope) + q_pe[0].double() @ k_pe.double().T
    probabilities = torch.softmax(scores * 0.01, -1)
    expected = torch.einsum("hk,khv->hv", probabilities, values)
    absorbed = torch.softmax((query.packed[0] @ torch.cat((kv_c, k_pe), -1).T) * 0.01, -1) @ kv_c
    assert close(w.project(absorbed[None])[0], expected, 1e-4)
