"""Qwen3-MoE (arXiv 2505.09388): softmax router, QK-norm on each head, dense layers where wanted."""

from __future__ import annotations

from typing import Literal

from models.attention.gqa import GroupedQueryAttention
from models.config import Size
from models.engines import Feature, no, otherwise, rope_rows, wrong
from models.families.sparse_layers import SparseLayers
from models.moe_config import MoEModelConfig


class Qwen3Moe(SparseLayers, MoEModelConfig):
    """Softmax router, `norm_topk_prob` either way; QK-norm on each head, optional biases; dense
    layers by `mlp_only_layers` and `decoder_sparse_step`; no shared experts."""

    family: Literal["qwen3_moe"] = "qwen3_moe"

    moe_intermediate_size: Size = 768
    """Width of each expert."""
    attention_bias: bool = False
    """Biases in q, k, v and o."""

    hf_class = "Qwen3MoeForCausalLM"
    defaults = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    }
    hf_neutral = {"use_qk_norm": (True,)}
    window_switch = True
    expert_width_field = "moe_intermediate_size"

    def attention(self, layer: int) -> GroupedQueryAttention:
        bias = self.attention_bias
        return GroupedQueryAttention(self, layer, qk_norm=self.qk_norm, bias=bias, output_bias=bias)

    @property
    def qk_norm(self) -> Literal["head"]:
        return "head"

    engine_rows = (
        Feature("", lambda c: True, {"moe_intermediate_size": 64, "norm_topk_prob": True}),
        Feature(
            "norm_topk_prob: false",
            lambda c: not c.norm_topk_prob,
            {"norm_topk_prob": False},
            {"llama.cpp": wrong("renormalises the gates of a qwen3_moe all the same")},
        ),
        Feature(
            "dense layers",
            lambda c: len(c.moe_layers) < c.num_hidden_layers,
            {"mlp_only_layers": [1]},
            {"llama.cpp": no("does not convert a qwen3_moe with dense layers")},
        ),
        Feature(
            "attention_bias: true",
            lambda c: c.attention_bias,
            {"attention_bias": True},
            {
                "vLLM": wrong("drops the bias of o_proj of a qwen3_moe"),
                "llama.cpp": no("does not load a qwen3_moe with attention biases"),
                "mistral.rs": wrong("drops all attention biases of a qwen3_moe"),
            },
        ),
        *rope_rows(mistral_rs=otherwise("linear", "yarn", "llama3"), llama_cpp=otherwise("llama3")),
        Feature(
            "hidden_act other than silu",
            lambda c: c.hidden_act != "silu",
            {"hidden_act": "gelu"},
            {
                "vLLM": wrong("computes a qwen3_moe with silu whatever its hidden_act says"),
                "llama.cpp": wrong("computes a qwen3_moe with silu whatever its hidden_act says"),
            },
        ),
    )
