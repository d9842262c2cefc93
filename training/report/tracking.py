"""Weights & Biases, fed by a thread through a bounded queue: whatever it does, it cannot delay or
end the run.

It gets each attempt as a run of its own in one group, as its server drops points whose step is not
larger than the last one (wandb/wandb#2234, #5632).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What Weights & Biases gets of each layer, and of how many layers: its pages stay readable, and
# metrics.jsonl has everything.
LAYER_SERIES = ("max_violation", "load_entropy", "dead_experts")
LAYERS_SHOWN = 16


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


class WandbThread(threading.Thread):
    """Feeds Weights & Biases; drops values rather than wait for it."""

    QUEUE = 10_000
    FINISH_S = 30.0

    def __init__(
        self,
        settings: dict[str, Any],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        # A daemon: a hanging connection must not keep the process alive.
        super().__init__(daemon=True)
        self._settings = settings
        self._say = say
        self._warn = warn
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(self.QUEUE)
        self._dropped = 0
        self.start()

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
        self.join(max(0.0, end - time.monotonic()))
        if self.is_alive():
            self._warn(
                f"Weights & Biases did not finish within {self.FINISH_S:.0f} s and is left behind; "
                f"metrics.jsonl has everything"
            )
        elif self._dropped:
            self._warn(f"Weights & Biases was too slow: {self._dropped} lines were not sent to it")

    def run(self) -> None:
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
                f"Weights & Biases stopped ({type(error).__name__}: {error}); training continues; "
                f"metrics.jsonl has everything"
            )
            while self._queue.get() is not None:
                pass
