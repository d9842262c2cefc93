"""The stream of rows is one and the same whatever reads it, and goes on from anywhere."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

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
from training.data.loader import RowDataset
from training.data.sources import name_sources
from training.data.store import block_path

UNEQUAL = [" ".join(["7"] * (1 + i % 5) + [str(100 + i)]) for i in range(64)]
"""64 documents of 2 to 6 words; the last word is the sample's number."""


def number(row: tuple[int, ...]) -> int:
    """The sample that a row without packing holds."""
    return row[-2 if row[-1] == EOS else -1] - NUMBERS - 100


# --- resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("packing", [True, False])
def test_stop_at_step_5_and_go_on_with_other_ranks(
    tmp_path: Path, world: int, packing: bool
) -> None:
    """KempnerInstitute/KempnerForge#51, PrimeIntellect-ai/prime-rl#1035."""
    options = {"global_batch_size": 4, "micro_batch_size": 1}
    whole = take(make_data(tmp_path, UNEQUAL, seq_len=8, packing=packing), 40, **options)
    first = make_data(tmp_path, UNEQUAL, seq_len=8, packing=packing)
    states = []
    got = []
    for step in first.steps(world=2, rank=0, **options):
        got.append(rows_of(step))
        states.append(first.state_dict())
        if len(got) == 5:
            break
    other = make_data(tmp_path, UNEQUAL, seq_len=8, packing=packing)
    for step in itertools.islice(other.steps(world=2, rank=1, **options), 5):
        got[len(states) - 5] += rows_of(step)
        states.append(other.state_dict())
    assert states[:5] == states[5:], "the state is the same on every rank"
    second = make_data(tmp_path, UNEQUAL, seq_len=8, packing=packing)
    second.load_state_dict(json.loads(json.dumps(states[4])))
    assert take(second, 35, world=world, **options) == whole[5:]
    if not packing:
        # 64 samples are 16 steps: within the epoch none is lost or repeated.
        after = [row for step in whole[5:16] for row in step]
        before = [row for step in whole[:5] for row in step]
        assert sorted(map(number, before + after)) == list(range(64))


def test_resuming_at_every_step_over_two_epochs(tmp_path: Path) -> None:
    options = {"global_batch_size": 3, "micro_batch_size": 2}
    data = make_data(tmp_path, UNEQUAL[:20], seq_len=8)
    assert data.rows_per_epoch % 3, "epochs end within a step"
    states, rows = [data.state_dict()], []
    for step in data.steps(steps=12, **options):
        rows.append(rows_of(step))
        states.append(data.state_dict())
    assert states[-1]["sources"]["data"]["epoch"] >= 2
    for start, state in enumerate(states[:-1]):
        data.load_state_dict(state)
        assert take(data, 12 - start, **options) == rows[start:], f"from step {start}"


@pytest.mark.parametrize("workers", [1, 2])
def test_reader_processes_change_nothing_and_run_ahead_of_no_state(
    tmp_path: Path, workers: int
) -> None:
    options = {"global_batch_size": 4, "micro_batch_size": 2}
    texts = {"a": numbered(30, 4), "b": numbered(30, 3, start=500)}
    one = make_data(tmp_path, texts, seq_len=8)
    two = make_data(tmp_path, texts, seq_len=8, workers=workers)
    expected = [(rows_of(s), one.state_dict()) for s in one.steps(steps=6, **options)]
    steps = two.steps(**options)
    for rows, state in expected[:3]:
        assert rows_of(next(steps)) == rows
        assert two.state_dict() == state, "the state is of the step that was handed out"
    steps.close()
    two.load_state_dict(expected[2][1])
    assert take(two, 3, **options) == [rows for rows, _ in expected[3:]]


