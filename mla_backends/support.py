"""What a kernel takes and gives, as data: the same lines refuse a problem, print the support table and make the tests.

A `Limit` reads one field of `Problem` or `Device`; a `Joint` reads several. Each offers values to
test: inside, each worth a run on a GPU, and just outside. A refusal is a value until the very edge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mla_backends.device import Device
from mla_backends.problem import Problem

__all__ = [
    "ALIGNMENT",
    "Conventions",
    "Joint",
    "Limit",
    "OneOf",
    "Range",
    "Refusal",
    "Speed",
    "Support",
    "one_dtype",
]

ALIGNMENT = 16
"""Bytes: what the kernels' vector accesses and bulk copies need of a query's or result's address and outer strides."""


def _shown(value: Any, subject: str = "") -> str:
    if subject == "capability" and value is None:
        return "cpu"
    if isinstance(value, tuple) and len(value) == 2:
        return str(Device(value))
    return "none" if value is None else str(value)


def _either(values: tuple[Any, ...]) -> str:
    words = [_shown(v) for v in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


@dataclass(frozen=True)
class OneOf:
    """The values listed, and no other. Capabilities are listed so, never compared: sm120 is not sm100."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)

    def __contains__(self, value: Any) -> bool:
        return any(type(value) is type(v) and value == v for v in self.values)

    def __str__(self) -> str:
        return _either(self.values)

    @property
    def inside(self) -> tuple[Any, ...]:
        return self.values


@dataclass(frozen=True)
class Range:
    """Whole numbers from `low` to `high`, both taken, that `step` divides.

    Args:
        low, high: bounds; `high` None is no bound.
        step: what divides every value.
        tested: values inside that are worth a GPU run.
        unknown: whether None, a fact that nobody gave, passes.
    """

    low: int
    high: int | None = None
    step: int = 1
    tested: tuple[int, ...] = ()
    unknown: bool = True

    def __contains__(self, value: Any) -> bool:
        if value is None:
            return self.unknown
        return bool(value >= self.low and (self.high is None or value <= self.high) and value % self.step == 0)

    def __str__(self) -> str:
        multiple = f"a multiple of {self.step}" if self.step > 1 else ""
        bounds = f"{self.low} to {self.high}" if self.high is not None else f"at least {self.low}"
        if multiple and self.high is None and self.low in (0, self.step):
            return multiple
        return f"{multiple}, {bounds}" if multiple else bounds

    @property
    def inside(self) -> tuple[Any, ...]:
        if self.tested:
            return self.tested
        return (self.low,) if self.high is None else (self.low, self.high)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_fields(*read: tuple[type[Problem] | type[Device], str]) -> None:
    """Raises ValueError for a field that there is not: the adapter does not import then, and says why."""
    for holder, name in read:
        known = [f.name for f in fields(holder)]
        if name not in known:
            raise ValueError(f"{holder.__name__} has no field {name!r}, it has {', '.join(known)}")


@dataclass(frozen=True)
class Limit:
    """One fact that must have one of some values.

    Args:
        of: Problem or Device, whichever has the field.
        subject: the field's name.
        takes: what the kernel takes.
        refuses: values just outside, to test; each broken alone gives exactly this refusal.
        source: who says so: a file and line, a document, or a run.
        cure: what the user can change, where that isn't plain.
        unless_forced: a preference rather than a fact about the kernel: naming the adapter waives it.
    """

    of: type[Problem] | type[Device]
    subject: str
    takes: OneOf | Range
    refuses: tuple[Any, ...]
    source: str
    cure: str = ""
    unless_forced: bool = False

    def __post_init__(self) -> None:
        _check_fields((self.of, self.subject))

    def refusal(self, problem: Problem, device: Device) -> Refusal | None:
        found = getattr(problem if self.of is Problem else device, self.subject)
        if found in self.takes:
            return None
        return Refusal(self.subject, _shown(found, self.subject), self._taken, self.source, self.cure)

    def __str__(self) -> str:
        return f"{self.subject}: {self._taken} [{self.source}]"

    @property
    def _taken(self) -> str:
        # A capability of None is a CPU, other fields' None is nothing given.
        return str(self.takes).replace("none", "cpu") if self.subject == "capability" else str(self.takes)


@dataclass(frozen=True)
class Joint:
    """What holds only in combination.

    Args:
        name: the rule in words, as the refusal prints it.
        reads: fields that it looks at, "device." before those of `Device`.
        predicate: of (problem, device); true where the kernel runs.
        inside, outside: field values to test, with the rest as the other limits want it.
        source, cure: as in `Limit`.
    """

    name: str
    reads: tuple[str, ...]
    predicate: Callable[[Problem, Device], bool]
    inside: tuple[Mapping[str, Any], ...]
    outside: tuple[Mapping[str, Any], ...]
    source: str
    cure: str = ""

    def __post_init__(self) -> None:
        names = [*self.reads, *(name for facts in (*self.inside, *self.outside) for name in facts)]
        _check_fields(*((Device if n.startswith("device.") else Problem, n.removeprefix("device.")) for n in names))

    def refusal(self, problem: Problem, device: Device) -> Refusal | None:
        if self.predicate(problem, device):
            return None
        found = []
        for name in self.reads:
            holder: Any = device if name.startswith("device.") else problem
            field_name = name.removeprefix("device.")
            found.append(f"{field_name} is {_shown(getattr(holder, field_name), field_name)}")
        return Refusal("", " and ".join(found), self.name, self.source, self.cure)

    def __str__(self) -> str:
        return f"{self.name} [{self.source}]"


Support = tuple[Limit | Joint, ...]


def one_dtype(source: str) -> Joint:
    """The rule of kernels that multiply query and cache as they are: a bf16 cache takes no float16 query, nor the reverse."""
    return Joint(
        "query and cache of one dtype",
        reads=("q_dtype", "cache_format"),
        predicate=lambda p, _: (p.cache_format, p.q_dtype) not in {("bf16", "float16"), ("fp16", "bfloat16")},
        inside=({"cache_format": "fp16", "q_dtype": "float16"},),
        outside=({"q_dtype": "float16"}, {"cache_format": "fp16"}),
        source=source,
    )


@dataclass(frozen=True)
class Refusal:
    """One reason: what was found, what is taken, who says so, what to change.

    `subject` is the field that was read, and empty where it was several or an installation: `found` says which then.
    """

    subject: str
    found: str
    takes: str
    source: str
    cure: str = ""

    def __str__(self) -> str:
        found = f"{self.subject} is {self.found}" if self.subject else self.found
        return f"{found}, it takes {self.takes} [{self.source}]" + (f"; {self.cure}" if self.cure else "")


@dataclass(frozen=True)
class Conventions:
    """How a kernel wants its query and gives its results. The plan converts from this data, only where it differs.

    Args:
        query: one packed [.., H, D] buffer, or latent and rope apart.
        query_dtype: what the kernel reads; None is the problem's q_dtype.
        heads: head counts that run natively, ascending; None is any. The plan pads to the least that holds.
        lse_base: of the logarithm.
        lse_axes: order of the kernel's lse: request, query row, head; T for request and row in one, as kernels have it
            for ragged queries whatever the axes say: only whether heads come last counts then.
        empty_rows: what a row without keys gets. exact: out 0, lse -inf. lse_inf: out 0, lse +inf.
            unwritten: nothing is stored. undefined: lengths and page ids must be clamped first, and the row overwritten.
        unused_rows: ignored, or read: a NaN in a never-written row of a live page reaches the output.
        strides: cache page and row strides are honoured; a cache that is not packed is refused where they are not.
        writes_out: the kernel can write into a given `out`.
        metadata: how a step is planned. op: by a call on the device. first_run: by the step's first kernel.
            host: on the host, from the lengths. none: there is nothing to plan.
        lse_precision: of the lse, in its own units, where a kernel's arithmetic is coarser than what the formats allow; else 0.
            A coarse one is given to those who name the adapter, and to nobody else.
        slots: how a sparse kernel reads its keys, and what brings them there. sanitize_slots: slots, -1 for every one
            outside the cache. compact_slots: row ids, slot // page_size * (rows from page to page) + slot % page_size, the
            valid ones first, and how many those are.
        topk_multiple: what a row of sparse indices is padded to a multiple of.
        table_columns: what the width of the block table must be a multiple of.
        allocates: what the library itself allocates at each run.
    """

    query: Literal["packed", "split"]
    query_dtype: str | None = None
    heads: tuple[int, ...] | None = None
    lse_base: Literal["e", "2"] = "e"
    lse_axes: Literal["BQH", "BHQ", "TH", "HT"] = "BQH"
    empty_rows: Literal["exact", "lse_inf", "unwritten", "undefined"] = "exact"
    unused_rows: Literal["ignored", "read"] = "ignored"
    strides: bool = True
    writes_out: bool = False
    metadata: Literal["op", "first_run", "host", "none"] = "none"
    lse_precision: float = 0.0
    slots: Literal["sanitize_slots", "compact_slots"] = "sanitize_slots"
    topk_multiple: int = 1
    table_columns: int = 1
    allocates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, words in _words().items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it takes one of {', '.join(map(repr, words))}")
        counts = self.heads if self.heads is not None else (1,)
        if not isinstance(counts, tuple) or not counts or list(counts) != sorted({c for c in counts if _is_count(c)}):
            raise ValueError(f"heads is {self.heads}, it takes a tuple of counts that ascend, or None")
        for name in ("topk_multiple", "table_columns"):
            if not _is_count(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}, it takes a whole number of at least 1")
        if self.query_dtype not in (None, "float8_e4m3fn"):
            raise ValueError(
                f"query_dtype is {self.query_dtype!r}, it takes 'float8_e4m3fn', or None for the problem's"
            )
        if not 0 <= self.lse_precision < 1:
            raise ValueError(f"lse_precision is {self.lse_precision!r}, it takes an error of the logarithm, 0 for none")

    def padded(self, num_heads: int) -> int:
        """The least head count that the kernel runs and that holds `num_heads`."""
        if self.heads is None:
            return num_heads
        return next((h for h in self.heads if h >= num_heads), num_heads)


@functools.cache
def _words() -> dict[str, tuple[str, ...]]:
    """The fields of `Conventions` that take some words alone, and which."""
    hints = get_type_hints(Conventions).items()
    return {name: get_args(kind) for name, kind in hints if get_origin(kind) is Literal}


@dataclass(frozen=True)
class Speed:
    """How near a kernel comes to the machine's ceilings: what dispatch orders the adapters by.

    Args:
        memory: fraction of copy bandwidth that its cache reads reach.
        compute: fraction of the matrix rate that it reaches.
        overhead: microseconds of a layer that no roofline explains.
        split: microseconds that each split of a request's keys adds, where their partial results are combined.
        partial: microseconds of a thousand partial results: requests, times query rows and heads, times splits.
        source: the run that these were read from.
    """

    memory: float
    compute: float
    overhead: float = 0.0
    split: float = 0.0
    partial: float = 0.0
    source: str = ""
