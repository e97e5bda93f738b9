"""Cache writes, byte for byte, against rows that numpy puts together value by value and an e4m3 found in a table.

What a value becomes is worked out here from the format's definition: nothing is shared with the ops.
"""

import math

import numpy as np
import pytest
import torch

from mla_backends import InvalidInput, ops, torch_ops

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
POISON = 0xA5


def e4m3_value(code):
    """Of a byte with a sign, 4 exponent bits (bias 7) and 3 mantissa bits; 0x7f and 0xff are NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 0x80 else magnitude


MAGNITUDES = np.array([e4m3_value(code) for code in range(0x7F)])  # ascending, 448 last


def e4m3_bytes(x):
    """The nearest code of each float32, ties to the even code, saturated; NaN is 0x7f."""
    x = np.asarray(x, np.float32)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 448.0)
    above = np.searchsorted(MAGNITUDES, magnitude).clip(0, len(MAGNITUDES) - 1)  # the first code at or above
    below = np.where(MAGNITUDES[above] == magnitude, above, np.maximum(above - 1, 0))
    up, down = MAGNITUDES[above] - magnitude, magnitude - MAGNITUDES[below]
    code = np.where(up < down, above, np.where(down < up, below, np.where(above % 2 == 0, above, below)))
    code = np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0))
    return code.astype(np.uint8)


def power_of_two_at_or_above(x):
    mantissa, exponent = math.frexp(float(np.float32(x)))
    return np.float32(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))


def numbers(x):
    return x.detach().cpu().float().numpy()


def finite_amax(x):
    return np.float32(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def expected_row(kv_c, k_pe, fmt, kv_scale=1.0):
    """The bytes of one token's row."""
    if fmt in ("bf16", "fp16", "fp32"):
        return torch.cat((kv_c, k_pe)).cpu().contiguous().view(torch.uint8).numpy()
    latent, rope = numbers(kv_c), numbers(k_pe)
    if fmt == "fp8":
        return e4m3_bytes(np.concatenate((latent, rope)) / np.float32(kv_scale))
    scales = [
        power_of_two_at_or_above(max(finite_amax(tile) / np.float32(448), np.float32(1e-4)))
        for tile in latent.reshape(-1, 128)
    ]
    parts = [e4m3_bytes(tile / scale) for tile, scale in zip(latent.reshape(-1, 128), scales, strict=True)]
    parts.append(np.array(scales, np.float32).view(np.uint8))
    parts.append(k_pe.cpu().to(BF16).contiguous().view(torch.uint8).numpy())
    return np.concatenate(parts)


LAYOUT = {
    "bf16": (BF16, 576),
    "fp16": (FP16, 576),
    "fp32": (FP32, 576),
    "fp8": (torch.uint8, 576),
    "fp8_ds_mla": (torch.uint8, 656),
}
CASES = [("bf16", BF16), ("fp16", FP16), ("fp32", FP32)] + [
    (f, d) for f in ("fp8", "fp8_ds_mla") for d in (BF16, FP16, FP32)
]
WRITES = pytest.mark.parametrize(("fmt", "dtype"), CASES, ids=lambda x: str(x).removeprefix("torch."))


