"""Rotary position embedding (Su et al., arXiv 2104.09864) and its scalings, as transformers
computes them.

Shape letters: B rows, L tokens, H heads, C head width, F rotated pairs (rotary_dim / 2).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from models.errors import UserError, allowed_by
from moe.settings import Settings

Length = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


def inverse_frequencies(base: float | Tensor, size: int) -> Tensor:
    """[F] fp32, positions per radian of each pair; where the base is, or on the CPU."""
    device = base.device if isinstance(base, Tensor) else "cpu"
    return base ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)


class RopeScaling(Settings):
    """A kind of scaling: the keys of `rope_scaling` that it reads, and what it makes of the
    frequencies."""

    smallest: ClassVar[int] = 2
    """Rotated dimensions that it needs."""

    rope_type: str
    factor: Annotated[float, Field(ge=1)]
    """How much longer texts become."""

    @property
    def amplitude(self) -> float:
        """Multiplies the cosines and sines, hence the scores with its square."""
        return 1.0

    def frequencies(self, rope: Rope) -> Tensor:
        """[F] fp32 on the CPU, for texts of any length."""
        return 1.0 / inverse_frequencies(rope.base, rope.size)

    def at(self, positions_BL: Tensor, rope: Rope, frequencies_F: Tensor) -> Tensor:
        """The same where the tokens given have these positions, on their device."""
        return frequencies_F


class Linear(RopeScaling):
    """Positions divided by `factor` (Chen et al., arXiv 2306.15595)."""

    rope_type: Literal["linear"] = "linear"

    def frequencies(self, rope: Rope) -> Tensor:
        return super().frequencies(rope) / self.factor


class Dynamic(RopeScaling):
    """A larger base for texts beyond `max_position_embeddings`, the plain one up to there
    (NTK-aware; Peng et al., arXiv 2309.00071, section 3.3)."""

    rope_type: Literal["dynamic"] = "dynamic"
    smallest = 4

    def at(self, positions_BL: Tensor, rope: Rope, frequencies_F: Tensor) -> Tensor:
        length, longest = positions_BL.max() + 1, rope.max_positions
        stretch = self.factor * length.clamp(min=longest) / longest - (self.factor - 1)
        base = rope.base * stretch ** (rope.size / (rope.size - 2))
        grown_F = 1.0 / inverse_frequencies(base, rope.size)
        return torch.where(length > longest, grown_F, frequencies_F)


class Yarn(RopeScaling):
    """Fast pairs as they are, slow ones divided by `factor`, a ramp between them, and larger scores
    (YaRN; Peng et al., arXiv 2309.00071)."""

    rope_type: Literal["yarn"] = "yarn"
    original_max_position_embeddings: Length
    beta_fast: Positive = 32.0
    """Pairs that turn more often than this within the original length stay as they are."""
    beta_slow: Positive = 1.0
    """Pairs that turn less often are divided by `factor`."""
    truncate: bool = True
    """Round the ends of the ramp to whole pairs."""
    attention_factor: Positive | None = None
    """The amplitude; otherwise it follows from `factor`."""
    mscale: Annotated[float, Field(ge=0)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0)] | None = None
    """DeepSeek's weights of the amplitude, for what is rotated and for whole heads."""

    @model_validator(mode="after")
    def _ramp_goes_down(self) -> Yarn:
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"at least beta_slow={self.beta_slow:g}, in beta_fast")
        return self

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth()

    def growth(self, weight: float = 1.0) -> float:
        """0.1 ln(factor) + 1, the paper's amplitude."""
        return 0.1 * weight * math.log(self.factor) + 1.0

    def frequencies(self, rope: Rope) -> Tensor:
        inverse_F = inverse_frequencies(rope.base, rope.size)
        low, high = (self._pair_of(turns, rope) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.size - 1)
        if low == high:
            high += 0.001
        pairs_F = torch.arange(rope.size // 2, dtype=torch.float32, device="cpu")
        kept_F = 1 - ((pairs_F - low) / (high - low)).clamp(0, 1)
        return 1 / (self.factor * inverse_F) * (1 - kept_F) + 1 / inverse_F * kept_F

    def _pair_of(self, turns: float, rope: Rope) -> float:
        """The pair that turns so often within the original length."""
        length = self.original_max_position_embeddings
        return rope.size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.base))


class Llama3(RopeScaling):
    """Waves short against the original length stay as they are, long ones are stretched by
    `factor`, those between in part (Llama 3.1, arXiv 2407.21783)."""

    rope_type: Literal["llama3"] = "llama3"
    original_max_position_embeddings: Length
    low_freq_factor: Positive
    """Waves longer than the original length divided by this are stretched."""
    high_freq_factor: Positive
    """Waves shorter than the original length divided by this stay as they are."""

    @model_validator(mode="after")
    def _has_a_middle(self) -> Llama3:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"above low_freq_factor={self.low_freq_factor:g}, in high_freq_factor")
        return self

    def frequencies(self, rope: Rope) -> Tensor:
        plain_F, length = super().frequencies(rope), self.original_max_position_embeddings
        low, high = self.low_freq_factor, self.high_freq_factor
        waves_F = 2 * math.pi / plain_F
        kept_F = (length / waves_F - low) / (high - low)
        between_F = (1 - kept_F) * plain_F / self.factor + kept_F * plain_F
        stretched_F = torch.where(waves_F > length / low, plain_F / self.factor, between_F)
        return torch.where(waves_F < length / high, plain_F, stretched_F)


SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": Linear,
    "dynamic": Dynamic,
    "yarn": Yarn,
    "llama3": Llama3,
}
"""`rope_type` → its settings and what it does."""

_ORIGINAL = "original_max_position_embeddings"


def normal_rope_scaling(raw: dict[str, Any], max_positions: Any = None) -> dict[str, Any] | None:
    """{"rope_type": ..., "factor": f, ...} with what differs from the kind's defaults, or None for
    the default type. 4.x files say `type`.

    Args:
        max_positions: `max_position_embeddings`, which is the original length where none is given.

    Raises:
        UserError: an unknown type, a factor below 1, keys that the type lacks or does not read.
    """
    if not isinstance(raw, dict):
        raise UserError(f"rope_scaling={raw!r} is not supported; expected one flat object")
    kind = raw.get("rope_type", raw.get("type", "default"))
    given = {key: value for key, value in raw.items() if key not in ("rope_type", "type")}
    if kind == "default":
        given.pop(_ORIGINAL, None)  # read for other types only
        if given.pop("factor", None) not in (None, 1) or given:
            said = ", ".join(f"{key}={value!r}" for key, value in raw.items())
            raise UserError(
                f"rope_scaling with {said} scales nothing without rope_type: linear; allowed: "
                "{rope_type: linear, factor: f}, another rope_type, or null"
            )
        return None
    if not isinstance(kind, str) or kind not in SCALINGS:
        allowed = ", ".join(("default", *SCALINGS))
        raise UserError(f"rope_scaling type {kind!r} is not supported; allowed: {allowed}")
    fields = dict(SCALINGS[kind].model_fields)
    if _ORIGINAL not in fields:
        given.pop(_ORIGINAL, None)
    elif given.get(_ORIGINAL) is None and isinstance(max_positions, int):
        given[_ORIGINAL] = max_positions
    given = {key: value for key, value in given.items() if value is not None}
    allowed = ", ".join(("rope_type", *(key for key in fields if key != "rope_type")))
    if unknown := sorted(given.keys() - fields.keys()):
        raise UserError(f"rope_scaling has unknown keys {unknown}; allowed: {allowed}")
    for key, field in fields.items():
        if field.is_required() and key not in given:
            raise UserError(f"rope_scaling of type {kind} needs {key}; allowed: {allowed}")
    try:
        scaling = SCALINGS[kind](rope_type=kind, **given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "value_error":  # of our own checks
            said = str(first["ctx"]["error"])
            raise UserError(f"rope_scaling of type {kind} needs a number {said}") from None
        key = first["loc"][0]
        raise UserError(f"rope_scaling.{key}={given[key]!r} must be {allowed_by(first)}") from None
    return {"rope_type": kind, **scaling.model_dump(exclude={"rope_type"}, exclude_defaults=True)}


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
        max_positions: `max_position_embeddings`.
    """

    def __init__(
        self,
        size: int,
        base: float,
        scaling: dict[str, Any] | None = None,
        max_positions: int = 1,
    ) -> None:
        self.size, self.base, self.max_positions = size, base, max_positions
        self.scaling = None if scaling is None else SCALINGS[scaling["rope_type"]](**scaling)
        self.key = (size, base, self.scaling, max_positions)
        """Equal for equal angles: layers share what was computed once."""
        if self.scaling is None:
            frequencies_F = 1.0 / inverse_frequencies(base, size)
        else:
            frequencies_F = self.scaling.frequencies(self)
        self._frequencies = {torch.device("cpu"): frequencies_F}

    def __call__(self, positions_BL: Tensor) -> Rotation:
        """Rotation for integer positions [B, L]."""
        device = positions_BL.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        frequencies_F, scaling = self._frequencies[device], self.scaling
        if scaling is not None:
            frequencies_F = scaling.at(positions_BL, self, frequencies_F)
        angles_BLF = positions_BL[..., None].float() * frequencies_F
        cos_BLF, sin_BLF = angles_BLF.cos(), angles_BLF.sin()
        if scaling is not None and scaling.amplitude != 1:
            cos_BLF, sin_BLF = cos_BLF * scaling.amplitude, sin_BLF * scaling.amplitude
        return Rotation(cos_BLF, sin_BLF)


def rotate(x_BLHC: Tensor, rotation: Rotation, *, interleaved: bool = False) -> Tensor:
    """Rotate the first 2F dimensions of every head; the rest passes. Same dtype as the input.

    Computed in fp32 at least: bf16 cosines would move positions by up to half a token.

    Args:
        interleaved: pairs are neighbours, as DeepSeek's and Meta's weights have them, and not the
            halves of what is rotated; the result has them as halves all the same, which changes no
            product of a query and a key.
    """
    pairs = rotation.cos_BLF.shape[-1]
    dtype = torch.promote_types(x_BLHC.dtype, torch.float32)
    cos = rotation.cos_BLF[:, :, None].to(dtype)
    sin = rotation.sin_BLF[:, :, None].to(dtype)
    turned = x_BLHC[..., : 2 * pairs].to(dtype)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    parts = [first * cos - second * sin, second * cos + first * sin]
    parts = [part.to(x_BLHC.dtype) for part in parts]
    if 2 * pairs < x_BLHC.shape[-1]:
        parts.append(x_BLHC[..., 2 * pairs :])
    return torch.cat(parts, dim=-1)
