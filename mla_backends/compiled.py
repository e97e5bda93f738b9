"""The compiled library of CUDA ops: where it is, or why there is none.

It is built with the package where nvcc is found, loads on a machine without a GPU, and is loaded at
the first CUDA call, not at import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

__all__ = ["Compiled", "compiled", "function"]

_LIBRARY = "libmla_backends_ops.so"
_NOT_BUILT = "ops_not_built.txt"


@dataclass(frozen=True)
class Compiled:
    """Whether CUDA ops run from the compiled library.

    Args:
        path: of the library; None where there is none.
        reason: why there is none, so that every op runs in torch; empty where there is one.
    """

    path: str | None
    reason: str = ""

    def __bool__(self) -> bool:
        return self.path is not None

    def __str__(self) -> str:
        return f"compiled ops from {self.path}" if self else f"no compiled ops, every op runs in torch: {self.reason}"


@functools.cache
def _loaded() -> tuple[Any, Compiled]:
    package = resources.files("mla_backends")
    library = package.joinpath(_LIBRARY)
    if not library.is_file():
        note = package.joinpath(_NOT_BUILT)
        reason = note.read_text().strip() if note.is_file() else "this copy of the package was not installed"
        return None, Compiled(None, f"{_LIBRARY} is not in {package}: {reason}; install with nvcc on PATH")
    try:
        import tvm_ffi

        return tvm_ffi.load_module(str(library)), Compiled(str(library))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return None, Compiled(None, f"{library} does not load: {error}")


def compiled() -> Compiled:
    """Whether the library serves CUDA tensors, its path, and why not."""
    return _loaded()[1]


@functools.cache
def function(name: str) -> Callable[..., Any] | None:
    """An export of the library, None where there is no library."""
    module = _loaded()[0]
    return None if module is None else module.get_function(name)
