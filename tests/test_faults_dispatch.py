"""Choice: capabilities, packages, softmax scales, process death, the canary, dropped-in adapters (kinds 7, 13, 14 and 15)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_adapters
from mla_backends import (
    Device,
    Geometry,
    InvalidInput,
    NoAdapterRuns,
    PagedCache,
    Problem,
    Query,
    get_backend,
    softmax_scale,
)
from mla_backends.adapter import Adapter, Kernel, Provider, Step, takes_arguments
from mla_backends.canary import PROOFS
from mla_backends.catalogue import Broken, installed, serving
from mla_backends.support import Conventions, Joint, Limit, OneOf, Speed
from mla_backends.testing import good_case, installed_adapters

EAGER = next(entry for entry in installed() if entry.name == "eager")
assert isinstance(EAGER, Adapter)
PRESENT = {entry.name for entry in installed()}


# --- capabilities ---------------------------------------------------------------------------------------------------------

CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
KINDS = {
    "dense bf16": Problem(16),
    "dense fp8": Problem(16, cache_format="fp8"),
    "sparse fp8_ds_mla": Problem(64, cache_format="fp8_ds_mla", topk=2048),
    "sparse bf16": Problem(16, topk=2048),
}

# Of the bundled adapters, each with the kinds and capabilities that its kernels were built for, exactly.
BUILT_FOR: dict[str, dict[str, set[tuple[int, int]]]] = {
    "eager": {},
    "flashmla": {"dense bf16": {(9, 0)}},
    "flashmla-fp8": {"dense fp8": {(9, 0)}},
    "flashmla-sparse": {"sparse fp8_ds_mla": {(9, 0), (10, 0), (10, 3)}},
    "fa3": {"dense bf16": {(9, 0)}},
    "fa3-sparse": {"sparse bf16": {(9, 0)}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_a_capability_gets_the_adapters_built_for_it_and_the_reasons_of_all_others(
    capability: tuple[int, int], kind: str
) -> None:
    verdicts = get_backend(Device(capability, "", 132)).explain(KINDS[kind])
    assert {v.name for v in verdicts} == PRESENT
    for verdict in verdicts:
        assert verdict.runs == (verdict.reasons == ())
        if verdict.name in BUILT_FOR:
            assert verdict.runs == (capability in BUILT_FOR[verdict.name].get(kind, set())), str(verdicts)
    running = [v.runs for v in verdicts]
    assert running == sorted(running, reverse=True)
    assert verdicts.chosen == (next(iter(verdicts)) if any(running) else None)


def test_no_kernel_is_left_to_a_newer_capability_by_itself() -> None:
    """sm120 is not sm100 and sm121 not sm120: what runs on a capability is listed, so an unknown one gets nothing."""
    for capability in ((9, 1), (13, 0), (12, 7), (99, 0)):
        for problem in KINDS.values():
            verdicts = get_backend(capability).explain(problem)
            assert verdicts.chosen is None, str(verdicts)
            assert all("capability" in [r.subject for r in v.reasons] for v in verdicts)


def test_each_adapter_gives_one_reason_on_a_capability_that_is_not_its_own() -> None:
    for adapter in installed_adapters():
        problem, device = good_case(adapter)
        (reason,) = adapter.refusals(problem, replace(device, capability=(99, 9)))
        assert reason.subject == "capability"
        assert reason.found == "sm999"


@pytest.mark.parametrize("spelling", ["sm90", "sm_90", "SM90a", (9, 0), Device((9, 0))])
def test_a_hopper_is_explained_on_any_machine(spelling: Any) -> None:
    backend = get_backend(spelling)
    assert str(backend.device) == "sm90"
    page = str(backend.explain(Problem(16)))
    assert page.startswith("sm90: num_heads=16")
    assert "eager (torch): refused\n    - capability is sm90, it takes cpu" in page


def test_a_machine_that_is_not_this_one_serves_explain_alone() -> None:
    backend = get_backend((12, 1))
    cache = PagedCache.allocate(1, 64, "bf16", "cpu")
    ones = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(InvalidInput, match="not this machine's: it serves explain alone"):
        backend.plan(cache, ones * 0, ones[0], num_heads=1, softmax_scale=1.0)
    with pytest.raises(InvalidInput, match="explain alone"):
        backend.warmup([Problem(16)])


def test_problems_of_nothing_are_judged_too() -> None:
    for facts in ({"q_len": 0}, {"batch": 0}, {"max_seq_len": 0}, {"q_len": 0, "batch": 0, "max_seq_len": 0}):
        for sms in (0, 132):
            assert get_backend(Device((8, 0), "", sms)).explain(Problem(16, **facts)).chosen is not None


def test_a_kernel_whose_splits_cost_comes_first_where_requests_are_many() -> None:
    class Fast(Adapter):
        conventions = Conventions(query="split")
        support = ()

        def __init__(self, name: str, speed: Speed) -> None:
            self.name, self.speed = name, speed  # type: ignore[misc]

        def plan(self, step: Step, library: Any) -> Kernel:
            raise AssertionError

    adapters = (Fast("splits", Speed(0.9, 0.9, 10.0, split=0.2)), Fast("whole", Speed(0.6, 0.6, 10.0)))
    rows = (Fast("partial", Speed(0.9, 0.9, 10.0, partial=1.0)), adapters[1])
    few, many = (
        get_backend(Device((7, 0), "", 132), adapters=rows).explain(Problem(heads, batch=8, max_seq_len=1024))
        for heads in (8, 64)
    )
    assert [next(iter(v)).name for v in (few, many)] == ["partial", "whole"]
    first = {
        (batch, keys, sms): next(
            iter(
                get_backend(Device((7, 0), "", sms), adapters=adapters).explain(
                    Problem(16, batch=batch, max_seq_len=keys)
                )
            )
        ).name
        for batch, keys, sms in ((1, 16384, 132), (128, 16384, 132), (1, 16384, 0), (1, 16384, 8), (0, 64, 132))
    }
    assert first == {
        (1, 16384, 132): "whole",
        (128, 16384, 132): "splits",
        (1, 16384, 0): "whole",
        (1, 16384, 8): "splits",
        (0, 64, 132): "whole",
    }


# --- adapters that are wrong in themselves ---------------------------------------------------------------------------------


def test_a_rule_on_a_field_that_is_not_there_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="Problem has no field 'num_head', it has num_heads, "):
        Limit(Problem, "num_head", OneOf(16), refuses=(), source="a test")
    with pytest.raises(ValueError, match="Device has no field 'sms', it has capability"):
        Joint("sms", ("q_len", "device.sms"), lambda p, d: True, inside=(), outside=(), source="a test")
    with pytest.raises(ValueError, match="Problem has no field 'q_lenn'"):
        Joint("q", ("q_len",), lambda p, d: True, inside=({"q_lenn": 1},), outside=(), source="a test")


def test_a_rule_that_raises_is_a_reason_of_its_adapter_alone() -> None:
    class Raises(Adapter):
        name = "raises"
        support = (
            Joint(
                "short",
                ("max_seq_len",),
                lambda p, _: p.max_seq_len < 1000,  # type: ignore[operator]
                inside=({"max_seq_len": 5},),
                outside=({"max_seq_len": 5000},),
                source="a test",
            ),
        )
        conventions = Conventions(query="split")

        def plan(self, step: Step, library: Any) -> Kernel:
            raise AssertionError

    assert isinstance(EAGER, Adapter)
    verdicts = get_backend("cpu", adapters=[Raises(), EAGER]).explain(Problem(16))
    assert verdicts.chosen is not None
    assert verdicts.chosen.name == "eager"
    assert "its own rules end in TypeError: '<' not supported" in str(verdicts["raises"].reasons[0])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"query": "pakced"}, "query is 'pakced', it takes one of 'packed', 'split'"),
        ({"lse_base": 2}, "lse_base is 2, it takes one of 'e', '2'"),
        ({"heads": (128, 16)}, "counts that ascend"),
        ({"heads": ()}, "counts that ascend"),
        ({"heads": [16]}, "a tuple of counts"),
        ({"heads": (0, 16)}, "counts that ascend"),
        ({"topk_multiple": 0}, "topk_multiple is 0, it takes a whole number of at least 1"),
        ({"table_columns": 1.5}, "table_columns is 1.5"),
        ({"query_dtype": "float8"}, "query_dtype is 'float8', it takes 'float8_e4m3fn'"),
        ({"lse_precision": float("nan")}, "lse_precision is nan"),
    ],
)
def test_conventions_that_mean_nothing_are_refused_where_they_are_written(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Conventions(**{"query": "packed", **given})


def test_what_conventions_are_checked_by_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made anew at each plan of an adapter whose own depend on the problem."""
    Conventions(query="packed")

    def again(_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("mla_backends.support.get_type_hints", again)
    assert Conventions(query="split").query == "split"


def test_a_kernel_whose_results_are_of_another_form_does_not_prove_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROOFS, "_known", {})

    class Other(Kernel):
        def __init__(self, inner: Kernel, lse: Any, dtype: torch.dtype) -> None:
            self.inner, self.lse, self.dtype = inner, lse, dtype

        def run(self, *given: Any) -> Any:
            out, lse = self.inner.run(*given)
            return out.to(self.dtype), self.lse(lse)

    class Formless(Adapter):
        name = "formless"
        conventions = Conventions(query="split")
        support = ()

        def __init__(self, lse: Any, dtype: torch.dtype) -> None:
            self.kind = lse, dtype

        def plan(self, step: Step, library: Any) -> Kernel:
            assert isinstance(EAGER, Adapter)
            return Other(EAGER.plan(step, None), *self.kind)

    cache = PagedCache.allocate(4, 64, "bf16", "cpu")
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for kind, says in (
        ((lambda lse: None, torch.bfloat16), "lse is missing, it is asked for in float32"),
        ((lambda lse: lse.double(), torch.bfloat16), "lse is torch.float64"),
        ((lambda lse: lse, torch.float32), "out is torch.float32, the query's dtype is torch.bfloat16"),
    ):
        PROOFS._known.clear()
        with pytest.raises(NoAdapterRuns, match=says):
            get_backend("cpu", adapters=[Formless(*kind)]).plan(
                cache, table, lens, num_heads=4, softmax_scale=0.1, return_lse=True
            )


