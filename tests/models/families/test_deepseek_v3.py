"""DeepSeek-V3: random small models against transformers' own, its public config.json, its fp8."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from models.build import build_model, meta_tensors
from models.config import ModelConfig
from models.documents import Documents
from models.errors import UserError
from models.hf import HfWeights, export_hf, load_hf, tensor_files
from models.hf.check import check_export, round_weights
from models.hf.config import config_from_hf
from tests.models.tiny import (
    in_their_names,
    next_tokens,
    our_tensors,
    randomise_buffers_and_norms,
    tiny_config,
    tokens,
    transformers_in_float64,
    transformers_model,
)
from training.estimate.counts import active_parameters, attention_costs, parameter_counts
from training.estimate.flops import flops_per_token, matmul_weights

CASES = ("deepseek_v3", "deepseek_v3_plain")


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Small models in which every width may differ from every other."""
    heads, groups, kept = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 4))), 1
    if groups > 1:
        kept = draw(st.integers(1, groups))
    experts = groups * draw(st.integers(2, 3))
    top_k = draw(st.integers(1, min(4, kept * (experts // groups) - 1)))
    layers = draw(st.integers(1, 2))
    yarn = {"rope_type": "yarn", "factor": draw(st.sampled_from((1.0, 2.0, 40.0)))}
    yarn |= {"original_max_position_embeddings": 8}
    yarn |= {"mscale": draw(st.sampled_from((0.5, 1.0))), "mscale_all_dim": draw(st.floats(0, 1))}
    scalings = (None, yarn, {"rope_type": "linear", "factor": 3.0})
    return ModelConfig(
        family="deepseek_v3",
        vocab_size=draw(st.integers(17, 40)),
        hidden_size=draw(st.integers(6, 14)),
        intermediate_size=draw(st.integers(3, 9)),
        moe_intermediate_size=draw(st.integers(2, 7)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        q_lora_rank=draw(st.none() | st.integers(1, 9)),
        kv_lora_rank=draw(st.integers(1, 9)),
        qk_nope_head_dim=draw(st.integers(1, 6)),
        qk_rope_head_dim=2 * draw(st.integers(1, 4)),
        v_head_dim=draw(st.integers(1, 9)),
        rope_interleave=draw(st.booleans()),
        rope_scaling=draw(st.sampled_from(scalings)),
        attention_bias=draw(st.booleans()),
        n_shared_experts=draw(st.integers(1, 2)),
        first_k_dense_replace=draw(st.integers(0, layers)),
        num_experts=experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=top_k > 1 and draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from((1.0, 2.5))),
        rms_norm_eps=draw(st.sampled_from((1e-6, 1e-2))),
        hidden_act=draw(st.sampled_from(("silu", "gelu"))),
        initializer_range=0.4,
    )


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(configs())
def test_random_models_equal_transformers(config: ModelConfig) -> None:
    """Loss and every gradient of a step in float64."""
    ours = build_model(config, dtype=torch.float64, seed=3)
    randomise_buffers_and_norms(ours)
    theirs = transformers_model(config).to(torch.float64)
    theirs.load_state_dict(in_their_names(ours, our_tensors(ours)), strict=True)
    tokens_BL = tokens(config, 2, 9)
    labels_BL = next_tokens(tokens_BL)
    with transformers_in_float64():
        logits_BLV = theirs(input_ids=tokens_BL).logits
    loss = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), reduction="sum")
    loss.backward()
    found = ours(tokens_BL, labels_BL=labels_BL).loss_sum
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    mine = in_their_names(ours, {name: p.grad for name, p in ours.named_parameters()})
    for name, parameter in theirs.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        difference, size = (expected - mine[name]).norm(), expected.norm()
        assert difference <= 1e-9 * size or difference < 1e-13, f"{name}: {difference}, {size}"


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_have_the_gradients_of_their_rows(case: str) -> None:
    """The operator for several documents in a row, with heads of two widths and its own scale."""
    config = tiny_config(case)
    model = build_model(config, dtype=torch.float64, seed=3)
    randomise_buffers_and_norms(model)
    parts = [tokens(config, 1, length, seed=length) for length in (5, 9, 1)]
    labels = [next_tokens(part) for part in parts]
    total = sum(model(t, labels_BL=y).loss_sum for t, y in zip(parts, labels, strict=True))
    total.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    packed = model(
        torch.cat(parts, 1), labels_BL=torch.cat(labels, 1),
        documents=Documents.from_lengths([5, 9, 1]),
    ).loss_sum  # fmt: skip
    packed.backward()
    torch.testing.assert_close(packed, total, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-11)


# ---- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_64_of_64_greedy_tokens(case: str, dtype: str, tmp_path: Path) -> None:
    model = build_model(tiny_config(case, max_position_embeddings=128, eos_token_id=None), seed=3)
    randomise_buffers_and_norms(model)
    export_hf(model, tmp_path / "out", dtype=dtype)
    round_weights(model, dtype)
    receipt = check_export(model, tmp_path / "out")
    assert receipt.passed and (receipt.tokens, receipt.equal_tokens) == (64, 64), str(receipt)


@pytest.mark.parametrize("case", CASES)
def test_a_bf16_folder_of_transformers_loads(case: str, tmp_path: Path) -> None:
    theirs = transformers_model(tiny_config(case))
    randomise_buffers_and_norms(theirs)
    theirs.bfloat16().save_pretrained(tmp_path)
    ours = load_hf(tmp_path)
    named = in_their_names(ours, our_tensors(ours))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(named[name], tensor.float()), name


PUBLIC: dict[str, Any] = {
    # what stands in the public DeepSeek-V3, without what is as transformers' default has it
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    },
}


def test_the_public_config_and_its_size() -> None:
    config = config_from_hf(PUBLIC)
    assert config == config_from_hf(PUBLIC | {"head_dim": 64, "qk_head_dim": 192})
    assert config == ModelConfig.of_user(config.model_dump())
    counts = parameter_counts(config)
    assert round(sum(counts.values()) / 1e9, 1) == 671.0  # as its card says
    assert round(active_parameters(config, counts) / 1e9, 1) == 37.6  # 37B, without embeddings
    attention = config.attention(0)
    assert attention.scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert config.widest_head == 192
    written = config.to_hf()
    assert "head_dim" not in written and written["num_nextn_predict_layers"] == 0


def test_counts_are_those_of_the_attention() -> None:
    config = tiny_config("deepseek_v3")
    (cost,) = set(attention_costs(config))
    matrices = [
        t for n, t in meta_tensors(config).items() if n.startswith("layers.0.attn.") and t.dim() > 1
    ]
    assert cost.weights == sum(t.numel() for t in matrices) and len(matrices) == 5
    heads = config.num_attention_heads
    assert (cost.scores, cost.values) == (heads * (6 + 8), heads * 5)
    active, _ = matmul_weights(config)
    expected = 6 * active + 3 * 3 * heads * (6 + 8 + 5) * 17
    assert flops_per_token(config, 16) == expected


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2: every head.*num_attention_heads=4"),
        ({"head_dim": 16}, "head_dim=16: .*allowed: qk_rope_head_dim=8, or leave it out"),
        ({"qk_rope_head_dim": 7}, "head_dim=7 rotates 7 dimensions"),
        ({"n_group": 3}, "n_group=3 must divide num_experts=8"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=true: vLLM"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is no field of the family"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tiny_config("deepseek_v3", **changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"qk_head_dim": 128}, r"contradicts itself: qk_head_dim=128 beside .* = 192"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "not understood: moe_layer_freq"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'.*allowed: fp8"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
            "weight_block_size=None is not read",
        ),
    ],
)
def test_what_a_config_json_cannot_say_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        config_from_hf(PUBLIC | changes)


