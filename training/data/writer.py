"""Tokenise a reader's documents into a store: in parallel, and resumable after any kind of end.

One thread reads, worker processes encode, blocks are written in order. A block's file is renamed
into place before its line is added to blocks.jsonl, so whatever was interrupted is done again from
the last line on. Contents do not depend on the number of workers or of interruptions.
"""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from training.data.config import DataError
from training.data.encode import Encoder
from training.data.identity import differences, file_hashes
from training.data.items import Item, Position
from training.data.lock import POLL_S, atomic_file, disk_errors
from training.data.progress import Progress
from training.data.sources import Reader
from training.data.store import (
    FORMAT,
    VERSION,
    Block,
    block_path,
    content_hash,
    count_skipped,
    read_blocks,
)
from training.data.tokenizer.text_tokenizer import TextTokenizer

EMPTY = "empty"
"""Kind of a document without a character: left out, and no bad line."""
_MAX_ITEMS = 200_000
_MAX_EXAMPLES = 5
_INLINE_BYTES = 3_000_000
"""Below this, starting processes takes longer than they save."""


def block_bytes_for(total_bytes: int | None) -> int:
    """Text of one block: some 256 blocks, within 2 and 64 MB; 4 MB where the size is unknown.

    Depends on the input alone, so that the same input always gives the same store.
    """
    if total_bytes is None:
        return 4_000_000
    return min(max(total_bytes // 256, 2_000_000), 64_000_000)


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def make_plan(
    reader: Reader, tokenizer: TextTokenizer, block_bytes: int | None = None
) -> dict[str, Any]:
    """What determines a store's content; its hash names the store in the cache."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": tokenizer.hash,
        "dtype": "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        "block_bytes": block_bytes or block_bytes_for(reader.total_bytes),
        "reader": reader.identity(),
    }


@dataclass
class _Pending:
    """A block that is read and being encoded."""

    texts: list[str] = field(default_factory=list)
    text_bytes: int = 0
    items: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    next: Position = field(default_factory=dict)
    future: Future | None = None

    def add(self, item: Item) -> None:
        self.items += 1
        if item.problem is not None:
            self._skip(item.problem, item.place)
        elif not item.text.strip():
            self._skip(EMPTY, item.place)
        else:
            self.texts.append(item.text)
            self.text_bytes += item.size

    def _skip(self, kind: str, place: str) -> None:
        self.skipped[kind] = self.skipped.get(kind, 0) + 1
        if place and len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(f"{kind}: {place}")


def write_store(
    folder: Path,
    reader: Reader,
    tokenizer: TextTokenizer,
    *,
    on_bad_line: str,
    workers: int = 0,
    label: str = "",
    block_bytes: int | None = None,
    may_write: Callable[[int], bool] | None = None,
) -> None:
    """Write the store in `folder`, or the rest of it. The caller holds its lock.

    Args:
        on_bad_line: stop or skip.
        workers: tokenising processes; 0 takes one a core.
        label: name on the progress bar; empty shows none.
        block_bytes: text of one block; None goes by the size of the input.
        may_write: asked before block N is read; the writer pauses while it says no. None: without
            pauses, and the files' hashes are kept first, which reads them once more.

    Raises:
        DataError: a bad line under `stop`, a full disk, or a folder with another store's plan.
    """
    plan = make_plan(reader, tokenizer, block_bytes)
    _start(folder, plan, tokenizer, hashed=may_write is None)
    done, offset = read_blocks(folder)
    refuse_bad_lines(folder, done, on_bad_line)
    workers = workers or usable_cores()
    if reader.total_bytes is not None and reader.total_bytes < _INLINE_BYTES:
        workers = 0
    bar = Progress(f"tokenising {label}" if label else "")
    counts = [sum(block.text_bytes for block in done), sum(block.tokens for block in done)]
    queue: deque[_Pending] = deque()
    encoder = Encoder(folder / "tokenizer" / "tokenizer.json", tokenizer.bos_eos, workers)
    # Outermost: closing the log flushes once more what a full disk did not take.
    with disk_errors(folder), encoder, open(folder / "blocks.jsonl", "ab") as log, bar:
        if log.tell() > offset:
            log.truncate(offset)  # a line torn by a crash

        def finish_first() -> None:
            pending = queue.popleft()
            block = _write_block(folder, len(done), pending, plan["dtype"])
            _append(log, len(done), block)
            done.append(block)
            counts[0] += block.text_bytes
            counts[1] += block.tokens
            bar.show(counts[0], counts[1], reader.fraction(block.next))

        start = done[-1].next if done else None
        for pending in _read_blocks(reader, start, plan["block_bytes"], on_bad_line):
            pending.future = encoder.submit(pending.texts)
            queue.append(pending)
            while queue and (queue[0].future.done() or len(queue) > 2 * workers + 1):
                finish_first()
            while may_write is not None and not may_write(len(done) + len(queue)):
                if queue:
                    finish_first()
                else:
                    time.sleep(POLL_S)
        while queue:
            finish_first()
    meta = {
        "blocks": len(done),
        "documents": sum(block.documents for block in done),
        "tokens": sum(block.tokens for block in done),
        "text_bytes": sum(block.text_bytes for block in done),
        "skipped": count_skipped(done),
        "content": content_hash(done),
    }
    _write_json(folder / "meta.json", meta)


def _start(folder: Path, plan: dict[str, Any], tokenizer: TextTokenizer, hashed: bool) -> None:
    path = folder / "plan.json"
    if path.is_file():
        have = json.loads(path.read_text(encoding="utf-8"))
        hashes = {"sha256": have["sha256"]} if "sha256" in have else {}
        if have != plan | hashes:
            told = differences(have, plan)
            if told:
                raise DataError(
                    f"{folder} holds a token store made of something else: {'; '.join(told)}. "
                    "Choose another folder, or remove it"
                )
            _write_json(path, plan | hashes)  # the same text under other names or times
        # What a killed writer of this host left half-written; the lock says that there is none now.
        for leftover in (folder / "blocks").glob(f".*.{socket.gethostname()}.*.tmp"):
            leftover.unlink(missing_ok=True)
        return
    with disk_errors(folder):
        (folder / "blocks").mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / "tokenizer")
    _write_json(path, plan | ({"sha256": file_hashes(plan)} if hashed else {}))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _read_blocks(
    reader: Reader, start: Position | None, block_bytes: int, on_bad_line: str
) -> Iterator[_Pending]:
    pending = _Pending()
    for item in reader.items(start):
        item.check(on_bad_line)
        pending.add(item)
        if pending.text_bytes >= block_bytes or pending.items >= _MAX_ITEMS:
            pending.next = reader.snapshot(item.next)
            yield pending
            pending = _Pending()
        last = item
    if pending.items:
        pending.next = reader.snapshot(last.next)
        yield pending


def _write_block(folder: Path, index: int, pending: _Pending, dtype: str) -> Block:
    ids, ends = pending.future.result()
    kept = np.diff(ends, prepend=0) > 0  # a text that was nothing but an end token
    if not kept.all():
        empty = int((~kept).sum())
        pending.skipped[EMPTY] = pending.skipped.get(EMPTY, 0) + empty
        ends = ends[kept]
    data = ends.astype("<i8").tobytes() + ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    with atomic_file(block_path(folder, index)) as temporary:
        temporary.write_bytes(data)
    return Block(
        documents=len(ends),
        tokens=len(ids),
        text_bytes=pending.text_bytes,
        crc=zlib.crc32(data),
        skipped=pending.skipped,
        examples=pending.examples,
        next=pending.next,
    )


def _append(log: Any, index: int, block: Block) -> None:
    log.write(json.dumps({"block": index, **asdict(block)}).encode() + b"\n")
    log.flush()
    os.fsync(log.fileno())


def refuse_bad_lines(folder: Path, blocks: list[Block], on_bad_line: str) -> None:
    """Stop at the bad lines that an earlier run with on_bad_line=skip left out of these blocks."""
    if on_bad_line == "skip":
        return
    for block in blocks:
        for example in block.examples:
            if example.startswith(f"{EMPTY}: "):
                continue
            raise DataError(
                f"{example} (left out of {folder}, which was made with on_bad_line=skip; "
                "data.on_bad_line=skip accepts that)"
            )
