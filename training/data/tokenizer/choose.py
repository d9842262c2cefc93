"""Which tokenizer a run takes, once; it is kept in the run's folder from then on."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from training.data.config import BUNDLED, DataConfig, DataError
from training.data.lock import disk_errors, run_once, temporary_name
from training.data.sources import store_tokenizers
from training.data.tokenizer.read import read_tokenizer
from training.data.tokenizer.text_tokenizer import TextTokenizer
from training.data.tokenizer.train import sample_texts, train_tokenizer

logger = logging.getLogger(__name__)

DEFAULT_VOCAB_SIZE = 4096


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
        config: data section; `tokenizer`, or None to take that of the token stores among the
            sources or else to train one on the sources' text.
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
    given = config.tokenizer
    if given is not None and (given != tokenizer.hub_name or Path(given).exists()):
        wanted = _read(given, config)
        if wanted.hash != tokenizer.hash:
            raise DataError(
                f"data.tokenizer={given!r} is another tokenizer than the one kept in {folder}; "
                f"choose another {place}"
            )
    return tokenizer.with_bos(config.add_bos)


def _choose(config: DataConfig, init_from: Path | None, init_name: str | None) -> TextTokenizer:
    """The tokenizer of the initial weights, if there are any; else that of the data."""
    if init_name is None:
        return _of_data(config)[0].with_bos(config.add_bos)
    given = config.tokenizer is not None or bool(store_tokenizers(config))
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
    elif config.tokenizer_vocab_size is not None:
        raise DataError(
            f"data.tokenizer_vocab_size={config.tokenizer_vocab_size} trains a tokenizer, but "
            f"model.init_from={init_name!r} brings its own; leave it out"
        )
    return own.with_bos(config.add_bos)


def _of_data(config: DataConfig) -> tuple[TextTokenizer, str]:
    """The tokenizer that the data section asks for, and its name in messages."""
    if config.tokenizer is not None:
        other = [s for s in config.sources if not str(s.path).startswith(BUNDLED)]
        if config.tokenizer.startswith(BUNDLED) and other:
            logger.warning(
                f"data.tokenizer={config.tokenizer} was made for the bundled text: other text may "
                "need twice as many tokens; data.tokenizer=null trains one on data.sources"
            )
        return _read(config.tokenizer, config), f"data.tokenizer={config.tokenizer!r}"
    stores = store_tokenizers(config)
    if stores:
        first, *others = (_read(path, config) for path in stores)
        if any(other.hash != first.hash for other in others):
            raise DataError(
                "data.sources: the token stores were made with different tokenizers: "
                + ", ".join(str(path.parent) for path in stores)
            )
        return first, f"the token store {stores[0].parent}"
    size = config.tokenizer_vocab_size or DEFAULT_VOCAB_SIZE
    return train_tokenizer(sample_texts(config), size), "the tokenizer trained here"


def _read(path: str | Path, config: DataConfig) -> TextTokenizer:
    return read_tokenizer(path, eos_token=config.eos_token, bos_token=config.bos_token)
