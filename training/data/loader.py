"""From a `DataConfig` to batches: training steps that resume exactly, and fixed validation batches.

Global row j of a run is a pure function of (config, seed, j). A step takes the next
`global_batch_size` rows and each rank its share of them, so the stream of rows does not depend on
the number of ranks, on micro-batches or on reader processes, and the state is one small dict that
is the same on every rank.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from training.data.batch import EMPTY, Batch, make_batch
from training.data.config import DataConfig, DataError
from training.data.mixture import Cursor, integer_weights
from training.data.order import Cut, HeldOut, Order
from training.data.sources import describe, name_sources, open_source, resolve
from training.data.store import content_hash, entropy, unigram_counts
from training.data.stream import Feeder
from training.data.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

Where = tuple[int, int, int]
_VALIDATION_SEED = 1


@dataclass
class Source:
    """One source as the loader sees it."""

    name: str
    order: Order
    feeder: Feeder | None = None
    told: Sequence[str] = ()
    """Lines about which files of a folder it is made of, and which are left out."""

    @cached_property
    def content(self) -> str:
        """Hash of the text. A store that may still grow is known by its first block."""
        store = self.order.store
        return content_hash(store.blocks[:1] if self.order.streamed else store.blocks)

    def has(self, epoch: int, row: int) -> bool:
        """Whether the epoch has this row; waits while it is still being tokenised."""
        if self.feeder is not None and not self.order.store.complete:
            if not self.order.has(epoch, row):
                self.feeder.wait_for(lambda: self.order.has(epoch, row))
            self.feeder.want(self.order.block_at(epoch, row))
        return self.order.has(epoch, row)


class _Rows(Dataset):
    """A micro-batch by the places of its rows; what reader processes get a copy of."""

    def __init__(self, orders: Sequence[Order], cut: Cut, pad_id: int):
        self.orders, self.cut, self.pad_id = list(orders), cut, pad_id

    def __getitem__(self, where: tuple[Where, ...]) -> Batch:
        rows = [None if s < 0 else self.orders[s].row(epoch, row) for s, epoch, row in where]
        return make_batch(rows, where, self.cut.seq_len, self.pad_id)


class _Places:
    """Places of one rank's micro-batches, step by step. Runs ahead of training by the prefetch, so
    the state after each step waits in `states` until the step is handed out."""

    def __init__(self, cursor: Cursor, share: _Share, steps: int | None):
        self.cursor, self.share, self.steps = cursor, share, steps
        self.states: deque[dict[str, Any]] = deque()

    def __iter__(self) -> Iterator[tuple[Where, ...]]:
        done = 0
        while self.steps is None or done < self.steps:
            rows = [self.cursor.next() for _ in range(self.share.global_batch_size)]
            self.states.append(self.cursor.state_dict())
            yield from self.share.micro_batches(rows)
            done += 1


@dataclass(frozen=True)
class _Share:
    """A rank's part of a step: consecutive rows (one more for the first ranks where they do not
    divide) in equally many micro-batches on every rank, the last ones filled up by empty rows."""

    global_batch_size: int
    micro_batch_size: int
    rank: int
    world: int

    @property
    def count(self) -> int:
        """Micro-batches of a step on each rank."""
        rows = -(-self.global_batch_size // self.world)
        return -(-rows // self.micro_batch_size)

    def micro_batches(self, rows: list[Where]) -> Iterator[tuple[Where, ...]]:
        each, more = divmod(self.global_batch_size, self.world)
        start = self.rank * each + min(self.rank, more)
        mine = rows[start : start + each + (self.rank < more)]
        size = self.micro_batch_size
        mine += [EMPTY] * (self.count * size - len(mine))
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
        cut: Cut,
        seed: int,
    ):
        self.config, self.tokenizer, self.cut, self.seed = config, tokenizer, cut, seed
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
            lines += [*source.told, describe(source.name, source.order.store) + share]
        return lines + [line for source in self.validation_sources for line in source.told]

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
        share = _Share(global_batch_size, micro_batch_size, rank, world)
        cursor = self._new_cursor()  # runs ahead
        cursor.load_state_dict(self._cursor.state_dict())
        places = _Places(cursor, share, steps)
        loader = iter(self._loader(self.sources, places, pin_memory, ahead=2 * share.count))
        try:
            while batches := [batch for _, batch in zip(range(share.count), loader)]:
                self._cursor.load_state_dict(places.states.popleft())
                yield batches
        except DataError as error:  # a reader process's comes with its traceback before it
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None
        except (EOFError, OSError) as error:
            # Besides torch's own message of a killed worker, what a batch's shared memory answers
            # whose process is gone: a lost connection, or a file or socket that is not there.
            if _a_reader_died(loader):
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
        places: Iterable[tuple[Where, ...]],
        pin_memory: bool,
        ahead: int = 0,
    ) -> DataLoader:
        """Micro-batches at `places`, read in processes of their own if `ahead` (their number)."""
        workers = self.config.workers if ahead else 0
        return DataLoader(
            _Rows([source.order for source in sources], self.cut, self.tokenizer.pad_id),
            sampler=places,
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
        """Go on from a state, also one made with other ranks, batch sizes or `workers`.

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
            "seq_len": self.cut.seq_len,
            "packing": self.cut.packing,
            "add_bos": self.cut.bos_id is not None,
            "shuffle": self.config.shuffle,
            "stream": self.config.stream,
            "validation_fraction": self.config.validation_fraction,
            "tokenizer": self.tokenizer.hash,
        }

    # --- validation -----------------------------------------------------------------------------

    def validation(
        self,
        *,
        micro_batch_size: int,
        rank: int = 0,
        world: int = 1,
        most_rows: int | None = None,
        pin_memory: bool = False,
    ) -> dict[str, Iterator[Batch]]:
        """Validation micro-batches of this rank by source name; the same rows at every call.

        Micro-batch m holds the same rows whatever `world` is. Every rank gets equally many, some
        of them empty where they do not divide.

        Args:
            most_rows: of a source, over all ranks; None takes all.
        """
        return {
            source.name: self._validate(index, micro_batch_size, rank, world, most_rows, pin_memory)
            for index, source in enumerate(self.validation_sources)
        }

    def _validate(
        self, index: int, size: int, rank: int, world: int, most: int | None, pin_memory: bool
    ) -> Iterator[Batch]:
        rows = self.validation_sources[index].order.rows()
        rows = rows if most is None else min(rows, most)
        count = -(-rows // size)
        each = -(-count // world)
        places = []
        for batch in range(rank * each, (rank + 1) * each):
            first = batch * size
            here = range(first, min(first + size, rows)) if batch < count else ()
            where = [(index, 0, row) for row in here]
            places.append(tuple(where + [EMPTY] * (size - len(where))))
        # Without reader processes: validation rows are few, and starting them is not free.
        yield from self._loader(self.validation_sources, places, pin_memory)

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
            if source.feeder is not None:
                source.feeder.close()


def _a_reader_died(loader: Iterator[Batch], patience_s: float = 1.0) -> bool:
    """Whether a reader process of `loader` has ended by itself. Its sockets close a moment before
    the kernel tells that it has."""
    readers = getattr(loader, "_workers", ())  # of torch's iterator; none with workers=0
    end = time.monotonic() + patience_s
    while readers and all(reader.is_alive() for reader in readers):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return bool(readers)


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
    tokenizer = tokenizer.begin_with(config.add_bos)
    cut = Cut(
        seq_len=config.seq_len,
        packing=config.packing,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
    )
    names = name_sources(config.sources, "data.sources")
    validation_names = name_sources(config.validation_sources, "data.validation_sources")
    sources: list[Source] = []
    validation: list[Source] = []
    for index, (given, name) in enumerate(zip(config.sources, names)):
        key = f"data.sources[{index}]"
        store, feeder, told = open_source(
            resolve(given, key), key, config, tokenizer, stream=config.stream, timeout_s=timeout_s
        )
        streamed = feeder is not None
        if streamed:
            feeder.wait_for(lambda store=store: store.documents > 0)
        place = f"{key} ({given.path or given.hub})"
        held = HeldOut(store, config.validation_fraction, streamed, place)
        order = Order(
            store, cut, seed=seed if config.shuffle else None, held=held, streamed=streamed
        )
        if streamed:
            feeder.wait_for(lambda order=order: order.has(0, 0))
        source = Source(name, order, feeder, told)
        sources.append(source)
        _check_enough(source, key, str(given.path or given.hub))
        if config.validation_fraction:
            part = Order(
                store, cut, seed=_VALIDATION_SEED, held=held, streamed=streamed, validation=True
            )
            validation.append(Source(name, part))
    if config.stream and all(source.feeder is None for source in sources):
        raise DataError("data.stream=true has no use: all sources are token stores already")
    for index, (given, name) in enumerate(zip(config.validation_sources, validation_names)):
        key = f"data.validation_sources[{index}]"
        store, _, told = open_source(
            resolve(given, key), key, config, tokenizer, stream=False, timeout_s=timeout_s
        )
        order = Order(store, cut, seed=_VALIDATION_SEED, held=HeldOut(store, 0.0, False))
        source = Source(name, order, told=told)
        validation.append(source)
        _check_enough(source, key, str(given.path or given.hub))
    for source in (*sources, *validation):
        if source.order.store.skipped() and not source.order.validation:
            logger.warning("%s", describe(source.name, source.order.store))
    given = [source.weight for source in config.sources]
    weights = given if given[0] is not None else [source.order.rows() or 1 for source in sources]
    return TrainData(config, tokenizer, sources, integer_weights(weights), validation, cut, seed)


def _check_enough(source: Source, key: str, place: str) -> None:
    """Refuse a source that cannot fill a row (or, without packing, has no document at all)."""
    order, store = source.order, source.order.store
    need = order.cut.seq_len if order.cut.packing else 1
    if not store.complete or order.units() >= need:
        return
    unit = "tokens" if order.cut.packing else "rows"
    skipped = sum(store.skipped().values())
    left_out = f" ({skipped} lines or documents left out)" if skipped else ""
    examples = [example for block in store.blocks for example in block.examples][:1]
    if not store.documents and not skipped:
        raise DataError(f"{key} ({source.name}): {place} holds no text")
    raise DataError(
        f"{key} ({source.name}: {place}) is too small: {order.units()} {unit} in "
        f"{store.documents} documents{left_out}, and data.seq_len={order.cut.seq_len} needs at "
        f"least {need}" + "".join(f"; the first left out: {example}" for example in examples)
    )
