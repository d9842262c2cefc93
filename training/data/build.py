"""From a `DataConfig` to `TrainData`: its sources opened, checked and put in order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from training.data.cache import open_source
from training.data.config import (
    DataConfig,
    DataError,
    HeldOutFraction,
    SourceConfig,
    ValidationSources,
)
from training.data.held_out import HeldOut
from training.data.loader import Source, TrainData
from training.data.mixture import integer_weights
from training.data.order import Order, RowFormat
from training.data.sources import name_sources
from training.data.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

_VALIDATION_SEED = 1


def build_data(
    config: DataConfig, tokenizer: TextTokenizer, *, seed: int, timeout_s: float = 1800.0
) -> TrainData:
    """Tokenise what is not yet tokenised and check that there is enough of it.

    Every rank calls this, in any order and without a process group: one of those that share a file
    system writes, the others wait.

    Args:
        config: data section.
        tokenizer: of `load_tokenizer`.
        seed: of the order of documents.
        timeout_s: how long to wait for another process that makes no progress.

    Raises:
        DataError: nothing to read, too little text, a bad line under `stop`, two sources of one
            name, a store of another tokenizer … in one line.
    """
    tokenizer = tokenizer.with_bos(config.add_bos)
    row_format = RowFormat(
        seq_len=config.seq_len,
        packing=config.packing,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
    )
    opened = {"config": config, "tokenizer": tokenizer, "timeout_s": timeout_s}
    fraction, texts = 0.0, []
    if isinstance(config.validation, HeldOutFraction):
        fraction = config.validation.fraction
    elif isinstance(config.validation, ValidationSources):
        texts = config.validation.sources
    sources: list[Source] = []
    validation: list[Source] = []
    for key, name, given in _named(config.sources, "data.sources"):
        store, background, notes = open_source(given, key, stream=config.stream, **opened)
        streamed = background is not None
        if streamed:
            background.wait_for(lambda store=store: store.documents > 0)
        place = f"{key} ({given.path or given.hub})"
        held = HeldOut(store, fraction, streamed, place)
        order = Order(
            store, row_format, seed=seed if config.shuffle else None, held=held, streamed=streamed
        )
        if streamed:
            background.wait_for(lambda order=order: order.has(0, 0))
        source = Source(name, order, background, notes)
        sources.append(source)
        _check_enough(source, key, str(given.path or given.hub))
        if fraction:
            part = Order(
                store,
                row_format,
                seed=_VALIDATION_SEED,
                held=held,
                streamed=streamed,
                validation=True,
            )
            validation.append(Source(name, part))
    if config.stream and all(source.background is None for source in sources):
        raise DataError("data.stream=true has no use: all sources are token stores already")
    for key, name, given in _named(texts, "data.validation.sources"):
        store, _, notes = open_source(given, key, stream=False, **opened)
        order = Order(store, row_format, seed=_VALIDATION_SEED, held=HeldOut(store, 0.0, False))
        source = Source(name, order, notes=notes)
        validation.append(source)
        _check_enough(source, key, str(given.path or given.hub))
    for source in (*sources, *validation):
        if source.order.store.skipped() and not source.order.validation:
            logger.warning("%s", source.order.store.describe(source.name))
    given = [source.weight for source in config.sources]
    weights = given if given[0] is not None else [source.order.rows() or 1 for source in sources]
    return TrainData(
        config, tokenizer, sources, integer_weights(weights), validation, row_format, seed
    )


def _named(sources: Sequence[SourceConfig], key: str) -> Iterator[tuple[str, str, SourceConfig]]:
    """(key, name, source) of each."""
    for index, name in enumerate(name_sources(sources, key)):
        yield f"{key}[{index}]", name, sources[index]


def _check_enough(source: Source, key: str, place: str) -> None:
    """Refuse a source that cannot fill a row (or, without packing, has no document at all)."""
    order, store = source.order, source.order.store
    need = order.format.seq_len if order.format.packing else 1
    if not store.complete or order.units() >= need:
        return
    unit = "tokens" if order.format.packing else "rows"
    skipped = sum(store.skipped().values())
    left_out = f" ({skipped} lines or documents left out)" if skipped else ""
    examples = [example for block in store.blocks for example in block.examples][:1]
    if not store.documents and not skipped:
        raise DataError(f"{key} ({source.name}): {place} holds no text")
    raise DataError(
        f"{key} ({source.name}: {place}) is too small: {order.units()} {unit} in "
        f"{store.documents} documents{left_out}, and data.seq_len={order.format.seq_len} needs at "
        f"least {need}" + "".join(f"; the first left out: {example}" for example in examples)
    )
