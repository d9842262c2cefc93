"""What the `experts` section of a config means for a run, and what cannot be.

What is told in the events can be followed on paper before the run starts: who is where, and how
many experts each layer has in the end.
"""

from __future__ import annotations

from moe.config import QuantileBias
from training.config.load import ConfigError
from training.config.sections import Config
from training.surgery.config import ExpertEvent


def decides(config: Config) -> bool:
    """Whether a policy changes experts by what they are worth."""
    policy = config.expert_changes.policy
    return policy is not None and policy.decides


def uses_slots(config: Config) -> bool:
    """Whether experts come and go in this run."""
    return bool(config.expert_changes.events) or decides(config)


def start_experts(config: Config) -> int | None:
    """Experts of a layer at first; None: the same slots hold one forever, and no mask is kept."""
    if not uses_slots(config):
        return None
    return config.expert_changes.start or config.model.config.num_experts


def uses_families(config: Config) -> bool:
    """Whether a token chooses one of each family of copies at most."""
    return uses_slots(config) and config.expert_changes.copies.kind == "family"


def least_experts(config: Config) -> int:
    """Experts that a layer cannot do without."""
    router, k = config.router, config.model.config.num_experts_per_tok
    start = router.top_k.start if router.top_k is not None else 0
    return max(k, start) + isinstance(router.bias, QuantileBias)


def revives_dead(config: Config) -> int | None:
    """Steps after which a dead expert becomes a copy of the busiest one; None: never."""
    policy = config.expert_changes.policy
    return policy.after if policy is not None and policy.kind == "revive" else None


def chosen_by_importance(config: Config) -> bool:
    """Whether anything looks at what experts are worth."""
    by_event = any(
        event.expert is None or (event.kind == "revive" and event.slot is None)
        for event in config.expert_changes.events
    )
    return decides(config) or by_event


def importance(config: Config) -> str:
    """What is measured: nothing but the load where nothing looks at it."""
    return config.expert_changes.importance.kind if chosen_by_importance(config) else "load"


def dormant_copies(config: Config) -> bool:
    """Whether a copy can begin without tokens: its bias lets them in again, by its own score."""
    return isinstance(config.router.bias, QuantileBias) and config.router.score == "sigmoid"


def check_experts(config: Config) -> None:
    """Refuse events and limits that cannot be.

    Raises:
        ConfigError: key, value, what is allowed.
    """
    experts, model, router = config.expert_changes, config.model.config, config.router
    if model.mixed_widths and experts.policy is not None:
        raise ConfigError(
            f"experts.policy.kind={experts.policy.kind!r} takes all experts for equally wide, "
            "which they are not with model.moe_expert_widths; allowed: experts.policy=null"
        )
    if not uses_slots(config):
        return
    if not model.moe_layers:
        key = "events" if experts.events else "policy"
        raise ConfigError(f"experts.{key} has no effect: no layer of this model has experts")
    if experts.start is not None and config.model.init_from is not None:
        raise ConfigError(
            f"experts.start={experts.start} does not go with model.init_from, which says which "
            "slots are in use; leave it out"
        )
    least, slots = least_experts(config), model.num_experts
    resizes = experts.policy is not None and experts.policy.kind == "resize"
    limits = [("start", start_experts(config), least, slots)]
    if resizes:
        low, high = experts.policy.min_experts or least, experts.policy.max_experts or slots
        limits += [
            ("policy.min_experts", low, least, high),
            ("policy.max_experts", high, low, slots),
        ]
    for key, value, lowest, highest in limits:
        if not lowest <= value <= highest:
            raise ConfigError(
                f"experts.{key}={value} must be from {lowest} to {highest} here, with "
                f"model.num_experts={slots} slots"
            )
    if start_experts(config) < slots and not (
        resizes or any(event.kind == "clone" for event in experts.events)
    ):
        raise ConfigError(
            f"experts.start={experts.start} leaves slots free that nothing ever fills; allowed "
            f"without experts.policy.kind=resize or events of kind clone: {slots} "
            "(model.num_experts), or leave it out"
        )
    if experts.copies.kind == "dormant" and not dormant_copies(config):
        bias = "null" if router.bias is None else router.bias.kind
        raise ConfigError(
            "experts.copies.kind='dormant' needs router.bias.kind=quantile, which lets tokens in "
            f"again, and the score sigmoid, which is each expert's own; allowed with {bias} and "
            f"{router.score}: copy"
        )
    if experts.copies.kind == "family":
        for key, wrong, allowed in (
            ("router.selection.kind='ema'", _kind(router.selection) == "ema", "null"),
            ("experts.copies.noise=0", not experts.copies.noise, "above 0"),
        ):
            if wrong:
                raise ConfigError(
                    f"{key} does not go with experts.copies.kind='family', whose members a token "
                    f"tells apart by their own rows alone; allowed: {allowed}"
                )
    for key, wrong, allowed in (
        ("model.moe_expert_widths", model.mixed_widths, "null"),
        (f"model.n_group={model.expert_groups[0]}", model.expert_groups[0] > 1, "1"),
        ("router.gradient", router.gradient is not None, "null"),
        ("router.rounding.max_tiles", router.rounding and router.rounding.max_tiles, "null"),
        ("train.sparsity", config.train.sparsity is not None, "null"),
    ):
        if wrong:
            raise ConfigError(
                f"{key} does not go with experts that come and go (experts); allowed: {allowed}"
            )
    follow_events(config)


def _kind(option: object) -> str | None:
    return getattr(option, "kind", None)


def check_importance(config: Config, sharing: str) -> None:
    """ConfigError for an importance that needs an expert whole in one process."""
    how = config.expert_changes.importance.kind
    if chosen_by_importance(config) and how in ("reap", "taylor"):
        raise ConfigError(
            f"experts.importance.kind={how!r} works in one process only and without an engine, and "
            f"this run has {sharing}; allowed: gate_mass, load"
        )


def follow_events(config: Config) -> list[int]:
    """How many experts each layer has after all events; those of a policy cannot be foreseen.

    Raises:
        ConfigError: an event that cannot happen.
    """
    events, model = config.expert_changes.events, config.model.config
    layers, slots, least = len(model.moe_layers), model.num_experts, least_experts(config)
    sure = _kind(config.expert_changes.policy) != "resize"
    counts = [start_experts(config) or slots] * layers
    places: list[set[int] | None] = [set(range(count)) if sure else None for count in counts]
    steps = [event.step for event in events]
    if steps != sorted(steps):
        raise ConfigError(f"experts.events are at the steps {steps}; they must stand in order")
    for number, event in enumerate(events):
        where = f"experts.events.{number}"
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
    event: ExpertEvent,
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


def events_uneven(config: Config) -> bool:
    """Whether the events leave layers with different numbers of experts."""
    return bool(config.expert_changes.events) and len(set(follow_events(config))) > 1
