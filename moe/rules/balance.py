"""What the balance losses share: Switch Transformer's value, whatever load it compares with.

    E * sum over e of F_e * P_e     1.0 = balanced     (arXiv 2101.03961)

F_e is the share of the load of expert e, without gradient; P_e its mean probability.

Shape letters: L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from moe.balance import balance_loss, flop_weights
from moe.rules.base import Rule, RuleSettings
from moe.types import Form, RouterStats

Coefficient = Annotated[float, Field(gt=0)]


class LoadBalance(RuleSettings):
    """Switch's loss against a load that the kind names."""

    coef: Coefficient = 0.01
    """Weight of the loss, mean over layers; a balanced layer has the value 1."""
    load: Literal["tokens", "flops"] = "tokens"
    """What becomes equal for all experts: their tokens, or their arithmetic, tokens times width,
    with `model.moe_expert_widths`. A selection bias follows it too."""

    def check(self, form: Form, router: Any) -> None:
        if self.load == "flops" and form.widths is None:
            raise ValueError(
                "router.balance.load='flops' needs model.moe_expert_widths; allowed: tokens"
            )


class BalanceRule(Rule):
    """Switch's loss of a micro-batch, against `load_LE` or, where that is unknown, its own load."""

    @classmethod
    def losses(
        cls, rules: Sequence[BalanceRule], stats: RouterStats, load_LE: Tensor | None
    ) -> Tensor:
        if rules[0].settings.load == "flops":
            widths = tuple(rule.form.widths for rule in rules)
            own_LE = stats.counts_E if load_LE is None else load_LE
            load_LE = own_LE.detach() * flop_weights(widths, own_LE.device)
        return balance_loss(stats, load_LE)
