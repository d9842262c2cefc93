"""Weight gradients of the experts in Triton: the sum over an expert's rows of outer products.

    dW1[e] = sum over rows r of e of dH[r]ᵀ · X[token of r]          (E, H, D)
    dW2[e] = sum over rows r of e of dO[token of r]ᵀ · A'[r]         (E, D, N)

One operand is in expert order, the other is gathered while it is loaded. An expert without rows
gets exact zeros (other implementations have left stale memory there:
github.com/pytorch/pytorch/issues/172439).

Shape letters: R rows (expert order), E experts, I rows of a weight, O columns of a weight.
"""

from __future__ import annotations

from torch import Tensor

from moe.kernels.common.backend import cdiv, next_power_of_2, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.tiles import (
    descriptor,
    grid_size,
    ragged_descriptor,
    ragged_load,
    tma_serves,
    with_unit_stride,
)
from moe.kernels.common.tuning import Config, pick, size_class
from moe.kernels.grouped.configs import candidates
from moe.kernels.grouped.main_loop import in_parts

# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def operand(
    ptr, desc, token_ptr, start, end, k, col, WIDTH, stride,
    GATHER: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, VEC: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Rows start + k … of an operand, BC columns from `col` on; zeros past the expert's last row.

    The row stride is counted in vectors of VEC elements, so that loads are 16 bytes wide.
    """
    if TMA and not GATHER:
        return ragged_load(desc, start, end, k, col, BK, BC)
    rows = start + k + tl.arange(0, BK)
    some = rows < end
    if GATHER:
        rows = tl.load(token_ptr + rows, mask=some, other=0)
    cols = tl.arange(0, BC)
    at = ((rows.to(tl.int64) * stride + col // VEC) * VEC)[:, None] + cols[None, :]
    mask = some[:, None]
    if not EVEN:
        mask = mask & (col + cols < WIDTH)[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0)


@triton.jit
def _part(acc, col, tile, args, FORM):
    """Stores a range of columns of a tile, or adds them to what is there."""
    e, row = tile
    out_ptr, out_desc, I, O = args
    ADD: tl.constexpr = FORM[0]
    TMA: tl.constexpr = FORM[1]
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    if TMA:
        if ADD:
            acc += out_desc.load([e, row, col]).reshape(BM, BN).to(tl.float32)
        out = acc.to(out_ptr.dtype.element_ty).reshape(1, BM, BN)
        out_desc.store([e, row, col], out)
    else:
        rows = row + tl.arange(0, BM)
        cols = col + tl.arange(0, BN)
        out = out_ptr + e.to(tl.int64) * I * O + rows.to(tl.int64)[:, None] * O + cols[None, :]
        some = (rows < I)[:, None] & (cols < O)[None, :]
        if ADD:
            acc += tl.load(out, mask=some, other=0.0).to(tl.float32)
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=some)
    return 0


_SIZES = ["E", "I", "O", "stride_left", "stride_right"]  # see `up_forward`


@triton.jit(do_not_specialize=_SIZES)
def _outer_kernel(
    left_ptr, left_desc, left_token_ptr, right_ptr, right_desc, right_token_ptr, out_ptr, out_desc,
    offsets_ptr, E, I, O, stride_left, stride_right,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, ADD: tl.constexpr, TMA: tl.constexpr,
    EVEN_LEFT: tl.constexpr, EVEN_RIGHT: tl.constexpr, VEC: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One loop over the products of all tiles of this program, so that the loads of the next tile
    start while the current one is stored. An expert without rows takes one product of zeros.

    `tl.range(flatten=True)` cannot do it: the inner loop's length differs by expert.
    """
    first = tl.program_id(0)
    step = tl.num_programs(0)
    col_tiles = tl.cdiv(O, BN)
    per_expert = tl.cdiv(I, BM) * col_tiles
    experts = tl.arange(0, EP)
    some = experts < E
    rows = tl.load(offsets_ptr + experts + 1, mask=some, other=0)
    rows -= tl.load(offsets_ptr + experts, mask=some, other=0)
    tiles = tl.cdiv(tl.maximum((experts + 1) * per_expert - first, 0), step)
    tiles -= tl.cdiv(tl.maximum(experts * per_expert - first, 0), step)
    total = tl.sum(tl.where(some, tiles * tl.maximum(tl.cdiv(rows, BK), 1), 0))
    t = first - step
    e = 0
    start = 0
    end = 0
    k = 0
    row = 0
    col = 0
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in tl.range(0, total, disallow_acc_multi_buffer=True):
        k += BK
        if k >= end - start:
            t += step
            e = t // per_expert
            within = t - e * per_expert
            row = within // col_tiles * BM
            col = within % col_tiles * BN
            start = tl.load(offsets_ptr + e)
            end = tl.load(offsets_ptr + e + 1)
            k = 0
        left = operand(
            left_ptr, left_desc, left_token_ptr, start, end, k, row, I, stride_left,
            GATHER_LEFT, TMA, EVEN_LEFT, VEC, BK, BM,
        )  # fmt: skip
        right = operand(
            right_ptr, right_desc, right_token_ptr, start, end, k, col, O, stride_right,
            GATHER_RIGHT, TMA, EVEN_RIGHT, VEC, BK, BN,
        )  # fmt: skip
        acc = tl.dot(left.T, right, acc, input_precision="ieee")
        if k + BK >= end - start:
            in_parts(acc, col, (e, row), (out_ptr, out_desc, I, O), (ADD, TMA), _part, SPLIT)
            acc = tl.zeros((BM, BN), dtype=tl.float32)