# ---- fp8, from the definition of the format ------------------------------------------------------

BLOCK = 128


def to_fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight in float8_e4m3fn and, for each block of 128 x 128 (the last ones smaller), the number
    that it is to be multiplied by: the block's largest value over 448, the largest of float8."""
    rows, columns = weight.shape
    scales = torch.empty(math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales


def dequantised(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    out = stored.float()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            out[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= scales[i, j]
    return out


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder in which all matrices but embedding, output and routers are float8, as in the public
    one; and the same with their values in float32."""
    root = tmp_path_factory.mktemp("fp8")
    config = tiny_config(
        "deepseek_v3", hidden_size=136, intermediate_size=144, moe_intermediate_size=130,
        q_lora_rank=64, kv_lora_rank=128, num_hidden_layers=2, num_experts=4, n_group=1,
        topk_group=1,
    )  # fmt: skip
    model = build_model(config, seed=3)
    randomise_buffers_and_norms(model)
    plain, folder = root / "plain", root / "fp8"
    export_hf(model, plain)
    folder.mkdir()
    tensors = load_file(plain / "model.safetensors")
    narrow: dict[str, torch.Tensor] = {}
    for name, tensor in list(tensors.items()):
        whole = tensor.dim() != 2 or "embed" in name or "lm_head" in name or "mlp.gate." in name
        if whole:
            narrow[name] = tensor
            continue
        narrow[name], scales = to_fp8_blocks(tensor)
        narrow[f"{name}_scale_inv"] = scales
        tensors[name] = dequantised(narrow[name], scales)
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = PUBLIC["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, plain


def test_fp8_is_read_as_its_definition_says(fp8_folder) -> None:
    folder, plain = fp8_folder
    ours, expected = load_hf(folder), load_hf(plain)
    scales = [name for name in tensor_files(folder) if name.endswith("_scale_inv")]
    assert len(scales) == 10 + 3 * (1 + 1 + 4)  # attention, dense, shared and routed
    for name, tensor in our_tensors(expected).items():
        assert torch.equal(our_tensors(ours)[name], tensor), name
    again = build_model(ours.config, seed=3)  # not what was drawn: rounding to float8 shows
    difference = (again.layers[1].moe.w1 - ours.layers[1].moe.w1).abs().max()
    assert 1e-3 < difference < 0.2


def test_fp8_by_part_and_in_bf16(fp8_folder, tmp_path: Path) -> None:
    """What a process reads that holds some of the experts; and it is exported without scales."""
    folder, plain = fp8_folder
    weights, whole = (HfWeights(config_from_hf(place), place) for place in (folder, plain))
    some = weights.values("layers.1.moe.w1", range(1, 3))
    assert torch.equal(some, whole.values("layers.1.moe.w1")[1:3])
    export_hf(load_hf(folder), tmp_path / "out", dtype="bfloat16")
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in raw
    assert not any("scale_inv" in name for name in tensor_files(tmp_path / "out"))


def test_damaged_fp8_is_refused_by_name(fp8_folder, tmp_path: Path) -> None:
    folder, _ = fp8_folder
    name = "model.layers.1.self_attn.o_proj.weight"

    def told(change) -> str:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(UserError) as caught:
            load_hf(tmp_path)
        return str(caught.value)

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    scale = f"{name}_scale_inv"
    assert f"{name} is F8_E4M3" in told(lambda t: t.pop(scale))
    assert f"unknown: {scale}" in told(lambda t: t.pop(name))
    assert f"{name} has scales [1, 1] instead of [2, 1]" in told(
        lambda t: t.update({scale: t[scale][:1].contiguous()})
    )
    assert f"{name} is F32 with scales" in told(lambda t: t.update({name: t[name].float()}))
