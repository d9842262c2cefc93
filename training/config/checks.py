"""Settings of a config that do not go together: useless ones and impossible ones.

A setting counts as useless only away from its default, so that a resolved config, which spells
everything out, loads again. Used by training/config/build.py; nothing here needs PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from training.config.expert_checks import (
    check_importance,
    check_surgery,
    chosen_by_importance,
    makes_copies,
    uses_slots,
)
from training.config.export_compat import check_exactness, mask_steps
from training.config.load import ConfigError, shown

if TYPE_CHECKING:
    from training.config.sections import Config


def router_defaults(config: Config) -> dict[str, Any]:
    """Values of the router's fields that are empty: by what the family can express, and nothing
    for a model without experts."""
    router = config.router
    update = router.bias_update
    if update is None:
        has_bias = config.model.config.has_selection_bias and config.model.config.moe_layers
        update = "quantile" if has_bias else "none"
    score, coef = router.score or config.model.config.router_score, router.balance_coef
    if coef is None and not config.model.config.moe_layers:
        coef = 0.0
    elif coef is None:
        coef = 0.01 if update in ("none", "min_load") else 0.0
    return {"score": score, "bias_update": update, "balance_coef": coef}


# What does nothing while another setting is empty, none or zero.
_UNSET = {
    "router.rounding": "router.rounding_tile router.rounding_min_tiles router.rounding_max_tiles "
    "router.rounding_min_mean_tiles router.rounding_protect_top1 router.rounding_renorm "
    "router.rounding_dropped_grad",
    "model.moe_expert_widths": "router.balance_load",
    "router.capacity_factor": "router.capacity_drop",
    "router.bias_update": "router.bias_rate router.bias_ema router.bias_freeze_at router.min_load "
    "router.calibrate_bias",
    "router.sample_temperature": "router.sample_until",
    "router.top_k_schedule": "router.top_k_start router.top_k_ramp router.top_k_levels "
    "router.soft_k",
    "train.sparse_density": "train.sparse_method train.sparse_block train.sparse_start "
    "train.sparse_every train.sparse_end train.sparse_until train.sparse_regrow",
    "surgery.policy": "surgery.every surgery.dry_run surgery.retire_below surgery.retire_after "
    "surgery.cooldown",
    "checkpoint.every_steps": "checkpoint.keep_last",  # there is only one
    "eval.every_steps": "eval.rows eval.sample_prompt eval.sample_tokens",
    "eval.sample_prompt": "eval.sample_tokens",
}
# What works with one value of another setting alone.
_ONLY_WITH = (
    ("router.bias_update", "min_load", "router.min_load"),
    ("router.bias_update", "quantile", "router.bias_ema"),
    ("router.top_k_schedule", "steps", "router.top_k_levels"),
    ("surgery.policy", "resize", "surgery.clone_above surgery.min_experts surgery.max_experts"),
)
# What does nothing with one value of another setting, and why.
_NOT_WITH = (
    ("router.bias_update", "quantile", ", which has no rate", "router.bias_rate"),
    ("router.top_k_schedule", "steps", ", which has router.top_k_levels", "router.top_k_ramp"),
    ("train.sparse_method", "straight_through", "", "train.sparse_regrow"),
    ("optim.schedule", "constant", "", "optim.decay_fraction optim.min_lr_ratio"),
    ("optim.schedule", "cosine", ", which decays from the warm-up on", "optim.decay_fraction"),
    ("optim.schedule", "linear", ", which decays from the warm-up on", "optim.decay_fraction"),
    ("log.wandb", "off", "", "log.wandb_project"),
)
# The rest: (in what circumstance they do nothing, whether it holds, the settings).
_USELESS: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    (
        "while router.balance_coef=0 and router.bias_update=none",
        lambda c: c.router.balance_coef == 0 and c.router.bias_update == "none",
        "router.balance_load",
    ),
    (
        "while router.balance_coef=0",
        lambda c: c.router.balance_coef == 0,
        "router.balance_scope",
    ),
    (
        "once router.freeze_at=1 freezes the routers before the first step",
        lambda c: c.router.freeze_at == 1,
        "optim.router_lr_multiplier optim.router_weight_decay router.ema router.gradient "
        "router.rounding_dropped_grad",
    ),
    (
        "when a token takes all experts",
        lambda c: c.model.config.num_experts == c.model.config.num_experts_per_tok,
        "router.gradient",
    ),
    (
        "without mean outputs (router.gradient or router.rounding_dropped_grad: default)",
        lambda c: "default" not in (c.router.gradient, c.router.rounding_dropped_grad),
        "router.default_decay",
    ),
    (
        "without surgery.events or surgery.policy",
        lambda c: not uses_slots(c),
        "surgery.start_experts",
    ),
    (
        "without surgery.events that copy, surgery.policy or router.revive_after",
        lambda c: not makes_copies(c) and c.router.revive_after is None,
        "surgery.noise",
    ),
    (
        "without surgery.events that copy, or surgery.policy",
        # the others are what an empty one becomes
        lambda c: not makes_copies(c) and c.surgery.clone == "family",
        "surgery.clone",
    ),
    (
        "where nothing looks at it: without surgery.policy, or events that choose by it",
        lambda c: not chosen_by_importance(c),
        "surgery.importance surgery.importance_decay",
    ),
    (
        "without text to validate on (data.validation_sources or data.validation_fraction)",
        lambda c: not c.data.validation_sources and not c.data.validation_fraction,
        "eval.rows",
    ),
)


def _value(config: Config, place: str) -> Any:
    """Value of section.key; the architecture's keys are right under model."""
    section, key = place.split(".")
    return getattr(config.model.config if section == "model" else getattr(config, section), key)


