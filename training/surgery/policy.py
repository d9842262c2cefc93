"""Who comes and goes, and when: pure functions of a config and of numbers on the host.

Changes are asked for by `experts.events` at fixed steps, and by `experts.policy`: for experts that
are dead (revive), or by what experts are worth (replace, resize).

Shape letters: L MoE layers, E slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe.surgery import Change, move_rows
from training.config.export_compat import last_acting_step
from training.health import ALARM_DEAD
from training.surgery.checks import decides

if TYPE_CHECKING:
    from training.config.sections import Config
    from training.surgery.config import Deciding, ExpertEvent


@dataclass(frozen=True)
class Seen:
    """What decisions are made from, on the host."""

    active_LE: Tensor
    """bool"""
    counts_LE: Tensor
    """Of the last step."""
    dead_LE: Tensor
    """Steps without load."""
    importance_LE: Tensor | None = None
    load_LE: Tensor | None = None
    low_LE: Tensor | None = None
    changed_L: Tensor | None = None
    family_LE: Tensor | None = None
    k: int = 1
    """Families that a token needs to choose from."""

    def spare(self, layer: int) -> Tensor:
        """Which experts may go: K families or more are left without any one; bool [E]."""
        active_E = self.active_LE[layer]
        if self.family_LE is None:
            return active_E
        family_E = self.family_LE[layer]
        several_E = ((family_E[:, None] == family_E) & active_E).sum(dim=1) > 1
        return active_E & (several_E | (len(family_E[active_E].unique()) > self.k))

    def least(self, layer: int, among_E: Tensor | None = None) -> int:
        """The expert of least importance, of all or of some (bool)."""
        among_E = self.active_LE[layer] if among_E is None else among_E
        return int(self.importance_LE[layer].masked_fill(~among_E, torch.inf).argmin())

    def neediest(self, layer: int) -> int:
        """The expert of largest load times importance."""
        need_E = self.load_LE[layer] * self.importance_LE[layer]
        return int(need_E.masked_fill(~self.active_LE[layer], -torch.inf).argmax())

    def follow(self, change: Change) -> None:
        """Take a change for made."""
        self.active_LE[change.layer, change.expert] = change.parent is not None
        for rows_LE in (self.importance_LE, self.load_LE, self.family_LE):
            if rows_LE is not None:
                move_rows(rows_LE[change.layer], change)

    def free(self, layer: int) -> int:
        """The first free slot; -1 if there is none."""
        free = (~self.active_LE[layer]).nonzero().flatten().tolist()
        return free[0] if free else -1


def choose_revivals(seen: Seen, after: int) -> list[Change]:
    """At most one in each layer: the expert that has been dead longest, if for `after` steps, as a
    copy of the one with most tokens. None that its layer cannot spare."""
    found = []
    for layer, (dead_E, counts_E) in enumerate(zip(seen.dead_LE, seen.counts_LE)):
        dead_E = dead_E.masked_fill(~seen.spare(layer), 0)
        expert = int(dead_E.argmax())
        if dead_E[expert] >= after:
            reason = f"dead for {int(dead_E[expert])} steps"
            found.append(Change("revive", expert, int(counts_E.argmax()), layer, reason))
    return found


def scheduled(events: Sequence[ExpertEvent], step: int, seen: Seen) -> list[Change]:
    """The changes that the config has for the end of this step; `seen` follows them."""
    found = []
    for event in events:
        if event.step != step:
            continue
        layers = range(len(seen.active_LE)) if event.layer is None else (event.layer,)
        for layer in layers:
            if event.kind == "retire":
                expert = seen.least(layer) if event.expert is None else event.expert
                found.append(Change("retire", expert, None, layer, "scheduled"))
            else:
                parent = seen.neediest(layer) if event.expert is None else event.expert
                slot = event.slot
                if slot is None:
                    slot = seen.free(layer) if event.kind == "clone" else seen.least(layer)
                found.append(Change(event.kind, slot, parent, layer, "scheduled"))
            seen.follow(found[-1])
    return found


def decide(
    policy: Deciding, seen: Seen, step: int, limits: tuple[int, int], may_clone: bool = True
) -> tuple[list[Change], Tensor]:
    """What the policy wants after a step, at most one change in a layer.

    Args:
        limits: fewest and most experts of a layer.
        may_clone: whether copies could still come to work.

    Returns:
        The changes, and `low_LE` after this decision.
    """
    low_LE, found = torch.zeros_like(seen.low_LE), []
    for layer, active_E in enumerate(seen.active_LE):
        importance_E = seen.importance_LE[layer]
        median = importance_E[active_E].median()
        below_E = active_E & (importance_E < policy.retire_below * median)
        low_LE[layer] = torch.where(below_E, seen.low_LE[layer] + 1, 0.0)
        if step - seen.changed_L[layer] < policy.cooldown:
            continue
        idle_E = (low_LE[layer] >= policy.retire_after) | (seen.dead_LE[layer] >= ALARM_DEAD)
        idle_E &= seen.spare(layer)
        count, parent = int(active_E.sum()), seen.neediest(layer)
        mean = seen.load_LE[layer, active_E].mean().clamp(min=1e-20)
        load = float(seen.load_LE[layer, parent] / mean)
        worst = seen.least(layer, idle_E)
        why = f"importance {_ratio(importance_E[worst], median)} of the median"
        need = f"copied one has {load:.2f} times the mean load"
        if policy.kind == "replace":
            if idle_E.any() and worst != parent and may_clone:
                found.append(Change("revive", worst, parent, layer, f"{why}; {need}"))
        elif idle_E.any() and count > limits[0]:
            found.append(Change("retire", worst, None, layer, why))
        elif load > policy.clone_above and count < limits[1] and may_clone:
            found.append(Change("clone", seen.free(layer), parent, layer, need))
    return found, low_LE


def _ratio(value: Tensor, median: Tensor) -> str:
    return f"{float(value / median.clamp(min=1e-20)):.2g}"


def level(seen: Seen) -> list[Change]:
    """What makes all layers have as many experts as the one with fewest: those of least importance
    of those that can be spared retire; `seen` follows them."""
    fewest, found = int(seen.active_LE.sum(1).min()), []
    for layer, active_E in enumerate(seen.active_LE):
        for _ in range(int(active_E.sum()) - fewest):
            slot = seen.least(layer, seen.spare(layer))
            found.append(Change("retire", slot, None, layer, "layers are levelled"))
            seen.follow(found[-1])
    return found


@dataclass(frozen=True)
class Calendar:
    """The steps of a run after which experts may change, as its config has them."""

    events: frozenset[int]
    every: int | None
    """Of the policy's decisions."""
    level_at: int | None
    """Step after which layers are brought to one number, and left alone from then on."""
    clone_until: int
    """Last step after which a policy makes copies."""

    def due(self, step: int) -> bool:
        """Whether anything may happen after this step."""
        return step in self.events or step == self.level_at or self.decides(step)

    def decides(self, step: int) -> bool:
        """Whether the policy decides after this step."""
        on = self.every is not None and step % self.every == 0
        return on and (self.level_at is None or step < self.level_at)


def calendar(config: Config, steps: int) -> Calendar:
    """When experts may change in a run of so many steps."""
    experts = config.expert_changes
    every = experts.policy.every if decides(config) else None
    ends = [
        last
        for place in ("experts.policy", "experts.events")
        if (last := last_acting_step(config, place, steps)) is not None
    ]
    return Calendar(
        events=frozenset(event.step for event in experts.events),
        every=every,
        level_at=min(ends, default=None),
        clone_until=last_release(config, steps) - (every or 0),
    )


def last_release(config: Config, steps: int) -> int:
    """Last step after which tokens may find a dormant copy."""
    if config.expert_changes.copies.kind == "family":
        return last_acting_step(config, "experts.copies", steps) or steps
    if config.expert_changes.copies.kind != "dormant":
        return steps
    bias, last_bias = config.router.bias, last_acting_step(config, "router.bias", steps)
    ends = [steps, bias.freeze_at or steps]
    if last_bias is not None:
        ends.append(last_bias - config.router.end_steps)
    return min(ends) - 1
