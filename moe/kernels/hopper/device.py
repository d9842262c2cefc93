"""Device code that the Hopper kernels share (Gluon). Import only where Triton is installed.

Two roles run on every multiprocessor at once. The producer (four warps when it gathers, else one)
fills a ring of shared-memory stages: TMA for whatever is contiguous, cp.async for gathered rows,
both arriving at the stage's `full` barrier. Row products gather with one arrival a stage, late,
when the copies have landed (`arrive_behind`; measured 5 to 7 % faster than the arrivals that 128
threads' copies make themselves; weight gradients, which load tokens at every step, are 12 to 20 %
slower that way and leave it to the copies). The consumer (eight warps) multiplies with wgmma and
frees stages by their `empty` barrier. Both walk over the same tiles in the same order.

The finished tile is not stored at once: it stays in registers as packed bf16 (`pack_columns`) while
the first products of the next tile run, and is stored part by part under them. So the tensor cores
do not wait for epilogues, and the accumulator is free for the next tile.

Shape letters: M rows and N columns of a tile.
"""

from __future__ import annotations

from moe.kernels.common.backend import HAVE_TRITON

if HAVE_TRITON:  # always: nothing imports this file where it is not
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # the name since Triton 3.7, and before
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

__all__ = [
    "FAR",
    "TensorDescriptor",
    "arrive_behind",
    "async_copy",
    "barrier",
    "column_parts",
    "fence_async_shared",
    "gather_layout",
    "gl",
    "gluon",
    "init_ring",
    "mbarrier",
    "mma_layout",
    "next_stage",
    "nvmma",
    "pack_columns",
    "pack_pairs",
    "sigmoid",
    "silu",
    "stack",
    "tile_at",
    "tma",
    "unpack_pair",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

FAR = gl.constexpr(2**30)  # entries of a ragged descriptor's bounded axis; see `common.tiles`

# ------------------------------------------------------------------------------------------ layouts


@gluon.constexpr_function
def mma_layout(BN: int, num_warps: int) -> gl.NVMMADistributedLayout:
    """Layout of a float32 accumulator: every warp holds all columns of its rows."""
    shape = [16, min(BN, 256), 16]
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=shape
    )


@gluon.constexpr_function
def gather_layout(num_warps: int) -> gl.BlockedLayout:
    """16 bytes a thread, 4 rows of 128 bytes a warp: rows of the swizzle atom."""
    return gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def nvmma(shape: list, dtype: gl.dtype = gl.bfloat16) -> gl.NVMMASharedLayout:
    """The swizzled shared-memory layout that TMA and wgmma agree on."""
    return gl.NVMMASharedLayout.get_default_for(list(shape), dtype)


# --------------------------------------------------------------------------------------------- ring


@gluon.constexpr_function
def stack(count: int, shape: list) -> list:
    """Shape of `count` buffers of a shape."""
    return [count, *shape]


@gluon.jit
def init_ring(full, empty, STAGES: gl.constexpr, COPIES: gl.constexpr):
    """One arrival fills a stage, with COPIES more of a gather; one frees it."""
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + COPIES)
        mbarrier.init(empty.index(i), count=1)


@gluon.jit
def arrive_behind(full, stage, LEFT: gl.constexpr):
    """Waits until at most LEFT groups of this program's copies are under way, and arrives for a
    stage whose group is older; -1: there is none yet.

    Each writing thread fences its own copies, since wgmma reads them through another proxy.
    """
    async_copy.wait_group(LEFT)
    fence_async_shared()
    barrier()  # all threads' fences come before the one arrival
    mbarrier.arrive(full.index(gl.maximum(stage, 0)), pred=stage >= 0)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring and its phase, which turns over at the wrap."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


# -------------------------------------------------------------------------------------------- tiles


@gluon.jit
def tile_at(t, row_tiles, col_tiles, GROUP: gl.constexpr):
    """Tile number → (row tile, column tile): down GROUP row tiles first, then the next column."""
    per_group = GROUP * col_tiles
    group = t // per_group
    first = group * GROUP
    size = gl.minimum(row_tiles - first, GROUP)
    within = t - group * per_group
    return first + within % size, within // size


# ----------------------------------------------------------------------------------------- numerics


@gluon.jit
def pack_pairs(low, high):
    """Two float32 tensors → one int32 tensor of bf16 pairs, `low` in the low half.

    A plain cast would be sunk by ptxas below the next tile's first wgmma, which it then
    serialises (warning C7514).
    """
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack_pair(pair):
    """int32 of two bf16 → the low and the high one as float32."""
    low = (pair << 16).to(gl.float32, bitcast=True)
    high = (pair & -65536).to(gl.float32, bitcast=True)
    return low, high


@gluon.jit
def _pack_neighbours(x):
    low, high = x.reshape(x.shape[0], x.shape[1] // 2, 2).split()
    return pack_pairs(low, high)


@gluon.jit
def column_parts(x, PARTS: gl.constexpr):
    """Equal ranges of columns, left to right; free: a thread holds all columns of its rows."""
    if PARTS == 1:
        return (x,)
    else:
        left, right = x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()
        return column_parts(left, PARTS // 2) + column_parts(right, PARTS // 2)


@gluon.jit
def pack_columns(acc, PARTS: gl.constexpr):
    """float32 [M, N] → PARTS tensors int32 [M, N / PARTS / 2] of neighbouring columns in bf16."""
    parts = column_parts(acc, PARTS)
    packed = ()
    for i in gl.static_range(PARTS):
        packed += (_pack_neighbours(parts[i]),)
    return packed


@gluon.jit
def sigmoid(x):
    """One instruction of the special-function unit: 0.5 tanh(x / 2) + 0.5."""
    tanh = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=r,r", [x * 0.5], dtype=gl.float32, is_pure=True, pack=1
    )
    return tanh * 0.5 + 0.5


@gluon.jit
def silu(x):
    return x * sigmoid(x)
