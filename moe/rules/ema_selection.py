"""Selection by an average of the router's weight: the choice follows slowly what the gates learn.

The weight itself gives gates and probabilities. With `router.end_steps` the average stops selecting
that many steps before the end, and the run trains what is exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.rules.base import Export, RouterView, Rule, RuleSettings
from moe.types import Form, RouterStats


class EmaSelection(RuleSettings):
    """An average of the router weights selects the experts, while the weights themselves give the
    gates."""

    export: ClassVar[Export] = "ends"
    lacks: ClassVar[str] = "selection by averaged router weights"
    line: ClassVar = (
        "routing fluctuates late in training",
        "a small matrix product per layer",
        "no effect on loss (±0.07, ±0.14) or churn seen",
    )

    kind: Literal["ema"] = "ema"
    decay: Annotated[float, Field(ge=0, lt=1)]
    """Decay of the average from step to step."""

    def build(self, form: Form, device: torch.device | str | None = None) -> Rule:
        return _EmaSelection(self, form, device)

    def check(self, form: Form, router: Any) -> None:
        if form.families:
            raise ValueError(
                "router.selection.kind=ema does not go with copies of experts that form families: "
                "the average and the weight could each prefer another member; allowed: null"
            )


class _EmaSelection(Rule):
    """Buffer: weight_ema, shaped as the router's weight. `selecting`: whether it selects now."""

    def __init__(self, settings: EmaSelection, form: Form, device=None) -> None:
        super().__init__(settings, form, device)
        rows = form.experts * form.rows
        self.add_state("weight_ema", (rows, form.hidden_size), device)
        self.selecting = True

    def begin_step(self, step: int) -> str | None:
        until, before = self.form.last_acting, self.selecting
        self.selecting = until is None or step <= until
        if before and not self.selecting:
            return "the router's own weight selects from now on, no longer its average"
        return None

    @property
    def phase(self) -> bool:
        return self.selecting

    @property
    def changes(self) -> int:
        return int(self.form.last_acting is not None)

    @torch.no_grad()
    def start(self, router: RouterView) -> None:
        self.weight_ema.copy_(router.weight)

    def selection(
        self, router: RouterView, x_TD: Tensor, select_TE: Tensor, valid_T: Tensor | None
    ) -> Tensor | None:
        return router.product(x_TD, self.weight_ema) if self.selecting else None

    @classmethod
    def update(
        cls,
        rules: Sequence[_EmaSelection],
        routers: Sequence[RouterView],
        stats: RouterStats,
        step: int,
        applied: Tensor | None,
    ) -> None:
        decay = rules[0].settings.decay
        averages = [rule.weight_ema for rule in rules]
        weights = [router.weight.detach() for router in routers]
        if applied is None:
            torch._foreach_lerp_(averages, weights, 1 - decay)
            return
        for average, weight in zip(averages, weights):
            average.copy_(torch.where(applied > 0, torch.lerp(average, weight, 1 - decay), average))
