"""What a run of ci/bench-ops found: the tables, and the goals with what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from mla_backends import ops


@dataclass
class Row:
    """One problem: microseconds a call of each variant; the floor's bytes and operations."""

    section: str
    name: str
    tokens: int
    heads: int
    bytes: int
    flops: int = 0
    us: dict[str, float] = field(default_factory=dict)

    def ratio(self, to: str) -> float | None:
        return self.us["ours"] / self.us[to] if to in self.us else None

    @property
    def spread(self) -> float:
        """Of ours against itself."""
        return abs(self.us["ours again"] / self.us["ours"] - 1)


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def goals(rows: list[Row]) -> list[tuple[str, float, float, float]]:
    """(goal, measured, gate, stretch) of performance's rows; a row of many points is held by its worst and its geomean."""
    found: list[tuple[str, float, float, float]] = []
    at = {(r.section, r.heads, r.tokens): r for r in rows if r.section == "query"}
    points = [((128, 128), "bmm + torch.cat", 0.35, 0.30)]
    points += [
        ((128, t), "bmm + vLLM concat", g, s) for t, g, s in ((1, 1.0, 0.65), (128, 0.80, 0.70), (2048, 0.60, 0.55))
    ]
    for (heads, tokens), against, gate, stretch in points:
        row = at.get(("query", heads, tokens))
        ratio = row and row.ratio(against)
        if ratio:
            found.append((f"query assembly / ({against}), H={heads}, T={tokens}", ratio, gate, stretch))
    for section, stretch in (("concat", 0.95), ("writes", 0.90)):
        names = sorted({r.name for r in rows if r.section == section})
        for name in names:
            ratios = [q for r in rows if r.name == name and (q := r.ratio("vLLM")) is not None]
            if ratios:
                found.append((f"{name} / vLLM, geomean of {len(ratios)} points", geomean(ratios), 1.0, stretch))
                found.append((f"{name} / vLLM, the worst point", max(ratios), 1.0, stretch))
    return found


def verdict(measured: float, gate: float, stretch: float) -> str:
    return "stretch" if measured <= stretch else "gate" if measured <= gate else "MISSED"


def markdown(rows: list[Row], said: list[str], copy: float, matmul: float) -> str:
    name = torch.cuda.get_device_name()
    lines = [
        f"{name}, torch {torch.__version__}, copy {copy:.2f} TB/s, bf16 GEMM {matmul:.0f} TFLOP/s in this run.",
        "",
    ]
    lines += [f"- {line}" for line in said] + [f"- {ops.compiled()}", ""]
    for section in ("query", "concat", "writes", "crossover"):
        chosen = [r for r in rows if r.section == section]
        if not chosen:
            continue
        columns = list(dict.fromkeys(n for r in chosen for n in r.us if n != "ours again"))
        lines += [f"### {section}, µs", ""]
        lines.append(f"| what | H | T | {' | '.join(columns)} | ratios | A/A | floor | ours / floor | TB/s |")
        lines.append("|---" * (len(columns) + 8) + "|")
        for r in chosen:
            floor = 1e6 * max(r.bytes / (copy * 1e12), r.flops / (matmul * 1e12))
            ratios = ", ".join(f"{r.us['ours'] / r.us[n]:.2f}" for n in columns if n in r.us and n != "ours")
            times = " | ".join(f"{r.us[n]:.2f}" if n in r.us else "" for n in columns)
            speed = r.bytes / r.us["ours"] / 1e6
            lines.append(
                f"| {r.name} | {r.heads} | {r.tokens} | {times} | {ratios} | {r.spread:.1%} | {floor:.2f} | "
                f"{r.us['ours'] / floor:.2f} | {speed:.2f} |"
            )
        lines.append("")
    measured = goals(rows)
    if measured:
        lines += ["### goals", "", "| goal | measured | gate | stretch | met |", "|---|---|---|---|---|"]
        lines += [
            f"| {g} | {m:.3f} | {gate} | {stretch} | {verdict(m, gate, stretch)} |" for g, m, gate, stretch in measured
        ]
    return "\n".join(lines) + "\n"
