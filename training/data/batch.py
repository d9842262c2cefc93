"""One micro-batch as the model takes it.

Shape letters: B rows, L tokens a row, N segments of the flattened batch (N1 = N + 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.documents import Documents
from training.data.order import Row

RowId = tuple[int, int, int]
"""(source, epoch, row): a row's identity in the data."""
NO_ROW: RowId = (-1, 0, 0)
"""Identity of a row without tokens."""


@dataclass(frozen=True)
class Batch:
    """B rows of L tokens. A row without any token (padding of an uneven split) is all invalid."""

    tokens_BL: Tensor
    """int64 token ids; padding holds the pad id"""
    labels_BL: Tensor
    """int64, the next token of the same document, -100 where there is none (shifted here, once)"""
    positions_BL: Tensor
    """int64, from 0 in each segment"""
    valid_BL: Tensor
    """bool, False on padding"""
    source_B: Tensor
    """int64 index into TrainData.source_names; -1 for a row without tokens"""
    documents: Documents
    """segments: a document's tokens inside a row, or the padding at the end of a row"""
    num_targets: int
    """labels that count"""
    num_tokens: int
    """valid tokens"""
    rows: tuple[RowId, ...]
    """the batch's identity in the data"""

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """What a model takes besides the tokens, by the names of its arguments."""
        names = ("labels_BL", "positions_BL", "documents", "valid_BL")
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`; lengths stay on the host."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in pinned host memory (called by the DataLoader)."""
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with `function` of each of its tensors."""
        changed = {
            field.name: function(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        documents = dataclasses.replace(
            self.documents, cu_seqlens_N1=function(self.documents.cu_seqlens_N1)
        )
        return dataclasses.replace(self, documents=documents, **changed)


def make_batch(
    rows: Sequence[Row | None], ids: Sequence[RowId], seq_len: int, pad_id: int
) -> Batch:
    """Put rows together; None is a row without tokens."""
    shape = (len(rows), seq_len)
    tokens_BL = np.full(shape, pad_id, np.int64)
    labels_BL = np.full(shape, -100, np.int64)
    positions_BL = np.empty(shape, np.int64)
    valid_BL = np.zeros(shape, bool)
    lengths: list[int] = []
    count = np.arange(seq_len)
    num_tokens = 0
    for b, row in enumerate(rows):
        used = 0 if row is None else len(row.tokens)
        if used:
            tokens_BL[b, :used] = row.tokens
            labels_BL[b, :used] = row.labels
            valid_BL[b, :used] = True
            lengths += row.lengths
            start = 0
            for length in row.lengths:
                positions_BL[b, start : start + length] = count[:length]
                start += length
        if used < seq_len:  # padding is a segment of its own, so no real token attends to it
            positions_BL[b, used:] = count[: seq_len - used]
            lengths.append(seq_len - used)
        num_tokens += used
    return Batch(
        tokens_BL=torch.from_numpy(tokens_BL),
        labels_BL=torch.from_numpy(labels_BL),
        positions_BL=torch.from_numpy(positions_BL),
        valid_BL=torch.from_numpy(valid_BL),
        source_B=torch.tensor([source for source, _, _ in ids], dtype=torch.int64),
        documents=Documents.from_lengths(lengths),
        num_targets=int((labels_BL != -100).sum()),
        num_tokens=num_tokens,
        rows=tuple(ids),
    )
