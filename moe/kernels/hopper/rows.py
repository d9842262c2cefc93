"""Row products on Hopper: out[r] = a[r] · W[e(r)] for rows in expert order.

One kernel serves three operators. `up`: rows of X gathered by cp.async, SwiGLU in the epilogue, H
and A stored. `down`: A · W2ᵀ. `dX`: dH · W1. Design and roles: `_device`.

Shape letters: T tokens, R rows (expert order), E experts, I inner width, O outer width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv
from moe.kernels.common.launch import launch
from moe.kernels.common.reference import down_forward_ref, input_gradient_ref, up_forward_ref
from moe.kernels.common.row_tiles import RowTiles
from moe.kernels.common.tuning import Config, size_class
from moe.kernels.hopper.configs import addressable, pick_right, programs
from moe.kernels.hopper.descriptors import plain, ragged
from moe.kernels.hopper.device import (
    FAR,
    arrive_behind,
    async_copy,
    fence_async_shared,
    gather_layout,
    gl,
    gluon,
    init_ring,
    mbarrier,
    mma_layout,
    next_stage,
    nvmma,
    pack_columns,
    silu,
    stack,
    tile_at,
    tma,
    unpack_pair,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from moe.kernels.hopper.selftest import problem, relative_error

# ----------------------------------------------------------------------------------------- producer


@gluon.jit
def next_tile(
    t, count, row_tiles, col_tiles, token_ptr, expert_ptr, start_ptr, end_ptr,
    GATHER: gl.constexpr, BM: gl.constexpr, GROUP: gl.constexpr, rows_layout: gl.constexpr,
):  # fmt: skip
    """(expert, first row, column tile, token of each row) of tile t; asked for a tile ahead."""
    row_tile, col_tile = tile_at(t, row_tiles, col_tiles, GROUP)
    some = t < count
    e = gl.load(expert_ptr + row_tile, mask=some, other=0)
    start = gl.load(start_ptr + row_tile, mask=some, other=0)
    token = 0
    if GATHER:
        # rows past the end of a tile repeat its last one; the store cuts them off
        end = gl.load(end_ptr + row_tile, mask=some, other=1)
        rows = start + gl.arange(0, BM, layout=rows_layout)
        token = gl.load(token_ptr + gl.minimum(rows, end - 1))
    return e, start, col_tile, token


@gluon.jit
def produce_rows(
    a_desc, a_ptr, token_ptr, w_desc, expert_ptr, start_ptr, end_ptr, row_tiles, col_tiles, steps,
    vectors, row_vectors, a_bufs, w_bufs, full, empty,
    GATHER: gl.constexpr, EVEN: gl.constexpr, TRANSPOSED: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Fills the ring for `steps` products of each tile.

    Widths come in vectors of 8 numbers, so that the compiler sees that all 16 bytes of a copy are
    aligned and lie on one side of the end of a row. Columns of A and W past it are zeros.
    """
    A_BYTES: gl.constexpr = BM * BK * 2
    W_BYTES: gl.constexpr = BN * BK * 2
    layout: gl.constexpr = gather_layout(gl.num_warps())
    stage = 0
    phase = 1
    behind = -1
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    count = row_tiles * col_tiles
    next_e, next_start, next_col, next_token = next_tile(
        gl.program_id(0), count, row_tiles, col_tiles, token_ptr, expert_ptr, start_ptr, end_ptr,
        GATHER, BM, GROUP, by_row,
    )  # fmt: skip
    for t in range(gl.program_id(0), count, gl.num_programs(0)):
        e = next_e
        start = next_start
        col = next_col * BN
        if GATHER:
            cols = gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
            vector = next_token * row_vectors
        next_e, next_start, next_col, next_token = next_tile(
            t + gl.num_programs(0), count, row_tiles, col_tiles, token_ptr, expert_ptr, start_ptr,
            end_ptr, GATHER, BM, GROUP, by_row,
        )  # fmt: skip
        for k in range(steps):
            filled = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(filled, W_BYTES if GATHER else A_BYTES + W_BYTES)
            if TRANSPOSED:
                tma.async_copy_global_to_shared(
                    w_desc, [e, col, k * BK], filled, w_bufs.index(stage)
                )
            else:
                tma.async_copy_global_to_shared(
                    w_desc, [e, k * BK, col], filled, w_bufs.index(stage)
                )
            if GATHER:
                at = a_ptr + vector.to(gl.int64)[:, None] * 8 + cols[None, :]
                vector += BK // 8
                if EVEN:
                    async_copy.async_copy_global_to_shared(a_bufs.index(stage), at)
                else:
                    inside = cols // 8 < vectors - k * (BK // 8)
                    async_copy.async_copy_global_to_shared(
                        a_bufs.index(stage), at, mask=inside[None, :]
                    )
                async_copy.commit_group()
                arrive_behind(full, behind, 1)
                behind = stage
            else:
                tma.async_copy_global_to_shared(
                    a_desc, [start, k * BK], filled, a_bufs.index(stage)
                )
            stage, phase = next_stage(stage, phase, STAGES)
    if GATHER:
        arrive_behind(full, behind, 0)


