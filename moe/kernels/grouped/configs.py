"""Configurations of the grouped Triton kernels, and the rows of their tiles."""

from __future__ import annotations

import torch

from moe.kernels.common.tuning import Config, forced_configs

ROW_PRODUCTS = ("up", "rows", "down_backward")
"""Kernels that share a list of row tiles."""

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
        Config(128, 256, 64, stages=5, split=4),
        Config(256, 128, 64, stages=5, split=4),
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
_SMALL_ROWS = 64  # mean rows per expert below which tiles of 64 rows waste less


def tile_rows(dtype: torch.dtype, rows: int, num_experts: int) -> int:
    """Rows of the tiles that the row products of one call share."""
    sizes = {c.bm for name, c in forced_configs().items() if name in ROW_PRODUCTS}
    if len(sizes) > 1:
        raise ValueError(f"forced configurations disagree on the rows of a tile: {sizes}")
    if sizes:
        return sizes.pop()
    if dtype == torch.float32:
        return 64
    return 128 if rows >= _SMALL_ROWS * num_experts else 64


def candidates(kernel: str, dtype: torch.dtype, bm: int | None = None) -> list[Config]:
    """Configurations of a kernel for tiles of bm rows (None: any), the default first."""
    if dtype == torch.float32:
        table = _FULL
    else:
        table = _HALF_SMALL if bm == 64 else _HALF
    return table[kernel]


def all_configs(kernel: str) -> list[Config]:
    """Every configuration that a kernel can be given."""
    return list(dict.fromkeys(c for t in (_HALF, _HALF_SMALL, _FULL) for c in t[kernel]))
