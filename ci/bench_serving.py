"""Each adapter against the library call that it makes: kernel nodes, time under graphs, host time of an eager call.

The direct call is what an engine writes by hand: the library's own Python entry on tensors that are ready,
its metadata made beforehand. Both sides read the same rotating layers of one slot, of 180 MB and more.

Like for like, sparse plans run on what they selected, as the direct call has its tables ready, and the fp8 plan leaves
rows without keys as the kernel does. With "+ settled" they do what the direct call does not: look at slots from
anywhere, and bring rows without keys to out 0.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import ceilings, graph_of, host_times, interleaved, kernel_nodes

from mla_backends import DecodePlan, PagedCache, UnifiedCache, get_backend

SCALE = 192**-0.5
PAGE = 64
ROTATING_BYTES = 180e6
HEADS, BATCHES, LENGTHS = (16, 64, 128), (1, 8, 32, 128), (1024, 4096, 16384)
TOPK = 2048
FORMATS = {"flashmla-fp8": "fp8", "flashmla-sparse": "fp8_ds_mla"}
IS_SPARSE = ("flashmla-sparse", "fa3-sparse")
SETTLED = " + settled"
CASES = (
    *("flashmla", "fa3", "flashinfer", "flashinfer-fa2", "flashmla-fp8", "flashmla-sparse", "fa3-sparse"),
    *(f"{adapter}{SETTLED}" for adapter in ("flashmla-fp8", "flashmla-sparse", "fa3-sparse")),
)

Call = Callable[[], object]


@dataclass
class Point:
    """One problem's tensors: a slot of rotating layers, a query, a table."""

    case: str
    heads: int
    batch: int
    length: int
    q_len: int = 1

    def __post_init__(self) -> None:
        self.adapter, self.settles = self.case.removesuffix(SETTLED), self.case.endswith(SETTLED)
        form = FORMATS.get(self.adapter, "bf16")
        columns = self.length // PAGE
        pages = self.batch * columns
        row_bytes = {"bf16": 1152, "fp8": 576, "fp8_ds_mla": 656}[form]
        layers = min(16, max(2, math.ceil(ROTATING_BYTES / (pages * PAGE * row_bytes))))
        slot = UnifiedCache.allocate(pages, layers, PAGE, form, "cuda")  # type: ignore[arg-type]
        self.layers = [slot.layer(i) for i in range(layers)]
        rows = torch.arange(pages * PAGE, device="cuda")
        step = max(1, (1 << 28) // 576)
        for layer in self.layers:
            for some in rows.split(step):
                kv_c = torch.randn(len(some), 512, device="cuda", dtype=torch.bfloat16)
                layer.write(kv_c, torch.randn(len(some), 64, device="cuda", dtype=torch.bfloat16), some)
        self.table = torch.randperm(pages, device="cuda").int().view(self.batch, columns)
        spread = torch.randn(self.batch).mul(self.length / 8).add(self.length * 3 / 4).clamp(1, self.length)
        self.lens_cpu = spread.int()
        self.lens = self.lens_cpu.cuda()
        self.query = torch.randn(self.batch, self.q_len, self.heads, 576, device="cuda", dtype=torch.bfloat16) * 0.3
        self.indices = None
        if self.adapter in IS_SPARSE:
            self.indices = torch.randint(0, pages * PAGE, (self.batch, 1, TOPK), device="cuda").int()

    def plan(self) -> DecodePlan:
        sparse = self.indices is not None
        return get_backend(adapter=self.adapter).plan(
            self.layers[0],
            None if sparse else self.table,
            None if sparse else self.lens,
            num_heads=self.heads,
            softmax_scale=SCALE,
            q_len=self.q_len,
            topk=TOPK if sparse else None,
            max_batch=self.batch if sparse else None,
            seq_lens_cpu=None if sparse else self.lens_cpu,
            q_scale=0.01 if self.adapter == "flashmla-fp8" else None,
            empty_rows="exact" if self.settles else "any",
        )

    def ours(self) -> tuple[DecodePlan, list[Call]]:
        """One call a layer."""
        plan = self.plan()
        query = plan.new_query()  # with the heads that the kernel runs, as the direct call gets them
        if plan.quantizes_query:
            query.packed.copy_(torch.randn(query.packed.shape, device="cuda") * 8)
        else:
            query.packed[..., : self.heads, :].copy_(self.query.squeeze(1))
        self.e4m3 = query.packed if plan.quantizes_query else None
        indices = None if self.indices is None else self.indices.squeeze(1)
        if indices is not None and not self.settles:
            pages = torch.arange(self.layers[0].num_pages, device="cuda").int().expand(self.batch, -1)
            indices = plan.select_slots(indices, pages)  # a position is its slot
        return plan, [lambda c=c: plan.run(query, c, indices=indices) for c in self.layers]  # type: ignore[misc]

    def direct(self, plan: DecodePlan) -> list[Call]:
        make: dict[str, Callable[[], Callable[[PagedCache], object]]] = {
            "flashmla": self._flashmla,
            "flashmla-fp8": self._flashmla_fp8,
            "flashmla-sparse": self._flashmla_sparse,
            "fa3": self._fa3,
            "fa3-sparse": self._fa3_sparse,
            "flashinfer": lambda: self._flashinfer("fa3"),
            "flashinfer-fa2": lambda: self._flashinfer("fa2"),
        }
        run = make[self.adapter]()
        return [lambda c=c: run(c) for c in self.layers]  # type: ignore[misc]

    def _flashmla(self) -> Callable[[PagedCache], object]:
        import flash_mla

        meta, _ = flash_mla.get_mla_metadata()
        return lambda c: flash_mla.flash_mla_with_kvcache(
            self.query, c.data.unsqueeze(2), self.table, self.lens, 512, meta, softmax_scale=SCALE, use_legacy=True
        )

    def _flashmla_fp8(self) -> Callable[[PagedCache], object]:
        import flash_mla

        query, one = self.e4m3.view(self.batch, 1, -1, 576), torch.full((1,), 0.01, device="cuda")  # type: ignore[union-attr]
        meta, _ = flash_mla.get_mla_metadata()
        meta.tile_scheduler_metadata, meta.num_splits = flash_mla.get_mla_decoding_metadata(
            self.lens, query.shape[2], 1, is_fp8_kvcache=True, use_legacy=True
        )
        return lambda c: flash_mla.flash_mla_with_kvcache(
            query, c.data.unsqueeze(2), self.table, self.lens, 512, meta, softmax_scale=SCALE, is_fp8_kvcache=True,
            descale_q=one, descale_k=c.scale, use_legacy=True,
        )  # fmt: skip

    def _flashmla_sparse(self) -> Callable[[PagedCache], object]:
        import flash_mla

        query = self.query
        if self.heads not in (64, 128):
            query = torch.nn.functional.pad(query, (0, 0, 0, 64 - self.heads))
        meta, _ = flash_mla.get_mla_metadata()
        return lambda c: flash_mla.flash_mla_with_kvcache(
            query, c.data.unsqueeze(2), None, None, 512, meta, softmax_scale=SCALE, is_fp8_kvcache=True,
            indices=self.indices, use_legacy=True,
        )  # fmt: skip

    def _fa3(self) -> Callable[[PagedCache], object]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        flat = self.query.view(self.batch, self.heads, 576)
        starts = torch.arange(self.batch + 1, device="cuda", dtype=torch.int32)
        return lambda c: flash_attn_varlen_func(
            q=flat[..., 512:], q_v=flat[..., :512], k=c.data[..., 512:].unsqueeze(2), v=c.data[..., :512].unsqueeze(2),
            max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=self.length, seqused_k=self.lens,
            block_table=self.table, softmax_scale=SCALE, causal=True, fa_version=3,
        )  # fmt: skip

    def _fa3_sparse(self) -> Callable[[PagedCache], object]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        flat, slots = self.query.view(self.batch, self.heads, 576), self.indices.view(self.batch, TOPK)  # type: ignore[union-attr]
        starts = torch.arange(self.batch + 1, device="cuda", dtype=torch.int32)
        counts = torch.full((self.batch,), TOPK, device="cuda", dtype=torch.int32)
        table = slots // PAGE * self.layers[0].rows_per_page + slots % PAGE
        return lambda c: flash_attn_varlen_func(
            q=flat[..., 512:], q_v=flat[..., :512], k=c.by_row.rope_heads, v=c.by_row.latent_heads, max_seqlen_q=1,
            cu_seqlens_q=starts, max_seqlen_k=TOPK, seqused_k=counts, block_table=table, softmax_scale=SCALE,
            causal=False, fa_version=3,
        )  # fmt: skip

    def _flashinfer(self, kind: str) -> Callable[[PagedCache], object]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

        used = (self.lens_cpu + PAGE - 1) // PAGE
        wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend=kind)
        metadata = MLAPlanMetadata.csr(
            qo_indptr=torch.arange(self.batch + 1, dtype=torch.int32),
            kv_indptr=torch.nn.functional.pad(used.cumsum(0), (1, 0)).int(),
            kv_indices=torch.cat([self.table[b, :n] for b, n in enumerate(used.tolist())]),
            kv_len_arr=self.lens_cpu,
        )
        wrapper.plan(
            metadata=metadata, num_heads=self.heads, head_dim_ckv=512, head_dim_kpe=64, page_size=PAGE, causal=False,
            sm_scale=SCALE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, query_layout="split",
            kv_cache_layout="split",
        )  # fmt: skip
        flat = self.query.view(self.batch, self.heads, 576)
        query = (flat[..., :512], flat[..., 512:])
        return lambda c: wrapper.run(query=query, kv_cache=(c.data[..., :512], c.data[..., 512:]))


