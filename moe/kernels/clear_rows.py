"""Zeroes the rows that belong to no expert: what a grouped product leaves there is undefined.

Only those rows are touched, so the cost is that of the padding, not of the tensor.

Shape letters: R rows (expert order), E experts, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels._grouped import define_op, used_rows
from moe.kernels._triton import launch, next_power_of_2, num_sms, tl, triton

# --------------------------------------------------------------------------------------- reference


def clear_rows_ref(y_RD: Tensor, offsets_E1: Tensor) -> None:
    """Plain torch version of `clear_rows`, any device and dtype."""
    y_RD.masked_fill_(~used_rows(offsets_E1, y_RD.shape[0])[:, None], 0.0)


# ------------------------------------------------------------------------------------------- kernel


@triton.jit(do_not_specialize=["R"])
def _clear_kernel(y_ptr, used_ptr, R, D, BD: tl.constexpr):
    first = tl.load(used_ptr) + tl.program_id(0)
    row = y_ptr + first.to(tl.int64) * D
    for _ in tl.range(first, R, tl.num_programs(0)):
        for d in tl.range(0, D, BD):
            cols = d + tl.arange(0, BD)
            zeros = tl.zeros((BD,), dtype=y_ptr.dtype.element_ty)
            tl.store(row + cols, zeros, mask=cols < D)
        row += tl.num_programs(0).to(tl.int64) * D


# ----------------------------------------------------------------------------------------- launcher


def clear_rows_triton(y_RD: Tensor, offsets_E1: Tensor) -> None:
    """Launches the kernel; see `clear_rows`."""
    R, D = y_RD.shape
    if R == 0:
        return
    BD = min(1024, next_power_of_2(D))
    grid = min(4 * num_sms(y_RD.device), R)
    launch(_clear_kernel, (grid,), y_RD, offsets_E1[offsets_E1.shape[0] - 1 :], R, D, BD=BD)


# ---------------------------------------------------------------------------------------- custom op


def _run(y_RD, offsets_E1, backend):
    (clear_rows_ref if backend == "reference" else clear_rows_triton)(y_RD, offsets_E1)


def _fake(y_RD, offsets_E1, backend):
    return None


_op = define_op("clear_rows(Tensor(a!) y_RD, Tensor offsets_E1, str backend) -> ()", _run, _fake)

# ------------------------------------------------------------------------------------------- public


def clear_rows(y_RD: Tensor, offsets_E1: Tensor, *, backend: str = "reference") -> Tensor:
    """Zeroes rows offsets_E1[E] … R - 1 of a contiguous y in place and returns it.

    Args:
        y_RD: rows in expert order.
        offsets_E1: int32 first row of each expert.
        backend: "reference", "triton" or "hopper" (as "triton"), already resolved.
    """
    torch._assert(y_RD.is_contiguous(), "clear_rows needs contiguous rows")
    _op(y_RD, offsets_E1, backend)
    return y_RD
