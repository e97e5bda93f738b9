"""The truth in float64: MLA decode from its definition alone, slow and obvious.

It shares no code with an adapter and no trick with a kernel, and reads no row that a query may not see, so that what
lies elsewhere (NaN, in the tests) cannot reach a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_backends.errors import InvalidInput
from mla_backends.result import Decoded

__all__ = ["reference_decode", "reference_sparse"]


def reference_decode(
    latent: Tensor,
    rope: Tensor,
    cache_values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    cu_q_lens: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> Decoded:
    """One decode step over paged keys, on the CPU wherever the tensors are.

    Args:
        latent: [B, H, L], [B, q, H, L], or ragged [T, H, L] with `cu_q_lens`; dequantised values.
        rope: the same leading shape, R last.
        cache_values: [pages, page_size, L + R], from `PagedCache.dequantized`.
        block_table: [B, W] page ids; only the first ceil(seq_len / page_size) of a row are read.
        seq_lens: [B] keys a request, new tokens included.
        softmax_scale: multiplies the logits.
        causal: row i of a request sees keys k <= seq_len - q + i; else k < seq_len.
        cu_q_lens: [B + 1], the first query of each request; tokens past the last are rows that see no key.
        attn_sink: [H], one more logit a head, already scaled, with no value; lse leaves it out.

    Returns:
        out [.., H, L] and lse [.., H] in float64, natural log; a row that sees no key is out 0, lse -inf.

    Raises:
        InvalidInput: if a live page is not in the cache.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1, with W_UK folded into the query.
    """
    query = torch.cat((latent, rope), -1).detach().cpu().double()
    values = cache_values.detach().cpu().double()
    table, lengths = block_table.tolist(), seq_lens.tolist()
    rows = query.flatten(0, -3)
    out = torch.zeros(*rows.shape[:2], latent.shape[-1], dtype=torch.float64, device="cpu")
    lse = torch.full(rows.shape[:2], -torch.inf, dtype=torch.float64, device="cpu")
    if cu_q_lens is not None:
        starts = cu_q_lens.tolist()
    else:
        q_len = query.shape[1] if query.dim() == 4 else 1
        starts = [b * q_len for b in range(len(lengths) + 1)]
    for b, length in enumerate(lengths):
        keys = _paged_keys(values, table[b], length)
        q_len = starts[b + 1] - starts[b]
        for i in range(q_len):
            seen = max(0, length - q_len + i + 1) if causal else length
            row = starts[b] + i
            out[row], lse[row] = _attend(rows[row], keys[:seen], latent.shape[-1], softmax_scale, attn_sink)
    return Decoded(out.view(latent.shape), lse.view(latent.shape[:-1]))


def reference_sparse(
    latent: Tensor,
    rope: Tensor,
    cache_values: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    attn_sink: Tensor | None = None,
) -> Decoded:
    """One decode step over chosen slots, on the CPU wherever the tensors are.

    Args:
        latent: [B, (q,) H, L], dequantised values.
        rope: the same leading shape, R last.
        cache_values: [pages, page_size, L + R], from `PagedCache.dequantized`.
        indices: [B, (q,) topk] slots, page * page_size + offset; any slot outside the cache is none, duplicates count twice.
        softmax_scale: multiplies the logits.
        attn_sink: [H], one more logit a head, already scaled, with no value; lse leaves it out.

    Returns:
        As `reference_decode`; a row whose indices are all none is empty.
    """
    query = torch.cat((latent, rope), -1).detach().cpu().double()
    slots = cache_values.detach().cpu().double().flatten(0, 1)
    rows = query.flatten(0, -3)
    chosen = indices.flatten(0, -2).tolist()
    out = torch.zeros(*rows.shape[:2], latent.shape[-1], dtype=torch.float64, device="cpu")
    lse = torch.full(rows.shape[:2], -torch.inf, dtype=torch.float64, device="cpu")
    for row, wanted in enumerate(chosen):
        keys = slots[[slot for slot in wanted if 0 <= slot < len(slots)]]
        out[row], lse[row] = _attend(rows[row], keys, latent.shape[-1], softmax_scale, attn_sink)
    return Decoded(out.view(latent.shape), lse.view(latent.shape[:-1]))


def _paged_keys(values: Tensor, pages: list[int], length: int) -> Tensor:
    """[length, D]: the rows of a request in the order of its tokens."""
    num_pages, page_size, width = values.shape
    keys = torch.empty(length, width, dtype=torch.float64, device="cpu")
    for first in range(0, length, page_size):
        page = pages[first // page_size]
        if not 0 <= page < num_pages:
            raise InvalidInput(
                f"block_table has page {page} for token {first} of {length}, it takes 0 to {num_pages - 1}"
            )
        last = min(first + page_size, length)
        keys[first:last] = values[page, : last - first]
    return keys


def _attend(
    query: Tensor, keys: Tensor, kv_lora_rank: int, softmax_scale: float, attn_sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of one token: query [H, D] over keys [n, D] -> out [H, L], lse [H]."""
    num_heads = query.shape[0]
    if not len(keys):
        empty = query.new_zeros(num_heads, kv_lora_rank)
        return empty, query.new_full((num_heads,), -torch.inf)
    logits = softmax_scale * (query @ keys.T)
    lse = torch.logsumexp(logits, -1)
    denominator = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.detach().cpu().double())
    return torch.exp(logits - denominator[:, None]) @ keys[:, :kv_lora_rank], lse
