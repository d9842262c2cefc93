"""What a checkpoint holds of a run, and bringing it back."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from models.build import start_routers
from parallel import World
from training.checkpoint.files import read_rng, read_state
from training.checkpoint.saver import Snapshot
from training.checkpoint.tensors import load_tensors, stored_tensors, unreadable
from training.checkpoint.weights import refuse_loss
from training.config.export_compat import acting
from training.device import restore_rng, rng_bytes, seed_all

if TYPE_CHECKING:
    from models.transformer import Decoder
    from training.run_state import RunState
    from training.step import TrainState


def _state_tensors(state: TrainState) -> dict[str, Tensor]:
    """What a checkpoint holds beside weights and moments: the state of routers and followers."""
    buffers = _persistent_buffers(state.model)
    found = {f"buffers/{name}": buffer.reshape(-1) for name, buffer in buffers}
    for follower in state.followers:
        found |= follower.tensors()
    return found


def _persistent_buffers(model: Decoder) -> list[tuple[str, Tensor]]:
    kept = model.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def load(checkpoint: Path, state: TrainState) -> None:
    """Fill weights, optimizer, routers and followers from a checkpoint of this run, in place.

    Raises:
        CheckpointError: tensors that are missing or do not fit.
    """
    weights, beside = state.optimizer.tensors(), _state_tensors(state)
    stored, step = stored_tensors(checkpoint), read_state(checkpoint)["step"]
    refuse_loss(checkpoint, weights | beside)
    for follower in state.followers:
        tensors = follower.tensors()
        if tensors and stored.keys().isdisjoint(tensors):
            follower.start_late(checkpoint, step)
    load_tensors(checkpoint, weights)
    state.optimizer.loaded()
    # State that the run has only now, by changed settings, starts as in a new run.
    start_routers(state.model)
    load_tensors(checkpoint, {name: beside[name] for name in beside if name in stored})


def snapshot(state: RunState) -> Snapshot:
    """Everything needed to resume from here; views, so to be written or copied before the next
    step."""
    train, folder = state.train, state.run.folder
    shapes = train.optimizer.shapes() | {
        name: list(buffer.shape) for name, buffer in _persistent_buffers(train.model)
    }
    return Snapshot(
        step=train.step,
        tensors=train.optimizer.tensors() | _state_tensors(train),
        state={
            "tokens": train.tokens,
            "attempt": state.run.attempt,
            "data": state.position,
            "shapes": shapes,
            "inexact": acting(state.config, train.step, state.steps),
        },
        rng=rng_bytes(),
        files={
            "config.yaml": folder / "config.yaml",
            "tokenizer": folder / "tokenizer",
            "model/config.json": json.dumps(train.model.config.to_hf(), indent=2).encode(),
        },
        finite=train.optimizer.all_finite(),
    )


def restore_random_states(checkpoint: Path, world: World, seed: int) -> None:
    """Set the random states of this process as they were.

    A process that did not exist when they were saved seeds its own from its rank and the step.

    Raises:
        CheckpointError: the file holds anything but plain states.
    """
    rng = read_rng(checkpoint, world.rank)
    if rng is not None:
        try:
            restore_rng(rng)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise unreadable(checkpoint, f"random states of process {world.rank}", error) from None
    else:
        seed_all(seed + read_state(checkpoint)["step"], world.rank)
