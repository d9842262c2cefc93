"""Which rows go where: from a `Routing` to the steps of an exchange.

A *pair* is a token with one of its experts, a *copy* a token with one of its destination ranks: a
token crosses once for each rank that it has experts on, not once for each expert (with 8 experts a
token over 4 ranks, 2.70 instead of 6.00 crossings on average). With a copy travel its pairs:
expert ids and gates. The destination computes the gate-weighted sum of its experts and sends one
row back.

The exchange is cut into steps that are on their way while others compute:

    all_to_all  step c: the c-th part of every rank's tokens, to all ranks
    pairwise    step r: all tokens for the rank r + 1 places further round the ring
    all_gather  see `all_gather.py`

A rank's pairs with its own experts take no part; they are the local block behind the last step.

Order of summation, for outputs and gradients alike: (1) a token's experts on one rank, in slot
order, in float32, rounded to the dtype of the rows; (2) the ranks' sums, in the order in which the
token's slots first name a rank, likewise; (3) plus the own rank's sum. It depends on the routing
and on who holds which expert, on nothing else: not on steps, schedule or transport.

Shape letters: T tokens, S slots (token order), P pairs sorted by key, C copies, N ranks, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe.kernels.common.autograd import first_order
from moe.kernels.routing.routing_metadata import routing_metadata
from moe.routing import Routing
from parallel.exchange.all_to_all import Copies
from parallel.exchange.transport import Split
from parallel.world import all_gather_single


@dataclass(frozen=True)
class Step:
    """One part of an exchange."""

    rows: Split
    """Rows of tokens on the way to the experts; `rows.reversed()` on the way back."""
    pairs: Split
    """Expert ids and gates that belong to them."""


@dataclass(frozen=True)
class Dispatch:
    """Everything that one rank must know to exchange the tokens of one routing."""

    steps: list[Step]
    copies: Copies
    """Copies of all steps, in order, and their tokens."""
    id_P: Tensor
    """int32: expert of each pair, as its rank numbers them, times 2, plus 1 on the first pair of a
    copy; all steps, then the local block."""
    token_P: Tensor
    """int32: token of each pair."""
    slot_P: Tensor
    """int32: slot of each pair."""
    row_S: Tensor
    """int32: place of each slot's pair, -1 for none."""
    local_pairs: int
    """Length of the local block."""

    def gates(self, gates_S: Tensor) -> list[Tensor]:
        """Gates of the pairs of each step, and of the local block, with their gradients."""
        sizes = [sum(step.pairs.send) for step in self.steps]
        return list(
            _Permute.apply(gates_S, self.slot_P, self.row_S).split([*sizes, self.local_pairs])
        )

    def ids(self) -> list[Tensor]:
        """`id_P` cut as `gates`."""
        sizes = [sum(step.pairs.send) for step in self.steps]
        return list(self.id_P.split([*sizes, self.local_pairs]))

    def local(self, gates_P: Tensor, num_tokens: int, num_experts: int, backend: str) -> Routing:
        """Routing of this rank's tokens over its own experts."""
        first = self.id_P.shape[0] - self.local_pairs
        return Routing.from_pairs(
            self.token_P[first:], self.id_P[first:] // 2, gates_P, num_tokens, num_experts, backend
        )


