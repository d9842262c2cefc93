"""Stores come out the same however they were made, and say so when they are damaged."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import training.data.writer as writer_module
from tests.training.data.helpers import (
    NUMBERS,
    number_tokenizer,
    numbered,
    write_jsonl,
    write_tokenizer,
)
from training.data import DataError, SourceConfig, TokenStore
from training.data.file_reader import FileReader
from training.data.files import find_files
from training.data.hub_reader import HubReader
from training.data.lock import run_once, try_lock
from training.data.tokenizer import read_tokenizer
from training.data.writer import block_bytes_for, write_store

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some 200 bytes."""
    monkeypatch.setattr(writer_module, "block_bytes_for", lambda total: 200)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenise in processes however little text there is."""
    monkeypatch.setattr(writer_module, "_INLINE_BYTES", 0)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Three files of documents of consecutive numbers, an empty one between."""
    folder = tmp_path / "text"
    write_jsonl(folder / "a.jsonl", numbered(40, 5))
    write_jsonl(folder / "b.jsonl", [])
    write_jsonl(folder / "c.jsonl", numbered(30, 7, start=500))
    return folder


def reader(path: Path, **source) -> FileReader:
    source = SourceConfig(path=str(path), **source)
    return FileReader(find_files(source, "path")[0], source)


def make(tmp_path: Path, text: Path, name: str = "store", **options) -> Path:
    options = {"on_bad_line": "stop", "workers": 1, **options}
    write_store(tmp_path / name, reader(text), number_tokenizer(tmp_path / "tok"), **options)
    return tmp_path / name


def documents(folder: Path) -> list[list[int]]:
    """Every document's numbers, in the store's order."""
    store = TokenStore(folder)
    found = []
    for index in range(len(store.blocks)):
        ends, ids = store.block(index)
        found += [part.astype(int) - NUMBERS for part in np.split(ids, ends[:-1])]
    return [list(map(int, document)) for document in found if len(document)]


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def expected(text: Path) -> list[list[int]]:
    lines = [line for path in sorted(text.iterdir()) for line in path.read_text().splitlines()]
    return [[int(word) for word in json.loads(line)["text"].split()] for line in lines]


def test_every_document_once_in_order(tmp_path: Path, text: Path) -> None:
    folder = make(tmp_path, text)
    assert documents(folder) == expected(text)
    store = TokenStore(folder)
    assert store.complete
    assert (store.documents, store.tokens) == (70, 410)
    assert len(store.blocks) > 5
    assert store.dtype == np.uint16
    assert store.check() == []


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, text: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = make(tmp_path, text, "inline")
    monkeypatch.setattr(writer_module, "_INLINE_BYTES", 0)
    assert content(make(tmp_path, text, "workers", workers=workers)) == content(inline)


def test_block_size_depends_on_the_input_alone() -> None:
    assert block_bytes_for(None) == 4_000_000
    assert block_bytes_for(0) == block_bytes_for(10**8) == 2_000_000
    assert block_bytes_for(2_560_000_000) == 10_000_000
    assert block_bytes_for(10**13) == 64_000_000


