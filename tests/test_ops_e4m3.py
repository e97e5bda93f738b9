"""Queries in e4m3: their bytes, their measured scale, and absorption straight into them."""

import math

import numpy as np
import pytest
import torch

from mla_backends import InvalidInput, cuda_ops, ops

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
E4M3 = torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
EVERY_CODE = np.array(
    [
        math.copysign((m if e == 0 else 8 + m) * 2.0 ** (max(e, 1) - 10), s)
        for s in (1, -1)
        for e in range(16)
        for m in range(8 if e < 15 else 7)
    ]
)


def numbers(x):
    return x.float().cpu().double().numpy()


def check_nearest(stored, exact, slack=0.0):
    """Each stored value is no further from the exact one than any e4m3 is, but for its `slack`."""
    got, exact = numbers(stored).ravel(), np.clip(exact, -448, 448).ravel()
    least = np.abs(exact[:, None] - EVERY_CODE).min(1)
    assert (np.abs(got - exact) <= least + np.ravel(slack) + 1e-9).all()


@pytest.mark.parametrize("device", DEVICES)
@DTYPES
@pytest.mark.parametrize("width", [576, 64, 37])
@pytest.mark.parametrize("scale", [1.0, 0.013])
def test_a_query_is_quantised_to_the_nearest_e4m3_of_its_quotient(scale, width, dtype, device):
    query = (
        (torch.randn(10, 6, width + 8, generator=torch.Generator().manual_seed(3)) * 3)
        .to(dtype)
        .to(device)[..., :width]
        .transpose(0, 1)
    )
    buffer = torch.full((6, 16, width + 8), 7.0, device=device).to(E4M3)
    ops.quantize_query(buffer[:, :10, :width], query, torch.tensor([scale], device=device))
    check_nearest(buffer[:, :10, :width], numbers(query) / np.float32(scale))
    assert (buffer[:, 10:].float() == 7).all()
    assert (buffer[..., width:].float() == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@DTYPES
def test_a_quantised_query_saturates_and_keeps_nan(dtype, device):
    query = torch.tensor([500.0, -3e4, math.inf, math.nan, 0.0, -0.0, 1.0, 2.0], device=device).to(dtype).view(1, 1, 8)
    out = torch.empty(1, 1, 8, dtype=E4M3, device=device)
    ops.quantize_query(out, query, torch.ones(1, device=device))
    assert out.view(torch.uint8).flatten().tolist() == [0x7E, 0xFE, 0x7E, 0x7F, 0x00, 0x80, 0x38, 0x40]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tokens", "heads", "padded"), [(1, 16, 16), (5, 10, 64), (cuda_ops.FEW_TOKENS_E4M3 + 4, 3, 4)]
)
def test_absorption_goes_straight_into_an_e4m3_buffer(tokens, heads, padded, device):
    generator = torch.Generator().manual_seed(tokens)
    projected = torch.randn(tokens, heads, 192, generator=generator).to(BF16).to(device)
    q_nope, q_pe = projected[..., :128], projected[..., 128:]
    w_uk = torch.randn(heads, 128, 512, generator=generator).to(BF16).to(device)
    exact = np.einsum("thn,hnl->thl", numbers(q_nope), numbers(w_uk))
    scale = np.float32(np.abs(exact).max() / 300)  # a few values saturate under a smaller scale; none is tested here
    buffer = torch.full((tokens, padded, 576), 7.0, device=device).to(E4M3)
    ops.absorb_query(buffer[..., :512], buffer[..., 512:], q_nope, q_pe, w_uk, torch.tensor([scale], device=device))
    # What is rounded to e4m3 is off by at most 2**-24 of the summed magnitudes a step of the sum, and at many tokens on
    # CUDA, where cuBLAS rounds it to bf16, by 2**-8 of itself; a distance from two e4m3 changes by that once for each.
    magnitudes = np.einsum("thn,hnl->thl", np.abs(numbers(q_nope)), np.abs(numbers(w_uk)))
    off = 128 * 2.0**-24 * magnitudes
    if device == "cuda" and tokens > cuda_ops.FEW_TOKENS_E4M3:
        off = off + 2.0**-8 * np.abs(exact)
    check_nearest(buffer[:, :heads, :512], exact / scale, slack=2 * off / scale)
    check_nearest(buffer[:, :heads, 512:], numbers(q_pe) / scale)
    assert (buffer[:, heads:].float() == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [2, cuda_ops.FEW_TOKENS_E4M3 + 1])
