"""The balance loss against the load of the step before, which costs nothing and is as independent
of the layout as that of the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe.rules.balance import BalanceRule, LoadBalance
from moe.rules.base import RouterView, assign, done_layers
from moe.types import Form, RouterStats


class LaggedBalance(LoadBalance):
    """Compares with the load of the step before, which costs nothing."""

    compares: ClassVar[str] = "the step before"
    line: ClassVar = (
        "many micro-batches per step",
        "none; the first step has no balance gradient",
        "no difference from `global` seen",
    )

    kind: Literal["lagged"] = "lagged"

    def build(self, form: Form, device: torch.device | str | None = None) -> BalanceRule:
        return _LaggedBalance(self, form, device)


class _LaggedBalance(BalanceRule):
    """Buffer: load_E [E], tokens of each expert in the last step."""

    def __init__(self, settings: LaggedBalance, form: Form, device=None) -> None:
        super().__init__(settings, form, device)
        self.add_state("load_E", (form.experts,), device)

    @classmethod
    def load(cls, rules: Sequence[_LaggedBalance]) -> Tensor:
        return torch.stack([rule.load_E for rule in rules])

    @classmethod
    def update(
        cls,
        rules: Sequence[_LaggedBalance],
        routers: Sequence[RouterView],
        stats: RouterStats,
        step: int,
        applied: Tensor | None,
    ) -> None:
        loads = [rule.load_E for rule in rules]
        assign(loads, stats.counts_E.float(), done_layers(stats, applied))
