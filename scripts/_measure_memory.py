"""What `scripts/estimate.py --measure` does: a few real training steps, and where their peak lies.

The steps are the trainer's own, on packed rows of the bundled novel, with weights drawn on the
device. Peaks are those of PyTorch's allocator: of all steps, the first one with its compiling and
tuning included, and of the steps after it.
"""

from __future__ import annotations

import gc
import linecache
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from parallel import World
from scripts.bench.harness import step_seconds
from scripts.bench.train import draw_on_device, one_step, text_batches
from training.assemble import make_trainee, model_config
from training.data import load_tokenizer

if TYPE_CHECKING:
    from training.config.build import Config, Plan

WARMUP = 2
GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """Bytes on one GPU, and speed."""

    states: int
    """Allocated before the first step: weights, masters, moments, gradient buffers."""
    peak: int
    """Most that was allocated at a time, over all steps."""
    steady: int
    """Likewise, without the first steps."""
    reserved: int
    """What the allocator took from the device."""
    context: int
    """What the device has in use beyond that, if nothing else on it grew meanwhile."""
    tokens_per_second: float
    document: float
    """Tokens of the document that the average token is in."""


def measure(config: Config, plan: Plan, steps: int, breakdown: Path | None = None) -> Measured:
    """Train `WARMUP + steps` steps on this machine's GPU.

    Args:
        config: with the bundled novel as its data (`scripts.bench.train.TEXT`).
        breakdown: folder for a table of what was allocated at the peak, by where in the code.
    """
    device = torch.device("cuda")
    free, size = torch.cuda.mem_get_info()
    others = size - free - torch.cuda.memory_reserved()  # other processes, and what is there now
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    if breakdown is not None:
        torch.cuda.memory._record_memory_history(
            "all", context="all", stacks="python", max_entries=4_000_000
        )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(config.data, Path(folder) / "tokenizer")
        batches = text_batches(config, plan, tokenizer, 4)
    lengths = [n for rows in batches for batch in rows for n in batch.documents.lengths]
    architecture = model_config(config, tokenizer)
    with mock.patch("training.assemble.init_weights", draw_on_device):
        trainee = make_trainee(config, architecture, plan, device, config.train.steps or 1000)
    train = one_step(trainee, config, World(), device, lr=1e-5)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    states = torch.cuda.memory_allocated()
    peaks = []

    def step(number: int) -> None:
        if number == WARMUP:
            peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        train(number + 1, batches[number % len(batches)])

    seconds = step_seconds(step, steps, WARMUP)
    peaks.append(torch.cuda.max_memory_allocated())
    reserved = torch.cuda.memory_reserved()
    if breakdown is not None:
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        breakdown.mkdir(parents=True, exist_ok=True)
        text = peak_table(snapshot["device_traces"][torch.cuda.current_device()])
        name = "compiled" if plan.compile else "eager"
        (breakdown / f"{architecture.family}_{name}.txt").write_text(text)
    free, size = torch.cuda.mem_get_info()
    return Measured(
        states=states,
        peak=max(peaks),
        steady=peaks[-1],
        reserved=reserved,
        context=size - free - reserved - max(others, 0),
        tokens_per_second=plan.tokens_per_step / statistics.median(seconds),
        document=sum(n * n for n in lengths) / sum(lengths),
    )


def peak_table(events: Iterable[dict[str, Any]], rows: int = 80) -> str:
    """What was allocated when most was: bytes by call stack, the largest first.

    Args:
        events: one device's trace of `torch.cuda.memory._snapshot()`, in order of time.
    """
    events = [e for e in events if e["action"] in ("alloc", "free_requested")]
    known: dict[int, int] = {}
    now = most = at = 0
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            known[event["addr"]] = event["size"]
            now += event["size"]
        else:
            now -= known.pop(event["addr"], 0)
        if now > most:
            most, at = now, number
    live: dict[int, dict[str, Any]] = {}
    for event in events[: at + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        else:
            live.pop(event["addr"], None)
    groups: dict[str, list[int]] = defaultdict(list)
    for event in live.values():
        groups[_place(event.get("frames") or ())].append(event["size"])
    lines = [f"{most / GIB:.3f} GiB in {len(live)} blocks, by where they were allocated"]
    for place, sizes in sorted(groups.items(), key=lambda row: -sum(row[1]))[:rows]:
        counted = ", ".join(
            f"{sizes.count(size)} x {size / 2**20:.2f} MiB"
            for size in sorted(set(sizes), reverse=True)[:4]
        )
        lines.append(f"{sum(sizes) / GIB:9.3f} GiB  {counted}\n{place}")
    return "\n".join(lines) + "\n"


def _place(frames: Iterable[dict[str, Any]], depth: int = 5) -> str:
    """The innermost frames of Python, with their lines."""
    here = str(Path(__file__).resolve().parent.parent) + os.sep
    found = []
    for frame in frames:
        name = frame["filename"]
        if not name.endswith(".py") or ("/torch/" in name and "torchinductor" not in name):
            continue
        line = linecache.getline(name, frame["line"]).strip()[:110]
        short = name.removeprefix(here)
        short = short if short != name else "/".join(Path(name).parts[-2:])
        found.append(f"              {short}:{frame['line']} {frame['name']}: {line}")
        if len(found) == depth:
            break
    return "\n".join(found) or "              outside of Python"
