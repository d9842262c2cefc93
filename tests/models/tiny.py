"""Tiny models of every family, and transformers' own implementation of them as the oracle."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from models import ModelConfig
from models.build import build_model
from models.hf.names import entries
from models.transformer import Decoder

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
NO_EXPERTS: dict[str, Any] = {
    "num_experts": None,
    "num_experts_per_tok": None,
    "intermediate_size": 40,
}
# What each family has that the others do not, in at least one case.
CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "family": "qwen3_moe",
        "head_dim": 12,
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "attention_bias": True,
        "rope_theta": 500000.0,
    },
    "qwen3_moe_sparse_step": {
        "family": "qwen3_moe",
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "hidden_act": "gelu",
    },
    "olmoe": {
        "family": "olmoe",
        "intermediate_size": 20,
        "norm_topk_prob": False,
        "clip_qkv": 1.0,
    },
    "olmoe_norm": {
        "family": "olmoe",
        "intermediate_size": 20,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "attention_bias": True,
    },
    "mixtral": {"family": "mixtral", "intermediate_size": 20, "head_dim": 16},
    "glm4_moe": {
        "family": "glm4_moe",
        "head_dim": 16,
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm4_moe_plain": {
        "family": "glm4_moe",
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "partial_rotary_factor": 0.5,
        "hidden_act": "relu",
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        "num_key_value_heads": 4,
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 5,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rms_norm_eps": 1e-3,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v3_plain": {
        "family": "deepseek_v3",
        "num_key_value_heads": 4,
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "rope_interleave": False,
        "hidden_act": "gelu",
    },
    "qwen2_moe": {
        "family": "qwen2_moe",
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe_sparse_step": {
        "family": "qwen2_moe",
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "qkv_bias": False,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
    },
    "flex_olmo": {
        "family": "flex_olmo",
        "intermediate_size": 20,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "flex_olmo_norm": {
        "family": "flex_olmo",
        "intermediate_size": 20,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "llama": {
        "family": "llama",
        **NO_EXPERTS,
        "head_dim": 12,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "llama_biases": {
        "family": "llama",
        **NO_EXPERTS,
        "attention_bias": True,
        "hidden_act": "gelu",
        "num_key_value_heads": 4,
    },
    "qwen2": {"family": "qwen2", **NO_EXPERTS, "rope_theta": 500000.0},
    "qwen2_tied": {"family": "qwen2", **NO_EXPERTS, "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", **NO_EXPERTS, "head_dim": 12, "attention_bias": True},
    "qwen3_tied": {
        "family": "qwen3",
        **NO_EXPERTS,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "hidden_act": "relu",
    },
    "olmo2": {"family": "olmo2", **NO_EXPERTS, "attention_bias": True},
    "olmo2_tied": {
        "family": "olmo2",
        **NO_EXPERTS,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
}
# One case per family.
MOE_FAMILIES = (
    "qwen3_moe",
    "olmoe",
    "mixtral",
    "glm4_moe",
    "deepseek_v3",
    "qwen2_moe",
    "flex_olmo",
)
DENSE_FAMILIES = ("llama", "qwen2", "qwen3", "olmo2")
FAMILIES = MOE_FAMILIES + DENSE_FAMILIES


def tiny_config(case: str = "qwen3_moe", **changes: Any) -> ModelConfig:
    return ModelConfig(**{**COMMON, **CASES[case], **changes})


def tokens(config: ModelConfig, rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (rows, length), generator=generator)


def next_tokens(tokens_BL: Tensor) -> Tensor:
    """Labels of unpacked rows: the next token, nothing for the last."""
    return torch.cat([tokens_BL[:, 1:], tokens_BL.new_full((len(tokens_BL), 1), -100)], dim=1)


def randomise_buffers_and_norms(model: torch.nn.Module, seed: int = 1) -> None:
    """Values away from their neutral start: norms of 1 and biases of 0 hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if name.endswith(("norm.weight", "bias")):
            noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 0.5
            tensor.data.add_((0.5 * noise).to(tensor.dtype))


def transformers_model(config: ModelConfig, **options: Any) -> torch.nn.Module:
    """transformers' model of this config, random weights, in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config.to_hf()
    hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
    hf_config._experts_implementation = "eager"  # the grouped one has no fp64
    model = AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="sdpa", **({"dtype": torch.float32} | options)
    )
    return model.train()


def same_model_in_both(config: ModelConfig, dtype: torch.dtype) -> tuple[Decoder, torch.nn.Module]:
    """Our model and transformers' with the same weights, put there by our table of names."""
    ours = build_model(config, dtype=dtype, seed=3)
    randomise_buffers_and_norms(ours)
    theirs = transformers_model(config).to(dtype)
    theirs.load_state_dict(in_their_names(ours, our_tensors(ours)), strict=True)
    return ours, theirs


def our_tensors(model: Decoder) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def in_their_names(model: Decoder, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names that transformers 5 has in memory (experts of a layer in one tensor)."""
    config = model.config
    plan = entries(config, our_tensors(model), config.moe_layers)
    named = {
        entry.name: entry.take(values[entry.source].detach())
        for entry in plan
        if values.get(entry.source) is not None
    }
    if config.tie_word_embeddings:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    return named


@contextmanager
def transformers_in_float64() -> Iterator[None]:
    """Inside, transformers computes norms and routers of fp64 models in fp64 too, not in fp32.

    Its own code runs: the functions that say `torch.float32`, `torch.float` or `.float()` are given
    a `torch` in which these mean float64, and Mixtral's `.float()` a Tensor method that does.
    """
    from transformers.models.mixtral import modeling_mixtral

    modules = [
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for family in FAMILIES
    ]
    wide = types.SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    wide.float32 = wide.float = torch.float64
    undo = []
    for module in modules:
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__name__.endswith(("RMSNorm", "Router")):
                plain = value.forward
                changed = {**plain.__globals__, "torch": wide}
                value.forward = types.FunctionType(
                    plain.__code__, changed, plain.__name__, plain.__defaults__, plain.__closure__
                )
                undo.append((value, plain))
    router = modeling_mixtral.MixtralTopKRouter
    inner, to_float = router.forward, torch.Tensor.float

    def forward_in_double(self, hidden_states):
        torch.Tensor.float = torch.Tensor.double
        try:
            return inner(self, hidden_states)
        finally:
            torch.Tensor.float = to_float

    router.forward = forward_in_double
    try:
        yield
    finally:
        for value, plain in undo:
            value.forward = plain
