"""The adapters of this machine on one workload, each held against the reference and timed beside the others.

A workload is a real model's geometry and a batch; its data is a `Trial`'s, which would expose a wrong
read. What is found is returned, and printed elsewhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from mla_backends.backend import Backend, get_backend
from mla_backends.cache import PagedCache
from mla_backends.catalogue import Broken, installed
from mla_backends.conditions import Condition, Outcome
from mla_backends.device import Device
from mla_backends.errors import InvalidInput, NoAdapterRuns
from mla_backends.formats import Format, format_named
from mla_backends.problem import Geometry
from mla_backends.timing import ceilings, graph_of, interleaved, median_on_cpu
from mla_backends.trials import Trial
from mla_backends.verdicts import Verdict, Verdicts

__all__ = ["MODELS", "Comparison", "Row", "Workload", "compare"]

MLA_WIDTHS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

# Source: config.json of deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-V2-Lite and moonshotai/Kimi-K2-Instruct.
MODELS: dict[str, dict[str, int]] = {
    "deepseek-v3": {"num_attention_heads": 128, **MLA_WIDTHS},
    "deepseek-v2-lite": {"num_attention_heads": 16, **MLA_WIDTHS},
    "kimi-k2": {"num_attention_heads": 64, **MLA_WIDTHS},
}

EDGES = (0, 64, 65, 63, 1)
"""Lengths at which kernels go wrong first: an empty row, and both sides of a page."""

REFERENCE_FLOPS = 4e11
"""Float64 operations that the reference may take: some ten seconds on two cores. What is over is not checked, and said."""

GRAPH_CALLS = 10
"""Calls in a captured graph, at the least."""

CACHE_MULTIPLE = 3
"""Bytes that a timed graph reads before it comes back to a row, in sizes of the L2 cache, so that rows come from memory."""


@dataclass(frozen=True)
class Workload:
    """One decode step of a model on one rank.

    Args:
        model: a name in `MODELS`.
        tp: ranks that share its heads.
        batch: requests.
        seq: keys of the longest request.
        q_len: new tokens a request.
        lengths: "mixed", the longest and random shorter ones with an empty row and page edges among them; or "equal".
        cache_format: of the paged cache.
        page_size: tokens.
        topk: keys a row selects; None is dense.

    Raises:
        InvalidInput: for a model that there is not, a `tp` that does not divide its heads, counts below 1.
    """

    model: str = "deepseek-v3"
    tp: int = 1
    batch: int = 8
    seq: int = 512
    q_len: int = 1
    lengths: Literal["mixed", "equal"] = "mixed"
    cache_format: Format = "bf16"
    page_size: int = 64
    topk: int | None = None

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise InvalidInput(f"model is {self.model!r}, it takes one of {', '.join(MODELS)}")
        if self.lengths not in ("mixed", "equal"):
            raise InvalidInput(f"lengths is {self.lengths!r}, it takes mixed or equal")
        for name in ("batch", "seq", "q_len", "page_size", "topk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name} is {value}, it takes a whole number of at least 1")
        format_named(self.cache_format)
        _ = self.geometry

    @property
    def geometry(self) -> Geometry:
        return Geometry.from_config(MODELS[self.model], tp_size=self.tp)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Keys a request; the same each time."""
        if self.lengths == "equal":
            return (self.seq,) * self.batch
        edges = [n for n in EDGES if n <= self.seq][: self.batch // 4]
        drawn = random.Random(0)
        rest = [drawn.randint(1, self.seq) for _ in range(self.batch - 1 - len(edges))]
        return (self.seq, *edges, *rest)

    def condition(self) -> Condition:
        """The middle layer of three, in a block-major slot."""
        return Condition(
            num_heads=self.geometry.num_heads,
            q_len=self.q_len,
            cache_format=self.cache_format,
            page_size=self.page_size,
            seq_lens=self.seq_lens,
            layers=3,
            layer=1,
            topk=self.topk,
            kv_scale=0.5 if self.cache_format == "fp8" else None,
        )

    def keys(self) -> list[int]:
        """How many keys each request's rows read together: a page's rows are read once for all query rows."""
        return list(self.seq_lens) if self.topk is None else [self.topk * self.q_len] * self.batch

    def flops(self, request: int) -> float:
        """Multiplications and additions of one request."""
        widths = self.geometry
        per_key = 2 * widths.num_heads * (2 * widths.kv_lora_rank + widths.qk_rope_head_dim)
        rows = self.q_len if self.topk is None else 1
        return float(self.keys()[request] * rows * per_key)

    def nbytes(self) -> int:
        """Bytes of the cache rows that a step reads."""
        row = format_named(self.cache_format).row_bytes(self.geometry.kv_lora_rank, self.geometry.qk_rope_head_dim)
        return sum(self.keys()) * row

    def checked(self) -> list[int]:
        """The first requests whose reference costs no more than `REFERENCE_FLOPS`, and always one."""
        chosen, spent = [0], self.flops(0)
        for request in range(1, self.batch):
            spent += self.flops(request)
            if spent > REFERENCE_FLOPS:
                break
            chosen.append(request)
        return chosen


@dataclass(frozen=True)
class Row:
    """What was found of one adapter.

    Args:
        adapter, provider: names; the provider with its version where it runs.
        reasons: why it is refused; empty where it ran.
        outcome: numbers against the reference; None where it is refused.
        faults: what is wrong with them, in words; empty where nothing is.
        microseconds: median of a run of one layer, lse included; None where it was not timed, and `note` says why.
        floor_ratio: microseconds over the least that memory and matrix rate of this run allow; None on a CPU.
        note: what else to know.
    """

    adapter: str
    provider: str
    reasons: tuple[str, ...] = ()
    outcome: Outcome | None = None
    faults: tuple[str, ...] = ()
    microseconds: float | None = None
    floor_ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """All adapters on one workload.

    Args:
        device: where, in words.
        workload: what.
        checked: requests that were held against the reference, of workload.batch.
        floor_microseconds: the least that this run's ceilings allow; None on a CPU.
        ceilings: copy bandwidth in TB/s and bf16 rate in TFLOP/s, measured in this run; None on a CPU.
        rows: in the order of `explain`.
    """

    device: str
    workload: Workload
    checked: int
    floor_microseconds: float | None
    ceilings: tuple[float, float] | None
    rows: tuple[Row, ...]

    @property
    def is_right(self) -> bool:
        """Every adapter that ran agrees with the reference."""
        return not any(row.faults for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Plain values; NaN and infinite ones, which JSON has not, as text."""
        plain: dict[str, Any] = _plain({**asdict(self), "is_right": self.is_right})
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def compare(
    workload: Workload,
    *,
    only: Sequence[str] = (),
    device: torch.device | str | None = None,
    on_step: Callable[[str, int], None] = lambda doing, steps: None,
) -> Comparison:
    """Run every adapter that takes the workload here, and time those that are right.

    Args:
        only: names of the adapters to run; all that are installed by default.
        device: of this machine; the current GPU by default, the CPU where there is none.
        on_step: called before each step with what it does and how many steps there are.

    Raises:
        InvalidInput: for an adapter or a device that there is not.
        NoAdapterRuns: where every adapter refuses.
    """
    here = get_backend(device=device)
    names = list(only) or [entry.name for entry in installed()]
    backends = {name: get_backend(device=device, adapter=name) for name in names}
    steps = 2 * len(names) + 1
    on_step("data", steps)
    data = _Data(workload, here.torch_device)
    verdicts = {name: _verdict(backend, name, data) for name, backend in backends.items()}
    if not any(verdict.runs for verdict in verdicts.values()):
        raise NoAdapterRuns(Verdicts(data.of(names[0]).problem(), here.device, tuple(verdicts.values())))
    rows = {}
    for name, verdict in verdicts.items():
        on_step(f"{name}: numbers", steps)
        rows[name] = _checked(verdict, backends[name], data)
    timed = _timed(
        {name: backends[name] for name in names if rows[name].outcome}, data, lambda text: on_step(text, steps)
    )
    rates = ceilings() if here.torch_device.type == "cuda" else None
    floor = None if rates is None else _floor(workload, *rates)
    for name, (microseconds, note) in timed.items():
        ratio = microseconds / floor if floor and microseconds is not None else None
        rows[name] = replace(rows[name], microseconds=microseconds, floor_ratio=ratio, note=note)
    return Comparison(_words(here.device), workload, len(workload.checked()), floor, rates, tuple(rows.values()))


class _Data:
    """The workload's tensors: one `Trial` for adapters that ignore unused rows, another for those that read them."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload = workload
        self.device = device
        self._trials: dict[Literal["nan", "finite"], Trial] = {}

    def of(self, adapter: str) -> Trial:
        entry = next(e for e in installed() if e.name == adapter)
        trial = self._of("nan")
        if not isinstance(entry, Broken) and entry.conventions_of(trial.problem()).unused_rows == "read":
            return self._of("finite")
        return trial

    def _of(self, unused: Literal["nan", "finite"]) -> Trial:
        if unused not in self._trials:
            condition, checked = self.workload.condition(), self.workload.checked()
            self._trials[unused] = Trial(condition, self.device, unused=unused, checked=checked)
        return self._trials[unused]

    def rotation(self, adapter: str) -> list[PagedCache]:
        """The layer, and as many copies of it as keep its rows out of the L2 cache; on a CPU the layer alone."""
        trial = self.of(adapter)
        caches = [trial.cache]
        if self.device.type == "cuda":
            l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            copies = math.ceil(CACHE_MULTIPLE * l2 / max(1, self.workload.nbytes())) - 1
            caches += [
                PagedCache(trial.contiguous.data.clone(), trial.cache.format, kv_scale=trial.cache.kv_scale)
                for _ in range(copies)
            ]
        return caches


def _verdict(backend: Backend, name: str, data: _Data) -> Verdict:
    return backend.explain(data.of(name).problem())[name]


def _checked(verdict: Verdict, backend: Backend, data: _Data) -> Row:
    if not verdict.runs:
        return Row(verdict.name, verdict.provider, reasons=tuple(map(str, verdict.reasons)))
    trial = data.of(verdict.name)
    try:
        outcome = trial.run(backend)
    except NoAdapterRuns as refused:  # by its canary
        reasons = refused.verdicts[verdict.name].reasons
        return Row(verdict.name, verdict.provider, reasons=tuple(map(str, reasons)))
    return Row(verdict.name, verdict.provider, outcome=outcome, faults=outcome.faults(trial.condition))


def _timed(
    backends: dict[str, Backend], data: _Data, on_step: Callable[[str], None]
) -> dict[str, tuple[float | None, str]]:
    """Median microseconds of a run of one layer, by adapter, or None and the reason."""
    found: dict[str, tuple[float | None, str]] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    # Kept until the last replay: a graph reads its plan's and query's memory, and would read whatever came after them.
    calls_of: dict[str, list[Callable[[], object]]] = {}
    for name, backend in backends.items():
        on_step(f"{name}: time")
        trial = data.of(name)
        plan = trial.plan(backend)
        query = trial.query(plan)
        if data.device.type == "cpu":
            found[name] = median_on_cpu(partial(plan.run, query, trial.cache, indices=trial.indices)), ""
            continue
        caches = data.rotation(name)
        caches *= math.ceil(GRAPH_CALLS / len(caches))
        calls: list[Callable[[], object]] = [partial(plan.run, query, cache, indices=trial.indices) for cache in caches]
        try:
            graphs[name], calls_of[name] = graph_of(calls), calls
        except RuntimeError as error:
            found[name] = None, f"no CUDA graph: {error}"
    if graphs:
        times = interleaved(list(graphs.values()))
        found |= {name: (t / len(calls_of[name]), "") for name, t in zip(graphs, times, strict=True)}
    return found


def _floor(workload: Workload, copy_tbs: float, matrix_tflops: float) -> float:
    """Microseconds that no kernel can go below: rows read at copy bandwidth, or products at the matrix rate."""
    flops = sum(workload.flops(b) for b in range(workload.batch))
    return 1e6 * max(workload.nbytes() / (copy_tbs * 1e12), flops / (matrix_tflops * 1e12))


def _words(device: Device) -> str:
    """sm90, NVIDIA H200; or cpu."""
    return str(device) if device.name in ("", "cpu") else f"{device}, {device.name}"
