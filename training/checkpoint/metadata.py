"""What a checkpoint's `.metadata` says about its tensors, read as data.

torch.distributed.checkpoint keeps it as a pickle, and a pickle from somebody else may call anything
while it is read. So only the few classes that describe plain tensors are looked up here; none of
them does more than hold values. (The way of "Restricting Globals" in the documentation of Python's
pickle.) The tensors' files themselves are read by torch.load(weights_only=True).
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    _METADATA: {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},  # name → torch.strided and the like
    # The folder that was written to. Python 3.13 names the module `pathlib._local`.
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


class MetadataError(ValueError):
    """`.metadata` is not the description of plain tensors; the message says what it holds."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise MetadataError(
            f".metadata refers to {module}.{name}, which is no part of a description of tensors "
            "and could run code"
        )


def read_metadata(folder: Path) -> Metadata:
    """The description of a checkpoint's tensors.

    Raises:
        MetadataError: it names anything else than tensors in files of this folder. Nothing that it
            names has been run.
    """
    try:
        with open(folder / ".metadata", "rb") as file:
            found = _Unpickler(file).load()
    except (MetadataError, OSError):
        raise
    except Exception as error:  # bytes that are no pickle raise errors of nearly every kind
        raise MetadataError(f".metadata cannot be read ({type(error).__name__})") from None
    if not isinstance(found, Metadata):
        raise MetadataError(f".metadata holds a {type(found).__name__}, not a list of tensors")
    try:
        entries, places = dict(found.state_dict_metadata), dict(found.storage_data)
        # Objects that are no tensors would be read by a plain torch.load.
        others = [k for k, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)]
        files = {place.relative_path for place in places.values()}
        outside = [name for name in files if PurePosixPath(name).name != name]
    except Exception as error:  # fields that are missing or of other types
        raise MetadataError(f".metadata is malformed ({type(error).__name__})") from None
    if others:
        raise MetadataError(f".metadata lists {others[0]!r}, which is no tensor")
    if outside:
        raise MetadataError(f".metadata names the file {outside[0]!r} outside of the checkpoint")
    return found


class Reader(dcp.FileSystemReader):
    """torch's reader of a checkpoint folder, with `read_metadata` in the place of its own."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))
