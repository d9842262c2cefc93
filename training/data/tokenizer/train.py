"""A byte-level BPE trained on the text of a run's sources."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.data.config import DataConfig, DataError
from training.data.file_reader import FileReader
from training.data.sources import Reader, make_reader
from training.data.tokenizer.build import BOS, EOS, PAD, build_tokenizer
from training.data.tokenizer.text_tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

TRAIN_BYTES = 100_000_000
"""Text that a tokenizer is trained on at most; more changes the merges of rare words alone."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE (GPT-2's splitting) of `vocab_size` tokens, three of them special.

    Raises:
        DataError: the texts are empty.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, BOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    total = 0

    def limited() -> Iterable[str]:
        nonlocal total
        for text in texts:
            total += len(text)
            yield text
            if total >= TRAIN_BYTES:
                return

    backend.train_from_iterator(limited(), trainer)
    if total == 0:
        raise DataError("there is no text to train a tokenizer on (0 characters)")
    if (size := backend.get_vocab_size()) < vocab_size:
        logger.warning(
            f"the tokenizer has {size:,} of {vocab_size:,} tokens: the text has no more merges"
        )
    return build_tokenizer(backend, {}, "trained here", EOS, BOS)


def sample_texts(config: DataConfig) -> Iterator[str]:
    """Text to train a tokenizer on: all, or of much text the head of each file."""
    for index, source in enumerate(config.sources):
        key = f"data.sources[{index}]"
        reader = make_reader(source, key)
        budget = TRAIN_BYTES // len(config.sources)
        if reader.total_bytes is None or reader.total_bytes <= budget:
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


def _head(reader: Reader, budget: int, on_bad_line: str) -> Iterator[str]:
    seen = 0
    for item in reader.items():
        if seen >= budget:
            return
        item.check(on_bad_line)
        if item.text is not None:  # other lines are counted when all is tokenised
            seen += item.size
            yield item.text
