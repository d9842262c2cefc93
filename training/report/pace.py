"""Speed of training, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Pace:
    """Speed of training proper: time spent on evaluation and saving does not count."""

    started: float = field(default_factory=time.perf_counter)
    paused: float = 0.0
    laps: int = 0
    steps: int = 0  # of all laps but the first
    seconds: float = 0.0  # likewise

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside is not training time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.paused += time.perf_counter() - start

    def lap(self, steps: int) -> tuple[float, float]:
        """Seconds since the last lap, and seconds per step to expect from here on."""
        now = time.perf_counter()
        seconds = max(now - self.started - self.paused, 1e-9)
        self.started, self.paused = now, 0.0
        self.laps += 1
        # The first lap holds compilation and warm-up; it is used only until there is another.
        if self.laps == 1:
            return seconds, seconds / steps
        self.steps += steps
        self.seconds += seconds
        return seconds, self.seconds / self.steps
