"""Up-projection of the experts: H = gathered X · W1ᵀ (+ b1), A = activation(H), in Triton.

The rows of X are gathered while they are loaded, the activation runs on the float32 sums, and both
H (for backward) and A are stored; the gathered X never exists in memory. After SonicMoE
(arXiv 2512.14080), kernel "F1".

Shape letters: T tokens, R rows (expert order), E experts, D model width, N expert width, H columns
of H (2N for gated activations, gate and up interleaved, else N).
"""

from __future__ import annotations

from torch import Tensor

from moe.kernels.common.activations import act, activation_width, up_factor
from moe.kernels.common.backend import cdiv, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.row_tiles import RowTiles
from moe.kernels.common.tiles import (
    descriptor,
    grid_size,
    pairs,
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
def up_part(acc, col, tile, args, FORM):
    """Bias, H, activation and A of a range of columns of H."""
    e, start, end = tile
    b1_ptr, h_ptr, h_desc, stride_h, a_ptr, a_desc, stride_a, H, N = args
    ACT: tl.constexpr = FORM[0]
    WIDTH: tl.constexpr = FORM[1]
    STORE_H: tl.constexpr = FORM[2]
    BIAS: tl.constexpr = FORM[3]
    TMA: tl.constexpr = FORM[4]
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    if BIAS:
        cols = col + tl.arange(0, BN)
        bias = tl.load(b1_ptr + e.to(tl.int64) * H + cols, mask=cols < H, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if STORE_H:
        h = acc.to(a_ptr.dtype.element_ty)
        store_rows(h_ptr, h_desc, h, start, end, col, H, stride_h, BM, BN, TMA)
    if WIDTH == 2:
        gate, up = pairs(acc)
        a = act(gate, ACT) * up_factor(up, ACT)
    else:
        a = act(acc, ACT)
    a = a.to(a_ptr.dtype.element_ty)
    store_rows(a_ptr, a_desc, a, start, end, col // WIDTH, N, stride_a, BM, BN // WIDTH, TMA)
    return 0


@triton.jit
def up_finish(acc, gate, e, start, end, col, width, args, FORM, SPLIT: tl.constexpr):
    in_parts(acc, col, (e, start, end), args, FORM, up_part, SPLIT)


# Not specialised on divisibility, so that fewer variants are compiled: TMA and whole vectors
# (VEC) carry what alignment the fast path needs.
_SIZES = ["D", "H", "N", "stride_x", "stride_we", "stride_wh", "stride_wd", "stride_h", "stride_a"]


@triton.jit(do_not_specialize=_SIZES)
def _up_kernel(
    x_ptr, x_desc, w1_ptr, w1_desc, b1_ptr, h_ptr, h_desc, a_ptr, a_desc, token_ptr,
    expert_ptr, start_ptr, end_ptr, count_ptr,
    D, H, N, stride_x, stride_we, stride_wh, stride_wd, stride_h, stride_a,
    ACT: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr, STORE_H: tl.constexpr,
    BIAS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, VEC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    row_products(
        (x_ptr, x_desc, stride_x, token_ptr),
        (w1_ptr, w1_desc, stride_we, stride_wd, stride_wh),
        (expert_ptr, start_ptr, end_ptr, count_ptr),
        (None, None), D, H,
        (b1_ptr, h_ptr, h_desc, stride_h, a_ptr, a_desc, stride_a, H, N),
        (ACT, WIDTH, STORE_H, BIAS, TMA), up_finish, SPLIT,
        GATHER=GATHER, TRANSPOSED=True, GATES=False, SLOTS=False, TMA=TMA, EVEN=EVEN, VEC=VEC,
        BM=BM, BN=BN, BK=BK, GROUP=GROUP,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------- launcher


def up_forward_triton(
    x_TD: Tensor,
    w1_EHD: Tensor,
    b1_EH: Tensor | None,
    token_R: Tensor | None,
    activation: str,
    save_h: bool,
    tiles: RowTiles,
    config: Config | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches the kernel; see `moe.kernels.products.up_forward`. H has no rows when it is not
    saved. `out`: H and A to write to, rows of any stride; only rows of `tiles` are touched."""
    _, H, D = w1_EHD.shape
    width = activation_width(activation)
    N = H // width
    R = (x_TD if token_R is None else token_R).shape[0]
    h_RH, a_RN = out or (x_TD.new_empty(R if save_h else 0, H), x_TD.new_empty(R, N))
    if R == 0:
        return h_RH, a_RN
    c = config or pick(
        "up", (x_TD.dtype, tiles.rows, size_class(R), D, H, activation),
        candidates("up", x_TD.dtype, tiles.rows),
        lambda c: up_forward_triton(x_TD, w1_EHD, b1_EH, token_R, activation, save_h, tiles, c),
        x_TD.device,
    )  # fmt: skip
    x_TD = with_unit_stride(x_TD)
    b1_EH = None if b1_EH is None else b1_EH.contiguous()
    tma = tma_serves(x_TD, w1_EHD, a_RN, h_RH)
    vec = 16 // x_TD.element_size() if tma else 1
    x_desc = w_desc = h_desc = a_desc = None
    cols = c.bn // c.split
    if tma:
        w_desc = descriptor(w1_EHD, [1, c.bn, c.bk])
        a_desc = ragged_descriptor(a_RN, [c.bm, cols // width])
        if save_h:
            h_desc = ragged_descriptor(h_RH, [c.bm, cols])
        if token_R is None:
            x_desc = descriptor(x_TD, [c.bm, c.bk])
    grid = grid_size(x_TD.device, c, tiles.expert_B.shape[0] * cdiv(H, c.bn))
    launch(_up_kernel, (grid,),
        x_TD, x_desc, w1_EHD, w_desc, b1_EH, h_RH if save_h else None, h_desc, a_RN, a_desc,
        token_R, *tiles[:4],
        D, H, N, x_TD.stride(0) // vec, *w1_EHD.stride(), h_RH.stride(0), a_RN.stride(0),
        ACT=activation, WIDTH=width, GATHER=token_R is not None, STORE_H=save_h,
        BIAS=b1_EH is not None, TMA=tma, EVEN=D % c.bk == 0,
        VEC=vec, BM=c.bm, BN=c.bn, BK=c.bk, GROUP=c.group,
        SPLIT=c.split, num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return h_RH, a_RN
