"""Parameters of a model by kind, without making any, and how many of them one process keeps."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from models.attention import AttentionCost
from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from parallel.mesh import MeshPlan


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Kind (`models.build.parameter_kinds`) → parameters, of the model as it is built."""
    model = build_model(config, device="meta")
    kinds = parameter_kinds(model)
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        counts[kinds[name]] = counts.get(kinds[name], 0) + parameter.numel()
    return counts


def attention_costs(config: ModelConfig) -> tuple[AttentionCost, ...]:
    """What the attention of each layer costs, as its kind says."""
    return _attention_costs(type(config), config.model_dump_json())


@functools.lru_cache(maxsize=8)  # every log step asks
def _attention_costs(family: type[ModelConfig], fields: str) -> tuple[AttentionCost, ...]:
    config = family.model_validate_json(fields)
    with torch.device("meta"):
        return tuple(config.attention(i).cost() for i in range(config.num_hidden_layers))


def active_parameters(config: ModelConfig, counts: Mapping[str, int]) -> int:
    """Parameters that one token meets, the embedding table included, as model cards count."""
    if not config.moe_layers:
        return sum(counts.values())
    unused = config.num_experts - config.num_experts_per_tok
    return sum(counts.values()) - counts.get("expert", 0) * unused // config.num_experts


def held(counts: Mapping[str, int], mesh: MeshPlan) -> int:
    """Parameters whose master weights, gradients and moments one process of a mesh keeps: experts
    are split and sharded, routers are whole, all else is sharded over a node's ranks."""
    ranks = {"expert": mesh.expert * mesh.expert_shard, "router": 1}
    return sum(-(-count // ranks.get(kind, mesh.local)) for kind, count in counts.items())
