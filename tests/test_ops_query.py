"""The ops that make a query, against a float64 triple loop and a gather from raw storage, on poisoned outputs."""

import math

import numpy as np
import pytest
import torch

from mla_backends import InvalidInput, cuda_ops, ops, torch_ops

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# One rounding to the output dtype (2**-9 and 2**-12 at most), relative to the norm; float32 sums of up to 512 add less.
TOLERANCE = {BF16: 6e-3, FP16: 1e-3, FP32: 1e-5}


def poisoned(*shape, dtype=BF16, device="cpu"):
    return torch.full(shape, float("nan"), dtype=FP32).to(dtype).to(device)


def normal(*shape, dtype=BF16, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def triple_loop(a, b):
    """a [G, M, K] @ b [G, K, N], one float64 sum an element."""
    a, b = a.cpu().double().numpy(), b.cpu().double().numpy()
    out = np.empty((a.shape[0], a.shape[1], b.shape[2]))
    for g in range(a.shape[0]):
        columns = np.ascontiguousarray(b[g].T)
        for m in range(a.shape[1]):
            for n in range(b.shape[2]):
                out[g, m, n] = (a[g, m] * columns[n]).sum()
    return out


def error(got, want):
    got = got.cpu().double().numpy()
    return np.linalg.norm(got - want) / np.linalg.norm(want)  # a NaN compares false with any tolerance


def stored(x):
    """The elements of x as integers, each fetched from the raw storage by its own index."""
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[x.element_size()]
    memory = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).cpu().numpy().view(kind)
    at = np.full(x.shape, x.storage_offset(), np.int64)
    for dim, stride in enumerate(x.stride()):
        shape = [1] * x.dim()
        shape[dim] = -1
        at = at + stride * np.arange(x.shape[dim]).reshape(shape)
    return memory[at]


def gathered(nope, rope):
    """[T, H, X + R] by indices alone."""
    heads = np.arange(nope.shape[1]) % rope.shape[1]
    return np.concatenate((stored(nope), stored(rope)[:, heads]), -1)


def layouts(kind, dtype, device):
    """out, a, b of a product, and the buffer that out lies in."""
    if kind == "contiguous":
        buffer = poisoned(16, 7, 512, dtype=dtype, device=device)
        return (
            buffer,
            normal(16, 7, 128, dtype=dtype, device=device),
            normal(16, 128, 512, dtype=dtype, device=device, seed=1),
            buffer,
        )
    if kind == "absorb":
        buffer = poisoned(7, 16, 576, dtype=dtype, device=device)
        a = normal(7, 16, 192, dtype=dtype, device=device)[..., :128].transpose(0, 1)
        return buffer[..., :512].transpose(0, 1), a, normal(16, 128, 512, dtype=dtype, device=device, seed=1), buffer
    buffer = poisoned(7, 16, 128, dtype=dtype, device=device)
    a = normal(7, 16, 512, dtype=dtype, device=device).transpose(0, 1)
    return buffer.transpose(0, 1), a, normal(16, 512, 128, dtype=dtype, device=device, seed=1), buffer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "absorb", "project"])
def test_a_product_is_the_triple_loops_in_every_layout(kind, dtype, device):
    out, a, b, _ = layouts(kind, dtype, device)
    ops.batched_matmul(out, a, b)
    assert error(out, triple_loop(a, b)) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_into_a_view_leaves_the_rest_of_the_buffer(device):
    out, a, b, buffer = layouts("absorb", BF16, device)
    ops.batched_matmul(out, a, b)
    assert buffer[..., 512:].isnan().all()
    assert not buffer[..., :512].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_of_a_view_of_a_parameter_needs_no_gradient(device):
    out, a, b, _ = layouts("absorb", BF16, device)
    ops.batched_matmul(out, a, torch.nn.Parameter(b))
    assert not out.requires_grad
    assert error(out, triple_loop(a, b)) < TOLERANCE[BF16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("empty", [(0, 3, 8, 8), (2, 0, 8, 8), (2, 3, 8, 0)])
def test_an_empty_product_is_no_launch(empty, device):
    g, m, k, n = empty
    ops.batched_matmul(*(x.to(device) for x in (poisoned(g, m, n), normal(g, m, k), normal(g, k, n))))


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_over_nothing_is_zero(device):
    out = poisoned(2, 3, 8, device=device)
    ops.batched_matmul(out, normal(2, 3, 0, device=device), normal(2, 0, 8, device=device))
    assert (out == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda o, a, b: (o, a[..., :64], b), "inner dimension"),
        (lambda o, a, b: (o, a[:8], b), "batch dimension"),
        (lambda o, a, b: (o[..., :256], a, b), "out is"),
        (lambda o, a, b: (o, a.half(), b), "dtype"),
        (lambda o, a, b: (o.float(), a, b), "dtype"),
        (lambda o, a, b: (o, a.double(), b.double()), "dtype"),
        (lambda o, a, b: (o, a, b.transpose(1, 2).contiguous().transpose(1, 2)), r"last stride of b .* b\.contiguous"),
        (lambda o, a, b: (o[0], a[0], b[0]), r"\[G, M, N\]"),
    ],
)
def test_operands_that_do_not_fit_are_named(wrong, says, device):
    out, a, b, _ = layouts("contiguous", BF16, device)
    with pytest.raises(InvalidInput, match=says):
        ops.batched_matmul(*wrong(out, a, b))


