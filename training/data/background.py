"""Tokenising in the background while training reads.

A child process writes the store block by block and holds its lock; every rank of every host that
shares the folder only looks at what is finished. The child is tied to its parent by a pipe, so it
ends however the parent ends. When it is gone and blocks are missing, the first rank to get the lock
starts another, which resumes after the last finished block.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.data.config import DataError
from training.data.lock import POLL_S, atomic_file, try_lock
from training.data.store import TokenStore

logger = logging.getLogger(__name__)

AHEAD_BLOCKS = 64
"""The writer waits when it is so far ahead of training: a corpus may be larger than the disk."""


class BackgroundWriter:
    """A store that is written in the background, seen from one rank.

    Args:
        folder: of the store; `plan.json` need not exist yet.
        job: what the child needs, as JSON: see `background_job`.
        save_tokenizer: writes the tokenizer where the child looks, FOLDER/tokenizer.
        timeout_s: without any new block while one is waited for.
    """

    def __init__(
        self,
        folder: Path,
        job: dict[str, Any],
        save_tokenizer: Callable[[], None],
        timeout_s: float,
    ):
        self.folder, self.timeout_s = folder, timeout_s
        self._save_tokenizer = save_tokenizer
        self._job = {**job, "folder": str(folder)}
        self._child: subprocess.Popen | None = None
        self._wanted = -1
        self._logged = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._old_error = self._read_error().get("id")
        self.store = self._open()

    def _open(self) -> TokenStore:
        self._wait(lambda: (self.folder / "plan.json").is_file(), lambda: None)
        return TokenStore(self.folder)

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()`, or when the store is complete.

        Raises:
            DataError: what stopped the writer; or nothing came for `timeout_s`.
        """

        def done() -> bool:
            if ready() or self.store.complete:
                return True
            self.store.refresh()
            if ready() or self.store.complete:
                return True
            # A run resumed far inside needs more blocks than the writer may be ahead of training.
            self.want(len(self.store.blocks))
            return False

        self._wait(done, lambda: len(self.store.blocks))
        for block in self.store.blocks[self._logged :]:
            for example in block.examples:
                logger.warning("left out: %s", example)
        self._logged = len(self.store.blocks)

    def want(self, block: int) -> None:
        """Tell the writer how far training has come."""
        if block > self._wanted and not self.store.complete:
            self._wanted = block
            with atomic_file(self.folder / "wanted") as temporary:
                temporary.write_text(str(block))

    def _wait(self, done: Callable[[], bool], progress: Callable[[], object]) -> None:
        seen, since = progress(), time.monotonic()
        while not done():
            self._start_if_none()
            time.sleep(POLL_S / 2)
            if (now := progress()) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                raise DataError(
                    f"no new block of {self.folder} for {self.timeout_s:.0f} s: the process that "
                    "tokenises it makes no progress"
                )

    def _start_if_none(self) -> None:
        if self._child is not None and self._child.poll() is None:
            return
        lock = try_lock(self.folder / ".lock")
        if lock is None:
            return
        try:
            if (self.folder / "meta.json").is_file():
                return
            error = self._read_error()
            if error and error["id"] != self._old_error:
                raise DataError(error["message"])
            if self._child is not None and self._child.returncode != 0:
                raise DataError(
                    f"the process that tokenises {self.folder} died (exit code "
                    f"{self._child.returncode})"
                )
            (self.folder / "error.json").unlink(missing_ok=True)
            self._save_tokenizer()
            root = str(Path(__file__).resolve().parents[2])
            path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
            self._child = subprocess.Popen(
                [sys.executable, "-m", "training.data.background_job"],
                stdin=subprocess.PIPE,
                pass_fds=[lock],  # the lock lives as long as the child
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # a signal to the run's group must not end it first
            )
            with contextlib.suppress(BrokenPipeError):  # its exit code is told by the next call
                self._child.stdin.write(json.dumps(self._job).encode() + b"\n")
                self._child.stdin.flush()
        finally:
            os.close(lock)

    def _read_error(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "error.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}

    def close(self) -> None:
        """End the child, if it is this rank's."""
        if self._child is not None:
            # Not by closing the pipe: reader processes forked since then hold copies of it.
            self._child.terminate()
            self._child.wait()
            self._child.stdin.close()
            self._child = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a BackgroundWriter stays in the process that made it")
