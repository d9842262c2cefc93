"""The pieces of a training step: forward and backward over micro-batches, and what a log step
reads.

Normalisation. With m running over all micro-batches of a step on all processes, a step's loss is

    sum_m CE_m / targets  +  sum_m tokens_m / tokens * (balance_coef * balance_m + z_coef * z_m)

where `targets` and `tokens` count the whole step. Gradients are sums over micro-batches and
processes and are never averaged, so loss and gradients do not depend on how the rows are split. A
micro-batch without any target adds zero; a step without any target anywhere is left out by all
processes alike.

Nothing here reads device memory back, except `read_window` at log steps (one transfer).

Shape letters: L MoE layers, E experts, W steps of the window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe.balance import (
    attach_loss,
    auxiliary_loss,
    balance_loss,
    flop_weights,
    sequence_loss,
    z_loss,
)
from moe.control import needs_update, routers_of, stacked, update_routers
from moe.metrics import RouterStats, layer_metrics, model_metrics, pack, to_host
from parallel import World, agree, gather, sum_
from training.device import untouched_rng
from training.graph import StepGraph, computation
from training.optim.master import TERMS, MasterAdamW, Outcome

if TYPE_CHECKING:
    from parallel.engine import Engine
    from training.config.router import RouterConfig
    from training.data import Batch
    from training.health import RoutingHealth
    from training.sparsity import Sparsity
    from training.surgery.importance import Worth

REASONS = {1: "not finite", 2: "spike", 3: "after a stop"}


@dataclass(frozen=True)
class StepTotals:
    """What all processes agree on before a step."""

    targets: int
    """Labels that count, in the whole step."""
    tokens: int
    """Valid tokens of the whole step."""
    stop: bool
    """Some process was asked to stop."""


def agree_on_step(world: World, batches: Sequence[Batch], stop: bool) -> StepTotals:
    """One small exchange in host memory: the divisors of the loss, and whether to stop before
    it."""
    targets = sum(batch.num_targets for batch in batches)
    tokens = sum(batch.num_tokens for batch in batches)
    targets, tokens, stops = agree(world, [targets, tokens, int(stop)])
    return StepTotals(targets, tokens, stops > 0)


@dataclass
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


def train_step(
    model: nn.Module,
    optimizer: MasterAdamW | Engine,
    batches: Sequence[Batch],
    totals: StepTotals,
    *,
    step: int,
    lr: float,
    router: RouterConfig,
    world: World,
    device: torch.device,
    keep: LastCounts | None = None,
    health: RoutingHealth | None = None,
    graph: StepGraph | None = None,
    sparsity: Sparsity | None = None,
    worth: Worth | None = None,
) -> StepResult:
    """One optimizer step over this process's micro-batches; all processes call it alike.

    Args:
        model: what is called for forward, `Trainee.forward`.
        optimizer: of one process, or the engine that shards model and optimizer over several.
        step: number of the step, from 1, for the records.
        keep: holds the last finished micro-batch's tokens per expert, in case memory runs out.
        health: counters that follow the step.
        graph: replays the device's work instead of launching it (one process).
        sparsity: masks of the experts' weights.
        worth: averages that do.
    """
    batches = [batch.to(device, non_blocking=True) for batch in batches]
    work_LE = relative_work(model, router, device)
    optimizer.routers_frozen = any(router.frozen for router in routers_of(model))

    def gradients(batches: Sequence[Batch], targets: Tensor, tokens: Tensor) -> RouterStats | None:
        """Forward and backward of all micro-batches; the sum of their statistics."""
        optimizer.zero_grad()
        stats: RouterStats | None = None
        # Without a loss that compares with a load, none has to be found.
        scope = router.balance_scope if router.balance_coef else "micro"
        load_LE = load_before(model, batches, scope, world)
        for number, batch in enumerate(batches, 1):
            with optimizer.micro_batch(last=number == len(batches)):
                out = model(batch.tokens_BL, **batch.model_kwargs)
                terms = [out.loss_sum / targets]
                loss = terms[0]
                if out.router is not None:
                    seen = out.router.detach()
                    stats = seen if stats is None else stats.plus(seen)
                    if scope == "global" and load_LE is None:
                        load_LE = sum_(world, seen.counts_E.clone())
                    auxiliary, values = router_losses(out.router, tokens, router, load_LE, work_LE)
                    loss = attach_loss(loss, auxiliary)
                    terms += values
                    if keep is not None:
                        keep.counts_LE = seen.counts_E
                optimizer.backward(loss)
            optimizer.terms[: len(terms)] += torch.stack(terms).detach()
        if worth is not None:
            worth.before_update()
        return stats

    if graph is None:
        # On the device, as a graph needs them: so both divide in the same way.
        targets, tokens = (
            torch.full((), float(total), device=device) for total in (totals.targets, totals.tokens)
        )
        stats = gradients(batches, targets, tokens)
        if sparsity is not None:
            sparsity.before_update(step)
        outcome = optimizer.step(lr)
        if sparsity is not None:
            sparsity.after_update(step, 1 - outcome.skipped)
    else:
        optimizer.set_lr(lr)
        stats, outcome = graph.run(
            lambda *given: (gradients(*given), optimizer.update()),
            batches,
            totals.targets,
            totals.tokens,
            computation(model),
        )
    if stats is not None:
        stats, applied = _over_processes(stats, world), 1 - outcome.skipped
        if not router.balance_coef:  # nothing but a number to watch: that of the whole step
            optimizer.terms[TERMS.index("balance_loss")] = balance_loss(stats).mean()
        if needs_update(model):
            update_routers(model, stats, step=step, applied=applied)
        if health is not None:
            health.update(stats, applied)
        if worth is not None:
            worth.update(stats, applied)
    return StepResult(
        step=step,
        lr=lr,
        tokens=totals.tokens,
        rows=[row for batch in batches for row in batch.rows],
        numbers=torch.cat([optimizer.terms, torch.stack(outcome), optimizer.group_norms]),
        groups=tuple(group.metric for group in optimizer.groups),
        stats=stats,
    )


def _over_processes(stats: RouterStats, world: World) -> RouterStats:
    """Statistics of the whole step; all sums over processes in one exchange."""
    if world.size == 1:
        return stats
    flat, unpack = pack(stats)
    return unpack(sum_(world, flat))


def router_losses(
    stats: RouterStats,
    step_tokens: Tensor | float,
    router: RouterConfig,
    load_LE: Tensor | None,
    work_LE: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """A micro-batch's share of the auxiliary loss, and of the balance and z values for the log.

    Args:
        load_LE: to compare with; the micro-batch's own when None.
        work_LE: what a token costs an expert, where arithmetic is balanced and not tokens.

    The coefficients weigh means over layers, so a deeper model is not balanced harder.
    """
    layers = stats.tokens.shape[0]
    if work_LE is not None:
        load_LE = (stats.counts_E if load_LE is None else load_LE).detach() * work_LE
    by_sequence = router.balance_scope == "sequence"
    coef = "sequence_coef" if by_sequence else "balance_coef"
    auxiliary = auxiliary_loss(
        stats,
        step_tokens=step_tokens,
        **{coef: router.balance_coef / layers},
        z_coef=router.z_coef / layers,
        counts_E=load_LE,
    )
    with torch.no_grad():
        balance_L = sequence_loss(stats) if by_sequence else balance_loss(stats, load_LE)
        share_L = stats.tokens / step_tokens / layers
        values = [(share_L * value_L).sum() for value_L in (balance_L, z_loss(stats))]
    return auxiliary, values


def relative_work(model: nn.Module, router: RouterConfig, device: torch.device) -> Tensor | None:
    """What a token costs each expert [L, E], where arithmetic is balanced; None for tokens."""
    if router.balance_load != "flops":
        return None
    widths = tuple(router.config.expert_widths for router in routers_of(model))
    return flop_weights(widths, device)


def load_before(
    model: nn.Module, batches: Sequence[Batch], scope: str, world: World
) -> Tensor | None:
    """Tokens per expert that the balance loss compares with, [L, E], where they are known or found
    before the step; None: those of each micro-batch, or of the one there is.

    global: the load of the whole step enters the loss of its first micro-batch already, so with
        several of them they all go through the model once more beforehand, without gradient: a
        third more arithmetic, for a loss that no layout and no accumulation changes.
    lagged: the load of the last step, which costs nothing (and is as independent of the layout).
        Zeros in the first step.
    """
    if scope == "lagged":
        return stacked(routers_of(model), "load_E")
    if scope != "global" or len(batches) == 1 or not routers_of(model):
        return None
    counts_LE = None
    with torch.no_grad(), untouched_rng():
        for batch in batches:
            out = model(
                batch.tokens_BL,
                positions_BL=batch.positions_BL,
                documents=batch.documents,
                valid_BL=batch.valid_BL,
            )
            seen = out.router.counts_E
            counts_LE = seen if counts_LE is None else counts_LE + seen
    return sum_(world, counts_LE)


@dataclass
class LastCounts:
    """Tokens per expert of the last micro-batch that went through the model."""

    counts_LE: Tensor | None = None


# --- time ---------------------------------------------------------------------------------------


@dataclass
class Pace:
    """Speed of training proper: time spent on evaluation and saving does not count."""

    started: float = field(default_factory=time.perf_counter)
    paused: float = 0.0
    laps: int = 0
    steps: int = 0  # of all laps but the first
    seconds: float = 0.0  # likewise

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside is not training time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.paused += time.perf_counter() - start

    def lap(self, steps: int) -> tuple[float, float]:
        """Seconds since the last lap, and seconds per step to expect from here on."""
        now = time.perf_counter()
        seconds = max(now - self.started - self.paused, 1e-9)
        self.started, self.paused = now, 0.0
        self.laps += 1
        # The first lap holds compilation and warm-up; it is used only until there is another.
        if self.laps == 1:
            return seconds, seconds / steps
        self.steps += steps
        self.seconds += seconds
        return seconds, self.seconds / self.steps


# --- log steps ----------------------------------------------------------------------------------


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
    skipped: list[Skipped]
    losses: dict[int, float]
    """Step → its loss."""
    counts_LE: Tensor | None = None
    """Tokens per expert in the last step, on the host; None without experts."""
    health: dict[str, Tensor] = field(default_factory=dict)
    """`RoutingHealth.tensors` on the host."""


def read_window(
    window: Sequence[StepResult],
    world: World,
    skipped_total: Tensor,
    extra: Mapping[str, Tensor] | None = None,
    health: RoutingHealth | None = None,
) -> Window:
    """The numbers of the steps since the last log step; all processes call it alike.

    The one place that waits for the device: everything comes over in one transfer.

    Args:
        extra: further metrics, scalars on the device.
    """
    last = window[-1]
    layers: dict[str, Tensor] = {}
    if last.stats is not None:
        layers = layer_metrics(last.stats) | (health.metrics() if health is not None else {})
    numbers_W, layers, whole, total, extra, counts_LE, counters = to_host(
        (
            torch.stack([result.numbers for result in window]),
            layers,
            model_metrics(layers),
            skipped_total,
            dict(extra or {}),
            last.stats.counts_E if last.stats is not None else None,
            health.tensors() if health is not None else {},
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
        metrics |= {name: value.item() for name, value in whole.items()}
        metrics |= {name: table[-1][name] for name in ("balance_loss", "z_loss")}
        metrics |= {
            f"layers/{layer}/{name}": value
            for name, values in layers.items()
            for layer, value in enumerate(values.tolist())
        }
    metrics |= {name: value.item() for name, value in extra.items()}
    losses = {result.step: row["loss"] for result, row in zip(window, table)}
    bad = [(result, row) for result, row in zip(window, table) if row["reason"]]
    if not bad:
        return Window(metrics, [], losses, counts_LE, counters)
    # All processes see the same reasons, so all come here or none.
    parts = gather(world, [result.rows for result, _ in bad])
    skipped = [
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
    return Window(metrics, skipped, losses, counts_LE, counters)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf
