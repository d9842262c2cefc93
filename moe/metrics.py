"""What the router did: statistics per layer, and the numbers a person reads from them.

`RouterStats` is an output of the layer's forward, never a buffer that forward changes: evaluation and the
recomputation of activation checkpointing cannot add to it. Every field is a sum over the valid tokens, so
statistics of micro-batches and of ranks add up.

Shape letters: L layers, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RouterStats(NamedTuple):
    """Sums over the valid tokens of one batch, per layer; all on the device of the layer.

    Fields are [E] or [] for one layer, [L, E] or [L] after `stack`. A NamedTuple, hence a pytree:
    checkpointing, torch.compile and FSDP hooks see the tensors inside.
    """

    counts_E: Tensor  # int32: tokens that chose each expert, before any rounding or dropping
    prob_sum_E: Tensor  # fp32, differentiable: sum of the scores normalised to 1 over E
    z_sum: Tensor  # fp32, differentiable: sum of logsumexp(logits)^2
    entropy_sum: Tensor  # fp32: sum of the entropy (nats) of each token's normalised gates
    tokens: Tensor  # fp32: number of valid tokens
    nonfinite: Tensor  # fp32: valid tokens whose logits hold NaN or +inf, or nothing finite
    rows_E: Tensor  # int32: rows each expert really computes, after rounding

    @classmethod
    def stack(cls, stats: list[RouterStats]) -> RouterStats:
        """Statistics of several layers with a leading layer axis."""
        if not stats:
            raise ValueError("RouterStats.stack: no layers given")
        return cls(*(torch.stack(field) for field in zip(*stats, strict=True)))
