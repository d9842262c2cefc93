"""What follows a run step by step beside the optimizer: counters, averages, masks.

A follower is one class in one file and one entry of `FOLLOWERS` in training/assemble.py; the step
calls all of them alike and knows none by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from moe.surgery import Change
    from moe.types import RouterStats


class Follower:
    """Does nothing; a follower overrides what it needs, in the order of a step.

    Nothing may read device memory back. `after_forward` and `before_update` may be captured in a
    CUDA graph: there, only work on the device repeats.
    """

    def prepare_step(self, step: int) -> None:
        """Between steps: what `step`, and an evaluation before it, will compute with."""

    def after_forward(self, stats: RouterStats) -> None:
        """After the forward pass of a micro-batch, with its own statistics."""

    def before_update(self) -> None:
        """Between the last backward pass and the update."""

    def after_update(self, stats: RouterStats | None, applied: Tensor) -> None:
        """After the update.

        Args:
            stats: [L, ...], of the whole step over all processes; None without experts.
            applied: scalar on the device; 0 if the step was skipped.
        """

    def expert_changed(self, change: Change, step: int) -> None:
        """An expert has come or gone after `step`."""

    def metrics(self) -> dict[str, Tensor]:
        """For a log step, on the device: one number for each layer [L], or for the model []."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: flat views to read from and load into."""
        return {}

    def start_late(self, checkpoint: Path, step: int) -> None:
        """The run resumes after `step` from a checkpoint that holds nothing of this follower.

        Raises:
            ConfigError: it cannot begin this late.
        """
