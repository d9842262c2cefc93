"""Writing a Hugging Face folder, atomically.

    export_hf(model, "out/", dtype="bfloat16", tokenizer=read_tokenizer("tokenizer/"))

Writing goes tensor by tensor into a new folder that takes its name when it is complete; each tensor
on disk has one name, one shard, the dtype that config.json tells.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.build import meta_tensors
from models.config import ModelConfig
from models.errors import UserError
from models.gate_factor import with_folded_factor
from models.hf.files import INDEX, MODEL_FILES, list_problems
from models.hf.names import Entry, entries
from models.slots import without_free_slots
from models.transformer import Decoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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
    config, source = with_folded_factor(*without_free_slots(config, source))
    if tokenizer is not None:
        check_vocabulary(tokenizer, config)
    limit = _parse_size(max_shard_size)
    untie = config.tie_word_embeddings and not keep_tied
    if untie:
        config = config.model_copy(update={"tie_word_embeddings": False})
    shapes = meta_tensors(config)
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
        raise UserError(list_problems("the model's tensors", missing=missing, unknown=extra))


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
    patterns = (*MODEL_FILES, *_CONFIG_FILES, *_TOKENIZER_FILES)
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