def slot_buffer(fmt, pages, page_size, device, layers=3):
    """Poisoned bytes of a block-major slot, and its middle layer as the cache sees it."""
    dtype, row = LAYOUT[fmt]
    itemsize = torch.empty(0, dtype=dtype).element_size()
    memory = torch.full((pages, layers, page_size, row * itemsize), POISON, dtype=torch.uint8, device=device)
    return memory, memory.view(dtype)[:, layers // 2]


def rows_of(tokens, dtype, device, seed=0, *, rank=512, rope=64):
    """kv_c and k_pe of widely spread magnitudes, as slices of a wider projection (row stride 640)."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, rank + rope + 64, generator=generator)
    wide *= torch.exp2(
        torch.randint(-12, 9, (tokens, (rank + rope + 64) // 64), generator=generator)
    ).repeat_interleave(64, 1)
    wide = wide.to(dtype).to(device)
    return wide[:, :rank], wide[:, rank : rank + rope]


@pytest.mark.parametrize("device", DEVICES)
@WRITES
def test_every_byte_of_the_middle_layer_is_as_worked_out_and_the_rest_of_the_slot_is_untouched(fmt, dtype, device):
    memory, layer = slot_buffer(fmt, 5, 64, device)
    kv_c, k_pe = rows_of(203, dtype, device)
    slots = torch.randperm(5 * 64, generator=torch.Generator().manual_seed(3))[:200]
    want = memory.cpu().numpy().copy()
    for token, slot in enumerate(slots.tolist()):
        want[slot // 64, 1, slot % 64] = expected_row(kv_c[token], k_pe[token], fmt)
    ops.write_cache(layer, kv_c, k_pe, slots.to(device), fmt)
    assert np.array_equal(memory.cpu().numpy(), want)


@pytest.mark.parametrize("device", DEVICES)
@WRITES
def test_slots_outside_the_cache_are_skipped(fmt, dtype, device):
    memory, layer = slot_buffer(fmt, 2, 8, device)
    kv_c, k_pe = rows_of(7, dtype, device)
    slots = [-1, 15, 16, -(2**40), 0, 2**40, 5]
    want = memory.cpu().numpy().copy()
    for token, slot in ((1, 15), (4, 0), (6, 5)):
        want[slot // 8, 1, slot % 8] = expected_row(kv_c[token], k_pe[token], fmt)
    ops.write_cache(layer, kv_c, k_pe, torch.tensor(slots, device=device), fmt)
    assert np.array_equal(memory.cpu().numpy(), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [[-1, -5, 16], []], ids=["all outside", "no tokens"])
@WRITES
def test_with_nothing_to_write_nothing_is_written(fmt, dtype, slots, device):
    memory, layer = slot_buffer(fmt, 2, 8, device)
    kv_c, k_pe = rows_of(4, dtype, device)
    ops.write_cache(layer, kv_c, k_pe, torch.tensor(slots, dtype=torch.int64, device=device), fmt)
    assert (memory == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@WRITES
def test_rows_at_unaligned_addresses_are_written_right(fmt, dtype, device):
    row_dtype, row = LAYOUT[fmt]
    itemsize = torch.empty(0, dtype=row_dtype).element_size()
    pitch = row + 3
    memory = torch.full(((1 + 2 * 8 * pitch) * itemsize,), POISON, dtype=torch.uint8, device=device)
    layer = memory.view(row_dtype).as_strided((2, 8, row), (8 * pitch, pitch, 1), 1)
    wide = torch.cat(rows_of(5, dtype, device), 1)
    kv_c, k_pe = torch.nn.functional.pad(wide.float(), (1, 2)).to(dtype)[:, 1:513], wide[:, 512:]
    slots = torch.tensor([3, 12, 0, 9, 15], device=device)
    ops.write_cache(layer, kv_c, k_pe, slots, fmt)
    rows = memory.cpu().numpy()[itemsize:].reshape(16, -1)
    for token, slot in enumerate(slots.tolist()):
        want = expected_row(kv_c[token], k_pe[token], fmt)
        assert np.array_equal(rows[slot, : len(want)], want)
        assert (rows[slot, len(want) :] == POISON).all()
    untouched = sorted(set(range(16)) - set(slots.tolist()))
    assert (rows[untouched] == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", [(128, 64), (96, 0), (20, 6)])
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_other_widths_are_written_right(fmt, widths, device):
    rank, rope = widths
    kv_c, k_pe = rows_of(6, BF16, device, rank=128, rope=64)
    kv_c, k_pe = kv_c[:, :rank], k_pe[:, :rope]
    data = torch.full((3, 4, (rank + rope) * (2 if fmt == "bf16" else 1)), POISON, dtype=torch.uint8, device=device)
    slots = torch.tensor([11, 2, 7, 0, 5, 6], device=device)
    ops.write_cache(data.view(BF16) if fmt == "bf16" else data, kv_c, k_pe, slots, fmt)
    for token, slot in enumerate(slots.tolist()):
        assert np.array_equal(data[slot // 4, slot % 4].cpu().numpy(), expected_row(kv_c[token], k_pe[token], fmt))


SPECIAL = [
    0.0,
    -0.0,
    448.0,
    449.0,
    464.0,
    465.0,
    -448.0,
    -1e30,
    1e30,
    math.inf,
    -math.inf,
    math.nan,
    2.0**-9,
    2.0**-10,
    3 * 2.0**-10,
    2.0**-11,
    1.0625,
    1.1875,
    -0.4375,
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [None, 1.0, 0.37, 3.0, 2.5e-3])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_fp8_is_divided_by_kv_scale_rounded_to_even_and_saturated(given, as_tensor, device):
    if given is None and as_tensor:
        given, as_tensor = 1.7, True
    kv_c, k_pe = rows_of(4, FP32, device, seed=5)
    kv_c[0, : len(SPECIAL)] = torch.tensor(SPECIAL, device=device)
    kv_c[1, : len(SPECIAL)] = torch.tensor(SPECIAL, device=device) * float(given or 1)
    scale = torch.tensor([given], device=device) if as_tensor else given
    data = torch.zeros(1, 4, 576, dtype=torch.uint8, device=device)
    ops.write_cache(data.view(E4M3), kv_c, k_pe, torch.arange(4, device=device), "fp8", scale)
    for token in range(4):
        assert np.array_equal(data[0, token].cpu().numpy(), expected_row(kv_c[token], k_pe[token], "fp8", given or 1.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.0371, -3.3, 2.0**-126, 1e-41, 3e38, math.inf, 0.0, math.nan])
def test_quotients_that_lie_on_a_boundary_of_e4m3_or_next_to_it_are_rounded_as_ieee_division_rounds_them(scale, device):
    between = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    quotients = np.concatenate((MAGNITUDES, between, [464.0, 480.0, 1023.9, 1e9])).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        near = (quotients * np.float32(scale)).view(np.uint32)[:, None] + np.array([-2, -1, 0, 1, 2]).astype(np.uint32)
        values = np.concatenate((near.view(np.float32).ravel(), [0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf]))
        values = np.concatenate((values, -values)).astype(np.float32)
        rows = np.resize(values, (-(-len(values) // 576), 576))
        want = e4m3_bytes(rows / np.float32(scale))
    x = torch.from_numpy(rows).to(device)
    data = torch.zeros(1, len(rows), 576, dtype=torch.uint8, device=device)
    ops.write_cache(
        data,
        x[:, :512],
        x[:, 512:],
        torch.arange(len(rows), device=device),
        "fp8",
        torch.tensor([scale], device=device),
    )
    assert np.array_equal(data[0].cpu().numpy(), want)


@pytest.mark.parametrize("device", DEVICES)
def test_an_fp8_write_saturates_at_448_and_keeps_nan(device):
    data = torch.zeros(1, 1, 576, dtype=E4M3, device=device)
    kv_c, k_pe = (
        torch.full((1, 512), 1e4, dtype=BF16, device=device),
        torch.full((1, 64), -1e4, dtype=BF16, device=device),
    )
    kv_c[0, 3] = math.nan
    ops.write_cache(data, kv_c, k_pe, torch.zeros(1, dtype=torch.int64, device=device), "fp8")
    values = data.float()[0, 0].cpu()
    assert values[3].isnan()
    assert (values[:3] == 448).all()
    assert (values[512:] == -448).all()


@pytest.mark.parametrize("device", DEVICES)
def test_row_scales_are_the_least_powers_of_two_that_hold_their_tile(device):
    amax = [3.0, 0.7, 5.3, 0.0]
    kv_c = torch.tensor(amax, dtype=BF16, device=device).repeat_interleave(128)[None]
    data = torch.zeros(1, 1, 656, dtype=torch.uint8, device=device)
    ops.write_cache(
        data,
        kv_c,
        torch.ones(1, 64, dtype=BF16, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        "fp8_ds_mla",
    )
    scales = data[0, 0, 512:528].clone().view(FP32).cpu().tolist()
    assert scales == [2.0**-7, 2.0**-9, 2.0**-6, 2.0**-13]  # 3/448 is above 2**-8; the last is the floor


@pytest.mark.parametrize("device", DEVICES)
def test_a_tile_with_nan_and_infinity_keeps_its_finite_values(device):
    kv_c, k_pe = rows_of(1, BF16, device)
    kv_c[0, 5], kv_c[0, 130], kv_c[0, 131] = math.nan, math.inf, -math.inf
    data = torch.zeros(1, 1, 656, dtype=torch.uint8, device=device)
    ops.write_cache(data, kv_c, k_pe, torch.zeros(1, dtype=torch.int64, device=device), "fp8_ds_mla")
    assert np.array_equal(data[0, 0].cpu().numpy(), expected_row(kv_c[0], k_pe[0], "fp8_ds_mla"))
    assert data[0, 0, 5] == 0x7F
    assert data[0, 0, 130:132].tolist() == [0x7E, 0xFE]


@CUDA
@pytest.mark.parametrize("tokens", [1, 3, 64, 5000])
@WRITES
def test_writes_on_cuda_are_the_torch_forms_to_the_byte(fmt, dtype, tokens):
    kv_c, k_pe = rows_of(tokens, dtype, "cuda", seed=tokens)
    kv_c[::2, 7], kv_c[1::3, 200], k_pe[::5, 1] = math.nan, math.inf, -0.0
    slots = torch.randperm(tokens + 100, device="cuda")[:tokens]
    slots[::7] = -1
    scale = torch.tensor([0.731], device="cuda") if fmt == "fp8" else None
    page_size = 64
    pages = (tokens + 100) // page_size + 1
    got, want = slot_buffer(fmt, pages, page_size, "cuda"), slot_buffer(fmt, pages, page_size, "cuda")
    cpu = slot_buffer(fmt, pages, page_size, "cpu")
    ops.write_cache(got[1], kv_c, k_pe, slots, fmt, scale)
    torch_ops.write_cache(want[1], kv_c, k_pe, slots, fmt, scale, 1.0)
    torch_ops.write_cache(cpu[1], kv_c.cpu(), k_pe.cpu(), slots.cpu(), fmt, None if scale is None else scale.cpu(), 1.0)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[0].cpu(), cpu[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", [0, 3], ids=["aligned", "unaligned"])
@WRITES
def test_the_fused_write_is_the_write_and_the_rope_tail(fmt, dtype, padding, device):
    kv_c, k_pe = rows_of(9, dtype, device)
    slots = torch.tensor([4, -1, 30, 7, 0, 99, 12, 13, 31], device=device)
    q_pe = torch.randn(9, 10, 192, device=device).to(dtype)[..., 128:]
    (memory, layer), (want, want_layer) = slot_buffer(fmt, 4, 8, device), slot_buffer(fmt, 4, 8, device)
    query = torch.full((9, 16, 576 + padding), math.nan, device=device).to(dtype)
    ops.write_cache_and_rope(query[..., 512 + padding :], q_pe, layer, kv_c, k_pe, slots, fmt)
    ops.write_cache(want_layer, kv_c, k_pe, slots, fmt)
    assert torch.equal(memory, want)
    assert torch.equal(query[:, :10, 512 + padding :], q_pe)
    assert query[:, 10:].isnan().all()
    assert query[..., : 512 + padding].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_fused_write_with_no_tokens_writes_the_rope_alone(device):
    memory, layer = slot_buffer("bf16", 2, 8, device)
    kv_c, k_pe = rows_of(0, BF16, device)
    q_pe, rope = torch.randn(3, 4, 64, device=device).to(BF16), torch.full((3, 4, 64), math.nan, device=device).to(BF16)
    ops.write_cache_and_rope(rope, q_pe, layer, kv_c, k_pe, torch.empty(0, dtype=torch.int64, device=device), "bf16")
    assert torch.equal(rope, q_pe)
    assert (memory == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_fused_write_without_heads_writes_the_cache_alone(device):
    (memory, layer), (want, want_layer) = slot_buffer("bf16", 2, 8, device), slot_buffer("bf16", 2, 8, device)
    kv_c, k_pe = rows_of(3, BF16, device)
    slots, nothing = torch.tensor([4, -1, 9], device=device), torch.empty(3, 0, 64, dtype=BF16, device=device)
    ops.write_cache_and_rope(nothing, nothing, layer, kv_c, k_pe, slots, "bf16")
    ops.write_cache(want_layer, kv_c, k_pe, slots, "bf16")
    assert torch.equal(memory, want)


def expected_indexer(k):
    """The 128 key bytes and the scale of one token."""
    values = numbers(k)
    scale = power_of_two_at_or_above(max(finite_amax(values), np.float32(1e-4)) / np.float32(448))
    return e4m3_bytes(values / scale), np.array([scale], np.float32).view(np.uint8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("page_size", [64, 1, 7])
def test_indexer_keys_and_scales_are_split_by_page_and_the_rest_of_the_slot_is_untouched(page_size, dtype, device):
    pages = 320 // page_size + 1
    memory = torch.full((pages, 3, page_size, 132), POISON, dtype=torch.uint8, device=device)
    k = rows_of(203, dtype, device, seed=1)[0][:, 64:192]
    k[3], k[4, 5], k[5, 0] = 0, math.nan, math.inf
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(2))[:200]
    slots[10], slots[11] = -1, pages * page_size
    want = memory.cpu().numpy().copy().reshape(pages, 3, -1)
    for token, slot in enumerate(slots.tolist()):
        if not 0 <= slot < pages * page_size:
            continue
        page, offset = divmod(slot, page_size)
        keys, scale = expected_indexer(k[token])
        want[page, 1, offset * 128 : offset * 128 + 128] = keys
        want[page, 1, page_size * 128 + offset * 4 : page_size * 128 + offset * 4 + 4] = scale
    ops.write_indexer_cache(memory[:, 1], k, slots.to(device))
    assert np.array_equal(memory.cpu().numpy().reshape(pages, 3, -1), want)


@CUDA
@pytest.mark.parametrize("tokens", [1, 17, 4096])
def test_indexer_writes_on_cuda_are_the_torch_forms_to_the_byte(tokens):
    k = rows_of(tokens, BF16, "cuda", seed=tokens)[0][:, :128]
    slots = torch.randperm(tokens + 64, device="cuda")[:tokens] - 3
    got, want = (torch.full((tokens // 64 + 1, 64, 132), POISON, dtype=torch.uint8, device="cuda") for _ in range(2))
    ops.write_indexer_cache(got, k, slots)
    torch_ops.write_indexer_cache(want, k, slots)
    assert torch.equal(got, want)


@CUDA
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp8_ds_mla"])
def test_offsets_past_two_to_the_31_elements_are_right_in_writes(fmt):
    row_dtype, row = LAYOUT[fmt]
    far = 2**31 + 65536
    memory = torch.empty(far + 8 * row, dtype=row_dtype, device="cuda")
    data = memory.as_strided((2, 8, row), (far, row, 1))
    kv_c, k_pe = rows_of(2, BF16, "cuda")
    ops.write_cache(data, kv_c, k_pe, torch.tensor([13, 5], device="cuda"), fmt)
    for token, at in ((0, far + 5 * row), (1, 5 * row)):
        stored = memory[at : at + row].view(torch.uint8).cpu().numpy()
        assert np.array_equal(stored, expected_row(kv_c[token], k_pe[token], fmt))


@CUDA
def test_offsets_past_two_to_the_31_bytes_are_right_in_indexer_writes():
    far = 2**31 + 65536
    memory = torch.empty(far + 8 * 132, dtype=torch.uint8, device="cuda")
    k = rows_of(1, BF16, "cuda")[0][:, :128]
    ops.write_indexer_cache(memory.as_strided((2, 8, 132), (far, 132, 1)), k, torch.tensor([13], device="cuda"))
    keys, scale = expected_indexer(k[0])
    assert np.array_equal(memory[far + 5 * 128 : far + 6 * 128].cpu().numpy(), keys)
    assert np.array_equal(memory[far + 8 * 128 + 20 : far + 8 * 128 + 24].cpu().numpy(), scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": lambda x: x[None]}, r"\[pages, page_size, row\]"),
        ({"data": lambda x: x[..., :512]}, "row of data is 512"),
        ({"data": lambda x: x.half()}, "dtype of data"),
        ({"kv_c": lambda x: x[:2]}, "kv_c is .* a row for each"),
        ({"kv_c": lambda x: x.half(), "k_pe": lambda x: x.half()}, "stores them unchanged"),
        ({"k_pe": lambda x: x.float()}, "one dtype"),
        ({"kv_c": lambda x: x.t().contiguous().t()}, "last stride of kv_c"),
        ({"slot_mapping": lambda x: x.int()}, "int64"),
        ({"slot_mapping": lambda x: x[None]}, "int64"),
        ({"format": lambda _: "fp9"}, "format"),
        ({"kv_scale": lambda _: 1.0}, "no scale of the whole cache"),
    ],
)
def test_a_write_that_does_not_fit_is_refused_with_its_name(change, says, device):
    kv_c, k_pe = rows_of(3, BF16, device)
    given = {
        "data": torch.zeros(2, 4, 576, dtype=BF16, device=device),
        "kv_c": kv_c,
        "k_pe": k_pe,
        "slot_mapping": torch.arange(3, device=device),
        "format": "bf16",
        "kv_scale": None,
    }
    with pytest.raises(InvalidInput, match=says):
        ops.write_cache(**{name: change.get(name, lambda x: x)(x) for name, x in given.items()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, torch.ones(2), torch.ones(1, dtype=torch.float64)])
def test_a_kv_scale_is_positive_and_finite_or_one_float32(scale, device):
    kv_c, k_pe = rows_of(1, BF16, device)
    data, slots = (
        torch.zeros(1, 4, 576, dtype=torch.uint8, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    with pytest.raises(InvalidInput, match="kv_scale"):
        ops.write_cache(data, kv_c, k_pe, slots, "fp8", scale.to(device) if isinstance(scale, torch.Tensor) else scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (torch.zeros(2, 4, 128, dtype=torch.uint8), "132"),
        (torch.zeros(2, 4, 132), "uint8"),
        (torch.zeros(2, 8, 132, dtype=torch.uint8)[:, ::2], "split by page"),
    ],
)
def test_an_indexer_cache_has_dense_pages_of_132_bytes_a_token(data, says, device):
    on = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=device)
    with pytest.raises(InvalidInput, match=says):
        ops.write_indexer_cache(
            on, torch.zeros(1, 128, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        )
