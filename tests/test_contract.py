"""The package's signatures against contract.pyi, read with `ast`: what callers outside were promised is there, to the letter.

A parameter may take more types than promised and a result may be narrower; more parameters are
keyword-only with a default. Nothing else may differ.
"""

import ast
import builtins
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import mla_backends

CONTRACT = (Path(__file__).parent / "contract.pyi").read_text()

Function = ast.FunctionDef
EMPTY = inspect.Parameter.empty


class Item(NamedTuple):
    """One promise: a name of the package, or a member of one of its classes."""

    owner: str | None
    name: str
    node: ast.stmt

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


def items(stub: str) -> Iterator[Item]:
    """Every class, function and constant of a stub, and every member of its classes."""
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ClassDef):
            yield Item(None, node.name, node)
            for member in node.body:
                if isinstance(member, Function):
                    yield Item(node.name, member.name, member)
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    yield Item(node.name, member.target.id, member)
        elif isinstance(node, Function):
            yield Item(None, node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield Item(None, node.targets[0].id, node)


class Contract:
    """A stub's promises held against an object that should have its names as attributes."""

    def __init__(self, package: Any) -> None:
        self.package = package
        self.names = {
            **vars(typing),
            **vars(builtins),
            **{name: getattr(package, name) for name in dir(package) if not name.startswith("__")},
            "torch": torch,
            "Tensor": torch.Tensor,
            "device": torch.device,
            "dtype": torch.dtype,
            "Iterable": typing.get_origin(typing.Iterable[int]),
            "Sequence": typing.get_origin(typing.Sequence[int]),
        }

    def differences(self, item: Item) -> list[str]:
        """Sentences on how the package breaks this promise; none where it keeps it."""
        holder = self.package if item.owner is None else getattr(self.package, item.owner, None)
        if holder is None:
            return [f"there is no {item.owner}"]
        if isinstance(item.node, Function):
            return self._function(item, item.node, holder)
        if isinstance(item.node, ast.AnnAssign):
            return self._attribute(item, item.node, holder)
        found = getattr(holder, item.name, None)
        if found is None:
            return [f"there is no {item}"]
        if isinstance(item.node, ast.ClassDef):
            return self._class(item, item.node, found)
        assert isinstance(item.node, ast.Assign)
        promised = self._evaluated(ast.unparse(item.node.value), self.names)
        return [] if found == promised else [f"{item} is {found}, the contract says {promised}"]

    def _class(self, item: Item, node: ast.ClassDef, found: Any) -> list[str]:
        if inspect.ismodule(found):
            return []
        if not inspect.isclass(found):
            return [f"{item} is no class"]
        bases = [getattr(builtins, ast.unparse(base)) for base in node.bases]
        return [f"{item} is no {base.__name__}" for base in bases if not issubclass(found, base)]

    def _function(self, item: Item, node: Function, holder: Any) -> list[str]:
        raw = inspect.getattr_static(holder, item.name, None)
        if raw is None:
            return [f"there is no {item}"]
        kind = {"classmethod": classmethod, "staticmethod": staticmethod}
        decorators = [ast.unparse(d) for d in node.decorator_list]
        is_in_class = inspect.isclass(holder)
        if is_in_class and any(not isinstance(raw, kind[d]) for d in decorators):
            return [f"{item} is no {decorators[0]}"]
        if is_in_class and not decorators and not inspect.isfunction(raw):
            return [f"{item} is a {type(raw).__name__}, the contract says a method"]
        function = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
        if not callable(function):
            return [f"{item} cannot be called"]
        takes_self = is_in_class and decorators != ["staticmethod"]
        promised = list(_stub_parameters(node))[1 if takes_self else 0 :]
        actual = list(inspect.signature(function).parameters.values())[1 if takes_self else 0 :]
        scope = {**self.names, **getattr(sys.modules.get(function.__module__), "__dict__", {})}
        problems = [f"{item}: {text}" for text in self._parameters(promised, actual, scope)]
        if node.returns is not None:
            returned = inspect.signature(function).return_annotation
            problems += self._type(f"{item}'s result", node.returns, returned, scope, narrower=True)
        return problems

    def _parameters(
        self, promised: list[inspect.Parameter], actual: list[inspect.Parameter], scope: dict[str, Any]
    ) -> Iterator[str]:
        named = {p.name: p for p in actual}
        for parameter in promised:
            found = named.get(parameter.name)
            if found is None:
                yield f"takes no {parameter.name}"
                continue
            if found.kind != parameter.kind:
                yield f"{parameter.name} is {found.kind.description}, the contract says {parameter.kind.description}"
            # By type too, for True == 1.
            if type(found.default) is not type(parameter.default) or found.default != parameter.default:
                yield f"{parameter.name} defaults to {_default(found)}, the contract says {_default(parameter)}"
            yield from self._type(parameter.name, parameter.annotation, found.annotation, scope, narrower=False)
        positional = [p.name for p in actual if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        wanted = [p.name for p in promised if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        if positional[: len(wanted)] != wanted:
            yield f"takes {', '.join(positional)} in this order, the contract says {', '.join(wanted)}"
        for extra in (p for p in actual if p.name not in {q.name for q in promised}):
            if extra.kind is not inspect.Parameter.KEYWORD_ONLY or extra.default is EMPTY:
                yield f"takes {extra.name} besides, which has to be keyword-only with a default"

    def _attribute(self, item: Item, node: ast.AnnAssign, holder: Any) -> list[str]:
        raw = inspect.getattr_static(holder, item.name, None)
        if isinstance(raw, property):
            assert raw.fget is not None
            function, annotation = raw.fget, inspect.signature(raw.fget).return_annotation
            scope = vars(sys.modules[function.__module__])
        elif inspect.isroutine(raw):
            return [f"{item} is a method, the contract says an attribute"]
        else:
            owner = next((c for c in holder.__mro__ if item.name in inspect.get_annotations(c)), None)
            if owner is None:
                return [f"{item} is neither a property nor annotated in its class"]
            annotation, scope = inspect.get_annotations(owner)[item.name], vars(sys.modules[owner.__module__])
        return self._type(str(item), node.annotation, annotation, {**self.names, **scope}, narrower=True)

    def _type(
        self, what: str, promised: ast.expr, annotation: Any, scope: dict[str, Any], *, narrower: bool
    ) -> list[str]:
        if annotation is EMPTY:
            return [f"{what} is not annotated"]
        want = _members(self._evaluated(ast.unparse(promised), self.names))
        have = _members(self._evaluated(annotation, scope))
        if Any in (want if narrower else have):
            return []
        if (have <= want) if narrower else (want <= have):
            return []
        return [f"{what} is {annotation}, the contract says {ast.unparse(promised)}"]

    def _evaluated(self, annotation: Any, scope: dict[str, Any]) -> Any:
        return eval(annotation, dict(scope)) if isinstance(annotation, str) else annotation


def _members(annotation: Any) -> set[Any]:
    """What a type is a union of, with a Literal's values one by one."""
    if annotation is None:
        return {type(None)}
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_members(a) for a in typing.get_args(annotation)))
    if origin is typing.Literal:
        return {("literal", value) for value in typing.get_args(annotation)}
    return {annotation}


def _default(parameter: inspect.Parameter) -> str:
    return "nothing" if parameter.default is EMPTY else repr(parameter.default)


def _stub_parameters(node: Function) -> Iterator[inspect.Parameter]:
    """A stub's parameters as `inspect` would show them, with annotations as `ast` has them."""
    spec = node.args
    assert not spec.posonlyargs
    assert spec.vararg is None
    assert spec.kwarg is None
    defaults = [None] * (len(spec.args) - len(spec.defaults)) + list(spec.defaults)
    both = [(a, d, inspect.Parameter.POSITIONAL_OR_KEYWORD) for a, d in zip(spec.args, defaults, strict=True)]
    both += [(a, d, inspect.Parameter.KEYWORD_ONLY) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    for argument, default, kind in both:
        value = EMPTY if default is None else ast.literal_eval(default)
        yield inspect.Parameter(argument.arg, kind, default=value, annotation=argument.annotation)


@pytest.mark.parametrize("item", list(items(CONTRACT)), ids=str)
def test_the_package_keeps_the_contract(item: Item) -> None:
    assert not Contract(mla_backends).differences(item)


def test_everything_in_the_contract_is_public() -> None:
    names = {item.name for item in items(CONTRACT) if item.owner is None}
    assert names <= set(mla_backends.__all__)


@pytest.mark.parametrize(
    "fact",
    [mla_backends.Device((9, 0)), mla_backends.Geometry(16), mla_backends.Problem(16)],
    ids=lambda f: type(f).__name__,
)
def test_facts_are_frozen_and_hashable(fact: Any) -> None:
    name = next(iter(type(fact).__annotations__))
    with pytest.raises(FrozenInstanceError):
        setattr(fact, name, 1)
    assert hash(fact) == hash(type(fact)(getattr(fact, name)))


# --- the checker itself ----------------------------------------------------------------------------------------------

STUB = '''
Kind = Literal["a", "b"]
def make(x: int, *, y: bool = True) -> Thing: ...
class Wrong(ValueError):
    """A docstring."""
class Thing:
    size: int | None
    """Of it."""
    def __init__(self, size: int, name: str = "") -> None: ...
    @classmethod
    def of(cls, other: Thing, *, scale: float | Tensor | None = None) -> Thing: ...
    @staticmethod
    def pure(x: Tensor) -> None: ...
    def go(self, n: int, m: int, *, flag: bool = False) -> Any: ...
'''


class Thing:
    size: int | None

    def __init__(self, size: int, name: str = "", *, more: int = 0) -> None:
        self.size = size

    @classmethod
    def of(cls, other: "Thing", *, scale: "float | torch.Tensor | None" = None) -> "Thing":
        return other

    @staticmethod
    def pure(x: torch.Tensor) -> None: ...

    def go(self, n: int | str, m: int, *, flag: bool = False) -> int:
        return n if isinstance(n, int) else m


def make(x: int, *, y: bool = True) -> Thing:
    return Thing(x)


class Wrong(ValueError): ...


def toy(**changed: Any) -> types.SimpleNamespace:
    """A package that keeps STUB, but for what is changed."""
    kind = typing.Literal["a", "b"]
    return types.SimpleNamespace(**{"Kind": kind, "make": make, "Wrong": Wrong, "Thing": Thing, **changed})


def changed_thing(**members: Any) -> type:
    return type("Thing", (Thing,), {"__module__": __name__, **members})


def all_differences(package: Any) -> list[str]:
    return [text for item in items(STUB) for text in Contract(package).differences(item)]


def test_a_package_that_keeps_a_contract_has_no_differences() -> None:
    assert len(list(items(STUB))) == 9
    assert all_differences(toy()) == []


def _of_method(self: Any, other: Thing, *, scale: float | torch.Tensor | None = None) -> Thing: ...  # type: ignore[empty-body]
def _fewer(self: Any, n: int, *, flag: bool = False) -> int: ...  # type: ignore[empty-body]
def _swapped(self: Any, m: int, n: int, *, flag: bool = False) -> int: ...  # type: ignore[empty-body]
def _positional(self: Any, n: int, m: int, flag: bool = False) -> int: ...  # type: ignore[empty-body]
def _other_default(self: Any, n: int, m: int, *, flag: int = 0) -> int: ...  # type: ignore[empty-body]
def _extra(self: Any, n: int, m: int, k: int = 0, *, flag: bool = False) -> int: ...  # type: ignore[empty-body]
def _required(self: Any, n: int, m: int, *, k: int, flag: bool = False) -> int: ...  # type: ignore[empty-body]
def _first(self: Any, k: int, n: int, m: int, *, flag: bool = False) -> int: ...  # type: ignore[empty-body]
def _narrow(self: Any, n: bool, m: int, *, flag: bool = False) -> int: ...  # type: ignore[empty-body]
def _bare(self: Any, n, m, *, flag=False): ...  # type: ignore[no-untyped-def]
def _wide(x: int, *, y: bool = True) -> Thing | None: ...


@pytest.mark.parametrize(
    ("package", "sentence"),
    [
        (toy(make=None), "there is no make"),
        (toy(make=_wide), "make's result is"),
        (toy(Thing=None), "there is no Thing"),
        (toy(Wrong=type("Wrong", (TypeError,), {})), "Wrong is no ValueError"),
        (toy(Kind=typing.Literal["a"]), "Kind is"),
        (toy(Thing=changed_thing(of=_of_method)), "Thing.of is no classmethod"),
        (toy(Thing=changed_thing(go=classmethod(_first))), "Thing.go is a classmethod"),
        (toy(Thing=changed_thing(go=_fewer)), "Thing.go: takes no m"),
        (toy(Thing=changed_thing(go=_swapped)), "in this order"),
        (toy(Thing=changed_thing(go=_positional)), "flag is positional or keyword"),
        (toy(Thing=changed_thing(go=_other_default)), "flag defaults to 0"),
        (toy(Thing=changed_thing(go=_extra)), "takes k besides"),
        (toy(Thing=changed_thing(go=_required)), "takes k besides"),
        (toy(Thing=changed_thing(go=_first)), "in this order"),
        (toy(Thing=changed_thing(go=_narrow)), "n is <class 'bool'>"),
        (toy(Thing=changed_thing(go=_bare)), "n is not annotated"),
        (toy(Thing=changed_thing(size=property(lambda self: 1))), "Thing.size is not annotated"),
        (toy(Thing=changed_thing(size=_fewer)), "Thing.size is a method"),
        (toy(Thing=changed_thing(__annotations__={"size": str})), "Thing.size is <class 'str'>"),
        (toy(Thing=type("Thing", (), {})), "neither a property nor annotated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_promise_is_found(package: Any, sentence: str) -> None:
    assert any(sentence in text for text in all_differences(package))


def test_a_module_keeps_the_contract_of_a_class_of_functions() -> None:
    stub = "class ops:\n    @staticmethod\n    def f(x: int, y: int = 2) -> None: ..."

    def f(x: int, y: int = 2) -> None: ...

    def g(x: int) -> None: ...

    def package(function: Callable[..., None]) -> Any:
        module = types.ModuleType("ops")
        module.f = function  # type: ignore[attr-defined]
        return types.SimpleNamespace(ops=module)

    assert [d for i in items(stub) for d in Contract(package(f)).differences(i)] == []
    assert "ops.f: takes no y" in [d for i in items(stub) for d in Contract(package(g)).differences(i)]
