"""The conformance suite: what every adapter is held to, derived from what it declares. Plug-in authors import it.

    from mla_backends.testing import Conformance

    class TestMyKernel(Conformance):
        adapters = (MyAdapter(),)

gives, under pytest, one test a stated limit (each broken alone is the one reason given; on any machine)
and one a condition that the limits take (numbers, empty rows, bit-identity on a strided layer; where the
kernel can run). A condition that a limit refuses is a test too: that it is refused for just that reason.
And one that holds a single plan against fresh ones over layers, steps and batch sizes.

A kernel that cannot run here is a skip whose text is the verdict; MLA_MUST_RUN=name,name turns such a skip
into a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from mla_backends.adapter import Adapter
from mla_backends.backend import Backend, get_backend
from mla_backends.catalogue import Broken, installed
from mla_backends.conditions import Condition
from mla_backends.device import Device
from mla_backends.endurance import Endurance
from mla_backends.errors import NoAdapterRuns
from mla_backends.problem import Problem
from mla_backends.support import Joint, Limit
from mla_backends.trials import Trial

__all__ = [
    "MUST_RUN",
    "BrokenRule",
    "Conformance",
    "base_condition",
    "broken_rules",
    "conditions",
    "endured",
    "good_case",
    "installed_adapters",
    "require_device",
]

MUST_RUN = "MLA_MUST_RUN"
"""Environment variable: adapters, by comma, whose kernels must run here."""

MANY_SMS = 132
"""Multiprocessors of the device that limits are tried on: an H200's."""


# --- limits ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokenRule:
    """A rule, and a case that breaks it and no other."""

    rule: Limit | Joint
    problem: Problem
    device: Device

    def __str__(self) -> str:
        if isinstance(self.rule, Limit):
            holder: Any = self.problem if self.rule.of is Problem else self.device
            return f"{self.rule.subject}={getattr(holder, self.rule.subject)}"
        return self.rule.name


def good_case(adapter: Adapter) -> tuple[Problem, Device]:
    """A problem and a device that the adapter's limits take: the first value that each states."""
    facts: dict[str, Any] = {"num_heads": 16}
    device = Device(None, "", MANY_SMS)
    for rule in adapter.support:
        if isinstance(rule, Joint):
            continue
        if rule.of is Device:
            device = replace(device, **{rule.subject: rule.takes.inside[0]})
            continue
        facts[rule.subject] = rule.takes.inside[0]
    if "cache_format" in facts and "q_dtype" not in facts:
        facts["q_dtype"] = {"fp16": "float16", "fp32": "float32"}.get(facts["cache_format"], "bfloat16")
    facts["needs_lse"] = nearest(adapter, "needs_lse", False)
    return Problem(**facts), device


def with_facts(problem: Problem, device: Device, facts: Any) -> tuple[Problem, Device]:
    """Both with some fields changed; "device." comes before those of `Device`."""
    of_device = {k.removeprefix("device."): v for k, v in facts.items() if k.startswith("device.")}
    return replace(problem, **{k: v for k, v in facts.items() if not k.startswith("device.")}), replace(
        device, **of_device
    )


def broken_rules(adapter: Adapter) -> Iterator[BrokenRule]:
    """Every value that the adapter states to be just outside, on an otherwise good case."""
    problem, device = good_case(adapter)
    for rule in adapter.support:
        if isinstance(rule, Joint):
            for facts in rule.outside:
                yield BrokenRule(rule, *with_facts(problem, device, facts))
            continue
        for value in rule.refuses:
            prefix = "device." if rule.of is Device else ""
            yield BrokenRule(rule, *with_facts(problem, device, {f"{prefix}{rule.subject}": value}))


# --- conditions -----------------------------------------------------------------------------------------------------------

HEADS = (1, 8, 12, 16, 20, 40, 64, 96, 128)
Q_LENS = (1, 2, 4)
LONG = (4096, 1000, 0, 333)


