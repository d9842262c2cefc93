"""Whether the routers of a config can be built and do what the config says, before a model is.

A schedule of K must fit the experts and end with the run, what begins with some step must begin in
it. Used by training/config/build.py where the length of the run is known, and by train.py where it
comes out of the data. An error of the layer's own checks is told by the names of the config file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from models.config import known_fields
from training.assemble import router_options
from training.config.checks import check_sparse
from training.config.expert_checks import uses_slots
from training.config.experts import SurgeryConfig
from training.config.export_compat import check_ends, last_acting_step
from training.config.load import ConfigError, shown
from training.config.router import RouterConfig
from training.surgery.policy import calendar, last_release

if TYPE_CHECKING:
    from training.config.sections import Config


# Names of the layer's own settings (`moe.MoEConfig` and what it holds) that a config file has under
# another name; the others are looked up in its sections.
_PLACES = {
    "groups": "model.n_group",
    "groups_kept": "model.topk_group",
    "group_top": "model.n_group",
    "norm": "model.norm_topk_prob",
    "route_scale": "model.routed_scaling_factor",
    "expert_widths": "model.moe_expert_widths",
    "expert_size": "model.moe_intermediate_size",
    "shared_expert_size": "model.n_shared_experts",
    "activation": "model.hidden_act",
    "init_std": "model.initializer_range",
    "router_init_std": "router.init_std",
    "kernels": "model.kernels",
    "save": "model.save",
    "selection_bias": "router.bias_update",
    "families": "surgery.clone",
    "amplitude": "router.amplitude",
    "capacity": "router.capacity_factor",
    "capacity_drop": "router.capacity_drop",
    "top_k": "router.top_k_schedule",
    "bias_targets": "router.balance_load",
    "keep_load": "router.balance_scope",
    "variant": "router.rounding",
    **dict.fromkeys(
        ("bias_anneal", "ema_until", "families_until", "capacity_until"),
        "router.end_steps",
    ),
}
# Values that a config file spells otherwise.
_VALUES = {
    "norm": {"'topk_sum'": "true", "'softmax_topk'": "true", "'none'": "false"},
    "families": {"True": "'family'", "False": "'copy'"},
}
_NAME = re.compile(
    r"(?<![\w.'/])(?P<owner>control\.|rounding\.)?(?P<name>[a-z]\w*)=(?P<value>'\w*'|\w+)?"
)


def place_of(name: str, owner: str = "") -> str | None:
    """section.key of a setting of the layer; None if a config file has none such.

    Args:
        owner: "control." or "rounding.", if it belongs to that part of a layer's config.
    """
    if owner == "rounding." and name != "variant":
        name = f"rounding_{name}"
    if name in _PLACES:
        return _PLACES[name]
    for section, fields in (
        ("router", RouterConfig.model_fields),
        ("surgery", SurgeryConfig.model_fields),
        ("model", known_fields()),
    ):
        if name in fields:
            return f"{section}.{name}"
    rounding = f"rounding_{name}"
    return f"router.{rounding}" if rounding in RouterConfig.model_fields else None


def in_config_words(sentence: str) -> str:
    """An error of the layer's, its settings by the names that they have in a config file."""

    def renamed(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        place = place_of(name, match["owner"] or "")
        if place is None:
            return match[0]
        value = _VALUES.get(name, {}).get(value, value or "")
        return f"{place}={ {'True': 'true', 'False': 'false', 'None': 'null'}.get(value, value) }"

    sentence = re.sub(
        r"(?<![\w.'/])(control|rounding)\.([a-z]\w*)(?![\w=])",
        lambda m: place_of(m[2], f"{m[1]}.") or m[0],
        _NAME.sub(renamed, sentence),
    )
    return re.sub(r"allowed: None\b", "allowed: null", sentence)


def check_routers(config: Config, steps: int) -> None:
    """Refuse routers that cannot be, in a run of so many steps.

    Raises:
        ConfigError: key, value, what is allowed.
    """
    model = config.model.config
    check_sparse(config, steps)
    if not model.moe_layers:
        _refuse_all(config)
        return
    _check_starts(config, steps)
    built = {"kernels": config.model.kernels, "save": config.model.save}
    try:
        check_ends(config, steps)
        options = built | router_options(config, model, steps)
        for layer in model.moe_layers:
            model.moe_config(layer, **options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(in_config_words(str(error))) from None


def _refuse_all(config: Config) -> None:
    """A model without experts has no router to set anything of."""
    filled = {
        "score": config.model.config.router_score,
        "bias_update": "none",
        "balance_coef": 0.0,
    }
    for key, field in RouterConfig.model_fields.items():
        value, default = getattr(config.router, key), field.get_default(call_default_factory=True)
        # those that are empty by default have been filled
        default = filled.get(key, default)
        if value != default:
            raise ConfigError(
                f"router.{key}={shown(value)} has no effect: no layer of this model has "
                "experts; leave it out"
            )


def _check_starts(config: Config, steps: int) -> None:
    """What begins at a step must begin while it can still do something."""
    if config.router.bias_freeze_at == 1 and not config.router.calibrate_bias:
        raise ConfigError(
            "router.bias_freeze_at=1 never lets the selection bias move; allowed: 2 or more, "
            "router.calibrate_bias=true, or router.bias_update=none"
        )
    if uses_slots(config):
        _check_changes(config, steps)
    last_bias = last_acting_step(config, "router.bias_update", steps)
    whole = (steps, f"the run has {steps} steps")
    ends = dict.fromkeys(("freeze_at", "revive_after", "bias_freeze_at"), whole)
    ends["sample_until"] = (steps - 1, f"the last of the run's {steps} steps takes the best")
    if last_bias is not None:
        start = last_bias - config.router.end_steps
        ends["bias_freeze_at"] = (
            start,
            f"router.end_steps={config.router.end_steps} brings the bias to zero from step "
            f"{start + 1} on",
        )
    for key, (last, why) in ends.items():
        value = getattr(config.router, key)
        if value is not None and value > last:
            raise ConfigError(
                f"router.{key}={value} has no effect: {why}; allowed: 1 to {last}, or leave it out"
            )


def _check_changes(config: Config, steps: int) -> None:
    """Changes of experts must come while the run goes on, and copies must come to work in it."""
    times, until = calendar(config, steps), last_release(config, steps)
    if times.every is not None and times.every >= steps:
        raise ConfigError(
            f"surgery.every={times.every} has no effect: the run has {steps} steps; allowed: below "
            "that"
        )
    for number, event in enumerate(config.surgery.events):
        last, why = steps - 1, f"the run has {steps} steps"
        if times.level_at is not None:
            last = times.level_at
            why = f"layers are brought to one number of experts after step {last}"
        if event.kind != "retire" and until - 1 < last:
            last = until - 1
            why = f"nothing lets tokens find a dormant copy after step {until}"
        if event.step > last:
            raise ConfigError(
                f"surgery.events.{number}.step={event.step} is too late: {why}; allowed: 1 to "
                f"{last}"
            )
