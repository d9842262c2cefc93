"""First starts: what a refused one leaves behind (nothing), and what the next one takes."""

import re

import pytest

import train
from tests.training.tiny import documents
from training.data.tokenizer import read_tokenizer, train_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def run(tiny_config, tmp_path, monkeypatch):
    """run(*overrides) → exit code; runs lie in tmp_path/runs."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: train.main([str(tiny_config), "train.steps=4", *words])


def test_a_refused_start_leaves_nothing_for_the_next(run, tmp_path, capsys):
    folder = tmp_path / "runs" / "mine"
    (tmp_path / "a.txt").write_text("\n".join(documents(60, seed=5)))
    (tmp_path / "b.txt").write_text(("zebra " * 40 + "\n") * 60)
    words = ["run.name=mine", "data.tokenizer=null"]

    def source(name: str) -> str:
        return f"data.sources=[{{path: {tmp_path / name}, format: lines, name: text}}]"

    assert run(*words, source("a.txt")) == 2
    smaller = "model.vocab_size=288 is too small .*; allowed: at least that, or data.tokenizer_voca"
    assert re.search(smaller + "b_size=288", capsys.readouterr().err)
    assert not folder.exists()
    assert run(*words, "data.tokenizer_vocab_size=280", source("b.txt")) == 0
    assert "Ġzebra" in read_tokenizer(folder / "tokenizer").backend.get_vocab()


def test_a_tokenizer_of_a_run_without_checkpoint_is_made_anew(run, tmp_path):
    folder = tmp_path / "runs" / "mine"
    words = ["run.name=mine", "data.tokenizer=null", "run.resume=never"]
    (folder / "tokenizer").mkdir(parents=True)  # as a start that was killed leaves it
    train_tokenizer(["other text, " * 9], 270).save(folder / "tokenizer")
    assert run(*words, "data.tokenizer_vocab_size=284") == 0
    kept = read_tokenizer(folder / "tokenizer")
    assert kept.vocab_size == 284
    assert run(*words[:2], "data.tokenizer_vocab_size=280", "train.steps=6") == 0
    assert read_tokenizer(folder / "tokenizer").hash == kept.hash, "a checkpoint was made with it"
