"""How ops run: under torch.compile, in a captured graph, on any stream and device, and without a compiled library."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mla_backends import InvalidInput, cuda_ops, ops

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
BF16, INT32 = torch.bfloat16, torch.int32


def cases(device, tokens=4):
    """Of each op: the function, its arguments, and the positions of those that it writes."""

    def normal(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(BF16).to(device)

    def ints(*shape, high=3):
        return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(9)).to(INT32).to(device)

    query, e4m3 = normal(tokens, 16, 576), normal(tokens, 16, 576).to(torch.float8_e4m3fn)
    scale, one = torch.tensor([0.5], device=device), torch.zeros(1, device=device)
    slots = torch.tensor([5, -1, 40, 2], device=device)
    data = torch.zeros(4, 3, 8, 576, dtype=BF16, device=device)[:, 1]
    rows = torch.zeros(4, 8, 656, dtype=torch.uint8, device=device)
    lengths = torch.tensor([0, 3, 1, 9], dtype=INT32, device=device)
    lse, raw = torch.zeros(tokens, 16, device=device), normal(tokens, 16).float()

    def finish(out, lse, raw, lengths):
        ops.finish_rows(out, lse, raw, lengths, q_len=1, causal=True, base2=True, overwrite_out=True)

    def compact(out, counts, slots):
        ops.compact_slots(out, counts, slots, 3, page_size=2, rows_per_page=6)

    return {
        "batched_matmul": (
            ops.batched_matmul,
            [normal(16, tokens, 512), normal(16, tokens, 128), normal(16, 128, 512)],
            [0],
        ),
        "absorb_query": (
            ops.absorb_query,
            [query[..., :512], query[..., 512:], normal(tokens, 10, 128), normal(tokens, 10, 64), normal(10, 128, 512)],
            [0, 1],
        ),
        "absorb_query to e4m3": (
            ops.absorb_query,
            [
                e4m3[..., :512],
                e4m3[..., 512:],
                normal(tokens, 10, 128),
                normal(tokens, 10, 64),
                normal(10, 128, 512),
                scale,
            ],
            [0, 1],
        ),
        "concat_nope_rope": (ops.concat_nope_rope, [query, normal(tokens, 16, 512), normal(tokens, 1, 64)], [0]),
        "rope_tail": (ops.rope_tail, [query[..., 512:], normal(tokens, 10, 64)], [0]),
        "quantize_query": (ops.quantize_query, [e4m3, normal(tokens, 16, 576), scale], [0]),
        "query_scale": (ops.query_scale, [one, query[..., :512], query[..., 512:], lengths, None, 1], [0]),
        "write_cache": (ops.write_cache, [data, normal(6, 512), normal(6, 64), slots, "bf16"], [0]),
        "write_cache fp8_ds_mla": (ops.write_cache, [rows, normal(6, 512), normal(6, 64), slots, "fp8_ds_mla"], [0]),
        "write_cache_and_rope": (
            ops.write_cache_and_rope,
            [query[..., 512:], normal(tokens, 10, 64), data, normal(6, 512), normal(6, 64), slots, "bf16"],
            [0, 2],
        ),
        "write_indexer_cache": (
            ops.write_indexer_cache,
            [torch.zeros(4, 8, 132, dtype=torch.uint8, device=device), normal(5, 128), slots],
            [0],
        ),
        "finish_rows": (finish, [normal(tokens, 16, 512), lse, raw, lengths], [0, 1]),
        "select_slots": (
            lambda out, at, table: ops.select_slots(out, at, table, 8),
            [ints(tokens, 70), ints(tokens, 64, high=40), ints(tokens, 4)],
            [0],
        ),
        "select_rows": (
            lambda out, counts, at, table: ops.select_rows(out, counts, at, table, 8, num_slots=16, rows_per_page=24),
            [ints(tokens, 70), ints(tokens), ints(tokens, 64, high=40), ints(tokens, 4)],
            [0, 1],
        ),
        "sanitize_slots": (lambda out, slots: ops.sanitize_slots(out, slots, 2), [ints(4, 70), ints(4, 64)], [0]),
        "compact_slots": (compact, [ints(4, 70), ints(4), ints(4, 64, high=5)], [0, 1]),
    }


NAMES = list(cases("cpu"))


def copied(arguments):
    """The same values in the same layouts, views of one buffer staying so."""
    storages = {}

    def copy(x):
        if not isinstance(x, torch.Tensor):
            return x
        key = x.untyped_storage().data_ptr()
        if key not in storages:
            storages[key] = x.untyped_storage().clone()
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(
            storages[key], x.storage_offset(), x.shape, x.stride()
        )

    return [copy(x) for x in arguments]


def written(arguments, outputs):
    return [arguments[i].contiguous().view(torch.uint8) for i in outputs]


def same(first, second, outputs):
    return all(torch.equal(a, b) for a, b in zip(written(first, outputs), written(second, outputs), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_an_op_compiles_without_a_graph_break_and_gives_the_same_bits(name, device):
    run, arguments, outputs = cases(device)[name]
    eager, compiled = copied(arguments), copied(arguments)
    run(*eager)
    torch.compile(run, backend="aot_eager", fullgraph=True)(*compiled)
    assert not same(eager, arguments, outputs), "the op wrote nothing, so that equality would prove nothing"
    assert same(compiled, eager, outputs)


# Whole plans' nodes have tests of their own, among those of torch.compile.
NODES = ("refresh_plan", "run_plan", "select_slots_of_plan")


@pytest.mark.parametrize(
    "name", sorted(n for n in dir(torch.ops.mla_backends) if not n.startswith("_") and n not in ("name", *NODES))
)
def test_a_schema_marks_exactly_what_its_op_writes(name):
    """By torch's own checker, over the arguments that the public function hands to the op."""
    found = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is getattr(torch.ops.mla_backends, name).default:
                found.append(args)
            return func(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patch, Recorder():
        from mla_backends import op_table

        patch.setattr(op_table, "_is_compiling", lambda: True)
        everything = cases("cpu")
        for case in everything:
            if case.split(" ")[0] == name:
                run, arguments, _ = everything[case]
                run(*arguments)
        if name == "merge_partials":
            ops.merge_partials(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4))
    assert found
    for args in found:
        # torch's schema check multiplies outputs by themselves, which float8 has no kernel for
        is_e4m3 = any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in args)
        checks = ("test_faketensor",) if is_e4m3 else ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.mla_backends, name).default, tuple(args), test_utils=checks)


