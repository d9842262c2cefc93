"""Up-projection of the experts: H = gathered X · W1ᵀ (+ b1), A = activation(H).

The rows of X are gathered while they are loaded, the activation runs on the float32 sums, and both
H (for backward) and A are stored; the gathered X never exists in memory. After SonicMoE
(arXiv 2512.14080), kernel "F1".

Shape letters: T tokens, R rows (expert order), E experts, D model width, N expert width, H columns
of H (2N for gated activations, gate and up interleaved, else N).
"""

from __future__ import annotations

from torch import Tensor

from moe.kernels import hopper
from moe.kernels.common import tiles as _tiles
from moe.kernels.common.activations import act, activation_ref, activation_width
from moe.kernels.common.backend import cdiv, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.ops import define_op
from moe.kernels.common.reference import gather_rows_ref, grouped_rows_ref
from moe.kernels.common.tiles import (
    Config,
    RowTiles,
    halves,
    look_up,
    pairs,
    source_rows,
    store_rows,
    weight_tile,
)
from moe.kernels.common.tuning import size_class

# --------------------------------------------------------------------------------------- reference


def up_forward_ref(
    x_TD: Tensor,
    w1_EHD: Tensor,
    b1_EH: Tensor | None,
    token_R: Tensor | None,
    offsets_E1: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Plain torch version of `up_forward`, any device and dtype."""
    x_RD = gather_rows_ref(x_TD, token_R)
    h_RH = grouped_rows_ref(x_RD, w1_EHD.transpose(1, 2), offsets_E1, b1_EH)
    return h_RH, activation_ref(h_RH, activation)


# ------------------------------------------------------------------------------------------- kernel


# Not specialised on divisibility, so that fewer variants are compiled: TMA and whole vectors
# (VEC) carry what alignment the fast path needs.
_SIZES = ["D", "H", "N", "stride_x", "stride_we", "stride_wh", "stride_wd"]


@triton.jit
def _finish(
    acc, b1_ptr, h_ptr, h_desc, a_ptr, a_desc, e, start, end, col, H, N,
    ACT: tl.constexpr, WIDTH: tl.constexpr, STORE_H: tl.constexpr, BIAS: tl.constexpr,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Epilogue of BN columns of H from `col` on, in SPLIT parts: bias, H, activation, A."""
    if SPLIT > 1:
        left, right = halves(acc)
        _finish(
            left, b1_ptr, h_ptr, h_desc, a_ptr, a_desc, e, start, end, col, H, N,
            ACT, WIDTH, STORE_H, BIAS, TMA, BM, BN // 2, SPLIT // 2,
        )  # fmt: skip
        _finish(
            right, b1_ptr, h_ptr, h_desc, a_ptr, a_desc, e, start, end, col + BN // 2, H, N,
            ACT, WIDTH, STORE_H, BIAS, TMA, BM, BN // 2, SPLIT // 2,
        )  # fmt: skip
    else:
        if BIAS:
            cols = col + tl.arange(0, BN)
            bias = tl.load(b1_ptr + e.to(tl.int64) * H + cols, mask=cols < H, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if STORE_H:
            h = acc.to(a_ptr.dtype.element_ty)
            store_rows(h_ptr, h_desc, h, start, end, col, H, H, BM, BN, TMA)
        if WIDTH == 2:
            gate, up = pairs(acc)
            a = act(gate, ACT) * up
        else:
            a = act(acc, ACT)
        a = a.to(a_ptr.dtype.element_ty)
        store_rows(a_ptr, a_desc, a, start, end, col // WIDTH, N, N, BM, BN // WIDTH, TMA)


@triton.jit
def _product(
    acc, x_ptr, x_desc, x_at, w1_ptr, w1_desc, e, start, k, col, D, H,
    stride_we, stride_wh, stride_wd, GATHER: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    VEC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + X · W1ᵀ for inner columns k … k + BK - 1."""
    if GATHER or not TMA:
        # Whole vectors of VEC elements keep the loads 16 bytes wide and asynchronous: where the
        # loops are one, the compiler sees no alignment in x_at itself.
        cols = tl.arange(0, BK)
        at = ((x_at + k // VEC) * VEC)[:, None] + cols[None, :]
        if EVEN:
            x = tl.load(x_ptr + at)
        else:
            x = tl.load(x_ptr + at, mask=(k + cols < D)[None, :], other=0.0)
    else:
        x = x_desc.load([start, k])
    w = weight_tile(w1_ptr, w1_desc, e, col, k, H, D, stride_we, stride_wh, stride_wd, BN, BK, TMA)
    return tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=_SIZES)
def _up_kernel(
    x_ptr, x_desc, w1_ptr, w1_desc, b1_ptr, h_ptr, h_desc, a_ptr, a_desc, token_ptr,
    tile_expert_ptr, tile_start_ptr, tile_end_ptr, tile_count_ptr,
    D, H, N, stride_x, stride_we, stride_wh, stride_wd,
    ACT: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr, STORE_H: tl.constexpr,
    BIAS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, VEC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.load(tile_count_ptr)
    col_tiles = tl.cdiv(H, BN)
    count = row_tiles * col_tiles
    first = tl.program_id(0)
    step = tl.num_programs(0)
    next_e, next_start, next_end, next_col = look_up(
        first, count, row_tiles, col_tiles, tile_expert_ptr, tile_start_ptr, tile_end_ptr, GROUP
    )
    next_sources = source_rows(token_ptr, next_start, next_end, BM, GATHER)
    if FLATTEN:
        e, start, end, col = next_e, next_start, next_end, next_col * BN
        x_at = next_sources.to(tl.int64) * stride_x
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        t = first - step
        k = tl.cdiv(D, BK) * BK
        products = tl.cdiv(tl.maximum(count - first, 0), step) * tl.cdiv(D, BK)
        for _ in tl.range(0, products, disallow_acc_multi_buffer=True):
            k += BK
            if k >= D:
                k = 0
                t += step
                e, start, end, col = next_e, next_start, next_end, next_col * BN
                x_at = next_sources.to(tl.int64) * stride_x
                next_e, next_start, next_end, next_col = look_up(
                    t + step, count, row_tiles, col_tiles,
                    tile_expert_ptr, tile_start_ptr, tile_end_ptr, GROUP,
                )  # fmt: skip
                next_sources = source_rows(token_ptr, next_start, next_end, BM, GATHER)
            acc = _product(
                acc, x_ptr, x_desc, x_at, w1_ptr, w1_desc, e, start, k, col, D, H,
                stride_we, stride_wh, stride_wd, GATHER, TMA, EVEN, VEC, BN, BK,
            )  # fmt: skip
            if k + BK >= D:
                _finish(
                    acc, b1_ptr, h_ptr, h_desc, a_ptr, a_desc, e, start, end, col, H, N,
                    ACT, WIDTH, STORE_H, BIAS, TMA, BM, BN, SPLIT,
                )  # fmt: skip
                acc = tl.zeros((BM, BN), dtype=tl.float32)
    else:
        for t in tl.range(first, count, step, disallow_acc_multi_buffer=True):
            e, start, end, col = next_e, next_start, next_end, next_col * BN
            x_at = next_sources.to(tl.int64) * stride_x
            next_e, next_start, next_end, next_col = look_up(
                t + step, count, row_tiles, col_tiles,
                tile_expert_ptr, tile_start_ptr, tile_end_ptr, GROUP,
            )  # fmt: skip
            next_sources = source_rows(token_ptr, next_start, next_end, BM, GATHER)
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for k in tl.range(0, D, BK):
                acc = _product(
                    acc, x_ptr, x_desc, x_at, w1_ptr, w1_desc, e, start, k, col, D, H,
                    stride_we, stride_wh, stride_wd, GATHER, TMA, EVEN, VEC, BN, BK,
                )  # fmt: skip
            _finish(
                acc, b1_ptr, h_ptr, h_desc, a_ptr, a_desc, e, start, end, col, H, N,
                ACT, WIDTH, STORE_H, BIAS, TMA, BM, BN, SPLIT,
            )  # fmt: skip


# ----------------------------------------------------------------------------------------- launcher


def up_forward_triton(
    x_TD: Tensor,
    w1_EHD: Tensor,
    b1_EH: Tensor | None,
    token_R: Tensor | None,
    offsets_E1: Tensor,
    activation: str,
    save_h: bool,
    tiles: RowTiles,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches the kernel; see `up_forward`. H has no rows when it is not saved."""
    _, H, D = w1_EHD.shape
    width = activation_width(activation)
    N = H // width
    R = (x_TD if token_R is None else token_R).shape[0]
    h_RH = x_TD.new_empty(R if save_h else 0, H)
    a_RN = x_TD.new_empty(R, N)
    if R == 0:
        return h_RH, a_RN
    c = config or _tiles.pick_config(
        "up", x_TD.dtype, tiles.rows, (size_class(R), D, H, activation),
        lambda c: up_forward_triton(
            x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, tiles, c
        ),
        x_TD.device,
    )  # fmt: skip
    x_TD = _tiles.with_unit_stride(x_TD)
    b1_EH = None if b1_EH is None else b1_EH.contiguous()
    tma = _tiles.tma_serves(x_TD, w1_EHD, a_RN, h_RH)
    vec = 16 // x_TD.element_size() if tma else 1
    x_desc = w_desc = h_desc = a_desc = None
    cols = c.bn // c.split
    if tma:
        w_desc = _tiles.descriptor(w1_EHD, [1, c.bn, c.bk])
        a_desc = _tiles.ragged_descriptor(a_RN, [c.bm, cols // width])
        if save_h:
            h_desc = _tiles.ragged_descriptor(h_RH, [c.bm, cols])
        if token_R is None:
            x_desc = _tiles.descriptor(x_TD, [c.bm, c.bk])
    grid = _tiles.grid_size(x_TD.device, c, tiles.expert_B.shape[0] * cdiv(H, c.bn))
    launch(_up_kernel, (grid,),
        x_TD, x_desc, w1_EHD, w_desc, b1_EH, h_RH if save_h else None, h_desc, a_RN, a_desc,
        token_R, tiles.expert_B, tiles.start_B, tiles.end_B, tiles.count,
        D, H, N, x_TD.stride(0) // vec, *w1_EHD.stride(),
        ACT=activation, WIDTH=width, GATHER=token_R is not None, STORE_H=save_h,
        BIAS=b1_EH is not None, TMA=tma, EVEN=D % c.bk == 0,
        VEC=vec, BM=c.bm, BN=c.bn, BK=c.bk, GROUP=c.group,
        SPLIT=c.split, FLATTEN=c.flatten, num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return h_RH, a_RN


# --------------------------------------------------------------------------------------- custom op


def _run(
    x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, tiles, tile_rows, backend
):  # fmt: skip
    if backend == "hopper":
        D, H = x_TD.shape[1], w1_EHD.shape[1]
        hopper.check_operands(x_TD, w1_EHD, activation=activation, bias=b1_EH, D=D, H=H)
    if backend != "reference":
        per_row = x_TD if token_R is None else token_R
        tiles = _tiles.unpack(tiles, tile_rows, offsets_E1, per_row, backend)
        if backend == "hopper":
            from moe.kernels.hopper.rows import up_forward_hopper

            return up_forward_hopper(x_TD, w1_EHD, token_R, save_h, tiles)
        return up_forward_triton(
            x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, tiles
        )
    h_RH, a_RN = up_forward_ref(x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation)
    return (h_RH if save_h else h_RH.new_empty(0, h_RH.shape[1])), a_RN


def _fake(
    x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, tiles, tile_rows, backend
):  # fmt: skip
    R = (x_TD if token_R is None else token_R).shape[0]
    H = w1_EHD.shape[1]
    N = H // activation_width(activation)
    return x_TD.new_empty(R if save_h else 0, H), x_TD.new_empty(R, N)


_op = define_op(
    "up_forward(Tensor x_TD, Tensor w1_EHD, Tensor? b1_EH, Tensor? token_R, Tensor offsets_E1, "
    "str activation, bool save_h, Tensor[] tiles, int tile_rows, str backend) "
    "-> (Tensor, Tensor)",
    _run,
    _fake,
)

# ------------------------------------------------------------------------------------------ public


def up_forward(
    x_TD: Tensor,
    w1_EHD: Tensor,
    b1_EH: Tensor | None,
    token_R: Tensor | None,
    offsets_E1: Tensor,
    *,
    activation: str,
    save_h: bool = True,
    tiles: RowTiles | None = None,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """H and A of all rows.

    Args:
        x_TD: tokens; or, with token_R None, rows already in expert order.
        w1_EHD: weights, gate and up rows interleaved for gated activations.
        b1_EH: bias or None.
        token_R: int32 token of each row.
        offsets_E1: int32 first row of each expert; rows from the last entry on are left undefined.
        activation: a name in `activations.ACTIVATIONS`.
        save_h: False leaves H out (its tensor has no rows).
        tiles: row tiles of `offsets_E1` as made by `_tiles.row_tiles`, or None to make them here.
        backend: "reference", "triton" or "hopper", already resolved.

    Returns:
        (h_RH, a_RN) in the dtype of x.
    """
    return _op(
        x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, *_tiles.pack(tiles), backend
    )
