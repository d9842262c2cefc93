#!/usr/bin/env python3
"""Trains arms × seeds on the same data in the same order and compares them in pairs.

    python scripts/sweep.py configs/ablations/balance.yaml
    python scripts/sweep.py configs/ablations/*.yaml --jobs 8 --out runs/sweeps
    python scripts/sweep.py configs/ablations/rounding.yaml --seeds 5 train.steps=1000
    python scripts/sweep.py configs/ablations/*.yaml --seeds 3-4 --also machine-b/sweeps
    python scripts/sweep.py my.yaml --dense-twin --lengths 0.5,2     # and what a gain is worth
    python scripts/sweep.py my.yaml --leave-one-out                  # all together, less one each

A sweep file names a base config, the arms (lists of section.key=value words) and which of them is
the control; see configs/ablations. Words on the command line go to every arm. With one seed, arms
start from the same weights and read the same rows in the same order, so that differences are taken
within a seed. Runs that several files have in common are trained once.

`--dense-twin` adds an arm: the control without experts, with as many weights in products per token.
`--lengths 0.5,2` also trains the control for half and twice its steps. A law that is fitted to its
final losses then says how many times the arm's compute, and its time, the control would need for
the arm's loss (scripts/_scaling_law.py). `--leave-one-out` makes all arms' words together the
control, and an arm of each left out.

Written to OUT: NAME.md (the table: mean ± standard error, and the paired difference from the
control), NAME.json, NAME.png. The same command again trains only what is missing and resumes
what was stopped. `--also FOLDER` counts the finished runs of another OUT, made by the same code
elsewhere; with `--time-limit 0` nothing is trained and the tables are of what there is. Exit codes:
0 done, 1 a run failed, 2 a mistake in a file, 75 stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pydantic import Field, ValidationError, model_validator

from models.dense_twin import dense_twin
from models.errors import UserError
from moe.settings import Settings
from scripts._command import bounded, command, make_parser
from scripts._sweep_report import RunValues, read_values, write_report
from training.config.build import Config, load_config
from training.config.load import ConfigError, expand_home, read_yaml, user_path
from training.config.messages import first_line
from training.estimate.flops import run_flops
from training.report.files import EVENTS, read_lines, read_metrics
from training.report.units import human_time

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
STOPPED = 75
TWIN = "dense twin"


class SweepFile(Settings):
    """What a sweep file says."""

    title: str
    base: str
    """Config of all arms, relative to the sweep file."""
    settings: list[str] = Field(default_factory=list)
    """Words for all arms."""
    control: str
    arms: dict[str, list[str]] = Field(min_length=2)
    """Name → words that make the arm differ."""
    seeds: list[int] = Field([0, 1, 2], min_length=1)
    metrics: list[str] = Field(["val_loss", "max_violation", "dead_experts"], min_length=1)
    """Columns of the table; the first one is plotted."""
    curve: str = "max_violation"
    """Metric whose course is plotted."""
    equal_flops: list[str] = Field(default_factory=list)
    """Arms that train for as many steps as cost what the control costs, by
    training/estimate/flops.py."""
    lengths: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)
    """Other lengths that the control is trained for, as multiples of its steps: two or more, for
    the law by which effective speedups are told."""

    @model_validator(mode="after")
    def _names_are_arms(self) -> SweepFile:
        for key, names in (("control", [self.control]), ("equal_flops", self.equal_flops)):
            for name in names:
                if name not in self.arms:
                    raise ValueError(f"{key}: {name!r} is none of the arms {list(self.arms)}")
        if self.lengths and len({1.0, *self.lengths}) < 3:
            raise ValueError(
                f"lengths: {self.lengths} are too few for a law; allowed: two or more beside 1"
            )
        return self


@dataclass(eq=False)
class Run:
    """One training run; several arms may share it."""

    arm: str
    seed: int
    words: list[str]
    base: Path
    config: Config
    key: str
    """Hash of the resolved config, without its name and place."""
    length: float = 1.0
    """Steps of the control as a multiple of its own; 1 for arms."""
    folder: Path = field(default=Path())
    error: str | None = None

    @property
    def done(self) -> bool:
        return any(line.get("event") == "done" for line in read_lines(self.folder / EVENTS))


def read_sweep(path: Path) -> SweepFile:
    """The sweep in a YAML file.

    Raises:
        ConfigError: what is wrong with it, in one line.
    """
    try:
        return SweepFile.model_validate(read_yaml(path))
    except ValidationError as error:
        keys = {"": list(SweepFile.model_fields)}
        raise ConfigError(f"{path}: {first_line(error, keys)}") from None


def plan_runs(
    path: Path, sweep: SweepFile, words: Sequence[str], seeds: Sequence[int]
) -> list[Run]:
    """All runs of a sweep, every config checked.

    Raises:
        ConfigError: a mistake in an arm, which is named.
    """
    base = path.parent / sweep.base
    runs = []
    steps = {arm: f"train.steps={count}" for arm, count in equal_steps(path, sweep, words).items()}
    wanted = [(arm, 1.0, [steps[arm]] if arm in steps else []) for arm in sweep.arms]
    if sweep.lengths:
        own = _steps(path, sweep, _of_arm(path, sweep, sweep.control, words), "lengths")
        counts = {length: max(1, round(length * own)) for length in sweep.lengths}
        wanted += [(sweep.control, x, [f"train.steps={n}"]) for x, n in counts.items() if x != 1]
    for seed in seeds:
        for arm, length, more in wanted:
            every = [*sweep.settings, *sweep.arms[arm], *words, f"run.seed={seed}", *more]
            config = _load(path, base, arm, every)
            values = config.to_dict()
            values["run"] |= {"name": None, "dir": None}
            text = json.dumps(values, sort_keys=True)
            key = hashlib.sha256(text.encode()).hexdigest()[:8]
            runs.append(Run(arm, seed, every, base, config, key, length))
    return runs


def _of_arm(path: Path, sweep: SweepFile, arm: str, words: Sequence[str]) -> Config:
    every = [*sweep.settings, *sweep.arms[arm], *words]
    return _load(path, path.parent / sweep.base, arm, every)


def _steps(path: Path, sweep: SweepFile, control: Config, key: str) -> int:
    if control.train.steps is None:
        raise ConfigError(f"{path}: {key} needs train.steps, the control has epochs")
    return control.train.steps


def with_dense_twin(path: Path, sweep: SweepFile, words: Sequence[str]) -> SweepFile:
    """The sweep with one more arm: the control's dense twin.

    Raises:
        ConfigError: an arm of that name, or a control that has no dense twin.
    """
    if TWIN in sweep.arms:
        raise ConfigError(f"{path}: there is an arm {TWIN!r} already; leave --dense-twin out")
    try:
        fields = dense_twin(_of_arm(path, sweep, sweep.control, words).model.config)
    except UserError as error:
        raise ConfigError(f"{path}: --dense-twin: {error}") from None
    twin = [f"model.{key}={json.dumps(value)}" for key, value in fields.items()]
    return _changed(sweep, arms=sweep.arms | {TWIN: [*sweep.arms[sweep.control], *twin]})


def leave_one_out(path: Path, sweep: SweepFile) -> SweepFile:
    """All arms' words together as the control, an arm of each left out, and one of none.

    Raises:
        ConfigError: too few arms.
    """
    own = {arm: words for arm, words in sweep.arms.items() if arm != sweep.control}
    if len(own) < 2:
        raise ConfigError(f"{path}: --leave-one-out needs two arms beside the control")
    setting: dict[str, str] = {}
    for arm, words in own.items():
        for key in {word.partition("=")[0] for word in words}:
            if key in setting:
                raise ConfigError(
                    f"{path}: --leave-one-out: the arms {setting[key]!r} and {arm!r} both set "
                    f"{key}, so they cannot be put together"
                )
            setting[key] = arm
    base = sweep.arms[sweep.control]
    arms = {"all": [*base, *(word for words in own.values() for word in words)]}
    for left in own:
        others = [word for arm, words in own.items() if arm != left for word in words]
        arms[f"without {left}"] = [*base, *others]
    arms["none"] = base
    title = f"{sweep.title}, leave one out"
    return _changed(sweep, title=title, arms=arms, control="all", equal_flops=[])


def _changed(sweep: SweepFile, **changes: Any) -> SweepFile:
    return SweepFile(**{**sweep.model_dump(), **changes})


def _load(path: Path, base: Path, arm: str, words: list[str]) -> Config:
    try:
        return load_config(base, words)
    except ConfigError as error:
        raise ConfigError(f"{path}: arm {arm!r}: {error}") from None


def equal_steps(path: Path, sweep: SweepFile, words: Sequence[str]) -> dict[str, int]:
    """Steps of the arms in `equal_flops` that cost as many model FLOPs as the control's do."""
    found: dict[str, int] = {}
    if not sweep.equal_flops:
        return found

    control = _of_arm(path, sweep, sweep.control, words)
    steps = _steps(path, sweep, control, "equal_flops")
    budget = run_flops(control, steps)
    for arm in sweep.equal_flops:
        config = _of_arm(path, sweep, arm, words)
        low, high = 1, 8 * steps
        while low < high:  # the most steps within the budget
            middle = (low + high + 1) // 2
            low, high = (middle, high) if run_flops(config, middle) <= budget else (low, middle - 1)
        found[arm] = low
    return found