@CUDA
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17, 33, 200])
@pytest.mark.parametrize("inner", [128, 512])
def test_both_absorption_shapes_are_right_and_bit_equal_over_repeats(inner, tokens, heads):
    columns = 640 - inner
    a = normal(tokens, heads, inner, device="cuda").transpose(0, 1)
    b = normal(heads, inner, columns, device="cuda", seed=1)
    runs = [poisoned(tokens, heads, columns, device="cuda").transpose(0, 1) for _ in range(5)]
    for out in runs:
        ops.batched_matmul(out, a, b)
    want = torch.einsum("hti,hic->htc", a.double(), b.double())
    assert ((runs[0].double() - want).norm() / want.norm()).item() < TOLERANCE[BF16]
    assert all(torch.equal(out, runs[0]) for out in runs)


def query_of(tokens, heads, padded, dtype, device, *, nope=128, rank=512, rope=64):
    """A poisoned query buffer, its two views, and strided q_nope and q_pe of one projection."""
    projected = normal(tokens, heads, nope + rope, dtype=dtype, device=device)
    buffer = poisoned(tokens, padded, rank + rope, dtype=dtype, device=device)
    w_uk = normal(heads, nope, rank, dtype=dtype, device=device, seed=1)
    return buffer, buffer[..., :rank], buffer[..., rank:], projected[..., :nope], projected[..., nope:], w_uk


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "padded"), [(1, 16, 16), (5, 10, 16), (16, 4, 64), (17, 3, 3), (40, 2, 4), (70, 2, 4)]
)
def test_absorption_writes_its_heads_and_nothing_else(tokens, heads, padded, dtype, device):
    buffer, latent, rope, q_nope, q_pe, w_uk = query_of(tokens, heads, padded, dtype, device)
    ops.absorb_query(latent, rope, q_nope, q_pe, w_uk)
    want = triple_loop(q_nope.transpose(0, 1), w_uk).transpose(1, 0, 2)
    assert error(buffer[:, :heads, :512], want) < TOLERANCE[dtype]
    assert torch.equal(buffer[:, :heads, 512:], q_pe)
    assert buffer[:, heads:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_absorption_into_two_tensors_from_transposed_and_unaligned_queries(device):
    w_uk = normal(3, 128, 512, device=device, seed=1)
    q_nope = normal(3, 5, 128, device=device).transpose(0, 1)
    wide = normal(5, 3, 67, device=device, seed=2)
    for q_pe in (wide[..., :64], wide[..., 3:]):
        latent, rope = poisoned(5, 3, 512, device=device), poisoned(5, 3, 64, device=device)
        ops.absorb_query(latent, rope, q_nope, q_pe, w_uk)
        assert error(latent, triple_loop(q_nope.transpose(0, 1), w_uk).transpose(1, 0, 2)) < TOLERANCE[BF16]
        assert torch.equal(rope, q_pe)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", [(128, 512, 0), (16, 24, 8), (192, 512, 64)])
def test_absorption_of_other_widths_and_without_rope(widths, device):
    nope, rank, rope_width = widths
    _, latent, rope, q_nope, q_pe, w_uk = query_of(3, 5, 5, BF16, device, nope=nope, rank=rank, rope=rope_width)
    ops.absorb_query(latent, rope, q_nope, q_pe, w_uk)
    assert error(latent, triple_loop(q_nope.transpose(0, 1), w_uk).transpose(1, 0, 2)) < TOLERANCE[BF16]
    assert torch.equal(rope, q_pe)


@CUDA
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("tokens", [1, 3, cuda_ops.FEW_TOKENS, cuda_ops.FEW_TOKENS + 1, 300])
def test_absorption_is_bit_equal_over_repeats_on_both_sides_of_the_crossover(tokens, heads):
    runs = []
    for _ in range(4):
        buffer, latent, rope, q_nope, q_pe, w_uk = query_of(tokens, heads, heads, BF16, "cuda")
        ops.absorb_query(latent, rope, q_nope, q_pe, w_uk)
        runs.append(buffer)
    want = torch.einsum("thn,hnl->thl", q_nope.double(), w_uk.double())
    assert ((runs[0][..., :512].double() - want).norm() / want.norm()).item() < TOLERANCE[BF16]
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"w_uk": lambda x: x[:, :64]}, "w_uk"),
        ({"q_pe": lambda x: x[:, :2]}, "q_pe"),
        ({"q_pe": lambda x: x.half()}, "dtype of q_nope"),
        ({"latent": lambda x: x[:, :2], "rope": lambda x: x[:, :2]}, "at least 3 heads"),
        ({"latent": lambda x: x.float(), "rope": lambda x: x.float()}, "dtype of latent"),
        (
            {"latent": lambda x: x.to(torch.float8_e4m3fn), "rope": lambda x: x.to(torch.float8_e4m3fn)},
            "without a scale",
        ),
        ({"scale": lambda _: torch.ones(1)}, "with a scale"),
        ({"q_nope": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}, "last stride of q_nope"),
        ({"latent": lambda x: x[0]}, r"\[T, H, L\]"),
    ],
)
def test_a_query_that_does_not_fit_is_refused_with_its_name(change, says, device):
    _, latent, rope, q_nope, q_pe, w_uk = query_of(4, 3, 4, BF16, device)
    given = {"latent": latent, "rope": rope, "q_nope": q_nope, "q_pe": q_pe, "w_uk": w_uk, "scale": None}
    with pytest.raises(InvalidInput, match=says):
        ops.absorb_query(**{name: change.get(name, lambda x: x)(x) for name, x in given.items()})


