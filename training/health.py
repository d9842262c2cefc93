"""The health of the routers over many steps: dead experts, a lasting uneven load, and alarms.

Counters live on the device and follow every step; they come to the host with the numbers of a log
step. They are part of a checkpoint, so a resumed run knows for how long an expert has been dead.

Shape letters: L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from moe.balance import load_fractions
from moe.control import routers_of
from moe.metrics import DEAD_BELOW, RouterStats, evenness, relative_load
from moe.surgery import Change
from training.follower import Follower

if TYPE_CHECKING:
    from training.config.sections import Config

ALARM_VIOLATION = 3.0
"""Largest load over the mean load, minus 1."""
ALARM_ENTROPY = 0.8
"""Entropy of the load over that of an even one."""
ALARM_STEPS = 50
"""Steps without a break until violation or entropy raise an alarm."""
ALARM_DEAD = 200
"""The same for an expert that is dead."""
EARLY_STEPS = 200
"""Steps at a run's start in which routers are still finding their balance."""


def early_until(warmup_steps: int) -> int:
    """The step from which on an uneven load is a fault: before it most heal by themselves."""
    return max(EARLY_STEPS, warmup_steps)


class HealthCounters(NamedTuple):
    """Consecutive steps, float32 so that they travel with everything else."""

    dead_LE: Tensor
    """For which the expert has had less than a tenth of the mean load."""
    uneven_L: Tensor
    """For which the layer's violation has been above `ALARM_VIOLATION`."""
    narrow_L: Tensor
    """For which its load entropy has been below `ALARM_ENTROPY`."""


class RoutingHealth(Follower):
    """`HealthCounters` that follow every step."""

    def __init__(self, layers: int, experts: int, device: torch.device | str = "cpu") -> None:
        self.dead_LE = torch.zeros(layers, experts, device=device)
        self.uneven_L = torch.zeros(layers, device=device)
        self.narrow_L = torch.zeros(layers, device=device)

    @staticmethod
    def make(
        config: Config, model: nn.Module, optimizer: object, device: torch.device, steps: int
    ) -> RoutingHealth | None:
        """None without experts."""
        routers = routers_of(model)
        if not routers:
            return None
        return RoutingHealth(len(routers), routers[0].config.num_experts, device)

    def counters(self) -> HealthCounters:
        return HealthCounters(self.dead_LE, self.uneven_L, self.narrow_L)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "health/dead": self.dead_LE.view(-1),
            "health/uneven": self.uneven_L,
            "health/narrow": self.narrow_L,
        }

    @torch.no_grad()
    def after_update(self, stats: RouterStats, applied: Tensor) -> None:
        """No counter moves in a step that was skipped."""
        share_LE, experts = load_fractions(stats.counts_E), stats.experts
        even_L = evenness(torch.special.entr(share_LE).sum(-1), experts)
        counts = (stats.tokens > 0) & (applied > 0)
        for counter, holds in (
            (self.dead_LE, relative_load(stats) < DEAD_BELOW),
            (self.uneven_L, share_LE.amax(-1) * experts - 1 > ALARM_VIOLATION),
            (self.narrow_L, even_L < ALARM_ENTROPY),
        ):
            counted = counts.view(-1, *(1,) * (counter.dim() - 1))
            counter.copy_(torch.where(counted, torch.where(holds, counter + 1, 0.0), counter))

    def expert_changed(self, change: Change, step: int) -> None:
        self.dead_LE[change.layer, change.expert] = 0.0

    def metrics(self) -> dict[str, Tensor]:
        """Per layer: the longest time that an expert has been dead, and how many
        have been for `ALARM_DEAD` steps."""
        return {
            "dead_steps": self.dead_LE.amax(-1).double(),
            f"dead_{ALARM_DEAD}": (self.dead_LE >= ALARM_DEAD).sum(-1).double(),
        }


@dataclass
class Alarms:
    """Tells of each lasting fault once, again only after it was over or the run no longer early.

    Layers that a fault begins in at the same time share one alarm.
    """

    sounding: set[tuple[str, int, bool]] = field(default_factory=set)

    def new(self, counters: HealthCounters, early: bool = False) -> list[dict[str, Any]]:
        """Alarms that begin now: fault, MoE layers, the longest of their steps, early, text.

        Args:
            counters: on the host.
            early: the run has only begun (`early_until`).
        """
        dead_LE, uneven_L, narrow_L = counters
        faults: dict[str, list[tuple[int, int]]] = {
            "max_violation": _lasting(uneven_L, ALARM_STEPS),
            "load_entropy": _lasting(narrow_L, ALARM_STEPS),
            "dead_experts": _lasting(dead_LE.amax(-1), ALARM_DEAD),
        }
        dead_L = (dead_LE >= ALARM_DEAD).sum(-1).tolist()
        found: list[dict[str, Any]] = []
        for kind, layers in faults.items():
            new = [(layer, n) for layer, n in layers if (kind, layer, early) not in self.sounding]
            told = early and any(kind == other for other, _, _ in self.sounding)
            if not new or told:  # early, one line is enough for all layers
                continue
            numbers, steps = [layer for layer, _ in new], max(n for _, n in new)
            dead = sum(dead_L[layer] for layer in numbers)
            text = {
                "max_violation": f"max_violation has been above {ALARM_VIOLATION:g}",
                "load_entropy": f"load_entropy has been below {ALARM_ENTROPY:g}",
                "dead_experts": f"{dead} expert{'s' * (dead != 1)} had less than a tenth of the "
                "mean load",
            }[kind]
            where = f"MoE layer{'s' * (len(new) > 1)} {_ranges(numbers)}"
            calm = "early, often heals by itself: " if early else ""
            alarm = {"fault": kind, "layers": numbers, "steps": steps, "early": early}
            if kind == "dead_experts":
                alarm["experts"] = {
                    str(layer): (dead_LE[layer] >= ALARM_DEAD).nonzero().flatten().tolist()[:32]
                    for layer in numbers
                }
            found.append(alarm | {"text": f"{calm}{where}: {text} for {steps} steps"})
        self.sounding = {
            (kind, layer, early) for kind, layers in faults.items() for layer, _ in layers
        }
        return found


def _lasting(steps_L: Tensor, after: int) -> list[tuple[int, int]]:
    """(layer, steps) of the counters that have reached `after`."""
    return [(layer, int(n)) for layer, n in enumerate(steps_L.tolist()) if n >= after]


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as text: 0 to 3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    shown = (f"{p[0]} to {p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts)
    return ", ".join(shown)
