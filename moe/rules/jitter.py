"""Noise on the router's input while training (Switch Transformer, arXiv 2101.03961)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.rules.base import Rule, RuleSettings
from moe.types import Form


class Jitter(RuleSettings):
    """While training, the router's input is multiplied by noise (arXiv 2101.03961)."""

    line: ClassVar = ("comparisons", "noise in training", "–")

    kind: Literal["jitter"] = "jitter"
    size: Annotated[float, Field(gt=0, lt=1)]
    """The noise is in 1 ± size."""

    def build(self, form: Form, device: torch.device | str | None = None) -> Rule:
        return _Jitter(self, form, device)


class _Jitter(Rule):
    draws = True

    def input(self, x_TD: Tensor) -> Tensor:
        if not self.training:
            return x_TD
        size = self.settings.size
        wide_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
        return wide_TD * (1 - size + 2 * size * torch.rand_like(wide_TD))
