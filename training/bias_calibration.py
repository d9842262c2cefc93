"""Balance before the first step: selection biases that fit the first batch of the run."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import torch

from moe.calibrate import calibrating
from parallel import sum_
from training.device import untouched_rng

if TYPE_CHECKING:
    from training.run_state import Job


def calibrate(job: Job) -> None:
    """Set the selection biases by the rows that the first step will train on; the data is put back
    to where it was, and no weight changes."""
    stream = job.data.steps(
        global_batch_size=job.config.train.global_batch_size,
        micro_batch_size=job.plan.micro_batch_size,
        rank=job.world.rank,
        world=job.world.size,
        steps=1,
    )
    with closing(stream):
        batch = next(iter(stream))[0].to(job.device)
    job.data.load_state_dict(job.progress.position)
    # blocks that are compiled would be compiled for this pass alone
    with (
        untouched_rng(),
        torch.compiler.set_stance("force_eager"),
        calibrating(job.model, lambda bias_E: sum_(job.world, bias_E) / job.world.size),
    ):
        job.trainee.forward(
            batch.tokens_BL,
            positions_BL=batch.positions_BL,
            documents=batch.documents,
            valid_BL=batch.valid_BL,
        )
    job.log.event("bias_calibrated", "selection biases set by the first micro-batch", step=0)
