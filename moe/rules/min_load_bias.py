"""A selection bias that lifts starving experts alone.

    b += rate for experts below `below` times the mean load

No expert dies, and above that the load is left to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.rules.bias import BiasRule, BiasSettings, missing_load, moved
from moe.types import Form, RouterStats


class MinLoadBias(BiasSettings):
    """Up for experts far below the mean load alone: no expert dies, and above that the load is left
    to itself."""

    balances: ClassVar[bool] = False
    line: ClassVar = ("experts die early", "none", "not run")

    kind: Literal["min_load"] = "min_load"
    rate: Annotated[float, Field(gt=0)] = 1e-3
    """Step of the bias."""
    below: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Part of the mean load below which an expert's bias rises."""

    def build(self, form: Form, device: torch.device | str | None = None) -> BiasRule:
        return _MinLoadBias(self, form, device)


class _MinLoadBias(BiasRule):
    @classmethod
    def next_bias(cls, rules: Sequence[BiasRule], bias_LE: Tensor, stats: RouterStats) -> Tensor:
        settings, missing_LE = rules[0].settings, missing_load(rules, stats)
        low_LE = (missing_LE > 1 - settings.below).to(missing_LE.dtype)
        return moved(bias_LE, settings.rate * low_LE, stats)
