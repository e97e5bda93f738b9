"""What dispatch chooses against the fastest: every dense adapter under graphs, at two sets of problems.

From the first set come the figures of each adapter's `Speed`; `--fit` prints them as this run would have them. The second
judges the choice, and no figure comes from it.

Lengths are spread alike in both and fill three quarters of the plan's capacity, which is what dispatch takes them to do.
A layer's time is a graph's, and for adapters that plan on the host a share of `update` besides: one a step, over the layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from bench_serving import Point
from timing import graph_of, interleaved

from mla_backends import DecodePlan, get_backend
from mla_backends.catalogue import Broken, installed
from mla_backends.device import Device
from mla_backends.dispatch import estimate
from mla_backends.problem import Problem
from mla_backends.support import Speed

LAYERS = 61
"""Of a step: DeepSeek-V3's."""

# (heads, q_len, batch, longest request)
TUNED = tuple(itertools.product((16, 64, 128), (1,), (1, 8, 32, 128), (1024, 4096, 16384)))
HELD_OUT = (
    *itertools.product((4, 24, 48, 112), (1,), (2, 12, 56), (896, 3200, 12800)),
    *itertools.product((16, 24), (2, 3, 6), (10, 40), (2048,)),
)


@dataclass(frozen=True, eq=False)
class Found:
    """One problem: microseconds of a layer by adapter, and of an update by those that plan on the host."""

    problem: Problem
    graph_us: dict[str, float]
    update_us: dict[str, float]

    def layer_us(self, adapter: str) -> float:
        return self.graph_us[adapter] + self.update_us.get(adapter, 0.0) / LAYERS


def measure(heads: int, q_len: int, batch: int, length: int, replays: int) -> Found:
    point = Point("fa3", heads, batch, length, q_len)
    plans: dict[str, DecodePlan] = {}
    graphs = []
    times = max(1, math.ceil(10 / len(point.layers)))
    for verdict in get_backend().explain(point.plan().problem):
        if verdict.runs:
            point.adapter = verdict.name
            plans[verdict.name], calls = point.ours()
            graphs.append(graph_of(calls * times))
    spent = interleaved(graphs, replays=replays)
    graph_us = {name: t / (len(point.layers) * times) for name, t in zip(plans, spent, strict=True)}
    update_us = {name: _update_us(point, plan) for name, plan in plans.items() if plan.update_mode == "host"}
    return Found(plans["fa3"].problem, graph_us, update_us)


def _update_us(point: Point, plan: DecodePlan) -> float:
    """Wall time of an update whose lengths the host has."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        plan.update(point.table, point.lens, seq_lens_cpu=point.lens_cpu)
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def fitted(name: str, tuned: list[Found], starts: int = 3) -> Speed:
    """The figures whose estimates are nearest to what was measured, in the mean square of the logarithm.

    Of what combining costs, a split or a partial result, whichever explains more. By steps along one figure at a time, ever
    smaller, from some random starts.
    """
    (adapter,) = (a for a in installed() if not isinstance(a, Broken) and a.name == name)
    mine, device, drawn = [f for f in tuned if name in f.graph_us], Device.here(), random.Random(0)

    def speed_of(figures: list[float], combining: str) -> Speed:
        return replace(Speed(*(round(f, 3) for f in figures[:3])), **{combining: round(figures[3], 3)})

    def off(figures: list[float], combining: str) -> float:
        speed = speed_of(figures, combining)
        return sum(math.log(estimate(adapter, f.problem, device, speed) / f.layer_us(name)) ** 2 for f in mine)

    found: list[tuple[float, list[float], str]] = []
    for combining in ("split", "partial") * starts:
        figures = [drawn.uniform(0.3, 1.0), drawn.uniform(0.3, 1.0), drawn.uniform(5.0, 50.0), drawn.uniform(0.05, 1.0)]
        least, step = off(figures, combining), 0.3
        while step > 3e-3:
            moved = False
            for i, factor in itertools.product(range(len(figures)), (1 + step, 1 / (1 + step))):
                tried = [f * factor if j == i else f for j, f in enumerate(figures)]
                if (now := off(tried, combining)) < least:
                    figures, least, moved = tried, now, True
            if not moved:
                step /= 2
        found.append((least, figures, combining))
    _, figures, combining = min(found)
    return speed_of(figures, combining)


def judged(found: list[Found]) -> dict[str, object]:
    """Of the time of the chosen adapter over that of the fastest: geometric mean, 95th percentile, worst and where."""
    ratios = {f: f.layer_us(_chosen(f.problem)) / min(map(f.layer_us, f.graph_us)) for f in found}
    single = {
        name: statistics.geometric_mean(f.layer_us(name) for f in found)
        for name in set.intersection(*(set(f.graph_us) for f in found))
    }
    best = min(single, key=single.__getitem__)
    mine = statistics.geometric_mean(f.layer_us(_chosen(f.problem)) for f in found)
    ordered, worst = sorted(ratios.values()), max(ratios, key=ratios.__getitem__)
    return {
        "points": len(found),
        "geomean": statistics.geometric_mean(ordered),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
        "worst": ratios[worst],
        "where": f"{worst.problem}: {_chosen(worst.problem)}, {worst.graph_us}, {worst.update_us}",
        "best_single": best,
        "over_best_single": mine / single[best],
    }


def _chosen(problem: Problem) -> str:
    chosen = get_backend().explain(problem).chosen
    assert chosen is not None
    return chosen.name


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cli.add_argument("--out", type=Path, default=Path("build/bench-selection"))
    cli.add_argument("--fit", action="store_true", help="print each adapter's figures as the first set has them")
    cli.add_argument("--quick", action="store_true", help="every sixth problem")
    args = cli.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    step, replays = (6, 9) if args.quick else (1, 21)
    sets = {
        name: [measure(*point, replays) for point in points[::step]]
        for name, points in (("tuned on", TUNED), ("held out", HELD_OUT))
    }
    names = sorted({name for found in sets.values() for f in found for name in f.graph_us})
    speeds = {name: fitted(name, sets["tuned on"]) for name in names} if args.fit else {}
    verdicts = {name: judged(found) for name, found in sets.items()}
    lines = [
        "| problems | points | chosen / fastest, geomean | p95 | worst | chosen / best single, geomean |",
        "|---" * 6 + "|",
    ]
    for name, v in verdicts.items():
        lines.append(
            f"| {name} | {v['points']} | {v['geomean']:.3f} | {v['p95']:.3f} | {v['worst']:.3f} | "
            f"{v['over_best_single']:.3f} ({v['best_single']}) |"
        )
    lines += ["", *(f"worst of those {name}: {v['where']}" for name, v in verdicts.items()), ""]
    lines += [f"{name}: {speed}" for name, speed in speeds.items()]
    rows = [{"set": n, **asdict(f), "problem": asdict(f.problem)} for n, found in sets.items() for f in found]
    (args.out / "selection.json").write_text(json.dumps({"rows": rows, "verdicts": verdicts}, indent=1))
    (args.out / "selection.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
