"""Activations of the experts: forward and backward, plain torch and inside Triton kernels.

A gated activation reads two columns of H for each column of A, gate and up interleaved (2j gate,
2j + 1 up), so that a pair always sits in one row of one tile. An ungated activation reads one.

    swiglu  silu(gate) * up        relu2  relu(x)^2
    geglu   gelu(gate) * up        gelu   x * Phi(x), exact (erf)
    reglu   relu(gate) * up        silu   x * sigmoid(x)

    clamped_swiglu  g * sigmoid(1.702 g) * (u + 1), where g is the gate up to 7 and u the up column
                    between -7 and 7 (gpt-oss, arXiv 2508.10925)

All arithmetic is in float32 (float64 for float64 tensors); tensors keep their own dtype.

Shape letters: R rows, N columns of A, H columns of H (2N gated, N ungated).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.common.backend import HAVE_TRITON, tl, triton

_INV_SQRT2 = 0.7071067811865476
_INV_SQRT_2PI = 0.3989422804014327
# Of gpt-oss. transformers 4.57 has these two numbers in its code, so no folder can say others.
_CLAMP = 7.0
_SHARPNESS = 1.702


def _silu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    f = x * s
    return f, s.add(f).addcmul_(f, s, value=-1)  # s + f (1 - s)


def _gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    cdf = torch.erf(x * _INV_SQRT2).add_(1.0).mul_(0.5)
    pdf = torch.exp(x.square() * -0.5).mul_(_INV_SQRT_2PI)
    return x * cdf, cdf.addcmul_(x, pdf)


def _relu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.relu(), (x > 0).to(x.dtype)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _relu2_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    r = x.relu()
    return r.square(), r.mul_(2.0)


def _clamped_silu(x: Tensor) -> Tensor:
    g = x.clamp(max=_CLAMP)
    return g * torch.sigmoid(_SHARPNESS * g)


def _clamped_silu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    g = x.clamp(max=_CLAMP)
    s = torch.sigmoid(_SHARPNESS * g)
    slope = s + _SHARPNESS * g * s * (1 - s)
    return g * s, slope.mul_(x <= _CLAMP)


def _clamped_up(x: Tensor) -> Tensor:
    return x.clamp(-_CLAMP, _CLAMP) + 1


def _clamped_up_slope(x: Tensor) -> Tensor:
    return x.abs() <= _CLAMP


class Activation(NamedTuple):
    """What an activation is, in plain torch; `act` and `act_and_slope` are the same on a device."""

    width: int
    """Columns of H that one column of A reads: 2 where a gate multiplies, else 1."""
    inner: Callable[[Tensor], Tensor]
    """The inner function, differentiable by autograd."""
    overwrite: Callable[[Tensor], Tensor]
    """The inner function; may overwrite its input."""
    with_slope: Callable[[Tensor], tuple[Tensor, Tensor]]
    """The inner function and its derivative."""
    up: Callable[[Tensor], Tensor] | None = None
    """What the gate multiplies, of the up column and differentiable by autograd; None: the column
    itself."""
    up_slope: Callable[[Tensor], Tensor] | None = None
    """The derivative of that."""


_SILU = (F.silu, lambda x: F.silu(x, inplace=True), _silu_and_slope)
_GELU = (F.gelu, F.gelu, _gelu_and_slope)
_RELU = (F.relu, Tensor.relu_, _relu_and_slope)
_CLAMPED = (_clamped_silu, _clamped_silu, _clamped_silu_and_slope)
_RELU2 = (_relu2, lambda x: x.relu_().square_(), _relu2_and_slope)

ACTIVATIONS = {
    "swiglu": Activation(2, *_SILU),
    "geglu": Activation(2, *_GELU),
    "reglu": Activation(2, *_RELU),
    "clamped_swiglu": Activation(2, *_CLAMPED, _clamped_up, _clamped_up_slope),
    "relu2": Activation(1, *_RELU2),
    "gelu": Activation(1, *_GELU),
    "silu": Activation(1, *_SILU),
}
IN_KERNELS = frozenset(ACTIVATIONS)
"""Those that `act` knows; one that is added to the table from elsewhere has plain PyTorch alone."""


def activation_of(name: str) -> Activation:
    """The entry of the table.

    Raises:
        ValueError: unknown name.
    """
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        near = difflib.get_close_matches(str(name), ACTIVATIONS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"activation={name!r} is unknown; allowed: {', '.join(ACTIVATIONS)}{hint}"
        ) from None


def activation_width(name: str) -> int:
    """Columns of H per column of A: 2 for gated activations, 1 for the others.

    Raises:
        ValueError: unknown name.
    """
    return activation_of(name).width


# --------------------------------------------------------------------------------------- reference


def _wide(x: Tensor) -> Tensor:
    """A contiguous copy in the arithmetic's dtype: interleaved halves are slow to compute on."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype, memory_format=torch.contiguous_format, copy=True)


