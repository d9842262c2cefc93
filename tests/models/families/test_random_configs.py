"""Random small configs of every family: loss and every gradient equal transformers' in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.config import ModelConfig
from models.transformer import Decoder
from tests.models.tiny import (
    in_their_names,
    next_tokens,
    same_model_in_both,
    tokens,
    transformers_in_float64,
)

EXAMPLES = 60
flags = st.booleans()

# What a family has beyond the fields of all, and what of these it restricts.
OWN: dict[str, dict[str, st.SearchStrategy]] = {
    "llama": {"attention_bias": flags, "head_dim": st.sampled_from([None, 6])},
    "qwen2": {},
    "qwen3": {"attention_bias": flags, "head_dim": st.sampled_from([4, 10])},
    "olmo2": {"attention_bias": flags},
    "qwen2_moe": {
        "qkv_bias": flags,
        "norm_topk_prob": flags,
        "moe_intermediate_size": st.integers(1, 9),
        "shared_expert_intermediate_size": st.integers(1, 9),
        "decoder_sparse_step": st.integers(1, 2),
        "mlp_only_layers": st.sampled_from([[], [0], [0, 1]]),
    },
    "flex_olmo": {"attention_bias": flags, "norm_topk_prob": flags},
    "qwen3_moe": {
        "attention_bias": flags,
        "head_dim": st.sampled_from([4, 10]),
        "norm_topk_prob": flags,
        "moe_intermediate_size": st.integers(1, 9),
        "decoder_sparse_step": st.integers(1, 2),
        "mlp_only_layers": st.sampled_from([[], [0], [0, 1]]),
    },
    "olmoe": {
        "attention_bias": flags,
        "norm_topk_prob": flags,
        "clip_qkv": st.sampled_from([None, 0.5]),
        "tie_word_embeddings": st.just(False),
    },
    "mixtral": {"head_dim": st.sampled_from([None, 6]), "norm_topk_prob": st.just(True)},
    "glm4_moe": {
        "attention_bias": flags,
        "head_dim": st.sampled_from([4, 8]),
        "norm_topk_prob": flags,
        "use_qk_norm": flags,
        "moe_intermediate_size": st.integers(1, 9),
        "n_shared_experts": st.integers(1, 2),
        "first_k_dense_replace": st.integers(0, 1),
        "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
        "n_group": st.integers(1, 2),
        "tie_word_embeddings": st.just(False),
    },
}


@st.composite
def configs(draw, family: str) -> ModelConfig:
    heads = draw(st.sampled_from([1, 2, 4]))
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": draw(st.integers(8, 24)),
        "hidden_size": heads * draw(st.sampled_from([2, 4, 6])),
        "intermediate_size": draw(st.integers(1, 12)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0])),
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "relu"])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "rope_theta": draw(st.sampled_from([100.0, 10_000.0])),
        "tie_word_embeddings": draw(flags),
    }
    fields |= {key: draw(values) for key, values in OWN[family].items()}
    if "norm_topk_prob" in OWN[family]:
        groups = fields.get("n_group", 1)
        fields["num_experts"] = groups * draw(st.integers(3, 5))
        least = 2 if fields["norm_topk_prob"] else 1
        most = fields["num_experts"] // groups  # of one group
        most -= family == "glm4_moe"  # a selection bias needs experts to choose from
        fields["num_experts_per_tok"] = draw(st.integers(least, most))
    if "mlp_only_layers" in fields:
        layers = range(fields["num_hidden_layers"])
        fields["mlp_only_layers"] = [i for i in fields["mlp_only_layers"] if i in layers]
    return ModelConfig(**fields)


def assert_same_gradients(ours: Decoder, theirs: torch.nn.Module) -> None:
    """Gradients that nearly cancel, as of key biases, are measured by a thousandth of the whole."""
    mine = in_their_names(ours, {name: p.grad for name, p in ours.named_parameters()})
    grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert len(grads) > 8
    least = 1e-3 * torch.stack([grad.norm() for grad in grads.values()]).norm()
    for name, grad in grads.items():
        difference = (grad - mine[name]).norm() / torch.maximum(grad.norm(), least)
        assert difference <= 1e-9, f"{name}: {difference:.1e}"


@pytest.mark.parametrize("family", OWN)
def test_random_configs_compute_what_transformers_does(family: str) -> None:
    seen = []

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(config=configs(family))
    def check(config: ModelConfig) -> None:
        seen.append(config)
        ours, theirs = same_model_in_both(config, torch.float64)
        tokens_BL = tokens(config, 2, 7)
        labels_BL = next_tokens(tokens_BL)
        logits_BLV = theirs(input_ids=tokens_BL).logits
        loss = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), reduction="sum")
        loss.backward()
        found = ours(tokens_BL, labels_BL=labels_BL).loss_sum
        found.backward()
        torch.testing.assert_close(found, loss, rtol=1e-10, atol=0)
        assert_same_gradients(ours, theirs)

    with transformers_in_float64():
        check()
    assert len(seen) >= EXAMPLES
    assert len({str(config) for config in seen}) > EXAMPLES // 2, "they must differ"
