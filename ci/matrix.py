"""A pytest plug-in that writes the GPU matrix: adapter x condition, passed, refused with the reason, or failed.

python -m pytest -p matrix --matrix-dir DIR        with ci/ on PYTHONPATH, as ci/gpu does
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SIGNS = {"passed": "pass", "refused": "refused", "failed": "FAILED", "skipped": "skipped"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix-dir", help="where matrix.json and matrix.md are written")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--matrix-dir") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Matrix(Path(config.getoption("--matrix-dir"))))


class Matrix:
    """The reports of tests that recorded an adapter and a condition; all others are only counted."""

    def __init__(self, into: Path) -> None:
        self._into = into
        self._cells: list[dict[str, Any]] = []
        self._tests: Counter[str] = Counter()
        self._skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        decides = report.when == "call" or (report.when == "setup" and not report.passed)
        if not decides:
            return
        self._tests[report.outcome] += 1
        facts = dict(report.user_properties)
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skips[report.longrepr[2]] += 1
        if "condition" not in facts:
            return
        result = "refused" if report.passed and "refused" in facts else report.outcome
        why = facts.get("refused", "")
        if report.failed:
            why = str(report.longrepr).splitlines()[-1] if report.longrepr else "no report"
        elif report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2]
        cell = {"adapter": facts["adapter"], "condition": facts["condition"], "result": result, "why": why}
        self._cells.append(
            {**cell, **{k: facts[k] for k in ("out_error", "lse_error", "stated_lse_error") if k in facts}}
        )

    def pytest_sessionfinish(self) -> None:
        self._into.mkdir(parents=True, exist_ok=True)
        machine = machine_facts()
        page = {"machine": machine, "tests": dict(self._tests), "skips": dict(self._skips), "cells": self._cells}
        (self._into / "matrix.json").write_text(json.dumps(page, indent=1))
        (self._into / "matrix.md").write_text(as_markdown(machine, self._cells, self._tests, self._skips))


def machine_facts() -> dict[str, str]:
    """Device, driver and library versions."""
    import torch

    from mla_backends.catalogue import Broken, installed, serving
    from mla_backends.device import Device

    facts = {"python": platform.python_version(), "torch": torch.__version__, "device": Device.here().name}
    if torch.cuda.is_available():
        facts["capability"] = str(Device.here())
        facts["cuda"] = str(torch.version.cuda)
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    for entry in installed():
        facts[entry.name] = entry.error if isinstance(entry, Broken) else str(serving(entry))
    return facts


def as_markdown(machine: dict[str, str], cells: list[dict[str, Any]], tests: Counter[str], skips: Counter[str]) -> str:
    """The matrix to read: a row a condition, a column an adapter, refusals by number."""
    adapters = sorted({c["adapter"] for c in cells})
    rows = list(dict.fromkeys(c["condition"] for c in cells))
    found = {(c["adapter"], c["condition"]): c for c in cells}
    reasons: dict[str, int] = {}
    lines = ["# GPU matrix", "", *(f"- {name}: {value}" for name, value in machine.items()), ""]
    lines.append("tests: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(tests.items())))
    lines += ["", "| condition | " + " | ".join(adapters) + " |", "|---" * (len(adapters) + 1) + "|"]
    for row in rows:
        shown = []
        for adapter in adapters:
            cell = found.get((adapter, row))
            if cell is None:
                shown.append("")
                continue
            text = SIGNS[cell["result"]]
            if cell["result"] == "passed" and "out_error" in cell:
                text += f" {cell['out_error']:.1e}"
            if "stated_lse_error" in cell:
                text += f", without lse; as named, lse {cell['stated_lse_error']:.1e}"
            if cell["why"]:
                text += f" [{reasons.setdefault(cell['why'], len(reasons) + 1)}]"
            shown.append(text)
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    lines += ["", *(f"[{number}] {why}" for why, number in reasons.items())]
    if skips:
        lines += ["", "Skipped:", *(f"- {count}x {why}" for why, count in skips.items())]
    return "\n".join(lines) + "\n"
