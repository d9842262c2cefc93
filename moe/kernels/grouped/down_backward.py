"""Backward of down-projection and activation, in one pass over dO, in Triton.

    dA  = gathered dO · W2      (not yet multiplied by the gate)
    dH  = activation'(H) · gate · dA
    A'  = gate · activation(H)  (A is recomputed from H; A' feeds the gradient of W2)
    dS  = <dA, A> (+ <dO, b2>)  (the gate's gradient, from the unscaled A)

Taking dS as an inner product over the expert width N means that neither Y nor A is kept (arXiv
2512.14080, kernel "B1"). dS is summed from per-tile partial sums in a fixed order, never by
atomics.

Shape letters: T tokens, R rows (expert order), S slots (token order), E experts, D model width, N
expert width, H columns of H, P parts of <dA, A>.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.activations import (
    act,
    act_and_slope,
    activation_width,
    through_up,
    up_factor,
)
from moe.kernels.common.backend import cdiv, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.row_tiles import RowTiles
from moe.kernels.common.tiles import (
    aligned,
    descriptor,
    grid_size,
    pairs,
    ragged_descriptor,
    source_rows,
    store_rows,
    tma_serves,
    with_unit_stride,
)
from moe.kernels.common.tuning import Config, pick, size_class
from moe.kernels.grouped.configs import candidates
from moe.kernels.grouped.main_loop import in_parts, row_products

# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def backward_part(da, col, tile, args, FORM):
    """dH and A' of a range of columns of dA. Returns its <dA, A> of each row."""
    gate, start, end, units = tile
    h_ptr, h_desc, dh_ptr, dh_desc, stride_h, a_ptr, a_desc, stride_a, H, N = args
    ACT: tl.constexpr = FORM[0]
    WIDTH: tl.constexpr = FORM[1]
    RAGGED: tl.constexpr = FORM[2]
    GATES: tl.constexpr = FORM[3]
    WANT_DH: tl.constexpr = FORM[4]
    WANT_A: tl.constexpr = FORM[5]
    TMA: tl.constexpr = FORM[6]
    BM: tl.constexpr = da.shape[0]
    BN: tl.constexpr = da.shape[1]
    if TMA:
        h = h_desc.load([start, col * WIDTH])
    else:
        rows = start + tl.arange(0, BM)
        cols = col * WIDTH + tl.arange(0, BN * WIDTH)
        at = rows.to(tl.int64)[:, None] * stride_h + cols[None, :]
        h = tl.load(h_ptr + at, mask=(rows < end)[:, None] & (cols < H)[None, :], other=0.0)
    h = h.to(tl.float32)
    if WIDTH == 2:
        x, up = pairs(h)
        f, slope = act_and_slope(x, ACT)
        factor = up_factor(up, ACT)
        a = f * factor
    else:
        a, slope = act_and_slope(h, ACT)
    # Pairing A with dA keeps both in the accumulator's layout. Left alone, the compiler reads H in
    # two layouts and computes the activation twice.
    da, a = tl.join(da, a).split()
    if RAGGED:  # what lies beyond the expert's width was never written: it may be NaN
        inside = (col + tl.arange(0, BN) < units)[None, :]
        dot = tl.sum(tl.where(inside, da * a, 0.0), axis=1)
    else:
        dot = tl.sum(da * a, axis=1)
    if GATES:
        da *= gate[:, None]
    if WANT_DH:
        if WIDTH == 2:
            d_gate = da * factor * slope
            dh = tl.join(d_gate, through_up(da * f, up, ACT)).reshape(BM, BN * 2)
        else:
            dh = da * slope
        dh = dh.to(h_ptr.dtype.element_ty)
        store_rows(dh_ptr, dh_desc, dh, start, end, col * WIDTH, H, stride_h, BM, BN * WIDTH, TMA)
    if WANT_A:
        if GATES:
            a *= gate[:, None]
        a = a.to(h_ptr.dtype.element_ty)
        store_rows(a_ptr, a_desc, a, start, end, col, N, stride_a, BM, BN, TMA)
    return dot


