"""From a config to the model, the optimizer, and what follows them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.attention.flash4 import fits, installed
from models.attention.sdpa import Choice
from models.build import (
    build_model,
    initial_values,
    parameter_kinds,
    reset_buffers,
    start_routers,
)
from models.execution import apply_checkpointing, compile_blocks
from models.first_weights import FirstWeights
from moe.control import routers_of
from parallel import World
from parallel.engines.choose import make_engine
from parallel.engines.sharded import Sharding
from parallel.mesh import build_mesh
from training.checkpoint.weights import load_initial
from training.config.load import ConfigError
from training.data.config import TokenizerFile
from training.data.sources import store_tokenizers
from training.graph import StepGraph, computation, launch_now, own_stream
from training.health import RoutingHealth
from training.optim.config import RouterRates
from training.optim.groups import parameter_groups
from training.optim.schedule import learning_rate
from training.out_of_memory import LastCounts
from training.snapshot import load
from training.sparsity import Sparsity
from training.step import TERMS, TrainState
from training.surgery.checks import importance, start_experts, uses_families
from training.surgery.importance import ExpertImportance

if TYPE_CHECKING:
    from models.config import ModelConfig
    from models.transformer import Decoder
    from parallel.engines.base import Engine
    from training.config.plan import Plan
    from training.config.sections import Config
    from training.data import TextTokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_config(config: Config, tokenizer: TextTokenizer) -> ModelConfig:
    """The architecture with the tokenizer's special tokens filled in where the config names none.

    Raises:
        ConfigError: the tokenizer has ids that the embedding has no row for.
    """
    given = config.model.config
    if tokenizer.vocab_size > given.vocab_size:
        smaller = f", or data.tokenizer={{kind: bpe, vocab_size: {given.vocab_size}}}"
        if isinstance(config.data.tokenizer, TokenizerFile) or store_tokenizers(config.data):
            smaller = ""
        raise ConfigError(
            f"model.vocab_size={given.vocab_size} is too small for the tokenizer, which has "
            f"{tokenizer.vocab_size} tokens; allowed: at least that{smaller}"
        )
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    fill = {key: value for key, value in ids.items() if getattr(given, key) is None}
    return given.model_copy(update=fill)


def router_options(config: Config, architecture: ModelConfig, steps: int) -> dict[str, Any]:
    """Fields of `moe.MoEConfig` that say how this run routes, beyond what the family fixes.

    Args:
        steps: of the whole run: what cannot be exported ends before the last `router.end_steps`.
    """
    return {
        "router": config.router,
        "steps": steps,
        "start_experts": start_experts(config),
        "importance": importance(config),
        "families": uses_families(config),
    }


FOLLOWERS = (RoutingHealth, ExpertImportance, Sparsity, LastCounts)
"""What can follow a run beside the optimizer; each makes itself, or None where it is not wanted."""


def make_train_state(
    config: Config,
    architecture: ModelConfig,
    plan: Plan,
    world: World,
    device: torch.device,
    *,
    steps: int,
    checkpoint: Path | None = None,
) -> TrainState:
    """The model with first weights, or with those of a checkpoint, and its optimizer.

    One process holds everything; of several none ever holds the whole model.

    Args:
        steps: of the whole run.

    Raises:
        UserError: weights that do not fit. ParallelError: weights that differ between processes.
        CheckpointError: a checkpoint that does not fit.
    """
    if config.train.cuda_graph:
        own_stream(device)
    attention = pick_attention(
        config.model.attention, device, DTYPES[plan.dtype], architecture.widest_head
    )
    model = build_model(
        architecture,
        kernels=config.model.kernels,
        attention=attention,
        save=config.model.save,
        **router_options(config, architecture, steps),
        # What shards a model keeps float32 master weights as its own, and casts them.
        dtype=torch.float32 if plan.sharded else DTYPES[plan.dtype],
        device="meta" if plan.sharded else device,
        seed=None,
    )
    model.train()
    apply_checkpointing(model, config.train.checkpointing)
    optimizer = _engine(config, plan, model, device)
    made = (kind.make(config, model, optimizer, device, steps) for kind in FOLLOWERS)
    graph = StepGraph(partial(computation, model)) if config.train.cuda_graph else None
    state = TrainState(
        model=model,
        forward=optimizer.model,
        optimizer=optimizer,
        world=world,
        device=device,
        learning_rate=lambda step: learning_rate(config.optim, step - 1, steps),
        followers=[follower for follower in made if follower is not None],
        launch=launch_now if graph is None else graph.run,
    )
    if checkpoint is not None:
        load(checkpoint, state)
    else:
        _first_weights(config, state)
    optimizer.check_replicas()
    if plan.compile:  # after the engine has placed the parameters
        routers = max((router.changes for router in routers_of(model)), default=0)
        masks = 0 if state.follower(Sparsity) is None else 2
        compile_blocks(model, changes=masks + routers, whole=plan.whole_blocks)
    return state


def _engine(config: Config, plan: Plan, model: Decoder, device: torch.device) -> Engine:
    """What holds the model and its optimizer; of a model on "meta" this process's share, with
    memory but without values."""
    optim, dtype = config.optim, DTYPES[plan.dtype]
    router = optim.router or RouterRates()
    model.compute_dtype = dtype
    tied = model.head.weight is model.embed.weight
    engine = make_engine(
        plan.engine,
        model,
        parameter_groups(
            model,
            parameter_kinds(model),
            weight_decay=optim.weight_decay,
            router_weight_decay=router.weight_decay,
            router_lr_multiplier=router.lr_multiplier,
            by_matrix=optim.granularity == "matrices",
        ),
        optim,
        Sharding(
            build_mesh(plan.mesh, device, config.parallel.timeout_s),
            # A weight that two units share belongs to neither.
            list(model.layers) if tied else [model.embed, *model.layers, model.head],
            plan.exchange,
            plan.offload,
            dtype,
            plan.whole_blocks,
        ),
        num_terms=len(TERMS),
        seed=config.run.seed,
        accumulates=plan.accumulation > 1,
    )
    reset_buffers(model)
    return engine


def _first_weights(config: Config, state: TrainState) -> None:
    model, engine = state.model, state.optimizer
    if config.model.init_from:
        load_initial(engine, model, config.model.init_from)
        return
    # The model's own experts are split by now, and have other names.
    kinds = parameter_kinds(build_model(model.config, device="meta"))
    shapes = engine.shapes()
    seed, first = config.run.seed, config.model.init or FirstWeights()

    def values(name: str, experts: range | None) -> Tensor:
        kind, shape = kinds[name], shapes[name]
        return initial_values(model.config, name, kind, shape, seed, experts, first)

    engine.fill(values)
    start_routers(model)


def pick_attention(asked: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """Who computes attention, by `model.attention`; ConfigError for FlashAttention-4 that cannot
    be."""
    if asked == "auto":
        return "flash4" if fits(device, dtype, head_dim) else "pytorch"
    if asked == "flash4" and not fits(device, dtype, head_dim):
        raise ConfigError(
            "model.attention='flash4' needs the package flash-attn-4 (pip install -e '.[gpu]'; "
            f"here: {installed() or 'not installed'}), a Hopper GPU, bfloat16 or float16 and heads "
            f"of up to 128, a multiple of 8; this run is on {device.type} in "
            f"{str(dtype).removeprefix('torch.')} with heads of {head_dim}; allowed here: auto, "
            "pytorch"
        )
    return asked
