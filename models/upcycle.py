"""A Mixture-of-Experts model from a dense one.

    dense = load_hf("Qwen3-0.6B/")
    model, exact = upcycle(dense, num_experts=8, num_experts_per_tok=2)

Each dense family has one family with experts whose attention, norms and dense layers are the same.
See `moe.upcycle` for what is done to a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.build import build_model, start_routers
from models.config import FAMILIES, ModelConfig
from models.errors import UserError
from models.transformer import Decoder
from moe.upcycle import upcycle_layer

# Dense family → family with experts that computes the same around them.
SPARSE_FAMILY = {
    "llama": "mixtral",
    "qwen2": "qwen2_moe",
    "qwen3": "qwen3_moe",
    "olmo2": "flex_olmo",
}


def sparse_fields(dense: ModelConfig) -> dict[str, Any]:
    """Fields of the family with experts that are those of a dense model.

    Raises:
        UserError: a family that cannot be upcycled, or a setting that the other family lacks.
    """
    if dense.family not in SPARSE_FAMILY:
        raise UserError(
            f"a model of family={dense.family!r} cannot be upcycled; allowed: "
            f"{', '.join(SPARSE_FAMILY)}"
        )
    name = SPARSE_FAMILY[dense.family]
    family, fields = FAMILIES[name], {"family": name}
    for key, value in dense.model_dump(exclude={"family"}).items():
        if key in family.model_fields:
            fields[key] = value
        elif value != type(dense).model_fields[key].default:
            raise UserError(
                f"{key}={value} cannot be upcycled: a {dense.family} becomes a {name}, which has "
                f"no {key}"
            )
    return fields


@torch.no_grad()
def upcycle(
    dense: Decoder,
    *,
    num_experts: int,
    num_experts_per_tok: int,
    granularity: int = 1,
    sparse_step: int = 1,
    seed: int = 0,
) -> tuple[Decoder, bool]:
    """The model with experts in every `sparse_step`-th layer, and whether it computes the same.

    Args:
        dense: a model of one of the families in `SPARSE_FAMILY`.
        granularity: shards into which each copy of a dense network is cut.
        seed: of the routers.

    Raises:
        UserError: numbers that do not fit, or what the new family lacks, by name.
    """
    fields = sparse_fields(dense.config)
    family, width = FAMILIES[fields["family"]], dense.config.intermediate_size
    divided = {
        "intermediate_size": width,
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
    }
    for name, value in divided.items():
        if granularity < 1 or value % granularity:
            raise UserError(f"granularity={granularity} must divide {name}={value}")
    fields |= {
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "norm_topk_prob": True,  # gates that sum to 1: what preserves the function
        family.expert_width_field: width // granularity,
    }
    if "shared_expert_intermediate_size" in family.model_fields:
        fields["shared_expert_intermediate_size"] = width
    if "decoder_sparse_step" in family.model_fields:
        fields["decoder_sparse_step"] = sparse_step
    elif sparse_step != 1:
        raise UserError(
            f"sparse_step={sparse_step} cannot be: every layer of a {fields['family']} has "
            "experts; allowed: 1"
        )
    config = ModelConfig.of_user(fields)
    if not config.moe_layers:
        raise UserError(
            f"sparse_step={sparse_step} leaves none of {config.num_hidden_layers} layers to upcycle"
        )
    model = build_model(config, seed=seed)
    theirs = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        if name in theirs:
            parameter.copy_(theirs[name])
    exact = True
    for layer in config.moe_layers:
        mlp = dense.layers[layer].mlp
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        moe = model.layers[layer].moe
        exact &= upcycle_layer(moe, *weights, granularity=granularity)
    start_routers(model)
    return model, exact


@torch.no_grad()
def mean_loss(model: Decoder, tokens_BL: Tensor, rows: int = 1) -> float:
    """Mean cross-entropy of the next token, summed in float64, `rows` rows at a time."""
    total = 0.0
    for part_BL in tokens_BL.split(rows):
        logits_BLV = model(part_BL, logits=True).logits[:, :-1]
        for logits_LV, targets_L in zip(logits_BLV, part_BL[:, 1:]):
            for some_LV, some_L in zip(logits_LV.split(64), targets_L.split(64)):
                total += F.cross_entropy(some_LV.double(), some_L, reduction="sum").item()
    return total / (tokens_BL.shape[0] * (tokens_BL.shape[1] - 1))
