"""Whether a store is made of the same things as a plan says: by content, not by names and times.

Files are first compared by path, size and time, which costs nothing. Where these differ, as after
the same archive was unpacked anew, the SHA-256 that the store keeps of each file decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

File = Sequence[Any]
"""path, size in bytes, time in nanoseconds"""

_NAMES = {
    "format": "the kind of store",
    "version": "the version of stores",
    "tokenizer": "the tokenizer",
    "dtype": "the form of token ids",
    "block_bytes": "the size of blocks",
}


def _files(plan: Mapping[str, Any]) -> list[File]:
    """The local files of a plan; none for a data set of the hub."""
    files = plan["reader"].get("files")
    return [file for file in files if not isinstance(file, str)] if isinstance(files, list) else []


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def file_hashes(plan: Mapping[str, Any]) -> list[str]:
    """SHA-256 of each local file of a plan, in their order."""
    with ThreadPoolExecutor(4) as pool:  # hashing lets other threads run
        return list(pool.map(_sha256, [file[0] for file in _files(plan)]))


def differences(have: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    """What a plan has otherwise than a store's, in words; empty where both give the same store.

    Args:
        have: plan.json of the store, with its files' hashes under `sha256`.
    """
    told = [
        f"{_NAMES[key]} is another ({_short(have.get(key))}, now {_short(plan[key])})"
        for key in plan.keys() - {"reader", "block_bytes", "dtype"}
        if have.get(key) != plan[key]
    ]
    old, new = have["reader"], plan["reader"]
    told += [
        f"{key} is {new.get(key)!r}, not {old.get(key)!r}"
        for key in sorted((old.keys() | new.keys()) - {"files", "formats"})
        if old.get(key) != new.get(key)
    ]
    told += _other_files(have, plan)
    if not told and old.get("formats") != new.get("formats"):
        told.append(f"files are read as {new.get('formats')}, not as {old.get('formats')}")
    if not told:  # otherwise they follow from what was told
        told += [
            f"{_NAMES[key]} is {plan[key]}, not {have.get(key)}"
            for key in ("block_bytes", "dtype")
            if have.get(key) != plan[key]
        ]
    return told


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) > 40 else text


def _other_files(have: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    old, new = _files(have), _files(plan)
    if old == new:
        same = have["reader"].get("files") == plan["reader"].get("files")
        return [] if same else ["other files of the data set are named"]
    if len(old) == len(new):
        sizes = [
            f"{path} has {size:,} bytes, {was[0]} had {was[1]:,}"
            for was, (path, size, _) in zip(old, new)
            if size != was[1]
        ]
        if sizes:
            return _few(sizes)
        if len(have.get("sha256", ())) != len(old):
            return [
                "files have other names or times, and this store keeps no hash of what they held"
            ]
        hashes = zip(new, have["sha256"], file_hashes(plan))
        return _few([f"{file[0]} holds other text" for file, was, now in hashes if was != now])
    names = {Path(file[0]).name for file in old}, {Path(file[0]).name for file in new}
    told = [f"it was made of {len(old)} files, these are {len(new)}"]
    for word, some in (("gone", names[0] - names[1]), ("new", names[1] - names[0])):
        told += [f"{word}: {', '.join(_few(sorted(some)))}"] if some else []
    return [", ".join(told)]


def _few(items: list[str], most: int = 3) -> list[str]:
    return items[:most] + ([f"and {len(items) - most} more"] if len(items) > most else [])
