"""The selection bias of DeepSeek-V3: a fixed step up or down.

b += rate * sign(mean load - load)          (Wang et al., arXiv 2408.15664)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.rules.bias import BiasRule, BiasSettings, missing_load, moved
from moe.types import Form, RouterStats


class SignBias(BiasSettings):
    """Up for experts below the mean load, down for those above (arXiv 2408.15664)."""

    line: ClassVar = (
        "you want balance without a balance loss; in short runs with rate 0.01",
        "none",
        "violation 1.9 with rate 1e-2, 2.8 with 1e-3 after 300 steps",
    )

    kind: Literal["sign"] = "sign"
    rate: Annotated[float, Field(gt=0)] = 1e-3
    """Step of the bias."""

    def build(self, form: Form, device: torch.device | str | None = None) -> BiasRule:
        return _SignBias(self, form, device)


class _SignBias(BiasRule):
    @classmethod
    def next_bias(cls, rules: Sequence[BiasRule], bias_LE: Tensor, stats: RouterStats) -> Tensor:
        return moved(bias_LE, rules[0].settings.rate * missing_load(rules, stats).sign(), stats)
