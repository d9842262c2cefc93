"""What is due after a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.surgery.policy import calendar

if TYPE_CHECKING:
    from training.config.sections import Config


@dataclass(frozen=True)
class Due:
    """What is to be done after a step."""

    log: bool
    evaluate: bool
    save: bool


def due_after(config: Config, step: int, steps: int) -> Due:
    """Evaluation and checkpoints bring a log line with them: a validation belongs to a line of
    metrics, and no checkpoint may be newer than the record of the steps that were skipped before
    it. So do changes of experts, which are decided by numbers that a log line reads."""

    def every(interval: int | None) -> bool:
        return interval is not None and step % interval == 0

    last = step == steps
    evaluate = config.eval.every_steps is not None and (last or every(config.eval.every_steps))
    save = last or every(config.checkpoint.every_steps)
    log = step == 1 or evaluate or save or every(config.log.every_steps)
    log = log or calendar(config, steps).due(step)
    return Due(log, evaluate, save)
