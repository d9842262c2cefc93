"""The balance loss inside every sequence (DeepSeek-V3, arXiv 2412.19437): load and probabilities
are those of one row, so neither the size of the micro-batch nor other rows change it.

Shape letters: T tokens, E experts, K experts per token, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe.balance import load_fractions, sequence_loss
from moe.rules.balance import Coefficient
from moe.rules.base import RouterView, Rule, RuleSettings
from moe.scores import probabilities
from moe.types import Choice, Form, RouterStats


class SequenceBalance(RuleSettings):
    """Compares with the load of each row of `data.seq_len` tokens."""

    compares: ClassVar[str] = "each row"
    line: ClassVar = (
        "with a selection bias and a small `coef`, as in DeepSeek-V3",
        "one more [tokens, experts] pass per layer",
        "no difference from `global` seen",
    )

    kind: Literal["sequence"] = "sequence"
    coef: Coefficient = 0.01
    """Weight of the loss, mean over layers; a balanced layer has the value 1."""

    def build(self, form: Form, device: torch.device | str | None = None) -> Rule:
        return _SequenceBalance(self, form, device)


class _SequenceBalance(Rule):
    keeps_logits = True

    def measure(
        self, router: RouterView, choice: Choice, valid_T: Tensor | None, sequences: int
    ) -> dict[str, Tensor]:
        if not choice.logits_TE.shape[0]:
            return {}
        prob_TE = probabilities(choice.logits_TE, self.form.score, valid_T)
        found = sequence_sum(prob_TE, choice.gating.expert_TK, sequences, router.experts_in_use)
        return {"sequence_sum": found}

    @classmethod
    def losses(cls, rules: Sequence[Rule], stats: RouterStats, load_LE: Tensor | None) -> Tensor:
        return sequence_loss(stats)


def sequence_sum(
    prob_TE: Tensor, expert_TK: Tensor, sequences: int, in_use: int | Tensor | None = None
) -> Tensor:
    """`RouterStats.sequence_sum` of equally long sequences: tokens * Switch loss, summed.

    Args:
        prob_TE: [T, E] probabilities that sum to 1, or zeros for tokens that are not valid.
        expert_TK: int [T, K]; -1 for tokens that are not valid.
        in_use: experts that the load is to be even over; None: all.
    """
    tokens, experts = prob_TE.shape
    sequence_T1 = torch.arange(tokens, device=prob_TE.device)[:, None] * sequences // max(tokens, 1)
    some_TK = expert_TK >= 0
    cell_TK = sequence_T1 * experts + expert_TK.clamp(min=0)
    counts = torch.zeros(sequences * experts, dtype=torch.int32, device=prob_TE.device)
    counts = counts.scatter_add(0, cell_TK.reshape(-1), some_TK.reshape(-1).to(torch.int32))
    fraction_BE = load_fractions(counts.view(sequences, experts)).to(prob_TE.dtype)
    prob_sum_BE = prob_TE.view(sequences, -1, experts).sum(dim=1)
    return (experts if in_use is None else in_use) * (fraction_BE * prob_sum_BE).sum()
