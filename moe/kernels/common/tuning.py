"""Kernel configurations, and the choice of the fastest of a few, once per card and shape class.

    config = pick("up", (size_class(R), D, H, dtype), CONFIGS, run, x.device)

`run(config)` must launch the kernel and may be called many times. The choice is kept in memory and
in a small JSON file, so a second start measures nothing and does not depend on the noise of the
day: with the same file every process and every restart takes the same configurations, hence the
same order of summation. Processes that ask at the same time wait for the one that measures (file
lock); those of one run each measure and take what the first has written. Ranks on several hosts
agree when `TESSERA_CACHE` names a folder that they share.

Nothing is measured while a CUDA graph is captured, while torch.compile traces, on a CPU, or with
`TESSERA_TUNE=0`: then a choice of the file counts, else the first configuration. Shape classes are
coarse and lists short on purpose, since every configuration that is tried is compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from moe.kernels.common.backend import INTERPRET, device_name, next_power_of_2, triton

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class Config(NamedTuple):
    """One way to run a kernel. Each kernel reads the fields that mean something to it."""

    bm: int
    """Rows of the output tile; for row products the rows of the tile list."""
    bn: int
    """Columns of the output tile."""
    bk: int
    """Inner columns of one product; of a sparse row, entries in flight."""
    warps: int = 8
    stages: int = 3
    group: int = 8
    """Row tiles that share the columns of a weight while it is in L2."""
    split: int = 2
    """Parts in which the epilogue handles a tile's columns: fewer registers, less staging."""
    ctas: int = 1
    """Programs per multiprocessor."""

    def __str__(self) -> str:
        return (
            f"{self.bm}x{self.bn}x{self.bk} w{self.warps} s{self.stages} g{self.group} "
            f"/{self.split} c{self.ctas}"
        )


_forced: dict[str, Config] = {}
_forced_pointers = False


@contextlib.contextmanager
def forced(pointers: bool = False, **configs: Config) -> Iterator[None]:
    """Inside: the named kernels run with the given configurations; with `pointers`, the Triton tier
    without TMA."""
    global _forced, _forced_pointers
    before = _forced, _forced_pointers
    _forced, _forced_pointers = {**_forced, **configs}, pointers
    try:
        yield
    finally:
        _forced, _forced_pointers = before


def forced_configs() -> dict[str, Config]:
    """Kernel to configuration, inside `forced`."""
    return _forced


def pointers_forced() -> bool:
    """Whether this is inside `forced(pointers=True)`."""
    return _forced_pointers


_picked: dict[tuple, Config] = {}


def pick(
    kernel: str,
    key: tuple,
    configs: Sequence[Config],
    run: Callable[[Config], object],
    device: torch.device,
    check: Callable[[Config], None] | None = None,
) -> Config:
    """The configuration to run: forced, or the fastest for this class of shapes, or the first.

    Args:
        kernel: its name, for `forced` and the file.
        key: shape class; anything with a stable `str`.
        configs: candidates, the default first.
        run: launches the kernel with a configuration, with no effect but on new tensors.
        check: raises RuntimeError for a configuration that must not run; not asked of a forced one.

    Raises:
        RuntimeError: `check` refuses every configuration; its first reason.
    """
    if kernel in _forced:
        return _forced[kernel]
    if check is None and len(configs) == 1:
        return configs[0]
    place = (kernel, key, device)
    config = _picked.get(place)
    if config is not None:
        return config

    def checked(config: Config) -> None:
        if check is not None:
            check(config)
        run(config)

    config = best(kernel, key, configs, checked, device=device)
    if check is not None:
        config = _first_right([config, *configs], check)
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        _picked[place] = config
    return config


def _first_right(configs: Sequence[Config], check: Callable[[Config], None]) -> Config:
    refusal = None
    for config in configs:
        try:
            check(config)
        except RuntimeError as error:
            refusal = refusal or error
        else:
            return config
    assert refusal is not None
    raise refusal


# ------------------------------------------------------------------------------------------- choice

C = TypeVar("C")
Measure = Callable[[Callable[[], None]], float]

_chosen: dict[tuple[str, str], int] = {}


def size_class(n: int) -> int:
    """The next power of two: sizes of one class share a configuration."""
    return next_power_of_2(n)


