"""scripts/upcycle.py: a dense qwen3 of transformers becomes a qwen3_moe that computes the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from models.hf import load_hf
from models.upcycle import load_dense
from tests.training.tiny import write_inputs

FIELDS = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 0,
    "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": None,
    "bos_token_id": None,
}  # fmt: skip


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**FIELDS, tie_word_embeddings=True)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


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
        ours = load_dense(dense).eval()(tokens, logits=True).logits
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


def test_other_models_are_refused(script, dense, tmp_path, capsys):
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(SystemExit) as caught:
        script("upcycle").main([str(dense), str(tmp_path / "o"), "--experts", "4", "--top-k", "2"])
    assert caught.value.code == 2
    assert "model_type='llama' cannot be upcycled; allowed: qwen3" in capsys.readouterr().err