def _default(config: Config, place: str) -> Any:
    """Default of section.key, outside of the architecture."""
    section, key = place.split(".")
    field = type(getattr(config, section)).model_fields[key]
    return field.get_default(call_default_factory=True)


def _idle(config: Config) -> Iterator[tuple[str, str]]:
    """(in what circumstance that holds here, the settings that then do nothing)."""
    for place, places in _UNSET.items():
        value = _value(config, place)
        if value in (None, "none", 0):
            unset = f"without {place}" if value is None else f"while {place}={value or 0}"
            yield unset, places
    for place, only, places in _ONLY_WITH:
        if _value(config, place) != only:
            yield f"with another {place} than {only}", places
    for place, wrong, why, places in _NOT_WITH:
        if _value(config, place) == wrong:
            yield f"with {place}={wrong}{why}", places
    yield from ((reason, places) for reason, holds, places in _USELESS if holds(config))


def drop_idle(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Take out of `values` what overrides switch off: `eval.every_steps=null` is enough for a file
    that says more about evaluation.

    Args:
        values: of the file, overrides included; what they make useless is removed.
        overrides: places (section.key) that the command line sets.
    """
    for switch in overrides:
        section, _, key = switch.partition(".")
        value = values[section].get(key) if isinstance(values.get(section), dict) else None
        idle = [_UNSET[switch]] if switch in _UNSET and value in (None, "none", 0) else []
        idle += [names for place, only, names in _ONLY_WITH if place == switch and value != only]
        idle += [names for place, no, _, names in _NOT_WITH if place == switch and value == no]
        for place in " ".join(idle).split():
            section, key = place.split(".")
            if place not in overrides and isinstance(values.get(section), dict):
                values[section].pop(key, None)


def refuse_useless(config: Config) -> None:
    """ConfigError for a setting that another one makes useless and that is not at its default."""
    for reason, places in _idle(config):
        for place in places.split():
            value = _value(config, place)
            if value != _default(config, place):
                raise ConfigError(
                    f"{place}={shown(value)} has no effect {reason}; give "
                    f"{place}={shown(_default(config, place))}"
                )


def check_combinations(config: Config) -> None:
    """ConfigError for settings that are right alone and impossible together."""
    train, data, model = config.train, config.data, config.model.config
    if (train.steps is None) == (train.epochs is None):
        raise ConfigError(
            f"train.steps={shown(train.steps)} and train.epochs={shown(train.epochs)}: give one "
            "of the two, and one only (null empties the other)"
        )
    check_surgery(config)
    check_exactness(config)
    if model.moe_expert_widths is not None:
        _check_widths(config)
    elif config.model.kernels == "spmm":
        _check_spmm(config)
    _check_router(config)
    check_rounding(config, min(train.micro_batch_size, train.global_batch_size))
    if config.parallel.schedule == "whole" and config.router.rounding != "none":
        raise ConfigError(
            f"parallel.schedule=whole cannot be with router.rounding={config.router.rounding}, "
            "which gives tokens unequal numbers of experts; allowed with it: all, pairwise"
        )
    if config.router.top_k_schedule != "none" and config.router.top_k_start is None:
        raise ConfigError(
            f"router.top_k_schedule={config.router.top_k_schedule!r} needs router.top_k_start, the "
            f"experts per token in the first step; it ends with model.num_experts_per_tok="
            f"{model.num_experts_per_tok}"
        )
    if data.seq_len > model.max_position_embeddings:
        raise ConfigError(
            f"data.seq_len={data.seq_len} must not exceed "
            f"model.max_position_embeddings={model.max_position_embeddings}"
        )


def _check_spmm(config: Config) -> None:
    """What products of sparse matrices cannot do."""
    if config.model.save != "h":
        raise ConfigError(
            f"model.save={config.model.save!r} does not go with model.kernels='spmm', which keeps "
            "all it computes; allowed: 'h'"
        )
    model = config.model.config
    if model.expert_size % 16:
        raise ConfigError(
            f"model.{model.expert_width_field}={model.expert_size} with model.kernels='spmm' must "
            "be a multiple of 16, so that blocks do not cross from one expert to the next"
        )


def check_sparse(config: Config, steps: int) -> None:
    """Refuse masks that do not fit into a run of so many steps, or into its model.

    Raises:
        ConfigError: key, value, what is allowed.
    """
    train, model = config.train, config.model.config
    for place, value in (
        ("train.sparse_density", train.sparse_density),
        ("log.activation_threshold", config.log.activation_threshold),
    ):
        if value is None:
            continue
        if not model.moe_layers:
            raise ConfigError(f"{place}={value:g} has no effect: no layer has experts")
        if model.moe_expert_widths is not None:
            raise ConfigError(
                f"{place}={value:g} takes all experts for equally wide, which they are not with "
                "model.moe_expert_widths; leave one of them out"
            )
    if train.sparse_density is None:
        return
    if config.router.revive_after is not None:
        raise ConfigError(
            f"router.revive_after={config.router.revive_after} copies an expert without its mask; "
            "leave it out, or train.sparse_density"
        )
    found = mask_steps(config, steps)
    names = ("sparse_start", "sparse_end", "sparse_until")
    if not (found[0] <= found[1] <= found[2] < steps):
        said = ", ".join(f"train.{name}={step}" for name, step in zip(names, found))
        raise ConfigError(
            f"{said} must follow one another and lie before the last of {steps} steps, so that the "
            "last ones train what is exported"
        )
    smallest = min(model.expert_size, model.hidden_size)
    if train.sparse_block > smallest:
        raise ConfigError(
            f"train.sparse_block={train.sparse_block} is wider than an expert's matrices; "
            f"allowed: 1 to {smallest}"
        )


def _check_widths(config: Config) -> None:
    """What takes all experts for equally wide."""
    router, given = config.router, config.model.config.moe_expert_widths
    for place, value, allowed in (
        ("model.kernels", config.model.kernels, ("auto", "triton", "reference")),
        ("router.revive_after", router.revive_after, (None,)),
        ("model.save", config.model.save, ("h", "x")),
    ):
        if value not in allowed:
            raise ConfigError(
                f"{place}={value!r} takes all experts for equally wide, which they are not with "
                f"model.moe_expert_widths; allowed: {', '.join(a or 'empty' for a in allowed)}"
            )
    if router.balance_load == "flops":
        if router.balance_scope == "sequence" and router.balance_coef:
            raise ConfigError(
                "router.balance_load='flops' does not go with router.balance_scope='sequence', "
                "which counts tokens; allowed: global, lagged, micro"
            )
        if router.bias_update != "none" and isinstance(given[0], list):
            raise ConfigError(
                f"router.bias_update={router.bias_update!r} with router.balance_load='flops' needs "
                "one list of model.moe_expert_widths for all layers"
            )


def _check_router(config: Config) -> None:
    """Settings of the router that exclude each other, or that this model gives no room."""
    router, model = config.router, config.model.config
    experts, k = model.num_experts, model.num_experts_per_tok
    groups, kept = model.expert_groups
    choice = experts // groups * kept
    if router.bias_update != "none" and choice <= k:
        raise ConfigError(
            f"router.bias_update={router.bias_update!r} cannot balance anything: every token takes "
            f"all {choice} experts that it may choose from; allowed: none"
        )
    if router.expert_dropout and (kept < groups or experts == k):
        raise ConfigError(
            f"router.expert_dropout={router.expert_dropout:g} needs experts to choose from in "
            f"every group; allowed with num_experts={experts}, num_experts_per_tok={k}, "
            f"n_group={groups}, topk_group={kept}: 0"
        )
    if router.sample_temperature:
        for wrong, name, allowed in (
            (model.has_selection_bias, f"the family {model.family}'s selection bias", "none"),
            (router.bias_update != "none", f"router.bias_update={router.bias_update!r}", "none"),
            (kept < groups, f"topk_group={kept}", f"{groups}"),
            (experts == k, f"num_experts_per_tok={k}", f"below {experts}"),
        ):
            if wrong:
                raise ConfigError(
                    f"router.sample_temperature={router.sample_temperature:g} does not go with "
                    f"{name}; allowed there: {allowed}"
                )
    balanced = router.balance_coef > 0 or router.bias_update != "none"
    if router.rounding != "none" and router.rounding_min_tiles == 0 and not balanced:
        raise ConfigError(
            "router.rounding_min_tiles=0 takes all tokens from an expert with less than half a "
            "tile of them, and without balancing nothing brings it back; allowed: 1 or more, a "
            "router.balance_coef above 0, or a router.bias_update"
        )
    if router.amplitude and (router.score != "softmax" or router.freeze_at == 1):
        raise ConfigError(
            f"router.amplitude=true needs probabilities of its own, which router.score="
            f"{router.score!r} (or a frozen router) does not give; allowed: softmax"
        )
    if router.capacity_factor is not None:
        if router.rounding != "none":
            raise ConfigError(
                f"router.capacity_factor={router.capacity_factor:g} and router.rounding="
                f"{router.rounding!r} both decide how many tokens an expert gets; with rounding "
                "give router.rounding_max_tiles"
            )
        if router.capacity_factor * k >= experts:
            raise ConfigError(
                f"router.capacity_factor={router.capacity_factor:g} has no effect: no expert can "
                f"get more than {experts / k:g} times the mean; allowed: below that"
            )


def check_rounding(config: Config, rows: int) -> None:
    """Refuse token rounding that would not round, or not as it is told, in micro-batches of so
    many rows.

    Raises:
        ConfigError: key, value, what is allowed.
    """
    model, router = config.model.config, config.router
    if router.rounding == "none" or not model.moe_layers:
        return
    tokens, tile = rows * config.data.seq_len, router.rounding_tile
    mean = tokens * model.num_experts_per_tok / (model.num_experts * tile)
    if tile == 1:
        raise ConfigError(
            "router.rounding_tile=1 has no effect: every count is a multiple of 1; allowed: 2 or "
            "more, or router.rounding=none"
        )
    if mean < router.rounding_min_mean_tiles or tokens < tile:
        raise ConfigError(
            f"router.rounding={router.rounding!r} has no effect: a micro-batch of {tokens} tokens "
            f"gives an expert {mean:.2g} tiles of router.rounding_tile={tile} on average, below "
            f"router.rounding_min_mean_tiles={router.rounding_min_mean_tiles:g}; raise "
            "train.micro_batch_size (and train.global_batch_size, with many processes), or leave "
            "it out"
        )
    most = tokens // tile
    if router.rounding_max_tiles is not None:
        most = min(most, math.ceil(router.rounding_max_tiles * mean))
    if router.rounding_min_tiles > most:
        raise ConfigError(
            f"router.rounding_min_tiles={router.rounding_min_tiles} is more than an expert can "
            f"get of a micro-batch of {tokens} tokens; allowed: 0 to {most}"
        )


def refuse_sharded(config: Config, sharing: str) -> None:
    """ConfigError for what needs a model whole in one process.

    Args:
        sharing: what shares it, for the message: "4 processes", "parallel.engine=fsdp2".
    """
    for place, value in (
        ("train.sparse_density", config.train.sparse_density),
        ("log.activation_threshold", config.log.activation_threshold),
    ):
        if value is not None:
            raise ConfigError(
                f"{place}={value:g} works in one process only and without an engine, and this run "
                f"has {sharing}; leave it out"
            )
    widths = config.model.config.moe_expert_widths
    if widths is not None:
        raise ConfigError(
            f"model.moe_expert_widths={widths!r} works in one process only and without an engine, "
            f"and this run has {sharing}; leave it out"
        )
    check_importance(config, sharing)
    for place in ("optim.weights", "optim.moments"):  # AdamW of the engines is their own
        value, default = _value(config, place), _default(config, place)
        if value != default:
            raise ConfigError(
                f"{place}={value!r} works in one process only and without an engine, and this run "
                f"has {sharing}; allowed: {default}"
            )
    if config.train.cuda_graph:
        raise ConfigError(
            f"train.cuda_graph=true cannot go with {sharing}; allowed: one process, without an "
            "engine"
        )


def check_states(config: Config, dtype: str) -> None:
    """ConfigError for narrow optimizer states of a model that is not narrow itself."""
    for place in ("optim.weights", "optim.moments"):
        value = _value(config, place)
        if value != _default(config, place) and dtype != "bfloat16":
            raise ConfigError(
                f"{place}={value!r} needs a bfloat16 model, and this run computes in {dtype}: "
                "set train.dtype=bfloat16, or leave it out"
            )


def check_graph(config: Config, device: str, dtype: str, accumulation: int) -> None:
    """ConfigError for what cannot be captured as a CUDA graph, by name."""
    router, width = config.router, config.model.config.head_dim
    noisy = (
        router.jitter
        or router.expert_dropout
        or router.sample_temperature
        or router.rounding in ("stochastic", "systematic")
    )
    counted = router.balance_scope == "global" and router.balance_coef
    refused = (
        (device != "cuda", f"a run on {device}", "a CUDA device"),
        (dtype != "bfloat16", f"train.dtype={dtype}", "bfloat16"),
        (
            config.model.kernels in ("reference", "spmm"),
            f"model.kernels={config.model.kernels}",
            "auto, triton, hopper",
        ),
        (
            config.train.sparse_density is not None,
            "train.sparse_density, whose masks come by the number of the step",
            "one of the two",
        ),
        (width % 8 or width > 256, f"model.head_dim={width}", "multiples of 8 up to 256"),
        (
            counted and accumulation > 1,
            f"router.balance_scope=global and {accumulation} micro-batches in a step",
            "router.balance_scope=lagged, or one micro-batch",
        ),
        (
            noisy and config.train.checkpointing == "full",
            "train.checkpointing=full and random routing",
            "train.checkpointing=none, selective",
        ),
    )
    for impossible, what, allowed in refused:
        if impossible:
            raise ConfigError(f"train.cuda_graph=true cannot go with {what}; allowed: {allowed}")