def stated(adapter: Adapter, subject: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values that an adapter states to take of a field of `Problem`; `default` where it has no limit on it."""
    for rule in adapter.support:
        if isinstance(rule, Limit) and rule.of is Problem and rule.subject == subject:
            return rule.takes.inside
    return default


def nearest(adapter: Adapter, subject: str, preferred: Any) -> Any:
    """`preferred` where the adapter takes it, else the first value that it states."""
    for rule in adapter.support:
        if isinstance(rule, Limit) and rule.of is Problem and rule.subject == subject:
            return preferred if preferred in rule.takes else rule.takes.inside[0]
    return preferred


def base_condition(adapter: Adapter) -> Condition:
    """What all conditions are near to: the usual decode, but for what the adapter does not take of it."""
    formats, is_sparse = stated(adapter, "cache_format", ("bf16",)), None not in stated(adapter, "topk", (None,))
    base = Condition(
        cache_format=formats[0],
        page_size=nearest(adapter, "page_size", 64),
        topk=nearest(adapter, "topk", 192) if is_sparse else None,
        q_len=nearest(adapter, "q_len", 1),
        causal=nearest(adapter, "causal", True),
        attn_sink=nearest(adapter, "attn_sink", False),
        batch_invariant=nearest(adapter, "batch_invariant", False),
        return_lse=nearest(adapter, "needs_lse", True),
    )
    return base if adapter.conventions.strides else replace(base, layers=1, layer=0)


def conditions(adapter: Adapter) -> Iterator[Condition]:
    """What an adapter is run at: each axis of the contract, around `base_condition`."""
    base = base_condition(adapter)
    formats, pages = stated(adapter, "cache_format", ("bf16",)), stated(adapter, "page_size", (64,))
    is_sparse = base.topk is not None
    yield from (replace(base, num_heads=h, q_len=q) for h in HEADS for q in Q_LENS)
    yield from (
        replace(base, cache_format=f, num_heads=h, q_len=q) for f in formats[1:] for h in (16, 128) for q in (1, 4)
    )
    yield from (replace(base, page_size=p, num_heads=h) for p in pages if p != base.page_size for h in (16, 128))
    for layers in (1, 2, 3, 61):
        for layer in sorted({0, layers // 2, layers - 1}):
            yield replace(base, layers=layers, layer=layer)
            if layers in (3, 61):
                yield replace(base, layers=layers, layer=layer, neighbours="random")
    for kind in ("parts", "transposed", "padded"):
        yield from (replace(base, query=kind, num_heads=h, q_len=q) for h, q in ((12, 1), (40, 2), (64, 1)))
    yield replace(base, return_lse=not base.return_lse)
    yield replace(base, offset=8)
    if is_sparse:
        yield from (replace(base, topk=k, num_heads=h) for k in (1, 63, 64, 65, 192, 2048) for h in (8, 16, 64, 128))
    else:
        yield from (
            replace(base, seq_lens=lens) for lens in ((0, 0, 0), (1,), (63, 64, 65, 1), LONG, tuple(range(0, 140, 7)))
        )
        yield replace(base, q_len=4, seq_lens=(3, 64, 66, 0, 1))
        yield replace(base, q_len=8, seq_lens=(3, 64, 300))
        yield replace(base, q_len=4, causal=False)
        yield replace(base, seq_lens=LONG, num_heads=128)
        yield replace(base, max_batch=12, query="padded")
        yield replace(base, q_lens=(1, 4, 2, 1, 3, 1, 4))
        yield replace(base, q_lens=(3, 0, 2, 1), seq_lens=(2, 64, 65, 0), num_heads=128)
    yield replace(base, batch_invariant=True, q_scale=0.01 if formats[0] == "fp8" else None)
    yield replace(base, attn_sink=not base.attn_sink)
    if "fp8" in formats:
        fp8 = replace(base, cache_format="fp8")
        for scale in (0.5, 2.0):
            for h, q in ((8, 2), (16, 1), (20, 4), (64, 1), (128, 2)):
                yield replace(fp8, kv_scale=scale, kv_scale_kind="float", num_heads=h, q_len=q)
                yield replace(fp8, kv_scale=scale, kv_scale_kind="tensor", num_heads=h, q_len=q)
        yield from (replace(fp8, q_scale=0.01, num_heads=h, q_len=q) for h in (8, 16, 20, 64, 128) for q in (1, 4))
        yield replace(fp8, q_scale=0.01, num_heads=12, query="parts", q_len=2)
        # Without lse: sm90's tensor cores add products of e4m3 in 14 bits, and logits of thousands are no finer than that.
        yield replace(fp8, q_amax=3000.0, kv_scale=0.5, return_lse=False)
        yield replace(fp8, q_amax=3000.0, num_heads=20, query="transposed", return_lse=False)


def endured(adapter: Adapter) -> tuple[Condition, ...]:
    """What one plan is held over many steps at: heads that the kernel runs as they are, as padded ones hide what it does to
    its query and `out`, and heads that are padded.
    """
    base, (problem, device) = base_condition(adapter), good_case(adapter)
    counts = (adapter.conventions.padded(problem.num_heads), 1)
    taken = [h for h in counts if not adapter.refusals(replace(problem, num_heads=h), device)]
    return tuple(replace(base, num_heads=h) for h in dict.fromkeys(taken or (problem.num_heads,)))


class Conformance:
    """Subclass, set `adapters`, and let pytest collect it."""

    adapters: ClassVar[Sequence[Adapter]] = ()

    @classmethod
    def pytest_generate_tests(cls, metafunc: Any) -> None:
        if "broken" in metafunc.fixturenames:
            cases = [(a, b) for a in cls.adapters for b in broken_rules(a)]
            metafunc.parametrize(("adapter", "broken"), cases, ids=[f"{a.name}-{b}" for a, b in cases])
        elif "condition" in metafunc.fixturenames:
            found = [(a, c) for a in cls.adapters for c in dict.fromkeys(conditions(a))]
            metafunc.parametrize(("adapter", "condition"), found, ids=[f"{a.name}-{c}" for a, c in found])
        elif "adapter" in metafunc.fixturenames:
            metafunc.parametrize("adapter", cls.adapters, ids=[a.name for a in cls.adapters])

    def test_what_the_limits_state_is_taken(self, adapter: Adapter) -> None:
        problem, device = good_case(adapter)
        assert adapter.refusals(problem, device) == ()
        for rule in adapter.support:
            inside = rule.inside if isinstance(rule, Joint) else [{_field(rule): v} for v in rule.takes.inside]
            for facts in inside:
                assert rule.refusal(*with_facts(problem, device, facts)) is None

    def test_a_broken_limit_is_the_one_reason_given(self, adapter: Adapter, broken: BrokenRule) -> None:
        reasons = adapter.refusals(broken.problem, broken.device)
        assert reasons == (broken.rule.refusal(broken.problem, broken.device),)
        assert broken.rule.source in str(reasons[0])

    def test_the_numbers_are_right(self, adapter: Adapter, condition: Condition, record_property: Any) -> None:
        record_property("adapter", adapter.name)
        record_property("condition", str(condition))
        backend = get_backend(adapter=adapter.name, adapters=[adapter])
        require_device(adapter, backend)
        trial = _trial(adapter, condition, backend)
        reasons = adapter.refusals(trial.problem(), backend.device, forced=True)
        if reasons:
            record_property("refused", "; ".join(map(str, reasons)))
            with pytest.raises(NoAdapterRuns) as refused:
                trial.plan(backend)
            assert refused.value.verdicts[adapter.name].reasons == reasons
            return
        outcome = trial.run(backend)
        if condition.return_lse and adapter.conventions_of(trial.problem()).lse_precision:
            # As its name gets it, to the precision that it states; then as dispatch gives it.
            record_property("stated_lse_error", outcome.lse_error)
            assert outcome.faults(condition) == ()
            condition = replace(condition, return_lse=False)
            outcome = _trial(adapter, condition, backend).run(backend)
        record_property("out_error", outcome.out_error)
        if condition.return_lse:
            record_property("lse_error", outcome.lse_error)
        assert outcome.faults(condition) == ()

    def test_a_plan_serves_layer_after_layer_and_step_after_step(self, adapter: Adapter, record_property: Any) -> None:
        record_property("adapter", adapter.name)
        record_property("condition", "steps")
        backend = get_backend(adapter=adapter.name, adapters=[adapter])
        require_device(adapter, backend)
        q_scale = None if adapter.conventions.query_dtype is None else 0.01
        for condition in endured(adapter):
            endurance = Endurance(backend, condition, q_scale=q_scale)
            reasons = adapter.refusals(endurance.problem(), backend.device, forced=True)
            if reasons:
                pytest.skip(f"{adapter.name} refuses: {'; '.join(map(str, reasons))}")
            assert endurance.faults() == ()


def _trial(adapter: Adapter, condition: Condition, backend: Backend) -> Trial:
    """With NaN in unused rows, unless the adapter says that its kernel reads those."""
    trial = Trial(condition, backend.torch_device, unused="nan")
    if adapter.conventions_of(trial.problem()).unused_rows == "ignored":
        return trial
    return Trial(condition, backend.torch_device, unused="finite")


def _field(rule: Limit) -> str:
    return f"device.{rule.subject}" if rule.of is Device else rule.subject


def require_device(adapter: Adapter, backend: Backend) -> None:
    """Skip, with the verdict as the reason, where the adapter's kernel cannot run here; fail under MLA_MUST_RUN."""
    problem, _ = good_case(adapter)
    verdict = backend.explain(problem)[adapter.name]
    if verdict.runs:
        return
    said = f"{adapter.name} cannot run on {backend.device}: " + "; ".join(map(str, verdict.reasons))
    if adapter.name in os.environ.get(MUST_RUN, "").split(","):
        pytest.fail(f"{said} ({MUST_RUN} names it)")
    pytest.skip(said)


def installed_adapters() -> tuple[Adapter, ...]:
    """Those behind the entry points that could be imported."""
    return tuple(entry for entry in installed() if not isinstance(entry, Broken))
