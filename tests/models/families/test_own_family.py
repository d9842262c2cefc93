"""A family from a file outside the packages: configured, trained, exported and read back."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file

import train
from models.attention import GroupedQueryAttention
from models.build import build_model, meta_tensors
from models.config import TENSOR_NAMES, ModelConfig, Size
from models.errors import UserError
from models.families import FAMILIES
from models.hf import export_hf, load_hf
from models.hf.names import entries
from moe.kernels.common.activations import ACTIVATIONS
from tests.training.tiny import write_inputs
from training.checkpoint.files import resolve
from training.checkpoint.weights import CheckpointTensors, load_model
from training.config.build import ConfigError, load_config


class Toy(ModelConfig):
    """Qwen3-MoE with clipped values, GeGLU and tensor names of its own."""

    family: Literal["toy"] = "toy"

    moe_intermediate_size: Size = 16
    """Width of each expert."""
    qkv_limit: Annotated[float, Field(gt=0)] = 8.0
    """Clamp queries, keys and values."""

    hf_class = "ToyForCausalLM"
    defaults = {"intermediate_size": 32, "rms_norm_eps": 1e-6, "hidden_act": "gelu"}
    defaults |= {"norm_topk_prob": True}
    activations = {"gelu": "geglu"}
    expert_width_field = "moe_intermediate_size"
    layer_prefix = "transformer.h.{}."
    tensor_names = TENSOR_NAMES | {
        "embed": "transformer.wte",
        "attn.o": "attn.out",
        "moe.router.weight": "ffn.router.weight",
        "moe.w1": ("ffn.{}.gate.weight", "ffn.{}.up.weight"),
        "moe.w2": "ffn.{}.down.weight",
    }

    def attention(self, layer: int) -> GroupedQueryAttention:
        return GroupedQueryAttention(self, layer, qk_norm="head", clip=self.qkv_limit)


@pytest.fixture
def toy(monkeypatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", Toy)


@pytest.mark.usefixtures("toy")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_own_family_is_trained_exported_and_read_back(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_inputs(tmp_path / "in", count=14)
    words = ["run.name=toy", "model.family=toy", "model.qkv_limit=0.5", "train.steps=12"]
    assert train.main([str(file), *words]) == 0
    lines = (tmp_path / "runs/toy/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0] - 0.3

    latest = resolve(tmp_path / "runs/toy")
    trained = load_model(latest)
    attention, moe = trained.layers[1].attn, trained.layers[1].moe
    assert type(trained.config) is Toy and attention.clip == 0.5
    assert moe.config.activation == "geglu"
    export_hf(CheckpointTensors(latest), tmp_path / "out", config=trained.config)
    stored = load_file(tmp_path / "out/model.safetensors")
    assert {"transformer.wte.weight", "transformer.h.1.ffn.3.down.weight"} <= stored.keys()
    assert torch.equal(stored["transformer.h.1.ffn.2.up.weight"], moe.w1[2, 1::2])
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "toy"
    back = load_hf(tmp_path / "out")
    assert back.config == trained.config
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, back.get_parameter(name)), name


def test_own_family_is_checked_as_ours_are(toy, tmp_path) -> None:
    file = write_inputs(tmp_path / "in", count=2)
    for words, told in (
        (["model.hidden_act=silu"], "hidden_act='silu' is not supported for toy; allowed: gelu"),
        (["model.clip_qkv=3"], "model.clip_qkv=3 is no field of the family toy"),
        (["model.qkv_limt=3"], "did you mean model.qkv_limit?"),
        (["model.qkv_limit=0"], "model.qkv_limit=0 must be a number > 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(file, ["model.family=toy", *words])
        assert told in str(caught.value)


def test_a_family_without_a_name_for_a_parameter_is_found(toy, monkeypatch, tmp_path) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ModelConfig(
        family="toy", **sizes, num_experts=2, num_experts_per_tok=1, norm_topk_prob=False,
        max_position_embeddings=8,
    )  # fmt: skip
    names = {key: name for key, name in TENSOR_NAMES.items() if key != "attn.k"}
    monkeypatch.setattr(Toy, "tensor_names", names)
    with pytest.raises(AssertionError, match=r"toy has no name for layers\.0\.attn\.k\.weight"):
        export_hf({}, tmp_path / "out", config=config)


def test_the_documented_family_works(monkeypatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    start, end = page.index("    # mine.py"), page.index('    FAMILIES["mine"] = Mine')
    place: dict[str, Any] = {"__name__": "mine"}
    code = compile(textwrap.dedent(page[start:end]), "mine.py", "exec", dont_inherit=True)
    exec(code, place)
    monkeypatch.setitem(FAMILIES, "mine", place["Mine"])
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ModelConfig(
        family="mine", **sizes, moe_intermediate_size=4, intermediate_size=8, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=8,
    )  # fmt: skip
    assert type(config) is place["Mine"]
    model = build_model(config)
    assert model(torch.ones(1, 4, dtype=torch.int64), logits=True).logits.isfinite().all()
    names = {entry.name for entry in entries(config, meta_tensors(config))}
    assert "model.layers.0.mlp.router.weight" in names


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_activations_of_a_family_are_those_of_the_layer(family: type[ModelConfig]) -> None:
    assert family.activations["silu"] == "swiglu"
    for name in family.activations.values():
        assert ACTIVATIONS[name].width == 2


def test_unknown_family_is_refused_after_it_is_gone() -> None:
    with pytest.raises(UserError, match="family='toy' must be one of 'qwen3_moe', 'olmoe'"):
        ModelConfig.of_user({"family": "toy"})
