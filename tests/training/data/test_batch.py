"""Rows put together for the model: padding apart, borders exact, empty rows harmless."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from tests.training.data.helpers import EOS, PAD, make_order, make_store, random_documents
from training.data.batch import NO_ROW, Batch, make_batch


def batch_of(tmp_path: Path, documents: list, seq_len: int, rows: list[int | None]) -> Batch:
    order = make_order(make_store(tmp_path / "s", [documents]), seq_len, seed=None)
    where = [NO_ROW if row is None else (0, 0, row) for row in rows]
    return make_batch(
        [None if row is None else order.row(0, row) for row in rows], where, seq_len, PAD
    )


def test_a_batch_by_hand(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [[5, 6, 7], [8, 9]], 4, [0, 1, None])
    assert batch.tokens_BL.tolist() == [[5, 6, 7, EOS], [8, 9, EOS, PAD], [PAD] * 4]
    assert batch.labels_BL.tolist() == [[6, 7, EOS, -100], [9, EOS, -100, -100], [-100] * 4]
    assert batch.positions_BL.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch.valid_BL.tolist() == [[True] * 4, [True] * 3 + [False], [False] * 4]
    assert batch.documents.lengths == (4, 3, 1, 4)
    assert batch.documents.cu_seqlens_N1.tolist() == [0, 4, 7, 8, 12]
    assert batch.documents.cu_seqlens_N1.dtype == torch.int32
    assert batch.source_B.tolist() == [0, 0, -1]
    assert batch.rows == ((0, 0, 0), (0, 0, 1), NO_ROW)
    assert (batch.num_targets, batch.num_tokens) == (5, 7)
    for name in ("tokens_BL", "labels_BL", "positions_BL", "source_B"):
        assert getattr(batch, name).dtype == torch.int64, name


@pytest.mark.parametrize("seq_len", [2, 3, 8, 31])
def test_segments_fill_rows_and_positions_restart_in_each(tmp_path: Path, seq_len: int) -> None:
    documents = random_documents(30, 12)
    count = -(-sum(len(d) + 1 for d in documents) // seq_len)
    batch = batch_of(tmp_path, documents, seq_len, list(range(count)))
    batch.documents.check(count, seq_len)
    assert min(batch.documents.lengths) >= 1
    assert batch.positions_BL.flatten().tolist() == batch.documents.positions().tolist()
    start = 0
    tokens, valid = batch.tokens_BL.flatten(), batch.valid_BL.flatten()
    for length in batch.documents.lengths:
        piece = slice(start, start + length)
        assert len(set(valid[piece].tolist())) == 1, "padding shares a segment with tokens"
        assert EOS not in tokens[piece][:-1], "two documents in one segment"
        start += length


def test_labels_are_within_their_segment_or_begin_the_next_row(tmp_path: Path) -> None:
    documents = random_documents(30, 12)
    count = -(-sum(len(d) + 1 for d in documents) // 8)
    batch = batch_of(tmp_path, documents, 8, list(range(count)))
    tokens, labels = batch.tokens_BL.flatten(), batch.labels_BL.flatten()
    counted = labels != -100
    # In the given order the batch is the text itself, so the target is simply the next token.
    where = torch.nonzero(counted).flatten()
    assert (labels[where] == tokens[where + 1]).all()
    assert not counted[tokens == EOS].any()
    assert counted[(tokens != EOS) & batch.valid_BL.flatten()].all()


def test_moving_and_pickling_keep_everything(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [[5, 6, 7], [8, 9]], 4, [0, 1])
    for other in (batch.to("cpu"), pickle.loads(pickle.dumps(batch))):
        assert torch.equal(other.tokens_BL, batch.tokens_BL)
        assert torch.equal(other.documents.cu_seqlens_N1, batch.documents.cu_seqlens_N1)
        assert (other.rows, other.num_targets) == (batch.rows, batch.num_targets)
    meta = batch.to("meta")
    tensors = [v for v in vars(meta).values() if isinstance(v, torch.Tensor)]
    assert len(tensors) == 5
    assert all(t.is_meta for t in [*tensors, meta.documents.cu_seqlens_N1])


@pytest.mark.gpu
def test_pinned_memory_and_device(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [[5, 6, 7], [8, 9]], 4, [0, 1]).pin_memory()
    assert batch.tokens_BL.is_pinned() and batch.documents.cu_seqlens_N1.is_pinned()
    moved = batch.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert moved.labels_BL.is_cuda and moved.documents.cu_seqlens_N1.is_cuda
    assert torch.equal(moved.tokens_BL.cpu(), batch.tokens_BL)
