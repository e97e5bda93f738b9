"""The command line: what it prints, and how it ends."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

for package in ("typer", "rich"):
    pytest.importorskip(package, reason=f"the command line needs {package}, of the [cli] extra")

# ruff: noqa: E402, for what needs the extra
from typer.testing import CliRunner, Result

import mla_backends.backend
import mla_backends.cli
import mla_backends.compare
from mla_adapters.eager import Eager, EagerKernel
from mla_backends import Problem, get_backend
from mla_backends.adapter import Adapter
from mla_backends.catalogue import Broken, installed
from mla_backends.cli import app
from mla_backends.support import Limit, OneOf

SMALL = ("compare", "--model", "deepseek-v2-lite", "--tp", "2", "--batch", "4", "--seq", "130", "--device", "cpu")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with the adapters that are to be installed, and no others."""

    def install(*entries: Adapter | Broken) -> None:
        for module in (mla_backends.backend, mla_backends.cli, mla_backends.compare):
            monkeypatch.setattr(module, "installed", lambda: entries)

    return install


class OffKernel(EagerKernel):
    def run(self, *arguments: Any) -> Any:
        out, lse = super().run(*arguments)
        return out * 1.01, lse


class Off(Eager):
    """Off by a hundredth, which the canary's coarse tolerance lets through and the comparison doesn't."""

    name = "off"

    def plan(self, step: Any, library: Any) -> OffKernel:
        return OffKernel(step)


class SizeThirtyTwo(Eager):
    name = "size-32"
    support = (*Eager.support, Limit(Problem, "page_size", OneOf(32), refuses=(64,), source="a test"))


# --- info and table -------------------------------------------------------------------------------------------------------


def test_info_lists_the_device_the_ops_and_every_adapter() -> None:
    done = run("info")
    assert done.exit_code == 0
    assert str(mla_backends.ops.compiled()) in done.stdout
    assert all(f"  {entry.name} " in done.stdout for entry in installed())
    assert f"device    {get_backend().device}" in done.stdout


def test_info_lists_an_adapter_that_does_not_import_with_its_error(only: Any) -> None:
    only(Eager(), Broken("broken", "OSError: undefined symbol: cuFoo"))
    lines = run("info").stdout.splitlines()
    assert "  eager   torch" in lines
    assert "  broken  does not import: OSError: undefined symbol: cuFoo" in lines


def test_table_has_a_row_an_adapter() -> None:
    done = run("table")
    assert done.exit_code == 0
    assert len([line for line in done.stdout.splitlines() if line.startswith("| `")]) == len(installed())


