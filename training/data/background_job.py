"""The child process of `background`: reads its job from the first line of stdin and writes a store.

The end of stdin, which is the end of its parent, ends it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import uuid
from pathlib import Path

from training.data.config import DataError, SourceConfig
from training.data.lock import atomic_file
from training.data.sources import make_reader
from training.data.tokenizer.read import read_tokenizer
from training.data.writer import write_store


def _end_with_the_parent() -> None:
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held at exit
        pass
    os._exit(0)


def main() -> None:
    """Write the store; what stops it is left in error.json."""
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    folder = Path(job["folder"])

    def may_write(block: int) -> bool:
        try:
            wanted = int((folder / "wanted").read_text())
        except FileNotFoundError:
            wanted = 0
        return block <= wanted + job["ahead"]

    try:
        tokenizer = read_tokenizer(folder / "tokenizer", **job["tokens"])
        reader = make_reader(SourceConfig(**job["source"]), job["key"])
        write_store(
            folder,
            reader,
            tokenizer,
            on_bad_line=job["on_bad_line"],
            workers=job["workers"],
            block_bytes=job["block_bytes"],
            may_write=may_write,
        )
    except Exception as error:
        message = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        with atomic_file(folder / "error.json") as temporary:
            temporary.write_text(json.dumps({"id": uuid.uuid4().hex, "message": message}))
        sys.exit(2)


if __name__ == "__main__":
    main()
