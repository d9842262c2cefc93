"""Text to batches: readers, tokenizer, token stores, the order of rows, validation.

What lives here turns a `DataConfig` into micro-batches whose every row is a pure function of
(seed, epoch, index). Nothing here knows the model, the optimizer or the loop.

    tokenizer = load_tokenizer(config.data, run_folder / "tokenizer")
    data = build_data(config.data, tokenizer, seed=config.run.seed)
    data.load_state_dict(state)
    for micro_batches in data.steps(global_batch_size=…, micro_batch_size=…, rank=…, world=…):
        ...  # a list of Batch, as many on every rank; data.state_dict() is now after this step
    for name, batches in data.validation(micro_batch_size=…, rank=…, world=…, max_rows=64).items():
        ...  # as many Batch on every rank
"""

from training.data.batch import Batch
from training.data.build import build_data
from training.data.config import DataConfig, DataError, SourceConfig
from training.data.loader import TrainData
from training.data.store import TokenStore
from training.data.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "Batch",
    "DataConfig",
    "DataError",
    "SourceConfig",
    "TextTokenizer",
    "TokenStore",
    "TrainData",
    "build_data",
    "load_tokenizer",
]
