"""scripts/generate.py: text from a run and from a Hugging Face folder."""

from __future__ import annotations

import pytest
import torch

from training.data.tokenizer import read_tokenizer


def test_run_and_folder_say_the_same(script, trained, tmp_path, capsys) -> None:
    assert script("export_hf").main([str(trained), str(tmp_path / "out")]) == 0
    main = script("generate").main
    greedy = ["--prompt", "the white whale", "--temperature", "0", "--max-new-tokens", "12"]
    texts = []
    for model in (trained, trained / "checkpoints/latest", tmp_path / "out"):
        capsys.readouterr()
        assert main([str(model), *greedy]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith("the white whale") and len(texts[0]) > len("the white whale\n")
    # as a batch: each prompt continues as alone
    capsys.readouterr()
    assert main([str(trained), *greedy, "--prompt", "a ship"]) == 0
    both = capsys.readouterr().out.split("\n\n")
    assert both[0] + "\n" == texts[0] and both[1].startswith("a ship")


def test_seed_gives_the_text(script, trained, capsys) -> None:
    main = script("generate").main
    texts = []
    for seed in ("1", "1", "2"):
        capsys.readouterr()
        assert (
            main([str(trained), "--prompt", "the", "--seed", seed, "--max-new-tokens", "16"]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert main([str(trained), "--max-new-tokens", "3"]) == 0  # no prompt: a new document


def test_characters_are_shown_when_they_are_whole(script, trained) -> None:
    """A character of several bytes is several tokens here; no half of one is printed."""
    tokenizer = read_tokenizer(trained / "tokenizer")
    ids = tokenizer.encode("naïve 東京 😀!").tolist()
    assert len(ids) > 15
    pieces = list(script("generate").stream(tokenizer, iter(ids)))
    assert "".join(pieces) == "naïve 東京 😀!"
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) > 5
    cut = list(script("generate").stream(tokenizer, iter(ids[:-2])))
    assert "".join(cut).endswith("\ufffd")  # what never became whole is shown as such


def test_begin_token_as_in_training(trained) -> None:
    tokenizer = read_tokenizer(trained / "tokenizer")
    assert tokenizer.add_bos is False
    assert tokenizer.prompt("") == [tokenizer.eos_id]
    begun = tokenizer.with_bos(True)
    assert begun.prompt("") == [tokenizer.bos_id]
    assert begun.prompt("the") == [tokenizer.bos_id, *tokenizer.encode("the").tolist()]


def test_e14_text_past_the_models_positions_has_a_note(script, trained, capsys) -> None:
    for tokens, noted in ((40, True), (4, False)):
        arguments = [str(trained), "--prompt", "the", "--max-new-tokens", str(tokens)]
        assert script("generate").main(arguments) == 0
        assert (
            "the model is made for 32 (max_position_embeddings)" in capsys.readouterr().err
        ) == noted


def test_e5_e18_mistakes_are_one_line_and_exit_2(
    script, trained, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, match in [
        ([str(tmp_path / "nowhere")], "does not exist"),
        (
            [str(trained.parent / "nope")],
            f"does not exist; {trained.parent} holds '{trained.name}'",
        ),
        ([str(trained), "--top-k", "0"], "top_k=0"),
        ([str(trained), "--device", "cuda"], "--device=cuda, but PyTorch sees no CUDA device"),
        ([str(trained), "--max-new-tokens", "0"], "must be at least 1"),
        ([str(trained), "--temperature", "0", "--top-p", "0.5"], "temperature=0"),
    ]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            script("generate").main(arguments)
        told = capsys.readouterr().err
        assert stop.value.code == 2 and told.count("\n") == 1 and match in told, told
