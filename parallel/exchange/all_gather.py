"""The exchange `all_gather`: every rank sends all its tokens to every rank of the group.

With K experts a token over few ranks nearly every token has an expert on every rank (8 experts over
2 ranks: 99.6 % of tokens, over 4: 90 %), so sending just those saves little. Sending all makes
every size known beforehand: nothing is read back from the device, and the host runs ahead of it as
in one process. It costs the rows that nobody wanted, and buffers of the experts for K rows of each
token, for own and foreign tokens alike, as if all K were here (`model.save=x` keeps none of them).

What computes while rows travel, in forward (backward is the mirror image):

    dispatch        the first half of the own tokens with own experts
    combine         the second half of them, and the shared expert

Only numbers of tokens are told in advance, by the hosts among themselves, unless all are known to
have equally many (`equal_tokens`): then no host waits for anything.

Shape letters: T tokens, K experts a token, D width, N ranks, R rows sent, Q rows received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe.routing import Routing
from parallel.exchange.all_to_all import (
    Copies,
    Float8,
    Plain,
    WithIds,
    collect,
    issue,
    spread,
    wait,
)
from parallel.exchange.transport import Split, Transport
from parallel.world import ParallelError


@dataclass(frozen=True)
class AllGatherExchange:
    """What an exchange of this kind must know besides the tokens; the same on all ranks but for
    `rank` and `first_expert`."""

    transport: Transport
    hosts: dist.ProcessGroup | None
    """gloo, the ranks of the expert group; None: all of them have equally many tokens."""
    rank: int
    ranks: int
    num_experts: int
    """Of this rank."""
    first_expert: int
    chunks: int
    float8: bool
    backend: str
    """Of routings and sums: auto, triton or reference."""

    def tokens(self, count: int) -> np.ndarray:
        """Numbers of tokens of all ranks, int64 [N]; the hosts wait for each other to tell."""
        if self.hosts is None:
            return np.full(self.ranks, count)
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(found, torch.tensor([count]), group=self.hosts)
        return torch.cat(found).numpy()

    def own(self, expert_TK: Tensor, gate_TK: Tensor) -> Routing:
        """Routing over this rank's experts."""
        local_TK = expert_TK - self.first_expert
        local_TK = torch.where((local_TK >= 0) & (local_TK < self.num_experts), local_TK, -1)
        return Routing.from_topk(local_TK, gate_TK, self.num_experts, self.backend)

    def copies(self, expert_TK: Tensor, backend: str) -> Copies:
        """Rows sent and their tokens. A token's rows are summed in the order in which its slots
        first name their ranks, as in every other schedule; rows that no slot names are left out."""
        T, K = expert_TK.shape
        dest_TK = expert_TK // self.num_experts
        same_TKK = dest_TK[:, :, None] == dest_TK[:, None, :]
        first_TK = ~same_TKK.tril(-1).any(2)
        wanted_TK = first_TK & (expert_TK >= 0) & (dest_TK != self.rank)
        source_R, start_T, length_T = _places(T, self.chunks, self.ranks, expert_TK.device)
        other_TK = dest_TK - (dest_TK > self.rank).to(dest_TK.dtype)
        row_TK = start_T[:, None] + other_TK * length_T[:, None]
        row_S = torch.where(wanted_TK, row_TK, -1).to(torch.int32).view(-1)
        return Copies(source_R if self.ranks > 2 else None, row_S, T, K, None, backend)

    def __call__(
        self,
        rows_TD: Tensor,
        routing: Routing,
        compute: Callable[[Tensor, Routing], Tensor],
        shared: Callable[[], Tensor] | None,
        backend: str,
    ) -> Tensor:
        """Outputs of the experts [T, D].

        Args:
            rows_TD: this rank's tokens.
            compute: this rank's experts on rows, for a routing over them.
            shared: the shared expert's output.
            backend: of the sums, resolved.

        Raises:
            ValueError: tokens with unequal numbers of experts.
        """
        K = routing.slots_per_token
        if K is None:
            raise ParallelError(
                "parallel.exchange.kind=all_gather needs equally many experts for every token; "
                "allowed for this routing: all_to_all, pairwise"
            )
        T, others = rows_TD.shape[0], self.ranks - 1
        tokens_N = self.tokens(T)
        expert_TK, gate_TK = routing.expert_S.view(T, K), routing.gates_S.view(T, K)
        copies = self.copies(expert_TK, backend)
        bounds = _bounds(T, self.chunks)
        sizes = [stop - start for start, stop in pairwise(bounds)]
        if others == 1:  # the rows as they are
            parts = rows_TD.split(sizes)
        else:
            parts = spread(rows_TD, copies).split([size * others for size in sizes])
        flights = []
        for c, (part, gates, ids) in enumerate(
            zip(parts, gate_TK.split(sizes), expert_TK.split(sizes))
        ):
            split, pairs = _splits(tuple(tokens_N.tolist()), c, self.chunks, K, self.rank)
            id_P = WithIds(ids.repeat(others, 1).view(-1))
            flights.append(
                (
                    split,
                    id_P,
                    issue(gates.repeat(others, 1).view(-1), self.transport, pairs, id_P),
                    issue(part, self.transport, split, Float8() if self.float8 else Plain()),
                )
            )
        halves = [T // 2, T - T // 2]
        own = [
            (rows, self.own(ids, gates))
            for rows, ids, gates in zip(
                rows_TD.split(halves), expert_TK.split(halves), gate_TK.split(halves)
            )
        ]
        outputs = [compute(*own[0])]
        returning = []
        for split, id_P, gates, rows in flights:
            gate_P, rows_QD = wait(*gates), wait(*rows)
            received = self.own(id_P.ids.view(-1, K), gate_P.view(-1, K))
            y_QD = compute(rows_QD, received)
            returning.append(issue(y_QD, self.transport, split.reversed()))
        outputs.append(compute(*own[1]))
        y_TD = torch.cat(outputs)
        if shared is not None:
            y_TD = y_TD + shared()
        back = [wait(*flight) for flight in returning]
        back_RD = back[0] if len(back) == 1 else torch.cat(back)
        return collect(back_RD, copies) + y_TD


@lru_cache(maxsize=64)
def _splits(
    tokens: tuple[int, ...], chunk: int, chunks: int, per_token: int, rank: int
) -> tuple[Split, Split]:
    """Of the rows of a chunk, and of their pairs; kept, as each layer and step has the same."""
    sizes_N = np.array([n * (chunk + 1) // chunks - n * chunk // chunks for n in tokens])
    rows_NN = np.repeat(sizes_N[:, None], len(tokens), axis=1)
    np.fill_diagonal(rows_NN, 0)
    return Split(rows_NN, rank), Split(rows_NN * per_token, rank)


def _bounds(tokens: int, chunks: int) -> list[int]:
    return [tokens * chunk // chunks for chunk in range(chunks + 1)]


@lru_cache(maxsize=32)
def _places(
    tokens: int, chunks: int, ranks: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows sent: the token of each [R]. Of each token: its row for the first other rank, and
    how many rows further on that for the next one is, int32 [T]."""
    bounds, others = _bounds(tokens, chunks), ranks - 1
    sources, starts, lengths = [], [], []
    for start, stop in pairwise(bounds):
        token = torch.arange(start, stop)
        sources.append(token.repeat(others))
        starts.append(token + start * (others - 1))
        lengths.append(torch.full_like(token, stop - start))
    return (
        torch.cat(sources).to(device),
        torch.cat(starts).to(device, torch.int32),
        torch.cat(lengths).to(device, torch.int32),
    )