# --- packages -------------------------------------------------------------------------------------------------------------


class Hosted(Adapter):
    """An adapter whose kernel comes from a module of a test."""

    name = "hosted"
    support = (Limit(Device, "capability", OneOf(None), refuses=((9, 0),), source="a test"),)
    conventions = Conventions(query="split")

    def __init__(self, *providers: Provider) -> None:
        self.providers = providers  # type: ignore[misc]

    def plan(self, step: Step, library: Any) -> Kernel:
        assert isinstance(EAGER, Adapter)
        return EAGER.plan(step, None)


def reason(*providers: Provider) -> str:
    backend = get_backend("cpu", adapters=[Hosted(*providers)])
    return "; ".join(map(str, backend.explain(Problem(16))["hosted"].reasons))


@pytest.mark.parametrize(
    "raised",
    [
        "ImportError('libcudart.so.13: cannot open shared object file')",
        "OSError('undefined symbol: _ZN3c10')",
        "AttributeError('module torch.ops has no attribute flash_mla')",
        "RuntimeError('no CUDA here')",
        "ValueError('a bad version')",
        "KeyError('CUDA_HOME')",
    ],
)
def test_whatever_a_package_raises_at_import_is_its_reason(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cracked_kernels.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cracked_kernels", raising=False)
    said = reason(Provider("cracked-kernels", "cracked_kernels", lambda module: module))
    assert said.startswith("cracked-kernels: import failed: ")
    assert raised.partition("(")[0] in said or "ImportError" in raised
    assert "pip install cracked-kernels" in said


def test_a_package_of_the_same_name_with_another_signature_is_a_reason_and_the_next_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_owners.py").write_text("def decode(q, cache): ...\n")
    monkeypatch.syspath_prepend(tmp_path)

    def load(module: Any) -> Any:
        takes_arguments(module.decode, "q", "descale_q", "use_legacy")
        return module.decode

    other = Provider("other-owner", "two_owners", load)
    assert "two_owners.decode has no argument descale_q, use_legacy" in reason(other)
    missing = Provider("not-there", "not_there_at_all", lambda module: module)
    assert "not-there: not installed" in reason(missing)
    right = Provider("right-owner", "two_owners", lambda module: module.decode)
    adapter = Hosted(missing, other, right)
    assert reason(missing, other, right) == ""
    assert serving(adapter).provider is right
    assert [package for package, _ in serving(adapter).absent] == ["not-there", "other-owner"]


def test_no_package_is_imported_for_a_problem_that_its_kernel_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "explosive.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    adapter = Hosted(Provider("explosive", "explosive", lambda module: module))
    monkeypatch.setattr(
        Hosted, "support", (Limit(Problem, "num_heads", OneOf(64), refuses=(16,), source="a test"),), raising=True
    )
    backend = get_backend("cpu", adapters=[adapter])
    (only,) = backend.explain(Problem(16))["hosted"].reasons
    assert only.subject == "num_heads"
    cache, lens = PagedCache.allocate(4, 64, "bf16", "cpu"), torch.ones(1, dtype=torch.int32)
    for wrong in ({"num_heads": 16}, {"num_heads": 64, "softmax_scale": -1.0}):
        with pytest.raises((InvalidInput, NoAdapterRuns)):
            backend.plan(cache, lens[None] * 0, lens, **{"softmax_scale": 0.1, **wrong})
    with pytest.raises(InvalidInput, match="seq_lens holds 65"):
        backend.plan(cache, lens[None] * 0, lens * 65, num_heads=64, softmax_scale=0.1)
    assert "explosive" not in sys.modules


# --- softmax scale --------------------------------------------------------------------------------------------------------


def yarn(**rope: Any) -> dict[str, Any]:
    return {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096, **rope}


WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512, "v_head_dim": 128}
V2 = {**WIDTHS, "num_attention_heads": 128, "rope_scaling": yarn(factor=40, mscale=0.707, mscale_all_dim=0.707)}
V3 = {**WIDTHS, "num_attention_heads": 128, "rope_scaling": yarn(factor=40, mscale=1.0, mscale_all_dim=1.0)}
K2 = {**WIDTHS, "num_attention_heads": 64, "rope_scaling": yarn(factor=32.0, mscale=1.0, mscale_all_dim=1.0)}


