"""Rotary position embedding (Su et al., arXiv 2104.09864), half-split layout as in transformers.

Shape letters: B rows, L tokens, H heads, C head width, F rotated pairs (rotary_dim / 2).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.errors import UserError


def linear(frequencies_F: Tensor, *, factor: float) -> Tensor:
    """Positions divided by `factor` (Chen et al., arXiv 2306.15595)."""
    return frequencies_F / factor


SCALINGS: dict[str, Callable[..., Tensor]] = {"linear": linear}
"""`rope_type` → function of the frequencies and, by keyword alone, of what stands beside it in
`rope_scaling`, of which `factor` is always one."""


def normal_rope_scaling(raw: dict[str, Any]) -> dict[str, Any] | None:
    """{"rope_type": ..., "factor": f, ...}, or None for the default type. 4.x files say `type`.

    Raises:
        UserError: an unknown type, a factor below 1, keys that the type lacks or does not read.
    """
    if not isinstance(raw, dict):
        raise UserError(f"rope_scaling={raw!r} is not supported; expected one flat object")
    kind = raw.get("rope_type", raw.get("type", "default"))
    given = {key: value for key, value in raw.items() if key not in ("rope_type", "type")}
    if kind == "default":
        given.pop("original_max_position_embeddings", None)  # read for other types only
        if given.pop("factor", None) not in (None, 1) or given:
            said = ", ".join(f"{key}={value!r}" for key, value in raw.items())
            raise UserError(
                f"rope_scaling with {said} scales nothing without rope_type: linear; allowed: "
                "{rope_type: linear, factor: f}, or null"
            )
        return None
    if not isinstance(kind, str) or kind not in SCALINGS:
        allowed = ", ".join(("default", *SCALINGS))
        raise UserError(f"rope_scaling type {kind!r} is not supported; allowed: {allowed}")
    factor = given.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
        raise UserError(f"rope_scaling.factor={factor!r} must be a number of at least 1")
    settings = {
        name: value.default is value.empty
        for name, value in inspect.signature(SCALINGS[kind]).parameters.items()
        if value.kind is value.KEYWORD_ONLY
    }
    allowed = ", ".join(("rope_type", *settings))
    unknown = sorted(given.keys() - settings.keys() - {"original_max_position_embeddings"})
    if unknown:
        raise UserError(f"rope_scaling has unknown keys {unknown}; allowed: {allowed}")
    for name, required in settings.items():
        if required and name not in given:
            raise UserError(f"rope_scaling of type {kind} needs {name}; allowed: {allowed}")
    own = {name: given[name] for name in settings if name in given}
    return {"rope_type": kind, **own, "factor": float(factor)}


class Rotation(NamedTuple):
    """cos and sin of every token's angles, fp32 [B, L, F]."""

    cos_BLF: Tensor
    sin_BLF: Tensor


class Rope:
    """Angles of a rotary embedding.

    Not a module and no buffer: frequencies kept in a buffer are rounded when a model is cast to
    bf16 and are garbage after construction on the meta device. They are computed on the CPU once,
    in fp32 as transformers does (so in fp64 models too), and copied to each device once.

    Args:
        size: rotated dimensions of a head, even.
        base: `rope_theta`.
        scaling: as `normal_rope_scaling` gives it.
    """

    def __init__(self, size: int, base: float, scaling: dict[str, Any] | None = None) -> None:
        self.key = (size, base, tuple(sorted((scaling or {}).items())))
        """Equal for equal angles: layers share what was computed once."""
        exponents_F = torch.arange(0, size, 2, dtype=torch.float32, device="cpu")
        frequencies_F = 1.0 / (base ** (exponents_F / size))
        if scaling is not None:
            settings = {key: value for key, value in scaling.items() if key != "rope_type"}
            frequencies_F = SCALINGS[scaling["rope_type"]](frequencies_F, **settings)
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
