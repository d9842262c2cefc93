"""GLM-4.5 (arXiv 2508.06471): sigmoid router with a selection bias, groups, shared experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from models.attention.gqa import GroupedQueryAttention
from models.config import FUSED_NAMES, TENSOR_NAMES
from models.engines import Feature, no, otherwise, rope_rows, wrong
from models.families.deepseek_v3 import MOE_NAMES, DeepseekMoE


class Glm4Moe(DeepseekMoE):
    """Sigmoid router with selection bias, groups and scaling, `norm_topk_prob` either way; optional
    QK-norm and biases, partial rotary; dense layers by `first_k_dense_replace`; shared experts."""

    family: Literal["glm4_moe"] = "glm4_moe"

    attention_bias: bool = False
    """Biases in q, k and v."""
    use_qk_norm: bool = False
    """RMSNorm on each query and key head."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of each head that is rotated."""

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
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    tensor_names = TENSOR_NAMES | MOE_NAMES
    fused_names = FUSED_NAMES | MOE_NAMES

    def attention(self, layer: int) -> GroupedQueryAttention:
        return GroupedQueryAttention(self, layer, qk_norm=self.qk_norm, bias=self.attention_bias)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def qk_norm(self) -> Literal["none", "head"]:
        return "head" if self.use_qk_norm else "none"

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
        *rope_rows(mistral_rs=otherwise("linear", "yarn", "llama3"), llama_cpp=otherwise("llama3")),
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