# By hand: 192 ** -0.5 = 0.0721688, times (0.1 * mscale_all_dim * ln(factor) + 1) squared, which is
# 1.2608037 ** 2 (ln 40 = 3.6888795, times 0.0707), 1.3688879 ** 2 (times 0.1) and 1.3465736 ** 2 (ln 32 = 3.4657359).
@pytest.mark.parametrize(
    ("config", "scale"), [(V2, 0.1147214), (V3, 0.1352338), (K2, 0.1308607), ({**V3, "rope_scaling": None}, 0.0721688)]
)
def test_the_scale_of_a_published_model_has_mscale_once_squared(config: dict[str, Any], scale: float) -> None:
    assert softmax_scale(config) == pytest.approx(scale, rel=1e-6)
    assert softmax_scale(SimpleNamespace(**config)) == softmax_scale(config)
    new_style = {**config, "rope_parameters": {**(config["rope_scaling"] or {}), "rope_theta": 1e4}}
    new_style["rope_parameters"]["rope_type"] = new_style["rope_parameters"].pop("type", "default")
    for old in (new_style["rope_scaling"], None):
        assert softmax_scale({**new_style, "rope_scaling": old}) == softmax_scale(config)


def test_yarn_without_mscale_all_dim_or_below_factor_one_scales_nothing() -> None:
    plain = 192**-0.5
    for rope in (yarn(factor=40), yarn(factor=40, mscale_all_dim=0), yarn(factor=0.5, mscale_all_dim=1.0), {}):
        assert softmax_scale({**V3, "rope_scaling": rope}) == pytest.approx(plain)
    assert softmax_scale({**V3, "rope_parameters": {"rope_theta": 1e4}}) == pytest.approx(0.1352338, rel=1e-6)


