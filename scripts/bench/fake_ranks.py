"""One rank of many without the others, by PyTorch's fake process group.

Collectives return at once; an all-gather gives every rank's part the contents of the own one, a
reduction gives the own values or nothing in particular. So what is measured is what this rank does,
and the numbers that it computes mean nothing. Rows of tokens come back as they were sent
(`Mirror`), so sizes, expert ids and the loads of experts are those of a routing in which every rank
sends what this one does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel import World
from parallel.exchange.dispatch import exchange_counts
from parallel.exchange.transport import Pending, Split
from parallel.mesh import Mesh, build_mesh


class Mirror:
    """A transport that gives back the rows it is given, by one copy; whole multiples of them where
    the split says that more arrive, and the first of them where fewer do."""

    def start(self, rows: Tensor, split: Split) -> Pending:
        wanted, sent = sum(split.receive), rows.shape[0]
        if wanted > sent:
            assert wanted % sent == 0, (wanted, sent)
            return _Arrived(rows.repeat(wanted // sent, *[1] * (rows.dim() - 1)))
        return _Arrived(rows[:wanted].clone())


class _Arrived:
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def wait(self) -> Tensor:
        return self.rows


def mirrored(counts_NB2: np.ndarray, skew: int) -> np.ndarray:
    """Counts of a group, of which rank 0 knows its own: it gets from each rank `skew` times what it
    sends there.

    Args:
        counts_NB2: as `exchange_counts` gives it, every rank's those of rank 0.
    """
    ranks, bins = counts_NB2.shape[:2]
    counts_NB2 = counts_NB2.copy()
    if (bins - 1) % ranks:  # pairwise: a bin for each step round the ring
        counts_NB2[1:, :-1] *= skew
        return counts_NB2
    table_NCN2 = counts_NB2[:, :-1].reshape(ranks, -1, ranks, 2)
    own_CN2 = table_NCN2[0].copy()
    table_NCN2[1:, :, 0] = skew * own_CN2.transpose(1, 0, 2)[1:]
    counts_NB2[:, :-1] = table_NCN2.reshape(ranks, -1, 2)
    return counts_NB2


@contextmanager
def one_of(ranks: int, hosts: int, device: torch.device, skew: int = 1) -> Iterator[World]:
    """This process as rank 0 of so many, on the first of so many hosts.

    Args:
        skew: how many times more rows arrive than leave, where that is not fixed by the exchange.
    """
    if ranks == 1:
        yield World()
        return
    local = ranks // hosts
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    def mesh_of(*arguments) -> Mesh:
        mesh = build_mesh(*arguments)
        # Sizes that hosts tell each other would need a real group.
        mesh.groups["expert_hosts"] = mesh.groups["expert"]
        return mesh

    def counts(counts_B2: Tensor, group: dist.ProcessGroup) -> np.ndarray:
        return mirrored(exchange_counts(counts_B2, group), skew)

    group = dist.group.WORLD
    try:
        with (
            mock.patch.dict(os.environ, {name: str(number) for name, number in numbers.items()}),
            mock.patch("training.assemble.build_mesh", mesh_of),
            mock.patch("parallel.expert_parallel.make_transport", _transport),
            mock.patch("parallel.expert_parallel.exchange_counts", counts),
        ):
            yield World(0, ranks, 0, local, group, group, group)
    finally:
        dist.destroy_process_group()


def _transport(exchange, mesh: Mesh) -> Mirror | None:
    if getattr(exchange, "transport", "collective") == "pull":
        raise ValueError("parallel.exchange.transport=pull needs the other GPUs")
    return None if mesh.plan.expert == 1 else Mirror()
