"""Backward of down-projection and activation, in one pass over dO.

    dA  = gathered dO · W2                        (not yet multiplied by the gate)
    dH  = activation'(H) · gate · dA
    A'  = gate · activation(H)                    (A is recomputed from H; A' feeds the gradient of
    W2) dS  = <dA, A> (+ <dO, b2>)                    (the gate's gradient, from the unscaled A)

Taking dS as an inner product over the expert width N means that neither Y nor A is kept (arXiv
2512.14080, kernel "B1"). dS is summed from per-tile partial sums in a fixed order, never by
atomics.

Shape letters: T tokens, R rows (expert order), S slots (token order), E experts, D model width, N
expert width, H columns of H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels import hopper
from moe.kernels.common import tiles as _tiles
from moe.kernels.common.activations import (
    act,
    act_and_slope,
    activation_backward_ref,
    activation_ref,
    activation_width,
)
from moe.kernels.common.backend import cdiv, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.ops import define_op
from moe.kernels.common.reference import (
    arithmetic_dtype,
    expert_of_rows,
    gather_rows_ref,
    grouped_rows_ref,
    used_rows,
)
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


def _to_slots(value_R: Tensor, row_S: Tensor | None) -> Tensor:
    """Values by row → values by slot; 0 for a slot without row."""
    if row_S is None:
        return value_R
    if value_R.shape[0] == 0:
        return value_R.new_zeros(row_S.shape[0])
    return value_R.index_select(0, row_S.clamp_min(0)).masked_fill_(row_S < 0, 0.0)


def down_backward_ref(
    do_TD: Tensor,
    w2_EDN: Tensor,
    b2_ED: Tensor | None,
    h_RH: Tensor,
    gates_S: Tensor | None,
    token_R: Tensor | None,
    slot_R: Tensor | None,
    row_S: Tensor | None,
    offsets_E1: Tensor,
    activation: str,
    want_dh: bool,
    want_a: bool,
    want_dgate: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Plain torch version of `down_backward`, any device and dtype."""
    R = h_RH.shape[0]
    wide = arithmetic_dtype(h_RH.dtype)
    gate_R1 = None
    if gates_S is not None:
        gate_R = gates_S[:R] if slot_R is None or R == 0 else gates_S.index_select(0, slot_R)
        gate_R1 = gate_R[:, None].to(wide)
    if not (want_dh or want_dgate):
        a = activation_ref(h_RH, activation).to(wide)
        return None, (a if gate_R1 is None else a.mul_(gate_R1)).to(h_RH.dtype), None
    do_RD = gather_rows_ref(do_TD, token_R)
    da_RN = grouped_rows_ref(do_RD, w2_EDN, offsets_E1).to(wide)
    dh, a = activation_backward_ref(h_RH, da_RN, activation)
    dgate_S = None
    if want_dgate:
        assert gates_S is not None
        dgate_R = da_RN.mul_(a).sum(1)
        if b2_ED is not None:
            b2_RD = b2_ED.to(wide).index_select(0, expert_of_rows(offsets_E1, R))
            dgate_R += b2_RD.mul_(do_RD).sum(1)
        dgate_R.masked_fill_(~used_rows(offsets_E1, R), 0.0)
        dgate_S = _to_slots(dgate_R, row_S).to(gates_S.dtype)
    if gate_R1 is not None:
        dh, a = dh.mul_(gate_R1), a.mul_(gate_R1)
    return (
        dh.to(h_RH.dtype) if want_dh else None,
        a.to(h_RH.dtype) if want_a else None,
        dgate_S,
    )


# ------------------------------------------------------------------------------------------ kernels


# Not specialised on divisibility, so that fewer variants are compiled: see `up_forward`.
_SIZES = ["R", "D", "H", "N", "stride_do", "stride_we", "stride_wd", "stride_wn"]


