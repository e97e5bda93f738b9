"""The ops on finished rows, slots and e4m3 queries, against loops over rows and elements."""

import math

import numpy as np
import pytest
import torch

from mla_backends import InvalidInput, ops

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
E4M3 = torch.float8_e4m3fn
NAN, INF = math.nan, math.inf


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=INT32, device=device)


def keys_seen(seq_lens, q_lens, *, causal):
    """Of each row in turn, how many keys it sees."""
    return [
        length - q_len + i + 1 if causal else length
        for length, q_len in zip(seq_lens, q_lens, strict=True)
        for i in range(q_len)
    ]


def check_rows(out, lse, before, raw, seen, *, base2, overwrite):
    """out, before [T, H, X], lse, raw [T, H], row by row; seen[t] <= 0 is empty."""
    for t, keys in enumerate(seen):
        for h in range(raw.shape[1]):
            if keys <= 0:
                assert lse[t, h] == -INF
                assert (out[t, h] == 0).all() if overwrite else torch.equal(out[t, h], before[t, h])
                continue
            want = raw[t, h].item() * (math.log(2) if base2 else 1)
            assert lse[t, h].item() == pytest.approx(want, rel=1e-6, nan_ok=True)
            assert torch.equal(out[t, h], before[t, h])


LENGTHS = [0, 1, 2, 3, 64, -1]


