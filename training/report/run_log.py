"""What a run tells: metrics.jsonl, events.jsonl, lines on the screen, and Weights & Biases beside
them.

`metrics.jsonl` gets a line per logged step, `events.jsonl` a line per thing that happened (a start,
a skipped step, a checkpoint). Both are only ever appended to, and every line carries the `attempt`:
0 for the first start of the run, one more for each restart. After a resume the stretch between the
checkpoint and the crash is there twice, and of two lines of the same step the later attempt's
counts (`read_metrics`); nothing of the dead attempt is lost or mixed in.

Weights & Biases gets each attempt as a run of its own in one group, as its server drops points
whose step is not larger than the last one (wandb/wandb#2234, #5632). It is fed by a thread through
a bounded queue: whatever it does, it cannot delay or end the run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
LOAD = "load.jsonl"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""`OSError.errno` where there is no space to write."""


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in a folder. A start that was refused leaves none of these."""
    return any((folder / name).is_file() for name in ("config.yaml", METRICS))


# What Weights & Biases gets of each layer, and of how many layers: its pages stay readable, and
# metrics.jsonl has everything.
LAYER_SERIES = ("max_violation", "load_entropy", "dead_experts")
LAYERS_SHOWN = 16

EARLY_STEPS = 200
"""Steps at a run's start in which routers are still finding their balance."""


def early_until(warmup_steps: int) -> int:
    """The step from which on an uneven load is a fault: before it most heal by themselves."""
    return max(EARLY_STEPS, warmup_steps)


# --- files --------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; what is none, or was cut off by a crash, is left out."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line) if line.endswith("\n") else None
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def read_metrics(folder: str | Path, name: str = METRICS) -> list[dict[str, Any]]:
    """Lines of a run folder's metrics.jsonl (or load.jsonl) by step; of several of a step, the
    latest attempt's.

    A later attempt's lines replace every line of earlier attempts from its first step on: what a
    dead attempt wrote past the checkpoint that was resumed is not part of the curve.
    """
    kept: list[dict[str, Any]] = []
    attempt = None
    for line in read_lines(Path(folder) / name):
        if not isinstance(line.get("step"), int):
            continue
        if line.get("attempt") != attempt:
            attempt = line.get("attempt")
            kept = [other for other in kept if other["step"] < line["step"]]
        kept.append(line)
    return kept


