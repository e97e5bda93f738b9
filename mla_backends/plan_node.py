"""One plan as a compiled graph has it: what is traced in place of its calls, and what the graph's nodes find again.

`graph_node` defines the nodes; here are the tensors that they take, and how these become a query and a layer again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_backends.buffers import Buffers
from mla_backends.cache import PagedCache
from mla_backends.errors import InvalidInput
from mla_backends.formats import format_named
from mla_backends.graph_node import numbered, refresh_in_graph, run_in_graph, select_in_graph
from mla_backends.intake import Intake
from mla_backends.query import Query
from mla_backends.recipe import Recipe
from mla_backends.result import Decoded
from mla_backends.selection import Selection

__all__ = ["PlanNode"]


class PlanNode:
    """A plan's side of a compiled graph; it lives as long as the plan.

    Attributes:
        plan: whose `run`, `select_slots` and `refresh` the nodes call.
        number: how a node finds this again.
        inputs: what outside code may write, which a node must read: the plan's table and lengths where it is dense, then the
            queries' scale and the sink.
    """

    def __init__(
        self, plan: Any, recipe: Recipe, buffers: Buffers, intake: Intake, selection: Selection | None
    ) -> None:
        self.plan = plan
        self.number = numbered(self)
        self.inputs = [buffers.block_table, buffers.seq_lens] if selection is None else []
        self.inputs += [x for x in (recipe.q_scale, recipe.attn_sink) if isinstance(x, Tensor)]
        self._recipe, self._buffers, self._intake, self._selection = recipe, buffers, intake, selection
        self._is_cuda = recipe.where.type == "cuda"

    # --- traced -------------------------------------------------------------------------------------------------------

    def run(
        self,
        query: Query,
        cache: PagedCache,
        indices: Tensor | Selection | None,
        out: Tensor | None,
        lse: Tensor | None,
    ) -> Decoded:
        """The plan's `run` as one node of the graph that torch.compile is making."""
        recipe, problem = self._recipe, self._recipe.problem
        shape = (*query.latent.shape[:-2], problem.num_heads)
        if out is None:
            out = torch.empty((*shape, problem.kv_lora_rank), dtype=recipe.q_dtype, device=recipe.where)
        if lse is None and problem.needs_lse:
            lse = torch.empty(shape, dtype=torch.float32, device=recipe.where)
        # Of a selection its table goes in, so that the graph runs the node that fills it first.
        is_selected = isinstance(indices, Selection)
        if isinstance(indices, Selection):
            indices.check_owner(self._selection)
            indices = indices.kernel_table
        planned = (problem.cache_format, problem.kv_lora_rank, problem.qk_rope_head_dim)
        if (cache.format, cache.kv_lora_rank, cache.qk_rope_head_dim) != planned:
            raise InvalidInput(
                f"the cache is {cache!r}, this plan was made for {planned[0]} of {planned[1]} + {planned[2]}"
            )
        parts = (query.latent, query.rope, query.scale, cache.rows, cache.own_scale, indices)
        run_in_graph(self._is_cuda, self.number, self.inputs, *parts, is_selected, out, lse)
        return Decoded(out, lse)

    def select(self, selection: Selection, positions: Tensor, block_table: Tensor, seq_lens: Tensor | None) -> None:
        """The plan's `select_slots`, likewise."""
        select_in_graph(self._is_cuda, selection.kernel_table, self.number, positions, block_table, seq_lens)

    def refresh(self) -> None:
        """The plan's `refresh`, likewise; nothing where it is sparse."""
        if self._selection is None:
            refresh_in_graph(self._is_cuda, self.number, *self.inputs[:2])

    # --- run by a node ------------------------------------------------------------------------------------------------

    def unlearn(self) -> None:
        """The graph has written what the host thought to know."""
        self._buffers.sees_keys = False

    def query_over(self, latent: Tensor, rope: Tensor, scale: Tensor | None) -> Query:
        """The query of those tensors."""
        return self._intake.over(latent, rope, scale)

    def cache_over(self, rows: Tensor, scale: Tensor | None) -> PagedCache:
        """The layer of those tensors, as the plan takes it."""
        p = self._recipe.problem
        name = format_named(p.cache_format).name
        return PagedCache.over(rows, scale, name, kv_lora_rank=p.kv_lora_rank, qk_rope_head_dim=p.qk_rope_head_dim)