def concat_case(kind, device):
    """nope, rope, and a view of a poisoned buffer for out."""
    if kind == "contiguous":
        return (
            normal(16, 128, 512, device=device),
            normal(16, 128, 64, device=device, seed=1),
            poisoned(16, 128, 576, device=device),
        )
    if kind == "transposed nope":
        nope = normal(16, 9, 512, device=device).transpose(0, 1)
        return nope, normal(9, 16, 192, device=device, seed=1)[..., 128:], poisoned(9, 16, 576, device=device)
    if kind == "broadcast":
        return (
            normal(11, 16, 128, device=device),
            normal(11, 1, 64, device=device, seed=1),
            poisoned(11, 16, 192, device=device),
        )
    if kind == "unaligned":
        nope, rope = normal(5, 6, 515, device=device), normal(5, 6, 65, device=device, seed=1)
        return nope[..., 3:], rope[..., 1:], poisoned(5, 6, 577, device=device)[..., 1:]
    if kind == "aligned by 4":
        return (
            normal(5, 6, 514, device=device)[..., 2:],
            normal(5, 6, 64, device=device, seed=1),
            poisoned(5, 6, 578, device=device)[..., :576],
        )
    if kind == "odd widths":
        return normal(3, 5, 7, device=device), normal(3, 5, 3, device=device, seed=1), poisoned(3, 5, 10, device=device)
    if kind == "wide":
        return (
            normal(2, 3, 2048, device=device),
            normal(2, 3, 64, device=device, seed=1),
            poisoned(2, 3, 2112, device=device),
        )
    if kind == "padded heads":
        return (
            normal(4, 10, 512, device=device),
            normal(4, 10, 64, device=device, seed=1),
            poisoned(4, 16, 576, device=device)[:, :10],
        )
    dtype = {"fp32": FP32, "e4m3": torch.float8_e4m3fn}[kind]
    return (
        x.to(dtype)
        for x in (normal(3, 5, 512, device=device), normal(3, 5, 64, device=device), poisoned(3, 5, 576, device=device))
    )


