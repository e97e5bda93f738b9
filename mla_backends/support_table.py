"""README's support table, made from what the adapters declare, so that it says what dispatch does."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mla_backends.adapter import Adapter
from mla_backends.device import Device
from mla_backends.errors import InvalidInput
from mla_backends.problem import Problem
from mla_backends.support import Joint, Limit, OneOf, Range

__all__ = ["BEGIN", "END", "markdown", "with_table"]

BEGIN, END = "<!-- support table -->", "<!-- end of the support table -->"
"""Lines of a document between which the table belongs."""


def markdown(adapters: Iterable[Adapter]) -> str:
    """A Markdown table of the adapters, and below it, a line an adapter, what has no column."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    notes = []
    for adapter in adapters:
        rows.append([cell(adapter) for cell in COLUMNS.values()])
        if rest := list(_rest(adapter)):
            notes.append(f"- `{adapter.name}` takes {'; '.join(rest)}.")
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([table, "", *notes]) if notes else table


def with_table(document: str, table: str) -> str:
    """A document with the table between its two marks, whatever was there before.

    Raises:
        InvalidInput: where it does not have both marks, in this order.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidInput(
            f"the document has no place for a table, it takes a line {BEGIN!r} and a line {END!r} below it"
        )
    return f"{before}{begin}\n{table}\n{end}{after}"


def _limit(adapter: Adapter, subject: str) -> Limit | None:
    return next((r for r in adapter.support if isinstance(r, Limit) and r.subject == subject), None)


def _is_unbounded(limit: Limit) -> bool:
    """Whether every count is taken."""
    takes = limit.takes
    return isinstance(takes, Range) and takes.low <= 1 and takes.high is None and takes.step == 1


def _runs_on(adapter: Adapter) -> str:
    limit = _limit(adapter, "capability")
    if limit is None:
        return "any device"
    values = limit.takes.values if isinstance(limit.takes, OneOf) else ()
    devices = ", ".join(str(Device(capability)) for capability in sorted(values, key=lambda c: c or ()))
    return f"{devices}; any device when named" if limit.unless_forced else devices


def _values(subject: str) -> Callable[[Adapter], str]:
    """What a limit on `subject` takes, "any" without one."""

    def cell(adapter: Adapter) -> str:
        limit = _limit(adapter, subject)
        if limit is None or _is_unbounded(limit):
            return "any"
        return ", ".join(map(str, limit.takes.values)) if isinstance(limit.takes, OneOf) else str(limit.takes)

    return cell


def _can(subject: str) -> Callable[[Adapter], str]:
    """Whether a problem may ask for `subject`; "only" where it must."""

    def cell(adapter: Adapter) -> str:
        limit = _limit(adapter, subject)
        if limit is None or (True in limit.takes and False in limit.takes):
            return "yes"
        return "only" if True in limit.takes else "no"

    return cell


def _lse(adapter: Adapter) -> str:
    """As `_can`; "when named" where a default problem's would be coarse."""
    precision = adapter.conventions_of(Problem(16)).lse_precision
    return "when named" if precision else _can("needs_lse")(adapter)


def _heads(adapter: Adapter) -> str:
    native = adapter.conventions.heads
    limited = _values("num_heads")(adapter)
    if native is None:
        return limited
    padded = f"padded to {', '.join(map(str, native))}"
    return padded if limited == "any" else f"{limited}, {padded}"


def _keys(adapter: Adapter) -> str:
    """All of a request's keys, chosen ones, or both."""
    limit = _limit(adapter, "topk")
    if limit is None:
        return "dense, sparse"
    if None in limit.takes:
        return "dense"
    return "sparse" if _is_unbounded(limit) else f"sparse, topk {limit.takes}"


def _strides(adapter: Adapter) -> str:
    return "yes" if adapter.conventions.strides else "no"


def _library(adapter: Adapter) -> str:
    return " or ".join(provider.package for provider in adapter.providers) or "torch"


COLUMNS: dict[str, Callable[[Adapter], str]] = {
    "adapter": lambda adapter: f"`{adapter.name}`",
    "runs on": _runs_on,
    "keys": _keys,
    "cache format": _values("cache_format"),
    "heads": _heads,
    "page size": _values("page_size"),
    "q_len": _values("q_len"),
    "ragged": _can("ragged"),
    "lse": _lse,
    "sink": _can("attn_sink"),
    "batch-invariant": _can("batch_invariant"),
    "strided layers": _strides,
    "kernel from": _library,
}

IN_COLUMNS = frozenset(
    {"capability", "topk", "cache_format", "num_heads", "page_size", "q_len", "ragged", "needs_lse", "attn_sink"}
    | {"batch_invariant"}
)


def _rest(adapter: Adapter) -> Iterable[str]:
    """What the columns leave out: limits on other fields, rules that hold only in combination, and what a cache must hold."""
    for rule in adapter.support:
        if isinstance(rule, Joint):
            yield rule.name
        elif rule.subject not in IN_COLUMNS:
            yield f"{rule.subject} {rule.takes}"
    for dtype in ("bfloat16", "float16"):
        precision = adapter.conventions_of(Problem(16, q_dtype=dtype)).lse_precision
        if precision:
            yield f"no lse with q_dtype {dtype} unless it is named, as that may be off by {precision:.0e}"
    if adapter.conventions.unused_rows == "read":
        yield "finite values in the rows of a live page that were never written, as `allocate` makes them"
