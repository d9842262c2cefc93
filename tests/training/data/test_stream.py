"""Training on blocks while later ones are still tokenised by a child process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import training.data.cache as cache_module
import training.data.writer as writer_module
from tests.training.data.helpers import (
    EOS,
    NUMBERS,
    make_data,
    number_tokenizer,
    numbered,
    rows_of,
    take,
    write_jsonl,
)
from training.data import DataConfig, DataError, SourceConfig, TrainData, build_data

FORK = multiprocessing.get_context("fork")
OPTIONS = {"global_batch_size": 2, "micro_batch_size": 1}
TEXTS = numbered(200, 5)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 20 blocks of ten documents; the child learns of it from its job."""
    monkeypatch.setattr(writer_module, "block_bytes_for", lambda total: 180)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch):
    """build_data whose children are ended with the test."""
    made: list[TrainData] = []

    def build(tmp_path: Path, texts: list[str] | dict = TEXTS, **config) -> TrainData:
        made.append(make_data(tmp_path, texts, **{"seq_len": 8, "stream": True, **config}))
        return made[-1]

    yield build
    for data in made:
        data.close()


def store_of(data: TrainData):
    return data.sources[0].order.store


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_rows_do_not_depend_on_what_was_there_already(tmp_path: Path, opened) -> None:
    data = opened(tmp_path)
    assert data.rows_per_epoch is None or store_of(data).complete
    states, rows = [data.state_dict()], []
    for step in data.steps(steps=100, **OPTIONS):  # 150 rows are an epoch
        rows.append(rows_of(step))
        states.append(data.state_dict())
    assert data.rows_per_epoch == 150
    words = sorted(t - NUMBERS for step in rows[:75] for row in step for t in row if t != EOS)
    assert words == list(range(1000)), "an epoch is every document once"
    # In the first epoch blocks come in their order, shuffled inside; later all are mixed.
    first = [row[0] for step in rows[:75] for row in step]
    assert all(abs(word - NUMBERS - 1000 * i / 150) < 120 for i, word in enumerate(first))
    assert first != sorted(first)
    later = [row[0] for step in rows[75:] for row in step]
    assert any(abs(word - NUMBERS - 1000 * i / 50) > 300 for i, word in enumerate(later))
    # All there; and nothing there any more, resumed in the middle, with reader processes.
    again = opened(tmp_path)
    assert store_of(again).complete
    assert take(again, 100, **OPTIONS) == rows
    for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    resumed = opened(tmp_path, workers=1)
    resumed.load_state_dict(json.loads(json.dumps(states[40])))
    assert take(resumed, 60, **OPTIONS) == rows[40:]


def test_through_datasets_it_is_the_same_stream(tmp_path: Path, opened) -> None:
    expected = take(opened(tmp_path), 90, **OPTIONS)
    config = DataConfig(
        sources=[SourceConfig(hub="json", files=str(tmp_path / "data.jsonl"), name="data")],
        cache_dir=str(tmp_path / "cache"),
        seq_len=8,
        stream=True,
    )
    data = build_data(config, number_tokenizer(tmp_path / "tokenizer"), seed=0)
    try:
        assert take(data, 90, **OPTIONS) == expected
    finally:
        data.close()


def test_the_writer_waits_for_training(
    tmp_path: Path, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "AHEAD_BLOCKS", 3)
    data = opened(tmp_path)
    store = store_of(data)

    def standing() -> int:
        """Blocks written once no more come."""
        count, since = -1, time.monotonic()
        while time.monotonic() - since < 0.7:
            store.refresh()
            if len(store.blocks) != count:
                count, since = len(store.blocks), time.monotonic()
            time.sleep(0.05)
        return count

    assert standing() == 4, "block 0 is wanted, three more are allowed"
    steps = data.steps(**OPTIONS)
    for _ in range(20):
        next(steps)
    reached = data.sources[0].order.block_at(0, 39)
    assert reached >= 4
    assert standing() == reached + 4
    assert not store.complete
    for _ in range(60):
        next(steps)
    assert data.rows_per_epoch == 150


