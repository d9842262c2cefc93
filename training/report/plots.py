"""Pictures of a run, drawn from its folder: for plots/*.png while it trains and for the report.

`figures` yields each picture that the logged metrics allow, `draw` writes them as files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from training.report.record import Record, Series, read_run, unigram_entropy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 600
"""Points of a curve; longer ones are thinned, keeping the extremes of each stretch."""

PANELS = 12
"""Layers of the load map, evenly chosen."""
PICTURES = ("load", "max_violation", "load_entropy", "routing_churn")
"""What goes to trackers as pictures too."""

BLUE, ORANGE, GREY, RED = "#1f5fa8", "#d97a1a", "#8a8f98", "#b3261e"


def thin(series: Series, points: int = POINTS) -> Series:
    """At most about `points` points, with the lowest and the highest value of every stretch."""
    if len(series) <= points:
        return series
    kept: set[int] = {0, len(series) - 1}
    width = math.ceil(2 * len(series) / points)
    for start in range(0, len(series), width):
        stretch = range(start, min(start + width, len(series)))
        kept.add(min(stretch, key=lambda i: series.values[i]))
        kept.add(max(stretch, key=lambda i: series.values[i]))
    order = sorted(kept)
    return Series([series.steps[i] for i in order], [series.values[i] for i in order])


def smoothed(series: Series) -> Series:
    """Mean with exponentially falling weights over about a twentieth of the points, those before
    the first counting nothing."""
    decay = 1 - 1 / max(1.0, len(series) / 20)
    total = weight = 0.0
    values = []
    for value in series.values:
        if math.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
        values.append(total / weight if weight else math.nan)
    return Series(series.steps, values)


def _draw(axes: Axes, series: Series, **style: object) -> None:
    series = thin(series)
    axes.plot(series.steps, series.values, **({"linewidth": 1.2} | style))


def _figure(title: str, unit: str, width: float = 5.6) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(width, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def figures(
    record: Record, unigram_entropy: float | None = None
) -> Iterator[tuple[str, str, Figure]]:
    """Name, a sentence on how to read it, and the picture, for each that the metrics allow.

    Args:
        unigram_entropy: nats per token of the training text, drawn beside the loss: what a model
            reaches that knows only how often each token occurs.
    """
    loss, val = record.series("loss"), record.series("val_loss")
    if loss.steps:
        figure, axes = _figure("loss", "nats per token")
        _draw(axes, loss, color=BLUE, alpha=0.3, linewidth=0.8)
        _draw(axes, smoothed(loss), color=BLUE, label="training")
        if val.steps:
            axes.plot(val.steps, val.values, "o-", color=ORANGE, markersize=3, label="validation")
        for name, series in record.sources("val_loss").items():
            axes.plot(series.steps, series.values, ":", linewidth=1.2, label=f"validation, {name}")
        if unigram_entropy is not None:
            axes.axhline(unigram_entropy, color=GREY, linestyle="--", label="unigram entropy")
        # above the curves: nothing is drawn there
        axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.99))
        yield "loss", "Both fall; validation rising while training falls is overfitting.", figure

    simple = (
        ("lr", "learning rate", "", "Warm-up, course and decay of the peak rate."),
        (
            "grad_norm",
            "gradient norm",
            "before clipping",
            "Steady after warm-up; peaks go with jumps of the loss.",
        ),
        ("tokens_per_second", "speed", "tokens per second", "Steady; dips are waits for data."),
        (
            "mfu",
            "model FLOPs utilisation",
            "part of peak",
            "Useful arithmetic per peak arithmetic.",
        ),
        (
            "balance_loss",
            "load-balance loss",
            "1 = balanced",
            "Near 1 when all experts get the same load; their number when one gets all.",
        ),
        (
            "max_violation",
            "max_violation",
            "load / mean - 1",
            "Load of the fullest expert over the mean, minus 1, in the worst layer; 0 = balanced.",
        ),
        (
            "load_entropy",
            "entropy of the load",
            "of that of an even load",
            "Mean over layers; 1 = balanced. Below 0.8 for long, a few experts do the work.",
        ),
        ("dead_experts", "dead experts", "experts", "Below a tenth of the mean load, all layers."),
        (
            "routing_churn",
            "routing churn",
            "share of choices",
            "Choices of a fixed probe that changed since the last log step. Falls as the routers "
            "settle; low churn alone is no health: a collapsed router never changes its mind.",
        ),
        ("top_k", "experts per token", "experts", "By the schedule; evaluation takes the last."),
        (
            "router_entropy",
            "entropy of gates",
            "nats",
            "ln K: the K experts count alike; 0: one of them does everything.",
        ),
    )
    for name, title, unit, text in simple:
        series = record.series(name)
        if name == "tokens_per_second" and len(series) > 2:
            series = Series(series.steps[1:], series.values[1:])  # the first holds compilation
        if name == "top_k" and len(set(series.values)) < 2:
            continue
        if series.steps:
            figure, axes = _figure(title, unit)
            _draw(axes, series, color=RED if name == "dead_experts" else BLUE)
            if name in ("tokens_per_second", "dead_experts", "max_violation"):
                axes.set_ylim(bottom=0)
            if name == "grad_norm" and all(v > 0 for v in series.finite):
                axes.set_yscale("log")
            yield name, text, figure

    layers = record.layers("max_violation")
    if layers and any(len(series) > 1 for series in layers.values()):
        yield "load_by_layer", "Dark rows are layers with a much-used expert.", _heat_map(layers)
    if len(record.loads) > 1:
        text = "Each row is an expert: pale has no load, dark blue three times the mean or more."
        yield "load", text, _load_maps(record.loads)


def _heat_map(layers: dict[int, Series]) -> Figure:
    figure, axes = _figure("max_violation by MoE layer", "MoE layer", width=11.8)
    steps = sorted({step for series in layers.values() for step in series.steps})
    columns = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, 120).astype(int))]
    place = {step: column for column, step in enumerate(columns)}
    grid = np.full((len(layers), len(columns)), np.nan)
    for row, series in enumerate(layers.values()):
        for step, value in zip(series.steps, series.values):
            if step in place:
                grid[row, place[step]] = value
    image = axes.imshow(
        grid,
        aspect="auto",
        cmap="YlGnBu",
        vmin=0,
        interpolation="nearest",
        extent=(columns[0], columns[-1], len(layers) - 0.5, -0.5),
    )
    axes.set_yticks(range(len(layers)), [str(number) for number in layers])
    if len(layers) > 12:
        axes.set_yticks(range(0, len(layers), 4), [str(n) for n in list(layers)[::4]])
    axes.grid(visible=False)
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_label("load / mean - 1", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def _load_maps(lines: list[dict]) -> Figure:
    """Load of every expert over time, a panel for each of at most `PANELS` layers."""
    from matplotlib.figure import Figure

    load_WLE = np.array([line["load"] for line in lines])
    steps = [line["step"] for line in lines]
    layers = load_WLE.shape[1]
    shown = np.unique(np.linspace(0, layers - 1, min(layers, PANELS)).astype(int))
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2.2 + 2.4 * columns, 0.9 + 1.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    figure.suptitle("load of each expert", fontsize=10, x=0.01, ha="left")
    for panel in panels.flat:
        panel.set_visible(False)
    for panel, layer in zip(panels.flat, shown):
        panel.set_visible(True)
        panel.set_title(f"MoE layer {layer}", fontsize=8)
        image = panel.imshow(
            load_WLE[:, layer].T,
            aspect="auto",
            cmap="YlGnBu",
            vmin=0,
            vmax=3,
            interpolation="nearest",
            extent=(steps[0], steps[-1], load_WLE.shape[2] - 0.5, -0.5),
        )
        panel.tick_params(labelsize=7)
        panel.label_outer()
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("expert", fontsize=8)
    bar = figure.colorbar(image, ax=panels, shrink=0.8)
    bar.set_label("load / mean", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def draw(folder: str | Path) -> list[Path]:
    """Draw plots/*.png of a run folder, each file whole or not at all; the files written."""
    folder = Path(folder)
    (folder / "plots").mkdir(exist_ok=True)
    record = read_run(folder)
    written = []
    for name, _, figure in figures(record, unigram_entropy(record)):
        target = folder / "plots" / f"{name}.png"
        partial = target.with_suffix(".partial")
        figure.savefig(partial, dpi=110, format="png")
        partial.replace(target)
        written.append(target)
    return written
