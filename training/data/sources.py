"""What a source is: its name, its store if it is one, and otherwise its reader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from training.data.config import BUNDLED, BUNDLED_FOLDER, DataConfig, DataError, SourceConfig
from training.data.file_reader import FileReader
from training.data.files import find_files
from training.data.hub_reader import HubReader
from training.data.store import is_store

Reader = FileReader | HubReader


_ENDINGS = r"(\.(jsonl|ndjson|json|parquet|arrow|txt|text|md|gz|zst))+$"


def source_name(source: SourceConfig) -> str:
    """Name in logs and metrics."""
    if source.name is not None:
        return source.name
    if source.hub is not None:
        given = source.hub.rsplit("/", 1)[-1]
        return _plain(given if source.subset is None else f"{given}_{source.subset}")
    given = source.path if isinstance(source.path, str) else source.path[0]
    if given.startswith(BUNDLED):
        return given.removeprefix(BUNDLED)
    path = Path(given)
    name = path.name if "*" not in path.name else path.parent.name
    return _plain(re.sub(_ENDINGS, "", name)) or "data"


def _plain(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", name)


def name_sources(sources: Sequence[SourceConfig], key: str) -> list[str]:
    """Names of all sources, each once.

    Raises:
        DataError: two have the same name, or a name that cannot be part of a metric's.
    """
    names: list[str] = []
    for index, source in enumerate(sources):
        name = source_name(source)
        if name in names:
            raise DataError(
                f"{key}[{index}]: another source is named {name!r} too; give each its own name"
            )
        if not re.fullmatch(r"[\w.+-]+", name):
            raise DataError(
                f"{key}[{index}]: name={name!r} may hold letters, digits, _ - + and . only"
            )
        names.append(name)
    return names


def resolve(source: SourceConfig, key: str) -> SourceConfig:
    """The source with `bundled:` replaced by the file it means, and the folder of a data set that
    `datasets` saved (save_to_disk) by its files."""
    path = source.path
    if isinstance(path, str) and source.format == "auto":
        folder = Path(path).expanduser()
        if (folder / "state.json").is_file() and (files := sorted(folder.glob("*.arrow"))):
            saved = {"path": None, "hub": "arrow", "files": [str(file) for file in files]}
            return source.model_copy(update={**saved, "name": source_name(source)})
    if not isinstance(path, str) or not path.startswith(BUNDLED):
        return source
    folder = BUNDLED_FOLDER / path.removeprefix(BUNDLED)
    files = sorted(folder.glob("*.jsonl")) if folder.name else []
    if not files:
        known = ", ".join(sorted(BUNDLED + f.parent.name for f in BUNDLED_FOLDER.glob("*/*.jsonl")))
        raise DataError(f"{key}.path={path!r}: bundled are {known}")
    return source.model_copy(update={"path": str(files[0]), "name": source_name(source)})


def store_folder(source: SourceConfig, key: str) -> Path | None:
    """The token store that a source names, if it is one.

    Raises:
        DataError: format=store, and there is none.
    """
    path = source.path
    if isinstance(path, str) and source.format in ("auto", "store") and is_store(path):
        return Path(path)
    if source.format == "store":
        raise DataError(f"{key}.path={path!r} is no token store (no plan.json there)")
    return None


def make_reader(source: SourceConfig, key: str) -> Reader:
    """A reader of a source that is not a store."""
    source = resolve(source, key)
    if source.hub is not None:
        return HubReader(source, f"{key}.hub")
    files, notes = find_files(source, f"{key}.path")
    return FileReader(files, source, notes)


def store_tokenizers(config: DataConfig) -> list[Path]:
    """Tokenizer folders of the stores among the training sources."""
    found = (store_folder(source, f"data.sources[{i}]") for i, source in enumerate(config.sources))
    return [folder / "tokenizer" for folder in found if folder is not None]
