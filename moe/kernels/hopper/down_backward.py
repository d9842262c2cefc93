"""Backward of down-projection and SwiGLU on Hopper: dH, A' and the parts of dS in one kernel.

The product dA = dO · W2 is that of `rows`, gathered dO included, but its epilogue is too long to be
done between the products of the next tile. So it has a role of its own: the consumer leaves a
finished tile in shared memory as bf16 and goes on; two more warps take it from there, read the
same columns of H, and write dH and A' while the next tile is multiplied. Every thread reads and
writes its own numbers, 16 bytes at a time. The sums <dA, A> of a tile's rows are stored once per
tile and added up in a fixed order afterwards.

Why two warps: for wgmma with 256 columns ptxas wants at least 154 registers a thread at a kernel's
start, so that a program has at most twelve warps. They need about 44,000 cycles for a tile, as long
as 30 to 40 products: D from 2048 on hides them. Doing their work in the producer's four warps,
between its stages, was slower (393 against 450 TFLOP/s at D = 1536, 561 against 611 at 4096).

Shape letters: T tokens, R rows (expert order), S slots (token order), E experts, D model width, N
expert width, H columns of H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv
from moe.kernels.common.launch import launch
from moe.kernels.common.reference import down_backward_ref
from moe.kernels.common.row_tiles import RowTiles
from moe.kernels.common.tuning import Config, size_class
from moe.kernels.hopper.configs import addressable, pick_right, programs
from moe.kernels.hopper.descriptors import plain
from moe.kernels.hopper.device import (
    async_copy,
    column_parts,
    gl,
    gluon,
    init_ring,
    mbarrier,
    mma_layout,
    next_stage,
    nvmma,
    pack_pairs,
    sigmoid,
    stack,
    tile_at,
    unpack_pair,
    warpgroup_mma_wait,
)
from moe.kernels.hopper.rows import multiply, produce_rows
from moe.kernels.hopper.selftest import problem, relative_error

_ROWS = gl.constexpr(8)
"""Rows that the epilogue works on at once, and asks for ahead."""
_COLS = gl.constexpr(64)
"""Columns of dA that it works on at once: 128 bytes, a row of a swizzle atom."""
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def epilogue_layout(num_warps: int) -> gl.BlockedLayout:
    """16 bytes of H a thread, two rows a warp."""
    return gl.BlockedLayout([1, 4], [2, 16], [num_warps, 1], [1, 0])


# ----------------------------------------------------------------------------------------- consumer


@gluon.jit
def _consume(
    tiles, steps, do_bufs, w_bufs, full, empty, da_bufs, da_full, da_empty,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dA of each tile, left in shared memory."""
    PARTS: gl.constexpr = BN // _COLS
    acc = gl.zeros([BM, BN], gl.float32, mma_layout(BN, gl.num_warps()))
    stage = 0
    phase = 0
    turn = 0
    for _t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = multiply(acc, do_bufs, w_bufs, full, stage, phase, False, False, BN, BK)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
        for _ in range(1, steps):
            acc = multiply(acc, do_bufs, w_bufs, full, stage, phase, True, False, BN, BK)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        mbarrier.wait(da_empty, turn ^ 1)
        parts = column_parts(acc, PARTS)
        for i in gl.static_range(PARTS):
            da_bufs.index(i).store(parts[i].to(gl.bfloat16))
        mbarrier.arrive(da_full, count=1)
        turn ^= 1


# ----------------------------------------------------------------------------------------- epilogue


