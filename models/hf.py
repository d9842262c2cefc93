"""Hugging Face folders: strict reading and atomic writing.

    export_hf(model, "out/", dtype="bfloat16", tokenizer=read_tokenizer("tokenizer/"))
    model = load_hf("folder/")                 # or load_weights(model, "folder/")

Reading uses every tensor of the folder exactly once and fills every parameter, or fails with one
error that lists all names: experts that match nothing and stay random are the classic silent fault
(NVIDIA/Megatron-LM#5844). Writing goes tensor by tensor into a new folder that takes its name when
it is complete; each tensor on disk has one name, one shard, the dtype that config.json tells.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.build import build_model
from models.config import ModelConfig
from models.config_hf import config_from_hf, read_config_json
from models.errors import UserError
from models.hf_names import Entry, entries, fused_names, layer_of
from models.slots import without_free_slots
from models.transformer import Decoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INDEX = "model.safetensors.index.json"
# Files of a model folder that a reader would take for part of the new model.
_MODEL_FILES = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")
_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)

# ------------------------------------------------------------------------------------- writing


class SavedTokenizer(Protocol):
    """What an export needs of a tokenizer; `training.data.TextTokenizer` is one."""

    vocab_size: int

    def token_to_id(self, token: str) -> int | None: ...
    def encode_with_bos(self, text: str) -> list[int]: ...
    def save(self, folder: str | Path) -> None: ...


@dataclass(frozen=True)
class Exported:
    """What `export_hf` wrote."""

    folder: Path
    files: tuple[str, ...]
    """Weight files, in order."""
    tensors: int
    bytes: int
    """Bytes of all tensors."""


def export_hf(
    source: Decoder | Mapping[str, Tensor],
    folder: str | Path,
    *,
    config: ModelConfig | None = None,
    dtype: str = "float32",
    max_shard_size: int | str = "5GB",
    tokenizer: SavedTokenizer | None = None,
    generation: dict[str, Any] | None = None,
    keep_tied: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write a folder that transformers 4.57 to 5.x, vLLM and llama.cpp load as it is. Expert slots
    that are free are left out (`models.slots`).

    Args:
        source: a model, or a mapping from its parameter and buffer names to tensors (may load them
            on access: each is asked for once, one after the other).
        folder: where to; created. If it holds model files, they are named and refused.
        config: needed with a mapping.
        dtype: float32, bfloat16 or float16, of every tensor but selection biases (fp32: an
            update of 0.001 would vanish in bf16).
        max_shard_size: bytes, or "5GB" / "500MB" (powers of ten, as transformers counts).
        tokenizer: written along; a `training.data.TextTokenizer`.
        generation: more keys for generation_config.json (temperature, top_p, ...).
        keep_tied: leave a tied output matrix out, with tie_word_embeddings true. By default it is
            written: SGLang does not tie qwen3_moe.
        overwrite: remove the model files of an earlier export instead of refusing.
        progress: called with (bytes written, bytes in all) after each file.

    Raises:
        ValueError: a folder in use, an unknown dtype, missing or unknown tensors, a tokenizer that
            does not fit, too little disk space, layers with different numbers of experts.
    """
    if isinstance(source, Decoder):
        config = source.config
        source = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    if config is None:
        raise ValueError("export_hf: a mapping of tensors needs config=")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    config, source = without_free_slots(config, source)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config)
    limit = _parse_size(max_shard_size)
    untie = config.tie_word_embeddings and not keep_tied
    if untie:
        config = config.model_copy(update={"tie_word_embeddings": False})
    shapes = _shapes(config)
    plan = entries(config, shapes)
    head = {"head.weight": "embed.weight"} if untie else {}
    _check_sources(config, source, {head.get(entry.source, entry.source) for entry in plan})

    generation = _generation_config(config, generation)
    sizes = [
        torch.Size(entry.shape(shapes[entry.source])).numel() * _disk_dtype(entry, dtype).itemsize
        for entry in plan
    ]
    shards = _assign_shards(sizes, limit)
    folder = Path(folder)
    stale = _stale_files(folder)
    if stale and not overwrite:
        names = ", ".join(stale)
        raise UserError(
            f"{folder} already holds model files ({names}); overwrite (--overwrite) removes them"
        )
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < sum(sizes) + 10**7:
        raise UserError(
            f"{folder.parent} has {free / 1e9:.2f} GB free, the model needs {sum(sizes) / 1e9:.2f}"
        )
    partial.mkdir()
    try:
        if tokenizer is not None:
            tokenizer.save(partial)
        files = _write_weights(source, plan, sizes, shards, partial, dtype, head, progress)
        _write_json(partial / "generation_config.json", generation)
        _write_json(partial / "config.json", config.to_hf(dtype))
        _take_name(partial, folder, stale)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Exported(folder, tuple(files), len(plan), sum(sizes))


def _shapes(config: ModelConfig) -> dict[str, Tensor]:
    model = build_model(config, device="meta")
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _check_sources(config: ModelConfig, source: Mapping[str, Tensor], wanted: set[str]) -> None:
    names = set(source)
    if config.tie_word_embeddings or "head.weight" not in wanted:
        names.discard("head.weight")  # state dicts list a tied matrix twice
    # Routers keep state between training steps; of all that only a selection bias is for a folder.
    state = {name for name in names - wanted if ".router." in name}
    for name in sorted(state):
        if name.endswith(".selection_bias") and bool(source[name].any()):
            raise UserError(
                f"{name} is not zero, and {config.family} has no selection bias: an export would "
                "be another model"
            )
    names -= state
    missing, extra = sorted(wanted - names), sorted(names - wanted)
    if missing or extra:
        raise UserError(_list_problems("the model's tensors", missing=missing, unknown=extra))


