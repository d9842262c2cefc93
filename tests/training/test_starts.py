"""Starts: what a refused one leaves behind (nothing), and what the next one takes."""

import re
import resource
import shlex
from pathlib import Path

import pytest

import train
from tests.training.tiny import documents
from training.data.tokenizer import read_tokenizer, train_tokenizer
from training.report.record import read_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROOT = Path(__file__).resolve().parents[2]


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
    smaller = "model.vocab_size=288 is too small .*; allowed: at least that, or data.tokenizer="
    assert re.search(smaller + "{kind: bpe, vocab_size: 288}", capsys.readouterr().err)
    assert not folder.exists()
    assert run(*words, "data.tokenizer={kind: bpe, vocab_size: 280}", source("b.txt")) == 0
    assert "Ġzebra" in read_tokenizer(folder / "tokenizer").backend.get_vocab()


def test_a_tokenizer_of_a_run_without_checkpoint_is_made_anew(run, tmp_path):
    folder = tmp_path / "runs" / "mine"
    words = ["run.name=mine", "data.tokenizer=null", "run.resume=never"]
    (folder / "tokenizer").mkdir(parents=True)  # as a start that was killed leaves it
    train_tokenizer(["other text, " * 9], 270).save(folder / "tokenizer")
    assert run(*words, "data.tokenizer={kind: bpe, vocab_size: 284}") == 0
    kept = read_tokenizer(folder / "tokenizer")
    assert kept.vocab_size == 284
    assert run(*words[:2], "data.tokenizer={kind: bpe, vocab_size: 280}", "train.steps=6") == 0
    assert read_tokenizer(folder / "tokenizer").hash == kept.hash, "a checkpoint was made with it"


def test_a_start_on_a_full_disk_is_one_line_and_leaves_the_run(run, tmp_path, capsys):
    assert run("run.name=full") == 0
    file = tmp_path / "runs" / "full" / "config.yaml"
    config = file.read_text()
    capsys.readouterr()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        assert run("run.name=full") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capsys.readouterr().err
    assert "no space to write the run" in error and error.count("\n") == 1
    assert file.read_text() == config
    assert run("run.name=full", "train.steps=5") == 0, "it goes on when there is some"


def test_a_tokenizer_that_a_run_has_lost_is_the_checkpoints(run, tmp_path):
    folder = tmp_path / "runs" / "mine"
    words = ["run.name=mine", "data.tokenizer={kind: bpe, vocab_size: 280}"]
    assert run(*words) == 0
    kept = read_tokenizer(folder / "tokenizer")
    (folder / "tokenizer/tokenizer.json").unlink()
    assert run(*words, "train.steps=6") == 0
    assert read_tokenizer(folder / "tokenizer").hash == kept.hash


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_store_is_not_trained_on(run, tmp_path, capfd, workers):
    assert run("run.name=a", "data.cache_dir=cache") == 0
    (block,) = tmp_path.glob("cache/text-*/blocks/000000.bin")
    data = block.read_bytes()
    block.write_bytes(data[:-2] + bytes([data[-2] ^ 1, data[-1]]))
    capfd.readouterr()
    assert run("run.name=b", "data.cache_dir=cache", f"data.workers={workers}") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "000000.bin is damaged: the checksum differs; remove" in line


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("model.vocab_size=99999999999999", 2, "model.vocab_size=99999999999999"),
        (
            "model.hidden_size=1e8 model.vocab_size=1e8",
            1,
            "no memory for this model: .*; lower model",
        ),
        ("train.global_batch_size=1000000000", 2, "train.global_batch_size=1000000000 rows a step"),
    ],
)
def test_sizes_that_no_host_has_memory_for(run, capsys, words, code, message):
    assert run(*words.split()) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_a_full_disk_leaves_the_resolved_config_as_it_was(run, tmp_path, monkeypatch, capsys):
    write = Path.write_text

    def full(path, text, **options):
        if "config.yaml" in path.name:
            write(path, text[:40], **options)
            raise OSError(28, "No space left on device")
        return write(path, text, **options)

    assert run("run.name=mine") == 0
    config = tmp_path / "runs/mine/config.yaml"
    before = config.read_bytes()
    monkeypatch.setattr(Path, "write_text", full)
    capsys.readouterr()
    assert run("run.name=mine", "train.steps=6") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"no space left for runs/mine/config\.yaml .* set run\.dir", line)
    assert config.read_bytes() == before and not list(config.parent.glob("*.tmp"))


def test_the_quickstart_ends_with_a_command_that_trains_on_ones_own_text(
    tmp_path, monkeypatch, capsys
):
    """A text of one document; with a smaller model here, and interrupted on the way."""
    told = (ROOT / "scripts/quickstart.sh").read_text().partition("Next: your own text")[2]
    command = told.replace("\\\\\n", " ").splitlines()[0]
    python, program, config, *words = shlex.split(command)
    assert (python, program) == (".venv/bin/python", "train.py")
    monkeypatch.chdir(tmp_path)
    small = f"model.hidden_size=32 model.num_hidden_layers=1 data.cache_dir={tmp_path}/cache"
    quick = "run.device=cpu optim.schedule.warmup_steps=1 eval.every_steps=2 log.plots=false"
    words = [str(ROOT / config), *words, *small.split(), *quick.split()]
    text = Path("my_text.txt")
    text.write_text("Too short.")
    assert train.main([*words, "train.steps=2"]) == 2
    assert "data.sources[0] (my_text: my_text.txt) is too small" in capsys.readouterr().err
    text.write_text("\n".join(documents(200)))
    for steps in (2, 4):
        assert train.main([*words, f"train.steps={steps}"]) == 0
    assert read_run("runs/mine").series("val_loss").steps == [2, 4]
