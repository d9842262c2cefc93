"""Reading a run folder back: its metrics as columns, its events, its config."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.errors import UserError
from training.config.load import read_yaml
from training.report.files import EVENTS, LOAD, SCORES, holds_run, read_lines, read_metrics

SOURCES_SHOWN = 8
"""Sources of text that have a curve of their own."""


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it was logged."""

    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.steps)

    def tail(self, part: float) -> Series:
        """The last `part` of the points, at least one."""
        start = min(len(self) - 1, round(len(self) * (1 - part))) if self.steps else 0
        return Series(self.steps[start:], self.values[start:])

    @property
    def finite(self) -> list[float]:
        """The values that are numbers."""
        return [value for value in self.values if math.isfinite(value)]


def with_errors(scores: Mapping[str, float]) -> list[tuple[str, float, float | None]]:
    """(name, value, standard error or None) of scores named TASK/METRIC, whose standard errors are
    named TASK/METRIC_stderr, each with /FILTER behind it if it has one."""
    rows = []
    for name, value in scores.items():
        task, _, rest = name.partition("/")
        metric, slash, kept = rest.partition("/")
        if not metric.endswith("_stderr"):
            rows.append((name, value, scores.get(f"{task}/{metric}_stderr{slash}{kept}")))
    return rows


@dataclass(frozen=True)
class Record:
    """A run folder as read."""

    folder: Path
    config: dict[str, Any]
    """Resolved config; empty when the file is missing."""
    head: list[str]
    """The comment lines above it: command, versions, git commit."""
    lines: list[dict[str, Any]]
    """metrics.jsonl without what dead attempts wrote past their last checkpoint."""
    events: list[dict[str, Any]]
    names: tuple[str, ...] = field(default=())
    loads: list[dict[str, Any]] = field(default_factory=list)
    """load.jsonl, read like `lines`."""
    scores: list[dict[str, Any]] = field(default_factory=list)
    """scores.jsonl, what scripts/evaluate.py has measured."""

    def series(self, name: str) -> Series:
        """A metric by its name; NaN and infinity, which JSON holds as text, as floats again."""
        pairs = [(line["step"], float(line[name])) for line in self.lines if _is_number(line, name)]
        return Series([step for step, _ in pairs], [value for _, value in pairs])

    def layers(self, name: str) -> dict[int, Series]:
        """A metric of each layer."""
        wanted = [n.split("/") for n in self.names if n.startswith("layers/")]
        numbers = sorted({int(parts[1]) for parts in wanted if parts[2:] == [name]})
        return {number: self.series(f"layers/{number}/{name}") for number in numbers}

    def sources(self, name: str) -> dict[str, Series]:
        """A metric of each source of text, where there are several; at most `SOURCES_SHOWN`."""
        each = sorted(
            n.partition("/")[2]
            for n in self.names
            if n.startswith(f"{name}/") and not n.endswith("_current_k")
        )
        return {source: self.series(f"{name}/{source}") for source in each[:SOURCES_SHOWN]}

    def setting(self, place: str, default: Any = None) -> Any:
        """A value of the resolved config by section.key."""
        value: Any = self.config
        for key in place.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    @property
    def steps(self) -> int | None:
        """Steps of the whole run; with `train.epochs`, from the event that its start wrote."""
        told = (event["steps"] for event in reversed(self.events) if "steps" in event)
        return self.setting("train.steps") or next(told, None)

    @property
    def training_seconds(self) -> float:
        """From the first to the last log line of each attempt, together: the time between attempts
        is none of training."""
        pairs = itertools.pairwise(line for line in self.lines if "time" in line)
        return sum(
            after["time"] - before["time"]
            for before, after in pairs
            if before.get("attempt") == after.get("attempt")
        )

    @property
    def last(self) -> dict[str, Any]:
        """The last line with a training loss."""
        return next((line for line in reversed(self.lines) if "loss" in line), {})


def _is_number(line: dict[str, Any], name: str) -> bool:
    value = line.get(name)
    return isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")


def read_run(folder: str | Path) -> Record:
    """Read a run folder; of a checkpoint in it, the run that it belongs to.

    Raises:
        ValueError: the folder does not exist, or is none of a run; its config.yaml is no YAML.
    """
    folder = Path(folder)
    if (folder / "state.json").is_file():
        if folder.absolute().parent.name != "checkpoints":
            raise UserError(f"{folder} is a checkpoint outside a run; give a run folder")
        folder = folder.absolute().parents[1]
    if not folder.is_dir():
        near = sorted(repr(p.name) for p in folder.parent.glob("*") if holds_run(p))
        beside = f"; {folder.parent} holds {', '.join(near[:10])}" if near else ""
        raise UserError(f"run folder {folder} does not exist{beside}")
    file = folder / "config.yaml"
    if not holds_run(folder):
        raise UserError(
            f"{folder} is no run folder: it holds neither config.yaml nor metrics.jsonl"
        )
    config = read_yaml(file) if file.is_file() else {}
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    head = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    lines = read_metrics(folder)
    return Record(
        folder=folder,
        config=config,
        head=head,
        lines=lines,
        events=list(read_lines(folder / EVENTS)),
        names=tuple(dict.fromkeys(name for line in lines for name in line)),
        loads=read_metrics(folder, LOAD),
        scores=list(read_lines(folder / SCORES)),
    )


def unigram_entropy(record: Record) -> float | None:
    """Nats per token of the training text, from the event that the run's start wrote."""
    for event in reversed(record.events):
        if isinstance(event.get("unigram_entropy"), (int, float)):
            return float(event["unigram_entropy"])
    return None
