"""OLMoE (arXiv 2409.02060): softmax router, QK-norm over the whole projection, experts only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from models.attention.gqa import GroupedQueryAttention
from models.engines import ROPE_SCALINGS, Feature, no, otherwise, rope_rows, wrong
from models.moe_config import MoEModelConfig

NOT_THERE = no("has no olmoe")


class Olmoe(MoEModelConfig):
    """Softmax router, `norm_topk_prob` either way; QK-norm over the whole projection, `clip_qkv`,
    optional biases; every layer has experts, none shared."""

    family: Literal["olmoe"] = "olmoe"

    attention_bias: bool = False
    """Biases in q, k, v and o."""
    clip_qkv: Annotated[float, Field(gt=0)] | None = None
    """Clamp queries, keys and values to ±clip_qkv before RoPE."""

    hf_class = "OlmoeForCausalLM"
    defaults = {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    }
    hf_token_ids = {"pad_token_id": 1, "eos_token_id": 50279}
    fixed_head_dim = True
    hf_neutral = {"use_qk_norm": (True,)}
    can_tie = False

    def attention(self, layer: int) -> GroupedQueryAttention:
        bias = self.attention_bias
        return GroupedQueryAttention(
            self, layer, qk_norm=self.qk_norm, bias=bias, output_bias=bias, clip=self.clip_qkv
        )

    @property
    def qk_norm(self) -> Literal["full"]:
        return "full"

    engine_rows = (
        Feature(
            "",
            lambda c: True,
            {"num_key_value_heads": 4, "norm_topk_prob": False},
            {"mistral.rs": NOT_THERE},
        ),
        Feature(
            "norm_topk_prob: true",
            lambda c: c.norm_topk_prob,
            {"norm_topk_prob": True},
            {
                "vLLM": wrong("ignores norm_topk_prob of an olmoe"),
                "llama.cpp": wrong("ignores norm_topk_prob of an olmoe"),
                "mistral.rs": NOT_THERE,
            },
        ),
        Feature(
            "fewer key/value heads than heads",
            lambda c: c.num_key_value_heads != c.num_attention_heads,
            {"num_key_value_heads": 2},
            {
                "llama.cpp": no("does not load an olmoe with fewer key/value heads than heads"),
                "mistral.rs": NOT_THERE,
            },
        ),
        Feature(
            "clip_qkv",
            lambda c: c.clip_qkv is not None,
            {"clip_qkv": 0.5},
            {
                "vLLM": wrong("ignores clip_qkv of an olmoe"),
                "llama.cpp": wrong("ignores clip_qkv of an olmoe"),
                "mistral.rs": NOT_THERE,
            },
        ),
        Feature(
            "attention_bias: true",
            lambda c: c.attention_bias,
            {"attention_bias": True},
            {
                "vLLM": wrong("drops all attention biases of an olmoe"),
                "llama.cpp": no("does not load an olmoe with attention biases"),
                "mistral.rs": NOT_THERE,
            },
        ),
        Feature(
            "rms_norm_eps other than 1e-5",
            lambda c: c.rms_norm_eps != 1e-5,
            {"rms_norm_eps": 0.05},
            {
                "vLLM": wrong("computes an olmoe with rms_norm_eps 1e-5 whatever its config says"),
                "llama.cpp": wrong(
                    "computes an olmoe with rms_norm_eps 1e-5 whatever its config says"
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
                "vLLM": wrong("computes an olmoe with silu whatever its hidden_act says"),
                "llama.cpp": wrong("computes an olmoe with silu whatever its hidden_act says"),
                "mistral.rs": NOT_THERE,
            },
        ),
    )
