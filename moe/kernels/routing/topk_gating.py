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

# ruff: noqa: RUF005, SIM109 -- Triton's compiler takes neither (*a, b) nor `x in (a, b)`

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels import hopper
from moe.kernels.common.autograd import first_order
from moe.kernels.common.backend import INTERPRET, cdiv, next_power_of_2, pick_backend, tl, triton
from moe.kernels.common.launch import counter, launch, on_device
from moe.kernels.common.networks import largest, merge_descending, sort_descending, stack, top_of
from moe.kernels.common.ops import define_op, is_eager
from moe.kernels.routing.router_logits import router_logits_again
from moe.kernels.routing.routing_metadata import (
    RoutingMetadata,
    clear_tail,
    expert_bits,
    launch_finish,
    launch_place,
    place_block,
    routing_metadata_ref,
    sums_fit,
    words_per_step,
)

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "identity")
NORMS = ("topk_sum", "none", "softmax_topk")
NEG_INF = float("-inf")
# A masked expert counts this much in a group's score: finite, so that a group with one usable
# expert still beats a group with none.
GROUP_FLOOR = -1e30


# What logits were made of by `router_logits`: tokens [T, D], weight [E, D], backend.
MadeOf = tuple[Tensor, Tensor, str]


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


# ------------------------------------------------------------------------------------------ kernels
# Scores and norms as integers, because a kernel compares constants, not strings.
SCORE_CODE = {name: i for i, name in enumerate(SCORES)}
NORM_CODE = {name: i for i, name in enumerate(NORMS)}
_SOFTMAX, _SIGMOID, _SQRTSOFTPLUS, _IDENTITY = (tl.constexpr(i) for i in range(4))
_TOPK_SUM, _NONE, _SOFTMAX_TOPK = (tl.constexpr(i) for i in range(3))
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_NEG_INF = tl.constexpr(float("-inf"))
_GROUP_FLOOR = tl.constexpr(GROUP_FLOOR)
_NEG_INF_KEY = tl.constexpr(-2139095041)  # ordered(-inf)
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
    if SCORE == _SIGMOID:
        return 1.0 / (1.0 + tl.exp(-z))
    elif SCORE == _SQRTSOFTPLUS:
        softplus = tl.maximum(z, 0.0) + _log1p(tl.exp(-tl.abs(z)))
        return tl.where(z < -20.0, tl.exp(0.5 * z), tl.sqrt(softplus))
    else:
        return tl.where(z > _NEG_INF, z, 0.0)


@triton.jit
def _kept_groups(
    biased,
    BT: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    EGP: tl.constexpr,
    KEPT: tl.constexpr,
    TOP: tl.constexpr,
):
    """bool [BT, GP * EGP]: columns of the groups that may be chosen from."""
    member = tl.reshape(tl.maximum(biased, _GROUP_FLOOR), (BT, GP, EGP))
    place = tl.arange(0, EGP)[None, None, :]
    total = tl.max(member, axis=2)
    best = total
    for _ in tl.static_range(1, TOP):
        first = tl.min(tl.where(member == best[:, :, None], place, EGP), axis=2)
        member = tl.where(place == first[:, :, None], -_FLT_MAX, member)
        best = tl.max(member, axis=2)
        total += best
    group = tl.arange(0, GP)[None, :]
    key = tl.where(group < G, ordered(total + 0.0), EMPTY_KEY)
    keep = tl.zeros((BT, GP), dtype=tl.int32)
    for _ in range(KEPT):
        lowest = tl.min(tl.where(key == tl.max(key, axis=1)[:, None], group, GP), axis=1)
        hit = group == lowest[:, None]
        keep = tl.where(hit, 1, keep)
        key = tl.where(hit, EMPTY_KEY, key)
    keep = tl.broadcast_to(keep[:, :, None], (BT, GP, EGP))
    return tl.reshape(keep, (BT, GP * EGP)) > 0


@triton.jit
def _gates(sel_z, ok, shift, inverse, scale, SCORE: tl.constexpr, NORM: tl.constexpr):
    """Gates [BT, KP] of the selected logits; the row's softmax is e^(z - shift) * inverse."""
    if (NORM == _SOFTMAX_TOPK) or ((NORM == _TOPK_SUM) and (SCORE == _SOFTMAX)):
        top = tl.max(tl.where(ok, sel_z, _NEG_INF), axis=1)
        top = tl.where(top > _NEG_INF, top, 0.0)
        gate = tl.where(ok, tl.exp(sel_z - top[:, None]), 0.0)
        total = tl.sum(gate, axis=1)
        gate = gate / tl.where(total > 0.0, total, 1.0)[:, None]
    else:
        if SCORE == _SOFTMAX:
            gate = tl.exp(sel_z - shift[:, None]) * inverse[:, None]
        else:
            gate = elementwise_score(sel_z, SCORE)
        gate = tl.where(ok, gate, 0.0)
        if NORM == _TOPK_SUM:
            gate = gate / (tl.sum(gate, axis=1) + 1e-20)[:, None]
    return gate * scale


