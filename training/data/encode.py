"""Texts to token ids, here or in worker processes.

A worker is this file run as a script: it imports only numpy and tokenizers (0.2 s instead of the
seconds that a fork-safe start of the whole package takes) and talks over its pipes, so it ends with
its parent however that dies, and its own death is an end of file for the parent.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules must not hide top-level ones

import contextlib
import os
import pickle
import struct
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Tokenizer

_BATCH_CHARACTERS = 1_000_000
BosEos = tuple["str | None", str]
"""Begin and end token of documents as text."""


def encode_texts(
    tokenizer: Tokenizer, texts: list[str], bos_eos: BosEos
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all texts one after the other (uint32) and the end offset of each (int64).

    Args:
        bos_eos: begin and end token as text. A document written with them loses them here, since
            each document gets exactly one of each later.
    """
    bos, eos = bos_eos
    ids: list[np.ndarray] = []
    lengths: list[int] = []
    batch: list[str] = []
    size = 0

    def flush() -> None:
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            ids.append(np.array(encoding.ids, dtype=np.uint32))
            lengths.append(len(ids[-1]))
        batch.clear()

    for text in texts:
        text = text.removesuffix(eos)
        batch.append(text.removeprefix(bos) if bos else text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            flush()
            size = 0
    if batch:
        flush()
    return np.concatenate(ids or [np.zeros(0, np.uint32)]), np.cumsum(lengths, dtype=np.int64)


def _send(pipe: BinaryIO, value: object) -> None:
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(struct.pack("<Q", len(payload)))
    pipe.write(payload)
    pipe.flush()


def _receive(pipe: BinaryIO) -> object:
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    size = struct.unpack("<Q", head)[0]
    payload = pipe.read(size)
    if len(payload) < size:
        raise EOFError
    return pickle.loads(payload)


class Encoder:
    """Encodes blocks of texts in `workers` processes; 0 encodes in this one, on a thread."""

    def __init__(self, tokenizer_file: Path, bos_eos: BosEos, workers: int):
        self._file = tokenizer_file
        self._bos_eos = bos_eos
        self._processes: list[subprocess.Popen] = []
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="tokenize")
        self._encode: Callable[[list[str]], tuple[np.ndarray, np.ndarray]]
        if workers:
            self._encode = self._encode_in_worker
        else:
            tokenizer = open_tokenizer(tokenizer_file)
            self._encode = lambda texts: encode_texts(tokenizer, texts, bos_eos)

    def submit(self, texts: list[str]) -> Future:
        """A future of (ids, ends) of the texts."""
        return self._threads.submit(self._encode, texts)

    def _encode_in_worker(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        process = getattr(self._local, "process", None)
        if process is None:
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
            process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which ends this one
            )
            self._processes.append(process)
        try:
            if getattr(self._local, "process", None) is None:
                self._local.process = process
                _send(process.stdin, (str(self._file), self._bos_eos))
            _send(process.stdin, texts)
            return _receive(process.stdout)
        except (EOFError, BrokenPipeError):
            raise RuntimeError(
                f"a tokenising process died (exit code {process.wait()}); if it was killed for "
                "memory, set data.tokenize_workers lower"
            ) from None

    def close(self) -> None:
        """End the workers; blocks in flight are dropped."""
        for process in self._processes:
            process.kill()  # unblocks its thread
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:  # a thread may have started one meanwhile
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # what was not yet written to it
                process.stdin.close()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_tokenizer(file: Path | str) -> Tokenizer:
    """The tokenizer in a file, without truncation, and reading special tokens' names as text."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _serve() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        file, bos_eos = _receive(source)
        tokenizer = open_tokenizer(file)
        while True:
            _send(sink, encode_texts(tokenizer, _receive(source), bos_eos))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    _serve()
