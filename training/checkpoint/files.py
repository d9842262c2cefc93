"""Checkpoints: what makes a folder complete, how one is written, which one is loaded.

    checkpoints/step_00000100/
        __0_0.distcp … .metadata   all tensors, by torch.distributed.checkpoint
        state.json                 step, tokens, position in the data, shapes of the tensors
        rng_00000.pt               random states, one file per process
        config.yaml, model/, tokenizer/
                                   enough to export the model without the training code's config
        manifest.json              size and SHA-256 of every other file: the mark of completeness
    checkpoints/latest             symbolic link to the newest complete folder

A folder is written as `step_….tmp`: tensors, small files, fsync, manifest, fsync; then it gets its
name, its parent is synced, `latest` moves, and only then older folders go. So a crash at any moment
leaves the last complete folder as it was, and half of a folder never has a manifest under its final
name. Every checksum is verified on loading: torch.distributed.checkpoint itself notices truncated
files but not flipped bits. (That `latest` must not move before everything is on disk is the lesson
of KempnerInstitute/KempnerForge#102; that retention must not eat healthy checkpoints, of
RLinf/RLinf#1469.)

Tensors are stored flat, by logical names of the whole model (`parallel.engines.base`), so any
layout of processes can read or write any range of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from parallel import World, from_main, gather

MANIFEST = "manifest.json"
FORMAT = 1
_ALWAYS = ("state.json", ".metadata")  # files without which there is nothing to read


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read, told in one line."""


class NonFiniteWeights(CheckpointError):
    """Weights or moments hold NaN or infinity, so nothing was written."""


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if _HAS_DIGEST else _digest(file)


_HAS_DIGEST = hasattr(hashlib, "file_digest")  # Python 3.11


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to disk, as fsync does the content of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point_latest(root: Path, folder: Path) -> None:
    """Make `root/latest` a symbolic link to `folder`, in one step."""
    link = root / "latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name, target_is_directory=True)
    os.replace(link, root / "latest")
    sync_folder(root)


# --- finding and reading ------------------------------------------------------------------------


def candidates(root: Path) -> list[Path]:
    """Folders named step_…, newest first, whole or not; unfinished `.tmp` ones come with them."""
    found = [
        path
        for path in root.glob("step_*")
        if path.is_dir() and path.name.removeprefix("step_").removesuffix(".tmp").isdigit()
    ]
    return sorted(found, key=lambda path: (step_of(path), path.suffix != ".tmp"), reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_").removesuffix(".tmp"))


def defect(folder: Path) -> str | None:
    """Why a folder is no complete checkpoint, from names and sizes alone; None if it is one."""
    if folder.suffix == ".tmp":
        return "it was never finished"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = {
            name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
        }
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was never finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name in _ALWAYS:
        if name not in files:
            return f"its {MANIFEST} does not list {name}"
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def damage(folder: Path, world: World | None = None) -> str | None:
    """As `defect`, and every checksum is verified; the files are divided among the processes."""
    world = world or World()
    for rank, reason in enumerate(gather(world, defect(folder))):
        if reason is not None:
            return reason if world.size == 1 else f"{reason} (seen by process {rank})"
    files = sorted(json.loads((folder / MANIFEST).read_text())["files"].items())

    def check(item: tuple[str, dict[str, Any]]) -> str | None:
        name, entry = item
        if sha256(folder / name) == entry["sha256"]:
            return None
        return f"{name} does not match its checksum, so the file was damaged after it was written"

    with ThreadPoolExecutor(4) as pool:
        found = [reason for reason in pool.map(check, files[world.rank :: world.size]) if reason]
    return next((reason for part in gather(world, found) for reason in part), None)


def newest(root: Path, world: World | None = None) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, and one sentence for each newer one passed over."""
    world = world or World()
    skipped: list[str] = []
    for folder in from_main(world, candidates(root) if world.main else None):
        reason = damage(folder, world)
        if reason is None:
            return folder, skipped
        skipped.append(f"{folder.name} is passed over: {reason}")
    return None, skipped


def resolve(path: str | Path) -> Path:
    """The checkpoint folder behind a path: itself, `latest`, or a run or checkpoints folder.

    Raises:
        CheckpointError: nothing complete there; says what is wrong and what else there is.
    """
    path = Path(path)
    for root in (path / "checkpoints", path):
        if candidates(root):
            folder, skipped = newest(root)
            if folder is None:
                raise CheckpointError(f"{root} holds no complete checkpoint: {'; '.join(skipped)}")
            return folder
    if not path.exists():
        runs = [p for p in sorted(path.parent.glob("*")) if (p / "checkpoints").is_dir()]
        others = [repr(folder.name) for folder in [*candidates(path.parent), *runs][:10]]
        hint = f"; {path.parent} holds {', '.join(others)}" if others else ""
        raise CheckpointError(f"checkpoint {path} does not exist{hint}")
    folder = path.resolve()
    if not (folder / MANIFEST).exists() and not folder.name.startswith("step_"):
        raise CheckpointError(f"{path} is no checkpoint, nor a run or another folder that has one")
    reason = damage(folder)
    if reason is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {reason}")
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """The plain values of a checkpoint."""
    return json.loads((folder / "state.json").read_text())


def read_rng(folder: Path, rank: int) -> bytes | None:
    """The random states of a process, or None when there were fewer processes than that."""
    path = folder / f"rng_{rank:05d}.pt"
    return path.read_bytes() if path.is_file() else None
