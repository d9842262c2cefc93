"""Rows arrive where they should, over every transport and for every shape of traffic."""

from __future__ import annotations

import tempfile
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel.exchange import pull
from parallel.exchange.all_to_all import issue, wait
from parallel.exchange.pull import Pull
from parallel.exchange.transport import Collective, RingTransport, Split
from tests.distributed.launch import RankError, run

N = 4
TRAFFIC = {
    "uneven": np.array([[3, 0, 5, 1], [2, 7, 0, 4], [0, 0, 1, 9], [6, 2, 3, 0]]),
    "nothing at all": np.zeros((N, N), dtype=np.int64),
    "one rank sends nothing": np.array([[0, 0, 0, 0], [1, 2, 3, 4], [4, 3, 2, 1], [2, 2, 2, 2]]),
    "one rank gets nothing": np.array([[1, 2, 3, 0], [4, 1, 2, 0], [3, 4, 1, 0], [2, 3, 4, 0]]),
    "one pair": np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 8, 0, 0]]),
    "ring": np.eye(N, dtype=np.int64)[[1, 2, 3, 0]] * 5,
    "to itself": np.diag([1, 0, 3, 2]),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int32]


def _rows(source: int, target: int, count: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    """Rows whose content names where they come from, where they go and their number."""
    row = torch.arange(count)[:, None]
    return torch.cat(
        [torch.full((count, 1), source), torch.full((count, 1), target), row, row * 0 + salt], 1
    ).to(dtype)


def _check(transport, table: np.ndarray, dtype: torch.dtype, salt: int) -> None:
    rank = dist.get_rank()
    split = Split(table.astype(np.int64), rank)
    sent = torch.cat([_rows(rank, to, int(table[rank, to]), dtype, salt) for to in range(N)])
    received = transport.start(sent, split).wait()
    want = torch.cat([_rows(of, rank, int(table[of, rank]), dtype, salt) for of in range(N)])
    assert received.dtype == dtype and torch.equal(received, want), (table, received, want)
    back = transport.start(received, split.reversed()).wait()
    assert torch.equal(back, sent), (table, back, sent)


def _transports_deliver():
    for transport in (Collective(dist.group.WORLD), RingTransport(dist.group.WORLD)):
        for salt, table in enumerate(TRAFFIC.values()):
            for dtype in DTYPES:
                _check(transport, table, dtype, salt)
    # several in flight, waited for in another order than started
    for transport in (Collective(dist.group.WORLD), RingTransport(dist.group.WORLD)):
        splits = [Split(t.astype(np.int64), dist.get_rank()) for t in TRAFFIC.values()]
        flights = [
            transport.start(torch.full((sum(s.send), 3), float(i)), s) for i, s in enumerate(splits)
        ]
        for i in reversed(range(len(flights))):
            received = flights[i].wait()
            assert received.shape == (sum(splits[i].receive), 3)
            assert (received == i).all(), (i, received)
    return True


def test_collective_and_pairwise_deliver_all_traffic():
    assert run(N, _transports_deliver) == [True] * N


# --- pull: the protocol, over files that all processes map ----------------------------------------


class FileMemory:
    """Peer memory for a CPU: a mapped file for each rank; `lag` seconds before a peer is read."""

    def __init__(self, folder: str, lag: float) -> None:
        self.folder, self.lag, self.version = folder, lag, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def reserve(self, nbytes: int) -> None:
        self.version += 1
        names = [f"{self.folder}/{self.version}_{rank}" for rank in range(self.world)]
        torch.from_file(names[self.rank], shared=True, size=nbytes, dtype=torch.uint8).fill_(255)
        dist.barrier()
        self.pieces = [
            torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8) for name in names
        ]

    stream = None

    def write(self, rows: torch.Tensor, at: int) -> None:
        data = rows.reshape(-1).view(torch.uint8)
        self.pieces[self.rank][at : at + data.numel()] = data

    def read(self, rank: int, at: int, nbytes: int, rows: torch.Tensor, into: int) -> None:
        if rank != self.rank and self.lag:
            time.sleep(self.lag)
        data = rows.view(-1).view(torch.uint8)
        data[into : into + nbytes] = self.pieces[rank][at : at + nbytes]

    def barrier(self) -> None:
        dist.barrier()


def _pull_delivers(folder: str, slots: int, grain: int):
    pull.SLOTS, pull._GRAIN = slots, grain
    # Ranks read at different speeds, so that a buffer overwritten too early is seen.
    transport = Pull(FileMemory(folder, lag=0.004 * dist.get_rank()))
    _check(transport, np.zeros((N, N), dtype=np.int64), torch.float32, 0)  # before any buffer
    for salt in range(3):
        for table in TRAFFIC.values():
            for dtype in (torch.float32, torch.bfloat16):
                _check(transport, table * (salt + 1), dtype, salt)
    return transport.memory.version


