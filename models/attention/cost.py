"""What attention of a kind costs: the counts that FLOPs and estimates of speed are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionCost:
    """Of one layer."""

    weights: int
    """In the matrix products that every token meets."""
    scores: int
    """Multiply-adds of a query with the key of one token, over all heads."""
    values: int
    """Those of a weight of the softmax with the values of one token."""
    normed: int
    """Values of a token in norms inside of attention."""
    moved: int
    """Values of a token that are rotated, or copied beside rotated ones."""
