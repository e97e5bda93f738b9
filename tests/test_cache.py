"""Caches: which memory is taken, where each byte lies in it, and what is refused."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from mla_backends.cache import PagedCache
from mla_backends.errors import InvalidInput
from mla_backends.formats import FORMATS
from mla_backends.indexer import IndexerCache
from mla_backends.unified import UnifiedCache

FORMAT_NAMES = tuple(FORMATS)
ROW_BYTES = {"bf16": 1152, "fp16": 1152, "fp32": 2304, "fp8": 576, "fp8_ds_mla": 656}
DTYPES = {name: getattr(torch, FORMATS[name].dtypes[0]) for name in FORMAT_NAMES}
WIDTHS = {name: ROW_BYTES[name] // DTYPES[name].itemsize for name in FORMAT_NAMES}
PAGES, PAGE_SIZE = 5, 4


def tokens(count: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.randn(count, 576, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made[:, :512].clone(), made[:, 512:].clone()


def written(cache: PagedCache, seed: int = 0) -> PagedCache:
    """Every row of the cache, in shuffled slots."""
    slots = torch.randperm(cache.num_slots, generator=torch.Generator().manual_seed(seed))
    dtype = cache.dtype if cache.format in ("fp16", "fp32") else torch.bfloat16
    cache.write(*tokens(cache.num_slots, dtype=dtype, seed=seed), slots)
    return cache


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


# --- which memory is taken -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_a_row_has_the_bytes_of_its_format_and_starts_zero_and_aligned(format):
    cache = PagedCache.allocate(PAGES, PAGE_SIZE, format, "cpu")
    assert cache.data.shape == (PAGES, PAGE_SIZE, WIDTHS[format])
    assert cache.rows[0].nbytes == PAGE_SIZE * ROW_BYTES[format]
    assert cache.rows.dtype == cache.dtype == DTYPES[format]
    assert not bits(cache.data).any()
    assert cache.alignment == 16
    assert cache.packed_rows
    assert cache.page_stride_rows is None
    assert (cache.num_pages, cache.page_size, cache.num_slots) == (PAGES, PAGE_SIZE, PAGES * PAGE_SIZE)


def test_the_three_forms_of_data_are_the_same_rows_in_the_callers_memory():
    data = torch.randn(PAGES, PAGE_SIZE, 576).bfloat16()
    flat, after, before = (PagedCache(d, "bf16") for d in (data, data.unsqueeze(2), data.unsqueeze(1)))
    for cache in (flat, after, before):
        assert cache.facts == flat.facts
        assert hash(cache.facts) == hash(flat.facts)
        assert cache.rows.data_ptr() == cache.heads.data_ptr() == cache.latent.data_ptr() == data.data_ptr()
        assert cache.heads.shape == (PAGES, PAGE_SIZE, 1, 576)
        assert torch.equal(cache.rows, data)
        assert torch.equal(torch.cat((cache.latent, cache.rope), -1), data)
    assert after.data.shape == (PAGES, PAGE_SIZE, 1, 576)


def test_an_fp8_cache_of_bytes_is_read_as_e4m3_in_place():
    data = torch.zeros(PAGES, PAGE_SIZE, 576, dtype=torch.uint8)
    cache = PagedCache(data, "fp8")
    assert cache.data is data
    assert cache.rows.dtype == torch.float8_e4m3fn
    assert cache.rows.data_ptr() == data.data_ptr()
    assert cache.facts == PagedCache(data.view(torch.float8_e4m3fn), "fp8").facts._replace(alignment=cache.alignment)


def test_rows_that_mix_dtypes_have_no_latent_view():
    cache = PagedCache.allocate(PAGES, PAGE_SIZE, "fp8_ds_mla", "cpu")
    assert cache.latent is None
    assert cache.rope is None
    assert cache.scale is None


@pytest.mark.parametrize("layers", [1, 2, 61])
def test_a_layer_is_a_view_whose_page_stride_is_a_slot(layers):
    unified = UnifiedCache.allocate(3, layers, 2, "bf16", "cpu")
    for i in {0, layers // 2, layers - 1}:
        cache = unified.layer(i)
        assert cache.rows.data_ptr() == unified.data[:, i].data_ptr()
        assert cache.facts.page_stride == layers * 2 * 576
        assert cache.page_stride_rows == (None if layers == 1 else layers * 2)
        assert cache.packed_rows
        assert cache.alignment == 16
        assert cache.facts == unified.layer(0).facts


def test_a_layer_is_made_once_for_each_scale():
    unified = UnifiedCache.allocate(3, 4, 2, "fp8", "cpu")
    scale = torch.ones(1)
    for kv_scale in (None, 0.5, 2.0, scale):
        assert unified.layer(3, kv_scale=kv_scale) is unified.layer(3, kv_scale=kv_scale)
        assert unified.layer(-1, kv_scale=kv_scale) is unified.layer(3, kv_scale=kv_scale)
    assert unified.layer(3, kv_scale=0.5) is not unified.layer(3, kv_scale=2.0)
    assert unified.layer(3, kv_scale=scale).kv_scale is scale
    another = torch.full((1,), 2.0)
    assert unified.layer(3, kv_scale=another).kv_scale is another
    assert unified.layer(2) is not unified.layer(3)


def test_layers_do_not_collect_the_scale_tensors_of_every_step():
    unified = UnifiedCache.allocate(3, 2, 2, "fp8", "cpu")
    for _ in range(50):
        unified.layer(1, kv_scale=torch.ones(1))
    assert len(unified._layers) == 2
    assert len(unified._tensor_scaled) == 1


def test_a_bool_is_no_scale_even_where_it_equals_one_that_is_known():
    unified = UnifiedCache.allocate(3, 2, 2, "fp8", "cpu")
    unified.layer(0, kv_scale=1.0)
    with pytest.raises(InvalidInput, match="kv_scale is True"):
        unified.layer(0, kv_scale=True)


def test_a_compiled_function_takes_layers_and_writes_them_in_one_graph():
    unified = UnifiedCache.allocate(3, 2, 4, "bf16", "cpu")
    kv_c, k_pe = tokens(2)

    def step(kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> Tensor:
        for i in range(2):
            unified.layer(i).write(kv_c + i, k_pe, slots)
        return slots + 1

    torch.compile(step, backend="eager", fullgraph=True)(kv_c, k_pe, torch.tensor([3, 8]))
    for i in range(2):
        expected = torch.cat((kv_c + i, k_pe), -1).float()
        assert torch.equal(unified.layer(i).gather(torch.tensor([3, 8])), expected)


@pytest.mark.parametrize("i", [2, -3, 61, None, 0.5])
def test_a_layer_that_is_not_there_is_refused(i):
    unified = UnifiedCache.allocate(3, 2, 2, "bf16", "cpu")
    with pytest.raises(InvalidInput, match=f"layer is {i}, it takes 0 to 1"):
        unified.layer(i)


def test_widths_are_facts_of_the_cache():
    nope = PagedCache.allocate(PAGES, PAGE_SIZE, "bf16", "cpu", kv_lora_rank=512, qk_rope_head_dim=0)
    assert nope.data.shape[-1] == 512
    assert nope.rope.shape == (PAGES, PAGE_SIZE, 0)
    kv_c, k_pe = tokens(2)
    nope.write(kv_c, k_pe[:, :0], torch.tensor([3, 9]))
    assert torch.equal(nope.gather(torch.tensor([9, 3])), kv_c[[1, 0]].float())
    small = UnifiedCache.allocate(2, 3, 4, "fp16", "cpu", kv_lora_rank=256, qk_rope_head_dim=32).layer(1)
    assert (small.kv_lora_rank, small.qk_rope_head_dim, small.rows.shape[-1]) == (256, 32, 288)


@pytest.mark.parametrize(("offset", "alignment"), [(0, 16), (8, 16), (4, 8), (1, 2)])
def test_alignment_is_that_of_the_base_address(offset, alignment):
    storage = torch.zeros(PAGES * PAGE_SIZE * 576 + 16, dtype=torch.bfloat16)
    assert storage.data_ptr() % 16 == 0
    data = storage[offset:].as_strided((PAGES, PAGE_SIZE, 576), (PAGE_SIZE * 576, 576, 1))
    assert PagedCache(data, "bf16").alignment == alignment


@pytest.mark.parametrize(("page_pad", "row_pad", "alignment"), [(8, 0, 16), (4, 0, 8), (0, 2, 4), (0, 8, 16)])
def test_alignment_is_that_of_the_strides(page_pad, row_pad, alignment):
    row, page = 576 + row_pad, PAGE_SIZE * (576 + row_pad) + page_pad
    cache = PagedCache(
        torch.zeros(PAGES * page, dtype=torch.bfloat16).as_strided((PAGES, PAGE_SIZE, 576), (page, row, 1)), "bf16"
    )
    assert cache.alignment == alignment
    assert cache.packed_rows == (row_pad == 0)
    assert cache.packed_pages == (page_pad == 0)
    assert cache.facts.row_stride == row
    assert cache.pages_start_on_rows == (page % 576 == 0)


def test_the_strides_of_single_pages_and_single_rows_mean_nothing():
    one_page = torch.zeros(9999, dtype=torch.bfloat16).as_strided((1, PAGE_SIZE, 576), (7, 576, 1))
    one_row = torch.zeros(9999, dtype=torch.bfloat16).as_strided((PAGES, 1, 576), (576, 5, 1))
    for data in (one_page, one_row):
        cache = PagedCache(data, "bf16")
        assert cache.packed_rows
        assert cache.page_stride_rows is None
        assert cache.alignment == 16


def test_pages_may_be_interleaved_by_token():
    data = torch.zeros(PAGE_SIZE, PAGES, 576, dtype=torch.bfloat16).transpose(0, 1)
    cache = written(PagedCache(data, "bf16"))
    assert not cache.packed_rows
    assert torch.equal(cache.dequantized(), written(PagedCache.allocate(PAGES, PAGE_SIZE, "bf16", "cpu")).dequantized())


def test_a_cache_and_its_facts_cannot_be_changed():
    cache = PagedCache.allocate(PAGES, PAGE_SIZE, "fp8", "cpu")
    for name in ("kv_scale", "data", "anything"):
        with pytest.raises(AttributeError, match=name):
            setattr(cache, name, 2.0)


# --- what is refused -------------------------------------------------------------------------------------------------


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("data", "format", "says"),
    [
        (bf16(4, 576), "bf16", r"takes \[pages, page_size, 576\]"),
        (bf16(4, 3, 2, 576), "bf16", r"takes \[pages, page_size, 576\]"),
        (None, "bf16", "NoneType"),
        (bf16(4, 2, 576), "fp16", "torch.bfloat16, format 'fp16' takes float16"),
        (bf16(4, 2, 576), "fp8", "takes float8_e4m3fn or uint8"),
        (bf16(4, 2, 512), "bf16", "rows of 512, format 'bf16' takes 576.*kv_lora_rank"),
        (bf16(0, 2, 576), "bf16", "0 pages"),
        (bf16(4, 0, 576), "bf16", "of 0 rows"),
        (bf16(4, 576, 2).transpose(1, 2), "bf16", "stride 2 in its last dimension, it takes 1"),
        (bf16(4, 1, 576).expand(4, 2, 576), "bf16", "0 between rows.*overlap"),
        (bf16(1, 2, 576).expand(4, 2, 576), "bf16", "0 elements between pages.*overlap"),
        (bf16(9999).as_strided((4, 2, 576), (1152, 575, 1)), "bf16", "575 between rows.*overlap"),
        (bf16(9999).as_strided((4, 2, 576), (1151, 576, 1)), "bf16", "1151 elements between pages.*overlap"),
        (bf16(4, 2, 576), "bfloat16", "format is 'bfloat16', it takes one of bf16"),
        (torch.zeros(4, 64, 656, dtype=torch.uint8), "fp8", "rows of 656, format 'fp8' takes 576"),
        (torch.zeros(4, 64, 576, dtype=torch.uint8), "fp8_ds_mla", "rows of 576, format 'fp8_ds_mla' takes 656"),
        (torch.zeros(4, 64, 528, dtype=torch.uint8), "fp8_ds_mla", "rows of 528"),
    ],
)
def test_data_that_is_not_of_the_format_is_refused(data, format, says):
    with pytest.raises(InvalidInput, match=says):
        PagedCache(data, format)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(InvalidInput, match=r"float32.*rows of 500.*stride 4"):
        PagedCache(torch.zeros(3, 500, 4).transpose(1, 2), "bf16")


@pytest.mark.parametrize("kv_scale", [0, 0.0, -1.0, math.nan, math.inf, 1e-60, 1e60, True, "1", 1j])
def test_a_scale_is_a_positive_finite_number(kv_scale):
    with pytest.raises(InvalidInput, match="kv_scale is"):
        PagedCache.allocate(2, 2, "fp8", "cpu", kv_scale=kv_scale)


@pytest.mark.parametrize(
    "kv_scale", [torch.ones(1).double(), torch.ones(2), torch.ones(0), torch.ones(1, device="meta")]
)
def test_a_scale_tensor_is_one_float32_on_the_device(kv_scale):
    with pytest.raises(InvalidInput, match=r"kv_scale is .* it takes one float32 on cpu"):
        PagedCache.allocate(2, 2, "fp8", "cpu", kv_scale=kv_scale)


@pytest.mark.parametrize("format", [name for name in FORMAT_NAMES if name != "fp8"])
@pytest.mark.parametrize("kv_scale", [1.0, torch.ones(1)], ids=["float", "tensor"])
def test_a_scale_is_refused_by_formats_that_take_none(format, kv_scale):
    with pytest.raises(InvalidInput, match=f"format '{format}' takes none.*leave kv_scale out"):
        PagedCache.allocate(2, 2, format, "cpu", kv_scale=kv_scale)
    with pytest.raises(InvalidInput, match=f"format '{format}' takes none"):
        UnifiedCache.allocate(2, 2, 2, format, "cpu").layer(0, kv_scale=kv_scale)


@pytest.mark.parametrize("counts", [(0, 2), (2, 0), (-1, 2), (2.0, 2), (True, 2)])
def test_counts_are_whole_numbers_of_at_least_one(counts):
    for allocate in (
        lambda: PagedCache.allocate(*counts, "bf16", "cpu"),
        lambda: UnifiedCache.allocate(counts[0], 2, counts[1], "bf16", "cpu"),
        lambda: IndexerCache.allocate(*counts, "cpu"),
    ):
        with pytest.raises(InvalidInput, match="at least 1"):
            allocate()


def test_a_format_that_is_defined_for_one_model_width_refuses_another():
    with pytest.raises(InvalidInput, match=r"256 \+ 64, format 'fp8_ds_mla' is defined for 512 \+ 64"):
        PagedCache.allocate(2, 2, "fp8_ds_mla", "cpu", kv_lora_rank=256)


@pytest.mark.parametrize(
    "data",
    [
        bf16(3, 2, 576),
        bf16(3, 0, 2, 576),
        bf16(3, 1, 2, 576).expand(3, 4, 2, 576),
        bf16(99999).as_strided((3, 4, 2, 576), (4 * 1152, 1151, 576, 1)),
        bf16(3, 4, 2, 512),
    ],
    ids=["3-D", "empty", "one layer expanded", "layers overlap", "width"],
)
def test_a_slot_whose_layers_cannot_be_viewed_is_refused(data):
    with pytest.raises(InvalidInput, match="data"):
        UnifiedCache(data, "bf16")


# --- writing and reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("layers", [1, 2, 61])
def test_writing_a_layer_writes_the_same_bits_as_a_packed_cache_and_no_neighbour(format, layers):
    slot = UnifiedCache.allocate(PAGES, layers, PAGE_SIZE, format, "cpu")
    packed = bits(written(PagedCache.allocate(PAGES, PAGE_SIZE, format, "cpu")).data)
    for i in {0, layers // 2, layers - 1}:
        slot.data.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
        cache = written(slot.layer(i))
        assert torch.equal(bits(cache.data), packed)
        others = bits(torch.cat((slot.data.view(torch.uint8)[:, :i], slot.data.view(torch.uint8)[:, i + 1 :]), 1))
        assert bool((others == 0xFF).all())
        assert torch.equal(cache.dequantized(), PagedCache(cache.data.clone(), format).dequantized())


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32"])
def test_plain_formats_keep_values_exactly(format):
    cache = PagedCache.allocate(PAGES, PAGE_SIZE, format, "cpu")
    kv_c, k_pe = tokens(3, dtype=DTYPES[format])
    cache.write(kv_c, k_pe, torch.tensor([19, 0, 6]))
    values = cache.dequantized()
    assert values.dtype == torch.float32
    assert torch.equal(values.flatten(0, 1)[[19, 0, 6]], torch.cat((kv_c, k_pe), -1).float())
    untouched = [s for s in range(20) if s not in (19, 0, 6)]
    assert not values.flatten(0, 1)[untouched].any()


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_slots_outside_the_cache_are_skipped(format):
    cache = written(PagedCache.allocate(PAGES, PAGE_SIZE, format, "cpu"))
    before = bits(cache.data).clone()
    dtype = cache.dtype if format in ("fp16", "fp32") else torch.bfloat16
    cache.write(*tokens(4, dtype=dtype, seed=1), torch.tensor([-1, 20, 2**40, -(2**40)]))
    assert torch.equal(bits(cache.data), before)
    cache.write(*tokens(3, dtype=dtype, seed=1), torch.tensor([-1, 7, 20]))
    changed = (bits(cache.data).view(20, -1) != before.view(20, -1)).any(-1)
    assert changed.nonzero().flatten().tolist() == [7]


def test_tokens_may_be_strided_and_more_than_the_slots():
    cache = PagedCache.allocate(PAGES, PAGE_SIZE, "bf16", "cpu")
    wide = torch.randn(6, 2, 700).bfloat16()
    cache.write(wide[:, 1, :512], wide[:, 0, 100:164], torch.tensor([4, 2], dtype=torch.int64))
    expected = torch.cat((wide[:2, 1, :512], wide[:2, 0, 100:164]), -1)
    assert torch.equal(cache.gather(torch.tensor([4, 2])), expected.float())


@pytest.mark.parametrize(
    ("kv_c", "k_pe", "slots", "says"),
    [
        (bf16(2, 512), bf16(2, 64), torch.tensor([0, 1], dtype=torch.int32), "int64"),
        (bf16(1, 512), bf16(2, 64), torch.tensor([0, 1]), "kv_c"),
        (bf16(2, 512), bf16(1, 64), torch.tensor([0, 1]), "k_pe"),
        (bf16(2, 576), bf16(2, 64), torch.tensor([0, 1]), "kv_c"),
        (bf16(2, 512), bf16(2, 1, 64), torch.tensor([0, 1]), "k_pe"),
        (bf16(2, 512), bf16(2, 32), torch.tensor([0, 1]), "k_pe"),
        (bf16(1)[0], bf16(2, 64), torch.tensor([0, 1]), "kv_c"),
        (bf16(2, 512).half(), bf16(2, 64), torch.tensor([0, 1]), "dtype"),
        (bf16(2, 1024)[:, ::2], bf16(2, 64), torch.tensor([0, 1]), "stride"),
    ],
)
def test_tokens_that_do_not_fit_the_cache_are_refused(kv_c, k_pe, slots, says):
    cache = PagedCache.allocate(PAGES, PAGE_SIZE, "bf16", "cpu")
    with pytest.raises(InvalidInput, match=says):
        cache.write(kv_c, k_pe, slots)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_gather_reads_what_dequantized_shows(format):
    slot = UnifiedCache.allocate(PAGES, 3, PAGE_SIZE, format, "cpu")
    slot.data.view(torch.uint8).fill_(0xFF)
    cache = written(slot.layer(1))
    slots = torch.tensor([[[19, 0, 0], [4, 3, 7]]])
    assert torch.equal(cache.gather(slots), cache.dequantized().flatten(0, 1)[slots])
    assert cache.gather(slots[:, :0]).shape == (1, 0, 3, 576)


def test_offsets_beyond_32_bits_reach_the_right_row():
    # 2 GiB of addresses, of which only the touched rows are ever backed by memory.
    stride = 2**30 + 576
    slot = torch.empty(2 * stride + PAGE_SIZE * 576, dtype=torch.uint8)
    cache = PagedCache(slot.as_strided((3, PAGE_SIZE, 576), (stride, 576, 1)), "fp8", kv_scale=0.25)
    small = PagedCache.allocate(3, PAGE_SIZE, "fp8", "cpu", kv_scale=0.25)
    for each in (cache, small):
        written(each)
    assert torch.equal(cache.dequantized(), small.dequantized())
    last = torch.tensor([11])
    assert torch.equal(cache.gather(last), small.gather(last))
    assert slot[2 * stride + 3 * 576 :][:576].tolist() == bits(small.data)[2, 3].tolist()


# --- fp8 -------------------------------------------------------------------------------------------------------------


def test_fp8_stores_value_over_scale_and_saturates():
    cache = PagedCache.allocate(1, 2, "fp8", "cpu", kv_scale=0.5)
    kv_c, k_pe = torch.zeros(1, 512).bfloat16(), torch.zeros(1, 64).bfloat16()
    kv_c[0, :4] = torch.tensor([3.0, -224.0, 1000.0, -1e30])
    k_pe[0, 0] = 1.0
    cache.write(kv_c, k_pe, torch.tensor([1]))
    stored = cache.rows[0, 1].float()
    assert stored[:4].tolist() == [6.0, -448.0, 448.0, -448.0]
    assert stored[512] == 2.0
    assert cache.dequantized()[0, 1, :4].tolist() == [3.0, -224.0, 224.0, -224.0]


@pytest.mark.parametrize("kv_scale", [None, 1, 0.37, 4096.0])
def test_a_float_scale_and_a_tensor_scale_store_the_same_bits(kv_scale):
    tensor = torch.tensor(1.0 if kv_scale is None else float(kv_scale))
    by_float = written(PagedCache.allocate(PAGES, PAGE_SIZE, "fp8", "cpu", kv_scale=kv_scale))
    by_tensor = written(PagedCache.allocate(PAGES, PAGE_SIZE, "fp8", "cpu", kv_scale=tensor))
    as_bytes = written(PagedCache(torch.zeros(PAGES, PAGE_SIZE, 576, dtype=torch.uint8), "fp8", kv_scale=tensor))
    assert torch.equal(bits(by_float.data), bits(by_tensor.data))
    assert torch.equal(bits(by_float.data), bits(as_bytes.data))
    assert torch.equal(by_float.dequantized(), by_tensor.dequantized())
    assert by_float.kv_scale is kv_scale
    assert by_tensor.kv_scale is tensor


def test_a_scale_tensor_stays_the_callers_memory_and_is_not_looked_at():
    given = torch.tensor(-1.0)  # nonsense, which only a look at it would find
    cache = PagedCache.allocate(1, 2, "fp8", "cpu", kv_scale=given)
    assert cache.scale.shape == (1,)
    given.fill_(2.0)
    cache.write(torch.full((1, 512), 6.0), torch.full((1, 64), 6.0), torch.tensor([0]))
    assert cache.rows[0, 0].float().unique().tolist() == [3.0]
    assert cache.dequantized()[0, 0].unique().tolist() == [6.0]


def test_an_fp8_ds_mla_row_is_512_e4m3_then_4_scales_then_64_bf16():
    cache = PagedCache.allocate(2, 3, "fp8_ds_mla", "cpu")
    amax = [3.0, 0.7, 5.3, 0.0]
    kv_c = torch.rand(4, 128, generator=torch.Generator().manual_seed(0)) * 2 - 1
    kv_c[:, 5] = 1.0
    kv_c = (kv_c * torch.tensor(amax)[:, None]).flatten()[None].bfloat16()
    k_pe = torch.randn(1, 64).bfloat16()
    cache.write(kv_c, k_pe, torch.tensor([4]))
    row = bytes(cache.data[1, 1].tolist())
    assert len(row) == 656

    tile_amax = kv_c.view(4, 128).float().abs().amax(-1).tolist()
    scales = struct.unpack("<4f", row[512:528])
    assert list(scales) == [2.0 ** math.ceil(math.log2(max(a / 448, 1e-4))) for a in tile_amax]
    for scale in scales:
        assert math.frexp(scale)[0] == 0.5
        as_bf16 = torch.tensor(scale).bfloat16().item()
        as_e8m0 = 2.0 ** ((struct.unpack("<I", struct.pack("<f", scale))[0] >> 23) - 127)
        assert scale == as_bf16 == as_e8m0

    assert row[528:] == bytes(bits(k_pe)[0].tolist())
    stored = torch.tensor(list(row[:512]), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    expected = (kv_c.view(4, 128).float() / torch.tensor(scales)[:, None]).to(torch.float8_e4m3fn).float().flatten()
    assert torch.equal(stored, expected)

    values = cache.dequantized()[1, 1]
    assert torch.equal(values[:512].view(4, 128), stored.view(4, 128) * torch.tensor(scales)[:, None])
    assert torch.equal(values[512:], k_pe[0].float())
    # e4m3 keeps 4 significant bits, so half a step is 1/16 of a value at most; below that the scale's smallest step counts.
    assert torch.allclose(values[:512], kv_c[0].float(), rtol=1 / 16, atol=max(scales) * 2**-10)


def test_fp8_ds_mla_rows_at_odd_addresses_are_read_right():
    aligned = written(PagedCache.allocate(2, 3, "fp8_ds_mla", "cpu"))
    storage = torch.zeros(1 + 2 * 3 * 659, dtype=torch.uint8)
    odd = storage[1:].as_strided((2, 3, 656), (3 * 659, 659, 1))
    odd.copy_(aligned.data)
    cache = PagedCache(odd, "fp8_ds_mla")
    assert cache.alignment == 1
    assert torch.equal(cache.dequantized(), aligned.dequantized())


# --- smaller pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_split_pages_are_the_same_rows_under_finer_ids(format):
    cache = written(PagedCache.allocate(3, 64, format, "cpu"))
    small = cache.split_pages(16)
    assert small.rows.shape == (12, 16, WIDTHS[format])
    assert small.rows.data_ptr() == cache.rows.data_ptr()
    for page in range(3):
        for i in range(4):
            assert torch.equal(bits(small.rows[page * 4 + i]), bits(cache.rows[page, i * 16 : i * 16 + 16]))
    assert torch.equal(small.dequantized().flatten(0, 1), cache.dequantized().flatten(0, 1))
    assert cache.split_pages(64) is cache


def test_split_pages_keeps_scale_widths_and_row_pitch():
    data = torch.zeros(4, 8, 320, dtype=torch.uint8)[..., :288]
    cache = PagedCache(data, "fp8", kv_scale=0.5, kv_lora_rank=256, qk_rope_head_dim=32)
    small = cache.split_pages(2)
    assert (small.kv_scale, small.kv_lora_rank, small.facts.row_stride) == (0.5, 256, 320)
    small.write(torch.ones(1, 256), torch.ones(1, 32), torch.tensor([13]))
    assert cache.dequantized()[1, 5].unique().tolist() == [1.0]
    assert cache.dequantized().sum() == 288


@pytest.mark.parametrize("page_size", [0, -2, 3, 16, 2.0])
def test_split_pages_takes_a_divisor(page_size):
    with pytest.raises(InvalidInput, match="page_size is"):
        PagedCache.allocate(3, 8, "bf16", "cpu").split_pages(page_size)


def test_pages_apart_from_each_other_cannot_be_split():
    slot = UnifiedCache.allocate(3, 2, 8, "bf16", "cpu")
    with pytest.raises(InvalidInput, match="pages that follow each other; allocate the cache with page_size 4"):
        slot.layer(0).split_pages(4)
    assert UnifiedCache.allocate(1, 2, 8, "bf16", "cpu").layer(1).split_pages(4).num_pages == 2


# --- pages of one row ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize(("layers", "page_size"), [(1, 4), (3, 4), (3, 1)])
def test_by_row_every_slot_is_a_page_of_one_row(format, layers, page_size):
    slot = UnifiedCache.allocate(PAGES, layers, page_size, format, "cpu")
    cache = written(slot.layer(layers - 1))
    rows = cache.by_row
    assert cache.rows_per_page == layers * page_size
    assert rows.page_size == 1
    assert rows.rows.data_ptr() == cache.rows.data_ptr()
    for page in range(PAGES):
        for offset in range(page_size):
            assert torch.equal(bits(rows.rows[page * cache.rows_per_page + offset, 0]), bits(cache.rows[page, offset]))
    assert cache.by_row is rows


def test_by_row_does_not_reach_past_the_last_row():
    slot = torch.zeros(3, 2, 4, 576)
    last = PagedCache(slot[:, 1], "fp32").by_row.rows
    assert last.data_ptr() + last.nbytes == slot.data_ptr() + slot.nbytes


def test_by_row_takes_pages_that_start_on_rows():
    apart = torch.zeros(3, 5 * 576 + 8)[:, : 4 * 576].view(3, 4, 576)
    with pytest.raises(InvalidInput, match="2888 elements between pages and 576 between rows"):
        _ = PagedCache(apart, "fp32").by_row
    pitched = PagedCache(torch.zeros(3, 4, 640)[..., :576], "fp32")
    assert (pitched.rows_per_page, pitched.by_row.num_pages) == (4, 12)


def test_latent_and_rope_have_the_head_axis_that_some_kernels_want():
    cache = written(UnifiedCache.allocate(PAGES, 3, PAGE_SIZE, "bf16", "cpu").layer(1))
    assert cache.latent_heads.shape == (PAGES, PAGE_SIZE, 1, 512)
    assert cache.rope_heads.shape == (PAGES, PAGE_SIZE, 1, 64)
    assert torch.equal(torch.cat((cache.latent_heads, cache.rope_heads), -1), cache.heads)
    assert cache.latent_heads.data_ptr() == cache.rows.data_ptr()
    mixed = PagedCache.allocate(PAGES, PAGE_SIZE, "fp8_ds_mla", "cpu")
    assert mixed.latent_heads is mixed.rope_heads is None


# --- indexer keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("layers", [1, 3])
def test_an_indexer_page_is_all_keys_and_then_all_scales(page_size, layers):
    slot = torch.full((3, layers, page_size, 132), 0xFF, dtype=torch.uint8)
    cache = IndexerCache(slot[:, layers - 1])
    slots = torch.tensor([3 * page_size - 1, 0, -1, page_size, 3 * page_size])
    k = (torch.randn(5, 128, generator=torch.Generator().manual_seed(0)) * 30).bfloat16()
    cache.write(k, slots)
    page_bytes = slot[:, layers - 1].flatten(1)
    for token, at in ((0, 3 * page_size - 1), (1, 0), (3, page_size)):
        page, offset = divmod(at, page_size)
        key = page_bytes[page, offset * 128 : offset * 128 + 128].clone().view(torch.float8_e4m3fn).float()
        where = page_size * 128 + offset * 4
        (scale,) = struct.unpack("<f", bytes(page_bytes[page, where : where + 4].tolist()))
        amax = k[token].float().abs().max().item()
        assert scale == 2.0 ** math.ceil(math.log2(max(amax, 1e-4) / 448))
        assert torch.equal(key, (k[token].float() / scale).to(torch.float8_e4m3fn).float())
        assert torch.equal(cache.dequantized()[page, offset], key * scale)
    if page_size > 4:
        assert bool((page_bytes[1, 128 : page_size * 128] == 0xFF).all())
    assert bool((slot[:, : layers - 1] == 0xFF).all())
    assert cache.dequantized().shape == (3, page_size, 128)


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(3, 4, 128, dtype=torch.uint8),
        torch.zeros(3, 4, 132),
        torch.zeros(3, 4, 1, 132, dtype=torch.uint8),
        torch.zeros(0, 4, 132, dtype=torch.uint8),
        torch.zeros(3, 4, 144, dtype=torch.uint8)[..., :132],
        torch.zeros(3, 8, 132, dtype=torch.uint8)[:, ::2],
        torch.zeros(1, 4, 132, dtype=torch.uint8).expand(3, 4, 132),
        torch.zeros(4, 3, 132, dtype=torch.uint8).transpose(0, 1),
    ],
    ids=["width", "dtype", "rank", "empty", "padded rows", "every other row", "pages overlap", "interleaved"],
)
def test_an_indexer_page_is_one_dense_block_of_bytes(data):
    with pytest.raises(InvalidInput, match="data"):
        IndexerCache(data)


def test_indexer_pages_start_zero():
    cache = IndexerCache.allocate(3, 64, "cpu")
    assert cache.data.shape == (3, 64, 132)
    assert not cache.dequantized().any()
    assert (cache.num_slots, cache.alignment, cache.page_stride) == (192, 16, 64 * 132)


def test_a_cache_made_in_inference_mode_is_written_outside_of_it():
    with torch.inference_mode():
        made = PagedCache.allocate(1, 64, "bf16", "cpu"), UnifiedCache.allocate(1, 2, 64, "bf16", "cpu").layer(1)
    for cache in made:
        cache.write(torch.ones(1, 512).bfloat16(), torch.ones(1, 64).bfloat16(), torch.zeros(1, dtype=torch.int64))
        assert (cache.data[0, 0] == 1).all()
        cache.data.zero_()


def test_a_cache_is_found_again_by_its_memory_its_format_and_its_scale():
    rows, scales = torch.zeros(2, 64, 576, dtype=torch.float8_e4m3fn), (torch.ones(1), torch.ones(1))
    caches = [PagedCache(rows, "fp8", kv_scale=scale) for scale in scales]
    narrow = PagedCache(rows, "fp8", kv_scale=scales[0], kv_lora_rank=448, qk_rope_head_dim=128)

    def over(scale, rank=512, rope=64):
        return PagedCache.over(rows, scale, "fp8", kv_lora_rank=rank, qk_rope_head_dim=rope)

    assert [over(scale) for scale in scales] == caches
    assert over(scales[0], 448, 128) is narrow
    del narrow
    assert over(scales[0], 448, 128).kv_lora_rank == 448
    assert over(scales[0]) is caches[0]
    other = torch.full((1,), 2.0)
    assert over(other).scale.data_ptr() == other.data_ptr()
