"""The parts of a run, as `train.py` puts them together and hands them around."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training.health import Alarms
from training.run import Progress, Run
from training.step import LastCounts, Window

if TYPE_CHECKING:
    import torch

    from models.transformer import Decoder
    from parallel import World
    from parallel.engine import Engine
    from training.assemble import Trainee
    from training.checkpoint.files import Saver
    from training.config.plan import Plan
    from training.config.sections import Config
    from training.data import TextTokenizer, TrainData
    from training.optim.master import MasterAdamW
    from training.probe import Probe
    from training.report.run_log import RunLog


@dataclass
class Job:
    """Everything that is made before the first step."""

    config: Config
    plan: Plan
    world: World
    device: torch.device
    run: Run
    log: RunLog
    tokenizer: TextTokenizer
    data: TrainData
    trainee: Trainee
    probe: Probe
    saver: Saver
    steps: int
    """Steps of the whole run."""
    progress: Progress
    last_counts: LastCounts = field(default_factory=LastCounts)
    router_changes: list[tuple[int, str]] = field(default_factory=list)
    """(first step, what is different) since the last log line."""
    read: Window | None = None
    """What the last log step read."""
    alarms: Alarms = field(default_factory=Alarms)
    not_finite: int = 0
    """Steps in a row up to the last log line that were skipped because they are not finite."""
    load_at: int = -1
    """Step of the last line of load.jsonl; -1: none in this attempt."""
    pictured_at: int = 0
    """Step of the last pictures that went to Weights & Biases."""
    began: int = 0
    """Steps that were finished when this attempt began."""
    plotted_at: float = float("-inf")
    """When plots were last drawn, in monotonic seconds."""

    @property
    def model(self) -> Decoder:
        return self.trainee.model

    @property
    def optimizer(self) -> MasterAdamW | Engine:
        return self.trainee.optimizer
