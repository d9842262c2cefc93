"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): softmax router, a shared expert with a gate of its
own, biases in the query, key and value projections."""

from __future__ import annotations

from typing import Any, Literal

from models.attention.gqa import GroupedQueryAttention
from models.config import FUSED_NAMES, TENSOR_NAMES, Size
from models.engines import ROPE_SCALINGS, Feature, no, otherwise, rope_rows, wrong
from models.families.sparse_layers import SparseLayers
from models.moe_config import MoEModelConfig

NOT_THERE = no("has no qwen2_moe")
SHARED_NAMES = {
    "moe.shared.gate_proj": "mlp.shared_expert.gate_proj",
    "moe.shared.up_proj": "mlp.shared_expert.up_proj",
    "moe.shared.down_proj": "mlp.shared_expert.down_proj",
    "moe.shared.output_gate": "mlp.shared_expert_gate",
}


class Qwen2Moe(SparseLayers, MoEModelConfig):
    """Softmax router, `norm_topk_prob` either way; a shared expert whose output a sigmoid gates; no
    QK-norm, biases in q, k and v; dense layers by `mlp_only_layers` and `decoder_sparse_step`."""

    family: Literal["qwen2_moe"] = "qwen2_moe"

    moe_intermediate_size: Size = 1408
    """Width of each expert."""
    shared_expert_intermediate_size: Size = 5632
    """Width of the expert that every token uses."""
    qkv_bias: bool = True
    """Biases in q, k and v."""

    hf_class = "Qwen2MoeForCausalLM"
    defaults = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    }
    fixed_head_dim = True
    window_switch = True
    expert_width_field = "moe_intermediate_size"
    tensor_names = TENSOR_NAMES | SHARED_NAMES
    fused_names = FUSED_NAMES | SHARED_NAMES

    def attention(self, layer: int) -> GroupedQueryAttention:
        return GroupedQueryAttention(self, layer, bias=self.qkv_bias)

    def moe_fields(self) -> dict[str, Any]:
        return {
            "shared_expert_size": self.shared_expert_intermediate_size,
            "shared_expert_gate": True,
        }

    engine_rows = (
        Feature(
            "",
            lambda c: True,
            {
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 96,
                "norm_topk_prob": False,
            },
            {"mistral.rs": NOT_THERE},
        ),
        Feature(
            "norm_topk_prob: true",
            lambda c: c.norm_topk_prob,
            {"norm_topk_prob": True},
            {"llama.cpp": wrong("ignores norm_topk_prob of a qwen2_moe"), "mistral.rs": NOT_THERE},
        ),
        Feature(
            "dense layers",
            lambda c: len(c.moe_layers) < c.num_hidden_layers,
            {"mlp_only_layers": [1]},
            {
                "llama.cpp": no("does not convert a qwen2_moe with dense layers"),
                "mistral.rs": NOT_THERE,
            },
        ),
        Feature(
            "qkv_bias: false",
            lambda c: not c.qkv_bias,
            {"qkv_bias": False},
            {
                "vLLM": wrong(
                    "takes biases of a qwen2_moe from memory as it comes with qkv_bias: false"
                ),
                "mistral.rs": NOT_THERE,
            },
        ),
        *rope_rows(
            mistral_rs=dict.fromkeys(ROPE_SCALINGS, NOT_THERE), llama_cpp=otherwise("llama3")
        ),
        Feature(
            "hidden_act other than silu",
            lambda c: c.hidden_act != "silu",
            {"hidden_act": "gelu"},
            {
                "vLLM": no("does not load a qwen2_moe with another hidden_act than silu"),
                "llama.cpp": wrong("computes a qwen2_moe with silu whatever its hidden_act says"),
                "mistral.rs": NOT_THERE,
            },
        ),
    )
