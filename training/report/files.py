"""The files of a run's record: appending to them and reading them back.

`metrics.jsonl` gets a line per logged step, `events.jsonl` a line per thing that happened (a start,
a skipped step, a checkpoint). Both are only ever appended to, and every line carries the `attempt`:
0 for the first start of the run, one more for each restart. After a resume the stretch between the
checkpoint and the crash is there twice, and of two lines of the same step the later attempt's
counts (`read_metrics`); nothing of the dead attempt is lost or mixed in.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
LOAD = "load.jsonl"
SCORES = "scores.jsonl"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""`OSError.errno` where there is no space to write."""


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in a folder. A start that was refused leaves none of these."""
    return any((folder / name).is_file() for name in ("config.yaml", METRICS))


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


class JsonLines:
    """Appends JSON objects to a file, each line in one write.

    What a full disk does not take, be it half of a line, waits in memory for the next write.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        _end_last_line(path)
        self._path, self._warn = path, warn
        self._pending = b""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run

    def write(self, values: dict[str, Any]) -> None:
        """Append a line; while the disk is full it is kept and tried again with the next one."""
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
