"""Stochastic rounding to bfloat16, with random bits that nobody has to save.

What is stored in bfloat16 is rounded up or down at random, with the probabilities that make the
mean exact (for weights: Zamirai et al., arXiv 2010.06192). Nearest rounding would lose every step
that is smaller than half the distance of two bfloat16 numbers, 0.2 to 0.4 percent of a weight.

The random bits are a hash of (seed, number of the update, element): the same on every device, in
every run that is resumed, and nowhere stored.

Shape letters: P elements of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv, pick_backend, tl, triton
from moe.kernels.common.launch import launch, on_device

WORD = 0xFFFFFFFF
_NEXT = 0x9E3779B9


# ------------------------------------------------------------------------------------ random bits
# The finalizer "lowbias32" (github.com/skeeto/hash-prospector): every input bit changes every
# output bit with a probability near one half.


def _mix_ref(x: Tensor) -> Tensor:
    """Hash of 32-bit words held in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & WORD
    x = x ^ (x >> 15)
    # the product of two 32-bit words overflows int64, whose low 32 bits are right all the same
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def random_words(seed: int, step: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Two random 32-bit words (in int64) for each of the elements `first` … `first + count`."""
    place_P = torch.arange(first, first + count, dtype=torch.int64, device=step.device)
    key = _mix_ref((seed & WORD) ^ _mix_ref(step.to(torch.int64)))
    low_P, high_P = place_P & WORD, place_P >> 32
    one_P = _mix_ref(low_P ^ _mix_ref(key ^ (high_P + 1)))
    return one_P, _mix_ref(one_P ^ _NEXT)


def _halves(seed: int, step: Tensor, first: int, count: int) -> Iterator[Tensor]:
    """16 random bits for each element, as often as they are asked for."""
    one_P, two_P = random_words(seed, step, first, count)
    while True:
        yield one_P & 0xFFFF
        yield one_P >> 16
        one_P, two_P = two_P, _mix_ref(two_P ^ _NEXT)


def buffer_seed(seed: int, number: int) -> int:
    """The seed of one of several buffers."""
    return int(_mix_ref(torch.tensor((seed + 0x632BE5AB * (number + 1)) & WORD)))


def stochastic_bfloat16(x_P: Tensor, random_P: Tensor) -> Tensor:
    """float32 → bfloat16, up or down by 16 random bits (int64, less than 65536); NaN stays NaN."""
    bits_P = x_P.view(torch.int32).to(torch.int64) & WORD
    rounded_P = ((bits_P + random_P) >> 16) & 0xFFFF
    signed_P = torch.where(rounded_P >= 0x8000, rounded_P - 0x10000, rounded_P).to(torch.int16)
    return torch.where(x_P.isnan(), x_P.bfloat16(), signed_P.view(torch.bfloat16))


# ----------------------------------------------------------------------------- parts of kernels
# bfloat16 buffers come as int16: rounding works on bits anyway.


def bits(buffer: Tensor) -> Tensor:
    """A bfloat16 tensor as int16, any other as it is."""
    return buffer.view(torch.int16) if buffer.dtype == torch.bfloat16 else buffer


@triton.jit
def mix(x):
    """`_mix_ref` of uint32."""
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
def narrow(x, carry):
    """The upper 16 bits of x, with `carry` added to the lower ones; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + carry) >> 16).to(tl.uint16)
    quiet = ((bits >> 16) | 0x40).to(tl.uint16)
    return tl.where(x == x, rounded, quiet).to(tl.int16, bitcast=True)


# ---------------------------------------------------------------------------------------- storing


@triton.jit
def random_word(places, first, start, seed, step):
    """The first word of `random_words` for the elements `first + places` of a block that begins at
    `start`; `step` is uint32."""
    key = mix((mix(step) ^ seed).to(tl.uint32))
    low = (places + first).to(tl.uint32)
    # the upper half of a place is that of the block's first element, or one more
    high = ((start + first) >> 32).to(tl.uint32)
    same = ((places + first) >> 32) == ((start + first) >> 32)
    upper = tl.where(same, mix(key ^ (high + 1)), mix(key ^ (high + 2)))
    return mix(low ^ upper)


@triton.jit
def _store_kernel(
    target_ptr, value_ptr, keep_ptr, step_ptr, size, first, seed,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    mask = places < size
    if tl.load(keep_ptr) > 0.0:
        step = tl.load(step_ptr).to(tl.int32).to(tl.uint32, bitcast=True)
        word = random_word(places, first, start, seed, step)
        if HALF >= 2:
            word = mix(word ^ 0x9E3779B9)
        carry = (word & 0xFFFF) if HALF % 2 == 0 else (word >> 16)
        value = tl.load(value_ptr + places, mask=mask, other=0.0)
        tl.store(target_ptr + places, narrow(value, carry), mask=mask)


def signed(seed: int) -> int:
    """The 32 bits of a seed as kernels take them."""
    seed &= WORD
    return seed - (1 << 32) if seed >> 31 else seed


def _store_triton(
    target_P: Tensor, value_P: Tensor, keep: Tensor, seed: int, step: Tensor, first: int, half: int
) -> None:
    size, block = target_P.numel(), 2048
    if size:
        with on_device(target_P):
            launch(_store_kernel, (cdiv(size, block),),
                bits(target_P), value_P.float().contiguous(), keep, step, size, first,
                signed(seed), HALF=half, BLOCK=block, num_warps=8,
            )  # fmt: skip


def store(
    targets: Sequence[Tensor],
    values: Sequence[Tensor],
    keep: Tensor,
    seed: int,
    step: Tensor,
    first: int = 0,
    backend: str = "auto",
) -> None:
    """Set flat tensors of one length, unless the step is skipped; bfloat16 is rounded at random.

    Args:
        values: float32 or wider.
        keep: scalar, 0 leaves everything alone.
        seed, step, first: of the random bits; `step` is a scalar on the device, `first` the place
            of the first element in the whole buffer.
        backend: auto | reference | triton, of up to four targets; both give the same bits.
    """
    some = any(target.dtype == torch.bfloat16 for target in targets)
    kernel = some and len(targets) <= 4 and pick_backend(backend, targets[0]) == "triton"
    halves = _halves(seed, step, first, targets[0].numel())
    for number, (target, value) in enumerate(zip(targets, values, strict=True)):
        if kernel and target.dtype == torch.bfloat16:
            _store_triton(target, value, keep, seed, step, first, number)
            continue
        random_P = next(halves) if some and not kernel else None
        if target.dtype == torch.bfloat16:
            value = stochastic_bfloat16(value, random_P)
        target.copy_(torch.where(keep > 0, value, target))  # not a product: 0 * NaN is NaN
