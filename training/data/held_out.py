"""Which documents of a source are kept out of training for validation."""

from __future__ import annotations

import numpy as np

from training.data.config import DataError
from training.data.randomness import HELD_OUT, random_words
from training.data.store import TokenStore

_EXACT_DOCUMENTS = 1 << 24
"""Up to so many, exactly the fraction is held out; of more, each with that probability."""
_SEED = 0x7E55E7A
_NONE = np.zeros(0, np.int64)


class HeldOut:
    """Documents of a store that are for validation, by block. The choice ignores the run's seed.

    `fraction` of the documents, at least one; a single document is divided, and the last
    `fraction` of its tokens are held out. Of a streamed store, of its first block.

    Args:
        place: the key and the text, for errors.

    Raises:
        DataError: too little text to hold any out.
    """

    tail: int | None = None
    """Tokens at the end of the only document that are held out; None: documents are whole."""

    def __init__(
        self, store: TokenStore, fraction: float, streamed: bool, place: str = "data.sources"
    ):
        blocks = range(1) if streamed else range(len(store.blocks))
        counts = [store.blocks[block].documents for block in blocks]
        total = sum(counts)
        self._by_block: dict[int, np.ndarray] = {}
        if fraction == 0.0:
            return
        tokens = sum(store.blocks[block].tokens for block in blocks)
        if tokens < 2:
            raise DataError(
                f"{place} has {tokens} tokens in {total} documents, too few for both training and "
                f"validation (data.validation.fraction={fraction}); give more text"
            )
        if total == 1:
            self._by_block[counts.index(1)] = np.zeros(1, np.int64)
            self.tail = min(max(round(fraction * tokens), 1), tokens - 1)
            return
        keys = (random_words(count, _SEED, HELD_OUT, block) for block, count in enumerate(counts))
        if total <= _EXACT_DOCUMENTS:
            wanted = min(max(round(fraction * total), 1), total - 1)
            chosen = np.argsort(np.concatenate(list(keys)), kind="stable")[:wanted]
            block_of = np.searchsorted(np.cumsum(counts), chosen, side="right")
            starts = np.cumsum([0, *counts])
            for block in np.unique(block_of):
                inside = chosen[block_of == block] - starts[block]
                self._by_block[int(block)] = np.sort(inside)
        else:
            limit = np.uint64(int(fraction * 2.0**64))
            for block, words in enumerate(keys):
                self._by_block[block] = np.flatnonzero(words < limit)

    def __getitem__(self, block: int) -> np.ndarray:
        """Sorted indices of the held-out documents of a block."""
        return self._by_block.get(block, _NONE)
