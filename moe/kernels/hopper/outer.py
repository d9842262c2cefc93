"""Weight gradients on Hopper: out[e] = sum over the rows r of e of left[r]ᵀ · right[r].

One operand is in expert order and comes by TMA, the other is gathered by cp.async (or comes by TMA
too). Both give zeros past an expert's last row, so surplus products add nothing and an expert
without rows gets exact zeros. Design and roles: `_device`.

Shape letters: R rows (expert order), E experts, I rows of a weight, O columns of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv
from moe.kernels.common.launch import launch
from moe.kernels.common.reference import weight_gradient_ref
from moe.kernels.common.tuning import Config, size_class
from moe.kernels.hopper.configs import addressable, pick_right, programs
from moe.kernels.hopper.descriptors import plain, ragged
from moe.kernels.hopper.device import (
    FAR,
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
    stack,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from moe.kernels.hopper.selftest import problem, relative_error

# ------------------------------------------------------------------------------------------- kernel


@gluon.jit
def _tile(t, offsets_ptr, left_tiles, right_tiles, steps_least: gl.constexpr, BK: gl.constexpr):
    """(expert, left tile, right tile, first row, end row, products) of a tile."""
    per_expert = left_tiles * right_tiles
    e = t // per_expert
    within = t - e * per_expert
    start = gl.load(offsets_ptr + e)
    end = gl.load(offsets_ptr + e + 1)
    steps = gl.maximum(gl.cdiv(end - start, BK), steps_least)
    return e, within // right_tiles, within % right_tiles, start, end, steps


@gluon.jit
def _copy_rows(ptr, token, some, inside, row_vectors, cols, smem, EVEN: gl.constexpr):
    """Starts the copy of gathered rows; zeros where not `some`, and past the width (see `rows`)."""
    at = ptr + (token.to(gl.int64) * row_vectors * 8)[:, None] + cols[None, :]
    if EVEN:
        async_copy.async_copy_global_to_shared(smem, at, mask=some[:, None])
    else:
        async_copy.async_copy_global_to_shared(smem, at, mask=some[:, None] & inside[None, :])


@gluon.jit
def _produce(
    left_desc, left_ptr, right_desc, right_ptr, token_ptr, offsets_ptr, E, vectors, left_tiles,
    right_tiles, row_vectors, left_bufs, right_bufs, full, empty,
    GATHER_LEFT: gl.constexpr, GATHER_RIGHT: gl.constexpr, EVEN: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    LEFT_BYTES: gl.constexpr = 0 if GATHER_LEFT else BM * BK * 2
    RIGHT_BYTES: gl.constexpr = 0 if GATHER_RIGHT else BN * BK * 2
    GATHER: gl.constexpr = GATHER_LEFT or GATHER_RIGHT
    WIDTH: gl.constexpr = BM if GATHER_LEFT else BN
    layout: gl.constexpr = gather_layout(gl.num_warps())
    stage = 0
    phase = 1
    count = E * left_tiles * right_tiles
    for t in range(gl.program_id(0), count, gl.num_programs(0)):
        _, left_tile, right_tile, start, end, steps = _tile(
            t, offsets_ptr, left_tiles, right_tiles, PARTS, BK
        )
        bound = FAR - (end - start)
        row = left_tile * BM
        col = right_tile * BN
        if GATHER:
            cols = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
            if GATHER_LEFT:
                ptr = left_ptr + row
                inside = cols // 8 < vectors - row // 8
            else:
                ptr = right_ptr + col
                inside = cols // 8 < vectors - col // 8
            rows = start + gl.arange(0, BK, layout=gl.SliceLayout(1, layout))
            token = gl.load(token_ptr + rows, mask=rows < end, other=0)
        for k in range(steps):
            if GATHER:  # ask for the next tokens before waiting for a free stage
                some = rows < end
                rows += BK
                token_next = gl.load(token_ptr + rows, mask=rows < end, other=0)
            filled = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(filled, LEFT_BYTES + RIGHT_BYTES)
            if not GATHER_LEFT:
                tma.async_copy_global_to_shared(
                    left_desc, [FAR, end, bound + k * BK, row], filled, left_bufs.index(stage)
                )
            if not GATHER_RIGHT:
                tma.async_copy_global_to_shared(
                    right_desc, [FAR, end, bound + k * BK, col], filled, right_bufs.index(stage)
                )
            if GATHER:
                if GATHER_LEFT:
                    smem = left_bufs.index(stage)
                else:
                    smem = right_bufs.index(stage)
                smem = smem.reshape([BK, WIDTH])
                _copy_rows(ptr, token, some, inside, row_vectors, cols, smem, EVEN)
                async_copy.mbarrier_arrive(filled, increment_count=False)
                token = token_next
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply(
    acc, left_bufs, right_bufs, full, stage, phase, use_acc,
    GATHER: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    mbarrier.wait(full.index(stage), phase)
    if GATHER:
        fence_async_shared()  # wgmma reads what cp.async wrote
    left = left_bufs.index(stage).reshape([BK, BM]).permute((1, 0))
    right = right_bufs.index(stage).reshape([BK, BN])
    return warpgroup_mma(left, right, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _store_part(
    part, out_desc, out_bufs, e, row, col, PART: gl.constexpr, BM: gl.constexpr,
    COLS: gl.constexpr,
):  # fmt: skip
    out_smem = out_bufs.index(PART % 2)
    words: gl.constexpr = [BM, COLS // 2]
    tma.store_wait(pendings=1)  # the last part may still be read, from the other buffer
    out_smem._reinterpret(gl.int32, words, nvmma(words, gl.int32)).store(part)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [e, row, col], out_smem)


@gluon.jit
def _consume(
    out_desc, offsets_ptr, E, left_tiles, right_tiles, left_bufs, right_bufs, full, empty, out_bufs,
    GATHER: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = BN // PARTS
    acc = gl.zeros([BM, BN], gl.float32, mma_layout(BN, gl.num_warps()))
    held = pack_columns(acc, PARTS)
    held_e = E  # nothing is held yet: this expert is out of bounds
    held_row = 0
    held_col = 0
    stage = 0
    phase = 0
    count = E * left_tiles * right_tiles
    for t in range(gl.program_id(0), count, gl.num_programs(0)):
        e, left_tile, right_tile, _, _, steps = _tile(
            t, offsets_ptr, left_tiles, right_tiles, PARTS, BK
        )
        before = stage
        for i in gl.static_range(PARTS):
            acc = _multiply(
                acc, left_bufs, right_bufs, full, stage, phase, i > 0, GATHER, BM, BN, BK
            )
            if i > 0:
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index(before), count=1)
            _store_part(
                held[i], out_desc, out_bufs, held_e, held_row, held_col + i * COLS, i, BM, COLS
            )
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        for _ in range(PARTS, steps):
            acc = _multiply(
                acc, left_bufs, right_bufs, full, stage, phase, True, GATHER, BM, BN, BK
            )
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        held = pack_columns(acc, PARTS)
        held_e = e
        held_row = left_tile * BM
        held_col = right_tile * BN
    for i in gl.static_range(PARTS):
        _store_part(held[i], out_desc, out_bufs, held_e, held_row, held_col + i * COLS, i, BM, COLS)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["E", "vectors", "left_tiles", "right_tiles", "row_vectors"])
def _outer_kernel(
    left_desc, left_ptr, right_desc, right_ptr, token_ptr, out_desc, offsets_ptr,
    E, vectors, left_tiles, right_tiles, row_vectors,
    GATHER_LEFT: gl.constexpr, GATHER_RIGHT: gl.constexpr, EVEN: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PRODUCER_WARPS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    GATHER: gl.constexpr = GATHER_LEFT or GATHER_RIGHT
    LEFT_BLOCK: gl.constexpr = [BK, BM] if GATHER_LEFT else [1, 1, BK, BM]
    RIGHT_BLOCK: gl.constexpr = [BK, BN] if GATHER_RIGHT else [1, 1, BK, BN]
    OUT_BLOCK: gl.constexpr = [1, BM, BN // PARTS]
    left_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(STAGES, LEFT_BLOCK), nvmma(LEFT_BLOCK))
    right_bufs = gl.allocate_shared_memory(
        gl.bfloat16, stack(STAGES, RIGHT_BLOCK), nvmma(RIGHT_BLOCK)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    init_ring(full, empty, STAGES, PRODUCER_WARPS * 32 if GATHER else 0)
    out_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(2, OUT_BLOCK), nvmma(OUT_BLOCK))
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, offsets_ptr, E, left_tiles, right_tiles, left_bufs, right_bufs, full,
                empty, out_bufs, GATHER, BM, BN, BK, STAGES, PARTS,
            )),
            (_produce, (
                left_desc, left_ptr, right_desc, right_ptr, token_ptr, offsets_ptr, E, vectors,
                left_tiles, right_tiles, row_vectors, left_bufs, right_bufs, full, empty,
                GATHER_LEFT, GATHER_RIGHT, EVEN, BM, BN, BK, STAGES, PARTS,
            )),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


# ----------------------------------------------------------------------------------------- launcher


def weight_gradient_hopper(
    left_RI: Tensor,
    right_RO: Tensor,
    left_token_R: Tensor | None,
    right_token_R: Tensor | None,
    offsets_E1: Tensor,
    config: Config | None = None,
) -> Tensor:
    """out_EIO of `weight_gradient`."""
    assert left_token_R is None or right_token_R is None, "at most one operand is gathered"
    E, I, O = offsets_E1.shape[0] - 1, left_RI.shape[1], right_RO.shape[1]
    out_EIO = left_RI.new_empty(E, I, O)
    if left_RI.shape[0] == 0 or right_RO.shape[0] == 0:
        return out_EIO.zero_()
    gather_left, gather_right = left_token_R is not None, right_token_R is not None
    gather = gather_left or gather_right
    c = config or pick_right(
        "outer_left" if gather_left else "outer_right", (size_class(left_RI.shape[0]), I, O),
        lambda c: weight_gradient_hopper(
            left_RI, right_RO, left_token_R, right_token_R, offsets_E1, c
        ),
        lambda c: _error(c, gather_left, gather_right, left_RI.device), left_RI.device,
        gather=gather,
    )  # fmt: skip
    left_RI, right_RO = addressable(left_RI), addressable(right_RO)
    gathered = left_RI if gather_left else right_RO
    left_tiles, right_tiles = cdiv(I, c.bm), cdiv(O, c.bn)
    grid = programs(left_RI.device, E * left_tiles * right_tiles)
    launch(
        _outer_kernel, (grid,),
        None if gather_left else ragged(left_RI, [c.bk, c.bm]), left_RI if gather_left else None,
        None if gather_right else ragged(right_RO, [c.bk, c.bn]),
        right_RO if gather_right else None, left_token_R if gather_left else right_token_R,
        plain(out_EIO, [1, c.bm, c.bn // c.split]), offsets_E1,
        E, gathered.shape[1] // 8, left_tiles, right_tiles, gathered.stride(0) // 8,
        GATHER_LEFT=gather_left, GATHER_RIGHT=gather_right,
        EVEN=not gather or (I % c.bm if gather_left else O % c.bn) == 0,
        BM=c.bm, BN=c.bn, BK=c.bk, STAGES=c.stages, PARTS=c.split,
        PRODUCER_WARPS=4 if gather else 1, PRODUCER_REGISTERS=40 if gather else 24, num_warps=8,
    )  # fmt: skip
    return out_EIO


# ---------------------------------------------------------------------------------------- self-test


def _error(config: Config, gather_left: bool, gather_right: bool, device: torch.device) -> float:
    p = problem(gather_left or gather_right, device)
    left, right = (p.x, p.a_RN) if gather_left else (p.h_RH, p.x)
    tokens = (p.token_R if gather_left else None, p.token_R if gather_right else None)
    got = weight_gradient_hopper(left, right, *tokens, p.offsets_E1, config)
    want = weight_gradient_ref(left.float(), right.float(), *tokens, p.offsets_E1)
    return relative_error((got,), (want,))
