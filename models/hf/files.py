"""The weight files of a Hugging Face folder, and which tensor is in which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open

from models.errors import UserError
from models.hf.config import read_config_json

INDEX = "model.safetensors.index.json"
MODEL_FILES = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Files of a model folder that a reader would take for part of the model."""


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """File of each tensor in a folder, from its index if it has one; the index must be exact.

    ValueError for missing shards, for names that index and shards do not agree on, for both an
    unsharded and a sharded model in one folder, and for formats other than safetensors. Shards that
    the index does not name are not part of the model.
    """
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / INDEX
    if index.is_file():
        if single.is_file():
            raise UserError(f"{folder} holds both model.safetensors and {INDEX}: which is meant?")
        return _indexed_files(folder, read_config_json(index))
    if not single.is_file():
        other = sorted(file.name for pattern in MODEL_FILES for file in folder.glob(pattern))
        have = f"; it has {', '.join(other)}" if other else ""
        raise UserError(f"{folder} has neither model.safetensors nor {INDEX}{have}")
    return dict.fromkeys(_names_in(single), single)


def _indexed_files(folder: Path, index: dict[str, Any]) -> dict[str, Path]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / INDEX} has no weight_map")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{folder / INDEX}: a tensor's file in weight_map must be text")
    files = {name: folder / file for name, file in weight_map.items()}
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    if absent:
        raise UserError(f"{folder / INDEX} names files that are not there: {', '.join(absent)}")
    inside = [(name, file) for file in sorted(set(files.values())) for name in _names_in(file)]
    elsewhere = [name for name, file in inside if files.get(name) != file]
    missing = sorted(set(files) - {name for name, _ in inside})
    if elsewhere or missing:
        raise UserError(
            list_problems(f"{folder / INDEX} against its files", missing=missing, unknown=elsewhere)
        )
    return files


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return list(opened.keys())
    except Exception as error:  # SafetensorError is not exported under one name by all versions
        raise UserError(f"{file} is not readable as safetensors: {error}") from None


def list_problems(what: str, **problems: list[str]) -> str:
    """One line that names everything that is wrong, up to twenty of a kind."""
    shown = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            shown.append(f"{len(names)} {kind}: {', '.join(names[:20])}{more}")
    return f"{what}: " + "; ".join(shown)
