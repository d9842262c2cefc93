"""Which tier runs: the plain reference, the Triton kernels, or those for Hopper GPUs.

The one place where this is decided; operators take the answer. `pick_backend` of
`moe.kernels.common.backend` knows what can run at all; here is when "auto" prefers Hopper's kernels
and what they cannot do.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from moe.kernels import hopper
from moe.kernels.common.activations import IN_KERNELS
from moe.kernels.common.backend import (
    HAVE_TRITON,
    INTERPRET,
    RESOLVED,
    capability,
    pick_backend,
    triton,
)

# ------------------------------------------------------------------------------- whether they can

_TRITON = ((3, 6), (3, 9))  # first version, and the first that is not known to work


@functools.cache
def hopper_missing() -> str | None:
    """Why the Hopper kernels cannot be built with the installed Triton, or None."""
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
    if hopper.LACKING is not None:
        return f"Gluon of Triton {triton.__version__} lacks what the kernels use: {hopper.LACKING}"
    return None


@torch.compiler.assume_constant_result
def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device)[0] == 9


@torch.compiler.assume_constant_result
def _missing() -> str | None:
    return hopper_missing()


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
    reason = hopper_missing()
    if reason is not None:
        _notice(reason)
        return False
    if device.type != "cuda" or device in hopper.checked:
        return True
    return not torch.cuda.is_current_stream_capturing()


# ------------------------------------------------------------------------------- grouped products


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


def check_hopper(
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


def why_not_hopper(
    x: Tensor, w2_EDN: Tensor, activation: str, bias: Tensor | None = None
) -> str | None:
    """What these experts have that the Hopper kernels cannot do, or None; the device is not looked
    at."""
    D, N = w2_EDN.shape[1:]
    reason = _unfit(x.dtype, {"D": D, "N": N}, activation, bias)
    if reason is None and x.numel() >= 2**34:
        return f"{x.numel()} numbers in x; rows are gathered by 32-bit places of 8, below 2^34"
    return reason


def pick_for_activation(
    backend: str, x: Tensor, activation: str, available: tuple[str, ...] = RESOLVED
) -> str:
    """`pick_backend`; with an activation that the kernels do not know, "auto" is the reference.

    Raises:
        ValueError: a backend asked for by name that cannot run here, or not with this activation.
    """
    picked = pick_backend(backend, x, available=available)
    if picked == "reference" or activation in IN_KERNELS:
        return picked
    if backend in ("triton", "hopper"):
        raise ValueError(
            f"backend={backend!r} does not know activation={activation!r}; allowed with it: "
            "auto, reference"
        )
    return "reference"


def pick_products(
    backend: str,
    x: Tensor,
    w2_EDN: Tensor,
    activation: str,
    rows: int,
    bias: Tensor | None = None,
) -> str:
    """The tier that `moe.experts.experts` runs on such operands, of which none is read.

    "auto" takes Hopper's kernels on a Hopper GPU for operands that they can do; with less than half
    a tile of 128 rows per expert the Triton tier, which has smaller tiles, wastes less.

    Args:
        rows: pairs of a token and one of its experts.
        bias: one of the biases, if there are any.

    Raises:
        ValueError: a backend asked for by name cannot run them.
    """
    picked = pick_for_activation(backend, x, activation)
    if picked == "hopper":
        reason = _missing() or why_not_hopper(x, w2_EDN, activation, bias)
        if reason is not None:
            raise ValueError(f"backend='hopper' cannot run this: {reason}; use 'auto' or 'triton'")
    elif backend == "auto" and picked == "triton":
        full = rows >= 64 * w2_EDN.shape[0]
        fits = _on_hopper(x.device) and why_not_hopper(x, w2_EDN, activation, bias) is None
        if full and fits and _usable(x.device):
            return "hopper"
    return picked


# ----------------------------------------------------------------------------------------- gating

# What the kernels take; above that, backend "auto" means the reference.
MAX_EXPERTS = 4096
MAX_PER_TOKEN = 64
# The Hopper kernels' shapes; with fewer logits their three launches cost more than they save.
_HOPPER_EXPERTS = (64, 256)
_HOPPER_PER_TOKEN = (2, 8)
_HOPPER_LOGITS = 1 << 20
_HOPPER_STRIDE = 1 << 24  # offsets in a tile of 128 tokens have 32 bits


def pick_gating(backend: str, logits_TE: Tensor, k: int, limited: bool) -> str:
    """The tier of the router's top-K; for forms that Hopper's kernels lack, "hopper" means
    "triton".

    Args:
        limited: only some groups of experts may be chosen from.

    Raises:
        ValueError: "triton" was asked for by name and cannot do it.
    """
    picked = pick_backend(backend, logits_TE)
    E = logits_TE.shape[1]
    fits = E <= MAX_EXPERTS and k <= MAX_PER_TOKEN
    if backend == "triton" and not fits:
        raise ValueError(
            f"backend='triton' takes up to {MAX_EXPERTS} experts and k up to {MAX_PER_TOKEN}, "
            f"got {E} and k={k}; use 'reference'"
        )
    if picked == "reference" or not fits:
        return "reference"
    fits = _HOPPER_EXPERTS[0] <= E <= _HOPPER_EXPERTS[1] and not limited
    fits = fits and _HOPPER_PER_TOKEN[0] <= k <= _HOPPER_PER_TOKEN[1]
    if not fits or backend == "triton" or logits_TE.numel() < _HOPPER_LOGITS:
        return "triton"
    if logits_TE.stride(1) != 1 or logits_TE.stride(0) >= _HOPPER_STRIDE:
        return "triton"
    device = logits_TE.device
    return "hopper" if _on_hopper(device) and _usable(device) else "triton"
