"""What all benchmarks share: options, clocks, errors, and rows that are printed and kept.

A benchmark measures on the GPU; `--small` runs it on a CPU too, at sizes that show that it works
and with times that say nothing of a GPU. CUDA graphs do not exist there: work is called instead.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts._command import make_parser
from training.config.load import user_path

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Run = Callable[[], object]


# ---- options -------------------------------------------------------------------------------------


def bench_parser(
    doc: str | None, name: str, *, config: bool = False, small: bool = False
) -> argparse.ArgumentParser:
    """A parser with the common options, for `parse`.

    Args:
        name: of the default folder under runs/.
        config: the benchmark takes a config, and runs on a CPU too.
        small: it has sizes for a CPU, and without `--small` it needs a GPU.
    """
    parser = make_parser(doc, config)
    parser.add_argument(
        "--out", type=user_path, default=Path("runs", name), help="folder for JSON and PNG"
    )
    parser.add_argument("--verbose", action="store_true", help="tracebacks of failed rows")
    if small:
        parser.add_argument("--small", action="store_true", help="small sizes, also on a CPU")
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, gpu_only: Sequence[str] = ()
) -> argparse.Namespace:
    """The options. Exits with code 2 and one line where they cannot run on this machine.

    Args:
        gpu_only: names of flags that measure nothing without a GPU.
    """
    args = parser.parse_intermixed_args(arguments)
    args.command = list(sys.argv[1:] if arguments is None else arguments)
    args.failed, args.written = 0, {}
    if DEVICE.type == "cpu":
        for flag in gpu_only:
            if getattr(args, flag):
                parser.error(f"--{flag} needs a CUDA device")
        if not getattr(args, "small", True):
            parser.error("this benchmark needs a CUDA device; allowed here: --small")
    torch.manual_seed(0)
    return args


def chosen(table: Sequence | dict) -> Callable[[str], list]:
    """Of argparse: entries of `table` (of a dict: its items) by their numbers, "0,3", or "all"."""
    entries = list(table.items() if isinstance(table, dict) else table)
    allowed = [str(number) for number in range(len(entries))]

    def read(text: str) -> list:
        for part in text.split(",") if text != "all" else ():
            if part not in allowed:
                raise argparse.ArgumentTypeError(f"{part!r} is none of 0 to {allowed[-1]}, or all")
        return [entries[int(part)] for part in (allowed if text == "all" else text.split(","))]

    return read


def tuples(letters: str) -> Callable[[str], list[tuple[int, ...]]]:
    """Of argparse: "1,2,3;4,5,6" as tuples of as many sizes as `letters`, "M,K,N", has."""

    def read(text: str) -> list[tuple[int, ...]]:
        try:
            sizes = [tuple(map(int, part.split(","))) for part in text.split(";")]
        except ValueError:
            sizes = [()]
        if any(len(entry) != len(letters.split(",")) or min(entry) < 1 for entry in sizes):
            raise argparse.ArgumentTypeError(f"{text!r} is not {letters};{letters};…")
        return sizes

    return read


# ---- clocks --------------------------------------------------------------------------------------


def wait(device: torch.device = DEVICE) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device = DEVICE) -> float | torch.cuda.Event:
    """A moment in the device's queue, for `elapsed_ms`; on a CPU: now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Any, stop: Any) -> float:
    """Milliseconds between two marks that the device has passed."""
    return 1e3 * (stop - start) if isinstance(start, float) else start.elapsed_time(stop)


