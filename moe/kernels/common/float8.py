"""Float8 in blocks: e4m3 numbers (3 bits of mantissa), a float32 scale for each 128 or 128 x 128.

The recipe of DeepSeek-V3 (arXiv 2412.19437, section 3.3): activations and gradients have a scale
for each row's 128 neighbouring columns, weights for each 128 x 128. A scale is the block's largest
magnitude over 448, the largest number of e4m3, so nothing overflows. Products sum 128 inner numbers
as the tensor cores do, and those sums, times both scales, in float32.

Not finite stays not finite: NaN keeps its place, an infinity makes its block NaN. Blocks of numbers
too small for a scale become zeros.

What is quantised, and where (scales lie along the last dimension):

    X      rows [T, D]      once a token
    W1     [E, H, D]        and its transpose [E, D, H] for the gradient of X: the same numbers
    H, A   rows [R, H], [R, N]    from the float32 sums of the up-projection
    W2     [E, D, N]        and its transpose [E, N, D] for dA
    dO     rows [T, D]      once a token
    dH     rows [R, H]      from float32

Gate and up columns of H alternate, so that one block of A belongs to two of H. The products: H and
A from gathered X and W1; Y = A · W2 and the gathered gradient of X = dH · W1 in bfloat16; dA from
gathered dO and W2, and with H dequantised from it dH, A' = gate · A in bfloat16 and the gates'
gradient. Weight gradients are products of bfloat16: dW1 of dH and X dequantised, dW2 of dO and A'.
Any size is allowed: the last block of a row is shorter.

Shape letters: R rows, C columns; BR, BC: blocks of 128 of those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv

FLOAT8 = torch.float8_e4m3fn
BLOCK = 128
LARGEST = 448.0
LEAST = 1e-30
"""Of the scales: none is zero, nor so small that a GPU would take it for zero."""


def _scale_of(blocks: Tensor, axes: tuple[int, ...]) -> Tensor:
    size = blocks.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")).abs()
    return (size.amax(axes) / LARGEST).clamp_min(LEAST)


def quantise_rows_ref(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """(q_RC in e4m3, scale [R, BC] in float32) with x ≈ q · scale; any float dtype, any device."""
    R, C = x_RC.shape
    padded = x_RC.new_zeros(R, cdiv(C, BLOCK) * BLOCK, dtype=torch.float32)
    padded[:, :C] = x_RC
    blocks = padded.unflatten(1, (-1, BLOCK))
    scale = _scale_of(blocks, (2,))
    q_RC = (blocks / scale[:, :, None]).flatten(1)[:, :C]
    return q_RC.to(FLOAT8).contiguous(), scale


def quantise_weight_ref(w_ERC: Tensor) -> tuple[Tensor, Tensor]:
    """(q_ERC in e4m3, scale [E, BR, BC] in float32) of each expert's matrix."""
    E, R, C = w_ERC.shape
    rows, cols = cdiv(R, BLOCK), cdiv(C, BLOCK)
    padded = w_ERC.new_zeros(E, rows * BLOCK, cols * BLOCK, dtype=torch.float32)
    padded[:, :R, :C] = w_ERC
    blocks = padded.view(E, rows, BLOCK, cols, BLOCK)
    scale = _scale_of(blocks, (2, 4))
    q = (blocks / scale[:, :, None, :, None]).view(padded.shape)
    return q[:, :R, :C].to(FLOAT8).contiguous(), scale


def dequantise_rows_ref(q_RC: Tensor, scale: Tensor) -> Tensor:
    """q · scale in float32."""
    return q_RC.float() * scale.repeat_interleave(BLOCK, 1)[:, : q_RC.shape[1]]


def dequantise_weight_ref(q_ERC: Tensor, scale: Tensor) -> Tensor:
    """q · scale in float32."""
    spread = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return q_ERC.float() * spread[:, : q_ERC.shape[1], : q_ERC.shape[2]]
