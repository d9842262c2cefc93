"""From a source to its token store: found in the cache, made now, or made in the background."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from training.data.background import AHEAD_BLOCKS, BackgroundWriter
from training.data.config import DataConfig, DataError, SourceConfig
from training.data.lock import run_once
from training.data.sources import make_reader, source_name, store_folder
from training.data.store import TokenStore
from training.data.tokenizer.text_tokenizer import TextTokenizer
from training.data.writer import make_plan, refuse_bad_lines, usable_cores, write_store


def cache_folder(config: DataConfig) -> Path:
    """Where tokenised sources are kept."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tessera" / "data"


class OpenedSource(NamedTuple):
    """A source's store, and what else is known of it."""

    store: TokenStore
    background: BackgroundWriter | None = None
    """what writes the store while it is read"""
    notes: Sequence[str] = ()
    """lines for the log about which files of a folder it is made of"""


def open_source(
    source: SourceConfig,
    key: str,
    config: DataConfig,
    tokenizer: TextTokenizer,
    *,
    stream: bool,
    timeout_s: float,
) -> OpenedSource:
    """The store of a source, tokenised now if it is not there yet.

    Any number of processes may call this at once; one writes, the others wait.

    Raises:
        DataError: nothing to read, a bad line under `stop`, a store of another tokenizer …
    """
    folder = store_folder(source, key)
    if folder is not None:
        return OpenedSource(_open_complete(folder, f"{key}.path={str(folder)!r}", tokenizer))
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
    background = None
    if stream:
        bos, eos = tokenizer.bos_eos
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
        background = BackgroundWriter(
            folder, job, lambda: tokenizer.save(folder / "tokenizer"), timeout_s
        )
        store = background.store
    else:
        progress = folder / "blocks.jsonl"
        run_once(
            folder / ".lock",
            (folder / "meta.json").is_file,
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
    return OpenedSource(store, background, reader.notes)


def _open_complete(folder: Path, given: str, tokenizer: TextTokenizer) -> TokenStore:
    """A store that a source names, which must be finished and of the run's tokenizer."""
    store = TokenStore(folder)
    if store.tokenizer_hash != tokenizer.hash:
        raise DataError(
            f"{given}: this store was made by another tokenizer (hash "
            f"{store.tokenizer_hash[:12]}…, its own is in {folder / 'tokenizer'}) than the "
            f"run's (hash {tokenizer.hash[:12]}…); data.tokenizer=null takes the store's"
        )
    if not store.complete:
        raise DataError(
            f"{given}: this store is not complete ({len(store.blocks)} "
            "blocks); run scripts/prepare_data.py again with the same arguments to finish it"
        )
    return store
