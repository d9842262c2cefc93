"""A gradient for the experts that a token did not choose.

The output y_t = sum over the chosen e of g_te E_e(x_t) says nothing about the others, so a router
learns from the K experts it has chosen alone. What is missing is <dy_t, E_e(x_t)>; here a running
mean m_e of each expert's output stands for E_e(x_t): one product [T, D] x [D, E], and the sparse
forward is unchanged.

The gates of the chosen experts keep their ordinary gradient. The weights of the others are their
scores, normalised over all experts. With K = E nothing is missing.

Shape letters: T tokens, E experts, K experts per token, D model width.

Source: Default MoE (arXiv 2504.12463).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.kernels.common.autograd import first_order
from moe.routing import Routing
from moe.rules.base import RuleSettings
from moe.rules.mean_outputs import MeanOutputs
from moe.scores import probabilities
from moe.types import Choice, Form


class DefaultGradient(RuleSettings):
    """Routers learn about experts that a token did not choose from their mean output over the last
    steps (Default MoE, arXiv 2504.12463)."""

    line: ClassVar = ("the router learns slowly", "a small matrix product", "loss −0.014 ± 0.001")

    kind: Literal["default"] = "default"
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the mean outputs from step to step."""

    def build(self, form: Form, device: torch.device | str | None = None) -> MeanOutputs:
        return _DefaultGradient(self, form, device, self.decay)

    def check(self, form: Form, router: Any) -> None:
        if form.start_experts is not None:
            raise ValueError(
                "router.gradient.kind=default does not go with experts that come and go; allowed: "
                "router.gradient=null"
            )


class _DefaultGradient(MeanOutputs):
    keeps_logits = True

    def output(self, y_TD: Tensor, choice: Choice, valid_T: Tensor | None) -> Tensor:
        form = self.form
        missing_TE = missing_pairs(choice.gating.expert_TK, form.experts, choice.routing)
        weight_TE = default_weights(choice.logits_TE, form.score, form.scale, valid_T)
        return default_gradient(y_TD, weight_TE, missing_TE, self.means())


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


class _Gradient(torch.autograd.Function):
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
    return _Gradient.apply(y_TD, weight_TE, missing_TE, default_ED.detach())


def default_weights(
    logits_TE: Tensor, score: str, scale: float, valid_T: Tensor | None = None
) -> Tensor:
    """The weights of default outputs, [T, E]: scores that sum to 1 over all experts, times the
    scale of the gates."""
    return probabilities(logits_TE, score, valid_T) * scale
