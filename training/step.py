"""A training step: forward and backward over the micro-batches, the update, and what follows it.

Normalisation. With m running over all micro-batches of a step on all processes, a step's loss is

    sum_m CE_m / targets  +  sum_m tokens_m / tokens * (balance_coef * balance_m + z_coef * z_m)

where `targets` and `tokens` count the whole step. Gradients are sums over micro-batches and
processes and are never averaged, so loss and gradients do not depend on how the rows are split. A
micro-batch without any target adds zero; a step without any target anywhere is left out by all
processes alike.

Nothing here reads device memory back.

Shape letters: L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from moe import control
from moe.balance import attach_loss, balance_loss
from moe.control import (
    balance_rules,
    needs_update,
    router_losses,
    routers_of,
    update_routers,
)
from moe.metrics import pack
from moe.types import RouterStats
from parallel import World, agree, sum_
from training.device import untouched_rng
from training.follower import Follower
from training.graph import Launch, launch_now

if TYPE_CHECKING:
    from models.transformer import Decoder
    from parallel.engines.base import Engine, Outcome
    from training.data import Batch

F = TypeVar("F", bound=Follower)

TERMS = ("loss", "balance_loss", "z_loss")
"""Loss terms of a step."""


@dataclass(kw_only=True)
class TrainState:
    """A model, what trains it, and how far it is: all that a step needs and changes."""

    model: Decoder
    """The model itself: its config, its buffers, and what evaluation calls."""
    forward: nn.Module
    """What a step calls: the model, or an engine's wrapper around it."""
    optimizer: Engine
    world: World
    device: torch.device
    learning_rate: Callable[[int], float]
    """Of a step by its number, from 1."""
    followers: Sequence[Follower] = ()
    launch: Launch = launch_now
    """Does the device's work of a step, or replays it."""
    step: int = 0
    """Steps begun; between two steps all of them are finished, skipped ones included."""
    tokens: int = 0
    """Valid tokens in the finished steps."""

    def follower(self, kind: type[F]) -> F | None:
        """The follower of this class, if the run has one."""
        return next((each for each in self.followers if isinstance(each, kind)), None)


@dataclass(frozen=True)
class StepTotals:
    """What all processes agree on before a step."""

    targets: int
    """Labels that count, in the whole step."""
    tokens: int
    """Valid tokens of the whole step."""
    stop: bool
    """Some process was asked to stop."""


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device until the next log step."""

    step: int
    lr: float
    tokens: int
    rows: list[tuple[int, int, int]]
    """(source, epoch, row) of this process's rows: the identity of its part of the batch."""
    numbers: Tensor
    """float32: the terms of the loss, the fields of `Outcome`, and the norm of each group."""
    groups: tuple[str, ...]
    """Names of the groups' norms."""
    stats: RouterStats | None
    """Sums over the micro-batches of all processes; [L, E] and [L]."""


def agree_on_step(world: World, batches: Sequence[Batch], stop: bool) -> StepTotals:
    """One small exchange in host memory: the divisors of the loss, and whether to stop before
    it."""
    targets = sum(batch.num_targets for batch in batches)
    tokens = sum(batch.num_tokens for batch in batches)
    targets, tokens, stops = agree(world, [targets, tokens, int(stop)])
    return StepTotals(targets, tokens, stops > 0)


def begin_step(state: TrainState) -> list[str]:
    """Go on to the next step; one sentence for each change of the routing from it on."""
    state.step += 1
    return control.begin_step(state.model, state.step)


