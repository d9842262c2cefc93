"""Backward of down-projection and SwiGLU on Hopper: dH, A' and the parts of dS in one kernel.

The product dA = dO · W2 is that of `rows`, gathered dO included. Its finished tile is held as bf16
pairs; under each step of the next tile one range of its columns is finished: the same columns of H
come by TMA into a small ring, dH overwrites them there and leaves by TMA, A' beside it. The sums
<dA, A> of a tile's rows are stored once per tile and added up in a fixed order afterwards.

Shape letters: T tokens, R rows (expert order), S slots (token order), E experts, D model width, N
expert width, H columns of H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels._tiles import RowTiles
from moe.kernels._triton import launch, triton
from moe.kernels._tuning import size_class
from moe.kernels.down_backward import sum_parts
from moe.kernels.hopper._configs import Config, addressable, pick_config, programs
from moe.kernels.hopper._descriptors import plain, ragged
from moe.kernels.hopper._device import (
    FAR,
    fence_async_shared,
    gl,
    gluon,
    init_ring,
    mbarrier,
    mma_layout,
    next_stage,
    nvmma,
    pack_columns,
    pack_pairs,
    sigmoid,
    stack,
    tile_at,
    tma,
    unpack_pair,
    warpgroup_mma_wait,
)
from moe.kernels.hopper.rows import multiply, produce_rows

# ------------------------------------------------------------------------------------------- kernel


@gluon.jit
def _load_h(
    h_desc, h_bufs, h_full, start, col, PART: gl.constexpr, COLS: gl.constexpr, BM: gl.constexpr,
    H_BUFS: gl.constexpr,
):  # fmt: skip
    """Asks for the columns of H that belong to a range of columns of dA."""
    slot: gl.constexpr = PART % H_BUFS
    filled = h_full.index(slot)
    mbarrier.expect(filled, BM * COLS * 4)
    column = (col + PART * COLS) * 2
    tma.async_copy_global_to_shared(h_desc, [start, column], filled, h_bufs.index(slot))


@gluon.jit
def _swiglu_backward(da, pair):
    """(dgate, dup, A, dA · A) of columns of dA and their (gate, up) pairs."""
    x, up = unpack_pair(pair)
    s = sigmoid(x)
    f = x * s
    a = f * up
    return da * up * (s + f * (1.0 - s)), da * f, a, da * a


@gluon.jit
def _finish_part(
    part, gate, dot, h_desc, dh_desc, a_desc, h_bufs, h_full, a_smem, start, end, col,
    PART: gl.constexpr, PARTS: gl.constexpr, GATES: gl.constexpr, BM: gl.constexpr,
    COLS: gl.constexpr, H_BUFS: gl.constexpr,
):  # fmt: skip
    """Stores dH and A' of one range of columns; returns `dot` with its share of <dA, A>."""
    slot: gl.constexpr = PART % H_BUFS
    words: gl.constexpr = [BM, COLS]
    half: gl.constexpr = [BM, COLS // 2]
    tma.store_wait(pendings=0)
    if PART + H_BUFS - 1 < PARTS:
        _load_h(h_desc, h_bufs, h_full, start, col, PART + H_BUFS - 1, COLS, BM, H_BUFS)
    mbarrier.wait(h_full.index(slot), (PART // H_BUFS) & 1)
    h_smem = h_bufs.index(slot)._reinterpret(gl.int32, words, nvmma(words, gl.int32))
    h = h_smem.load(mma_layout(COLS, gl.num_warps()))
    even, odd = h.reshape(BM, COLS // 2, 2).split()
    layout: gl.constexpr = even.type.layout
    da_even, da_odd = unpack_pair(gl.convert_layout(part, layout))
    dgate_even, dup_even, a_even, dot_even = _swiglu_backward(da_even, even)
    dgate_odd, dup_odd, a_odd, dot_odd = _swiglu_backward(da_odd, odd)
    sums = gl.sum(dot_even + dot_odd, axis=1)
    dot += gl.convert_layout(sums, dot.type.layout)
    if GATES:
        g = gl.convert_layout(gate, gl.SliceLayout(1, layout))[:, None]
        dgate_even *= g
        dup_even *= g
        a_even *= g
        dgate_odd *= g
        dup_odd *= g
        a_odd *= g
    dh = gl.join(pack_pairs(dgate_even, dup_even), pack_pairs(dgate_odd, dup_odd))
    h_smem.store(dh.reshape(BM, COLS))
    a_smem._reinterpret(gl.int32, half, nvmma(half, gl.int32)).store(pack_pairs(a_even, a_odd))
    fence_async_shared()
    bound = FAR - (end - start)
    column = col + PART * COLS
    dh_smem = h_bufs.index(slot)._reinterpret(
        gl.bfloat16, [1, 1, BM, 2 * COLS], nvmma([1, 1, BM, 2 * COLS])
    )
    tma.async_copy_shared_to_global(dh_desc, [FAR, end, bound, column * 2], dh_smem)
    tma.async_copy_shared_to_global(a_desc, [FAR, end, bound, column], a_smem)
    return dot


@gluon.jit
def _store_dot(dot, dot_ptr, R, start, end, col, BM: gl.constexpr, BN: gl.constexpr):
    rows = start + gl.arange(0, BM, layout=dot.type.layout)
    gl.store(dot_ptr + (col // BN).to(gl.int64) * R + rows, dot, mask=rows < end)


@gluon.jit
def _consume(
    h_desc, dh_desc, a_desc, gates_ptr, slot_ptr, dot_ptr, start_ptr, end_ptr, R, row_tiles,
    col_tiles, steps, do_bufs, w_bufs, full, empty, h_bufs, h_full, a_smem,
    GATHER: gl.constexpr, GATES: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    GROUP: gl.constexpr, H_BUFS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = mma_layout(BN, gl.num_warps())
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    COLS: gl.constexpr = BN // PARTS
    acc = gl.zeros([BM, BN], gl.float32, layout)
    held = pack_columns(acc, PARTS)
    held_gate = gl.zeros([BM], gl.float32, by_row)
    held_start = 0  # nothing is held yet: no rows
    held_end = 0
    held_col = 0
    for i in gl.static_range(H_BUFS - 1):
        _load_h(h_desc, h_bufs, h_full, held_start, held_col, i, COLS, BM, H_BUFS)
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row_tile, col_tile = tile_at(t, row_tiles, col_tiles, GROUP)
        start = gl.load(start_ptr + row_tile)
        end = gl.load(end_ptr + row_tile)
        col = col_tile * BN
        dot = gl.zeros([BM], gl.float32, by_row)
        before = stage
        for i in gl.static_range(PARTS):
            acc = multiply(acc, do_bufs, w_bufs, full, stage, phase, i > 0, GATHER, False, BN, BK)
            if i > 0:
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index(before), count=1)
            dot = _finish_part(
                held[i], held_gate, dot, h_desc, dh_desc, a_desc, h_bufs, h_full, a_smem,
                held_start, held_end, held_col, i, PARTS, GATES, BM, COLS, H_BUFS,
            )  # fmt: skip
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        _store_dot(dot, dot_ptr, R, held_start, held_end, held_col, BM, BN)
        for i in gl.static_range(H_BUFS - 1):
            _load_h(h_desc, h_bufs, h_full, start, col, i, COLS, BM, H_BUFS)
        if GATES:
            rows = gl.minimum(start + gl.arange(0, BM, layout=by_row), end - 1)
            if SLOTS:
                rows = gl.load(slot_ptr + rows)
            held_gate = gl.load(gates_ptr + rows).to(gl.float32)
        for _ in range(PARTS, steps):
            acc = multiply(acc, do_bufs, w_bufs, full, stage, phase, True, GATHER, False, BN, BK)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        held = pack_columns(acc, PARTS)
        held_start = start
        held_end = end
        held_col = col
    dot = gl.zeros([BM], gl.float32, by_row)
    for i in gl.static_range(PARTS):
        dot = _finish_part(
            held[i], held_gate, dot, h_desc, dh_desc, a_desc, h_bufs, h_full, a_smem,
            held_start, held_end, held_col, i, PARTS, GATES, BM, COLS, H_BUFS,
        )  # fmt: skip
    _store_dot(dot, dot_ptr, R, held_start, held_end, held_col, BM, BN)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["R", "vectors", "row_vectors", "steps", "col_tiles"])
def _down_backward_kernel(
    do_desc, do_ptr, token_ptr, w_desc, h_desc, dh_desc, a_desc, gates_ptr, slot_ptr, dot_ptr,
    expert_ptr, start_ptr, end_ptr, count_ptr, R, vectors, row_vectors, steps, col_tiles,
    GATHER: gl.constexpr, EVEN: gl.constexpr, GATES: gl.constexpr, SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, GROUP: gl.constexpr, H_BUFS: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    gl.static_assert(PARTS % (2 * H_BUFS) == 0)  # else a buffer's phase differs from tile to tile
    COLS: gl.constexpr = BN // PARTS
    W_BLOCK: gl.constexpr = [1, BK, BN]
    A_BLOCK: gl.constexpr = [1, 1, BM, COLS]
    H_BLOCK: gl.constexpr = [BM, 2 * COLS]
    do_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], nvmma([BM, BK]))
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(STAGES, W_BLOCK), nvmma(W_BLOCK))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    init_ring(full, empty, STAGES, PRODUCER_WARPS * 32 if GATHER else 0)
    h_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(H_BUFS, H_BLOCK), nvmma(H_BLOCK))
    h_full = gl.allocate_shared_memory(gl.int64, [H_BUFS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(H_BUFS):
        mbarrier.init(h_full.index(i), count=1)
    a_smem = gl.allocate_shared_memory(gl.bfloat16, A_BLOCK, nvmma(A_BLOCK))
    row_tiles = gl.load(count_ptr)
    gl.warp_specialize(
        [
            (_consume, (
                h_desc, dh_desc, a_desc, gates_ptr, slot_ptr, dot_ptr, start_ptr, end_ptr, R,
                row_tiles, col_tiles, steps, do_bufs, w_bufs, full, empty, h_bufs, h_full, a_smem,
                GATHER, GATES, SLOTS, BM, BN, BK, STAGES, PARTS, GROUP, H_BUFS,
            )),
            (produce_rows, (
                do_desc, do_ptr, token_ptr, w_desc, expert_ptr, start_ptr, end_ptr, row_tiles,
                col_tiles, steps, vectors, row_vectors, do_bufs, w_bufs, full, empty,
                GATHER, EVEN, False, BM, BN, BK, STAGES, GROUP,
            )),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


# ----------------------------------------------------------------------------------------- launcher


def down_backward_hopper(
    do_TD: Tensor,
    w2_EDN: Tensor,
    h_RH: Tensor,
    gates_S: Tensor | None,
    token_R: Tensor | None,
    slot_R: Tensor | None,
    row_S: Tensor | None,
    offsets_E1: Tensor,
    want_dgate: bool,
    tiles: RowTiles,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dH, A', dS) of `down_backward`, SwiGLU, no bias; dS is None if not wanted."""
    _, D, N = w2_EDN.shape
    R = h_RH.shape[0]
    dh_RH = torch.empty_like(h_RH)
    a_RN = h_RH.new_empty(R, N)
    dgate_S = torch.empty_like(gates_S) if want_dgate else None
    if R == 0:
        return dh_RH, a_RN, None if dgate_S is None else dgate_S.zero_()
    c = config or pick_config(
        "down_backward", (size_class(R), D, N),
        lambda c: down_backward_hopper(
            do_TD, w2_EDN, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, want_dgate, tiles, c
        ),
        h_RH.device, gather=token_R is not None,
    )  # fmt: skip
    do_TD, w2_EDN = addressable(do_TD), addressable(w2_EDN)
    gates_S = None if gates_S is None else gates_S.contiguous()
    gather = token_R is not None
    cols = c.bn // c.parts
    steps = max(triton.cdiv(D, c.bk), c.parts)
    col_tiles = triton.cdiv(N, c.bn)
    dot = torch.empty(col_tiles, R, dtype=torch.float32, device=h_RH.device)
    grid = programs(h_RH.device, tiles.expert_B.shape[0] * col_tiles)
    launch(
        _down_backward_kernel, (grid,),
        None if gather else plain(do_TD, [c.bm, c.bk]), do_TD if gather else None, token_R,
        plain(w2_EDN, [1, c.bk, c.bn]), plain(h_RH, [c.bm, 2 * cols]),
        ragged(dh_RH, [c.bm, 2 * cols]), ragged(a_RN, [c.bm, cols]), gates_S, slot_R, dot,
        tiles.expert_B, tiles.start_B, tiles.end_B, tiles.count,
        R, D // 8, do_TD.stride(0) // 8, steps, col_tiles,
        GATHER=gather, EVEN=not gather or steps * c.bk == D, GATES=gates_S is not None,
        SLOTS=slot_R is not None, BM=c.bm, BN=c.bn, BK=c.bk, STAGES=c.stages, PARTS=c.parts,
        GROUP=c.group, H_BUFS=2, PRODUCER_WARPS=4 if gather else 1,
        PRODUCER_REGISTERS=40 if gather else 24, num_warps=8,
    )  # fmt: skip
    if dgate_S is not None:
        sum_parts(dot, row_S, dgate_S, offsets_E1[-1:])
    return dh_RH, a_RN, dgate_S