def test_killed_at_any_block_it_goes_on_where_it_was(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = content(make(tmp_path, text, "whole"))
    folder = tmp_path / "store"

    def run(die_at: str, after: int) -> None:
        """Write until the `after`-th block is at the given point, then die without a word."""
        blocks = [0]
        for name in ("_write_block", "_append"):
            original = getattr(writer_module, name)

            def dying(*args, original=original, name=name):
                if name == die_at:
                    blocks[0] += 1
                    if blocks[0] > after:
                        os.kill(os.getpid(), signal.SIGKILL)
                return original(*args)

            monkeypatch.setattr(writer_module, name, dying)
        make(tmp_path, text)

    seen = 0
    for die_at in ("_write_block", "_append", "_append", "_write_block"):
        child = FORK.Process(target=run, args=(die_at, 1))
        child.start()
        child.join(20)
        assert child.exitcode == -signal.SIGKILL
        lines = (folder / "blocks.jsonl").read_text().count("\n")
        assert lines > seen, "each run finishes a block and keeps those before"
        seen = lines
        assert not (folder / "meta.json").exists()
    # And a line torn in the middle, as by a power cut.
    with open(folder / "blocks.jsonl", "a") as file:
        file.write('{"block": ' + str(seen) + ', "docum')
    (folder / "blocks" / f".000009.bin.{socket.gethostname()}.1.tmp").touch()
    assert TokenStore(folder).check() == ["meta.json is missing: the store is not complete"]
    assert content(make(tmp_path, text)) == whole


def test_finished_blocks_are_not_made_again(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, text)
    times = {path: path.stat().st_mtime_ns for path in (folder / "blocks").iterdir()}
    lines = (folder / "blocks.jsonl").read_text().splitlines(keepends=True)
    (folder / "blocks.jsonl").write_text("".join(lines[:4]))
    (folder / "meta.json").unlink()
    make(tmp_path, text)
    kept = [path.name for path, before in times.items() if path.stat().st_mtime_ns == before]
    assert sorted(kept) == [f"{i:06d}.bin" for i in range(4)]
    assert (folder / "blocks.jsonl").read_text() == "".join(lines)


def test_reading_through_datasets_goes_on_too(tmp_path: Path, text: Path) -> None:
    source = SourceConfig(hub="json", files=str(text / "a.jsonl"))
    tokenizer = number_tokenizer(tmp_path / "tok")

    def write() -> dict[str, bytes]:
        write_store(
            tmp_path / "s", HubReader(source, "hub"), tokenizer, on_bad_line="stop", workers=1
        )
        found = content(tmp_path / "s")
        # The library writes the same place in other words after going on; the rest is compared.
        del found["blocks.jsonl"]
        return found

    whole = write()
    assert documents(tmp_path / "s") == expected(text)[:40]
    lines = (tmp_path / "s/blocks.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) > 2
    for kept in (1, len(lines) - 1):
        (tmp_path / "s/blocks.jsonl").write_text("".join(lines[:kept]))
        (tmp_path / "s/meta.json").unlink()
        assert write() == whole


def test_bad_lines_stop_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "text/a.jsonl"
    good = [json.dumps({"text": line}) for line in numbered(10)]
    bad = ['{"text"', "[1]", '{"title": "x"}', '{"text": 1}', '{"text": "\\ud800"}']
    empty = [json.dumps({"text": value}) for value in ("", "  \n ", "<|endoftext|>")]
    lines = empty[:1] + good[:5] + bad[:1] + good[5:] + bad[1:] + empty[1:]
    path.parent.mkdir()
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"malformed JSON at .*a\.jsonl:7: .*on_bad_line=skip"):
        make(tmp_path, path.parent)
    folder = make(tmp_path, path.parent, on_bad_line="skip")
    store = TokenStore(folder)
    assert documents(folder) == [[n] for n in range(10)]
    assert store.skipped() == {
        "empty": 3,
        "malformed JSON": 1,
        "not an object": 1,
        "no text field": 1,
        "text is not a string": 1,
        "invalid UTF-8": 1,
    }
    assert json.loads((folder / "meta.json").read_text())["skipped"] == store.skipped()
    # What a run with `skip` left out is not passed over in silence by one with `stop`.
    with pytest.raises(DataError, match=r"malformed JSON: .*a\.jsonl:7.*made with on_bad_line"):
        make(tmp_path, path.parent)


def test_a_store_of_other_inputs_is_not_mixed_up(tmp_path: Path, text: Path) -> None:
    make(tmp_path, text)
    write_jsonl(text / "d.jsonl", numbered(3))
    with pytest.raises(DataError, match=r"made of 3 files, these are 4, new: d\.jsonl"):
        make(tmp_path, text)


def test_a4_the_same_text_unpacked_anew_is_the_same_store(tmp_path: Path, text: Path) -> None:
    folder = make(tmp_path, text)
    made = {path: path.stat().st_mtime_ns for path in (folder / "blocks").iterdir()}
    for number, name in enumerate(("text", "elsewhere")):  # other times; another folder as well
        anew = tmp_path / name
        shutil.copytree(text, tmp_path / "copy")
        shutil.rmtree(anew, ignore_errors=True)
        (tmp_path / "copy").rename(anew)
        for file in anew.iterdir():
            os.utime(file, (10**9 + number, 10**9 + number))
        make(tmp_path, anew)
        assert {path: path.stat().st_mtime_ns for path in (folder / "blocks").iterdir()} == made
        plan = json.loads((folder / "plan.json").read_text())
        names = [file[0] for file in plan["reader"]["files"]]
        assert names == [str(anew / f"{letter}.jsonl") for letter in "abc"]
    # an unfinished one goes on with it
    (folder / "meta.json").unlink()
    lines = (folder / "blocks.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "blocks.jsonl").write_bytes(b"".join(lines[:-1]))
    os.utime(anew / "a.jsonl")
    make(tmp_path, anew)
    assert (folder / "meta.json").is_file()
    # as long, and another text
    content = (anew / "c.jsonl").read_text()
    (anew / "c.jsonl").write_text(content.replace("501", "502", 1))
    with pytest.raises(DataError, match=r"something else: .*/c\.jsonl holds other text\. Choose"):
        make(tmp_path, anew)
    (anew / "c.jsonl").write_text(content + content)
    with pytest.raises(DataError, match=r"c\.jsonl has [\d,]+ bytes, .*/c\.jsonl had [\d,]+"):
        make(tmp_path, anew)


def test_a4_what_differs_is_told_in_words(tmp_path: Path, text: Path) -> None:
    folder = make(tmp_path, text)
    given = reader(text, text_field="body")
    with pytest.raises(DataError, match=r"text_field is 'body', not 'text'"):
        write_store(folder, given, number_tokenizer(tmp_path / "tok"), on_bad_line="stop")
    other = read_tokenizer(write_tokenizer(tmp_path / "tok2", numbers=900))
    with pytest.raises(DataError, match=r"the tokenizer is another \(\w{12}…, now \w{12}…\)"):
        write_store(folder, reader(text), other, on_bad_line="stop")
    # A store that was made while training keeps no hashes.
    plan = json.loads((folder / "plan.json").read_text())
    del plan["sha256"]
    (folder / "plan.json").write_text(json.dumps(plan))
    os.utime(text / "a.jsonl", (1, 1))
    with pytest.raises(DataError, match="other names or times, and this store keeps no hash"):
        make(tmp_path, text)


def test_a_full_disk_is_told_and_nothing_is_lost(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = content(make(tmp_path, text, "whole"))
    original, calls = Path.write_bytes, []

    def write_bytes(self: Path, data: bytes) -> int:
        calls.append(self)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_bytes)
        with pytest.raises(DataError, match=r"no space left for .*cache_dir.*kept"):
            make(tmp_path, text)
    assert len(TokenStore(tmp_path / "store").blocks) == 3
    assert not list((tmp_path / "store").rglob("*.tmp"))
    assert content(make(tmp_path, text)) == whole


def test_damage_is_found(tmp_path: Path, text: Path) -> None:
    def damaged(change: Callable[[Path], object]) -> str:
        nonlocal count
        count += 1
        folder = make(tmp_path, text, f"s{count}")
        change(folder)
        return "\n".join(TokenStore(folder).check())

    def edit(name: str, function: Callable[[bytes], bytes]) -> Callable[[Path], object]:
        return lambda folder: (folder / name).write_bytes(function((folder / name).read_bytes()))

    count = 0
    block = "blocks/000002.bin"
    assert damaged(lambda folder: None) == ""
    flipped = edit(block, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    assert "000002.bin is damaged: the checksum differs" in damaged(flipped)
    assert "bytes instead of" in damaged(edit(block, lambda data: data[:-2]))
    assert "No such file" in damaged(lambda folder: (folder / block).unlink())
    wrong = edit("meta.json", lambda data: data.replace(b'"documents": 70', b'"documents": 71'))
    assert "documents=71, but the blocks hold 70" in damaged(wrong)
    cut = edit("blocks.jsonl", lambda data: data[: data.rindex(b'{"block')])
    with pytest.raises(DataError, match=r"damaged: meta\.json tells of \d+ blocks"):
        damaged(cut)


@pytest.mark.parametrize("change", [lambda data: data[:-2], lambda data: data[:-2] + b"AA"])
def test_a_damaged_block_is_refused_when_read(tmp_path: Path, text: Path, change) -> None:
    folder = make(tmp_path, text)
    path = folder / "blocks/000001.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=r"000001\.bin is damaged"):
        TokenStore(folder).block(1)


def test_a_large_store_is_verified_by_check_alone(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, text)
    path = folder / "blocks/000001.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"AA")
    monkeypatch.setattr("training.data.store._CHECKED_BYTES", 0)
    store = TokenStore(folder)
    store.block(1)
    assert any("000001.bin is damaged" in fault for fault in store.check())


@pytest.mark.parametrize("full", ["blocks.jsonl", "tokenizer"])
def test_a_full_disk_is_told_wherever_it_is_met(tmp_path: Path, text: Path, full: str) -> None:
    """/dev/full takes a write into its buffer, and fails when that is flushed, and at the close."""
    folder = tmp_path / "store"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / (full if full != "tokenizer" else "tokenizer/tokenizer.json")).symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"no space left for .*store .*cache_dir"):
        make(tmp_path, text)


@pytest.mark.parametrize("inline_bytes", [0, 10**9])
def test_a_special_token_spelled_in_a_text_is_not_one(
    tmp_path: Path, inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_INLINE_BYTES", inline_bytes)
    tokenizer = read_tokenizer("bundled:moby-dick")
    text = "so <|endoftext|> it goes"
    path = write_jsonl(tmp_path / "a.jsonl", [text])
    write_store(tmp_path / "s", reader(path), tokenizer, on_bad_line="stop", workers=1)
    ids = TokenStore(tmp_path / "s").block(0)[1]
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


@pytest.mark.usefixtures("processes")
def test_a_dead_worker_is_told(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import training.data.encode as encode_module

    popen = encode_module.subprocess.Popen

    def short_lived(*args, **options):
        process = popen(*args, **options)
        process.kill()
        return process

    monkeypatch.setattr(encode_module.subprocess, "Popen", short_lived)
    with pytest.raises(RuntimeError, match=r"process died \(exit code -9\).*tokenize_workers"):
        make(tmp_path, text)


# --- one writer ---------------------------------------------------------------------------------


def in_processes(count: int, work: Callable[[int], None]) -> list:
    children = [FORK.Process(target=work, args=(i,)) for i in range(count)]
    for child in children:
        child.start()
    return children


def test_of_many_processes_one_works(tmp_path: Path) -> None:
    def work() -> None:
        with open(tmp_path / "log", "a") as log:
            log.write("x")
        time.sleep(0.3)
        (tmp_path / "done").touch()

    def process(i: int) -> None:
        run_once(tmp_path / "lock", (tmp_path / "done").exists, work, timeout_s=10)

    children = in_processes(4, process)
    for child in children:
        child.join(20)
        assert child.exitcode == 0
    assert (tmp_path / "log").read_text() == "x"


def test_when_the_worker_is_killed_another_takes_over(tmp_path: Path) -> None:
    def process(i: int) -> None:
        def work() -> None:
            (tmp_path / f"working{i}").touch()
            if i == 0:
                time.sleep(60)
            (tmp_path / "done").touch()

        run_once(tmp_path / "lock", (tmp_path / "done").exists, work, timeout_s=20)

    (first,) = in_processes(1, process)
    while not (tmp_path / "working0").exists():
        time.sleep(0.01)
    second = FORK.Process(target=process, args=(1,))
    second.start()
    time.sleep(0.3)
    assert not (tmp_path / "working1").exists()
    first.kill()
    second.join(20)
    assert second.exitcode == 0
    assert (tmp_path / "working1").exists()


def test_waiting_ends_when_nothing_moves(tmp_path: Path) -> None:
    lock = try_lock(tmp_path / "lock")
    start = time.monotonic()

    def progress() -> float:
        return min(time.monotonic() - start, 0.6)  # moves for a while, then stands still

    def never() -> None:
        raise AssertionError("the lock is held")

    with pytest.raises(DataError, match=r"waited .* finish the thing; it holds .*lock"):
        run_once(
            tmp_path / "lock",
            lambda: False,
            never,
            timeout_s=0.4,
            progress=progress,
            what="the thing",
        )
    assert 1.0 <= time.monotonic() - start < 5
    os.close(lock)