def test_batch_sizes_and_ranks_cut_the_same_stream(tmp_path: Path) -> None:
    data = make_data(tmp_path, UNEQUAL, seq_len=8)
    start = data.state_dict()
    streams = []
    for world, batch, micro in [
        (1, 12, 12),
        (1, 4, 3),
        (2, 6, 2),
        (3, 12, 5),
        (4, 6, 1),
        (4, 2, 1),
    ]:
        data.load_state_dict(start)
        steps = take(
            data, 24 // batch * 2, world=world, global_batch_size=batch, micro_batch_size=micro
        )
        streams.append([row for step in steps for row in step][:24])
    assert all(stream == streams[0] for stream in streams)


@pytest.mark.parametrize(("world", "batch", "micro"), [(2, 5, 2), (3, 4, 1), (4, 3, 2), (3, 1, 4)])
def test_every_rank_gets_equally_many_micro_batches(
    tmp_path: Path, world: int, batch: int, micro: int
) -> None:
    """deepspeedai/DeepSpeed#4966: ranks must not issue different numbers of collectives."""
    data = make_data(tmp_path, UNEQUAL, seq_len=8)
    state = data.state_dict()
    shapes, rows = [], []
    for rank in range(world):
        data.load_state_dict(state)
        step = next(
            data.steps(rank=rank, world=world, global_batch_size=batch, micro_batch_size=micro)
        )
        shapes.append([tuple(b.tokens_BL.shape) for b in step])
        rows += rows_of(step)
        for b in step:
            b.documents.check(micro, 8)
            assert b.num_targets == int((b.labels_BL != -100).sum())
            assert b.num_tokens == int(b.valid_BL.sum())
    count = math.ceil(math.ceil(batch / world) / micro)
    assert shapes == [[(micro, 8)] * count] * world
    data.load_state_dict(state)
    assert rows == take(data, 1, global_batch_size=batch, micro_batch_size=batch)[0]


def test_five_samples_on_two_ranks_with_two_readers_each(tmp_path: Path) -> None:
    """huggingface/datasets#6623, #3423, #6990: union exact, disjoint, equally many steps."""
    texts = {f"shard{i}": [str(10 * i + j) for j in range(5)] for i in range(3)}
    seen: list[list[int]] = []
    for world in (2, 3):
        numbers = []
        for rank in range(world):
            data = make_data(tmp_path, texts, seq_len=4, packing=False, workers=2)
            options = {"global_batch_size": 5, "micro_batch_size": 1, "world": world}
            steps = [rows_of(step) for step in data.steps(rank=rank, steps=3, **options)]
            assert len(steps) == 3
            numbers += [row[0] - NUMBERS for step in steps for row in step]
        seen.append(sorted(numbers))
    assert seen == [sorted(10 * i + j for i in range(3) for j in range(5))] * 2


def test_a_batch_larger_than_the_epoch_starts_over_within_it(tmp_path: Path) -> None:
    data = make_data(tmp_path, ["1", "2", "3"], seq_len=4, packing=False)
    (step,) = take(data, 1, global_batch_size=7, micro_batch_size=7)
    assert [sorted(step[i : i + 3]) for i in (0, 3)] == [sorted(step[:3])] * 2
    assert len(step) == 7


