"""Which tokens row i of an epoch holds: a pure function of (seed, epoch, i), without state.

An epoch of a source is its documents in a permuted order, one after the other, each as
[begin] + ids + [end]. With packing, row i is tokens [i*L, (i+1)*L) of that stream; without, each
document is cut into chunks of L, and row i is the i-th chunk. A document cut by the end of a row
continues in the next one, and the label of its last token in a row is the first token of the next
row: every token but a document's first is a target exactly once.

The permutation is made in windows of whole blocks: blocks are permuted, grouped into windows of
some 2 M documents, and the documents permuted inside each window. A smaller store is permuted as a
whole. In the first epoch of a streamed source, each block is a window, and blocks come as read.

Shape letters: B blocks, D documents of a window.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from training.data.held_out import HeldOut
from training.data.randomness import BLOCKS, DOCUMENTS, permutation
from training.data.store import TokenStore

WINDOW_DOCUMENTS = 2_000_000


class Row(NamedTuple):
    """Up to L tokens; what is missing to L is padding."""

    tokens: np.ndarray
    labels: np.ndarray
    lengths: list[int]
    """of the documents' pieces in the row"""


@dataclass(frozen=True)
class RowFormat:
    """How documents become rows."""

    seq_len: int
    packing: bool
    eos_id: int
    bos_id: int | None = None
    """None: no begin token"""

    @property
    def extra(self) -> int:
        """Tokens that a document gets beside its own."""
        return 1 if self.bos_id is None else 2

    def units(self, lengths: np.ndarray) -> np.ndarray:
        """What documents of these many ids count in an epoch: tokens, or chunks without packing.

        Without packing, an end token that would be alone in a chunk is a target only: as an input
        it would make a row without targets.
        """
        full = lengths + self.extra
        return full if self.packing else -(-(full - 1) // self.seq_len)

    def rows(self, units: int) -> int:
        """Rows of an epoch of so many units."""
        return -(-units // self.seq_len) if self.packing else units


class Window(NamedTuple):
    """Documents that are permuted together, in their order."""

    block_D: np.ndarray
    start_D: np.ndarray
    length_D: np.ndarray
    bounds_D1: np.ndarray
    """where each document begins in the epoch's units; the last one ends at bounds_D1[-1]"""


class Order:
    """Rows of one selection (training or held-out documents) of a store.

    Args:
        seed: of the permutations; None keeps the order of the files.
        streamed: the store may still grow, and its first epoch takes blocks as they come.
        held: the documents to leave out of training, or to take when `validation`.
    """

    def __init__(
        self,
        store: TokenStore,
        format: RowFormat,
        *,
        seed: int | None,
        held: HeldOut,
        streamed: bool = False,
        validation: bool = False,
    ):
        self.store, self.format, self.seed = store, format, seed
        self.streamed, self.held, self.validation = streamed, held, validation
        self._units_B: list[int] = []
        self._ends_B: list[int] = []
        self._rows: int | None = None
        self._plans: OrderedDict[int, tuple[list[np.ndarray], np.ndarray]] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], Window] = OrderedDict()

    # --- how much there is ----------------------------------------------------------------------

    def _lengths(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(start, length) in ids of the selected documents of a block."""
        ends = self.store.block(block)[0]
        lengths = np.diff(ends, prepend=0)
        starts = ends - lengths
        held = self.held[block]
        if len(held) and self.held.tail is not None:
            first = lengths - self.held.tail
            return (starts + first, lengths - first) if self.validation else (starts, first)
        if self.validation:
            return starts[held], lengths[held]
        if len(held):
            starts, lengths = np.delete(starts, held), np.delete(lengths, held)
        return starts, lengths

    def _block_units(self, block: int) -> int:
        if self.validation and not len(self.held[block]):
            return 0
        if self.format.packing and not len(self.held[block]):
            info = self.store.blocks[block]  # known without reading the block
            return info.tokens + self.format.extra * info.documents
        return int(self.format.units(self._lengths(block)[1]).sum())

    def units(self) -> int:
        """Units of the blocks known so far."""
        while len(self._units_B) < len(self.store.blocks):
            units = self._block_units(len(self._units_B))
            self._units_B.append(units)
            self._ends_B.append(units + (self._ends_B[-1] if self._ends_B else 0))
        return self._ends_B[-1] if self._ends_B else 0

    def rows(self) -> int | None:
        """Rows of an epoch; None while the store still grows."""
        if self._rows is None and (self.store.complete or (self.validation and self.streamed)):
            self._rows = self.format.rows(self.units())
        return self._rows

    def has(self, epoch: int, row: int) -> bool:
        """Whether the blocks known so far contain this row (whole, if more blocks may come)."""
        total = self.rows()
        if total is not None:
            return row < total
        return epoch == 0 and row < (
            self.units() // self.format.seq_len if self.format.packing else self.units()
        )

    def block_at(self, epoch: int, row: int) -> int:
        """For a streamed first epoch: the block that holds the row's first token, or the number of
        known blocks if that comes later."""
        if epoch or not self.streamed:
            return 0
        self.units()
        unit = row * self.format.seq_len if self.format.packing else row
        return bisect.bisect_right(self._ends_B, unit)

    # --- the order ------------------------------------------------------------------------------

    def _plan(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Blocks of each window, and where each window begins in units (and the last one ends)."""
        self.units()
        in_order = self.streamed and epoch == 0
        plan = self._plans.get(epoch)
        if plan is not None and (not in_order or len(plan[0]) == len(self._units_B)):
            return plan
        count = len(self._units_B)
        blocks = np.arange(count)
        if self.seed is not None and not in_order:
            blocks = permutation(count, self.seed, epoch, BLOCKS)
        if in_order:
            windows = [blocks[i : i + 1] for i in range(count)]
        else:
            documents = np.array([self.store.blocks[b].documents for b in blocks], np.int64)
            # A window ends with the block that fills it.
            group = (np.cumsum(documents) - documents) // WINDOW_DOCUMENTS
            windows = np.split(blocks, np.flatnonzero(np.diff(group)) + 1) if count else []
        units = [sum(self._units_B[b] for b in window) for window in windows]
        plan = (windows, np.cumsum([0, *units], dtype=np.int64))
        self._plans[epoch] = plan
        if len(self._plans) > 2:
            self._plans.popitem(last=False)
        return plan

    def _window(self, epoch: int, index: int) -> Window:
        found = self._windows.get((epoch, index))
        if found is not None:
            self._windows.move_to_end((epoch, index))
            return found
        windows, starts = self._plan(epoch)
        blocks = np.sort(windows[index])
        parts = [self._lengths(int(block)) for block in blocks]
        block_D = np.repeat(blocks.astype(np.int32), [len(lengths) for _, lengths in parts])
        start_D = np.concatenate([start for start, _ in parts])
        length_D = np.concatenate([length for _, length in parts])
        if self.seed is not None:
            order = permutation(len(block_D), self.seed, epoch, DOCUMENTS, int(blocks[0]))
            block_D, start_D, length_D = block_D[order], start_D[order], length_D[order]
        bounds_D1 = np.cumsum([starts[index], *self.format.units(length_D)], dtype=np.int64)
        window = Window(block_D, start_D, length_D, bounds_D1)
        self._windows[epoch, index] = window
        if len(self._windows) > 3:  # a row may begin in one window and end in the next
            self._windows.popitem(last=False)
        return window

    # --- a row ----------------------------------------------------------------------------------

    def row(self, epoch: int, index: int) -> Row:
        """Row `index` of an epoch. IndexError past the end of what is known."""
        if not self.has(epoch, index):
            self.store.refresh()
            if not self.has(epoch, index):
                raise IndexError(f"row {index} of epoch {epoch} of {self.store.folder}")
        length = self.format.seq_len
        if not self.format.packing:
            window, document = self._find(epoch, index)
            first = (index - int(window.bounds_D1[document])) * length
            return self._fill([(window, document, first)], length)
        unit, room = index * length, length
        pieces: list[tuple[Window, int, int]] = []
        end = int(self._plan(epoch)[1][-1])
        while room > 0 and unit < end:
            window, document = self._find(epoch, unit)
            while room > 0 and document < len(window.length_D):
                first = unit - int(window.bounds_D1[document])
                size = int(window.length_D[document]) + self.format.extra - first
                pieces.append((window, document, first))
                unit += size
                room -= size
                document += 1
        return self._fill(pieces, length)

    def _find(self, epoch: int, unit: int) -> tuple[Window, int]:
        """The document that a unit belongs to."""
        starts = self._plan(epoch)[1]
        window = self._window(epoch, int(np.searchsorted(starts, unit, side="right")) - 1)
        return window, int(np.searchsorted(window.bounds_D1, unit, side="right")) - 1

    def _fill(self, pieces: list[tuple[Window, int, int]], room: int) -> Row:
        """A row of the documents' tokens from position `first` on, until `room` is full."""
        tokens = np.empty(room, np.int64)
        labels = np.full(room, -100, np.int64)
        lengths: list[int] = []
        used = 0
        for window, document, first in pieces:
            ids = self._document(window, document, first, first + room - used + 1)
            size = int(window.length_D[document]) + self.format.extra - first
            if not self.format.packing:
                size -= int(size == room + 1)  # the end token is a target only, see RowFormat.units
            size = min(size, room - used)
            tokens[used : used + size] = ids[:size]
            targets = ids[1 : size + 1]
            labels[used : used + len(targets)] = targets
            lengths.append(size)
            used += size
        return Row(tokens[:used], labels[:used], lengths)

    def _document(self, window: Window, document: int, first: int, last: int) -> np.ndarray:
        """Tokens [first, last) of [begin] + ids + [end], cut at the document's end."""
        form = self.format
        length = int(window.length_D[document])
        begin = form.extra - 1
        last = min(last, length + form.extra)
        start = int(window.start_D[document])
        ids = self.store.block(int(window.block_D[document]))[1]
        body = ids[start + max(first - begin, 0) : start + min(last - begin, length)]
        out = np.empty(last - first, np.int64)
        head = int(begin == 1 and first == 0)
        if head:
            out[0] = form.bos_id
        out[head : head + len(body)] = body
        if last == length + form.extra:
            out[-1] = form.eos_id
        return out
