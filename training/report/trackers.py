"""Trackers: services that show a run's metrics beside its own files.

    log.trackers=[{kind: tensorboard}, {kind: wandb, mode: offline}]

A tracker is the settings of one package and what it does with a line of metrics. Each is fed by a
thread of its own through a bounded queue, so whatever it does, it cannot delay or end the run, and
a number that it does not take in time is dropped: metrics.jsonl has everything.

A file of your own adds a tracker by `TRACKERS["mine"] = Mine` (docs/extending.md).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from moe.settings import Settings, one_of

Numbers = Mapping[str, float]
Pictures = Mapping[str, Path]


@dataclass(frozen=True)
class Attempt:
    """One start of a run, as trackers name it."""

    folder: Path
    """Of the run."""
    number: int
    """Which start of the run this is, from 0."""
    step: int
    """Steps that earlier attempts have finished: lines of this one come after them."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config."""

    @property
    def group(self) -> str:
        """The name of the run, which its attempts share."""
        return self.folder.name

    @property
    def name(self) -> str:
        return f"{self.folder.name}-{self.number}"


class Feed(Protocol):
    """An open connection to a tracker. Its calls may be slow or fail."""

    place: str
    """Where to look at it, for the run's first lines."""

    def log(self, step: int, numbers: Numbers, pictures: Pictures) -> None:
        """Values of a step; pictures are PNG files."""

    def close(self) -> None:
        """Send what is pending."""


class Tracker(Settings):
    """The settings of a tracker; a subclass has a field `kind`."""

    title: ClassVar[str]
    """Its name in messages."""

    def open(self, attempt: Attempt) -> Feed:
        """Import the package and connect; called in the tracker's thread."""
        raise NotImplementedError


# --- Weights & Biases -----------------------------------------------------------------------------


class Wandb(Tracker):
    """Weights & Biases (package `wandb`). Each attempt is a run of its own in one group, as the
    server drops points whose step is not larger than the last one (wandb/wandb#2234, #5632)."""

    title = "Weights & Biases"

    kind: Literal["wandb"] = "wandb"
    mode: Literal["offline", "online"]
    """offline: files in the run folder. online: sent while the run goes on."""
    project: str = "tessera"
    """Project there."""

    def open(self, attempt: Attempt) -> Feed:
        return _WandbFeed(self, attempt)


class _WandbFeed:
    def __init__(self, settings: Wandb, attempt: Attempt) -> None:
        import wandb

        self._picture = wandb.Image
        self._run = wandb.init(
            mode=settings.mode,
            project=settings.project,
            dir=str(attempt.folder.absolute()),  # its service may have another working folder
            group=attempt.group,
            name=attempt.name,
            config=dict(attempt.config),
            # its summary of every metric would push what the run says at its end off the screen
            settings={"silent": True},
        )
        if settings.mode == "offline":
            self.place = f"offline; wandb sync {self._run.settings.sync_dir} sends it"
        else:
            self.place = self._run.url
        # Our own step axis: the built-in one refuses to go back.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Numbers, pictures: Pictures) -> None:
        drawn = {name: self._picture(str(path)) for name, path in pictures.items()}
        self._run.log({"step": step, **numbers, **drawn})

    def close(self) -> None:
        self._run.finish()


# --- TensorBoard ----------------------------------------------------------------------------------


class TensorBoard(Tracker):
    """TensorBoard (package `tensorboard`): files in the run folder, one curve over all attempts."""

    title = "TensorBoard"

    kind: Literal["tensorboard"] = "tensorboard"

    def open(self, attempt: Attempt) -> Feed:
        return _TensorBoardFeed(attempt)


