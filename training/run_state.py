"""A run at work, as `train.py` puts it together and hands it around."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from training.health import Alarms
from training.report.pace import Pace
from training.report.window import Window
from training.run import Run
from training.step import StepResult, TrainState

if TYPE_CHECKING:
    import torch

    from models.transformer import Decoder
    from parallel import World
    from training.checkpoint.saver import Saver
    from training.config.plan import Plan
    from training.config.sections import Config
    from training.data import TextTokenizer, TrainData
    from training.probe import Probe
    from training.report.run_log import RunLog


@dataclass(kw_only=True)
class RunState:
    """What is made before the first step, and what the run remembers between steps."""

    config: Config
    plan: Plan
    run: Run
    log: RunLog
    tokenizer: TextTokenizer
    data: TrainData
    train: TrainState
    probe: Probe
    saver: Saver
    steps: int
    """Steps of the whole run."""
    position: dict[str, Any]
    """State of the data after the finished steps."""
    results: list[StepResult] = field(default_factory=list)
    """Steps since the last log line, their numbers on the device."""
    pace: Pace = field(default_factory=Pace)
    router_changes: list[tuple[int, str]] = field(default_factory=list)
    """(first step, what is different) since the last log line."""
    last_window: Window | None = None
    """What the last log step read; None if all of its steps were empty."""
    alarms: Alarms = field(default_factory=Alarms)
    not_finite: int = 0
    """Steps in a row up to the last log line that were skipped because they are not finite."""
    load_at: int | None = None
    """Step of the last line of load.jsonl in this attempt."""
    pictured_at: int = 0
    """Step of the last pictures that went to trackers."""
    plotted_at: float = float("-inf")
    """When plots were last drawn, in monotonic seconds."""

    @property
    def step(self) -> int:
        """Finished steps, skipped ones included."""
        return self.train.step

    @property
    def model(self) -> Decoder:
        return self.train.model

    @property
    def world(self) -> World:
        return self.train.world

    @property
    def device(self) -> torch.device:
        return self.train.device
