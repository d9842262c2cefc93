"""Rows are a pure function of (seed, epoch, index) and lose, repeat or mix nothing."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest

import training.data.held_out as held_out_module
import training.data.order as order_module
from tests.training.data.helpers import (
    BOS,
    EOS,
    add_block,
    finish,
    make_order,
    make_store,
    random_documents,
)
from training.data import DataError
from training.data.order import Order, Row
from training.data.randomness import permutation


def split(documents: list, blocks: int) -> list[list]:
    return [documents[i::blocks] for i in range(blocks)]


def all_rows(order: Order, epoch: int = 0) -> list[Row]:
    return [order.row(epoch, i) for i in range(order.rows())]


def documents_in(rows: list[Row]) -> list[tuple[int, ...]]:
    """The documents of consecutive packed rows, put together again by their end tokens."""
    stream = [int(t) for row in rows for t in row.tokens]
    found, current = [], []
    for token in stream:
        current.append(token)
        if token == EOS:
            found.append(tuple(current))
            current = []
    assert not current, f"the last document has no end: {current}"
    return found


def pairs(rows: list[Row]) -> list[tuple[int, int]]:
    """(input, target) of every label that counts."""
    return [
        (int(t), int(label))
        for row in rows
        for t, label in zip(row.tokens, row.labels)
        if label != -100
    ]


def expected_pairs(documents: list, add_bos: bool = False) -> list[tuple[int, int]]:
    full = [[BOS] * add_bos + list(document) + [EOS] for document in documents]
    return [pair for document in full for pair in itertools.pairwise(document)]


def test_two_documents_in_a_row_have_exactly_their_own_targets(tmp_path: Path) -> None:
    """pytorch/torchtitan#4075, InternLM/InternLM#318, huggingface/transformers#44642."""
    order = make_order(make_store(tmp_path / "s", [[[5, 6, 7], [8, 9]]]), 16, seed=None)
    row = order.row(0, 0)
    assert row.tokens.tolist() == [5, 6, 7, EOS, 8, 9, EOS]
    assert row.labels.tolist() == [6, 7, EOS, -100, 9, EOS, -100]
    assert row.lengths == [4, 3]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("seq_len", [2, 5, 16, 64])
@pytest.mark.parametrize("blocks", [1, 4])
def test_packing_loses_and_repeats_nothing(
    tmp_path: Path, seq_len: int, add_bos: bool, blocks: int
) -> None:
    documents = random_documents(40, 23)
    store = make_store(tmp_path / "s", split(documents, blocks))
    order = make_order(store, seq_len, add_bos=add_bos)
    for epoch in range(2):
        rows = all_rows(order, epoch)
        full = [tuple([BOS] * add_bos + [*d, EOS]) for d in documents]
        assert sorted(documents_in(rows)) == sorted(full)
        assert sorted(pairs(rows)) == sorted(expected_pairs(documents, add_bos))
        assert all(len(row.tokens) == seq_len for row in rows[:-1])
        assert 1 <= len(rows[-1].tokens) <= seq_len
        for row in rows:
            assert sum(row.lengths) == len(row.tokens) == len(row.labels)
            assert min(row.lengths) >= 1


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("seq_len", [2, 5, 64])
def test_without_packing_a_row_holds_one_document(
    tmp_path: Path, seq_len: int, add_bos: bool
) -> None:
    documents = random_documents(40, 23)
    order = make_order(
        make_store(tmp_path / "s", split(documents, 3)), seq_len, packing=False, add_bos=add_bos
    )
    rows = all_rows(order)
    assert sorted(pairs(rows)) == sorted(expected_pairs(documents, add_bos))
    for row in rows:
        assert row.lengths == [len(row.tokens)]
        assert 1 <= len(row.tokens) <= seq_len
        assert (row.labels != -100).any(), "a row without targets"
        assert EOS not in row.tokens[:-1], "two documents in a row"
    # A document longer than a row goes on in the next one.
    for a, b in itertools.pairwise(rows):
        if a.labels[-1] not in (-100, EOS):
            assert b.tokens[0] == a.labels[-1]


def test_one_token_documents(tmp_path: Path) -> None:
    documents = [[11], [12], [13, 14, 15], [16]]
    for packing in (True, False):
        store = make_store(tmp_path / str(packing), [documents])
        rows = all_rows(make_order(store, 4, packing=packing))
        assert sorted(pairs(rows)) == sorted(expected_pairs(documents))


