"""Tables and plots of scripts/sweep.py: arms against a control, in pairs of equal seeds.

value of a run    val_…: the last validation; any other metric: its mean over the last fifth of
                  the logged steps
± of a value      standard error of the mean over seeds
difference        mean over seeds of (arm - control) with one seed, ± its standard error
speedup           compute, or time, that the control needs for the arm's loss by a law fitted to its
                  own lengths (scripts/_scaling_law.py), over that of the arm; mean over seeds
verdict           lower or higher where the difference exceeds the 95 % interval of Student's t,
                  else "none at ±x" with that interval: a difference below x would not be seen
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts._scaling_law import Law, fit_law
from training.report.record import Record, read_run

if TYPE_CHECKING:
    from scripts.sweep import SweepFile

# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom; the last one serves for more,
# which widens the interval a little.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
TAIL = 0.2


@dataclass(frozen=True)
class RunValues:
    """A finished run."""

    arm: str
    seed: int
    folder: Path
    length: float = 1.0
    """Of the control: steps as a multiple of its own."""
    flops: float = math.nan
    """Model FLOPs, where a law asks for them."""


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error; `error` is None for a single value."""

    mean: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        error = None
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), error, len(values))

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % interval."""
        if self.error is None:
            return None
        return self.error * T_QUANTILES[min(self.count - 1, len(T_QUANTILES)) - 1]

    def text(self, sign: bool = False) -> str:
        mean = f"{self.mean:+.4f}" if sign else f"{self.mean:.4f}"
        return mean if self.error is None else f"{mean} ± {self.error:.4f}"


def verdict(difference: Mean) -> str:
    """In words, whether a difference was seen."""
    if difference.interval is None:
        return "one pair"
    if abs(difference.mean) <= difference.interval:
        return f"none at ±{difference.interval:.2g}"
    return "higher" if difference.mean > 0 else "lower"


def value_of(record: Record, name: str) -> float | None:
    """The number that stands for a run; None if it was never logged."""
    series = record.series(name)
    if not series.steps:
        return None
    return (
        series.values[-1] if name.startswith("val_") else statistics.fmean(series.tail(TAIL).values)
    )


def read_values(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Those of the named metrics that a run logged."""
    record = read_run(folder)
    found = {name: value_of(record, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Cell:
    """One metric of one arm."""

    value: Mean
    difference: Mean | None
    """From the control; None for the control itself and where no pair is finished."""


def compare(
    values: dict[str, dict[int, dict[str, float]]], control: str, metrics: Sequence[str]
) -> dict[str, dict[str, Cell]]:
    """Arm → metric → cell, from arm → seed → metric → value; only seeds of both arms make pairs."""
    table: dict[str, dict[str, Cell]] = {}
    for arm, by_seed in values.items():
        row: dict[str, Cell] = {}
        for metric in metrics:
            own = {seed: found[metric] for seed, found in by_seed.items() if metric in found}
            if not own:
                continue
            base = {
                seed: found[metric]
                for seed, found in values.get(control, {}).items()
                if metric in found
            }
            pairs = [own[seed] - base[seed] for seed in sorted(own) if seed in base]
            paired = Mean.of(pairs) if pairs and arm != control else None
            row[metric] = Cell(Mean.of(list(own.values())), paired)
        table[arm] = row
    return table


@dataclass(frozen=True)
class Speedup:
    """What an arm's loss is worth in the control's compute and time: 1 is nothing."""

    compute: Mean
    time: Mean | None
    """None where the log has no speeds."""
    beyond: bool
    """Whether some seed's loss lies outside of those that the law was fitted to."""


def seconds_of(record: Record) -> float | None:
    """Time of training alone: tokens over the median speed of the log."""
    tokens, speeds = record.series("tokens"), record.series("tokens_per_second")
    if not tokens.steps or not speeds.steps:
        return None
    return tokens.values[-1] / statistics.median(speeds.values)


def speedups(
    runs: Sequence[RunValues], control: str, metric: str
) -> tuple[dict[str, Speedup], dict[int, Law]]:
    """Arm → speedup, and seed → law; each seed has a law of its own, with which its arms are
    compared. Seeds without a law, and losses that it does not reach, are left out."""
    lines: dict[int, list[tuple[float, float]]] = {}
    own: dict[int, tuple[float, float | None]] = {}
    found: dict[str, dict[int, tuple[float, float, float | None]]] = {}
    for run in runs:
        record = read_run(run.folder)
        loss, seconds = value_of(record, metric), seconds_of(record)
        if loss is None:
            continue
        if run.arm == control:
            lines.setdefault(run.seed, []).append((run.flops, loss))
            if run.length == 1:
                own[run.seed] = run.flops, seconds
        else:
            found.setdefault(run.arm, {})[run.seed] = run.flops, loss, seconds
    laws = {}
    for seed, points in lines.items():
        if seed in own:
            units = [flops / own[seed][0] for flops, _ in points]
            law = fit_law(units, [loss for _, loss in points])
            laws |= {} if law is None else {seed: law}
    table = {}
    for arm, by_seed in found.items():
        compute, time, beyond = [], [], False
        for seed, (flops, loss, seconds) in by_seed.items():
            needed = laws[seed].compute(loss) if seed in laws else math.inf
            if math.isinf(needed):
                continue
            base, base_seconds = own[seed]
            beyond |= not laws[seed].covers(needed)
            compute.append(needed * base / flops)
            if seconds and base_seconds:
                time.append(needed * base_seconds / seconds)
        if compute:
            both = Mean.of(time) if len(time) == len(compute) else None
            table[arm] = Speedup(Mean.of(compute), both, beyond)
    return table, laws


def speedup_lines(table: dict[str, Speedup], laws: dict[int, Law], metric: str) -> list[str]:
    """The table of effective speedups, and the laws behind it."""
    if not laws:
        return ["", "No law: the control's losses of three lengths are not there or do not fall."]
    lines = ["", "| arm | effective speedup, compute | effective speedup, time |", "|---|---|---|"]
    for arm, found in table.items():
        time = "" if found.time is None else found.time.text()
        mark = " (beyond the fit)" if found.beyond else ""
        lines.append(f"| {arm} | {found.compute.text()}{mark} | {time} |")
    told = "; ".join(f"seed {seed}: {law}" for seed, law in sorted(laws.items()))
    lines += [
        "",
        "Effective speedup: how many times an arm's compute (model FLOPs) or time the control "
        f"needs for the arm's {metric}, by a law of the control's compute C, in units of its own. "
        f"{told}. Time is that of the runs as they went: runs side by side slow each other down. "
        '"Beyond the fit" is extrapolated; an arm without a row is out of reach of the law.',
    ]
    return lines


def markdown(
    sweep: SweepFile,
    table: dict[str, dict[str, Cell]],
    command: str,
    steps: dict[str, int | None],
    more: Sequence[str] = (),
) -> str:
    """The table, with what was compared and how to make it again."""
    metrics = [name for name in sweep.metrics if any(name in row for row in table.values())]
    lines = [f"# {sweep.title}", "", f"`{command}`", ""]
    head = ["arm", "runs"]
    for metric in metrics:
        head += [metric, "difference", "seen"]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for arm, row in table.items():
        count = max((cell.value.count for cell in row.values()), default=0)
        cells = [f"{arm} (control)" if arm == sweep.control else arm, str(count)]
        for metric in metrics:
            cell = row.get(metric)
            if cell is None:
                cells += ["", "", ""]
            elif cell.difference is None:
                cells += [cell.value.text(), "", ""]
            else:
                told = verdict(cell.difference)
                cells += [cell.value.text(), cell.difference.text(sign=True), told]
        lines.append("| " + " | ".join(cells) + " |")
    lines += more
    arms = [f"{arm}: {' '.join(own) or '–'}" for arm, own in sweep.arms.items()]
    lines += ["", "Arms: " + "; ".join(arms)]
    if sweep.equal_flops:
        counted = [f"{arm} {count}" for arm, count in steps.items()]
        lines += ["", f"Steps, at equal model FLOPs: {', '.join(counted)}"]
    lines += [
        "",
        "Mean ± standard error over seeds; differences in pairs of equal seed (same first weights, "
        "same rows in the same order); seen: by the 95 % interval of Student's t. One cell in "
        "twenty is seen by chance.",
        "",
    ]
    return "\n".join(lines)


def plot(path: Path, sweep: SweepFile, runs: Sequence[RunValues], values: Any) -> None:
    """Left: the first metric's differences, a dot a pair; right: the course of `curve`."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(10, 0.32 * len(sweep.arms) + 2.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    figure.suptitle(sweep.title, fontsize=11)
    metric = sweep.metrics[0]
    colors = [f"C{number % 10}" for number in range(len(sweep.arms))]
    # beyond ten arms the colours begin again, with another line and marker
    lines = ["-" if number < 10 else "--" for number in range(len(sweep.arms))]
    marks = ["o" if number < 10 else "s" for number in range(len(sweep.arms))]
    control = values.get(sweep.control, {})
    others = [arm for arm in sweep.arms if arm != sweep.control]
    for height, arm in enumerate(others):
        pairs = [
            found[metric] - control[seed][metric]
            for seed, found in values.get(arm, {}).items()
            if metric in found and metric in control.get(seed, {})
        ]
        if not pairs:
            continue
        number = list(sweep.arms).index(arm)
        color = colors[number]
        mean = Mean.of(pairs)
        left.errorbar(mean.mean, height, xerr=mean.error, fmt="|", color=color, capsize=4, ms=14)
        left.plot(pairs, [height] * len(pairs), marks[number], color=color, alpha=0.5, ms=4)
    left.axvline(0, color="#8a8f98", linestyle="--", linewidth=1)
    left.set_yticks(range(len(others)), others, fontsize=8)
    left.set_ylim(len(others) - 0.5, -0.5)
    left.set_xlabel(f"{metric}: arm - {sweep.control}, same seed (bar: standard error)", fontsize=8)
    # A curve over other seeds than its neighbour's would differ by the seeds.
    found = [set(values[arm]) for arm in sweep.arms if values.get(arm)]
    seeds = set.intersection(*found) if found else set()
    for arm, color, line in zip(sweep.arms, colors, lines):
        mine = [run for run in runs if run.arm == arm and run.seed in seeds]
        curves = [read_run(run.folder).series(sweep.curve) for run in mine]
        by_step: dict[int, list[float]] = {}
        for series in curves:
            for step, value in zip(series.steps, series.values):
                by_step.setdefault(step, []).append(value)
        if by_step:
            steps = sorted(by_step)
            means = [statistics.fmean(by_step[step]) for step in steps]
            right.plot(steps, means, line, color=color, label=arm, linewidth=1.2)
    right.set_xlabel("step", fontsize=8)
    right.set_ylabel(f"{sweep.curve}, mean of seeds {sorted(seeds)}", fontsize=8)
    if right.lines:
        right.legend(fontsize=7, frameon=False)
    for axes in (left, right):
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def write_report(
    stem: Path,
    sweep: SweepFile,
    runs: Sequence[RunValues],
    command: str,
    steps: dict[str, int | None],
) -> str:
    """Write STEM.md, STEM.json and STEM.png; the text of the table."""
    values: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in sweep.arms}
    faster, laws, more = {}, {}, []
    if sweep.lengths:
        faster, laws = speedups(runs, sweep.control, sweep.metrics[0])
        more = speedup_lines(faster, laws, sweep.metrics[0])
    runs = [run for run in runs if run.length == 1]
    for run in runs:
        values[run.arm][run.seed] = read_values(run.folder, sweep.metrics)
    table = compare(values, sweep.control, sweep.metrics)
    text = markdown(sweep, table, command, steps, more)
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    result = {
        "title": sweep.title,
        "command": command,
        "control": sweep.control,
        "settings": sweep.settings,
        "arms": {
            arm: {
                "words": sweep.arms[arm],
                "steps": steps.get(arm),
                "runs": {str(seed): found for seed, found in values[arm].items()},
                "metrics": {name: asdict(cell) for name, cell in table[arm].items()},
            }
            for arm in sweep.arms
        },
        "laws": {str(seed): asdict(law) for seed, law in laws.items()},
        "speedups": {arm: asdict(found) for arm, found in faster.items()},
        "versions": _versions(runs),
    }
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    if runs:
        plot(stem.with_suffix(".png"), sweep, runs, values)
    return text


def _versions(runs: Sequence[RunValues]) -> list[str]:
    """The comment lines at the head of a run's config: versions and commit."""
    return read_run(runs[0].folder).head if runs else []
