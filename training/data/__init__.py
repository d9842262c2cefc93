"""Text to batches: readers, tokenizer, token stores, the order of rows, validation.

What lives here turns a `DataConfig` into micro-batches whose every row is a pure function of
(seed, epoch, index). Nothing here knows the model, the optimizer or the loop.

    tokenizer = load_tokenizer(config.data, run_folder / "tokenizer")
    data = build_data(config.data, tokenizer, seed=config.run.seed)
    data.load_state_dict(state)
    for micro_batches in data.steps(global_batch_size=…, micro_batch_size=…, rank=…, world=…):
        ...  # a list of Batch, as many on every rank; data.state_dict() is now after this step
    for name, batches in data.validation(micro_batch_size=…, rank=…, world=…, most_rows=64).items():
        ...  # as many Batch on every rank
"""

from __future__ import annotations

from importlib import import_module

from training.data.config import DataConfig, DataError, SourceConfig

_LAZY = {
    "Batch": "batch",
    "Documents": "batch",
    "TextTokenizer": "tokenizer",
    "TokenStore": "store",
    "TrainData": "loader",
    "build_data": "loader",
    "load_tokenizer": "tokenizer",
}

__all__ = ["DataConfig", "DataError", "SourceConfig", *_LAZY]


def __getattr__(name: str):
    """Import the rest on first use: checking a config must not wait for torch."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"training.data.{_LAZY[name]}"), name)
