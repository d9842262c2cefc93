"""The grouped product of rows in expert order: out[r] = scale[r] · (a[r] · W[e(r)] + bias[e(r)]).

One Triton kernel for the down-projection (W2 read as its transpose) and for the gradient of X (W1
as it is).

Shape letters: R rows (expert order), E experts, I inner width, O outer width.
"""

from __future__ import annotations

from torch import Tensor

from moe.kernels.common import tiles as _tiles
from moe.kernels.common.backend import cdiv, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.tiles import (
    Config,
    RowTiles,
    halves,
    look_up,
    source_rows,
    store_rows,
    weight_tile,
)
from moe.kernels.common.tuning import size_class

# Not specialised on divisibility, so that fewer variants are compiled: TMA and whole vectors
# (VEC) carry what alignment the fast path needs.
_SIZES = ["I", "O", "stride_a", "stride_we", "stride_wi", "stride_wo"]


@triton.jit
def _finish(
    acc, scale_ptr, bias_ptr, out_ptr, out_desc, e, start, end, col, O,
    BIAS: tl.constexpr, SCALE: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Epilogue of BN columns from `col` on, in SPLIT parts: bias, row factors, store."""
    if SPLIT > 1:
        left, right = halves(acc)
        _finish(
            left, scale_ptr, bias_ptr, out_ptr, out_desc, e, start, end, col, O,
            BIAS, SCALE, TMA, BM, BN // 2, SPLIT // 2,
        )  # fmt: skip
        _finish(
            right, scale_ptr, bias_ptr, out_ptr, out_desc, e, start, end, col + BN // 2, O,
            BIAS, SCALE, TMA, BM, BN // 2, SPLIT // 2,
        )  # fmt: skip
    else:
        if BIAS:
            cols = col + tl.arange(0, BN)
            bias = tl.load(bias_ptr + e.to(tl.int64) * O + cols, mask=cols < O, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if SCALE:
            rows = start + tl.arange(0, BM)
            acc *= tl.load(scale_ptr + rows, mask=rows < end, other=0.0)[:, None]
        out = acc.to(out_ptr.dtype.element_ty)
        store_rows(out_ptr, out_desc, out, start, end, col, O, O, BM, BN, TMA)


@triton.jit
def _product(
    acc, a_ptr, a_desc, w_ptr, w_desc, e, start, end, k, col, I, O,
    stride_a, stride_we, stride_wi, stride_wo, TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + A · W for inner columns k … k + BK - 1."""
    if TMA:  # rows past the end of the tile are another expert's; the store cuts them off
        a = a_desc.load([start, k])
    else:
        cols = k + tl.arange(0, BK)
        rows = source_rows(None, start, end, BM, False).to(tl.int64) * stride_a
        a = tl.load(a_ptr + rows[:, None] + cols[None, :], mask=(cols < I)[None, :], other=0.0)
    if TRANSPOSED:  # W in memory is (E, O, I)
        w = weight_tile(
            w_ptr, w_desc, e, col, k, O, I, stride_we, stride_wo, stride_wi, BN, BK, TMA
        ).T
    else:
        w = weight_tile(
            w_ptr, w_desc, e, k, col, I, O, stride_we, stride_wi, stride_wo, BK, BN, TMA
        )
    return tl.dot(a, w, acc, input_precision="ieee")


@triton.jit(do_not_specialize=_SIZES)
def _rows_kernel(
    a_ptr, a_desc, w_ptr, w_desc, bias_ptr, scale_ptr, out_ptr, out_desc,
    tile_expert_ptr, tile_start_ptr, tile_end_ptr, tile_count_ptr,
    I, O, stride_a, stride_we, stride_wi, stride_wo,
    TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.load(tile_count_ptr)
    col_tiles = tl.cdiv(O, BN)
    count = row_tiles * col_tiles
    first = tl.program_id(0)
    step = tl.num_programs(0)
    next_e, next_start, next_end, next_col = look_up(
        first, count, row_tiles, col_tiles, tile_expert_ptr, tile_start_ptr, tile_end_ptr, GROUP
    )
    if FLATTEN:
        e, start, end, col = next_e, next_start, next_end, next_col * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        t = first - step
        k = tl.cdiv(I, BK) * BK
        products = tl.cdiv(tl.maximum(count - first, 0), step) * tl.cdiv(I, BK)
        for _ in tl.range(0, products, disallow_acc_multi_buffer=True):
            k += BK
            if k >= I:
                k = 0
                t += step
                e, start, end, col = next_e, next_start, next_end, next_col * BN
                next_e, next_start, next_end, next_col = look_up(
                    t + step, count, row_tiles, col_tiles,
                    tile_expert_ptr, tile_start_ptr, tile_end_ptr, GROUP,
                )  # fmt: skip
            acc = _product(
                acc, a_ptr, a_desc, w_ptr, w_desc, e, start, end, k, col, I, O,
                stride_a, stride_we, stride_wi, stride_wo, TRANSPOSED, TMA, BM, BN, BK,
            )  # fmt: skip
            if k + BK >= I:
                _finish(
                    acc, scale_ptr, bias_ptr, out_ptr, out_desc, e, start, end, col, O,
                    BIAS, SCALE, TMA, BM, BN, SPLIT,
                )  # fmt: skip
                acc = tl.zeros((BM, BN), dtype=tl.float32)
    else:
        for t in tl.range(first, count, step, disallow_acc_multi_buffer=True):
            e, start, end, col = next_e, next_start, next_end, next_col * BN
            next_e, next_start, next_end, next_col = look_up(
                t + step, count, row_tiles, col_tiles,
                tile_expert_ptr, tile_start_ptr, tile_end_ptr, GROUP,
            )  # fmt: skip
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for k in tl.range(0, I, BK):
                acc = _product(
                    acc, a_ptr, a_desc, w_ptr, w_desc, e, start, end, k, col, I, O,
                    stride_a, stride_we, stride_wi, stride_wo, TRANSPOSED, TMA, BM, BN, BK,
                )  # fmt: skip
            _finish(
                acc, scale_ptr, bias_ptr, out_ptr, out_desc, e, start, end, col, O,
                BIAS, SCALE, TMA, BM, BN, SPLIT,
            )  # fmt: skip


def rows_triton(
    a_RI: Tensor,
    w_EIO: Tensor,
    bias_EO: Tensor | None,
    scale_R: Tensor | None,
    tiles: RowTiles,
    config: Config | None = None,
) -> Tensor:
    """out_RO in the dtype of a; w may be a transposed view. Rows of no tile are left undefined."""
    R, I = a_RI.shape
    O = w_EIO.shape[2]
    out_RO = a_RI.new_empty(R, O)
    if R == 0:
        return out_RO
    c = config or _tiles.pick_config(
        "rows", a_RI.dtype, tiles.rows, (size_class(R), I, O),
        lambda c: rows_triton(a_RI, w_EIO, bias_EO, scale_R, tiles, c), a_RI.device,
    )  # fmt: skip
    a_RI = _tiles.with_unit_stride(a_RI)
    bias_EO = None if bias_EO is None else bias_EO.contiguous()
    scale_R = None if scale_R is None else scale_R.contiguous()
    transposed = w_EIO.stride(1) == 1 and w_EIO.stride(2) != 1
    stored = w_EIO.transpose(1, 2) if transposed else w_EIO
    tma = _tiles.tma_serves(a_RI, stored, out_RO)
    a_desc = w_desc = out_desc = None
    if tma:
        a_desc = _tiles.descriptor(a_RI, [c.bm, c.bk])
        w_desc = _tiles.descriptor(stored, [1, c.bn, c.bk] if transposed else [1, c.bk, c.bn])
        out_desc = _tiles.ragged_descriptor(out_RO, [c.bm, c.bn // c.split])
    grid = _tiles.grid_size(a_RI.device, c, tiles.expert_B.shape[0] * cdiv(O, c.bn))
    launch(_rows_kernel, (grid,),
        a_RI, a_desc, w_EIO, w_desc, bias_EO, scale_R, out_RO, out_desc,
        tiles.expert_B, tiles.start_B, tiles.end_B, tiles.count,
        I, O, a_RI.stride(0), w_EIO.stride(0), w_EIO.stride(1), w_EIO.stride(2),
        TRANSPOSED=transposed, BIAS=bias_EO is not None, SCALE=scale_R is not None, TMA=tma,
        BM=c.bm, BN=c.bn, BK=c.bk, GROUP=c.group, SPLIT=c.split, FLATTEN=c.flatten,
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return out_RO
