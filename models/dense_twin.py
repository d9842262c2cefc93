"""The dense model that an MoE model is judged against: as many weights in products per token."""

from __future__ import annotations

from typing import Any

from models.config import FAMILIES, ModelConfig
from models.errors import UserError


def dense_twin(config: ModelConfig) -> dict[str, Any]:
    """Fields that make a model dense, with networks as wide as the K experts and the shared ones
    of a layer are together; what else it has stays. The router's weights are not made up for.

    Where some layers are dense already, all get the same width, so that the sum over layers stays.

    Raises:
        UserError: a family whose layers all have experts, or a model without any.
    """
    fields = config.all_dense()
    if fields is None:
        able = [name for name, f in FAMILIES.items() if f.all_dense is not ModelConfig.all_dense]
        raise UserError(
            f"the family {config.family} has no dense layers, so it has no dense twin; allowed: "
            f"{', '.join(able)}"
        )
    if not config.moe_layers:
        raise UserError("no layer of this model has experts, so it is a dense twin already")
    total = 0.0
    for layer in range(config.num_hidden_layers):
        moe = config.moe_config(layer)
        if moe is None:
            total += config.intermediate_size
            continue
        widths = moe.expert_widths or (moe.expert_size,)
        total += moe.num_experts_per_tok * sum(widths) / len(widths) + moe.shared_expert_size
    width = round(total / config.num_hidden_layers)
    return fields | {"intermediate_size": width, "moe_expert_widths": None}
