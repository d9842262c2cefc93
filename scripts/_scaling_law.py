"""How much more compute a control needs for an arm's loss: effective speedup by a fitted law.

    loss = floor + scale · compute ^ -exponent

The law is fitted to the final losses of one control that was trained for several lengths, each with
a schedule of its own: losses on the way to a decay of the learning rate are no losses of shorter
runs. Compute is in units of the control's own, so a speedup is 1 where an arm is worth nothing.

After Marin's ablations (github.com/marin-community/marin/issues/3469).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

EXPONENTS = (0.01, 4.0)
"""The range in which the exponent is looked for."""
REACH = 8.0


@dataclass(frozen=True)
class Law:
    """A fitted law."""

    floor: float
    scale: float
    exponent: float
    least: float
    most: float
    """The compute of the shortest and longest run that it was fitted to."""

    def loss(self, compute: float) -> float:
        return self.floor + self.scale * compute**-self.exponent

    def compute(self, loss: float) -> float:
        """Needed for a loss; infinite at the floor and where it is more than `REACH` times that of
        the longest run, of which the fit knows nothing."""
        if loss <= self.floor:
            return math.inf
        needed = ((loss - self.floor) / self.scale) ** (-1 / self.exponent)
        return needed if needed <= REACH * self.most else math.inf

    def covers(self, compute: float) -> bool:
        """Whether it lies between the runs of the fit, with a part in a hundred to spare."""
        return 0.99 * self.least <= compute <= 1.01 * self.most

    def __str__(self) -> str:
        return f"{self.floor:.3f} + {self.scale:.3f} · C^-{self.exponent:.3f}"


def fit_law(compute: Sequence[float], losses: Sequence[float]) -> Law | None:
    """The law with the least squared error in the loss, floor not below zero.

    None where the losses do not fall with the compute, or at fewer than three lengths.
    """
    if len(set(compute)) < 3:
        return None

    def error(log_exponent: float) -> tuple[float, float, float]:
        """Squared error, floor and scale of the best law with an exponent."""
        powers = [c ** -math.exp(log_exponent) for c in compute]
        n, mean_u, mean_y = len(powers), sum(powers) / len(powers), sum(losses) / len(losses)
        square = sum((u - mean_u) ** 2 for u in powers)
        slope = sum((u - mean_u) * (y - mean_y) for u, y in zip(powers, losses)) / square
        floor = mean_y - slope * mean_u
        if floor < 0:
            floor, slope = (
                0.0,
                sum(u * y for u, y in zip(powers, losses)) / sum(u * u for u in powers),
            )
        if slope <= 0:
            return math.inf, floor, slope
        wrong = sum((floor + slope * u - y) ** 2 for u, y in zip(powers, losses))
        return wrong / n, floor, slope

    low, high = (math.log(exponent) for exponent in EXPONENTS)
    steps = 400
    places = [low + (high - low) * i / steps for i in range(steps + 1)]
    best = min(range(len(places)), key=lambda i: error(places[i])[0])
    if math.isinf(error(places[best])[0]):
        return None
    left, right = places[max(0, best - 1)], places[min(steps, best + 1)]
    for _ in range(60):  # the error has one minimum between neighbours of the best place
        a, b = left + (right - left) / 3, right - (right - left) / 3
        left, right = (left, b) if error(a)[0] < error(b)[0] else (a, right)
    exponent = (left + right) / 2
    _, floor, scale = error(exponent)
    return Law(floor, scale, math.exp(exponent), min(compute), max(compute))
