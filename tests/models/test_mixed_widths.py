"""Models whose experts differ in width: config, initial values, export with zeros, import back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import ModelConfig
from models.build import build_model
from models.hf import export_hf, load_hf
from moe.layer import MoE, MoEConfig
from tests.models.tiny import CASES, COMMON
from training.estimate.flops import flops_per_token, matmul_weights, mean_widths, width_metrics

WIDTHS = [4, 8, 12, 20, 16, 2, 1, 20]


def config(case: str = "qwen3_moe", **changes) -> ModelConfig:
    return ModelConfig(**{**COMMON, **CASES[case], "moe_expert_widths": WIDTHS, **changes})


def logits(model, tokens_BL: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens_BL, logits=True).logits


@pytest.mark.parametrize("case", ["qwen3_moe", "olmoe", "mixtral", "glm4_moe"])
def test_transformers_computes_the_same_from_an_export(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    own = "moe_intermediate_size" in CASES[case]
    name = "moe_intermediate_size" if own else "intermediate_size"
    model = build_model(config(case, **{name: max(WIDTHS)}))
    export_hf(model, tmp_path / "out")
    tokens_BL = torch.randint(3, 96, (2, 16))
    ours = logits(model, tokens_BL)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens_BL).logits, ours, rtol=1e-4, atol=2e-5)

    # all experts of one width, zeros and all: what other software sees
    plain = json.loads((tmp_path / "out" / "config.json").read_text())
    assert plain.pop("moe_expert_widths") == WIDTHS
    (tmp_path / "out" / "config.json").write_text(json.dumps(plain))
    padded = load_hf(tmp_path / "out")
    assert padded.config.moe_expert_widths is None
    torch.testing.assert_close(logits(padded, tokens_BL), ours, rtol=1e-4, atol=2e-5)


def test_an_export_comes_back_bit_for_bit(tmp_path: Path) -> None:
    by_layer = [WIDTHS, WIDTHS[::-1]]
    model = build_model(config(moe_expert_widths=by_layer))
    assert model.layers[0].moe.w1.shape == (2 * sum(WIDTHS), 32)
    export_hf(model, tmp_path / "out")
    back = load_hf(tmp_path / "out")
    assert back.config == model.config
    for (name, one), other in zip(model.named_parameters(), back.parameters()):
        assert torch.equal(one, other), name


def test_numbers_beyond_a_width_are_not_dropped(tmp_path: Path) -> None:
    export_hf(build_model(config()), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    tensors[name][0, 8] = 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} is not zero beyond the 8 units"):
        load_hf(tmp_path / "out")


def test_equal_widths_start_with_the_values_of_one_width() -> None:
    mixed = build_model(config(moe_expert_widths=[20] * 8)).layers[0].moe
    same = build_model(config(moe_expert_widths=None)).layers[0].moe
    assert torch.equal(mixed.w1, same.w1.flatten(0, 1))
    assert torch.equal(mixed.w2, same.w2.mT.flatten(0, 1))
    x = torch.randn(7, 32)
    torch.testing.assert_close(mixed(x)[0], same(x)[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_expert_widths": WIDTHS[:5]}, "has 5 widths for num_experts=8"),
        ({"moe_expert_widths": [WIDTHS] * 3}, "3 lists for 2 layers"),
        ({"moe_intermediate_size": 24}, "moe_intermediate_size=24 must be the widest"),
        ({"moe_expert_widths": [0] * 7 + [20]}, "greater than or equal to 1"),
        ({"mlp_only_layers": [0, 1, 2]}, "has no effect"),
    ],
)
def test_impossible_widths_are_refused(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernels": "hopper"}, "kernels='hopper' computes experts of one width"),
        ({"expert_widths": (4, 8, 12)}, "must be num_experts=2 widths"),
        ({"expert_size": 9}, "the widest expert_size=9"),
    ],
)
def test_impossible_layers_are_refused(changes, words) -> None:
    good = {
        "hidden_size": 8, "expert_size": 8, "num_experts": 2, "num_experts_per_tok": 1,
        "norm": "none", "expert_widths": (4, 8),
    }  # fmt: skip
    MoE(MoEConfig(**good))
    with pytest.raises(ValueError, match=words):
        MoEConfig(**{**good, **changes})


def test_arithmetic_counts_the_widths_that_tokens_met() -> None:
    c = config()
    active, total = matmul_weights(c)
    _, same = matmul_weights(config(moe_expert_widths=None))
    assert same - total == 2 * 3 * 32 * (8 * 20 - sum(WIDTHS))
    assert mean_widths(c) == [sum(WIDTHS) / 8] * 2
    counts_LE = torch.zeros(2, 8, dtype=torch.int32)
    counts_LE[0, 3], counts_LE[1, 6] = 10, 10  # widths 20 and 1
    assert mean_widths(c, counts_LE) == [20.0, 1.0]
    seen, _ = matmul_weights(c, counts_LE=counts_LE)
    assert seen - active == pytest.approx(2 * 3 * 32 * (21 - 2 * sum(WIDTHS) / 8), abs=2)
    assert flops_per_token(c, 64, None, counts_LE) - flops_per_token(c, 64) == 6 * (seen - active)
    found = width_metrics(c, counts_LE)
    assert found["active_width"] == pytest.approx(21 / (2 * sum(WIDTHS) / 8))
    assert found["flop_violation"] == 7
    even = torch.tensor([[1000 / w for w in WIDTHS]] * 2)
    assert width_metrics(c, even)["flop_violation"] == pytest.approx(0, abs=1e-5)
