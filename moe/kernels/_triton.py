"""The one place that imports Triton.

`from moe.kernels._triton import triton, tl, HAVE_TRITON, INTERPRET` works on every machine. Without
Triton (macOS, a bare CPU install) `triton` and `tl` are inert stand-ins: decorators return an
object that refuses to launch, so kernel files import and their reference versions run.
`pick_backend` turns the user's word ("auto", "triton", "reference", "hopper") into the
implementation that will run, or into a ValueError.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

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


_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, tuple))


def is_eager(*arguments: Any) -> bool:
    """Whether a launcher may be called with these directly, past the dispatcher.

    An operator call costs tens of microseconds of Python, as much as a router's kernels take. It is
    needed where something looks at operators: torch.compile, fake tensors, tensor subclasses,
    dispatch modes (selective checkpointing, FLOP counters).
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return _PLAIN.issuperset(map(type, arguments))


class _Kept(NamedTuple):
    """What a launch needs of a compiled kernel."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple
    whole: Any
    kernel: Any  # kept alive: its id is part of the key


_compiled: dict[tuple, _Kept] = {}


def _class_of(argument: Any) -> Any:
    """What Triton may compile an argument into, at least as fine as its own specialisation; of what
    `launch` does not tell apart itself."""
    if isinstance(argument, int):  # bool, and what else derives from int
        return type(argument), argument == 1, argument % 16 == 0, argument.bit_length() > 31
    base = argument.base  # a tensor descriptor: strides and sizes are values, not code
    return base.dtype, base.data_ptr() % 16 == 0, len(argument.shape), *argument.block_shape


def _watched() -> bool:
    """Whether a profiler of Triton wants to be told of launches."""
    hook = triton.knobs.runtime.launch_enter_hook  # a chain since Triton 3.5
    return hook is not None and bool(getattr(hook, "calls", True))


def _constants(kernel: Any, given: int, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values of the compile-time constants, which follow `given` other arguments."""
    constant = {p.name for p in kernel.params if p.is_constexpr}
    rest = kernel.arg_names[given:]
    if constant != set(rest) or not constant <= options.keys():
        raise TypeError(f"{kernel.__name__}: all constants must be keywords: {sorted(constant)}")
    return tuple(options[name] for name in rest)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, with less work for the host from the second time on.

    Triton binds, classifies and hashes every argument and checks every global at each launch, which
    takes longer than a small kernel runs. Here the compiled kernel is kept by the classes of its
    arguments and started without its runner, with addresses in place of tensors on a GPU, which
    Triton would ask for theirs and the driver about each. What lies elsewhere is left to Triton,
    which refuses memory that a kernel cannot reach. Compile-time constants must be given by
    keyword, all other arguments by position.
    """
    if _as_on_gpu:
        return
    if INTERPRET:
        kernel[grid](*args, **options)
        return
    if not torch.cuda.is_initialized():  # to be compiled on a machine without a GPU
        _constants(kernel, len(args), options)
        kernel[grid](*args, **options)
        return
    device = torch._C._cuda_getDevice()
    key: list[Any] = [id(kernel), device, *options, *options.values()]
    values: list[Any] = [*args]
    for i, a in enumerate(args):
        if isinstance(a, Tensor):
            address = a.data_ptr()
            if a.is_cuda:
                values[i] = address
            key.append(a.dtype if address & 15 == 0 else (a.dtype, False))
        elif type(a) is int:  # one, a multiple of 16, more than 32 bits
            key.append((a == 1) + 2 * (a & 15 == 0) + 4 * (a.bit_length() > 31))
        elif a is None or type(a) is float:
            key.append(type(a))
        else:
            key.append(_class_of(a))
    name = tuple(key)
    found = _compiled.get(name)
    if found is None:
        constants = _constants(kernel, len(args), options)
        made = kernel[grid](*args, **options)
        _compiled[name] = _Kept(
            made.run, made.function, made.packed_metadata, constants, made, kernel
        )
        return
    grid = (*grid, 1, 1)
    if _watched():
        found.whole[grid[:3]](*args, *found.constants)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    found.run(
        grid[0], grid[1], grid[2], stream, found.function, found.metadata, None, None, None,
        *values, *found.constants,
    )  # fmt: skip


_stream_counters: dict[tuple[int, int], Tensor] = {}  # by device and stream
_graph_counters: list[Tensor] = []  # whose addresses CUDA graphs hold
_unused_counters: dict[int, list[Tensor]] = {}  # by device


def _more_counters(device: torch.device) -> list[Tensor]:
    # on a stream of its own: a pool of memory for CUDA graphs takes the allocations of one stream
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        rows = torch.zeros(1024, 4, dtype=torch.int32, device=device)
    stream.synchronize()  # any stream may use them
    return list(rows[:, :1].unbind())


def counter(device: torch.device) -> Tensor:
    """int32 [1], zero: by it the programs of one launch on the current stream of `device`, the
    current one, learn which of them is the last, which must set it back to zero.

    Launches on a stream run one after the other and share one. A launch in a CUDA graph may run
    beside any but itself: it gets one of its own for good, and one that the graph clears each time
    where none is left.
    """
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device=device)
    index = device.index
    if torch._C._cuda_isCurrentStreamCapturing():
        unused = _unused_counters.get(index)
        if not unused:
            return torch.zeros(1, dtype=torch.int32, device=device)
        _graph_counters.append(unused.pop())
        return _graph_counters[-1]
    stream = index, torch._C._cuda_getCurrentRawStream(index)
    found = _stream_counters.get(stream)
    if found is None:
        if not _unused_counters.get(index):
            _unused_counters[index] = _more_counters(device)
        found = _stream_counters[stream] = _unused_counters[index].pop()
    return found


_NOTHING = contextlib.nullcontext()


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


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
