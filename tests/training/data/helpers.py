"""Small stores and files whose every token is known."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from training.data import DataConfig, SourceConfig, TokenStore, TrainData, build_data
from training.data.batch import Batch
from training.data.held_out import HeldOut
from training.data.order import Order, RowFormat
from training.data.tokenizer import TextTokenizer, read_tokenizer

EOS, BOS, PAD = 0, 1, 2
NUMBERS = 3
"""Word `n` has the id NUMBERS + n."""


def write_tokenizer(folder: Path, numbers: int = 3000, **files: dict) -> Path:
    """A tokenizer of whole words "0", "1", … so that ids can be read off a text."""
    vocabulary = {"<|endoftext|>": EOS, "<|startoftext|>": BOS, "<|pad|>": PAD}
    vocabulary |= {str(n): NUMBERS + n for n in range(numbers)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def number_tokenizer(folder: Path) -> TextTokenizer:
    return read_tokenizer(write_tokenizer(folder))


def write_jsonl(path: Path, texts: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def numbered(count: int, length: int = 1, start: int = 0) -> list[str]:
    """Texts of `length` consecutive numbers, no number twice."""
    return [" ".join(str(start + i * length + j) for j in range(length)) for i in range(count)]


def make_store(
    folder: Path,
    blocks: Sequence[Sequence[Sequence[int]]],
    *,
    complete: bool = True,
    dtype: str = "uint16",
    tokenizer: str = "none",
) -> TokenStore:
    """A store written by hand from documents' ids, by block: the file format in other words."""
    (folder / "blocks").mkdir(parents=True)
    plan = {"format": "tessera token store", "version": 1, "tokenizer": tokenizer, "dtype": dtype}
    (folder / "plan.json").write_text(json.dumps(plan))
    for documents in blocks:
        add_block(folder, documents, dtype)
    store = TokenStore(folder)
    if complete:
        finish(store)
    return store


def add_block(folder: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16") -> None:
    index = len(list((folder / "blocks").iterdir()))
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    ids = np.concatenate([np.array(d, dtype) for d in documents] or [np.zeros(0, dtype)])
    data = ends.tobytes() + ids.astype(dtype).tobytes()
    (folder / "blocks" / f"{index:06d}.bin").write_bytes(data)
    record = {
        "block": index,
        "documents": len(documents),
        "tokens": len(ids),
        "text_bytes": 2 * len(ids),
        "crc": zlib.crc32(data),
        "skipped": {},
        "examples": [],
        "next": {"file": 0},
    }
    with open(folder / "blocks.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def finish(store: TokenStore) -> None:
    store.refresh()
    meta = {
        "blocks": len(store.blocks),
        "documents": store.documents,
        "tokens": store.tokens,
        "skipped": {},
        "content": "unchecked",
    }
    (store.folder / "meta.json").write_text(json.dumps(meta))
    store.refresh()


def make_order(store: TokenStore, seq_len: int, **changes) -> Order:
    row_format = RowFormat(
        seq_len=seq_len,
        packing=changes.pop("packing", True),
        eos_id=EOS,
        bos_id=BOS if changes.pop("add_bos", False) else None,
    )
    streamed = changes.get("streamed", False)
    held = HeldOut(store, changes.pop("fraction", 0.0), streamed)
    return Order(store, row_format, seed=changes.pop("seed", 7), held=held, **changes)


def random_documents(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Documents of different lengths (from 1) in which no id occurs twice anywhere."""
    lengths = np.random.default_rng(seed).integers(1, longest + 1, count)
    ends = np.cumsum(lengths)
    return [list(range(10 + int(e - n), 10 + int(e))) for e, n in zip(ends, lengths)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    return number_tokenizer(tmp_path / "tokenizer")


def make_data(
    tmp_path: Path,
    texts: Sequence[str] | dict[str, Sequence[str]],
    *,
    seed: int = 0,
    weights: dict[str, float] | None = None,
    **config,
) -> TrainData:
    """Data of one source `data`, or of several by name, tokenised into numbers."""
    if not isinstance(texts, dict):
        texts = {"data": texts}
    sources = []
    for name, lines in texts.items():
        path = tmp_path / f"{name}.jsonl"
        if not path.exists():
            write_jsonl(path, lines)
        weight = weights[name] if weights else None
        sources.append(SourceConfig(path=str(path), name=name, weight=weight))
    config = DataConfig(**{"sources": sources, "cache_dir": str(tmp_path / "cache"), **config})
    return build_data(config, number_tokenizer(tmp_path / "tokenizer"), seed=seed, timeout_s=30)


def rows_of(batches: Iterable[Batch]) -> list[tuple[int, ...]]:
    """Valid tokens of each row that has any."""
    rows = []
    for batch in batches:
        for tokens, valid in zip(batch.tokens_BL.tolist(), batch.valid_BL.tolist()):
            row = tuple(t for t, v in zip(tokens, valid) if v)
            if row:
                rows.append(row)
    return rows


def take(data: TrainData, steps: int, **options) -> list[list[tuple[int, ...]]]:
    """Rows of each of the next steps, over all ranks in their order."""
    world = options.pop("world", 1)
    state = data.state_dict()
    per_rank = []
    for rank in range(world):
        data.load_state_dict(state)
        per_rank.append(
            [rows_of(step) for step in data.steps(rank=rank, world=world, steps=steps, **options)]
        )
    return [[row for ranks in per_rank for row in ranks[step]] for step in range(steps)]
