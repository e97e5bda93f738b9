"""What the conformance suite finds in kernels that give one right answer and then go wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from mla_backends import PagedCache, Query, get_backend
from mla_backends.adapter import Adapter, HostLengths, Kernel, Step
from mla_backends.catalogue import installed
from mla_backends.conditions import Condition
from mla_backends.endurance import Endurance
from mla_backends.problem import Problem
from mla_backends.support import Conventions, Limit, OneOf, Range
from mla_backends.testing import Conformance, base_condition, conditions, endured, good_case
from mla_backends.trials import Trial

EAGER = next(entry for entry in installed() if entry.name == "eager")
assert isinstance(EAGER, Adapter)


class Right(Kernel):
    def __init__(self, step: Step) -> None:
        assert isinstance(EAGER, Adapter)
        self.step, self.inner = step, EAGER.plan(step, None)

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.inner.run(query, cache, indices, None)


class Stale(Right):
    """Plans once, and keeps its own copy of lengths and table."""

    def __init__(self, step: Step) -> None:
        assert step.seq_lens is not None
        assert step.block_table is not None
        super().__init__(replace(step, seq_lens=step.seq_lens.clone(), block_table=step.block_table.clone()))


class Late(Right):
    """Plans at update, and so misses what an engine writes into the buffers unless refresh plans too: here it does not."""

    def update(self, lengths: HostLengths | None) -> None:
        self.updates = getattr(self, "updates", 0) + 1
        if self.updates <= 1 + 4:
            step = self.step
            assert isinstance(EAGER, Adapter)
            assert step.seq_lens is not None
            assert step.block_table is not None
            kept = replace(step, seq_lens=step.seq_lens.clone(), block_table=step.block_table.clone())
            self.inner = EAGER.plan(kept, None)


class OneBuffer(Right):
    """Returns the same memory at each run."""

    kept: tuple[Tensor, Tensor] | None = None

    def run(self, *given: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = super().run(*given)
        assert lse is not None
        if self.kept is None:
            self.kept = out.clone(), lse.clone()
        self.kept[0].copy_(out.view(self.kept[0].shape))
        self.kept[1].copy_(lse)
        return self.kept[0].view(out.shape), self.kept[1]


class Writer(Right):
    """Scales the query that it was given, in place."""

    def run(self, query: Query, *rest: Any) -> tuple[Tensor, Tensor | None]:
        result = super().run(query, *rest)
        query.latent.mul_(2)
        return result


class FirstValues(Right):
    """Decodes the values of the first query that it saw, at whatever address they were."""

    kept: Query | None = None

    def run(self, query: Query, *rest: Any) -> tuple[Tensor, Tensor | None]:
        if self.kept is None:
            self.kept = Query.from_packed(query.packed.clone())
        return super().run(self.kept, *rest)


class FirstScale(Right):
    """Dequantises every layer by the first one's scale."""

    kept: float | None = None

    def run(self, query: Query, cache: PagedCache, *rest: Any) -> tuple[Tensor, Tensor | None]:
        assert cache.scale is not None
        self.kept = float(cache.scale) if self.kept is None else self.kept
        return super().run(query, PagedCache(cache.data, "fp8", kv_scale=self.kept), *rest)


class Whole(Right):
    """Of a smaller batch decodes the wrong requests."""

    def __init__(self, step: Step) -> None:
        if step.batch == 2 and step.seq_lens is not None and step.block_table is not None:
            step = replace(step, seq_lens=step.seq_lens.flip(0))
        super().__init__(step)


class Wrapped(Adapter):
    name = "wrapped"
    support = (Limit(Problem, "num_heads", Range(1, tested=(16,)), (), source="a test"),)
    conventions = Conventions(query="split")

    def __init__(self, kernel: type[Right], **changed: Any) -> None:
        self.kernel = kernel
        self.conventions = replace(self.conventions, metadata="op", **changed)  # type: ignore[misc]

    def plan(self, step: Step, library: Any) -> Kernel:
        return self.kernel(step)


