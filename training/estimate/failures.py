"""Checkpoints against failures: how often to save, and what share of the time is lost.

Failures come at random, equally likely at any moment (a Poisson process). One takes the run back
to its last checkpoint. Saving often costs time, saving seldom loses more work; the best interval
is Young's (CACM 17(9), 1974) where saving is short against the time between failures, and Daly's
(Future Generation Computer Systems 22, 2006) in general:

    wall time / work = M exp(R / M) (exp((t + C) / M) - 1) / t

for a mean time M between failures, a restart of R seconds, t seconds of work between two
checkpoints and a save that stops the training for C seconds. It counts failures during saves and
restarts too. A checkpoint that is written in the background for L seconds is of use only then: a
failure costs L seconds more, which are added to R here (exact to first order in L / M).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

WORST = 1e6
"""Wall time per work from which on a run is said to get nowhere."""


@dataclass(frozen=True)
class Failures:
    """All times in seconds."""

    between: float
    """Mean time between two failures of the whole run."""
    save: float
    """For which a save stops the training."""
    restart: float
    """From a failure to the first new step: noticing it, starting, loading, compiling."""
    write: float = 0.0
    """From the begin of a save until the checkpoint is complete, while training goes on."""

    def stretch(self, interval: float) -> float:
        """Wall time per useful work, at least 1, with so many seconds of work between saves."""
        M = self.between
        exponent = (self.restart + self.write) / M + (interval + self.save) / M
        if exponent > math.log(WORST):
            return WORST
        lost = math.exp((self.restart + self.write) / M)
        return M * lost * math.expm1((interval + self.save) / M) / interval

    def lost(self, interval: float) -> float:
        """Share of the time that is no useful work: saves, restarts, work done twice."""
        return 1 - 1 / self.stretch(interval)

    def young(self) -> float:
        """Seconds of work between two saves by Young's formula."""
        return math.sqrt(2 * self.save * self.between)

    def best(self) -> float:
        """Seconds of work between two saves for which `stretch` is smallest.

        There the derivative is zero: t / M - 1 + exp(-(t + C) / M) = 0, whose left side grows with
        t, so it is found by bisection.
        """
        M, C = self.between, self.save
        low, high = 0.0, M
        for _ in range(100):
            middle = (low + high) / 2
            if middle / M + math.expm1(-(middle + C) / M) < 0:
                low = middle
            else:
                high = middle
        return high

    def simulate(self, interval: float, length: float, seed: int = 0) -> float:
        """Share of the time lost in a run of so many seconds whose failures are drawn."""
        draw = random.Random(seed)
        now = done = 0.0  # work since the start that a checkpoint holds
        pending: list[tuple[float, float]] = []  # checkpoints on their way: (complete at, work)
        fails = draw.expovariate(1 / self.between)
        work = 0.0

        def settle(moment: float) -> None:
            nonlocal done
            while pending and pending[0][0] <= moment:
                done = pending.pop(0)[1]

        while now < length:
            ends = now + interval + self.save
            if fails >= ends:
                work += interval
                pending.append((ends - self.save + max(self.write, self.save), work))
                now = ends
                settle(now)
                continue
            settle(fails)
            pending.clear()
            work, now = done, fails
            while True:  # a restart can fail as well
                fails = now + draw.expovariate(1 / self.between)
                if fails >= now + self.restart:
                    break
                now = fails
            now += self.restart
        return 1 - work / now
