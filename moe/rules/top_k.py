"""How many experts a token uses, as training goes on: from many to few.

    schedule = TopKSchedule("geometric", start=16, end=4, ramp_steps=1000)
    schedule.k(1), schedule.k(1001)          # 16, 4

A schedule is a pure function of the number of the step, so a resumed run has the K that it would
have had. Every change of K changes the shapes of a step: torch.compile compiles anew and a captured
CUDA graph is captured anew. `soft` computes the next whole K and lets the last of them fade out, so
that the output has no jumps; then only the number of computed experts changes at whole values.

Evaluation and export always use the end of the schedule.

Shape letters: T tokens, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.rules.base import Rule, RuleSettings
from moe.scores import RENORMALISED
from moe.types import Form

KINDS = ("steps", "linear", "cosine", "geometric")
# The largest fall of K in one step: with renormalised gates and logits of unit spread 16 → 8 raises
# the norm of the output by a third, 16 → 12 by a tenth.
SMALLEST_RATIO = 2 / 3


@dataclass(frozen=True)
class TopKSchedule:
    """K as a function of the step, from 1.

    With q = (step - 1) / ramp_steps, at most 1, and a real number kappa:

        linear      start + (end - start) q
        cosine      end + (start - end) (1 + cos(pi q)) / 2
        geometric   start (end / start)^q
        steps       the last of `levels` that has begun

    Raises:
        ValueError: by field, value and what is allowed.
    """

    kind: str
    start: int
    end: int
    ramp_steps: int = 0
    """Steps in which K falls (all kinds but steps)."""
    levels: tuple[tuple[int, int], ...] = ()
    """steps: (first step with it, K), both in order."""
    soft: bool = False
    """Fade experts out instead of dropping them."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"top_k.kind={self.kind!r} is unknown; allowed: {', '.join(KINDS)}")
        if not 1 <= self.end < self.start:
            raise ValueError(
                f"top_k.start={self.start} must be above num_experts_per_tok={self.end}, where the "
                "schedule ends"
            )
        if self.kind == "steps":
            self._check_levels()
        elif self.ramp_steps < 1:
            raise ValueError(
                f"top_k.over gives {self.ramp_steps} steps; K needs at least 1 to fall"
            )
        if not self.soft:
            self._check_jumps()

    def _check_levels(self) -> None:
        steps = [step for step, _ in self.levels]
        values = [self.start, *(k for _, k in self.levels)]
        if self.soft:
            raise ValueError("top_k.soft=true has no values between the levels of top_k.kind=steps")
        if not self.levels or steps != sorted(set(steps)) or steps[0] < 2:
            raise ValueError(
                f"top_k.levels={[list(pair) for pair in self.levels]} must be [step, K] pairs with "
                "ascending steps from 2 on"
            )
        if values != sorted(set(values), reverse=True) or values[-1] != self.end:
            raise ValueError(
                f"top_k.levels={[list(pair) for pair in self.levels]} must fall from "
                f"top_k.start={self.start} to num_experts_per_tok={self.end}"
            )

    def _check_jumps(self) -> None:
        last = self.start
        for step, k in self.changes():
            if k < last * SMALLEST_RATIO - 1e-9 and k < last - 1:
                raise ValueError(
                    f"top_k.kind={self.kind!r} drops K from {last} to {k} at step {step}: "
                    "the output jumps; allowed: to two thirds at once (levels like 16, 12, 8, "
                    "6, 4), more steps (top_k.over), or top_k.soft=true"
                )
            last = k

    @property
    def last_change(self) -> int:
        """The first step with the final K."""
        return self.levels[-1][0] if self.kind == "steps" else self.ramp_steps + 1

    def kappa(self, step: int) -> float:
        """The real number that K comes from."""
        if self.kind == "steps":
            begun = [k for first, k in self.levels if step >= first]
            return float(begun[-1] if begun else self.start)
        q = min(1.0, max(0, step - 1) / self.ramp_steps)
        if q == 1.0:
            return float(self.end)
        if self.kind == "linear":
            return self.start + (self.end - self.start) * q
        if self.kind == "cosine":
            return self.end + (self.start - self.end) * (1 + math.cos(math.pi * q)) / 2
        return self.start * (self.end / self.start) ** q

    def k(self, step: int) -> int:
        """Experts that are computed for a token: kappa rounded to the nearest whole number (halves
        up), with `soft` the next whole number."""
        kappa = self.kappa(step)
        # the small term: 15.999999999999998 is 16 that went through a power
        return max(self.end, math.ceil(kappa - 1e-9) if self.soft else math.floor(kappa + 0.5))

    def changes(self) -> list[tuple[int, int]]:
        """(step, K) of every step that has another K than the one before."""
        found, last = [], self.start
        for step in range(1, self.last_change + 1):
            if (k := self.k(step)) != last:
                found.append((step, k))
                last = k
        return found


