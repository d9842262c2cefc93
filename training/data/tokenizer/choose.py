"""Which tokenizer a run takes, once; it is kept in the run's folder from then on."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from training.data.config import BUNDLED, DataConfig, DataError, TokenizerFile, TrainedBpe
from training.data.lock import disk_errors, run_once, temporary_name
from training.data.sources import store_tokenizers
from training.data.tokenizer.read import read_tokenizer
from training.data.tokenizer.text_tokenizer import TextTokenizer
from training.data.tokenizer.train import sample_texts, train_tokenizer

logger = logging.getLogger(__name__)


def load_tokenizer(
    config: DataConfig,
    folder: str | Path | None = None,
    *,
    place: str = "run.name",
    timeout_s: float = 1800.0,
    init_from: Path | None = None,
    init_name: str | None = None,
) -> TextTokenizer:
    """The tokenizer of a run, kept in `folder` (the run's) for resuming, export and generation.

    Any number of processes may call this at once; one of them trains or writes.

    Args:
        config: data section.
        folder: where to keep it; what lies there already is used and must agree with `config`.
        place: the setting that chooses the folder, for the message.
        init_from: folder of the tokenizer that the initial weights were trained with: it is taken,
            and another one refused.
        init_name: what the weights are called in messages.

    Raises:
        DataError: no such tokenizer, or the folder holds another one.
    """
    if folder is None:
        return _choose(config, init_from, init_name)
    folder = Path(folder)

    def write() -> None:
        tokenizer = _choose(config, init_from, init_name)
        temporary = temporary_name(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with disk_errors(folder, "run.dir" if place == "run.name" else place):
                tokenizer.save(temporary)
                shutil.rmtree(folder, ignore_errors=True)  # without its tokenizer.json
                os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    run_once(
        folder.with_name(f".{folder.name}.lock"),
        (folder / "tokenizer.json").is_file,
        write,
        timeout_s=timeout_s,
        what=f"the tokenizer {folder}",
    )
    try:
        tokenizer = _read(folder, config)
    except DataError as error:
        raise DataError(f"{error}; if it is damaged, remove {folder}: it is made again") from None
    if isinstance(config.tokenizer, TokenizerFile):
        path = config.tokenizer.path
        known = path == tokenizer.hub_name and not Path(path).exists()
        if not known and _read(path, config).hash != tokenizer.hash:
            raise DataError(
                f"data.tokenizer={path!r} is another tokenizer than the one kept in {folder}; "
                f"choose another {place}"
            )
    return tokenizer.with_bos(config.add_bos)


def _choose(config: DataConfig, init_from: Path | None, init_name: str | None) -> TextTokenizer:
    """The tokenizer of the initial weights, if there are any; else that of the data."""
    if init_name is None:
        return _of_data(config)[0].with_bos(config.add_bos)
    given = isinstance(config.tokenizer, TokenizerFile) or bool(store_tokenizers(config))
    if init_from is None:
        if not given:
            raise DataError(
                f"model.init_from={init_name!r} has no tokenizer; give the one that its weights "
                "were trained with as data.tokenizer"
            )
        return _of_data(config)[0].with_bos(config.add_bos)
    own = _read(init_from, config)
    if own.add_bos != config.add_bos:
        logger.warning(
            f"model.init_from={init_name!r} was trained {'with' if own.add_bos else 'without'} "
            f"begin tokens, this run is with data.add_bos={str(config.add_bos).lower()}"
        )
    if given:
        other, name = _of_data(config)
        if other.hash != own.hash:
            raise DataError(
                f"{name} is another tokenizer than that of model.init_from={init_name!r}, whose "
                "weights know other ids; leave data.tokenizer out (null) to take the weights' own"
            )
    elif isinstance(config.tokenizer, TrainedBpe):
        raise DataError(
            f"data.tokenizer.kind=bpe trains a tokenizer, but model.init_from={init_name!r} brings "
            "its own; leave data.tokenizer out (null)"
        )
    return own.with_bos(config.add_bos)


def _of_data(config: DataConfig) -> tuple[TextTokenizer, str]:
    """The tokenizer that the data section asks for, and its name in messages."""
    given, stores = config.tokenizer, store_tokenizers(config)
    if isinstance(given, TokenizerFile):
        other = [s for s in config.sources if not str(s.path).startswith(BUNDLED)]
        if given.path.startswith(BUNDLED) and other:
            logger.warning(
                f"data.tokenizer={given.path} was made for the bundled text: other text may "
                "need twice as many tokens; data.tokenizer=null trains one on data.sources"
            )
        return _read(given.path, config), f"data.tokenizer={given.path!r}"
    if not stores:
        size = (given or TrainedBpe()).vocab_size
        return train_tokenizer(sample_texts(config), size), "the tokenizer trained here"
    if given is not None:
        raise DataError(
            f"data.tokenizer.kind=bpe trains on text, but {stores[0].parent} is a token store; "
            "data.tokenizer=null takes the store's own"
        )
    first, *others = (_read(path, config) for path in stores)
    if any(other.hash != first.hash for other in others):
        raise DataError(
            "data.sources: the token stores were made with different tokenizers: "
            + ", ".join(str(path.parent) for path in stores)
        )
    return first, f"the token store {stores[0].parent}"


def _read(path: str | Path, config: DataConfig) -> TextTokenizer:
    given = config.tokenizer
    if not isinstance(given, TokenizerFile):
        return read_tokenizer(path)
    return read_tokenizer(path, eos_token=given.eos_token, bos_token=given.bos_token)
