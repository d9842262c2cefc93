"""Starting kernels with little work for the host."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.backend import INTERPRET, runs_nothing, triton


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
    if runs_nothing():
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
