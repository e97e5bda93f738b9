"""The door: a device's backend explains what runs, sizes and proves it, and plans decode steps.

Everything that a caller can get wrong is refused here, before a kernel library is imported.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mla_backends.absorb import AbsorbWeights, Query
from mla_backends.adapter import Adapter
from mla_backends.arguments import (
    check_cache,
    check_flags,
    check_kind,
    check_numbers,
    check_problem,
    check_scale,
    check_sink,
    check_workspace,
    longest,
    workspace_of,
)
from mla_backends.cache import PagedCache
from mla_backends.canary import PROOFS, SWITCH
from mla_backends.catalogue import Entry, as_entries, installed, serving
from mla_backends.device import Device
from mla_backends.dispatch import forced, judge
from mla_backends.errors import InvalidInput, NoAdapterRuns, whole_number
from mla_backends.formats import format_named
from mla_backends.plan import DecodePlan
from mla_backends.problem import Problem
from mla_backends.recipe import Recipe, cache_facts
from mla_backends.result import Decoded
from mla_backends.steps import MOST_KEYS, Room, StepInput, check_ints, check_tensor
from mla_backends.support import Refusal
from mla_backends.verdicts import Verdict, Verdicts

__all__ = ["Backend", "WarmupReport", "get_backend"]

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""What engines allocate: the sizes that `page_sizes` asks about."""


def get_backend(
    capability: tuple[int, int] | str | Device | None = None,
    *,
    adapter: str | None = None,
    device: torch.device | str | None = None,
    adapters: Sequence[Any] | None = None,
) -> Backend:
    """The backend of a device: the current one, or by capability.

    A capability that is not this machine's serves `explain` alone. The eager adapter is chosen by itself on a
    CPU; on a GPU only by adapter="eager".

    Args:
        capability: (9, 0), "sm90", "cpu" or a Device; None is `device`.
        adapter: the one to use; no other is considered then.
        device: of this machine; None is the current GPU, or the CPU where torch sees none.
        adapters: objects of `mla_backends.adapter.Adapter` that replace those installed.

    Raises:
        InvalidInput: for a capability, device or adapter that there is not.
    """
    entries = installed() if adapters is None else as_entries(adapters)
    if adapter is not None:
        forced(entries, adapter)
    if capability is None:
        here = Device.here(device)
        return Backend(here, _torch_device(device), entries, adapter)
    asked = Device.named(capability)
    if asked.capability is None:
        return Backend(Device.here("cpu"), torch.device("cpu"), entries, adapter)
    here = Device.here(device)
    if here.capability == asked.capability:
        return Backend(here, _torch_device(device), entries, adapter)
    return Backend(asked, None, entries, adapter)


def _torch_device(device: torch.device | str | None) -> torch.device:
    """With its index, as a tensor's own device has it."""
    found = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _plain(sink: Tensor) -> Tensor:
    """The caller's own tensor where kernels can read it, so that what is written into it later counts."""
    return sink if sink.is_contiguous() and not sink.requires_grad else sink.detach().contiguous()


