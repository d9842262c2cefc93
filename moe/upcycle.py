"""Upcycling: the experts of a layer from one dense feed-forward network.

    upcycle_layer(layer, gate_ND, up_ND, down_DN)           every expert a copy
    upcycle_layer(..., granularity=4)                       every expert a quarter of a copy

With gates that sum to a constant the layer then computes what the dense network did, whatever its
router chooses. With `granularity` G an expert holds N / G of the dense columns, the G shards of a
copy have the same router row, so a token takes whole copies, and the down-projection carries the
factor G (all of it: SiLU is not homogeneous, so a factor spread over the three matrices would not
be exact).

Sources: A. Komatsuzaki et al., "Sparse Upcycling" (arXiv 2212.05055); E. He et al., granular
upcycling with virtual groups (arXiv 2410.07524); T. Nakamura et al., "Drop-Upcycling" (arXiv
2502.19261).

Shape letters: E experts, K experts per token, N width of the dense network, D model width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe.kernels.common.activations import activation_width
from moe.layer import MoE


@torch.no_grad()
def upcycle_layer(
    layer: MoE, gate_ND: Tensor, up_ND: Tensor, down_DN: Tensor, *, granularity: int = 1
) -> bool:
    """Fill w1, w2 and group the router's rows; the router's rows of first shards stay as they are.

    Args:
        layer: gated, of expert size N / granularity. A shared expert must be N wide and have a gate
            of its own: it becomes the dense network too and its gate starts at one half, so that
            the routed experts give the other half.
        gate_ND, up_ND, down_DN: the dense network down(act(gate x) · up x).
        granularity: G; the experts are E / G copies of G shards, expert c · G + s is shard s of
            copy c.

    Returns:
        Whether the layer computes the dense network exactly (to rounding). Gates that are not
        normalised do not sum to a constant; then the factor is right for logits of zero only.

    Raises:
        ValueError: sizes that do not fit, by name.
    """
    c, G, N = layer.config, granularity, gate_ND.shape[0]
    if G < 1 or c.num_experts % G or c.num_experts_per_tok % G or N % G:
        raise ValueError(
            f"granularity={G} must divide num_experts={c.num_experts}, "
            f"num_experts_per_tok={c.num_experts_per_tok} and the dense width {N}"
        )
    if c.expert_size * G != N:
        raise ValueError(
            f"expert_size={c.expert_size} must be the dense width {N} / granularity={G} = {N // G}"
        )
    if activation_width(c.activation) != 2:
        raise ValueError(f"activation={c.activation!r} must be a gated one")
    if c.groups > 1 or c.form.rows > 1:
        raise ValueError(
            "a layer with expert groups or several router rows for an expert cannot be filled "
            "exactly"
        )
    if layer.shared is not None and not (c.shared_expert_gate and c.shared_expert_size == N):
        raise ValueError(
            f"a shared expert must be as wide as the dense network, {N}, and have a gate of its "
            f"own; this one has shared_expert_size={c.shared_expert_size}, "
            f"shared_expert_gate={c.shared_expert_gate}"
        )
    exact = c.norm != "none"
    gates = {"softmax": 1 / c.num_experts, "sigmoid": 0.5, "sqrtsoftplus": math.log(2) ** 0.5}
    if not exact and c.score not in gates:
        raise ValueError(
            f"score={c.score!r} with norm='none' has gates of no size of its own; use another norm "
            f"or a score of {', '.join(gates)}"
        )
    factor = G / c.route_scale / (1 if exact else gates[c.score] * c.num_experts_per_tok)
    if layer.shared is not None:
        factor *= 0.5
        layer.shared.output_gate.weight.zero_()  # sigmoid(0) = 1/2
        for name, weight in (("gate_proj", gate_ND), ("up_proj", up_ND), ("down_proj", down_DN)):
            layer.shared.get_submodule(name).weight.copy_(weight)
    w1_END2D = layer.w1.view(-1, G, c.expert_size, 2, c.hidden_size)
    w1_END2D[:, :, :, 0] = gate_ND.view(G, -1, c.hidden_size).to(layer.w1)
    w1_END2D[:, :, :, 1] = up_ND.view(G, -1, c.hidden_size).to(layer.w1)
    w2_EGDN = layer.w2.view(-1, G, c.hidden_size, c.expert_size)
    w2_EGDN[:] = (down_DN * factor).view(c.hidden_size, G, -1).transpose(0, 1).to(layer.w2)
    rows_EGD = layer.router.weight.view(-1, G, c.hidden_size)
    rows_EGD[:] = rows_EGD[:, :1].clone()
    return exact


@torch.no_grad()
def drop_columns(layer: MoE, share: float, generator: torch.Generator) -> None:
    """Draw a share of each expert's columns anew, from normals of the mean and deviation they had.

    Not the same columns in every expert, so that experts differ from the first step on; the
    function is no longer preserved (Drop-Upcycling, with share 0.5 by default there).
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} must be from 0 to 1")
    N = layer.config.expert_size
    count = round(share * N)
    if count == 0:
        return
    for w1_HD, w2_DN in zip(layer.w1, layer.w2):
        column = torch.randperm(N, generator=generator)[:count]
        for part in (w1_HD[0::2], w1_HD[1::2], w2_DN.T):
            old = part[column.to(part.device)].float()
            new = torch.randn(old.shape, generator=generator).to(old) * old.std() + old.mean()
            part[column.to(part.device)] = new.to(part)


@torch.no_grad()
def add_noise(layer: MoE, relative: float, generator: torch.Generator) -> None:
    """Add normals of `relative` times the deviation of each expert's matrix, to tell copies apart.

    Raises:
        ValueError: a negative factor.
    """
    if relative < 0:
        raise ValueError(f"relative={relative} must not be negative")
    if relative == 0:
        return
    for weight in (layer.w1, layer.w2):
        for one in weight:
            noise = torch.randn(one.shape, generator=generator)
            one += (noise * (relative * one.float().std().cpu())).to(one)
