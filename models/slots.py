"""Leaving out the free expert slots of a model, for a folder that knows no such thing.

Experts keep their order and take the numbers from 0 on. Where layers have different numbers of
experts, a config.json cannot say so; a family with a selection bias gets experts that no token can
choose in the layers that have fewer, which computes the same. The others are refused.

Shape letters: E slots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from models.config import ModelConfig
from models.errors import UserError

MASK = "moe.router.active_E"
_PER_EXPERT = re.compile(r"layers\.(\d+)\.moe\.(w1|w2|router\.weight|router\.selection_bias)")
# Scores lie in [0, 1]: so far below the lowest bias no key comes first.
NEVER = 2.0


def without_free_slots(
    config: ModelConfig, source: Mapping[str, Tensor]
) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """A model's config and tensors without its free slots; the same ones if there are none.

    Raises:
        UserError: layers with different numbers of experts, in a family that cannot say so.
    """
    used = {
        layer: source[name].nonzero().flatten().tolist()
        for layer in config.moe_layers
        if (name := f"layers.{layer}.{MASK}") in source
    }
    counts = {layer: len(slots) for layer, slots in used.items()}
    if all(count == config.num_experts for count in counts.values()):
        return config, source
    most = max(counts.values())
    if min(counts.values()) < most and not config.has_selection_bias:
        told = ", ".join(f"layer {layer}: {count}" for layer, count in counts.items())
        raise UserError(
            f"the layers have different numbers of experts ({told}), which {config.family} cannot "
            "say. Train on with router.end_steps, which brings them to one number before the last "
            "steps, or with experts.events that retire or clone the difference"
        )
    return config.model_copy(update={"num_experts": most}), _Used(source, used, most)


class _Used(Mapping[str, Tensor]):
    """The tensors of a model with the experts in use alone, each made when it is asked for."""

    def __init__(self, source: Mapping[str, Tensor], used: dict[int, list[int]], most: int) -> None:
        self.source, self.used, self.most = source, used, most

    def __getitem__(self, name: str) -> Tensor:
        value, found = self.source[name], _PER_EXPERT.fullmatch(name)
        if found is None:
            return value
        kept = value[self.used[int(found[1])]]
        missing = self.most - len(kept)
        if not missing:
            return kept
        fill = float(kept.min()) - NEVER if found[2] == "router.selection_bias" else 0.0
        return torch.cat([kept, kept.new_full((missing, *kept.shape[1:]), fill)])

    def __iter__(self) -> Iterator[str]:
        return iter(name for name in self.source if not name.endswith(MASK))

    def __len__(self) -> int:
        return sum(1 for _ in self)
