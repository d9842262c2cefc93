"""Kernels for Hopper (compute capability 9.x) in Triton's Gluon dialect: the `hopper` backend.

The six grouped products of the experts, warp-specialised: see `_device` for how; and the router of
large batches. Combine and the small kernels are those of the Triton tier. This file decides alone,
without importing Gluon, whether the kernels can run; the launchers are imported where they are
called.

    rows           up-projection with SwiGLU, down-projection, gradient of the gathered X
    down_backward  dH, A' and dS
    outer          gradients of both weights
    gating         the router's top-K
    placing        the sort behind it, in plain Triton
"""

from __future__ import annotations

import functools
import importlib
import warnings

import torch
from torch import Tensor

from moe.kernels.common.backend import HAVE_TRITON, INTERPRET, capability, triton

checked: set[torch.device] = set()
"""Devices on which this process has compared kernels with float32 (`_configs.pick_config`)."""

_TRITON = ((3, 6), (3, 9))  # first version, and the first that is not known to work


@functools.cache
def missing() -> str | None:
    """Why the kernels cannot be built with the installed Triton, or None."""
    if not HAVE_TRITON:
        return "the triton package is not installed"
    if INTERPRET:
        return "Triton's interpreter (TRITON_INTERPRET=1) cannot run Gluon"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    first, end = _TRITON
    if not first <= version < end:
        return (
            f"Triton {triton.__version__} is installed, Gluon kernels need "
            f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
        )
    try:
        for name in ("rows", "outer", "down_backward", "gating"):
            importlib.import_module(f"moe.kernels.hopper.{name}")
    except (ImportError, AttributeError) as error:
        return f"Gluon of Triton {triton.__version__} lacks what the kernels use: {error}"
    return None


@torch.compiler.assume_constant_result
def _here(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU."""
    return device.type == "cuda" and capability(device)[0] == 9


@torch.compiler.assume_constant_result
def _missing() -> str | None:
    return missing()


@functools.cache
def _notice(reason: str) -> None:
    warnings.warn(
        f"the expert layers run on this GPU without their Hopper kernels: {reason}; "
        "the Triton kernels take over",
        stacklevel=2,
    )


@torch.compiler.assume_constant_result
def _usable(device: torch.device) -> bool:
    """Whether the kernels can be built, for a device that would like them; else says why, once.
    Not while a CUDA graph is captured, if they were not checked before: then nothing can be."""
    reason = missing()
    if reason is not None:
        _notice(reason)
        return False
    if device.type != "cuda" or device in checked:
        return True
    return not torch.cuda.is_current_stream_capturing()


def available(device: torch.device) -> bool:
    """Whether the kernels can run there."""
    return _here(device) and _missing() is None


def why_not(
    x: Tensor,
    w1_EHD: Tensor,
    w2_EDN: Tensor,
    b1_EH: Tensor | None,
    b2_ED: Tensor | None,
    activation: str,
) -> str | None:
    """What these operands have that the kernels cannot do, or None; the device is not looked at."""
    D, N = w2_EDN.shape[1:]
    bias = b2_ED if b1_EH is None else b1_EH
    reason = _unfit(x.dtype, {"D": D, "N": N}, activation, bias)
    if reason is None and x.numel() >= 2**34:
        return f"{x.numel()} numbers in x; rows are gathered by 32-bit places of 8, below 2^34"
    return reason


def _unfit(
    dtype: torch.dtype, sizes: dict[str, int], activation: str, bias: Tensor | None
) -> str | None:
    if dtype != torch.bfloat16:
        return f"dtype {dtype}; the kernels take bfloat16"
    if activation != "swiglu":
        return f"activation={activation!r}; the kernels have 'swiglu'"
    if bias is not None:
        return "biases"
    if any(size % 8 for size in sizes.values()):
        named = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return f"{named}; TMA needs multiples of 8"
    return None


def check_operands(
    *operands: Tensor, activation: str = "swiglu", bias: Tensor | None = None, **sizes: int
) -> None:
    """Refuses a single product that the launchers would compute otherwise than it was asked for.

    Args:
        operands: of one dtype each.
        activation, bias: what the kernels would leave out.
        sizes: widths of rows, by name.

    Raises:
        ValueError: the reason.
    """
    for operand in operands:
        reason = _unfit(operand.dtype, sizes, activation, bias)
        if reason is not None:
            raise ValueError(f"backend='hopper' cannot run this: {reason}; use 'triton'")


def prefers(
    x: Tensor,
    w1_EHD: Tensor,
    w2_EDN: Tensor,
    b1_EH: Tensor | None,
    b2_ED: Tensor | None,
    activation: str,
    rows: int,
) -> bool:
    """Whether "auto" takes these kernels.

    They need a Hopper GPU and operands that they can do; with less than half a tile of 128 rows
    per expert the Triton tier, which has smaller tiles, wastes less.
    """
    if not _here(x.device) or why_not(x, w1_EHD, w2_EDN, b1_EH, b2_ED, activation) is not None:
        return False
    return rows >= 64 * w2_EDN.shape[0] and _usable(x.device)


def require(
    x: Tensor,
    w1_EHD: Tensor,
    w2_EDN: Tensor,
    b1_EH: Tensor | None,
    b2_ED: Tensor | None,
    activation: str,
) -> None:
    """Refuses by name what was asked for by name and cannot be done.

    Raises:
        ValueError: the reason.
    """
    reason = _missing() or why_not(x, w1_EHD, w2_EDN, b1_EH, b2_ED, activation)
    if reason is not None:
        raise ValueError(f"backend='hopper' cannot run this: {reason}; use 'auto' or 'triton'")
