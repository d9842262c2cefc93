"""Writing checkpoints, in this thread or in the background."""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from parallel import World, gather
from parallel.flat_shard import ShardSavePlanner, local_of, with_local
from training.checkpoint.files import (
    FORMAT,
    MANIFEST,
    CheckpointError,
    NonFiniteWeights,
    candidates,
    defect,
    folder_name,
    point_latest,
    sha256,
    step_of,
    sync_folder,
)
from training.report.files import DISK_FULL

# One process needs no process group, and says so on purpose (no_dist=True).
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")

_MANY_BYTES = 256 << 20  # above this, tensors are written by several threads


@dataclass(frozen=True)
class Snapshot:
    """Everything of one moment of a run."""

    step: int
    tensors: Mapping[str, Tensor]
    """Logical name → tensor on its device."""
    state: Mapping[str, Any]
    """Plain values for state.json."""
    rng: bytes
    """This process's random states."""
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    """Relative name → content, or a file or folder to copy; written by the first process."""
    finite: Tensor | None = None
    """Boolean scalar on the device: whether all tensors are finite."""


@dataclass(frozen=True)
class Saved:
    """How a save ended."""

    step: int
    folder: Path | None
    seconds: float
    bytes: int = 0
    error: CheckpointError | None = None


class Saver:
    """Writes snapshots of a run, in this thread or in the background.

    All processes must call `save` for the same steps; `last_step` is the last of them. In the
    background, the tensors are first copied to host memory (in stream order, so the next update
    cannot reach them); a second save waits for the first. Ended saves, also failed ones, are handed
    out by `poll`; `last_error` is what `poll` saw of the save of `last_step`.

    `last_step` at first: the step that the run resumes from. Newer folders that are there already
    were passed over as damaged: they stay, and take no place of `keep_last`.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        background: bool = True,
        last_step: int | None = None,
    ) -> None:
        self.last_step = last_step
        self.last_error: CheckpointError | None = None
        self.root = root
        self.world = world
        self.keep_last, self.keep_every = keep_last, keep_every
        self.background = background
        self._thread: threading.Thread | None = None
        self._ended: queue.SimpleQueue[Saved] = queue.SimpleQueue()
        self._buffer: Tensor | None = None
        start = -1 if last_step is None else last_step
        there = candidates(root) if world.main else []
        self._passed_over = {folder.name for folder in there if step_of(folder) > start}

    def save(self, snapshot: Snapshot) -> None:
        """Write one checkpoint; how it ended comes out of `poll`."""
        self.wait()
        self.last_step, self.last_error = snapshot.step, None
        if not self.background:
            self._ended.put(self._write(snapshot, lambda: None))
            return
        host, ready = self._to_host(snapshot)
        self._thread = threading.Thread(
            target=lambda: self._ended.put(self._write(host, ready)),
            name=f"checkpoint-{snapshot.step}",
        )
        self._thread.start()

    def poll(self) -> list[Saved]:
        """Saves that have ended since the last call."""
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get())
            if ended[-1].step == self.last_step:
                self.last_error = ended[-1].error
        return ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Until no save is under way, or so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = self._thread if self._thread.is_alive() else None

    def _to_host(self, snapshot: Snapshot) -> tuple[Snapshot, Callable[[], None]]:
        """A copy in host memory, and a function that waits until the copy is complete."""
        tensors = dict(snapshot.tensors)
        if snapshot.finite is not None:
            tensors["finite"] = snapshot.finite
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = size
            size += -(-tensor.nbytes // 64) * 64
        cuda = any(local_of(tensor).is_cuda for tensor in tensors.values())
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None  # let go of the old one before taking the new one
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        copies = {}
        for name, entry in tensors.items():
            tensor = local_of(entry)
            raw = self._buffer[places[name] : places[name] + tensor.nbytes]
            copy = raw.view(tensor.dtype).view(tensor.shape)
            copies[name] = with_local(entry, copy.copy_(tensor, non_blocking=True))
        event = torch.cuda.Event() if cuda else None
        if event is not None:
            event.record()
        finite = copies.pop("finite", None)
        host = Snapshot(snapshot.step, copies, snapshot.state, snapshot.rng, snapshot.files, finite)
        return host, (event.synchronize if event is not None else lambda: None)

    def _write(self, snapshot: Snapshot, ready: Callable[[], None]) -> Saved:
        started = time.perf_counter()
        final = self.root / folder_name(snapshot.step)
        try:
            ready()
            size = self._write_folder(snapshot, final)
            return Saved(snapshot.step, final, time.perf_counter() - started, size)
        except CheckpointError as error:
            return Saved(snapshot.step, None, time.perf_counter() - started, error=error)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            wrapped = CheckpointError(_describe(error, final))
            wrapped.__cause__ = error
            return Saved(snapshot.step, None, time.perf_counter() - started, error=wrapped)

    def _write_folder(self, snapshot: Snapshot, final: Path) -> int:
        # Each phase ends with all processes telling each other how it went: whoever failed, all
        # stop at the same place, and none waits for another that is gone.
        temporary = final.with_name(final.name + ".tmp")
        try:
            self._together(lambda: self._open(snapshot, temporary), final)
            self._together(lambda: self._write_tensors(snapshot, temporary), final)
            own = self._together(lambda: self._write_small(snapshot, temporary), final)
            listed = {name: entry for part in own for name, entry in part.items()}
            self._together(lambda: self._complete(listed, temporary, final, snapshot.step), final)
        except (Exception, CheckpointException):
            if self.world.main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return sum(entry["bytes"] for entry in listed.values())

    def _together(self, work: Callable[[], Any], final: Path) -> list[Any]:
        """Results of `work` by process; one failure anywhere is raised everywhere."""
        try:
            result, problem, kind = work(), None, None
        except (Exception, CheckpointException) as error:
            if self.world.size == 1:
                raise
            result, kind = None, type(error).__name__
            problem = str(error) if isinstance(error, CheckpointError) else _describe(error, final)
        if self.world.size == 1:
            return [result]
        answers = gather(self.world, (result, problem, kind), self.world.checkpoint)
        for _, problem, kind in answers:
            if problem is not None:
                raise (NonFiniteWeights if kind == "NonFiniteWeights" else CheckpointError)(problem)
        return [result for result, _, _ in answers]

    def _open(self, snapshot: Snapshot, temporary: Path) -> None:
        if snapshot.finite is not None and not bool(snapshot.finite):
            raise NonFiniteWeights(
                f"weights or optimizer states are not finite at step {snapshot.step}: no "
                "checkpoint was written, the earlier ones are kept"
            )
        if self.world.main:
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in _leftovers(self.root):  # of attempts that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            temporary.mkdir()

    def _write_tensors(self, snapshot: Snapshot, temporary: Path) -> None:
        size = sum(tensor.nbytes for tensor in snapshot.tensors.values())
        writer = dcp.FileSystemWriter(temporary, thread_count=4 if size > _MANY_BYTES else 1)
        dcp.save(
            dict(snapshot.tensors),
            storage_writer=writer,
            planner=ShardSavePlanner(),
            process_group=self.world.checkpoint,
            no_dist=self.world.size == 1,
        )

    def _write_small(self, snapshot: Snapshot, temporary: Path) -> dict[str, dict[str, Any]]:
        """Write this process's small files; size and checksum of every file it has written."""
        rank = self.world.rank
        _write(temporary / f"rng_{rank:05d}.pt", snapshot.rng)
        if self.world.main:
            state = {"format": FORMAT, "step": snapshot.step, "world_size": self.world.size}
            text = json.dumps(state | dict(snapshot.state), indent=1)
            _write(temporary / "state.json", text.encode())
            for name, content in snapshot.files.items():
                _write(temporary / name, content)
            mine = [path for path in _files(temporary) if not _of_process(path)]
        else:
            mine = []
        mine += temporary.glob(f"__{rank}_*.distcp")
        mine.append(temporary / f"rng_{rank:05d}.pt")
        for path in mine:
            if path.suffix != ".distcp":  # those are synced by their writer
                _sync_file(path)
        return {
            path.relative_to(temporary).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": sha256(path),
            }
            for path in mine
        }

    def _complete(self, listed: dict[str, Any], temporary: Path, final: Path, step: int) -> None:
        if not self.world.main:
            return
        manifest = {"format": FORMAT, "step": step, "files": dict(sorted(listed.items()))}
        _write(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_file(temporary / MANIFEST)
        for folder in {path.parent for path in _files(temporary)}:
            sync_folder(folder)
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():  # a damaged one of the same step that loading had to pass over
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        sync_folder(self.root)
        point_latest(self.root, final)
        shutil.rmtree(replaced, ignore_errors=True)
        self._passed_over.discard(final.name)
        self._retire(step)

    def _retire(self, step: int) -> None:
        """Remove complete checkpoints older than the one of `step` beyond `keep_last`, which counts
        that one; those of `keep_every`, damaged and foreign ones stay."""
        if self.keep_last is None:
            return
        older = [path for path in candidates(self.root) if step_of(path) < step]
        whole = [p for p in older if p.name not in self._passed_over and defect(p) is None]
        for folder in whole[self.keep_last - 1 :]:
            if self.keep_every is not None and step_of(folder) % self.keep_every == 0:
                continue
            # Out of sight first: a removal that is interrupted leaves no folder that looks damaged.
            retired = folder.with_name(folder.name + ".retired")
            folder.rename(retired)
            shutil.rmtree(retired, ignore_errors=True)


def _leftovers(root: Path) -> list[Path]:
    """What an interrupted save or removal left; nobody writes there now."""
    endings = (".tmp", ".retired", ".replaced")
    return [path for path in root.glob("step_*") if path.suffix in endings]


def _of_process(path: Path) -> bool:
    return path.suffix == ".distcp" or path.name.startswith("rng_")


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write(path: Path, content: bytes | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content.is_dir():
        shutil.copytree(content, path, dirs_exist_ok=True)
    else:
        shutil.copyfile(content, path)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _describe(error: BaseException, folder: Path) -> str:
    """An error of writing, in one line with what to do."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        where = f" (process {rank})"
        error = inner
    else:
        where = ""
    seen = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    text = str(error)
    if isinstance(seen, OSError):
        error, text = seen, seen.strerror or str(seen)
    earlier = [path for path in candidates(folder.parent) if defect(path) is None]
    untouched = "; earlier checkpoints are untouched" if earlier else ""
    full = isinstance(error, OSError) and error.errno in DISK_FULL
    if full or "No space left" in text or "file write failed" in text or "enforce fail" in text:
        remedy = "lower checkpoint.keep.last" if earlier else "name another disk as run.dir"
        return (
            f"no space to write checkpoint {folder.name} in {folder.parent}{where}: "
            f"{text.splitlines()[0]}{untouched}. Free some space or {remedy}"
        )
    return (
        f"checkpoint {folder.name} could not be written in {folder.parent}{where}: "
        f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}{untouched}"
    )
