"""The balance loss against the load of the whole step (arXiv 2501.11873): the same value and
gradient for any layout and any accumulation."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from moe.rules.balance import BalanceRule, LoadBalance
from moe.types import Form


class GlobalBalance(LoadBalance):
    """Compares with the load of the whole step over all ranks and micro-batches; with several
    micro-batches they are counted in a pass of their own first, a third more arithmetic."""

    compares: ClassVar[str] = "the whole step"
    line: ClassVar = (
        "`max_violation` stays high (raise `coef`), or it drowns the loss (lower it)",
        "none with one micro-batch per step, else a third more FLOPs",
        "without it 89 of 128 experts dead, with 0.01 ten; no effect on loss seen (±0.13)",
    )

    kind: Literal["global"] = "global"

    def build(self, form: Form, device: torch.device | str | None = None) -> BalanceRule:
        return _GlobalBalance(self, form, device)


class _GlobalBalance(BalanceRule):
    counts_step = True
