"""RoPE scaling: the kinds are classes in one table, and what a config says of them is checked; ours
compute what transformers computes, whichever way a config.json spells them."""

from __future__ import annotations

import copy
import json
from typing import Any, Literal

import pytest
import torch

from models.build import build_model
from models.config import ModelConfig
from models.hf.config import config_from_hf
from models.rope import SCALINGS, Rope, RopeScaling, normal_rope_scaling
from tests.models.tiny import (
    in_their_names,
    our_tensors,
    tiny_config,
    tokens,
    transformers_in_float64,
)


class Shifted(RopeScaling):
    rope_type: Literal["shifted"] = "shifted"
    by: float
    power: int = 1

    def frequencies(self, rope: Rope) -> torch.Tensor:
        return (super().frequencies(rope) + self.by) ** self.power / self.factor


@pytest.fixture
def own(monkeypatch) -> None:
    monkeypatch.setitem(SCALINGS, "shifted", Shifted)


def test_a_kind_of_ones_own_reaches_the_angles(own) -> None:
    config = tiny_config("mixtral", rope_scaling={"type": "shifted", "factor": 2, "by": 0.5})
    assert config.rope_scaling == {"rope_type": "shifted", "by": 0.5, "factor": 2.0}
    positions = torch.arange(5)[None]
    plain = tiny_config("mixtral").attention(0).rope
    moved = config.attention(0).rope
    frequencies_F = plain(torch.tensor([[1]])).sin_BLF.asin()  # the first angle is 1
    expected_BLF = (frequencies_F + 0.5) / 2 * positions[..., None]
    torch.testing.assert_close(moved(positions).cos_BLF, expected_BLF.cos())
    assert plain.key != moved.key == config.attention(1).rope.key
    assert Rope(8, 100.0).key != Rope(8, 101.0).key != Rope(16, 101.0).key


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rope_type": "shifted", "factor": 2}, "type shifted needs by; allowed: rope_type, fact"),
        ({"rope_type": "shifted", "factor": 2, "by": 1, "to": 1}, r"unknown keys \['to'\]"),
        ({"rope_type": "shifted", "by": 1}, "type shifted needs factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5 must be a number >= 1"),
        ({"rope_type": "linear", "factor": "2"}, "factor='2' must be a number"),
        ({"rope_type": "yarn", "factor": 2}, "yarn needs original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 2, "low_freq_factor": 1}, "unknown keys.*beta_fast"),
        (
            YARN | {"beta_fast": 1, "beta_slow": 2},
            "needs a number at least beta_slow=2, in beta_fast",
        ),
        (YARN | {"mscale": -1}, "mscale=-1 must be a number >= 0"),
        (YARN | {"original_max_position_embeddings": 8.5}, "embeddings=8.5 must be a whole number"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "above low_freq_factor=1, in high_freq_factor"),
        ({"rope_type": ["linear"], "factor": 2}, "not supported; allowed: default, linear"),
        ({"rope_type": "linear", "factor": 2, "by": 1}, "'by'.*allowed: rope_type, factor$"),
    ],
)
def test_what_a_kind_does_not_read_is_refused(own, given: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        normal_rope_scaling(given)


def test_layers_turn_by_their_own_rope_and_share_equal_ones() -> None:
    model = build_model(tiny_config("mixtral"), dtype=torch.float64)
    assert len(model.ropes) == 1  # the angles of three layers are computed once
    for layer, block in enumerate(model.layers):
        block.attn.rope = Rope(16, (1e4, 100.0)[layer % 2])
    model.ropes = {block.attn.rope.key: block.attn.rope for block in model.layers}
    assert len(model.ropes) == 2
    tokens_BL, positions_BL = tokens(model.config, 2, 9), torch.arange(9).expand(2, 9)
    with torch.no_grad():
        x_BLD = model.embed(tokens_BL)
        for block in model.layers:
            x_BLD, _ = block(x_BLD, block.attn.rope(positions_BL))
        expected = model.head(model.norm(x_BLD))
        assert torch.equal(model(tokens_BL, logits=True).logits, expected)


# ---- as transformers computes them ---------------------------------------------------------------

DEEPSEEK = {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1}


def old(**scaling: Any) -> dict[str, Any]:
    """The keys of transformers 4.x."""
    return {"rope_theta": 1000.0, "rope_scaling": scaling}


def new(**scaling: Any) -> dict[str, Any]:
    """Those of 5.x."""
    return {"rope_parameters": {"rope_theta": 1000.0, **scaling}}


# family, keys of its config.json, tokens: beyond max_position_embeddings=64 too
SPELLINGS: list[tuple[str, dict[str, Any], int]] = [
    ("qwen3_moe", old(type="yarn", factor=4.0, original_max_position_embeddings=16), 40),
    ("qwen3_moe", old(**YARN), 80),
    ("qwen3_moe", new(**YARN), 40),
    ("qwen3_moe", old(rope_type="yarn", factor=4.0), 40),
    ("qwen3_moe", new(rope_type="yarn", factor=4.0), 40),
    ("mixtral", old(**YARN, **DEEPSEEK), 40),
    ("mixtral", new(**YARN, **DEEPSEEK), 40),
    ("mixtral", new(**YARN, mscale=0.7), 40),
    ("olmoe", old(**YARN, attention_factor=1.3), 40),
    ("olmoe", new(**YARN, attention_factor=0.8, beta_fast=4, beta_slow=2), 40),
    ("olmoe", new(**YARN, truncate=False, beta_fast=2.5), 40),
    ("glm4_moe", old(**YARN) | {"partial_rotary_factor": 0.5}, 40),
    (
        "glm4_moe",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        40,
    ),
    ("qwen3_moe", old(**LLAMA3), 40),
    ("mixtral", new(**LLAMA3), 80),
    ("glm4_moe", new(**LLAMA3, partial_rotary_factor=0.5), 40),
    ("qwen3_moe", old(type="dynamic", factor=2.0), 40),
    ("qwen3_moe", old(rope_type="dynamic", factor=2.7), 100),
    ("mixtral", new(rope_type="dynamic", factor=4.0), 100),
    ("glm4_moe", new(rope_type="dynamic", factor=3, partial_rotary_factor=0.5), 90),
    ("olmoe", new(rope_type="linear", factor=2.0), 40),
    ("olmoe", {"rope_scaling": None, "rope_theta": 500.0}, 40),
]


def config_json(family: str, rope: dict[str, Any]) -> dict[str, Any]:
    """A config.json that spells RoPE in this way alone."""
    plain = dict.fromkeys(("rope_scaling", "rope_theta", "partial_rotary_factor"))
    config = tiny_config(family, head_dim=8, num_hidden_layers=2, **plain)
    raw = config.to_hf()
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"):
        raw.pop(key, None)
    return raw | copy.deepcopy(rope)


def from_transformers(raw: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = copy.deepcopy(raw)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


@pytest.mark.parametrize(
    ("family", "rope", "length"), SPELLINGS, ids=lambda v: v if isinstance(v, str) else None
)
def test_logits_equal_transformers(family: str, rope: dict[str, Any], length: int) -> None:
    raw = config_json(family, rope)
    config = config_from_hf(raw)
    ours, theirs = build_model(config, dtype=torch.float64, seed=3), from_transformers(raw)
    theirs.load_state_dict(in_their_names(ours, our_tensors(ours)), strict=True)
    tokens_BL = tokens(config, 1, length)
    with torch.no_grad(), transformers_in_float64():
        expected = theirs(input_ids=tokens_BL).logits
        found = ours.eval()(tokens_BL, logits=True).logits
        plain = ModelConfig(**config.model_dump() | {"rope_scaling": None})
        other = (
            build_model(plain, dtype=torch.float64, seed=3).eval()(tokens_BL, logits=True).logits
        )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    acts = config.rope_scaling is not None
    acts &= config.rope_scaling != {"rope_type": "dynamic", "factor": 2.0}  # 40 tokens of 64
    assert ((other - expected).abs().max() > 1e-4) == acts
    # both spellings of what we write mean the same, and are read as the same
    written = json.loads(json.dumps(config.to_hf()))
    assert config_from_hf(written) == config
    for left_out in ("rope_parameters", "rope_scaling"):
        one = {key: value for key, value in written.items() if key != left_out}
        assert config_from_hf(one) == config


def test_two_spellings_that_differ_are_refused() -> None:
    raw = config_json("mixtral", new(**YARN)) | {"rope_scaling": YARN | {"factor": 2.0}}
    with pytest.raises(ValueError, match="contradicts itself: rope_scaling="):
        config_from_hf(raw)
    same = config_json("mixtral", new(**YARN)) | {"rope_scaling": {**YARN, "beta_fast": 32}}
    assert config_from_hf(same).rope_scaling == YARN


def test_a_text_that_grows_beyond_the_length_is_generated_alike() -> None:
    """Dynamic scaling turns each new token by the base of the length so far."""
    from models.generate import generate

    raw = config_json("mixtral", new(rope_type="dynamic", factor=4.0))
    config = config_from_hf(raw | {"max_position_embeddings": 24, "eos_token_id": None})
    ours = build_model(config, dtype=torch.float64, seed=3)
    theirs = from_transformers(raw | {"max_position_embeddings": 24, "eos_token_id": None})
    theirs.load_state_dict(in_their_names(ours, our_tensors(ours)), strict=True)
    prompt_BL = tokens(config, 1, 20)
    with transformers_in_float64():
        expected = theirs.generate(prompt_BL, max_new_tokens=40, do_sample=False, eos_token_id=None)
    found = [step[0] for step in generate(ours, prompt_BL.tolist(), max_new_tokens=40)]
    assert found == expected[0, 20:].tolist()


def test_dynamic_scaling_needs_more_than_one_pair() -> None:
    with pytest.raises(ValueError, match="type dynamic needs at least 4 rotated dimensions"):
        tiny_config("mixtral", head_dim=2, rope_scaling={"rope_type": "dynamic", "factor": 2})
