"""scripts/to_gguf.py and scripts/check_engines.py: exported folders in llama.cpp and mistral.rs."""

from __future__ import annotations

import json

import pytest

from models.build import build_model
from models.engines import rows
from models.hf import export_hf, load_hf
from tests.models.tiny import FAMILIES, tiny_config
from training.data.tokenizer import train_tokenizer

GPT2 = {
    "model": {"type": "BPE"},
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [GPT2["pre_tokenizer"]]}}, ""),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "splitting rule"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{}, {}]}}, "'Sequence'"),
        ({"pre_tokenizer": GPT2["pre_tokenizer"] | {"add_prefix_space": True}}, "prefix_space"),
        ({"pre_tokenizer": None}, "splitting rule"),
        ({"normalizer": {"type": "NFC"}}, "normalizer 'NFC'"),
        ({"model": {"type": "Unigram"}}, "'Unigram'"),
        ({"model": {"type": "BPE", "ignore_merges": True}}, "ignore_merges"),
    ],
)
def test_f4_only_gpt2_splitting_is_named_gpt2(script, change: dict, words: str) -> None:
    found = script("to_gguf").not_gpt2(GPT2 | change)
    assert found == "" if not words else words in found


@pytest.fixture
def folder(tmp_path):
    """Writes an export of a family with a tokenizer of its own."""

    def write(family: str, **changes):
        tokenizer = train_tokenizer(["a whale and a ship at sea"], 288)
        config = tiny_config(family, vocab_size=288, num_key_value_heads=4, **changes)
        out = tmp_path / "out"
        export_hf(build_model(config), out, tokenizer=tokenizer)
        return out

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_f4_exports_convert_to_gguf(script, folder, tmp_path, capsys, family: str) -> None:
    pytest.importorskip("conversion", reason="pip install -e '.[interop]'")
    gguf = pytest.importorskip("gguf", reason="pip install -e '.[interop]'")
    plain = {
        "qwen3_moe": {"attention_bias": False, "mlp_only_layers": []},
        "qwen2_moe": {"mlp_only_layers": []},
    }
    source, file = folder(family, **plain.get(family, {})), tmp_path / "model.gguf"
    main = script("to_gguf").main
    first = next(feature for name, feature in rows() if name == family)
    if first.verdict("llama.cpp").kind == "no":
        with pytest.raises(SystemExit) as stop:
            main([str(source), str(file)])
        told = capsys.readouterr().err
        assert stop.value.code == 2 and "not supported" in told and told.count("\n") == 1
        return
    assert main([str(source), str(file)]) == 0
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    written = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(tokens) == 288 and all(tokens[id_] == token for token, id_ in written.items())
    with pytest.raises(SystemExit):
        main([str(source), str(file)])
    assert "exists" in capsys.readouterr().err


def test_f4_another_splitting_rule_is_refused(script, folder, tmp_path, capsys) -> None:
    pytest.importorskip("conversion", reason="pip install -e '.[interop]'")
    source = folder("mixtral")
    content = json.loads((source / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            content["pre_tokenizer"],
        ],
    }
    (source / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as stop:
        script("to_gguf").main([str(source), str(tmp_path / "model.gguf")])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.count("\n") == 1 and "llama.cpp has no such" in told
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*partial*"))


@pytest.mark.parametrize("family", FAMILIES)
def test_f6_the_models_of_the_rows_are_written(script, tmp_path, family: str) -> None:
    """Without any engine: a change of the exporter must not break what only few machines run."""
    for feature in (feature for name, feature in rows() if name == family):
        folder = tmp_path / feature.name.replace("/", " ")
        config = script("check_engines").write_folder(family, feature, folder, seed=1)
        assert feature.has(config) and load_hf(folder / "model").config == config
        assert (folder / "model/tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "vllm"], "--engine vllm is unknown"),
        (["--engine", "vLLM=nowhere/python"], "--engine vLLM=nowhere/python: there is no program"),
        (["--engine", "transformers", "--only", "qwen1"], "--only 'qwen1': no row"),
    ],
)
def test_f6_a_check_that_would_check_nothing_is_refused(script, capsys, words, told) -> None:
    with pytest.raises(SystemExit) as stop:
        script("check_engines").main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and told in line


@pytest.mark.parametrize("row", ["mixtral ", "glm4_moe ", "qwen3_moe norm_topk_prob: false"])
def test_f6_rows_of_the_table_are_what_engines_do(script, row: str) -> None:
    check_engines = script("check_engines")
    engines = check_engines.installed()
    if not engines:
        pytest.skip("neither llama.cpp nor mistral.rs is there: pip install -e '.[interop]'")
    import sys

    family, feature = next((f, r) for f, r in rows() if f"{f} {r.name}" == row)
    seen = check_engines.check(family, feature, dict.fromkeys(engines, sys.executable))
    assert {e: s.kind for e, s in seen.items()} == {e: feature.verdict(e).kind for e in engines}


def test_f6_an_engine_that_answers_otherwise_is_found(script) -> None:
    check_engines = script("check_engines")
    count = 20
    reference = {
        "tokens": list(range(count)),
        "logprobs": [-1.0] * count,
        "margins": [1.0] * 15 + [1e-3] * 5,
        "words": [chr(97 + i) for i in range(count)],
    }
    same = {"version": "1", "tokens": list(range(15)) + [0] * 5, "logprobs": [-1.0] * count}
    assert check_engines.compare(reference, same).kind == "yes"  # what a near tie decides is free
    for change in ({"tokens": [*range(14), 0, *range(5)]}, {"logprobs": [-1.1] * count}):
        assert check_engines.compare(reference, same | change).kind == "wrong"
    text = "abcdefghijklmno"
    assert check_engines.compare(reference, {"version": "1", "text": text + "zz"}).kind == "yes"
    assert check_engines.compare(reference, {"version": "1", "text": "x" + text}).kind == "wrong"
    assert check_engines.compare(reference, {"error": "no such model"}).kind == "no"