def test_an_absorbed_e4m3_query_saturates(tokens, device):
    latent, rope = (torch.zeros(tokens, 1, width, device=device).to(E4M3) for width in (512, 64))
    q_nope, q_pe = (torch.full((tokens, 1, width), 8.0, dtype=BF16, device=device) for width in (128, 64))
    w_uk = torch.full((1, 128, 512), -1.0, dtype=BF16, device=device)
    ops.absorb_query(latent, rope, q_nope, q_pe, w_uk, torch.tensor([0.01], device=device))
    assert (latent.float() == -448).all()
    assert (rope.float() == 448).all()


@pytest.mark.parametrize("device", DEVICES)
@DTYPES
@pytest.mark.parametrize("shape", [(6, 16, 512, 64), (6, 5, 24, 8), (6, 3, 10, 3), (300, 16, 512, 64)])
def test_a_measured_scale_is_the_largest_finite_value_of_live_rows(shape, dtype, device):
    tokens, heads, rank, rope_width = shape
    q = torch.randn(tokens, heads, rank + rope_width, generator=torch.Generator().manual_seed(1)).to(dtype)
    q[0, 0, 0], q[1, 1, -1] = math.nan, 1000.0  # request 0 has no keys: neither counts
    q[2, 0, 1], q[3, 1, 2], q[4, 2, -1] = math.inf, math.nan, -9.0
    lengths = [0, *[5] * (tokens // 2 - 1)]
    out = torch.full((1,), math.nan, device=device)
    on = q.to(device)
    ops.query_scale(out, on[..., :rank], on[..., rank:], torch.tensor(lengths, dtype=INT32, device=device), None, 2)
    assert out.item() == np.float32(9.0) / np.float32(448)


@pytest.mark.parametrize("device", DEVICES)
def test_a_measured_scale_of_ragged_rows_leaves_out_dead_requests_and_tokens_past_the_end(device):
    q = torch.ones(9, 2, 72, dtype=BF16)
    q[0], q[3], q[5], q[8] = 2.0, 50.0, -4.0, 70.0
    lengths, cu = ([1, 0, 3], [0, 2, 4, 7])  # tokens 2 and 3 have no keys, 7 and 8 no request
    out, on = torch.full((1,), math.nan, device=device), q.to(device)
    ops.query_scale(
        out,
        on[..., :64],
        on[..., 64:],
        torch.tensor(lengths, dtype=INT32, device=device),
        torch.tensor(cu, dtype=INT32, device=device),
        3,
    )
    assert out.item() == np.float32(4.0) / np.float32(448)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 2])
def test_a_measured_scale_is_never_zero(tokens, device):
    out, q = torch.zeros(1, device=device), torch.zeros(tokens, 4, 72, dtype=BF16, device=device)
    ops.query_scale(out, q[..., :64], q[..., 64:], torch.zeros(tokens, dtype=INT32, device=device), None, 1)
    assert out.item() > 0
    stored = torch.empty(tokens, 4, 72, device=device).to(E4M3)
    ops.quantize_query(stored, q, out)
    assert (stored.float() == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"out": torch.empty(2, 3, 8)}, "dtype of out"),
        ({"query": torch.empty(2, 3, 9)}, "out and query"),
        ({"query": torch.empty(2, 3, 8, dtype=torch.float64)}, "dtype of out and query"),
        ({"scale": torch.ones(2)}, "scale"),
        ({"scale": torch.ones(1, dtype=BF16)}, "scale"),
    ],
)
def test_a_quantisation_that_does_not_fit_is_refused(change, says, device):
    given = {"out": torch.empty(2, 3, 8).to(E4M3), "query": torch.empty(2, 3, 8), "scale": torch.ones(1)}
    with pytest.raises(InvalidInput, match=says):
        ops.quantize_query(**{name: x.to(device) for name, x in (given | change).items()})
