"""The grouped product of rows in expert order: out[r] = a[r] · W[e(r)] + bias[e(r)], in Triton.

One kernel for the down-projection (W2 read as its transpose) and for the gradient of X (W1 as it
is).

Rows stay in expert order and are stored contiguously; `combine` gathers them per token. Scattering
in this kernel's store was measured slower on Hopper (arXiv 2512.14080, section on expert
aggregation).

Shape letters: R rows (expert order), E experts, I inner width, O outer width.
"""

from __future__ import annotations

from torch import Tensor

from moe.kernels.common.backend import cdiv, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.row_tiles import RowTiles
from moe.kernels.common.tiles import (
    descriptor,
    grid_size,
    ragged_descriptor,
    store_rows,
    tma_serves,
    with_unit_stride,
)
from moe.kernels.common.tuning import Config, pick, size_class
from moe.kernels.grouped.configs import candidates
from moe.kernels.grouped.main_loop import in_parts, row_products

# ------------------------------------------------------------------------------------------- kernel


@triton.jit
def row_part(acc, col, tile, args, FORM):
    """Bias and store of a range of columns."""
    e, start, end = tile
    bias_ptr, out_ptr, out_desc, O = args
    BIAS: tl.constexpr = FORM[0]
    TMA: tl.constexpr = FORM[1]
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    if BIAS:
        cols = col + tl.arange(0, BN)
        bias = tl.load(bias_ptr + e.to(tl.int64) * O + cols, mask=cols < O, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    store_rows(out_ptr, out_desc, out, start, end, col, O, O, BM, BN, TMA)
    return 0


@triton.jit
def rows_finish(acc, gate, e, start, end, col, width, args, FORM, SPLIT: tl.constexpr):
    in_parts(acc, col, (e, start, end), args, FORM, row_part, SPLIT)


_SIZES = ["I", "O", "stride_a", "stride_we", "stride_wi", "stride_wo"]  # see `up_forward`


@triton.jit(do_not_specialize=_SIZES)
def _rows_kernel(
    a_ptr, a_desc, w_ptr, w_desc, bias_ptr, out_ptr, out_desc,
    expert_ptr, start_ptr, end_ptr, count_ptr, I, O, stride_a, stride_we, stride_wi, stride_wo,
    TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    row_products(
        (a_ptr, a_desc, stride_a, None),
        (w_ptr, w_desc, stride_we, stride_wi, stride_wo),
        (expert_ptr, start_ptr, end_ptr, count_ptr),
        (None, None), I, O, (bias_ptr, out_ptr, out_desc, O), (BIAS, TMA), rows_finish, SPLIT,
        GATHER=False, TRANSPOSED=TRANSPOSED, GATES=False, SLOTS=False, TMA=TMA, EVEN=EVEN, VEC=1,
        BM=BM, BN=BN, BK=BK, GROUP=GROUP,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------- launcher


def rows_triton(
    a_RI: Tensor,
    w_EIO: Tensor,
    bias_EO: Tensor | None,
    tiles: RowTiles,
    config: Config | None = None,
    out_RO: Tensor | None = None,
) -> Tensor:
    """out_RO in the dtype of a; w may be a transposed view. Rows of no tile are left undefined, in
    a given `out_RO` untouched."""
    R, I = a_RI.shape
    O = w_EIO.shape[2]
    if out_RO is None:
        out_RO = a_RI.new_empty(R, O)
    if R == 0:
        return out_RO
    c = config or pick(
        "rows", (a_RI.dtype, tiles.rows, size_class(R), I, O),
        candidates("rows", a_RI.dtype, tiles.rows),
        lambda c: rows_triton(a_RI, w_EIO, bias_EO, tiles, c), a_RI.device,
    )  # fmt: skip
    a_RI = with_unit_stride(a_RI)
    bias_EO = None if bias_EO is None else bias_EO.contiguous()
    transposed = w_EIO.stride(1) == 1 and w_EIO.stride(2) != 1
    stored = w_EIO.transpose(1, 2) if transposed else w_EIO
    tma = tma_serves(a_RI, stored, out_RO)
    a_desc = w_desc = out_desc = None
    if tma:
        a_desc = descriptor(a_RI, [c.bm, c.bk])
        w_desc = descriptor(stored, [1, c.bn, c.bk] if transposed else [1, c.bk, c.bn])
        out_desc = ragged_descriptor(out_RO, [c.bm, c.bn // c.split])
    grid = grid_size(a_RI.device, c, tiles.expert_B.shape[0] * cdiv(O, c.bn))
    launch(_rows_kernel, (grid,),
        a_RI, a_desc, w_EIO, w_desc, bias_EO, out_RO, out_desc, *tiles[:4],
        I, O, a_RI.stride(0), *w_EIO.stride(),
        TRANSPOSED=transposed, BIAS=bias_EO is not None, TMA=tma, EVEN=I % c.bk == 0,
        BM=c.bm, BN=c.bn, BK=c.bk, GROUP=c.group, SPLIT=c.split,
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return out_RO