@triton.jit
def _exact_tile(
    logits,
    bias,
    valid,
    expert,
    gate,
    lse,
    first_row,
    end_row,
    stride_t,
    stride_e,
    scale,
    rounds,
    E: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    EGP: tl.constexpr,
    EB: tl.constexpr,
    KEPT: tl.constexpr,
    TOP: tl.constexpr,
    SCORE: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    BT: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Route BT rows by K rounds of arg-max, any input and any form; groups padded to EGP columns.

    Returns counts [EB], probability sums [EP] (by padded column) and the number of rows that needed
    the non-finite policy. SECOND: the rows' probabilities are in already, unless their `lse` is not
    finite.
    """
    EP: tl.constexpr = GP * EGP
    EG: tl.constexpr = E // G
    place = tl.arange(0, EP)
    if GP == 1:
        column = place
        real = place < E
    else:
        column = (place // EGP) * EG + place % EGP
        real = (place % EGP < EG) & (place // EGP < G)
    row = first_row + tl.arange(0, BT)
    inside = row < end_row
    row = row.to(tl.int64)
    at = logits + row[:, None] * stride_t + column[None, :].to(tl.int64) * stride_e
    raw = tl.load(at, mask=inside[:, None] & real[None, :], other=_NEG_INF).to(tl.float32)
    use = inside
    if HAS_VALID:
        use = use & (tl.load(valid + row, mask=inside, other=0) != 0)
    # The comparison is explicit: what max and min do with NaN differs between compilers.
    strange = (raw != raw) | (raw == float("inf"))
    z = tl.where(raw != raw, _NEG_INF, tl.minimum(raw, _FLT_MAX)) + 0.0
    live = z > _NEG_INF
    shift = tl.max(z, axis=1)
    some = shift > _NEG_INF
    shift = tl.where(some, shift, 0.0)
    exps = tl.exp(z - shift[:, None])
    total = tl.where(some, tl.sum(exps, axis=1), 1.0)
    inverse = 1.0 / total
    counted = use & some
    if SECOND:
        before = tl.load(lse + row, mask=inside, other=0.0)
        counted = counted & ((tl.abs(before) < float("inf")) == 0)
        tl.debug_barrier()
    tl.store(lse + row, tl.where(use & some, shift + tl.log(total), 0.0), mask=inside)
    score = z
    if SCORE == _SOFTMAX:
        score = exps * inverse[:, None]
        prob = score
    elif SCORE == _SIGMOID or SCORE == _SQRTSOFTPLUS:
        score = elementwise_score(z, SCORE)
        prob = score / (tl.sum(score, axis=1) + 1e-20)[:, None]
    else:
        prob = exps * inverse[:, None]
    prob_sum = tl.sum(tl.where(counted[:, None], prob, 0.0), axis=0)

    key = z
    if HAS_BIAS or KEPT < G:
        biased = score
        if HAS_BIAS:
            biased = score + tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
            biased = tl.where(biased != biased, _NEG_INF, tl.minimum(biased, _FLT_MAX))
            biased = tl.where(live, biased, _NEG_INF)
            key = biased
        else:
            biased = tl.where(live, biased, _NEG_INF)
        if KEPT < G:
            key = tl.where(_kept_groups(biased, BT, G, GP, EGP, KEPT, TOP), key, _NEG_INF)
    key = tl.where(real[None, :], ordered(key), EMPTY_KEY)

    slot = tl.arange(0, KP)[None, :]
    sel_z = tl.full((BT, KP), _NEG_INF, dtype=tl.float32)
    sel_id = tl.zeros((BT, KP), dtype=tl.int32)
    for k in range(rounds):
        best = tl.max(key, axis=1)
        pick = tl.min(tl.where(key == best[:, None], place[None, :], EP), axis=1)
        hit = place[None, :] == pick[:, None]
        if HAS_BIAS or KEPT < G:
            picked = tl.sum(tl.where(hit, z, 0.0), axis=1)
            picked = tl.where(best > _NEG_INF_KEY, picked, _NEG_INF)
        else:
            picked = unordered(best)
        if GP != 1:
            pick = (pick // EGP) * EG + pick % EGP
        sel_z = tl.where(slot == k, picked[:, None], sel_z)
        sel_id = tl.where(slot == k, pick[:, None], sel_id)
        key = tl.where(hit, EMPTY_KEY, key)

    ok = sel_z > _NEG_INF
    gates = _gates(sel_z, ok, shift, inverse, scale, SCORE, NORM)
    out = row[:, None] * K + slot
    mask = inside[:, None] & (slot < K)
    tl.store(gate + out, tl.where(use[:, None], gates, 0.0), mask=mask)
    tl.store(expert + out, tl.where(use[:, None], sel_id, -1), mask=mask)
    # Counted from memory: in Triton 3.6 a histogram of a reshaped tensor miscounts tiles with rows
    # that are not there or not valid (seen on an H200; its mask seems not to be reordered with it).
    tl.debug_barrier()
    zero = tl.zeros((1,), dtype=tl.int64)
    pair = (zero + first_row) * K + tl.arange(0, BT * KP)
    mine = pair < (zero + tl.minimum(first_row + BT, end_row)) * K
    ids = tl.load(expert + pair, mask=mine, other=-1)
    counts = tl.histogram(ids, EB, mask=ids >= 0)
    short = tl.sum(ok.to(tl.int32), axis=1) < K
    odd = use & (short | (tl.max(strange.to(tl.int32), axis=1) > 0))
    return counts, prob_sum, tl.sum(odd.to(tl.int32), axis=0)


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
        if SCORE == _SOFTMAX:
            c = tl.exp(z - shift) * inverse + b
        else:
            c = elementwise_score(z, SCORE) + b
        return tl.where((z > _NEG_INF) & (c == c), c, _NEG_INF)
    else:
        return z


@triton.jit
def _bucket_keys(
    values, lane, BUCKETS: tl.constexpr, LANES: tl.constexpr, N: tl.constexpr, J: tl.constexpr
):
    """Tuple of N sortable keys [BT, LANES]: maxima of buckets, bucket number in the low bits."""
    keys = ()
    for n in tl.static_range(N):
        best = values[n * J]
        for j in tl.static_range(1, J):
            best = tl.maximum(best, values[n * J + j])
        best = tl.max(best, axis=2)
        key = ordered(best + 0.0) & -BUCKETS
        keys = keys + (key | (BUCKETS - 1 - n * LANES - lane)[None, :],)
    return keys


@triton.jit
def _stage_one(
    logits, bias, row, use, stride_t, prob,
    E: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BUCKETS: tl.constexpr,
    LANES: tl.constexpr, N: tl.constexpr, J: tl.constexpr, SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Read BT whole rows: their best K buckets, their softmax, their probabilities into `prob`.

    LANES neighbouring threads share a row; each has N buckets of J vectors of 4 columns. Returns L
    sorted bucket keys, the softmax's shift and sum, whether more than K buckets could be among the
    best K when the low bits of the maxima, which the bucket number replaces, are ignored, and prob.
    """
    W: tl.constexpr = 4 * LANES
    lane = tl.arange(0, LANES)
    column = lane[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    at = (logits + row * stride_t)[:, None, None] + column
    xs = ()
    for i in tl.static_range(N * J):
        mask = use[:, None, None]
        if (i + 1) * W > E:
            mask = mask & (i * W + column < E)
        xs = xs + (tl.load(at + i * W, mask=mask, other=_NEG_INF).to(tl.float32),)
    # Without a bias buckets are compared by logits, and the best of them, but for its low bits,
    # serves as the softmax's shift.
    if HAS_BIAS:
        best = xs[0]
        for i in tl.static_range(1, N * J):
            best = tl.maximum(best, xs[i])
        shift = tl.max(tl.max(best, axis=2), axis=1)
    else:
        keys = _bucket_keys(xs, lane, BUCKETS, LANES, N, J)
        top = largest(top_of(keys, N, L, EMPTY_KEY), 1, L)
        shift = unordered(top[0] & -BUCKETS)
    scores = ()
    part = xs[0]
    for i in tl.static_range(N * J):
        e = exp_below(xs[i], shift[:, None, None], ASM)
        if i == 0:
            part = e
        else:
            part += e
        scores = scores + (e,)
    total = tl.sum(tl.sum(part, axis=2), axis=1)
    inverse = 1.0 / total
    norm = inverse
    if SCORE == _SIGMOID or SCORE == _SQRTSOFTPLUS:
        scores = ()
        for i in tl.static_range(N * J):
            s = elementwise_score(xs[i], SCORE)
            if i == 0:
                part = s
            else:
                part += s
            scores = scores + (s,)
        norm = 1.0 / (tl.sum(tl.sum(part, axis=2), axis=1) + 1e-20)
    if HAS_BIAS:
        values = ()
        for i in tl.static_range(N * J):
            b = tl.load(bias + i * W + column, mask=i * W + column < E, other=0.0).to(tl.float32)
            values = values + (
                key_value(xs[i], shift[:, None, None], inverse[:, None, None], b, SCORE, True),
            )
        keys = _bucket_keys(values, lane, BUCKETS, LANES, N, J)
        top = largest(top_of(keys, N, L, EMPTY_KEY), 1, L)
    level = (top[K - 1] & -BUCKETS)[:, None]
    found = (keys[0] >= level).to(tl.int32)
    for n in tl.static_range(1, N):
        found += (keys[n] >= level).to(tl.int32)
    crowded = tl.sum(found, axis=1).to(tl.int32) > K
    # the probabilities of rows whose softmax is not finite are left to `_exact_tile`
    sound = (use & (total > 0.0) & (total < float("inf")))[:, None, None]
    added = ()
    for i in tl.static_range(N * J):
        p = scores[i] * norm[:, None, None]
        added = added + (prob[i] + tl.where(sound, p, 0.0),)
    return top, shift, total, crowded, added


@triton.jit
def _columns(v):
    """[B, 4] → tuple of its four columns [B]."""
    even, odd = tl.split(tl.reshape(v, (v.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


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
def _stage_two(
    logits, bias, row, use, stride_t, buckets, shift, inverse,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BUCKETS: tl.constexpr,
    LANES: tl.constexpr, J: tl.constexpr, SCORE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The best K elements of the K `buckets` of every row, one thread a row.

    Returns tuples of K columns and logits in order, and whether that order, or the cut after the
    K-th, could not be told (or the K-th is masked: such rows follow the non-finite policy).
    """
    W: tl.constexpr = 4 * LANES
    base = logits + row * stride_t
    four = tl.arange(0, 4)[None, :]
    tiles = ()
    for k in tl.static_range(K):
        bucket = BUCKETS - 1 - (buckets[k] & (BUCKETS - 1))
        for j in tl.static_range(J):
            c = (((bucket // LANES) * J + j) * W + (bucket % LANES) * 4)[:, None] + four
            mask = use[:, None] & (c < E)
            z = tl.load(base[:, None] + c, mask=mask, other=_NEG_INF).to(tl.float32)
            b = z
            if HAS_BIAS:
                b = tl.load(bias + c, mask=mask, other=0.0).to(tl.float32)
            v = key_value(z, shift[:, None], inverse[:, None], b, SCORE, HAS_BIAS)
            tiles = tiles + (_columns((ordered(v + 0.0) & -EP) | (EP - 1 - c)),)
    for i in tl.static_range(4 * J):
        keys = ()
        for k in tl.static_range(K):
            keys = keys + (tiles[k * J + i // 4][i % 4],)
        for _ in tl.static_range(L - K):
            keys = keys + (tl.full(keys[0].shape, EMPTY_KEY, tl.int32),)
        keys = sort_descending(keys, L)
        if i == 0:
            best = keys
        else:
            best = merge_descending(best, keys, L)
    level = best[K - 1] & -EP
    found = level * 0
    for i in tl.static_range(K * J):
        for part in tl.static_range(4):
            found += (tiles[i][part] >= level).to(tl.int32)
    flag = found > K

    # Keys that agree in all but the low bits may stand in the wrong order: one pass of exchanges of
    # neighbours by the exact values, then a check.
    columns = ()
    zs = ()
    values = ()
    for k in tl.static_range(K):
        c = EP - 1 - (best[k] & (EP - 1))
        mask = use & (c < E)
        z = tl.load(base + c, mask=mask, other=_NEG_INF).to(tl.float32) + 0.0
        b = z
        if HAS_BIAS:
            b = tl.load(bias + c, mask=mask, other=0.0).to(tl.float32)
        columns = columns + (c,)
        zs = zs + (z,)
        values = values + (key_value(z, shift, inverse, b, SCORE, HAS_BIAS),)
    for first in tl.static_range(2):
        swaps = behind(values, columns, K)
        columns = swap(columns, swaps, first, K)
        zs = swap(zs, swaps, first, K)
        values = swap(values, swaps, first, K)
    swaps = behind(values, columns, K)
    for k in tl.static_range(K - 1):
        flag = flag | swaps[k]
    return columns, zs, flag | ((values[K - 1] > _NEG_INF) == 0)


@triton.jit
def _rank_block(expert, row_S, begin, end, SLOTS: tl.constexpr):
    """row_S[i] = slots begin … i - 1 with the expert of slot i."""
    i = tl.arange(0, SLOTS)
    inside = begin + i < end
    e = tl.load(expert + begin + i, mask=inside, other=-1)
    earlier = (e[:, None] == e[None, :]) & (i[None, :] < i[:, None])
    tl.store(row_S + begin + i, tl.sum(earlier.to(tl.int32), axis=1).to(tl.int32), mask=inside)


@triton.jit
def _sum_and_place(
    expert, counts, prob_sum, odd, part_counts, part_prob, part_odd, offsets, row_S, slot_R,
    token_R, S, blocks,
    K: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
    CLEAR: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """From what at most BB programs found of BLOCK tokens each: the sums, and the rows of all S
    slots from the ranks in their blocks. `part_counts` is overwritten."""
    EP: tl.constexpr = 1 << BITS
    column = tl.arange(0, EP)
    block = tl.arange(0, BB)
    at = block[:, None] * E + column[None, :]
    mask = (block < blocks)[:, None] & (column < E)[None, :]
    count = tl.load(part_counts + at, mask=mask, other=0)
    prob = tl.load(part_prob + at, mask=mask, other=0.0)
    rows = tl.load(part_odd + block, mask=block < blocks, other=0)
    total = tl.sum(count, axis=0).to(tl.int32)
    start = tl.cumsum(total, axis=0).to(tl.int32) - total
    pairs = tl.sum(total, axis=0).to(tl.int32)
    next_row = tl.cumsum(count, axis=0).to(tl.int32) - count + start[None, :]
    tl.debug_barrier()  # all have read the counts
    tl.store(part_counts + at, next_row, mask=mask)
    tl.store(counts + column, total, mask=column < E)
    tl.store(prob_sum + column, tl.sum(prob, axis=0), mask=column < E)
    tl.store(odd, tl.sum(rows, axis=0).to(tl.int32))
    tl.store(offsets + column, start, mask=column < E)
    tl.store(offsets + E, pairs)
    tl.debug_barrier()  # other threads read the rows
    for first in range(0, S, STEP):
        slot = first + tl.arange(0, STEP)
        inside = slot < S
        t = slot // K
        e = tl.load(expert + slot, mask=inside, other=-1)
        rank = tl.load(row_S + slot, mask=inside, other=0)
        ok = e >= 0
        row = tl.load(part_counts + (t // BLOCK) * E + e, mask=ok, other=0) + rank
        tl.store(row_S + slot, tl.where(ok, row, -1), mask=inside)
        tl.store(slot_R + row, slot, mask=ok)
        tl.store(token_R + row, t, mask=ok)
    if CLEAR:
        clear_tail(slot_R, token_R, pairs, S, 0, 1, 1024)


@triton.jit(do_not_specialize=["T", "block", "rounds"])
def _gating_kernel(
    logits, bias, valid, expert, gate, lse, counts_out, prob_out, odd_out, offsets, row_S,
    slot_R, token_R, work, finished, T, block, stride_t, stride_e, scale, rounds,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, EGP: tl.constexpr, EB: tl.constexpr, KEPT: tl.constexpr, TOP: tl.constexpr,
    SCORE: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_VALID: tl.constexpr,
    BX: tl.constexpr, BT: tl.constexpr, SUB: tl.constexpr, L: tl.constexpr, BUCKETS: tl.constexpr,
    LANES: tl.constexpr, N: tl.constexpr, J: tl.constexpr, META: tl.constexpr,
    BITS: tl.constexpr, WORDS: tl.constexpr, BB: tl.constexpr, BLOCK: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Route one block of tokens; its counts, probability sums and number of rows that needed the
    non-finite policy go to its row of the output arrays. META 1: the only program, which goes on to
    make the routing metadata. META 2: those results go to `work` [blocks (2E + 1)], and the program
    that finishes last, told by the counter `finished`, makes the sums and the routing metadata of
    all. Which program that is changes nothing in the results.

    L == 0: `_exact_tile`, any form. L > 0: top-K in two stages, exact or flagged. A row is cut into
    BUCKETS buckets of 4 J columns; the K best elements lie in the K buckets with the best maxima,
    so stage one finds those, and stage two the best K of their 4 J K elements. Both use sorting
    networks on 32-bit keys whose low bits hold the bucket or the column instead of the value's
    lowest bits. That is the certificate: where the cut falls between keys that agree in all other
    bits, the tile is flagged and `_exact_tile` chooses again. So it is for NaN, for masked experts
    among the best K, and for values so large that the approximate shift overflows the softmax.
    """
    EP: tl.constexpr = GP * EGP
    # the row's softmax itself is wanted in stage two, not only the order of its logits
    SOFTMAX_KEPT: tl.constexpr = (SCORE == _SOFTMAX) and (HAS_BIAS or (NORM == _NONE))
    begin = tl.program_id(0) * block
    end = tl.minimum(begin + block, T)
    place = tl.arange(0, EP)
    bin = tl.arange(0, EB)
    counts = tl.zeros((EB,), dtype=tl.int32)
    prob_sum = tl.zeros((EP,), dtype=tl.float32)
    odd = tl.program_id(0) * 0
    blocks = tl.num_programs(0)
    part_counts = counts_out
    part_prob = prob_out
    part_odd = odd_out
    if META == 2:
        part_counts = work
        part_prob = (work + blocks * E).to(tl.pointer_type(tl.float32), bitcast=True)
        part_odd = work + 2 * blocks * E
    prob_at = part_prob + tl.program_id(0) * E
    counts_at = part_counts + tl.program_id(0) * E
    if L == 0:
        for first_row in range(begin, end, BX):
            c, p, o = _exact_tile(
                logits, bias, valid, expert, gate, lse, first_row, end, stride_t, stride_e, scale,
                rounds, E, K, KP, G, GP, EGP, EB, KEPT, TOP, SCORE, NORM, HAS_BIAS, HAS_VALID, BX,
                False,
            )  # fmt: skip
            counts += c
            prob_sum += p
            odd += o
        if GP == 1:
            column = place
            real = place < E
        else:
            column = (place // EGP) * (E // G) + place % EGP
            real = (place % EGP < E // G) & (place // EGP < G)
        tl.store(prob_at + column, prob_sum, mask=real)
    else:
        prob = ()
        for _ in tl.static_range(N * J):
            prob = prob + (tl.zeros((BT, LANES, 4), dtype=tl.float32),)
        for first_row in range(begin, end, BT * SUB):
            last_row = tl.minimum(first_row + BT * SUB, end)
            slot = tl.arange(0, L)[None, :]
            for some_row in range(first_row, last_row, BT):
                row = some_row + tl.arange(0, BT)
                inside = row < end
                row = row.to(tl.int64)
                use = inside
                if HAS_VALID:
                    use = use & (tl.load(valid + row, mask=inside, other=0) != 0)
                top, shift, total, crowded, prob = _stage_one(
                    logits, bias, row, use, stride_t, prob,
                    E, K, L, BUCKETS, LANES, N, J, SCORE, HAS_BIAS, ASM,
                )  # fmt: skip
                # stage two has other rows in a thread: what it needs goes through memory
                buckets = tl.where(crowded[:, None], -1, stack(top, L) & (BUCKETS - 1))
                at = row[:, None] * K + slot
                tl.store(expert + at, buckets, mask=inside[:, None] & (slot < K))
                tl.store(lse + row, tl.where(use, shift + tl.log(total), 0.0), mask=inside)
                if SOFTMAX_KEPT:
                    tl.store(gate + row * K, shift, mask=inside)
                    tl.store(gate + row * K + 1, total, mask=inside)
            tl.debug_barrier()
            row = first_row + tl.arange(0, BT * SUB)
            inside = row < end
            row = row.to(tl.int64)
            use = inside
            if HAS_VALID:
                use = use & (tl.load(valid + row, mask=inside, other=0) != 0)
            row_lse = tl.load(lse + row, mask=inside, other=0.0)
            shift = row_lse
            inverse = row_lse
            if SOFTMAX_KEPT:
                shift = tl.load(gate + row * K, mask=inside, other=0.0)
                inverse = 1.0 / tl.load(gate + row * K + 1, mask=inside, other=1.0)
            buckets = ()
            for k in tl.static_range(K):
                buckets = buckets + (tl.load(expert + row * K + k, mask=inside, other=0),)
            columns, zs, unclear = _stage_two(
                logits, bias, row, use, stride_t, buckets, shift, inverse,
                E, EP, K, L, BUCKETS, LANES, J, SCORE, HAS_BIAS,
            )  # fmt: skip
            flag = use & (unclear | (buckets[0] < 0) | ((tl.abs(row_lse) < float("inf")) == 0))
            for _ in tl.static_range(L - K):
                columns = columns + (columns[0],)
                zs = zs + (zs[0],)
            tl.debug_barrier()  # all have read what is now overwritten
            if tl.max(flag.to(tl.int32), axis=0) > 0:
                for some_row in range(first_row, last_row, BX):
                    c, p, o = _exact_tile(
                        logits, bias, valid, expert, gate, lse, some_row, end, stride_t, stride_e,
                        scale, rounds, E, K, KP, G, GP, EGP, EB, KEPT, TOP, SCORE, NORM, HAS_BIAS,
                        HAS_VALID, BX, True,
                    )  # fmt: skip
                    counts += c
                    prob_sum += p
                    odd += o
            else:
                ids = stack(columns, L)
                gates = _gates(stack(zs, L), slot < K, shift, inverse, scale, SCORE, NORM)
                at = row[:, None] * K + slot
                mask = inside[:, None] & (slot < K)
                tl.store(expert + at, tl.where(use[:, None], ids, -1), mask=mask)
                tl.store(gate + at, tl.where(use[:, None], gates, 0.0), mask=mask)
                # Counted from memory: the histogram of Triton 3.6 miscounts the layout of `ids`.
                tl.debug_barrier()
                zero = tl.zeros((1,), dtype=tl.int64)
                pair = (zero + first_row) * K + tl.arange(0, BT * SUB * L)
                mine = pair < (zero + last_row) * K
                ids = tl.load(expert + pair, mask=mine, other=-1)
                counts += tl.histogram(ids, EB, mask=ids >= 0)
        W: tl.constexpr = 4 * LANES
        column = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
        for i in tl.static_range(N * J):
            tl.store(prob_at + i * W + column, tl.sum(prob[i], axis=0), mask=i * W + column < E)
        # what flagged tiles added comes on top, once the stores above are visible to the program
        tl.debug_barrier()
        part = tl.load(prob_at + place, mask=place < E, other=0.0)
        tl.debug_barrier()
        tl.store(prob_at + place, part + prob_sum, mask=place < E)
    tl.store(counts_at + bin, counts, mask=bin < E)
    tl.store(part_odd + tl.program_id(0), odd)
    if META == 2:
        tl.debug_barrier()  # expert ids are read back by other threads
        _rank_block(expert, row_S, begin * K, end * K, BLOCK * KP)
        tl.debug_barrier()  # before it counts as finished, all threads have written
        if tl.atomic_add(finished, 1, sem="acq_rel", scope="gpu") == blocks - 1:
            tl.store(finished, 0)
            _sum_and_place(
                expert, counts_out, prob_out, odd_out, part_counts, part_prob, part_odd, offsets,
                row_S, slot_R, token_R, T * K, blocks, K, E, BITS, BB, BLOCK, HAS_VALID,
                min(4096, BB * BLOCK * KP),
            )  # fmt: skip
    if META == 1:
        tl.debug_barrier()  # counts and expert ids are read back by other threads
        column = tl.arange(0, 1 << BITS)
        total = tl.load(counts_at + column, mask=column < E, other=0)
        tl.static_assert(BITS <= 10)  # else the counts would be overwritten
        place_block(
            expert, expert, total, total * 0, counts_at, offsets, row_S, slot_R, token_R, 0, T * K,
            T * K, 0, 1, K, E, BITS, WORDS, False, HAS_VALID, ASM,
        )  # fmt: skip


@triton.jit
def score_slope(z, s, SCORE: tl.constexpr):
    """Derivative of an elementwise score s(z)."""
    if SCORE == _SIGMOID:
        return s * (1.0 - s)
    elif SCORE == _SQRTSOFTPLUS:
        steep = z >= -20.0
        slope = 0.5 / ((1.0 + tl.exp(-z)) * tl.where(steep, s, 1.0))
        return tl.where(steep, slope, 0.5 * s)
    else:
        return z * 0.0 + 1.0


@triton.jit(do_not_specialize=["T", "rounds"])
def _backward_kernel(
    logits, expert, gate, d_gate, d_lse, d_prob, d_logits, T, stride_t, stride_e, scale, rounds,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    SCORE: tl.constexpr, NORM: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LSE: tl.constexpr,
    HAS_PROB: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """d_logits of BT rows from the gradients of gates, logsumexp and probability sums."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    inside = row < T
    row = row.to(tl.int64)
    column = tl.arange(0, EP)
    mask = inside[:, None] & (column < E)[None, :]
    at = row[:, None] * stride_t + column[None, :].to(tl.int64) * stride_e
    raw = tl.load(logits + at, mask=mask, other=_NEG_INF).to(tl.float32)
    z = tl.where(raw != raw, _NEG_INF, tl.minimum(raw, _FLT_MAX))
    live = z > _NEG_INF
    # not e^(z - lse): lse is a rounded number, and in rows of large logits a coarse one
    shift = tl.max(z, axis=1)
    shift = tl.where(shift > _NEG_INF, shift, 0.0)
    p = tl.exp(z - shift[:, None])
    total = tl.sum(p, axis=1)
    inverse_total = 1.0 / tl.where(total > 0.0, total, 1.0)
    p = p * inverse_total[:, None]
    dz = tl.zeros((BT, EP), dtype=tl.float32)
    on_p = tl.zeros((BT,), dtype=tl.float32)  # factor of the whole row p
    if HAS_LSE:
        on_p += tl.load(d_lse + row, mask=inside, other=0.0)
    if HAS_PROB:
        dp = tl.load(d_prob + column, mask=column < E, other=0.0)[None, :]
        if SCORE == _SIGMOID or SCORE == _SQRTSOFTPLUS:
            s = tl.where(live, elementwise_score(z, SCORE), 0.0)
            inverse = (1.0 / (tl.sum(s, axis=1) + 1e-20))[:, None]
            mean = tl.sum(s * inverse * dp, axis=1)[:, None]
            dz += (dp - mean) * inverse * score_slope(z, s, SCORE)
        else:
            dz += p * dp
            on_p -= tl.sum(p * dp, axis=1)
    if HAS_GATE:
        slot = tl.arange(0, KP)[None, :]
        slots = inside[:, None] & (slot < K)
        here = row[:, None] * K + slot
        id = tl.load(expert + here, mask=slots, other=-1)
        g = tl.load(gate + here, mask=slots, other=0.0)
        dg = tl.load(d_gate + here, mask=slots, other=0.0) * scale
        at_id = row[:, None] * stride_t + id.to(tl.int64) * stride_e
        zk = tl.load(logits + at_id, mask=slots & (id >= 0), other=_NEG_INF).to(tl.float32)
        zk = tl.where(zk != zk, _NEG_INF, tl.minimum(zk, _FLT_MAX))
        # slots that were filled for want of usable experts have the constant gate 0
        ok = (id >= 0) & (zk > _NEG_INF)
        if (NORM == _SOFTMAX_TOPK) or (SCORE != _IDENTITY):
            ok = ok & (g != 0.0)
        dg = tl.where(ok, dg, 0.0)
        if (NORM == _SOFTMAX_TOPK) or ((NORM == _TOPK_SUM) and (SCORE == _SOFTMAX)):
            g = _gates(zk, ok, shift, shift, 1.0, SCORE, NORM)
            dk = g * (dg - tl.sum(g * dg, axis=1)[:, None])
        elif SCORE == _SOFTMAX:
            dk = tl.where(ok, tl.exp(zk - shift[:, None]) * inverse_total[:, None], 0.0) * dg
            on_p -= tl.sum(dk, axis=1)
        else:
            sk = tl.where(ok, elementwise_score(zk, SCORE), 0.0)
            dk = dg
            if NORM == _TOPK_SUM:
                inverse = (1.0 / (tl.sum(sk, axis=1) + 1e-20))[:, None]
                dk = (dg - tl.sum(sk * inverse * dg, axis=1)[:, None]) * inverse
            dk = tl.where(ok, dk * score_slope(zk, sk, SCORE), 0.0)
        for k in range(rounds):
            idk = tl.max(tl.where(slot == k, id, -1), axis=1)
            add = tl.sum(tl.where(slot == k, dk, 0.0), axis=1)
            dz += tl.where(column[None, :] == idk[:, None], add[:, None], 0.0)
    dz += p * on_p[:, None]
    # rows that are not valid took no part; NaN, +inf and -inf were replaced by constants
    used = tl.load(expert + row * K, mask=inside, other=-1) >= 0
    dz = tl.where(used[:, None] & live & (raw < float("inf")), dz, 0.0)
    out = row[:, None] * E + column[None, :]
    tl.store(d_logits + out, dz.to(d_logits.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "rounds"])
def _gates_backward_kernel(
    expert, gate, lse, d_gate, d_logits, T, inverse_scale, scale, rounds,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HAS_GATE: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """d_logits of BT rows from the gradient of gates that are a softmax over the chosen logits."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    inside = row < T
    column = tl.arange(0, EP)
    slot = tl.arange(0, KP)[None, :]
    row = row.to(tl.int64)
    slots = inside[:, None] & (slot < K)
    here = row[:, None] * K + slot
    id = tl.load(expert + here, mask=slots, other=-1)
    dz = tl.zeros((BT, EP), dtype=tl.float32)
    if HAS_GATE:
        g = tl.load(gate + here, mask=slots, other=0.0) * inverse_scale
        dg = tl.load(d_gate + here, mask=slots, other=0.0) * scale
        # Slots that were filled for want of usable experts have the constant gate 0. Where the
        # largest logit is the largest number, the chosen ones beside it have 0 too; it stands for
        # an infinity, a constant.
        finite = tl.load(lse + row, mask=inside, other=0.0) < _FLT_MAX
        ok = (id >= 0) & (g != 0.0) & finite[:, None]
        dg = tl.where(ok, dg, 0.0)
        g = tl.where(ok, g, 0.0)
        dk = g * (dg - tl.sum(g * dg, axis=1)[:, None])
        for k in range(rounds):
            idk = tl.max(tl.where(slot == k, id, -1), axis=1)
            add = tl.sum(tl.where(slot == k, dk, 0.0), axis=1)
            dz += tl.where(column[None, :] == idk[:, None], add[:, None], 0.0)
    out = row[:, None] * E + column[None, :]
    tl.store(d_logits + out, dz, mask=inside[:, None] & (column < E)[None, :])


# ---------------------------------------------------------------------------------------- launchers


class _Plan(NamedTuple):
    """How a shape is run: programs, tokens a program, and the kernel's compile-time sizes."""

    blocks: int
    block: int
    sizes: dict[str, int]
    warps: int
    last_sorts: bool = False  # the last program to finish, with metadata; its sizes have BB, BLOCK


# A single program routes and sorts up to this much: 256 tokens of 8 experts take 6.9 us (H200). It
# took 9.6 for 512, where several programs, whose last one sorts, take 5.0.
_ONE_PROGRAM_LOGITS = 2048
_ONE_PROGRAM_ROWS = 2048
# Up to so many slots the last of several programs sorts them: the host spends less on one launch.
_LAST_PROGRAM_SLOTS = 4096
_RANKED_SLOTS = 64  # of a program then, each compared with each
_FAST_LARGEST_K = 16
_NO_BUCKETS = {"L": 0, "BUCKETS": 1, "LANES": 1, "N": 1, "J": 1, "BT": 1, "SUB": 1}


# What the benchmark sets to time other plans than the rules below give: "exact" (1: no two-stage
# selection), "lanes" (threads of a row), "warps" (of a program), "sub" (1, 2, 4: tiles that stage
# two takes at once), "each" (steps of a program); where one program does all, "warps", "elements"
# (logits of a thread in one step) and "words" (words of 32 slots that it sorts at once); "last" for
# `_LAST_PROGRAM_SLOTS`.
forced_plan: dict[str, int] = {}


def _fast_sizes(E: int, k: int) -> dict[str, int] | None:
    """Bucket sizes of the two-stage selection, or None where it does not pay."""
    if E < 64 or k > _FAST_LARGEST_K or (k > 8 and E < 128):
        return None
    vectors = 1 if E <= 1024 else 2  # J: columns of a bucket / 4
    lanes = forced_plan.get("lanes", 4)
    while lanes * 32 * vectors < E and lanes < 64:
        lanes *= 2
    if lanes * 32 * vectors < E:
        return None
    each = cdiv(E, lanes * 4 * vectors)
    return {
        "L": 2 if k <= 2 else 8 if k <= 8 else 16,
        "BUCKETS": lanes * next_power_of_2(each),
        "LANES": lanes,
        "N": each,
        "J": vectors,
    }


def _plan(*shape: int) -> _Plan:
    return _new_plan(*shape) if forced_plan else _known_plan(*shape)


@functools.lru_cache(256)
def _known_plan(*shape: int) -> _Plan:
    return _new_plan(*shape)


def _new_plan(T: int, E: int, k: int, *form: int) -> _Plan:
    plan = _division(T, E, k, *form)
    few = T * k <= forced_plan.get("last", _LAST_PROGRAM_SLOTS)
    if plan.blocks == 1 or not few or not sums_fit(plan.blocks, E):
        return plan
    if plan.block * plan.sizes["KP"] > _RANKED_SLOTS:
        return plan
    sizes = plan.sizes | {"BB": next_power_of_2(plan.blocks), "BLOCK": plan.block}
    sizes["maxnreg"] = 168  # else the assembler spills to fit more programs on an SM
    return plan._replace(sizes=sizes, last_sorts=True)


def _division(T: int, E: int, k: int, groups: int, groups_kept: int, contiguous: bool) -> _Plan:
    np2 = next_power_of_2
    limited = groups_kept < groups
    G = groups if limited else 1
    sizes = {
        "E": E, "K": k, "KP": np2(k), "G": G, "GP": np2(G), "EGP": np2(E // G),
        "EB": max(32, np2(E)), "KEPT": groups_kept if limited else 1, "BITS": expert_bits(E),
        "WORDS": forced_plan.get("words", words_per_step(E)), "BB": 1, "BLOCK": 1,
        **_NO_BUCKETS,
    }  # fmt: skip
    width = max(sizes["GP"] * sizes["EGP"], sizes["KP"])
    fast = None if limited or not contiguous or k == 1 else _fast_sizes(E, k)
    if fast is None or forced_plan.get("exact"):
        # with 32 rows of 64 columns some forms spill
        sizes["BX"] = forced_plan.get(
            "bx", max(1, min(256, (1024 if width == 64 else 2048) // width))
        )
        if T * width <= forced_plan.get("one", _ONE_PROGRAM_LOGITS) and T <= _ONE_PROGRAM_ROWS:
            warps = forced_plan.get("warps", 8)
            elements = forced_plan.get("elements", 8)
            sizes["BX"] = min(np2(max(T, 1)), max(1, warps * 32 * elements // width))
            return _Plan(1, max(T, 1), sizes, warps)
        # few tokens: many programs of few rows each, whose counts the sort adds up itself
        while "bx" not in forced_plan and sizes["BX"] > 8 and 64 * sizes["BX"] > T:
            sizes["BX"] //= 2
        tiles = cdiv(T, sizes["BX"])
        each = forced_plan.get("each", max(1, min(16, tiles // 1024)))
        return _Plan(cdiv(tiles, each), each * sizes["BX"], sizes, 4)
    # beyond 2048 experts four warps spill
    warps = max(forced_plan.get("warps", 8 if E > 2048 else 4), fast["LANES"] // 32)
    sizes.update(fast)
    sizes["BT"] = warps * 32 // fast["LANES"]
    sizes["BX"] = max(1, min(sizes["BT"], 1024 // width))
    # With four threads a row, stage two takes one tile at once: on an H200 at T=65536, E=128, K=8
    # four tiles at once take 77 us instead of 53 (bench/router.py --tune --shapes 7).
    sub = 1 if fast["LANES"] == 4 else min(4, fast["LANES"])
    while sub > 1 and sub * sizes["BT"] * 264 > T:
        sub //= 2
    sizes["SUB"] = sub = forced_plan.get("sub", sub)
    tiles = cdiv(T, sub * sizes["BT"])
    each = forced_plan.get("each", max(1, min(8, tiles // 512)))
    return _Plan(cdiv(max(tiles, 1), each), each * sub * sizes["BT"], sizes, warps)


def _topk_gating_triton(
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
    metadata: bool,
    on_hopper: bool,
) -> tuple[Tensor, ...]:
    """The fields of a gating and, if wanted, of routing metadata: one launch for small batches,
    else two or three."""
    if on_hopper:
        from moe.kernels.hopper.gating import gating_hopper

        with on_device(logits_TE):
            return gating_hopper(logits_TE, k, score, norm, scale, bias_E, valid_T, metadata)
    T, E = logits_TE.shape
    device = logits_TE.device
    plan = _plan(T, E, k, groups, groups_kept, logits_TE.stride(1) == 1)
    i32, f32 = {"dtype": torch.int32, "device": device}, {"dtype": torch.float32, "device": device}
    expert = torch.empty(T, k, **i32)
    gate = torch.empty(T, k, **f32)
    lse = torch.empty(T, **f32)
    counts = torch.empty(E, **i32)
    prob_sum = torch.empty(E, **f32)
    nonfinite = torch.empty((), **i32)
    meta = ()
    if metadata:
        meta = RoutingMetadata(
            torch.empty(E + 1, **i32),
            torch.empty(T * k, **i32),
            torch.empty(T * k, **i32),
            torch.empty(T * k, **i32),
        )
    one = plan.blocks == 1
    sums = (counts, prob_sum, nonfinite)
    partial, work, finished = sums, counts, counts
    mode = int(metadata and one and plan.warps <= plan.sizes["WORDS"])
    with on_device(logits_TE):
        if metadata and plan.last_sorts:
            mode = 2
            work = torch.empty(plan.blocks * (2 * E + 1), **i32)
            finished = counter(device)
        elif not one:
            partial = (
                torch.empty(plan.blocks, E, **i32),
                torch.empty(plan.blocks, E, **f32),
                torch.empty(plan.blocks, **i32),
            )
        launch(_gating_kernel, (plan.blocks,),
            logits_TE, logits_TE if bias_E is None else bias_E.contiguous(),
            logits_TE if valid_T is None else valid_T.contiguous(),
            expert, gate, lse, *partial, *(meta or (counts,) * 4), work, finished, T, plan.block,
            logits_TE.stride(0), logits_TE.stride(1), scale, k,
            TOP=group_top, SCORE=SCORE_CODE[score], NORM=NORM_CODE[norm],
            HAS_BIAS=bias_E is not None, HAS_VALID=valid_T is not None, META=mode,
            ASM=not INTERPRET, num_warps=plan.warps, **plan.sizes,
        )  # fmt: skip
        if mode > 0:
            return expert, gate, lse, *sums, *meta
        short = metadata and not one and sums_fit(plan.blocks, E)
        if not one and not short:
            launch_finish(*partial, *sums, prefix=metadata)
        if metadata:
            before = None if one or short else partial[0]
            launch_place(
                meta, expert.view(-1), k, None, counts, before, plan.block * k,
                clear=valid_T is not None, sums=(*partial, prob_sum, nonfinite) if short else None,
            )  # fmt: skip
    return expert, gate, lse, *sums, *meta


def _topk_gating_backward_triton(
    logits_TE: Tensor | None,
    expert_TK: Tensor,
    gate_TK: Tensor,
    lse_T: Tensor,
    d_gate_TK: Tensor | None,
    d_lse_T: Tensor | None,
    d_prob_E: Tensor | None,
    num_experts: int,
    score: str,
    norm: str,
    scale: float,
) -> Tensor:
    """Gradient of the logits; without logits where `gates_suffice` and only gates have one."""
    (T, k), E = expert_TK.shape, num_experts
    np2 = next_power_of_2
    like = gate_TK if logits_TE is None else logits_TE
    d_logits = torch.empty(T, E, dtype=like.dtype, device=like.device)
    if T == 0:
        return d_logits
    bt = max(1, min(128, 2048 // max(np2(E), np2(k))))
    given = [None if d is None else d.contiguous() for d in (d_gate_TK, d_lse_T, d_prob_E)]
    with on_device(like):
        if logits_TE is None:
            launch(_gates_backward_kernel, (cdiv(T, bt),),
                expert_TK, gate_TK, lse_T, gate_TK if given[0] is None else given[0], d_logits, T,
                1.0 / scale if scale else 0.0, scale, k,
                E=E, EP=np2(E), K=k, KP=np2(k), HAS_GATE=given[0] is not None, BT=bt, num_warps=4,
            )  # fmt: skip
            return d_logits
        launch(_backward_kernel, (cdiv(T, bt),),
            logits_TE, expert_TK, gate_TK, *(gate_TK if d is None else d for d in given),
            d_logits, T, logits_TE.stride(0), logits_TE.stride(1), scale, k,
            E=E, EP=np2(E), K=k, KP=np2(k), SCORE=SCORE_CODE[score], NORM=NORM_CODE[norm],
            HAS_GATE=given[0] is not None, HAS_LSE=given[1] is not None,
            HAS_PROB=given[2] is not None, BT=bt, num_warps=4,
        )  # fmt: skip
    return d_logits


# -------------------------------------------------------------------------------- ops and autograd


def _fake(
    logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T, metadata,
    on_hopper,
):  # fmt: skip
    T, E = logits_TE.shape
    ints, floats = {"dtype": torch.int32}, {"dtype": torch.float32}
    out = [
        logits_TE.new_empty(T, k, **ints), logits_TE.new_empty(T, k, **floats),
        logits_TE.new_empty(T, **floats), logits_TE.new_empty(E, **ints),
        logits_TE.new_empty(E, **floats), logits_TE.new_empty((), **ints),
    ]  # fmt: skip
    sizes = (E + 1, T * k, T * k, T * k) if metadata else ()
    return out + [logits_TE.new_empty(size, **ints) for size in sizes]


_forward_op = define_op(
    "topk_gating(Tensor logits_TE, int k, str score, str norm, float scale, Tensor? bias_E, "
    "int groups, int groups_kept, int group_top, Tensor? valid_T, bool metadata, bool hopper) -> "
    "Tensor[]",
    _topk_gating_triton,
    _fake,
)
_backward_op = define_op(
    "topk_gating_backward(Tensor? logits_TE, Tensor expert_TK, Tensor gate_TK, Tensor lse_T, "
    "Tensor? d_gate_TK, Tensor? d_lse_T, Tensor? d_prob_E, int num_experts, str score, str norm, "
    "float scale) -> Tensor",
    _topk_gating_backward_triton,
    lambda logits_TE, expert_TK, gate_TK, lse_T, d_gate_TK, d_lse_T, d_prob_E, num_experts, *form: (
        gate_TK if logits_TE is None else logits_TE
    ).new_empty(expert_TK.shape[0], num_experts),
)


class _TopkGating(torch.autograd.Function):
    """x, weight: None, or what the logits were made of by the backend `made_by`; then those are
    kept, and the backward computes the logits again where it needs them."""

    @staticmethod
    def forward(ctx, logits_TE, x_TD, weight_ED, made_by, k, score, norm, scale, *rest):
        forward = _topk_gating_triton if is_eager(logits_TE) else _forward_op
        out = tuple(forward(logits_TE, k, score, norm, scale, *rest))
        expert, gate, lse = out[:3]
        if x_TD is None:
            ctx.save_for_backward(logits_TE, None, None, expert, gate, lse)
        else:
            ctx.save_for_backward(None, x_TD, weight_ED, expert, gate, lse)
        ctx.made_by = made_by
        ctx.num_experts = logits_TE.shape[1]
        ctx.form = (score, norm, scale)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(expert, out[3], *out[5:])
        return out

    @staticmethod
    @first_order
    def backward(ctx, _0, d_gate, d_lse, _3, d_prob, *_rest):
        logits_TE, x_TD, weight_ED, expert, gate, lse = ctx.saved_tensors
        score, norm, _ = ctx.form
        if d_lse is None and d_prob is None and gates_suffice(score, norm):
            logits_TE = None
        elif logits_TE is None:
            logits_TE = router_logits_again(x_TD, weight_ED, ctx.made_by)
        backward = _topk_gating_backward_triton if is_eager(gate) else _backward_op
        d_logits = backward(
            logits_TE, expert, gate, lse, d_gate, d_lse, d_prob, ctx.num_experts, *ctx.form
        )
        return (d_logits, *(None for _ in range(14)))


def gates_suffice(score: str, norm: str) -> bool:
    """Whether the gradient of the gates can be told from the gates, without the logits."""
    return norm == "softmax_topk" or (norm == "topk_sum" and score == "softmax")


def _run(logits_TE: Tensor, made_of: MadeOf | None, *rest) -> tuple[Tensor, ...]:
    if logits_TE.requires_grad and torch.is_grad_enabled():
        x_TD, weight_ED, made_by = (None, None, "") if made_of is None else made_of
        if made_of is not None and (*x_TD.shape[:1], *weight_ED.shape[:1]) != logits_TE.shape:
            raise ValueError(
                f"made_of holds x {tuple(x_TD.shape)} and weight {tuple(weight_ED.shape)}, which "
                f"do not give logits_TE {tuple(logits_TE.shape)}"
            )
        return _TopkGating.apply(logits_TE, x_TD, weight_ED, made_by, *rest)
    return (_topk_gating_triton if is_eager(logits_TE) else _forward_op)(logits_TE, *rest)


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


# What the kernels take; above that, backend "auto" means the reference.
MOST_EXPERTS = 4096
MOST_PER_TOKEN = 64


def _uses_kernels(backend: str, logits_TE: Tensor, k: int) -> bool:
    chosen = pick_backend(backend, logits_TE)
    fits = logits_TE.shape[1] <= MOST_EXPERTS and k <= MOST_PER_TOKEN
    if backend == "triton" and not fits:
        raise ValueError(
            f"backend='triton' takes up to {MOST_EXPERTS} experts and k up to {MOST_PER_TOKEN}, "
            f"got {logits_TE.shape[1]} and k={k}; use 'reference'"
        )
    return chosen == "triton" and fits


# The Hopper kernels' shapes; with fewer logits their three launches cost more than they save.
_HOPPER_EXPERTS = (64, 256)
_HOPPER_PER_TOKEN = (2, 8)
_HOPPER_LOGITS = 1 << 20
_HOPPER_STRIDE = 1 << 24  # offsets in a tile of 128 tokens have 32 bits


def _uses_hopper(backend: str, logits_TE: Tensor, k: int, groups: int, groups_kept: int) -> bool:
    """Whether `moe.kernels.hopper.gating` serves this; for other forms "hopper" means "triton"."""
    E = logits_TE.shape[1]
    fits = _HOPPER_EXPERTS[0] <= E <= _HOPPER_EXPERTS[1] and groups_kept == groups
    fits = fits and _HOPPER_PER_TOKEN[0] <= k <= _HOPPER_PER_TOKEN[1]
    if not fits or backend == "triton" or logits_TE.numel() < _HOPPER_LOGITS:
        return False
    if logits_TE.stride(1) != 1 or logits_TE.stride(0) >= _HOPPER_STRIDE:
        return False
    return hopper.available(logits_TE.device)


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
    made_of: MadeOf | None = None,
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
        backend: "auto" (kernels on CUDA up to 4096 experts and k = 64; on Hopper its own where
            they are faster), "triton" or "reference".
        made_of: (x_TD, weight_ED, backend) of the `router_logits` call that gave the logits; then
            the kernels keep those two for the backward in place of the logits, 4TE bytes, and
            compute the logits again if anything but the gates of a softmax has a gradient.

    Raises:
        ValueError: an argument out of range, by name and value.

    Sources: score forms and bias of DeepSeek-V3 (arXiv 2412.19437), z loss of ST-MoE (arXiv
    2202.08906), tie and NaN behaviour after the reports pytorch/pytorch#127196 and
    vllm-project/vllm#39391, two-stage selection after Chern et al. (arXiv 2206.14286).
    """
    _check(logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T)
    args = (logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T)
    if not _uses_kernels(backend, logits_TE, k):
        return topk_gating_ref(*args)
    on_hopper = _uses_hopper(backend, logits_TE, k, groups, groups_kept)
    return Gating(*_run(logits_TE, made_of, *args[1:], False, on_hopper))


def topk_routing(
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
    made_of: MadeOf | None = None,
) -> tuple[Gating, RoutingMetadata]:
    """`topk_gating` and the `routing_metadata` of its choice, in fewer launches than the two.

    The counting sort starts from counts that the gating kernel makes anyway; a small batch is
    routed and sorted by a single launch. Arguments and errors are those of `topk_gating`.
    """
    _check(logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T)
    args = (logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T)
    if not _uses_kernels(backend, logits_TE, k):
        gating = topk_gating_ref(*args)
        E = logits_TE.shape[1]
        return gating, routing_metadata_ref(gating.expert_TK.reshape(-1), E, k)
    on_hopper = _uses_hopper(backend, logits_TE, k, groups, groups_kept)
    out = _run(logits_TE, made_of, *args[1:], True, on_hopper)
    return Gating(*out[:6]), RoutingMetadata(*out[6:])
