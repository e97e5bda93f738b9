"""`mla-backends`: what is here, what would run and why, whether it is right, and the table of what is supported.

The only module that prints; it needs the [cli] extra. Exit status 2 is a bad input, and of `compare` also no adapter, 1 a mismatch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as missing:
    print(f"mla-backends needs {missing.name}: pip install 'mla-backends[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

import torch

from mla_backends import ops
from mla_backends.backend import get_backend
from mla_backends.catalogue import Broken, installed, serving
from mla_backends.compare import MODELS, Comparison, Row, Workload, compare
from mla_backends.device import Device, installed_version
from mla_backends.errors import InvalidInput, NoAdapterRuns
from mla_backends.formats import FORMATS
from mla_backends.problem import Problem
from mla_backends.support_table import markdown, with_table

__all__ = ["app", "main"]

MISMATCH, BAD_INPUT = 1, 2

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
Option = typer.Option


@contextmanager
def refusals_as_messages() -> Iterator[None]:
    """A refusal is its own message, and no traceback says more."""
    try:
        yield
    except (InvalidInput, NoAdapterRuns) as refused:
        print(refused, file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None


# --- info -----------------------------------------------------------------------------------------------------------------


@app.command("info")
def info() -> None:
    """The device, the compiled ops, and each adapter: its provider and version, or why it is absent."""
    here = Device.here()
    sms = f", {here.sm_count} multiprocessors" if here.sm_count else ""
    print(f"device    {here}{'' if here.capability is None else f', {here.name}{sms}'}")
    print(f"package   mla-backends {installed_version('mla-backends')}, torch {torch.__version__}")
    print(f"ops       {ops.compiled()}")
    print("adapters")
    width = max((len(entry.name) for entry in installed()), default=0)
    for entry in installed():
        if isinstance(entry, Broken):
            print(f"  {entry.name:{width}}  does not import: {entry.error}")
            continue
        served = serving(entry)
        absent = "; ".join(f"{package}: {why}" for package, why in served.absent)
        if served.answered:
            print(f"  {entry.name:{width}}  {served}" + (f" (passed over: {absent})" if absent else ""))
        else:
            print(f"  {entry.name:{width}}  absent: {absent}")


# --- explain --------------------------------------------------------------------------------------------------------------


@app.command("explain")
def explain(
    capability: Annotated[
        str | None, Option(help="of the device, such as sm90 or cpu; this machine's by default")
    ] = None,
    num_heads: Annotated[int, Option(help="query heads on this rank")] = 128,
    batch: Annotated[int | None, Option(help="requests in a step")] = None,
    q_len: Annotated[int, Option(help="new tokens a request")] = 1,
    ragged: Annotated[bool, Option(help="requests differ in new tokens")] = False,
    causal: Annotated[bool, Option(help="a new token sees none after it")] = True,
    kv_lora_rank: Annotated[int, Option(help="width of the latent")] = 512,
    qk_rope_head_dim: Annotated[int, Option(help="width of the rotated key")] = 64,
    cache_format: Annotated[str, Option(help=", ".join(FORMATS))] = "bf16",
    q_dtype: Annotated[str, Option(help="of the model's queries, as torch names it")] = "bfloat16",
    page_size: Annotated[int, Option(help="tokens a page")] = 64,
    page_stride: Annotated[int | None, Option(help="rows between two pages' starts; packed pages by default")] = None,
    whole_rows: Annotated[bool, Option(help="pages start a whole number of rows apart")] = True,
    packed_rows: Annotated[bool, Option(help="rows of a page follow each other without a gap")] = True,
    alignment: Annotated[int, Option(help="bytes that divide the cache's address and strides")] = 16,
    topk: Annotated[int | None, Option(help="keys a row selects; dense by default")] = None,
    needs_lse: Annotated[bool, Option(help="the log-sum-exp is wanted")] = False,
    attn_sink: Annotated[bool, Option(help="a sink logit a head is given")] = False,
    batch_invariant: Annotated[bool, Option(help="a row's bits must not depend on the batch")] = False,
    measured_q_scale: Annotated[bool, Option(help="an e4m3 query's scale is measured, not given")] = True,
    max_seq_len: Annotated[int | None, Option(help="keys of the longest request")] = None,
) -> None:
    """Which adapters run a problem on a device, in order of preference, and every reason of those that don't."""
    facts = {name: value for name, value in locals().items() if name != "capability"}
    with refusals_as_messages():
        print(get_backend(capability).explain(Problem(**facts)))