@dataclass(frozen=True)
class WarmupReport:
    """What `Backend.warmup` did: a line a problem."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Backend:
    """One device's decode. Made by `get_backend`.

    Attributes:
        device: the facts that dispatch goes by.
    """

    device: Device

    def __init__(
        self, device: Device, where: torch.device | None, entries: tuple[Entry, ...], only: str | None
    ) -> None:
        self.device = device
        self._where = where
        self._entries = entries
        self._only = only

    @property
    def torch_device(self) -> torch.device:
        """Where this backend's tensors live.

        Raises:
            InvalidInput: for a backend of another machine's capability.
        """
        return self._here()

    def explain(self, problem: Problem) -> Verdicts:
        """Every adapter's verdict on a problem, in order of preference; its str() is the page a user reads.

        Raises:
            InvalidInput: for anything but a Problem.
        """
        check_problem(problem)
        ask = serving if self._where is not None else None
        return judge(problem, self.device, self._entries, ask=ask, only=self._only)

    def page_sizes(self, problem: Problem) -> tuple[int, ...]:
        """Page sizes from 1 to 256 tokens that some adapter takes, before the engine allocates; empty if none.

        Raises:
            InvalidInput: for anything but a Problem.
        """
        check_problem(problem)
        return tuple(size for size in PAGE_SIZES if self.explain(replace(problem, page_size=size)).chosen)

    def workspace_bytes(self, problem: Problem, *, max_batch: int, max_seq_len: int) -> int:
        """Bytes of the uint8 tensor that plans of one stream may share.

        Raises:
            InvalidInput: for anything but a Problem, or counts below 0.
            NoAdapterRuns: where nothing runs the problem.
        """
        check_problem(problem)
        max_batch = whole_number("max_batch", max_batch, least=0)
        max_seq_len = whole_number("max_seq_len", max_seq_len, least=0, most=MOST_KEYS)
        sized = replace(problem, batch=max_batch, max_seq_len=max_seq_len)
        adapter = self._adapter(self._chosen(self.explain(sized)).name)
        return adapter.workspace_bytes(sized, self.device, max_batch=max_batch, max_seq_len=max_seq_len)

    def warmup(self, problems: Iterable[Problem]) -> WarmupReport:
        """Compile and prove (canary) the adapters that these problems would be given. Outside capture.

        Returns:
            A printable report: for each problem the adapter, its error against the reference, and the seconds it took;
            or why none runs.
        """
        where = self._here()
        if isinstance(problems, Problem):
            problems = (problems,)
        if not isinstance(problems, Iterable):
            raise InvalidInput(
                f"problems is a {type(problems).__name__}, it takes Problems, as a list or one by itself"
            )
        lines = []
        for problem in problems:
            start = time.perf_counter()
            try:
                adapter, why = self._choose(problem, where)
            except NoAdapterRuns as refused:
                lines.append(str(refused))
                continue
            lines.append(f"{problem}: {adapter.name}, {why['canary']}, {time.perf_counter() - start:.1f} s")
        return WarmupReport(tuple(lines))

    def plan(
        self,
        cache: PagedCache,
        block_table: Tensor | None,
        seq_lens: Tensor | None,
        *,
        num_heads: int,
        softmax_scale: float,
        q_len: int = 1,
        cu_q_lens: Tensor | None = None,
        max_q_len: int | None = None,
        causal: bool = True,
        q_dtype: torch.dtype | None = None,
        topk: int | None = None,
        attn_sink: Tensor | None = None,
        return_lse: bool = False,
        max_batch: int | None = None,
        max_seq_len: int | None = None,
        seq_lens_cpu: Tensor | None = None,
        workspace: Tensor | None = None,
        batch_invariant: bool = False,
        q_scale: float | Tensor | None = None,
        empty_rows: Literal["exact", "any"] = "exact",
    ) -> DecodePlan:
        """Choose the adapter and prepare one step.

        Args:
            cache: any layer; all layers that the plan serves have its layout.
            block_table: [B, W] page ids; int32, another integer dtype or a sliced table is converted here.
            seq_lens: [B] int32, keys per request with the new tokens.
            num_heads: H, query heads on this rank.
            softmax_scale: factor on the logits; `mla_backends.softmax_scale(config)` knows it.
            q_len: new tokens a request: row i sees keys k <= seq_len - q_len + i (causal) or k < seq_len.
            cu_q_lens: [B + 1] int32: ragged queries [T, H, D]; tokens past cu_q_lens[-1] are empty rows.
            max_q_len: rows of the largest ragged request; None reads them off cu_q_lens, which waits for a GPU.
            causal: as above.
            q_dtype: of the model's q_nope, q_pe and out; by default the cache's, bfloat16 for fp8 formats.
            topk: sparse: table and lengths are None and max_batch, required then, is B.
            attn_sink: [H] float32, one more logit a head in the softmax, with no value; lse leaves it out.
            return_lse: whether `run` gives the log-sum-exp.
            max_batch: the plan's B; rows past the live ones are empty. Default: this step's.
            max_seq_len: keys, the plan's capacity. Default: W * page_size, never the current lengths.
            seq_lens_cpu: the exact lengths on the host, which spares a wait to adapters that plan there.
            workspace: one uint8 tensor of `workspace_bytes`, which plans of one stream may share.
            batch_invariant: a row's bits must not depend on the rest of the batch.
            q_scale: kernels with an e4m3 query: value = stored * q_scale. None: measured at each query.
            empty_rows: "exact": a row that sees no key is out 0, lse -inf. "any": such rows may hold anything, NaN too, for
                engines that throw them away; that spares a launch a layer where a kernel leaves them wrong.

        Raises:
            InvalidInput: for what does not fit together, before any kernel library is touched.
            NoAdapterRuns: where every adapter refuses.
        """
        where = self._here()
        check_cache(cache, where)
        num_heads, softmax_scale, q_len = check_numbers(num_heads=num_heads, softmax_scale=softmax_scale, q_len=q_len)
        check_flags(causal=causal, return_lse=return_lse, batch_invariant=batch_invariant)
        step = StepInput(block_table, seq_lens, seq_lens_cpu, cu_q_lens)
        check_kind(step, topk, max_batch)
        step.check(where)
        batch = whole_number("max_batch", max_batch, least=0) if max_batch is not None else step.live or 0
        if cu_q_lens is not None:
            most = longest(cu_q_lens) if max_q_len is None else whole_number("max_q_len", max_q_len, least=0)
            if q_len not in (1, most):
                raise InvalidInput(
                    f"q_len is {q_len} and cu_q_lens is given, whose queries have each their own; leave q_len out, and give "
                    f"the most rows of a request as max_q_len"
                )
            q_len = most
        elif max_q_len is not None and max_q_len != q_len:
            raise InvalidInput(f"max_q_len is {max_q_len} without cu_q_lens; uniform queries take q_len")
        widest = 0 if block_table is None else int(block_table.shape[1]) * cache.page_size
        if max_seq_len is None:
            capacity = min(widest, MOST_KEYS)
        else:
            capacity = whole_number("max_seq_len", max_seq_len, least=0, most=MOST_KEYS)
        dtype = q_dtype if q_dtype is not None else getattr(torch, format_named(cache.format).query_dtype)
        if not isinstance(dtype, torch.dtype):
            raise InvalidInput(f"q_dtype is {dtype!r}, it takes a torch.dtype such as torch.bfloat16")
        if empty_rows not in ("exact", "any"):
            raise InvalidInput(f"empty_rows is {empty_rows!r}, it takes 'exact' or 'any'")
        q_scale = check_scale(q_scale, where)
        check_workspace(workspace, where)
        Room(
            batch=batch,
            max_seq_len=capacity,
            page_size=cache.page_size,
            num_pages=cache.num_pages,
            q_len=q_len,
            ragged=cu_q_lens is not None,
            device=where,
        ).check(step)
        problem = Problem(
            num_heads,
            batch=batch,
            q_len=max(q_len, 1),
            ragged=cu_q_lens is not None,
            causal=causal,
            q_dtype=str(dtype).removeprefix("torch."),
            topk=topk,
            needs_lse=return_lse,
            attn_sink=attn_sink is not None,
            batch_invariant=batch_invariant,
            max_seq_len=None if topk is not None else capacity,
            measured_q_scale=q_scale is None,
            **cache_facts(cache),
        )
        if attn_sink is not None:
            check_sink(attn_sink, num_heads, where)
        adapter, why = self._choose(problem, where)
        needed = adapter.workspace_bytes(problem, self.device, max_batch=batch, max_seq_len=capacity)
        recipe = Recipe(
            adapter=adapter,
            serving=serving(adapter),
            problem=problem,
            device=self.device,
            where=where,
            num_pages=cache.num_pages,
            softmax_scale=softmax_scale,
            q_dtype=dtype,
            max_seq_len=capacity,
            attn_sink=None if attn_sink is None else _plain(attn_sink),
            workspace=workspace_of(workspace, needed, where),
            q_scale=q_scale,
            empty_rows=empty_rows,
            why=why,
        )
        return DecodePlan.start(recipe, batch=batch, q_len=q_len, step=step)

    def decode(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        cache: PagedCache,
        block_table: Tensor | None,
        seq_lens: Tensor | None,
        *,
        softmax_scale: float,
        weights: AbsorbWeights | None = None,
        indices: Tensor | None = None,
        cu_q_lens: Tensor | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        seq_lens_cpu: Tensor | None = None,
        q_scale: float | Tensor | None = None,
    ) -> Decoded:
        """Plan and run at once.

        Args:
            q_nope: [B, (q,) H, N] with `weights`, else absorbed [B, (q,) H, L]; ragged [T, H, ..].
            q_pe: the rotated part, same leading shape, R last.
            cache, block_table, seq_lens, cu_q_lens, return_lse, seq_lens_cpu, q_scale: as in `plan`.
            softmax_scale: factor on the logits.
            weights: absorbs the query and projects the result.
            indices: sparse: [B, (q,) topk] int32 slots; table and lengths are None.
            out: [.., V] with weights, else [.., L], to write into.

        Returns:
            out [B, (q,) H, V] with weights, else [B, (q,) H, L], and lse where asked for.

        Raises:
            InvalidInput, NoAdapterRuns: as `plan` and `DecodePlan.run` do.
        """
        check_tensor("q_nope", q_nope, "a tensor [B, H, X], [B, q, H, X] or ragged [T, H, X]")
        check_tensor("q_pe", q_pe, "a tensor with q_nope's leading shape")
        if q_nope.ndim not in (3, 4):
            raise InvalidInput(
                f"q_nope has shape {list(q_nope.shape)}, it takes [B, H, X], [B, q, H, X] or ragged [T, H, X]"
            )
        if cu_q_lens is not None and q_nope.ndim == 4:
            raise InvalidInput(f"q_nope has shape {list(q_nope.shape)}, with cu_q_lens it takes [T, H, X], ragged")
        if weights is not None and not isinstance(weights, AbsorbWeights):
            raise InvalidInput(f"weights is a {type(weights).__name__}, it takes AbsorbWeights")
        if indices is not None and any(x is not None for x in (block_table, seq_lens, seq_lens_cpu, cu_q_lens)):
            raise InvalidInput(
                "indices is given, so the decode is sparse: block_table, seq_lens, seq_lens_cpu and cu_q_lens must be None"
            )
        absorbed = None if weights is not None else Query.from_parts(q_nope, q_pe)
        if indices is not None:
            check_ints("indices", indices, q_nope.ndim - 1, self._here())
        if indices is not None and (indices.ndim != q_nope.ndim - 1 or indices.shape[:-1] != q_nope.shape[:-2]):
            raise InvalidInput(
                f"indices has shape {list(indices.shape)}, it takes {[*q_nope.shape[:-2], 'topk']} for q_nope {list(q_nope.shape)}"
            )
        plan = self.plan(
            cache,
            block_table,
            seq_lens,
            num_heads=int(q_nope.shape[-2]),
            softmax_scale=softmax_scale,
            q_len=1 if q_nope.ndim == 3 else int(q_nope.shape[1]),
            cu_q_lens=cu_q_lens,
            q_dtype=q_nope.dtype,
            topk=None if indices is None else int(indices.shape[-1]),
            return_lse=return_lse,
            max_batch=None if indices is None else int(q_nope.shape[0]),
            seq_lens_cpu=seq_lens_cpu,
            q_scale=q_scale,
        )
        if weights is None:
            assert absorbed is not None
            return plan.run(absorbed, cache, indices=indices, out=out)
        query = weights.query(q_nope, q_pe, out=None if cu_q_lens is not None else plan.new_query())
        decoded = plan.run(query, cache, indices=indices)
        return Decoded(weights.project(decoded.out, out=out), decoded.lse)

    # --- choice -------------------------------------------------------------------------------------------------------

    def _here(self) -> torch.device:
        if self._where is None:
            raise InvalidInput(
                f"this backend is of {self.device}, which is not this machine's: it serves explain alone; get_backend() is this machine's"
            )
        return self._where

    def _adapter(self, name: str) -> Adapter:
        entry = forced(self._entries, name)
        assert isinstance(entry, Adapter)
        return entry

    def _chosen(self, verdicts: Verdicts) -> Verdict:
        chosen = verdicts.chosen
        if chosen is None:
            raise NoAdapterRuns(verdicts)
        return chosen

    def _choose(self, problem: Problem, where: torch.device) -> tuple[Adapter, dict[str, Any]]:
        """The first adapter that runs and proves itself.

        Raises:
            NoAdapterRuns: with what each canary found among the reasons.
        """
        verdicts = self.explain(problem)
        while True:
            name = self._chosen(verdicts).name
            adapter = self._adapter(name)
            try:
                proof = PROOFS.of(adapter, serving(adapter), problem, self.device, where)
            except RuntimeError as error:
                raise InvalidInput(
                    f"{name} is not proved yet for {problem}, and a CUDA graph is being captured; call warmup first"
                ) from error
            if not isinstance(proof, Refusal):
                said = f"off ({SWITCH}=0)" if proof is None else f"error {proof:.1e}"
                order = [v.name for v in verdicts if v.runs]
                return adapter, {
                    "canary": said,
                    "chosen": "named by the caller" if self._only else f"first of {', '.join(order)}",
                }
            refused = [replace(v, reasons=(proof,)) if v.name == name else v for v in verdicts]
            verdicts = replace(verdicts, entries=tuple(sorted(refused, key=lambda v: not v.runs)))
