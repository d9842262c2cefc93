"""What an expert is worth, beyond the tokens that it gets.

Shape letters: T tokens, D model width, E slots, S pairs (slots of a routing).

Source: REAP (github.com/CerebrasResearch/reap) for the importance of that name.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe.experts import experts
from moe.routing import Routing

IMPORTANCES = ("load", "gate_mass", "reap", "taylor")


@torch.no_grad()
def importance_sums(
    how: str,
    x_TD: Tensor,
    w1_EHD: Tensor | None,
    w2_EDN: Tensor | None,
    routing: Routing,
    activation: str,
    backend: str,
) -> Tensor | None:
    """What `how` measures in one batch, summed over each expert's pairs; [E]. Only reap reads
    the weights.

    load       nothing: the tokens of each expert are counted anyway
    gate_mass  the gates
    reap       gate * ||output||: how much the expert adds to the layer's output (divided by its
               tokens by those who read it). The outputs are computed once more, one by one: an
               experts' forward on top, and memory for all pairs' outputs
    taylor     nothing: sum of gate * d loss / d gate, what the loss would lose to first order
               without the expert, is <w2, d loss / d w2>, for outputs are linear in w2: read off
               the gradient before the optimizer's step
    """
    if how in ("load", "taylor"):
        return None
    value_S = routing.gates_S.detach().float()
    if how == "reap":
        weights = w1_EHD, w2_EDN
        value_S = value_S * output_norms(x_TD.detach(), *weights, routing, activation, backend)
    return replace(routing, gates_S=value_S).dense().sum(dim=0)


def output_norms(
    x_TD: Tensor,
    w1_EHD: Tensor,
    w2_EDN: Tensor,
    routing: Routing,
    activation: str,
    backend: str,
) -> Tensor:
    """||E(x)|| of each pair, float32 [S]; 0 for slots without one."""
    some_S = routing.expert_S >= 0
    token_S = routing.token_S.long().clamp(max=max(routing.num_tokens - 1, 0))
    ones_S1 = some_S[:, None].to(routing.gates_S.dtype)
    alone = Routing.from_topk(routing.expert_S[:, None], ones_S1, routing.num_experts, backend)
    y_SD = experts(x_TD[token_S], w1_EHD, w2_EDN, alone, activation=activation, backend=backend)
    return torch.where(some_S, y_SD.float().norm(dim=1), 0.0)
