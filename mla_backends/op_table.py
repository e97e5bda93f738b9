"""One entry an op: its schema, its torch form and, where the library was built, its CUDA form.

An eager call goes straight to the form that serves the tensors' device; under torch.compile it goes
through `torch.ops.mla_backends`, so that a graph holds it as one node. `Library.define` and `impl`
are used because `custom_op` costs 11 µs a call against 3 (H200 host).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_backends.compiled import function
from mla_backends.errors import InvalidInput

__all__ = [
    "Op",
    "are_tensors",
    "dense_last",
    "one_device",
    "one_float",
    "own_memory",
    "refuse",
    "register",
    "requests",
    "writable",
]

_LIBRARY = torch.library.Library("mla_backends", "DEF")
_is_compiling = torch.compiler.is_compiling
_PLAIN = (Tensor, torch.nn.Parameter)


def register(schema: str, on_cpu: Callable[..., None], on_cuda: Callable[..., None]) -> Callable[..., None]:
    """Define `mla_backends::<schema>`, every written argument marked, and give back what runs it.

    Returns:
        A function of (is_cuda, *arguments): through the dispatcher where torch.compile looks on, else straight.
    """
    name = schema.partition("(")[0]

    def fake(*args: Any) -> None:
        return None

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, on_cpu, "CPU")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"mla_backends::{name}", fake, lib=_LIBRARY)
    overload = getattr(torch.ops.mla_backends, name).default

    def run(is_cuda: bool, *args: Any) -> None:
        # A fake tensor has no memory, and a mode that records needs to see the op.
        if _is_compiling() or any(isinstance(a, Tensor) and type(a) not in _PLAIN for a in args):
            overload(*args)
        elif is_cuda:
            on_cuda(*args)
        else:
            on_cpu(*args)

    return run


class Op:
    """One op: `took` tries the compiled kernel on arguments as they come, a call runs checked ones anywhere.

    Checks in Python cost as much as a launch, and the kernel's host side makes the same ones for a hundredth of that.
    So an eager CUDA call asks it first; only what it refuses is checked in Python, which finds the words.

    Args:
        schema: as `torch.library` takes it, every written argument marked; the op returns nothing.
        torch_form: takes the schema's arguments.
        cuda_form: the same, and True, or False with nothing done where they break the contract. By default the compiled
            library's export of the op's name. Called only where there is a library.
    """

    def __init__(
        self, schema: str, torch_form: Callable[..., None], cuda_form: Callable[..., bool] | None = None
    ) -> None:
        self.name = schema.partition("(")[0]
        self._torch_form, self._cuda_form = torch_form, cuda_form
        self._run = register(schema, torch_form, self._on_cuda)

    def took(self, first: Tensor | None, *args: Any) -> bool:
        """Whether the compiled kernel ran on these arguments; if not, nothing was done."""
        written = args[0] if first is None else first
        if _is_compiling() or type(written) is not Tensor or not written.is_cuda:
            return False
        export = function(self.name)
        if export is None:
            return False
        try:
            return bool((self._cuda_form or export)(first, *args))
        except TypeError:  # TVM-FFI's, before anything is done: an argument is of another kind altogether
            return False

    def __call__(self, is_cuda: bool, first: Tensor | None, *args: Any) -> None:
        """Run on checked arguments, of which there is something to write."""
        self._run(is_cuda, first, *args)

    def _on_cuda(self, *args: Any) -> None:
        export = function(self.name)
        if export is None:
            self._torch_form(*args)
        elif not (self._cuda_form or export)(*args):
            raise RuntimeError(f"mla_backends::{self.name} was refused by its kernel though its checks passed")


def refuse(name: str, found: object, taken: str) -> InvalidInput:
    return InvalidInput(f"{name} is {found}, it takes {taken}")


def are_tensors(**given: object) -> None:
    """Raises InvalidInput for what is no tensor."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise refuse(name, f"a {type(x).__name__}", "a tensor")


def dense_last(**tensors: Tensor) -> None:
    """Raises InvalidInput for a tensor whose last dimension is not dense."""
    for name, x in tensors.items():
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise refuse(f"the last stride of {name}", x.stride(-1), f"1; pass {name}.contiguous()")


def own_memory(**tensors: Tensor) -> None:
    """Raises InvalidInput for what an op would write in one place for several values, or torch lets nobody write."""
    for name, x in tensors.items():
        if not _is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled():
            raise refuse(
                name, "a tensor of inference mode, which is written there alone", f"another; pass {name}.clone()"
            )
        if any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
            raise refuse(f"the strides of {name}", x.stride(), "memory for each value; clone an expanded tensor")


def writable(**tensors: Tensor) -> None:
    """Raises InvalidInput for what an op cannot write row by row: a last dimension that is not dense, and as `own_memory`."""
    for name, x in tensors.items():
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            taken = "1; it is written, so give memory whose rows are dense"
            raise refuse(f"the last stride of {name}", x.stride(-1), taken)
    own_memory(**tensors)


def one_device(device: int, **tensors: Tensor | None) -> None:
    """Raises InvalidInput for a tensor on another device than the one that the op writes on (-1: the CPU)."""
    for name, x in tensors.items():
        # A meta tensor has no memory, and the CPU's number.
        if x is not None and (x.get_device() != device or x.is_meta):
            where = "the CPU" if device < 0 else f"cuda:{device}"
            raise refuse(f"the device of {name}", x.device, f"{where}, where the op writes")


def one_float(name: str, x: Tensor, device: int) -> None:
    """Raises InvalidInput for anything but one float32 on that device."""
    if x.dtype != torch.float32 or x.numel() != 1:
        raise refuse(name, f"{list(x.shape)} {x.dtype}", "one float32 on the device")
    one_device(device, **{name: x})


def requests(tokens: int, seq_lens: Tensor | None, cu_q_lens: Tensor | None, q_len: int, device: int) -> None:
    """Raises InvalidInput unless lengths describe that many tokens: B * q_len, or ragged by cu_q_lens [B + 1]."""
    for name, x in (("seq_lens", seq_lens), ("cu_q_lens", cu_q_lens)):
        if x is not None and (x.dtype != torch.int32 or x.dim() != 1 or not x.is_contiguous()):
            raise refuse(
                name, f"{list(x.shape)} {x.dtype} with strides {list(x.stride())}", "contiguous int32, one dimension"
            )
    one_device(device, seq_lens=seq_lens, cu_q_lens=cu_q_lens)
    if cu_q_lens is not None:
        if cu_q_lens.shape[0] < 1 or (seq_lens is not None and cu_q_lens.shape[0] != seq_lens.shape[0] + 1):
            raise refuse("cu_q_lens", list(cu_q_lens.shape), "[B + 1] with seq_lens [B]")
        return
    if q_len < 1 and tokens:
        raise refuse("q_len", q_len, "at least 1")
    if seq_lens is not None and seq_lens.shape[0] * q_len != tokens:
        raise refuse("seq_lens", list(seq_lens.shape), f"[B] with B * q_len = {tokens} rows, q_len {q_len}")
