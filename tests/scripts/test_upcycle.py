"""scripts/upcycle.py: a dense model of transformers becomes one with experts that computes the
same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from models.hf import load_hf
from tests.training.tiny import write_inputs

FIELDS = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 0,
    "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": None,
    "bos_token_id": None,
}  # fmt: skip


BECOMES = {"llama": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe", "olmo2": "flex_olmo"}


def write_dense(folder: Path, family: str, tied: bool = True, size: str = "5GB", **more) -> Path:
    """A random model of a dense family, written by transformers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FIELDS, tie_word_embeddings=tied, **more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # away from 0 and 1, which hide mistakes
            parameter.data += torch.rand(parameter.shape) / 2
    model.save_pretrained(folder, max_shard_size=size)
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_dense(tmp_path / "dense", "qwen3")


@pytest.mark.parametrize(("tied", "size"), [(True, "5GB"), (False, "40KB")])
@pytest.mark.parametrize("family", BECOMES)
def test_every_dense_family_becomes_what_it_says(script, tmp_path, family, tied, size):
    """Whole or in shards, tied or not: logits of our own models differ by 1e-6 of the largest."""
    dense = write_dense(tmp_path / "dense", family, tied, size)
    assert (dense / "model.safetensors.index.json").exists() == (not tied)
    words = ["--experts", "8", "--top-k", "4", "--granularity", "2", "--tokens", "128"]
    assert script("upcycle").main([str(dense), str(tmp_path / "out"), *words]) == 0
    old, new = load_hf(dense).double(), load_hf(tmp_path / "out").double()
    assert (old.config.family, new.config.family) == (family, BECOMES[family])
    tokens = torch.randint(288, (2, 30))
    with torch.no_grad():
        before, after = (model.eval()(tokens, logits=True).logits for model in (old, new))
    assert (after - before).abs().max() <= 1e-6 * before.abs().max()
    _loads_alike(dense, tmp_path / "out")


def test_a_dense_run_of_ours_is_upcycled_too(script, dense, tmp_path):
    assert script("import_hf").main([str(dense), str(tmp_path / "imported")]) == 0
    words = [str(tmp_path / "imported"), str(tmp_path / "out"), "--experts", "4", "--top-k", "2"]
    assert script("upcycle").main([*words, "--tokens", "128"]) == 0
    _loads_alike(dense, tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "more", "words", "message"),
    [
        ("llama", {"attention_bias": True}, [], "attention_bias=True cannot be upcycled: a llama"),
        ("llama", {}, ["--sparse-step", "2"], "sparse_step=2 cannot be: every layer of a mixtral"),
        ("olmo2", {}, ["--sparse-step", "2"], "every layer of a flex_olmo has experts"),
        (
            "mixtral",
            {"num_local_experts": 2},
            [],
            "family='mixtral' cannot be upcycled; allowed: l",
        ),
        ("gpt2", {}, [], "model_type='gpt2' is not supported"),
    ],
)
def test_what_the_new_family_lacks_is_refused(
    script, tmp_path, capsys, family, more, words, message
):
    write_dense(tmp_path / "dense", family, **more)
    capsys.readouterr()
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as caught:
        script("upcycle").main(
            [str(tmp_path / "dense"), str(out), "--experts", "4", "--top-k", "2", *words]
        )
    assert caught.value.code == 2 and not out.exists()
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def _loads_alike(dense: Path, out: Path) -> None:
    """transformers' logits of both folders."""
    import transformers

    tokens = torch.randint(288, (2, 30))
    with torch.no_grad():
        old, new = (
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens)
            for folder in (dense, out)
        )
    torch.testing.assert_close(new.logits, old.logits, rtol=1e-4, atol=1e-4)


