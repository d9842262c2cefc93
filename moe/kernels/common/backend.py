"""The one place that imports Triton.

`from moe.kernels.common.backend import triton, tl, HAVE_TRITON, INTERPRET` works on every machine.
Without Triton (macOS, a bare CPU install) `triton` and `tl` are inert stand-ins: decorators return
an object that refuses to launch, so kernel files import and their reference versions run.
`pick_backend` turns the user's word ("auto", "triton", "reference", "hopper") into the
implementation that will run, or into a ValueError.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False

    class _Inert:
        """Stands for any Triton name: attribute access and decoration work, a launch does not."""

        def __init__(self, name: str = "triton") -> None:
            self._name = name

        def __getattr__(self, name: str) -> _Inert:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Inert(f"{self._name}.{name}")

        def __call__(self, *args: Any, **kwargs: Any) -> _Inert:
            if len(args) == 1 and callable(args[0]) and not kwargs:
                return _Inert(getattr(args[0], "__name__", self._name))
            return self

        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError(f"{self._name} needs Triton, which is not installed")

    triton = SimpleNamespace(  # type: ignore[assignment]
        jit=_Inert("triton.jit"),
        autotune=_Inert("triton.autotune"),
        heuristics=_Inert("triton.heuristics"),
        Config=_Inert("triton.Config"),
        __version__="0",
    )
    tl = _Inert("triton.language")  # type: ignore[assignment]

# Read once: Triton itself looks at the variable when a kernel is decorated, that is at import.
INTERPRET = HAVE_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in (
    "1",
    "true",
    "on",
    "yes",
)


# For the host alone: Triton's own of these names take microseconds a call, tens in a launcher.


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


BACKENDS = ("auto", "reference", "triton", "hopper", "spmm")
RESOLVED = ("reference", "triton", "hopper")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


_as_on_gpu = False


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside: tensors without content (`FakeTensorMode`) go the way of those on a GPU, whatever
    their device, and nothing is launched. (Builds of PyTorch for CPUs know no gradients of CUDA
    tensors, not even of such that have no content.)"""
    global _as_on_gpu
    before, _as_on_gpu = _as_on_gpu, True
    try:
        yield
    finally:
        _as_on_gpu = before


def runs_nothing() -> bool:
    """Whether this is inside `as_on_gpu`, where no kernel is launched."""
    return _as_on_gpu


def on_gpu(device: torch.device) -> bool:
    """Whether tensors there are on a GPU, or taken for such (`as_on_gpu`)."""
    return _as_on_gpu or device.type == "cuda"


def pick_backend(
    name: str,
    tensor: Tensor,
    *,
    available: tuple[str, ...] = ("reference", "triton"),
    argument: str = "backend",
) -> str:
    """The implementation to run on `tensor`: one of `available`.

    "auto" takes what always runs: on CUDA "triton", everywhere else, and for float64, "reference"
    (`moe.experts` knows when "hopper" is better). A backend asked for by name is never replaced;
    for an operator that has no kernel of its own for Hopper, "hopper" means "triton" there. "spmm"
    is a way to compute experts (`moe.sparse.experts`); whatever else a layer does then runs as with
    "auto".

    Raises:
        ValueError: unknown name, or a named backend that cannot run here; the message says which
            and why.
    """
    if name not in BACKENDS:
        raise ValueError(f"{argument}={name!r} is unknown; allowed: {', '.join(BACKENDS)}")
    if _as_on_gpu:
        return "reference" if name == "reference" else "triton"
    if name == "spmm":
        name = "auto"
    floating = tensor.dtype.is_floating_point
    dtype_ok = not floating or tensor.dtype in KERNEL_DTYPES
    if name == "auto":
        if tensor.is_cuda and HAVE_TRITON and not INTERPRET and dtype_ok:
            return "triton"
        return "reference"
    if name == "reference":
        return name
    if name not in available and not (name == "hopper" and "triton" in available):
        raise ValueError(
            f"{argument}={name!r} is not implemented by this operator; "
            f"allowed: {', '.join(available)}"
        )
    if not HAVE_TRITON:
        raise ValueError(
            f"{argument}={name!r} needs the triton package, which is not installed; use 'reference'"
        )
    if not dtype_ok:
        raise ValueError(
            f"{argument}={name!r} does not support dtype {tensor.dtype}; use 'reference'"
        )
    if name == "hopper" and not (tensor.is_cuda and capability(tensor.device)[0] == 9):
        raise ValueError(
            f"{argument}='hopper' needs a CUDA tensor on a GPU of compute capability 9.x"
        )
    if name == "triton" and not (tensor.is_cuda or INTERPRET):
        raise ValueError(
            f"{argument}='triton' needs a CUDA tensor, got {tensor.device}; "
            "on a CPU set TRITON_INTERPRET=1 before the import (slow, for tests) or use 'reference'"
        )
    return name if name in available else "triton"


