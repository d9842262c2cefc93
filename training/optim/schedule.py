"""Schedules of the learning rate and of the experts per token: pure functions of the step.

Nothing here holds state, so nothing has to be saved, and a resumed run cannot be one step ahead or
behind. Steps count from 0. A step that is skipped (NaN, a spike) still advances the schedule: the
learning rate belongs to the position in the data, and two runs over the same data stay comparable
step by step.

The end of every decay is reached *after* the last step (step `steps` itself is never taken), so no
step is wasted on a learning rate of zero.
"""

from __future__ import annotations

import math

from moe.rules.top_k import TopKSchedule
from training.config.sections import Config
from training.optim.config import SCHEDULES, OptimConfig


def lr_factor(
    step: int,
    *,
    steps: int,
    kind: str = "wsd",
    warmup_steps: int = 0,
    decay_fraction: float = 0.2,
    min_ratio: float = 0.0,
) -> float:
    """The learning rate of `step` as a part of the peak, in [0, 1].

    Warm-up is linear: step s has (s + 1) / warmup_steps, so the first step moves already and step
    `warmup_steps - 1` is the first with the full rate. Then:

    - ``constant``: 1.
    - ``linear``, ``cosine``: from 1 down to `min_ratio` over the remaining steps.
    - ``wsd`` (warm-up, stable, decay): 1 until the last `decay_fraction` of all steps, then along
      1 - sqrt(x) down to `min_ratio`. The shape is the best of those compared by Hägele et al.,
      "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (arXiv
      2405.18392). Its stable part does not depend on `steps`: a run can be made longer before the
      decay starts.

    Args:
        step: the step about to be taken, from 0.
        steps: all steps of the run.

    Raises:
        ValueError: an unknown kind, a negative step, or a run without steps.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"optim.schedule.kind={kind!r} must be one of {', '.join(SCHEDULES)}")
    if step < 0 or steps < 1:
        raise ValueError(f"lr_factor: step={step} must be >= 0 and steps={steps} >= 1")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    start = warmup_steps
    if kind == "wsd":
        start = max(warmup_steps, steps - round(decay_fraction * steps))
    if step < start:
        return 1.0
    # A resumed run may have been shortened to fewer steps than it has taken: stay at the end.
    x = min(1.0, (step - start) / max(1, steps - start))
    shape = {
        "linear": 1.0 - x,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * x)),
        "wsd": 1.0 - math.sqrt(x),
    }[kind]
    return min_ratio + (1.0 - min_ratio) * shape


def warmup_steps(wanted: int, steps: int) -> int:
    """Steps of warm-up in a run of `steps`: as wanted (`optim.schedule.warmup_steps`) if the run
    is longer than that, else a tenth of the run."""
    return wanted if wanted < steps else steps // 10


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of `step` (from 0) by the `optim` section, before group multipliers."""
    return optim.lr * lr_factor(
        step,
        steps=steps,
        kind=optim.schedule.kind,
        warmup_steps=warmup_steps(optim.schedule.warmup_steps, steps),
        decay_fraction=getattr(optim.schedule, "decay_fraction", 0.0),
        min_ratio=getattr(optim.schedule, "min_lr_ratio", 0.0),
    )


def top_k_schedule(config: Config, steps: int) -> TopKSchedule | None:
    """Experts per token over a run of `steps` steps; None where their number is constant."""
    top_k = config.router.top_k
    if top_k is None:
        return None
    return top_k.schedule(config.model.config.num_experts_per_tok, steps)