def cache_folder() -> Path:
    """Where choices are kept: $TESSERA_CACHE, $XDG_CACHE_HOME/tessera or ~/.cache/tessera."""
    own = os.environ.get("TESSERA_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tessera"


def cache_file(device: torch.device) -> Path:
    """One file per card and Triton version."""
    name = f"{device_name(device)}-triton{triton.__version__}"
    plain = "".join(c if c.isalnum() or c in ".-" else "_" for c in name)
    return cache_folder() / f"tuning-{plain}.json"


def best(
    kernel: str,
    key: tuple[Any, ...],
    configs: Sequence[C],
    run: Callable[[C], None],
    *,
    device: torch.device,
    measure: Measure | None = None,
) -> C:
    """The configuration to use for `kernel` on this shape class.

    Args:
        kernel: name of the kernel.
        key: shape class; anything with a stable `str`.
        configs: candidates, at least one, the first is the default; their `repr` identifies them,
            so a changed list is tuned again.
        run: launches the kernel with a configuration. One that raises is left out.
        device: where it runs.
        measure: seconds of a launch, for tests; default: CUDA events.

    Raises:
        ValueError: no configurations.
        Exception: whatever the first configuration raised, if every one failed.
    """
    if not configs:
        raise ValueError(f"configs of kernel {kernel!r} is empty")
    if len(configs) == 1:
        return configs[0]
    listed = hashlib.sha256("\n".join(map(repr, configs)).encode()).hexdigest()[:12]
    entry = f"{kernel}|{','.join(map(str, key))}|{listed}"
    place = (str(device), entry)
    if place in _chosen:
        return configs[_chosen[place]]
    path = cache_file(device)
    index = _lookup(path, entry, len(configs))
    if index is None and not _may_measure(device, measure):
        return configs[0]  # not remembered: a later call may measure
    if index is None:
        # Processes of one run never wait for each other here: the one that measures may itself be
        # waiting for rows that the other has not sent yet. They agree afterwards.
        own = _fastest(configs, run, measure or _cuda_seconds) if _in_a_group() else None
        with _locked(path):
            index = _lookup(path, entry, len(configs))  # another process was first
            if index is None:
                measured = own is not None
                index = own if measured else _fastest(configs, run, measure or _cuda_seconds)
                _record(path, entry, index)
    _chosen[place] = index
    return configs[index]


def forget() -> None:
    """Drop what this process remembers; the file stays."""
    _chosen.clear()
    _picked.clear()


def _may_measure(device: torch.device, measure: Measure | None) -> bool:
    if os.environ.get("TESSERA_TUNE", "1") == "0" or torch.compiler.is_compiling():
        return False
    if measure is not None:
        return True
    return device.type == "cuda" and not INTERPRET and not torch.cuda.is_current_stream_capturing()


def _in_a_group() -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _fastest(configs: Sequence[C], run: Callable[[C], None], measure: Measure) -> int:
    seconds: dict[int, float] = {}
    first_error: Exception | None = None
    for i, config in enumerate(configs):
        try:
            seconds[i] = measure(lambda config=config: run(config))
        except Exception as error:  # too much shared memory, a compiler that gives up
            first_error = first_error or error
    if not seconds:
        assert first_error is not None
        raise first_error
    if measure is _cuda_seconds and len(seconds) > 1:
        # One short measurement may meet something else at work: two more rounds, in turn.
        rounds = {i: [first] for i, first in seconds.items()}
        for _ in range(2):
            for i, found in rounds.items():
                found.append(measure(lambda config=configs[i]: run(config)))
        seconds = {i: statistics.median(found) for i, found in rounds.items()}
    return min(seconds, key=lambda i: (seconds[i], i))


def _cuda_seconds(run: Callable[[], None]) -> float:
    """Median seconds of a launch: compile and warm up, then up to 20 launches or about 30 ms."""
    run()
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    once = max(start.elapsed_time(end), 1e-3)
    repeats = max(3, min(20, int(30 / once)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host gets ahead of the device
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1000


# -------------------------------------------------------------------------------------------- file


def _read(path: Path) -> dict[str, int]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"tuning file {path} is not readable and is ignored: {error}", stacklevel=4)
        return {}
    return content if isinstance(content, dict) else {}


def _lookup(path: Path, entry: str, count: int) -> int | None:
    index = _read(path).get(entry)
    return index if isinstance(index, int) and 0 <= index < count else None


def _record(path: Path, entry: str, index: int) -> None:
    """Add an entry; the file is replaced as a whole, so that no reader sees half of it."""
    content = _read(path)
    content[entry] = index
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1, sort_keys=True)
        os.replace(name, path)
    except OSError as error:
        warnings.warn(f"tuning file {path} is not writable: {error}", stacklevel=4)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock; it falls with the process. Without a writable folder: no lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "w") if fcntl else None  # noqa: SIM115
    except OSError:
        lock = None
    if lock is None:
        yield
        return
    with lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
