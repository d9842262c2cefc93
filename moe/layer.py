"""The Mixture-of-Experts layer: router, routing, experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe.rounding import RoundingConfig


@dataclass(frozen=True)
class MoEConfig:
    hidden_size: int
    expert_size: int
    num_experts: int
    num_experts_per_tok: int
    score: str = "softmax"
    norm: str = "topk_sum"
    route_scale: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    group_top: int = 2
    activation: str = "swiglu"
    shared_expert_size: int = 0
    kernels: str = "auto"
    save: str = "h"
    rounding: RoundingConfig | None = None
    init_std: float = 0.02
