"""Whether the routers of a config can be built and do what the config says, before a model is.

A schedule of K must fit the experts and end with the run, what begins with some step must begin in
it. Used by training/config.py where the length of the
run is known, and by train.py where it comes out of the data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.assemble import router_options
from training.config_checks import check_sparse
from training.config_load import ConfigError, shown
from training.config_router import RouterConfig
from training.config_surgery import uses_slots
from training.exactness import check_ends, last_acting_step
from training.surgery_policy import calendar, last_release

if TYPE_CHECKING:
    from training.config import Config


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
    try:
        check_ends(config, steps)
        model.moe_config(model.moe_layers[0], **router_options(config, model, steps))
    except ConfigError:
        raise
    except ValueError as error:
        key = str(error).partition("=")[0]
        section = "router." if key in RouterConfig.model_fields else ""
        raise ConfigError(f"{section}{error}") from None


def _refuse_all(config: Config) -> None:
    """A model without experts has no router to set anything of."""
    for key, field in RouterConfig.model_fields.items():
        value, default = getattr(config.router, key), field.get_default(call_default_factory=True)
        # those that are empty by default have been filled by the family
        if value != default and key not in ("score", "bias_update", "balance_coef"):
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
