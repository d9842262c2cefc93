"""scripts/import_hf.py: a folder of transformers becomes a checkpoint that training goes on
from.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from models.build import build_model
from models.hf import export_hf, load_hf
from tests.models.tiny import randomise_buffers_and_norms, tiny_config, transformers_model
from tests.scripts.trained import train
from tests.training.tiny import write_inputs
from training.checkpoint.files import resolve
from training.checkpoint.tensors import read_weights
from training.checkpoint.weights import load_initial_weights, load_model


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A glm4_moe as transformers saves it, with a tokenizer."""
    config = tiny_config("glm4_moe", vocab_size=288, eos_token_id=0)
    model = transformers_model(config)
    randomise_buffers_and_norms(model)
    model.save_pretrained(tmp_path / "theirs")
    write_inputs(tmp_path / "inputs")
    shutil.copy(tmp_path / "inputs/tokenizer/tokenizer.json", tmp_path / "theirs")
    return tmp_path / "theirs"


def assert_equal_models(one: torch.nn.Module, two: torch.nn.Module) -> None:
    first, second = one.state_dict(), two.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_imported_folder_is_a_checkpoint(script, theirs, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert script("import_hf").main([str(theirs), str(out)]) == 0
    told = capsys.readouterr().out
    assert "glm4_moe" in told and f"model.init_from={out}" in told and "data.tokenizer=" in told
    checkpoint = resolve(out)
    assert checkpoint == (out / "checkpoints" / "step_00000000").resolve()
    reference = load_hf(theirs)
    assert_equal_models(load_model(out), reference)
    assert_equal_models(load_model(checkpoint), reference)
    assert all(tensor.dtype == torch.float32 for tensor in read_weights(checkpoint).values())
    # and back again: the same tensors as transformers wrote
    assert script("export_hf").main([str(out), str(tmp_path / "back"), "--check"]) == 0
    assert_equal_models(load_hf(tmp_path / "back"), reference)


@pytest.mark.parametrize("kind", ["checkpoint", "hugging face"])
def test_training_goes_on_from_it(script, theirs, tmp_path, monkeypatch, capsys, kind) -> None:
    """It starts from these weights and this architecture."""
    out = theirs
    if kind == "checkpoint":
        out = tmp_path / "out"
        assert script("import_hf").main([str(theirs), str(out)]) == 0
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "inputs" / "config.yaml"
    text = config.read_text()
    start = text.index("model:")
    end = text.index("\n", text.index("vocab_size", start))
    config.write_text(text[:start] + f"model: {{init_from: {out}}}" + text[end:])
    assert train(config, "run.name=more", "train.steps=2", "optim.schedule.warmup_steps=0") == 0
    lines = (tmp_path / "runs/more/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"loss"' in line]

    assert len(losses) == 2
    saved = json.loads((tmp_path / "runs/more/checkpoints/latest/model/config.json").read_text())
    assert saved["model_type"] == "glm4_moe" and saved["routed_scaling_factor"] == 1.7
    # two steps of Adam at 0.01 move no weight further than that; the weights are around ±0.3
    before, after = load_hf(theirs), load_model(tmp_path / "runs/more")
    for name, parameter in before.named_parameters():
        moved = (after.get_parameter(name) - parameter).abs()
        assert 0 < moved.max() < 0.04, name


def test_an_exported_tied_model_goes_on_tied(script, tmp_path, monkeypatch, capsys) -> None:
    """Train, export, import and continue with the same config: one matrix all the way."""
    config = write_inputs(tmp_path / "inputs")
    monkeypatch.chdir(tmp_path)
    tied = ("model.tie_word_embeddings=true", "train.steps=4")
    assert train(config, "run.name=try", *tied) == 0
    assert script("export_hf").main(["runs/try", "out", "--check"]) == 0
    assert json.loads(Path("out/config.json").read_text())["tie_word_embeddings"] is False
    capsys.readouterr()
    assert script("import_hf").main(["out", "continued"]) == 0
    told = capsys.readouterr().out
    first, again = load_model("runs/try"), load_model("continued")
    assert again.config == first.config and again.head.weight is again.embed.weight
    assert_equal_models(again, first)
    count = sum(parameter.numel() for parameter in first.parameters())
    assert f"{count:,} parameters" in told and "tied again" in told
    words = told.split("CONFIG ")[1].replace("NAME", "more").split()
    assert train(config, *words, *tied) == 0
    assert load_model("runs/more").config == first.config


def test_f9_untying_is_said(script, theirs, tmp_path, capsys) -> None:
    from safetensors.torch import load_file, save_file

    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(theirs / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    assert script("import_hf").main([str(theirs), str(tmp_path / "out")]) == 0
    assert "untied, as other engines load a tied glm4_moe wrongly" in capsys.readouterr().out
    model = load_model(tmp_path / "out")
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.head.weight, tensors["model.embed_tokens.weight"])


def test_nothing_is_tied_that_differs_or_may_not_be(script, tmp_path, capsys) -> None:
    tie = script("import_hf").tie
    for family in ("qwen3_moe", "glm4_moe"):
        model = build_model(tiny_config(family, tie_word_embeddings=False))
        assert not tie(model)
        with torch.no_grad():
            model.head.weight.copy_(model.embed.weight)
        assert tie(model) == model.config.tie_word_embeddings == (family == "qwen3_moe")
        assert (model.head.weight is model.embed.weight) == (family == "qwen3_moe")
    model = build_model(tiny_config("qwen3_moe", tie_word_embeddings=False))
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
        model.head.weight[3, 5] += 1e-6
    export_hf(model, tmp_path / "own")
    assert script("import_hf").main([str(tmp_path / "own"), str(tmp_path / "out")]) == 0
    assert "tied again" not in capsys.readouterr().out
    assert_equal_models(load_model(tmp_path / "out"), model)


def test_nothing_is_written_when_a_tensor_is_missing(script, theirs, tmp_path, capsys) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(theirs / "model.safetensors")
    tensors["surplus"] = tensors.pop("model.layers.1.mlp.experts.5.gate_proj.weight")
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit) as stop:
        script("import_hf").main([str(theirs), str(tmp_path / "out")])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.count("\n") == 1
    assert "1 missing: model.layers.1.mlp.experts.5.gate_proj.weight" in told
    assert "1 unknown: surplus" in told
    assert not (tmp_path / "out").exists()


def test_odd_keys_and_used_folders(script, theirs, tmp_path, capsys) -> None:
    main = script("import_hf").main
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config | {"shiny": 1}))
    with pytest.raises(SystemExit):
        main([str(theirs), str(tmp_path / "out")])
    assert "not understood: shiny" in capsys.readouterr().err
    assert main([str(theirs), str(tmp_path / "out"), "--ignore-key", "shiny"]) == 0
    with pytest.raises(SystemExit):
        main([str(theirs), str(tmp_path / "out"), "--ignore-key", "shiny"])
    assert "not an empty folder" in capsys.readouterr().err


def test_weights_of_another_model_are_refused(script, theirs, tmp_path) -> None:
    assert script("import_hf").main([str(theirs), str(tmp_path / "out")]) == 0
    wider = build_model(tiny_config("glm4_moe", vocab_size=300))
    with pytest.raises(ValueError, match=r"embed\.weight is \[288, 32\], .* has \[300, 32\]"):
        load_initial_weights(wider, tmp_path / "out")
    deeper = build_model(tiny_config("glm4_moe", vocab_size=288, num_hidden_layers=4))
    with pytest.raises(ValueError, match=r"missing \['layers\.3\."):
        load_initial_weights(deeper, tmp_path / "out")


def test_f5_end_tokens_are_those_of_the_generation_config(script, theirs, tmp_path, capsys) -> None:
    given = {"eos_token_id": [3, 0], "temperature": 0.6, "top_p": 0.9}
    (theirs / "generation_config.json").write_text(json.dumps(given))
    assert script("import_hf").main([str(theirs), str(tmp_path / "out")]) == 0
    assert "left out of generation_config.json: temperature, top_p" in capsys.readouterr().out
    assert load_model(tmp_path / "out").config.eos_token_ids == (3, 0)
    assert load_hf(theirs).config.eos_token_ids == (3, 0)
