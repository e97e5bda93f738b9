"""Each op in torch: what a CPU runs, and what the CUDA kernels must equal.

Nothing here checks a shape: `ops` has done it, once for both forms. Nothing here waits for a device
either: rows that must be skipped are redirected instead of filtered, because a filter's size is
known only to the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_backends.formats import E4M3_MAX, FP8_DS_MLA_TILE

__all__ = [
    "absorb_query",
    "batched_matmul",
    "concat_nope_rope",
    "finish_rows",
    "merge_partials",
    "quantize_query",
    "query_scale",
    "rope_tail",
    "write_cache",
    "write_cache_and_rope",
    "write_indexer_cache",
]

SCALE_FLOOR = 1e-4
"""Least amax / 448 of an fp8_ds_mla tile and least amax of an indexer key. Source: FlashMLA's tests/quant.py; vLLM."""

QUERY_SCALE_FLOOR = 2.0**-64
"""Least scale of an e4m3 query, so that a query of zeros can be divided by it."""

_E4M3_NAN = 0x7F


def _detached(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x


def _e4m3(values: Tensor, scale: Tensor | None) -> Tensor:
    """The bytes of values / scale: rounded to nearest even, saturated at 448, every NaN as 0x7f.

    The scale is a tensor on purpose: torch divides by a Python number through its reciprocal on CUDA.
    """
    x = values.float()
    if scale is not None:
        x = x / scale
    stored = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return stored.masked_fill(x.isnan(), _E4M3_NAN)


def _power_of_two_above(x: Tensor) -> Tensor:
    """2**ceil(log2(x)) of positive finite float32, from the bits, so that no rounding of a logarithm decides."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def _finite_amax(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x.abs(), 0.0).amax(-1, keepdim=True)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32; on the CPU from float32 operands, as its bf16 product may accumulate in bf16."""
    with torch.autocast(a.device.type, enabled=False):
        return torch.bmm(_detached(a).float(), _detached(b).float())


def batched_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.is_cuda:
        torch.bmm(_detached(a), _detached(b), out=out)
        return
    out.copy_(_matmul(a, b))


def absorb_query(
    latent: Tensor, rope: Tensor, q_nope: Tensor, q_pe: Tensor, w_uk: Tensor, scale: Tensor | None = None
) -> None:
    heads = q_nope.shape[1]
    target = latent[:, :heads].transpose(0, 1)
    if scale is None:
        batched_matmul(target, q_nope.transpose(0, 1), w_uk)
    elif latent.is_cuda:
        with torch.autocast("cuda", enabled=False):
            product = torch.bmm(_detached(q_nope).transpose(0, 1), _detached(w_uk))
        target.view(torch.uint8).copy_(_e4m3(product, scale))
    else:
        target.view(torch.uint8).copy_(_e4m3(_matmul(q_nope.transpose(0, 1), w_uk), scale))
    rope_tail(rope, q_pe, scale)


def rope_tail(rope: Tensor, q_pe: Tensor, scale: Tensor | None = None) -> None:
    target = rope[:, : q_pe.shape[1]]
    if scale is None:
        target.copy_(_detached(q_pe))
        return
    target.view(torch.uint8).copy_(_e4m3(_detached(q_pe), scale))


def concat_nope_rope(out: Tensor, nope: Tensor, rope: Tensor) -> None:
    width = nope.shape[-1]
    out[..., :width].copy_(_detached(nope))
    out[..., width:].copy_(_detached(rope))


def quantize_query(out: Tensor, query: Tensor, scale: Tensor) -> None:
    out.view(torch.uint8).copy_(_e4m3(_detached(query), scale))


def _requests(
    tokens: int, seq_lens: Tensor | None, cu_q_lens: Tensor | None, q_len: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token: its request, its position from the request's last token (0, -1, ..), and whether it has a request."""
    token = torch.arange(tokens, device=device)
    if cu_q_lens is None:
        return token // q_len, token % q_len - q_len + 1, torch.ones_like(token, dtype=torch.bool)
    ends = cu_q_lens[1:].long()
    if ends.numel() == 0:
        return token * 0, token * 0, torch.zeros_like(token, dtype=torch.bool)
    request = torch.searchsorted(ends, token, right=True)
    held = request < ends.numel()
    request = request.clamp_max(ends.numel() - 1)
    return request, token - ends[request] + 1, held


def query_scale(
    out: Tensor, latent: Tensor, rope: Tensor, seq_lens: Tensor | None, cu_q_lens: Tensor | None, q_len: int
) -> None:
    amax = torch.zeros((), dtype=torch.float32, device=out.device)
    if latent.shape[0] and latent.shape[1]:
        request, _, live = _requests(latent.shape[0], seq_lens, cu_q_lens, q_len, out.device)
        if seq_lens is not None:
            live = live & (seq_lens[request] > 0)
        for part in (latent, rope):
            if part.shape[-1]:
                row = _finite_amax(_detached(part).float()).amax((1, 2))
                amax = torch.maximum(amax, torch.where(live, row, 0.0).amax())
    largest = torch.full((), E4M3_MAX, dtype=torch.float32, device=out.device)
    out.copy_((amax / largest).clamp_min(QUERY_SCALE_FLOOR).view(1))


def finish_rows(
    lse: Tensor | None,
    out: Tensor | None,
    raw_lse: Tensor | None,
    seq_lens: Tensor | None,
    cu_q_lens: Tensor | None,
    q_len: int,
    causal: bool,
    base2: bool,
) -> None:
    """`out` is None where its empty rows stay as they are."""
    raw_lse = None if raw_lse is None else _detached(raw_lse)
    shaped = lse if lse is not None else out[..., 0] if out is not None else None
    if shaped is None:
        return
    rows = shaped.shape[:-1]
    request, behind, held = _requests(math.prod(rows), seq_lens, cu_q_lens, q_len, shaped.device)
    if seq_lens is not None:
        keys = seq_lens[request] + behind if causal else seq_lens[request]
        empty = ((keys <= 0) | ~held).view(*rows, 1).expand(shaped.shape)
    else:
        assert raw_lse is not None
        empty = raw_lse.isinf() | ~held.view(*rows, 1)
    if lse is not None and raw_lse is not None:
        natural = raw_lse * math.log(2.0) if base2 else raw_lse
        lse.copy_(torch.where(empty, -math.inf, natural))
    if out is not None:
        out.masked_fill_(empty.unsqueeze(-1), 0)


def _redirected(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make every slot writable without a wait for the device.

    A token whose slot is outside the cache repeats the write of the first token whose slot is inside;
    with none inside, all write to slot 0 what is there.

    Returns:
        source [T], the token whose row is written; target [T], the slot; any_inside, whether a row is written at all.
    """
    inside = (slots >= 0) & (slots < num_slots)
    source = torch.where(inside, torch.arange(slots.numel(), device=slots.device), inside.to(torch.int8).argmax())
    any_inside = inside.any()
    return source, torch.where(any_inside, slots[source], 0), any_inside


def _row_bytes(kv_c: Tensor, k_pe: Tensor, format: str, kv_scale: Tensor | None) -> Tensor:
    """[T, row] as the cache stores it: the cache's dtype, or bytes for the two fp8 formats."""
    if format == "fp8":
        return _e4m3(torch.cat((kv_c, k_pe), -1), kv_scale)
    if format != "fp8_ds_mla":
        return torch.cat((kv_c, k_pe), -1)
    tiles = kv_c.float().unflatten(-1, (-1, FP8_DS_MLA_TILE))
    largest = torch.full((), E4M3_MAX, dtype=torch.float32, device=kv_c.device)
    scales = _power_of_two_above((_finite_amax(tiles) / largest).clamp_min(SCALE_FLOOR))
    rope = k_pe.to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat((_e4m3(tiles, scales).flatten(1), scales.flatten(1).view(torch.uint8), rope), -1)


def write_cache(
    data: Tensor, kv_c: Tensor, k_pe: Tensor, slots: Tensor, format: str, kv_scale: Tensor | None, kv_scale_value: float
) -> None:
    """kv_scale_value counts where kv_scale is None."""
    tokens, page_size = slots.numel(), data.shape[1]
    if kv_scale is None and kv_scale_value != 1.0:
        kv_scale = torch.full((), kv_scale_value, dtype=torch.float32, device=data.device)
    rows = _row_bytes(_detached(kv_c)[:tokens], _detached(k_pe)[:tokens], format, kv_scale)
    cells = data.view(torch.uint8) if format in ("fp8", "fp8_ds_mla") else data
    source, target, any_inside = _redirected(slots, data.shape[0] * page_size)
    page, offset = target // page_size, target % page_size
    cells[page, offset] = torch.where(any_inside, rows[source], cells[page, offset])


def write_cache_and_rope(
    rope: Tensor,
    q_pe: Tensor,
    data: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    slots: Tensor,
    format: str,
    kv_scale: Tensor | None,
    kv_scale_value: float,
) -> None:
    rope_tail(rope, q_pe)
    write_cache(data, kv_c, k_pe, slots, format, kv_scale, kv_scale_value)


def write_indexer_cache(data: Tensor, k: Tensor, slots: Tensor) -> None:
    tokens, (pages, page_size, _) = slots.numel(), data.shape
    values = _detached(k)[:tokens].float()
    width = values.shape[-1]
    largest = torch.full((), E4M3_MAX, dtype=torch.float32, device=data.device)
    scales = _power_of_two_above(_finite_amax(values).clamp_min(SCALE_FLOOR) / largest)
    source, target, any_inside = _redirected(slots, pages * page_size)
    rows = torch.cat((_e4m3(values, scales), scales.view(torch.uint8)), -1)[source]
    page, offset = (target // page_size)[:, None], (target % page_size)[:, None]
    key_bytes = offset * width + torch.arange(width, device=data.device)
    scale_bytes = page_size * width + offset * 4 + torch.arange(4, device=data.device)
    cells, column = data.flatten(1), torch.cat((key_bytes, scale_bytes), -1)
    cells[page, column] = torch.where(any_inside, rows, cells[page, column])


def merge_partials(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
    """A part whose lse is infinite saw no key; whatever its out holds does not count."""
    empty = lses.isinf()
    outs, lses = _detached(outs), _detached(lses)
    wide = torch.float64 if outs.dtype == torch.float64 else torch.float32
    logits = torch.where(empty, -math.inf, lses)
    top = logits.amax(0)
    weights = torch.where(empty, 0.0, (logits - torch.where(top.isinf(), 0.0, top)).exp())
    total = weights.sum(0)
    parts = torch.where(empty.unsqueeze(-1), 0.0, outs.to(wide))
    merged = (weights.unsqueeze(-1) * parts).sum(0) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    out.copy_(merged)
    lse.copy_(torch.where(total == 0, -math.inf, top + total.log()))