def test_resuming_far_inside_an_empty_cache(
    tmp_path: Path, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks are needed before the first step than the writer may be ahead of training."""
    data = opened(tmp_path)
    take(data, 50, **OPTIONS)
    state = data.state_dict()
    expected = take(data, 5, **OPTIONS)
    monkeypatch.setattr(cache_module, "AHEAD_BLOCKS", 1)
    other = opened(tmp_path, cache_dir=str(tmp_path / "elsewhere"))
    other.load_state_dict(state)
    assert take(other, 5, **OPTIONS) == expected
    assert not store_of(other).complete


def test_a_bad_line_stops_training_where_it_is_reached(
    tmp_path: Path, opened, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:150]) + "{oops\n" + "".join(lines[150:]))
    data = opened(tmp_path)
    seen = []
    with pytest.raises(DataError, match=r"malformed JSON at .*data\.jsonl:151: "):
        seen += [rows_of(step) for step in data.steps(steps=75, **OPTIONS)]
    # Skipping it, training goes on where it was and tells of the line.
    other = opened(tmp_path, on_bad_line="skip")
    rows = take(other, 75, **OPTIONS)
    words = sorted(t - NUMBERS for step in rows for row in step for t in row if t != EOS)
    assert words == list(range(1000))
    assert "data.jsonl:151" in caplog.text
    assert "1 malformed JSON" in other.describe()[0]


def test_a_killed_writer_is_told_and_the_next_run_goes_on(
    tmp_path: Path, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "AHEAD_BLOCKS", 2)
    data = opened(tmp_path)
    child = data.sources[0].background._child
    child.send_signal(signal.SIGKILL)
    with pytest.raises(DataError, match=r"process that tokenises .* died \(exit code -9\)"):
        take(data, 75, **OPTIONS)
    done = len(store_of(data).blocks)
    assert 0 < done < 10
    stamp = (store_of(data).folder / "blocks/000000.bin").stat().st_mtime_ns
    other = opened(tmp_path)
    assert sum(len(step) for step in take(other, 75, **OPTIONS)) == 150
    assert (store_of(data).folder / "blocks/000000.bin").stat().st_mtime_ns == stamp


def test_the_writer_ends_with_a_killed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "AHEAD_BLOCKS", 1)
    monkeypatch.setattr(writer_module, "_INLINE_BYTES", 0)

    def run() -> None:
        data = make_data(tmp_path, TEXTS, seq_len=8, stream=True)
        (tmp_path / "pid").write_text(str(data.sources[0].background._child.pid))
        (tmp_path / "pid").rename(tmp_path / "writer")
        time.sleep(60)

    process = FORK.Process(target=run)
    process.start()
    wait_until((tmp_path / "writer").exists)
    pid = int((tmp_path / "writer").read_text())
    assert alive(pid)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    wait_until(lambda: not alive(pid), 10)


def test_of_several_ranks_one_has_the_writer(tmp_path: Path) -> None:
    results = FORK.Queue()

    def rank(index: int) -> None:
        data = make_data(tmp_path, TEXTS, seq_len=8, stream=True)
        steps = data.steps(rank=index, world=3, steps=10, global_batch_size=6, micro_batch_size=2)
        rows = [rows_of(step) for step in steps]
        results.put((index, data.sources[0].background._child is not None, rows))
        time.sleep(0.5)  # whoever has the writer leaves last
        data.close()

    write_jsonl(tmp_path / "data.jsonl", TEXTS)
    number_tokenizer(tmp_path / "tokenizer")
    ranks = [FORK.Process(target=rank, args=(i,)) for i in range(3)]
    for process in ranks:
        process.start()
    got = sorted(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(20)
        assert process.exitcode == 0
    assert sum(writer for _, writer, _ in got) <= 1
    steps = zip(*(rows for _, _, rows in got))
    data = make_data(tmp_path, TEXTS, seq_len=8, stream=True)
    expected = take(data, 10, global_batch_size=6, micro_batch_size=6)
    data.close()
    assert [[row for rows in step for row in rows] for step in steps] == expected


def test_validation_while_streaming_is_of_the_first_block(tmp_path: Path, opened) -> None:
    data = opened(tmp_path, validation={"fraction": 0.2})

    def held() -> set[int]:
        batches = data.validation(micro_batch_size=2)["data"]
        return {t - NUMBERS for row in rows_of(batches) for t in row if t != EOS}

    before = held()
    trained = {
        t - NUMBERS for step in take(data, 80, **OPTIONS) for row in step for t in row if t != EOS
    }
    assert held() == before
    assert trained | before == set(range(1000))
    assert not trained & before
    assert max(before) < 100
    assert len(before) in (10, 15)  # 20 % of the some ten documents of the block


def test_nothing_to_stream(tmp_path: Path, opened) -> None:
    from tests.training.data.helpers import make_store

    tokenizer = number_tokenizer(tmp_path / "tokenizer")
    make_store(tmp_path / "store", [[[5, 6, 7]] * 9], tokenizer=tokenizer.hash)
    config = DataConfig(sources=[SourceConfig(path=str(tmp_path / "store"))], seq_len=4)
    assert build_data(config, tokenizer, seed=0).rows_per_epoch == 9
    config = config.model_copy(update={"stream": True})
    with pytest.raises(DataError, match=r"stream=true has no use"):
        build_data(config, tokenizer, seed=0)
    with pytest.raises(DataError, match=r"too small: 2 tokens"):
        opened(tmp_path, ["1"])


def test_a_store_of_another_tokenizer_or_an_unfinished_one_is_refused(tmp_path: Path) -> None:
    from tests.training.data.helpers import make_store

    tokenizer = number_tokenizer(tmp_path / "tokenizer")
    for name, options, message in [
        (
            "a",
            {"tokenizer": "f" * 64},
            r"another tokenizer .*ffffffffffff.* than the run's.*data.tokenizer=null",
        ),
        ("b", {"tokenizer": tokenizer.hash, "complete": False}, r"not complete \(1 blocks\)"),
    ]:
        make_store(tmp_path / name, [[[5, 6, 7]] * 9], **options)
        config = DataConfig(sources=[SourceConfig(path=str(tmp_path / name))], seq_len=4)
        with pytest.raises(DataError, match=message):
            build_data(config, tokenizer, seed=0)
