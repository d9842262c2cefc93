"""A configuration's error against float32, measured before it may run.

A miscompiled kernel can be the fastest one: it has happened to this project with loops that Triton
flattened. So each configuration computes a small ragged problem first, once in a process, with a
generator of its own. That may be in the middle of a user's forward or backward: nothing around it,
such as autocast or a dispatch mode, has a part in it.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moe.kernels.common.tiles import row_tiles
from moe.kernels.grouped.down_backward import down_backward_ref
from moe.kernels.grouped.down_forward import down_forward_ref
from moe.kernels.grouped.input_gradient import input_gradient_ref
from moe.kernels.grouped.up_forward import up_forward_ref
from moe.kernels.grouped.weight_gradient import weight_gradient_ref
from moe.kernels.hopper.configs import Config
from moe.kernels.hopper.down_backward import down_backward_hopper
from moe.kernels.hopper.outer import weight_gradient_hopper
from moe.kernels.hopper.rows import rows_hopper, up_forward_hopper

BOUND = 1e-2
_COUNTS = (130, 0, 5, 300)
_T, _D, _N = 200, 1024, 256


def error(kernel: str, config: Config, gather: bool, device: torch.device) -> float:
    """Largest relative error by norm of what the kernel makes; infinite where it is not finite.

    Args:
        kernel: name in `_configs.CONFIGS`.
        config: the configuration to run.
        gather: whether an operand is gathered.
        device: a Hopper GPU.
    """
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast("cuda", enabled=False),
        torch.cuda.device(device),
    ):
        return _error(kernel, config, gather, device)


def _error(kernel: str, config: Config, gather: bool, device: torch.device) -> float:
    generator = torch.Generator(device).manual_seed(0)
    E, R = len(_COUNTS), sum(_COUNTS)
    T = _T if gather else R

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).mul_(scale).bfloat16()

    x, h, a = random(T, _D), random(R, 2 * _N), random(R, _N)
    w1, w2 = random(E, 2 * _N, _D, scale=_D**-0.5), random(E, _D, _N, scale=_N**-0.5)
    row_R = torch.randperm(R, generator=generator, device=device).int()
    token = row_R % T if gather else None
    starts = [0, *accumulate(_COUNTS)]
    offsets = torch.tensor(starts, dtype=torch.int32, device=device)
    tiles = row_tiles(offsets, R, x.dtype, "hopper")
    gates = torch.rand(R, generator=generator, device=device)
    if kernel == "up":
        got = up_forward_hopper(x, w1, token, True, tiles, config)
        want = up_forward_ref(x.float(), w1.float(), None, token, offsets, "swiglu")
    elif kernel == "rows":
        got = (
            rows_hopper(a, w2, None, tiles, transposed=True, config=config),
            rows_hopper(h, w1, None, tiles, transposed=False, config=config),
        )
        want = (
            down_forward_ref(a.float(), w2.float(), None, offsets),
            input_gradient_ref(h.float(), w1.float(), offsets),
        )
    elif kernel == "down_backward":
        slots = (row_R, row_R.argsort().int())
        got = down_backward_hopper(
            x, w2, h, gates, token, *slots, offsets, True, tiles, config
        )  # fmt: skip
        want = down_backward_ref(
            x.float(), w2.float(), None, h.float(), gates, token, *slots, offsets,
            "swiglu", True, True, True,
        )  # fmt: skip
    elif kernel == "outer_left":
        got = (weight_gradient_hopper(x, a, token, None, offsets, config),)
        want = (weight_gradient_ref(x.float(), a.float(), token, None, offsets),)
    else:
        got = (weight_gradient_hopper(h, x, None, token, offsets, config),)
        want = (weight_gradient_ref(h.float(), x.float(), None, token, offsets),)
    errors = [((g.float() - w).norm() / w.norm()).item() for g, w in zip(got, want)]
    return max(e if e == e else float("inf") for e in errors)