@gluon.jit
def _copy_h(h_bufs, h_ptr, buffer, row, end, col, vectors, PARTS: gl.constexpr):
    """Starts the copy of the (gate, up) pairs of _ROWS rows; zeros outside."""
    layout: gl.constexpr = epilogue_layout(gl.num_warps())
    rows = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(PARTS):
        cols = col + i * _COLS + gl.arange(0, _COLS, layout=gl.SliceLayout(0, layout))
        at = h_ptr + rows.to(gl.int64)[:, None] * vectors * 8 + cols[None, :]
        some = (rows < end)[:, None] & (cols // 8 < vectors)[None, :]
        async_copy.async_copy_global_to_shared(h_bufs.index(buffer * PARTS + i), at, mask=some)


@gluon.jit
def _swiglu_backward(da, pair, g):
    """(dgate, dup, A) of columns of dA and their (gate, up) pairs, times g, and dA · A."""
    x, up = unpack_pair(pair)
    s = sigmoid(x)
    f = x * s
    a = f * up
    dg = da * g
    return dg * up * (s + f * (1.0 - s)), dg * f, a * g, da * a


@gluon.jit
def _finish(
    h_ptr, dh_ptr, a_ptr, gates_ptr, slot_ptr, dot_ptr, start_ptr, end_ptr, R, row_tiles,
    col_tiles, vectors, da_bufs, da_full, da_empty, h_bufs, gate_bufs,
    GATES: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """dH, A' and the sums <dA, A> of each tile, from dA in shared memory and H.

    H comes by cp.async, a block of rows ahead, and gates through shared memory: a load into a
    register that is waited for much later would hold up every other load between.
    """
    PARTS: gl.constexpr = BN // _COLS
    BLOCKS: gl.constexpr = BM // _ROWS
    BLOCK: gl.constexpr = [_ROWS, _COLS]
    layout: gl.constexpr = epilogue_layout(gl.num_warps())
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_tile: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    # the same bytes: a buffer of BM rows is BLOCKS buffers of _ROWS rows, whole atoms each
    blocks = da_bufs._reinterpret(gl.bfloat16, stack(PARTS * BLOCKS, BLOCK), nvmma(BLOCK))
    turn = 0
    for t in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row_tile, col_tile = tile_at(t, row_tiles, col_tiles, GROUP)
        start = gl.load(start_ptr + row_tile)
        end = gl.minimum(gl.load(end_ptr + row_tile), start + BM)
        col = col_tile * BN
        _copy_h(h_bufs, h_ptr, 0, start, end, col, vectors, PARTS)
        async_copy.commit_group()
        if GATES:
            places = gl.minimum(start + gl.arange(0, BM, layout=by_tile), end - 1)
            if SLOTS:
                places = gl.load(slot_ptr + places)
            gates = gl.load(gates_ptr + places).to(gl.float32)
            gate_bufs._reinterpret(gl.float32, [BM], _PLAIN).store(gates)
        mbarrier.wait(da_full, turn)
        for r in range(BLOCKS):
            row = start + r * _ROWS
            buffer = r % 2
            if r + 1 < BLOCKS:
                _copy_h(h_bufs, h_ptr, 1 - buffer, row + _ROWS, end, col, vectors, PARTS)
            async_copy.commit_group()
            async_copy.wait_group(1)
            g = gl.full([_ROWS], 1.0, gl.float32, by_row)
            if GATES:
                g = gate_bufs.index(r).load(by_row)
            rows = row + gl.arange(0, _ROWS, layout=by_row)
            for i in gl.static_range(PARTS):
                da = blocks.index(i * BLOCKS + r).load(layout).to(gl.float32)
                pair = h_bufs.index(buffer * PARTS + i).load(layout)
                dgate, dup, a, terms = _swiglu_backward(da, pair, g[:, None])
                terms = gl.sum(terms.reshape(_ROWS, _COLS // 4, 4), axis=2)  # within a thread
                if i == 0:
                    dot = terms
                else:
                    dot += terms
                cols = col + i * _COLS + gl.arange(0, _COLS, layout=gl.SliceLayout(0, layout))
                some = (rows < end)[:, None] & (cols // 8 < vectors)[None, :]
                at = rows.to(gl.int64)[:, None] * vectors * 8 + cols[None, :]
                gl.store(dh_ptr + at, pack_pairs(dgate, dup), mask=some)
                gl.store(a_ptr + at, a.to(gl.bfloat16), mask=some)
            sums = gl.sum(dot, axis=1)
            of = row + gl.arange(0, _ROWS, layout=sums.type.layout)
            gl.store(dot_ptr + col_tile.to(gl.int64) * R + of, sums, mask=of < end)
        mbarrier.arrive(da_empty, count=1)
        turn ^= 1


# ------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["R", "n_vectors", "vectors", "row_vectors", "steps", "col_tiles"])
def _down_backward_kernel(
    do_desc, do_ptr, token_ptr, w_desc, h_ptr, dh_ptr, a_ptr, gates_ptr, slot_ptr, dot_ptr,
    expert_ptr, start_ptr, end_ptr, count_ptr, R, n_vectors, vectors, row_vectors, steps,
    col_tiles,
    GATHER: gl.constexpr, EVEN: gl.constexpr, GATES: gl.constexpr, SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, PRODUCER_WARPS: gl.constexpr, EPILOGUE_WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    W_BLOCK: gl.constexpr = [1, BK, BN]
    DA_BLOCK: gl.constexpr = [BM, _COLS]
    do_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], nvmma([BM, BK]))
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(STAGES, W_BLOCK), nvmma(W_BLOCK))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    init_ring(full, empty, STAGES, 1 if GATHER else 0)
    da_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(BN // _COLS, DA_BLOCK), nvmma(DA_BLOCK))
    da_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    da_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    h_bufs = gl.allocate_shared_memory(gl.int32, [2 * BN // _COLS, _ROWS, _COLS], _PLAIN_2D)
    gate_bufs = gl.allocate_shared_memory(gl.float32, [BM // _ROWS, _ROWS], _PLAIN)
    mbarrier.init(da_full, count=1)
    mbarrier.init(da_empty, count=1)
    row_tiles = gl.load(count_ptr)
    gl.warp_specialize(
        [
            (_consume, (
                row_tiles * col_tiles, steps, do_bufs, w_bufs, full, empty, da_bufs, da_full,
                da_empty, BM, BN, BK, STAGES,
            )),
            (_finish, (
                h_ptr, dh_ptr, a_ptr, gates_ptr, slot_ptr, dot_ptr, start_ptr, end_ptr, R,
                row_tiles, col_tiles, n_vectors, da_bufs, da_full, da_empty, h_bufs, gate_bufs,
                GATES, SLOTS, BM, BN, GROUP,
            )),
            (produce_rows, (
                do_desc, do_ptr, token_ptr, w_desc, expert_ptr, start_ptr, end_ptr, row_tiles,
                col_tiles, steps, vectors, row_vectors, do_bufs, w_bufs, full, empty,
                GATHER, EVEN, False, BM, BN, BK, STAGES, GROUP,
            )),
        ],
        [EPILOGUE_WARPS, PRODUCER_WARPS],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


# ----------------------------------------------------------------------------------------- launcher


def down_backward_hopper(
    do_TD: Tensor,
    w2_EDN: Tensor,
    h_RH: Tensor,
    gates_S: Tensor | None,
    token_R: Tensor | None,
    slot_R: Tensor | None,
    tiles: RowTiles,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dH and A' of `down_backward`, SwiGLU, no bias; and the parts of <dA, A>, float32 [P, R]."""
    _, D, N = w2_EDN.shape
    R, device = h_RH.shape[0], h_RH.device
    dh_RH = torch.empty_like(h_RH)
    a_RN = h_RH.new_empty(R, N)
    if R == 0:
        return dh_RH, a_RN, torch.empty(0, R, dtype=torch.float32, device=device)
    gather = token_R is not None
    c = config or pick_right(
        "down_backward", (size_class(R), D, N),
        lambda c: down_backward_hopper(do_TD, w2_EDN, h_RH, gates_S, token_R, slot_R, tiles, c),
        lambda c: _error(c, gather, device), device, gather=gather,
    )  # fmt: skip
    do_TD, w2_EDN = addressable(do_TD), addressable(w2_EDN)
    gates_S = None if gates_S is None else gates_S.contiguous()
    steps = cdiv(D, c.bk)
    col_tiles = cdiv(N, c.bn)
    dot_PR = torch.empty(col_tiles, R, dtype=torch.float32, device=device)
    grid = programs(device, tiles.expert_B.shape[0] * col_tiles)
    launch(
        _down_backward_kernel, (grid,),
        None if gather else plain(do_TD, [c.bm, c.bk]), do_TD if gather else None, token_R,
        plain(w2_EDN, [1, c.bk, c.bn]), h_RH.view(torch.int32), dh_RH.view(torch.int32), a_RN,
        gates_S, slot_R, dot_PR, *tiles[:4],
        R, N // 8, D // 8, do_TD.stride(0) // 8, steps, col_tiles,
        GATHER=gather, EVEN=not gather or steps * c.bk == D, GATES=gates_S is not None,
        SLOTS=slot_R is not None, BM=c.bm, BN=c.bn, BK=c.bk, STAGES=c.stages,
        GROUP=c.group, PRODUCER_WARPS=2 if gather else 1, EPILOGUE_WARPS=2, REGISTERS=136,
        num_warps=8,
    )  # fmt: skip
    return dh_RH, a_RN, dot_PR


# ---------------------------------------------------------------------------------------- self-test


def _error(config: Config, gather: bool, device: torch.device) -> float:
    p = problem(gather, device)
    dh, a, dot = down_backward_hopper(
        p.x, p.w2_EDN, p.h_RH, p.gates_S, p.token_R, p.slot_R, p.tiles, config
    )
    want = down_backward_ref(
        p.x.float(), p.w2_EDN.float(), None, p.h_RH.float(), p.gates_S, p.token_R, p.slot_R,
        p.row_S, p.offsets_E1, "swiglu", True, True, True,
    )  # fmt: skip
    return relative_error((dh, a, dot.sum(0)[p.row_S.long()]), want)