def activation_ref(h_RH: Tensor, kind: str) -> Tensor:
    """a_RN of h_RH, in the dtype of h_RH."""
    act = activation_of(kind)
    if act.width == 1:
        return act.overwrite(_wide(h_RH)).to(h_RH.dtype)
    up = h_RH[:, 1::2] if act.up is None else act.up(_wide(h_RH[:, 1::2]))
    return act.overwrite(_wide(h_RH[:, 0::2])).mul_(up).to(h_RH.dtype)


def activation_backward_ref(h_RH: Tensor, da_RN: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(dH, A) in the dtype of the arithmetic, from H and the gradient of A (recomputes A)."""
    act = activation_of(kind)
    if act.width == 1:
        a, slope = act.with_slope(_wide(h_RH))
        return slope.mul_(da_RN), a
    up = _wide(h_RH[:, 1::2])
    f, slope = act.with_slope(_wide(h_RH[:, 0::2]))
    dh = torch.empty(h_RH.shape, dtype=f.dtype, device=f.device)
    torch.mul(da_RN, f, out=dh[:, 1::2])
    if act.up is not None:
        dh[:, 1::2] *= act.up_slope(up)
        up = act.up(up)
    torch.mul(slope.mul_(up), da_RN, out=dh[:, 0::2])
    return dh, f.mul_(up)


# ----------------------------------------------------------------------------------- device code

if HAVE_TRITON:
    _LOG2E_ = tl.constexpr(1.4426950408889634)
    _INV_SQRT2_ = tl.constexpr(_INV_SQRT2)
    _INV_SQRT_2PI_ = tl.constexpr(_INV_SQRT_2PI)
    _CLAMP_ = tl.constexpr(_CLAMP)
    _SHARPNESS_ = tl.constexpr(_SHARPNESS)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))"""
    return 1.0 / (1.0 + tl.exp2(x * -_LOG2E_))


@triton.jit
def act(x, KIND: tl.constexpr):
    """The inner function, float32."""
    if KIND == "swiglu" or KIND == "silu":
        return x * sigmoid(x)
    elif KIND == "geglu" or KIND == "gelu":
        return x * (0.5 + 0.5 * tl.erf(x * _INV_SQRT2_))
    elif KIND == "relu2":
        r = tl.maximum(x, 0.0)
        return r * r
    elif KIND == "clamped_swiglu":
        g = tl.minimum(x, _CLAMP_)
        return g * sigmoid(g * _SHARPNESS_)
    else:
        tl.static_assert(KIND == "reglu", "unknown activation")
        return tl.maximum(x, 0.0)


@triton.jit
def act_and_slope(x, KIND: tl.constexpr):
    """The inner function and its derivative at x, float32."""
    if KIND == "swiglu" or KIND == "silu":
        s = sigmoid(x)
        f = x * s
        return f, s + f * (1.0 - s)
    elif KIND == "geglu" or KIND == "gelu":
        cdf = 0.5 + 0.5 * tl.erf(x * _INV_SQRT2_)
        pdf = tl.exp2(x * x * (-0.5 * _LOG2E_)) * _INV_SQRT_2PI_
        return x * cdf, cdf + x * pdf
    elif KIND == "relu2":
        r = tl.maximum(x, 0.0)
        return r * r, 2.0 * r
    elif KIND == "clamped_swiglu":
        g = tl.minimum(x, _CLAMP_)
        s = sigmoid(g * _SHARPNESS_)
        slope = s + _SHARPNESS_ * g * (s - s * s)  # in this form no register spills
        return g * s, tl.where(x <= _CLAMP_, slope, 0.0)
    else:
        tl.static_assert(KIND == "reglu", "unknown activation")
        return tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)


@triton.jit
def up_factor(up, KIND: tl.constexpr):
    """What the gate multiplies, float32."""
    if KIND == "clamped_swiglu":
        return tl.minimum(tl.maximum(up, -_CLAMP_), _CLAMP_) + 1.0
    else:
        return up


@triton.jit
def through_up(gradient, up, KIND: tl.constexpr):
    """The gradient of the up column, of that of its factor."""
    if KIND == "clamped_swiglu":
        return tl.where(tl.abs(up) <= _CLAMP_, gradient, 0.0)
    else:
        return gradient
