"""A token store: documents as token ids on disk, memory-mapped, in blocks of documents.

    STORE/plan.json       what it is made of: tokenizer, reader, block size, dtype
    STORE/tokenizer/      the tokenizer itself
    STORE/blocks.jsonl    a line for each finished block: counts, CRC-32, where reading goes on
    STORE/blocks/N.bin    ends of the documents (int64), then their ids (uint16 or uint32)
    STORE/meta.json       written last: totals; a store without it is not complete

Ids are the text's alone. Begin and end tokens are added when rows are cut, so a store serves with
and without them. Blocks appear in order, so a store that still grows can already be read.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training.data.config import DataError

FORMAT = "tessera token store"
VERSION = 1
_CHECKED_BYTES = 4 << 30
"""Up to this size of a store each process verifies a block when it first reads it, at 6 GB/s from
memory. Rows of a larger one come from all blocks, which would all be read in the first steps."""
_OPEN_BLOCKS = 1024  # far below the kernel's limit of 65,530 maps a process


@dataclass(frozen=True)
class Block:
    """One line of blocks.jsonl."""

    documents: int
    tokens: int
    text_bytes: int
    crc: int
    skipped: dict[str, int]
    """kind of problem → how many lines or documents were left out"""
    examples: list[str]
    """file:line and detail of the first few of them"""
    next: dict[str, Any]


def block_path(folder: Path, index: int) -> Path:
    """File of one block."""
    return folder / "blocks" / f"{index:06d}.bin"


def is_store(path: str | Path) -> bool:
    """Whether a folder is a token store, complete or not."""
    return (Path(path) / "plan.json").is_file()


class TokenStore:
    """Read access to a store. `refresh` sees blocks that were finished since.

    Raises:
        DataError: no store there, or one of another version.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.plan = json.loads((self.folder / "plan.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise DataError(f"{folder} is no token store ({error})") from None
        if self.plan.get("format") != FORMAT or self.plan.get("version") != VERSION:
            raise DataError(
                f"{folder} is a token store of version {self.plan.get('version')}; this program "
                f"reads version {VERSION}: make it again"
            )
        self.dtype = np.dtype(self.plan["dtype"])
        self.blocks: list[Block] = []
        self.meta: dict[str, Any] | None = None
        self._offset = 0
        self._maps: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._sound: set[int] = set()  # blocks whose checksum agreed
        self.refresh()

    def refresh(self) -> None:
        """Read what was added to blocks.jsonl."""
        if self.meta is not None:
            return
        # meta.json first: once it is there, so are all blocks.
        meta = self.folder / "meta.json"
        found = json.loads(meta.read_text(encoding="utf-8")) if meta.is_file() else None
        blocks, self._offset = read_blocks(self.folder, self._offset, len(self.blocks))
        self.blocks += blocks
        if found is not None and found["blocks"] != len(self.blocks):
            raise DataError(
                f"{self.folder} is damaged: meta.json tells of {found['blocks']} blocks, "
                f"blocks.jsonl of {len(self.blocks)}"
            )
        self.meta = found

    @property
    def complete(self) -> bool:
        """Whether no more blocks will come."""
        return self.meta is not None

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer that made the ids."""
        return self.plan["tokenizer"]

    @property
    def documents(self) -> int:
        """Documents in the blocks known so far."""
        return sum(block.documents for block in self.blocks)

    @property
    def tokens(self) -> int:
        """Tokens in the blocks known so far, without begin and end tokens."""
        return sum(block.tokens for block in self.blocks)

    def skipped(self) -> dict[str, int]:
        """Kind of problem → how many lines or documents were left out of the blocks so far."""
        return count_skipped(self.blocks)

    def describe(self, name: str) -> str:
        """A line about the store for the log."""
        text = f"{name}: {self.documents:,} documents, {self.tokens:,} tokens"
        if not self.complete:
            text += " so far (streaming)"
        skipped = self.skipped()
        if skipped:
            text += "; left out " + ", ".join(f"{count} {kind}" for kind, count in skipped.items())
            examples = [example for block in self.blocks for example in block.examples][:3]
            if examples:
                text += " (" + "; ".join(examples) + ")"
        return text

    def block(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ends int64 [documents], ids [tokens]) of a block, memory-mapped.

        Raises:
            DataError: the block's file is missing, or is not what was written.
        """
        found = self._maps.get(index)
        if found is None:
            few = self.tokens * self.dtype.itemsize <= _CHECKED_BYTES
            found = self._maps[index] = self._map(index, few and index not in self._sound)
            if len(self._maps) > _OPEN_BLOCKS:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(index)
        return found

    def _map(self, index: int, verify: bool) -> tuple[np.ndarray, np.ndarray]:
        block, path = self.blocks[index], block_path(self.folder, index)
        head = 8 * block.documents
        size = head + self.dtype.itemsize * block.tokens
        try:
            actual = path.stat().st_size
            if actual != size:
                raise DataError(f"{path} is damaged: {actual} bytes instead of {size}")
            if size == 0:
                return np.zeros(0, np.int64), np.zeros(0, self.dtype)
            # A plain array over the map: slicing a numpy.memmap costs three times as much.
            raw = np.asarray(np.memmap(path, mode="r"))
        except OSError as error:
            raise DataError(f"{self.folder} is damaged: {error}") from None
        if verify and zlib.crc32(raw) != block.crc:  # wrong ids would train in silence
            raise DataError(
                f"{path} is damaged: the checksum differs; remove {self.folder}: the next start "
                "makes it again if it is in data.cache_dir, else scripts/prepare_data.py does"
            )
        if verify:
            self._sound.add(index)
        return raw[:head].view(np.int64), raw[head:].view(self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict()}  # maps are opened anew in each process

    def check(self) -> list[str]:
        """Compare every block with its counts and checksum; the faults found, one a line."""
        faults = [] if self.complete else ["meta.json is missing: the store is not complete"]
        for index in range(len(self.blocks)):
            try:
                ends, ids = self._map(index, verify=True)
            except DataError as error:
                faults.append(str(error))
                continue
            if len(ends) and (ends[-1] != len(ids) or (np.diff(ends, prepend=0) <= 0).any()):
                path = block_path(self.folder, index)
                faults.append(f"{path}: document ends do not rise to the number of tokens")
        if self.meta is not None:
            faults += [
                f"meta.json: {key}={self.meta[key]}, but the blocks hold {getattr(self, key)}"
                for key in ("documents", "tokens")
                if self.meta[key] != getattr(self, key)
            ]
            if self.meta["content"] != content_hash(self.blocks):
                faults.append("meta.json: the hash of the content differs")
        return faults


def read_blocks(folder: Path, offset: int = 0, have: int = 0) -> tuple[list[Block], int]:
    """Finished blocks listed after byte `offset`, of which `have` came before; and the new offset.

    A line without its newline is still being written (or was torn by a crash) and is left alone.
    """
    path = folder / "blocks.jsonl"
    if not path.is_file():
        return [], offset
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    data = data[: data.rfind(b"\n") + 1]
    blocks: list[Block] = []
    for line in data.splitlines():
        values = json.loads(line)
        if values.pop("block") == have + len(blocks):  # two writers may list a block twice
            blocks.append(Block(**values))
    return blocks, offset + len(data)


def count_skipped(blocks: list[Block]) -> dict[str, int]:
    """Kind of problem → how many lines or documents were left out of these blocks."""
    total: dict[str, int] = {}
    for block in blocks:
        for kind, count in block.skipped.items():
            total[kind] = total.get(kind, 0) + count
    return total


def content_hash(blocks: list[Block]) -> str:
    """Hash of the tokens and where documents end, whatever the files are called."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(f"{block.documents} {block.tokens} {block.crc}\n".encode())
    return digest.hexdigest()


def unigram_counts(store: TokenStore, vocab_size: int, max_tokens: int | None = None) -> np.ndarray:
    """int64 [vocab_size]: how often each id occurs in the first `max_tokens` of the store."""
    counts = np.zeros(vocab_size, np.int64)
    seen = 0
    for index, block in enumerate(store.blocks):
        if max_tokens is not None and seen >= max_tokens:
            break
        counts += np.bincount(store.block(index)[1], minlength=vocab_size)[:vocab_size]
        seen += block.tokens
    return counts


def entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the distribution with these counts."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
