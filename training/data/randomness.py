"""Random numbers that are the same on every machine and under every numpy.

Raw 64-bit words of PCG64 seeded through SeedSequence: numpy keeps both stable, its `permutation`
not (NEP 19), and a run may be resumed under another numpy. Sorting the words gives a permutation.
"""

from __future__ import annotations

import numpy as np

BLOCKS, DOCUMENTS, HELD_OUT = range(3)
"""What a sequence is for: a part of its key."""


def random_words(count: int, *key: int) -> np.ndarray:
    """uint64 [count], a function of the key alone."""
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)


def permutation(count: int, *key: int) -> np.ndarray:
    """int64 [count], a permutation that is a function of the key alone."""
    return np.argsort(random_words(count, *key), kind="stable")
