"""How rows of a buffer reach other ranks: the one seam between an exchange and its wires.

    Collective      one uneven all-to-all: NCCL between hosts, gloo on a CPU
    RingTransport   sends and receives in ring order, between ranks that have rows for each other
    Pull            (`pull.py`) copy-engine reads from peers' memory, for GPUs of one host

A transport has `start(rows, split)`, which returns at once, and the `Pending` that it gives has
`wait()`, after which the rows may be read on the current stream. All ranks of a group must start
the same exchanges in the same order, also those in which they have no rows.

Shape letters: N ranks of the group, R rows sent by this rank, Q rows received.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor


class ExchangeError(RuntimeError):
    """Rows did not reach another process or did not come from it.

    Carries what it takes to say so: the operation in words, and the group of processes in it.
    """

    def __init__(self, operation: str, group: dist.ProcessGroup | None, reason: str) -> None:
        super().__init__(reason)
        self.operation = operation
        self.group = group


@contextmanager
def exchanging(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Makes an `ExchangeError` of what a backend raises inside: gloo's errors are bare
    `RuntimeError`s that name neither the operation nor the processes."""
    try:
        yield
    except RuntimeError as error:
        operation = "all_to_all of tokens on their way to experts or back"
        raise ExchangeError(operation, group, str(error)) from error


@dataclass(frozen=True)
class Split:
    """Who sends how many rows to whom in one exchange, as every rank of the group knows it."""

    rows_NN: np.ndarray
    """int64 [source, destination]."""
    rank: int
    """This rank's number in the group."""

    @cached_property
    def send(self) -> list[int]:
        """Rows for each destination, in the order in which they lie in the send buffer."""
        return self.rows_NN[self.rank].tolist()

    @cached_property
    def receive(self) -> list[int]:
        """Rows from each source, in the order in which they will lie in the received buffer."""
        return self.rows_NN[:, self.rank].tolist()

    @cached_property
    def starts(self) -> list[int]:
        """First row for this rank in the send buffer of each source."""
        return self.rows_NN[:, : self.rank].sum(axis=1).tolist()

    @cached_property
    def received(self) -> int:
        """Rows received."""
        return sum(self.receive)

    @cached_property
    def reads(self) -> list[tuple[int, int, int, int]]:
        """(source, first row in its send buffer, rows, first row in the received buffer); from the
        own rank on round the ring, so that not all read from the same one at once."""
        found = []
        for distance in range(len(self.receive)):
            source = (self.rank + distance) % len(self.receive)
            if self.receive[source]:
                into = sum(self.receive[:source])
                found.append((source, self.starts[source], self.receive[source], into))
        return found

    @cached_property
    def most(self) -> int:
        """Rows in the largest send buffer of the group."""
        return int(self.rows_NN.sum(axis=1).max())

    def reversed(self) -> Split:
        """The way back: what was received is sent."""
        return self._reversed

    @cached_property
    def _reversed(self) -> Split:
        return Split(self.rows_NN.T, self.rank)


class Pending(Protocol):
    """Rows on their way."""

    def wait(self) -> Tensor:
        """The received rows [Q, …]; work queued on the current stream from now on may read them."""


class Transport(Protocol):
    """Moves rows between the ranks of one group."""

    def start(self, rows: Tensor, split: Split) -> Pending:
        """Begin an exchange and return without waiting.

        Args:
            rows: [R, …] contiguous, ordered by destination; must not be written before `wait`.
            split: sizes; R = sum(split.send).
        """


@dataclass
class _Flying:
    """An exchange by torch.distributed works; keeps the send buffer alive until it has left.

    A buffer freed while an asynchronous exchange reads it is corrupted data
    (github.com/pytorch/pytorch/issues/188655).
    """

    works: list[dist.Work]
    received: Tensor
    sent: Tensor | None
    group: dist.ProcessGroup

    def wait(self) -> Tensor:
        with exchanging(self.group):
            for work in self.works:
                work.wait()
        self.works = []
        self.sent = None
        return self.received


@dataclass(frozen=True)
class Collective:
    """One `all_to_all_single` per exchange."""

    group: dist.ProcessGroup

    def start(self, rows: Tensor, split: Split) -> Pending:
        _check(rows, split)
        received = rows.new_empty(sum(split.receive), *rows.shape[1:])
        with exchanging(self.group):
            work = dist.all_to_all_single(
                received, rows, split.receive, split.send, group=self.group, async_op=True
            )
        return _Flying([work], received, rows, self.group)


@dataclass(frozen=True)
class RingTransport:
    """Ring order: to the next rank and from the previous, then the ones after them.

    Empty sides are left out: NCCL's point-to-point calls have hung on them
    (github.com/NVIDIA/nccl/issues/1593). The group must have run a collective before.
    """

    group: dist.ProcessGroup

    def start(self, rows: Tensor, split: Split) -> Pending:
        _check(rows, split)
        received = rows.new_empty(sum(split.receive), *rows.shape[1:])
        to, of = rows.split(split.send), received.split(split.receive)
        size = len(split.send)
        operations = []
        for distance in range(size):
            target, source = (split.rank + distance) % size, (split.rank - distance) % size
            if distance == 0:
                of[source].copy_(to[target])
                continue
            if split.send[target]:
                operations.append(
                    dist.P2POp(dist.isend, to[target], group=self.group, group_peer=target)
                )
            if split.receive[source]:
                operations.append(
                    dist.P2POp(dist.irecv, of[source], group=self.group, group_peer=source)
                )
        with exchanging(self.group):
            works = dist.batch_isend_irecv(operations) if operations else []
        return _Flying(works, received, rows, self.group)


def _check(rows: Tensor, split: Split) -> None:
    assert rows.is_contiguous() and rows.shape[0] == sum(split.send), (
        f"rows {tuple(rows.shape)} with strides {rows.stride()} for a split of {split.send}"
    )
