"""What no router can do, refused by name before one is built."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moe.kernels.common.gating import NORMS, SCORES

if TYPE_CHECKING:
    from moe.layer import MoEConfig

# What can be measured of experts; see `moe.surgery`.
IMPORTANCES = ("load", "gate_mass", "reap", "taylor")
# Gates that sum to a constant by construction: with one expert per token the gate is that constant.
RENORMALISED = ("topk_sum", "softmax_topk")


def check_router(config: MoEConfig) -> None:
    """Refuse what no router can do.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    experts, k = config.num_experts, config.num_experts_per_tok
    if not 1 <= k <= experts:
        raise ValueError(
            f"num_experts_per_tok={k} is not possible with num_experts={experts}; "
            f"allowed: 1 to {experts}"
        )
    if config.score not in SCORES:
        raise ValueError(f"score={config.score!r} is unknown; allowed: {', '.join(SCORES)}")
    if config.norm not in NORMS:
        raise ValueError(f"norm={config.norm!r} is unknown; allowed: {', '.join(NORMS)}")
    if k == 1 and config.norm in RENORMALISED:
        # minimind#858: such a router is trained by nothing but the auxiliary losses
        raise ValueError(
            f"num_experts_per_tok=1 with norm={config.norm!r} makes every gate the constant "
            f"{config.route_scale:g}: the router would get no gradient from the loss; "
            "allowed with one expert per token: norm='none'"
        )
    if config.score == "identity" and config.norm == "topk_sum":
        raise ValueError(
            "norm='topk_sum' divides by the sum of the scores, which can be zero or negative with "
            "score='identity'; allowed with it: 'none', 'softmax_topk'"
        )
    if not (math.isfinite(config.route_scale) and config.route_scale > 0):
        raise ValueError(f"route_scale={config.route_scale} must be a finite number above 0")
    _check_bias_update(config)
    if config.control.top_k is not None:
        _check_top_k(config)
    if config.rounding is not None:
        _check_renorm(config)
    _check_noise(config)
    _check_ends(config)
    if config.importance not in IMPORTANCES:
        raise ValueError(
            f"importance={config.importance!r} is unknown; allowed: {', '.join(IMPORTANCES)}"
        )
    if config.start_experts is not None:
        _check_slots(config)
    elif config.families:
        raise ValueError("families=True has no effect without start_experts; allowed: False")
    _check_sampling(config)
    _check_capacity(config)
    groups, kept = config.groups, config.groups_kept
    if groups < 1 or experts % groups:
        raise ValueError(f"groups={groups} must be at least 1 and divide num_experts={experts}")
    if not 1 <= kept <= groups:
        raise ValueError(f"groups_kept={kept} must be between 1 and groups={groups}")
    size = experts // groups
    if kept * size < k:
        raise ValueError(
            f"groups_kept={kept} groups of {size} experts hold {kept * size} experts, fewer than "
            f"num_experts_per_tok={k}"
        )
    if kept < groups and not 1 <= config.group_top <= size:
        raise ValueError(
            f"group_top={config.group_top} must be between 1 and the {size} experts of a group"
        )


def _check_top_k(config: MoEConfig) -> None:
    schedule, rounding = config.control.top_k, config.rounding
    choice = config.num_experts // config.groups * config.groups_kept
    most = choice - (config.control.bias_update == "quantile")  # it looks at the next one too
    if schedule.start > most:
        raise ValueError(
            f"top_k_start={schedule.start} is more than the {most} experts that a token may take "
            f"of num_experts={config.num_experts}"
        )
    if schedule.end != config.num_experts_per_tok:
        raise ValueError(
            f"the schedule of K ends at {schedule.end}, num_experts_per_tok is "
            f"{config.num_experts_per_tok}: evaluation takes that many"
        )
    if schedule.soft and rounding is not None and rounding.renorm != "tc":
        raise ValueError(
            f"rounding_renorm={rounding.renorm!r} makes gates anew, without those that soft_k=true "
            "fades; allowed with it: tc"
        )


def _check_renorm(config: MoEConfig) -> None:
    """Evaluation and export take a token's gates as `norm` says; rounding may not train others."""
    renorm, sums_to_one = config.rounding.renorm, config.norm in RENORMALISED
    if renorm != "tc" and (renorm == "tr") != sums_to_one:
        gates = "sum to 1" if sums_to_one else "do not sum to 1"
        raise ValueError(
            f"rounding.renorm={renorm!r} does not go with norm={config.norm!r}: the gates of a "
            f"token {gates} in evaluation and in an export; allowed: tc, "
            f"{'tr' if sums_to_one else 'none'}"
        )


