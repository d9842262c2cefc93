"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783): dense, no QK-norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from models.attention.gqa import GroupedQueryAttention
from models.config import ModelConfig
from models.engines import Feature, no, rope_rows, wrong


class Llama(ModelConfig):
    """Dense; no QK-norm, optional biases in attention."""

    family: Literal["llama"] = "llama"

    attention_bias: bool = False
    """Biases in q, k, v and o."""

    hf_class = "LlamaForCausalLM"
    defaults = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }
    hf_token_ids = {"bos_token_id": 1, "eos_token_id": 2}
    hf_neutral = {"pretraining_tp": (1,)}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.hidden_size % self.num_attention_heads:
            yield (
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads="
                f"{self.num_attention_heads} in a llama"
            )

    def attention(self, layer: int) -> GroupedQueryAttention:
        bias = self.attention_bias
        return GroupedQueryAttention(self, layer, bias=bias, output_bias=bias)

    engine_rows = (
        Feature("", lambda c: True, {}),
        Feature(
            "head_dim other than hidden_size / heads",
            lambda c: c.head_dim * c.num_attention_heads != c.hidden_size,
            {"head_dim": 64},
            {"mistral.rs": no("does not load a llama whose head_dim is not hidden_size / heads")},
        ),
        Feature(
            "attention_bias: true",
            lambda c: c.attention_bias,
            {"attention_bias": True},
            {"mistral.rs": wrong("drops all attention biases of a llama")},
        ),
        *rope_rows(),
        Feature(
            "hidden_act other than silu",
            lambda c: c.hidden_act != "silu",
            {"hidden_act": "gelu"},
            {
                "vLLM": no("does not load a llama with another hidden_act than silu"),
                "llama.cpp": wrong("computes a llama with silu whatever its hidden_act says"),
            },
        ),
    )
