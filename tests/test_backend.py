"""A backend explains, sizes, warms up and describes; `decode` is plan, absorb, run and project."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_backends import AbsorbWeights, NoAdapterRuns, PagedCache, Problem, get_backend
from mla_backends.adapter import Adapter, Kernel, Step
from mla_backends.catalogue import installed
from mla_backends.device import Device
from mla_backends.support import Conventions, Limit, OneOf, Speed

EAGER = next(entry for entry in installed() if entry.name == "eager")
assert isinstance(EAGER, Adapter)


class Particular(Adapter):
    """Takes pages of 32 and 64 and heads of 16, and wants a workspace."""

    name = "particular"
    support = (
        Limit(Device, "capability", OneOf(None), refuses=((9, 0),), source="a test"),
        Limit(Problem, "page_size", OneOf(32, 64), refuses=(16, 128), source="a test"),
        Limit(Problem, "num_heads", OneOf(16), refuses=(8,), source="a test"),
    )
    conventions = Conventions(query="packed", heads=(16,), metadata="host", allocates=("lse",))
    speed = Speed(memory=0.5, compute=0.5)

    def plan(self, step: Step, library: Any) -> Kernel:
        assert step.workspace is not None
        assert step.workspace.numel() >= step.batch * 100 + step.max_seq_len
        assert isinstance(EAGER, Adapter)
        return EAGER.plan(step, None)

    def workspace_bytes(self, problem: Problem, device: Device, *, max_batch: int, max_seq_len: int) -> int:
        return max_batch * 100 + max_seq_len


ONE = get_backend("cpu", adapters=[Particular])
BOTH = get_backend("cpu", adapters=[EAGER, Particular])


def test_explain_lists_every_adapter_with_all_its_reasons_those_that_run_first() -> None:
    verdicts = BOTH.explain(Problem(16))
    assert [v.name for v in verdicts] == ["particular", "eager"]
    assert verdicts.chosen == verdicts["particular"]
    refused = BOTH.explain(Problem(8, page_size=48))
    assert [(v.name, v.runs) for v in refused] == [("eager", True), ("particular", False)]
    assert [r.subject for r in refused["particular"].reasons] == ["page_size", "num_heads"]
    assert str(refused) == (
        "cpu: num_heads=8, page_size=48\n"
        "  eager (torch): runs\n"
        "  particular (torch): refused\n"
        "    - page_size is 48, it takes 32 or 64 [a test]\n"
        "    - num_heads is 8, it takes 16 [a test]"
    )


def test_page_sizes_are_those_that_some_adapter_takes() -> None:
    assert ONE.page_sizes(Problem(16)) == (32, 64)
    assert ONE.page_sizes(Problem(8)) == ()
    assert BOTH.page_sizes(Problem(8)) == (1, 2, 4, 8, 16, 32, 64, 128, 256)


def test_workspace_bytes_are_what_a_plan_of_that_size_takes() -> None:
    size = ONE.workspace_bytes(Problem(16), max_batch=3, max_seq_len=128)
    assert size == 428
    cache = PagedCache.allocate(4, 64, "bf16", "cpu")
    table, lens = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 64], dtype=torch.int32)
    workspace = torch.zeros(size, dtype=torch.uint8)
    plan = ONE.plan(cache, table, lens, num_heads=16, softmax_scale=0.1, max_batch=3, workspace=workspace)
    assert plan.describe()["workspace_bytes"] == size
    assert ONE.plan(cache, table, lens, num_heads=16, softmax_scale=0.1).describe()["workspace_bytes"] == 328
    with pytest.raises(NoAdapterRuns):
        ONE.workspace_bytes(Problem(8), max_batch=3, max_seq_len=128)


def test_warmup_reports_each_problem() -> None:
    report = BOTH.warmup([Problem(16), Problem(8, cache_format="fp8"), Problem(16, q_dtype="float64")])
    lines = str(report).splitlines()
    assert lines[0].startswith("num_heads=16: particular, error ")
    assert lines[1].startswith("num_heads=8, cache_format=fp8: eager, error ")
    assert "no adapter runs this problem" in str(report)
    assert "q_dtype is float64, it takes bfloat16, float16 or float32" in str(report)


def test_a_plan_describes_itself() -> None:
    cache = PagedCache.allocate(4, 64, "bf16", "cpu")
    table, lens = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 64], dtype=torch.int32)
    facts = BOTH.plan(cache, table, lens, num_heads=16, softmax_scale=0.1, max_batch=5).describe()
    assert {
        "adapter": "particular",
        "provider": "torch",
        "version": torch.__version__,
        "padded_heads": 16,
        "workspace_bytes": 628,
        "update_mode": "host",
        "library_allocates": ("lse",),
        "chosen": "first of particular, eager",
        "batch": 5,
        "max_seq_len": 128,
    }.items() <= facts.items()
    assert facts["canary"].startswith("error ")
    named = get_backend("cpu", adapters=[EAGER, Particular], adapter="eager")
    assert named.plan(cache, table, lens, num_heads=16, softmax_scale=0.1).describe()["chosen"] == "named by the caller"


def test_every_adapters_reasons_come_with_the_refusal() -> None:
    problem = Problem(8, q_dtype="float64")
    with pytest.raises(NoAdapterRuns) as refused:
        BOTH.workspace_bytes(problem, max_batch=1, max_seq_len=1)
    verdicts = refused.value.verdicts
    assert verdicts.entries == BOTH.explain(replace(problem, batch=1, max_seq_len=1)).entries
    assert {v.name: [r.subject for r in v.reasons] for v in verdicts} == {
        "eager": ["q_dtype"],
        "particular": ["num_heads"],
    }
    assert str(refused.value) == f"no adapter runs this problem\n{verdicts}"


def test_a_named_adapter_is_the_only_one_considered() -> None:
    only = get_backend("cpu", adapters=[EAGER, Particular], adapter="particular")
    assert [v.name for v in only.explain(Problem(8))] == ["particular"]
    assert only.explain(Problem(8)).chosen is None
    gpu = get_backend((9, 0), adapters=[EAGER], adapter="eager")
    assert gpu.explain(Problem(8)).chosen is not None, "naming eager waives its preference for a CPU"


@pytest.mark.parametrize("form", ["one token", "several", "ragged", "sparse"])
def test_decode_is_plan_absorb_run_and_project(form: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).bfloat16()

    backend, cache = get_backend("cpu"), PagedCache.allocate(8, 64, "bf16", "cpu")
    cache.write(normal(512, 512), normal(512, 64), torch.arange(512))
    weights = AbsorbWeights(normal(4, 128, 512), normal(4, 512, 128))
    lead = {"several": (2, 3), "ragged": (5,)}.get(form, (2,))
    q_nope, q_pe = normal(*lead, 4, 128), normal(*lead, 4, 64)
    table, lens = torch.randint(0, 8, (2, 4), generator=generator).int(), torch.tensor([200, 64], dtype=torch.int32)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32) if form == "ragged" else None
    indices = torch.randint(0, 512, (2, 70), generator=generator).int() if form == "sparse" else None
    if indices is not None:
        table, lens = None, None
    plan = backend.plan(
        cache,
        table,
        lens,
        num_heads=4,
        softmax_scale=0.1,
        q_len=3 if form == "several" else 1,
        cu_q_lens=starts,
        topk=None if indices is None else 70,
        max_batch=None if indices is None else 2,
        return_lse=True,
    )
    want = plan.run(weights.query(q_nope, q_pe), cache, indices=indices)
    given = {"softmax_scale": 0.1, "cu_q_lens": starts, "indices": indices, "return_lse": True}
    into = torch.full((*lead, 4, 128), torch.nan, dtype=torch.bfloat16)
    got = backend.decode(q_nope, q_pe, cache, table, lens, weights=weights, out=into, **given)
    assert got.out is into
    assert torch.equal(got.out, weights.project(want.out))
    assert torch.equal(got.lse, want.lse)
    absorbed = weights.query(q_nope, q_pe)
    latent = backend.decode(absorbed.latent, absorbed.rope, cache, table, lens, **given)
    assert torch.equal(latent.out, want.out)
    assert (
        backend.decode(absorbed.latent, absorbed.rope, cache, table, lens, **{**given, "return_lse": False}).lse is None
    )