KINDS = [
    "contiguous",
    "transposed nope",
    "broadcast",
    "unaligned",
    "aligned by 4",
    "odd widths",
    "wide",
    "padded heads",
    "fp32",
    "e4m3",
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_concatenation_is_a_gather_to_the_bit(kind, device):
    nope, rope, out = concat_case(kind, device)
    ops.concat_nope_rope(out, nope, rope)
    assert np.array_equal(stored(out), gathered(nope, rope))


@CUDA
@pytest.mark.parametrize("kind", KINDS)
def test_concatenation_on_cuda_is_the_torch_forms_to_the_byte(kind):
    nope, rope, out = concat_case(kind, "cuda")
    same = out.clone()
    ops.concat_nope_rope(out, nope, rope)
    torch_ops.concat_nope_rope(same, nope, rope)
    assert torch.equal(out.view(torch.uint8), same.view(torch.uint8))


@CUDA
def test_an_output_past_any_l2_is_concatenated_right():
    tokens, heads = 2050, 60  # 142 MB; the last group of eight heads is half empty
    nope = normal(heads, tokens, 512, device="cuda").transpose(0, 1)
    rope = normal(tokens, heads, 192, device="cuda", seed=1)[..., 128:]
    buffer = poisoned(tokens, heads + 1, 576, device="cuda")
    ops.concat_nope_rope(buffer[:, :heads], nope, rope)
    assert torch.equal(buffer[:, :heads], torch.cat((nope, rope), -1))
    assert buffer[:, heads:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_concatenation_into_a_slice_leaves_its_neighbours(device):
    buffer = poisoned(4, 16, 584, device=device)
    ops.concat_nope_rope(buffer[:, :10, :576], normal(4, 10, 512, device=device), normal(4, 10, 64, device=device))
    assert buffer[:, 10:].isnan().all()
    assert buffer[..., 576:].isnan().all()
    assert not buffer[:, :10, :576].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 4, 8, 8), (3, 0, 8, 8)])
def test_an_empty_concatenation_is_no_launch(shape, device):
    tokens, heads, width, rope = shape
    ops.concat_nope_rope(
        poisoned(tokens, heads, width + rope), normal(tokens, heads, width), normal(tokens, heads, rope)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda o, n, r: (o, n, r[:2]), "rope is"),
        (lambda o, n, r: (o, n, r[:, :2]), "rope is"),
        (lambda o, n, r: (o[..., :64], n, r), "out is"),
        (lambda o, n, r: (o, n.half(), r), "dtype"),
        (lambda o, n, r: (o, n.transpose(1, 2).contiguous().transpose(1, 2), r), "last stride of nope"),
        (lambda o, n, r: (o, n.flatten(0, 1), r), r"\[T, H, X"),
    ],
)
def test_a_concatenation_that_does_not_fit_is_refused(wrong, says, device):
    with pytest.raises(InvalidInput, match=says):
        ops.concat_nope_rope(*(x.to(device) for x in wrong(poisoned(3, 4, 72), normal(3, 4, 64), normal(3, 4, 8))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_a_rope_tail_is_a_copy_of_its_heads(offset, device):
    buffer = poisoned(6, 16, 577, device=device)
    q_pe = normal(6, 10, 192, device=device)[..., 128:]
    ops.rope_tail(buffer[..., 512 + offset : 576 + offset], q_pe)
    assert torch.equal(buffer[:, :10, 512 + offset : 576 + offset], q_pe)
    assert math.isnan(buffer[0, 0, 511].item())
    assert buffer[:, 10:].isnan().all()


@CUDA
def test_offsets_past_two_to_the_31_elements_are_right_in_concatenation():
    far = 2**31 + 4096
    memory = torch.empty(far + 4096, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    out = memory.as_strided((2, 1, 576), (far, 576, 1))
    nope, rope = (normal(2, 1, width, device="cuda").to(torch.float8_e4m3fn) for width in (512, 64))
    ops.concat_nope_rope(out, nope, rope)
    assert torch.equal(memory[far : far + 576].view(torch.uint8), torch.cat((nope, rope), -1)[1, 0].view(torch.uint8))
    assert torch.equal(memory[:576].view(torch.uint8), torch.cat((nope, rope), -1)[0, 0].view(torch.uint8))
