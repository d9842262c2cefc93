"""Configurations of the Hopper kernels, which operands they take, and their TMA descriptors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels import hopper
from moe.kernels.common import tuning as _tuning
from moe.kernels.common.backend import num_sms
from moe.kernels.common.tiles import aligned

ROWS = 128
"""Rows of every row tile."""


class Config(NamedTuple):
    """One way to run a Hopper kernel."""

    bm: int
    """Rows of the output tile; 128 for row products."""
    bn: int
    bk: int = 64
    stages: int = 4
    parts: int = 4
    """Ranges of columns in which a finished tile is stored, each under one or two products of the
    next; `down_backward` has other means."""
    group: int = 8
    """Row tiles that share the columns of a weight while it is in L2."""
    double: bool = True
    """Whether a part may be stored under two products instead of one, where there are enough."""

    def doubles(self, steps: int) -> int:
        """How many of the parts are stored under two products, of `steps`; few values, since
        each is compiled."""
        spare = steps - self.parts
        return next((n for n in (self.parts - 1, self.parts // 2) if self.double and n <= spare), 0)

    def __str__(self) -> str:
        tile = f"{self.bm}x{self.bn}x{self.bk} s{self.stages} g{self.group}"
        return f"{tile} /{self.parts}{'d' if self.double else ''}"


# The first entry is the default. All compile for sm_90a without spilled registers and fit the
# 227 KiB of shared memory of a program (tests/moe/kernels/hopper).
CONFIGS: dict[str, list[Config]] = {
    "up": [Config(128, 256, parts=8), Config(128, 256, parts=8, group=16)],
    "rows": [Config(128, 256), Config(128, 256, group=16)],
    "down_backward": [Config(128, 256, stages=3), Config(128, 256, stages=3, group=16)],
    "outer_left": [Config(128, 256), Config(256, 128)],
    "outer_right": [Config(256, 128), Config(128, 256)],
}

_forced: dict[str, Config] = {}
_picked: dict[tuple, Config] = {}
_errors: dict[tuple, float] = {}  # of what this process has checked


@contextlib.contextmanager
def forced(**configs: Config) -> Iterator[None]:
    """Inside: the named kernels run with the given configurations."""
    global _forced
    before = _forced
    _forced = {**_forced, **configs}
    try:
        yield
    finally:
        _forced = before


def pick_config(
    kernel: str,
    key: tuple,
    run: Callable[[Config], object],
    device: torch.device,
    *,
    gather: bool,
) -> Config:
    """The configuration to run: forced, or the fastest for this class of shapes, or the default.

    Whichever it is, but a forced one, has computed a small problem right on this card in this
    process: one that has not does so now, once, and one whose results are wrong is passed over.
    While a CUDA graph is captured nothing can be checked; then those count that were before.

    Args:
        kernel: name in `CONFIGS`.
        key: shape class.
        run: launches the kernel with a configuration, with no effect but on new tensors.
        gather: whether the call gathers an operand.

    Raises:
        RuntimeError: no configuration is right, or a graph is captured before any was checked.
    """
    if kernel in _forced:
        return _forced[kernel]
    place = (kernel, key, gather, device)
    config = _picked.get(place)
    if config is not None:
        return config

    def run_checked(config: Config) -> None:
        _refuse_wrong(kernel, config, gather, device)
        run(config)

    listed = CONFIGS[kernel]
    fastest = _tuning.best(f"hopper {kernel}", (*key, gather), listed, run_checked, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    config = _first_right(kernel, [fastest, *listed], gather, device, capturing)
    if not capturing:
        _picked[place] = config
    return config


def _first_right(
    kernel: str, configs: list[Config], gather: bool, device: torch.device, capturing: bool
) -> Config:
    """The first that computes a small problem right, of those already checked if `capturing`."""
    refusal = None
    for config in configs:
        if capturing and (kernel, config, gather, device) not in _errors:
            continue
        try:
            _refuse_wrong(kernel, config, gather, device)
        except RuntimeError as error:
            refusal = refusal or error
        else:
            return config
    if refusal is None:
        raise RuntimeError(
            f"hopper {kernel}: a CUDA graph is captured before this kernel was checked on "
            f"{device}; run the layer once, forward and backward, before the capture"
        )
    raise refusal


def _refuse_wrong(kernel: str, config: Config, gather: bool, device: torch.device) -> None:
    """Raises RuntimeError, which leaves the configuration out, where its results are wrong."""
    from moe.kernels.hopper import selftest as _selftest

    place = (kernel, config, gather, device)
    if place not in _errors:
        _errors[place] = _selftest.error(kernel, config, gather, device)
        hopper.checked.add(device)
    if not _errors[place] <= _selftest.BOUND:
        raise RuntimeError(
            f"hopper {kernel} [{config}]: relative error {_errors[place]:.1e} on {device}; "
            "use kernels='triton'"
        )


def programs(device: torch.device, most: int) -> int:
    """Programs of a persistent launch with at most `most` tiles: one for each multiprocessor."""
    return max(1, min(num_sms(device), most))


def addressable(t: Tensor) -> Tensor:
    """t, or a contiguous copy where TMA or a gather (32-bit places of rows) cannot address it."""
    if aligned(t) and not (t.ndim == 2 and t.shape[0] * t.stride(0) >= 2**34):
        return t
    return t.clone(memory_format=torch.contiguous_format)
