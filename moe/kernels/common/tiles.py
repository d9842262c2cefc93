"""Tiles of the grouped Triton kernels: configurations, row tiles, descriptors, device code.

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

Shape letters: R rows (expert order), E experts, B row tiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common import tuning as _tuning
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET, capability, num_sms, tl, triton
from moe.kernels.routing.routing_metadata import tile_schedule

if HAVE_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

# ----------------------------------------------------------------------------------- configurations


class Config(NamedTuple):
    """One way to run a grouped kernel."""

    bm: int
    """Rows of the output tile; for row products the rows of the tile list."""
    bn: int
    bk: int
    warps: int = 8
    stages: int = 3
    group: int = 8
    """Row tiles that share the columns of a weight while it is in L2."""
    split: int = 2
    """Parts in which the epilogue handles a tile's columns: fewer registers, less staging."""
    flatten: bool = False
    """One loop over the products of all tiles, so that loads of the next tile start during the
    epilogue. Written out by hand in the kernels: with values carried from tile to tile,
    `tl.range(flatten=True)` of Triton 3.6 updates them at every step and gives wrong results."""
    ctas: int = 1
    """Programs per multiprocessor."""

    def __str__(self) -> str:
        flat = " flat" if self.flatten else ""
        return (
            f"{self.bm}x{self.bn}x{self.bk} w{self.warps} s{self.stages} g{self.group} "
            f"/{self.split} c{self.ctas}{flat}"
        )


# First entry: the default. Lists are short on purpose: each entry is a compilation. All fit the
# shared memory of an H100 or H200 (227 KiB a program; half of it where two share a multiprocessor)
# and compile for sm_90 without spilled registers. A gathered operand of "outer" is loaded through
# loaded indices, for which Triton keeps half as many buffers as stages: 5 give three. 7 overflow
# the shared memory in Triton 3.6.
_HALF: dict[str, list[Config]] = {
    "up": [
        Config(128, 256, 64, stages=3, split=2),
        Config(128, 256, 64, stages=4, split=4),
    ],
    "rows": [
        Config(128, 256, 64, stages=3, split=2),
        Config(128, 256, 64, stages=4, split=4),
        Config(128, 128, 64, warps=4, stages=3, split=4, ctas=2),
    ],
    "down_backward": [
        Config(128, 256, 64, stages=3, split=4),
        Config(128, 128, 64, stages=4, split=2),
        Config(128, 128, 64, warps=4, stages=2, split=4, ctas=2),
    ],
    "outer": [
        Config(128, 256, 64, stages=5, split=4, flatten=True),
        Config(256, 128, 64, stages=5, split=4, flatten=True),
        Config(128, 128, 64, warps=4, stages=5, split=4, ctas=2),
    ],
}
_HALF_SMALL = {  # few rows per expert: tiles of 64 rows
    "up": [Config(64, 256, 64, warps=4, stages=4)],
    "rows": [Config(64, 256, 64, warps=4, stages=4)],
    "down_backward": [Config(64, 128, 64, warps=4, stages=4)],
    "outer": _HALF["outer"],
}
_FULL = {  # float32 products run on the plain cores (no TF32): accuracy first
    "up": [Config(64, 64, 32, warps=4, stages=2, split=1)],
    "rows": [Config(64, 64, 32, warps=4, stages=2, split=1)],
    "down_backward": [Config(64, 64, 32, warps=4, stages=2, split=1)],
    "outer": [Config(64, 64, 32, warps=4, stages=2, split=1)],
}
_TRIALS: dict[str, list[Config]] = {
    "up": [
        Config(128, 256, 64, stages=4, split=4, flatten=True),
        Config(128, 256, 64, stages=3, split=2, flatten=True),
    ],
    "rows": [
        Config(128, 256, 64, stages=4, split=4, flatten=True),
        Config(128, 256, 64, stages=3, split=2, flatten=True),
    ],
    "down_backward": [
        Config(128, 256, 64, stages=3, split=4, flatten=True),
        Config(128, 128, 64, stages=4, split=2, flatten=True),
    ],
    "outer": [Config(128, 256, 64, stages=5, split=4)],
}
_SMALL_ROWS = 64  # mean rows per expert below which tiles of 64 rows waste less

_forced: dict[str, Config] = {}
_forced_pointers = False