def test_a_config_of_another_model_and_a_tp_size_that_does_not_divide_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no qk_nope_head_dim"):
        softmax_scale({"hidden_size": 4096})
    assert Geometry.from_config(V3, tp_size=8) == Geometry(16)
    wrong: Any
    for wrong in (0, 3, -8, 256, "8", 8.0, True):
        with pytest.raises(InvalidInput, match=f"tp_size is {wrong!r}, it takes a divisor of the model's 128 heads"):
            Geometry.from_config(V3, tp_size=wrong)


# --- process death --------------------------------------------------------------------------------------------------------

DEADLY = {
    "flashmla": {"alignment": 8},
    "flashmla-fp8": {"batch": 4096},
}


@pytest.mark.parametrize("name", DEADLY)
def test_what_ends_the_process_is_refused_by_a_limit(name: str) -> None:
    if name not in PRESENT:
        pytest.skip(f"{name} is not installed")
    adapter = next(a for a in installed_adapters() if a.name == name)
    problem, device = good_case(adapter)
    (reason,) = adapter.refusals(replace(problem, **DEADLY[name]), device)
    assert reason.subject in DEADLY[name]


@pytest.mark.parametrize("name", DEADLY)
def test_a_process_that_asks_for_it_ends_in_a_python_exception(name: str) -> None:
    adapter = next((a for a in installed_adapters() if a.name == name), None)
    if adapter is None:
        pytest.skip(f"{name} is not installed")
    backend = get_backend(adapter=name)
    problem, _ = good_case(adapter)
    verdict = backend.explain(problem)[name]
    if not verdict.runs:
        pytest.skip(f"{name} cannot run here: {'; '.join(map(str, verdict.reasons))}")
    code = f"""
        import torch
        from mla_backends import PagedCache, Query, get_backend
        backend = get_backend(adapter={name!r})
        fp8 = {name == "flashmla-fp8"}
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        size, offset, batch = dtype.itemsize, 0 if fp8 else 8, 4096 if fp8 else 4
        raw = torch.zeros(4 * 64 * 576 * size + 64, dtype=torch.uint8, device="cuda")
        data = raw[offset : offset + 4 * 64 * 576 * size].view(dtype).view(4, 64, 576)
        cache = PagedCache(data, "fp8" if fp8 else "bf16")
        table, lens = torch.zeros(batch, 2, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
        plan = backend.plan(cache, table.cuda(), lens.cuda(), num_heads=16, softmax_scale=0.1)
        plan.run(Query.from_packed(torch.zeros(batch, 16, 576, dtype=torch.bfloat16, device="cuda")), cache)
        torch.cuda.synchronize()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stderr
    assert "NoAdapterRuns" in ended.stderr
    assert next(iter(DEADLY[name])) in ended.stderr


# --- the canary -----------------------------------------------------------------------------------------------------------


class Spoiled(Kernel):
    def __init__(self, inner: Kernel, owner: Garbage) -> None:
        self.inner, self.owner = inner, owner

    def run(
        self, query: Query, cache: PagedCache, indices: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        self.owner.runs += 1
        if self.owner.raises:
            raise RuntimeError("no kernel image is available")
        out, lse = self.inner.run(query, cache, indices, None)
        if self.owner.spoils == "lse":
            assert lse is not None
            return out, lse / 0.6931
        return (torch.full_like(out, torch.nan) if self.owner.spoils == "nan" else out.flip(-1)), lse


class Garbage(Adapter):
    """A library that passes every check and returns something else."""

    name = "garbage"
    support = ()
    conventions = Conventions(query="split")
    speed = Speed(memory=1.0, compute=1.0)

    def __init__(self, spoils: str = "out", *, raises: bool = False) -> None:
        self.spoils, self.raises, self.runs = spoils, raises, 0

    def plan(self, step: Step, library: Any) -> Kernel:
        assert isinstance(EAGER, Adapter)
        return Spoiled(EAGER.plan(step, None), self)


def made(*adapters: Any, **given: Any) -> Any:
    cache = PagedCache.allocate(4, 64, "bf16", "cpu")
    lens = torch.tensor([3, 64], dtype=torch.int32)
    table = torch.zeros(2, 2, dtype=torch.int32)
    backend = get_backend("cpu", adapters=adapters)
    return backend.plan(cache, table, lens, **{"num_heads": 4, "softmax_scale": 0.1, "return_lse": True, **given})


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (Garbage("out"), "a tiny problem is off by .* it takes an error of at most 0.02"),
        (Garbage("nan"), "a tiny problem is off by nan"),
        (Garbage("lse"), "lse is off by"),
        (Garbage(raises=True), "ended in RuntimeError: no kernel image is available"),
    ],
    ids=["out", "nan", "lse", "raises"],
)
def test_a_kernel_that_returns_garbage_is_refused_before_it_serves(adapter: Garbage, says: str) -> None:
    with pytest.raises(NoAdapterRuns, match=says) as refused:
        made(adapter)
    (verdict,) = refused.value.verdicts
    assert verdict.name == "garbage"
    assert "canary" in verdict.reasons[0].source
    runs = adapter.runs
    with pytest.raises(NoAdapterRuns):
        made(adapter)
    assert adapter.runs == runs, "what was found is remembered"


def test_the_next_adapter_serves_where_the_first_returns_garbage() -> None:
    plan = made(Garbage(), EAGER)
    assert plan.adapter == "eager"
    assert plan.describe()["canary"].startswith("error ")


def test_without_the_canary_garbage_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_BACKENDS_CANARY", "0")
    plan = made(Garbage(), EAGER)
    assert plan.adapter == "garbage"
    assert plan.describe()["canary"] == "off (MLA_BACKENDS_CANARY=0)"


def test_a_tiny_problem_is_tiny_however_many_rows_are_asked_for() -> None:
    adapter = Garbage("none")
    with pytest.raises(NoAdapterRuns):
        made(adapter, q_len=100_000)
    assert adapter.runs == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_defaults_are_not_ours(dtype: torch.dtype) -> None:
    """Engines set the default dtype and device while they load a model."""
    given = torch.tensor([0.5], dtype=torch.float32), torch.device("cpu")
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            adapter = Hosted()
            backend = get_backend("cpu", adapters=[adapter])
            cache = PagedCache.allocate(4, 64, "fp8", "cpu", kv_scale=given[0])
            lens = torch.tensor([3, 64], dtype=torch.int32, device="cpu")
            table = torch.zeros(2, 2, dtype=torch.int32, device="cpu")
            kv_c, k_pe = (torch.ones(3, n, dtype=torch.bfloat16, device="cpu") for n in (512, 64))
            cache.write(kv_c, k_pe, torch.arange(3, device="cpu"))
            plan = backend.plan(cache, table, lens, num_heads=4, softmax_scale=0.1, return_lse=True)
            query = plan.new_query()
            got = plan.run(query, cache)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.out.dtype == torch.bfloat16
    assert torch.equal(got.out[0], torch.ones(4, 512, dtype=torch.bfloat16))
    assert got.lse is not None
    assert torch.allclose(got.lse[:, 0], torch.tensor([3.0, 64.0]).log())


# --- adapters that are dropped in -----------------------------------------------------------------------------------------

DUMMY = """
from mla_backends.adapter import Adapter, Kernel
from mla_backends.device import Device
from mla_backends.problem import Problem
from mla_backends.reference import reference_decode
from mla_backends.support import Conventions, Limit, OneOf, Range, Speed


