"""Which files a source names, and which of a folder's are left out and why."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from training.data.config import DataError, SourceConfig

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
PACKED = (".gz", ".zst")
"""Endings of compression, which may follow the others; parquet and arrow have their own."""
# What comes beside text and is none of it: pages about a data set, and what `datasets` notes.
_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|code_of_conduct)([._-].*)?\.(md|txt|text|rst)"
    r"|(notice|authors|citation|changelog|contributing|security)\.(md|txt|text|rst)"
    r"|(dataset_infos?|dataset_dict|state|metadata|croissant)\.json",
    re.IGNORECASE,
)
_NAMED = 10  # files of a kind that are told by name


def format_of(path: Path, given: str) -> str | None:
    """Format of a file by its ending (`.gz` or `.zst` may follow); None if unknown."""
    if given != "auto":
        return given
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def find_files(source: SourceConfig, key: str) -> tuple[list[Path], list[str]]:
    """Files of a source in a fixed order: as listed, and sorted inside a folder or glob. Of these,
    hidden files, pages about the data (README, LICENSE) and unknown endings are left out; a file
    that is named by itself is always taken. Each counts once.

    Returns:
        the files, and lines for the log about folders and globs (what is taken, what is left out
        and why) and about files that are listed twice.

    Raises:
        DataError: nothing there, or a file whose format its ending does not tell.
    """
    notes: list[str] = []
    paths = [source.path] if isinstance(source.path, str) else list(source.path or ())
    found: dict[Path, None] = {}
    twice: list[str] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_file():
            matches = [path]
        else:
            inside = _inside(path, given, key)
            matches, left_out = _sort_out(inside, path, source)
            saved = [str(p.parent) for p in inside if p.name == "state.json"]
            if len(saved) > 1:
                raise DataError(
                    f"{key}={given!r}: name one of the saved data sets: {', '.join(saved)}"
                )
            if not matches:
                raise DataError(
                    f"{key}={given!r}: none of the {len(inside)} files there is {_allowed(source)}"
                    f"{_because(left_out)}"
                )
            names = _few([_name(match, path) for match in matches])
            notes.append(f"{given}: {_files(len(matches))} taken: {names}{_because(left_out)}")
        for match in matches:
            if format_of(match, source.format) is None:
                raise DataError(
                    f"{key}: the format of {str(match)!r} is not known by its ending "
                    f"({_allowed(source)}); give it as format"
                )
            if match.resolve() in found:
                twice.append(str(match))
            found.setdefault(match.resolve())
    if twice:
        notes.append(f"listed more than once, and taken once: {_few(twice)}")
    return list(found), notes


def _inside(path: Path, given: str, key: str) -> list[Path]:
    """Files of a folder or of a glob, sorted."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
    matches = [p for p in matches if p.is_file()]
    if not matches:
        own = "; give your own text: data.sources='[{path: FILE_OR_FOLDER}]'"
        raise DataError(
            f"{key}={given!r}: no such file, and no file matches it as a glob"
            + own * key.startswith("data.sources")
        )
    return matches


def _sort_out(
    inside: Iterable[Path], base: Path, source: SourceConfig
) -> tuple[list[Path], dict[str, list[str]]]:
    """What is taken, and the names of the rest by reason."""
    taken: list[Path] = []
    left_out: dict[str, list[str]] = {}
    root = _fixed_part(base)  # where it lies is not what makes a file hidden
    for path in inside:
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            reason = "hidden"
        elif _ABOUT.fullmatch(path.name):
            reason = "about the data"
        elif format_of(path, source.format) is None:
            reason = "ending not known"
        else:
            taken.append(path)
            continue
        left_out.setdefault(reason, []).append(_name(path, base))
    return taken, left_out


def _fixed_part(pattern: Path) -> Path:
    """The folder above the first wildcard of a glob; a folder itself."""
    parts = list(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    return Path(*parts)


def _name(path: Path, base: Path) -> str:
    """A file's name below a folder, or as a glob found it."""
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)


def _files(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _because(left_out: dict[str, list[str]]) -> str:
    reasons = [f"{_few(names)} ({reason})" for reason, names in left_out.items()]
    return f"; left out: {'; '.join(reasons)}" if reasons else ""


def _allowed(source: SourceConfig) -> str:
    endings = " ".join(_SUFFIXES)
    return f"{endings}, each also with .gz or .zst" if source.format == "auto" else "a file"