def test_a_row_does_not_depend_on_what_was_asked_before(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", split(random_documents(50, 20), 5))
    order = make_order(store, 8)
    wanted = {(e, i): order.row(e, i) for e in range(3) for i in range(order.rows())}
    places = list(wanted)
    np.random.default_rng(1).shuffle(places)
    fresh = make_order(store, 8)
    copied = pickle.loads(pickle.dumps(fresh))
    for place in places:
        place = tuple(int(i) for i in place)
        for other in (fresh, copied):
            row = other.row(*place)
            assert row.tokens.tolist() == wanted[place].tokens.tolist()
            assert row.labels.tolist() == wanted[place].labels.tolist()
            assert row.lengths == wanted[place].lengths


def test_seed_and_epoch_change_the_order_and_nothing_else(tmp_path: Path) -> None:
    documents = random_documents(30, 9)
    store = make_store(tmp_path / "s", split(documents, 3))
    orders = {
        (seed, epoch): documents_in(all_rows(make_order(store, 8, seed=seed), epoch))
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len({tuple(value) for value in orders.values()}) == 4
    assert len({tuple(sorted(value)) for value in orders.values()}) == 1


def test_the_permutation_is_the_same_for_ever() -> None:
    """A checkpoint of today must go on with the same rows under a later numpy."""
    assert permutation(8, 3, 0, 1).tolist() == [7, 3, 5, 1, 2, 4, 6, 0]


def test_shuffling_mixes_documents_of_all_blocks(tmp_path: Path) -> None:
    documents = random_documents(200, 3)
    blocks = [documents[:100], documents[100:]]
    order = make_order(make_store(tmp_path / "s", blocks), 8)
    second = {(*d, EOS) for d in blocks[1]}
    place = [document in second for document in documents_in(all_rows(order))]
    assert 25 < sum(place[:100]) < 75


def test_without_shuffling_documents_keep_their_order(tmp_path: Path) -> None:
    documents = random_documents(30, 9)
    blocks = [documents[:7], documents[7:20], documents[20:]]
    order = make_order(make_store(tmp_path / "s", blocks), 8, seed=None)
    for epoch in (0, 1):
        found = documents_in(all_rows(order, epoch))
        assert found == [(*d, EOS) for d in documents]


def test_windows_hold_whole_blocks_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_module, "WINDOW_DOCUMENTS", 25)
    documents = random_documents(100, 9)
    blocks = [documents[i : i + 10] for i in range(0, 100, 10)]
    order = make_order(make_store(tmp_path / "s", blocks), 7)
    assert [len(window) for window in order._plan(0)[0]] == [3, 2, 3, 2]
    for epoch in range(2):
        rows = all_rows(order, epoch)
        assert sorted(documents_in(rows)) == sorted((*d, EOS) for d in documents)
    assert len({tuple(sorted(order._plan(epoch)[0][0])) for epoch in range(5)}) > 2
    in_block = {(*d, EOS): i for i, block in enumerate(blocks) for d in block}
    first = [in_block[d] for d in documents_in(all_rows(order, 0))[:30]]
    assert len(set(first)) == 3, "the first window is three blocks"
    assert first != sorted(first, key=first.index), "and their documents are mixed"


def test_empty_blocks_are_passed_over(tmp_path: Path) -> None:
    documents = random_documents(12, 5)
    store = make_store(tmp_path / "s", [[], documents[:6], [], documents[6:], []])
    for streamed in (False, True):
        order = make_order(store, 4, streamed=streamed)
        found = documents_in(all_rows(order))
        assert sorted(found) == sorted((*d, EOS) for d in documents)


@pytest.mark.parametrize("packing", [True, False])
def test_held_out_documents_are_never_trained_on(tmp_path: Path, packing: bool) -> None:
    documents = random_documents(50, 12)
    store = make_store(tmp_path / "s", split(documents, 4))
    options = {"fraction": 0.2, "packing": packing}
    train = make_order(store, 8, **options)
    held = make_order(store, 8, validation=True, **options)
    seen = [{t for row in all_rows(order) for t in row.tokens} - {EOS} for order in (train, held)]
    everything = {t for document in documents for t in document}
    assert seen[0] | seen[1] == everything
    assert not seen[0] & seen[1]
    assert sum(set(d) <= seen[1] for d in documents) == 10
    # Another seed of the run holds out the same documents.
    other = make_order(store, 8, seed=99, validation=True, **options)
    assert {t for row in all_rows(other) for t in row.tokens} - {EOS} == seen[1]


def test_at_least_one_document_is_held_out_and_one_is_left(tmp_path: Path) -> None:
    store = make_store(tmp_path / "two", [[[5, 6]], [[7, 8]]])
    for fraction in (1e-6, 0.999):
        train = make_order(store, 4, fraction=fraction)
        held = make_order(store, 4, fraction=fraction, validation=True)
        assert len(documents_in(all_rows(train))) == len(documents_in(all_rows(held))) == 1
    for name, documents in (("one", [[5]]), ("none", [])):
        with pytest.raises(DataError, match=r"data\.sources has . tokens in . documents, too few"):
            make_order(make_store(tmp_path / name, [documents]), 4, fraction=0.5)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("fraction", "count"), [(0.2, 20), (1e-6, 1), (0.999, 99)])
