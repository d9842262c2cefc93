"""One AdamW update of a flat buffer in one pass over memory, for states in float32 or bfloat16.

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g²        g = gradient / scale
    w = (1 - lr decay) w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

(Loshchilov & Hutter, arXiv 1711.05101.) All arithmetic is float32. What is stored in bfloat16 is
rounded up or down at random, with the probabilities that make the mean exact (stochastic rounding;
for weights: Zamirai et al., arXiv 2010.06192). Nearest rounding would lose every step that is
smaller than half the distance of two bfloat16 numbers, 0.2 to 0.4 percent of a weight.

The random bits are a hash of (seed, number of the update, element): the same on every device, in
every run that is resumed, and nowhere stored.

Shape letters: P elements of the buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv, pick_backend, tl, triton
from moe.kernels.common.launch import launch, on_device

_WORD = 0xFFFFFFFF


class Rates(NamedTuple):
    """What an update needs besides the buffers."""

    numbers: Tensor
    """float32 [6] on the device: 1 - lr · decay, lr / (1 - beta1^t), sqrt(1 - beta2^t), the
    gradient's divisor, 1 to update or 0 to leave everything alone, t."""
    betas: tuple[float, float]
    eps: float
    seed: int
    """Of the random bits; another one for each buffer."""


# ------------------------------------------------------------------------------------ random bits
# The finalizer "lowbias32" (github.com/skeeto/hash-prospector): every input bit changes every
# output bit with a probability near one half.


def _mix_ref(x: Tensor) -> Tensor:
    """Hash of 32-bit words held in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    # the product of two 32-bit words overflows int64, whose low 32 bits are right all the same
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def random_words(seed: int, step: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Two random 32-bit words (in int64) for each of the elements `first` … `first + count`."""
    place_P = torch.arange(first, first + count, dtype=torch.int64, device=step.device)
    key = _mix_ref((seed & _WORD) ^ _mix_ref(step.to(torch.int64)))
    low_P, high_P = place_P & _WORD, place_P >> 32
    one_P = _mix_ref(low_P ^ _mix_ref(key ^ (high_P + 1)))
    return one_P, _mix_ref(one_P ^ 0x9E3779B9)


def stochastic_bfloat16(x_P: Tensor, random_P: Tensor) -> Tensor:
    """float32 → bfloat16, up or down by 16 random bits (int64, less than 65536); NaN stays NaN."""
    bits_P = x_P.view(torch.int32).to(torch.int64) & _WORD
    rounded_P = ((bits_P + random_P) >> 16) & 0xFFFF
    signed_P = torch.where(rounded_P >= 0x8000, rounded_P - 0x10000, rounded_P).to(torch.int16)
    return torch.where(x_P.isnan(), x_P.bfloat16(), signed_P.view(torch.bfloat16))


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
    random = torch.bfloat16 in (weight_P.dtype, exp_avg_P.dtype)

    def write(target: Tensor, value: Tensor, bits: Tensor | None) -> None:
        if target.dtype == torch.bfloat16:
            value = stochastic_bfloat16(value, bits)
        target.copy_(torch.where(keep > 0, value, target))  # not a product: 0 * NaN is NaN

    for start in range(0, weight_P.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        w, m, v = weight_P[piece], exp_avg_P[piece], exp_avg_sq_P[piece]
        one = two = None
        if random:
            one, two = random_words(rates.seed, step, first + start, w.numel())
        g = gradient_P[piece].to(wide) / divisor
        wide_m, wide_v = m.to(wide), v.to(wide)
        new_m = wide_m + (g - wide_m) * (1 - beta1)
        new_v = wide_v * beta2 + g * g * (1 - beta2)
        new_w = w.to(wide) * decay - size * new_m / (new_v.sqrt() / root + rates.eps)
        write(w, new_w, None if one is None else one & 0xFFFF)
        write(m, new_m, None if one is None else one >> 16)
        write(v, new_v, None if two is None else two & 0xFFFF)
        if copy_P is not None:
            copy_P[piece].copy_(w)


# ----------------------------------------------------------------------------------------- kernel
# bfloat16 buffers come as int16: rounding works on bits anyway.


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def widen(x):
    """float32 of a bfloat16 that came as int16; anything else as it is."""
    if x.dtype == tl.int16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def _narrow(x, carry):
    """The upper 16 bits of x, with `carry` added to the lower ones; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + carry) >> 16).to(tl.uint16)
    quiet = ((bits >> 16) | 0x40).to(tl.uint16)
    return tl.where(x == x, rounded, quiet).to(tl.int16, bitcast=True)


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
            key = _mix((_mix(step) ^ seed).to(tl.uint32))
            low = (places + first).to(tl.uint32)
            # the upper half of a place is that of the block's first element, or one more
            high = ((start + first) >> 32).to(tl.uint32)
            same = ((places + first) >> 32) == ((start + first) >> 32)
            upper = tl.where(same, _mix(key ^ (high + 1)), _mix(key ^ (high + 2)))
            one = _mix(low ^ upper)
        if ROUND_WEIGHT:
            tl.store(weight_ptr + places, _narrow(w, one & 0xFFFF), mask=mask)
        else:
            tl.store(weight_ptr + places, w, mask=mask)
        if COPY:  # to the nearest, ties to even
            lowest = (w.to(tl.uint32, bitcast=True) >> 16) & 1
            tl.store(copy_ptr + places, _narrow(w, lowest + 0x7FFF), mask=mask)
        if ROUND_MOMENTS:
            two = _mix(one ^ 0x9E3779B9)
            tl.store(m_ptr + places, _narrow(m, one >> 16), mask=mask)
            tl.store(v_ptr + places, _narrow(v, two & 0xFFFF), mask=mask)
        else:
            tl.store(m_ptr + places, m, mask=mask)
            tl.store(v_ptr + places, v, mask=mask)


def bits(buffer: Tensor) -> Tensor:
    """A bfloat16 tensor as int16, any other as it is."""
    return buffer.view(torch.int16) if buffer.dtype == torch.bfloat16 else buffer


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
    seed = rates.seed & _WORD
    with on_device(weight_P):
        launch(_adamw_kernel, (cdiv(size, block),),
            bits(weight_P), bits(weight_P if copy_P is None else copy_P), bits(exp_avg_P),
            bits(exp_avg_sq_P), bits(gradient_P), rates.numbers, size, first,
            seed - (1 << 32) if seed >> 31 else seed,
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


def buffer_seed(seed: int, number: int) -> int:
    """The seed of one of several buffers."""
    return int(_mix_ref(torch.tensor((seed + 0x632BE5AB * (number + 1)) & _WORD)))


def rates_numbers(
    lr: Tensor, weight_decay: float, betas: tuple[float, float], step: Tensor, divisor: Tensor,
    keep: Tensor,
) -> Tensor:  # fmt: skip
    """`Rates.numbers` from scalars on the device; `step` counts this update already."""
    lr, t = lr.double(), step.double()
    bias1, bias2 = 1 - betas[0] ** t, 1 - betas[1] ** t
    numbers = [1 - lr * weight_decay, lr / bias1, bias2.sqrt(), divisor.double(), keep.double(), t]
    return torch.stack(numbers).float()