def bounded(values: dict[str, Any]) -> dict[str, Any]:
    """Values with the series of a few layers only, evenly chosen, whatever the model's size."""
    layers = sorted({int(name.split("/")[1]) for name in values if name.startswith("layers/")})
    count = min(len(layers), LAYERS_SHOWN)
    kept = {layers[i * (len(layers) - 1) // max(count - 1, 1)] for i in range(count)}

    def shown(name: str) -> bool:
        if not name.startswith("layers/"):
            return True
        _, layer, series = name.split("/", 2)
        return int(layer) in kept and series in LAYER_SERIES

    return {name: value for name, value in values.items() if shown(name)}


class _Appender:
    """Appends JSON objects to a file, each line in one write.

    What a full disk does not take, be it half of a line, waits in memory for the next write.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        _end_last_line(path)
        self._path, self._warn = path, warn
        self._pending = b""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run

    def write(self, values: dict[str, Any]) -> None:
        waited = bool(self._pending)
        text = json.dumps({key: _plain(value) for key, value in values.items()})
        self._pending += text.encode() + b"\n"
        self._flush()
        if self._pending and not waited:
            self._warn(f"no space to write {self._path}; its lines wait until there is some")

    def _flush(self) -> None:
        with room_or_not():
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]

    def close(self) -> None:
        self._flush()
        if self._pending:
            lost = self._pending.count(b"\n")
            self._warn(f"no space to write {self._path}: its last lines ({lost}) are lost")
        with room_or_not():  # some file systems tell only now
            self._file.close()


@contextlib.contextmanager
def room_or_not() -> Iterator[None]:
    """A write inside may fail for want of space."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise


def _end_last_line(path: Path) -> None:
    """Remove what a crash left of an unfinished line, so that the next one starts clean."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        content_end = file.seek(0, os.SEEK_END)
        position = content_end
        while position > 0:
            start = max(0, position - 4096)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                position = start + found + 1
                break
            position = start
        if position != content_end:
            file.truncate(position)


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity; they are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


# --- human units --------------------------------------------------------------------------------


def human_count(value: float) -> str:
    """1234567 → 1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def human_bytes(value: float) -> str:
    """12.1e9 → 12.1 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def human_time(seconds: float) -> str:
    """3700 → 1h02m."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 48 * 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"


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
        parts.append(f"imbalance {metrics['max_violation']:.2f}")
    parts.append(f"{human_time(metrics['time_left_s'])} left")
    parts.append(f"{metrics['max_memory_gib']:.1f} GiB")
    return " | ".join(parts)


# --- the log ------------------------------------------------------------------------------------


class RunLog:
    """Everything a run says, from its first process; the others hold one that says nothing.

    Args:
        folder: of the run; it must exist. None: no files (not the first process).
        attempt: which start of the run this is, from 0.
        wandb: settings for `wandb.init`, or None.
    """

    def __init__(
        self,
        folder: Path | None,
        attempt: int = 0,
        wandb: dict[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        self.active = folder is not None
        self.attempt = attempt
        self._console = console or Console(highlight=False)
        self._wandb: WandbThread | None = None
        if folder is not None:
            self._metrics = _Appender(folder / METRICS, self.warn)
            self._events = _Appender(folder / EVENTS, self.warn)
            self._load = _Appender(folder / LOAD, self.warn)
            if wandb is not None:
                self._wandb = WandbThread(wandb, self.say, self.warn)

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
        if self._wandb is not None:
            self._wandb.put(bounded(values))

    def load(self, step: int, load: list[list[float]]) -> None:
        """A line in load.jsonl: load / mean load of every expert, by layer."""
        if self.active:
            line = {"attempt": self.attempt, "time": time.time(), "step": step, "load": load}
            self._load.write(line)

    def pictures(self, step: int, files: dict[str, Path]) -> None:
        """Pictures for Weights & Biases, by name; the files are read later, in its thread."""
        if self.active and self._wandb is not None:
            pictures = {f"pictures/{name}": path for name, path in files.items()}
            self._wandb.put({"step": step, **pictures})

    def finish_tracking(self) -> None:
        """Send Weights & Biases what is pending, within a bounded time; it gets no more."""
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def close(self) -> None:
        """Write what is pending; waits a bounded time for Weights & Biases."""
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


class WandbThread:
    """Feeds Weights & Biases from a thread of its own; drops values rather than wait for it."""

    QUEUE = 10_000
    FINISH_S = 30.0

    def __init__(
        self,
        settings: dict[str, Any],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._say = say
        self._warn = warn
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(self.QUEUE)
        self._dropped = 0
        # A daemon: a hanging connection must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
        self._thread.start()

    def put(self, values: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(values)
        except queue.Full:
            self._dropped += 1

    def finish(self) -> None:
        """Wait for what is queued, but not for ever."""
        end = time.monotonic() + self.FINISH_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=self.FINISH_S)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._warn(
                f"Weights & Biases did not finish within {self.FINISH_S:.0f} s and is left behind; "
                f"metrics.jsonl has everything"
            )
        elif self._dropped:
            self._warn(f"Weights & Biases was too slow: {self._dropped} lines were not sent to it")

    def _run(self) -> None:
        try:
            import wandb

            run = wandb.init(**self._settings)
            if self._settings.get("mode") == "offline":
                self._say(f"Weights & Biases: offline; wandb sync {run.settings.sync_dir} sends it")
            else:
                self._say(f"Weights & Biases: {run.url}")
            # Our own step axis: the built-in one refuses to go back.
            run.define_metric("*", step_metric="step")
            while (values := self._queue.get()) is not None:
                run.log(
                    {
                        name: wandb.Image(str(value)) if isinstance(value, Path) else value
                        for name, value in values.items()
                    }
                )
            run.finish()
        except BaseException as error:  # whatever it is, the run goes on
            self._warn(
                f"Weights & Biases stopped ({type(error).__name__}: {error}); the run goes on and "
                f"metrics.jsonl has everything"
            )
            while self._queue.get() is not None:
                pass