def raw_rows(tokens, heads, width, device, dtype=BF16):
    """Live values everywhere, and in some rows what kernels leave behind: these may not decide emptiness."""
    raw = torch.randn(tokens, heads, generator=torch.Generator().manual_seed(1))
    raw[0], raw[-1, 1] = INF, -INF
    out = torch.randn(tokens, heads, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    return out.to(device), raw.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("base2", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("width", [512, 9])
def test_lengths_alone_decide_which_rows_are_empty(width, q_len, overwrite, base2, causal, device):
    tokens, heads = len(LENGTHS) * q_len, 5
    before, raw = raw_rows(tokens, heads, width, device)
    out, lse = before.clone(), torch.full((tokens, heads), NAN, device=device)
    ops.finish_rows(
        out, lse, raw, ints(LENGTHS, device), q_len=q_len, causal=causal, base2=base2, overwrite_out=overwrite
    )
    seen = keys_seen(LENGTHS, [q_len] * len(LENGTHS), causal=causal)
    check_rows(out, lse, before, raw, seen, base2=base2, overwrite=overwrite)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [5, 40, 128])
def test_rows_by_request_and_position_with_a_transposed_raw_lse_and_sliced_heads(heads, device):
    lengths, q_len = [1, 0, 70], 4
    wide, raw = raw_rows(12, heads + 3, 64, device)
    before = wide.view(3, q_len, heads + 3, 64)
    buffer = before.clone()
    transposed = raw.view(3, q_len, -1).transpose(1, 2).contiguous().transpose(1, 2)[..., :heads]
    lse = torch.full((3, q_len, heads), NAN, device=device)
    ops.finish_rows(
        buffer[:, :, :heads],
        lse,
        transposed,
        ints(lengths, device),
        q_len=q_len,
        causal=True,
        base2=False,
        overwrite_out=True,
    )
    seen = keys_seen(lengths, [q_len] * 3, causal=True)
    check_rows(
        buffer[:, :, :heads].flatten(0, 1),
        lse.flatten(0, 1),
        before.flatten(0, 1)[:, :heads],
        raw[:, :heads],
        seen,
        base2=False,
        overwrite=True,
    )
    assert torch.equal(buffer[:, :, heads:], before[:, :, heads:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("requests", [4, 300], ids=["few requests", "more requests than threads"])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_rows_and_tokens_past_the_last_request(causal, requests, device):
    generator = torch.Generator().manual_seed(requests)
    q_lens = torch.randint(0, 4, (requests,), generator=generator).tolist()
    lengths = torch.randint(0, 6, (requests,), generator=generator).tolist()
    live = sum(q_lens)
    before, raw = raw_rows(live + 3, 2, 16, device)
    out, lse = before.clone(), torch.full_like(raw, NAN)
    cu = ints(np.cumsum([0, *q_lens]).tolist(), device)
    ops.finish_rows(
        out, lse, raw, ints(lengths, device), cu_q_lens=cu, q_len=4, causal=causal, base2=False, overwrite_out=True
    )
    seen = [*keys_seen(lengths, q_lens, causal=causal), 0, 0, 0]
    check_rows(out, lse, before, raw, seen, base2=False, overwrite=True)


@pytest.mark.parametrize("device", DEVICES)
def test_without_lengths_a_head_is_empty_where_its_raw_lse_is_infinite(device):
    before, raw = raw_rows(4, 6, 16, device)
    raw[0], raw[1, 2], raw[3, 5] = 0.5, INF, -INF
    out, lse = before.clone(), torch.full_like(raw, NAN)
    ops.finish_rows(out, lse, raw, None, q_len=1, causal=True, base2=True, overwrite_out=True)
    for t in range(4):
        for h in range(6):
            empty = math.isinf(raw[t, h].item())
            assert (out[t, h] == 0).all() if empty else torch.equal(out[t, h], before[t, h])
            assert lse[t, h].item() == (-INF if empty else pytest.approx(raw[t, h].item() * math.log(2), rel=1e-6))


@pytest.mark.parametrize("device", DEVICES)
def test_out_without_lse_lse_without_out_and_lse_in_place(device):
    before, raw = raw_rows(3, 2, 16, device)
    lengths = ints([1, 0, 2], device)
    out = before.clone()
    ops.finish_rows(out, None, None, lengths, q_len=1, causal=True, base2=False, overwrite_out=True)
    assert (out[1] == 0).all()
    assert torch.equal(out[::2], before[::2])
    lse = raw.clone()
    ops.finish_rows(None, lse, lse, lengths, q_len=1, causal=True, base2=False, overwrite_out=False)
    assert (lse[1] == -INF).all()
    assert torch.equal(lse[::2], raw[::2])


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_are_no_launch(device):
    out, lse = torch.empty(0, 4, 8, device=device), torch.empty(0, 4, device=device)
    ops.finish_rows(out, lse, lse, ints([], device), q_len=1, causal=True, base2=False, overwrite_out=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lse": torch.empty(4, 3)}, "out and lse"),
        ({"raw_lse": torch.empty(2, 4)}, "raw_lse"),
        ({"raw_lse": torch.empty(4, 2, dtype=torch.float64)}, "raw_lse"),
        ({"raw_lse": None}, "raw_lse"),
        ({"seq_lens": ints([1, 2, 3])}, "seq_lens"),
        ({"seq_lens": torch.tensor([1, 2])}, "seq_lens"),
        ({"cu_q_lens": ints([0, 1])}, "cu_q_lens"),
        ({"q_len": 0}, "q_len"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_their_name(change, says, device):
    given = {
        "out": torch.empty(4, 2, 8),
        "lse": torch.empty(4, 2),
        "raw_lse": torch.empty(4, 2),
        "seq_lens": ints([1, 2]),
        "q_len": 2,
    }
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in (given | change).items()}
    with pytest.raises(InvalidInput, match=says):
        ops.finish_rows(**moved, causal=True, base2=False, overwrite_out=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position_dtype", [INT32, torch.int64], ids=str)
@pytest.mark.parametrize("table_dtype", [INT32, torch.int64], ids=str)
@pytest.mark.parametrize("q_len", [None, 2])
@pytest.mark.parametrize("lengths", [None, [0, 5, 200]])
def test_positions_become_slots_or_none(lengths, q_len, table_dtype, position_dtype, device):
    page_size, topk, width = 16, 300, 320
    generator = torch.Generator().manual_seed(4)
    table = torch.randint(-1, 40, (3, 20), generator=generator).to(table_dtype)[:, :14]
    shape = (3, topk) if q_len is None else (3, q_len, topk)
    positions = torch.randint(-3, 16 * 16, shape, generator=generator).to(position_dtype)
    out = torch.full((*shape[:-1], width + 5), 777, dtype=INT32, device=device)
    seq_lens = None if lengths is None else ints(lengths, device)
    ops.select_slots(out[..., :width], positions.to(device), table.to(device), page_size, seq_lens)
    rows = out.cpu().view(3, -1, width + 5)
    for b, row in enumerate(positions.view(3, -1, topk)):
        for i, columns in enumerate(row.tolist()):
            for k, at in enumerate(columns):
                seen = 0 <= at < (14 * page_size if lengths is None else min(lengths[b], 14 * page_size))
                page = table[b, at // page_size].item() if seen else -1
                assert rows[b, i, k] == (page * page_size + at % page_size if page >= 0 else -1)
    assert (rows[..., topk:width] == -1).all()
    assert (rows[..., width:] == 777).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_beyond_int32_is_none(device):
    out = ints([[7, 7]], device)
    ops.select_slots(out, ints([[0, 64]], device), ints([[2**25, 2**25 - 1]], device), 64)
    assert out.tolist() == [[-1, 2**31 - 64]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [2**58, 2**58 + 1, 2**62, 2**63 - 1, -(2**63)])
def test_a_page_whose_slots_wrap_around_64_bits_is_none(page, device):
    out = ints([[7, 7]], device)
    ops.select_slots(out, ints([[0, 64]], device), torch.tensor([[page, 1]], device=device), 64)
    assert out.tolist() == [[-1, 64]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_slots", [1, 64, 65, 128, 2**31])
def test_slots_past_the_cache_are_none(num_slots, device):
    out = ints([[7] * 4], device)
    ops.select_slots(out, ints([[0, 63, 64, 127]], device), ints([[0, 1]], device), 64, num_slots=num_slots)
    assert out.tolist() == [[slot if slot < num_slots else -1 for slot in (0, 63, 64, 127)]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_len", [None, 2])
@pytest.mark.parametrize("topk", [1, 31, 256, 2048, 2049, 5000])
def test_selected_rows_are_the_compacted_slots(topk, q_len, device):
    generator = torch.Generator().manual_seed(topk)
    lead = (3,) if q_len is None else (3, q_len)
    positions = torch.randint(-40, 1100, (*lead, topk), generator=generator).to(device)
    table = torch.randint(-2, 20, (3, 64), generator=generator).to(INT32).to(device)
    lengths = ints([0, 900, 2000], device)
    slots = torch.full((*lead, topk), 777, dtype=INT32, device=device)
    ops.select_slots(slots, positions, table, 16, lengths, num_slots=250)
    rows = slots.view(-1, topk).shape[0]
    got, want = (torch.full((rows, topk + 9), 777, dtype=INT32, device=device) for _ in range(2))
    counts, true_counts = ints([777] * rows, device), ints([777] * rows, device)
    ops.select_rows(got[:, :-2], counts, positions, table, 16, lengths, num_slots=250, rows_per_page=48)
    ops.compact_slots(want[:, :-2], true_counts, slots.view(-1, topk), 250, page_size=16, rows_per_page=48)
    assert torch.equal(got, want)
    assert torch.equal(counts, true_counts)
    valid = [[s for s in row if s >= 0] for row in slots.view(-1, topk).tolist()]
    assert counts.tolist() == [len(row) for row in valid]
    assert [row[:n] for row, n in zip(got.tolist(), counts.tolist(), strict=True)] == [
        [s // 16 * 48 + s % 16 for s in row] for row in valid
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("topk", [1, 63, 64, 65, 192, 2048])
def test_slots_outside_the_cache_become_none_and_rows_are_padded(topk, device):
    slots = torch.randint(-5, 1000, (5, topk + 3), generator=torch.Generator().manual_seed(topk), dtype=INT32)[
        :, 2 : topk + 2
    ]
    out = torch.full((5, topk + 70), 777, dtype=INT32, device=device)
    ops.sanitize_slots(out[:, : topk + 64], slots.to(device), 900)
    want = [[s if 0 <= s < 900 else -1 for s in row] + [-1] * 64 + [777] * 6 for row in slots.tolist()]
    assert out.tolist() == want


@pytest.mark.parametrize("device", DEVICES)
def test_slots_may_be_sanitised_in_place(device):
    slots = ints([[3, 900, -7], [899, 2**31 - 1, 0]], device)
    ops.sanitize_slots(slots, slots, 900)
    assert slots.tolist() == [[3, -1, -1], [899, -1, 0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("topk", [1, 31, 256, 257, 2048, 2049, 5000])
def test_valid_slots_move_to_the_front_in_their_order_as_rows(topk, device):
    slots = torch.randint(-400, 1000, (6, topk), generator=torch.Generator().manual_seed(topk), dtype=INT32)
    slots[1], slots[2] = -1, 5
    out, counts = torch.full((6, topk + 9), 777, dtype=INT32, device=device), ints([777] * 6, device)
    ops.compact_slots(out, counts, slots.to(device), 900, page_size=64, rows_per_page=192)
    for row, got, count in zip(slots.tolist(), out.tolist(), counts.tolist(), strict=True):
        rows = [s // 64 * 192 + s % 64 for s in row if 0 <= s < 900]
        assert count == len(rows)
        assert got == rows + [0] * (topk + 9 - len(rows))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_no_slots_count_none(device):
    nothing, counts = torch.empty(3, 0, dtype=INT32, device=device), ints([7, 7, 7], device)
    ops.compact_slots(nothing, counts, nothing, 900)
    assert counts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_row_ids_beyond_int32_are_refused(device):
    table = ints([[0]], device)
    with pytest.raises(InvalidInput, match="largest row id"):
        ops.compact_slots(table.clone(), ints([0], device), table, 2**20, page_size=64, rows_per_page=2**18)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5)])
def test_partial_results_merge_to_the_softmax_over_all_keys(shape, dtype, device):
    parts, keys, width = 3, 7, 72
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(parts, *shape, keys, generator=generator, dtype=torch.float64) * 4
    values = torch.randn(parts, *shape, keys, width, generator=generator, dtype=torch.float64)
    logits[1, 0], logits[:, 1, 2] = -INF, -INF  # an empty part of request 0, and a row that no part sees
    outs = torch.einsum("...k,...kd->...d", logits.softmax(-1).nan_to_num(), values)
    lses = logits.logsumexp(-1)
    outs[lses.isinf()] = NAN
    everything = logits.movedim(0, -2).flatten(-2)
    want = torch.einsum("...k,...kd->...d", everything.softmax(-1).nan_to_num(), values.movedim(0, -3).flatten(-3, -2))
    got = ops.merge_partials(outs.to(dtype).to(device), lses.float().to(device))
    assert got.out.dtype == dtype
    assert torch.equal(got.lse.isinf().cpu(), everything.logsumexp(-1).isinf())
    torch.testing.assert_close(got.lse.cpu().double(), everything.logsumexp(-1), rtol=1e-5, atol=1e-5)
    # bf16: parts and result are each rounded to 2**-9 of values up to about 4
    torch.testing.assert_close(got.out.cpu().double(), want, rtol=0, atol=3e-2 if dtype == BF16 else 1e-5)
    assert (got.out[1, 2] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_one_part_merges_to_itself_and_views_are_taken(device):
    outs = torch.randn(3, 4, 2, 8, device=device).transpose(0, 2)[:1]
    lses = torch.randn(3, 4, 2, device=device).transpose(0, 2)[:1]
    got = ops.merge_partials(outs, lses)
    torch.testing.assert_close(got.out, outs[0])
    torch.testing.assert_close(got.lse, lses[0])
