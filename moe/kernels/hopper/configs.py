"""Configurations of the Hopper kernels, and which operands they take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe.kernels.common.backend import num_sms
from moe.kernels.common.tiles import aligned
from moe.kernels.common.tuning import Config, pick
from moe.kernels.hopper.selftest import refuse_wrong

# The first entry is the default. All compile for sm_90a without spilled registers and fit the
# 227 KiB of shared memory of a program (tests/moe/kernels/hopper). A finished tile is stored in
# `split` ranges of columns, each under one or two products of the next; `down_backward` has other
# means.
CONFIGS: dict[str, list[Config]] = {
    "up": [Config(128, 256, 64, stages=4, split=8, group=g) for g in (8, 16)],
    "rows": [Config(128, 256, 64, stages=4, split=4, group=g) for g in (8, 16)],
    "down_backward": [Config(128, 256, 64, stages=3, split=4, group=g) for g in (8, 16)],
    "outer_left": [Config(m, n, 64, stages=4, split=4) for m, n in ((128, 256), (256, 128))],
    "outer_right": [Config(m, n, 64, stages=4, split=4) for m, n in ((256, 128), (128, 256))],
}


def pick_right(
    kernel: str,
    key: tuple,
    run: Callable[[Config], object],
    error: Callable[[Config], float],
    device: torch.device,
    *,
    gather: bool,
) -> Config:
    """As `tuning.pick`, of the configurations of `CONFIGS[kernel]` that are right on this card.

    Args:
        key: shape class.
        run: launches the kernel with a configuration, with no effect but on new tensors.
        error: relative error of a configuration on a small problem.
        gather: whether the call gathers an operand.

    Raises:
        RuntimeError: no configuration is right, or a graph is captured before any was checked.
    """

    def check(config: Config) -> None:
        refuse_wrong(f"hopper {kernel}", (config, gather), lambda: error(config), device)

    return pick(f"hopper {kernel}", (*key, gather), CONFIGS[kernel], run, device, check)


def programs(device: torch.device, most: int) -> int:
    """Programs of a persistent launch with at most `most` tiles: one for each multiprocessor."""
    return max(1, min(num_sms(device), most))


def addressable(t: Tensor) -> Tensor:
    """t, or a contiguous copy where TMA or a gather (32-bit places of rows) cannot address it."""
    if aligned(t) and not (t.ndim == 2 and t.shape[0] * t.stride(0) >= 2**34):
        return t
    return t.clone(memory_format=torch.contiguous_format)
