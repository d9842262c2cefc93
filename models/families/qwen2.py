"""Qwen2 and Qwen2.5 (arXiv 2407.10671): dense, biases in the query, key and value projections."""

from __future__ import annotations

from typing import Literal

from models.attention.gqa import GroupedQueryAttention
from models.config import ModelConfig
from models.engines import Feature, no, otherwise, rope_rows, wrong


class Qwen2(ModelConfig):
    """Dense; no QK-norm, always biases in q, k and v."""

    family: Literal["qwen2"] = "qwen2"

    hf_class = "Qwen2ForCausalLM"
    defaults = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    }
    fixed_head_dim = True
    window_switch = True

    def attention(self, layer: int) -> GroupedQueryAttention:
        return GroupedQueryAttention(self, layer, bias=True)

    engine_rows = (
        Feature("", lambda c: True, {}),
        *rope_rows(mistral_rs=otherwise("linear", "yarn", "llama3")),
        Feature(
            "hidden_act other than silu",
            lambda c: c.hidden_act != "silu",
            {"hidden_act": "gelu"},
            {
                "vLLM": no("does not load a qwen2 with another hidden_act than silu"),
                "llama.cpp": wrong("computes a qwen2 with silu whatever its hidden_act says"),
            },
        ),
    )
