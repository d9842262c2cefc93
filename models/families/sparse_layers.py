"""Which layers hold experts, as Qwen's MoE families say it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from models.config import Count, Positive
from moe.settings import Settings


class SparseLayers(Settings):
    """Put before `MoEModelConfig` in a family's bases."""

    decoder_sparse_step: Positive = 1
    """Every so many layers one is MoE, counted from 1."""
    mlp_only_layers: list[Count] = Field(default_factory=list)
    """Layers that are dense all the same."""

    def is_moe_layer(self, layer: int) -> bool:
        sparse = (layer + 1) % self.decoder_sparse_step == 0
        return sparse and layer not in self.mlp_only_layers

    def all_dense(self) -> dict[str, Any]:
        return {"mlp_only_layers": list(range(self.num_hidden_layers))}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for layer in self.mlp_only_layers:
            if layer >= self.num_hidden_layers:
                count = self.num_hidden_layers
                yield f"mlp_only_layers names layer {layer}; there are {count}, from 0"
