"""The reference against torch's own attention in float64, against sums done by hand, and against itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_backends.cache import PagedCache
from mla_backends.errors import InvalidInput
from mla_backends.reference import reference_decode, reference_sparse

L, R, P, PAGES = 16, 8, 4, 40
SCALE = 0.3
# Two float64 evaluations of the same sums, of at most 130 terms of size 1.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def paged(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Shuffled pages with NaN in every row that no request owns, and absurd ids past each length."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.full((PAGES, P, L + R), torch.nan, dtype=torch.float64)
    free = torch.randperm(PAGES, generator=generator).tolist()
    width = max(-(-n // P) for n in lengths) + 2
    table = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
    table[:, -1] = -1
    keys = []
    for b, length in enumerate(lengths):
        rows = torch.randn(length, L + R, generator=generator, dtype=torch.float64)
        keys.append(rows)
        for column in range(-(-length // P)):
            page = free.pop()
            table[b, column] = page
            part = rows[column * P : (column + 1) * P]
            values[page, : len(part)] = part
    return values, table, torch.tensor(lengths, dtype=torch.int32), keys


def torch_attention(query: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
    """query [H, q, D] over keys [n, D] -> [H, q, L]."""
    each = keys.expand(query.shape[0], -1, -1)
    return torch.nn.functional.scaled_dot_product_attention(query, each, each[..., :L], mask, scale=SCALE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [None, 1, 3])
def test_it_is_torchs_attention_over_the_rows_of_each_request(causal, q_len):
    lengths = [3, 1, 4, 5, 64]
    values, table, seq_lens, keys = paged(lengths)
    if q_len == 3:
        lengths[1] = 3  # no row without keys, which torch has no answer for
        values, table, seq_lens, keys = paged(lengths)
    lead = (5,) if q_len is None else (5, q_len)
    latent, rope = randn(*lead, 6, L, seed=1), randn(*lead, 6, R, seed=2)
    found = reference_decode(latent, rope, values, table, seq_lens, softmax_scale=SCALE, causal=causal)
    assert found.out.shape == (*lead, 6, L)
    assert found.lse.shape == (*lead, 6)
    assert found.out.dtype == found.lse.dtype == torch.float64
    query = torch.cat((latent, rope), -1).view(5, q_len or 1, 6, L + R)
    for b, rows in enumerate(keys):
        n, q = len(rows), q_len or 1
        mask = torch.arange(n)[None] <= n - q + torch.arange(q)[:, None] if causal else None
        expected = torch_attention(query[b].transpose(0, 1), rows, mask).transpose(0, 1)
        torch.testing.assert_close(found.out.view(5, q, 6, L)[b], expected, **EXACT)
        logits = SCALE * torch.einsum("qhd,nd->qhn", query[b], rows)
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None], -torch.inf)
        torch.testing.assert_close(found.lse.view(5, q, 6)[b], logits.exp().sum(-1).log(), **EXACT)


def test_two_keys_by_hand():
    latent, rope = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[2.0]]])
    values = torch.tensor([[[3.0, 5.0, 0.5], [1.0, -1.0, 1.0]]])  # one page of two rows
    found = reference_decode(latent, rope, values, torch.tensor([[0]]), torch.tensor([2]), softmax_scale=0.5)
    # Logits 0.5 * (3 + 2 * 0.5) = 2 and 0.5 * (1 + 2 * 1) = 1.5.
    first = math.exp(2) / (math.exp(2) + math.exp(1.5))
    expected = torch.tensor([[[first * 3 + (1 - first) * 1, first * 5 - (1 - first) * 1]]], dtype=torch.float64)
    torch.testing.assert_close(found.out, expected, **EXACT)
    assert found.lse.item() == pytest.approx(math.log(math.exp(2) + math.exp(1.5)), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_key_gives_back_its_value_in_float64(dtype):
    values = randn(1, 1, L + R).to(dtype)
    found = reference_decode(
        randn(1, 2, L).to(dtype),
        randn(1, 2, R).to(dtype),
        values,
        torch.tensor([[0]]),
        torch.tensor([1]),
        softmax_scale=1.0,
    )
    torch.testing.assert_close(found.out, values[0, :, :L].double().expand(1, 2, L), **EXACT)


def test_row_i_is_a_single_token_call_at_its_own_length():
    lengths, q_len = [3, 64, 66], 3
    values, table, seq_lens, _ = paged(lengths)
    latent, rope = randn(3, q_len, 8, L, seed=1), randn(3, q_len, 8, R, seed=2)
    found = reference_decode(latent, rope, values, table, seq_lens, softmax_scale=SCALE)
    for i in range(q_len):
        alone = reference_decode(latent[:, i], rope[:, i], values, table, seq_lens - q_len + i + 1, softmax_scale=SCALE)
        assert torch.equal(found.out[:, i], alone.out)
        assert torch.equal(found.lse[:, i], alone.lse)


def test_rows_that_see_no_key_are_empty():
    values, table, seq_lens, _ = paged([0, 1, 2, 5])
    latent, rope = randn(4, 3, 2, L, seed=1), randn(4, 3, 2, R, seed=2)
    found = reference_decode(latent, rope, values, table, seq_lens, softmax_scale=SCALE)
    empty = torch.tensor([[True, True, True], [True, True, False], [True, False, False], [False, False, False]])
    assert torch.equal(found.lse[..., 0] == -torch.inf, empty)
    assert not found.out[empty].any()
    assert bool((found.out[~empty] != 0).all())
    full = reference_decode(latent, rope, values, table, seq_lens, softmax_scale=SCALE, causal=False)
    assert torch.equal(
        full.lse[..., 0] == -torch.inf, torch.tensor([[True] * 3, [False] * 3, [False] * 3, [False] * 3])
    )


def test_a_ragged_batch_is_each_request_alone():
    lengths, q_lens = [5, 64, 2, 7, 9], [1, 3, 0, 2, 2]
    values, table, seq_lens, _ = paged(lengths)
    starts = [0, 1, 4, 4, 6, 8]
    latent, rope = randn(10, 4, L, seed=1), randn(10, 4, R, seed=2)  # two tokens past the last request
    cu_q_lens = torch.tensor(starts, dtype=torch.int32)
    for causal in (True, False):
        found = reference_decode(
            latent, rope, values, table, seq_lens, softmax_scale=SCALE, causal=causal, cu_q_lens=cu_q_lens
        )
        assert found.out.shape == (10, 4, L)
        for b, q_len in enumerate(q_lens):
            at = slice(starts[b], starts[b + 1])
            if not q_len:
                continue
            alone = reference_decode(
                latent[None, at],
                rope[None, at],
                values,
                table[b : b + 1],
                seq_lens[b : b + 1],
                softmax_scale=SCALE,
                causal=causal,
            )
            assert torch.equal(found.out[at], alone.out[0])
            assert torch.equal(found.lse[at], alone.lse[0])
        assert not found.out[8:].any()
        assert bool((found.lse[8:] == -torch.inf).all())


@pytest.mark.parametrize("lead", [(0,), (0, 3), (2, 0)])
def test_no_request_or_no_token_gives_empty_tensors(lead):
    values, table, seq_lens, _ = paged([5, 6])
    found = reference_decode(
        randn(*lead, 4, L), randn(*lead, 4, R), values, table[: lead[0]], seq_lens[: lead[0]], softmax_scale=SCALE
    )
    assert found.out.shape == (*lead, 4, L)
    assert found.lse.shape == (*lead, 4)


def test_a_live_page_outside_the_cache_is_refused():
    values, table, seq_lens, _ = paged([9])
    for page in (-1, PAGES):
        table[0, 1] = page
        with pytest.raises(InvalidInput, match=f"page {page} for token 4 of 9"):
            reference_decode(randn(1, 2, L), randn(1, 2, R), values, table, seq_lens, softmax_scale=SCALE)


def test_a_sink_is_one_more_key_without_a_value_that_lse_leaves_out():
    values, table, seq_lens, keys = paged([5, 0])
    latent, rope = randn(2, 3, L, seed=1), randn(2, 3, R, seed=2)
    sink = torch.tensor([0.7, -torch.inf, 30.0])
    plain = reference_decode(latent, rope, values, table, seq_lens, softmax_scale=SCALE)
    found = reference_decode(latent, rope, values, table, seq_lens, softmax_scale=SCALE, attn_sink=sink)
    assert torch.equal(found.lse, plain.lse)
    logits = SCALE * torch.cat((latent, rope), -1)[0] @ keys[0].T
    with_sink = torch.softmax(torch.cat((logits, sink[:, None].double()), -1), -1)
    torch.testing.assert_close(found.out[0], with_sink[:, :-1] @ keys[0][:, :L], **EXACT)
    torch.testing.assert_close(found.out[0, 1], plain.out[0, 1], **EXACT)
    assert found.out[0, 2].abs().max() < 1e-9
    assert not found.out[1].any()
    assert bool((found.lse[1] == -torch.inf).all())


# --- sparse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(3,), (3, 2)])
def test_all_slots_of_a_request_give_the_dense_answer(lead):
    values, table, seq_lens, _ = paged([5, 13, 8])
    latent, rope = randn(*lead, 4, L, seed=1), randn(*lead, 4, R, seed=2)
    dense = reference_decode(latent, rope, values, table, seq_lens, softmax_scale=SCALE, causal=False)
    indices = torch.full((3, 16), -1, dtype=torch.int32)
    for b, length in enumerate(seq_lens.tolist()):
        for k in range(length):
            indices[b, (5 * k + b) % 16] = table[b, k // P] * P + k % P  # any order, with none in between
    indices = indices if len(lead) == 1 else indices[:, None].expand(3, 2, 16)
    found = reference_sparse(latent, rope, values, indices, softmax_scale=SCALE)
    assert found.out.shape == (*lead, 4, L)
    torch.testing.assert_close(found.out, dense.out, **EXACT)
    torch.testing.assert_close(found.lse, dense.lse, **EXACT)


def test_slots_outside_the_cache_are_none_and_all_none_is_an_empty_row():
    values = randn(3, P, L + R, seed=3)
    latent, rope = randn(3, 2, L, seed=1), randn(3, 2, R, seed=2)
    indices = torch.tensor([[-1, 12, 7, 2**31 - 1], [-1, -7, 12, -(2**31)], [0, 11, -1, -1]], dtype=torch.int32)
    found = reference_sparse(latent, rope, values, indices, softmax_scale=SCALE)
    torch.testing.assert_close(found.out[0], values.flatten(0, 1)[7, :L].expand(2, L), **EXACT)
    assert not found.out[1].any()
    assert bool((found.lse[1] == -torch.inf).all())
    expected = torch_attention(torch.cat((latent, rope), -1)[2][:, None], values.flatten(0, 1)[[0, 11]])[:, 0]
    torch.testing.assert_close(found.out[2], expected, **EXACT)


def test_duplicates_count_twice():
    values = randn(2, P, L + R, seed=3)
    latent, rope = randn(1, 2, L, seed=1), randn(1, 2, R, seed=2)
    found = reference_sparse(latent, rope, values, torch.tensor([[3, 6, 3]]), softmax_scale=SCALE)
    rows = values.flatten(0, 1)[[3, 3, 6]]
    torch.testing.assert_close(
        found.out[0], torch_attention(torch.cat((latent, rope), -1)[0][:, None], rows)[:, 0], **EXACT
    )
    once = reference_sparse(latent, rope, values, torch.tensor([[3, 6]]), softmax_scale=SCALE)
    assert bool((found.lse > once.lse).all())
    assert not torch.allclose(found.out, once.out)


def test_a_sparse_sink_is_the_dense_one():
    values, table, seq_lens, _ = paged([5])
    latent, rope, sink = randn(1, 3, L, seed=1), randn(1, 3, R, seed=2), torch.tensor([0.7, 2.0, -1.0])
    dense = reference_decode(latent, rope, values, table, seq_lens, softmax_scale=SCALE, attn_sink=sink)
    indices = torch.tensor([[int(table[0, k // P]) * P + k % P for k in range(5)] + [-1]])
    found = reference_sparse(latent, rope, values, indices, softmax_scale=SCALE, attn_sink=sink)
    torch.testing.assert_close(found.out, dense.out, **EXACT)
    torch.testing.assert_close(found.lse, dense.lse, **EXACT)
    none = reference_sparse(latent, rope, values, indices * 0 - 1, softmax_scale=SCALE, attn_sink=sink)
    assert not none.out.any()


@pytest.mark.parametrize("format", ["bf16", "fp8", "fp8_ds_mla"])
def test_it_reads_what_a_cache_shows(format):
    cache = PagedCache.allocate(3, 2, format, "cpu")
    kv_c, k_pe = randn(3, 512, seed=4).bfloat16(), randn(3, 64, seed=5).bfloat16()
    cache.write(kv_c, k_pe, torch.tensor([4, 5, 1]))  # page 2, then the second row of page 0
    latent, rope = randn(1, 2, 512, seed=1), randn(1, 2, 64, seed=2)
    found = reference_sparse(latent, rope, cache.dequantized(), torch.tensor([[4, 5, 1]]), softmax_scale=0.05)
    rows = torch.cat((kv_c, k_pe), -1).double()
    logits = 0.05 * torch.cat((latent, rope), -1)[0] @ rows.T
    expected = torch.softmax(logits, -1) @ rows[:, :512]
    # bf16 is kept exactly; e4m3 rounds keys and values by up to 1/16.
    tolerance = 1e-12 if format == "bf16" else 0.2
    assert float((found.out[0] - expected).abs().max() / expected.abs().max()) < tolerance
