"""Models out of checkpoints, without a run: for export, generation and for starting another run.

A checkpoint holds the model's config.json and the tokenizer, so nothing of the training config is
needed. Weights are those that the optimizer keeps: float32 masters, or bfloat16.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.build import build_model, start_routers
from models.errors import UserError
from models.hf import HfWeights, check_vocabulary, load_hf, load_weights
from models.hf.config import config_from_hf
from models.transformer import Decoder
from parallel import World
from training.checkpoint.files import CheckpointError, read_state, resolve
from training.checkpoint.saver import Saver, Snapshot
from training.checkpoint.tensors import load_tensors, read_weights, stored_tensors

if TYPE_CHECKING:
    from parallel.engines.base import Engine
    from training.data import TextTokenizer


class CheckpointTensors(Mapping[str, Tensor]):
    """Parameters and buffers of a checkpoint folder by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = list(read_state(folder)["shapes"])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return read_weights(self.folder, [name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_hf_folder(path: str | Path) -> bool:
    """Whether a path is a Hugging Face folder; anything else is taken for a checkpoint or run."""
    return (Path(path) / "config.json").is_file()


@torch.no_grad()
def load_initial_weights(model: Decoder, path: str | Path) -> None:
    """Fill the model's parameters and router buffers from a Hugging Face folder or a checkpoint.
    Buffers that are not there start as in a new run.

    Raises:
        UserError: tensors that are missing, unknown or of another shape, all named; or a model
            that computes with what this one has no buffer for.
        CheckpointError: no complete checkpoint there.
    """
    if is_hf_folder(path):
        load_weights(model, path)
        start_routers(model)
        return
    tensors = CheckpointTensors(resolve(path))
    buffers = dict(model.named_buffers())
    targets = {**dict(model.named_parameters()), **buffers}
    # Routers may keep other state between steps than those that the weights were trained with.
    missing = sorted(set(targets) - set(tensors) - set(buffers))
    unknown = sorted(name for name in set(tensors) - set(targets) if ".router." not in name)
    refuse_loss(tensors.folder, [f"buffers/{name}" for name in buffers], "model.init_from: ")
    targets = {name: target for name, target in targets.items() if name in tensors}
    if missing or unknown:
        raise UserError(f"{path} does not fit the model: missing {missing}, unknown {unknown}")
    for name, target in targets.items():
        value = tensors[name]
        if value.shape != target.shape:
            raise UserError(
                f"{path}: {name} is {list(value.shape)}, the model has {list(target.shape)}"
            )
        target.copy_(value)
    start_routers(model, loaded=targets)


@torch.no_grad()
def load_initial(engine: Engine, model: Decoder, path: str | Path) -> None:
    """As `load_initial_weights`, for a model that an engine holds: every process reads its part.

    Raises:
        UserError: tensors that are missing, unknown or of another shape, all named.
        CheckpointError: no complete checkpoint there, or one that does not fit.
    """
    buffers = dict(model.named_buffers())
    if is_hf_folder(path):
        weights = HfWeights(model.config, path)
        engine.fill(weights.values)
        for name in buffers.keys() & set(weights.names):
            weights.read(name, buffers[name])
        start_routers(model)
        return
    folder = resolve(path)
    refuse_loss(folder, [f"buffers/{name}" for name in buffers], "model.init_from: ")
    have, wanted = read_state(folder)["shapes"], engine.shapes()
    # Routers may keep other state between steps than those that the weights were trained with.
    buffers = {name: buffer for name, buffer in buffers.items() if name in have}
    wanted |= {name: list(buffer.shape) for name, buffer in buffers.items()}
    have = {name: shape for name, shape in have.items() if name in wanted or ".router." not in name}
    if wanted != have:
        differ = sorted(n for n in wanted.keys() | have if wanted.get(n) != have.get(n))
        raise UserError(f"{path} does not fit the model: {', '.join(differ[:10])} differ")
    shards = {name: s for name, s in engine.tensors().items() if name.startswith("weights/")}
    load_tensors(folder, shards | {f"buffers/{n}": b.reshape(-1) for n, b in buffers.items()})
    engine.loaded()
    start_routers(model, loaded=buffers)


# State that changes what the model computes, and the setting that makes it do so.
_ACTING = {
    ".router.selection_bias": "router.bias",
    ".router.rules.selection.weight_ema": "router.selection",
    ".router.family_E": "experts.copies",
    "masks/": "train.sparsity",
}


def refuse_loss(folder: Path, kept: Collection[str], place: str = "") -> None:
    """Refuse to go on without what the model of a checkpoint computes with.

    Args:
        kept: names of the checkpoint's tensors that this run has too; others are lost.
        place: what the message begins with.

    Raises:
        UserError: naming it.
    """
    lost = stored_tensors(folder).keys() - set(kept)
    slots = [n.removeprefix("buffers/") for n in lost if n.endswith(".router.active_E")]
    if not all(bool(mask_E.all()) for mask_E in read_weights(folder, slots).values()):
        raise UserError(
            f"{place}{folder} has free expert slots. Give experts.events or experts.policy (with "
            "dry_run: true nothing changes), or start a run from its export, which leaves "
            "them out (scripts/export_hf.py)"
        )
    found = read_state(folder).get("inexact", [])
    acting = [key for part, key in _ACTING.items() if any(part in name for name in lost)]
    lacks = [lack for lack in found if any(f"({key})" in lack for key in acting)]
    if lacks:
        raise UserError(
            f"{place}{folder} was trained with {' and '.join(lacks)}, which this run does not "
            "have, so another model would be continued. Give the same settings, or let them end "
            "before: in a run's last router.end_steps steps, masks at train.sparsity.until"
        )


def refuse_inexact(folder: Path) -> None:
    """Refuse a checkpoint whose model is not the one that its config.json describes.

    Raises:
        UserError: what its router does beyond that.
    """
    lacks = read_state(folder).get("inexact", [])
    if lacks:
        raise UserError(
            f"{folder} was trained with {' and '.join(lacks)}, which its config.json cannot "
            "express, so another model would come out. Use a checkpoint from the run's last "
            "router.end_steps steps"
        )


def load_model(path: str | Path, **build: Any) -> Decoder:
    """The model of a checkpoint, run folder or Hugging Face folder.

    Args:
        build: arguments of `build_model`: dtype, device, kernels ...

    Raises:
        UserError: a checkpoint of a model that its config.json cannot express.
    """
    if is_hf_folder(path):
        return load_hf(path, **build)
    folder = resolve(path)
    refuse_inexact(folder)
    config = config_from_hf(folder / "model")
    if any(name.endswith(".router.active_E") for name in read_state(folder)["shapes"]):
        build["start_experts"] = config.num_experts  # the mask itself is loaded
    model = build_model(config, seed=None, **build)
    load_initial_weights(model, folder)
    return model


# One of them makes a folder a tokenizer's; those without tokenizer.json are converted.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def tokenizer_folder(path: str | Path) -> Path | None:
    """Folder with the tokenizer of a checkpoint, run or Hugging Face folder; None without one."""
    folder = Path(path) if is_hf_folder(path) else resolve(path) / "tokenizer"
    found = any((folder / name).is_file() for name in _TOKENIZERS)
    return folder if found else None


def save_weights(model: Decoder, root: Path, tokenizer: TextTokenizer | None = None) -> Path:
    """Write a model without optimizer state as `root/checkpoints/step_00000000`; its folder.

    Raises:
        CheckpointError: it could not be written.
    """
    named = {"weights": model.named_parameters(), "buffers": model.named_buffers()}
    tensors, shapes = {}, {}
    for kind, items in named.items():
        for name, tensor in items:
            tensors[f"{kind}/{name}"] = tensor.detach().float().reshape(-1)
            shapes[name] = list(tensor.shape)
    with tempfile.TemporaryDirectory() as side:
        files: dict[str, bytes | Path] = {
            "model/config.json": json.dumps(model.config.to_hf(), indent=2).encode()
        }
        if tokenizer is not None:
            check_vocabulary(tokenizer, model.config)
            tokenizer.save(side)
            files["tokenizer"] = Path(side)
        saver = Saver(root / "checkpoints", World(), background=False)
        state = {"tokens": 0, "shapes": shapes}
        saver.save(Snapshot(step=0, tensors=tensors, state=state, rng=b"", files=files))
    saved = saver.poll()[0]
    if saved.folder is None:
        raise saved.error or CheckpointError(f"{root} could not be written")
    return saved.folder