class _TensorBoardFeed:
    def __init__(self, attempt: Attempt) -> None:
        from matplotlib.image import imread
        from torch.utils.tensorboard import SummaryWriter

        folder = attempt.folder / "tensorboard"
        # What an attempt that died had written beyond the checkpoint is struck out.
        self._writer = SummaryWriter(str(folder), purge_step=attempt.step + 1)
        self._read = imread
        self.place = f"tensorboard --logdir {folder}"

    def log(self, step: int, numbers: Numbers, pictures: Pictures) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        for name, path in pictures.items():
            self._writer.add_image(name, self._read(path), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


# --- Trackio --------------------------------------------------------------------------------------


class Trackio(Tracker):
    """Trackio (package `trackio`): a local database, and a Hugging Face Space if one is named. Each
    attempt is a run of its own in one group."""

    title = "Trackio"

    kind: Literal["trackio"] = "trackio"
    project: str = "tessera"
    """Project there."""
    space: str | None = None
    """Hugging Face Space that shows it to others, as user/name; `null`: none."""

    def open(self, attempt: Attempt) -> Feed:
        return _TrackioFeed(self, attempt)


class _TrackioFeed:
    def __init__(self, settings: Trackio, attempt: Attempt) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(attempt.folder.absolute() / "trackio"))
        import trackio  # reads that when it is imported

        self._picture = trackio.Image
        self._run = trackio.init(
            project=settings.project,
            name=attempt.name,
            group=attempt.group,
            config=dict(attempt.config),
            space_id=settings.space,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        local = f"TRACKIO_DIR={os.environ['TRACKIO_DIR']} trackio show --project {settings.project}"
        self.place = local if settings.space is None else settings.space

    def log(self, step: int, numbers: Numbers, pictures: Pictures) -> None:
        drawn = {name: self._picture(path) for name, path in pictures.items()}
        self._run.log({**numbers, **drawn}, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
}
AnyTracker = one_of(TRACKERS)

# --- the thread -----------------------------------------------------------------------------------

# What trackers get of each layer, and of how many layers: their pages stay readable, and
# metrics.jsonl has everything.
LAYER_SERIES = ("max_violation", "load_entropy", "dead_experts")
LAYERS_SHOWN = 16


def bounded(values: Mapping[str, Any]) -> dict[str, Any]:
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


class TrackerThread(threading.Thread):
    """Feeds one tracker; drops values rather than wait for it."""

    QUEUE = 10_000
    FINISH_S = 30.0

    def __init__(
        self,
        tracker: Tracker,
        attempt: Attempt,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        # A daemon: a hanging connection must not keep the process alive.
        super().__init__(daemon=True, name=f"tracker {tracker.title}")
        self._tracker, self._attempt = tracker, attempt
        self._say, self._warn = say, warn
        self._queue: queue.Queue[tuple[int, Numbers, Pictures] | None] = queue.Queue(self.QUEUE)
        self._dropped = 0
        self.start()

    def put(self, step: int, numbers: Numbers, pictures: Pictures) -> None:
        try:
            self._queue.put_nowait((step, numbers, pictures))
        except queue.Full:
            self._dropped += 1

    def stop(self) -> None:
        """Let the thread end after what is queued; of a full queue a line makes room for that."""
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()
                    self._dropped += 1

    def wait(self, end: float) -> None:
        """Wait for the thread until a time of `time.monotonic`, but no longer."""
        title = self._tracker.title
        self.join(max(0.0, end - time.monotonic()))
        if self.is_alive():
            self._warn(
                f"{title} did not finish within {self.FINISH_S:g} s and is left behind; "
                "metrics.jsonl has everything"
            )
        elif self._dropped:
            self._warn(f"{title} was too slow: {self._dropped} lines were not sent to it")

    def run(self) -> None:
        title = self._tracker.title
        try:
            feed = self._tracker.open(self._attempt)
            self._say(f"{title}: {feed.place}")
            while (line := self._queue.get()) is not None:
                feed.log(*line)
            feed.close()
        except BaseException as error:  # whatever it is, the run goes on
            self._warn(
                f"{title} stopped ({type(error).__name__}: {error}); training continues; "
                "metrics.jsonl has everything"
            )
            while self._queue.get() is not None:
                pass


def finish(trackers: Sequence[TrackerThread]) -> None:
    """Let all of them send what is queued, within `TrackerThread.FINISH_S` together."""
    for tracker in trackers:
        tracker.stop()
    end = time.monotonic() + TrackerThread.FINISH_S
    for tracker in trackers:
        tracker.wait(end)
