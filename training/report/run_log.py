"""What a run tells: metrics.jsonl, events.jsonl, lines on the screen, and trackers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from training.report.files import EVENTS, LOAD, METRICS, JsonLines, room_or_not
from training.report.trackers import Attempt, Tracker, TrackerThread, bounded, finish
from training.report.units import human_count, human_time


def progress_line(metrics: dict[str, Any], steps: int) -> str:
    """The line of a logged step: step, loss, tokens/s, MFU, time left, memory."""
    parts = [
        f"step {metrics['step']:>{len(str(steps))}}/{steps}",
        f"loss {metrics['loss']:.4f}",
        f"{human_count(metrics['tokens_per_second'])} tok/s",
    ]
    if metrics.get("mfu") is not None:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if "max_violation" in metrics:
        parts.append(f"max_violation {metrics['max_violation']:.2f}")
    parts.append(f"{human_time(metrics['time_left_s'])} left")
    parts.append(f"{metrics['max_memory_gib']:.1f} GiB")
    return " | ".join(parts)


class RunLog:
    """Everything a run says, from its first process; the others hold one that says nothing.

    Args:
        folder: of the run; it must exist. None: no files (not the first process).
        attempt: which start of the run this is, from 0.
        step: finished steps of the attempts before it.
        trackers: services to send metrics to.
        config: the resolved config, for them.
    """

    def __init__(
        self,
        folder: Path | None,
        attempt: int = 0,
        step: int = 0,
        trackers: Sequence[Tracker] = (),
        config: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        self.active = folder is not None
        self.attempt = attempt
        self._console = console or Console(highlight=False)
        self._trackers: list[TrackerThread] = []
        if folder is not None:
            self._metrics = JsonLines(folder / METRICS, self.warn)
            self._events = JsonLines(folder / EVENTS, self.warn)
            self._load = JsonLines(folder / LOAD, self.warn)
            this = Attempt(folder, attempt, step, config or {})
            self._trackers = [TrackerThread(t, this, self.say, self.warn) for t in trackers]

    def say(self, text: str, style: str = "") -> None:
        """One line on the screen; colours only on a terminal."""
        if not self.active:
            return
        if self._console.is_terminal:
            self._console.print(Text(text, style=style))
            return
        with room_or_not():  # no wrapping: one event, one line, for grep
            print(text, flush=True)

    def warn(self, text: str) -> None:
        self.say(text, "yellow")

    def table(self, title: str, rows: list[dict[str, object]]) -> None:
        """Rows of equal keys, as a table."""
        if not self.active or not rows:
            return
        if self._console.is_terminal:
            table = Table(title=title, title_justify="left")
            for key in rows[0]:
                table.add_column(str(key))
            for row in rows:
                table.add_row(*(_cell(value) for value in row.values()))
            self._console.print(table)
            return
        cells = [[str(key) for key in rows[0]]]
        cells += [[_cell(value) for value in row.values()] for row in rows]
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        self.say(title)
        for line in cells:
            text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths))
            self.say(f"  {text}".rstrip())

    def event(
        self,
        kind: str,
        text: str | None = None,
        style: str = "yellow",
        *,
        told: bool = True,
        **fields: Any,
    ) -> None:
        """A line in events.jsonl and, with `text` and unless `told` is false, on the screen."""
        if not self.active:
            return
        line = {"event": kind, "attempt": self.attempt, "time": time.time(), **fields}
        self._events.write(line | ({"text": text} if text else {}))
        if text and told:
            self.say(text, style)

    def metrics(self, values: dict[str, Any]) -> None:
        """A line in metrics.jsonl; `step` among the values. None values are left out."""
        if not self.active:
            return
        values = {key: value for key, value in values.items() if value is not None}
        self._metrics.write({"attempt": self.attempt, "time": time.time(), **values})
        numbers = {
            key: value
            for key, value in bounded(values).items()
            if isinstance(value, int | float) and key != "step"
        }
        for tracker in self._trackers:
            tracker.put(values["step"], numbers, {})

    def load(self, step: int, load: list[list[float]]) -> None:
        """A line in load.jsonl: load / mean load of every expert, by layer."""
        if self.active:
            line = {"attempt": self.attempt, "time": time.time(), "step": step, "load": load}
            self._load.write(line)

    def pictures(self, step: int, files: dict[str, Path]) -> None:
        """Pictures for trackers, by name; the files are read later, in their threads."""
        pictures = {f"pictures/{name}": path for name, path in files.items()}
        for tracker in self._trackers:
            tracker.put(step, {}, pictures)

    def finish_tracking(self) -> None:
        """Send trackers what is pending, within a bounded time together; they get no more."""
        finish(self._trackers)
        self._trackers = []

    def close(self) -> None:
        """Write what is pending; waits a bounded time for trackers."""
        if not self.active:
            return
        self.finish_tracking()
        self._metrics.close()
        self._events.close()
        self._load.close()
        self.active = False


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