@triton.jit
def _finish(
    da, gate, h_ptr, h_desc, dh_ptr, dh_desc, a_ptr, a_desc, start, end, col, H, N,
    ACT: tl.constexpr, WIDTH: tl.constexpr, GATES: tl.constexpr, WANT_DH: tl.constexpr,
    WANT_A: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Epilogue of BN columns of dA from `col` on, in SPLIT parts. Returns <dA, A> of each row."""
    if SPLIT > 1:
        left, right = halves(da)
        dot_left = _finish(
            left, gate, h_ptr, h_desc, dh_ptr, dh_desc, a_ptr, a_desc, start, end, col, H, N,
            ACT, WIDTH, GATES, WANT_DH, WANT_A, TMA, BM, BN // 2, SPLIT // 2,
        )  # fmt: skip
        dot_right = _finish(
            right, gate, h_ptr, h_desc, dh_ptr, dh_desc, a_ptr, a_desc, start, end, col + BN // 2,
            H, N, ACT, WIDTH, GATES, WANT_DH, WANT_A, TMA, BM, BN // 2, SPLIT // 2,
        )  # fmt: skip
        return dot_left + dot_right
    else:
        if TMA:
            h = h_desc.load([start, col * WIDTH])
        else:
            rows = start + tl.arange(0, BM)
            cols = col * WIDTH + tl.arange(0, BN * WIDTH)
            at = rows.to(tl.int64)[:, None] * H + cols[None, :]
            h = tl.load(h_ptr + at, mask=(rows < end)[:, None] & (cols < H)[None, :], other=0.0)
        h = h.to(tl.float32)
        if WIDTH == 2:
            x, up = pairs(h)
            f, slope = act_and_slope(x, ACT)
            a = f * up
        else:
            a, slope = act_and_slope(h, ACT)
        # Pairing A with dA keeps both in the accumulator's layout. Left alone, the compiler reads H
        # in two layouts and computes the activation twice.
        da, a = tl.join(da, a).split()
        dot = tl.sum(da * a, axis=1)
        if GATES:
            da *= gate[:, None]
        if WANT_DH:
            if WIDTH == 2:
                dh = tl.join(da * up * slope, da * f).reshape(BM, BN * 2)
            else:
                dh = da * slope
            dh = dh.to(h_ptr.dtype.element_ty)
            store_rows(dh_ptr, dh_desc, dh, start, end, col * WIDTH, H, H, BM, BN * WIDTH, TMA)
        if WANT_A:
            if GATES:
                a *= gate[:, None]
            a = a.to(h_ptr.dtype.element_ty)
            store_rows(a_ptr, a_desc, a, start, end, col, N, N, BM, BN, TMA)
        return dot


@triton.jit
def _product(
    da, do_ptr, do_desc, do_at, w2_ptr, w2_desc, e, start, k, col, D, N,
    stride_we, stride_wd, stride_wn, GATHER: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    VEC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dA + dO · W2 for inner columns k … k + BK - 1; see `up_forward` for the vectors."""
    if GATHER or not TMA:
        cols = tl.arange(0, BK)
        at = ((do_at + k // VEC) * VEC)[:, None] + cols[None, :]
        if EVEN:
            do = tl.load(do_ptr + at)
        else:
            do = tl.load(do_ptr + at, mask=(k + cols < D)[None, :], other=0.0)
    else:
        do = do_desc.load([start, k])
    w = weight_tile(w2_ptr, w2_desc, e, k, col, D, N, stride_we, stride_wd, stride_wn, BK, BN, TMA)
    return tl.dot(do, w, da, input_precision="ieee")


@triton.jit
def _slots_of(slot_ptr, start, end, BM: tl.constexpr, SLOTS: tl.constexpr):
    """Slot of each row of a tile; rows past its end repeat the last one."""
    rows = tl.maximum(tl.minimum(start + tl.arange(0, BM), end - 1), 0)
    if SLOTS:
        rows = tl.load(slot_ptr + rows)
    return rows


@triton.jit
def _gates_of(gates_ptr, slots, BM: tl.constexpr, GATES: tl.constexpr):
    """Gate of each row; asked for long before it is used, so that nothing waits for it."""
    if GATES:
        return tl.load(gates_ptr + slots).to(tl.float32)
    return tl.zeros((BM,), dtype=tl.float32)


@triton.jit
def _finish_tile(
    da, gate, h_ptr, h_desc, dh_ptr, dh_desc, a_ptr, a_desc, dot_ptr, start, end, col, R, H, N,
    ACT: tl.constexpr, WIDTH: tl.constexpr, GATES: tl.constexpr, WANT_DH: tl.constexpr,
    WANT_A: tl.constexpr, WANT_DOT: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Epilogue of a whole tile: its parts, and its share of <dA, A>."""
    dot = _finish(
        da, gate, h_ptr, h_desc, dh_ptr, dh_desc, a_ptr, a_desc, start, end, col, H, N,
        ACT, WIDTH, GATES, WANT_DH, WANT_A, TMA, BM, BN, SPLIT,
    )  # fmt: skip
    if WANT_DOT:
        rows = start + tl.arange(0, BM)
        tl.store(dot_ptr + (col // BN).to(tl.int64) * R + rows, dot, mask=rows < end)


@triton.jit(do_not_specialize=_SIZES)
def _down_backward_kernel(
    do_ptr, do_desc, w2_ptr, w2_desc, h_ptr, h_desc, gates_ptr, dh_ptr, dh_desc, a_ptr, a_desc,
    dot_ptr, token_ptr, slot_ptr, tile_expert_ptr, tile_start_ptr, tile_end_ptr, tile_count_ptr,
    R, D, H, N, stride_do, stride_we, stride_wd, stride_wn,
    ACT: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr, GATES: tl.constexpr,
    SLOTS: tl.constexpr, WANT_DH: tl.constexpr, WANT_A: tl.constexpr, WANT_DOT: tl.constexpr,
    TMA: tl.constexpr, EVEN: tl.constexpr, VEC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.load(tile_count_ptr)
    col_tiles = tl.cdiv(N, BN)
    count = row_tiles * col_tiles
    first = tl.program_id(0)
    step = tl.num_programs(0)
    next_e, next_start, next_end, next_col = look_up(
        first, count, row_tiles, col_tiles, tile_expert_ptr, tile_start_ptr, tile_end_ptr, GROUP
    )
    next_sources = source_rows(token_ptr, next_start, next_end, BM, GATHER)
    next_slots = _slots_of(slot_ptr, next_start, next_end, BM, SLOTS)
    if FLATTEN:
        e, start, end, col = next_e, next_start, next_end, next_col * BN
        do_at = next_sources.to(tl.int64) * stride_do
        gate = tl.zeros((BM,), dtype=tl.float32)
        da = tl.zeros((BM, BN), dtype=tl.float32)
        t = first - step
        k = tl.cdiv(D, BK) * BK
        products = tl.cdiv(tl.maximum(count - first, 0), step) * tl.cdiv(D, BK)
        for _ in tl.range(0, products, disallow_acc_multi_buffer=True):
            k += BK
            if k >= D:
                k = 0
                t += step
                e, start, end, col = next_e, next_start, next_end, next_col * BN
                do_at = next_sources.to(tl.int64) * stride_do
                gate = _gates_of(gates_ptr, next_slots, BM, GATES)
                next_e, next_start, next_end, next_col = look_up(
                    t + step, count, row_tiles, col_tiles,
                    tile_expert_ptr, tile_start_ptr, tile_end_ptr, GROUP,
                )  # fmt: skip
                next_sources = source_rows(token_ptr, next_start, next_end, BM, GATHER)
                next_slots = _slots_of(slot_ptr, next_start, next_end, BM, SLOTS)
            da = _product(
                da, do_ptr, do_desc, do_at, w2_ptr, w2_desc, e, start, k, col, D, N,
                stride_we, stride_wd, stride_wn, GATHER, TMA, EVEN, VEC, BN, BK,
            )  # fmt: skip
            if k + BK >= D:
                _finish_tile(
                    da, gate, h_ptr, h_desc, dh_ptr, dh_desc, a_ptr, a_desc, dot_ptr,
                    start, end, col, R, H, N,
                    ACT, WIDTH, GATES, WANT_DH, WANT_A, WANT_DOT, TMA, BM, BN, SPLIT,
                )  # fmt: skip
                da = tl.zeros((BM, BN), dtype=tl.float32)
    else:
        for t in tl.range(first, count, step, disallow_acc_multi_buffer=True):
            e, start, end, col = next_e, next_start, next_end, next_col * BN
            do_at = next_sources.to(tl.int64) * stride_do
            gate = _gates_of(gates_ptr, next_slots, BM, GATES)
            next_e, next_start, next_end, next_col = look_up(
                t + step, count, row_tiles, col_tiles,
                tile_expert_ptr, tile_start_ptr, tile_end_ptr, GROUP,
            )  # fmt: skip
            next_sources = source_rows(token_ptr, next_start, next_end, BM, GATHER)
            next_slots = _slots_of(slot_ptr, next_start, next_end, BM, SLOTS)
            da = tl.zeros((BM, BN), dtype=tl.float32)
            for k in tl.range(0, D, BK):
                da = _product(
                    da, do_ptr, do_desc, do_at, w2_ptr, w2_desc, e, start, k, col, D, N,
                    stride_we, stride_wd, stride_wn, GATHER, TMA, EVEN, VEC, BN, BK,
                )  # fmt: skip
            _finish_tile(
                da, gate, h_ptr, h_desc, dh_ptr, dh_desc, a_ptr, a_desc, dot_ptr,
                start, end, col, R, H, N,
                ACT, WIDTH, GATES, WANT_DH, WANT_A, WANT_DOT, TMA, BM, BN, SPLIT,
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
        a = act(gate_columns, ACT) * up
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


# ----------------------------------------------------------------------------------------- launcher


def sum_parts(dot: Tensor, row_S: Tensor | None, dgate_S: Tensor, used: Tensor) -> None:
    """dgate_S from the parts of <dA, A>, dot [parts, R]; `used` [1] counts the real rows."""
    S = dgate_S.shape[0]
    if S:
        launch(
            _gate_gradient_kernel, (cdiv(S, 1024),),
            dot, row_S, dgate_S, used, dot.shape[1], S, dot.shape[0],
            BY_SLOT=row_S is not None, BS=1024,
        )  # fmt: skip


def down_backward_triton(
    do_TD: Tensor,
    w2_EDN: Tensor,
    b2_ED: Tensor | None,
    h_RH: Tensor,
    gates_S: Tensor | None,
    token_R: Tensor | None,
    slot_R: Tensor | None,
    row_S: Tensor | None,
    offsets_E1: Tensor,
    activation: str,
    want_dh: bool,
    want_a: bool,
    want_dgate: bool,
    tiles: RowTiles,
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Launches the kernels; see `down_backward`."""
    E, D, N = w2_EDN.shape
    R, H = h_RH.shape
    width = activation_width(activation)
    dh_RH = torch.empty_like(h_RH) if want_dh else None
    a_RN = h_RH.new_empty(R, N) if want_a else None
    dgate_S = torch.empty_like(gates_S) if want_dgate else None
    if R == 0:
        return dh_RH, a_RN, dgate_S if dgate_S is None else dgate_S.zero_()
    used = offsets_E1[E:]
    gates_S = None if gates_S is None else gates_S.contiguous()
    gate_args = {"GATES": gates_S is not None, "SLOTS": slot_R is not None}
    if not (want_dh or want_dgate):
        launch(_scaled_activation_kernel, (cdiv(R, 16), cdiv(N, 128)),
            h_RH, gates_S, slot_R, a_RN, used, H, N,
            ACT=activation, WIDTH=width, **gate_args, BM=16, BN=128,
        )  # fmt: skip
        return None, a_RN, None

    c = config or _tiles.pick_config(
        "down_backward", h_RH.dtype, tiles.rows, (size_class(R), D, H, activation),
        lambda c: down_backward_triton(
            do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
            want_dh, want_a, want_dgate, tiles, c,
        ),
        h_RH.device,
    )  # fmt: skip
    do_TD = _tiles.with_unit_stride(do_TD)
    tma = _tiles.tma_serves(do_TD, w2_EDN, h_RH)
    do_desc = w_desc = h_desc = dh_desc = a_desc = None
    cols = c.bn // c.split
    if tma and want_a:
        tma = _tiles.aligned(a_RN)
    vec = 16 // h_RH.element_size() if tma else 1
    if tma:
        w_desc = _tiles.descriptor(w2_EDN, [1, c.bk, c.bn])
        h_desc = _tiles.descriptor(h_RH, [c.bm, cols * width])
        if want_dh:
            dh_desc = _tiles.ragged_descriptor(dh_RH, [c.bm, cols * width])
        if want_a:
            a_desc = _tiles.ragged_descriptor(a_RN, [c.bm, cols])
        if token_R is None:
            do_desc = _tiles.descriptor(do_TD, [c.bm, c.bk])
    parts = cdiv(N, c.bn)
    dot = None
    if want_dgate:
        dot = torch.empty(parts + (b2_ED is not None), R, dtype=torch.float32, device=h_RH.device)
    grid = _tiles.grid_size(h_RH.device, c, tiles.expert_B.shape[0] * parts)
    launch(_down_backward_kernel, (grid,),
        do_TD, do_desc, w2_EDN, w_desc, h_RH, h_desc, gates_S, dh_RH, dh_desc, a_RN, a_desc, dot,
        token_R, slot_R, tiles.expert_B, tiles.start_B, tiles.end_B, tiles.count,
        R, D, H, N, do_TD.stride(0) // vec, *w2_EDN.stride(),
        ACT=activation, WIDTH=width, GATHER=token_R is not None, **gate_args, WANT_DH=want_dh,
        WANT_A=want_a, WANT_DOT=want_dgate, TMA=tma, EVEN=D % c.bk == 0,
        VEC=vec, BM=c.bm, BN=c.bn, BK=c.bk, GROUP=c.group,
        SPLIT=c.split, FLATTEN=c.flatten, num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    if want_dgate:
        if b2_ED is not None:
            launch(_bias_dot_kernel, (tiles.expert_B.shape[0],),
                do_TD, b2_ED.contiguous(), dot, token_R, tiles.expert_B, tiles.start_B, tiles.end_B,
                R, D, do_TD.stride(0), parts, GATHER=token_R is not None, BM=tiles.rows, BK=64,
            )  # fmt: skip
        sum_parts(dot, row_S, dgate_S, used)
    return dh_RH, a_RN, dgate_S


# --------------------------------------------------------------------------------------- custom op


def _run(
    do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
    want_dh, want_a, want_dgate, tiles, tile_rows, backend,
):  # fmt: skip
    args = (
        do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
        want_dh, want_a, want_dgate,
    )  # fmt: skip
    if backend == "hopper" and (want_dh or want_dgate):
        from moe.kernels.hopper.down_backward import down_backward_hopper

        D, N = w2_EDN.shape[1:]
        hopper.check_operands(do_TD, w2_EDN, h_RH, activation=activation, bias=b2_ED, D=D, N=N)
        # One kernel makes all three: with some frozen, what is not wanted is dropped.
        tiles = _tiles.unpack(tiles, tile_rows, offsets_E1, h_RH, backend)
        outs = down_backward_hopper(
            do_TD, w2_EDN, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, want_dgate, tiles
        )
        wanted = (want_dh, want_a, want_dgate)
        outs = tuple(out if want else None for out, want in zip(outs, wanted))
    elif backend != "reference":
        tiles = _tiles.unpack(tiles, tile_rows, offsets_E1, h_RH, backend)
        outs = down_backward_triton(*args, tiles)
    else:
        outs = down_backward_ref(*args)
    return tuple(h_RH.new_empty(0) if out is None else out for out in outs)


def _fake(
    do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
    want_dh, want_a, want_dgate, tiles, tile_rows, backend,
):  # fmt: skip
    R, N = h_RH.shape[0], w2_EDN.shape[2]
    return (
        torch.empty_like(h_RH) if want_dh else h_RH.new_empty(0),
        h_RH.new_empty(R, N) if want_a else h_RH.new_empty(0),
        torch.empty_like(gates_S) if want_dgate else h_RH.new_empty(0),
    )


_op = define_op(
    "down_backward(Tensor do_TD, Tensor w2_EDN, Tensor? b2_ED, Tensor h_RH, Tensor? gates_S, "
    "Tensor? token_R, Tensor? slot_R, Tensor? row_S, Tensor offsets_E1, str activation, "
    "bool want_dh, bool want_a, bool want_dgate, Tensor[] tiles, int tile_rows, str backend) "
    "-> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)

# ------------------------------------------------------------------------------------------ public


def down_backward(
    do_TD: Tensor,
    w2_EDN: Tensor,
    b2_ED: Tensor | None,
    h_RH: Tensor,
    gates_S: Tensor | None,
    token_R: Tensor | None,
    slot_R: Tensor | None,
    row_S: Tensor | None,
    offsets_E1: Tensor,
    *,
    activation: str,
    want_dh: bool = True,
    want_a: bool = True,
    want_dgate: bool = True,
    tiles: RowTiles | None = None,
    backend: str = "reference",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dh_RH, a_RN multiplied by the gates, dgate_S); None, and no work, for what is not wanted.

    Args:
        do_TD: gradient of the output; or, with token_R None, of the rows in expert order.
        w2_EDN: weights. b2_ED: bias or None (enters dgate only).
        h_RH: pre-activations as stored by `up_forward`.
        gates_S: weight of each slot; None means 1.
        token_R, slot_R: int32 token and slot of each row; slot_R None: gates are by row.
        row_S: int32 row of each slot, -1 for none; None: dgate is by row.
        offsets_E1: int32 first row of each expert; rows from the last entry on are left undefined
            in dh and a.
        backend: "reference", "triton" or "hopper", already resolved.
    """
    dh, a, dgate = _op(
        do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
        want_dh, want_a, want_dgate, *_tiles.pack(tiles), backend,
    )  # fmt: skip
    return dh if want_dh else None, a if want_a else None, dgate if want_dgate else None
