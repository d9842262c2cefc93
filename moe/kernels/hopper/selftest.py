"""A kernel's error against float32, measured before it may run.

A miscompiled kernel can be the fastest one: it has happened to this project with loops that Triton
flattened. So each variant computes a small problem first, once in a process, with a generator of
its own. That may be in the middle of a user's forward or backward: nothing around it, such as
autocast or a dispatch mode, has a part in it.

Shape letters: T tokens, R rows (expert order), E experts, D model width, N expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moe.kernels.common.row_tiles import RowTiles, tile_schedule

BOUND = 1e-2

checked: set[torch.device] = set()
"""Devices on which this process has compared kernels with float32."""

_errors: dict[tuple, float] = {}


def refuse_wrong(
    kernel: str, variant: Hashable, error: Callable[[], float], device: torch.device
) -> None:
    """Refuses a variant of a kernel whose results are wrong. Each is checked once; while a CUDA
    graph is captured none can be, then those pass that were right before.

    Args:
        error: runs it on a small problem; its relative error by norm.

    Raises:
        RuntimeError: it is wrong, or a graph is captured before it was checked.
    """
    place = (kernel, variant, device)
    if place not in _errors:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{kernel}: a CUDA graph is captured before this kernel was checked on "
                f"{device}; run the layer once, forward and backward, before the capture"
            )
        with (
            _disable_current_modes(),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
            torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        ):
            _errors[place] = error()
        checked.add(device)
    if not _errors[place] <= BOUND:
        raise RuntimeError(
            f"{kernel} [{variant}]: relative error {_errors[place]:.1e} on {device}; "
            "use kernels='triton'"
        )


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest by norm; infinite where it is not finite."""
    errors = [((g.float() - w).norm() / w.norm()).item() for g, w in zip(got, want)]
    return max(e if e == e else float("inf") for e in errors)


class Problem(NamedTuple):
    """Random operands of a small ragged layer of experts; one of four has no rows."""

    x: Tensor  # bf16 [T, D], or [R, D] where nothing is gathered
    h_RH: Tensor
    a_RN: Tensor
    w1_EHD: Tensor
    w2_EDN: Tensor
    gates_S: Tensor
    token_R: Tensor | None
    slot_R: Tensor
    row_S: Tensor
    offsets_E1: Tensor
    tiles: RowTiles


_COUNTS = (130, 0, 5, 300)
_T, _D, _N = 200, 1024, 256


def problem(gather: bool, device: torch.device) -> Problem:
    """The same numbers each time."""
    generator = torch.Generator(device).manual_seed(0)
    E, R = len(_COUNTS), sum(_COUNTS)
    T = _T if gather else R

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).mul_(scale).bfloat16()

    x, h, a = random(T, _D), random(R, 2 * _N), random(R, _N)
    w1, w2 = random(E, 2 * _N, _D, scale=_D**-0.5), random(E, _D, _N, scale=_N**-0.5)
    slot = torch.randperm(R, generator=generator, device=device).int()
    starts = [0, *accumulate(_COUNTS)]
    offsets = torch.tensor(starts, dtype=torch.int32, device=device)
    gates = torch.rand(R, generator=generator, device=device)
    return Problem(
        x, h, a, w1, w2, gates, slot % T if gather else None, slot, slot.argsort().int(), offsets,
        tile_schedule(offsets, 128, R),
    )  # fmt: skip
