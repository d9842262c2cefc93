"""AdamW (Loshchilov & Hutter, arXiv 1711.05101), for states in float32 or bfloat16.

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g²        g = gradient / scale
    w = (1 - lr decay) w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

One pass over memory updates a flat buffer. All arithmetic is float32; what is stored in bfloat16 is
rounded at random (`parallel.engines.rounding`).

Shape letters: P elements of the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

from moe.kernels.common.backend import cdiv, pick_backend, tl, triton
from moe.kernels.common.launch import launch, on_device
from parallel.engines.optimizer import Group, Piece, Scalars
from parallel.engines.rounding import bits, mix, narrow, random_word, signed, store, widen
from training.optim.config import OptimConfig


class Rates(NamedTuple):
    """What an update needs besides the buffers."""

    numbers: Tensor
    """float32 [6] on the device: 1 - lr · decay, lr / (1 - beta1^t), sqrt(1 - beta2^t), the
    gradient's divisor, 1 to update or 0 to leave everything alone, t."""
    betas: tuple[float, float]
    eps: float
    seed: int
    """Of the random bits; another one for each buffer."""


# -------------------------------------------------------------------------------------- reference

# Elements that the reference takes at a time: temporaries stay in a processor's cache.
_PIECE = 1 << 16


def adamw_ref(
    weight_P: Tensor,
    copy_P: Tensor | None,
    exp_avg_P: Tensor,
    exp_avg_sq_P: Tensor,
    gradient_P: Tensor,
    rates: Rates,
    first: int = 0,
) -> None:
    """Plain torch version of `adamw`, any device; float64 buffers are computed in float64."""
    wide = torch.promote_types(weight_P.dtype, torch.float32)
    decay, size, root, divisor, keep, step = rates.numbers.to(wide)
    beta1, beta2 = rates.betas
    for start in range(0, weight_P.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        w, m, v = weight_P[piece], exp_avg_P[piece], exp_avg_sq_P[piece]
        g = gradient_P[piece].to(wide) / divisor
        wide_m, wide_v = m.to(wide), v.to(wide)
        new_m = wide_m + (g - wide_m) * (1 - beta1)
        new_v = wide_v * beta2 + g * g * (1 - beta2)
        new_w = w.to(wide) * decay - size * new_m / (new_v.sqrt() / root + rates.eps)
        store((w, m, v), (new_w, new_m, new_v), keep, rates.seed, step, first + start)
        if copy_P is not None:
            copy_P[piece].copy_(w)


# ----------------------------------------------------------------------------------------- kernel


@triton.jit
def _adamw_kernel(
    weight_ptr, copy_ptr, m_ptr, v_ptr, gradient_ptr, numbers_ptr, size, first, seed,
    beta1, rest1, beta2, rest2, eps,
    COPY: tl.constexpr, ROUND_WEIGHT: tl.constexpr, ROUND_MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    mask = places < size
    if tl.load(numbers_ptr + 4) > 0.0:
        decay = tl.load(numbers_ptr)
        step_size = tl.load(numbers_ptr + 1)
        # the kernel waits for arithmetic as much as for memory: no division that can be avoided
        unroot = 1.0 / tl.load(numbers_ptr + 2)
        unscale = 1.0 / tl.load(numbers_ptr + 3)
        g = widen(tl.load(gradient_ptr + places, mask=mask, other=0)) * unscale
        w = widen(tl.load(weight_ptr + places, mask=mask, other=0))
        m = widen(tl.load(m_ptr + places, mask=mask, other=0))
        v = widen(tl.load(v_ptr + places, mask=mask, other=0))
        m = m + (g - m) * rest1
        v = v * beta2 + g * g * rest2
        w = w * decay - step_size * m / (tl.sqrt(v) * unroot + eps)
        if ROUND_WEIGHT or ROUND_MOMENTS:
            step = tl.load(numbers_ptr + 5).to(tl.int32).to(tl.uint32, bitcast=True)
            one = random_word(places, first, start, seed, step)
        if ROUND_WEIGHT:
            tl.store(weight_ptr + places, narrow(w, one & 0xFFFF), mask=mask)
        else:
            tl.store(weight_ptr + places, w, mask=mask)
        if COPY:  # to the nearest, ties to even
            lowest = (w.to(tl.uint32, bitcast=True) >> 16) & 1
            tl.store(copy_ptr + places, narrow(w, lowest + 0x7FFF), mask=mask)
        if ROUND_MOMENTS:
            two = mix(one ^ 0x9E3779B9)
            tl.store(m_ptr + places, narrow(m, one >> 16), mask=mask)
            tl.store(v_ptr + places, narrow(v, two & 0xFFFF), mask=mask)
        else:
            tl.store(m_ptr + places, m, mask=mask)
            tl.store(v_ptr + places, v, mask=mask)


def adamw_triton(
    weight_P: Tensor,
    copy_P: Tensor | None,
    exp_avg_P: Tensor,
    exp_avg_sq_P: Tensor,
    gradient_P: Tensor,
    rates: Rates,
    first: int = 0,
    block: int = 2048,
) -> None:
    """Launches the kernel; see `adamw`."""
    size = weight_P.numel()
    if size == 0:
        return
    beta1, beta2 = rates.betas
    with on_device(weight_P):
        launch(_adamw_kernel, (cdiv(size, block),),
            bits(weight_P), bits(weight_P if copy_P is None else copy_P), bits(exp_avg_P),
            bits(exp_avg_sq_P), bits(gradient_P), rates.numbers, size, first,
            signed(rates.seed),
            beta1, 1 - beta1, beta2, 1 - beta2, rates.eps,
            COPY=copy_P is not None, ROUND_WEIGHT=weight_P.dtype == torch.bfloat16,
            ROUND_MOMENTS=exp_avg_P.dtype == torch.bfloat16, BLOCK=block, num_warps=8,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------- public


def adamw(
    weight_P: Tensor,
    copy_P: Tensor | None,
    exp_avg_P: Tensor,
    exp_avg_sq_P: Tensor,
    gradient_P: Tensor,
    rates: Rates,
    backend: str = "auto",
    first: int = 0,
) -> None:
    """Update weights and moments in place; no host sync.

    Args:
        weight_P: float32 or bfloat16 (then stochastically rounded); float64 with the reference.
        copy_P: bfloat16, gets the weights rounded to the nearest; None: no copy is wanted.
        exp_avg_P, exp_avg_sq_P: both float32 or both bfloat16 (then stochastically rounded).
        gradient_P: float32 or bfloat16; is not changed.
        backend: auto | reference | triton.
        first: place of the first element in the whole buffer, where this is a piece of it; the
            random bits depend on it.

    Raises:
        ValueError: buffers that are not contiguous or not of one length, or an impossible dtype.
    """
    buffers = [weight_P, exp_avg_P, exp_avg_sq_P, gradient_P]
    buffers += [] if copy_P is None else [copy_P]
    if any(b.shape != weight_P.shape or b.dim() != 1 or b.stride() != (1,) for b in buffers):
        shapes = ", ".join(str(list(b.shape)) for b in buffers)
        raise ValueError(f"adamw needs contiguous flat buffers of one length, got {shapes}")
    if exp_avg_P.dtype != exp_avg_sq_P.dtype:
        raise ValueError(f"moments of {exp_avg_P.dtype} and {exp_avg_sq_P.dtype}: must be alike")
    backend = pick_backend(backend, gradient_P)
    if backend == "triton" and copy_P is not None and copy_P.dtype != torch.bfloat16:
        raise ValueError(f"the copy is {copy_P.dtype}; backend='triton' writes bfloat16 copies")
    function = adamw_triton if backend == "triton" else adamw_ref
    function(weight_P, copy_P, exp_avg_P, exp_avg_sq_P, gradient_P, rates, first)


# Elements from which float32 buffers in host memory (`parallel.offload`) are updated by PyTorch's
# fused kernel: 29 ms for 1e8 elements on 16 cores, the reference takes 386 ms.
LARGE = 1 << 22


def _adamw_host(
    piece: Piece, weight_decay: float, scalars: Scalars, betas: tuple[float, float], eps: float
) -> None:
    """`torch.optim.AdamW(fused=True)` on a float32 piece on the CPU; its gradient comes out scaled,
    which nobody reads after the update."""
    fused_adamw(
        [piece.weight],
        [piece.gradient],
        [piece.states["exp_avg"]],
        [piece.states["exp_avg_sq"]],
        [],
        [scalars.count - scalars.keep],  # it counts this update itself
        fused=True,
        grad_scale=scalars.divisor,
        found_inf=1 - scalars.keep,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=scalars.lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def _on_host(piece: Piece) -> bool:
    flats = (piece.weight, piece.gradient, *piece.states.values())
    alike = all(flat.dtype == torch.float32 and not flat.is_cuda for flat in flats)
    return alike and piece.copy is None and piece.weight.numel() >= LARGE


def rates_numbers(
    lr: Tensor, weight_decay: float, betas: tuple[float, float], step: Tensor, divisor: Tensor,
    keep: Tensor,
) -> Tensor:  # fmt: skip
    """`Rates.numbers` from scalars on the device; `step` counts this update already."""
    lr, t = lr.double(), step.double()
    bias1, bias2 = 1 - betas[0] ** t, 1 - betas[1] ** t
    numbers = [1 - lr * weight_decay, lr / bias1, bias2.sqrt(), divisor.double(), keep.double(), t]
    return torch.stack(numbers).float()


class AdamW(OptimConfig):
    """AdamW (arXiv 1711.05101) for every parameter."""

    kind: Literal["adamw"] = "adamw"
    """Which optimizer."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default_factory=lambda: [0.9, 0.95])
    """Decay of the first and second moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""

    @field_validator("betas")
    @classmethod
    def _two(cls, betas: list[float]) -> list[float]:
        if len(betas) != 2:
            raise ValueError(f"optim.betas={betas} must be a list of exactly 2 numbers")
        return betas

    def states(self, group: Group) -> dict[str, torch.dtype]:
        """First and second moment."""
        return dict.fromkeys(("exp_avg", "exp_avg_sq"), self.state_dtype(group))

    def update(self, group: Group, pieces: Sequence[Piece], scalars: Scalars) -> None:
        """See `parallel.engines.optimizer.Optimizer`."""
        lr, count, divisor, keep = scalars
        betas = (self.betas[0], self.betas[1])
        numbers = rates_numbers(lr, group.weight_decay, betas, count, divisor, keep)
        for piece in pieces:
            if _on_host(piece):
                _adamw_host(piece, group.weight_decay, scalars, betas, self.eps)
                continue
            adamw(
                piece.weight,
                piece.copy,
                piece.states["exp_avg"],
                piece.states["exp_avg_sq"],
                piece.gradient,
                Rates(numbers, betas, self.eps, piece.seed),
                first=piece.first,
            )
