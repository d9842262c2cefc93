"""The factor of the gates: what it does to the size of the output, and that any folder keeps it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from models.build import build_model
from models.config import FAMILIES as ALL
from models.config import ModelConfig
from models.errors import UserError
from models.hf import export_hf
from models.hf.check import check_export, round_weights
from models.hf.config import config_from_hf
from models.moe_config import KEPT_FACTOR, MoEModelConfig
from tests.models.tiny import randomise_buffers_and_norms, tiny_config

FAMILIES = {name: family for name, family in ALL.items() if issubclass(family, MoEModelConfig)}
WITHOUT = [name for name, family in FAMILIES.items() if not family.has_scaling_factor]
WITH = [name for name, family in FAMILIES.items() if family.has_scaling_factor]


def model_of(family: str, factor: float, **fields):
    config = tiny_config(family, routed_scaling_factor=factor, initializer_range=0.1, **fields)
    model = build_model(config, seed=1)
    randomise_buffers_and_norms(model)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_with_a_key_are_those_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.CONFIG_MAPPING[family]()
    assert hasattr(theirs, "routed_scaling_factor") == FAMILIES[family].has_scaling_factor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_from_a_folder(family, dtype, tmp_path):
    pytest.importorskip("transformers")
    model = model_of(family, 2.446)
    export_hf(model, tmp_path / "out", dtype=dtype)
    round_weights(model, dtype)
    receipt = check_export(model, tmp_path / "out", new_tokens=64)
    assert receipt.passed and receipt.equal_tokens == receipt.tokens, str(receipt)


@pytest.mark.parametrize("family", WITHOUT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_power_of_two_is_folded_bit_for_bit_and_nothing_else_changes(family, dtype, tmp_path):
    for factor in (1.0, 4.0):
        export_hf(model_of(family, factor), tmp_path / f"{factor:g}", dtype=dtype)
    plain, folded = (load_file(tmp_path / n / "model.safetensors") for n in ("1", "4"))
    scaled = {name for name in plain if not torch.equal(plain[name], folded[name])}
    assert scaled and all(torch.equal(4 * plain[name], folded[name]) for name in scaled)
    assert len(scaled) == sum(".experts." in name for name in plain) / 3
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("1", "4")]
    assert configs[0] == configs[1]
    assert not {"routed_scaling_factor", KEPT_FACTOR} & configs[0].keys()
    assert config_from_hf(tmp_path / "4").routed_scaling_factor == 1, "it is in the weights"


@pytest.mark.parametrize("family", WITH)
def test_a_family_with_a_key_keeps_its_weights(family, tmp_path):
    for factor in (1.0, 4.0):
        export_hf(model_of(family, factor), tmp_path / f"{factor:g}")
    plain, scaled = (load_file(tmp_path / n / "model.safetensors") for n in ("1", "4"))
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)
    assert config_from_hf(tmp_path / "4").routed_scaling_factor == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoints_config_keeps_the_factor(family):
    config = tiny_config(family, routed_scaling_factor=2.5)
    kept = config.to_hf()
    assert config_from_hf(kept) == config
    if family in WITHOUT:
        assert KEPT_FACTOR in kept
        del kept[KEPT_FACTOR]
        with pytest.raises(UserError, match="not understood: routed_scaling_factor"):
            config_from_hf(kept | {"routed_scaling_factor": 2.5})
        assert config_from_hf(kept | {"routed_scaling_factor": 1.0}).routed_scaling_factor == 1


# ------------------------------------------------------------------------------ size of the output

K_WIDTH, LAYERS = 64, 3
X_TD = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))


def config_of(k: int, dense: int | None = None, **fields) -> ModelConfig:
    """Experts of `K_WIDTH`, or dense networks of that many such widths."""
    sizes = {
        "num_hidden_layers": LAYERS, "hidden_size": 128, "moe_intermediate_size": K_WIDTH,
        "num_experts": 32, "num_experts_per_tok": k, "norm_topk_prob": True,
        "intermediate_size": (dense or k) * K_WIDTH, "initializer_range": 0.02,
        "mlp_only_layers": [] if dense is None else list(range(LAYERS)),
    }  # fmt: skip
    return tiny_config("qwen3_moe", **sizes | fields)


@torch.no_grad()
def sizes_by_layer(config: ModelConfig) -> tuple[list[float], list[float]]:
    """Root mean square of what each layer's experts, or its dense network, make at first of inputs
    of size one; and of a token's gates together, √(Σ g²)."""
    found, gates = [], []
    for block in build_model(config, seed=0).layers:
        moe = getattr(block, "moe", None)
        y_TD = block.mlp(X_TD) if moe is None else moe(X_TD)[0]
        found.append(y_TD.square().mean().sqrt().item())
        if moe is not None:
            gate_TK = moe.router(X_TD).gating.gate_TK
            gates.append(gate_TK.square().sum(dim=1).mean().sqrt().item())
    return found, gates


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_output_at_the_start_beside_the_dense_twins(k, normalised):
    """By layer: of what one network of K · N makes, the K experts make √(Σ g²) / √K, factor
    included; with equal gates that sum to one, a K-th of the factor."""
    (dense, _), (one, _) = sizes_by_layer(config_of(k, k)), sizes_by_layer(config_of(k, 1))
    for factor in (1.0, math.sqrt(k), float(k)):
        config = config_of(k, norm_topk_prob=normalised, routed_scaling_factor=factor)
        found, gates = sizes_by_layer(config)
        for layer, size in enumerate(found):
            assert size / dense[layer] == pytest.approx(gates[layer] / math.sqrt(k), rel=0.05)
            if normalised:
                assert size / dense[layer] == pytest.approx(factor / k, rel=0.1)
                if factor == math.sqrt(k):  # the size of one expert's output
                    assert size == pytest.approx(one[layer], rel=0.1)
