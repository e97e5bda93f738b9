"""The two ways in which a call is turned down: the caller's mistake, and no kernel for the problem."""

from __future__ import annotations

import math
import operator
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_backends.verdicts import Verdicts

__all__ = ["InvalidInput", "NoAdapterRuns", "real_number", "shown", "whole_number"]


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


def whole_number(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """The value as a plain int, where it is a whole number from `least` to `most`, numpy's too, and no bool.

    Raises:
        InvalidInput: naming the argument.
    """
    # A tensor is none, though it has an index: on a GPU that waits.
    found = operator.index(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if found is None or found < least or (most is not None and found > most):
        limit = "" if most is None else f" and at most {most}"
        raise InvalidInput(f"{name} is {value!r}, it takes a whole number of at least {least}{limit}")
    return found


def real_number(value: Any) -> float:
    """The value as a plain float, where it is a number, numpy's too, and no bool; else NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
