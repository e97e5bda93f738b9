"""One decode contract for Multi-head Latent Attention over the kernel libraries that people already run.

`get_backend(capability).plan(...)` chooses the kernel, `DecodePlan.run` decodes a layer, `Backend.decode`
does both. Importing this loads no kernel library.
"""

from mla_backends import ops
from mla_backends.absorb import AbsorbWeights, Query
from mla_backends.backend import Backend, get_backend
from mla_backends.cache import PagedCache
from mla_backends.device import Device
from mla_backends.errors import InvalidInput, NoAdapterRuns
from mla_backends.formats import Format
from mla_backends.indexer import IndexerCache
from mla_backends.plan import DecodePlan
from mla_backends.problem import Geometry, Problem, softmax_scale
from mla_backends.result import Decoded
from mla_backends.selection import Selection
from mla_backends.unified import UnifiedCache
from mla_backends.verdicts import Verdicts

__all__ = [
    "AbsorbWeights",
    "Backend",
    "DecodePlan",
    "Decoded",
    "Device",
    "Format",
    "Geometry",
    "IndexerCache",
    "InvalidInput",
    "NoAdapterRuns",
    "PagedCache",
    "Problem",
    "Query",
    "Selection",
    "UnifiedCache",
    "Verdicts",
    "get_backend",
    "ops",
    "softmax_scale",
]
