"""From a `SourceConfig` to a token store: found in the cache, made now, or in the background."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from training.data.config import BUNDLED, DataConfig, DataError, SourceConfig
from training.data.files import find_files
from training.data.lock import run_once
from training.data.readers import FileReader, HubReader
from training.data.store import TokenStore, is_store
from training.data.stream import AHEAD_BLOCKS, Feeder
from training.data.tokenizer import BUNDLED_FOLDER, TRAIN_BYTES, TextTokenizer
from training.data.writer import make_plan, refuse_bad_lines, usable_cores, write_store

logger = logging.getLogger(__name__)


def cache_folder(config: DataConfig) -> Path:
    """Where tokenised sources are kept."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tessera" / "data"


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
    return (
        _plain(re.sub(r"(\.(jsonl|ndjson|json|parquet|txt|text|md|gz|zst))+$", "", name)) or "data"
    )


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


def make_reader(source: SourceConfig, key: str) -> FileReader | HubReader:
    """A reader of a source that is not a store."""
    source = resolve(source, key)
    if source.hub is not None:
        return HubReader(source, f"{key}.hub")
    told: list[str] = []
    return FileReader(find_files(source, f"{key}.path", told), source, told)


def store_tokenizers(config: DataConfig) -> list[Path]:
    """Tokenizer folders of the stores among the training sources."""
    found = (store_folder(source, f"data.sources[{i}]") for i, source in enumerate(config.sources))
    return [folder / "tokenizer" for folder in found if folder is not None]


def sample_texts(config: DataConfig) -> Iterator[str]:
    """Text to train a tokenizer on: all, or of much text the head of each file."""
    for index, source in enumerate(config.sources):
        key = f"data.sources[{index}]"
        reader = make_reader(source, key)
        budget = TRAIN_BYTES // len(config.sources)
        if isinstance(reader, HubReader) or reader.total_bytes <= budget:
            parts = [(reader, budget)]
        else:
            parts = [
                (FileReader([file], source), budget * file.stat().st_size // reader.total_bytes)
                for file in reader.files
            ]
        found = False
        for part, most in parts:
            for text in _head(part, most, config.on_bad_line):
                found = found or bool(text.strip())
                yield text
        if not found:
            raise DataError(f"{key}: {source.path or source.hub} holds no text")


def _head(reader: FileReader | HubReader, budget: int, on_bad_line: str) -> Iterator[str]:
    seen = 0
    for item in reader.items():
        if seen >= budget:
            return
        item.check(on_bad_line)
        if item.text is not None:  # other lines are counted when all is tokenised
            seen += item.size
            yield item.text


def open_source(
    source: SourceConfig,
    key: str,
    config: DataConfig,
    tokenizer: TextTokenizer,
    *,
    stream: bool,
    timeout_s: float,
) -> tuple[TokenStore, Feeder | None, Sequence[str]]:
    """The store of a source, tokenised now if it is not there yet.

    Any number of processes may call this at once; one writes, the others wait.

    Returns:
        the store, what feeds it when it is written in the background, and lines about which files
        of a folder it is made of.

    Raises:
        DataError: nothing to read, a bad line under `stop`, a store of another tokenizer …
    """
    folder = store_folder(source, key)
    if folder is not None:
        store = TokenStore(folder)
        if store.tokenizer_hash != tokenizer.hash:
            raise DataError(
                f"{key}.path={str(folder)!r}: this store was made by another tokenizer (hash "
                f"{store.tokenizer_hash[:12]}…, its own is in {folder / 'tokenizer'}) than the "
                f"run's (hash {tokenizer.hash[:12]}…); data.tokenizer=null takes the store's"
            )
        if not store.complete:
            raise DataError(
                f"{key}.path={str(folder)!r}: this store is not complete ({len(store.blocks)} "
                "blocks); run scripts/prepare_data.py again with the same arguments to finish it"
            )
        return store, None, ()
    reader = make_reader(source, key)
    plan = make_plan(reader, tokenizer)
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]
    name = source_name(source)
    folder = cache_folder(config) / f"{name}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"data.cache_dir: {folder} cannot be made ({error.strerror}); name another folder"
        ) from None
    meta = folder / "meta.json"
    if stream:
        bos, eos = tokenizer.edges
        job = {
            "source": source.model_dump(),
            "key": key,
            "tokens": {"eos_token": eos, "bos_token": bos},
            "on_bad_line": config.on_bad_line,
            # Half the cores: training needs some too.
            "workers": config.tokenize_workers or max(1, usable_cores() // 2),
            "block_bytes": plan["block_bytes"],
            "ahead": AHEAD_BLOCKS,
        }
        feeder = Feeder(folder, job, lambda: tokenizer.save(folder / "tokenizer"), timeout_s)
        refuse_bad_lines(folder, feeder.store.blocks, config.on_bad_line)
        return feeder.store, feeder, reader.told
    progress = folder / "blocks.jsonl"
    run_once(
        folder / ".lock",
        meta.is_file,
        lambda: write_store(
            folder,
            reader,
            tokenizer,
            on_bad_line=config.on_bad_line,
            workers=config.tokenize_workers,
            label=name,
        ),
        timeout_s=timeout_s,
        progress=lambda: progress.stat().st_size if progress.is_file() else 0,
        what=f"tokenising {name} into {folder}",
    )
    store = TokenStore(folder)
    refuse_bad_lines(folder, store.blocks, config.on_bad_line)
    return store, None, reader.told


def describe(name: str, store: TokenStore) -> str:
    """A line about a store for the log."""
    text = f"{name}: {store.documents:,} documents, {store.tokens:,} tokens"
    if not store.complete:
        text += " so far (streaming)"
    skipped = store.skipped()
    if skipped:
        text += "; left out " + ", ".join(f"{count} {kind}" for kind, count in skipped.items())
        examples = [example for block in store.blocks for example in block.examples][:3]
        if examples:
            text += " (" + "; ".join(examples) + ")"
    return text
