"""Balance before the first step: selection biases that fit the first batch of the run."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import torch

from moe.calibrate import calibrating
from parallel import sum_
from training.device import untouched_rng

if TYPE_CHECKING:
    from training.run_state import RunState


def calibrate(state: RunState) -> None:
    """Set the selection biases by the rows that the first step will train on; the data is put back
    to where it was, and no weight changes."""
    stream = state.data.steps(
        global_batch_size=state.config.train.global_batch_size,
        micro_batch_size=state.plan.micro_batch_size,
        rank=state.world.rank,
        world=state.world.size,
        steps=1,
    )
    with closing(stream):
        batch = next(iter(stream))[0].to(state.device)
    state.data.load_state_dict(state.position)
    # blocks that are compiled would be compiled for this pass alone
    with (
        untouched_rng(),
        torch.compiler.set_stance("force_eager"),
        calibrating(state.model, lambda bias_E: sum_(state.world, bias_E) / state.world.size),
    ):
        state.train.forward(
            batch.tokens_BL,
            positions_BL=batch.positions_BL,
            documents=batch.documents,
            valid_BL=batch.valid_BL,
        )
    state.log.event("bias_calibrated", "selection biases set by the first micro-batch", step=0)
