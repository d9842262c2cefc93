"""The `surgery` section of a run's config: experts that come and go (docs/surgery.md).

What is told in the events can be followed on paper before the run starts: who is where, and how
many experts each layer has in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from models.config import Count, Positive, Strict
from training.config_load import ConfigError

if TYPE_CHECKING:
    from training.config import Config


class SurgeryEvent(Strict):
    """Something that happens to experts after a step."""

    step: Positive
    """After this step."""
    kind: Literal["clone", "retire", "revive"]
    """clone: a free slot gets a copy of an expert. retire: an expert goes. revive: a copy of one
    expert takes the place of another one."""
    layer: Count | None = None
    """Number of the MoE layer, from 0; empty: every one."""
    expert: Count | None = None
    """Who is copied, or who retires. Empty: of largest load times importance, or of least
    importance."""
    slot: Count | None = None
    """Where the copy goes. Empty: the first free slot, or (revive) that of the expert of least
    importance."""


class SurgeryConfig(Strict):
    """Experts that come and go: `model.num_experts` are slots, of which some hold an expert."""

    start_experts: Positive | None = None
    """Slots of each layer that hold an expert at first; empty: all `model.num_experts`."""
    events: list[SurgeryEvent] = Field(default_factory=list)
    """What happens at fixed steps."""
    policy: Literal["none", "replace", "resize"] = "none"
    """none; replace: an expert that is not needed becomes a copy of the one that is needed most;
    resize: those that are not needed retire, and those that are overloaded are cloned."""
    every: Positive = 500
    """Steps between the policy's decisions; at most one change in a layer each time."""
    dry_run: bool = False
    """true: the policy only logs what it would do."""
    importance: Literal["load", "gate_mass", "reap", "taylor"] = "taylor"
    """What an expert is worth: its tokens; its gates; gate times norm of its output (an experts'
    forward on top); or the loss that would go with it, to first order. The last two need one
    process."""
    importance_decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Of the averages over steps of importance and load."""
    retire_below: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Part of the layer's median importance below which an expert is not needed. Nor is one that
    has been dead for 200 steps."""
    retire_after: Positive = 2
    """Decisions in a row for which that must hold."""
    clone_above: Annotated[float, Field(gt=1)] = 1.5
    """resize: load above which an expert is cloned, as a multiple of the mean."""
    cooldown: Positive = 1000
    """Steps for which the policy leaves a layer alone after a change in it."""
    min_experts: Positive | None = None
    """resize: fewest experts of a layer; empty: as many as a token needs."""
    max_experts: Positive | None = None
    """resize: most experts of a layer; empty: all slots."""
    clone: Literal["dormant", "family", "copy"] | None = None
    """How copies begin. dormant: no token chooses it until `router.bias_update=quantile` has raised
    its bias, so the step after the change computes the same bits; needs the score sigmoid. copy: at
    work at once. family: likewise, but a token chooses one of a family of copies at most, its best
    one, so the output stays but for `noise`; no transformers family has that (`router.end_steps`).
    Empty: dormant where it is possible, else copy."""
    noise: Annotated[float, Field(ge=0)] = 0.01
    """Noise on a copy's weights, relative to their deviation."""


# Rule and score with which a copy can begin without tokens.
DORMANT = ("quantile", "sigmoid")


def uses_slots(config: Config) -> bool:
    """Whether experts come and go in this run."""
    return bool(config.surgery.events) or config.surgery.policy != "none"


def start_experts(config: Config) -> int | None:
    """Experts of a layer at first; None: the same slots hold one for ever, and no mask is kept."""
    if not uses_slots(config):
        return None
    return config.surgery.start_experts or config.model.config.num_experts


def uses_families(config: Config) -> bool:
    """Whether a token chooses one of each family of copies at most."""
    return uses_slots(config) and config.surgery.clone == "family"


def least_experts(config: Config) -> int:
    """Experts that a layer cannot do without."""
    router, k = config.router, config.model.config.num_experts_per_tok
    return max(k, router.top_k_start or 0) + (router.bias_update == "quantile")


def makes_copies(config: Config) -> bool:
    """Whether a slot may get a copy of an expert."""
    events = any(event.kind != "retire" for event in config.surgery.events)
    return events or config.surgery.policy != "none"


def chosen_by_importance(config: Config) -> bool:
    """Whether anything looks at what experts are worth."""
    surgery = config.surgery
    by_event = any(
        event.expert is None or (event.kind == "revive" and event.slot is None)
        for event in surgery.events
    )
    return surgery.policy != "none" or by_event


def importance(config: Config) -> str:
    """What is measured: nothing but the load where nothing looks at it."""
    return config.surgery.importance if chosen_by_importance(config) else "load"


def clone_default(config: Config) -> str:
    """`surgery.clone` where it is empty."""
    router = config.router
    return "dormant" if (router.bias_update, router.score) == DORMANT else "copy"


