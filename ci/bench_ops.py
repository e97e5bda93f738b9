"""Our ops against what engines call today, each pair in one run: microseconds, the ratio, and the ratio to the floor.

A graph holds ten calls or more, over rotating buffers of 180 MB, or of 256 sets where that would take more; before
every replay 192 MB of something else is read, so that nothing is found in L2. Variants take turns, ours is there
twice, and the difference between the two is the spread inside which a ratio is a tie.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm_peers
from ops_report import Row, markdown
from timing import ceilings, graph_of, interleaved
from torch import Tensor

from mla_backends import ops
from mla_backends.compiled import function
from mla_backends.cuda_ops import DONE
from mla_backends.formats import Format

BF16, DEVICE = torch.bfloat16, "cuda"
ROTATING_BYTES, MOST_SETS, LEAST_CALLS, REPLAYS = 180e6, 256, 10, 30
HEADS, TOKENS = (16, 64, 128), (1, 4, 16, 32, 128, 512, 2048, 8192)
WRITE_TOKENS = (1, 16, 128, 1024, 4096, 16384)
CROSSOVER_TOKENS = (1, 4, 16, 32, 40, 48, 56, 64, 96, 128)
PAGE_SIZE = 64
ANY = 1 << 30
FORMATS: tuple[Format, ...] = ("bf16", "fp8", "fp8_ds_mla")
ROWS = {"bf16": (576, BF16), "fp8": (576, torch.uint8), "fp8_ds_mla": (656, torch.uint8)}

Call = Callable[[], object]
Variants = dict[str, Callable[..., object]]


_FLUSH: list[tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = []


def flush() -> torch.cuda.CUDAGraph:
    """Reads 192 MB, which leaves L2 full of clean lines of no use to anyone."""
    if not _FLUSH:
        other = torch.randn(48 << 20, device=DEVICE)
        total = torch.empty((), device=DEVICE)
        _FLUSH.append((graph_of([lambda: torch.sum(other, 0, out=total)]), other, total))
    return _FLUSH[0][0]


def measure(row: Row, make: Callable[[], Any], variants: Variants) -> Row:
    """Fill in row.us: each variant is called with one set after another that `make` made."""
    sets = [make() for _ in range(max(1, min(MOST_SETS, math.ceil(ROTATING_BYTES / row.bytes))))]
    calls = max(LEAST_CALLS, len(sets))
    graphs = []
    for run in variants.values():
        bound = [partial(run, sets[i % len(sets)]) for i in range(calls)]
        graphs += [flush(), graph_of(bound)]
    times = interleaved(graphs, replays=REPLAYS)[1::2]
    row.us = {name: us / calls for name, us in zip(variants, times, strict=True)}
    return row


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=BF16)


def twice(ours: Callable[..., object], others: Variants) -> Variants:
    return {"ours": ours, **others, "ours again": ours}


def query_assembly(heads: int, tokens: int, vllm: Any) -> Row:
    """W_UK into the query, and nope and rope in one buffer."""

    def make() -> tuple[Tensor, ...]:
        projected = normal(tokens, heads, 192)
        out = torch.empty(tokens, heads, 576, device=DEVICE, dtype=BF16)
        return out, projected[..., :128], projected[..., 128:], normal(heads, 128, 512)

    def ours(x: tuple[Tensor, ...]) -> None:
        out, q_nope, q_pe, w_uk = x
        ops.absorb_query(out[..., :512], out[..., 512:], q_nope, q_pe, w_uk)

    def cat(x: tuple[Tensor, ...]) -> None:
        _, q_nope, q_pe, w_uk = x
        torch.cat((torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1), q_pe), -1)

    def concat(x: tuple[Tensor, ...]) -> None:
        out, q_nope, q_pe, w_uk = x
        vllm.concat_mla_q(torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1), q_pe, out)

    def bmm(x: tuple[Tensor, ...]) -> None:
        out, q_nope, _, w_uk = x
        torch.bmm(q_nope.transpose(0, 1), w_uk, out=out[..., :512].transpose(0, 1))

    others: Variants = {"bmm + torch.cat": cat, "bmm in place alone": bmm}
    if vllm is not None:
        others["bmm + vLLM concat"] = concat
    moved = 2 * (heads * 128 * 512 + tokens * heads * (192 + 576))
    row = Row("query", "query assembly", tokens, heads, moved, 2 * tokens * heads * 128 * 512)
    return measure(row, make, twice(ours, others))


def concatenation(heads: int, tokens: int, vllm: Any) -> Row:
    """nope, as a transposed product leaves it, and rope, a slice of the projection, into the query."""

    def make() -> tuple[Tensor, ...]:
        out = torch.empty(tokens, heads, 576, device=DEVICE, dtype=BF16)
        return out, normal(heads, tokens, 512).transpose(0, 1), normal(tokens, heads, 192)[..., 128:]

    others: Variants = {"torch.cat": lambda x: torch.cat((x[1], x[2]), -1, out=x[0])}
    if vllm is not None:
        others["vLLM"] = lambda x: vllm.concat_mla_q(x[1], x[2], x[0])
    row = Row("concat", "concat_nope_rope", tokens, heads, 4 * tokens * heads * 576)
    return measure(row, make, twice(lambda x: ops.concat_nope_rope(*x), others))


def cache_write(format: Format, tokens: int, vllm: Any) -> Row:
    """New rows into shuffled slots of a cache of twice as many."""
    width, dtype = ROWS[format]
    pages = max(4, 2 * tokens // PAGE_SIZE)
    scale = torch.full((1,), 0.7, device=DEVICE)

    def make() -> tuple[Tensor, ...]:
        data = torch.zeros(pages, PAGE_SIZE, width, device=DEVICE, dtype=dtype)
        return data, normal(tokens, 512), normal(tokens, 64), torch.randperm(pages * PAGE_SIZE, device=DEVICE)[:tokens]

    kv_scale = scale if format == "fp8" else None
    others: Variants = {}
    if vllm is not None:
        others["vLLM"] = lambda x: vllm_peers.write_cache(vllm, x[0], x[1], x[2], x[3], format, scale)

    def ours(x: tuple[Tensor, ...]) -> None:
        data, kv_c, k_pe, slots = x
        ops.write_cache(data, kv_c, k_pe, slots, format, kv_scale)

    moved = tokens * (1152 + width * dtype.itemsize + 8)
    row = Row("writes", f"write_cache {format}", tokens, 1, moved)
    return measure(row, make, twice(ours, others))


def indexer_write(tokens: int, vllm: Any) -> Row:
    pages = max(4, 2 * tokens // PAGE_SIZE)

    def make() -> tuple[Tensor, ...]:
        data = torch.zeros(pages, PAGE_SIZE, 132, device=DEVICE, dtype=torch.uint8)
        return data, normal(tokens, 128), torch.randperm(pages * PAGE_SIZE, device=DEVICE)[:tokens]

    others: Variants = {}
    if vllm is not None:
        others["vLLM"] = lambda x: vllm_peers.write_indexer(vllm, *x)
    row = Row("writes", "write_indexer_cache", tokens, 1, tokens * (256 + 132 + 8))
    return measure(row, make, twice(lambda x: ops.write_indexer_cache(*x), others))


def taken(export: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if export(*arguments) != DONE:
        raise SystemExit("the kernel for few tokens refused its own shape")


def crossover(heads: int, tokens: int, dtype: torch.dtype) -> Row:
    """Our kernel for few tokens against cuBLAS and what must follow it, whatever the ops would choose."""
    absorb, tail, quantize = function("absorb_query"), function("rope_tail"), function("quantize_query")
    if absorb is None or tail is None or quantize is None:
        raise SystemExit(str(ops.compiled()))
    is_e4m3 = dtype == torch.float8_e4m3fn
    scale = torch.full((1,), 0.1, device=DEVICE) if is_e4m3 else None

    def make() -> tuple[Tensor, ...]:
        projected = normal(tokens, heads, 192)
        out = torch.empty(tokens, heads, 576, device=DEVICE, dtype=dtype)
        return out[..., :512], out[..., 512:], projected[..., :128], projected[..., 128:], normal(heads, 128, 512)

    def cublas(x: tuple[Tensor, ...]) -> None:
        latent, rope, q_nope, q_pe, w_uk = x
        if is_e4m3:
            quantize(latent, torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1), scale)
        else:
            torch.bmm(q_nope.transpose(0, 1), w_uk, out=latent.transpose(0, 1))
        tail(rope, q_pe, scale)

    moved = 2 * (heads * 128 * 512 + tokens * heads * 192) + tokens * heads * 576 * dtype.itemsize
    row = Row("crossover", "absorb to e4m3" if is_e4m3 else "absorb", tokens, heads, moved)
    return measure(row, make, twice(lambda x: taken(absorb, (*x, scale, ANY)), {"cuBLAS": cublas}))


def check(vllm: Any) -> list[str]:
    """What ours and theirs agree on to the byte, before anything is timed; ours and torch's otherwise."""
    said = []
    nope, rope = normal(5, 16, 512), normal(5, 16, 64)
    out, theirs = (torch.empty(5, 16, 576, device=DEVICE, dtype=BF16) for _ in range(2))
    ops.concat_nope_rope(out, nope, rope)
    if not torch.equal(out, torch.cat((nope, rope), -1)):
        raise SystemExit("concat_nope_rope differs from torch.cat")
    if vllm is None:
        return ["vLLM's ops are not here ($MLA_KERNEL_SITE), so nothing is compared with them"]
    vllm.concat_mla_q(nope, rope, theirs)
    said.append(f"concat_mla_q equals ours: {torch.equal(out, theirs)}")
    kv_c, k_pe, slots = normal(9, 512), normal(9, 64), torch.randperm(256, device=DEVICE)[:9]
    scale = torch.full((1,), 0.7, device=DEVICE)
    for format in FORMATS:
        width, dtype = ROWS[format]
        ours_data, their_data = (torch.zeros(4, 64, width, device=DEVICE, dtype=dtype) for _ in range(2))
        ops.write_cache(ours_data, kv_c, k_pe, slots, format, scale if format == "fp8" else None)
        vllm_peers.write_cache(vllm, their_data, kv_c, k_pe, slots, format, scale)
        same = (ours_data.view(torch.uint8) == their_data.view(torch.uint8)).float().mean().item()
        said.append(f"concat_and_cache_mla {format}: {same:.4%} of the bytes are ours")
    keys, ours_data = normal(9, 128), torch.zeros(4, 64, 132, device=DEVICE, dtype=torch.uint8)
    their_data = ours_data.clone()
    ops.write_indexer_cache(ours_data, keys, slots)
    vllm_peers.write_indexer(vllm, their_data, keys, slots)
    said.append(f"indexer_k_quant_and_cache equals ours: {torch.equal(ours_data, their_data)}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench-ops"))
    parser.add_argument("--only", default="query,concat,writes,crossover")
    parser.add_argument("--quick", action="store_true", help="the ends and the middle of each range")
    asked = parser.parse_args()
    if not ops.compiled():
        raise SystemExit(str(ops.compiled()))
    torch.manual_seed(0)
    wanted, vllm = asked.only.split(","), vllm_peers.load()

    def some(values: tuple[int, ...]) -> tuple[int, ...]:
        return (values[0], values[len(values) // 2], values[-1]) if asked.quick else values

    copy, matmul = ceilings()
    said, rows = check(vllm), []
    for heads in HEADS:
        if "query" in wanted:
            # the goals' points are kept in a quick run too
            tokens = (1, 128, 2048) if asked.quick else TOKENS
            rows += [query_assembly(heads, t, vllm) for t in tokens]
        if "concat" in wanted:
            rows += [concatenation(heads, t, vllm) for t in some(TOKENS)]
        if "crossover" in wanted:
            for dtype in (BF16, torch.float8_e4m3fn):
                rows += [crossover(heads, t, dtype) for t in some(CROSSOVER_TOKENS)]
    if "writes" in wanted:
        for t in some(WRITE_TOKENS):
            rows += [cache_write(f, t, vllm) for f in FORMATS] + [indexer_write(t, vllm)]
    text = markdown(rows, said, copy, matmul)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "bench-ops.md").write_text(text)
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_s": copy,
        "gemm_tflop_s": matmul,
    }
    (asked.out / "bench-ops.json").write_text(
        json.dumps(record | {"said": said, "rows": [asdict(r) for r in rows]}, indent=1)
    )
    print(text)


if __name__ == "__main__":
    main()