def _disk_dtype(entry: Entry, dtype: str) -> torch.dtype:
    return torch.float32 if entry.source.endswith(".selection_bias") else DTYPES[dtype]


def _parse_size(size: int | str) -> int:
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B|)", str(size).strip().upper())
    number = int(float(match[1]) * units[match[2]]) if match else 0
    if number < 1:
        raise UserError(f"max_shard_size={size!r} is no size; allowed: bytes, or like 500MB or 5GB")
    return number


def _assign_shards(sizes: list[int], limit: int) -> list[list[int]]:
    """Consecutive runs of at most `limit` bytes; a larger tensor gets a shard of its own."""
    shards: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(index)
        room -= size
    return shards


def _write_weights(
    source: Mapping[str, Tensor],
    plan: list[Entry],
    sizes: list[int],
    shards: list[list[int]],
    folder: Path,
    dtype: str,
    rename: dict[str, str],
    progress: Callable[[int, int], None] | None,
) -> list[str]:
    files, weight_map, written = [], {}, 0
    current, tensor = None, None
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {}
        for index in shard:
            entry = plan[index]
            name = rename.get(entry.source, entry.source)
            if name != current:
                current, tensor = name, source[name].detach()
            value = entry.take(tensor).to("cpu", _disk_dtype(entry, dtype))
            # Two names of one memory (an untied copy of the embedding) must not share it on disk.
            content[entry.name] = value.clone() if value.data_ptr() == tensor.data_ptr() else value
            weight_map[entry.name] = file
        save_file(content, folder / file, metadata={"format": "pt"})
        _sync(folder / file)
        files.append(file)
        written += sum(sizes[index] for index in shard)
        if progress is not None:
            progress(written, sum(sizes))
    if len(files) > 1:
        index = {"metadata": {"total_size": written}, "weight_map": weight_map}
        _write_json(folder / INDEX, index)
    return files


def _generation_config(config: ModelConfig, more: dict[str, Any] | None) -> dict[str, Any]:
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    own = {key: getattr(config, key) for key in ids if getattr(config, key) is not None}
    for key, value in (more or {}).items():
        if key in own and own[key] != value:
            raise UserError(f"generation.{key}={value!r} contradicts the model's {own[key]!r}")
    return {**(more or {}), **own}


def check_vocabulary(tokenizer: SavedTokenizer, config: ModelConfig) -> None:
    """ValueError when the tokenizer gives ids that the model has no embedding for."""
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model "
            f"vocab_size={config.vocab_size}"
        )


def _stale_files(folder: Path) -> list[str]:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is no folder")
    patterns = (*_MODEL_FILES, *_CONFIG_FILES, *_TOKENIZER_FILES)
    found = {file.name for pattern in patterns for file in folder.glob(pattern)}
    return sorted(found)


def _take_name(partial: Path, folder: Path, stale: list[str]) -> None:
    """Give the complete folder its name; into a folder in use, file by file with config.json
    last.
    """
    for name in stale:
        (folder / name).unlink()
    if not folder.exists() or not any(folder.iterdir()):
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
        return
    for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, folder / file.name)
    partial.rmdir()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------- reading


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
        self._shapes = _shapes(config)
        names = set(self._files)
        if drop_mtp:
            names = {name for name in names if not _is_mtp(name, config)}
        fused = {i for i in config.moe_layers if names & set(fused_names(config, i))}
        plan = entries(config, self._shapes, fused)
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
                found = self._open(entry.name).get_slice(entry.name)
                shape, expected = tuple(found.get_shape()), entry.shape(self._shapes[entry.source])
                kind = found.get_dtype()
                if shape != expected:
                    wrong.append(f"{entry.name} {list(shape)} instead of {list(expected)}")
                elif kind not in ("F64", "F32", "F16", "BF16"):
                    wrong.append(f"{entry.name} is {kind}: quantised weights are not read")
        if missing or unknown or wrong:
            hint = ""
            if any(_is_mtp(name, config) for name in unknown):
                hint = (
                    "; layers after the last are multi-token prediction: scripts/import_hf.py "
                    "FOLDER OUT --drop-mtp leaves them out"
                )
            raise UserError(
                _list_problems(str(folder), missing=missing, unknown=sorted(unknown), wrong=wrong)
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

    def _tensor(self, name: str, rows: range | None = None) -> Tensor:
        if rows is None:
            return self._open(name).get_tensor(name)
        return self._open(name).get_slice(name)[rows.start : rows.stop]


def says_tied(folder: str | Path) -> bool:
    """Whether a folder's config.json ties the output matrix to the embedding."""
    config = Path(folder) / "config.json"
    return config.is_file() and read_config_json(config).get("tie_word_embeddings") is True


def _is_mtp(name: str, config: ModelConfig) -> bool:
    layer = layer_of(config, name)
    return layer is not None and layer >= config.num_hidden_layers


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
        other = sorted(file.name for pattern in _MODEL_FILES for file in folder.glob(pattern))
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
            _list_problems(
                f"{folder / INDEX} against its files", missing=missing, unknown=elsewhere
            )
        )
    return files


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return list(opened.keys())
    except Exception as error:  # SafetensorError is not exported under one name by all versions
        raise UserError(f"{file} is not readable as safetensors: {error}") from None


def _list_problems(what: str, **problems: list[str]) -> str:
    shown = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            shown.append(f"{len(names)} {kind}: {', '.join(names[:20])}{more}")
    return f"{what}: " + "; ".join(shown)
