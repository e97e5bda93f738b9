"""What is installed: the adapters behind the entry point group, and the packages that their kernels come from.

An adapter that cannot be imported is listed with its error and takes nothing else down.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from mla_backends.adapter import Absent, Adapter, Provider
from mla_backends.errors import InvalidInput

__all__ = ["GROUP", "Broken", "Serving", "as_entries", "installed", "serving"]

GROUP = "mla_backends.adapters"


@dataclass(frozen=True)
class Broken:
    """An adapter module that could not be used, and why."""

    name: str
    error: str


Entry = Adapter | Broken


@dataclass(frozen=True, eq=False)
class Serving:
    """Which provider answered for an adapter here.

    Args:
        provider: the one that serves; None where none does, or none is needed.
        library: what its `load` returned.
        absent: package and reason of each that did not answer.
    """

    provider: Provider | None
    library: Any
    absent: tuple[tuple[str, str], ...] = ()

    @property
    def answered(self) -> bool:
        return self.provider is not None or not self.absent

    def __str__(self) -> str:
        if self.provider is None:
            return "torch" if self.answered else "absent"
        return f"{self.provider.package} {self.provider.version or '(version unknown)'}"


@cache
def serving(adapter: Adapter) -> Serving:
    """Ask an adapter's providers in order; the first that answers serves. Asked once a process."""
    absent: list[tuple[str, str]] = []
    for provider in adapter.providers:
        try:
            return Serving(provider, provider.ask(), tuple(absent))
        except Absent as reason:
            absent.append((provider.package, str(reason)))
    return Serving(None, None, tuple(absent))


def is_installed(provider: Provider) -> bool:
    """Whether the provider's top-level package can be found, without importing it."""
    return importlib.util.find_spec(provider.module.partition(".")[0]) is not None


@cache
def installed() -> tuple[Entry, ...]:
    """Every adapter behind the entry point group, in the order of their modules' names."""
    found: list[Entry] = []
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda p: p.name != "bundled"):
        try:
            module = point.load()
        except Exception as error:  # a third party's module may raise anything
            found.append(Broken(point.name, f"{type(error).__name__}: {error}"))
            continue
        found.extend(_adapters_of(module))
    return as_entries(found)


def _adapters_of(module: Any) -> Iterator[Entry]:
    """A module's own ADAPTERS, or those of the modules in a package."""
    if hasattr(module, "ADAPTERS"):
        yield from module.ADAPTERS
        return
    for info in sorted(pkgutil.iter_modules(module.__path__), key=lambda i: i.name):
        try:
            inner = importlib.import_module(f"{module.__name__}.{info.name}")
            yield from inner.ADAPTERS
        except Exception as error:  # a dropped-in file may raise anything
            yield Broken(info.name, f"{type(error).__name__}: {error}")


def as_entries(adapters: Iterable[Any] | Sequence[Any]) -> tuple[Entry, ...]:
    """The entries, checked: each an `Adapter`, an `Adapter` class or a `Broken`, of different names.

    Raises:
        InvalidInput: for anything else, or a name given twice.
    """
    entries: list[Entry] = []
    for given in adapters:
        entry = given() if isinstance(given, type) and issubclass(given, Adapter) else given
        if not isinstance(entry, Adapter | Broken):
            raise InvalidInput(f"adapters holds {entry!r}, it takes objects of mla_backends.adapter.Adapter")
        if any(entry.name == other.name for other in entries):
            raise InvalidInput(f"two adapters are called {entry.name!r}, a name is taken once; rename one of them")
        entries.append(entry)
    return tuple(entries)
