"""Where each parameter lies in a Hugging Face folder.

transformers 4.57 to 5.x, vLLM, llama.cpp and SGLang read one tensor per expert and projection, and
all versions write that by default; that is what is exported, under the family's names. Reading also
takes the layout that transformers 5 holds in memory and writes with `save_original_format=False`:
all experts of a layer in one tensor, all gate rows before all up rows.

Here gate and up rows alternate (row 2j gate, 2j + 1 up), so that one matrix product gives both
halves of a unit side by side. Experts of different widths lie behind one another
(`moe.mixed_experts`); on disk each is padded with zeros to the widest, which computes the same.

Shape letters: E experts, N expert width, D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from models.config import ModelConfig
from models.errors import UserError
from moe.kernels.grouped.ragged import Widths


@dataclass(frozen=True)
class Entry:
    """One tensor on disk and the part of one parameter (or buffer) that it holds."""

    name: str
    """Name on disk."""
    source: str
    """Name of the parameter or buffer in `Decoder`."""
    expert: int | None = None
    """Index into the parameter's first dimension, or None for all of it."""
    part: Literal["all", "gate", "up", "halves"] = "all"
    """all rows; every second row; or both halves one after the other ([.., 2N, D] on disk)."""
    span: tuple[int, int] | None = None
    """First and last row of the parameter, where experts lie behind one another; what is no gate
    and no up projection is then transposed on disk."""
    padded: int = 0
    """With a span: width on disk."""

    def take(self, parameter: Tensor) -> Tensor:
        """What goes to disk, contiguous."""
        if self.span is not None:
            value = parameter[slice(*self.span)]
            if self.part != "all":
                value = value[(0 if self.part == "gate" else 1) :: 2]
            value = functional.pad(value, (0, 0, 0, self.padded - value.shape[0]))
            return (value if self.part != "all" else value.T).contiguous()
        value = parameter if self.expert is None else parameter[self.expert]
        if self.part == "halves":
            value = torch.cat([value[..., 0::2, :], value[..., 1::2, :]], dim=-2)
        elif self.part != "all":
            value = value[..., (0 if self.part == "gate" else 1) :: 2, :]
        return value.contiguous()

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Copy what came from disk into its place; shapes must agree (`shape`).

        Raises:
            UserError: numbers beyond the width of an expert, which would be lost.
        """
        if self.span is not None:
            target = parameter[slice(*self.span)]
            if self.part == "all":
                value = value.T
            else:
                target = target[(0 if self.part == "gate" else 1) :: 2]
            width = target.shape[0]
            if value[width:].any():
                raise UserError(
                    f"{self.name} is not zero beyond the {width} units that moe_expert_widths "
                    "gives this expert: another model would be loaded"
                )
            target.copy_(value[:width])
            return
        target = parameter if self.expert is None else parameter[self.expert]
        if self.part == "halves":
            half = target.shape[-2] // 2
            target[..., 0::2, :] = value[..., :half, :].to(target)
            target[..., 1::2, :] = value[..., half:, :].to(target)
        elif self.part == "all":
            target.copy_(value)
        else:
            target[..., (0 if self.part == "gate" else 1) :: 2, :] = value.to(target)

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Shape on disk."""
        if self.span is not None:
            shape = (self.padded, parameter.shape[1])
            return shape if self.part != "all" else shape[::-1]
        shape = list(parameter.shape if self.expert is None else parameter.shape[1:])
        if self.part in ("gate", "up"):
            shape[-2] //= 2
        return tuple(shape)


def entries(
    config: ModelConfig, tensors: Iterable[str], fused_layers: Collection[int] = ()
) -> list[Entry]:
    """All tensors of a folder, in the model's order.

    Args:
        tensors: names of the parameters and buffers of a `Decoder`; a tied output matrix once.
        fused_layers: layers whose experts lie in two tensors, in transformers' in-memory layout.
    """
    out: list[Entry] = []
    for source in tensors:
        layer, name = None, source
        if source.startswith("layers."):
            _, number, name = source.split(".", 2)
            layer = int(number)
        fused = layer in fused_layers
        names = config.fused_names if fused else config.tensor_names
        prefix = "" if layer is None else config.layer_prefix.format(layer)
        module, _, last = name.rpartition(".")
        if name in ("moe.w1", "moe.w2"):
            out += _expert_entries(config, source, layer, names[name], fused)
        elif name in names:
            out.append(Entry(prefix + names[name], source))
        elif module in names:
            out.append(Entry(f"{prefix}{names[module]}.{last}", source))
        elif ".router." not in source:  # state of routers stays here
            raise AssertionError(f"{config.family} has no name for {source} in a folder")
    return out


def layer_of(config: ModelConfig, name: str) -> int | None:
    """The layer that a tensor of a folder is of."""
    before, _, after = config.layer_prefix.partition("{}")
    number, found, _ = name.removeprefix(before).partition(after)
    inside = name.startswith(before) and found and number.isdigit()
    return int(number) if inside else None


def fused_names(config: ModelConfig, layer: int) -> tuple[str, str]:
    """Names of the two tensors that hold all experts of a layer."""
    prefix = config.layer_prefix.format(layer)
    return prefix + config.fused_names["moe.w1"], prefix + config.fused_names["moe.w2"]


def _expert_entries(
    config: ModelConfig, source: str, layer: int, names: str | tuple[str, str], fused: bool
) -> Iterator[Entry]:
    """Of w1 or w2 of a layer."""
    prefix, widths = config.layer_prefix.format(layer), config.expert_widths(layer)
    if fused:
        if widths is not None:
            raise UserError(
                f"{prefix}{names}: experts of different widths (moe_expert_widths) are read from "
                "one tensor for each expert only"
            )
        yield Entry(prefix + names, source, part="halves" if source.endswith("w1") else "all")
        return
    parts = (("all", names),) if isinstance(names, str) else zip(("gate", "up"), names, strict=True)
    parts = tuple(parts)
    for expert in range(config.num_experts):
        place: dict[str, Any] = {"expert": expert}
        if widths is not None:
            own = Widths(widths).of(expert, len(parts))
            place = {"span": (own.start, own.stop), "padded": config.expert_size}
        for part, name in parts:
            yield Entry(prefix + name.format(expert), source, part=part, **place)
