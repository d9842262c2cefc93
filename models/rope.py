"""Rotary position embedding (Su et al., arXiv 2104.09864), half-split layout as in transformers.

Shape letters: B rows, L tokens, H heads, C head width, F rotated pairs (rotary_dim / 2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.config import ModelConfig


class Rotation(NamedTuple):
    """cos and sin of every token's angles, fp32 [B, L, F]."""

    cos_BLF: Tensor
    sin_BLF: Tensor


class Rope:
    """Angles of a config's rotary embedding.

    Not a module and no buffer: frequencies kept in a buffer are rounded when a model is cast to
    bf16 and are garbage after construction on the meta device. They are computed on the CPU once,
    in fp32 as transformers does (so in fp64 models too), and copied to each device once.
    """

    def __init__(self, config: ModelConfig) -> None:
        exponents_F = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device="cpu")
        frequencies_F = 1.0 / (config.rope_theta ** (exponents_F / config.rotary_dim))
        if config.rope_scaling is not None:
            frequencies_F = frequencies_F / config.rope_scaling["factor"]
        self._frequencies = {torch.device("cpu"): frequencies_F}

    def __call__(self, positions_BL: Tensor) -> Rotation:
        """Rotation for integer positions [B, L]."""
        device = positions_BL.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        angles_BLF = positions_BL[..., None].float() * self._frequencies[device]
        return Rotation(angles_BLF.cos(), angles_BLF.sin())


def rotate(x_BLHC: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first 2F dimensions of every head; the rest passes. Same dtype as the input.

    Computed in fp32 at least: bf16 cosines would move positions by up to half a token.
    """
    pairs = rotation.cos_BLF.shape[-1]
    dtype = torch.promote_types(x_BLHC.dtype, torch.float32)
    cos = rotation.cos_BLF[:, :, None].to(dtype)
    sin = rotation.sin_BLF[:, :, None].to(dtype)
    first, second = x_BLHC[..., :pairs].to(dtype), x_BLHC[..., pairs : 2 * pairs].to(dtype)
    parts = [first * cos - second * sin, second * cos + first * sin]
    parts = [part.to(x_BLHC.dtype) for part in parts]
    if 2 * pairs < x_BLHC.shape[-1]:
        parts.append(x_BLHC[..., 2 * pairs :])
    return torch.cat(parts, dim=-1)
