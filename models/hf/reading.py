"""Reading a Hugging Face folder, strictly.

    model = load_hf("folder/")                 # or load_weights(model, "folder/")

Reading uses every tensor of the folder exactly once and fills every parameter, or fails with one
error that lists all names: experts that match nothing and stay random are the classic silent fault
(NVIDIA/Megatron-LM#5844).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from models.build import build_model, meta_tensors
from models.config import ModelConfig
from models.errors import UserError
from models.hf.config import config_from_hf, read_config_json
from models.hf.files import list_problems, tensor_files
from models.hf.names import Entry, entries, fused_names, layer_of
from models.hf.quantized import quantised_format
from models.transformer import Decoder


def load_hf(
    folder: str | Path, *, ignore_keys: tuple[str, ...] = (), drop_mtp: bool = False, **build: Any
) -> Decoder:
    """The model in a Hugging Face folder. `build`: arguments of `build_model` (dtype, device,
    kernels...).

    See `load_weights` for what is accepted and `config_from_hf` for `ignore_keys`.
    """
    model = build_model(config_from_hf(folder, ignore_keys=ignore_keys), seed=None, **build)
    load_weights(model, folder, drop_mtp=drop_mtp)
    return model


@torch.no_grad()
def load_weights(model: Decoder, folder: str | Path, *, drop_mtp: bool = False) -> None:
    """Fill the model from a folder. Values are cast to the model's dtype, routers to theirs.

    See `HfWeights` for what is accepted and what is refused.
    """
    weights = HfWeights(model.config, folder, drop_mtp=drop_mtp)
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in weights.names:
        weights.read(name, targets[name])


class HfWeights:
    """A folder's tensors by the names of our parameters and buffers, read when asked for: sharded
    or not, per expert or fused, tied or not.
    """

    def __init__(self, config: ModelConfig, folder: str | Path, *, drop_mtp: bool = False) -> None:
        """
        Args:
            drop_mtp: leave out the layers after the last one (multi-token prediction of the public
                GLM-4.x files), which this model does not have.

        Raises:
            UserError: listing every tensor that is missing, unknown or of another shape.
        """
        self._files = tensor_files(folder)
        self._opened: dict[Path, Any] = {}
        self._format = quantised_format(_config_of(folder))
        self._shapes = meta_tensors(config)
        names = set(self._files)
        if drop_mtp:
            names = {name for name in names if not _is_mtp(name, config)}
        fused = {i for i in config.moe_layers if names & set(fused_names(config, i))}
        plan = entries(config, self._shapes, fused)
        self._parts: dict[str, tuple[str, ...]] = {}
        if self._format is not None:
            stored = {entry.name: self._format.parts(entry.name) for entry in plan}
            self._parts = {n: parts for n, parts in stored.items() if names.issuperset(parts)}
            names -= {part for parts in self._parts.values() for part in parts}
            names |= self._parts.keys()
        unknown = names - {entry.name for entry in plan}
        embedding, head = (f"{config.tensor_names[name]}.weight" for name in ("embed", "head"))
        tied_copy = config.tie_word_embeddings and head in unknown
        if tied_copy:
            unknown.discard(head)
        # The folder ties the output matrix, and the model holds a copy of its own.
        untied = not config.can_tie and says_tied(folder)
        if untied and head not in names:
            source = next(entry for entry in plan if entry.name == head)
            plan[plan.index(source)] = replace(source, name=embedding)
        missing = sorted({entry.name for entry in plan} - names)
        wrong = []
        for entry in plan:
            if entry.name in names:
                expected = entry.shape(self._shapes[entry.source])
                if problem := self._problem(entry.name, expected):
                    wrong.append(problem)
        if missing or unknown or wrong:
            hint = ""
            if any(_is_mtp(name, config) for name in unknown):
                hint = (
                    "; layers after the last are multi-token prediction: scripts/import_hf.py "
                    "FOLDER OUT --drop-mtp leaves them out"
                )
            raise UserError(
                list_problems(str(folder), missing=missing, unknown=sorted(unknown), wrong=wrong)
                + hint
            )
        self._entries: dict[str, list[Entry]] = {}
        for entry in plan:
            self._entries.setdefault(entry.source, []).append(entry)
        if tied_copy or (untied and head in names):
            copy, kept = self._tensor(head), self._tensor(embedding)
            if not torch.equal(copy.to(kept), kept):
                raise UserError(
                    f"{folder}: tie_word_embeddings is true, but {head} differs from {embedding}"
                )

    @property
    def names(self) -> list[str]:
        """Parameters and buffers that the folder fills: all of the model's."""
        return list(self._entries)

    def values(self, name: str, experts: range | None = None) -> Tensor:
        """fp32 values of a parameter on the CPU, or of some of its experts, stacked."""
        shape = list(self._shapes[name].shape)
        shape[0] = shape[0] if experts is None else len(experts)
        into = torch.empty(shape)
        self.read(name, into, experts)
        return into

    def read(self, name: str, into: Tensor, experts: range | None = None) -> None:
        """Fill a tensor with a parameter or buffer, or with some of its experts."""
        for entry in self._entries[name]:
            if experts is None:
                entry.put(into, self._tensor(entry.name))
            elif entry.expert is None:  # all experts of a layer in one tensor
                entry.put(into, self._tensor(entry.name, experts))
            elif entry.expert in experts:
                place = replace(entry, expert=entry.expert - experts.start)
                place.put(into, self._tensor(entry.name))

    def _open(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt", device="cpu")
        return self._opened[file]

    def _stored(self, name: str) -> tuple[tuple[int, ...], str]:
        found = self._open(name).get_slice(name)
        return tuple(found.get_shape()), found.get_dtype()

    def _problem(self, name: str, expected: tuple[int, ...]) -> str | None:
        """What is wrong with a tensor of the folder that is to have this shape."""
        if name in self._parts:
            stored = [self._stored(part) for part in self._parts[name]]
            problem = self._format.problem(stored, expected)
            return problem and f"{name} {problem}"
        shape, kind = self._stored(name)
        if shape != expected:
            return f"{name} {list(shape)} instead of {list(expected)}"
        if kind not in ("F64", "F32", "F16", "BF16"):
            return (
                f"{name} is {kind}: quantised weights are not read without a format in config.json"
            )
        return None

    def _tensor(self, name: str, rows: range | None = None) -> Tensor:
        if name in self._parts:
            return self._format.read([self._plain(part, rows) for part in self._parts[name]])
        return self._plain(name, rows)

    def _plain(self, name: str, rows: range | None = None) -> Tensor:
        if rows is None:
            return self._open(name).get_tensor(name)
        return self._open(name).get_slice(name)[rows.start : rows.stop]


def _config_of(folder: str | Path) -> dict[str, Any]:
    config = Path(folder) / "config.json"
    return read_config_json(config) if config.is_file() else {}


def says_tied(folder: str | Path) -> bool:
    """Whether a folder's config.json ties the output matrix to the embedding."""
    return _config_of(folder).get("tie_word_embeddings") is True


def _is_mtp(name: str, config: ModelConfig) -> bool:
    layer = layer_of(config, name)
    return layer is not None and layer >= config.num_hidden_layers
