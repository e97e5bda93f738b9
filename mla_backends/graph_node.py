"""A plan's `run`, `select_slots` and `refresh`, each as one node of a compiled graph: torch.compile neither looks into it nor
breaks at it.

The node knows its plan by number. All tensors that it reads go in beside it, those that outside code may write into the plan
among them, so that a graph orders it behind what writes them; what lies elsewhere than the plan has it was written in the
graph, which copies it back later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mla_backends.errors import InvalidInput
from mla_backends.op_table import register

__all__ = ["is_same_memory", "numbered", "of_the_host", "refresh_in_graph", "run_in_graph", "select_in_graph"]

_Method = TypeVar("_Method", bound=Callable[..., None])

_LIVING: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def of_the_host(method: _Method) -> _Method:
    """What torch.compile must not look into: a whole graph is refused, another is broken there."""
    why = f"{method.__qualname__} is work of the host: call it outside of the compiled function"
    return cast(_Method, torch.compiler.disable(method, reason=why))


def numbered(node: Any) -> int:
    """A number by which a graph finds a plan's `PlanNode` again while it lives."""
    number = next(_numbers)
    _LIVING[number] = node
    return number


def _living(number: int) -> Any:
    found = _LIVING.get(number)
    if found is None:
        raise InvalidInput(f"plan {number} of a compiled graph is gone; keep it while the graph runs")
    return found


def is_same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are one view of one piece of memory."""
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _copied(given: Sequence[Tensor], into: Sequence[Tensor]) -> bool:
    """Bring values to where they belong; whether any lay elsewhere."""
    apart = [(a, b) for a, b in zip(into, given, strict=True) if not is_same_memory(a, b)]
    for mine, theirs in apart:
        mine.copy_(theirs)
    return bool(apart)


def _run(
    plan: int,
    inputs: list[Tensor],
    latent: Tensor,
    rope: Tensor,
    scale: Tensor | None,
    rows: Tensor,
    kv_scale: Tensor | None,
    indices: Tensor | None,
    is_selected: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    node = _living(plan)
    if _copied(inputs, node.inputs):
        node.unlearn()
    query, layer = node.query_over(latent, rope, scale), node.cache_over(rows, kv_scale)
    node.plan.run(query, layer, indices=node.plan.selected if is_selected else indices, out=out, lse=lse)


def _select(table: Tensor, plan: int, positions: Tensor, block_table: Tensor, seq_lens: Tensor | None) -> None:
    made = _living(plan).plan.select_slots(positions, block_table, seq_lens).kernel_table
    if not is_same_memory(made, table):
        table.copy_(made)


def _refresh(plan: int, block_table: Tensor, seq_lens: Tensor) -> None:
    node = _living(plan)
    were_apart = _copied((block_table, seq_lens), node.inputs[:2])
    node.plan.refresh()
    if were_apart:  # refresh holds lengths to the plan's room
        _copied(node.inputs[1:2], (seq_lens,))


run_in_graph: Callable[..., None] = register(
    "run_plan(int plan, Tensor[] inputs, Tensor latent, Tensor rope, Tensor? scale, Tensor rows, Tensor? kv_scale, "
    "Tensor? indices, bool is_selected, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _run,
    _run,
)

select_in_graph: Callable[..., None] = register(
    "select_slots_of_plan(Tensor(a!) table, int plan, Tensor positions, Tensor block_table, Tensor? seq_lens) -> ()",
    _select,
    _select,
)

refresh_in_graph: Callable[..., None] = register(
    "refresh_plan(int plan, Tensor block_table, Tensor(a!) seq_lens) -> ()", _refresh, _refresh
)