def check_surgery(config: Config) -> None:
    """Refuse events and limits that cannot be.

    Raises:
        ConfigError: key, value, what is allowed.
    """
    surgery, model = config.surgery, config.model.config
    if not uses_slots(config):
        return
    if not model.moe_layers:
        key = "events" if surgery.events else "policy"
        raise ConfigError(f"surgery.{key} has no effect: no layer of this model has experts")
    if surgery.start_experts is not None and config.model.init_from is not None:
        raise ConfigError(
            f"surgery.start_experts={surgery.start_experts} does not go with model.init_from, "
            "which says which slots are in use; leave it out"
        )
    least, slots = least_experts(config), model.num_experts
    low, high = surgery.min_experts or least, surgery.max_experts or slots
    for key, value, allowed in (
        ("start_experts", start_experts(config), (least, slots)),
        ("min_experts", low, (least, high)),
        ("max_experts", high, (low, slots)),
    ):
        if not allowed[0] <= value <= allowed[1]:
            raise ConfigError(
                f"surgery.{key}={value} must be from {allowed[0]} to {allowed[1]} here, with "
                f"model.num_experts={slots} slots"
            )
    clones = surgery.policy == "resize" or any(e.kind == "clone" for e in surgery.events)
    if start_experts(config) < slots and not clones:
        raise ConfigError(
            f"surgery.start_experts={surgery.start_experts} leaves slots free that nothing ever "
            f"fills; allowed without surgery.policy=resize or events of kind clone: {slots} "
            "(model.num_experts), or leave it out"
        )
    rule, score = config.router.bias_update, config.router.score
    if surgery.clone == "dormant" and (rule, score) != DORMANT:
        raise ConfigError(
            f"surgery.clone='dormant' needs router.bias_update=quantile, which lets tokens in "
            f"again, and the score sigmoid, which is each expert's own; allowed with {rule!r} and "
            f"{score!r}: copy"
        )
    if surgery.clone == "family" and (config.router.ema is not None or not surgery.noise):
        key, value = ("router.ema", config.router.ema) if surgery.noise else ("surgery.noise", 0)
        raise ConfigError(
            f"{key}={value:g} does not go with surgery.clone='family', whose members a token tells "
            f"apart by their own rows alone; allowed: {'empty' if surgery.noise else 'above 0'}"
        )
    for key, value, idle, allowed in (
        ("model.moe_expert_widths", model.moe_expert_widths, None, "empty"),
        ("model.n_group", model.n_group or 1, 1, "1"),
        ("router.score", score if score == "relu" else None, None, "another score"),
        ("router.gradient", config.router.gradient, "plain", "plain"),
        ("router.rounding_max_tiles", config.router.rounding_max_tiles, None, "empty"),
        ("train.sparse_density", config.train.sparse_density, None, "empty"),
    ):
        if value != idle:
            raise ConfigError(
                f"{key}={value!r} does not go with experts that come and go (surgery); allowed: "
                f"{allowed}"
            )
    follow_events(config)


def check_importance(config: Config, sharing: str) -> None:
    """ConfigError for an importance that needs an expert whole in one process."""
    how = config.surgery.importance
    if chosen_by_importance(config) and how in ("reap", "taylor"):
        raise ConfigError(
            f"surgery.importance={how!r} works in one process only and without an engine, and "
            f"this run has {sharing}; allowed: gate_mass, load"
        )


def follow_events(config: Config) -> list[int]:
    """How many experts each layer has after all events; those of a policy cannot be foreseen.

    Raises:
        ConfigError: an event that cannot happen.
    """
    surgery, model = config.surgery, config.model.config
    layers, slots, least = len(model.moe_layers), model.num_experts, least_experts(config)
    sure = surgery.policy != "resize"
    counts = [start_experts(config) or slots] * layers
    places: list[set[int] | None] = [set(range(count)) if sure else None for count in counts]
    steps = [event.step for event in surgery.events]
    if steps != sorted(steps):
        raise ConfigError(f"surgery.events are at the steps {steps}; they must stand in order")
    for number, event in enumerate(surgery.events):
        where = f"surgery.events.{number}"
        if event.kind == "retire" and event.slot is not None:
            raise ConfigError(
                f"{where}.slot={event.slot}: nothing is put in a slot by a retirement"
            )
        if event.layer is not None and event.layer >= layers:
            raise ConfigError(f"{where}.layer={event.layer} is none of the {layers} MoE layers")
        for key in ("expert", "slot"):
            value = getattr(event, key)
            if value is not None and value >= slots:
                raise ConfigError(f"{where}.{key}={value} is none of the {slots} slots")
        for layer in range(layers) if event.layer is None else (event.layer,):
            _follow(event, where, layer, counts, places, (least, slots), sure)
    return counts


def _follow(
    event: SurgeryEvent,
    where: str,
    layer: int,
    counts: list[int],
    places: list[set[int] | None],
    limits: tuple[int, int],
    sure: bool,
) -> None:
    least, slots = limits
    there, text = places[layer], f"after step {event.step} of MoE layer {layer}"
    if there is not None:
        if event.expert is not None and event.expert not in there:
            raise ConfigError(f"{where}.expert={event.expert}: that slot is free {text}")
        if event.slot is not None and (event.slot in there) == (event.kind == "clone"):
            holds = "holds an expert" if event.kind == "clone" else "is free"
            raise ConfigError(f"{where}.slot={event.slot}: that slot {holds} {text}")
    if event.kind == "revive":
        if event.expert is not None and event.expert == event.slot:
            raise ConfigError(f"{where}.slot={event.slot} is that of its own parent")
        return
    counts[layer] += 1 if event.kind == "clone" else -1
    if sure and not least <= counts[layer] <= slots:
        raise ConfigError(
            f"{where}.kind={event.kind!r} would leave MoE layer {layer} with {counts[layer]} "
            f"experts; allowed: {least} to {slots}"
        )
    if there is None:
        return
    if event.kind == "clone":
        free = [slot for slot in range(slots) if slot not in there]
        there.add(free[0] if event.slot is None else event.slot)
    elif event.expert is None:
        places[layer] = None  # who retires is known only then
    else:
        there.discard(event.expert)


def uneven(counts: Sequence[int]) -> bool:
    """Whether layers have different numbers of experts."""
    return len(set(counts)) > 1


def events_uneven(config: Config) -> bool:
    """Whether the events leave layers with different numbers of experts."""
    return bool(config.surgery.events) and uneven(follow_events(config))
