"""The health of the routers over many steps: dead experts, lasting imbalance, and alarms.

Counters live on the device and follow every step; they come to the host with the numbers of a log
step. They are part of a checkpoint, so a resumed run knows for how long an expert has been dead.

Shape letters: L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe.balance import load_fractions
from moe.metrics import DEAD_BELOW, RouterStats, evenness, relative_load

ALARM_VIOLATION = 3.0
"""Largest load over the mean load, minus 1."""
ALARM_ENTROPY = 0.8
"""Entropy of the load over that of an even one."""
ALARM_STEPS = 50
"""Steps without a break until violation or entropy raise an alarm."""
ALARM_DEAD = 200
"""The same for an expert that is dead."""


class RoutingHealth:
    """Counters of consecutive steps, float32 so that they travel with everything else.

    Attributes:
        dead_LE: steps for which the expert has had less than a tenth of the mean load.
        uneven_L: steps for which the layer's violation has been above `ALARM_VIOLATION`.
        narrow_L: steps for which its load entropy has been below `ALARM_ENTROPY`.
    """

    def __init__(self, layers: int, experts: int, device: torch.device | str = "cpu") -> None:
        self.dead_LE = torch.zeros(layers, experts, device=device)
        self.uneven_L = torch.zeros(layers, device=device)
        self.narrow_L = torch.zeros(layers, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: flat views to read from and load into."""
        return {
            "health/dead": self.dead_LE.view(-1),
            "health/uneven": self.uneven_L,
            "health/narrow": self.narrow_L,
        }

    @torch.no_grad()
    def update(self, stats: RouterStats, applied: Tensor | None = None) -> None:
        """Follow a step; nothing is read back.

        Args:
            stats: [L, ...], of the whole step.
            applied: 0 if the step was skipped: no counter moves.
        """
        share_LE, experts = load_fractions(stats.counts_E), stats.experts
        even_L = evenness(torch.special.entr(share_LE).sum(-1), experts)
        counts = stats.tokens > 0 if applied is None else (stats.tokens > 0) & (applied > 0)
        for counter, holds in (
            (self.dead_LE, relative_load(stats) < DEAD_BELOW),
            (self.uneven_L, share_LE.amax(-1) * experts - 1 > ALARM_VIOLATION),
            (self.narrow_L, even_L < ALARM_ENTROPY),
        ):
            counted = counts.view(-1, *(1,) * (counter.dim() - 1))
            counter.copy_(torch.where(counted, torch.where(holds, counter + 1, 0.0), counter))

    def metrics(self) -> dict[str, Tensor]:
        """Per layer, on the device: the longest time that an expert has been dead, and how many
        have been for `ALARM_DEAD` steps."""
        return {
            "dead_steps": self.dead_LE.amax(-1).double(),
            f"dead_{ALARM_DEAD}": (self.dead_LE >= ALARM_DEAD).sum(-1).double(),
        }


@dataclass
class Alarms:
    """Tells of each lasting fault once, again only after it was over or the run no longer early."""

    sounding: set[tuple[str, int, bool]] = field(default_factory=set)

    def new(
        self, uneven_L: Tensor, narrow_L: Tensor, dead_LE: Tensor, early: bool = False
    ) -> list[dict[str, Any]]:
        """Alarms that begin now, from counters on the host: fault, MoE layer, steps, early, text.

        Args:
            early: the run has only begun (`training.logging.early_until`).
        """
        found: list[dict[str, Any]] = []
        now: set[tuple[str, int, bool]] = set()
        calm = "early, often heals by itself: " if early else ""

        def check(kind: str, layer: int, steps: float, after: int, text: str, **more: Any) -> None:
            if steps < after:
                return
            now.add((kind, layer, early))
            if (kind, layer, early) not in self.sounding:
                text = f"{calm}MoE layer {layer}: {text} for {steps:.0f} steps"
                values = {"fault": kind, "layer": layer, "steps": int(steps), "early": early}
                found.append(values | {"text": text} | more)

        for layer, (uneven, narrow) in enumerate(zip(uneven_L.tolist(), narrow_L.tolist())):
            text = f"the fullest expert has had over {ALARM_VIOLATION + 1:g} times the mean load"
            check("imbalance", layer, uneven, ALARM_STEPS, text)
            text = f"the entropy of the load has been below {ALARM_ENTROPY:g} of an even one's"
            check("narrow_load", layer, narrow, ALARM_STEPS, text)
        for layer, dead_E in enumerate(dead_LE):
            experts = (dead_E >= ALARM_DEAD).nonzero().flatten().tolist()
            if experts:
                text = f"{len(experts)} experts have had less than a tenth of the mean load"
                longest = float(dead_E.max())
                check("dead_experts", layer, longest, ALARM_DEAD, text, experts=experts[:32])
        self.sounding = now
        return found
