"""What adapters say of a problem: each runs, or is refused with all its reasons; the page that a user reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mla_backends.device import Device
from mla_backends.problem import Problem
from mla_backends.support import Refusal

__all__ = ["Verdict", "Verdicts"]


@dataclass(frozen=True)
class Verdict:
    """What one adapter says of a problem on a device. No reasons: it runs.

    Args:
        name: the adapter's.
        provider: where its kernel comes from: the package that answered here, or those that would.
        reasons: every refusal, not only the first.
    """

    name: str
    provider: str
    reasons: tuple[Refusal, ...] = ()

    @property
    def runs(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Verdicts:
    """All adapters' verdicts on one problem, in order of preference: those that run come first."""

    problem: Problem
    device: Device
    entries: tuple[Verdict, ...] = field(default=())

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Verdict:
        """The verdict of the adapter called `name`.

        Raises:
            KeyError: if there is none of that name.
        """
        for verdict in self.entries:
            if verdict.name == name:
                return verdict
        raise KeyError(
            f"no verdict on {name!r}, there are those on {', '.join(v.name for v in self.entries) or 'none'}"
        )

    @property
    def chosen(self) -> Verdict | None:
        """The first that runs."""
        return next((v for v in self.entries if v.runs), None)

    def __str__(self) -> str:
        lines = [f"{self.device}: {self.problem}"]
        for verdict in self.entries:
            lines.append(f"  {verdict.name} ({verdict.provider}): {'runs' if verdict.runs else 'refused'}")
            lines.extend(f"    - {reason}" for reason in verdict.reasons)
        return "\n".join(lines)
