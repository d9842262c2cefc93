"""What changes a router from step to step without a gradient.

    begin_step(model, step)                              # before the forward passes of a step
    y, stats = layer(x)                                  # any number of micro-batches
    update_routers(model, stats, step=step)              # once, after the optimizer's step

The state (selection bias, load counters, averaged router weights ...) lives in float32 buffers of
`moe.Router`; `RouterControl` says what is done with it. A forward pass never changes it, so that
evaluation and the recomputation of activation checkpointing cannot; `update_routers` changes it
once per optimizer step, from statistics that the caller has summed over all micro-batches and over
all ranks that share the router, and the next step is the first to see it: a bias that came from the
batch it is used on would leak later tokens into earlier ones. Everything stays on the device.

What follows from the number of the step alone (whether selection still uses the averaged weights,
the number of experts per token) is no state: `begin_step` sets it, also after a restart.

Shape letters: L layers, E experts, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe.balance import centred
from moe.metrics import RouterStats
from moe.router import Router
from moe.router_gradient import GRADIENTS
from moe.top_k import TopKSchedule

DROPS = ("probability", "position")
BIAS_UPDATES = ("none", "sign", "quantile", "min_load")
# Least divisor: a layer without tokens moves nothing.
_TINY = 1e-20


@dataclass(frozen=True)
class RouterControl:
    """State of a router and how it changes; steps are numbered from 1.

    Raises:
        ValueError: an impossible value, by field, value and what is allowed.
    """

    bias_update: str = "none"
    """How the selection bias b follows the load f with mean m, after every step:
    sign      b += rate * sign(m - f)                     (Wang et al., arXiv 2408.15664)
    min_load  b += rate for experts below `min_load` times the mean alone: no expert dies, and
              above that the load is left to itself
    quantile  b = -q, q_e the excess over its tokens' (K+1)-th largest key that exactly the wanted
              number of tokens has for expert e: balanced in one or two steps, no rate
    and is then centred to mean 0."""
    bias_rate: float = 1e-3
    """Of sign and min_load."""
    min_load: float = 0.25
    """min_load: the part of the mean load that every expert should have."""
    bias_ema: float = 0.0
    """quantile: the part of the old bias that is kept."""
    bias_targets: tuple[float, ...] | None = None
    """Wanted share of the load per expert, up to a common factor; None: the same for all."""
    bias_freeze_at: int | None = None
    """From this step on the bias stays as it is."""
    bias_anneal: tuple[int, int] | None = None
    """(a, b): after step a the bias only falls, linearly, to exactly 0 after step b."""
    keep_load: bool = False
    """Keep the step's load for the balance loss of the next step."""
    ema: float | None = None
    """Decay of an average of the router's weight that selects the experts, while the weight itself
    gives the gates."""
    ema_until: int | None = None
    """Last step in which the average selects; None: always, in evaluation too."""
    families_until: int | None = None
    """Last step in which a token chooses one of a family of copies at most; None: always."""
    top_k: TopKSchedule | None = None
    """Experts per token while training goes on; None: always `num_experts_per_tok`."""
    freeze_at: int | None = None
    """From this step on the weight stays as it is (its gradient is zero, and whoever steps the
    optimizer leaves it out); the rest of the state goes on."""
    capacity: float | None = None
    """Most tokens of an expert while training, as a multiple of the mean; what exceeds it is
    dropped. Evaluation drops nothing."""
    capacity_drop: str = "probability"
    """Which tokens of a full expert are dropped: those of the lowest gate (probability), or the
    last ones (position)."""
    capacity_until: int | None = None
    """Last step with a limit; None: to the end."""
    sample_until: int | None = None
    """Last step that draws experts (`MoEConfig.sample_temperature`); the temperature falls to 0
    until then, on a straight line. None: it stays, to the end."""
    gradient: str = "plain"
    """What the router learns about experts that a token did not choose: plain (nothing) or default
    (a mean output); see `moe.router_gradient`."""
    default_decay: float = 0.95
    """default: of the average over steps that the mean outputs are."""

    def __post_init__(self) -> None:
        for name, words in (
            ("bias_update", BIAS_UPDATES),
            ("capacity_drop", DROPS),
            ("gradient", GRADIENTS),
        ):
            if (word := getattr(self, name)) not in words:
                raise ValueError(f"{name}={word!r} is unknown; allowed: {', '.join(words)}")
        for name in ("bias_rate", "capacity"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a finite number above 0")
        for name in ("bias_ema", "ema", "default_decay"):
            decay = getattr(self, name)
            if decay is not None and not 0 <= decay < 1:
                raise ValueError(f"{name}={decay} must be at least 0 and below 1")
        if not 0 < self.min_load < 1:
            raise ValueError(f"min_load={self.min_load} must be above 0 and below 1")
        if self.bias_targets is not None and not all(
            math.isfinite(share) and share > 0 for share in self.bias_targets
        ):
            raise ValueError(f"bias_targets={self.bias_targets} must be finite and above 0")
        if self.bias_anneal is not None and not 0 <= self.bias_anneal[0] < self.bias_anneal[1]:
            raise ValueError(
                f"bias_anneal={self.bias_anneal} must be two steps, the first before the second"
            )
        if self.sample_until is not None and self.sample_until < 1:
            raise ValueError(f"sample_until={self.sample_until} must be a step, 1 or more")

    @property
    def stateful(self) -> bool:
        """Whether `update_routers` has anything to do."""
        return self.bias_update != "none" or self.keep_load or self.ema is not None

    @property
    def changes(self) -> int:
        """How often a router computes otherwise from some step on: each is compiled anew."""
        until = (self.ema_until, self.capacity_until, self.sample_until)
        steps = (*until, self.families_until, self.freeze_at)
        by_k = 0 if self.top_k is None else len(self.top_k.changes()) + self.top_k.soft
        return by_k + sum(step is not None for step in steps)


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
    said: dict[str, None] = {}
    for router in routers_of(model):
        control = router.config.control
        if control.bias_update != "none" and control.bias_anneal is not None:
            start, end = control.bias_anneal
            if step == start + 1:
                said[f"the selection bias falls to zero until step {end}"] = None
            elif step == end + 1:
                said["the selection bias is zero from now on"] = None
        until = control.ema_until
        by_ema = control.ema is not None and (until is None or step <= until)
        if router.select_by_ema and not by_ema:
            said["the router's own weight selects from now on, no longer its average"] = None
        router.select_by_ema = by_ema
        if control.top_k is not None and (change := _set_top_k(router, control.top_k, step)):
            said[change] = None
        until = control.families_until
        exclusive = router.family_E is not None and (until is None or step <= until)
        if router.exclusive and not exclusive:
            said["copies of one expert may be chosen together from now on"] = None
        router.exclusive = exclusive
        until = control.capacity_until
        capacity = control.capacity if until is None or step <= until else None
        if router.capacity is not None and capacity is None:
            said["no expert drops tokens from now on"] = None
        router.capacity = capacity
        if (change := _set_temperature(router, step)) is not None:
            said[change] = None
        frozen = control.freeze_at is not None and step >= control.freeze_at
        if frozen and not router.frozen:
            said["the routers' weights stay as they are from now on"] = None
        router.frozen = frozen
    return list(said)


@contextmanager
def exported(model: nn.Module, selection_bias: bool) -> Iterator[None]:
    """Inside, routers compute what a folder can say that holds weights alone, in evaluation mode.

    Args:
        selection_bias: whether the folder holds the selection bias too.
    """
    routers = routers_of(model)
    before = [
        (router.select_by_ema, router.k, router.selection_bias, router.exclusive)
        for router in routers
    ]
    try:
        for router in routers:
            router.select_by_ema = False
            router.k = router.config.num_experts_per_tok
            router.exclusive = False
            if not selection_bias:
                router.selection_bias = None
        yield
    finally:
        for router, (by_ema, k, bias, exclusive) in zip(routers, before):
            router.select_by_ema, router.k = by_ema, k
            router.selection_bias, router.exclusive = bias, exclusive


def _set_temperature(router: Router, step: int) -> str | None:
    """Whether a step draws its experts, and how freely; what to say when that ends."""
    until, start = router.config.control.sample_until, router.config.sample_temperature
    before = router.sampling
    router.sampling = start > 0 and (until is None or step <= until)
    if router.temperature is not None:
        left = max(0.0, 1.0 - (step - 1) / until)
        router.temperature.fill_(start * left)  # on the device: a new value compiles nothing
    if before and not router.sampling:
        return "each token's best experts are taken from now on, none are drawn"
    return None


def _set_top_k(router: Router, schedule: TopKSchedule, step: int) -> str | None:
    """K of a step, and how far its last expert has faded; what to say if K is another."""
    before, router.k = router.k, schedule.k(step)
    router.fading = schedule.soft and step < schedule.last_change
    if router.kappa is not None:
        router.kappa.fill_(schedule.kappa(step))  # on the device: a new value compiles nothing
    if router.k != before:
        return f"each token uses {router.k} experts from now on, no longer {before}"
    return None


def needs_update(model: nn.Module) -> bool:
    """Whether `update_routers` would change anything, so that the statistics must be summed."""
    return any(
        router.config.control.stateful or router.default_ED is not None
        for router in routers_of(model)
    )


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
    _update_defaults(routers, stats, applied)
    # Layers of the same settings are updated together: their number costs no launches.
    together: dict[RouterControl, list[int]] = {}
    for layer, router in enumerate(routers):
        if router.config.control.stateful:
            together.setdefault(router.config.control, []).append(layer)
    for control, layers in together.items():
        mine = [routers[layer] for layer in layers]
        seen = stats if len(mine) == len(routers) else _layers(stats, layers)
        done_L = seen.tokens > 0
        if applied is not None:
            done_L = done_L & (applied > 0)
        if control.bias_update != "none":
            _update_bias(mine, seen, control, step, done_L)
        if control.keep_load:
            _assign([r.load_E for r in mine], seen.counts_E.float(), done_L)
        if control.ema is not None:
            _update_ema(mine, control.ema, applied)


def _update_defaults(routers: Sequence[Router], stats: RouterStats, applied: Tensor | None) -> None:
    """m_e <- decay m_e + (1 - decay) (mean output over the step's tokens of e); an expert without
    tokens keeps its own."""
    for layer, router in enumerate(routers):
        if router.default_ED is None:
            continue
        decay = router.config.control.default_decay
        rows_E = stats.rows_E[layer].to(router.default_ED.dtype)
        seen_E = rows_E > 0
        if applied is not None:
            seen_E = seen_E & (applied > 0)
        mean_ED = stats.output_sum_ED[layer].to(rows_E.dtype) / rows_E.clamp(min=1)[:, None]
        moved_ED = torch.lerp(mean_ED, router.default_ED, decay)
        router.default_ED.copy_(torch.where(seen_E[:, None], moved_ED, router.default_ED))
        router.default_count_E.add_(seen_E)


def _layers(stats: RouterStats, layers: Sequence[int]) -> RouterStats:
    return RouterStats(
        *(None if field is None else torch.stack([field[i] for i in layers]) for field in stats)
    )


def _assign(buffers: Sequence[Tensor], new_LE: Tensor, done_L: Tensor) -> None:
    """buffers[l] = new_LE[l] where done_L; by choice, not by product: 0 * NaN is NaN."""
    for buffer, new_E, done in zip(buffers, new_LE.unbind(), done_L.unbind()):
        buffer.copy_(torch.where(done, new_E.to(buffer.dtype), buffer))


def _update_bias(
    routers: Sequence[Router], stats: RouterStats, control: RouterControl, step: int, done_L: Tensor
) -> None:
    biases = [router.selection_bias for router in routers]
    bias_LE = torch.stack(biases)
    if control.bias_anneal is not None and step > control.bias_anneal[0]:
        left = control.bias_anneal[1] - step  # steps until it is 0
        new_LE = bias_LE * (left / (left + 1)) if left > 0 else torch.zeros_like(bias_LE)
        # skipped steps count: the last steps of a run are without bias whatever happened
        _assign(biases, new_LE, torch.ones_like(done_L))
        return
    if control.bias_freeze_at is not None and step >= control.bias_freeze_at:
        return
    _assign(biases, next_bias(bias_LE, stats, control), done_L)


def next_bias(bias_LE: Tensor, stats: RouterStats, control: RouterControl) -> Tensor:
    """The selection bias [L, E] after a step with these statistics, by `control.bias_update`."""
    in_use_LE = stats.in_use_E
    if control.bias_update == "quantile":
        target_LE = -stats.quantile_sum_E / stats.tokens.clamp(min=1)[:, None]
        target_LE = centred(target_LE, in_use_LE)
        return control.bias_ema * bias_LE + (1 - control.bias_ema) * target_LE
    load_LE = stats.counts_E.double()
    share_E = torch.full_like(load_LE[0], 1.0 / load_LE.shape[1])
    if in_use_LE is not None:
        share_E = in_use_LE / in_use_LE.sum(dim=1, keepdim=True, dtype=load_LE.dtype)
    if control.bias_targets is not None:
        # by fill_: share_E[expert] = … would copy a scalar of the host's over, and wait for it
        for expert, share in enumerate(control.bias_targets):
            share_E[expert].fill_(share / sum(control.bias_targets))
    mean_LE = load_LE.sum(dim=1, keepdim=True) * share_E
    missing_LE = (mean_LE - load_LE) / mean_LE.clamp(min=_TINY)
    if control.bias_update == "sign":
        missing_LE = missing_LE.sign()
    elif control.bias_update == "min_load":
        missing_LE = (missing_LE > 1 - control.min_load).to(missing_LE.dtype)
    new_LE = bias_LE.double() + control.bias_rate * missing_LE
    return centred(new_LE, in_use_LE).to(bias_LE.dtype)


def _update_ema(routers: Sequence[Router], decay: float, applied: Tensor | None) -> None:
    averages = [router.weight_ema for router in routers]
    weights = [router.weight.detach() for router in routers]
    if applied is None:
        torch._foreach_lerp_(averages, weights, 1 - decay)
        return
    for average, weight in zip(averages, weights):
        average.copy_(torch.where(applied > 0, torch.lerp(average, weight, 1 - decay), average))
