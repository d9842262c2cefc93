"""Experts drawn while training, without replacement: Gumbel top-K.

exp(log p / temperature) are the weights of a draw; gates are those of the drawn experts. With
`until` the temperature falls to 0 on a straight line, and the end of the run trains the choice that
is exported. (W. Kool et al., "Stochastic Beams and Where to Find Them", arXiv 1903.06059.)
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.rules.base import RouterView, Rule, RuleSettings
from moe.types import Form


class SampledSelection(RuleSettings):
    """While training, experts are drawn without replacement by exp(log p / temperature)."""

    line: ClassVar = (
        "comparisons",
        "noise in training",
        "no effect seen (±0.21); slightly worse than top-K in a toy task",
    )

    kind: Literal["sample"] = "sample"
    temperature: Annotated[float, Field(gt=0)]
    """1 draws by the probabilities; towards 0 the best are taken."""
    until: Annotated[int, Field(ge=1)] | None = None
    """Last step that draws experts: the temperature falls to zero until then, so that the end of
    the run trains the choice that is exported. `null`: drawn to the end."""

    def build(self, form: Form, device: torch.device | str | None = None) -> Rule:
        return _SampledSelection(self, form, device)

    def check(self, form: Form, router: Any) -> None:
        biased = "the family's selection bias"
        if router.bias is not None:
            biased = f"router.bias.kind={router.bias.kind}"
        for wrong, what, allowed in (
            (form.score not in ("softmax", "sigmoid"), f"score={form.score!r}", "softmax, sigmoid"),
            (router.bias is not None or form.biased, biased, "null"),
            (form.groups_kept < form.groups, f"groups_kept={form.groups_kept}", f"{form.groups}"),
            (form.experts == form.k, f"num_experts_per_tok={form.k}", f"below {form.experts}"),
        ):
            if wrong:
                raise ValueError(
                    "router.selection.kind=sample draws by the probabilities of all experts and "
                    f"does not go with {what}; allowed: {allowed}"
                )


class _SampledSelection(Rule):
    """Buffer: temperature [], where it falls. `drawing`: whether a step of training draws now."""

    draws = True

    def __init__(self, settings: SampledSelection, form: Form, device=None) -> None:
        super().__init__(settings, form, device)
        falls = settings.until is not None
        self.add_state("temperature", () if falls else None, device, settings.temperature)
        self.drawing = True

    def begin_step(self, step: int) -> str | None:
        until, before = self.settings.until, self.drawing
        self.drawing = until is None or step <= until
        if self.temperature is not None:
            left = max(0.0, 1.0 - (step - 1) / until)
            self.temperature.fill_(self.settings.temperature * left)  # on the device
        if before and not self.drawing:
            return "each token's best experts are taken from now on, none are drawn"
        return None

    @property
    def phase(self) -> bool:
        return self.drawing

    @property
    def changes(self) -> int:
        return int(self.settings.until is not None)

    def selection(
        self, router: RouterView, x_TD: Tensor, select_TE: Tensor, valid_T: Tensor | None
    ) -> Tensor | None:
        if not (self.drawing and self.training):
            return None
        fixed = self.temperature is None
        temperature = self.settings.temperature if fixed else self.temperature
        return gumbel(select_TE, self.form.score, temperature)


def gumbel(logits_TE: Tensor, score: str, temperature: float | Tensor) -> Tensor:
    """log p / temperature plus Gumbel noise, up to a constant per token.

    The K largest are a draw of K experts without replacement, each time with the probabilities of
    those that are left.
    """
    log_TE = logits_TE if score == "softmax" else torch.nn.functional.logsigmoid(logits_TE)
    noise_TE = torch.empty_like(log_TE).exponential_().log().neg()
    return log_TE / temperature + noise_TE
