"""Which source the next row comes from, and which row of it.

Sources are interleaved by largest deficit: the next row is taken from the source that is furthest
behind its share. All in integers, so that the sequence is exact on every machine, and no source is
ever a whole row ahead of its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any


def integer_weights(weights: Sequence[float | int]) -> list[int]:
    """The smallest integers in the same proportion; 0.1 counts as one tenth."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    return [weight // divisor for weight in whole]


class Cursor:
    """Walks through the mixture. Its state is a few integers for each source.

    Args:
        weights: positive integers.
        has_row: (source, epoch, row) → whether that epoch has that row. May wait for data.
    """

    def __init__(self, weights: Sequence[int], has_row: Callable[[int, int, int], bool]):
        self._weights = list(weights)
        self._sum = sum(weights)
        self._has_row = has_row
        self._indices = range(len(self._weights))
        self.taken = [0] * len(self._weights)
        """rows taken from each source since the weights were last changed"""
        self.epoch = [0] * len(self._weights)
        self.row = [0] * len(self._weights)
        self.rows = 0
        """rows taken in all"""

    def next(self) -> tuple[int, int, int]:
        """(source, epoch, row) of the next row."""
        source = 0
        if len(self._weights) > 1:
            ahead = sum(self.taken) + 1
            source = max(self._indices, key=lambda s: self._deficit(s, ahead))
        epoch, row = self.epoch[source], self.row[source]
        if not self._has_row(source, epoch, row):
            epoch, row = epoch + 1, 0
        self.epoch[source], self.row[source] = epoch, row + 1
        self.taken[source] += 1
        self.rows += 1
        return source, epoch, row

    def _deficit(self, source: int, ahead: int) -> int:
        # max() keeps the first of equals, so ties go to the source named first.
        return self._weights[source] * ahead - self.taken[source] * self._sum

    def state_dict(self) -> dict[str, Any]:
        """Plain copy of the state."""
        return {
            "rows": self.rows,
            "weights": list(self._weights),
            "taken": list(self.taken),
            "epoch": list(self.epoch),
            "row": list(self.row),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. With other weights than then, shares count from here on: what was
        taken before is not made up for."""
        self.rows = state["rows"]
        self.epoch, self.row = list(state["epoch"]), list(state["row"])
        same = state["weights"] == self._weights
        self.taken = list(state["taken"]) if same else [0] * len(self._weights)