@triton.jit
def _bias_gradient_kernel(
    g_ptr, token_ptr, gates_ptr, slot_ptr, offsets_ptr, out_ptr, O, stride_g,
    GATHER: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr,
    BR: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0)
    start = tl.load(offsets_ptr + e)
    end = tl.load(offsets_ptr + e + 1)
    cols = tl.program_id(1) * BO + tl.arange(0, BO)
    acc = tl.zeros((BR, BO), dtype=tl.float32)
    for r in tl.range(start, end, BR):
        rows = r + tl.arange(0, BR)
        some = rows < end
        at = rows
        if GATHER:
            at = tl.load(token_ptr + rows, mask=some, other=0)
        mask = some[:, None] & (cols < O)[None, :]
        at = at.to(tl.int64)[:, None] * stride_g + cols[None, :]
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if GATES:
            slots = rows
            if SLOTS:
                slots = tl.load(slot_ptr + rows, mask=some, other=0)
            g *= tl.load(gates_ptr + slots, mask=some, other=0.0).to(tl.float32)[:, None]
        acc += g
    out = tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + e.to(tl.int64) * O + cols, out, mask=cols < O)


# ---------------------------------------------------------------------------------------- launchers


def weight_gradient_triton(
    left_RI: Tensor,
    right_RO: Tensor,
    left_token_R: Tensor | None,
    right_token_R: Tensor | None,
    offsets_E1: Tensor,
    add_to_EIO: Tensor | None = None,
    config: Config | None = None,
    out_EIO: Tensor | None = None,
) -> Tensor:
    """Launches the kernel; see `moe.kernels.products.weight_gradient`. The sums are added to
    `add_to_EIO`, or else written to `out_EIO` or a new tensor."""
    assert left_token_R is None or right_token_R is None, "at most one operand is gathered"
    E, I, O = offsets_E1.shape[0] - 1, left_RI.shape[1], right_RO.shape[1]
    if add_to_EIO is not None:
        out_EIO = add_to_EIO
    elif out_EIO is None:
        out_EIO = left_RI.new_empty(E, I, O)
    if left_RI.shape[0] == 0 or right_RO.shape[0] == 0:
        return out_EIO.zero_() if add_to_EIO is None else out_EIO
    c = config or pick(
        "outer",
        (left_RI.dtype, size_class(left_RI.shape[0]), I, O, left_token_R is not None),
        candidates("outer", left_RI.dtype),
        lambda c: weight_gradient_triton(
            left_RI, right_RO, left_token_R, right_token_R, offsets_E1, None, c
        ),
        left_RI.device,
    )  # fmt: skip
    left_RI, right_RO = with_unit_stride(left_RI), with_unit_stride(right_RO)
    tma = tma_serves(left_RI, right_RO, out_EIO)
    vec = 16 // left_RI.element_size() if tma else 1
    left_desc = right_desc = out_desc = None
    if tma:
        out_desc = descriptor(out_EIO, [1, c.bm, c.bn // c.split])
        if left_token_R is None:
            left_desc = ragged_descriptor(left_RI, [c.bk, c.bm])
        if right_token_R is None:
            right_desc = ragged_descriptor(right_RO, [c.bk, c.bn])
    count = E * cdiv(I, c.bm) * cdiv(O, c.bn)
    launch(_outer_kernel, (grid_size(left_RI.device, c, count),),
        left_RI, left_desc, left_token_R, right_RO, right_desc, right_token_R, out_EIO, out_desc,
        offsets_E1, E, I, O, left_RI.stride(0) // vec, right_RO.stride(0) // vec,
        GATHER_LEFT=left_token_R is not None, GATHER_RIGHT=right_token_R is not None,
        ADD=add_to_EIO is not None, TMA=tma, EVEN_LEFT=I % c.bm == 0, EVEN_RIGHT=O % c.bn == 0,
        VEC=vec, EP=next_power_of_2(E), BM=c.bm, BN=c.bn, BK=c.bk, SPLIT=c.split,
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return out_EIO


def bias_gradient_triton(
    g_RO: Tensor,
    token_R: Tensor | None,
    gates_S: Tensor | None,
    slot_R: Tensor | None,
    offsets_E1: Tensor,
) -> Tensor:
    """Launches the kernel; see `moe.kernels.products.bias_gradient`."""
    E, O = offsets_E1.shape[0] - 1, g_RO.shape[1]
    out_EO = g_RO.new_empty(E, O)
    if g_RO.shape[0] == 0:
        return out_EO.zero_()
    g_RO = with_unit_stride(g_RO)
    gates_S = None if gates_S is None else gates_S.contiguous()
    launch(_bias_gradient_kernel, (E, cdiv(O, 64)),
        g_RO, token_R, gates_S, slot_R, offsets_E1, out_EO, O, g_RO.stride(0),
        GATHER=token_R is not None, GATES=gates_S is not None, SLOTS=slot_R is not None,
        BR=32, BO=64,
    )  # fmt: skip
    return out_EO