@triton.jit
def backward_finish(da, gate, e, start, end, col, width, args, FORM, SPLIT: tl.constexpr):
    """Epilogue of dA = dO · W2: dH and A' of a tile, and with WANT_DOT the gates' gradient."""
    to, dot_ptr, R = args
    WANT_DOT: tl.constexpr = FORM[7]
    dot = in_parts(da, col, (gate, start, end, width), to, FORM, backward_part, SPLIT)
    if WANT_DOT:
        BM: tl.constexpr = da.shape[0]
        BN: tl.constexpr = da.shape[1]
        rows = start + tl.arange(0, BM)
        tl.store(dot_ptr + (col // BN).to(tl.int64) * R + rows, dot, mask=rows < end)


_SIZES = [  # see `up_forward`
    "R", "D", "H", "N", "stride_do", "stride_we", "stride_wd", "stride_wn", "stride_h", "stride_a",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def _down_backward_kernel(
    do_ptr, do_desc, w2_ptr, w2_desc, h_ptr, h_desc, gates_ptr, dh_ptr, dh_desc, a_ptr, a_desc,
    dot_ptr, token_ptr, slot_ptr, expert_ptr, start_ptr, end_ptr, count_ptr,
    R, D, H, N, stride_do, stride_we, stride_wd, stride_wn, stride_h, stride_a,
    ACT: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr, GATES: tl.constexpr,
    SLOTS: tl.constexpr, TRANSPOSED: tl.constexpr, WANT_DH: tl.constexpr, WANT_A: tl.constexpr,
    WANT_DOT: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, VEC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    to = (h_ptr, h_desc, dh_ptr, dh_desc, stride_h, a_ptr, a_desc, stride_a, H, N)
    row_products(
        (do_ptr, do_desc, stride_do, token_ptr),
        (w2_ptr, w2_desc, stride_we, stride_wd, stride_wn),
        (expert_ptr, start_ptr, end_ptr, count_ptr),
        (gates_ptr, slot_ptr), D, N, (to, dot_ptr, R),
        (ACT, WIDTH, False, GATES, WANT_DH, WANT_A, TMA, WANT_DOT), backward_finish, SPLIT,
        GATHER=GATHER, TRANSPOSED=TRANSPOSED, GATES=GATES, SLOTS=SLOTS, TMA=TMA, EVEN=EVEN,
        VEC=VEC, BM=BM, BN=BN, BK=BK, GROUP=GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["R", "part"])
def _bias_dot_kernel(
    do_ptr, b2_ptr, dot_ptr, token_ptr, tile_expert_ptr, tile_start_ptr, tile_end_ptr, R, D,
    stride_do, part, GATHER: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dot[part, r] = <dO of row r, b2[e(r)]>: what the bias adds to the gate's gradient."""
    e = tl.load(tile_expert_ptr + tl.program_id(0))
    if e < 0:
        return
    start = tl.load(tile_start_ptr + tl.program_id(0))
    end = tl.load(tile_end_ptr + tl.program_id(0))
    do_at = source_rows(token_ptr, start, end, BM, GATHER).to(tl.int64) * stride_do
    dot = tl.zeros((BM,), dtype=tl.float32)
    for k in tl.range(0, D, BK):
        cols = k + tl.arange(0, BK)
        some = cols < D
        do = tl.load(do_ptr + do_at[:, None] + cols[None, :], mask=some[None, :], other=0.0)
        b2 = tl.load(b2_ptr + e.to(tl.int64) * D + cols, mask=some, other=0.0)
        dot += tl.sum(do.to(tl.float32) * b2.to(tl.float32)[None, :], axis=1)
    rows = start + tl.arange(0, BM)
    tl.store(dot_ptr + part.to(tl.int64) * R + rows, dot, mask=rows < end)


@triton.jit(do_not_specialize=["R", "S", "parts"])
def _gate_gradient_kernel(
    dot_ptr, row_ptr, dgate_ptr, used_ptr, R, S, parts, BY_SLOT: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """Sums the parts of <dA, A> in order and moves them from rows to slots; 0 where no row is."""
    slots = tl.program_id(0) * BS + tl.arange(0, BS)
    inside = slots < S
    if BY_SLOT:
        rows = tl.load(row_ptr + slots, mask=inside, other=-1)
        some = rows >= 0
    else:
        rows = slots
        some = inside & (rows < tl.load(used_ptr))
    total = tl.zeros((BS,), dtype=tl.float32)
    at = dot_ptr + rows
    for _ in tl.range(0, parts):
        total += tl.load(at, mask=some, other=0.0)
        at += R  # a step of the pointer, so no product of R and parts can overflow
    tl.store(dgate_ptr + slots, total.to(dgate_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_activation_kernel(
    h_ptr, gates_ptr, slot_ptr, a_ptr, used_ptr, H, N,
    ACT: tl.constexpr, WIDTH: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A' = gate · activation(H): all that the gradient of W2 alone needs."""
    used = tl.load(used_ptr)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    some = rows < used
    cols = tl.program_id(1) * BN * WIDTH + tl.arange(0, BN * WIDTH)
    at = rows.to(tl.int64)[:, None] * H + cols[None, :]
    h = tl.load(h_ptr + at, mask=some[:, None] & (cols < H)[None, :], other=0.0).to(tl.float32)
    if WIDTH == 2:
        gate_columns, up = pairs(h)
        a = act(gate_columns, ACT) * up_factor(up, ACT)
    else:
        a = act(h, ACT)
    if GATES:
        slots = rows
        if SLOTS:
            slots = tl.load(slot_ptr + rows, mask=some, other=0)
        a *= tl.load(gates_ptr + slots, mask=some, other=0.0).to(tl.float32)[:, None]
    out_cols = tl.program_id(1) * BN + tl.arange(0, BN)
    out_at = rows.to(tl.int64)[:, None] * N + out_cols[None, :]
    a = a.to(a_ptr.dtype.element_ty)
    tl.store(a_ptr + out_at, a, mask=some[:, None] & (out_cols < N)[None, :])


# ---------------------------------------------------------------------------------------- launchers


def sum_parts(dot_PR: Tensor, row_S: Tensor | None, dgate_S: Tensor, used: Tensor) -> None:
    """dgate_S from the parts of <dA, A>; `used` [1] counts the real rows."""
    S = dgate_S.shape[0]
    if S:
        launch(
            _gate_gradient_kernel, (cdiv(S, 1024),),
            dot_PR, row_S, dgate_S, used, dot_PR.shape[1], S, dot_PR.shape[0],
            BY_SLOT=row_S is not None, BS=1024,
        )  # fmt: skip


def scaled_activation(
    h_RH: Tensor,
    gates_S: Tensor | None,
    slot_R: Tensor | None,
    offsets_E1: Tensor,
    activation: str,
) -> Tensor:
    """A' alone, without dO: all that the gradient of W2 needs."""
    R, H = h_RH.shape
    width = activation_width(activation)
    a_RN = h_RH.new_empty(R, H // width)
    if R:
        launch(_scaled_activation_kernel, (cdiv(R, 16), cdiv(H // width, 128)),
            h_RH, None if gates_S is None else gates_S.contiguous(), slot_R, a_RN,
            offsets_E1[offsets_E1.shape[0] - 1 :], H, H // width,
            ACT=activation, WIDTH=width, GATES=gates_S is not None, SLOTS=slot_R is not None,
            BM=16, BN=128,
        )  # fmt: skip
    return a_RN


def bias_dot(
    do_TD: Tensor, b2_ED: Tensor, token_R: Tensor | None, tiles: RowTiles, dot_PR: Tensor
) -> None:
    """The last of the parts: <dO, b2> of each row."""
    do_TD = with_unit_stride(do_TD)
    parts, R = dot_PR.shape
    launch(_bias_dot_kernel, (tiles.expert_B.shape[0],),
        do_TD, b2_ED.contiguous(), dot_PR, token_R, *tiles[:3],
        R, do_TD.shape[1], do_TD.stride(0), parts - 1,
        GATHER=token_R is not None, BM=tiles.rows, BK=64,
    )  # fmt: skip


class RowGradients(NamedTuple):
    """What the kernel writes, rows of any stride; None for what is not wanted."""

    dh_RH: Tensor | None
    a_RN: Tensor | None
    dot_PR: Tensor | None  # float32; parts of <dA, A> by ranges of columns


def down_backward_triton(
    do_TD: Tensor,
    w2_EDN: Tensor,
    b2_ED: Tensor | None,
    h_RH: Tensor,
    gates_S: Tensor | None,
    token_R: Tensor | None,
    slot_R: Tensor | None,
    activation: str,
    wanted: tuple[bool, bool, bool],
    tiles: RowTiles,
    config: Config | None = None,
    out: RowGradients | None = None,
) -> RowGradients:
    """Launches the kernel; see `moe.kernels.products.down_backward`, of which `sum_parts` makes the
    last result.

    Args:
        wanted: dH, A', <dA, A>.
        out: where to write; only rows of `tiles` are touched. Its `dot_PR` may have more parts than
            this call fills.
    """
    _, D, N = w2_EDN.shape
    R, H = h_RH.shape
    width = activation_width(activation)
    c = config or pick(
        "down_backward", (h_RH.dtype, tiles.rows, size_class(R), D, H, activation),
        candidates("down_backward", h_RH.dtype, tiles.rows),
        lambda c: down_backward_triton(
            do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, activation, wanted, tiles, c
        ),
        h_RH.device,
    )  # fmt: skip
    want_dh, want_a, want_dot = wanted
    parts = cdiv(N, c.bn)
    if out is None:
        dot_shape = (parts + (b2_ED is not None), R)
        out = RowGradients(
            torch.empty_like(h_RH) if want_dh else None,
            h_RH.new_empty(R, N) if want_a else None,
            h_RH.new_empty(dot_shape, dtype=torch.float32) if want_dot else None,
        )
    dh_RH, a_RN, dot_PR = out
    if R == 0:
        return out
    do_TD = with_unit_stride(do_TD)
    gates_S = None if gates_S is None else gates_S.contiguous()
    transposed = w2_EDN.stride(1) == 1 and w2_EDN.stride(2) != 1
    stored = w2_EDN.transpose(1, 2) if transposed else w2_EDN
    tma = tma_serves(do_TD, stored, h_RH) and (a_RN is None or aligned(a_RN))
    vec = 16 // h_RH.element_size() if tma else 1
    do_desc = w_desc = h_desc = dh_desc = a_desc = None
    cols = c.bn // c.split
    if tma:
        w_desc = descriptor(stored, [1, c.bn, c.bk] if transposed else [1, c.bk, c.bn])
        h_desc = descriptor(h_RH, [c.bm, cols * width])
        if want_dh:
            dh_desc = ragged_descriptor(dh_RH, [c.bm, cols * width])
        if want_a:
            a_desc = ragged_descriptor(a_RN, [c.bm, cols])
        if token_R is None:
            do_desc = descriptor(do_TD, [c.bm, c.bk])
    grid = grid_size(h_RH.device, c, tiles.expert_B.shape[0] * parts)
    launch(_down_backward_kernel, (grid,),
        do_TD, do_desc, w2_EDN, w_desc, h_RH, h_desc, gates_S, dh_RH, dh_desc, a_RN, a_desc, dot_PR,
        token_R, slot_R, *tiles[:4],
        R, D, H, N, do_TD.stride(0) // vec, *w2_EDN.stride(), h_RH.stride(0),
        N if a_RN is None else a_RN.stride(0),
        ACT=activation, WIDTH=width, GATHER=token_R is not None, GATES=gates_S is not None,
        SLOTS=slot_R is not None, TRANSPOSED=transposed, WANT_DH=want_dh, WANT_A=want_a,
        WANT_DOT=want_dot, TMA=tma, EVEN=D % c.bk == 0, VEC=vec, BM=c.bm, BN=c.bn, BK=c.bk,
        GROUP=c.group, SPLIT=c.split, num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    if want_dot and b2_ED is not None:
        bias_dot(do_TD, b2_ED, token_R, tiles, dot_PR)
    return out