def check_resolved(name: str, backend: str) -> None:
    """Refuses, for the operator `name`, a backend that `pick_backend` does not give.

    Raises:
        ValueError: the backend and what is allowed.
    """
    if backend not in RESOLVED:
        raise ValueError(
            f"{name}: backend={backend!r} is not a resolved backend; allowed: {', '.join(RESOLVED)}"
        )


@functools.cache
def _properties(index: int) -> tuple[str, tuple[int, int], int]:
    p = torch.cuda.get_device_properties(index)
    return p.name, (p.major, p.minor), p.multi_processor_count


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


# Called while torch.compile traces a block: their answers are constants of the compiled code. Else
# Dynamo would trace into `functools.cache`, past the cache, and warn of it at every start.


@torch.compiler.assume_constant_result
def device_name(device: torch.device) -> str:
    """Card name as CUDA reports it, or "cpu"."""
    return _properties(_index(device))[0] if device.type == "cuda" else "cpu"


@torch.compiler.assume_constant_result
def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability (major, minor); (0, 0) on a CPU."""
    return _properties(_index(device))[1] if device.type == "cuda" else (0, 0)


@torch.compiler.assume_constant_result
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of the card; 1 on a CPU."""
    return _properties(_index(device))[2] if device.type == "cuda" else 1


if HAVE_TRITON:

    @triton.jit
    def _probe_kernel(a, b, out):
        x, y = tl.load(a), tl.load(b)
        tl.store(out, (x + y).to(tl.float32))
        tl.store(out + 1, tl.where(x < y, 1.0, 0.0))

    @triton.jit
    def _largest_kernel(a, out, N: tl.constexpr):
        x = tl.load(a + tl.arange(0, N))
        tl.store(out, tl.max(x, axis=0))
        tl.store(out + 1 + tl.arange(0, N), tl.sort(x))


@functools.cache
def interpreter_faults() -> tuple[str, ...]:
    """What Triton's interpreter, if it is in use, computes otherwise than the compiled code would.

    Interpreters have added and compared bfloat16 numbers as bit patterns and treated NaN in `max`
    and `sort` in ways of their own (triton-lang/triton issues 4972, 5999, 10945, 11153). Kernels
    here do not rely on the order of NaN; tests must not run bfloat16 where this names it.
    """
    if not INTERPRET:
        return ()
    faults = []
    out = torch.empty(5)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for kind, a, b, at, want in (
            ("addition", 2.5, 2.0, 0, 4.5),
            ("comparison", -5.0, -2.0, 1, 1.0),
        ):
            _probe_kernel[(1,)](*(torch.tensor([x], dtype=dtype) for x in (a, b)), out)
            if out[at].item() != want:
                faults.append(f"{name} {kind}")
    nan, inf = float("nan"), float("inf")
    _largest_kernel[(1,)](torch.tensor([nan, inf]), out, 2)
    if out[0].item() != inf:  # the compiled maximum drops NaN
        faults.append("max of NaN")
    _largest_kernel[(1,)](torch.tensor([inf, 3.1, nan, -1.0]), out, 4)
    if out[1:].isnan().sum() != 1 or not {inf, -1.0} <= set(out[1:].tolist()):
        faults.append("sort with NaN")
    return tuple(faults)
