"""What earlier tokens leave behind for generation.

Shape letters: B rows, L new tokens per row, S places per row, G key/value heads, C head width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class KeysValues:
    """Entry of a layer that keeps the keys and values of every token."""

    keys_BSGC: Tensor
    values_BSGC: Tensor

    def write(self, positions_BL: Tensor, key_BLGC: Tensor, value_BLGC: Tensor) -> None:
        """Store keys and values at their positions."""
        rows_B1 = torch.arange(positions_BL.shape[0], device=positions_BL.device)[:, None]
        self.keys_BSGC[rows_B1, positions_BL] = key_BLGC.to(self.keys_BSGC.dtype)
        self.values_BSGC[rows_B1, positions_BL] = value_BLGC.to(self.values_BSGC.dtype)


class KVCache:
    """The entries of all layers; rows may hold prompts of different lengths.

    Row b holds `lengths_B[b]` tokens. A padded prompt is padded at its end: causal attention never
    looks there, and the next tokens overwrite those places.

    Args:
        layers: the attention modules of a model, in order; each makes an entry of its own kind.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        rows: int,
        capacity: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.entries = [layer.cache_entry(rows, capacity, device, dtype) for layer in layers]
        self.capacity = capacity
        self.lengths_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.filled = 0
        """Upper bound of `lengths_B`, known without asking the device."""

    def positions(self, tokens: int) -> Tensor:
        """Positions [B, tokens] of the next tokens. ValueError when they do not fit."""
        if self.filled + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens per row; {self.filled} are used and "
                f"{tokens} more were given"
            )
        steps = torch.arange(tokens, device=self.lengths_B.device)
        return self.lengths_B[:, None] + steps

    def advance(self, tokens: int, valid_BL: Tensor | None) -> None:
        """Count the tokens of a forward pass; of a padded row only the valid ones (a prefix)."""
        self.filled += tokens
        self.lengths_B = self.lengths_B + (tokens if valid_BL is None else valid_BL.sum(1))