def test_reading_leaves_torch_random_state_alone(tmp_path: Path) -> None:
    data = make_data(tmp_path, UNEQUAL, seq_len=8, validation={"fraction": 0.1})
    before = torch.get_rng_state()
    take(data, 2, global_batch_size=2, micro_batch_size=1)
    list(data.validation(micro_batch_size=2)["data"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_c13_a_file_that_is_gone_is_named(tmp_path: Path, monkeypatch, workers: int) -> None:
    gone = tmp_path / "gone.bin"
    monkeypatch.setattr(RowDataset, "__getitem__", lambda self, where: open(gone))  # noqa: SIM115
    data = make_data(tmp_path, UNEQUAL, seq_len=8, workers=workers)
    with pytest.raises(DataError) as told:
        next(data.steps(global_batch_size=2, micro_batch_size=2))
    assert str(gone) in str(told.value) and "died" not in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_c13_another_error_of_reading_is_not_a_death(tmp_path: Path, monkeypatch, workers) -> None:
    def refused(self, where):
        raise ConnectionResetError("by a file system")

    monkeypatch.setattr(RowDataset, "__getitem__", refused)
    data = make_data(tmp_path, UNEQUAL, seq_len=8, workers=workers)
    with pytest.raises(ConnectionResetError, match="by a file system"):
        next(data.steps(global_batch_size=2, micro_batch_size=2))


def test_a_killed_reader_process_is_an_error(tmp_path: Path, monkeypatch, capfd) -> None:
    data = make_data(tmp_path, UNEQUAL, seq_len=8, workers=1)
    original = RowDataset.__getitem__

    def dying(self, where):
        if torch.utils.data.get_worker_info() is not None and where[0][2] == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, where)

    monkeypatch.setattr(RowDataset, "__getitem__", dying)

    def run() -> None:
        take(data, 10, global_batch_size=2, micro_batch_size=2)

    # In a process of its own: torch raises its error from a signal handler, wherever that finds
    # the process, and batches on their way from the killed one raise another.
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == 1
    error = capfd.readouterr().err
    assert "DataLoader worker" in error or "a process that reads batches died" in error


# --- mixing -------------------------------------------------------------------------------------


def test_mixing_by_weight_with_an_epoch_count_for_each_source(tmp_path: Path) -> None:
    texts = {"small": numbered(6, 3), "large": numbered(200, 3, start=500)}
    data = make_data(tmp_path, texts, seq_len=4, weights={"small": 1, "large": 3})
    assert data.source_names == ["small", "large"]
    count: Counter[int] = Counter()
    for step in data.steps(global_batch_size=8, micro_batch_size=8, steps=10):
        for batch in step:
            first = batch.tokens_BL.amax(1) - NUMBERS
            assert ((first >= 500) == (batch.source_B == 1)).all()
            count.update(batch.source_B.tolist())
    assert count == {0: 20, 1: 60}
    state = data.state_dict()["sources"]
    assert (state["small"]["epoch"], state["small"]["row"]) == (3, 2)
    assert (state["large"]["epoch"], state["large"]["row"]) == (0, 60)


def test_without_weights_each_source_is_seen_once_in_an_epoch(tmp_path: Path) -> None:
    texts = {"a": numbered(7, 3), "b": numbered(23, 3, start=500)}
    data = make_data(tmp_path, texts, seq_len=4)
    assert data.rows_per_epoch == 30
    steps = take(data, 10, global_batch_size=6, micro_batch_size=6)
    epochs = [sorted(row for step in half for row in step) for half in (steps[:5], steps[5:])]
    assert epochs[0] == epochs[1]
    assert len(set(epochs[0])) == 30


def test_changed_weights_are_taken_on_resuming(tmp_path: Path) -> None:
    texts = {"a": numbered(50, 3), "b": numbered(50, 3, start=500)}
    data = make_data(tmp_path, texts, seq_len=4, weights={"a": 1, "b": 1})
    take(data, 5, global_batch_size=4, micro_batch_size=4)
    other = make_data(tmp_path, texts, seq_len=4, weights={"a": 3, "b": 1})
    other.load_state_dict(data.state_dict())
    (step,) = take(other, 1, global_batch_size=8, micro_batch_size=8)
    assert sum(row[0] - NUMBERS < 500 for row in step) == 6


# --- validation ---------------------------------------------------------------------------------


def validation_rows(data: TrainData, world: int, **options) -> dict[str, list]:
    found: dict[str, list] = {name: [] for name in data.validation_names}
    counts = set()
    for rank in range(world):
        for name, batches in data.validation(rank=rank, world=world, **options).items():
            batches = list(batches)
            counts.add((name, len(batches)))
            found[name] += rows_of(batches)
    assert len(counts) == len(found), f"ranks get different numbers of batches: {counts}"
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_validation_is_the_same_for_every_world_and_call(tmp_path: Path, packing: bool) -> None:
    texts = {"a": numbered(60, 5), "b": numbered(80, 5, start=1000)}
    data = make_data(tmp_path, texts, seq_len=8, packing=packing, validation={"fraction": 0.2})
    one = validation_rows(data, 1, micro_batch_size=3)
    for world in (1, 2, 3, 4):
        assert validation_rows(data, world, micro_batch_size=3) == one
    other = make_data(
        tmp_path, texts, seq_len=8, packing=packing, validation={"fraction": 0.2}, seed=9
    )
    assert validation_rows(other, 1, micro_batch_size=3) == one
    trained = {
        t
        for step in take(data, 60, global_batch_size=8, micro_batch_size=8)
        for r in step
        for t in r
    }
    held = {t for rows in one.values() for row in rows for t in row}
    everything = {NUMBERS + n for n in [*range(300), *range(1000, 1400)]}
    assert trained & held == {EOS}
    assert (trained | held) - {EOS} == everything
    assert len(held) == 1 + 5 * (12 + 16)


def test_a_limit_takes_the_same_rows_in_every_world_and_micro_batch(tmp_path: Path) -> None:
    data = make_data(tmp_path, numbered(60, 7), seq_len=8, validation={"fraction": 0.5})
    limited = [
        validation_rows(data, world, micro_batch_size=size, max_rows=10)["data"]
        for world, size in ((1, 4), (2, 2), (3, 2), (4, 1))
    ]
    assert limited[0] == limited[1] == limited[2] == limited[3]
    assert len(limited[0]) == 10
    assert limited[0] == validation_rows(data, 1, micro_batch_size=2)["data"][:10]
    batch = next(iter(data.validation(micro_batch_size=2)["data"]))
    assert batch.source_B.tolist() == [0, 0]


def test_validation_sources_of_their_own(tmp_path: Path) -> None:
    own = [
        SourceConfig(
            path=str(write_jsonl(tmp_path / f"v{i}.jsonl", numbered(4, 3, 1000 + 100 * i)))
        )
        for i in range(2)
    ]
    data = make_data(
        tmp_path, numbered(30, 3), seq_len=4, validation={"kind": "sources", "sources": own}
    )
    assert data.validation_names == ["v0", "v1"]
    rows = validation_rows(data, 2, micro_batch_size=2)
    for i in range(2):
        assert {t for row in rows[f"v{i}"] for t in row} - {EOS} == {
            NUMBERS + 1000 + 100 * i + j for j in range(12)
        }
    assert data.rows_per_epoch == 30


def test_validation_does_not_move_training(tmp_path: Path) -> None:
    data = make_data(tmp_path, UNEQUAL, seq_len=8, validation={"fraction": 0.2})
    options = {"global_batch_size": 4, "micro_batch_size": 2}
    expected = take(data, 4, **options)
    other = make_data(tmp_path, UNEQUAL, seq_len=8, validation={"fraction": 0.2})
    got = []
    for step in other.steps(steps=4, **options):
        got.append(rows_of(step))
        validation_rows(other, 1, micro_batch_size=2)
    assert got == expected


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], r"data\.sources\[0\] \(data\): .*data\.jsonl holds no text"),
        (["1 2 3 4 5 6 7 8 9"], r"too small: 10 tokens in 1 documents"),
        (["", " ", "\n"], r"too small: 0 tokens in 0 documents \(3 lines or documents left out\)"),
    ],
)
def test_too_little_text_is_refused_with_counts(tmp_path: Path, texts: list, message: str) -> None:
    """mosaicml/llm-foundry#1585, axolotl-ai-cloud/axolotl#3100."""
    with pytest.raises(DataError, match=message):
        make_data(tmp_path, texts, seq_len=16)


