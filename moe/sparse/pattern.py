"""Where the entries of a sparse matrix lie: row pointers and columns, without values.

A `Pattern` keeps what is derived from it (its transpose, the row of each entry, the division into
items of work), so a matrix whose values change, as in training, derives it once.

Shape letters: M rows, K columns, Z entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe.kernels.sparse.spmm import Split, chunk_size, split_rows

INDEX = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Pattern:
    """Row pointers and columns of M x K entries (of blocks, in a block-sparse matrix).

    Two liberties let a routing be a pattern without reading memory back: a column of -1 is an
    unused entry, and so are the entries from `indptr[M]` on. Products skip both.
    """

    indptr: Tensor
    """int32 or int64 [M + 1]: first entry of each row."""
    indices: Tensor
    """int32 or int64 [Z]: column of each entry."""
    shape: tuple[int, int]
    row_length: int | None = None
    """Entries of a row, where all have the same number (kernels then skip `indptr`)."""
    longest: int | None = None
    """Entries of the longest row, where that is known: short rows are not divided."""
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What has been derived so far."""

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if rows < 0 or columns < 0:
            raise ValueError(f"shape {tuple(self.shape)} must not be negative")
        for name in ("indptr", "indices"):
            t = getattr(self, name)
            if t.dim() != 1 or t.dtype not in INDEX:
                raise ValueError(
                    f"{name} must be a vector of int32 or int64, got {t.dtype} {tuple(t.shape)}"
                )
        if self.indptr.shape[0] != rows + 1:
            raise ValueError(
                f"indptr has {self.indptr.shape[0]} entries, {rows} rows need {rows + 1}"
            )

    @property
    def entries(self) -> int:
        """Z, unused entries included."""
        return self.indices.shape[0]

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def _derive(self, name: str, make: Callable[[], Any]) -> Any:
        # not functools.cached_property: torch.compile cannot enter the lock it has in Python 3.11
        if name not in self.derived:
            self.derived[name] = make()
        return self.derived[name]

    @property
    def rows(self) -> Tensor:
        """[Z] row of each entry; M for the entries behind the last row."""
        return self._derive("rows", self._find_rows)

    def _find_rows(self) -> Tensor:
        at = torch.arange(self.entries, dtype=self.indptr.dtype, device=self.device)
        if self.row_length is not None:
            return at // max(self.row_length, 1)
        row = torch.searchsorted(self.indptr[1:].contiguous(), at, right=True)
        return row.to(self.indptr.dtype)

    @property
    def flipped(self) -> tuple[Pattern, Tensor]:
        """(pattern of the transpose, [Z] entry here of each entry there); a stable sort."""
        return self._derive("flipped", self._flip)

    def _flip(self) -> tuple[Pattern, Tensor]:
        rows, columns = self.shape
        column = torch.where(self.rows < rows, self.indices, -1)
        sorted_, order = torch.where(column < 0, columns, column).sort(stable=True)
        bounds = torch.arange(columns + 1, dtype=sorted_.dtype, device=self.device)
        indptr = torch.searchsorted(sorted_, bounds).to(self.indptr.dtype)
        back = Pattern(indptr, self.rows[order], (columns, rows))
        return back, order.to(self.indices.dtype)

    @property
    def told(self) -> bool:
        """Whether the transpose is known already."""
        return "flipped" in self.derived

    def with_flipped(self, back: Pattern, order: Tensor) -> Pattern:
        """The same pattern, told its transpose and the entry here of each entry there."""
        told = {"flipped": (back, order)}
        return replace(self, derived=told)

    @property
    def split(self) -> Split | None:
        """Items of work for `moe.kernels.sparse.spmm`; None where every row is short."""
        return self._derive("split", self._find_split)

    def _find_split(self) -> Split | None:
        chunk = chunk_size(self.entries, self.shape[0])
        known = self.longest if self.row_length is None else self.row_length
        if known is not None and known <= chunk:
            return None
        return split_rows(self.indptr, self.entries, chunk)

    def to(self, device: torch.device | str | None = None, index: torch.dtype | None = None):
        """The same pattern on another device or with other integers."""
        indptr, indices = self.indptr.to(device, index), self.indices.to(device, index)
        return replace(self, indptr=indptr, indices=indices, derived={})

    @classmethod
    def from_sorted(
        cls, rows: Tensor, indices: Tensor, shape: tuple[int, int], index: torch.dtype
    ) -> Pattern:
        """From the row and column of each entry, ascending; reads the longest row back."""
        bounds = torch.arange(shape[0] + 1, device=rows.device)
        indptr = torch.searchsorted(rows, bounds)
        longest = int(indptr.diff().max()) if shape[0] else 0
        return cls(indptr.to(index), indices.to(index), tuple(shape), longest=longest)

    def validate(self, row: str = "row", column: str = "column") -> Pattern:
        """Check everything by reading memory; returns self.

        Raises:
            ValueError: pointers that do not start at 0, fall, or do not end at Z; columns out of
                range, not ascending within their row, or named twice.
        """
        indptr, indices = self.indptr.long().cpu(), self.indices.long().cpu()
        columns = self.shape[1]
        if indptr[0] != 0 or indptr[-1] != indices.shape[0]:
            raise ValueError(
                f"indptr must run from 0 to {indices.shape[0]} (the number of entries), "
                f"it runs from {int(indptr[0])} to {int(indptr[-1])}"
            )
        falls = torch.nonzero(indptr.diff() < 0).flatten()
        if falls.numel():
            at = int(falls[0])
            raise ValueError(
                f"indptr must not fall, but indptr[{at}] is {int(indptr[at])} "
                f"and indptr[{at + 1}] is {int(indptr[at + 1])}"
            )
        wrong = torch.nonzero((indices < 0) | (indices >= columns)).flatten()
        if wrong.numel():
            at = int(wrong[0])
            raise ValueError(
                f"entry {at} has {column} {int(indices[at])}; allowed: 0 to {columns - 1}"
                if columns
                else f"entry {at} has {column} {int(indices[at])}, but there are no {column}s"
            )
        rows = self.rows.long().cpu()
        unsorted = torch.nonzero((rows[1:] == rows[:-1]) & (indices[1:] <= indices[:-1])).flatten()
        if unsorted.numel():
            at = int(unsorted[0])
            raise ValueError(
                f"{row} {int(rows[at])} has {column} {int(indices[at + 1])} after {column} "
                f"{int(indices[at])}; entries must ascend, each {column} once "
                "(COO(rows, columns, values, shape).csr() sorts and sums duplicates)"
            )
        return self
