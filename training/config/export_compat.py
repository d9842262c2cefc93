"""Whether what trains is what an exported folder computes.

A rule of the routers says by its word `export` whether it changes which function the trained model
is; what else does stands in `KNOBS`, with the families that can express it. One that the model's
family cannot is refused before the run starts, unless the config says that it ends
(`router.end_steps`: nothing of the kind acts in the last so many steps) or that the run is not
meant to be exported (`router.exportable: false`). All else changes training alone: losses, learning
rates, token rounding, noise.

The end of a run compares the model with what its folder will compute (`training/probe.py`), and a
checkpoint records which knobs still act in it, so that no earlier one is exported by mistake.
Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.config.load import ConfigError
from training.surgery.checks import events_uneven, uses_families

if TYPE_CHECKING:
    from training.config.sections import Config


@dataclass(frozen=True)
class Knob:
    """A setting that makes the model another function."""

    place: str
    """section.key"""
    what: str
    """What an exported folder would lack."""
    used: Callable[[Config], bool]
    end: str | None = None
    """How `router.end_steps` ends it; None: it cannot end."""
    biased: bool = False
    """Whether a family whose routers have a selection bias can say it in its config.json."""


_LEVELS = "different numbers of experts in its layers"
KNOBS = (
    Knob(
        "router.score",
        "other scores than its own",
        lambda c: c.router.score != c.model.config.router_score,
    ),
    # with a bias, layers are padded by experts that are never chosen
    Knob("experts.events", _LEVELS, events_uneven, "levelled", biased=True),
    Knob(
        "experts.policy",
        _LEVELS,
        lambda c: _resizes(c) and len(c.model.config.moe_layers) > 1,
        "levelled",
        biased=True,
    ),
    Knob("experts.copies", "choice within families", uses_families, "switched off"),
)


def _resizes(config: Config) -> bool:
    return (
        config.expert_changes.policy is not None and config.expert_changes.policy.kind == "resize"
    )


def inexact(config: Config) -> list[Knob]:
    """The knobs in use that the model's family cannot express."""
    biased = config.model.config.has_selection_bias
    rules = [
        Knob(
            f"router.{key}",
            rule.lacks,
            lambda c: True,
            None if rule.export == "never" else rule.ended,
            biased=rule.export == "in the family",
        )
        for key, rule in config.router.rules().items()
        if rule.export != "training only"
    ]
    knobs = (*KNOBS, *rules)
    return [knob for knob in knobs if knob.used(config) and not (knob.biased and biased)]


def check_exactness(config: Config) -> None:
    """Refuse a run whose export would be another model.

    Raises:
        ConfigError: naming the setting, the family, and what is allowed.
    """
    router, family = config.router, config.model.config.family
    if not router.exportable:
        return
    for knob in inexact(config):
        lacks = f"{_given(config, knob.place)} cannot be exported: {family} has no {knob.what}"
        if knob.end is None:
            raise ConfigError(
                f"{lacks}; allowed only with router.exportable=false, for a run that is not to be "
                "exported"
            )
        if router.end_steps is None:
            raise ConfigError(
                f"{lacks}. Give router.end_steps: the last so many steps train without it "
                f"({knob.end} before), or router.exportable=false for a run that is not to be "
                "exported"
            )


def _given(config: Config, place: str) -> str:
    """A setting as a message names it: of an option its kind."""
    section, _, key = place.partition(".")
    value = getattr(getattr(config, section), key)
    if (kind := getattr(value, "kind", None)) is not None:
        return f"{place}.kind={kind}"
    return f"{place}={value}" if isinstance(value, str) else place


def check_ends(config: Config, steps: int) -> None:
    """ConfigError if a run of so many steps is too short for its `router.end_steps`."""
    last = config.router.end_steps
    if last is not None and 2 * last >= steps:
        raise ConfigError(
            f"router.end_steps={last} must be less than half of the run's {steps} steps: as many "
            "steps before them are there for annealing"
        )


def last_acting_step(config: Config, place: str, steps: int) -> int | None:
    """Last step in which the knob acts as it likes; None: it acts to the end."""
    if any(knob.place == place for knob in inexact(config)) and config.router.end_steps:
        return steps - config.router.end_steps
    return None


def _masked(config: Config, step: int, steps: int) -> list[str]:
    """Masks whose hidden weights are not zero yet after `step`."""
    masks = config.train.sparsity
    if masks is None or masks.kind != "straight_through":
        return []
    first, _, last = masks.steps(steps)
    hidden = first <= step < last
    return ["masks of weights that go on learning (train.sparsity)"] if hidden else []


def acting(config: Config, step: int, steps: int) -> list[str]:
    """What an exported folder would lack of a model after `step` of `steps` steps."""
    return _masked(config, step, steps) + [
        f"{knob.what} ({knob.place})"
        for knob in inexact(config)
        if (last := last_acting_step(config, knob.place, steps)) is None or step <= last
    ]
