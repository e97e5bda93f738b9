"""What is installed: the adapters behind the entry point group, and the packages that their kernels come from.

An adapter that cannot be imported is listed with its error and takes nothing else down.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
    try:
        return importlib.util.find_spec(provider.module.partition(".")[0]) is not None
    except ValueError:  # a module that is loaded without a spec, as a test's stand-in may be
        return True


@cache
def installed() -> tuple[Entry, ...]:
    """Every adapter behind the entry point group, in the order of their modules' names."""
    found: tuple[Entry, ...] = ()
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda p: p.name != "bundled"):
        for name, load in _modules_of(point):
            try:
                found = as_entries((*found, *load().ADAPTERS))
            except (Exception, SystemExit) as error:  # a file that was dropped in may raise anything
                # A name is taken once, also that of a file whose adapters clash with another's.
                listed = name if all(name != entry.name for entry in found) else f"{point.name}:{name}"
                found = (*found, Broken(listed, f"{type(error).__name__}: {error}"))
    return found


def _modules_of(point: metadata.EntryPoint) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The module that an entry point names or, where that is a package without ADAPTERS, each module in it."""
    try:
        module = point.load()
    except (Exception, SystemExit):
        # Loading it again raises again, where it is listed with its error.
        yield point.name, point.load
        return
    if hasattr(module, "ADAPTERS") or not hasattr(module, "__path__"):
        yield point.name, lambda: module
        return
    for info in sorted(pkgutil.iter_modules(module.__path__), key=lambda i: i.name):
        yield info.name, partial(importlib.import_module, f"{module.__name__}.{info.name}")


def as_entries(adapters: Iterable[Any] | Sequence[Any]) -> tuple[Entry, ...]:
    """The entries, checked: each an `Adapter`, an `Adapter` class or a `Broken`, of different names.

    Raises:
        InvalidInput: for anything else, or a name given twice.
    """
    if not isinstance(adapters, Iterable):
        raise InvalidInput(f"adapters is {adapters!r}, it takes a list of mla_backends.adapter.Adapter")
    entries: list[Entry] = []
    for given in adapters:
        entry = given() if isinstance(given, type) and issubclass(given, Adapter) else given
        if not isinstance(entry, Adapter | Broken):
            raise InvalidInput(f"adapters holds {entry!r}, it takes objects of mla_backends.adapter.Adapter")
        missing = [
            name
            for name in ("name", "support", "conventions")
            if not hasattr(entry, name) and isinstance(entry, Adapter)
        ]
        if missing:
            raise InvalidInput(f"adapter {type(entry).__name__} declares no {', '.join(missing)}, it takes all three")
        if any(entry.name == other.name for other in entries):
            raise InvalidInput(f"two adapters are called {entry.name!r}, a name is taken once; rename one of them")
        entries.append(entry)
    return tuple(entries)
