"""What a process keeps outside of its GPU, and where.

    parallel.offload           master weights, Adam's moments and gradients: in host memory (cpu),
                               or gradients there and the rest in files (nvme)
    parallel.offload_weights   this process's part of the weights that products are made with

Files are mapped into memory: the operating system moves pages between disk and page cache, so a
checkpoint, a resharding load and an update read and write them like any tensor, and a machine with
memory to spare never waits for the disk. (DeepSpeed's own swapper, which needs libaio, hides the
state from all of these.) They have no name after they are mapped, so nothing is left behind however
the process ends; their blocks are reserved first, since a full disk under a mapping kills.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parallel.world import ParallelError

PLACES = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Offload:
    """The settings `parallel.offload`, `.offload_weights` and `.offload_path`.

    Raises:
        ValueError: unknown values, or a setting that needs another one or makes it useless.
    """

    state: str = "none"
    """Master weights and moments: none (on the device), cpu or nvme."""
    weights: str = "none"
    """Weights in the dtype of the products, likewise."""
    path: str | None = None
    """Folder on a local disk, for nvme."""

    def __post_init__(self) -> None:
        for key, value in self.named():
            if value not in PLACES:
                raise ParallelError(
                    f"parallel.{key}={value!r} is unknown; allowed: {', '.join(PLACES)}"
                )
        disk = [key for key, value in self.named() if value == "nvme"]
        if disk and self.path is None:
            raise ParallelError(
                f"parallel.{disk[0]}=nvme needs parallel.offload.path: a folder on a local disk"
            )
        if self.path == "":
            raise ParallelError("parallel.offload.path='' must name a folder on a local disk")
        if self.path is not None and not disk:
            raise ParallelError(
                f"parallel.offload.path={self.path!r} has no effect without parallel.offload=nvme "
                "or parallel.offload_weights=nvme; leave it out"
            )

    def named(self) -> list[tuple[str, str]]:
        """(key, value) of all but the folder, as the user wrote them."""
        return [("offload", self.state), ("offload_weights", self.weights)]

    @property
    def asked(self) -> str | None:
        """The first setting that an engine has to honour, `key=value`; None: there is none."""
        asked = (place for _, place in self.named() if place != "none")
        return next((f"parallel.offload.kind={place}" for place in asked), None)

    def check_folder(self) -> None:
        """ValueError if this machine has no such folder to write to, and cannot make it."""
        if self.path is not None:
            Disk(self.path)


class Disk:
    """Memory in unnamed files of a folder."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            ValueError: a folder that cannot be made or written to.
        """
        self.folder = Path(path)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise ParallelError(
                f"parallel.offload.path={path!r} cannot be used: {error.strerror}; allowed: a "
                "folder on a local disk that can be made and written"
            ) from None

    def take(self, like: Tensor) -> Tensor:
        """A flat tensor of as many elements and the dtype of `like`, holding its values.

        Raises:
            ValueError: the disk is full, or refuses.
        """
        count = like.numel()
        if count == 0:
            return like.detach().cpu().clone().reshape(-1)
        file = self.folder / f"tessera_{uuid.uuid4().hex}"
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, count * like.element_size())
                mapped = torch.from_file(str(file), shared=True, size=count, dtype=like.dtype)
            finally:
                os.close(descriptor)
                file.unlink()
        except OSError as error:
            raise ParallelError(
                f"parallel.offload.path={str(self.folder)!r}: {count * like.element_size():,} "
                f"bytes for optimizer state or weights: {error.strerror}"
            ) from None
        mapped.copy_(like.detach().reshape(-1))
        return mapped
