"""Which document each token of a packed batch belongs to, as attention needs it.

Packed rows hold several documents one after the other; attention must not cross their borders.
Restarting the position ids alone does not achieve that (huggingface/nanoVLM#204,
huggingface/trl#784), hence this value.

Shape letters: B rows, L tokens per row, N documents (segments) in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Borders of the segments over the B*L tokens of a batch, flattened row after row.

    No segment is empty and none crosses the end of a row. Padding at the end of a row belongs to
    some segment too (its own, or the last document's): every token is in exactly one.
    """

    cu_seqlens_N1: Tensor
    """int32 [N+1] on the batch's device: 0, then where each segment ends."""
    lengths: tuple[int, ...]
    """The N lengths on the host, so that no step has to read them back from the device."""

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str | None = None
    ) -> Documents:
        """Segments of the given lengths, in the order of the flattened batch.

        ValueError for an empty segment.
        """
        lengths = tuple(int(length) for length in lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"documents: every segment needs at least one token, got {lengths}")
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(ends.to(device), lengths)

    @cached_property
    def lengths_N(self) -> Tensor:
        """The lengths as an int64 tensor on the CPU."""
        return torch.tensor(self.lengths, dtype=torch.int64)

    def positions(self) -> Tensor:
        """Position of each token in its document, int64 [B*L] on the CPU."""
        ends_N = self.lengths_N.cumsum(0)
        starts_T = (ends_N - self.lengths_N).repeat_interleave(self.lengths_N)
        return torch.arange(int(ends_N[-1])) - starts_T

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Documents:
        """The same documents with the borders on `device`."""
        moved = self.cu_seqlens_N1.to(device, non_blocking=non_blocking)
        return Documents(moved, self.lengths)

    def check(self, rows: int, row_length: int) -> None:
        """ValueError unless the segments fill `rows` rows of `row_length` tokens without crossing
        a row's end.
        """
        ends = set(accumulate(self.lengths))
        if max(ends, default=0) != rows * row_length:
            raise ValueError(
                f"documents hold {sum(self.lengths)} tokens, the batch {rows} x {row_length}"
            )
        for row in range(1, rows):
            if row * row_length not in ends:
                raise ValueError(
                    f"documents: a segment crosses from row {row - 1} into row {row} "
                    f"({row_length} tokens per row)"
                )
