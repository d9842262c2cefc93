"""Pictures of a run from its metrics.jsonl: plots/loss.png and plots/router.png."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.logging import read_metrics

# One panel per picture row: title, metrics drawn in it.
PICTURES: dict[str, Sequence[tuple[str, Sequence[str]]]] = {
    "loss": (
        ("loss", ("loss", "val_loss")),
        ("gradient norm", ("grad_norm",)),
        ("learning rate", ("lr", "router_lr")),
    ),
    "router": (
        ("imbalance: max load / mean load - 1", ("max_violation",)),
        ("balance loss (1 = balanced)", ("balance_loss",)),
        ("router entropy (nats)", ("router_entropy",)),
    ),
}


def draw(folder: Path) -> list[Path]:
    """Draw what there is to draw; the files written."""
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    lines = read_metrics(folder)
    written = []
    for name, panels in PICTURES.items():
        panels = [row for row in panels if any(_series(lines, key)[0] for key in row[1])]
        if not panels:
            continue
        figure, axes = plt.subplots(
            len(panels), 1, figsize=(8, 2.6 * len(panels)), sharex=True, squeeze=False
        )
        for (title, keys), axis in zip(panels, axes[:, 0]):
            for key in keys:
                steps, values = _series(lines, key)
                marker = "o" if len(steps) < 30 else None
                if steps:
                    axis.plot(steps, values, label=key, marker=marker, markersize=3)
            axis.set_title(title, loc="left", fontsize=10)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        axes[-1, 0].set_xlabel("step")
        figure.tight_layout()
        target = folder / "plots" / f"{name}.png"
        target.parent.mkdir(exist_ok=True)
        partial = target.with_suffix(".partial")
        figure.savefig(partial, dpi=120, format="png")
        os.replace(partial, target)
        plt.close(figure)
        written.append(target)
    return written


def _series(lines: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of a metric (NaN and infinity are text in the file)."""
    numbers = (int, float)
    points = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), numbers)]
    return [step for step, _ in points], [value for _, value in points]
