"""The balance loss against the load of each rank's micro-batch: Switch Transformer's own."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from moe.rules.balance import BalanceRule, LoadBalance
from moe.types import Form


class MicroBalance(LoadBalance):
    """Compares with the load of each rank's micro-batch."""

    compares: ClassVar[str] = "each process's micro-batch"
    line: ClassVar = ("comparisons with other software", "none", "no difference from `global` seen")

    kind: Literal["micro"] = "micro"

    def build(self, form: Form, device: torch.device | str | None = None) -> BalanceRule:
        return BalanceRule(self, form, device)
