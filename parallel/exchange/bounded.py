"""Dispatch with room for as many rows as there can be, so that no size is read back to the host.

Every rank sends every other one equally large blocks of rows and of pairs, filled from the front;
where each pair and each row goes is computed on the device. A block has room for every token of its
chunk, or with `router.capacity` for those that the destination's experts can take, which over many
ranks is far less. So nothing can overflow, and what is summed, and in which order, is that of exact
sizes. All ranks of the group must have equally many tokens.

Shape letters: T tokens, S slots (token order), P pairs sorted by bin, B bins, Q pairs in blocks,
R rows in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from moe.routing import Routing
from parallel.exchange.all_to_all import Copies
from parallel.exchange.dispatch import Dispatch, DispatchPlan, SortedPairs, Step
from parallel.exchange.transport import Split
from parallel.world import ParallelError


@dataclass(frozen=True)
class Bounds:
    """Sizes that no routing exceeds."""

    rows: int
    """Tokens of a chunk for one rank."""
    pairs: int
    """Their pairs with its experts."""
    local: int
    """Pairs of all tokens with the own experts."""


def bounds_of(routing: Routing, plan: DispatchPlan) -> Bounds:
    """The most that a routing of this shape and limit can send.

    Raises:
        ValueError: tokens with unequal numbers of experts.
    """
    if routing.slots_per_token is None:
        raise ParallelError(
            "parallel.exchange.sizes=bounded needs equally many experts for every token; allowed "
            "for this routing: exact"
        )
    each = min(routing.slots_per_token, plan.experts_per_rank)
    tokens = routing.num_tokens
    chunk = -(-tokens // plan.chunks)
    held = tokens * each
    if routing.most_per_expert is not None:
        held = min(held, plan.experts_per_rank * routing.most_per_expert)
    return Bounds(min(chunk, held), min(chunk * each, held), held)


def plan_bounded(
    pairs: SortedPairs, plan: DispatchPlan, rank: int, bounds: Bounds, backend: str
) -> Dispatch:
    """As `plan_dispatch`, without the counts of other ranks.

    Args:
        backend: of the sums, resolved.
    """
    routing, others = pairs.routing, plan.ranks - 1
    device = routing.expert_S.device
    blocks = plan.num_steps * others
    sent, rows = blocks * bounds.pairs, blocks * bounds.rows
    pair_start_B, row_start_B = _starts(plan, rank, bounds, device)

    ends_B2 = pairs.counts_B2.cumsum(0, dtype=torch.int32)
    before_B2 = ends_B2 - pairs.counts_B2
    place_P = torch.arange(pairs.slot_P.shape[0], dtype=torch.int32, device=device)
    used_P = place_P < ends_B2[-1, 1]
    bin_P = torch.searchsorted(ends_B2[:, 1].contiguous(), place_P, right=True)
    bin_P = bin_P.clamp(max=plan.bins - 1)
    to_P = pair_start_B[bin_P] + place_P - before_B2[bin_P, 1]
    to_P = torch.where(used_P, to_P, sent + bounds.local)
    row_P = row_start_B[bin_P] + pairs.copy_P[: place_P.shape[0]] - before_B2[bin_P, 0]
    travels_P = used_P & (bin_P < plan.bins - 1)

    def placed(values: Tensor, places: Tensor, size: int, empty: int) -> Tensor:
        """Values at their places among so many; place `size` is thrown away."""
        found = values.new_full((size + 1,), empty, dtype=torch.int32)
        return found.scatter_(0, places.long(), values.to(torch.int32))[:size]

    expert_P = routing.expert_S[pairs.slot_P.long()] % plan.experts_per_rank
    id_P = expert_P * 2 + pairs.first_P.to(torch.int32)
    size = sent + bounds.local
    leaves_P = travels_P & pairs.first_P
    row_S = pairs.row_S.long()
    at_S = row_S.clamp(min=0)
    copy_S = torch.where((row_S >= 0) & leaves_P[at_S], row_P[at_S], -1).to(torch.int32)
    return Dispatch(
        steps=[_step(plan.ranks, rank, bounds)] * plan.num_steps,
        copies=Copies(
            placed(pairs.token_P, torch.where(leaves_P, row_P, rows), rows, 0),
            copy_S, routing.num_tokens, routing.slots_per_token, routing.slot_offsets_T1, backend,
        ),
        id_P=placed(id_P, to_P, size, EMPTY),
        token_P=placed(pairs.token_P, to_P, size, routing.num_tokens),
        slot_P=placed(pairs.slot_P, to_P, size, 0),
        row_S=torch.where(row_S >= 0, to_P[at_S], -1).to(torch.int32),
        local_pairs=bounds.local,
    )  # fmt: skip


EMPTY = -2
"""In place of `Dispatch.id_P`: no expert, and not the first pair of a row."""


def bounded_routing(
    id_P: Tensor, gate_P: Tensor, bounds: Bounds, num_experts: int, backend: str
) -> Routing:
    """As `received_routing`: of the blocks that a step has brought, one from each other rank."""
    first_NP = (id_P % 2).view(-1, bounds.pairs) if bounds.pairs else id_P.view(0, 1)
    row_NP = (first_NP.cumsum(1, dtype=torch.int32) - 1).clamp(min=0)
    block_N1 = torch.arange(row_NP.shape[0], dtype=torch.int32, device=id_P.device)[:, None]
    row_P = (block_N1 * bounds.rows + row_NP).view(-1)
    rows = row_NP.shape[0] * bounds.rows
    return Routing.from_pairs(row_P, id_P // 2, gate_P, rows, num_experts, backend)


@lru_cache(maxsize=64)
def _step(ranks: int, rank: int, bounds: Bounds) -> Step:
    """Equal blocks for all other ranks."""
    one = np.ones((ranks, ranks), dtype=np.int64)
    np.fill_diagonal(one, 0)
    return Step(Split(one * bounds.rows, rank), Split(one * bounds.pairs, rank))


@lru_cache(maxsize=64)
def _starts(
    plan: DispatchPlan, rank: int, bounds: Bounds, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First pair and first row of each bin's block, int32 [B]; the last bin's pairs stay here."""
    blocks = []
    for step in range(plan.num_steps):
        blocks += [
            step * (plan.ranks - 1) + target - (target > rank) for target in range(plan.ranks)
        ]
    blocks.append(plan.num_steps * (plan.ranks - 1))
    block_B = torch.tensor(blocks, dtype=torch.int32)
    return (block_B * bounds.pairs).to(device), (block_B * bounds.rows).to(device)
