"""GLM-4.5 (arXiv 2508.06471): sigmoid router with a selection bias, groups, shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from models.attention.gqa import GroupedQueryAttention
from models.config import FUSED_NAMES, TENSOR_NAMES, Count, ModelConfig, Positive, Size
from models.engines import LINEAR_ROPE, Feature, linear_rope, no, wrong

OWN_NAMES = {
    "moe.router.selection_bias": "mlp.gate.e_score_correction_bias",
    "moe.shared.gate_proj": "mlp.shared_experts.gate_proj",
    "moe.shared.up_proj": "mlp.shared_experts.up_proj",
    "moe.shared.down_proj": "mlp.shared_experts.down_proj",
}


class Glm4Moe(ModelConfig):
    """Sigmoid router with selection bias, groups and scaling, `norm_topk_prob` either way; optional
    QK-norm and biases, partial rotary; dense layers by `first_k_dense_replace`; shared experts."""

    family: Literal["glm4_moe"] = "glm4_moe"

    moe_intermediate_size: Size = 1408
    """Width of each expert."""
    attention_bias: bool = False
    """Biases in q, k and v."""
    use_qk_norm: bool = False
    """RMSNorm on each query and key head."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of each head that is rotated."""
    first_k_dense_replace: Count = 1
    """The first so many layers are dense."""
    n_shared_experts: Size = 1
    """Experts that every token uses, as one MLP of that many expert widths."""
    n_group: Positive = 1
    """Groups of experts for group-limited selection."""
    topk_group: Positive = 1
    """Groups that a token may choose from."""

    hf_class = "Glm4MoeForCausalLM"
    defaults = {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }
    hf_expert_counts = ("n_routed_experts",)
    topk_method = "noaux_tc"
    can_tie = False
    router_score = "sigmoid"
    has_selection_bias = True
    has_scaling_factor = True
    expert_width_field = "moe_intermediate_size"
    tensor_names = TENSOR_NAMES | OWN_NAMES
    fused_names = FUSED_NAMES | OWN_NAMES

    def attention(self, layer: int) -> GroupedQueryAttention:
        return GroupedQueryAttention(self, layer, qk_norm=self.qk_norm, bias=self.attention_bias)

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def all_dense(self) -> dict[str, Any]:
        return {"first_k_dense_replace": self.num_hidden_layers}

    def moe_fields(self) -> dict[str, Any]:
        return {
            "shared_expert_size": self.expert_size * self.n_shared_experts,
        }

    def hf_constants(self) -> dict[str, Any]:
        return {"num_nextn_predict_layers": 0}

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def qk_norm(self) -> Literal["none", "head"]:
        return "head" if self.use_qk_norm else "none"

    @property
    def expert_groups(self) -> tuple[int, int]:
        return self.n_group, self.topk_group

    def problems(self) -> Iterator[str]:
        """Of groups and dense layers too."""
        yield from super().problems()
        if self.num_experts % self.n_group:
            yield f"n_group={self.n_group} must divide num_experts={self.num_experts}"
        if self.topk_group > self.n_group:
            yield f"topk_group={self.topk_group} must not exceed n_group={self.n_group}"
        per_group = self.num_experts // self.n_group
        if per_group < 2:
            yield (
                f"n_group={self.n_group} leaves {per_group} experts per group; glm4_moe ranks "
                "groups by their two best experts and needs at least 2"
            )
        if self.topk_group * per_group < self.num_experts_per_tok:
            yield (
                f"topk_group={self.topk_group} groups of {per_group} experts are fewer than "
                f"num_experts_per_tok={self.num_experts_per_tok}"
            )
        if self.first_k_dense_replace > self.num_hidden_layers:
            yield (
                f"first_k_dense_replace={self.first_k_dense_replace} exceeds "
                f"num_hidden_layers={self.num_hidden_layers}"
            )

    engine_rows = (
        Feature("", lambda c: True, {"moe_intermediate_size": 64, "first_k_dense_replace": 1}),
        Feature(
            "norm_topk_prob: false",
            lambda c: not c.norm_topk_prob,
            {"norm_topk_prob": False},
        ),
        Feature("attention_bias: true", lambda c: c.attention_bias, {"attention_bias": True}),
        Feature("use_qk_norm: true", lambda c: c.use_qk_norm, {"use_qk_norm": True}),
        Feature("expert groups", lambda c: c.n_group > 1, {"n_group": 4, "topk_group": 2}),
        Feature(
            "n_shared_experts above 1",
            lambda c: c.n_shared_experts > 1,
            {"n_shared_experts": 2},
            {"mistral.rs": no("does not load a glm4_moe with more than one shared expert")},
        ),
        Feature(
            "linear RoPE scaling",
            linear_rope,
            LINEAR_ROPE,
            {"mistral.rs": wrong("ignores linear RoPE scaling")},
        ),
        Feature(
            "hidden_act other than silu",
            lambda c: c.hidden_act != "silu",
            {"hidden_act": "gelu"},
            {
                "vLLM": no("does not load a glm4_moe with another hidden_act than silu"),
                "llama.cpp": wrong("computes a glm4_moe with silu whatever its hidden_act says"),
            },
        ),
    )