def test_pull_delivers_with_buffers_in_turn_and_growing():
    with tempfile.TemporaryDirectory() as folder:
        versions = run(N, _pull_delivers, folder, 2, 64)
    assert len(set(versions)) == 1 and versions[0] > 2, versions


def test_pull_with_a_single_buffer_would_be_wrong():
    """The reason for two: without, a fast rank overwrites what a slow one still reads."""
    with tempfile.TemporaryDirectory() as folder, pytest.raises(RankError, match="AssertionError"):
        run(N, _pull_delivers, folder, 1, 1 << 16)


# --- issue and wait -------------------------------------------------------------------------------


class Recorded:
    """A transport that writes down what is started and waited for."""

    def __init__(self, inner, log):
        self.inner, self.log = inner, log

    def start(self, rows, split):
        number = sum(1 for event in self.log if event[0] == "start")
        self.log.append(("start", number, tuple(rows.shape[1:])))
        return RecordedPending(self.inner.start(rows, split), number, self.log)


class RecordedPending:
    def __init__(self, inner, number, log):
        self.inner, self.number, self.log = inner, number, log

    def wait(self):
        self.log.append(("wait", self.number))
        return self.inner.wait()


class _Mark(torch.autograd.Function):
    """Identity that writes down when it runs."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        log.append(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.name + "'")
        return grad, None, None


def _backward_mirrors_forward():
    rank, log = dist.get_rank(), []
    transport = Recorded(Collective(dist.group.WORLD), log)
    splits = [Split(TRAFFIC[n].astype(np.int64), rank) for n in ("uneven", "one pair")]
    weight = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    weight.requires_grad_()
    x = [torch.randn(sum(s.send), 4, dtype=torch.float64, requires_grad=True) for s in splits]
    sent = [issue(x[0], transport, splits[0]), issue(x[1], transport, splits[1])]
    local = _Mark.apply(x[0], log, "local")
    back = []
    for i in range(2):
        rows = wait(*sent[i])
        rows = _Mark.apply(rows @ weight, log, f"expert{i}")
        back.append(issue(rows, transport, splits[i].reversed()))
    local = _Mark.apply(local, log, "shared")
    y = [wait(*flight) for flight in back]
    forward, log[:] = list(log), []
    (sum((part * part).sum() for part in y) + local.sum()).backward()
    # the same without any exchange: rows come back to where they were
    plain = [part.detach().requires_grad_() for part in x]
    same = weight.detach().requires_grad_()
    (sum(((p @ same) ** 2).sum() for p in plain) + plain[0].sum()).backward()
    for got, want in zip(x, plain):
        assert torch.allclose(got.grad, want.grad)
    for w in (weight, same):
        dist.all_reduce(w.grad)
    assert torch.allclose(weight.grad, same.grad)
    return forward, list(log)


def test_backward_mirrors_forward_with_the_same_exchanges_on_all_ranks():
    results = run(N, _backward_mirrors_forward)
    assert all(result == results[0] for result in results)
    forward, backward = results[0]
    rows = (4,)
    assert forward == [
        ("start", 0, rows), ("start", 1, rows), "local",
        ("wait", 0), "expert0", ("start", 2, rows),
        ("wait", 1), "expert1", ("start", 3, rows),
        "shared", ("wait", 2), ("wait", 3),
    ]  # fmt: skip
    assert backward == [
        ("start", 0, rows), ("start", 1, rows), "shared'",
        ("wait", 0), "expert1'", ("start", 2, rows),
        ("wait", 1), "expert0'", ("start", 3, rows),
        "local'", ("wait", 2), ("wait", 3),
    ]  # fmt: skip


def _lost_wait():
    split = Split(TRAFFIC["uneven"].astype(np.int64), dist.get_rank())
    x = torch.randn(sum(split.send), 2, requires_grad=True)
    ticket, exchange = issue(x, Collective(dist.group.WORLD), split)
    y = wait(ticket, exchange)
    try:
        wait(ticket, exchange)
    except AssertionError as error:
        twice = str(error)
    try:
        torch.autograd.grad((y * y).sum(), x, create_graph=True)
    except RuntimeError as error:
        return twice, "create_graph=True is not supported" in str(error)


def test_an_exchange_is_waited_for_once_and_has_no_second_derivative():
    for twice, refused in run(2, _small_world_lost_wait):
        assert twice == "an exchange is waited for once"
        assert refused


def _small_world_lost_wait():
    TRAFFIC["uneven"] = np.array([[1, 2], [3, 0]])
    return _lost_wait()
