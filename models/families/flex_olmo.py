"""FlexOlmo (arXiv 2507.07024): OLMo 2 with experts; softmax router, experts only."""

from __future__ import annotations

from typing import Literal

from models.attention.gqa import GroupedQueryAttention
from models.config import FUSED_NAMES, TENSOR_NAMES
from models.engines import ROPE_SCALINGS, Feature, no, rope_rows, wrong
from models.families.olmo2 import POST_NORM_NAMES
from models.moe_config import MoEModelConfig

NOT_THERE = no("has no flex_olmo")
ELSEWHERE = {"llama.cpp": NOT_THERE, "mistral.rs": NOT_THERE}


class FlexOlmo(MoEModelConfig):
    """Softmax router, `norm_topk_prob` either way; norms behind attention and experts; QK-norm over
    the whole projection, optional biases in attention; every layer has experts, none shared."""

    family: Literal["flex_olmo"] = "flex_olmo"

    attention_bias: bool = False
    """Biases in q, k, v and o."""

    hf_class = "FlexOlmoForCausalLM"
    defaults = {
        "vocab_size": 100352,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "norm_topk_prob": False,
    }
    hf_token_ids = {"pad_token_id": 100277, "eos_token_id": 100257}
    fixed_head_dim = True
    post_norm = True
    tensor_names = TENSOR_NAMES | POST_NORM_NAMES
    fused_names = FUSED_NAMES | POST_NORM_NAMES

    def attention(self, layer: int) -> GroupedQueryAttention:
        bias = self.attention_bias
        return GroupedQueryAttention(self, layer, qk_norm=self.qk_norm, bias=bias, output_bias=bias)

    @property
    def qk_norm(self) -> Literal["full"]:
        return "full"

    engine_rows = (
        Feature("", lambda c: True, {"num_key_value_heads": 4, "norm_topk_prob": False}, ELSEWHERE),
        Feature(
            "norm_topk_prob: true",
            lambda c: c.norm_topk_prob,
            {"norm_topk_prob": True},
            ELSEWHERE,
        ),
        Feature(
            "fewer key/value heads than heads",
            lambda c: c.num_key_value_heads != c.num_attention_heads,
            {"num_key_value_heads": 2},
            ELSEWHERE,
        ),
        Feature(
            "attention_bias: true",
            lambda c: c.attention_bias,
            {"attention_bias": True},
            ELSEWHERE,
        ),
        *rope_rows(
            **{n: dict.fromkeys(ROPE_SCALINGS, NOT_THERE) for n in ("llama_cpp", "mistral_rs")}
        ),
        Feature(
            "hidden_act other than silu",
            lambda c: c.hidden_act != "silu",
            {"hidden_act": "gelu"},
            ELSEWHERE
            | {"vLLM": wrong("computes a flex_olmo with silu whatever its hidden_act says")},
        ),
    )
