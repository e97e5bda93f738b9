"""Imports go strictly down the floors, adapters stand apart, and no kernel library is imported by importing ours."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# From the ground up. A module imports from the floors below its own; one that is new gets its place here.
FLOORS = (
    "errors",
    "problem device result",
    "support formats",
    "compiled torch_ops torch_slots verdicts",
    "op_table cuda_ops",
    "query_ops row_ops slot_ops graph_node",
    "cache_ops",
    "ops",
    "query pages steps",
    "cache indexer absorb reference",
    "adapter unified",
    "arguments catalogue buffers",
    "intake outlet selection recipe",
    "plan_node",
    "dispatch plan",
    "canary",
    "backend",
    "__init__",
    "conditions timing",
    "trials",
    "endurance compare support_table",
    "testing",
    "cli",
)
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules.split()}

NO_TORCH = ("errors", "problem", "device", "result", "support", "formats")
KERNEL_LIBRARIES = {
    "flash_mla",
    "vllm",
    "flashinfer",
    "sgl_kernel",
    "flash_attn_interface",
    "flash_attn",
    "tokenspeed_mla",
}


class Import(NamedTuple):
    """One imported module; `inside` a function it is not imported by importing the file."""

    module: str
    inside: bool
    line: int


def is_type_checking(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import of a module in `package`, but those for type checkers alone."""
    yield from _imports(ast.parse(source), package, inside=False)


def _imports(node: ast.AST, package: str, *, inside: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child):
            for other in child.orelse:
                yield from _imports(ast.Module([other], []), package, inside=inside)
        elif isinstance(child, ast.Import):
            yield from (Import(alias.name, inside, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = child.module or ""
            if child.level:
                parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                origin = ".".join([*parents, origin]).strip(".")
            # `from package import name`: the name is a module of it or its own, and which is for the reader to say.
            yield from (Import(f"{origin}.{alias.name}", inside, child.lineno) for alias in child.names)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, inside=inside or is_function)


def floor_of(imported: str) -> tuple[str, int] | None:
    """The module of ours that an import means, and its floor; the package itself is `__init__`."""
    head, _, rest = imported.partition(".")
    if head != "mla_backends":
        return None
    module = rest.split(".")[0]
    return (module, FLOOR[module]) if module in FLOOR else ("__init__", FLOOR["__init__"])


def climbs(source: str, module: str) -> list[str]:
    """Sentences on the imports of a module of ours that don't go down."""
    found = []
    for each in imports(source, "mla_backends"):
        target = floor_of(each.module)
        if target is not None and target[1] >= FLOOR[module]:
            found.append(f"{module}:{each.line} (floor {FLOOR[module]}) imports {target[0]} (floor {target[1]})")
    return found


def strangers(source: str, adapter: str) -> list[str]:
    """Sentences on what an adapter imports above adapter.py, or of another adapter."""
    found = []
    for each in imports(source, "mla_adapters"):
        target = floor_of(each.module)
        if target is not None and target[1] > FLOOR["adapter"]:
            found.append(f"{adapter}:{each.line} imports {target[0]}, above adapter.py")
        if each.module.split(".")[0] == "mla_adapters":
            found.append(f"{adapter}:{each.line} imports {each.module}, another adapter")
    return found


def eager_imports(source: str, package: str, names: set[str]) -> list[str]:
    """Those of `names` that importing the file would import."""
    return [e.module for e in imports(source, package) if not e.inside and e.module.split(".")[0] in names]


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no modules in {folder}"
    return found


OURS = {path.relative_to(ROOT / "mla_backends").with_suffix("").as_posix(): path for path in sources("mla_backends")}
ADAPTERS = {path.stem: path for path in sources("adapters/mla_adapters")}


def test_every_module_is_on_a_floor() -> None:
    unplaced = sorted(set(OURS) - set(FLOOR))
    assert not unplaced, f"give {unplaced} a place in FLOORS"


@pytest.mark.parametrize("module", sorted(OURS))
def test_imports_go_strictly_down(module: str) -> None:
    assert not climbs(OURS[module].read_text(), module)


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_an_adapter_imports_up_to_adapter_and_no_other_adapter(adapter: str) -> None:
    assert not strangers(ADAPTERS[adapter].read_text(), adapter)


@pytest.mark.parametrize("module", sorted(OURS))
def test_nothing_imports_the_bundled_adapters(module: str) -> None:
    assert not [
        e for e in imports(OURS[module].read_text(), "mla_backends") if e.module.split(".")[0] == "mla_adapters"
    ]


@pytest.mark.parametrize("module", NO_TORCH)
def test_facts_import_no_torch(module: str) -> None:
    assert not eager_imports(OURS[module].read_text(), "mla_backends", {"torch"})


@pytest.mark.parametrize("path", [*OURS.values(), *ADAPTERS.values()], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_module_imports_a_kernel_library_when_it_is_imported(path: Path) -> None:
    assert not eager_imports(path.read_text(), path.parent.name, KERNEL_LIBRARIES)


@pytest.mark.parametrize(
    "source",
    [
        "from mla_backends.backend import get_backend",
        "import mla_backends.plan",
        "from mla_backends import get_backend",
        "from mla_backends import support",
        "import mla_backends",
        "from .dispatch import judge",
        "from . import catalogue",
        "def f():\n    from mla_backends.plan import DecodePlan",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from mla_backends.plan import DecodePlan",
        "try:\n    from mla_backends.plan import DecodePlan\nexcept ImportError:\n    pass",
    ],
)
def test_an_import_that_climbs_is_found(source: str) -> None:
    assert climbs(source, "support")


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from mla_backends.problem import Problem",
        "from mla_backends import problem",
        "from .errors import InvalidInput",
        "if TYPE_CHECKING:\n    from mla_backends.plan import DecodePlan",
        "if typing.TYPE_CHECKING:\n    from mla_backends.plan import DecodePlan",
    ],
)
def test_an_import_that_goes_down_or_is_for_types_alone_is_allowed(source: str) -> None:
    assert not climbs(source, "support")


@pytest.mark.parametrize(
    "source",
    [
        "from mla_adapters.eager import Eager",
        "from . import eager",
        "from .eager import Eager",
        "from mla_backends.plan import DecodePlan",
    ],
)
def test_an_adapter_that_reaches_too_far_is_found(source: str) -> None:
    assert strangers(source, "flashmla")


def test_a_kernel_library_is_found_at_module_level_and_left_alone_in_a_function() -> None:
    assert eager_imports("class A:\n    import flash_mla", "mla_adapters", KERNEL_LIBRARIES) == ["flash_mla"]
    assert not eager_imports("def f():\n    import flash_mla", "mla_adapters", KERNEL_LIBRARIES)
