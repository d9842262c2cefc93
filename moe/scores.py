"""Scores, gates and probabilities of router logits, as `moe.kernels.routing.topk_gating` has them,
for a choice that is made already.

Shape letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.common.gating import kept_groups, plain_scores, sanitised
from moe.types import Form

# Gates that sum to a constant by construction: with one expert per token the gate is that constant.
RENORMALISED = ("topk_sum", "softmax_topk")


def gates_at(
    logits_TE: Tensor, expert_TK: Tensor, score: str, norm: str, scale: float = 1.0
) -> Tensor:
    """Gates [T, K] of a given choice: `topk_gating`'s, differentiable, without its selection.

    Args:
        logits_TE: [T, E] float32 or float64.
        expert_TK: int [T, K]; -1 = no expert, gate 0.
        score, norm, scale: as in `topk_gating`.
    """
    index_TK = expert_TK.clamp(min=0).long()
    picked_TK = logits_TE.gather(1, index_TK)
    none_TK = (expert_TK < 0) | (picked_TK == -math.inf)
    if norm == "softmax_topk" or (norm == "topk_sum" and score == "softmax"):
        masked_TK = picked_TK.masked_fill(none_TK & ~none_TK.all(dim=1, keepdim=True), -math.inf)
        gate_TK = torch.softmax(masked_TK, dim=1)
    else:
        if score == "softmax":
            gate_TK = torch.exp(picked_TK - torch.logsumexp(logits_TE, dim=1, keepdim=True))
        elif score == "sigmoid":
            gate_TK = torch.sigmoid(picked_TK)
        elif score == "sqrtsoftplus":
            gate_TK = F.softplus(picked_TK).sqrt()
        else:
            gate_TK = picked_TK
        gate_TK = gate_TK.masked_fill(none_TK, 0.0)
        if norm == "topk_sum":
            gate_TK = gate_TK / (gate_TK.sum(dim=1, keepdim=True) + 1e-20)
    return gate_TK.masked_fill(none_TK, 0.0) * scale


def probabilities(logits_TE: Tensor, score: str, valid_T: Tensor | None = None) -> Tensor:
    """Scores normalised to sum 1 over the experts, [T, E]: the summands of `Gating.prob_sum_E`.

    Zero for tokens that are not valid; the non-finite policy is that of `topk_gating`.
    """
    largest = torch.finfo(logits_TE.dtype).max
    z_TE = torch.nan_to_num(logits_TE, nan=-math.inf, posinf=largest, neginf=-math.inf)
    use_T = (z_TE > -math.inf).any(dim=1)
    if valid_T is not None:
        use_T = use_T & valid_T
    z_TE = torch.where(use_T[:, None], z_TE, 0.0)
    if score in ("softmax", "identity"):
        prob_TE = torch.softmax(z_TE, dim=1)
    else:
        score_TE = torch.sigmoid(z_TE) if score == "sigmoid" else F.softplus(z_TE).sqrt()
        prob_TE = score_TE / (score_TE.sum(dim=1, keepdim=True) + 1e-20)
    return torch.where(use_T[:, None], prob_TE, 0.0)


def selection_keys(
    logits_TE: Tensor, form: Form, bias_E: Tensor | None, valid_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scores and biased scores [T, E], without gradient; -inf where an expert cannot be chosen."""
    with torch.no_grad():
        z_TE = sanitised(logits_TE.detach())
        usable_TE = z_TE > -math.inf
        if valid_T is not None:
            usable_TE = usable_TE & valid_T[:, None]
        # a row without any usable expert: zeros instead of a softmax over -inf
        hopeless_T1 = ~usable_TE.any(dim=1, keepdim=True)
        if form.score != "softmax":
            hopeless_T1 = ~usable_TE  # these scores are elementwise and want finite logits
        score_TE = plain_scores(torch.where(hopeless_T1, 0.0, z_TE), form.score)
        score_TE = torch.where(usable_TE, score_TE, -math.inf)
        # Without a bias the logits chose: the same order, and no ties where the score saturates.
        key_TE = torch.where(usable_TE, z_TE, -math.inf) if bias_E is None else score_TE + bias_E
        if form.groups_kept < form.groups:
            kept_TE = kept_groups(key_TE, form.groups, form.groups_kept, form.group_top)
            key_TE = key_TE.masked_fill(~kept_TE, -math.inf)
        return score_TE, key_TE