def hold(cycles: int, device: torch.device = DEVICE) -> None:
    """Keeps a GPU waiting, so that what the host queues meanwhile runs without gaps."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


@functools.cache
def _l2() -> Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)  # larger than any L2


def median_ms(
    run: Run,
    seconds: float = 0.4,
    *,
    fewest: int = 3,
    most: int = 60,
    flush: bool = True,
    held: int = 0,
    device: torch.device = DEVICE,
) -> float:
    """Median milliseconds of a call: on a GPU by its own clock.

    Args:
        seconds: spent about, in `fewest` to `most` calls.
        flush: with a cold L2 cache.
        held: cycles for which the device waits before each call, where Python is slower than it.
    """
    run()
    wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    once = max(time.perf_counter() - began, 1e-4)
    repeats = max(fewest, min(most, int(seconds / once)))
    for _ in range(min(3, repeats)):
        run()
    marks = []
    for _ in range(repeats):
        if held:
            hold(held, device)
        if flush and device.type == "cuda":
            _l2().zero_()
        start = mark(device)
        run()
        marks.append((start, mark(device)))
    wait(device)
    return statistics.median(elapsed_ms(*pair) for pair in marks)


def captured(run: Run) -> Run:
    """The same work as one CUDA graph: what it costs the device, whatever the host is doing.

    For a backward no autograd graph of the same leaves may be alive: its nodes that take gradients
    are of the stream that they were made on, and the capture would have to wait for that.
    """
    if DEVICE.type == "cpu":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def cycled_us(run: Callable[[Tensor], object], inputs: list[Tensor], repeats: int = 15) -> float:
    """Median microseconds of a call in a CUDA graph of one on each input; for small work, with
    inputs that are together larger than the L2 cache."""

    def all_of_them() -> None:
        for x in inputs:
            run(x)

    ms = median_ms(captured(all_of_them), fewest=repeats, most=repeats, flush=False)
    return 1e3 * ms / len(inputs)


def host_ms(run: Run, calls: int, finish: bool) -> float:
    """Milliseconds of a call issued from Python, one after the other; finish: and done."""
    wait()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    if finish:
        wait()
    ms = (time.perf_counter() - began) * 1e3 / calls
    wait()
    return ms


def step_seconds(step: Callable[[int], object], count: int, warmup: int) -> list[float]:
    """Seconds of each call from number `warmup` on, the host's and the device's."""
    seconds = []
    for number in range(warmup + count):
        wait()
        began = time.perf_counter()
        step(number)
        wait()
        seconds.append(time.perf_counter() - began)
        if number == 0 and warmup:
            print(f"first step: {seconds[0]:.1f} s", flush=True)
    return seconds[warmup:]


def busy_clock(run: Run, ms: float) -> int | None:
    """MHz of the multiprocessors while `run`, which takes `ms`, repeats for a third of a second;
    None where nvidia-ml-py is not installed."""
    for _ in range(int(350 / ms)):
        run()
    time.sleep(0.25)
    try:
        return torch.cuda.clock_rate()
    except ModuleNotFoundError:
        return None
    finally:
        torch.cuda.synchronize()


def release() -> None:
    """Frees what the allocator keeps, and counts the peak of memory from here."""
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---- profiler ------------------------------------------------------------------------------------

Span = tuple[float, float]


def device_events(run: Run, repeats: int = 1) -> list[tuple[float, float, str]]:
    """(start, end, name) in microseconds of what the device did in the last of a few calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeats):
            run()
        wait()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Synchronize" not in event.name
    )
    return events[len(events) * (repeats - 1) // repeats :]


@dataclass(frozen=True)
class Recorded:
    """What the profiler saw of a call on a GPU."""

    kernels: int
    """Kernels, copies and fills."""
    busy_ms: float
    """In which the device did one of them."""
    gaps_ms: float
    """Between the first and the last of them without any."""
    waits: int
    """Times that the host waited for a stream or an event."""
    waited_ms: float


def recorded(run: Run) -> Recorded:
    """One call by the profiler; it slows the host, so gaps and waits are longer than without."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        wait()
    spans, waits = [], []
    for event in profile.events():
        span = (event.time_range.start, event.time_range.end)
        if event.name in ("cudaStreamSynchronize", "cudaEventSynchronize"):
            waits.append(span)
        elif (
            event.device_type == torch.autograd.DeviceType.CUDA and "Synchronize" not in event.name
        ):
            spans.append(span)
    busy = covered(spans) / 1e3
    length = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e3
    return Recorded(len(spans), busy, length - busy, len(waits), covered(waits) / 1e3)


def covered(spans: Iterable[Span]) -> float:
    """Length of the union."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


# ---- errors --------------------------------------------------------------------------------------


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖, in float64."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


# ---- results -------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__}


def header(*about: str) -> None:
    """Prints what the figures are of."""
    found = machine()
    print("; ".join((f"{found['device']}, torch {found['torch']}", *about)), flush=True)


class Table:
    """Rows of one kind: printed as they come, and kept in `<out>/<kind>.json` at once, as what
    follows may run out of memory.

    Args:
        args: from `parse`.
        columns: "key:format | key:format", what is printed of a row; a key that a row does not
            have leaves the place empty.
        about: for the JSON file.
    """

    def __init__(self, args: argparse.Namespace, kind: str, columns: str, **about: Any) -> None:
        self.args, self.about = args, about
        self.path = args.out / f"{kind}.json"
        self.columns = [tuple(part.strip().rsplit(":", 1)) for part in columns.split("|")]
        self.rows: list[dict[str, Any]] = []
        self.headed = False

    @contextmanager
    def row(self, **values: Any) -> Iterator[dict[str, Any]]:
        """A new row, to be filled inside. A method that is absent or cannot do it says so in its
        row and keeps no other from running."""
        row = dict(values)
        try:
            yield row
        except ImportError as error:
            row["absent"] = str(error)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self.args.failed += 1
            if self.args.verbose:
                traceback.print_exc()
        self.rows.append(row)
        self.print(row)
        self.write()

    def print(self, row: dict[str, Any]) -> None:
        if not self.headed:
            print("\n" + "  ".join(cell(key, key, form) for key, form in self.columns))
            self.headed = True
        cells = []
        for key, form in self.columns:
            if row.get(key) is not None:
                text = format(row[key], form)
            elif "failed" in row or "absent" in row:
                continue
            else:
                text = ""
            cells.append(cell(text, key, form))
        why = [f"{word}: {row[word]}" for word in ("absent", "failed") if word in row]
        print("  ".join([*cells, *why]).rstrip(), flush=True)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        result = {**machine(), "command": self.args.command, **self.about, "rows": self.rows}
        self.path.write_text(json.dumps(result, indent=1))
        self.args.written[str(self.path)] = len(self.rows)


def cell(text: str, key: str, form: str) -> str:
    """A text as wide as its column; words to the left, numbers to the right."""
    width = max(len(key), int(re.match(r"\d*", form)[0] or 7))
    return text.ljust(width) if form.endswith("s") else text.rjust(width)


def finish(args: argparse.Namespace) -> int:
    """The exit code, 1 if a row failed."""
    if args.written:
        print("written to " + ", ".join(args.written))
    if args.failed:
        hint = "" if args.verbose else "; --verbose shows where"
        print(f"error: {args.failed} rows failed{hint}", file=sys.stderr)
    return 1 if args.failed else 0


def plot(
    path: Path,
    panels: dict[str, list[tuple[str, dict]]],
    baseline: float | None = None,
    same_scale: bool = False,
) -> None:
    """A PNG with a panel for each title, and one legend below them.

    Args:
        panels: title → (label, points). Points of names are bars; a series that lacks some of the
            names would leave gaps and is left to the table. Points of numbers are lines, both axes
            logarithmic, where the label's first words, up to a comma, give the color and the rest
            the dashes, so that lines of one label look alike.
        baseline: where a line is drawn through all panels.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(panels), figsize=(7.5 * len(panels), 5.2), squeeze=False, sharey=same_scale,
        layout="constrained",
    )  # fmt: skip
    colors: dict[str, str] = {}
    dashes: dict[str, str] = {}
    for axis, (title, series) in zip(axes[0], panels.items()):
        lines = any(not isinstance(at, str) for _, points in series for at in points)
        longest = max((len(points) for _, points in series), default=0)
        bars = [pair for pair in series if len(pair[1]) == longest]
        names = list(dict.fromkeys(itertools.chain(*(points for _, points in bars))))
        for number, (label, points) in enumerate(series if lines else bars):
            hue, _, dash = label.partition(", ") if lines else (label, "", "")
            color = colors.setdefault(hue, f"C{len(colors)}")
            if lines:
                style = dashes.setdefault(dash, ("-", "--", "-.", ":")[len(dashes) % 4])
                found = zip(*sorted(points.items()))
                axis.loglog(*found, style, color=color, marker=".", lw=1, label=label)
                continue
            size = 0.85 / len(bars)
            shift = (number - len(bars) / 2 + 0.5) * size
            places = [names.index(name) + shift for name in points]
            axis.bar(places, points.values(), size, color=color, label=label)
        if not lines:
            axis.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
        if baseline is not None:
            axis.axhline(baseline, color="black", lw=0.8)
        axis.set_title(title, fontsize=10, loc="left")
        axis.grid(axis="y", alpha=0.3)
    handles, labels = zip(*(axis.get_legend_handles_labels() for axis in axes[0]))
    named = dict(zip(itertools.chain(*labels), itertools.chain(*handles)))
    if named:
        figure.legend(
            named.values(), named.keys(), fontsize=9, ncols=4, loc="outside lower center",
            frameon=False,
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