def test_files_of_no_bytes_and_no_files(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    with pytest.raises(
        DataError, match=r"data\.sources\[0\] \(data\): .*data\.jsonl holds no text"
    ):
        make_data(tmp_path, [], seq_len=4, packing=False)
    config = DataConfig(sources=[SourceConfig(path=str(tmp_path / "none/*.jsonl"))])
    with pytest.raises(DataError, match="no such file"):
        build_data(config, number_tokenizer(tmp_path / "tokenizer"), seed=0)


def test_a_wrong_text_field_is_named_when_it_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "1 2 3"}\n' * 9)
    config = DataConfig(
        sources=[SourceConfig(path=str(path))], on_bad_line="skip", cache_dir=str(tmp_path / "c")
    )
    with pytest.raises(DataError, match=r"\(9 lines .* left out\).*a\.jsonl:1: no field 'text'"):
        build_data(config, number_tokenizer(tmp_path / "tokenizer"), seed=0)


def test_a_cache_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = write_jsonl(tmp_path / "a.jsonl", numbered(9))
    config = DataConfig(sources=[SourceConfig(path=str(path))], cache_dir=str(tmp_path / "file/x"))
    with pytest.raises(DataError, match=r"data\.cache_dir: .*file/x/a-.* cannot be made"):
        build_data(config, number_tokenizer(tmp_path / "tokenizer"), seed=0)


