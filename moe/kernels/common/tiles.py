"""Tiles of the grouped Triton kernels: descriptors and device code.

Every grouped kernel is persistent: a fixed number of programs walks over (row tile, column tile)
pairs. Row tiles never cross an expert's border; their list is made on the device (`row_tiles`) and
its length is read there, so the host never waits for the routing.

Two ways to memory, chosen per call by `tma_serves`:
  TMA       tensor descriptors for everything but gathered rows. Stores into rows that other tiles
            own, or past the end of an expert, are cut off by hardware bounds checks on 4-D "ragged"
            descriptors (the trick of triton.tools.ragged_tma: two extra axes whose strides cancel
            modulo 2^64).
  pointers  masked loads and stores with arbitrary strides, for anything that TMA cannot address:
            widths that are no multiple of 16 bytes, unaligned or transposed operands, GPUs before
            Hopper.

Shape letters: R rows (expert order), E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import HAVE_TRITON, INTERPRET, capability, num_sms, tl, triton
from moe.kernels.common.tuning import Config, pointers_forced

if HAVE_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

# -------------------------------------------------------------------------------------- descriptors


def aligned(t: Tensor) -> bool:
    """Whether TMA can address t: 16-byte base and strides, unit last stride."""
    *outer, last = t.stride()
    if last != 1 or t.data_ptr() % 16:
        return False
    size = t.element_size()
    return all(stride > 0 and stride * size % 16 == 0 for stride in outer)


def tma_serves(*tensors: Tensor) -> bool:
    """Whether a launch can use tensor descriptors for all of these."""
    if pointers_forced() or not (INTERPRET or capability(tensors[0].device)[0] >= 9):
        return False
    return all(aligned(t) for t in tensors)


def with_unit_stride(t: Tensor) -> Tensor:
    """t, or a contiguous copy when its last axis has gaps (transposed or expanded views)."""
    return t if t.stride(-1) == 1 and t.stride(0) > 0 else t.contiguous()


def descriptor(t: Tensor, block: list[int]):
    """Plain descriptor: reads outside give zeros, writes outside are dropped."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)


_FAR = 0x7FFF0000
_ROWS = tl.constexpr(2**30) if HAVE_TRITON else 2**30


def ragged_descriptor(t: Tensor, block: list[int]):
    """Descriptor for `ragged_load` and `ragged_store`: bounds are a run of rows named at run time.

    An access at (2^30, end, 2^30 - (end - start) + i, column) addresses row start + i, since the
    first axis steps 2^34 - stride elements and 2^30 of those steps cancel the others modulo 2^64
    bytes; the third axis has 2^30 entries, so the hardware cuts the access off at `end`.
    """
    stride = t.stride(0)
    shape = [_FAR, _FAR, 2**30, t.shape[1]]
    return TensorDescriptor(t, shape, [2**34 - stride, stride, stride, 1], [1, 1, *block])


def grid_size(device: torch.device, config: Config, tiles: int) -> int:
    """Programs of a persistent launch that has at most `tiles` tiles."""
    return max(1, min(num_sms(device) * config.ctas, tiles))


# -------------------------------------------------------------------------------------- device code


@triton.jit
def tile_of(t, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Tile number → (row tile, column tile): down GROUP row tiles first, then the next column."""
    per_group = GROUP * col_tiles
    group = t // per_group
    first = group * GROUP
    size = tl.maximum(tl.minimum(row_tiles - first, GROUP), 1)  # no tiles at all: no division by 0
    within = t - group * per_group
    return first + within % size, within // size


@triton.jit
def look_up(
    t, count, row_tiles, col_tiles, expert_ptr, start_ptr, end_ptr, GROUP: tl.constexpr
):  # fmt: skip
    """(expert, first row, end row, column tile) of a tile; past the last tile, those of the last.

    Kernels look the next tile up while they work on the current one, which hides the latency of
    these loads.
    """
    t = tl.maximum(tl.minimum(t, count - 1), 0)
    row_tile, col_tile = tile_of(t, row_tiles, col_tiles, GROUP)
    return (
        tl.load(expert_ptr + row_tile),
        tl.load(start_ptr + row_tile),
        tl.load(end_ptr + row_tile),
        col_tile,
    )


@triton.jit
def halves(x):
    """Left and right half of the columns of a tile."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return x.reshape(M, 2, N // 2).permute(0, 2, 1).split()


@triton.jit
def pairs(x):
    """Even and odd columns of a tile."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return x.reshape(M, N // 2, 2).split()


@triton.jit
def _stored_tile(
    ptr, desc, e, row, col, ROWS, COLS, stride_e, stride_r, stride_c,
    BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if TMA:
        return desc.load([e, row, col]).reshape(BR, BC)
    rows = row + tl.arange(0, BR)
    cols = col + tl.arange(0, BC)
    base = ptr + e.to(tl.int64) * stride_e
    at = rows.to(tl.int64)[:, None] * stride_r + cols.to(tl.int64)[None, :] * stride_c
    return tl.load(base + at, mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def weight_tile(
    w, e, row, col, ROWS, COLS,
    BR: tl.constexpr, BC: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The (BR, BC) tile at (row, col) of matrix e of a stack; zeros outside the matrix.

    `w` is (pointer, descriptor, strides of matrices, rows and columns). One that is TRANSPOSED has
    its rows along memory.
    """
    ptr, desc, stride_e, stride_r, stride_c = w
    if TRANSPOSED:
        return _stored_tile(
            ptr, desc, e, col, row, COLS, ROWS, stride_e, stride_c, stride_r, BC, BR, TMA
        ).T
    else:
        return _stored_tile(
            ptr, desc, e, row, col, ROWS, COLS, stride_e, stride_r, stride_c, BR, BC, TMA
        )


@triton.jit
def source_rows(token_ptr, start, end, BM: tl.constexpr, GATHER: tl.constexpr):
    """Row of the operand for each row of a tile; rows past the tile's end repeat its last one."""
    rows = tl.maximum(tl.minimum(start + tl.arange(0, BM), end - 1), 0)
    if GATHER:
        rows = tl.load(token_ptr + rows)
    return rows


@triton.jit
def ragged_load(desc, start, end, row, col, BR: tl.constexpr, BC: tl.constexpr):
    """Tile at (start + row, col); rows from `end` on are zeros."""
    return desc.load([_ROWS, end, _ROWS - (end - start) + row, col]).reshape(BR, BC)


@triton.jit
def ragged_store(desc, value, start, end, col, BR: tl.constexpr, BC: tl.constexpr):
    """Stores a tile at (start, col); rows from `end` on are left alone."""
    desc.store([_ROWS, end, _ROWS - (end - start), col], value.reshape(1, 1, BR, BC))


@triton.jit
def store_rows(
    ptr, desc, value, start, end, col, COLS, stride,
    BM: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Stores a tile at (start, col); rows from `end` and columns from COLS are left alone."""
    if TMA:
        ragged_store(desc, value, start, end, col, BM, BC)
    else:
        rows = start + tl.arange(0, BM)
        cols = col + tl.arange(0, BC)
        at = rows.to(tl.int64)[:, None] * stride + cols[None, :]
        tl.store(ptr + at, value, mask=(rows < end)[:, None] & (cols < COLS)[None, :])