def test_a_single_document_is_divided(
    tmp_path: Path, fraction: float, count: int, packing: bool, streamed: bool
) -> None:
    tokens = list(range(10, 110))
    blocks = [[tokens]] if streamed else [[], [tokens], []]
    store = make_store(tmp_path / "s", blocks)
    options = {"fraction": fraction, "packing": packing, "streamed": streamed, "add_bos": True}
    train = make_order(store, 8, **options)
    held = make_order(store, 8, seed=99, validation=True, **options)
    for epoch in range(2):
        assert pairs(all_rows(train, epoch)) == expected_pairs([tokens[:-count]], add_bos=True)
    assert pairs(all_rows(held)) == expected_pairs([tokens[-count:]], add_bos=True)


def test_only_the_first_block_of_a_stream_is_divided(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [[[5, 6, 7, 8]], [[9, 10]], [[11, 12]]])
    options = {"fraction": 0.25, "streamed": True}
    train = documents_in(all_rows(make_order(store, 4, **options)))
    assert train == [(5, 6, 7, EOS), (9, 10, EOS), (11, 12, EOS)]
    held = documents_in(all_rows(make_order(store, 4, validation=True, **options)))
    assert held == [(8, EOS)]


def test_very_many_documents_are_held_out_by_threshold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out_module, "_EXACT_DOCUMENTS", 10)
    documents = random_documents(1000, 2)
    store = make_store(tmp_path / "s", split(documents, 4))
    held = documents_in(all_rows(make_order(store, 8, fraction=0.1, validation=True)))
    train = documents_in(all_rows(make_order(store, 8, fraction=0.1)))
    assert 60 < len(held) < 140
    assert sorted(held + train) == sorted((*d, EOS) for d in documents)


@pytest.mark.parametrize("packing", [True, False])
def test_a_growing_store_gives_the_rows_of_the_finished_one(tmp_path: Path, packing: bool) -> None:
    documents = random_documents(40, 11)
    blocks = [documents[i : i + 10] for i in range(0, 40, 10)]
    whole = make_order(make_store(tmp_path / "whole", blocks), 16, streamed=True, packing=packing)
    store = make_store(tmp_path / "s", blocks[:1], complete=False)
    order = make_order(store, 16, streamed=True, packing=packing)
    reader = pickle.loads(pickle.dumps(order))  # another process: it sees blocks by itself
    index = 0
    for block in [*blocks[1:], None]:
        assert order.rows() is None
        assert not order.has(1, 0), "an epoch begins when the one before is known whole"
        while order.has(0, index):
            for other in (order, reader):
                assert other.row(0, index).tokens.tolist() == whole.row(0, index).tokens.tolist()
                assert other.row(0, index).labels.tolist() == whole.row(0, index).labels.tolist()
            index += 1
        with pytest.raises(IndexError):
            order.row(0, index)
        if block is not None:
            add_block(store.folder, block)
            store.refresh()
    assert index > 0
    finish(store)
    while order.has(0, index):
        assert reader.row(0, index).tokens.tolist() == whole.row(0, index).tokens.tolist()
        index += 1
    assert index == whole.rows() == order.rows()
    # Blocks as they came, documents shuffled inside them; in the next epoch across all.
    in_block = {(*d, EOS): i for i, block in enumerate(blocks) for d in block}
    if packing:
        first = [in_block[d] for d in documents_in(all_rows(order, 0))]
        assert first == sorted(first)
        assert documents_in(all_rows(order, 0)) != [(*d, EOS) for d in documents]
        second = [in_block[d] for d in documents_in(all_rows(order, 1))]
        assert second != sorted(second)


def test_block_at_tells_which_block_a_row_begins_in(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [[[5] * 7], [[6] * 3, [6] * 3], [[7] * 15]])
    order = make_order(store, 4, streamed=True)  # 8, 8 and 16 tokens with their ends
    assert [order.block_at(0, row) for row in range(9)] == [0, 0, 1, 1, 2, 2, 2, 2, 3]


def test_uint32_ids(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [[[100_000, 200_000]]], dtype="uint32")
    assert make_order(store, 4).row(0, 0).tokens.tolist() == [100_000, 200_000, EOS]