class DummyKernel(Kernel):
    def __init__(self, step):
        self.step = step

    def run(self, query, cache, indices, out):
        s = self.step
        got = reference_decode(
            query.latent, query.rope, cache.dequantized(), s.block_table, s.seq_lens, softmax_scale=s.softmax_scale,
            causal=s.problem.causal,
        )
        return got.out.to(query.dtype), got.lse.float()


class Dummy(Adapter):
    name = "dummy"
    support = (
        Limit(Device, "capability", OneOf(None), refuses=((9, 0),), source="dummy.py"),
        Limit(Problem, "cache_format", OneOf("bf16"), refuses=("fp8",), source="dummy.py"),
        Limit(Problem, "ragged", OneOf(False), refuses=(True,), source="dummy.py"),
        Limit(Problem, "topk", OneOf(None), refuses=(64,), source="dummy.py"),
        Limit(Problem, "attn_sink", OneOf(False), refuses=(True,), source="dummy.py"),
        Limit(Problem, "num_heads", Range(1, 64, tested=(4,)), refuses=(65,), source="dummy.py"),
    )
    conventions = Conventions(query="split")
    speed = Speed(memory=0.5, compute=0.5)

    def plan(self, step, library):
        return DummyKernel(step)


ADAPTERS = (Dummy(),)
"""

FILES = {
    "dummy": DUMMY,
    "cracked": "raise OSError('undefined symbol: _ZN3c105ErrorE')\n",
    "quitter": "raise SystemExit('no GPU, no fun')\n",
    "namesake": DUMMY.replace('name = "dummy"', 'name = "eager"'),
    "hollow": "x = 1\n",
    "nameless": "from mla_backends.adapter import Adapter\nclass A(Adapter):\n    def plan(self, step, library): ...\nADAPTERS = (A(),)\n",
    "stranger": "ADAPTERS = (1,)\n",
}


def in_a_process_with(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds the folder's files among the bundled adapters."""
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    opening = f"import mla_adapters\nmla_adapters.__path__.append({str(folder)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", opening + textwrap.dedent(code)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_an_adapter_dropped_in_as_one_file_is_listed_explained_and_dispatched(tmp_path: Path) -> None:
    code = """
        import torch
        from mla_backends import PagedCache, Problem, Query, get_backend
        from mla_backends.catalogue import Broken, installed
        broken = {entry.name: entry.error for entry in installed() if isinstance(entry, Broken)}
        assert broken["cracked"] == "OSError: undefined symbol: _ZN3c105ErrorE", broken
        assert broken["quitter"] == "SystemExit: no GPU, no fun", broken
        assert "'eager'" in broken["namesake"] and "InvalidInput" in broken["namesake"], broken
        assert "ADAPTERS" in broken["hollow"], broken
        assert "A declares no name, support, conventions" in broken["nameless"], broken
        assert "holds 1" in broken["stranger"], broken
        verdicts = get_backend("cpu").explain(Problem(4))
        assert verdicts.chosen.name == "dummy" and verdicts["eager"].runs, str(verdicts)
        assert "undefined symbol" in str(verdicts["cracked"].reasons[0])
        assert "dummy (torch): refused\\n    - capability is sm90, it takes cpu [dummy.py]" in str(get_backend("sm90").explain(Problem(4)))
        cache = PagedCache.allocate(4, 64, "bf16", "cpu")
        lens = torch.tensor([3, 64], dtype=torch.int32)
        table = torch.zeros(2, 2, dtype=torch.int32)
        query = Query.from_packed(torch.randn(2, 4, 576).bfloat16())
        plan = get_backend("cpu").plan(cache, table, lens, num_heads=4, softmax_scale=0.1)
        assert plan.adapter == "dummy", plan.describe()
        other = get_backend("cpu", adapter="eager").plan(cache, table, lens, num_heads=4, softmax_scale=0.1)
        assert torch.allclose(plan.run(query, cache).out, other.run(query, cache).out)
    """
    ended = in_a_process_with(tmp_path, code)
    assert ended.returncode == 0, ended.stderr


def test_an_adapter_dropped_in_as_one_file_is_tested(tmp_path: Path) -> None:
    tests = Path(__file__).with_name("test_adapters.py")
    code = f"""
        import pytest
        wanted = "dummy and (limits or limit or transposed or offset or q_lens)"
        raise SystemExit(pytest.main(["-p", "no:cacheprovider", "-q", "-rA", "-k", wanted, {str(tests)!r}]))
    """
    ended = in_a_process_with(tmp_path, code)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    passed = [line for line in ended.stdout.splitlines() if line.startswith("PASSED") and "dummy" in line]
    assert len(passed) > 8, ended.stdout
    for wanted in ("test_what_the_limits_state_is_taken", "num_heads=65", "test_the_numbers_are_right"):
        assert any(wanted in line for line in passed), ended.stdout


def test_the_bundled_adapters_all_import() -> None:
    assert [entry for entry in installed() if isinstance(entry, Broken)] == []
    assert len(list(mla_adapters.__path__)) >= 1
