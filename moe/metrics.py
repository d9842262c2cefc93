"""What the router did: statistics per layer, and the numbers that a person reads from them.

`RouterStats` is an output of the layer's forward, never a buffer that forward changes: evaluation
and the recomputation of activation checkpointing cannot add to it. Every field is a sum over the
valid tokens, so statistics of micro-batches and of ranks add up. Nothing here reads device memory
back except `to_host`, which brings any number of tensors over in one transfer.

Shape letters: L layers, E experts, P packed numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe.balance import balance_loss, load_fractions, z_loss
from moe.types import RouterStats

# An expert with less than this share of the mean load is called dead.
DEAD_BELOW = 0.1


def layer_metrics(stats: RouterStats, tile_rows: int = 128) -> dict[str, Tensor]:
    """Health of each layer's routing, computed on the device; values [] or [L], float64.

        max_violation      max load / mean load - 1; 0 = balanced
        min_violation      1 - min load / mean load; 1 = some expert got nothing
        load_cv2           squared coefficient of variation of the load
        load_entropy       entropy of the load / ln E; 1 = balanced
        effective_experts  exp(entropy of the load); E = balanced
        inverse_simpson    1 / sum of squared load shares, another effective number of experts
        dead_experts       experts below a tenth of the mean load
        gate_mass          largest mean probability * E - 1: what one expert gets of the gates,
                           before the choice
        router_entropy     mean entropy (nats) of a token's gates, normalised to sum 1
        tile_waste         padding rows per real row when experts are computed in tiles
        nonfinite_tokens   tokens whose logits were not finite
        balance_loss       Switch balance value; 1.0 = balanced
        z_loss             mean of logsumexp(logits)^2
        experts            how many the layer has, where that may change

    Without tokens every load metric takes its balanced value. A balanced random router shows a
    max_violation of about sqrt(2 ln E / mean load), never 0.
    """
    stats = stats.detach()
    experts = stats.experts
    fraction_E = load_fractions(stats.counts_E)
    share_E = relative_load(stats)
    tokens = stats.tokens.double().clamp(min=1)
    entropy = torch.special.entr(fraction_E).sum(dim=-1)
    squares = fraction_E.square().sum(dim=-1)
    rows_E = stats.rows_E.double()
    padded_E = torch.ceil(rows_E / tile_rows) * tile_rows
    found = {
        "max_violation": experts * fraction_E.amax(dim=-1) - 1.0,
        "min_violation": 1.0 - share_E.amin(dim=-1),
        "load_cv2": experts * squares - 1.0,
        "load_entropy": evenness(entropy, experts),
        "effective_experts": entropy.exp(),
        "inverse_simpson": 1.0 / squares,
        "dead_experts": (share_E < DEAD_BELOW).sum(dim=-1).double(),
        "gate_mass": experts * stats.prob_sum_E.double().amax(dim=-1) / tokens - 1.0,
        "router_entropy": stats.entropy_sum.double() / tokens,
        "tile_waste": (padded_E - rows_E).sum(dim=-1) / rows_E.sum(dim=-1).clamp(min=1),
        "nonfinite_tokens": stats.nonfinite.double(),
        "balance_loss": balance_loss(stats).double(),
        "z_loss": z_loss(stats).double(),
    }
    return found if isinstance(experts, int) else found | {"experts": experts.double()}


def relative_load(stats: RouterStats) -> Tensor:
    """Load of each expert over the mean load of those in use, float64 [..., E]; infinite for slots
    that hold none, which are neither dead nor the emptiest."""
    share_E, experts, in_use_E = load_fractions(stats.counts_E), stats.experts, stats.in_use_E
    if in_use_E is None:
        return experts * share_E
    return torch.where(in_use_E, experts[..., None] * share_E, math.inf)


def evenness(entropy: Tensor, experts: int | Tensor) -> Tensor:
    """Entropy of a load over that of an even one of so many experts; 1 for a single expert."""
    if isinstance(experts, int):
        return entropy / math.log(experts) if experts > 1 else torch.ones_like(entropy)
    return torch.where(experts > 1, entropy / experts.double().log().clamp(min=1e-9), 1.0)


# How a layer's metric becomes the model's; the mean where nothing else is said.
_OVER_LAYERS = {
    "max_violation": "max",
    "min_violation": "max",
    "dead_experts": "sum",
    "dead_200": "sum",
    "dead_steps": "max",
    "nonfinite_tokens": "sum",
}


def model_metrics(layers: dict[str, Tensor]) -> dict[str, Tensor]:
    """One number for the model from each metric [L].

    The worst violations, sums of dead experts and non-finite tokens, means of the rest.
    """
    out = {}
    for name, value_L in layers.items():
        how = _OVER_LAYERS.get(name, "mean")
        out[name] = value_L.amax() if how == "max" else getattr(value_L, how)()
    return out


def pack(tree: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """All tensors of a nested structure in one float64 vector [P], and the way back.

    One all-reduce over the vector sums the statistics of all ranks exactly: float64 holds
    integers to 2^53.

    Returns:
        The vector, and a function that gives the structure back from such a vector, on the
        vector's device, each tensor in its own shape and dtype. Leaves that are no tensors pass
        through.
    """
    leaves, spec = pytree.tree_flatten(tree)
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    flat_P = (
        torch.cat([tensor.reshape(-1).double() for tensor in tensors])
        if tensors
        else torch.zeros(0, dtype=torch.float64)
    )

    def unpack(flat_P: Tensor) -> Any:
        parts = iter(flat_P.split([tensor.numel() for tensor in tensors]))
        out = [
            next(parts).view(leaf.shape).to(leaf.dtype) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        return pytree.tree_unflatten(out, spec)

    return flat_P, unpack


def to_host(tree: Any) -> Any:
    """The same structure with every tensor on the CPU, brought over in a single transfer."""
    flat_P, unpack = pack(tree)
    return unpack(flat_P.cpu())