def test_without_a_library_the_reason_names_the_path_and_the_cure():
    state = ops.compiled()
    if state:
        assert state.path.endswith(".so")
        assert state.path in str(state)
    else:
        assert "libmla_backends_ops.so" in state.reason
        assert "nvcc" in state.reason


@CUDA
def test_a_gpu_test_run_has_the_compiled_library():
    assert ops.compiled(), str(ops.compiled())


@CUDA
@pytest.mark.parametrize("name", NAMES)
def test_cuda_and_cpu_agree(name):
    run, on_cuda, outputs = cases("cuda")[name]
    _, on_cpu, _ = cases("cpu")[name]
    run(*on_cuda)
    run(*on_cpu)
    for i in outputs:
        # sums in another order, then one rounding: bf16 is within 2**-8, e4m3 within one step of 2**-3
        tolerance = 0.13 if on_cpu[i].dtype == torch.float8_e4m3fn else 1e-2
        torch.testing.assert_close(on_cuda[i].cpu().float(), on_cpu[i].float(), rtol=tolerance, atol=tolerance)


@CUDA
@pytest.mark.parametrize("tokens", [4, cuda_ops.FEW_TOKENS_E4M3 + 1])
@pytest.mark.parametrize("name", NAMES)
def test_an_op_waits_for_nothing_and_replays_from_a_graph_on_another_stream(name, tokens):
    run, arguments, outputs = cases("cuda", 4)[name]
    if tokens > 4 and "absorb" in name:  # cuBLAS, and the tail
        q = torch.randn(tokens, 10, 192, device="cuda").to(BF16)
        dtype = arguments[0].dtype
        buffer = torch.zeros(tokens, 16, 576, device="cuda").to(dtype)
        arguments = [buffer[..., :512], buffer[..., 512:], q[..., :128], q[..., 128:], *arguments[4:]]
    eager, captured = copied(arguments), copied(arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*eager)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*copied(arguments))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run(*captured)
    assert same(captured, arguments, outputs)  # captured, not run
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, eager, outputs)