def test_table_goes_into_a_file_with_marks_and_into_no_other(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("before\n<!-- support table -->\n<!-- end of the support table -->\nafter\n")
    assert run("table", "--into", str(document)).exit_code == 0
    assert run("table").stdout.strip() in document.read_text()
    document.write_text("nothing\n")
    assert run("table", "--into", str(document)).exit_code == 2
    assert document.read_text() == "nothing\n"


# --- explain --------------------------------------------------------------------------------------------------------------

ANOTHER: dict[str, Any] = {
    "num_heads": 20,
    "batch": 7,
    "q_len": 3,
    "ragged": True,
    "causal": False,
    "kv_lora_rank": 448,
    "qk_rope_head_dim": 32,
    "cache_format": "fp8",
    "q_dtype": "float16",
    "page_size": 16,
    "page_stride": 80,
    "whole_rows": False,
    "packed_rows": False,
    "alignment": 8,
    "topk": 192,
    "needs_lse": True,
    "attn_sink": True,
    "batch_invariant": True,
    "measured_q_scale": False,
    "max_seq_len": 999,
}


def options(facts: dict[str, Any]) -> list[str]:
    found = []
    for name, value in facts.items():
        option = name.replace("_", "-")
        found += (
            [f"--{option}" if value else f"--no-{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
        )
    return found


def test_explain_takes_every_field_of_a_problem() -> None:
    assert set(ANOTHER) == {f.name for f in fields(Problem)}
    for name, value in ANOTHER.items():
        facts = {"num_heads": 128, name: value}
        done = run("explain", "--capability", "sm90", *options({name: value}))
        assert done.stdout.rstrip("\n") == str(get_backend((9, 0)).explain(Problem(**facts)))


def test_explain_takes_all_of_them_at_once() -> None:
    done = run("explain", "--capability", "sm100", *options(ANOTHER))
    assert done.stdout.rstrip("\n") == str(get_backend((10, 0)).explain(Problem(**ANOTHER)))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "--capability", "hopper"], "capability is 'hopper'"),
        (["explain", "--num-heads", "0"], "num_heads is 0"),
        (["compare", "--tp", "3"], "tp_size is 3, it takes a divisor of the model's 128 heads"),
        (["compare", "--model", "gpt-2"], "model is 'gpt-2', it takes one of deepseek-v3"),
        (["compare", "--format", "int4"], "format is 'int4'"),
        (["compare", "--batch", "0"], "batch is 0"),
        (["compare", "--lengths", "short"], "lengths is 'short'"),
        (["compare", "--adapter", "none-such"], "adapter is 'none-such'"),
        (["compare", "--device", "cuda:77"], "device is cuda:77"),
        (["table", "--into", "no-such/file.md"], "'no-such/file.md' does not exist"),
    ],
)
def test_bad_input_is_a_sentence_and_status_2(arguments: list[str], sentence: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# --- compare --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra", [(), ("--format", "fp8", "--q-len", "3"), ("--format", "fp8_ds_mla", "--topk", "65")], ids=str
)
def test_compare_gives_pure_json_of_right_figures(only: Any, extra: tuple[str, ...]) -> None:
    only(Eager(), SizeThirtyTwo())
    done = run(*SMALL, "--json", *extra)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    eager, refused = found["rows"]
    assert found["is_right"] is True
    assert found["checked"] == 4
    assert 0 < eager["outcome"]["out_error"] <= 5e-3
    assert eager["outcome"]["lse_error"] <= 1e-3
    assert eager["outcome"]["is_strided_equal"] is True
    assert eager["outcome"]["facts"]["heads"] == 8
    assert eager["microseconds"] > 0
    assert refused["outcome"] is None
    assert refused["reasons"] == ["page_size is 64, it takes 32 [a test]"]


def test_compare_prints_a_table_and_the_reasons(only: Any) -> None:
    only(Eager(), SizeThirtyTwo())
    done = run(*SMALL)
    assert done.exit_code == 0
    assert "8 heads (tp 2), 4 requests of 0 to 130 keys" in done.stdout
    assert "to the bit" in done.stdout
    assert "size-32: page_size is 64, it takes 32 [a test]" in done.stdout


def test_a_mismatch_is_named_and_status_1(only: Any) -> None:
    only(Eager(), Off())
    done = run(*SMALL)
    assert done.exit_code == 1
    assert "off: out is off by" in done.stdout
    assert "eager: " not in done.stdout
    told = run(*SMALL, "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["is_right"] is False


def test_no_adapter_is_every_reason_and_status_2(only: Any) -> None:
    only(SizeThirtyTwo())
    done = run(*SMALL)
    assert done.exit_code == 2
    assert "page_size is 64, it takes 32 [a test]" in done.stderr
    assert "Traceback" not in done.stderr


def test_compare_can_run_one_adapter_alone(only: Any) -> None:
    only(Eager(), Off())
    done = run(*SMALL, "--adapter", "eager", "--json")
    assert done.exit_code == 0
    assert [row["adapter"] for row in json.loads(done.stdout)["rows"]] == ["eager"]


# --- the extra ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module', name='{package}')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", "from mla_backends.cli import main; main()"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.strip() == f"mla-backends needs {package}: pip install 'mla-backends[cli]'"
