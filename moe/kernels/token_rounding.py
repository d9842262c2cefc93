"""Token rounding: every expert gets a whole number of row tiles (SonicMoE, arXiv 2512.14080).

Shape letters: T tokens, E experts, K experts per token, S slots (token order, allocated), M tile.

From a plain top-K choice TC with f_e tokens per expert: a target f'_e, a multiple of M, is fixed
from the counts; then expert e takes the first f'_e tokens in the order (is top-1 if protected, in
TC, score, -t). So either its lowest-scored tokens leave or the best other tokens join. Scores are
compared by a monotone stand-in (z - lse for softmax, z for the elementwise scores), so no
exponential decides and every device decides alike. Tokens that are not valid are never taken.
Everything stays on the device, the number of pairs too: slot arrays have a static bound, unused
slots have expert -1.

The gradient of the gates of realised pairs is exact; targets and selection are constants.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.topk_gating import NEG_INF, _scores, sanitised

VARIANTS = (
    "nearest",
    "nearest_even",
    "up",
    "down",
    "balanced",
    "stochastic",
    "systematic",
    "score",
)
RENORMS = ("tc", "tr", "none")
# a capacity factor is held as a fraction of this, so that the cap is exact integer arithmetic
CAP_UNIT = 1024


class RoundedPairs(NamedTuple):
    """Realised (token, expert) pairs in (token, expert) order, padded to a static number of
    slots."""

    gate_S: Tensor  # float32 (float64 for float64 logits), differentiable; 0 in unused slots
    expert_S: Tensor  # int32; -1 in unused slots
    slot_offsets_T1: Tensor  # int32: token t owns slots [t] … [t + 1] - 1
    target_E: Tensor  # int32: tokens of each expert after rounding


# ---------------------------------------------------------------------------------------- reference


def target_counts_ref(
    counts_E: Tensor,
    tokens: Tensor,
    k: int,
    variant: str,
    tile: int,
    min_tiles: int = 0,
    cap: int = 0,
    top1_E: Tensor | None = None,
    uniform_E: Tensor | None = None,
    gain_E: Tensor | None = None,
) -> Tensor:
    """Tokens of each expert after rounding, int64 [E], in integer arithmetic throughout.

    Args:
        counts_E: f_e, tokens of each expert in the plain top-K choice.
        tokens: int scalar tensor, number of valid tokens; a target above it becomes the multiple
            below.
        variant: one of VARIANTS.
        tile: M.
        min_tiles: experts with at least one token keep at least this many tiles.
        cap: 0, or CAP_UNIT times the capacity factor c: f'_e <= M ceil(c T K / (E M)).
        top1_E: tokens whose first choice is e; given, the target is never less.
        uniform_E: numbers in [0, 1) for "stochastic" ([E]) and "systematic" ([1] or [E], first
            used).
        gain_E: for "score": score mass of the tokens that would join minus that of those that would
            leave.
    """
    f = counts_E.long()
    tokens = tokens.long()
    E = f.numel()
    rest = f % tile
    low = f - rest
    free = (rest > 0) & (low + tile <= tokens)  # may be rounded up
    if variant == "up":
        up = rest > 0
    elif variant == "down":
        up = torch.zeros_like(free)
    elif variant == "nearest":
        up = 2 * rest >= tile
    elif variant == "nearest_even":
        up = (2 * rest > tile) | ((2 * rest == tile) & ((low // tile) % 2 == 1))
    elif variant == "balanced":
        ups = (2 * f.sum() + tile) // (2 * tile) - (low // tile).sum()
        order = torch.argsort(torch.where(free, rest, -1), descending=True, stable=True)
        place = torch.arange(E, device=f.device)
        up = torch.zeros_like(free).scatter(0, order, place < ups)
    elif variant == "stochastic":
        up = (uniform_E * tile).long().clamp(max=tile - 1) < rest
    elif variant == "systematic":
        # floor(u + C) with C a multiple of 1/M equals floor((floor(u M) + M C) / M)
        shift = (uniform_E[:1] * tile).long().clamp(max=tile - 1)
        after = (shift + rest.cumsum(0)) // tile
        before = (shift + rest.cumsum(0) - rest) // tile
        up = after > before
    else:
        up = gain_E >= 0
    target = torch.where(up & free, low + tile, low)
    if min_tiles:
        least = min_tiles * tile
        raised = target.clamp(min=least)
        target = torch.where((f > 0) & (least <= tokens), raised, target)
    if cap:
        unit = CAP_UNIT * E * tile
        most = tile * ((cap * k * tokens + unit - 1) // unit)
        target = torch.minimum(target, most)
    if top1_E is not None:
        n = top1_E.long()
        whole = (n + tile - 1) // tile * tile
        target = torch.maximum(target, torch.where(whole <= tokens, whole, n))
    return target


def rank_key_ref(logits_TE: Tensor, lse_T: Tensor, score: str) -> Tensor:
    """What stands for the score when an expert ranks tokens: same order, no exponential."""
    z_TE = sanitised(logits_TE.to(lse_T.dtype))
    return (z_TE - lse_T[:, None] if score == "softmax" else z_TE) + 0.0


def weights_ref(logits_TE: Tensor, score: str, norm: str) -> Tensor:
    """Gate weights [T, E] before any denominator of selected pairs; differentiable.

    softmax(z) for softmax scores and for norm softmax_topk; otherwise the score, normalised to sum
    1 over E unless norm is "none". Masked experts and rows without a usable expert have weight 0.
    """
    dtype = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
    z_TE = sanitised(logits_TE.to(dtype))
    live_TE = z_TE > NEG_INF
    zero = z_TE.new_zeros(())
    if score == "softmax" or norm == "softmax_topk":
        some_T1 = live_TE.any(dim=1, keepdim=True)
        return torch.where(some_T1, torch.softmax(torch.where(some_T1, z_TE, zero), dim=1), zero)
    weight_TE = torch.where(live_TE, _scores(torch.where(live_TE, z_TE, zero), score), zero)
    if norm == "none":
        return weight_TE
    return weight_TE / (weight_TE.sum(dim=1, keepdim=True) + 1e-20)


def _first_ranked(class_TE: Tensor, key_TE: Tensor, target_E: Tensor) -> Tensor:
    """bool [T, E]: the first target_E tokens of each expert by (class, key, -t); class -1 is never
    taken."""
    class_ET, key_ET = class_TE.T.contiguous(), key_TE.T.contiguous()
    by_key = torch.argsort(key_ET, dim=1, descending=True, stable=True)
    by_class = torch.argsort(class_ET.gather(1, by_key), dim=1, descending=True, stable=True)
    order = by_key.gather(1, by_class)
    place = torch.arange(order.shape[1], device=order.device)
    taken = (place[None, :] < target_E[:, None]).expand_as(order)
    return torch.zeros_like(class_ET, dtype=torch.bool).scatter(1, order, taken).T & (class_TE >= 0)


def token_rounding_ref(
    logits_TE: Tensor,
    expert_TK: Tensor,
    gate_TK: Tensor,
    lse_T: Tensor,
    slots: int,
    score: str,
    norm: str,
    scale: float,
    variant: str,
    tile: int,
    min_tiles: int,
    cap: int,
    protect_top1: bool,
    renorm: str,
    uniform_E: Tensor | None = None,
) -> RoundedPairs:
    """Plain torch version: any device, float64 for float64 logits, ordinary autograd, static
    shapes."""
    T, E = logits_TE.shape
    k = expert_TK.shape[1]
    device = logits_TE.device
    with torch.no_grad():
        valid_T = expert_TK[:, 0] >= 0 if k else torch.ones(T, dtype=torch.bool, device=device)
        chosen_TK = expert_TK.long().clamp(min=0)
        in_tc_TE = torch.zeros(T, E, dtype=torch.bool, device=device)
        in_tc_TE = in_tc_TE.scatter(1, chosen_TK, True) & valid_T[:, None]
        first_TE = torch.zeros_like(in_tc_TE).scatter(1, chosen_TK[:, :1], True) & valid_T[:, None]
        class_TE = in_tc_TE.long()
        if protect_top1:
            class_TE = class_TE + first_TE.long()
        class_TE = class_TE.masked_fill(~valid_T[:, None], -1)
        key_TE = rank_key_ref(logits_TE.detach(), lse_T.detach(), score)
        counts_E = in_tc_TE.sum(dim=0)
        top1_E = first_TE.sum(dim=0) if protect_top1 else None
        gain_E = None
        if variant == "score":
            weight_TE = weights_ref(logits_TE.detach(), score, norm)
            low_E = counts_E - counts_E % tile
            low_TE = _first_ranked(class_TE, key_TE, low_E)
            high_TE = _first_ranked(class_TE, key_TE, low_E + tile)
            zero = weight_TE.new_zeros(())
            joins_E = torch.where(high_TE & ~in_tc_TE, weight_TE, zero).sum(dim=0)
            leaves_E = torch.where(in_tc_TE & ~low_TE, weight_TE, zero).sum(dim=0)
            gain_E = joins_E - leaves_E
        target_E = target_counts_ref(
            counts_E, valid_T.sum(), k, variant, tile, min_tiles, cap, top1_E, uniform_E, gain_E
        )
        member_TE = _first_ranked(class_TE, key_TE, target_E)
        rank_TE = member_TE.reshape(-1).cumsum(0).view(T, E) - 1
        slot_TE = torch.where(member_TE, rank_TE, slots)  # slot `slots` is thrown away
        column_TE = torch.arange(E, dtype=torch.int32, device=device).expand(T, E)
        expert_S = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
        expert_S = expert_S.scatter(0, slot_TE.reshape(-1), column_TE.reshape(-1))[:slots]
        slot_offsets_T1 = torch.zeros(T + 1, dtype=torch.int64, device=device)
        slot_offsets_T1[1:] = member_TE.sum(dim=1).cumsum(0)

    weight_TE = weights_ref(logits_TE, score, norm)
    zero = weight_TE.new_zeros(())
    if renorm == "tc":
        kept_TE = torch.zeros_like(weight_TE).scatter(1, chosen_TK, gate_TK.to(weight_TE.dtype))
        dense_TE = torch.where(in_tc_TE, kept_TE, weight_TE * scale)
    elif renorm == "tr":
        total_T1 = torch.where(member_TE, weight_TE, zero).sum(dim=1, keepdim=True)
        dense_TE = weight_TE / (total_T1 + 1e-20) * scale
    else:
        dense_TE = weight_TE * scale
    dense_TE = torch.where(member_TE, dense_TE, zero)
    gate_S = dense_TE.new_zeros(slots + 1).scatter(0, slot_TE.reshape(-1), dense_TE.reshape(-1))
    return RoundedPairs(
        gate_S[:slots], expert_S, slot_offsets_T1.to(torch.int32), target_E.to(torch.int32)
    )