# ----------------------------------------------------------------------------------------- consumer


@gluon.jit
def multiply(
    acc, a_bufs, w_bufs, full, stage, phase, use_acc,
    TRANSPOSED: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    """Starts one product of the ring; finish it with `warpgroup_mma_wait`."""
    mbarrier.wait(full.index(stage), phase)
    a = a_bufs.index(stage)
    w = w_bufs.index(stage)
    if TRANSPOSED:
        w = w.reshape([BN, BK]).permute((1, 0))
    else:
        w = w.reshape([BK, BN])
    return warpgroup_mma(a, w, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _store_part(
    part, out_desc, act_desc, out_bufs, act_bufs, bound, end, col, PART: gl.constexpr,
    ACT: gl.constexpr, STORE_OUT: gl.constexpr, BM: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """Stores one part of a finished tile: the product and, with ACT, SwiGLU of its pairs."""
    STORES: gl.constexpr = 2 if ACT and STORE_OUT else 1
    out_smem = out_bufs.index(PART % 2)
    act_smem = act_bufs.index(PART % 2)
    if ACT:
        gate, up = unpack_pair(part)
        act = (silu(gate) * up).to(gl.bfloat16)
        act = gl.convert_layout(act, mma_layout(COLS // 2, gl.num_warps()))
    tma.store_wait(pendings=STORES)  # the last part may still be read, from the other buffers
    if STORE_OUT:
        words: gl.constexpr = [BM, COLS // 2]
        out_smem._reinterpret(gl.int32, words, nvmma(words, gl.int32)).store(part)
    if ACT:
        act_smem.reshape([BM, COLS // 2]).store(act)
    fence_async_shared()
    if STORE_OUT:
        tma.async_copy_shared_to_global(out_desc, [FAR, end, bound, col], out_smem)
    if ACT:
        tma.async_copy_shared_to_global(act_desc, [FAR, end, bound, col // 2], act_smem)


@gluon.jit
def _consume(
    out_desc, act_desc, start_ptr, end_ptr, row_tiles, col_tiles, steps,
    a_bufs, w_bufs, full, empty, out_bufs, act_bufs,
    TRANSPOSED: gl.constexpr, ACT: gl.constexpr, STORE_OUT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, DOUBLE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = BN // PARTS
    acc = gl.zeros([BM, BN], gl.float32, mma_layout(BN, gl.num_warps()))
    held = pack_columns(acc, PARTS)
    held_bound = 0 + FAR  # nothing is held yet: every row is out of bounds
    held_end = 0
    held_col = 0
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row_tile, col_tile = tile_at(t, row_tiles, col_tiles, GROUP)
        start = gl.load(start_ptr + row_tile)
        end = gl.load(end_ptr + row_tile)
        before = stage
        also = stage
        for i in gl.static_range(PARTS):
            acc = multiply(acc, a_bufs, w_bufs, full, stage, phase, i > 0, TRANSPOSED, BN, BK)
            if i > 0:
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index(before), count=1)
                if i <= DOUBLE:
                    mbarrier.arrive(empty.index(also), count=1)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
            if i < DOUBLE:
                acc = multiply(acc, a_bufs, w_bufs, full, stage, phase, True, TRANSPOSED, BN, BK)
                also = stage
                stage, phase = next_stage(stage, phase, STAGES)
            _store_part(
                held[i], out_desc, act_desc, out_bufs, act_bufs,
                held_bound, held_end, held_col + i * COLS, i, ACT, STORE_OUT, BM, COLS,
            )  # fmt: skip
        for _ in range(PARTS + DOUBLE, steps):
            acc = multiply(acc, a_bufs, w_bufs, full, stage, phase, True, TRANSPOSED, BN, BK)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        held = pack_columns(acc, PARTS)
        held_bound = FAR - (end - start)
        held_end = end
        held_col = col_tile * BN
    for i in gl.static_range(PARTS):
        _store_part(
            held[i], out_desc, act_desc, out_bufs, act_bufs,
            held_bound, held_end, held_col + i * COLS, i, ACT, STORE_OUT, BM, COLS,
        )  # fmt: skip
    tma.store_wait(pendings=0)


# ------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["vectors", "row_vectors", "steps", "col_tiles"])
def _rows_kernel(
    a_desc, a_ptr, token_ptr, w_desc, out_desc, act_desc,
    expert_ptr, start_ptr, end_ptr, count_ptr, vectors, row_vectors, steps, col_tiles,
    GATHER: gl.constexpr, EVEN: gl.constexpr, TRANSPOSED: gl.constexpr, ACT: gl.constexpr,
    STORE_OUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, DOUBLE: gl.constexpr, GROUP: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = BN // PARTS
    W_BLOCK: gl.constexpr = [1, BN, BK] if TRANSPOSED else [1, BK, BN]
    OUT_BLOCK: gl.constexpr = [1, 1, BM, COLS]
    ACT_BLOCK: gl.constexpr = [1, 1, BM, COLS // 2]
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], nvmma([BM, BK]))
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(STAGES, W_BLOCK), nvmma(W_BLOCK))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    init_ring(full, empty, STAGES, 1 if GATHER else 0)
    out_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(2, OUT_BLOCK), nvmma(OUT_BLOCK))
    act_bufs = out_bufs
    if ACT:
        act_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(2, ACT_BLOCK), nvmma(ACT_BLOCK))
    row_tiles = gl.load(count_ptr)
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, act_desc, start_ptr, end_ptr, row_tiles, col_tiles, steps,
                a_bufs, w_bufs, full, empty, out_bufs, act_bufs,
                TRANSPOSED, ACT, STORE_OUT, BM, BN, BK, STAGES, PARTS, DOUBLE, GROUP,
            )),
            (produce_rows, (
                a_desc, a_ptr, token_ptr, w_desc, expert_ptr, start_ptr, end_ptr, row_tiles,
                col_tiles, steps, vectors, row_vectors, a_bufs, w_bufs, full, empty,
                GATHER, EVEN, TRANSPOSED, BM, BN, BK, STAGES, GROUP,
            )),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- launchers


def _doubles(parts: int, steps: int) -> int:
    """How many of the parts are stored under two products, of `steps`; few values, since each is
    compiled."""
    return next((n for n in (parts - 1, parts // 2) if n <= steps - parts), 0)


def _launch(
    a_RI: Tensor,
    token_R: Tensor | None,
    w: Tensor,
    out_RO: Tensor | None,
    act_RN: Tensor | None,
    tiles: RowTiles,
    c: Config,
    transposed: bool,
) -> None:
    O, I = w.shape[1:] if transposed else (w.shape[2], w.shape[1])
    gather = token_R is not None
    cols = c.bn // c.split
    steps = max(cdiv(I, c.bk), c.split)
    col_tiles = cdiv(O, c.bn)
    w_desc = plain(w, [1, c.bn, c.bk] if transposed else [1, c.bk, c.bn])
    act_desc = None if act_RN is None else ragged(act_RN, [c.bm, cols // 2])
    out_desc = act_desc if out_RO is None else ragged(out_RO, [c.bm, cols])
    grid = programs(a_RI.device, tiles.expert_B.shape[0] * col_tiles)
    launch(
        _rows_kernel, (grid,),
        None if gather else plain(a_RI, [c.bm, c.bk]), a_RI if gather else None, token_R,
        w_desc, out_desc, act_desc,
        tiles.expert_B, tiles.start_B, tiles.end_B, tiles.count,
        I // 8, a_RI.stride(0) // 8, steps, col_tiles,
        GATHER=gather, EVEN=not gather or steps * c.bk == I, TRANSPOSED=transposed,
        ACT=act_RN is not None, STORE_OUT=out_RO is not None,
        BM=c.bm, BN=c.bn, BK=c.bk, STAGES=c.stages, PARTS=c.split, DOUBLE=_doubles(c.split, steps),
        GROUP=c.group,
        PRODUCER_WARPS=4 if gather else 1, PRODUCER_REGISTERS=40 if gather else 24, num_warps=8,
    )  # fmt: skip


def up_forward_hopper(
    x_TD: Tensor,
    w1_EHD: Tensor,
    token_R: Tensor | None,
    save_h: bool,
    tiles: RowTiles,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """H (no rows when it is not saved) and A of `up_forward`, SwiGLU, no bias."""
    _, H, D = w1_EHD.shape
    R = (x_TD if token_R is None else token_R).shape[0]
    h_RH = x_TD.new_empty(R if save_h else 0, H)
    a_RN = x_TD.new_empty(R, H // 2)
    if R == 0:
        return h_RH, a_RN
    gather = token_R is not None
    c = config or pick_right(
        "up", (size_class(R), D, H),
        lambda c: up_forward_hopper(x_TD, w1_EHD, token_R, save_h, tiles, c),
        lambda c: _up_error(c, gather, x_TD.device), x_TD.device, gather=gather,
    )  # fmt: skip
    x_TD, w1_EHD = addressable(x_TD), addressable(w1_EHD)
    _launch(x_TD, token_R, w1_EHD, h_RH if save_h else None, a_RN, tiles, c, True)
    return h_RH, a_RN


def rows_hopper(
    a_RI: Tensor,
    w: Tensor,
    tiles: RowTiles,
    *,
    transposed: bool,
    config: Config | None = None,
) -> Tensor:
    """out_RO; w in memory is (E, O, I) when `transposed`, else (E, I, O)."""
    R, I = a_RI.shape
    O = w.shape[1 if transposed else 2]
    out_RO = a_RI.new_empty(R, O)
    if R == 0:
        return out_RO
    c = config or pick_right(
        "rows", (size_class(R), I, O, transposed),
        lambda c: rows_hopper(a_RI, w, tiles, transposed=transposed, config=c),
        lambda c: _rows_error(c, a_RI.device), a_RI.device, gather=False,
    )  # fmt: skip
    _launch(addressable(a_RI), None, addressable(w), out_RO, None, tiles, c, transposed)
    return out_RO


# ---------------------------------------------------------------------------------------- self-test


def _up_error(config: Config, gather: bool, device: torch.device) -> float:
    p = problem(gather, device)
    got = up_forward_hopper(p.x, p.w1_EHD, p.token_R, True, p.tiles, config)
    want = up_forward_ref(
        p.x.float(), p.w1_EHD.float(), None, p.token_R, p.offsets_E1, "swiglu"
    )  # fmt: skip
    return relative_error(got, want)


def _rows_error(config: Config, device: torch.device) -> float:
    p = problem(False, device)
    got = (
        rows_hopper(p.a_RN, p.w2_EDN, p.tiles, transposed=True, config=config),
        rows_hopper(p.h_RH, p.w1_EHD, p.tiles, transposed=False, config=config),
    )
    want = (
        down_forward_ref(p.a_RN.float(), p.w2_EDN.float(), None, p.offsets_E1),
        input_gradient_ref(p.h_RH.float(), p.w1_EHD.float(), p.offsets_E1),
    )
    return relative_error(got, want)
