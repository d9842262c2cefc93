#!/usr/bin/env python3
"""Trains arms × seeds on the same data in the same order and compares them in pairs.

    python scripts/sweep.py configs/ablations/balance.yaml
    python scripts/sweep.py configs/ablations/*.yaml --jobs 8 --out runs/sweeps
    python scripts/sweep.py configs/ablations/rounding.yaml --seeds 5 train.steps=1000
    python scripts/sweep.py configs/ablations/*.yaml --seeds 3-4 --also machine-b/sweeps

A sweep file names a base config, the arms (lists of section.key=value words) and which of them is
the control; see configs/ablations. Words on the command line go to every arm. With one seed, arms
start from the same weights and read the same rows in the same order, so that differences are taken
within a seed. Runs that several files have in common are trained once.

Written to OUT: NAME.md (the table: mean ± standard error, and the paired difference from the
control), NAME.json, NAME.png. The same command again trains only what is missing and goes on with
what was stopped. `--also FOLDER` counts the finished runs of another OUT, made by the same code
elsewhere; with `--time-limit 0` nothing is trained and the tables are of what there is. Exit codes:
0 done, 1 a run failed, 2 a mistake in a file, 75 stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _sweep_report import RunValues, read_values, write_report
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from training.config.build import Config, load_config
from training.config.load import ConfigError, expand_home, fail, read_yaml, user_path
from training.report.run_log import EVENTS, METRICS, human_time, read_lines

STOPPED = 75


class SweepFile(BaseModel):
    """What a sweep file says."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    title: str
    base: str
    """Config of all arms, relative to the sweep file."""
    settings: list[str] = Field(default_factory=list)
    """Words for all arms."""
    control: str
    arms: Annotated[dict[str, list[str]], Field(min_length=2)]
    """Name → words that make the arm differ."""
    seeds: Annotated[list[int], Field(min_length=1)] = [0, 1, 2]
    metrics: Annotated[list[str], Field(min_length=1)] = [
        "val_loss",
        "max_violation",
        "dead_experts",
    ]
    """Columns of the table; the first one is plotted."""
    curve: str = "max_violation"
    """Metric whose course is plotted."""
    equal_flops: list[str] = Field(default_factory=list)
    """Arms that train for as many steps as cost what the control costs, by
    training/estimate/flops.py."""

    @model_validator(mode="after")
    def _names_are_arms(self) -> SweepFile:
        for key, names in (("control", [self.control]), ("equal_flops", self.equal_flops)):
            for name in names:
                if name not in self.arms:
                    raise ValueError(f"{key}: {name!r} is none of the arms {list(self.arms)}")
        return self


@dataclass
class Run:
    """One training run; several arms may share it."""

    arm: str
    seed: int
    words: list[str]
    base: Path
    config: Config
    key: str
    """Hash of the resolved config, without its name and place."""
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
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {place + ': ' if place else ''}{message}") from None


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
    for seed in seeds:
        for arm, own in sweep.arms.items():
            every = [*sweep.settings, *own, *words, f"run.seed={seed}"]
            every += [steps[arm]] if arm in steps else []
            config = _load(path, base, arm, every)
            values = config.to_dict()
            values["run"] |= {"name": None, "dir": None}
            text = json.dumps(values, sort_keys=True)
            key = hashlib.sha256(text.encode()).hexdigest()[:8]
            runs.append(Run(arm, seed, every, base, config, key))
    return runs


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
    from training.estimate.flops import run_flops

    def config_of(arm: str) -> Config:
        every = [*sweep.settings, *sweep.arms[arm], *words]
        return _load(path, path.parent / sweep.base, arm, every)

    control = config_of(sweep.control)
    if control.train.steps is None:
        raise ConfigError(f"{path}: equal_flops needs train.steps, the control has epochs")
    budget = run_flops(control, control.train.steps)
    for arm in sweep.equal_flops:
        config = config_of(arm)
        low, high = 1, 8 * control.train.steps
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
    run.folder = found[0] if found else folder / f"{plain}-seed{run.seed}-{run.key}"


# --- training -----------------------------------------------------------------------------------


