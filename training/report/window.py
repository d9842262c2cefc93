"""What a log step reads of the steps since the last one: the only wait for the device.

Shape letters: L MoE layers, E experts, W steps of the window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe.metrics import layer_metrics, model_metrics, to_host
from parallel import gather
from parallel.engines.base import Outcome
from training.health import HealthCounters, RoutingHealth
from training.step import TERMS

if TYPE_CHECKING:
    from training.step import StepResult, TrainState

REASONS = {1: "not finite", 2: "spike", 3: "after a stop"}


@dataclass(frozen=True)
class Skipped:
    """A step of the window that was not applied."""

    step: int
    reason: str
    loss: float
    grad_norm: float
    lr: float
    rows: list[list[int]]
    """[source, epoch, row] of all rows of the step over all processes."""


@dataclass(frozen=True)
class Window:
    """What a log step reads of the steps since the last one."""

    metrics: dict[str, Any]
    """Of the last step."""
    losses: dict[int, float]
    """Step → its loss."""
    skipped: Sequence[Skipped] = ()
    counts_LE: Tensor | None = None
    """Tokens per expert in the last step, on the host; None without experts."""
    health: HealthCounters | None = None
    """On the host."""


def read_window(
    state: TrainState, results: Sequence[StepResult], extra: Mapping[str, Tensor] | None = None
) -> Window:
    """The numbers of the steps since the last log step; all processes call it alike.

    Everything comes over in one transfer.

    Args:
        extra: further metrics, scalars on the device.
    """
    last = results[-1]
    layers = {} if last.stats is None else layer_metrics(last.stats)
    whole = dict(extra or {})
    for follower in state.followers:
        for name, value in follower.metrics().items():
            (layers if value.dim() else whole)[name] = value
    health = state.follower(RoutingHealth)
    numbers_W, layers, over_layers, total, whole, counts_LE, counters = to_host(
        (
            torch.stack([result.numbers for result in results]),
            layers,
            model_metrics(layers),
            state.optimizer.guard.skipped,
            whole,
            last.stats.counts_E if last.stats is not None else None,
            health.counters() if health is not None else None,
        )
    )
    names = [*TERMS, *Outcome._fields, *last.groups]
    table = [dict(zip(names, row)) for row in numbers_W.tolist()]
    metrics: dict[str, Any] = {
        "step": last.step,
        "loss": table[-1]["loss"],
        "grad_norm": table[-1]["grad_norm"],
        **{name: table[-1][name] for name in last.groups},
        "skipped_steps": int(total),
    }
    if layers:
        metrics |= {name: value.item() for name, value in over_layers.items()}
        metrics |= {name: table[-1][name] for name in ("balance_loss", "z_loss")}
        metrics |= {
            f"layers/{layer}/{name}": value
            for name, values in layers.items()
            for layer, value in enumerate(values.tolist())
        }
    metrics |= {name: value.item() for name, value in whole.items()}
    losses = {result.step: row["loss"] for result, row in zip(results, table)}
    skipped = _skipped(state, [(r, row) for r, row in zip(results, table) if row["reason"]])
    return Window(metrics, losses, skipped, counts_LE, counters)


def _skipped(
    state: TrainState, bad: Sequence[tuple[StepResult, dict[str, float]]]
) -> list[Skipped]:
    if not bad:  # all processes see the same reasons, so all go on or none
        return []
    parts = gather(state.world, [result.rows for result, _ in bad])
    return [
        Skipped(
            step=result.step,
            reason=REASONS[int(row["reason"])],
            loss=row["loss"],
            grad_norm=row["grad_norm"],
            lr=result.lr,
            rows=[list(place) for part in parts for place in part[number]],
        )
        for number, (result, row) in enumerate(bad)
    ]