INSTANCES = 4


def _some_memory() -> torch.Tensor:
    return torch.empty(random.randint(1, 64) << 20, dtype=torch.uint8, device="cuda")


def measure(point: Point, *, replays: int) -> dict[str, Any]:
    """Ours and direct at one point, interleaved.

    Where its buffers happen to lie counts for as much as 5% of a call, the same one or not: so of each the least of some
    instances, with memory of any size between them; how far those of the direct call lie apart is the spread.
    """
    ours_made, direct_made, between = [], [], []
    for _ in range(INSTANCES):
        plan, calls = point.ours()
        ours_made.append(calls)
        between.append(_some_memory())
        direct_made.append(point.direct(plan))
        between.append(_some_memory())
    times = max(1, math.ceil(10 / len(point.layers)))
    graphs = [graph_of(calls * times) for calls in (*ours_made, *direct_made)]
    per_run = [t / (len(point.layers) * times) for t in interleaved(graphs, replays=replays)]
    ours, direct = min(per_run[:INSTANCES]), min(per_run[INSTANCES:])
    return {
        "case": point.case, "heads": point.heads, "batch": point.batch, "length": point.length,
        "ours_us": ours, "direct_us": direct, "ratio": ours / direct, "instances_us": per_run,
        "spread": max(per_run[INSTANCES:]) / min(per_run[INSTANCES:]) - 1,
    }  # fmt: skip