def tile_rows(dtype: torch.dtype, rows: int, num_experts: int, backend: str = "triton") -> int:
    """Rows of the tiles that the row products of one call share."""
    if backend == "hopper":
        return 128
    if _forced:
        sizes = {c.bm for name, c in _forced.items() if name != "outer"}
        if len(sizes) > 1:
            raise ValueError(f"forced configurations disagree on the rows of a tile: {sizes}")
        if sizes:
            return sizes.pop()
    if dtype == torch.float32:
        return 64
    return 128 if rows >= _SMALL_ROWS * num_experts else 64


def candidates(kernel: str, dtype: torch.dtype, bm: int | None) -> list[Config]:
    """Configurations of a kernel for tiles of bm rows (None: any), the default first."""
    if kernel in _forced:
        return [_forced[kernel]]
    if dtype == torch.float32:
        table = _FULL
    else:
        table = _HALF_SMALL if bm == 64 else _HALF
    return table[kernel]


def trials(kernel: str) -> list[Config]:
    """What `scripts/bench/moe.py --tune` measures: the configurations of 16-bit types, and more.

    A trial moves to the tables above once it was right and fastest on a card.
    """
    return [*_HALF[kernel], *_TRIALS.get(kernel, [])]


def all_configs(kernel: str) -> list[Config]:
    """Every configuration that a kernel can be given."""
    return list(dict.fromkeys(c for t in (_HALF, _TRIALS, _HALF_SMALL, _FULL) for c in t[kernel]))


_picked: dict[tuple, Config] = {}


def pick_config(
    kernel: str,
    dtype: torch.dtype,
    bm: int | None,
    key: tuple,
    run: Callable[[Config], object],
    device: torch.device,
) -> Config:
    """The configuration to run: forced, or the fastest for this class of shapes, or the default.

    Args:
        kernel: name in the tables above.
        bm: rows of a tile if they are given.
        key: shape class.
        run: launches the kernel with a configuration, with no effect but on new tensors.
    """
    listed = candidates(kernel, dtype, bm)
    if len(listed) == 1:
        return listed[0]
    place = (kernel, dtype, bm, key, device)
    config = _picked.get(place)
    if config is None:
        config = _tuning.best(kernel, (str(dtype), bm, *key), listed, run, device=device)
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            _picked[place] = config
    return config


@contextlib.contextmanager
def forced(pointers: bool = False, **configs: Config) -> Iterator[None]:
    """Inside: the named kernels run with the given configurations; with `pointers`, without TMA."""
    global _forced, _forced_pointers
    before = _forced, _forced_pointers
    _forced, _forced_pointers = {**_forced, **configs}, pointers
    try:
        yield
    finally:
        _forced, _forced_pointers = before


# ---------------------------------------------------------------------------------------- row tiles


class RowTiles(NamedTuple):
    """Row tiles of one routing, all int32: what `tile_schedule` gives, and the rows of a tile."""

    expert_B: Tensor
    start_B: Tensor
    end_B: Tensor
    count: Tensor
    rows: int


def row_tiles(
    offsets_E1: Tensor, rows: int, dtype: torch.dtype, backend: str = "triton"
) -> RowTiles:
    """The tile list that all row products of one call share; made on the device."""
    bm = tile_rows(dtype, rows, offsets_E1.shape[0] - 1, backend)
    return RowTiles(*tile_schedule(offsets_E1, bm, rows), bm)


def pack(tiles: RowTiles | None) -> tuple[list[Tensor], int]:
    """The tiles as arguments of a custom op; an empty list asks the op to make them."""
    return ([], 0) if tiles is None else (list(tiles[:4]), tiles.rows)


def unpack(
    tiles: list[Tensor], rows: int, offsets_E1: Tensor, per_row: Tensor, backend: str = "triton"
) -> RowTiles:
    """The tiles from the arguments of a custom op; `per_row` has one entry a row."""
    if tiles:
        return RowTiles(*tiles, rows)
    return row_tiles(offsets_E1, per_row.shape[0], per_row.dtype, backend)


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
    if _forced_pointers or not (INTERPRET or capability(tensors[0].device)[0] >= 9):
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
def weight_tile(
    ptr, desc, e, row, col, ROWS, COLS, stride_e, stride_r, stride_c,
    BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The (BR, BC) tile at (row, col) of matrix e of a stack; zeros outside the matrix."""
    if TMA:
        return desc.load([e, row, col]).reshape(BR, BC)
    rows = row + tl.arange(0, BR)
    cols = col + tl.arange(0, BC)
    base = ptr + e.to(tl.int64) * stride_e
    at = rows.to(tl.int64)[:, None] * stride_r + cols.to(tl.int64)[None, :] * stride_c
    return tl.load(base + at, mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :], other=0.0)


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
