"""A limit on the tokens of an expert, as GShard and Switch Transformer have it: off by default.

With a limit of `factor` times the mean an expert drops the tokens beyond it, which then lack its
part of their output. Padding takes no places: it has no pairs at all. The gates of the pairs that
stay are those without a limit; statistics and balance losses see the choice before it.

Shape letters: T tokens, E experts, K experts per token, S slots (token order).

Sources: GShard (arXiv 2006.16668), Switch Transformer (arXiv 2101.03961).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.gating import Gating
from moe.routing import Routing


def limit_capacity(
    routing: Routing,
    gating: Gating,
    factor: float,
    drop: str,
    backend: str = "auto",
    experts: int | Tensor | None = None,
) -> Routing:
    """The routing without the pairs beyond each expert's limit, ceil(factor * pairs / E).

    Args:
        routing: of the whole top-K choice.
        gating: it was made from; its pairs, without padding, are what the mean is of.
        drop: "probability": an expert keeps the tokens of its largest gates (ties: the earlier
            ones); "position": its first tokens.
        experts: over which the mean is; None: all.
    """
    # in float64, so that 1.25 * 64 is 80 and not 81
    mean = gating.counts_E.sum().double() / (routing.num_experts if experts is None else experts)
    limit = torch.ceil(factor * mean - 1e-9).long()
    rank_S = ranks(routing, drop)
    expert_S = torch.where(rank_S < limit, routing.expert_S, -1)
    gates_S = torch.where(expert_S >= 0, routing.gates_S, 0.0)
    shape = gating.expert_TK.shape
    return Routing.from_topk(
        expert_S.view(shape), gates_S.view(shape), routing.num_experts, backend
    )


def ranks(routing: Routing, drop: str) -> Tensor:
    """int64 [S]: place of each pair among those of its expert, from 0, in the order of dropping
    (the last are dropped first)."""
    expert_S = routing.expert_S.long().clamp(min=0)
    if drop == "position":
        return routing.row_S.long() - routing.offsets_E1.long()[expert_S]
    gates_S = routing.gates_S.detach().masked_fill(routing.expert_S < 0, -1.0)
    by_gate_S = torch.sort(gates_S, descending=True, stable=True).indices
    group_S = torch.where(routing.expert_S < 0, routing.num_experts, routing.expert_S)
    by_expert_S = torch.sort(group_S[by_gate_S], stable=True).indices
    order_S = by_gate_S[by_expert_S]  # by expert, then by falling gate
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    return place_S - routing.offsets_E1.long()[expert_S]
