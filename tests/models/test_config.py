"""The model config: transformers' defaults, both spellings of config.json, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from models import ModelConfig
from models.families import FAMILIES as KNOWN
from models.hf.config import config_from_hf
from tests.models.tiny import CASES, FAMILIES, tiny_config

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = {family: {"model_type": family} for family in FAMILIES}
# transformers' default for GLM divides 4096 by 96 heads; its public models say 128.
MINIMAL["glm4_moe"]["head_dim"] = 128


def refused(match: str, /, **fields: Any) -> None:
    with pytest.raises(ValidationError, match=match):
        ModelConfig(**fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_take_transformers_defaults(family: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(**MINIMAL[family]).to_dict()
    ours = config_from_hf(MINIMAL[family])
    spelled = {"num_experts": ("num_experts", "num_local_experts", "n_routed_experts")}
    rope = theirs["rope_parameters"]
    assert ours.rope_theta == rope["rope_theta"]
    if family == "glm4_moe":
        assert ours.partial_rotary_factor == rope["partial_rotary_factor"]
    compared = 0
    for key in KNOWN[family].model_fields:
        names = [name for name in spelled.get(key, (key,)) if name in theirs]
        if names and theirs[names[0]] is not None:
            assert getattr(ours, key) == theirs[names[0]], key
            compared += 1
    assert compared >= (15 if "num_experts" in KNOWN[family].model_fields else 11)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_moe", False),
        ("olmoe", False),
        ("mixtral", True),
        ("glm4_moe", True),
        ("qwen2_moe", False),
        ("flex_olmo", False),
    ],
)
def test_missing_norm_topk_prob_is_the_familys_own(family: str, expected: bool) -> None:
    assert config_from_hf(MINIMAL[family]).norm_topk_prob is expected
    norm = config_from_hf(MINIMAL[family]).moe_config(5).norm
    assert norm == ("topk_sum" if expected else "none")


@pytest.mark.parametrize("case", CASES)
def test_config_json_holds_everything(case: str) -> None:
    config = tiny_config(case, bos_token_id=1, pad_token_id=0)
    written = json.loads(json.dumps(config.to_hf("bfloat16")))
    assert config_from_hf(written) == config
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    # each style alone is enough, so each is complete
    old = {key: value for key, value in written.items() if key not in ("rope_parameters", "dtype")}
    new = {
        key: value
        for key, value in written.items()
        if key not in ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype")
    }
    if config.family == "qwen3_moe":
        del old["num_local_experts"], new["num_experts"]
    assert config_from_hf(old) == config
    assert config_from_hf(new) == config


@pytest.mark.parametrize("case", CASES)
def test_transformers_config_survives(case: str) -> None:
    """What transformers makes of our config.json means the same to us."""
    from transformers import AutoConfig

    config = tiny_config(case, bos_token_id=1, pad_token_id=0)
    values = config.to_hf()
    theirs = AutoConfig.for_model(values.pop("model_type"), **values)
    assert config_from_hf(json.loads(theirs.to_json_string(use_diff=False))) == config
    assert config_from_hf(json.loads(theirs.to_json_string())) == config


@pytest.mark.parametrize("case", CASES)
def test_dump_loads_again(case: str) -> None:
    config = tiny_config(case)
    assert ModelConfig(**config.model_dump()) == config
    assert ModelConfig(**json.loads(config.model_dump_json())) == config


def test_from_hf_reads_files_and_folders(tmp_path) -> None:
    config = tiny_config("glm4_moe")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_hf()))
    assert config_from_hf(path) == config_from_hf(str(tmp_path)) == config
    with pytest.raises(ValueError, match="there is no file"):
        config_from_hf(tmp_path / "nowhere")
    path.write_text("{broken")
    with pytest.raises(ValueError, match="not valid JSON"):
        config_from_hf(tmp_path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        config_from_hf(tmp_path)


@pytest.mark.parametrize(
    ("family", "change", "match"),
    [
        ("qwen3_moe", {"model_type": "gpt2"}, "model_type='gpt2'.*allowed: qwen3_moe, olmoe"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("olmoe", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("qwen3_moe", {"hidden_act": "relu2"}, "hidden_act='relu2'.*allowed: silu, gelu"),
        ("qwen3_moe", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'.*linear"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "llama3"}}, "llama3 needs factor"),
        ("qwen3_moe", {"rope_scaling": {"type": "linear"}}, "linear needs factor"),
        ("qwen3_moe", {"rope_scaling": {"factor": 4}}, "factor=4 scales nothing"),
        ("qwen3_moe", {"rope_scaling": {"type:yarn": None}}, "allowed: .rope_type: linear"),
        (
            "qwen3_moe",
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "contradicts itself.*10000.*1000000",
        ),
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 16}, "contradicts itself"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen3_moe", {"new_feature": 1}, "not understood: new_feature"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func"),
        ("mixtral", {"attention_bias": True}, "not understood: attention_bias"),
        ("qwen3_moe", {"use_qk_norm": False}, "not understood: use_qk_norm"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "not understood: shared_expert"),
        ("olmoe", {"n_shared_experts": False}, "not understood: n_shared_experts"),
        ("mixtral", {"norm_topk_prob": False}, "always renormalises"),
        ("llama", {"num_experts": 8}, "not understood: num_experts"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"pretraining_tp": 2}, "not understood: pretraining_tp"),
        ("qwen2", {"attention_bias": True}, "not understood: attention_bias"),
        ("glm4_moe", {"eos_token_id": [1, 10**6]}, "eos_token_id=1000000.*vocab_size=151552"),
    ],
)
def test_unsupported_features_are_refused_by_name(family: str, change: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        config_from_hf(MINIMAL[family] | change)


def test_features_that_change_nothing_are_accepted() -> None:
    plain = config_from_hf(MINIMAL["qwen3_moe"])
    more = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 3}
    more |= {"rope_scaling": None, "rope_parameters": None, "transformers_version": "9"}
    assert config_from_hf(MINIMAL["qwen3_moe"] | more) == plain
    odd = MINIMAL["qwen3_moe"] | {"new_feature": 1}
    assert config_from_hf(odd, ignore_keys=("new_feature",)) == plain
    wide = {"sliding_window": 131072}
    assert config_from_hf(MINIMAL["mixtral"] | wide) == config_from_hf(MINIMAL["mixtral"])


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mixtral", {"attention_bias": False, "qkv_bias": False, "use_qk_norm": False}),
        ("mixtral", {"head_dim": None, "clip_qkv": None, "mlp_only_layers": []}),
        ("qwen3_moe", {"qkv_bias": False, "shared_expert_intermediate_size": 0}),
        ("qwen3_moe", {"use_qk_norm": True, "n_group": 1, "topk_group": 1}),
        ("olmoe", {"use_qk_norm": True, "first_k_dense_replace": 0, "n_shared_experts": 0}),
        ("olmoe", {"routed_scaling_factor": 1.0, "decoder_sparse_step": 1}),
        ("glm4_moe", {"qkv_bias": False, "clip_qkv": None, "mlp_only_layers": []}),
        ("llama", {"pretraining_tp": 1, "mlp_bias": False, "attention_bias": False}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 131072, "head_dim": 128}),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "default", "original_max_position_embeddings": 4096}},
        ),
        (
            "mixtral",
            {"rope_scaling": {"type": "default", "original_max_position_embeddings": 4096}},
        ),
    ],
)
def test_f10_keys_that_say_off_are_accepted(family: str, more: dict) -> None:
    plain = config_from_hf(MINIMAL[family])
    assert config_from_hf(MINIMAL[family] | more) == plain


def test_f8_advice_for_one_expert_a_token_works() -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok=1") as refusal:
        ModelConfig(family="mixtral", num_experts_per_tok=1)
    assert "set norm_topk_prob=false" not in str(refusal.value)
    assert "at least 2" in str(refusal.value) and "qwen3_moe" in str(refusal.value)
    ModelConfig(family="mixtral", num_experts_per_tok=2)
    ModelConfig(family="qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False)
    with pytest.raises(ValueError, match="set norm_topk_prob=false"):
        ModelConfig(family="qwen3_moe", num_experts_per_tok=1, norm_topk_prob=True)


def test_impossible_values_are_refused_by_name() -> None:
    refused("family", family="gpt2")
    refused("num_attention_heads=4", family="qwen3_moe", num_attention_heads=4,
            num_key_value_heads=3)  # fmt: skip
    refused("num_experts_per_tok=9", family="mixtral", num_experts_per_tok=9)
    refused("no field of the family olmoe", family="olmoe", n_group=1)
    refused("no field of the family llama", family="llama", num_experts=8)
    refused("num_experts=8, norm_topk_prob=True are no fields of the family qwen2, leave them out",
            family="qwen2", num_experts=8, norm_topk_prob=True)  # fmt: skip
    refused("qwen2 needs hidden_size", family="qwen2", head_dim=64)
    refused("multiple of num_attention_heads=3", family="llama", num_attention_heads=3, head_dim=8)
    refused("no field of the family mixtral", family="mixtral", moe_intermediate_size=8)
    refused("Extra inputs", family="olmoe", num_expert=8)
    refused("hidden_size", family="olmoe", hidden_size="2048")
    refused("gate 1 and gives the router no gradient", family="mixtral", num_experts_per_tok=1)
    refused("give head_dim", family="qwen3_moe", hidden_size=100)
    refused("rotates 15", family="qwen3_moe", head_dim=15)
    refused("olmoe needs hidden_size", family="olmoe", head_dim=64)
    refused("mlp_only_layers names layer 24", family="qwen3_moe", mlp_only_layers=[24])
    glm = {"family": "glm4_moe", "head_dim": 128}
    refused("n_group=3 must divide", **glm, n_group=3)
    refused("topk_group=3 must not exceed", **glm, n_group=2, topk_group=3)
    refused("needs at least 2", **glm, n_group=128, topk_group=128)
    refused("fewer than num_experts_per_tok=8", **glm, n_group=32, topk_group=1)
    refused("first_k_dense_replace=47", **glm, first_k_dense_replace=47)
    with pytest.raises(ValidationError):
        tiny_config().hidden_size = 3  # frozen


@pytest.mark.parametrize("family", [["mixtral"], {}, None, 3])
def test_a_family_that_is_no_text_is_refused_by_name(family) -> None:
    refused("qwen3_moe.*glm4_moe", family=family)
    with pytest.raises(ValueError, match=r"model_type=.* is not supported; allowed: qwen3_moe"):
        config_from_hf({"model_type": family})


def test_token_ids_of_public_tokenizers_are_no_defaults_of_new_models() -> None:
    assert config_from_hf(MINIMAL["olmoe"]).eos_token_id == 50279
    assert ModelConfig(family="olmoe").eos_token_id is None
    assert config_from_hf(MINIMAL["mixtral"]).eos_token_ids == (2,)
    assert tiny_config(eos_token_id=[2, 5]).eos_token_ids == (2, 5)


def test_which_layers_hold_experts() -> None:
    assert tiny_config("qwen3_moe", num_hidden_layers=4).moe_layers == [0, 2, 3]
    sparse = tiny_config("qwen3_moe_sparse_step", num_hidden_layers=6, mlp_only_layers=[3])
    assert sparse.moe_layers == [1, 5]
    assert tiny_config("glm4_moe", first_k_dense_replace=2).moe_layers == [2]
    assert tiny_config("olmoe").moe_layers == [0, 1, 2]
    assert tiny_config("glm4_moe").moe_config(0) is None
    assert tiny_config("llama").moe_layers == [] and tiny_config("llama").moe_config(0) is None


def test_moe_config_of_glm() -> None:
    moe = tiny_config("glm4_moe").moe_config(1, save="x")
    assert (moe.score, moe.norm, moe.route_scale, moe.selection_bias) == (
        "sigmoid", "topk_sum", 1.7, True,
    )  # fmt: skip
    assert (moe.groups, moe.groups_kept, moe.group_top, moe.shared_expert_size) == (4, 2, 2, 40)
    assert (moe.save, moe.init_std, moe.expert_size) == ("x", 0.3, 20)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("olmoe_1b_7b", 6_919_161_856), ("qwen3_30b_a3b", 30_532_122_624)],
)
def test_shipped_public_configs(name: str, parameters: int) -> None:
    """Parameter counts as the public models' cards and indexes tell them."""
    from models.build import build_model

    config = config_from_hf(ROOT / "configs" / "hf" / name)
    model = build_model(config, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
