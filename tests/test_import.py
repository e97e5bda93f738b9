"""What importing the package loads, asked of fresh processes."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

KERNEL_LIBRARIES = (
    "flash_mla",
    "vllm",
    "flashinfer",
    "sgl_kernel",
    "flash_attn_interface",
    "flash_attn",
    "tokenspeed_mla",
)


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, with `path` before everything else that it finds modules in."""
    search = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Without a GPU, so that sm90 is another machine's also where the tests run on one.
    environment = {**os.environ, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """A folder in which each kernel library is a module that ends the process that imports it."""
    for name in KERNEL_LIBRARIES:
        (tmp_path / f"{name}.py").write_text(
            "import os, sys\nsys.stderr.write(__name__)\nsys.stderr.flush()\nos._exit(99)\n"
        )
    return tmp_path


def test_a_trap_springs(traps: Path) -> None:
    assert run("import flashinfer", traps).returncode == 99


def test_importing_the_package_loads_no_kernel_library(traps: Path) -> None:
    done = run("import mla_backends", traps)
    assert done.returncode == 0, done.stderr


def test_explaining_for_another_machine_loads_no_kernel_library(traps: Path) -> None:
    code = textwrap.dedent("""
        from mla_backends import Problem, get_backend
        for capability in ((9, 0), (10, 0), (12, 0)):
            for cache_format in ("bf16", "fp8", "fp8_ds_mla"):
                print(get_backend(capability).explain(Problem(128, cache_format=cache_format)))
    """)
    done = run(code, traps)
    assert done.returncode == 0, done.stderr
    assert "sm90: num_heads=128" in done.stdout


def test_importing_the_package_loads_neither_the_bundled_adapters_nor_the_command_line(traps: Path) -> None:
    code = "import sys, mla_backends; print([m for m in ('mla_adapters', 'typer', 'rich', 'transformers') if m in sys.modules])"
    assert run(code, traps).stdout.strip() == "[]"
