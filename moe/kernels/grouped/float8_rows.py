"""Rows in float8 for keeping: each row divided by its own scale, in e4m3 (3 bits of mantissa).

What `save="fp8_h"` keeps of H between forward and backward: one byte a number and four a row. The
scale is the row's largest magnitude over 448, the largest number of the format, so that nothing
overflows and what is lost below is at most 2^-9 of that scale. Rounding is to nearest: relative
errors of single numbers up to 2^-4, about 2.6e-2 by norm.

Not finite stays not finite: NaN keeps its place, an infinity makes its whole row NaN.

Shape letters: R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv, next_power_of_2, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.ops import define_op

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
_LEAST = 1e-30  # a scale must not be zero, nor so small that a GPU would take it for zero

# --------------------------------------------------------------------------------------- reference


def to_float8_ref(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Plain torch version of `to_float8`, any device."""
    wide = x_RC.float()
    top_R = wide.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")).abs().amax(dim=1)
    scale_R = (top_R / LARGEST).clamp_min(_LEAST)
    return (wide / scale_R[:, None]).to(FLOAT8), scale_R


def from_float8_ref(q_RC: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    """Plain torch version of `from_float8`, any device."""
    return (q_RC.float() * scale_R[:, None]).to(dtype)


# ------------------------------------------------------------------------------------------- kernel


@triton.jit
def _block(R, C, col, BR: tl.constexpr, BC: tl.constexpr):
    """(rows, offsets, mask) of a block of the program's rows, from column `col` on."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    cols = col + tl.arange(0, BC)
    return rows, rows[:, None] * C + cols[None, :], (rows < R)[:, None] & (cols < C)[None, :]


@triton.jit
def _encode(x):
    """Bytes of e4m3, rounded to nearest even: in integers, since GPUs before 8.9 and Triton's
    interpreter cannot be trusted with the conversion."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1) >> 20) - 960  # exponents count from 2^-7
    # below 2^-6 a step is 2^-9, which is that of float32 numbers from 2^14 on
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _decode(code):
    """float32 of bytes of e4m3."""
    code = code.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    x = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: the exponents' difference
    return tl.where((code & 0x7F) == 0x7F, float("nan"), x)


@triton.jit
def _divide(x, scale):
    return _encode(x / scale[:, None])


@triton.jit(do_not_specialize=["R"])
def _to_float8_kernel(
    x_ptr, q_ptr, scale_ptr, R, C, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    rows, at, some = _block(R, C, 0, BR, BC)
    x = tl.load(x_ptr + at, mask=some, other=0.0).to(tl.float32)
    top = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)
    if not ONE:
        for col in tl.range(BC, C, BC):
            _, at, some = _block(R, C, col, BR, BC)
            x = tl.load(x_ptr + at, mask=some, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1))
    scale = tl.maximum(top / LARGEST, LEAST)
    tl.store(scale_ptr + rows, scale, mask=rows < R)
    if ONE:
        tl.store(q_ptr + at, _divide(x, scale), mask=some)
    else:
        for col in tl.range(0, C, BC):
            _, at, some = _block(R, C, col, BR, BC)
            x = tl.load(x_ptr + at, mask=some, other=0.0).to(tl.float32)
            tl.store(q_ptr + at, _divide(x, scale), mask=some)


@triton.jit(do_not_specialize=["R"])
def _from_float8_kernel(q_ptr, scale_ptr, out_ptr, R, C, BR: tl.constexpr, BC: tl.constexpr):
    rows, at, some = _block(R, C, tl.program_id(1) * BC, BR, BC)
    scale = tl.load(scale_ptr + rows, mask=rows < R, other=0.0)
    x = _decode(tl.load(q_ptr + at, mask=some, other=0)) * scale[:, None]
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=some)


# ----------------------------------------------------------------------------------------- launcher

_MOST = 4096  # numbers of a program's block


def _shape(C: int) -> tuple[int, int]:
    """(rows, columns) of a block."""
    BC = min(_MOST, max(16, next_power_of_2(C)))
    return _MOST // BC, BC


def to_float8_triton(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Launches the kernel; see `to_float8`."""
    R, C = x_RC.shape
    q_RC, scale_R = x_RC.new_empty(R, C, dtype=FLOAT8), x_RC.new_empty(R, dtype=torch.float32)
    if R:
        BR, BC = _shape(C)
        launch(
            _to_float8_kernel, (cdiv(R, BR),), x_RC.contiguous(), q_RC.view(torch.uint8),
            scale_R, R, C,
            LARGEST=LARGEST, LEAST=_LEAST, BR=BR, BC=BC, ONE=BC >= C,
        )  # fmt: skip
    return q_RC, scale_R


def from_float8_triton(q_RC: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    """Launches the kernel; see `from_float8`."""
    R, C = q_RC.shape
    out_RC = q_RC.new_empty(R, C, dtype=dtype)
    if R:
        BR, BC = _shape(C)
        grid = (cdiv(R, BR), cdiv(C, BC))
        q_RC = q_RC.view(torch.uint8)
        launch(_from_float8_kernel, grid, q_RC, scale_R, out_RC, R, C, BR=BR, BC=BC)
    return out_RC


# ---------------------------------------------------------------------------------------- custom op


def _run(x_RC, backend):
    return (to_float8_ref if backend == "reference" else to_float8_triton)(x_RC)


def _run_back(q_RC, scale_R, dtype, backend):
    return (from_float8_ref if backend == "reference" else from_float8_triton)(q_RC, scale_R, dtype)


_to_op = define_op(
    "to_float8(Tensor x_RC, str backend) -> (Tensor, Tensor)",
    _run,
    lambda x_RC, backend: (
        x_RC.new_empty(x_RC.shape, dtype=FLOAT8),
        x_RC.new_empty(x_RC.shape[0], dtype=torch.float32),
    ),
)
_from_op = define_op(
    "from_float8(Tensor q_RC, Tensor scale_R, ScalarType dtype, str backend) -> Tensor",
    _run_back,
    lambda q_RC, scale_R, dtype, backend: q_RC.new_empty(q_RC.shape, dtype=dtype),
)

# ------------------------------------------------------------------------------------------ public


def why_not(x: Tensor) -> str | None:
    """Why rows of x cannot be kept in float8, or None."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"{x.dtype} rows would lose all that float32 is for; it takes bfloat16 and float16"
    return None


def to_float8(x_RC: Tensor, *, backend: str = "reference") -> tuple[Tensor, Tensor]:
    """(q_RC in float8_e4m3fn, scale_R in float32) with x ≈ q · scale, row by row.

    Args:
        x_RC: bfloat16 or float16 (the reference takes any float).
        backend: "reference", "triton" or "hopper" (as "triton"), already resolved.
    """
    return _to_op(x_RC, backend)


def from_float8(
    q_RC: Tensor, scale_R: Tensor, dtype: torch.dtype, *, backend: str = "reference"
) -> Tensor:
    """q · scale in `dtype`: what `to_float8` was given, but for the rounding."""
    return _from_op(q_RC, scale_R, dtype, backend)
