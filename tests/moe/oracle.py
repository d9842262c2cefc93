"""The MoE layer written a second time, one token at a time, and tools to differentiate by hand.

Nothing here uses the code under test except to read its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moe import MoE, MoEConfig, RouterConfig

# every (score, norm) that a router accepts
FORMS = [
    (score, norm)
    for score in ("softmax", "sigmoid", "sqrtsoftplus", "identity")
    for norm in ("topk_sum", "none", "softmax_topk")
    if (score, norm) != ("identity", "topk_sum")
]


def layer_config(**fields) -> MoEConfig:
    """Of a small layer; fields of a `RouterConfig` are its router's, which has no bias unless one
    is given."""
    sizes = {"hidden_size": 6, "expert_size": 5, "num_experts": 7, "num_experts_per_tok": 2}
    keys = RouterConfig.model_fields.keys()
    if isinstance(fields.get("score", ""), str):  # identity is the layer's alone
        keys -= {"score"}
    router = {"bias": None} | {key: fields.pop(key) for key in keys & fields.keys()}
    return MoEConfig(**{**sizes, "router": RouterConfig(**router), **fields})


def make_layer(dtype: torch.dtype = torch.float64, **fields) -> MoE:
    """A small layer with weights large enough that no term is lost in rounding."""
    layer = MoE(layer_config(**{"init_std": 0.5, **fields}))
    return layer.to(dtype)


def logits_layer(dtype: torch.dtype = torch.float32, **fields) -> MoE:
    """A layer whose router logits are its input: D = E and the router's weight is the identity."""
    experts = fields["num_experts"]
    layer = make_layer(dtype, hidden_size=experts, **fields)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(experts))
    return layer


def score_by_hand(z: list[float], score: str) -> list[float]:
    if score == "softmax":
        top = max(z)
        weight = [math.exp(v - top) for v in z]
        return [w / sum(weight) for w in weight]
    if score == "sigmoid":
        return [1.0 / (1.0 + math.exp(-v)) for v in z]
    if score == "sqrtsoftplus":
        return [math.sqrt(math.log1p(math.exp(v))) for v in z]
    return list(z)


def choose_by_hand(
    z: list[float], k: int, score: str, norm: str, scale: float, bias: list[float]
) -> dict[int, float]:
    """expert -> gate of one token: sorted by (key descending, index ascending)."""
    s = score_by_hand(z, score)
    chosen = sorted(range(len(z)), key=lambda e: (-(s[e] + bias[e]), e))[:k]
    if norm == "softmax_topk":
        gates = score_by_hand([z[e] for e in chosen], "softmax")
    else:
        gates = [s[e] for e in chosen]
        if norm == "topk_sum":
            gates = [g / sum(gates) for g in gates]
    return {e: g * scale for e, g in zip(chosen, gates)}


def expert_by_hand(layer: MoE, e: int, x_D: Tensor) -> Tensor:
    h = layer.w1[e] @ x_D
    kind = layer.config.activation
    if kind == "clamped_swiglu":
        gate, up = h[0::2].clamp(max=7), h[1::2].clamp(-7, 7)
        return layer.w2[e] @ (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1))
    inner = h[0::2] if kind in ("swiglu", "geglu", "reglu") else h
    if kind in ("swiglu", "silu"):
        a = inner / (1 + torch.exp(-inner))
    elif kind in ("geglu", "gelu"):
        a = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    else:
        a = inner.clamp(min=0)
    if kind == "relu2":
        a = a * a
    if kind in ("swiglu", "geglu", "reglu"):
        a = a * h[1::2]
    return layer.w2[e] @ a


def shared_by_hand(layer: MoE, x_D: Tensor) -> Tensor:
    shared = layer.shared
    gate = shared.gate_proj.weight @ x_D
    return shared.down_proj.weight @ (gate / (1 + torch.exp(-gate)) * (shared.up_proj.weight @ x_D))


@torch.no_grad()
def moe_by_hand(layer: MoE, x: Tensor) -> Tensor:
    """y [..., D] in float64, token by token."""
    c = layer.config
    bias = [0.0] * c.num_experts
    if layer.router.selection_bias is not None:
        bias = layer.router.selection_bias.tolist()
    out = []
    for x_D in x.reshape(-1, c.hidden_size):
        z = (layer.router.weight @ x_D).tolist()
        chosen = choose_by_hand(z, c.num_experts_per_tok, c.score, c.norm, c.route_scale, bias)
        y_D = sum(gate * expert_by_hand(layer, e, x_D) for e, gate in chosen.items())
        if layer.shared is not None:
            y_D = y_D + shared_by_hand(layer, x_D)
        out.append(y_D)
    return torch.stack(out).view(x.shape)


def slope(
    value: Callable[[], Tensor], tensor: Tensor, direction: Tensor, step: float = 1e-5
) -> float:
    """Central difference of `value()` along `direction` of a tensor that it reads."""
    with torch.no_grad():
        start = tensor.detach().clone()
        tensor.copy_(start + step * direction)
        above = value().item()
        tensor.copy_(start - step * direction)
        below = value().item()
        tensor.copy_(start)
    return (above - below) / (2 * step)


def check_gradients(
    value: Callable[[], Tensor],
    tensors: dict[str, Tensor],
    *,
    directions: int = 3,
    atol: float = 1e-7,
) -> None:
    """Compare the gradients of `value()` with central differences along random directions."""
    gradients = torch.autograd.grad(value(), list(tensors.values()))
    for (name, tensor), gradient in zip(tensors.items(), gradients):
        for _ in range(directions):
            direction = torch.randn_like(tensor)
            found = (gradient * direction).sum().item()
            right = slope(value, tensor, direction)
            assert abs(found - right) <= atol * (1 + abs(right)), (name, found, right)
