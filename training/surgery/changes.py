"""Experts that come and go while a model trains.

Changes are made between a step and the next, at log steps, whose numbers are on the host anyway.
They are the same on all processes: they follow from sums over all of them. What moves is the
router's state, its row and the expert's weights, in the float32 master weights and in the
optimizer's states.

Shape letters: L MoE layers, E slots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from moe.control import routers_of, stacked
from moe.metrics import to_host
from moe.surgery import Change, change_state, noise_for
from parallel.flat_shard import local_of, read_range, write_range
from training.faults import RunFailed
from training.surgery.checks import least_experts, revives_dead
from training.surgery.importance import ExpertImportance, layer_names
from training.surgery.policy import Seen, calendar, choose_revivals, decide, level, scheduled

if TYPE_CHECKING:
    from parallel.engines.base import Engine
    from training.run_state import RunState

WEIGHTS = ("w1", "w2", "router.weight")


@torch.no_grad()
def make_changes(
    model: nn.Module,
    optimizer: Engine,
    changes: Sequence[Change],
    *,
    dormant: bool,
    noise: float,
    seed: int,
    step: int,
) -> None:
    """Make changes in the routers' state, the master weights, the optimizer's states and the model.

    All processes call it alike; a row that they share is put together and each keeps its part.

    Args:
        dormant: whether copies begin without tokens.
        noise: relative to the deviation of the copied weights.
        seed, step: fix the noise, so that all processes and a resumed run draw the same.

    Raises:
        ValueError: a change that cannot be.
    """
    routers, names = routers_of(model), layer_names(model)
    held, shapes = optimizer.tensors(), optimizer.shapes()
    for change in changes:
        router = routers[change.layer]
        slots = router.config.num_experts
        change_state(router, change, dormant and change.kind != "retire")
        for parameter in WEIGHTS:
            name = names[change.layer] + parameter
            size = torch.Size(shapes[name]).numel() // slots
            for kind in ("weights", *optimizer.states(name)):
                value = held[f"{kind}/{name}"]
                if change.parent is not None:
                    first = change.parent * size
                    row_X = read_range(value, first, first + size, router.weight.device)
                elif kind == "weights":
                    continue  # out of reach, and needed by nobody
                else:
                    row_X = torch.zeros(size, device=local_of(value).device)
                if kind == "weights" and noise:
                    row_X += noise_for(
                        row_X.float(), noise, f"{seed}/{step}/{name}/{change.expert}"
                    )
                write_range(value, change.expert * size, row_X)
    optimizer.loaded()  # the model's own weights follow the master weights


@dataclass(frozen=True)
class Done:
    """Changes that were made together, or would have been in a dry run."""

    changes: list[Change]
    dry: bool = False
    experts: list[int] | None = None
    """Of each layer, afterwards."""
    seconds: float | None = None
    """That the changes took."""
    probe_loss: tuple[float, float] | None = None
    """Loss of the probe before and after."""


def change_experts(state: RunState) -> list[Done]:
    """What is due after the step just logged; all that was done. All processes call it alike."""
    config, step = state.config, state.step
    after, times = revives_dead(config), calendar(config, state.steps)
    if state.last_window is None or state.last_window.counts_LE is None:
        return []
    if after is None and not times.due(step):
        return []
    seen = look(state)
    changes = scheduled(config.expert_changes.events, step, seen)
    done: list[Done] = []
    if step == times.level_at:
        changes += level(seen)
    elif times.decides(step):
        policy, least = config.expert_changes.policy, least_experts(config)
        low, high = getattr(policy, "min_experts", None), getattr(policy, "max_experts", None)
        limits = (low or least, high or config.model.config.num_experts)
        wanted, low_LE = decide(policy, seen, step, limits, step <= times.clone_until)
        state.train.follower(ExpertImportance).low_LE.copy_(low_LE)
        wanted = [change for change in wanted if not _touches(change, changes)]
        if policy.dry_run:
            done += [Done(wanted, dry=True)] if wanted else []
        else:
            changes += wanted
    dormant = config.expert_changes.copies.kind == "dormant"
    done += _make(state, changes, dormant=dormant) if changes else []
    if after is not None:
        revivals = [c for c in choose_revivals(seen, after) if not _touches(c, changes)]
        done += _make(state, revivals, dormant=False) if revivals else []
    return done


def _touches(change: Change, others: Sequence[Change]) -> bool:
    return any(change.layer == other.layer for other in others)


def look(state: RunState) -> Seen:
    """The numbers of the last step, and of the averages; waits for the device."""
    window, routers = state.last_window, routers_of(state.model)
    importance = state.train.follower(ExpertImportance)
    names = () if importance is None else ("importance_LE", "load_LE", "low_LE", "changed_L")
    numbers = {name: getattr(importance, name) for name in names}
    numbers["family_LE"] = stacked(routers, "family_E")
    active_LE, numbers = to_host((stacked(routers, "active_E"), numbers))
    counts_LE = window.counts_LE
    return Seen(
        torch.ones_like(counts_LE, dtype=torch.bool) if active_LE is None else active_LE.bool(),
        counts_LE,
        window.health.dead_LE,
        k=routers[0].training_k,
        **numbers,
    )


def _make(state: RunState, changes: list[Change], dormant: bool) -> list[Done]:
    before = state.probe.loss()
    start = time.perf_counter()
    try:
        make_changes(
            state.model,
            state.train.optimizer,
            changes,
            dormant=dormant,
            noise=state.config.expert_changes.copies.noise,
            seed=state.config.run.seed,
            step=state.step,
        )
    except ValueError as error:  # events that the policy has left no room for
        raise RunFailed(f"step {state.step}: {error}") from error
    for change in changes:
        for follower in state.train.followers:
            follower.expert_changed(change, state.step)
    active_LE, experts = stacked(routers_of(state.model), "active_E"), None
    if active_LE is not None:  # waits for all of it
        experts = [int(count) for count in active_LE.sum(dim=1).tolist()]
    elif state.device.type == "cuda":
        torch.cuda.synchronize(state.device)
    seconds = time.perf_counter() - start
    after = state.probe.loss()
    state.probe.refresh_baseline()
    loss = None if before is None else (before, after)
    return [Done(changes, experts=experts, seconds=seconds, probe_loss=loss)]
