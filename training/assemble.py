"""From a config to the model, the optimizer, and the snapshot that holds them; and back from
one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.build import build_model, parameter_kinds, start_routers
from models.execution import apply_checkpointing, compile_blocks
from moe.control import RouterControl
from moe.rounding import RoundingConfig
from parallel import World
from training.checkpoint import Snapshot, load_tensors, read_rng, read_state
from training.config_load import ConfigError
from training.device import restore_rng, rng_bytes, seed_all
from training.optim import MasterAdamW, parameter_groups
from training.weights import load_initial_weights

if TYPE_CHECKING:
    from models.config import ModelConfig
    from models.transformer import Decoder
    from training.config import Config, Plan, RouterConfig
    from training.data import TextTokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_config(config: Config, tokenizer: TextTokenizer) -> ModelConfig:
    """The architecture with the tokenizer's special tokens filled in where the config names none.

    Raises:
        ConfigError: the tokenizer has ids that the embedding has no row for.
    """
    given = config.model.config
    if tokenizer.vocab_size > given.vocab_size:
        raise ConfigError(
            f"model.vocab_size={given.vocab_size} is too small for the tokenizer, which has "
            f"{tokenizer.vocab_size} tokens; allowed: at least that"
        )
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    fill = {key: value for key, value in ids.items() if getattr(given, key) is None}
    return given.model_copy(update=fill)


def rounding(router: RouterConfig) -> RoundingConfig | None:
    """Token rounding as the model wants it; None for plain top-K."""
    if router.rounding == "none":
        return None
    return RoundingConfig(
        variant=router.rounding,
        tile=router.rounding_tile,
        min_tiles=router.rounding_min_tiles,
        max_tiles=router.rounding_max_tiles,
        protect_top1=router.rounding_protect_top1,
        renorm=router.rounding_renorm,
        min_mean_tiles=router.rounding_min_mean_tiles,
    )


def router_control(router: RouterConfig) -> RouterControl:
    """The state of the routers and how it changes between steps."""
    return RouterControl(
        bias_update=router.bias_update,
        bias_rate=router.bias_rate,
        bias_ema=router.bias_ema,
        bias_freeze_at=router.bias_freeze_at,
        keep_load=router.balance_coef > 0 and router.balance_scope == "lagged",
    )


def make_model(
    config: Config, architecture: ModelConfig, plan: Plan, device: torch.device, resumed: bool
) -> Decoder:
    """The model on its device, with first weights unless a checkpoint will fill them."""
    start = config.model.init_from
    model = build_model(
        architecture,
        kernels=config.model.kernels,
        save=config.model.save,
        rounding=rounding(config.router),
        control=router_control(config.router),
        selection_bias=architecture.has_selection_bias or config.router.bias_update != "none",
        sequence_stats=config.router.balance_coef > 0 and config.router.balance_scope == "sequence",
        dtype=DTYPES[plan.dtype],
        device=device,
        seed=None if resumed or start else config.run.seed,
    )
    if start and not resumed:
        load_initial_weights(model, start)
        start_routers(model)
    return model.train()


def make_optimizer(config: Config, model: Decoder) -> MasterAdamW:
    """AdamW over all parameters; moves them into its flat buffers."""
    optim = config.optim
    groups = parameter_groups(
        model,
        parameter_kinds(model),
        weight_decay=optim.weight_decay,
        router_weight_decay=optim.router_weight_decay,
        router_lr_multiplier=optim.router_lr_multiplier,
    )
    return MasterAdamW(
        groups,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        clip_norm=optim.clip_norm,
        spike_factor=optim.spike_factor,
        on_nonfinite=optim.on_nonfinite,
    )


def prepare_execution(config: Config, plan: Plan, model: Decoder) -> None:
    """Activation checkpointing and compilation; after the optimizer has placed the parameters."""
    apply_checkpointing(model, config.train.checkpointing)
    if plan.compile:
        compile_blocks(model)


# --- snapshots ----------------------------------------------------------------------------------


def saved_tensors(model: Decoder, optimizer: MasterAdamW) -> dict[str, Tensor]:
    """All tensors of a checkpoint by logical name, as views: parameters, moments, router
    buffers."""
    buffers = {name: buffer.reshape(-1) for name, buffer in _persistent_buffers(model)}
    return optimizer.tensors() | {f"buffers/{name}": buffer for name, buffer in buffers.items()}


def _persistent_buffers(model: Decoder) -> list[tuple[str, Tensor]]:
    kept = model.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def snapshot(
    *,
    step: int,
    tokens: int,
    position: dict[str, Any],
    model: Decoder,
    optimizer: MasterAdamW,
    folder: Path,
    attempt: int,
) -> Snapshot:
    """Everything needed to go on from here.

    Args:
        position: of the data after the step.
        folder: of the run, for its config and tokenizer.
    """
    shapes = optimizer.shapes() | {
        name: list(buffer.shape) for name, buffer in _persistent_buffers(model)
    }
    return Snapshot(
        step=step,
        tensors=saved_tensors(model, optimizer),
        state={"tokens": tokens, "attempt": attempt, "data": position, "shapes": shapes},
        rng=rng_bytes(),
        files={
            "config.yaml": folder / "config.yaml",
            "tokenizer": folder / "tokenizer",
            "model/config.json": json.dumps(model.config.to_hf(), indent=2).encode(),
        },
        finite=optimizer.all_finite(),
    )


def restore(
    checkpoint: Path, model: Decoder, optimizer: MasterAdamW, world: World, seed: int
) -> dict[str, Any]:
    """Fill model and optimizer, set random states; the plain values of the checkpoint.

    A process that did not exist when it was saved seeds its random states from its rank and the
    step.
    """
    load_tensors(checkpoint, saved_tensors(model, optimizer))
    optimizer.loaded()
    state = read_state(checkpoint)
    rng = read_rng(checkpoint, world.rank)
    if rng is not None:
        restore_rng(rng)
    else:
        seed_all(seed + state["step"], world.rank)
    return state
