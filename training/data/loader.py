"""Batches: training steps that resume exactly, and fixed validation batches.

Global row j of a run is a pure function of (config, seed, j). A step takes the next
`global_batch_size` rows and each rank its share of them, so the stream of rows does not depend on
the number of ranks, on micro-batches or on reader processes, and the state is one small dict that
is the same on every rank.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from training.data.background import BackgroundWriter
from training.data.batch import NO_ROW, Batch, RowId, make_batch
from training.data.config import DataConfig, DataError
from training.data.mixture import Cursor
from training.data.order import Order, RowFormat
from training.data.store import content_hash, entropy, unigram_counts
from training.data.tokenizer import TextTokenizer


@dataclass
class Source:
    """One source as the loader sees it."""

    name: str
    order: Order
    background: BackgroundWriter | None = None
    """what writes the store while it is read"""
    notes: Sequence[str] = ()
    """lines for the log about which files of a folder it is made of"""

    @cached_property
    def content(self) -> str:
        """Hash of the text. A store that may still grow is known by its first block."""
        store = self.order.store
        return content_hash(store.blocks[:1] if self.order.streamed else store.blocks)

    def has(self, epoch: int, row: int) -> bool:
        """Whether the epoch has this row; waits while it is still being tokenised."""
        if self.background is not None and not self.order.store.complete:
            if not self.order.has(epoch, row):
                self.background.wait_for(lambda: self.order.has(epoch, row))
            self.background.want(self.order.block_at(epoch, row))
        return self.order.has(epoch, row)


class RowDataset(Dataset):
    """A micro-batch by the ids of its rows; what reader processes get a copy of."""

    def __init__(self, orders: Sequence[Order], row_format: RowFormat, pad_id: int):
        self.orders, self.format, self.pad_id = list(orders), row_format, pad_id

    def __getitem__(self, ids: tuple[RowId, ...]) -> Batch:
        rows = [None if s < 0 else self.orders[s].row(epoch, row) for s, epoch, row in ids]
        return make_batch(rows, ids, self.format.seq_len, self.pad_id)


@dataclass
class _Sampler:
    """Row ids of one rank's micro-batches, step by step. Runs ahead of training by the prefetch, so
    the state after each step waits in `states` until the step is handed out."""

    cursor: Cursor
    global_batch_size: int
    micro_batch_size: int
    rank: int
    world: int
    steps: int | None

    def __post_init__(self) -> None:
        self.states: deque[dict[str, Any]] = deque()

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, on every rank alike."""
        rows = -(-self.global_batch_size // self.world)
        return -(-rows // self.micro_batch_size)

    def __iter__(self) -> Iterator[tuple[RowId, ...]]:
        done = 0
        while self.steps is None or done < self.steps:
            rows = [self.cursor.next() for _ in range(self.global_batch_size)]
            self.states.append(self.cursor.state_dict())
            yield from self._share(rows)
            done += 1

    def _share(self, rows: list[RowId]) -> Iterator[tuple[RowId, ...]]:
        """This rank's part of a step: consecutive rows, one more on the first ranks where they do
        not divide, filled up to whole micro-batches."""
        each, more = divmod(len(rows), self.world)
        start = self.rank * each + min(self.rank, more)
        mine = rows[start : start + each + (self.rank < more)]
        size = self.micro_batch_size
        mine += [NO_ROW] * (self.micro_batches * size - len(mine))
        for first in range(0, len(mine), size):
            yield tuple(mine[first : first + size])


class TrainData:
    """Training rows and validation rows of a run. Make it with `build_data`."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: TextTokenizer,
        sources: list[Source],
        weights: list[int],
        validation: list[Source],
        row_format: RowFormat,
        seed: int,
    ):
        self.config, self.tokenizer, self.format, self.seed = config, tokenizer, row_format, seed
        self.sources, self.validation_sources = sources, validation
        self.weights = weights
        self._cursor = self._new_cursor()

    def _new_cursor(self) -> Cursor:
        return Cursor(self.weights, lambda source, epoch, row: self.sources[source].has(epoch, row))

    @property
    def source_names(self) -> list[str]:
        """Names that Batch.source_B points into, for training batches."""
        return [source.name for source in self.sources]

    @property
    def validation_names(self) -> list[str]:
        """Names of the validation sources."""
        return [source.name for source in self.validation_sources]

    @property
    def rows_per_epoch(self) -> int | None:
        """Rows in which every source is seen once (if none has a weight); None while streaming.

        With weights, rows after which the sources together have given as many rows as they hold.
        """
        rows = [source.order.rows() for source in self.sources]
        return None if None in rows else sum(rows)

    def describe(self) -> list[str]:
        """Lines about each source: which files of a folder it is made of and which not; documents,
        tokens, of several its share of the rows, and what was left out and why."""
        lines: list[str] = []
        for source, weight in zip(self.sources, self.weights):
            share = f"; {weight / sum(self.weights):.1%} of the rows" * (len(self.sources) > 1)
            lines += [*source.notes, source.order.store.describe(source.name) + share]
        return lines + [line for source in self.validation_sources for line in source.notes]

    # --- training -------------------------------------------------------------------------------

    def steps(
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world: int = 1,
        steps: int | None = None,
        pin_memory: bool = False,
    ) -> Iterator[list[Batch]]:
        """Micro-batches of this rank, one list for each step, from the current state on.

        All ranks get equally many micro-batches of [micro_batch_size, seq_len]; where the rows do
        not divide, some rows are empty (no valid token, no target). While the caller works on a
        step, `state_dict()` is already the state after it. Endless unless `steps` is given:
        sources start over when they end.

        Args:
            global_batch_size: rows of a step over all ranks; need not divide.
            pin_memory: put batches into pinned memory (CUDA).

        Raises:
            RuntimeError: a reader process died.
            DataError: a streamed source cannot go on, or a block is damaged or gone.
        """
        cursor = self._new_cursor()  # runs ahead
        cursor.load_state_dict(self._cursor.state_dict())
        sampler = _Sampler(cursor, global_batch_size, micro_batch_size, rank, world, steps)
        others = set(multiprocessing.active_children())
        count = sampler.micro_batches
        loader = iter(self._loader(self.sources, sampler, pin_memory, ahead=2 * count))
        readers = set(multiprocessing.active_children()) - others
        try:
            while batches := [batch for _, batch in zip(range(count), loader)]:
                self._cursor.load_state_dict(sampler.states.popleft())
                yield batches
        except DataError as error:  # a reader process's comes with its traceback before it
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None
        except (EOFError, OSError) as error:
            # Besides torch's own message of a killed worker, what a batch's shared memory answers
            # whose process is gone: a lost connection, or a file or socket that is not there.
            if _any_dies(readers):
                raise RuntimeError(
                    f"a process that reads batches died ({type(error).__name__}); if it was killed "
                    "for memory, set data.workers lower"
                ) from error
            if isinstance(error, FileNotFoundError):
                gone = str(error).rpartition("FileNotFoundError: ")[2].strip()
                raise DataError(f"a file of the data is gone while the run reads it: {gone}") from (
                    error
                )
            raise
        finally:
            del loader  # ends reader processes now, and not when the garbage collector comes by

    def _loader(
        self,
        sources: list[Source],
        ids: Iterable[tuple[RowId, ...]],
        pin_memory: bool,
        ahead: int = 0,
    ) -> DataLoader:
        """Micro-batches of these rows; `ahead` of them (0: none) are read in other processes."""
        workers = self.config.workers if ahead else 0
        return DataLoader(
            RowDataset([source.order for source in sources], self.format, self.tokenizer.pad_id),
            sampler=ids,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=max(2, -(-ahead // workers)) if workers else None,
            pin_memory=pin_memory,
            # Its own generator: making an iterator draws a number from torch's global one.
            generator=torch.Generator(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in its data: plain JSON, the same on every rank."""
        walk = self._cursor.state_dict()
        sources = {
            source.name: {
                "taken": walk["taken"][index],
                "epoch": walk["epoch"][index],
                "row": walk["row"][index],
                "content": source.content,
            }
            for index, source in enumerate(self.sources)
        }
        return {
            "version": 1,
            "rows": walk["rows"],
            "weights": walk["weights"],
            "sources": sources,
            "order": self._order_key(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, also one made with other ranks, batch sizes or `workers`.

        Changed weights are taken: shares count from here on.

        Raises:
            DataError: the rows would not be the same: other text, tokenizer, seed, seq_len …
        """
        remedy = (
            "rows would be repeated or lost. Set it back, or train on in a new run that begins "
            "with these weights: run.name=NEW model.init_from=FOLDER_OF_THIS_RUN"
        )
        if state.get("version") != 1:
            raise DataError(f"the data state has version {state.get('version')}, not 1")
        for key, value in self._order_key().items():
            if state["order"].get(key) != value:
                raise DataError(
                    f"data.{key}={value!r}, but the checkpoint was made with "
                    f"{state['order'].get(key)!r}; {remedy}"
                )
        if list(state["sources"]) != self.source_names:
            raise DataError(
                f"data.sources are {', '.join(self.source_names)}, but the checkpoint was made "
                f"with {', '.join(state['sources'])}; {remedy}"
            )
        for source in self.sources:
            if state["sources"][source.name]["content"] != source.content:
                raise DataError(
                    f"the text of data source {source.name!r} is not the one that the checkpoint "
                    f"was made with (grown or changed); {remedy}"
                )
        places = state["sources"].values()
        self._cursor.load_state_dict(
            {
                "rows": state["rows"],
                "weights": state["weights"],
                **{key: [place[key] for place in places] for key in ("taken", "epoch", "row")},
            }
        )

    def _order_key(self) -> dict[str, Any]:
        """All that rows depend on beside the text."""
        return {
            "seed": self.seed,
            "seq_len": self.format.seq_len,
            "packing": self.format.packing,
            "add_bos": self.format.bos_id is not None,
            "shuffle": self.config.shuffle,
            "stream": self.config.stream,
            "validation.fraction": getattr(self.config.validation, "fraction", 0.0),
            "tokenizer": self.tokenizer.hash,
        }

    # --- validation -----------------------------------------------------------------------------

    def validation(
        self,
        *,
        micro_batch_size: int,
        rank: int = 0,
        world: int = 1,
        max_rows: int | None = None,
        pin_memory: bool = False,
    ) -> dict[str, Iterator[Batch]]:
        """Validation micro-batches of this rank by source name; the same rows at every call.

        Micro-batch m holds the same rows whatever `world` is. Every rank gets equally many, some
        of them empty where they do not divide.

        Args:
            max_rows: of a source, over all ranks; None takes all.
        """
        return {
            source.name: self._validate(index, micro_batch_size, rank, world, max_rows, pin_memory)
            for index, source in enumerate(self.validation_sources)
        }

    def _validate(
        self, index: int, size: int, rank: int, world: int, max_rows: int | None, pin_memory: bool
    ) -> Iterator[Batch]:
        rows = self.validation_sources[index].order.rows()
        rows = rows if max_rows is None else min(rows, max_rows)
        each = -(-rows // (size * world))  # micro-batches of a rank
        ids = [(index, 0, row) for row in range(rows)] + [NO_ROW] * (each * size * world - rows)
        mine = ids[rank * each * size : (rank + 1) * each * size]
        batches = [tuple(mine[first : first + size]) for first in range(0, len(mine), size)]
        # Without reader processes: validation rows are few, and starting them is not free.
        yield from self._loader(self.validation_sources, batches, pin_memory)

    # --- the rest -------------------------------------------------------------------------------

    def unigram_entropy(self, max_tokens: int = 50_000_000) -> float:
        """Entropy of the training tokens' distribution, in nats a token.

        What a model reaches that knows how frequent each token is and nothing else: a loss below it
        shows that context is used. Of the mixture, from the first `max_tokens` of each source.
        """
        mixed = np.zeros(self.tokenizer.vocab_size)
        for source, weight in zip(self.sources, self.weights):
            store = source.order.store
            counts = unigram_counts(store, self.tokenizer.vocab_size, max_tokens)
            share = min(1.0, max_tokens / max(store.tokens, 1))
            counts[self.tokenizer.eos_id] += round(store.documents * share)
            mixed += weight / sum(self.weights) * counts / counts.sum()
        return entropy(mixed)

    def close(self) -> None:
        """End background tokenising that this rank started."""
        for source in (*self.sources, *self.validation_sources):
            if source.background is not None:
                source.background.close()


def _any_dies(processes: Collection[multiprocessing.Process], patience_s: float = 1.0) -> bool:
    """Whether one of the processes has ended, or does within `patience_s`: its sockets close a
    moment before the kernel tells that it has."""
    end = time.monotonic() + patience_s
    while processes and all(process.is_alive() for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return bool(processes)