def fixed_costs(case: str) -> dict[str, Any]:
    """Kernel nodes of one captured run, and host time of an eager one, at a size where only they count."""
    found: dict[str, Any] = {"case": case}
    for heads in (16, 128):
        point = Point(case, heads, 1, 1024)
        plan, ours = point.ours()
        direct = point.direct(plan)
        declared = plan.describe()["adds_kernels"] if point.settles else ()
        found[f"nodes_{heads}"] = (kernel_nodes(ours[:1]), kernel_nodes(direct[:1]), declared)
        host = host_times([ours[0], direct[0], direct[0]])
        found[f"host_us_{heads}"] = (*host, host[0] - host[1])
    return found


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cli.add_argument("--out", type=Path, default=Path("build/bench-serving"))
    cli.add_argument("--cases", default=",".join(CASES))
    cli.add_argument("--quick", action="store_true", help="one batch and length")
    args = cli.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    copy, matmul = ceilings()
    lines = [f"copy {copy:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s, {torch.cuda.get_device_name()}", ""]
    rows, fixed, cases = [], [], args.cases.split(",")
    for case in cases:
        fixed.append(fixed_costs(case))
        for heads in HEADS:
            for batch in BATCHES if not args.quick else (32,):
                for length in LENGTHS if not args.quick else (4096,):
                    if case.removesuffix(SETTLED) in IS_SPARSE and length != 4096:
                        continue
                    rows.append(measure(Point(case, heads, batch, length), replays=15 if args.quick else 30))
                    torch.cuda.empty_cache()
    lines += [
        "| | points | time ratio, geomean | worst | where, and the A/A spread there | A/A spread, median |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        mine = [r for r in rows if r["case"] == case]
        worst = max(mine, key=lambda r: r["ratio"])
        where = f"H {worst['heads']}, B {worst['batch']}, {worst['length']}: {worst['spread']:.3f}"
        geomean = statistics.geometric_mean(r["ratio"] for r in mine)
        spread = statistics.median(r["spread"] for r in mine)
        lines.append(f"| {case} | {len(mine)} | {geomean:.3f} | {worst['ratio']:.3f} | {where} | {spread:.3f} |")
    lines += [
        "",
        "| | H | kernel nodes, ours / direct | declared | host µs, ours | direct | direct again | ours - direct |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for f in fixed:
        for heads in (16, 128):
            (ours, direct, declared), host = f[f"nodes_{heads}"], f[f"host_us_{heads}"]
            shown = " | ".join(f"{h:.1f}" for h in host)
            lines.append(f"| {f['case']} | {heads} | {ours} / {direct} | {', '.join(declared) or 'none'} | {shown} |")
    (args.out / "serving.json").write_text(
        json.dumps({"copy_tb_s": copy, "matmul_tflop_s": matmul, "rows": rows, "fixed": fixed}, indent=1)
    )
    (args.out / "serving.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
