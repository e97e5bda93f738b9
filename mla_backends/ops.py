"""The one door to the compiled ops, each with its torch form.

The shape contract of an op is checked once for both forms, by the module that defines it. Outputs are
written in place, no op waits for the device, and but for `merge_partials` nothing is returned.
"""

from __future__ import annotations

from mla_backends.cache_ops import write_cache, write_cache_and_rope, write_indexer_cache
from mla_backends.compiled import Compiled, compiled
from mla_backends.query_ops import (
    absorb_query,
    batched_matmul,
    concat_nope_rope,
    quantize_query,
    query_scale,
    rope_tail,
)
from mla_backends.row_ops import finish_rows, merge_partials
from mla_backends.slot_ops import compact_slots, sanitize_slots, select_rows, select_slots

__all__ = [
    "Compiled",
    "absorb_query",
    "batched_matmul",
    "compact_slots",
    "compiled",
    "concat_nope_rope",
    "finish_rows",
    "merge_partials",
    "quantize_query",
    "query_scale",
    "rope_tail",
    "sanitize_slots",
    "select_rows",
    "select_slots",
    "write_cache",
    "write_cache_and_rope",
    "write_indexer_cache",
]