class TopKSettings(RuleSettings):
    """Experts per token fall from `start` to `model.num_experts_per_tok`."""

    line: ClassVar = (
        "comparisons at equal FLOPs",
        "more experts early; one compilation per K",
        "8 → 2 of 32 experts: loss +0.25 ± 0.06, soft +0.25 ± 0.04",
    )

    start: Annotated[int, Field(ge=1)]
    """Experts per token in the first step; `model.num_experts_per_tok` at the end."""

    def schedule(self, end: int, steps: int | None) -> TopKSchedule:
        """Of a run of `steps` steps that ends with `end` experts per token.

        Raises:
            ValueError: by key, value and what is allowed.
        """
        raise NotImplementedError

    def build(self, form: Form, device: torch.device | str | None = None) -> Rule:
        return _ScheduledTopK(self, form, device)

    def check(self, form: Form, router: Any) -> None:
        most = form.choice - getattr(router.bias, "beyond_k", 0)
        if form.start_experts is not None:
            most = min(most, form.start_experts)
        if not form.k < self.start <= most:
            raise ValueError(
                f"router.top_k.start={self.start} must be above num_experts_per_tok={form.k} and "
                f"at most the {most} experts that a token may choose from"
            )
        try:
            schedule = self.schedule(form.k, form.steps)
        except ValueError as error:
            raise ValueError(f"router.{error}") from None
        if form.steps is not None and schedule.last_change > form.steps:
            raise ValueError(
                f"router.top_k.levels reach model.num_experts_per_tok={form.k} at step "
                f"{schedule.last_change}, after the {form.steps} steps of the run"
            )


class _Ramp(TopKSettings):
    needs_steps: ClassVar[bool] = True

    over: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Part of the run in which their number falls."""
    soft: bool = False
    """Let the last of a token's experts fade out instead of dropping it from one step to the
    next."""

    def schedule(self, end: int, steps: int | None) -> TopKSchedule:
        ramp_steps = round(self.over * steps)
        return TopKSchedule(self.kind, self.start, end, ramp_steps, soft=self.soft)


class LinearTopK(_Ramp):
    """Their number falls on a straight line."""

    kind: Literal["linear"] = "linear"


class CosineTopK(_Ramp):
    """Their number falls on half a cosine."""

    kind: Literal["cosine"] = "cosine"


class GeometricTopK(_Ramp):
    """Their number falls by equal factors."""

    kind: Literal["geometric"] = "geometric"


class StepsTopK(TopKSettings):
    """Their number falls at given steps."""

    kind: Literal["steps"] = "steps"
    levels: list[Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)]]
    """[step, experts per token] of each change; the last is `model.num_experts_per_tok`."""

    def schedule(self, end: int, steps: int | None) -> TopKSchedule:
        levels = tuple((step, k) for step, k in self.levels)
        return TopKSchedule(self.kind, self.start, end, levels=levels)


class _ScheduledTopK(Rule):
    """Buffer: kappa [], the real number of experts per token, where the last one fades.

    Attributes:
        k: experts per token now, while training.
        fading: whether the last of them fades out now, by `kappa`.
    """

    def __init__(self, settings: TopKSettings, form: Form, device=None) -> None:
        super().__init__(settings, form, device)
        self.schedule = settings.schedule(form.k, form.steps)
        self.add_state("kappa", () if self.schedule.soft else None, device, form.k)
        self.k, self.fading = form.k, False

    def begin_step(self, step: int) -> str | None:
        before, self.k = self.k, self.schedule.k(step)
        self.fading = self.schedule.soft and step < self.schedule.last_change
        if self.kappa is not None:
            self.kappa.fill_(self.schedule.kappa(step))  # on the device: compiles nothing anew
        if self.k != before:
            return f"each token uses {self.k} experts from now on, no longer {before}"
        return None

    @property
    def phase(self) -> tuple[int, bool]:
        return self.k, self.fading

    @property
    def changes(self) -> int:
        return len(self.schedule.changes()) + self.schedule.soft

    @property
    def scheduled(self) -> bool:
        return self.fading or self.k != self.form.k

    def experts_per_token(self, k: int) -> int:
        return self.k

    def gates(self, gate_TK: Tensor) -> Tensor:
        if not self.fading:
            return gate_TK
        return soften(gate_TK, self.kappa, self.form.norm in RENORMALISED)


def soften(gate_TK: Tensor, kappa: Tensor, renormalise: bool) -> Tensor:
    """Gates of which the last fades out: those of rank j times clip(kappa - j + 1, 0, 1).

    For a whole kappa of K the gates come back bit for bit.

    Args:
        gate_TK: gates in the order of the choice, best first; differentiable.
        kappa: scalar on the device, in (K - 1, K].
        renormalise: keep the sum of each token's gates.
    """
    K = gate_TK.shape[1]
    rank_K = torch.arange(K, device=gate_TK.device, dtype=gate_TK.dtype)
    faded_TK = gate_TK * (kappa.to(gate_TK.dtype) - rank_K).clamp(0.0, 1.0)
    if renormalise:
        before_T1, after_T1 = gate_TK.sum(1, keepdim=True), faded_TK.sum(1, keepdim=True)
        faded_TK = faded_TK * (before_T1 / after_T1.clamp(min=1e-20))
    return torch.where(kappa >= K, gate_TK, faded_TK)
