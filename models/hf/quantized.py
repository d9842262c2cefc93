"""Weights that a folder stores in fewer bits, dequantised as they are read.

`quantization_config` of a config.json names the format. Which of the tensors are stored in it is
seen by their names: whatever has no companion is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from models.errors import UserError

Stored = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor in a safetensors file, in its words."""


class QuantisedFormat(Protocol):
    """How one format stores a tensor. Made of the `quantization_config`."""

    def __init__(self, raw: dict[str, Any]) -> None:
        """UserError for a variant that is not read."""

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the tensors on disk that hold the one called `name`. Those that are cut by the
        first dimension, to read some experts alone, give a part of it."""

    def problem(self, stored: Sequence[Stored], expected: tuple[int, ...]) -> str | None:
        """What is wrong with the parts of a tensor that is to have this shape."""

    def read(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor in fp32."""


class Fp8Blocks:
    """DeepSeek-V3's fp8: float8_e4m3fn, and beside each weight a `weight_scale_inv` by whose
    numbers its blocks, of 128 x 128 usually, are multiplied (DeepSeek-V3, arXiv 2412.19437,
    section 3.3.2)."""

    def __init__(self, raw: dict[str, Any]) -> None:
        block, kind = raw.get("weight_block_size"), raw.get("fmt", "e4m3")
        sizes = isinstance(block, list) and len(block) == 2 and all(type(b) is int for b in block)
        if kind != "e4m3" or not sizes or min(block) < 1:
            raise UserError(
                f"quantization_config with fmt={kind!r} and weight_block_size={block!r} is not "
                "read; allowed of quant_method fp8: fmt e4m3 and two whole numbers"
            )
        self.block: tuple[int, int] = tuple(block)

    def parts(self, name: str) -> tuple[str, ...]:
        return name, f"{name}_scale_inv"

    def problem(self, stored: Sequence[Stored], expected: tuple[int, ...]) -> str | None:
        (shape, kind), (scales, scale_kind) = stored
        if shape != expected or len(shape) < 2:
            return f"{list(shape)} instead of {list(expected)}"
        blocks = tuple(-(-size // block) for size, block in zip(shape[-2:], self.block))
        if scales != (*shape[:-2], *blocks):
            return f"has scales {list(scales)} instead of {[*shape[:-2], *blocks]}"
        if kind != "F8_E4M3" or scale_kind not in ("F32", "BF16", "F8_E8M0"):
            return f"is {kind} with scales in {scale_kind}; read is F8_E4M3 with scales in F32"
        return None

    def read(self, parts: Sequence[Tensor]) -> Tensor:
        weight, scale = parts
        rows, columns = self.block
        scale = scale.float().repeat_interleave(rows, -2)[..., : weight.shape[-2], :]
        return weight.float() * scale.repeat_interleave(columns, -1)[..., : weight.shape[-1]]


FORMATS: dict[str, type[QuantisedFormat]] = {"fp8": Fp8Blocks}
"""`quant_method` → how it is read."""


def quantised_format(raw: dict[str, Any]) -> QuantisedFormat | None:
    """The format that a config.json names; None without one.

    Raises:
        UserError: one that is not read.
    """
    given = raw.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given
    if not isinstance(method, str) or method not in FORMATS:
        raise UserError(
            f"quantization_config with quant_method={method!r} is not supported; allowed: "
            f"{', '.join(FORMATS)}, or none"
        )
    return FORMATS[method](given)
