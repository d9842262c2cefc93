"""Files that many processes share: one writer at a time, and never a half-written file.

The lock is flock(2): the kernel drops it when its holder dies, even by SIGKILL, so nobody has to
guess whether a lock is stale. Where a network file system does not carry flock between hosts, each
host writes the same bytes under its own temporary names and the last rename wins.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from training.data.config import DataError

POLL_S = 0.1
KEPT = "data.cache_dir; what is already written is kept and continued"


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock at `path`, or None while another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise
    return descriptor


def run_once(
    lock: Path,
    done: Callable[[], bool],
    work: Callable[[], None],
    *,
    timeout_s: float,
    progress: Callable[[], object] = lambda: None,
    what: str = "",
) -> None:
    """Return once `done()`: one process does `work()`, the others wait for it.

    A waiting process takes over when the worker dies. The time-out counts from the last change of
    `progress()`.

    Raises:
        DataError: nothing has moved for `timeout_s`.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    seen, since = progress(), time.monotonic()
    while not done():
        descriptor = try_lock(lock)
        if descriptor is not None:
            try:
                if not done():
                    work()
            finally:
                os.close(descriptor)
            continue
        time.sleep(POLL_S)
        if (now := progress()) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > timeout_s:
            raise DataError(
                f"waited {timeout_s:.0f} s for another process to finish {what or lock.parent}; "
                f"it holds {lock} but makes no progress"
            )


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process of any host uses."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


@contextlib.contextmanager
def atomic_file(path: Path, remedy: str = KEPT) -> Iterator[Path]:
    """A temporary name that becomes `path`, flushed to disk, when the block ends well.

    Raises:
        DataError: the disk is full; says `remedy`.
    """
    temporary = temporary_name(path)
    try:
        with disk_errors(path, remedy):
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # else a power cut may undo the renaming, after later writes
            finally:
                os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(path: Path, remedy: str = KEPT) -> Iterator[None]:
    """A full disk or quota as a DataError that says what to do; any other error as it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"no space left for {path} ({error.strerror}); free some or set {remedy}"
        ) from error
