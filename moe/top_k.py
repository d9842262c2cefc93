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

import torch
from torch import Tensor

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
