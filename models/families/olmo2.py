"""OLMo 2 (arXiv 2501.00656): dense, norms behind attention and MLP, QK-norm over the whole
projection."""

from __future__ import annotations

from typing import Any, Literal

from models.attention.gqa import GroupedQueryAttention
from models.config import TENSOR_NAMES, ModelConfig
from models.engines import ROPE_SCALINGS, Feature, no, rope_rows, wrong

NOT_THERE = no("has no olmo2")
POST_NORM_NAMES = {
    "attn_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


class Olmo2(ModelConfig):
    """Dense; norms behind attention and MLP; QK-norm over the whole projection, optional biases in
    attention."""

    family: Literal["olmo2"] = "olmo2"

    attention_bias: bool = False
    """Biases in q, k, v and o."""

    hf_class = "Olmo2ForCausalLM"
    defaults = {
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    hf_token_ids = {"pad_token_id": 1, "eos_token_id": 50279}
    fixed_head_dim = True
    post_norm = True
    tensor_names = TENSOR_NAMES | POST_NORM_NAMES

    def attention(self, layer: int) -> GroupedQueryAttention:
        bias = self.attention_bias
        return GroupedQueryAttention(self, layer, qk_norm=self.qk_norm, bias=bias, output_bias=bias)

    @property
    def qk_norm(self) -> Literal["full"]:
        return "full"

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        out = super().to_hf(dtype)
        if out["rope_scaling"] is not None:
            del out["rope_scaling"]["rope_type"]  # transformers 4.57 allows type and factor alone
        return out

    engine_rows = (
        Feature("", lambda c: True, {"num_key_value_heads": 4}, {"mistral.rs": NOT_THERE}),
        Feature(
            "fewer key/value heads than heads",
            lambda c: c.num_key_value_heads != c.num_attention_heads,
            {"num_key_value_heads": 2},
            {"mistral.rs": NOT_THERE},
        ),
        Feature(
            "attention_bias: true",
            lambda c: c.attention_bias,
            {"attention_bias": True},
            {
                "llama.cpp": no("does not load an olmo2 with attention biases"),
                "mistral.rs": NOT_THERE,
            },
        ),
        *rope_rows(mistral_rs=dict.fromkeys(ROPE_SCALINGS, NOT_THERE)),
        Feature(
            "hidden_act other than silu",
            lambda c: c.hidden_act != "silu",
            {"hidden_act": "gelu"},
            {
                "llama.cpp": wrong("computes an olmo2 with silu whatever its hidden_act says"),
                "mistral.rs": NOT_THERE,
            },
        ),
    )
