"""One micro-batch as the model takes it.

Shape letters: B rows, L tokens a row, N segments of the flattened batch (N1 = N + 1).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Segments that attention must not leave, over the flattened B*L tokens."""

    cu_seqlens_N1: Tensor
    lengths: tuple[int, ...]
    max_length: int


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
    rows: tuple[tuple[int, int, int], ...]
    """(source, epoch, row) of each row: the batch's identity in the data; (-1, 0, 0) when empty"""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`; lengths stay on the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in pinned host memory (called by the DataLoader)."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function) -> Batch:
        changed = {
            field.name: function(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        documents = dataclasses.replace(
            self.documents, cu_seqlens_N1=function(self.documents.cu_seqlens_N1)
        )
        return dataclasses.replace(self, documents=documents, **changed)
