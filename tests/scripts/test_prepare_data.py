"""scripts/prepare_data.py as a user runs it, also when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import prepare_data
from tests.training.data.helpers import numbered, write_jsonl, write_tokenizer
from training.data import DataConfig, SourceConfig, TokenStore, build_data, load_tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_data.py"


def main(arguments: list[str]) -> int:
    """Its exit code, a mistake's included."""
    try:
        return prepare_data.main(arguments)
    except SystemExit as stop:
        return stop.code


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def test_a_store_is_made_checked_and_trained_on(tmp_path: Path, capsys) -> None:
    write_jsonl(tmp_path / "text/a.jsonl", numbered(20, 5))
    (tmp_path / "text/b.txt").write_text("100 101 102")
    tokenizer, store = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "store"
    assert run(tmp_path / "text", "--out", store, "--tokenizer", tokenizer) == 0
    assert "21 documents, 103 tokens" in capsys.readouterr().out
    assert run("--check", store) == 0
    assert "21 documents, 103 tokens, 1 blocks" in capsys.readouterr().out
    # It brings its tokenizer along.
    config = DataConfig(sources=[SourceConfig(path=str(store))], seq_len=8)
    data = build_data(config, load_tokenizer(config, tmp_path / "run/tokenizer"), seed=0)
    assert data.source_names == ["store"]
    assert data.rows_per_epoch == -(-(103 + 21) // 8)


def test_check_finds_damage(tmp_path: Path, capsys) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(20, 5))
    store = tmp_path / "store"
    assert run(path, "--out", store, "--tokenizer", write_tokenizer(tmp_path / "tokenizer")) == 0
    block = store / "blocks/000000.bin"
    data = bytearray(block.read_bytes())
    data[-1] ^= 1
    block.write_bytes(data)
    assert run("--check", store) == 1
    assert "FAULT" in (err := capsys.readouterr().err) and "checksum" in err
    assert run("--check", tmp_path) == 2


def test_training_a_tokenizer_first(tmp_path: Path, capsys) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["the whale and the sea and the ship"] * 9)
    arguments = (path, "--out", tmp_path / "store", "--train-tokenizer", "280")
    assert run(*arguments) == 0
    first = content(tmp_path / "store")
    assert run(*arguments) == 0
    assert content(tmp_path / "store") == first
    assert (tmp_path / "store/tokenizer/tokenizer_config.json").is_file()


def test_bad_lines(tmp_path: Path, capsys) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(5))
    path.write_text(path.read_text() + "{oops\n" + '{"text": "6"}\n')
    command = (path, "--out", tmp_path / "store", "--tokenizer", write_tokenizer(tmp_path / "tok"))
    assert run(*command) == 2
    error = capsys.readouterr().err
    assert "malformed JSON at" in error and "a.jsonl:6" in error
    assert error.count("\n") == 1
    assert run(*command, "--on-bad-line", "skip") == 0
    assert "6 documents" in (out := capsys.readouterr().out) and "1 malformed JSON" in out
    assert run(*command) == 2, "what was left out is not accepted by stop"


def test_through_datasets(tmp_path: Path, capsys) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(20, 5))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    command = ("--hub", "json", "--files", path, "--out", tmp_path / "s", "--tokenizer", tokenizer)
    assert run(*command) == 0
    assert "20 documents, 100 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jsonl"], "--out is missing"),
        (["--out", "store", "--tokenizer", "tok"], "either input files or --hub"),
        (["a.jsonl", "--out", "store"], "--tokenizer, or --train-tokenizer"),
        (["none.jsonl", "--out", "store", "--tokenizer", "tok"], "no such file"),
        (["a.jsonl", "--out", "store", "--tokenizer", "none.json"], "no such file or folder"),
        (["a.jsonl", "--out", "store", "--tokenizer", "tok", "--split", "x"], "only with hub"),
        (["a.jsonl", "--out", "store", "--train-tokenizer", "9"], "must be a whole number >= 260"),
        (["empty.jsonl", "--out", "store", "--tokenizer", "tok"], "no documents in the inputs"),
        (["a.jsonl", "--out", "a.jsonl/store", "--tokenizer", "tok"], "Not a directory"),
        (["--corpus", "hamlet", "--out", "x"], "known are moby-dick, sotu, python"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    tmp_path: Path, arguments: list[str], message: str, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ["1 2 3"])
    write_jsonl(tmp_path / "empty.jsonl", [])
    write_tokenizer(tmp_path / "tok")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_a_finished_store_takes_no_other_input(tmp_path: Path, capsys) -> None:
    tokenizer = write_tokenizer(tmp_path / "tok")
    path = write_jsonl(tmp_path / "a.jsonl", numbered(5))
    other = write_jsonl(tmp_path / "b.jsonl", numbered(6))
    for given, code in [(path, 0), (other, 2)]:
        assert run(given, "--out", tmp_path / "store", "--tokenizer", tokenizer) == code
    assert "b.jsonl has" in (told := capsys.readouterr().err) and "something else" in told
    os.utime(path, (1, 1))  # the same file, unpacked anew
    assert run(path, "--out", tmp_path / "store", "--tokenizer", tokenizer) == 0
    other_tokenizer = write_tokenizer(tmp_path / "tok2", numbers=30)
    assert run(path, "--out", tmp_path / "store", "--tokenizer", other_tokenizer) == 2
    assert "another tokenizer" in (told := capsys.readouterr().err)
    assert told.endswith("choose another --out\n")
    assert run(tmp_path / "store", "--out", tmp_path / "t", "--tokenizer", tokenizer) == 2
    assert "is a token store already" in capsys.readouterr().err


def test_killed_in_the_middle_it_goes_on_and_leaves_no_process(tmp_path: Path) -> None:
    """kill -9 of the command itself, with tokenising processes at work."""
    # 6 MB: three blocks, and more than what is done without processes.
    write_jsonl(tmp_path / "text/a.jsonl", [" ".join(["1234"] * 1200)] * 1000)
    tokenizer = write_tokenizer(tmp_path / "tok")
    arguments = [tmp_path / "text", "--tokenizer", tokenizer, "--workers", "1", "--out"]
    store = tmp_path / "store"
    process = subprocess.Popen([sys.executable, SCRIPT, *map(str, arguments), str(store)])
    deadline = time.monotonic() + 60
    while not (store / "blocks.jsonl").exists() or not (store / "blocks.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = [
        int(pid)
        for task in children.parents[1].iterdir()
        for pid in (task / "children").read_text().split()
    ]
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = (store / "blocks.jsonl").read_text().count("\n")
    assert 1 <= done < 3, "the test must kill it in the middle"
    assert not (store / "meta.json").exists()
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a tokenising process outlives the command"
        time.sleep(0.02)
    assert workers, "there was no process to look after"
    stamp = os.stat(store / "blocks/000000.bin").st_mtime_ns
    assert run(*arguments, store) == 0
    assert os.stat(store / "blocks/000000.bin").st_mtime_ns == stamp
    assert TokenStore(store).check() == []
    assert json.loads((store / "meta.json").read_text())["documents"] == 1000
    assert run(*arguments, tmp_path / "whole") == 0
    assert not list(store.rglob(".*.tmp"))
    assert content(store) == content(tmp_path / "whole")