def received_routing(
    id_P: Tensor, gate_P: Tensor, rows: int, num_experts: int, backend: str
) -> Routing:
    """Routing of a step's received rows over this rank's experts.

    Args:
        id_P: int32, as in `Dispatch.id_P`, of the received pairs.
        gate_P: their gates.
        rows: received rows.
        num_experts: experts of this rank.
    """
    row_P = torch.cumsum(id_P % 2, dim=0).to(torch.int32) - 1
    return Routing.from_pairs(row_P, id_P // 2, gate_P, rows, num_experts, backend)


@dataclass(frozen=True)
class SortedPairs:
    """A routing's pairs sorted by where they go; all on the device, sizes not yet known."""

    routing: Routing
    row_S: Tensor  # int32 slot -> place in the order, -1 = no pair
    slot_P: Tensor  # int32; static length S, unused behind the last pair
    token_P: Tensor  # int32
    copy_P: Tensor  # int32: number of the copy that the pair belongs to
    first_P: Tensor  # bool: first pair of its copy
    counts_B2: Tensor  # int32: copies and pairs in each bin


@dataclass(frozen=True)
class DispatchPlan:
    """How an exchange is cut; the same on all ranks."""

    ranks: int
    experts_per_rank: int
    chunks: int = 1
    kind: str = "all_to_all"

    @property
    def num_steps(self) -> int:
        if self.ranks == 1:
            return 0
        return self.chunks if self.kind == "all_to_all" else self.ranks - 1

    @property
    def bins(self) -> int:
        """Groups of pairs with one step and one destination; the last one is the local block."""
        return self.num_steps * (self.ranks if self.kind == "all_to_all" else 1) + 1


def sort_pairs(
    routing: Routing, plan: DispatchPlan, rank: int, backend: str = "auto"
) -> SortedPairs:
    """Sort pairs by (step, destination, token), the local ones last, and count them; no host sync.

    Args:
        rank: this rank's number in the expert group.
    """
    token_S = routing.token_S
    expert_S = routing.expert_S
    some_S = expert_S >= 0
    dest_S = expert_S // plan.experts_per_rank
    if plan.kind == "all_to_all":
        tokens = max(routing.num_tokens, 1)
        # token t is in chunk i when floor(T i / n) <= t < floor(T (i + 1) / n)
        chunk_S = ((token_S.long() + 1) * plan.chunks - 1) // tokens
        bin_S = chunk_S * plan.ranks + dest_S
    else:
        bin_S = (dest_S - rank - 1) % plan.ranks
    bin_S = torch.where(dest_S == rank, plan.bins - 1, bin_S)
    bin_S = torch.where(some_S, bin_S, -1).to(torch.int32)
    meta = routing_metadata(
        bin_S,
        plan.bins,
        slots_per_token=routing.slots_per_token,
        token_S=None if routing.slots_per_token is not None else token_S,
        backend=backend,
    )
    slots = bin_S.shape[0]
    place_P = torch.arange(slots, dtype=torch.int32, device=bin_S.device)
    slot_P, token_P = meta.slot_R[:slots], meta.token_R[:slots]
    used_P = place_P < meta.offsets_E1[-1]
    sorted_P = bin_S[slot_P.long()]
    first_P = torch.ones_like(used_P)
    first_P[1:] = (sorted_P[1:] != sorted_P[:-1]) | (token_P[1:] != token_P[:-1])
    first_P &= used_P
    copies_P1 = torch.zeros(slots + 1, dtype=torch.int32, device=bin_S.device)
    torch.cumsum(first_P, dim=0, dtype=torch.int32, out=copies_P1[1:])
    offsets_B1 = meta.offsets_E1.long()
    counts_B2 = torch.stack([copies_P1[offsets_B1].diff(), meta.offsets_E1.diff()], dim=1)
    return SortedPairs(routing, meta.row_S, slot_P, token_P, copies_P1[1:] - 1, first_P, counts_B2)


def exchange_counts(counts_B2: Tensor, group: dist.ProcessGroup) -> np.ndarray:
    """Every rank's counts, int64 [N, B, 2], on the host.

    The one place of a layer's forward where the host waits for the device: transports need sizes.
    The backward has none.
    """
    counts_NB2 = counts_B2.new_empty(dist.get_world_size(group) * counts_B2.shape[0], 2)
    all_gather_single(counts_NB2, counts_B2.contiguous(), group=group)
    return counts_NB2.view(-1, *counts_B2.shape).cpu().numpy().astype(np.int64)


def steps_of(counts_NB2: np.ndarray, plan: DispatchPlan, rank: int) -> list[Step]:
    """The splits of all steps, from all ranks' counts."""
    N = plan.ranks
    steps = []
    for index in range(plan.num_steps):
        if plan.kind == "all_to_all":
            table = counts_NB2[:, index * N : (index + 1) * N]
        else:
            table = np.zeros((N, N, 2), dtype=np.int64)
            for source in range(N):
                table[source, (source + index + 1) % N] = counts_NB2[source, index]
        copies, pairs = Split(table[..., 0], rank), Split(table[..., 1], rank)
        steps.append(Step(copies, pairs))
    return steps


def plan_dispatch(
    pairs: SortedPairs, counts_NB2: np.ndarray, plan: DispatchPlan, rank: int, backend: str
) -> Dispatch:
    """The exchange of one routing, now that all sizes are known.

    Args:
        backend: of the sums, resolved ("reference" or "triton").
    """
    routing = pairs.routing
    own_B2 = counts_NB2[rank]
    copies, remote_pairs = (int(n) for n in own_B2[:-1].sum(axis=0))
    local_pairs = int(own_B2[-1, 1])
    total = remote_pairs + local_pairs
    token_C = _compress(pairs.token_P, pairs.first_P, pairs.copy_P, copies)

    row_S = pairs.row_S.long()
    copy_S = pairs.copy_P[row_S.clamp(min=0)]
    starts_S = (row_S >= 0) & pairs.first_P[row_S.clamp(min=0)]
    copy_S = torch.where(starts_S & (copy_S < copies), copy_S, -1).to(torch.int32)

    slot_P, token_P = pairs.slot_P[:total], pairs.token_P[:total]
    expert_P = routing.expert_S[slot_P.long()] % plan.experts_per_rank
    return Dispatch(
        steps=steps_of(counts_NB2, plan, rank),
        copies=Copies(
            token_C, copy_S, routing.num_tokens, routing.slots_per_token,
            routing.slot_offsets_T1, backend,
        ),
        id_P=expert_P * 2 + pairs.first_P[:total].to(torch.int32),
        token_P=token_P,
        slot_P=slot_P,
        row_S=pairs.row_S,
        local_pairs=local_pairs,
    )  # fmt: skip


def _compress(values_P: Tensor, keep_P: Tensor, number_P: Tensor, count: int) -> Tensor:
    """The kept values among the first `count` numbers, without asking the device how many."""
    number_P = number_P[: values_P.shape[0]].long()
    keep_P = keep_P & (number_P < count)
    place_P = torch.where(keep_P, number_P, count)
    return values_P.new_zeros(count + 1).scatter_(0, place_P, values_P)[:count]


class _Permute(torch.autograd.Function):
    """gates_S in the order of pairs; backward gathers too, since a scatter would need atomics."""

    @staticmethod
    def forward(ctx: Any, gates_S: Tensor, slot_P: Tensor, row_S: Tensor) -> Tensor:
        ctx.save_for_backward(row_S)
        return gates_S.index_select(0, slot_P)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor, None, None]:
        (row_S,) = ctx.saved_tensors
        if grad_P.shape[0] == 0:
            return grad_P.new_zeros(row_S.shape[0]), None, None
        picked_S = grad_P.index_select(0, row_S.clamp(min=0))
        return torch.where(row_S >= 0, picked_S, 0.0), None, None
