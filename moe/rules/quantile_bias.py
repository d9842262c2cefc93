"""A selection bias found from the scores, without a rate: quantile balancing.

    b = -q, with q_e the excess over its tokens' (K+1)-th largest key that exactly the wanted number
        of tokens has for expert e

Balanced in one or two steps without groups of experts, for any score (Su, kexue.fm 11619 and 11626;
marin-community/marin#5502). Thresholds of micro-batches and ranks are averaged by their tokens:
unlike the rules by load, this one depends, slightly, on how the batch is split.

Shape letters: L layers, T tokens, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.rules.base import RouterView
from moe.rules.bias import BiasRule, BiasSettings, centred
from moe.scores import selection_keys
from moe.types import Choice, Form, RouterStats, valid_tokens

GROUPED = 0.9
"""Kept of the old bias where experts are chosen by groups: which groups a token takes follows the
biases, so thresholds found for today's groups are wrong for tomorrow's, and whole steps overshoot
for good (64 experts in 8 groups of which 4: a violation of 8 after 60 steps, with 0.9 of 0.2)."""


class QuantileBias(BiasSettings):
    """Each expert's bias is set so that its wanted number of tokens would choose it: balanced in
    one or two steps, no rate."""

    beyond_k: ClassVar[int] = 1
    line: ClassVar = (
        "you want balance without a balance loss",
        "a sort",
        "violation 2.1 instead of 3.3, 5 dead instead of 13; no effect on loss seen (±0.07)",
    )

    kind: Literal["quantile"] = "quantile"
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Part of the old bias that is kept. `null`: 0, or 0.9 where experts are chosen by groups."""

    def build(self, form: Form, device: torch.device | str | None = None) -> BiasRule:
        return _QuantileBias(self, form, device)


class _QuantileBias(BiasRule):
    @torch.no_grad()
    def measure(
        self, router: RouterView, choice: Choice, valid_T: Tensor | None, sequences: int
    ) -> dict[str, Tensor]:
        if not self.training:
            return {}
        select_TE = choice.logits_TE if choice.select_TE is None else choice.select_TE
        keys = selection_keys(select_TE, self.form, router.selection_bias, valid_T)
        tokens = valid_tokens(choice, valid_T)
        found_E = quantiles(*keys, router.active_k, self.form.shares, router.active_E)
        return {"quantile_sum_E": tokens * found_E}

    @classmethod
    def next_bias(cls, rules: Sequence[BiasRule], bias_LE: Tensor, stats: RouterStats) -> Tensor:
        target_LE = -stats.quantile_sum_E / stats.tokens.clamp(min=1)[:, None]
        kept, form = rules[0].settings.ema, rules[0].form
        if kept is None:
            kept = GROUPED if form.groups_kept < form.groups else 0.0
        return kept * bias_LE + (1 - kept) * centred(target_LE, stats.in_use_E)


@torch.no_grad()
def quantiles(
    score_TE: Tensor,
    key_TE: Tensor,
    k: int,
    shares: Sequence[float] | None = None,
    active_E: Tensor | None = None,
) -> Tensor:
    """Per expert the excess score that exactly the wanted number of tokens has; [E].

    With a_t the (k + 1)-th largest key of token t, expert e would get token t if its score were
    above a_t. So minus the (q + 1)-th largest s_te - a_t over the tokens is the bias with which
    about q tokens choose e: with q = tokens * k / E for all experts the load is balanced.

    Args:
        score_TE: scores without bias, -inf where an expert cannot be chosen or a token is no token.
        key_TE: the keys that chose: score plus bias, -inf likewise.
        k: experts per token, below E.
        shares: wanted share of the load per expert, up to a factor; None: the same for all.
        active_E: 1 for the experts in use, which alone share the load; None: all.
    """
    tokens, experts = score_TE.shape
    if not tokens:
        return score_TE.new_zeros(experts)
    rival_T1 = torch.topk(key_TE, k + 1, dim=1, sorted=True).values[:, k:]
    # a token with k usable experts or fewer has no choice, and says nothing
    counts_TE = (rival_T1 > -math.inf) & (key_TE > -math.inf)
    excess_TE = torch.where(counts_TE, score_TE - rival_T1, -math.inf)
    wanted_E = torch.full((experts,), k / experts, dtype=torch.float64, device=score_TE.device)
    if shares is not None:
        for expert, share in enumerate(shares):
            wanted_E[expert].fill_(k * share / sum(shares))  # an assignment waits for the device
    if active_E is not None:
        wanted_E = k * active_E.double() / active_E.double().sum()
    place_E = torch.round((rival_T1 > -math.inf).sum() * wanted_E).long().clamp(max=tokens - 1)
    ranked_TE = torch.sort(excess_TE, dim=0, descending=True).values
    found_E = ranked_TE.gather(0, place_E[None])[0]
    # fewer tokens than wanted may choose it at all: the lowest excess there is lets all of them in
    lowest_E = torch.where(counts_TE, excess_TE, math.inf).amin(dim=0)
    lowest_E = torch.where(lowest_E < math.inf, lowest_E, lowest_E.amin().clamp(max=0))
    return torch.where(found_E > -math.inf, found_E, lowest_E)
