"""The two ways in which a call is turned down: the caller's mistake, and no kernel for the problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_backends.support import Verdicts

__all__ = ["InvalidInput", "NoAdapterRuns"]


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
