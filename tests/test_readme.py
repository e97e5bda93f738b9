"""README's code runs, and its table is the one that the code prints."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_backends import Device, InvalidInput, Problem, get_backend
from mla_backends.adapter import Adapter
from mla_backends.catalogue import installed
from mla_backends.support_table import BEGIN, END, markdown, with_table

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def bundled() -> list[Adapter]:
    return [a for a in installed() if isinstance(a, Adapter) and type(a).__module__.startswith("mla_adapters.")]


@pytest.fixture
def defaults() -> Any:
    """Torch's own, again, after the test."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None if device.type == "cpu" else device)


@pytest.mark.usefixtures("defaults")
def test_the_ten_lines_and_those_of_sparse_decode_run() -> None:
    names: dict[str, Any] = {}
    exec(blocks()[0], names)
    assert names["out"].shape == (1, 16, 128)
    assert names["out"].isfinite().all()
    assert names["out"].any()
    exec(blocks()[1], names)
    assert names["out"].shape == (1, 16, 512)
    assert names["out"].isfinite().all()
    assert names["out"].any()


def test_the_example_of_an_adapter_is_listed_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    # Judged for a machine that is not this one, where nobody asks what is installed.
    monkeypatch.setattr(Device, "here", lambda device=None: Device(None, "cpu"))
    names: dict[str, Any] = {"__name__": "example"}
    exec(blocks()[2], names)
    backend = get_backend((9, 0), adapters=names["ADAPTERS"])
    assert [v.runs for v in backend.explain(Problem(16))] == [True]
    refused = str(get_backend((10, 0), adapters=names["ADAPTERS"]).explain(Problem(16, page_size=32)))
    assert "page_size is 32, it takes 64 [my_kernels/decode.h:40]" in refused
    with pytest.raises(InvalidInput):
        get_backend((9, 0), adapter="another", adapters=names["ADAPTERS"])


def test_the_table_is_what_the_code_prints() -> None:
    assert with_table(README, markdown(bundled())) == README, "write it anew: mla-backends table --into README.md"


def test_a_table_needs_its_two_marks() -> None:
    assert with_table(f"a\n{BEGIN}\nold\n{END}\nb", "new") == f"a\n{BEGIN}\nnew\n{END}\nb"
    for document in ("", BEGIN, END, f"{END}\n{BEGIN}"):
        with pytest.raises(InvalidInput, match="has no place for a table"):
            with_table(document, "new")


def test_the_refusal_is_what_explain_prints() -> None:
    """Each line, in order; "..." stands for those left out."""
    testing = pytest.importorskip("typer.testing", reason="the command line needs the [cli] extra")
    from mla_backends.cli import app

    found = re.search(r"^\$ mla-backends (explain .*)\n((?:.*\n)*?)```", README, re.MULTILINE)
    assert found is not None
    printed = testing.CliRunner().invoke(app, found[1].split()).stdout.splitlines()
    shown = [line for line in found[2].splitlines() if line.strip() != "..."]
    assert len(shown) >= 5
    rest = iter(printed)
    assert all(line in rest for line in shown), "\n".join(printed)


def test_every_bundled_adapter_is_in_the_table() -> None:
    table = markdown(bundled())
    assert bundled()
    assert all(f"| `{adapter.name}` |" in table for adapter in bundled())


def test_every_path_that_the_readme_names_exists() -> None:
    root = Path(__file__).parents[1]
    named = set(re.findall(r"`((?:ci|examples|tests|adapters)/[\w./-]+)[^`]*`", README))
    assert len(named) >= 5
    assert not [path for path in named if not (root / path).exists()]
