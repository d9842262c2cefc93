"""What all selection biases share: a rule that moves them after every step, until they freeze or
fade.

    b <- next_bias(b, load)     and centred: to mean 0, over the experts in use

The bias is added to the scores for the choice alone; gates come from the scores without it, and no
gradient reaches it. The next step is the first to see a change: a bias that came from the batch it
is used on would leak later tokens into earlier ones.

Shape letters: L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moe.rules.base import Export, RouterView, Rule, RuleSettings, assign, done_layers
from moe.types import Form, RouterStats

Step = Annotated[int, Field(ge=1)]
"""Number of a step, from 1."""
# Least divisor: a layer without tokens moves nothing.
_TINY = 1e-20


class BiasSettings(RuleSettings):
    """What every rule of a selection bias can be told."""

    export: ClassVar[Export] = "in the family"
    lacks: ClassVar[str] = "selection bias"
    ended: ClassVar[str] = "annealed to zero"
    balances: ClassVar[bool] = True
    """Whether no balance loss is needed beside it."""

    freeze_at: Step | None = None
    """From this step on the selection bias stays as it is; `null`: never."""
    calibrate: bool = False
    """Set the bias by the first micro-batch of each process, averaged, before the first step: fresh
    routers start balanced. Another layout starts from another, equally good bias."""

    @model_validator(mode="after")
    def _moves(self) -> BiasSettings:
        if self.freeze_at == 1 and not self.calibrate:
            raise ValueError(
                "freeze_at=1 never lets the bias move; allowed: 2 or more, or calibrate=true"
            )
        return self

    def check(self, form: Form, router: Any) -> None:
        if form.choice <= form.k:
            raise ValueError(
                f"router.bias.kind={self.kind} cannot balance anything: every token takes all "
                f"{form.choice} experts that it may choose from; allowed: router.bias=null"
            )
        shares = form.shares
        if shares is not None and max(shares) * form.k > sum(shares):
            raise ValueError(
                "router.balance.load=flops asks for more tokens of a narrow expert than there are: "
                f"its share may be at most 1/{form.k} of all, got {max(shares) / sum(shares):.3g}"
            )


class BiasRule(Rule):
    """A rule of a selection bias; a subclass says `next_bias`."""

    biases = True

    @property
    def fading(self) -> tuple[int, int] | None:
        """(a, b): after step a the bias only falls, linearly, to exactly 0 after step b."""
        form, last = self.form, self.form.last_acting
        return None if form.biased or last is None else (last - form.end_steps, last)

    def begin_step(self, step: int) -> str | None:
        start, end = self.fading or (None, None)
        if start is not None and step == start + 1:
            return f"the selection bias falls to zero until step {end}"
        if end is not None and step == end + 1:
            return "the selection bias is zero from now on"
        return None

    @classmethod
    def next_bias(cls, rules: Sequence[BiasRule], bias_LE: Tensor, stats: RouterStats) -> Tensor:
        """The bias [L, E] after a step with these statistics."""
        raise NotImplementedError

    @classmethod
    def update(
        cls,
        rules: Sequence[BiasRule],
        routers: Sequence[RouterView],
        stats: RouterStats,
        step: int,
        applied: Tensor | None,
    ) -> None:
        settings, fading = rules[0].settings, rules[0].fading
        biases = [router.selection_bias for router in routers]
        bias_LE, done_L = torch.stack(biases), done_layers(stats, applied)
        if fading is not None and step > fading[0]:
            left = fading[1] - step  # steps until it is 0
            new_LE = bias_LE * (left / (left + 1)) if left > 0 else torch.zeros_like(bias_LE)
            # skipped steps count: the last steps of a run are without bias whatever happened
            assign(biases, new_LE, torch.ones_like(done_L))
        elif settings.freeze_at is None or step < settings.freeze_at:
            assign(biases, cls.next_bias(rules, bias_LE, stats), done_L)


def missing_load(rules: Sequence[BiasRule], stats: RouterStats) -> Tensor:
    """(wanted − load) / wanted of each expert, float64 [L, E]; the same share for all, or that of
    equal arithmetic. Free slots miss nothing."""
    load_LE, in_use_LE, shares = stats.counts_E.double(), stats.in_use_E, rules[0].form.shares
    share_E = torch.full_like(load_LE[0], 1.0 / load_LE.shape[1])
    if in_use_LE is not None:
        share_E = in_use_LE / in_use_LE.sum(dim=1, keepdim=True, dtype=load_LE.dtype)
    if shares is not None:
        # by fill_: share_E[expert] = … would copy a scalar of the host's over, and wait for it
        for expert, share in enumerate(shares):
            share_E[expert].fill_(share / sum(shares))
    wanted_LE = load_LE.sum(dim=1, keepdim=True) * share_E
    return (wanted_LE - load_LE) / wanted_LE.clamp(min=_TINY)


def moved(bias_LE: Tensor, step_LE: Tensor, stats: RouterStats) -> Tensor:
    """bias + step, centred, in the dtype of the bias."""
    return centred(bias_LE.double() + step_LE, stats.in_use_E).to(bias_LE.dtype)


def centred(bias_E: Tensor, active_E: Tensor | None = None) -> Tensor:
    """A bias [..., E] less its mean; over the experts in use alone where a mask says which those
    are, and 0 for the others."""
    if active_E is None:
        return bias_E - bias_E.mean(dim=-1, keepdim=True)
    active_E = active_E.to(bias_E.dtype)
    mean = (bias_E * active_E).sum(-1, keepdim=True) / active_E.sum(-1, keepdim=True)
    return torch.where(active_E > 0, bias_E - mean, 0.0)
