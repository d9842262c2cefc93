"""Mixtral (arXiv 2401.04088): softmax router that always renormalises, no QK-norm, experts only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from models.attention.gqa import GroupedQueryAttention
from models.config import TENSOR_NAMES
from models.engines import Feature, no, otherwise, rope_rows, wrong
from models.moe_config import MoEModelConfig


class Mixtral(MoEModelConfig):
    """Softmax router, always renormalised; no QK-norm, no biases; every layer has experts, none
    shared."""

    family: Literal["mixtral"] = "mixtral"

    hf_class = "MixtralForCausalLM"
    defaults = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    hf_token_ids = {"bos_token_id": 1, "eos_token_id": 2}
    hf_omitted = ("norm_topk_prob",)
    hf_expert_counts = ("num_local_experts",)
    tensor_names = TENSOR_NAMES | {
        "moe.router.weight": "block_sparse_moe.gate.weight",
        "moe.w1": (
            "block_sparse_moe.experts.{}.w1.weight",
            "block_sparse_moe.experts.{}.w3.weight",
        ),
        "moe.w2": "block_sparse_moe.experts.{}.w2.weight",
    }

    def attention(self, layer: int) -> GroupedQueryAttention:
        return GroupedQueryAttention(self, layer)

    def hf_constants(self) -> dict[str, Any]:
        return {"sliding_window": None, "router_jitter_noise": 0.0}

    def problems(self) -> Iterator[str]:
        if not self.norm_topk_prob:
            yield "norm_topk_prob=false: mixtral always renormalises; allowed: true"
        if self.num_experts_per_tok == 1:
            yield (
                "num_experts_per_tok=1: mixtral renormalises, which makes every gate 1 and gives "
                "the router no gradient; allowed: at least 2, or family=qwen3_moe with "
                "norm_topk_prob=false"
            )
        yield from super().problems()

    engine_rows = (
        Feature("", lambda c: True, {}),
        Feature(
            "head_dim other than hidden_size / heads",
            lambda c: c.head_dim * c.num_attention_heads != c.hidden_size,
            {"head_dim": 64},
            {"mistral.rs": no("does not load a mixtral whose head_dim is not hidden_size / heads")},
        ),
        *rope_rows(mistral_rs=otherwise("linear", "yarn", "llama3")),
        Feature(
            "hidden_act other than silu",
            lambda c: c.hidden_act != "silu",
            {"hidden_act": "gelu"},
            {
                "vLLM": wrong("computes a mixtral with silu whatever its hidden_act says"),
                "llama.cpp": wrong("computes a mixtral with silu whatever its hidden_act says"),
            },
        ),
    )
