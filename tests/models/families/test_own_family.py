"""A family from a file outside the packages is checked as ours are; tests/test_extension.py trains
and exports it."""

from __future__ import annotations

import pytest

from models.config import TENSOR_NAMES, ModelConfig
from models.errors import UserError
from models.families import FAMILIES
from models.hf import export_hf
from moe.kernels.common.activations import ACTIVATIONS
from tests import ideas
from tests.training.tiny import write_inputs
from training.config.build import ConfigError, load_config


class Toy(ideas.own("A family", "Toy")):
    """The family of docs/extending.md, with one activation alone."""

    defaults = {"intermediate_size": 32, "rms_norm_eps": 1e-6, "hidden_act": "gelu"}
    defaults |= {"norm_topk_prob": True}
    activations = {"gelu": "geglu"}


@pytest.fixture
def toy(monkeypatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", Toy)


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


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_activations_of_a_family_are_those_of_the_layer(family: type[ModelConfig]) -> None:
    assert family.activations["silu"] == "swiglu"
    for name in family.activations.values():
        assert ACTIVATIONS[name].width == 2


def test_unknown_family_is_refused_after_it_is_gone() -> None:
    with pytest.raises(UserError, match="family='toy' must be one of 'qwen3_moe', 'olmoe'"):
        ModelConfig.of_user({"family": "toy"})
