"""Router gating: logits → experts, gates and the statistics of the balance and z losses.

Shape letters: T tokens, E experts, K experts per token, G expert groups.

Definitions (per token; z = logits, A = selected experts):
  score   softmax(z) | sigmoid(z) | sqrtsoftplus: sqrt(log(1 + e^z)) | identity: z
  key     score + bias if a bias is given, else z (same order as the score, but it never saturates)
  A       the K largest keys, ties to the lowest expert index, -0 equal to +0; with groups, only
          experts of the `groups_kept` groups whose `group_top` largest (score + bias) sum highest
  gates   from the unbiased score, times `scale`:
            none          s_i
            topk_sum      s_i / (sum over A of s + 1e-20); for softmax computed as softmax over
                          the selected logits, which is the same number without the underflow
            softmax_topk  softmax over the selected logits
  lse     logsumexp(z), for the z loss (ST-MoE)
  prob    scores normalised to sum 1 over E (softmax(z) for identity), summed over tokens, for the
          balance loss

Non-finite policy: NaN counts as -inf, +inf as the largest finite number, -inf is a masked expert.
Slots left when fewer than K finite keys remain are filled by lowest index with gate 0. No gate, lse
or probability is ever NaN, and `nonfinite` counts the rows that held a NaN or +inf or fewer than K
usable experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels._triton import pick_backend

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "identity")
NORMS = ("topk_sum", "none", "softmax_topk")
NEG_INF = float("-inf")
# A masked expert counts this much in a group's score: finite, so that a group with one usable
# expert still beats a group with none.
GROUP_FLOOR = -1e30


class Gating(NamedTuple):
    """What a router decides. Float fields are float32 (float64 for float64 logits)."""

    expert_TK: Tensor  # int32, descending key; -1 for tokens that are not valid
    gate_TK: Tensor  # differentiable
    lse_T: Tensor  # differentiable; 0 for tokens that are not valid or have no usable expert
    counts_E: Tensor  # int32, selected pairs per expert
    prob_sum_E: Tensor  # differentiable; sum over valid tokens of the probabilities
    nonfinite: Tensor  # int32 scalar on the device: rows that needed the non-finite policy


# ---------------------------------------------------------------------------------------- reference


def _scores(z_TE: Tensor, score: str) -> Tensor:
    """Scores of finite logits; every form has a finite gradient at every finite z."""
    if score == "softmax":
        return torch.softmax(z_TE, dim=-1)
    if score == "sigmoid":
        return torch.sigmoid(z_TE)
    if score == "sqrtsoftplus":
        # below `low`, log(1 + e^z) equals e^z in this dtype; the root's slope would be 0 * inf
        low = -40.0 if z_TE.dtype == torch.float64 else -20.0
        root = torch.logaddexp(z_TE.clamp(min=low), z_TE.new_zeros(())).sqrt()
        return torch.where(z_TE < low, torch.exp(z_TE / 2), root)
    return z_TE


def _select(
    key_TE: Tensor, group_key_TE: Tensor, k: int, groups: int, groups_kept: int, top: int
) -> tuple[Tensor, Tensor]:
    """Indices [T, K] of the K largest keys, (key descending, index ascending); which are usable."""
    T, E = key_TE.shape
    if groups_kept < groups:
        member = group_key_TE.clamp(min=GROUP_FLOOR).view(T, groups, E // groups)
        best = torch.sort(member, dim=-1, descending=True).values
        total = best[..., 0]
        for i in range(1, top):
            total = total + best[..., i]
        order = torch.sort(total + 0.0, dim=-1, descending=True, stable=True).indices
        keep = torch.zeros_like(total, dtype=torch.bool)
        keep = keep.scatter(1, order[:, :groups_kept], torch.ones_like(keep))
        key_TE = key_TE.masked_fill(~keep.repeat_interleave(E // groups, dim=1), NEG_INF)
    # adding zero turns -0 into +0: a radix sort would tell them apart
    value, index = torch.sort(key_TE + 0.0, dim=-1, descending=True, stable=True)
    return index[:, :k], value[:, :k] > NEG_INF


def topk_gating_ref(
    logits_TE: Tensor,
    k: int,
    score: str = "softmax",
    norm: str = "topk_sum",
    scale: float = 1.0,
    bias_E: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    group_top: int = 2,
    valid_T: Tensor | None = None,
) -> Gating:
    """Plain torch version of `topk_gating`: any device, float64 too, ordinary autograd."""
    T, E = logits_TE.shape
    dtype = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
    largest = torch.finfo(dtype).max
    raw_TE = logits_TE.to(dtype)
    bad_T = (raw_TE.isnan() | (raw_TE == math.inf)).any(dim=1)
    z_TE = torch.nan_to_num(raw_TE, nan=NEG_INF, posinf=largest, neginf=NEG_INF)
    live_TE = z_TE > NEG_INF
    if valid_T is None:
        valid_T = torch.ones(T, dtype=torch.bool, device=logits_TE.device)
    use_T = valid_T & live_TE.any(dim=1)
    # Masked entries get the value 0 wherever -inf could make a NaN, in value or in gradient; the
    # softmax alone keeps its -inf, in rows that have something else.
    zero = z_TE.new_zeros(())
    finite_TE = torch.where(live_TE, z_TE, zero)
    soft_TE = torch.where(use_T[:, None], z_TE, zero)
    if score == "softmax":
        score_TE = _scores(soft_TE, score)
    else:
        score_TE = torch.where(live_TE, _scores(finite_TE, score), zero)

    with torch.no_grad():
        biased_TE = score_TE if bias_E is None else score_TE + bias_E.to(dtype)
        biased_TE = torch.nan_to_num(biased_TE, nan=NEG_INF, posinf=largest, neginf=NEG_INF)
        biased_TE = biased_TE.masked_fill(~live_TE, NEG_INF)
        key_TE = biased_TE if bias_E is not None else z_TE
        pick_TK, usable_TK = _select(key_TE, biased_TE, k, groups, groups_kept, group_top)
        usable_TK = usable_TK & valid_T[:, None]
        pairs_TK = valid_T[:, None].expand(T, k)
        counts_E = torch.zeros(E, dtype=torch.int32, device=z_TE.device)
        counts_E = counts_E.scatter_add(
            0, pick_TK.reshape(-1), pairs_TK.reshape(-1).to(torch.int32)
        )
        short_T = usable_TK.sum(dim=1) < k
        nonfinite = ((bad_T | short_T) & valid_T).sum().to(torch.int32)

    if norm == "softmax_topk" or (norm == "topk_sum" and score == "softmax"):
        picked_TK = finite_TE.gather(1, pick_TK)
        # all slots unusable: a softmax over zeros, masked out below, instead of over -inf
        mask_TK = usable_TK | ~usable_TK.any(dim=1, keepdim=True)
        gate_TK = torch.softmax(torch.where(mask_TK, picked_TK, NEG_INF), dim=-1)
    else:
        gate_TK = torch.where(usable_TK, score_TE.gather(1, pick_TK), zero)
        if norm == "topk_sum":
            gate_TK = gate_TK / (gate_TK.sum(dim=1, keepdim=True) + 1e-20)
    gate_TK = torch.where(usable_TK, gate_TK, zero) * scale

    lse_T = torch.where(use_T, torch.logsumexp(soft_TE, dim=1), zero)
    if score in ("softmax", "identity"):
        prob_TE = torch.softmax(soft_TE, dim=-1)
    else:
        prob_TE = score_TE / (score_TE.sum(dim=1, keepdim=True) + 1e-20)
    prob_sum_E = torch.where(use_T[:, None], prob_TE, zero).sum(dim=0)

    expert_TK = torch.where(valid_T[:, None], pick_TK, -1).to(torch.int32)
    return Gating(expert_TK, gate_TK, lse_T, counts_E, prob_sum_E, nonfinite)


# ------------------------------------------------------------------------------------------- public


def _check(
    logits_TE: Tensor,
    k: int,
    score: str,
    norm: str,
    scale: float,
    bias_E: Tensor | None,
    groups: int,
    groups_kept: int,
    group_top: int,
    valid_T: Tensor | None,
) -> None:
    if logits_TE.dim() != 2 or not logits_TE.dtype.is_floating_point:
        raise ValueError(
            "logits_TE must be a floating point tensor [T, E], got "
            f"{logits_TE.dtype} {tuple(logits_TE.shape)}"
        )
    T, E = logits_TE.shape
    if not 1 <= k <= E:
        raise ValueError(f"k={k} is not possible with {E} experts; allowed: 1 to {E}")
    if score not in SCORES:
        raise ValueError(f"score={score!r} is unknown; allowed: {', '.join(SCORES)}")
    if norm not in NORMS:
        raise ValueError(f"norm={norm!r} is unknown; allowed: {', '.join(NORMS)}")
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be a finite number")
    if groups < 1 or E % groups:
        raise ValueError(f"groups={groups} must be at least 1 and divide the {E} experts")
    if not 1 <= groups_kept <= groups:
        raise ValueError(f"groups_kept={groups_kept} must be between 1 and groups={groups}")
    if groups_kept < groups:
        if groups_kept * (E // groups) < k:
            raise ValueError(
                f"groups_kept={groups_kept} groups of {E // groups} experts hold fewer experts "
                f"than k={k}"
            )
        if not 1 <= group_top <= E // groups:
            raise ValueError(
                f"group_top={group_top} must be between 1 and the group size {E // groups}"
            )
    if bias_E is not None and tuple(bias_E.shape) != (E,):
        raise ValueError(f"bias_E must have shape ({E},), got {tuple(bias_E.shape)}")
    if valid_T is not None and (tuple(valid_T.shape) != (T,) or valid_T.dtype != torch.bool):
        raise ValueError(
            f"valid_T must be bool of shape ({T},), got {valid_T.dtype} {tuple(valid_T.shape)}"
        )


def topk_gating(
    logits_TE: Tensor,
    k: int,
    *,
    score: str = "softmax",
    norm: str = "topk_sum",
    scale: float = 1.0,
    bias_E: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    group_top: int = 2,
    valid_T: Tensor | None = None,
    backend: str = "auto",
) -> Gating:
    """Choose K experts for every token and compute gates, logsumexp, counts and probability sums.

    See the head of this file for the definitions; the gradient flows through `gate_TK`, `lse_T` and
    `prob_sum_E`, the selection is a constant, and `bias_E` never gets a gradient.

    Args:
        logits_TE: [T, E] float32 (16-bit floats are widened; float64 runs the reference in
            float64).
        k: experts per token, 1 to E.
        score, norm, scale: form of the gates.
        bias_E: [E] added to the score for the selection only.
        groups, groups_kept, group_top: group-limited selection; groups=1 is plain top-K.
        valid_T: [T] bool; rows that are False get expert -1 and gate 0 and are counted nowhere.
        backend: "auto", "triton" or "reference".

    Raises:
        ValueError: an argument out of range, by name and value.

    Sources: score forms and bias of DeepSeek-V3 (arXiv 2412.19437), z loss of ST-MoE (arXiv
        2202.08906), tie and NaN behaviour after the reports pytorch/pytorch#127196 and vllm-
        project/vllm#39391.
    """
    _check(logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T)
    pick_backend(backend, logits_TE, available=("reference",))
    return topk_gating_ref(
        logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T
    )
