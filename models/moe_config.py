"""What families with experts have beyond `ModelConfig`: fields, layers, checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from models.config import FUSED_NAMES, ModelConfig, Names, Size
from moe.config import MoEConfig

OWN_FIELDS = ("moe_expert_widths",)
"""Fields that no family has in transformers: what they say is exact in the exported weights."""
KEPT_FACTOR = "moe_routed_scaling_factor"
"""Key of a checkpoint's config.json for the gates' factor in families that have none: an exported
folder has it in the weights, and a foreign `routed_scaling_factor` is no key that they read."""


class MoEModelConfig(ModelConfig):
    """Architecture of a family whose layers hold experts, all of them unless `is_moe_layer` says
    otherwise."""

    moe_expert_widths: list[Size] | list[list[Size]] | None = None
    """Width of each expert, where they differ: one list for all MoE layers, or a list for each. The
    family's own width is then that of the widest, to which an exported folder pads the others with
    zeros. `null`: all the same."""
    num_experts: Size
    """Routed experts per MoE layer (n_routed_experts / num_local_experts in some config.json
    files)."""
    num_experts_per_tok: Size
    """Experts that each token uses (K)."""
    norm_topk_prob: bool
    """Divide the K gates of a token by their sum (always true for mixtral)."""
    routed_scaling_factor: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Multiplies the gates after that. Exact in any export: in families without this key the down
    projections of the experts are multiplied instead (docs/routing.md has how to choose it)."""

    hf_expert_counts: ClassVar[tuple[str, ...]] = ("num_experts", "num_local_experts")
    """Keys under which transformers 4.57 and 5.x look for the number of experts."""
    expert_width_field: ClassVar[str] = "intermediate_size"
    """The field that is the width of an expert."""
    fused_names: ClassVar[Names] = FUSED_NAMES
    """`tensor_names` where all experts of a layer are in one tensor."""

    def is_moe_layer(self, layer: int) -> bool:
        return True

    def moe_fields(self) -> dict[str, Any]:
        """Fields of `MoEConfig` beyond those that all families have."""
        return {}

    @property
    def expert_groups(self) -> tuple[int, int]:
        """Groups of experts, and how many of them a token may choose from."""
        return 1, 1

    @property
    def folded_factor(self) -> float:
        return 1.0 if self.has_scaling_factor else self.routed_scaling_factor

    @property
    def mixed_widths(self) -> bool:
        return self.moe_expert_widths is not None

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.num_experts_per_tok > self.num_experts:
            yield (
                f"num_experts_per_tok={self.num_experts_per_tok} must not exceed "
                f"num_experts={self.num_experts}"
            )
        if self.num_experts_per_tok == 1 and self.norm_topk_prob:
            yield (
                "num_experts_per_tok=1 with norm_topk_prob=true makes every gate 1 and gives the "
                "router no gradient; set norm_topk_prob=false or more experts per token"
            )
        if self.moe_expert_widths is not None:
            yield from self._width_problems()

    def _width_problems(self) -> Iterator[str]:
        given, layers = self.moe_expert_widths, len(self.moe_layers)
        if not layers:
            yield f"moe_expert_widths={given} has no effect: no layer of this model has experts"
            return
        each = bool(given) and isinstance(given[0], list)
        by_layer = given if each else [given]
        if each and len(given) != layers:
            yield (
                f"moe_expert_widths has {len(given)} lists for {layers} layers with experts; "
                "allowed: a list for each, or one list of numbers for all"
            )
            return
        for widths in by_layer:
            if len(widths) != self.num_experts:
                yield (
                    f"moe_expert_widths={widths} has {len(widths)} widths for "
                    f"num_experts={self.num_experts}"
                )
                return
        widest = max(max(widths) for widths in by_layer)
        if widest != self.expert_size:
            name = self.expert_width_field
            yield f"{name}={self.expert_size} must be the widest of moe_expert_widths, {widest}"

    @property
    def expert_size(self) -> int:
        """Width of one routed expert, of the widest where they differ."""
        return getattr(self, self.expert_width_field)

    def expert_widths(self, layer: int) -> tuple[int, ...] | None:
        given = self.moe_expert_widths
        if given is None or not self.is_moe_layer(layer):
            return None
        return tuple(given[self.moe_layers.index(layer)] if isinstance(given[0], list) else given)

    def moe_config(self, layer: int, **options: Any) -> MoEConfig | None:
        if not self.is_moe_layer(layer):
            return None
        widths, (groups, groups_kept) = self.expert_widths(layer), self.expert_groups
        fields = {
            "hidden_size": self.hidden_size,
            "expert_size": self.expert_size if widths is None else max(widths),
            "expert_widths": widths,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "score": self.router_score,
            "norm": "topk_sum" if self.norm_topk_prob else "none",
            "selection_bias": self.has_selection_bias,
            "groups": groups,
            "groups_kept": groups_kept,
            "activation": self.activation,
            "init_std": self.initializer_range,
            "route_scale": self.routed_scaling_factor,
            **self.moe_fields(),
        }
        return MoEConfig(**{**fields, **options})

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        out = super().to_hf(dtype) | {"output_router_logits": False}
        out |= dict.fromkeys(self.hf_expert_counts, out.pop("num_experts"))
        for key in OWN_FIELDS:
            if out[key] is None:
                del out[key]
        if not self.has_scaling_factor:
            factor = out.pop("routed_scaling_factor")
            out |= {KEPT_FACTOR: factor} if factor != 1 else {}
        return out
