"""The run folder: whose it is, which attempt this is, and what a resumed run may change.

The same command again resumes from the newest good checkpoint. Settings may differ from those the
checkpoint was made with as long as its state keeps its meaning: the length of the run, learning
rates, batch sizes, logging, evaluation, the number of processes; each change is logged. What gives
the saved tensors another meaning (the architecture, the seed) is refused here by name; what gives
the position in the data another meaning (the text, the tokenizer, the row length) is refused by
the data's own state.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from parallel import World, from_main
from training.checkpoint.files import candidates, newest, read_state
from training.config.load import ConfigError
from training.data.lock import disk_errors
from training.report.files import EVENTS, METRICS, holds_run, read_lines

if TYPE_CHECKING:
    from training.config.sections import Config

# Settings that must stay, and the exceptions below them. Which text it is, the data's own state
# knows by content, so files may move.
FIXED = ("model", "run.seed", "experts.start", "optim.kind")
FREE = (
    "model.kernels",
    "model.attention",
    "model.save",
    "model.hf_config",
    "model.init_from",
    "model.init",
)


@dataclass(frozen=True)
class Run:
    """The folder of a run and where it resumes."""

    folder: Path
    attempt: int
    """0 for the first start, one more for each restart."""
    checkpoint: Path | None
    """Folder to resume from."""
    passed_over: tuple[str, ...] = ()
    """One sentence for each newer folder that is no complete checkpoint."""
    changed: tuple[str, ...] = ()
    """Settings that differ from the checkpoint's, as "key: old → new"."""
    step: int = 0
    """Steps that were finished when the checkpoint was made."""
    tokens: int = 0
    """Valid tokens in them."""
    position: dict[str, Any] | None = None
    """State of the data after them; None at the start."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def open_run(config: Config, world: World) -> Run:
    """Take the run folder, find what to resume from, and compare the settings.

    Raises:
        ConfigError: `run.resume=never` and the folder holds a run; another process is using it;
            it cannot be written; all of its checkpoints are damaged; or a setting that must stay
            has changed.
    """
    folder = config.run.folder
    new = not folder.exists()
    problem = from_main(world, _take(folder, config.run.resume) if world.main else None)
    if problem is not None:
        raise ConfigError(problem)
    # Others of several processes may still be reading there when one of them has failed.
    if new and world.size == 1 and not holds_run(folder):
        _made.append(folder)
    checkpoint, passed_over = newest(folder / "checkpoints", world)
    if checkpoint is None and passed_over:
        _refuse_damaged(folder / "checkpoints", passed_over, world)
    if checkpoint is None and world.main:  # of other text or settings, maybe: it is made anew
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    elif world.main and not (folder / "tokenizer" / "tokenizer.json").is_file():
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)
        with disk_errors(folder, "run.dir"):
            shutil.copytree(checkpoint / "tokenizer", folder / "tokenizer")
    attempt = from_main(world, _next_attempt(folder) if world.main else None)
    changed: list[str] = []
    if checkpoint is not None:
        old = yaml.safe_load((checkpoint / "config.yaml").read_text(encoding="utf-8"))
        changed, refused = differences(old, config.to_dict())
        if refused:
            raise ConfigError(
                f"{folder} is to resume from {checkpoint.name}, but these settings cannot change "
                f"in a run: {'; '.join(refused)}. Set them back, or give another run.name"
            )
    saved = {} if checkpoint is None else read_state(checkpoint)
    return Run(
        folder,
        attempt,
        checkpoint,
        tuple(passed_over),
        tuple(changed),
        step=saved.get("step", 0),
        tokens=saved.get("tokens", 0),
        position=saved.get("data"),
    )


def _refuse_damaged(root: Path, passed_over: Sequence[str], world: World) -> None:
    """ConfigError where checkpoints are there and none can be used: to start from step 1 would
    throw them away. A first save that never ended is no such checkpoint."""
    ended = [path for path in candidates(root) if path.suffix != ".tmp"] if world.main else None
    if from_main(world, ended):
        more = f"; and {len(passed_over) - 2} more" if len(passed_over) > 2 else ""
        raise ConfigError(
            f"{root} holds no checkpoint that can be used: {'; '.join(passed_over[:2])}{more}. Put "
            "a good copy there to resume; to start anew give another run.name, or remove that "
            "folder"
        )


MAX_EPOCHS_PER_STEP = 1000  # a mistyped batch size; the places of a step's rows are held in memory


def total_steps(config: Config, rows_per_epoch: int | None, *, step: int = 0, rows: int = 0) -> int:
    """Optimizer steps of the whole run. With `train.epochs`, those that are done and as many as
    the rest of the rows needs: earlier steps may have had another batch size.

    Args:
        step: of the checkpoint that the run resumes from.
        rows: that the steps up to there have taken.

    Raises:
        ConfigError: the length is given in epochs, and that of an epoch is not known; or a step
            takes the text over and over.
    """
    train = config.train
    if (
        rows_per_epoch is not None
        and train.global_batch_size > MAX_EPOCHS_PER_STEP * rows_per_epoch
    ):
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size} rows a step are more than "
            f"{MAX_EPOCHS_PER_STEP} times the text, which has {rows_per_epoch} rows"
        )
    if train.steps is not None:
        return train.steps
    if rows_per_epoch is None:
        raise ConfigError(
            f"train.epochs={train.epochs} needs a known number of rows, which data.stream=true "
            f"does not have at the start; give train.steps"
        )
    # As written: the float 0.1 is more than a tenth, and ceil would add a step.
    left = Fraction(str(train.epochs)) * rows_per_epoch - rows
    return step + max(0, math.ceil(left / train.global_batch_size))


# The reader processes of a killed run hold its lock until they notice: torch looks every 5 seconds.
LOCK_WAIT_S = 20.0
_locks: list[int] = []  # the system frees them too, however the process ends
_made: list[Path] = []  # the run folder, if this process made it and is alone


def release() -> None:
    """Let other processes use the run folder."""
    while _locks:
        os.close(_locks.pop())
    _made.clear()


def discard_new_run_folder() -> None:
    """Undo `open_run` after a start that failed: a folder that it made goes, with all in it."""
    for folder in _made:
        shutil.rmtree(folder, ignore_errors=True)
    release()


def _take(folder: Path, resume: str) -> str | None:
    """Make and lock the folder; what is wrong, if anything."""
    if resume == "never" and holds_run(folder):
        return (
            f"run folder {folder} holds a run and run.resume='never'; give another run.name, or "
            f"run.resume=auto to resume it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        return f"run folder {folder} cannot be written ({error.strerror}); see run.dir, run.name"
    deadline, told = time.monotonic() + LOCK_WAIT_S, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                if time.monotonic() < deadline:
                    if not told:
                        told = True
                        print(
                            f"another process uses {folder}; waiting up to {LOCK_WAIT_S:.0f} s, in "
                            "case it is one that has just been ended",
                            file=sys.stderr,
                            flush=True,
                        )
                    time.sleep(0.1)
                    continue
                os.close(descriptor)
                return (
                    f"another process is training in {folder}; wait for it, or give another "
                    "run.name"
                )
            # A file system without locks: training there is allowed, unguarded.
        _locks.append(descriptor)
        return None


def _next_attempt(folder: Path) -> int:
    seen = [
        line["attempt"]
        for name in (EVENTS, METRICS)
        for line in read_lines(folder / name)
        if isinstance(line.get("attempt"), int)
    ]
    return max(seen, default=-1) + 1


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Settings that differ, as "key: old → new": those that may change, and those that must not."""
    before, after = _flat(old), _flat(new)
    allowed, refused = [], []
    for key in {**before, **after}:
        was, now = before.get(key), after.get(key)
        if was == now or key.startswith("run.name"):
            continue
        fixed = _under(key, FIXED) and not _under(key, FREE)
        (refused if fixed else allowed).append(f"{key}: {was!r} → {now!r}")
    return allowed, refused


def _under(key: str, places: tuple[str, ...]) -> bool:
    return any(key == place or key.startswith(place + ".") for place in places)


def _flat(values: Any, place: str = "") -> dict[str, Any]:
    """Nested mappings and lists as dotted keys; empty ones stay as they are."""
    if isinstance(values, Mapping) and values:
        items = values.items()
    elif isinstance(values, (list, tuple)) and values and isinstance(values[0], Mapping):
        items = enumerate(values)
    else:
        return {place: list(values) if isinstance(values, tuple) else values}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flat(value, f"{place}.{key}" if place else str(key))
    return flat
