"""A plan's `run` and `select_slots`, each as one node of a compiled graph: torch.compile neither looks into it nor breaks at it.

The node knows plan, query and cache by number. Their tensors go in beside the numbers, as a compiled graph may write
another tensor in their place and copy it back later.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from mla_backends.errors import InvalidInput
from mla_backends.op_table import register

__all__ = ["is_same_memory", "numbered", "run_in_graph", "select_in_graph"]

_LIVING: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def numbered(owner: Any) -> int:
    """A number by which a graph's node finds `owner` again while it lives."""
    number = next(_numbers)
    _LIVING[number] = owner
    return number


def _living(number: int) -> Any:
    found = _LIVING.get(number)
    if found is None:
        raise InvalidInput(f"object {number} of a compiled graph is gone; keep its plan, query and cache while it runs")
    return found


def is_same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are one view of one piece of memory."""
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _run(
    plan: int,
    query: int,
    cache: int,
    latent: Tensor,
    rope: Tensor,
    scale: Tensor | None,
    data: Tensor,
    indices: Tensor | None,
    is_selected: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    asked, layer, made = _living(query).over(latent, rope, scale), _living(cache).over(data), _living(plan)
    made.run(asked, layer, indices=made.selected if is_selected else indices, out=out, lse=lse)


def _select(table: Tensor, plan: int, positions: Tensor, block_table: Tensor, seq_lens: Tensor | None) -> None:
    made = _living(plan).select_slots(positions, block_table, seq_lens).kernel_table
    if not is_same_memory(made, table):
        table.copy_(made)


run_in_graph: Callable[..., None] = register(
    "run_plan(int plan, int query, int cache, Tensor latent, Tensor rope, Tensor? scale, Tensor data, Tensor? indices, "
    "bool is_selected, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _run,
    _run,
)

select_in_graph: Callable[..., None] = register(
    "select_slots_of_plan(Tensor(a!) table, int plan, Tensor positions, Tensor block_table, Tensor? seq_lens) -> ()",
    _select,
    _select,
)