def work(connection: Connection, threads: int) -> None:
    """A worker process: trains the runs it is sent, one after the other, and answers with exit
    codes. One process for many runs, as importing and starting CUDA take longer than some runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides, and sends SIGTERM
    import torch

    import train

    torch.set_num_threads(threads)
    while (task := connection.recv()) is not None:
        arguments, log = task
        with (
            open(log, "a", encoding="utf-8") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
        ):
            code = train.main(arguments)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        connection.send(code)


@dataclass
class Worker:
    """A worker process, and what it is training since when."""

    process: multiprocessing.Process
    connection: Connection
    run: Run | None = None
    since: float = 0.0


def start_workers(count: int) -> list[Worker]:
    """Fresh processes; forked ones could not use CUDA."""
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = []
    for _ in range(count):
        ours, theirs = context.Pipe()
        threads = max(1, cores // count)
        process = context.Process(target=work, args=(theirs, threads), daemon=True)
        process.start()
        theirs.close()
        workers.append(Worker(process, ours))
    return workers


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
    workers = start_workers(min(jobs, total))
    first: Run | None = waiting[0]
    stopping = False
    try:
        while True:
            if (asked or time.monotonic() > end) and not stopping:
                stopping = True
                for worker in workers:
                    if worker.run is not None:
                        worker.process.terminate()  # saves, and answers 75
            if first is not None and (first.folder / METRICS).is_file():
                first = None if (first.folder / METRICS).stat().st_size else first
            for worker in workers:
                if worker.run is None and waiting and not stopping and worker.process.is_alive():
                    if first is None or waiting[0] is first:
                        _send(worker, waiting.popleft())
            busy = [worker for worker in workers if worker.run is not None]
            if not busy:
                break
            ready = wait(
                [w.connection for w in busy] + [w.process.sentinel for w in busy], timeout=0.5
            )
            for worker in busy:
                if worker.connection not in ready and worker.process.sentinel not in ready:
                    continue
                run, worker.run = worker.run, None
                first = None if run is first else first
                if _ended(worker, run, keep, stopping):
                    finished += 1
                    _tell(run, finished, total, time.monotonic() - worker.since)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.connection.send(None)
            worker.process.join(10)
            worker.process.kill()
    return not stopping


def _send(worker: Worker, run: Run) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    place = [f"run.dir={run.folder.parent}", f"run.name={run.folder.name}"]
    worker.run, worker.since = run, time.monotonic()
    worker.connection.send(([str(run.base), *run.words, *place], str(run.folder / "output.log")))


def _ended(worker: Worker, run: Run, keep: bool, stopping: bool) -> bool:
    """Take a worker's answer; whether the run is done."""
    try:
        code = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = None
        if stopping and worker.process.exitcode == -signal.SIGTERM:
            return False  # asked to stop before the run had begun: nothing to save
        run.error = f"its process ended with exit code {worker.process.exitcode}"
    if code == 0:
        if not keep:
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        return True
    if code not in (None, STOPPED):
        lines = (run.folder / "output.log").read_text(encoding="utf-8").strip().splitlines()
        run.error = lines[-1] if lines else f"exit code {code}"
    if run.error is not None:
        print(f"FAILED {run.folder.name}: {run.error}", flush=True)
    return False


def _tell(run: Run, finished: int, total: int, seconds: float) -> None:
    values = read_values(run.folder, ["val_loss", "loss", "max_violation"])
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
    width = len(str(total))
    print(
        f"[{finished:>{width}}/{total}] {run.arm} seed {run.seed}: {numbers}  "
        f"({human_time(seconds)})",
        flush=True,
    )


# --- the program --------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", type=expand_home, nargs="+", metavar="FILE | section.key=value")
    parser.add_argument(
        "--out", type=user_path, default=Path("runs/sweeps"), help="default runs/sweeps"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument(
        "--seeds", metavar="N | A-B", help="use seeds 0 to N - 1, or A to B, instead of the file's"
    )
    parser.add_argument(
        "--also",
        type=user_path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="an OUT of another command whose finished runs count too; may be repeated",
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="stop what is left after S seconds"
    )
    parser.add_argument(
        "--keep-checkpoints", action="store_true", help="do not delete those of finished runs"
    )
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


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    limit = math.inf if options.time_limit is None else options.time_limit
    end = time.monotonic() + limit
    words = [word for word in options.inputs if "=" in word]
    files = [Path(word) for word in options.inputs if "=" not in word]
    sweeps: list[tuple[Path, SweepFile, list[Run]]] = []
    try:
        if options.jobs < 1:
            raise ConfigError(f"--jobs={options.jobs} must be at least 1")
        given = None if options.seeds is None else read_seeds(options.seeds)
        for folder in options.also:
            if not (folder / "runs").is_dir():
                raise ConfigError(f"--also {folder} holds no folder runs")
        if not files:
            raise ConfigError("no sweep file given; configs/ablations holds some")
        for path in files:
            sweep = read_sweep(path)
            seeds = sweep.seeds if given is None else given
            sweeps.append((path, sweep, plan_runs(path, sweep, words, seeds)))
        out = options.out.resolve()
        (out / "runs").mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        fail(error)

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

    command = "python scripts/sweep.py " + " ".join(
        sys.argv[1:] if arguments is None else arguments
    )
    for path, sweep, runs in sweeps:
        values = [
            RunValues(run.arm, run.seed, unique[run.key].folder)
            for run in runs
            if unique[run.key].done
        ]
        steps = {run.arm: run.config.train.steps for run in runs}
        print(write_report(out / path.stem, sweep, values, command, steps))
    if any(run.error for run in ordered):
        return 1
    return 0 if whole else STOPPED


if __name__ == "__main__":
    sys.exit(main())