@CUDA
@pytest.mark.parametrize("name", NAMES)
def test_an_op_allocates_nothing_at_few_tokens(name):
    run, arguments, _ = cases("cuda")[name]
    run(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run(*arguments)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("name", NAMES)
def test_an_op_runs_on_its_tensors_device_not_on_the_current_one(name):
    run, on_second, outputs = cases("cuda:1")[name]
    _, on_first, _ = cases("cuda:0")[name]
    with torch.cuda.device(0):
        run(*on_second)
        run(*on_first)
        assert torch.cuda.current_device() == 0
    for i in outputs:
        assert torch.equal(on_second[i].cpu().view(torch.uint8), on_first[i].cpu().view(torch.uint8))


@CUDA
@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_two_devices_are_refused(name):
    run, arguments, _ = cases("cuda")[name]
    for i, x in enumerate(arguments):
        if isinstance(x, torch.Tensor):
            with pytest.raises(InvalidInput):
                run(*arguments[:i], x.cpu(), *arguments[i + 1 :])


def test_what_an_op_writes_has_memory_of_its_own_and_says_so_otherwise():
    rows, bf16 = torch.zeros(2, 4, 8), torch.bfloat16
    with torch.inference_mode():
        inferred = torch.zeros(2, 4, 8)
    for call, says in (
        (lambda: ops.concat_nope_rope(rows[:1].expand(2, 4, 8), rows[..., :6], rows[..., :2]), "the strides of out is"),
        (lambda: ops.concat_nope_rope(torch.zeros(2, 4, 16)[..., ::2], rows[..., :6], rows[..., :2]), "rows are dense"),
        (lambda: ops.batched_matmul(rows[:1].expand(2, 4, 8), rows, torch.zeros(2, 8, 8)), "the strides of out is"),
        (
            lambda: ops.write_cache(
                torch.zeros(1, 4, 8).expand(2, 4, 8), torch.zeros(1, 6), torch.zeros(1, 2), torch.zeros(1).long(), "fp32"
            ),
            "the strides of data is",
        ),
        (
            lambda: ops.write_indexer_cache(
                torch.zeros(1, 4, 132, dtype=torch.uint8).expand(2, 4, 132), torch.zeros(1, 128), torch.zeros(1).long()
            ),
            "the strides of data is",
        ),
        (
            lambda: ops.finish_rows(
                None, rows[0, :1, :1].expand(2, 4), torch.zeros(2, 4), torch.ones(2, dtype=torch.int32), q_len=1,
                causal=True, base2=False, overwrite_out=False,
            ),
            "the strides of lse is",
        ),
        (lambda: ops.concat_nope_rope(inferred, rows[..., :6], rows[..., :2]), r"of inference mode.*pass out.clone\(\)"),
        (lambda: ops.rope_tail(rows[:1].expand(2, 4, 8).to(bf16), None), "q_pe is a NoneType, it takes a tensor"),
        (lambda: ops.quantize_query(rows, rows, 0.5), "scale is a float, it takes a tensor"),
        (lambda: ops.query_scale(None, rows, rows, None), "out is a NoneType, it takes a tensor"),
        (
            lambda: ops.finish_rows(
                None, [1.0], None, None, q_len=1, causal=True, base2=False, overwrite_out=False
            ),
            "lse is a list, it takes a tensor",
        ),
        (lambda: ops.sanitize_slots(*(torch.zeros(1, 2, dtype=torch.int32),) * 2, 3.5), "num_slots is 3.5"),
        (
            lambda: ops.compact_slots(
                torch.zeros(1, 2, dtype=torch.int32), None, torch.zeros(1, 2, dtype=torch.int32), 3
            ),
            "counts is a NoneType",
        ),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=says):
            call()


def test_a_tensor_without_memory_goes_where_modes_see_it():
    """A fake one has no address to give a kernel, and a mode that records an op must be asked."""
    with FakeTensorMode():
        out, nope, rope = (torch.empty(2, 4, width) for width in (8, 6, 2))
        ops.concat_nope_rope(out, nope, rope)
    traced = make_fx(lambda *given: ops.concat_nope_rope(*given), tracing_mode="fake")(
        torch.empty(2, 4, 8), torch.empty(2, 4, 6), torch.empty(2, 4, 2)
    )
    assert "mla_backends.concat_nope_rope" in traced.code


def test_partials_of_any_float_are_merged():
    outs = torch.randn(2, 3, 4, 8).to(torch.float8_e4m3fn)
    lses = torch.randn(2, 3, 4)
    got = ops.merge_partials(outs, lses)
    want = ops.merge_partials(outs.float(), lses)
    assert torch.equal(got.out.float(), want.out.to(torch.float8_e4m3fn).float())
    assert torch.equal(got.lse, want.lse)