def train_step(state: TrainState, batches: Sequence[Batch], totals: StepTotals) -> StepResult:
    """One optimizer step over this process's micro-batches; all processes call it alike."""
    optimizer = state.optimizer
    batches = [batch.to(state.device, non_blocking=True) for batch in batches]
    lr = state.learning_rate(state.step)
    optimizer.routers_frozen = any(router.frozen for router in routers_of(state.model))
    optimizer.set_lr(lr)

    def work(
        batches: Sequence[Batch], targets: Tensor, tokens: Tensor
    ) -> tuple[RouterStats | None, Outcome]:
        stats = forward_backward(state, batches, targets, tokens)
        for follower in state.followers:
            follower.before_update()
        return stats, optimizer.update()

    stats, outcome = state.launch(work, batches, totals.targets, totals.tokens)
    applied = 1 - outcome.skipped
    if stats is not None:
        stats = _over_processes(stats, state.world)
        if not balance_rules(routers_of(state.model)):  # a number to watch: that of the whole step
            optimizer.terms[TERMS.index("balance_loss")] = balance_loss(stats).mean()
        if needs_update(state.model):
            update_routers(state.model, stats, step=state.step, applied=applied)
    for follower in state.followers:
        follower.after_update(stats, applied)
    return StepResult(
        step=state.step,
        lr=lr,
        tokens=totals.tokens,
        rows=[row for batch in batches for row in batch.rows],
        numbers=torch.cat([optimizer.terms, torch.stack(outcome), optimizer.group_norms]),
        groups=tuple(group.metric for group in optimizer.groups),
        stats=stats,
    )


def end_step(state: TrainState, totals: StepTotals) -> None:
    """After a step, trained or left out."""
    state.tokens += totals.tokens
    for follower in state.followers:
        follower.prepare_step(state.step + 1)


def prepare_evaluation(state: TrainState) -> None:
    """After a model was loaded, or made: compute as after the last finished step."""
    control.begin_step(state.model, max(1, state.step))
    for follower in state.followers:
        follower.prepare_step(state.step + 1)


def forward_backward(
    state: TrainState, batches: Sequence[Batch], targets: Tensor, tokens: Tensor
) -> RouterStats | None:
    """Losses and gradients of all micro-batches, into the optimizer; the sum of their router
    statistics, None without experts.

    Args:
        batches: on the device.
        targets, tokens: of the whole step, scalars on the device.
    """
    model, optimizer, routers = state.forward, state.optimizer, routers_of(state.model)
    optimizer.zero_grad()
    load_LE = load_before(state, batches)
    counted = load_LE is not None or not control.counts_step(state.model)
    stats: RouterStats | None = None
    for number, batch in enumerate(batches, 1):
        with optimizer.micro_batch(last=number == len(batches)):
            out = model(batch.tokens_BL, **batch.model_kwargs)
            terms = [out.loss_sum / targets]
            loss = terms[0]
            if out.router is not None:
                seen = out.router.detach()
                stats = seen if stats is None else stats.plus(seen)
                if not counted:  # one micro-batch is the whole step
                    load_LE = sum_(state.world, seen.counts_E.clone())
                auxiliary, values = router_losses(routers, out.router, tokens, load_LE)
                loss = attach_loss(loss, auxiliary)
                terms += values
                for follower in state.followers:
                    follower.after_forward(seen)
            optimizer.backward(loss)
        optimizer.terms[: len(terms)] += torch.stack(terms).detach()
    return stats


def _over_processes(stats: RouterStats, world: World) -> RouterStats:
    """Statistics of the whole step; all sums over processes in one exchange."""
    if world.size == 1:
        return stats
    flat, unpack = pack(stats)
    return unpack(sum_(world, flat))


def load_before(state: TrainState, batches: Sequence[Batch]) -> Tensor | None:
    """Tokens per expert that the balance loss compares with, [L, E], where they are known or found
    before the step; None: those of each micro-batch, or of the one there is.

    A load of the whole step enters the loss of its first micro-batch already, so with several of
    them they all go through the model once more beforehand, without gradient: a third more
    arithmetic, for a loss that no layout and no accumulation changes.
    """
    if len(batches) == 1 or not control.counts_step(state.model):
        return control.known_load(state.model)
    counts_LE = None
    with torch.no_grad(), untouched_rng():
        for batch in batches:
            out = state.forward(
                batch.tokens_BL,
                positions_BL=batch.positions_BL,
                documents=batch.documents,
                valid_BL=batch.valid_BL,
            )
            seen = out.router.counts_E
            counts_LE = seen if counts_LE is None else counts_LE + seen
    return sum_(state.world, counts_LE)
