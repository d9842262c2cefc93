"""Reading the tensors of a checkpoint."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from models.errors import brief
from parallel.flat_shard import ShardLoadPlanner
from training.checkpoint.files import CheckpointError, read_state
from training.checkpoint.metadata import MetadataError, Reader, read_metadata
from training.device import no_memory

# One process needs no process group, and says so on purpose (no_dist=True).
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


def unreadable(folder: Path, what: str, error: BaseException) -> CheckpointError:
    """An error of reading, in one line."""
    return CheckpointError(f"{what} of checkpoint {folder} cannot be read ({brief(error)})")


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Name → size and dtype of the (flat) tensors in a checkpoint.

    Raises:
        CheckpointError: its description holds anything but tensors, as a crafted one may.
    """
    try:
        return dict(read_metadata(folder).state_dict_metadata)
    except MetadataError as error:
        raise CheckpointError(f"checkpoint {folder} is refused: its {error}") from None


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors (or any views) by name; no process waits for another.

    Raises:
        CheckpointError: a name that is not stored, or of another size; or files that do not hold
            plain tensors.
    """
    stored = stored_tensors(folder)
    wrong = [
        f"{name} has {tensor.numel()} elements here and {_count(stored.get(name))} there"
        for name, tensor in tensors.items()
        if name not in stored or stored[name].size.numel() != tensor.numel()
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"checkpoint {folder} does not fit this model: {'; '.join(wrong[:3])}{more}"
        )
    try:
        dcp.load(
            dict(tensors),
            storage_reader=Reader(folder),
            planner=ShardLoadPlanner(),
            no_dist=True,
        )
    except CheckpointException as error:  # a BaseException, which holds the error proper
        inner, _ = next(iter(error.failures.values()))
        # A file that holds no tensors is a plain RuntimeError of torch.load; memory and devices
        # have kinds of their own.
        damaged = type(inner) is RuntimeError and not no_memory(inner)
        if damaged or isinstance(inner, (pickle.UnpicklingError, EOFError, OSError)):
            raise unreadable(folder, "tensors", inner) from inner
        raise inner from None


def _count(entry: TensorStorageMetadata | None) -> str:
    return "none" if entry is None else str(entry.size.numel())


def read_weights(folder: Path, names: list[str] | None = None) -> dict[str, Tensor]:
    """Parameters and buffers of a checkpoint on the CPU in their own shapes, for export and
    sampling.

    Args:
        names: only these; default all. Parameters come as the optimizer kept them.
    """
    shapes: dict[str, list[int]] = read_state(folder)["shapes"]
    stored = stored_tensors(folder)
    flat: dict[str, Tensor] = {}
    for name in names if names is not None else shapes:
        key = f"weights/{name}" if f"weights/{name}" in stored else f"buffers/{name}"
        flat[key] = torch.empty(stored[key].size, dtype=stored[key].properties.dtype)
    load_tensors(folder, flat)
    return {
        key.split("/", 1)[1]: tensor.view(shapes[key.split("/", 1)[1]])
        for key, tensor in flat.items()
    }