def place_run(run: Run, folder: Path, others: Sequence[Path] = ()) -> None:
    """Give a run its folder: the one that an earlier command made for the same config, or a new.

    A run that is finished in one of the `others` and not in `folder` is taken from there.
    """
    found = sorted(folder.glob(f"*-{run.key}"))
    for place in (*found, *(path for other in others for path in other.glob(f"*-{run.key}"))):
        run.folder = place
        if run.done:
            return
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "_", run.arm).lstrip(".+-") or "arm"
    plain += "" if run.length == 1 else f"_x{run.length:g}"
    run.folder = found[0] if found else folder / f"{plain}-seed{run.seed}-{run.key}"


# --- training -----------------------------------------------------------------------------------


def train_all(runs: list[Run], jobs: int, end: float, keep: bool) -> bool:
    """Train what is not done, `jobs` at a time; whether everything was started and ended by itself.

    Args:
        end: when to stop, on the clock of `time.monotonic`.

    The first run goes alone until its first logged step: meanwhile it tokenises the text and tunes
    kernels, which all others then find.
    """
    waiting = deque(run for run in runs if not run.done)
    total, finished = len(waiting), 0
    if not waiting or time.monotonic() >= end:
        return not waiting
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, cores // min(jobs, total))
    first: Run | None = waiting[0]
    working: dict[Run, tuple[subprocess.Popen, float]] = {}
    stopping = False
    try:
        while working or (waiting and not stopping):
            if (asked or time.monotonic() > end) and not stopping:
                stopping = True
                for process, _ in working.values():
                    process.terminate()  # saves, and ends with 75
            if first is not None and (first.done or read_metrics(first.folder)):
                first = None
            while waiting and not stopping and len(working) < (jobs if first is None else 1):
                run = waiting.popleft()
                working[run] = start(run, threads), time.monotonic()
            for run, (process, since) in list(working.items()):
                if process.poll() is None:
                    continue
                del working[run]
                first = None if run is first else first
                if process.returncode == 0:
                    finished += 1
                    _tell(run, finished, total, time.monotonic() - since)
                    if not keep:
                        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
                elif process.returncode not in (STOPPED, *[-signal.SIGTERM] * stopping):
                    lines = (run.folder / LOG).read_text(encoding="utf-8").strip().splitlines()
                    run.error = lines[-1] if lines else f"exit code {process.returncode}"
                    print(f"FAILED {run.folder.name}: {run.error}", flush=True)
            time.sleep(0.2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process, _ in working.values():
            process.kill()
    return not stopping


LOG = "output.log"


def start(run: Run, threads: int) -> subprocess.Popen:
    """Begin to train a run, in a process of its own."""
    run.folder.mkdir(parents=True, exist_ok=True)
    place = [f"run.dir={run.folder.parent}", f"run.name={run.folder.name}"]
    with open(run.folder / LOG, "a", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-u", str(TRAIN), str(run.base), *run.words, *place],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl+C is for this process, which then sends SIGTERM
        )


def _tell(run: Run, finished: int, total: int, seconds: float) -> None:
    values = read_values(run.folder, ["val_loss", "loss", "max_violation"])
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
    width, name = len(str(total)), run.arm if run.length == 1 else f"{run.arm} x{run.length:g}"
    print(
        f"[{finished:>{width}}/{total}] {name} seed {run.seed}: {numbers}  ({human_time(seconds)})",
        flush=True,
    )


def _flops(run: Run, sweep: SweepFile) -> float:
    """Model FLOPs of a run, where a law asks for them."""
    steps = run.config.train.steps
    return run_flops(run.config, steps) if sweep.lengths and steps is not None else math.nan


# --- the program --------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("inputs", type=expand_home, nargs="+", metavar="FILE | section.key=value")
    add("--out", type=user_path, default=Path("runs/sweeps"), help="default runs/sweeps")
    add("--jobs", type=bounded(least=1), default=1, help="runs to train at a time (default 1)")
    add("--seeds", metavar="N | A-B", help="seeds 0 to N - 1, or A to B, instead of the file's")
    add(
        "--also", type=user_path, action="append", default=[], metavar="FOLDER",
        help="an OUT of another command whose finished runs count too; may be repeated",
    )  # fmt: skip
    add("--dense-twin", action="store_true", help="add the control's dense twin as an arm")
    add(
        "--lengths", type=read_lengths, metavar="X,X",
        help="train the control for these multiples of its steps too, instead of the file's",
    )  # fmt: skip
    add("--leave-one-out", action="store_true", help="all arms together, less one each")
    add("--time-limit", type=float, default=math.inf, metavar="S", help="stop after S seconds")
    add("--keep-checkpoints", action="store_true", help="keep those of finished runs")
    return parser.parse_intermixed_args(arguments)


def read_seeds(word: str) -> range:
    """The seeds of a --seeds word.

    Raises:
        ConfigError: it is neither N nor A-B.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)", word)
    if match:
        first, last = match.groups()
        seeds = range(int(last)) if first is None else range(int(first), int(last) + 1)
        if seeds:
            return seeds
    raise ConfigError(f"--seeds={word} must be a number N of at least 1, or A-B with A <= B")


def read_lengths(word: str) -> list[float]:
    """Of a --lengths word."""
    try:
        return [float(part) for part in word.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word} must be numbers with commas between") from None


def read_all(
    files: Sequence[Path], words: Sequence[str], options: argparse.Namespace
) -> list[tuple[str, SweepFile, list[Run]]]:
    """Name, sweep and runs of each file, as the options change them.

    Raises:
        ConfigError: a mistake in a file.
    """
    given = None if options.seeds is None else read_seeds(options.seeds)
    sweeps = []
    for path in files:
        sweep, name = read_sweep(path), path.stem
        if options.leave_one_out:
            sweep, name = leave_one_out(path, sweep), f"{name}-leave-one-out"
        if options.dense_twin:
            sweep = with_dense_twin(path, sweep, words)
        if options.lengths is not None:
            try:
                sweep = _changed(sweep, lengths=options.lengths)
            except ValidationError as error:
                raise ConfigError(f"--{first_line(error, {})}") from None
        seeds = sweep.seeds if given is None else given
        sweeps.append((name, sweep, plan_runs(path, sweep, words, seeds)))
    return sweeps


@command
def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    end = time.monotonic() + options.time_limit
    words = [word for word in options.inputs if "=" in word]
    files = [Path(word) for word in options.inputs if "=" not in word]
    for folder in options.also:
        if not (folder / "runs").is_dir():
            raise ConfigError(f"--also {folder} holds no folder runs")
    if not files:
        raise ConfigError("no sweep file given; configs/ablations holds some")
    sweeps = read_all(files, words, options)
    out = options.out.resolve()
    (out / "runs").mkdir(parents=True, exist_ok=True)

    unique: dict[str, Run] = {}
    for _, _, runs in sweeps:
        for run in runs:
            unique.setdefault(run.key, run)
    for run in unique.values():
        place_run(run, out / "runs", [folder.resolve() / "runs" for folder in options.also])
    # Seed by seed over all files: wherever the time ends, the pairs are whole.
    ordered = sorted(unique.values(), key=lambda run: run.seed)
    missing = sum(not run.done for run in ordered)
    print(f"{len(ordered)} runs, {missing} to train, {options.jobs} at a time; folder {out}")
    whole = train_all(ordered, options.jobs, end, options.keep_checkpoints)

    given_words = sys.argv[1:] if arguments is None else arguments
    typed = "python scripts/sweep.py " + " ".join(given_words)
    for name, sweep, runs in sweeps:
        values = [
            RunValues(run.arm, run.seed, unique[run.key].folder, run.length, _flops(run, sweep))
            for run in runs
            if unique[run.key].done
        ]
        steps = {run.arm: run.config.train.steps for run in runs if run.length == 1}
        print(write_report(out / name, sweep, values, typed, steps))
    if any(run.error for run in ordered):
        return 1
    return 0 if whole else STOPPED


if __name__ == "__main__":
    sys.exit(main())