def _check_slots(config: MoEConfig) -> None:
    start, k = config.start_experts, config.num_experts_per_tok
    least = k + (config.control.bias_update == "quantile")  # it looks at the next one too
    if not least <= start <= config.num_experts:
        raise ValueError(
            f"start_experts={start} must be from {least} (a token takes {k}) to "
            f"num_experts={config.num_experts}"
        )
    top_k = config.control.top_k
    if top_k is not None and top_k.start > start:
        raise ValueError(
            f"top_k_start={top_k.start} is more than the start_experts={start} that there are"
        )
    for name, value, allowed in (
        ("groups", config.groups, (1,)),
        ("expert_widths", config.expert_widths, (None,)),
        ("control.gradient", config.control.gradient, ("plain",)),
        ("control.bias_targets", config.control.bias_targets, (None,)),
        ("rounding.max_tiles", config.rounding and config.rounding.max_tiles, (None,)),
    ):
        if value not in allowed:
            raise ValueError(
                f"{name}={value!r} does not go with start_experts={start}, which lets experts come "
                f"and go; allowed: {', '.join(map(str, allowed))}"
            )
    if config.families and config.control.ema is not None:
        raise ValueError(
            f"control.ema={config.control.ema:g} does not go with families=True: the average and "
            "the weight could each prefer another member of a family; allowed: None"
        )


def _check_bias_update(config: MoEConfig) -> None:
    control, experts = config.control, config.num_experts
    if control.bias_update == "none":
        return
    if not config.selection_bias:
        raise ValueError(
            f"control.bias_update={control.bias_update!r} has no bias to update; it needs "
            "selection_bias=True"
        )
    choice = experts // config.groups * config.groups_kept
    if choice <= config.num_experts_per_tok:
        raise ValueError(
            f"control.bias_update={control.bias_update!r} cannot balance anything: every token "
            f"takes all {choice} experts that it may choose from; allowed: 'none'"
        )
    targets = control.bias_targets
    if targets is not None and len(targets) != experts:
        raise ValueError(f"control.bias_targets has {len(targets)} values for {experts} experts")
    if targets is not None and max(targets) * config.num_experts_per_tok > sum(targets):
        raise ValueError(
            f"control.bias_targets asks for more tokens of an expert than there are: its share "
            f"may be at most 1/{config.num_experts_per_tok} of the sum, got "
            f"{max(targets) / sum(targets):.3g}"
        )


def _check_noise(config: MoEConfig) -> None:
    for name in ("jitter", "expert_dropout"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be at least 0 and below 1")
    if config.expert_dropout and config.groups_kept < config.groups:
        raise ValueError(
            f"expert_dropout={config.expert_dropout} could leave a kept group with too few "
            f"experts; allowed with groups_kept={config.groups_kept} of {config.groups} groups: 0"
        )
    if config.expert_dropout and config.num_experts_per_tok == config.num_experts:
        raise ValueError(
            f"expert_dropout={config.expert_dropout} has no effect when a token takes all "
            f"{config.num_experts} experts; allowed: 0"
        )


def _check_ends(config: MoEConfig) -> None:
    """A last step of what never acts."""
    control = config.control
    for name, idle, why in (
        ("sample_until", not config.sample_temperature, "with sample_temperature=0"),
        ("ema_until", control.ema is None, "without control.ema"),
        ("families_until", not config.families, "with families=False"),
        ("capacity_until", control.capacity is None, "without control.capacity"),
    ):
        until = getattr(control, name)
        if idle and until is not None:
            raise ValueError(f"control.{name}={until} has no effect {why}; allowed: None")


def _check_sampling(config: MoEConfig) -> None:
    temperature = config.sample_temperature
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"sample_temperature={temperature} must be a finite number, 0 or more")
    if config.amplitude and config.score != "softmax":
        raise ValueError(f"score={config.score!r} does not go with amplitude; allowed: 'softmax'")
    if not temperature:
        return
    if config.score not in ("softmax", "sigmoid"):
        raise ValueError(
            f"sample_temperature={temperature:g} needs probabilities, which score={config.score!r} "
            "has not; allowed: softmax, sigmoid"
        )
    for name, value, allowed in (
        ("selection_bias", config.selection_bias, False),
        ("groups_kept", config.groups_kept, config.groups),
    ):
        if value != allowed:
            raise ValueError(
                f"{name}={value!r} does not go with sample_temperature={temperature:g}, which "
                f"draws by the scores alone; allowed: {allowed!r}"
            )
    if config.num_experts_per_tok == config.num_experts:
        raise ValueError(
            f"sample_temperature={temperature:g} has no effect when a token takes all "
            f"{config.num_experts} experts; allowed: 0"
        )


def _check_capacity(config: MoEConfig) -> None:
    capacity, k = config.control.capacity, config.num_experts_per_tok
    if capacity is None:
        return
    if config.rounding is not None:
        raise ValueError(
            f"control.capacity={capacity} and rounding both decide how many tokens an expert "
            "gets; with rounding, limit them by rounding.max_tiles"
        )
    if capacity * k >= config.num_experts:
        raise ValueError(
            f"control.capacity={capacity} has no effect: no expert can get more than "
            f"{config.num_experts / k:g} times the mean; allowed: below that"
        )
