"""How stacked weights divide into matrices: for whoever must treat each matrix by itself, as an
optimizer that orthogonalises updates does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Matrices(NamedTuple):
    """A weight as blocks of rows, one behind the other; a block is one matrix, or several whose
    rows take turns, as the gate and up projections of an expert do.

    A plain matrix [M, N] is one block of M rows; experts [E, 2N, D] are E blocks of 2N rows with
    two matrices each.
    """

    rows: tuple[int, ...]
    """Of each block."""
    columns: int
    interleaved: int = 1
    """Matrices of a block: row r belongs to matrix r % interleaved."""

    @classmethod
    def of(cls, shape: Sequence[int], interleaved: int = 1) -> Matrices:
        """Of a weight [..., rows, columns]: a block for each of its leading indices."""
        blocks = 1
        for size in shape[:-2]:
            blocks *= size
        return cls((shape[-2],) * blocks, shape[-1], interleaved)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each block."""
        return tuple(rows * self.columns for rows in self.rows)

    @property
    def elements(self) -> int:
        return sum(self.rows) * self.columns

    def within(self, start: int, count: int) -> Matrices:
        """Those of `count` elements from element `start` on: whole blocks."""
        first, kept = 0, []
        for rows in self.rows:
            if start <= first < start + count:
                kept.append(rows)
            first += rows * self.columns
        assert sum(kept) * self.columns == count, f"{start} + {count} cuts blocks of {self}"
        return self._replace(rows=tuple(kept))
