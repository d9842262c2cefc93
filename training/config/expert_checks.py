"""What the `surgery` section of a config means for a run, and what cannot be.

What is told in the events can be followed on paper before the run starts: who is where, and how
many experts each layer has in the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.config.experts import SurgeryEvent
from training.config.load import ConfigError
from training.config.sections import Config

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
        ("model.n_group", model.expert_groups[0], 1, "1"),
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
