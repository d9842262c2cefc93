"""Python source code that every machine with this project has: its installed packages.

About 240 MB where PyTorch and transformers are installed, enough to train a model of a billion
parameters for an hour. Nothing is downloaded or shipped: `scripts/prepare_data.py --corpus python`
gathers the files of this Python's packages into one jsonl file. Two machines have the same corpus
if they have the same versions installed.

Every document names its package and the license that the package states; files stay under it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# Of a file, in bytes. Below: empty `__init__.py` and one-liners; above: generated tables.
SMALLEST, LARGEST = 200, 1_000_000
LONGEST_LINE = 1000


def python_documents() -> Iterator[dict[str, str]]:
    """Documents `{"id", "package", "license", "text"}`, sorted by package and path.

    Left out: files that another package has already (whitespace aside), that are no UTF-8, that are
    smaller than `SMALLEST` or larger than `LARGEST` bytes, and generated ones, which a line of more
    than `LONGEST_LINE` characters gives away.
    """
    seen: set[bytes] = set()
    packages = {dist.metadata["Name"]: dist for dist in metadata.distributions()}
    for name in sorted(packages, key=str.lower):
        dist = packages[name]
        label = f"{name}-{dist.version}"
        for file in sorted(dist.files or (), key=str):
            if file.suffix != ".py":
                continue
            text = _source(Path(str(file.locate())))
            if text is None:
                continue
            key = hashlib.sha256(re.sub(r"\s+", " ", text).encode()).digest()
            if key not in seen:
                seen.add(key)
                yield {"id": str(file), "package": label, "license": license_of(dist), "text": text}


def license_of(dist: metadata.Distribution) -> str:
    """What a package says about its license, in one line; "unknown" where it says nothing."""
    fields = dist.metadata
    classifiers = [
        line.rsplit(" :: ", 1)[1]
        for line in fields.get_all("Classifier") or ()
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    stated = (fields.get("License-Expression") or "", *classifiers, fields.get("License") or "")
    lines = (line.strip().partition("\n")[0] for line in stated)
    return next((line for line in lines if line), "unknown")


def _source(path: Path) -> str | None:
    """Text of a file that is worth reading, else None."""
    try:
        if not SMALLEST <= path.stat().st_size <= LARGEST:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if max(map(len, text.splitlines()), default=0) > LONGEST_LINE:
        return None
    return text
