"""What an adapter fulfils: data about its kernel, and a `plan` that prepares a `run`.

A new adapter is one file with a tuple `ADAPTERS`. It says what it takes in `support`, what it gives
in `conventions`, where its kernel comes from in `providers`; the plan pads, clamps, converts and
refuses from that data, so that nothing of it is written again in `plan` or `run`.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mla_backends.absorb import Query
from mla_backends.cache import PagedCache
from mla_backends.device import Device, installed_version
from mla_backends.problem import Problem
from mla_backends.support import Conventions, Refusal, Speed, Support

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Absent", "Adapter", "HostLengths", "Kernel", "Provider", "Step", "takes_arguments"]


class Absent(Exception):
    """A package is installed but does not hold the kernel; the text says what was missing."""


@dataclass(frozen=True)
class Provider:
    """A package that may hold the kernel, found by asking it.

    Args:
        package: the distribution's name, as pip knows it.
        module: what to import.
        load: from the imported module, the callables that the adapter uses, in whatever shape it likes; raises
            `Absent` where a signature, an op's schema or a build flag says that the kernel isn't there.
    """

    package: str
    module: str
    load: Callable[[Any], Any]

    def ask(self) -> Any:
        """The loaded callables.

        Raises:
            Absent: with the reason, whatever went wrong: a broken library takes nobody down.
        """
        try:
            return self.load(importlib.import_module(self.module))
        except ModuleNotFoundError as error:
            if error.name and (self.module == error.name or self.module.startswith(f"{error.name}.")):
                raise Absent("not installed") from error
            raise Absent(f"import failed: {error}") from error
        except Absent:
            raise
        except Exception as error:  # whatever a package does when it is imported, it is this package's reason
            raise Absent(f"import failed: {type(error).__name__}: {error}") from error

    @property
    def version(self) -> str | None:
        return installed_version(self.package)


def takes_arguments(function: Any, *names: str) -> None:
    """Check that a library's function has the named parameters.

    Raises:
        Absent: naming those it lacks.
    """
    parameters = inspect.signature(function).parameters
    missing = [name for name in names if name not in parameters]
    if missing:
        raise Absent(f"{function.__module__}.{function.__name__} has no argument {', '.join(missing)}")


@dataclass(frozen=True)
class HostLengths:
    """The step's lengths on the host, for kernels that plan there; rows past the live ones are 0.

    Args:
        seq_lens: [B] int32, CPU.
        cu_q_lens: [B + 1] int32, CPU.
    """

    seq_lens: Tensor
    cu_q_lens: Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """What a kernel is planned from: the facts, and the plan's own buffers, whose addresses never change.

    Args:
        problem: as dispatch saw it.
        device: where all tensors live.
        sm_count: the device's multiprocessors.
        heads: query heads as the kernel gets them: problem.num_heads, padded to a count that it runs.
        batch: B, the rows of the buffers.
        block_table: [B, W] int32, rows contiguous; None when sparse.
        seq_lens: [B] int32, keys per request; None when sparse. Clamped to at least 1, and the table's ids to
            the cache, where the conventions say that empty rows are undefined.
        cu_q_lens: [B + 1] int32, query rows before each request; a constant ramp when queries are uniform.
        q_len: query rows a request; the most of one request when ragged.
        max_seq_len: keys, the plan's capacity.
        num_pages: of the cache.
        softmax_scale: factor on the logits.
        attn_sink: [heads] float32 or None.
        workspace: uint8, as long as `Adapter.workspace_bytes` said; None for 0.
        slots: [B, q, topk'] int32, filled before each run as the conventions' `slots` says; None when dense.
        slot_counts: [B * q] int32, how many row ids come first in each row of `slots`; None where those are slots.
    """

    problem: Problem
    device: torch.device
    sm_count: int
    heads: int
    batch: int
    block_table: Tensor | None
    seq_lens: Tensor | None
    cu_q_lens: Tensor
    q_len: int
    max_seq_len: int
    num_pages: int
    softmax_scale: float
    attn_sink: Tensor | None
    workspace: Tensor | None
    slots: Tensor | None = None
    slot_counts: Tensor | None = None


class Kernel(ABC):
    """One prepared kernel; its buffers keep their addresses for its whole life."""

    @abstractmethod
    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Decode one layer on the current stream.

        Args:
            query: [B, q, H, D], ragged [T, H, D]; the heads, dtype and packing that the conventions ask for.
            cache: the layer, whose facts are those that the plan was made with.
            indices: `Step.slots`; None when dense.
            out: [B, q, H, L] or [T, H, L] to write into; only where the conventions say `writes_out`.

        Returns:
            out, the one given or a tensor that nothing else holds, as the plan may drop its axis of q in place; and lse in
            the kernel's own axes, base and empty value, None where the problem needs none.
        """

    def update(self, lengths: HostLengths | None) -> None:  # noqa: B027, a kernel may have nothing to plan
        """Plan a step anew from the buffers' current values, into the same metadata tensors.

        An exception leaves what was planned before: the caller's buffers are brought back, and its plan goes on.

        Args:
            lengths: given where the conventions say that metadata is made on the host.
        """

    def describe(self) -> dict[str, Any]:
        """Facts for `DecodePlan.describe`: the kernel's name, split counts, what else decides its speed."""
        return {}


class Adapter(ABC):
    """One kernel of one library. Everything but `plan` is data."""

    name: ClassVar[str]
    providers: ClassVar[tuple[Provider, ...]] = ()
    """In order of preference: the first that answers serves. Empty: torch is enough."""
    support: ClassVar[Support]
    conventions: ClassVar[Conventions]
    speed: ClassVar[Speed] = Speed(memory=0.0, compute=0.0)
    """Zeros: not measured, so it comes after those that are."""

    @abstractmethod
    def plan(self, step: Step, library: Any) -> Kernel:
        """Prepare a kernel.

        Args:
            step: facts and buffers.
            library: what the serving provider's `load` returned; None without providers.
        """

    def conventions_of(self, problem: Problem) -> Conventions:
        """The conventions at one problem: `conventions`, but where the kernel's depend on more than that."""
        return self.conventions

    def workspace_bytes(self, problem: Problem, device: Device, *, max_batch: int, max_seq_len: int) -> int:
        """Bytes of scratch that plans of one stream may share; 0 where the library allocates its own."""
        return 0

    def refusals(self, problem: Problem, device: Device, *, forced: bool = False) -> tuple[Refusal, ...]:
        """Every limit that the problem or the device breaks, and heads, strides and an lse that the conventions rule out.
        Pure: no kernel library is touched.

        Args:
            forced: the caller named this adapter, which waives preferences.
        """
        broken = []
        for rule in self.support:
            if forced and getattr(rule, "unless_forced", False):
                continue
            refusal = rule.refusal(problem, device)
            if refusal is not None:
                broken.append(refusal)
        conventions = self.conventions_of(problem)
        heads = conventions.heads
        if heads is not None and problem.num_heads > heads[-1] and not any(r.subject == "num_heads" for r in broken):
            taken, source = f"at most {heads[-1]}", f"conventions of {self.name}"
            broken.append(Refusal("num_heads", str(problem.num_heads), taken, source))
        is_strided = problem.page_stride is not None or not problem.packed_rows
        if is_strided and not conventions.strides:
            found = "the cache has other memory between its pages or rows"
            cure = "a cache of its own for each layer has none"
            broken.append(Refusal("", found, "packed pages", f"conventions of {self.name}", cure))
        precision = conventions.lse_precision
        if problem.needs_lse and precision and not forced:
            found = f"the lse is wanted, which this kernel may have off by {precision:.0e}"
            cure = f'name it, adapter="{self.name}", where that is near enough'
            broken.append(Refusal("", found, "problems without one", f"conventions of {self.name}", cure))
        return tuple(broken)
