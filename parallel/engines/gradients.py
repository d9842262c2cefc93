"""Sums of gradients and their norm, at the speed of memory.

PyTorch adds a bfloat16 gradient to a float32 buffer element by element through a cast (1.9 TB/s on
an H200 that copies 4.2), and its norm over short rows reads 0.9 TB/s; with seven billion parameters
the two took a tenth of a step.

Shape letters: P elements of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv, pick_backend, tl, triton
from moe.kernels.common.launch import launch, on_device
from parallel.engines.rounding import bits, widen


@triton.jit
def _collect_kernel(total_ptr, gradient_ptr, size, ADD: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    value = widen(tl.load(gradient_ptr + places, mask=mask, other=0))
    if ADD:
        value += tl.load(total_ptr + places, mask=mask, other=0.0)
    tl.store(total_ptr + places, value, mask=mask)


def collect(total: Tensor, gradient: Tensor, add: bool, backend: str = "auto") -> None:
    """total += gradient, or total = gradient without `add`; in float32, in place.

    Args:
        total: float32, contiguous.
        gradient: of the same shape, any dtype.
        backend: auto | reference | triton (bfloat16 gradients).
    """
    narrow = gradient.dtype == torch.bfloat16 and total.dtype == torch.float32
    if backend == "auto" and not narrow:
        backend = "reference"
    if pick_backend(backend, total) == "reference":
        total.add_(gradient) if add else total.copy_(gradient)
        return
    if not narrow:
        raise ValueError(
            f"backend='triton' adds bfloat16 to float32, not {gradient.dtype} to {total.dtype}"
        )
    size, block = total.numel(), 4096
    gradient = gradient.contiguous()
    with on_device(total):
        launch(_collect_kernel, (cdiv(size, block),),
            total, bits(gradient), size, ADD=add, BLOCK=block, num_warps=8,
        )  # fmt: skip


@triton.jit
def _squares_kernel(buffer_ptr, sums_ptr, size, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    places = program * BLOCK + tl.arange(0, BLOCK)
    value = widen(tl.load(buffer_ptr + places, mask=places < size, other=0))
    tl.store(sums_ptr + program, tl.sum(value * value, axis=0))


def norm(buffers: Sequence[Tensor], backend: str = "auto") -> Tensor:
    """The 2-norm of flat buffers together, float32 or bfloat16 each, as a float32 scalar.

    By sums of pieces: one running float32 sum over millions of elements loses five digits on a CPU.
    The same bits every time.
    """
    backends = {pick_backend(backend, buffer) for buffer in buffers}
    if backends <= {"reference"}:
        squares = [torch.linalg.vector_norm(b, dtype=torch.float64).square() for b in buffers]
        return torch.stack(squares).sum().sqrt().float()
    block = 8192
    counts = [cdiv(buffer.numel(), block) for buffer in buffers]
    sums = torch.empty(sum(counts), device=buffers[0].device)
    with on_device(sums):
        for buffer, mine in zip(buffers, sums.split(counts)):
            if len(mine):
                launch(_squares_kernel, (len(mine),),
                    bits(buffer), mine, buffer.numel(), BLOCK=block, num_warps=8,
                )  # fmt: skip
    return sums.sum(dtype=torch.float64).sqrt().float()
