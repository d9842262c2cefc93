"""A gradient for the experts that a token did not choose.

The output y_t = sum over the chosen e of g_te E_e(x_t) says nothing about the others, so a router
learns from the K experts it has chosen alone. What is missing is <dy_t, E_e(x_t)>. Two ways to
give it, both without a change of the sparse forward:

    dense     the outputs of all experts, computed in backward (DenseMixer): exact, E / K times the
              experts' forward on top
    default   a running mean m_e of each expert's output stands for E_e(x_t) (Default MoE, arXiv
              2504.12463): one product [T, D] x [D, E]; with fill="forward" the missing outputs are
              filled in too, in evaluation as well

The gates of the chosen experts keep their ordinary gradient. The weights q of the others are what
their gates would be: the score, over the sum of the *chosen* scores where gates are renormalised.
That sum is a constant in backward: differentiated it made training worse. With K = E nothing is
missing and both equal the plain gradient.

Shape letters: T tokens, E experts, K experts per token, D model width, N expert width, H columns of
the up-projection, C experts of a chunk.

Sources: DenseMixer (github.com/yaof20/DenseMixer), Default MoE (arXiv 2504.12463).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe.kernels.common.activations import activation_ref
from moe.kernels.common.autograd import first_order
from moe.kernels.routing.token_rounding import weights_ref
from moe.router import probabilities
from moe.routing import Routing

GRADIENTS = ("plain", "dense", "default")
FILLS = ("gradient", "forward")

# Elements of the largest intermediate tensor of `dense`: chunks of experts are made that small.
_CHUNK = 1 << 26


def missing_pairs(expert_TK: Tensor, num_experts: int, routing: Routing | None = None) -> Tensor:
    """bool [T, E]: pairs whose expert output is neither chosen nor computed.

    Args:
        expert_TK: int, the plain choice; tokens whose first entry is -1 have no missing pairs.
        routing: what is computed, where that differs from the choice (token rounding).
    """
    T, E = expert_TK.shape[0], num_experts
    flat = torch.ones(T * E + 1, dtype=torch.bool, device=expert_TK.device)

    def clear(token: Tensor, expert: Tensor) -> None:
        cell = torch.where(expert >= 0, token * E + expert, T * E)
        flat.index_fill_(0, cell.reshape(-1).long(), False)

    clear(torch.arange(T, device=expert_TK.device)[:, None], expert_TK)
    if routing is not None and routing.slots_per_token is None:
        clear(routing.token_S.long(), routing.expert_S)
    return flat[:-1].view(T, E) & (expert_TK[:, :1] >= 0)


def dense_weights(
    logits_TE: Tensor, expert_TK: Tensor, score: str, norm: str, scale: float
) -> Tensor:
    """q [T, E]: the gates that all experts would have, with the denominator as a constant."""
    weight_TE = weights_ref(logits_TE, score, "softmax_topk" if norm == "softmax_topk" else "none")
    if norm == "none":
        return weight_TE * scale
    with torch.no_grad():
        picked_TK = weight_TE.gather(1, expert_TK.long().clamp(min=0))
        total_T1 = (picked_TK * (expert_TK >= 0)).sum(dim=1, keepdim=True)
    return weight_TE * (scale / (total_T1 + 1e-20))


def expert_dots(
    dy_TD: Tensor, x_TD: Tensor, w1_EHD: Tensor, w2_EDN: Tensor, activation: str, dtype: torch.dtype
) -> Tensor:
    """<dy_t, E_e(x_t)> for every token and every expert: [T, E] in `dtype`.

    Args:
        dy_TD: its dtype is the one that is computed in.
    """
    x_TD, w1_EHD, w2_EDN = (t.to(dy_TD.dtype) for t in (x_TD, w1_EHD, w2_EDN))
    T, (E, H, D), N = x_TD.shape[0], w1_EHD.shape, w2_EDN.shape[2]
    step = max(1, _CHUNK // max(1, T * H))
    parts = []
    for first in range(0, E, step):
        w1_CHD, w2_CDN = w1_EHD[first : first + step], w2_EDN[first : first + step]
        C = w1_CHD.shape[0]
        h = x_TD @ w1_CHD.reshape(C * H, D).T
        a_TCN = activation_ref(h.view(T * C, H), activation).view(T, C, N)
        # <dy, W2 a> = <W2^T dy, a>
        b_TCN = (dy_TD @ w2_CDN.permute(1, 0, 2).reshape(D, C * N)).view(T, C, N)
        parts.append((a_TCN.to(dtype) * b_TCN).sum(dim=2))
    return torch.cat(parts, dim=1)


class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_TD, weight_TE, x_TD, w1_EHD, w2_EDN, missing_TE, dots):
        # The weights as they came, not detached: a sharding engine that swaps the memory of a
        # parameter (ZeRO-3) finds it again, and frees it in between.
        ctx.save_for_backward(x_TD, w1_EHD, w2_EDN, missing_TE)
        ctx.dots = dots
        ctx.weight_dtype = weight_TE.dtype
        return y_TD.view_as(y_TD)

    @staticmethod
    @first_order
    def backward(ctx, dy_TD):
        *tensors, missing_TE = ctx.saved_tensors
        dot_TE = ctx.dots(dy_TD, *tensors, ctx.weight_dtype)
        return dy_TD, torch.where(missing_TE, dot_TE, 0.0), *(None,) * 5


Dots = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]


def dense_gradient(
    y_TD: Tensor,
    weight_TE: Tensor,
    missing_TE: Tensor,
    x_TD: Tensor,
    w1_EHD: Tensor,
    w2_EDN: Tensor,
    activation: str,
    dots: Dots | None = None,
) -> Tensor:
    """y unchanged; in backward the weight of a missing pair gets <dy_t, E_e(x_t)>.

    Nothing else does: x and the experts keep the gradients of the sparse layer.

    Args:
        weight_TE: `dense_weights(...)`.
        missing_TE: `missing_pairs(...)`.
        dots: (dy, x, w1, w2, dtype) → <dy_t, E_e(x_t)> [T, E], where w1 and w2 are not those of all
            E experts; None: they are.
    """

    def own_dots(dy_TD, x_TD, w1_EHD, w2_EDN, dtype):
        return expert_dots(dy_TD, x_TD, w1_EHD, w2_EDN, activation, dtype)

    return _DenseGradient.apply(
        y_TD, weight_TE, x_TD.detach(), w1_EHD, w2_EDN, missing_TE, dots or own_dots
    )


class _DefaultGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_TD, weight_TE, missing_TE, default_ED):
        ctx.save_for_backward(missing_TE, default_ED)
        ctx.weight_dtype = weight_TE.dtype
        return y_TD.view_as(y_TD)

    @staticmethod
    @first_order
    def backward(ctx, dy_TD):
        missing_TE, default_ED = ctx.saved_tensors
        dot_TE = dy_TD.to(ctx.weight_dtype) @ default_ED.to(ctx.weight_dtype).T
        return dy_TD, torch.where(missing_TE, dot_TE, 0.0), None, None


def default_gradient(
    y_TD: Tensor, weight_TE: Tensor, missing_TE: Tensor, default_ED: Tensor
) -> Tensor:
    """y unchanged; in backward the weight of a missing pair gets <dy_t, m_e>."""
    return _DefaultGradient.apply(y_TD, weight_TE, missing_TE, default_ED.detach())


def filled_in(y_TD: Tensor, weight_TE: Tensor, missing_TE: Tensor, default_ED: Tensor) -> Tensor:
    """y + sum over the missing pairs of weight_te m_e; m without gradient."""
    weight_TE = torch.where(missing_TE, weight_TE, 0.0)
    return y_TD + (weight_TE @ default_ED.detach().to(weight_TE.dtype)).to(y_TD.dtype)


def default_weights(
    logits_TE: Tensor, score: str, scale: float, valid_T: Tensor | None = None
) -> Tensor:
    """The weights of default outputs, [T, E]: scores that sum to 1 over all experts, times the
    scale of the gates."""
    return probabilities(logits_TE, score, valid_T) * scale