# --- compare --------------------------------------------------------------------------------------------------------------


@app.command("compare")
def compare_(
    model: Annotated[str, Option(help=", ".join(MODELS))] = Workload.model,
    tp: Annotated[int, Option(help="ranks that share the heads")] = Workload.tp,
    batch: Annotated[int, Option(help="requests")] = Workload.batch,
    seq: Annotated[int, Option(help="keys of the longest request")] = Workload.seq,
    q_len: Annotated[int, Option(help="new tokens a request")] = Workload.q_len,
    lengths: Annotated[str, Option(help="mixed, with an empty row and page edges, or equal")] = Workload.lengths,
    cache_format: Annotated[str, Option("--format", help=", ".join(FORMATS))] = Workload.cache_format,
    page_size: Annotated[int, Option(help="tokens a page")] = Workload.page_size,
    topk: Annotated[int | None, Option(help="keys a row selects; dense by default")] = Workload.topk,
    adapter: Annotated[list[str] | None, Option(help="run this one alone; may be given again")] = None,
    device: Annotated[str | None, Option(help="cpu or cuda:0; the current GPU by default, else the CPU")] = None,
    as_json: Annotated[bool, Option("--json", help="the figures as JSON on stdout")] = False,
) -> None:
    """Every adapter that runs here against the float64 reference, on the geometry of a real model.

    The cache is the middle layer of a block-major slot whose other layers hold NaN, its pages shuffled.
    """
    with refusals_as_messages():
        workload = Workload(model, tp, batch, seq, q_len, lengths, cache_format, page_size, topk)  # type: ignore[arg-type]
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("compare", total=None)

            def on_step(doing: str, steps: int) -> None:
                started = progress.tasks[0].total is not None
                progress.update(task, description=doing, total=steps, advance=1 if started else 0)

            found = compare(workload, only=adapter or (), device=device, on_step=on_step)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _print(found)
    if not found.is_right:
        raise typer.Exit(MISMATCH)


def _print(found: Comparison) -> None:
    """The table of a comparison, and below it what was wrong or refused."""
    workload = found.workload
    print(
        f"{workload.model} on {found.device}: {workload.geometry.num_heads} heads (tp {workload.tp}), {workload.batch} "
        f"requests of {min(workload.seq_lens)} to {workload.seq} keys ({sum(workload.seq_lens)} in all), q_len "
        f"{workload.q_len}, {workload.cache_format}, pages of {workload.page_size}"
        + ("" if workload.topk is None else f", topk {workload.topk}")
    )
    table = Table(
        "adapter", "provider", "out error", "lse error", "strided = contiguous", "time, us", "x floor", "verdict"
    )
    for row in found.rows:
        table.add_row(*_cells(row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    checked = "all" if found.checked == workload.batch else f"the first {found.checked}"
    print(
        f"out error: norm of the difference over norm, lse error: the largest; against float64, {checked} of {workload.batch} requests"
    )
    if found.ceilings is not None and found.floor_microseconds is not None:
        copy, matrix = found.ceilings
        print(
            f"floor: {found.floor_microseconds:.1f} us, from {copy:.2f} TB/s copy and {matrix:.0f} TFLOP/s bf16 measured in this run"
        )
    for row in found.rows:
        for text in (*row.reasons, *row.faults, *filter(None, [row.note])):
            print(f"{row.adapter}: {text}")


def _cells(row: Row) -> list[str]:
    if row.outcome is None:
        return [row.adapter, row.provider, "", "", "", "", "", "refused"]
    return [
        row.adapter,
        row.provider,
        f"{row.outcome.out_error:.1e}",
        f"{row.outcome.lse_error:.1e}",
        "to the bit" if row.outcome.is_strided_equal else "NO",
        "" if row.microseconds is None else f"{row.microseconds:.1f}",
        "" if row.floor_ratio is None else f"{row.floor_ratio:.2f}",
        "MISMATCH" if row.faults else "right",
    ]


# --- table ----------------------------------------------------------------------------------------------------------------


@app.command("table")
def table(
    into: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="a Markdown file, whose table between the two marks is replaced"),
    ] = None,
) -> None:
    """README's support table, from what the installed adapters declare."""
    made = markdown(entry for entry in installed() if not isinstance(entry, Broken))
    if into is None:
        print(made)
        return
    with refusals_as_messages():
        into.write_text(with_table(into.read_text(), made))


def main() -> None:
    """The command `mla-backends`."""
    app()