def test_names_are_taken_from_paths(tmp_path: Path) -> None:
    given = {
        "a/b c.jsonl.gz": "b_c",
        "corpus/": "corpus",
        "web/*.parquet": "web",
        "bundled:moby-dick": "moby-dick",
        "v1.5.txt": "v1.5",
    }
    sources = [SourceConfig(path=path) for path in given]
    sources += [SourceConfig(hub="org/set", subset="en"), SourceConfig(path=["x.txt", "y.txt"])]
    assert name_sources(sources, "data.sources") == [*given.values(), "set_en", "x"]


def test_empty_documents_anywhere_do_no_harm(tmp_path: Path) -> None:
    """openai/gpt-2-output-dataset#51, decoderesearch/SAELens#611."""
    nothing = ["", " ", "8", ""]
    texts = [*nothing, "1 2 3", *nothing, "4 5 6 7", *nothing]
    for packing in (True, False):
        data = make_data(tmp_path, texts, seq_len=4, packing=packing)
        rows = take(data, 1, global_batch_size=data.rows_per_epoch, micro_batch_size=2)[0]
        words = sorted(t - NUMBERS for row in rows for t in row if t != EOS)
        assert words == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]
        for step in data.steps(global_batch_size=4, micro_batch_size=1, steps=3):
            for batch in step:
                batch.documents.check(1, 4)
        assert "9 empty" in data.describe()[0]


def test_two_sources_of_one_name(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "a/x.jsonl", numbered(9)))
    again = str(write_jsonl(tmp_path / "b/x.jsonl", numbered(9)))
    config = DataConfig(sources=[SourceConfig(path=path), SourceConfig(path=again)])
    with pytest.raises(DataError, match=r"data\.sources\[1\]: another source is named 'x'"):
        build_data(config, number_tokenizer(tmp_path / "tokenizer"), seed=0)
    named = SourceConfig(path=path, name="a/b")
    with pytest.raises(DataError, match="name='a/b' may hold"):
        build_data(DataConfig(sources=[named]), number_tokenizer(tmp_path / "tok"), seed=0)


def test_begin_token_that_does_not_exist(tmp_path: Path) -> None:
    from dataclasses import replace

    config = DataConfig(add_bos=True)
    with pytest.raises(DataError, match=r"add_bos=true.*bos_token: …"):
        build_data(config, replace(number_tokenizer(tmp_path), bos_id=None), seed=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"seq_len": 16},
        {"packing": False},
        {"add_bos": True},
        {"shuffle": False},
        {"validation": {"fraction": 0.1}},
    ],
)
def test_a_state_of_other_rows_is_refused(tmp_path: Path, changes: dict) -> None:
    data = make_data(tmp_path, UNEQUAL, seq_len=8)
    other = make_data(tmp_path, UNEQUAL, **{"seq_len": 8, **changes})
    key = next(iter(changes))
    with pytest.raises(DataError, match=rf"data\.{key}[.=].*repeated or lost"):
        other.load_state_dict(data.state_dict())


