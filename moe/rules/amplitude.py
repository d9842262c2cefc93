"""Experimental: probabilities are squared absolute values of complex amplitudes, two rows of the
router's weight an expert.

    p_e = |a_e|² / sum of |a|²     as softmax(log |a|²)

Classical sampling, no family has it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe.rules.base import Export, Rule, RuleSettings
from moe.types import Form

# Added to |a|²: an amplitude of 0 has a finite logarithm.
AMPLITUDE_EPS = 1e-20


class Amplitudes(RuleSettings):
    """Experimental: routers of two rows an expert, the real and imaginary part of an amplitude
    whose squared absolute value is the probability. Classical sampling, no family has it."""

    export: ClassVar[Export] = "never"
    lacks: ClassVar[str] = "probabilities of amplitudes"
    rows: ClassVar[int] = 2
    line: ClassVar = (
        "experiments",
        "one more weight row per expert",
        "no effect seen (±0.32); worse than softmax in a toy task",
    )

    kind: Literal["amplitude"] = "amplitude"

    def build(self, form: Form, device: torch.device | str | None = None) -> Rule:
        return _Amplitudes(self, form, device)


class _Amplitudes(Rule):
    def logits(self, row_TR: Tensor) -> Tensor:
        # rows 2e and 2e + 1 are real and imaginary part of a_e
        return row_TR.unflatten(1, (-1, 2)).square().sum(2).add(AMPLITUDE_EPS).log()