def test_the_dense_model_is_read_as_transformers_does(dense):
    import transformers

    tokens = torch.randint(288, (2, 30))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        ours = load_hf(dense).eval()(tokens, logits=True).logits
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        ["--experts", "4", "--top-k", "2"],
        ["--experts", "12", "--top-k", "6", "--granularity", "3"],
        ["--experts", "4", "--top-k", "2", "--sparse-step", "2"],
    ],
    ids=["copies", "granular", "every second layer"],
)
def test_upcycled(script, dense, tmp_path, capsys, words):
    write_inputs(tmp_path / "inputs")
    shutil.copy(tmp_path / "inputs/tokenizer/tokenizer.json", dense)
    out = tmp_path / "out"
    assert script("upcycle").main([str(dense), str(out), *words, "--tokens", "256"]) == 0
    told = capsys.readouterr().out
    assert "moby-dick.jsonl" in told and "difference" in told
    receipt = json.loads((out / "upcycle.json").read_text())
    assert abs(receipt["loss_after"] - receipt["loss_before"]) <= 1e-6
    assert receipt["tokens"] == 256 and receipt["parameters_after"] > receipt["parameters_before"]
    assert "loss_changed" not in receipt
    assert (out / "tokenizer.json").is_file()
    model = load_hf(out)
    assert len(model.config.moe_layers) == (1 if "--sparse-step" in words else 2)
    _loads_alike(dense, out)


def test_drop_and_noise_are_on_the_receipt(script, dense, tmp_path, capsys):
    words = [str(dense), "--experts", "4", "--top-k", "2", "--tokens", "128"]
    results = []
    for name in ("one", "two"):
        out = tmp_path / name
        more = ["--drop", "0.5", "--noise", "0.01"]
        assert script("upcycle").main([words[0], str(out), *words[1:], *more]) == 0
        receipt = json.loads((out / "upcycle.json").read_text())
        assert receipt["measured_on"] == "random tokens"
        assert abs(receipt["loss_after"] - receipt["loss_before"]) <= 1e-6
        assert abs(receipt["loss_changed"] - receipt["loss_before"]) > 1e-3
        results.append(load_hf(out).state_dict())
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0]), "same seed"
    assert "after --drop and --noise" in capsys.readouterr().out


def test_a_function_that_is_not_preserved_is_not_written(script, dense, tmp_path, monkeypatch):
    module = script("upcycle")

    def broken(*args, **options):
        model, exact = upcycle(*args, **options)
        with torch.no_grad():
            model.layers[0].moe.w2 *= 1.01
        return model, exact

    upcycle = module.upcycle
    monkeypatch.setattr(module, "upcycle", broken)
    words = [str(dense), str(tmp_path / "out"), "--experts", "4", "--top-k", "2"]
    assert module.main([*words, "--tokens", "128"]) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--experts", "4", "--top-k", "5"], "num_experts_per_tok=5"),
        (["--experts", "6", "--top-k", "2", "--granularity", "4"], "granularity=4 must divide"),
        (["--experts", "4", "--top-k", "2", "--granularity", "5"], "intermediate_size=48"),
        (["--experts", "4", "--top-k", "2", "--sparse-step", "3"], "sparse_step=3 leaves none"),
        (
            ["--experts", "4", "--top-k", "2", "--drop", "1.5"],
            "--drop: 1.5 must be at least 0 and at most 1",
        ),
        (["--experts", "4", "--top-k", "2", "--tokens", "1"], "--tokens: 1 must be at least 2"),
        (["--experts", "4", "--top-k", "1"], "norm_topk_prob"),
    ],
)
def test_mistakes_end_with_2(script, dense, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        script("upcycle").main([str(dense), str(tmp_path / "out"), *words])
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert message in text and "\n" not in text.strip()


def test_a_folder_that_cannot_be_made_ends_with_2(script, dense, tmp_path, capsys):
    out = dense / "config.json" / "out"
    with pytest.raises(SystemExit) as caught:
        script("upcycle").main([str(dense), str(out), "--experts", "4", "--top-k", "2"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {out.parent}: File exists\n"
