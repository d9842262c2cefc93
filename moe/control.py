"""What is done with the routers of a model once a step, and their losses.

    begin_step(model, step)                              # before the forward passes of a step
    y, stats = layer(x)                                  # any number of micro-batches
    update_routers(model, stats, step=step)              # once, after the optimizer's step

The state of routers and rules lies in float32 buffers. A forward pass never changes it, so that
evaluation and the recomputation of activation checkpointing cannot; `update_routers` changes it
once per optimizer step, from statistics that the caller has summed over all micro-batches and over
all ranks that share the router, and the next step is the first to see it. Everything stays on the
device. What follows from the number of the step alone is no state: `begin_step` sets it, also after
a restart.

Shape letters: L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moe.balance import balance_loss, z_loss
from moe.router import Router
from moe.rules.base import Rule
from moe.types import RouterStats


def routers_of(model: nn.Module) -> list[Router]:
    """The routers of a model in the order of its stacked statistics."""
    return [module for module in model.modules() if isinstance(module, Router)]


def stacked(routers: Sequence[Router], name: str) -> Tensor | None:
    """A buffer of all routers, [L, ...]; None where they have none of that name."""
    rows = [getattr(router, name) for router in routers]
    return torch.stack(rows) if rows and rows[0] is not None else None


def begin_step(model: nn.Module, step: int) -> list[str]:
    """Set what depends on the number of the step alone, before its first forward pass.

    Call it after a restart too, with the number of the last finished step, before anything is
    evaluated. Costs no device work; a change makes torch.compile compile once more.

    Returns:
        One sentence for each change since the step before, without repetitions.
    """
    said = [text for router in routers_of(model) for text in router.begin_step(step)]
    return list(dict.fromkeys(said))


@contextmanager
def exported(model: nn.Module, selection_bias: bool) -> Iterator[None]:
    """Inside, routers compute what a folder can say that holds weights alone, in evaluation mode.

    Args:
        selection_bias: whether the folder holds the selection bias too.
    """
    routers = routers_of(model)
    before = [(router.selection_bias, router.exclusive) for router in routers]
    off = [
        rule
        for router in routers
        for rule in router.rules.values()
        if rule.settings.export in ("ends", "training only")
    ]
    try:
        for router in routers:
            router.exclusive = False
            if not selection_bias:
                router.selection_bias = None
        for rule in off:
            rule.on = False
        yield
    finally:
        for router, (bias_E, exclusive) in zip(routers, before):
            router.selection_bias, router.exclusive = bias_E, exclusive
        for rule in off:
            rule.on = True


@contextmanager
def scheduled_evaluation(model: nn.Module) -> Iterator[None]:
    """Inside, evaluation takes the experts per token that training uses now."""
    routers = routers_of(model)
    try:
        for router in routers:
            router.scheduled_evaluation = True
        yield
    finally:
        for router in routers:
            router.scheduled_evaluation = False


# --- the update -----------------------------------------------------------------------------------


def needs_update(model: nn.Module) -> bool:
    """Whether `update_routers` would change anything, so that the statistics must be summed."""
    return any(_updating(router) for router in routers_of(model))


def _updating(router: Router) -> dict[str, Rule]:
    updates = {"update", "after_step"}
    return {key: rule for key, rule in router.rules.items() if updates & rule.hooks}


@torch.no_grad()
def update_routers(
    model: nn.Module, stats: RouterStats, *, step: int, applied: Tensor | None = None
) -> None:
    """Bring the state of all routers up to date after an optimizer step.

    Args:
        model: its routers, one or several, are those that gave the statistics.
        stats: [L, ...] (or of the one layer), summed over all micro-batches and ranks of the step.
        step: number of the step just done, from 1.
        applied: scalar on the device, 0 if the step was skipped: then no bit changes. None: done.

    Raises:
        ValueError: statistics of another number of layers.
    """
    stats = stats.detach()
    if stats.tokens.dim() == 0:
        stats = RouterStats.stack([stats])
    routers = routers_of(model)
    if stats.tokens.shape[0] != len(routers):
        raise ValueError(
            f"update_routers: statistics of {stats.tokens.shape[0]} layers, the model has "
            f"{len(routers)} routers"
        )
    # Layers of the same settings are updated together: their number costs no launches.
    together: list[tuple[Rule, list[int], list[Rule]]] = []
    for layer, router in enumerate(routers):
        for rule in _updating(router).values():
            for first, layers, rules in together:
                if _same(first, rule):
                    layers.append(layer)
                    rules.append(rule)
                    break
            else:
                together.append((rule, [layer], [rule]))
    for first, layers, rules in together:
        first.update(rules, [routers[n] for n in layers], stats.layers(layers), step, applied)


def _same(one: Rule, other: Rule) -> bool:
    forms = [(rule.form.shares, rule.form.last_acting, rule.form.biased) for rule in (one, other)]
    return type(one) is type(other) and one.settings == other.settings and forms[0] == forms[1]


# --- losses ---------------------------------------------------------------------------------------


def balance_rules(routers: Sequence[Router]) -> list[Rule]:
    """The balance losses of all layers; none where no loss balances."""
    return [rule for router in routers for rule in router.acting("losses")]


def counts_step(model: nn.Module) -> bool:
    """Whether the balance loss compares with the load of the whole step, which must be counted
    before the first of several micro-batches."""
    return any(rule.counts_step for rule in balance_rules(routers_of(model)))


def known_load(model: nn.Module) -> Tensor | None:
    """The load [L, E] that the balance loss compares with, where it is state of the routers."""
    rules = balance_rules(routers_of(model))
    return rules[0].load(rules) if rules else None


def router_losses(
    routers: Sequence[Router],
    stats: RouterStats,
    step_tokens: Tensor | float,
    load_LE: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """A micro-batch's share of the step's auxiliary loss, and of its balance and z values.

    Args:
        routers: that gave the statistics; all with the same settings.
        stats: of the micro-batch, stacked.
        step_tokens: valid tokens of the whole step over all micro-batches and ranks.
        load_LE: tokens of each expert to compare with; the micro-batch's own when None.

    The coefficients weigh means over layers, so a deeper model is not balanced harder.
    """
    layers, rules, z_coef = len(routers), balance_rules(routers), routers[0].config.router.z_coef
    loss_L = stats.tokens.new_zeros(stats.tokens.shape)
    if rules:
        value_L = rules[0].losses(rules, stats, load_LE)
        loss_L = loss_L + rules[0].settings.coef / layers * value_L
        balance_L = value_L.detach()
    else:
        balance_L = balance_loss(stats, load_LE).detach()
    z_L = z_loss(stats)
    if z_coef:
        loss_L = loss_L + z_coef / layers * z_L
    auxiliary = (stats.tokens / step_tokens * loss_L).sum()
    with torch.no_grad():
        share_L = stats.tokens / step_tokens / layers
        values = [(share_L * value_L).sum() for value_L in (balance_L, z_L.detach())]
    return auxiliary, values
