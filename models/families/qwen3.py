"""Qwen3 (arXiv 2505.09388): dense, QK-norm on each head."""

from __future__ import annotations

from typing import Literal

from models.attention.gqa import GroupedQueryAttention
from models.config import ModelConfig
from models.engines import Feature, no, otherwise, rope_rows, wrong


class Qwen3(ModelConfig):
    """Dense; QK-norm on each head, optional biases in attention."""

    family: Literal["qwen3"] = "qwen3"

    attention_bias: bool = False
    """Biases in q, k, v and o."""

    hf_class = "Qwen3ForCausalLM"
    defaults = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    }
    window_switch = True

    def attention(self, layer: int) -> GroupedQueryAttention:
        bias = self.attention_bias
        return GroupedQueryAttention(self, layer, qk_norm=self.qk_norm, bias=bias, output_bias=bias)

    @property
    def qk_norm(self) -> Literal["head"]:
        return "head"

    engine_rows = (
        Feature("", lambda c: True, {}),
        Feature(
            "attention_bias: true",
            lambda c: c.attention_bias,
            {"attention_bias": True},
            {
                "vLLM": wrong("drops the bias of o_proj of a qwen3"),
                "llama.cpp": no("does not load a qwen3 with attention biases"),
                "mistral.rs": wrong("drops all attention biases of a qwen3"),
            },
        ),
        *rope_rows(mistral_rs=otherwise("linear", "yarn", "llama3")),
        Feature(
            "hidden_act other than silu",
            lambda c: c.hidden_act != "silu",
            {"hidden_act": "gelu"},
            {
                "vLLM": no("does not load a qwen3 with another hidden_act than silu"),
                "llama.cpp": wrong("computes a qwen3 with silu whatever its hidden_act says"),
            },
        ),
    )