class Nameless(Right):
    """Gives no lse, or in another dtype."""

    def run(self, *given: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = super().run(*given)
        assert lse is not None
        return out, lse.double() if self.step.problem.num_heads == 16 else None


DENSE, SPARSE = Condition(), Condition(topk=64)


def faults_of(adapter: Wrapped, condition: Condition) -> tuple[str, ...]:
    return Endurance(get_backend("cpu", adapters=[adapter]), condition, q_scale=None).faults()


@pytest.mark.parametrize("condition", [DENSE, SPARSE, Condition(layers=1, layer=0, page_size=16)], ids=str)
def test_a_kernel_that_keeps_nothing_has_no_fault(condition: Condition) -> None:
    assert faults_of(Wrapped(Right), condition) == ()


def test_heads_that_are_padded_and_heads_that_are_not_are_endured() -> None:
    """What a kernel writes into a padded query is written into a copy."""
    padding = Wrapped(Writer, heads=(16, 64))
    assert [c.num_heads for c in endured(padding)] == [16, 1]
    assert [c.num_heads for c in endured(Wrapped(Right, heads=(64,)))] == [64, 1]
    few = Wrapped(Right)
    few.support = (Limit(Problem, "num_heads", Range(4, 8), (), source="a test"),)  # type: ignore[misc]
    assert [c.num_heads for c in endured(few)] == [4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_BACKENDS_CANARY", "0")
        assert "wrote into the query" in str(faults_of(padding, endured(padding)[0]))


def test_an_adapter_without_an_lse_is_held_to_all_else() -> None:
    silent = Wrapped(Right)
    silent.support = (  # type: ignore[misc]
        *silent.support,
        Limit(Problem, "needs_lse", OneOf(False), (True,), source="a test"),
    )
    asked = [c.return_lse for c in conditions(silent)]
    assert asked.count(False) > 40
    assert asked.count(True) == 1  # that it is refused
    assert faults_of(silent, endured(silent)[0]) == ()
    suite, said = Conformance(), []
    for condition in conditions(silent):
        suite.test_the_numbers_are_right(silent, condition, lambda *pair: said.append(pair))
    assert any(name == "refused" for name, _ in said)
    assert not any("lse_error" in name for name, _ in said)


ONE_KIND = (
    (Limit(Problem, "q_len", Range(2, 4), (), source="a test"), 2),
    (Limit(Problem, "causal", OneOf(False), (), source="a test"), False),
    (Limit(Problem, "attn_sink", OneOf(True), (), source="a test"), True),
    (Limit(Problem, "batch_invariant", OneOf(True), (), source="a test"), True),
    (Limit(Problem, "topk", Range(128, step=128, unknown=False, tested=(128,)), (), source="a test"), 128),
    (Limit(Problem, "page_size", OneOf(32), (), source="a test"), 32),
    (Limit(Problem, "cache_format", OneOf("fp8"), (), source="a test"), "fp8"),
)


@pytest.mark.parametrize(("limit", "value"), ONE_KIND, ids=[limit.subject for limit, _ in ONE_KIND])
def test_an_adapter_of_one_kind_of_problem_is_held_to_it(limit: Limit, value: Any) -> None:
    narrow = Wrapped(Right)
    narrow.support = (*narrow.support, limit)  # type: ignore[misc]
    base = base_condition(narrow)
    assert getattr(base, limit.subject) == value
    problem, device = good_case(narrow)
    asked = [replace(problem, **{limit.subject: getattr(c, limit.subject)}) for c in conditions(narrow)]
    assert sum(not narrow.refusals(p, device) for p in asked) > 20
    for condition in endured(narrow):
        endurance = Endurance(get_backend("cpu", adapters=[narrow]), condition, q_scale=None)
        assert not narrow.refusals(endurance.problem(), device)
        assert endurance.faults() == ()


def test_limits_on_the_step_itself_are_the_text_of_a_skip() -> None:
    small = Wrapped(Right)
    small.support = (*small.support, Limit(Problem, "batch", Range(0, 2), (3,), source="a test"))  # type: ignore[misc]
    with pytest.raises(pytest.skip.Exception, match="wrapped refuses: batch is 4, it takes 0 to 2"):
        Conformance().test_a_plan_serves_layer_after_layer_and_step_after_step(small, lambda *pair: None)


@pytest.mark.parametrize("heads", [8, 16])
def test_an_lse_that_is_missing_or_of_another_dtype_is_a_fault(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_BACKENDS_CANARY", "0")
    backend, condition = get_backend("cpu", adapters=[Wrapped(Nameless)]), Condition(num_heads=heads)
    assert any(
        "the lse is missing or not float32" in fault for fault in Trial(condition, "cpu").run(backend).faults(condition)
    )


def test_a_stated_precision_is_held_and_noted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(Right):
        by = 1.5e-3

        def run(self, *given: Any) -> tuple[Tensor, Tensor | None]:
            out, lse = super().run(*given)
            assert lse is not None
            return out, lse + self.by

    monkeypatch.setenv("MLA_BACKENDS_CANARY", "0")
    suite, said, coarse = Conformance(), [], Wrapped(Off, lse_precision=2**-9)
    suite.test_the_numbers_are_right(coarse, Condition(), lambda *pair: said.append(pair))
    assert {name for name, _ in said} == {"adapter", "condition", "stated_lse_error", "out_error"}
    Off.by = 3e-3
    with pytest.raises(AssertionError):
        suite.test_the_numbers_are_right(coarse, Condition(), lambda *pair: None)


@pytest.mark.parametrize(
    ("adapter", "condition", "says"),
    [
        (Wrapped(Stale), DENSE, "after update a plan decodes another step"),
        (Wrapped(Late), DENSE, "after refresh a plan decodes another step"),
        (Wrapped(OneBuffer), DENSE, "wrote into the result of the run before it"),
        (Wrapped(OneBuffer), SPARSE, "wrote into the result of the run before it"),
        (Wrapped(Writer), DENSE, "wrote into the query that it was given"),
        (Wrapped(Writer), SPARSE, "wrote into the query that it was given"),
        (Wrapped(Right, writes_out=True), DENSE, r"written into out= and lse= is not what a run gives"),
        (Wrapped(Whole), DENSE, "a view at a smaller batch decodes otherwise"),
        (Wrapped(FirstValues), DENSE, "a run reads what its query held before"),
        (Wrapped(FirstValues), SPARSE, "a run reads what its query held before"),
        (Wrapped(FirstScale), Condition(cache_format="fp8"), "the second layer of a plan is decoded otherwise"),
    ],
    ids=lambda x: x.kernel.__name__ if isinstance(x, Wrapped) else None,
)
def test_each_kind_of_memory_is_found(
    adapter: Wrapped, condition: Condition, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_BACKENDS_CANARY", "0")  # which sees some of them
    assert any(says in fault for fault in faults_of(adapter, condition))
