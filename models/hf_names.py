"""Where each parameter lies in a Hugging Face folder, for the four families.

transformers 4.57 to 5.x, vLLM, llama.cpp and SGLang read one tensor per expert and projection, and
all versions write that by default; that is what is exported. Reading also takes the layout that
transformers 5 holds in memory and writes with `save_original_format=False`: all experts of a layer
in one tensor, all gate rows before all up rows.

Here gate and up rows alternate (row 2j gate, 2j + 1 up), so that one matrix product gives both
halves of a unit side by side. Experts of different widths lie behind one another
(`moe.mixed_experts`); on disk each is padded with zeros to the widest, which computes the same.

Shape letters: E experts, N expert width, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def entries(config: ModelConfig, fused_layers: frozenset[int] = frozenset()) -> list[Entry]:
    """All tensors of a folder, in the order of the layers; a tied output matrix is not among them.

    `fused_layers`: layers whose experts lie in two tensors, in transformers' in-memory layout.
    """
    out = [Entry("model.embed_tokens.weight", "embed.weight")]
    for layer in range(config.num_hidden_layers):
        out += _layer_entries(config, layer, layer in fused_layers)
    out.append(Entry("model.norm.weight", "norm.weight"))
    if not config.tie_word_embeddings:
        out.append(Entry("lm_head.weight", "head.weight"))
    return out


def fused_names(layer: int) -> tuple[str, str]:
    """Names of the two tensors that hold all experts of a layer (the same for all families)."""
    prefix = f"model.layers.{layer}.mlp.experts."
    return prefix + "gate_up_proj", prefix + "down_proj"


def _layer_entries(config: ModelConfig, layer: int, fused: bool) -> Iterator[Entry]:
    theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
    yield Entry(theirs + "input_layernorm.weight", ours + "attn_norm.weight")
    for projection in "qkvo":
        name = f"{theirs}self_attn.{projection}_proj."
        yield Entry(name + "weight", f"{ours}attn.{projection}.weight")
        if config.output_bias if projection == "o" else config.attention_bias:
            yield Entry(name + "bias", f"{ours}attn.{projection}.bias")
    if config.qk_norm != "none":
        for norm in ("q_norm", "k_norm"):
            yield Entry(f"{theirs}self_attn.{norm}.weight", f"{ours}attn.{norm}.weight")
    yield Entry(theirs + "post_attention_layernorm.weight", ours + "mlp_norm.weight")

    projections = ("gate_proj", "up_proj", "down_proj")
    if not config.is_moe_layer(layer):
        for name in projections:
            yield Entry(f"{theirs}mlp.{name}.weight", f"{ours}mlp.{name}.weight")
        return
    mixtral = config.family == "mixtral" and not fused
    moe = theirs + ("block_sparse_moe." if mixtral else "mlp.")
    yield Entry(moe + "gate.weight", ours + "moe.router.weight")
    if config.family == "glm4_moe":
        bias = ours + "moe.router.selection_bias"
        yield Entry(moe + "gate.e_score_correction_bias", bias)
        for name in projections:
            yield Entry(f"{moe}shared_experts.{name}.weight", f"{ours}moe.shared.{name}.weight")
    widths = config.expert_widths(layer)
    if fused and widths is not None:
        raise UserError(
            f"{fused_names(layer)[0]}: experts of different widths (moe_expert_widths) are read "
            "from one tensor for each expert only"
        )
    if fused:
        gate_up, down = fused_names(layer)
        yield Entry(gate_up, ours + "moe.w1", part="halves")
        yield Entry(down, ours + "moe.w2")
        return
    gate, up, down = ("w1", "w3", "w2") if mixtral else projections

    def place(expert: int, rows: int) -> dict[str, Any]:
        """Of an expert, in a parameter with so many rows a unit."""
        if widths is None:
            return {"expert": expert}
        own = Widths(widths).of(expert, rows)
        return {"span": (own.start, own.stop), "padded": config.expert_size}

    for expert in range(config.num_experts):
        prefix = f"{moe}experts.{expert}."
        yield Entry(f"{prefix}{gate}.weight", ours + "moe.w1", part="gate", **place(expert, 2))
        yield Entry(f"{prefix}{up}.weight", ours + "moe.w1", part="up", **place(expert, 2))
    for expert in range(config.num_experts):  # after all of w1, so that each is read just once
        prefix = f"{moe}experts.{expert}."
        yield Entry(f"{prefix}{down}.weight", ours + "moe.w2", **place(expert, 1))
