"""What cannot be, told before a model is built: by the config alone, by a plan, or by the length of
the run.

A section refuses by itself what its own fields cannot mean together, and the layer what no router
and no experts can do; here is what several sections have to do with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moe.config import RouterConfig
from moe.kernels.common.activations import IN_KERNELS
from parallel.engines.choose import LOCAL
from training.assemble import router_options
from training.config.export_compat import check_ends, check_exactness, last_acting_step
from training.config.load import ConfigError
from training.config.plan import Plan
from training.config.sections import Config
from training.surgery.checks import check_experts, check_importance, revives_dead, uses_slots
from training.surgery.policy import calendar, last_release

# Where epochs make the length, any that no schedule is too long for does.
ANY_STEPS = 1_000_000


def check_config(config: Config) -> None:
    """Refuse settings that are right alone and impossible together.

    Raises:
        ConfigError: key, value, what is allowed.
    """
    data, model, router = config.data, config.model.config, config.router
    if data.seq_len > model.max_position_embeddings:
        raise ConfigError(
            f"data.seq_len={data.seq_len} must not exceed "
            f"model.max_position_embeddings={model.max_position_embeddings}"
        )
    check_experts(config)
    check_exactness(config)
    if not model.moe_layers:
        _refuse_options(router)
        return
    _check_layers(config, config.train.steps or ANY_STEPS)


def _check_layers(config: Config, steps: int) -> None:
    """Refuse what no layer and no router can do."""
    model = config.model.config
    built = {"kernels": config.model.kernels, "save": config.model.save}
    try:
        for layer in model.moe_layers:
            model.moe_config(layer, **built, **router_options(config, model, steps))
    except ValueError as error:
        where = "" if str(error).startswith("router.") else "the model's layers cannot be built: "
        raise ConfigError(f"{where}{error}") from None


def _refuse_options(router: RouterConfig) -> None:
    """A model without experts has no router to set anything of."""
    plain = RouterConfig(score=router.score, balance=None, bias=None)
    for key in RouterConfig.model_fields:
        if getattr(router, key) != getattr(plain, key):
            raise ConfigError(
                f"router.{key} has no effect: no layer of this model has experts; leave it out"
            )


# --- a plan ---------------------------------------------------------------------------------------


def check_plan(config: Config, plan: Plan) -> None:
    """Refuse what cannot be computed by these processes, on this device.

    Raises:
        ConfigError: key, value, what is allowed.
    """
    if plan.engine != LOCAL:
        several = f"{plan.world_size} processes"
        sharing = several if plan.world_size > 1 else f"parallel.engine={plan.engine}"
        refuse_sharded(config, sharing)
    for key in ("weights", "moments"):
        if getattr(config.optim, key) != "float32" and plan.dtype != "bfloat16":
            raise ConfigError(
                f"optim.{key}={getattr(config.optim, key)!r} needs a bfloat16 model, and this run "
                f"computes in {plan.dtype}: set train.dtype=bfloat16, or leave it out"
            )
    if config.model.save == "fp8_h" and plan.dtype != "bfloat16":
        raise ConfigError(
            f"model.save='fp8_h' needs train.dtype='bfloat16', this run's is {plan.dtype!r}; "
            "allowed here: h, x"
        )
    _check_rounding(config, plan.micro_batch_size)
    if config.train.cuda_graph:
        _check_graph(config, plan)
    if config.train.steps is not None:
        check_run(config, config.train.steps)


def refuse_sharded(config: Config, sharing: str) -> None:
    """ConfigError for what needs a model whole in one process.

    Args:
        sharing: what shares it, for the message: "4 processes", "parallel.engine=fsdp2".
    """
    check_importance(config, sharing)
    optim = config.optim
    for wrong, what, allowed in (
        (config.train.sparsity is not None, "train.sparsity", "null"),
        (config.log.activation_threshold is not None, "log.activation_threshold", "null"),
        (config.model.config.mixed_widths, "model.moe_expert_widths", "null"),
        (optim.weights != "float32", f"optim.storage.weights={optim.weights!r}", "float32"),
        (optim.moments != "float32", f"optim.storage.moments={optim.moments!r}", "float32"),
        (config.train.cuda_graph, "train.cuda_graph=true", "false"),
    ):
        if wrong:
            raise ConfigError(
                f"{what} works in one process only and without an engine, and this run has "
                f"{sharing}; allowed: {allowed}"
            )


def _check_rounding(config: Config, rows: int) -> None:
    """Refuse token rounding that would not round, or not as it is told, in micro-batches of so many
    rows."""
    model, rounding = config.model.config, config.router.rounding
    if rounding is None:
        return
    exchange = config.parallel.exchange
    fixed = "kind=all_gather" if exchange.kind == "all_gather" else "sizes=bounded"
    if exchange.kind == "all_gather" or getattr(exchange, "sizes", "exact") == "bounded":
        raise ConfigError(
            f"parallel.exchange.{fixed} does not go with router.rounding, which gives "
            "tokens unequal numbers of experts; allowed with it: all_to_all with exact sizes, "
            "pairwise"
        )
    tokens, tile = rows * config.data.seq_len, rounding.tile
    mean = tokens * model.num_experts_per_tok / (model.num_experts * tile)
    if mean < rounding.min_mean_tiles or tokens < tile:
        raise ConfigError(
            f"router.rounding has no effect: a micro-batch of {tokens} tokens gives an expert "
            f"{mean:.2g} tiles of router.rounding.tile={tile} on average, below "
            f"router.rounding.min_mean_tiles={rounding.min_mean_tiles:g}; raise "
            "train.micro_batch_size (and train.global_batch_size, with many processes), or leave "
            "it out"
        )
    most = tokens // tile
    if rounding.max_tiles is not None:
        most = min(most, math.ceil(rounding.max_tiles * mean))
    if rounding.min_tiles > most:
        raise ConfigError(
            f"router.rounding.min_tiles={rounding.min_tiles} is more than an expert can get of a "
            f"micro-batch of {tokens} tokens; allowed: 0 to {most}"
        )


def _check_graph(config: Config, plan: Plan) -> None:
    """ConfigError for what cannot be captured as a CUDA graph, by name."""
    router, width = config.router, config.model.config.widest_head
    random = router.noise is not None or getattr(router.selection, "kind", None) == "sample"
    random |= router.rounding is not None and router.rounding.to in ("stochastic", "systematic")
    counted = router.balance is not None and router.balance.kind == "global"
    for impossible, what, allowed in (
        (plan.device != "cuda", f"a run on {plan.device}", "a CUDA device"),
        (plan.dtype != "bfloat16", f"train.dtype={plan.dtype}", "bfloat16"),
        (
            config.model.kernels in ("reference", "spmm"),
            f"model.kernels={config.model.kernels}",
            "auto, triton, hopper",
        ),
        (
            config.model.config.activation not in IN_KERNELS,
            f"model.hidden_act={config.model.config.hidden_act}, which no kernel knows",
            "an activation of the package",
        ),
        (
            config.train.sparsity is not None,
            "train.sparsity, whose masks come by the number of the step",
            "one of the two",
        ),
        (width % 8 or width > 256, f"heads of width {width}", "multiples of 8 up to 256"),
        (
            counted and plan.accumulation > 1,
            f"router.balance.kind=global and {plan.accumulation} micro-batches in a step",
            "router.balance.kind=lagged, or one micro-batch",
        ),
        (
            random and config.train.checkpointing == "full",
            "train.checkpointing=full and random routing",
            "train.checkpointing=none, selective",
        ),
    ):
        if impossible:
            raise ConfigError(f"train.cuda_graph=true cannot go with {what}; allowed: {allowed}")


# --- the length of the run ------------------------------------------------------------------------


def check_run(config: Config, steps: int) -> None:
    """Refuse what cannot be in a run of so many steps, and layers that cannot be built.

    Raises:
        ConfigError: key, value, what is allowed.
    """
    check_ends(config, steps)
    _check_masks(config, steps)
    if uses_slots(config):
        _check_changes(config, steps)
    for key, value, last, why in _starts(config, steps):
        if value is not None and value > last:
            raise ConfigError(
                f"{key}={value} has no effect: {why}; allowed: 1 to {last}, or leave it out"
            )
    _check_layers(config, steps)


def _starts(config: Config, steps: int) -> Iterator[tuple[str, int | None, int, str]]:
    """Key and value of what begins or ends at a step, its last possible step, and why."""
    router, whole = config.router, f"the run has {steps} steps"
    yield "router.freeze_at", router.freeze_at, steps, whole
    yield "experts.policy.after", revives_dead(config), steps, whole
    until = getattr(router.selection, "until", None)
    yield "router.selection.until", until, steps - 1, f"the last of {steps} steps takes the best"
    if router.bias is not None:
        last, why = steps, whole
        if (ending := last_acting_step(config, "router.bias", steps)) is not None:
            last = ending - router.end_steps
            why = f"router.end_steps brings the bias to zero from step {last + 1} on"
        yield "router.bias.freeze_at", router.bias.freeze_at, last, why


def _check_masks(config: Config, steps: int) -> None:
    """Refuse masks that do not fit into a run of so many steps, or into its model."""
    masks, model = config.train.sparsity, config.model.config
    for place, value in (
        ("train.sparsity", masks),
        ("log.activation_threshold", config.log.activation_threshold),
    ):
        if value is not None and not model.moe_layers:
            raise ConfigError(f"{place} has no effect: no layer has experts")
        if value is not None and model.mixed_widths:
            raise ConfigError(
                f"{place} takes all experts for equally wide, which they are not with "
                "model.moe_expert_widths; leave one of them out"
            )
    if masks is None:
        return
    if revives_dead(config) is not None:
        raise ConfigError(
            "experts.policy.kind=revive copies an expert without its mask; leave it out, or "
            "train.sparsity"
        )
    first, full, last = masks.steps(steps)
    if not first <= full <= last < steps:
        raise ConfigError(
            f"train.sparsity.start={first}, train.sparsity.end={full}, train.sparsity.until={last} "
            f"must follow one another and lie before the last of {steps} steps, so that the last "
            "ones train what is exported"
        )
    smallest = min(model.expert_size, model.hidden_size)
    if masks.block > smallest:
        raise ConfigError(
            f"train.sparsity.block={masks.block} is wider than an expert's matrices; allowed: 1 to "
            f"{smallest}"
        )


def _check_changes(config: Config, steps: int) -> None:
    """Changes of experts must come while the run goes on, and copies must come to work in it."""
    times, until = calendar(config, steps), last_release(config, steps)
    if times.every is not None and times.every >= steps:
        raise ConfigError(
            f"experts.policy.every={times.every} has no effect: the run has {steps} steps; "
            "allowed: below that"
        )
    for number, event in enumerate(config.expert_changes.events):
        last, why = steps - 1, f"the run has {steps} steps"
        if times.level_at is not None:
            last = times.level_at
            why = f"layers are brought to one number of experts after step {last}"
        if event.kind != "retire" and until - 1 < last:
            last = until - 1
            why = f"nothing lets tokens find a dormant copy after step {until}"
        if event.step > last:
            raise ConfigError(
                f"experts.events.{number}.step={event.step} is too late: {why}; allowed: 1 to "
                f"{last}"
            )
