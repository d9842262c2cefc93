"""What router gating means: definitions, the plain reference, and device code of all its kernels.

`moe.kernels.routing.topk_gating` is the operator.

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

# ruff: noqa: RUF005 -- Triton's compiler takes neither (*a, b) nor `x in (a, b)`

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.backend import tl, triton

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


def sanitised(raw: Tensor) -> Tensor:
    """NaN → -inf, +inf → the largest finite number. What is replaced gets no gradient, not even the
    0 * NaN that `nan_to_num` would pass back."""
    largest = torch.finfo(raw.dtype).max
    fixed = torch.nan_to_num(raw.detach(), nan=NEG_INF, posinf=largest, neginf=NEG_INF)
    return torch.where(raw.isfinite(), raw, fixed)


def plain_scores(z_TE: Tensor, score: str) -> Tensor:
    """Scores of finite logits; every form has a finite gradient at every finite z."""
    if score == "softmax":
        return torch.softmax(z_TE, dim=-1)
    if score == "sigmoid":
        return torch.sigmoid(z_TE)
    if score == "sqrtsoftplus":
        # below `low`, log(1 + e^z) equals e^z in this dtype; the root's slope would be 0 * inf
        low = -40.0 if z_TE.dtype == torch.float64 else -20.0
        root = torch.logaddexp(z_TE.clamp(min=low), z_TE.new_zeros(())).sqrt()
        # and of large z, e^(z/2) would overflow: no slope passes back, but 0 * inf is NaN
        return torch.where(z_TE < low, torch.exp(z_TE.clamp(max=low) / 2), root)
    return z_TE


def kept_groups(key_TE: Tensor, groups: int, groups_kept: int, top: int) -> Tensor:
    """bool [T, E]: experts of the groups that a token may choose from."""
    T, E = key_TE.shape
    member = key_TE.clamp(min=GROUP_FLOOR).view(T, groups, E // groups)
    best = torch.sort(member, dim=-1, descending=True).values
    total = best[..., 0]
    for i in range(1, top):
        total = total + best[..., i]
    order = torch.sort(total + 0.0, dim=-1, descending=True, stable=True).indices
    keep = torch.zeros_like(total, dtype=torch.bool)
    keep = keep.scatter(1, order[:, :groups_kept], torch.ones_like(keep))
    return keep.repeat_interleave(E // groups, dim=1)


def _select(
    key_TE: Tensor, group_key_TE: Tensor, k: int, groups: int, groups_kept: int, top: int
) -> tuple[Tensor, Tensor]:
    """Indices [T, K] of the K largest keys, (key descending, index ascending); which are usable."""
    if groups_kept < groups:
        kept_TE = kept_groups(group_key_TE, groups, groups_kept, top)
        key_TE = key_TE.masked_fill(~kept_TE, NEG_INF)
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
    raw_TE = logits_TE.to(dtype)
    bad_T = (raw_TE.isnan() | (raw_TE == math.inf)).any(dim=1)
    z_TE = sanitised(raw_TE)
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
        score_TE = plain_scores(soft_TE, score)
    else:
        score_TE = torch.where(live_TE, plain_scores(finite_TE, score), zero)

    with torch.no_grad():
        biased_TE = score_TE if bias_E is None else score_TE + bias_E.to(dtype)
        biased_TE = sanitised(biased_TE)
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


# -------------------------------------------------------------------------------------- device code

# Scores and norms as integers, because a kernel compares constants, not strings.
SCORE_CODE = {name: i for i, name in enumerate(SCORES)}
NORM_CODE = {name: i for i, name in enumerate(NORMS)}
SOFTMAX, SIGMOID, SQRTSOFTPLUS, IDENTITY = (tl.constexpr(i) for i in range(4))
TOPK_SUM, NO_NORM, SOFTMAX_TOPK = (tl.constexpr(i) for i in range(3))
FLT_MAX = tl.constexpr(3.4028234663852886e38)
MINUS_INF = tl.constexpr(float("-inf"))
FLOOR_OF_GROUP = tl.constexpr(GROUP_FLOOR)
NEG_INF_KEY = tl.constexpr(-2139095041)  # ordered(-inf)
EMPTY_KEY = tl.constexpr(-2147483648)  # below every key


@triton.jit
def ordered(x):
    """float32 → int32 of the same order (-0 must have been turned into +0); its own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _log1p(u):
    """log(1 + u) for u in [0, 1] to full relative precision (Kahan): Triton has no log1p."""
    w = 1.0 + u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def elementwise_score(z, SCORE: tl.constexpr):
    """sigmoid, sqrtsoftplus or identity of sanitised logits; 0 for -inf."""
    if SCORE == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-z))
    elif SCORE == SQRTSOFTPLUS:
        softplus = tl.maximum(z, 0.0) + _log1p(tl.exp(-tl.abs(z)))
        return tl.where(z < -20.0, tl.exp(0.5 * z), tl.sqrt(softplus))
    else:
        return tl.where(z > MINUS_INF, z, 0.0)


@triton.jit
def exp_below(x, shift, ASM: tl.constexpr):
    """e^(x - shift); on the GPU two instructions, which flush results below 2^-126 to zero."""
    if ASM:
        power = x * 1.4426950408889634 - shift * 1.4426950408889634
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp(x - shift)


@triton.jit
def key_value(z, shift, inverse, b, SCORE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """What the selection compares, from logits and (if any) their experts' bias; -inf if masked."""
    if HAS_BIAS:
        if SCORE == SOFTMAX:
            c = tl.exp(z - shift) * inverse + b
        else:
            c = elementwise_score(z, SCORE) + b
        return tl.where((z > MINUS_INF) & (c == c), c, MINUS_INF)
    else:
        return z


@triton.jit
def swap(v, swaps, FIRST: tl.constexpr, K: tl.constexpr):
    """Exchange v[i] and v[i + 1] where swaps[i], for i = FIRST, FIRST + 2, …"""
    out = ()
    for i in tl.static_range(K):
        if (i >= FIRST) and ((i - FIRST) % 2 == 0) and (i + 1 < K):
            out = out + (tl.where(swaps[i], v[i + 1], v[i]),)
        elif (i > FIRST) and ((i - FIRST) % 2 == 1):
            out = out + (tl.where(swaps[i - 1], v[i - 1], v[i]),)
        else:
            out = out + (v[i],)
    return out


@triton.jit
def behind(value, column, K: tl.constexpr):
    """Tuple: whether entry i belongs behind entry i + 1 in (value descending, column ascending)."""
    out = ()
    for i in tl.static_range(K - 1):
        out = out + (
            (value[i] < value[i + 1]) | ((value[i] == value[i + 1]) & (column[i] > column[i + 1])),
        )
    return out


@triton.jit
def score_slope(z, s, SCORE: tl.constexpr):
    """Derivative of an elementwise score s(z)."""
    if SCORE == SIGMOID:
        return s * (1.0 - s)
    elif SCORE == SQRTSOFTPLUS:
        steep = z >= -20.0
        slope = 0.5 / ((1.0 + tl.exp(-z)) * tl.where(steep, s, 1.0))
        return tl.where(steep, slope, 0.5 * s)
    else:
        return z * 0.0 + 1.0
