"""The two ways in which a call is turned down: the caller's mistake, and no kernel for the problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_backends.support import Verdicts

__all__ = ["InvalidInput", "NoAdapterRuns", "shown", "whole_number"]


class InvalidInput(ValueError):
    """What the caller got wrong: names the argument, what was found, what is taken, and a cure where there is one."""


class NoAdapterRuns(RuntimeError):
    """Every adapter refused; the message lists each adapter with all its reasons.

    Attributes:
        verdicts: one verdict an adapter, as `Backend.explain` gives them.
    """

    verdicts: Verdicts

    def __init__(self, verdicts: Verdicts) -> None:
        super().__init__(f"no adapter runs this problem\n{verdicts}")
        self.verdicts = verdicts


def shown(found: object) -> str:
    """How a message shows what was given: a tensor by shape and dtype, anything else by its type."""
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    return f"a {type(found).__name__}" if shape is None or dtype is None else f"{list(shape)} of {dtype}"


def whole_number(name: str, value: Any, *, least: int = 1) -> int:
    """The value, where it is a whole number of at least `least`, and no bool.

    Raises:
        InvalidInput: naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(f"{name} is {value!r}, it takes a whole number of at least {least}")
    return value