def test_a_state_of_other_text_or_sources_is_refused(tmp_path: Path) -> None:
    data = make_data(tmp_path, {"a": numbered(20, 3)}, seq_len=4)
    other = make_data(tmp_path, {"b": numbered(20, 3)}, seq_len=4)
    with pytest.raises(DataError, match=r"data\.sources are b, but .* made with a"):
        other.load_state_dict(data.state_dict())
    write_jsonl(tmp_path / "a.jsonl", numbered(21, 3))
    changed = make_data(tmp_path, {"a": []}, seq_len=4)
    with pytest.raises(DataError, match="text of data source 'a' is not the one"):
        changed.load_state_dict(data.state_dict())
    # The same text under another time stamp is the same text.
    write_jsonl(tmp_path / "a.jsonl", numbered(20, 3))
    make_data(tmp_path, {"a": []}, seq_len=4).load_state_dict(data.state_dict())


# --- the rest -----------------------------------------------------------------------------------


def test_unigram_entropy_by_hand(tmp_path: Path) -> None:
    data = make_data(tmp_path, ["1 1 1 2", "1 2 3"], seq_len=4)
    counts = [4, 2, 1, 2]  # 1, 2, 3 and the two end tokens
    expected = -sum(c / 9 * math.log(c / 9) for c in counts)
    assert data.unigram_entropy() == pytest.approx(expected)


def test_unigram_entropy_of_a_mixture(tmp_path: Path) -> None:
    texts = {"a": ["1 1 1"], "b": ["2 2 2"]}
    data = make_data(tmp_path, texts, seq_len=4, weights={"a": 1, "b": 3})
    p = [0.75 * 0.25, 0.75 * 0.75, 0.25]
    assert data.unigram_entropy() == pytest.approx(-sum(x * math.log(x) for x in p))


def test_cached_tokens_are_found_again_and_bad_lines_told(tmp_path: Path, caplog) -> None:
    data = make_data(tmp_path, [*numbered(9, 3), ""], seq_len=4)
    (folder,) = (tmp_path / "cache").glob("data-*")
    before = (folder / "meta.json").stat().st_mtime_ns
    caplog.clear()
    make_data(tmp_path, [], seq_len=6, add_bos=True)
    assert (folder / "meta.json").stat().st_mtime_ns == before
    assert "left out 1 empty" in caplog.text
    assert data.describe() == ["data: 9 documents, 27 tokens; left out 1 empty"]


def test_the_bundled_text_without_any_setting(tmp_path: Path) -> None:
    from training.data import load_tokenizer

    config = DataConfig(cache_dir=str(tmp_path), tokenizer="bundled:moby-dick", seq_len=512)
    tokenizer = load_tokenizer(config, tmp_path / "run/tokenizer")
    data = build_data(config, tokenizer, seed=0)
    assert data.describe() == ["moby-dick: 138 documents, 334,522 tokens"]
    assert data.rows_per_epoch == math.ceil((334_522 + 138) / 512)
    (step,) = data.steps(global_batch_size=2, micro_batch_size=2, steps=1)
    assert tokenizer.decode(step[0].tokens_BL[0].tolist()).count(" the ") > 5
    assert data.unigram_entropy() == pytest.approx(6.674, abs=1e-3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_block_is_told_in_one_line(tmp_path, workers):
    data = make_data(tmp_path, numbered(40, 5), seq_len=8, workers=workers)
    store = data.sources[0].order.store
    store._sound.clear()
    store._maps.clear()
    path = block_path(store.folder, 0)
    path.write_bytes(path.read_bytes()[:-2] + b"AA")
    with pytest.raises(DataError, match=r"000000\.bin is damaged: the checksum") as told:
        take(data, 1, global_batch_size=2, micro_batch_size=2)
    assert "\n" not in str(told.value) and "Traceback" not in str(told.value)
