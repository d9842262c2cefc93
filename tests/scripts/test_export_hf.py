"""scripts/export_hf.py: from a run to a folder that transformers loads, with proof."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.hf import load_hf
from training.checkpoint.files import resolve
from training.checkpoint.tensors import read_weights
from training.checkpoint.weights import CheckpointTensors, load_model


def test_run_is_exported_and_checked(script, trained, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert script("export_hf").main([str(trained), str(out), "--check"]) == 0
    told = capsys.readouterr().out
    assert "1 file(s)" in told and "with tokenizer" in told
    assert "greedy tokens: " in told and told.strip().endswith("check passed")
    checkpoint = resolve(trained)
    assert checkpoint.name == "step_00000006"
    stored = read_weights(checkpoint)
    for name, parameter in load_hf(out).named_parameters():
        assert torch.equal(parameter, stored[name]), name
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] is not None and config["dtype"] == "float32"


def test_bf16_is_checked_against_the_rounded_weights(script, trained, tmp_path, capsys):
    main = script("export_hf").main
    older = trained / "checkpoints" / "step_00000003"
    arguments = ["--dtype", "bfloat16", "--max-shard-size", "10KB", "--check"]
    assert main([str(older), str(tmp_path / "out"), *arguments]) == 0
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert {t.dtype for file in files for t in load_file(file).values()} == {torch.bfloat16}


def test_check_finds_a_difference(script, trained, tmp_path, capsys, monkeypatch):
    """A folder whose router scale was lost, and one with a damaged expert."""
    from models.hf import check

    out = tmp_path / "out"
    assert script("export_hf").main([str(trained), str(out)]) == 0
    model = load_model(trained)
    assert check.check_export(model, out).passed
    config = json.loads((out / "config.json").read_text())
    assert config["norm_topk_prob"] is False
    (out / "config.json").write_text(json.dumps(config | {"norm_topk_prob": True}))
    receipt = check.check_export(model, out)
    assert not receipt.passed and receipt.logit_difference > 1e-4
    assert "logits differ" in str(receipt) and "check FAILED" in str(receipt)
    (out / "config.json").write_text(json.dumps(config))

    # the same logits, but every token ends the text there
    file = out / "generation_config.json"
    generation = file.read_text()
    file.write_text(json.dumps({"eos_token_id": list(range(config["vocab_size"]))}))
    receipt = check.check_export(model, out)
    assert receipt.logit_difference < 1e-5 and not receipt.passed
    assert "greedy tokens differ" in str(receipt)
    file.write_text(generation)

    tensors = load_file(out / "model.safetensors")
    tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    problems = check.check_export(model, out).problems
    assert any("does not load it" in p or "missing_keys" in p for p in problems), problems

    # the script's exit code
    real = check.check_export

    def strict(*args, **kwargs):
        return real(*args, **{**kwargs, "tolerance": -1.0})

    monkeypatch.setattr(check, "check_export", strict)
    assert script("export_hf").main([str(trained), str(tmp_path / "two"), "--check"]) == 1
    assert "check FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("faulty", ["in float32", "in both"])
def test_a_difference_is_decided_in_float64(script, trained, tmp_path, monkeypatch, faulty):
    """A tie of two experts within the rounding of float32 is no fault of the folder."""
    from models.hf import check

    out = tmp_path / "out"
    assert script("export_hf").main([str(trained), str(out)]) == 0
    model, real, seen = load_model(trained), check._compare, []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def compare(model, theirs, *rest):
        assert model.embed.weight.dtype == theirs.get_input_embeddings().weight.dtype
        seen.append((model.embed.weight.dtype, real(model, theirs, *rest)))
        tie = faulty == "in both" or len(seen) == 1
        return seen[-1][1]._replace(difference=3e-5) if tie else seen[-1][1]

    monkeypatch.setattr(check, "_compare", compare)
    receipt = check.check_export(model, out)
    assert receipt.passed == (faulty == "in float32") and receipt.dtype == "float64"
    (first, rough), (second, fine) = seen
    assert (first, second) == (torch.float32, torch.float64)
    assert max(rough.difference, fine.difference) < 1e-6 and fine.mine == fine.reference
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name


def test_mistakes_are_one_line_and_exit_2(script, trained, tmp_path, capsys):
    main = script("export_hf").main
    out = tmp_path / "out"
    assert main([str(trained), str(out)]) == 0
    for arguments, match in [
        ([str(trained), str(out)], "already holds model files (config.json"),
        ([str(trained), str(out)], "(--overwrite) removes them"),
        ([str(tmp_path / "nowhere"), str(out)], "does not exist"),
        ([str(out), str(tmp_path / "two")], "is a Hugging Face folder already"),
        ([str(trained), str(tmp_path / "two"), "--max-shard-size", "big"], "max_shard_size='big'"),
        ([str(trained), str(out / "config.json" / "x")], "config.json: File exists"),
    ]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        told = capsys.readouterr().err
        assert stop.value.code == 2 and told.count("\n") == 1 and match in told, told
    assert main([str(trained), str(out), "--overwrite"]) == 0


def test_checkpoint_tensors_are_read_one_by_one(trained: Path) -> None:
    tensors = CheckpointTensors(resolve(trained))
    whole = read_weights(resolve(trained))
    assert set(tensors) == set(whole) and len(tensors) == len(whole)
    for name, tensor in whole.items():
        assert torch.equal(tensors[name], tensor)
    with pytest.raises(KeyError):
        tensors["no.such"]


def test_b3_check_finds_a_tokenizer_that_is_rebuilt(script, trained, tmp_path, capsys) -> None:
    """The same vocabulary and merges under another rule for leading spaces, and another begin."""
    import json

    from models.hf.check import check_export
    from training.data.tokenizer import read_tokenizer

    out = tmp_path / "out"
    assert script("export_hf").main([str(trained), str(out), "--check"]) == 0
    assert "texts have no begin token, documents end with" in capsys.readouterr().out
    model, tokenizer = load_model(trained), read_tokenizer(trained / "tokenizer")
    file = out / "tokenizer.json"
    right = file.read_text()
    content = json.loads(right)
    content["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(content))
    problems = check_export(model, out, tokenizer=tokenizer, new_tokens=2).problems
    assert any("AutoTokenizer (" in problem for problem in problems), problems
    file.write_text(right)
    tokenizer.with_bos(True).save(out)
    problems = check_export(model, out, tokenizer=tokenizer, new_tokens=2).problems
    assert any(") reads" in problem for problem in problems), problems


def test_b7_the_export_names_the_converter_for_llama_cpp(script, trained, tmp_path, capsys):
    assert script("export_hf").main([str(trained), str(tmp_path / "out")]) == 0
    assert "scripts/to_gguf.py" in capsys.readouterr().out
