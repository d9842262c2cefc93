"""Values that pass between the router, its rules and the layer; nothing of ours but kernels below.

Shape letters: L layers, T tokens, E experts, K experts per token, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.gating import Gating
from moe.routing import Routing


@dataclass(frozen=True)
class Form:
    """What a router computes, whatever its rules: what `moe.MoEConfig` says of it."""

    hidden_size: int
    """D."""
    experts: int
    """E."""
    k: int
    """K of evaluation and of the end of training."""
    score: str = "softmax"
    norm: str = "topk_sum"
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_top: int = 2
    backend: str = "auto"
    rows: int = 1
    """Rows of the router's weight for an expert."""
    biased: bool = False
    """Whether the model's family adds a selection bias to the scores."""
    start_experts: int | None = None
    """Slots that hold an expert at first, where experts come and go."""
    families: bool = False
    """Whether a token chooses one of each family of copies at most."""
    widths: tuple[int, ...] | None = None
    """Of the experts, where they differ."""
    shares: tuple[float, ...] | None = None
    """Wanted share of the load per expert, up to a common factor; None: the same for all."""
    steps: int | None = None
    """Of the whole run, where that is known."""
    end_steps: int | None = None
    """The last so many of them train exactly what is exported."""

    @property
    def choice(self) -> int:
        """Experts that a token may choose from."""
        return self.experts // self.groups * self.groups_kept

    @property
    def last_acting(self) -> int | None:
        """Last step in which a rule acts that no exported folder can say; None: to the end."""
        return None if self.end_steps is None else self.steps - self.end_steps


class Choice(NamedTuple):
    """What a router decided for T tokens."""

    logits_TE: Tensor
    """float32, differentiable: of gates, probabilities and losses."""
    select_TE: Tensor | None
    """Logits that chose the experts in place of those."""
    gating: Gating
    """The top-K choice and its gates, which the statistics count."""
    routing: Routing
    """What the experts compute: the choice, but for rounding and capacity."""


class RouterStats(NamedTuple):
    """Sums over the valid tokens of one batch, per layer, on the layer's device.

    An output of the layer's forward, never a buffer that forward changes: evaluation and the
    recomputation of activation checkpointing cannot add to it, and statistics of micro-batches and
    of ranks add up. Fields are [E] or [] for one layer, [L, E] or [L] after `stack`. A NamedTuple
    and hence a pytree: checkpointing, torch.compile and FSDP hooks see the tensors inside.
    """

    counts_E: Tensor  # int32: tokens that chose each expert, before any rounding or dropping
    prob_sum_E: Tensor  # fp32, differentiable: sum of the scores normalised to 1 over E
    z_sum: Tensor  # fp32, differentiable: sum of logsumexp(logits)^2
    sequence_sum: Tensor  # fp32, differentiable: tokens * Switch loss of each sequence, or 0
    entropy_sum: Tensor  # fp32: sum of the entropy (nats) of each token's normalised gates
    tokens: Tensor  # fp32: number of valid tokens
    nonfinite: Tensor  # int32: tokens whose logits held NaN or +inf, or too few usable experts
    rows_E: Tensor  # int32: rows that each expert computes, after rounding
    # None where the layer does not measure it:
    output_sum_ED: Tensor | None = None  # fp32: sum of each expert's outputs over its rows
    quantile_sum_E: Tensor | None = None  # fp32: tokens * thresholds of `quantiles`
    active_sum_E: Tensor | None = None  # fp32: tokens * (1 for the slots that hold an expert)
    importance_sum_E: Tensor | None = None  # fp32: see `moe.importance`

    @classmethod
    def stack(cls, stats: Sequence[RouterStats]) -> RouterStats:
        """Statistics of several layers, with a leading layer axis; what only some layers measure
        is 0 for the others.

        Raises:
            ValueError: no layers, or layers with different numbers of experts.
        """
        if not stats:
            raise ValueError("RouterStats.stack: no layers given")
        widths = {one.counts_E.shape[-1] for one in stats}
        if len(widths) > 1:
            raise ValueError(f"layers have different numbers of experts: {sorted(widths)}")
        return cls(*(_stack(field) for field in zip(*stats)))

    def plus(self, other: RouterStats) -> RouterStats:
        """Statistics of two batches together."""
        return RouterStats(*(None if a is None else a + b for a, b in zip(self, other)))

    def layers(self, numbers: Sequence[int]) -> RouterStats:
        """Those of some of the stacked layers."""
        if len(numbers) == len(self.tokens):
            return self
        return RouterStats(
            *(None if field is None else torch.stack([field[i] for i in numbers]) for field in self)
        )

    def measured(self) -> dict[str, Tensor]:
        """The fields that are there, by name."""
        return {name: field for name, field in self._asdict().items() if field is not None}

    @property
    def in_use_E(self) -> Tensor | None:
        """Which slots hold an expert, bool; None: all of them."""
        if self.active_sum_E is None:
            return None
        active_E = self.active_sum_E > 0
        return active_E | ~active_E.any(dim=-1, keepdim=True)  # without tokens nothing is known

    @property
    def experts(self) -> int | Tensor:
        """How many hold an expert, per layer where there is a mask."""
        in_use_E = self.in_use_E
        return self.counts_E.shape[-1] if in_use_E is None else in_use_E.sum(dim=-1)

    def detach(self) -> RouterStats:
        return RouterStats(*(None if field is None else field.detach() for field in self))


def _stack(fields: Sequence[Tensor | None]) -> Tensor | None:
    some = next((field for field in fields if field is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if field is None else field for field in fields])


def valid_tokens(choice: Choice, valid_T: Tensor | None) -> Tensor:
    """How many tokens a choice is of, without padding; a float scalar on the device."""
    like = choice.gating.lse_T
    if valid_T is None:
        return like.new_full((), choice.logits_TE.shape[0])
    return valid_T.sum(dtype=like.dtype)
