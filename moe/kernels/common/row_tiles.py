"""Row tiles: each expert's rows cut into tiles, listed on the device.

Tiles never cross an expert's border. The list's length is read on the device, so the host never
waits for the routing.

Shape letters: R rows (expert order), E experts, B row tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv, next_power_of_2, pick_backend, tl, triton
from moe.kernels.common.launch import launch, on_device
from moe.kernels.common.ops import define_op, is_eager


class RowTiles(NamedTuple):
    """Row tiles of a grouped product, int32 [B] each; unused tiles have expert -1 and an empty
    range."""

    expert_B: Tensor
    start_B: Tensor  # first row
    end_B: Tensor  # one past the last row of the tile
    count: Tensor  # int32 scalar: tiles in use
    rows: int  # of a tile, at most


# ---------------------------------------------------------------------------------------- reference


def max_tiles(num_experts: int, tile_rows: int, max_rows: int) -> int:
    """Most row tiles that `max_rows` rows over `num_experts` experts can need: sum of ceil(f_e /
    tile_rows)."""
    busy = min(num_experts, max_rows)
    return busy + (max_rows - busy) // tile_rows


def tile_schedule_ref(offsets_E1: Tensor, tile_rows: int, max_rows: int) -> RowTiles:
    """Plain torch version of `tile_schedule`, any device."""
    E = offsets_E1.numel() - 1
    B = max_tiles(E, tile_rows, max_rows)
    offsets = offsets_E1.long()
    tiles_E = (offsets[1:] - offsets[:-1] + tile_rows - 1) // tile_rows
    last_E = tiles_E.cumsum(0)  # one past the last tile of each expert
    tile_B = torch.arange(B, device=offsets_E1.device)
    count = last_E[-1]
    used_B = tile_B < count
    expert_B = torch.searchsorted(last_E, tile_B, right=True).clamp(max=E - 1)
    start_B = offsets[expert_B] + (tile_B - (last_E - tiles_E)[expert_B]) * tile_rows
    end_B = torch.minimum(start_B + tile_rows, offsets[expert_B + 1])
    i32 = torch.int32
    return RowTiles(
        torch.where(used_B, expert_B, -1).to(i32),
        torch.where(used_B, start_B, 0).to(i32),
        torch.where(used_B, end_B, 0).to(i32),
        count.to(i32),
        tile_rows,
    )


# ------------------------------------------------------------------------------------------- kernel


@triton.jit(do_not_specialize=["B", "tile_rows"])
def _tiles_kernel(
    offsets, expert_B, start_B, end_B, count, B, tile_rows,
    E: tl.constexpr, EP: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, EP)
    first = tl.load(offsets + column, mask=column < E, other=0)
    last = tl.load(offsets + column + 1, mask=column < E, other=0)
    tiles = (last - first + tile_rows - 1) // tile_rows
    after = tl.cumsum(tiles, axis=0).to(tl.int32)
    total = tl.sum(tiles, axis=0).to(tl.int32)
    tile = tl.program_id(0) * BB + tl.arange(0, BB)
    # the expert of a tile is the number of experts whose tiles all come before it
    e = tl.sum((after[None, :] <= tile[:, None]).to(tl.int32), axis=1).to(tl.int32)
    used = tile < total
    mine = column[None, :] == e[:, None]
    skipped = tl.sum(tl.where(mine, (after - tiles)[None, :], 0), axis=1).to(tl.int32)
    low = tl.sum(tl.where(mine, first[None, :], 0), axis=1).to(tl.int32)
    high = tl.sum(tl.where(mine, last[None, :], 0), axis=1).to(tl.int32)
    start = low + (tile - skipped) * tile_rows
    tl.store(expert_B + tile, tl.where(used, e, -1), mask=tile < B)
    tl.store(start_B + tile, tl.where(used, start, 0), mask=tile < B)
    tl.store(end_B + tile, tl.where(used, tl.minimum(start + tile_rows, high), 0), mask=tile < B)
    if tl.program_id(0) == 0:
        tl.store(count, total)


# ----------------------------------------------------------------------------------------- launcher


def _tile_schedule_triton(
    offsets_E1: Tensor, tile_rows: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    E = offsets_E1.numel() - 1
    B = max_tiles(E, tile_rows, max_rows)
    ints = {"dtype": torch.int32, "device": offsets_E1.device}
    out = (*(torch.empty(B, **ints) for _ in range(3)), torch.empty((), **ints))
    ep = next_power_of_2(E)
    bb = max(1, min(256, 8192 // ep))
    with on_device(offsets_E1):
        launch(
            _tiles_kernel,
            (max(1, cdiv(B, bb)),),
            offsets_E1.contiguous(),
            *out,
            B,
            tile_rows,
            E=E,
            EP=ep,
            BB=bb,
            num_warps=4,
        )
    return out


# ---------------------------------------------------------------------------------------- custom op

_tiles_op = define_op(
    "tile_schedule(Tensor offsets_E1, int tile_rows, int max_rows) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _tile_schedule_triton,
    lambda offsets_E1, tile_rows, max_rows: tuple(
        offsets_E1.new_empty(shape, dtype=torch.int32)
        for shape in (*[(max_tiles(offsets_E1.numel() - 1, tile_rows, max_rows),)] * 3, ())
    ),
)

# ------------------------------------------------------------------------------------------- public


def tile_schedule(
    offsets_E1: Tensor, tile_rows: int, max_rows: int, *, backend: str = "auto"
) -> RowTiles:
    """Cut each expert's rows into tiles of at most `tile_rows` rows, in expert order.

    Args:
        offsets_E1: [E+1] int32 first row of each expert.
        tile_rows: rows of a tile.
        max_rows: static upper bound on offsets_E1[E]; the arrays have `max_tiles(E, tile_rows,
            max_rows)` entries.
    """
    if tile_rows < 1:
        raise ValueError(f"tile_rows={tile_rows} must be at least 1")
    if max_rows < 0:
        raise ValueError(f"max_rows={max_rows} must not be negative")
    if pick_backend(backend, offsets_E1) == "reference":
        return tile_schedule_ref(offsets_E1, tile_rows, max_rows)
    run = _tile_schedule_triton if is_eager(offsets_E1) else _tiles_op
    return RowTiles(*run(offsets_E1, tile_rows, max_rows), tile_rows)
