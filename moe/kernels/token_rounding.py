"""Token rounding: every expert gets a whole number of row tiles (SonicMoE, arXiv 2512.14080).

Shape letters: T tokens, E experts, K experts per token, S slots (token order, allocated), R rows
(expert order, R = S), M tile, B blocks of tokens.

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

from moe.kernels._grouped import define_op
from moe.kernels._triton import cdiv, is_eager, launch, next_power_of_2, on_device, tl, triton
from moe.kernels.routing_metadata import clear_tail, launch_finish, routing_metadata
from moe.kernels.topk_gating import (
    EMPTY_KEY,
    NEG_INF,
    NORM_CODE,
    SCORE_CODE,
    elementwise_score,
    ordered,
    plain_scores,
    sanitised,
    score_slope,
    unordered,
)

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
    weight_TE = torch.where(live_TE, plain_scores(torch.where(live_TE, z_TE, zero), score), zero)
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
            weight_TE = weights_ref(logits_TE.detach(), score, "none")
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


# ------------------------------------------------------------------------------------------ kernels
_VARIANT = {name: i for i, name in enumerate(VARIANTS)}
_NEAREST, _NEAREST_EVEN, _UP, _DOWN, _BALANCED, _STOCHASTIC, _SYSTEMATIC, _SCORE_MASS = (
    tl.constexpr(i) for i in range(8)
)
_RENORM = {name: i for i, name in enumerate(RENORMS)}
_TC, _TR, _BARE = (tl.constexpr(i) for i in range(3))
_SOFTMAX = tl.constexpr(SCORE_CODE["softmax"])
_PLAIN = tl.constexpr(NORM_CODE["none"])
_SOFTMAX_TOPK = tl.constexpr(NORM_CODE["softmax_topk"])
_MINUS_INF = tl.constexpr(NEG_INF)
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_CAP_UNIT = tl.constexpr(CAP_UNIT)


@triton.jit
def _goals(
    counts, top1, uniform, gain, tile, least, cap, k,
    VARIANT: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr,
    HAS_TOP1: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """`target_counts_ref`, and the counts before, of all experts [EP]."""
    e = tl.arange(0, EP)
    f = tl.load(counts + e, mask=e < E, other=0)
    total = tl.sum(f, axis=0).to(tl.int32)
    tokens = total // k
    rest = f % tile
    low = f - rest
    free = (rest > 0) & (low + tile <= tokens)
    if VARIANT == _NEAREST:
        up = 2 * rest >= tile
    elif VARIANT == _NEAREST_EVEN:
        up = (2 * rest > tile) | ((2 * rest == tile) & ((low // tile) % 2 == 1))
    elif VARIANT == _UP:
        up = rest > 0
    elif VARIANT == _DOWN:
        up = rest < 0
    elif VARIANT == _BALANCED:
        # an expert goes up if fewer than `ups` are ahead of it: larger rest, or equal and earlier
        ups = (2 * total + tile) // (2 * tile) - tl.sum(low // tile, axis=0).to(tl.int32)
        mine = tl.where(free, rest, -1)
        ahead = tl.zeros((EP,), dtype=tl.int32)
        for first in range(0, E, CHUNK):
            other = first + tl.arange(0, CHUNK)
            of = tl.load(counts + other, mask=other < E, other=0)
            rest_o = of % tile
            theirs = tl.where((rest_o > 0) & (of - rest_o + tile <= tokens), rest_o, -1)
            before = (theirs[None, :] > mine[:, None]) | (
                (theirs[None, :] == mine[:, None]) & (other[None, :] < e[:, None])
            )
            before = before & (other < E)[None, :]
            ahead += tl.sum(before.to(tl.int32), axis=1).to(tl.int32)
        up = ahead < ups
    elif VARIANT == _STOCHASTIC:
        u = tl.load(uniform + e, mask=e < E, other=0.0)
        up = tl.minimum((u * tile).to(tl.int32), tile - 1) < rest
    elif VARIANT == _SYSTEMATIC:
        shift = tl.minimum((tl.load(uniform) * tile).to(tl.int32), tile - 1)
        after = shift + tl.cumsum(rest, axis=0).to(tl.int32)
        up = after // tile > (after - rest) // tile
    else:
        up = tl.load(gain + e, mask=e < E, other=-1.0) >= 0.0
    goal = tl.where(up & free, low + tile, low)
    goal = tl.where((f > 0) & (least <= tokens), tl.maximum(goal, least), goal)
    if HAS_CAP:
        unit = tl.full((), E * _CAP_UNIT, tl.int64) * tile
        most = (tl.full((), 1, tl.int64) * cap * k * tokens + unit - 1) // unit
        goal = tl.minimum(goal, (most * tile).to(tl.int32))
    if HAS_TOP1:
        n = tl.load(top1 + e, mask=e < E, other=0)
        whole = (n + tile - 1) // tile * tile
        goal = tl.maximum(goal, tl.where(whole <= tokens, whole, n))
    return goal, f


@triton.jit(do_not_specialize=["tile", "least", "cap", "k"])
def _targets_kernel(
    counts, top1, uniform, gain, target, tile, least, cap, k,
    VARIANT: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr,
    HAS_TOP1: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """`target_counts_ref` in one program."""
    goal, _ = _goals(
        counts, top1, uniform, gain, tile, least, cap, k, VARIANT, E, EP, CHUNK, HAS_TOP1, HAS_CAP
    )
    e = tl.arange(0, EP)
    tl.store(target + e, goal, mask=e < E)


@triton.jit
def _keys_of(z, lse, SCORE: tl.constexpr):
    """Sortable stand-ins for the scores of logits [B, C], rows' lse [B]; see `rank_key_ref`."""
    z = tl.where(z != z, _MINUS_INF, tl.minimum(z, _FLT_MAX))
    if SCORE == _SOFTMAX:
        z = z - lse[:, None]
    return ordered(z + 0.0)


@triton.jit
def _chosen(expert, row, inside, column, K: tl.constexpr):
    """bool [B, C]: columns among the row's plain top-K choice."""
    hit = (row * 0)[:, None] + column[None, :] < 0
    for k in tl.static_range(K):
        id = tl.load(expert + row * K + k, mask=inside, other=-1)
        hit = hit | (column[None, :] == id[:, None])
    return hit


@triton.jit(do_not_specialize=["T", "tile"])
def _rank_keys_kernel(
    logits, expert, lse, counts, target, keys, T, stride_t, stride_e, tile,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, PROTECT: tl.constexpr,
    FORCE: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """keys [E, T]: the key of every token that expert e may have to choose from, else EMPTY_KEY.

    A growing expert chooses among the other tokens, a shrinking one among its own, but for its
    protected ones. FORCE 1, 2: all experts with an incomplete tile grow, shrink by it.
    """
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BE + tl.arange(0, BE)
    inside = row < T
    row = row.to(tl.int64)
    real = column < E
    f = tl.load(counts + column, mask=real, other=0)
    goal = tl.load(target + column, mask=real, other=0)
    if FORCE == 1:
        goal = tl.where(f % tile > 0, f - f % tile + tile, f)
    if FORCE == 2:
        goal = f - f % tile
    mask = inside[:, None] & (real & (goal != f))[None, :]
    at = row[:, None] * stride_t + column[None, :].to(tl.int64) * stride_e
    z = tl.load(logits + at, mask=mask, other=0.0).to(tl.float32)
    key = _keys_of(z, tl.load(lse + row, mask=inside, other=0.0), SCORE)
    first = tl.load(expert + row * K, mask=inside, other=-1)
    own = _chosen(expert, row, inside, column, K)
    may = (own != (goal > f)[None, :]) & (first >= 0)[:, None]
    if PROTECT:
        may = may & (column[None, :] != first[:, None])
    out = column[None, :].to(tl.int64) * T + row[:, None]
    tl.store(keys + out, tl.where(may, key, EMPTY_KEY), mask=mask)


@triton.jit
def _total(flag):
    return tl.sum(flag.to(tl.int32), axis=0).to(tl.int32)


@triton.jit
def _count_above(keys, value, T, ONE: tl.constexpr, BLOCK: tl.constexpr, key):
    """How many keys are at least `value`, both as unsigned numbers."""
    if ONE:
        return _total(key >= value)
    else:
        count = 0
        for first in range(0, T, BLOCK):
            t = first + tl.arange(0, BLOCK)
            some = tl.load(keys + t, mask=t < T, other=EMPTY_KEY)
            some = some.to(tl.uint32, bitcast=True) ^ 0x80000000
            count += _total(some >= value)
        return count


@triton.jit
def _count_equal(keys, value, before, T, ONE: tl.constexpr, BLOCK: tl.constexpr, key):
    """How many keys of tokens earlier than `before` equal `value`."""
    if ONE:
        return _total((key == value) & (tl.arange(0, BLOCK) < before))
    else:
        count = 0
        for first in range(0, T, BLOCK):
            t = first + tl.arange(0, BLOCK)
            some = tl.load(keys + t, mask=t < T, other=EMPTY_KEY)
            some = some.to(tl.uint32, bitcast=True) ^ 0x80000000
            count += _total((some == value) & (t < before))
        return count


@triton.jit
def _last_taken(
    mine, key, quota, T, ONE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Key, as unsigned number, and token of the last of `quota` taken in (key descending, token)
    order: a search over the bits of the key by counting, then, if tokens tie there, one over the
    bits of the token."""
    value = tl.full((), 0, tl.uint32)
    if ONE and BLOCK <= 16384:  # two bits at a time: three counts of 20 bits in one sum
        for i in range(16):
            one = tl.full((), 1, tl.uint32) << (30 - 2 * i)
            first = value + one
            second = first + one
            found = (key >= first).to(tl.int64) + ((key >= second).to(tl.int64) << 20)
            found += (key >= second + one).to(tl.int64) << 40
            found = tl.sum(found, axis=0)
            value += tl.where((found & 0xFFFFF) >= quota, one, 0)
            value += tl.where(((found >> 20) & 0xFFFFF) >= quota, one, 0)
            value += tl.where((found >> 40) >= quota, one, 0)
    else:
        for i in range(32):
            bit = tl.full((), 1, tl.uint32) << (31 - i)
            more = _count_above(mine, value | bit, T, ONE, BLOCK, key) >= quota
            value = tl.where(more, value | bit, value)
    equal = _count_equal(mine, value, T, T, ONE, BLOCK, key)
    above = _count_above(mine, value, T, ONE, BLOCK, key) - equal
    token = T
    if above + equal > quota:
        token = 0  # fewer than the wanted number of ties come before it
        for i in range(BITS):
            step = 1 << (BITS - 1 - i)
            few = _count_equal(mine, value, token + step, T, ONE, BLOCK, key) < quota - above
            token = tl.where(few, token + step, token)
    return value, token


@triton.jit(do_not_specialize=["T", "tile", "k"])
def _select_kernel(
    counts, target, top1, keys, last_key, last_token, mass, T, tile, k,
    SCORE: tl.constexpr, PROTECT: tl.constexpr, FORCE: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The last token that expert e takes from its `keys`, in (key descending, token) order.

    FORCE: only the score mass of the tokens that would join (1) or leave (2).
    """
    e = tl.program_id(0)
    f = tl.load(counts + e)
    goal = tl.load(target + e)
    kept = 0
    if PROTECT:
        kept = tl.load(top1 + e)
    if FORCE > 0:
        ids = tl.arange(0, EP)
        tokens = tl.sum(tl.load(counts + ids, mask=ids < E, other=0), axis=0).to(tl.int32) // k
        goal = f - f % tile
        if FORCE == 1:
            goal = tl.minimum(tl.where(f % tile > 0, goal + tile, goal), tokens)
    quota = tl.where(goal > f, goal - f, tl.maximum(goal - kept, 0))
    mine = keys + e.to(tl.int64) * T
    t = tl.arange(0, BLOCK)
    value = tl.full((), 0xFFFFFFFF, tl.uint32)
    token = tl.full((), -1, tl.int32)
    if (goal != f) & (quota > 0):
        key = tl.load(mine + t, mask=(t < T) & ONE, other=EMPTY_KEY)
        key = key.to(tl.uint32, bitcast=True) ^ 0x80000000
        value, token = _last_taken(mine, key, quota, T, ONE, BLOCK, BITS)
    if FORCE > 0:
        total = 0.0
        if goal != f:
            for first in range(0, T, BLOCK):
                at = first + t
                some = tl.load(mine + at, mask=at < T, other=EMPTY_KEY)
                number = some.to(tl.uint32, bitcast=True) ^ 0x80000000
                taken = (number > value) | ((number == value) & (at <= token))
                if FORCE == 2:
                    taken = (taken == 0) & (some != EMPTY_KEY)
                u = unordered(some)
                if SCORE == _SOFTMAX:
                    s = tl.exp(u)
                else:
                    s = elementwise_score(u, SCORE)
                total += tl.sum(tl.where(taken, s, 0.0), axis=0)
        tl.store(mass + e, total)
    else:
        tl.store(last_key + e, (value ^ 0x80000000).to(tl.int32, bitcast=True))
        tl.store(last_token + e, token)


@triton.jit(do_not_specialize=["T", "tile", "least", "cap"])
def _round_kernel(
    logits, expert, lse, counts, top1, uniform, gain, target, members, work, T, tile, least, cap,
    stride_t, stride_e,
    VARIANT: tl.constexpr, HAS_CAP: tl.constexpr, GIVEN: tl.constexpr, SCORE: tl.constexpr,
    PROTECT: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """All of expert e's rounding, its tokens in registers: target, choice, members.

    GIVEN: the targets are known. Else they are computed here and written. The results are those of
    `_targets_kernel`, `_rank_keys_kernel`, `_select_kernel` and `_member_kernel`.
    """
    e = tl.program_id(0)
    f = tl.load(counts + e)
    if GIVEN:
        goal = tl.load(target + e)
    else:
        goals, _ = _goals(
            counts, top1, uniform, gain, tile, least, cap, K, VARIANT, E, EP, CHUNK, PROTECT,
            HAS_CAP,
        )  # fmt: skip
        goal = tl.sum(tl.where(tl.arange(0, EP) == e, goals, 0), axis=0).to(tl.int32)
        tl.store(target + e, goal)
    t = tl.arange(0, BLOCK)
    inside = t < T
    row = t.to(tl.int64)
    first = tl.load(expert + row * K, mask=inside, other=-1)
    own = first == e
    for j in tl.static_range(1, K):
        own = own | (tl.load(expert + row * K + j, mask=inside, other=-1) == e)
    member = own
    if goal != f:
        z = tl.load(logits + row * stride_t + e.to(tl.int64) * stride_e, mask=inside, other=0.0)
        z = z.to(tl.float32)
        z = tl.where(z != z, _MINUS_INF, tl.minimum(z, _FLT_MAX))
        if SCORE == _SOFTMAX:
            z = z - tl.load(lse + row, mask=inside, other=0.0)
        may = (own != (goal > f)) & (first >= 0)
        kept = 0
        if PROTECT:
            may = may & (first != e)
            kept = tl.load(top1 + e)
        key = tl.where(may, ordered(z + 0.0), EMPTY_KEY)
        key = key.to(tl.uint32, bitcast=True) ^ 0x80000000
        quota = tl.where(goal > f, goal - f, tl.maximum(goal - kept, 0))
        taken = may & (t < 0)
        if quota > 0:
            value, token = _last_taken(logits, key, quota, T, True, BLOCK, BITS)
            taken = may & ((key > value) | ((key == value) & (t <= token)))
        member = taken | (own & (goal > f))
        if PROTECT:
            member = member | (first == e)
    bits = tl.reshape(member.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
    words = tl.sum(bits, axis=1).to(tl.int32)
    group = tl.arange(0, BLOCK // 32)
    tl.store(members + group * E + e, words, mask=group * 32 < T)
    each = tl.sum(tl.reshape(member.to(tl.int32), (BLOCK // PART, PART)), axis=1).to(tl.int32)
    part = tl.arange(0, BLOCK // PART)
    tl.store(work + part * E + e, each, mask=part * PART < T)


@triton.jit(do_not_specialize=["T", "block"])
def _member_kernel(
    logits, expert, lse, counts, target, last_key, last_token, members, work, T, block,
    stride_t, stride_e,
    E: tl.constexpr, BE: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr,
    PROTECT: tl.constexpr,
):  # fmt: skip
    """Members of BE experts: bit t % 32 of word [t / 32, e] says whether e has t [T / 32, E]; per
    block of tokens the pairs of each expert."""
    column = tl.program_id(1) * BE + tl.arange(0, BE)
    real = column < E
    f = tl.load(counts + column, mask=real, other=0)
    goal = tl.load(target + column, mask=real, other=0)
    key_e = tl.load(last_key + column, mask=real, other=0)
    token_e = tl.load(last_token + column, mask=real, other=-1)
    per_expert = tl.zeros((BE,), dtype=tl.int32)
    begin = tl.program_id(0) * block
    end = tl.minimum(begin + block, T)
    for first_row in range(begin, end, 32):
        row = first_row + tl.arange(0, 32)
        inside = row < end
        long = row.to(tl.int64)
        mask = inside[:, None] & real[None, :]
        at = long[:, None] * stride_t + column[None, :].to(tl.int64) * stride_e
        moved = mask & (goal != f)[None, :]
        z = tl.load(logits + at, mask=moved, other=0.0).to(tl.float32)
        key = _keys_of(z, tl.load(lse + long, mask=inside, other=0.0), SCORE)
        ahead = (key > key_e[None, :]) | (
            (key == key_e[None, :]) & (row[:, None] <= token_e[None, :])
        )
        own = _chosen(expert, long, inside, column, K)
        first = tl.load(expert + long * K, mask=inside, other=-1)
        stay = own & (ahead | (goal >= f)[None, :])
        if PROTECT:
            stay = stay | (column[None, :] == first[:, None])
        join = (own == 0) & (goal > f)[None, :] & ahead & (first >= 0)[:, None]
        member = ((stay | join) & mask).to(tl.int32)
        per_expert += tl.sum(member, axis=0).to(tl.int32)
        word = tl.sum(member << tl.arange(0, 32)[:, None], axis=0).to(tl.int32)
        tl.store(members + (first_row // 32) * E + column, word, mask=real)
    tl.store(work + tl.program_id(0) * E + column, per_expert, mask=real)


@triton.jit
def _member_tile(members, row, inside, E: tl.constexpr, EP: tl.constexpr):
    """int32 [B, EP] of 0 and 1 from the bits of `_member_kernel`."""
    column = tl.arange(0, EP)
    at = (row // 32)[:, None] * E + column[None, :]
    words = tl.load(members + at, mask=inside[:, None] & (column < E)[None, :], other=0)
    return (words >> (row % 32).to(tl.int32)[:, None]) & 1


@triton.jit
def _weights(z, live, lse, SCORE: tl.constexpr, NORM: tl.constexpr):
    """`weights_ref` of sanitised logits [BT, EP], and the inverse of the rows' sum of scores."""
    one = (lse * 0.0 + 1.0)[:, None]
    if (SCORE == _SOFTMAX) or (NORM == _SOFTMAX_TOPK):
        return tl.where(live, tl.exp(z - lse[:, None]), 0.0), one
    else:
        s = tl.where(live, elementwise_score(z, SCORE), 0.0)
        if NORM == _PLAIN:
            return s, one
        else:
            inverse = 1.0 / (tl.sum(s, axis=1)[:, None] + 1e-20)
            return s * inverse, inverse


@triton.jit(do_not_specialize=["T", "S", "block", "blocks"])
def _fill_kernel(
    logits, expert, gate, lse, members, work, totals, gate_S, expert_S, row_S, slot_R, token_R,
    offsets, slot_offsets, T, S, block, blocks, stride_t, stride_e, scale,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr,
    NORM: tl.constexpr, RENORM: tl.constexpr, BT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Slots and rows of one block's pairs, from the pairs of all earlier blocks: `work`, and
    `totals` of all. SUM > 0: `work` holds each block's own pairs, and every program adds up those
    of all blocks, SUM at once."""
    column = tl.arange(0, EP)
    real = column < E
    part = tl.program_id(0)
    if SUM > 0:
        total_e = tl.zeros((EP,), dtype=tl.int32)
        ahead = tl.zeros((EP,), dtype=tl.int32)
        for first in range(0, blocks, SUM):
            other = (first + tl.arange(0, SUM))[:, None]
            known = (other < blocks) & real[None, :]
            some = tl.load(work + other * E + column[None, :], mask=known, other=0)
            total_e += tl.sum(some, axis=0).to(tl.int32)
            ahead += tl.sum(tl.where(other < part, some, 0), axis=0).to(tl.int32)
    else:
        total_e = tl.load(totals + column, mask=real, other=0)
        ahead = tl.load(work + part * E + column, mask=real, other=0)
    pairs = tl.sum(total_e, axis=0).to(tl.int32)
    start_e = tl.cumsum(total_e, axis=0).to(tl.int32) - total_e
    if part == 0:
        tl.store(offsets + column, start_e, mask=real)
        tl.store(offsets + E, pairs)
        tl.store(slot_offsets + T, pairs)
    next_row = start_e + ahead
    next_slot = tl.sum(ahead, axis=0).to(tl.int32)
    begin = part * block
    end = tl.minimum(begin + block, T)
    for first_row in range(begin, end, BT):
        t = first_row + tl.arange(0, BT)
        inside = t < end
        row = t.to(tl.int64)
        bits = _member_tile(members, t, inside, E, EP)
        member = bits > 0
        each = tl.sum(bits, axis=1).to(tl.int32)
        first_slot = next_slot + tl.cumsum(each, axis=0).to(tl.int32) - each
        tl.store(slot_offsets + t, first_slot, mask=inside)
        slot = first_slot[:, None] + tl.cumsum(bits, axis=1).to(tl.int32) - bits
        at_row = next_row[None, :] + tl.cumsum(bits, axis=0).to(tl.int32) - bits

        # weights are wanted of members alone, but for the denominator over all experts
        wanted = member
        if (SCORE != _SOFTMAX) and (NORM != _SOFTMAX_TOPK) and (NORM != _PLAIN):
            wanted = inside[:, None] & real[None, :]
        at = row[:, None] * stride_t + column[None, :].to(tl.int64) * stride_e
        z = tl.load(logits + at, mask=wanted, other=_MINUS_INF).to(tl.float32)
        z = tl.where(z != z, _MINUS_INF, tl.minimum(z, _FLT_MAX))
        row_lse = tl.load(lse + row, mask=inside, other=0.0)
        weight, _ = _weights(z, z > _MINUS_INF, row_lse, SCORE, NORM)
        g = weight * scale
        if RENORM == _TR:
            g = g / (tl.sum(tl.where(member, weight, 0.0), axis=1) + 1e-20)[:, None]
        if RENORM == _TC:
            for k in tl.static_range(K):
                id = tl.load(expert + row * K + k, mask=inside, other=-1)
                own = tl.load(gate + row * K + k, mask=inside, other=0.0)
                g = tl.where(column[None, :] == id[:, None], own[:, None], g)
        tl.store(gate_S + slot, g, mask=member)
        ids = tl.broadcast_to(column[None, :], (BT, EP))
        tl.store(expert_S + slot, ids, mask=member)
        tl.store(row_S + slot, at_row, mask=member)
        tl.store(slot_R + at_row, slot, mask=member)
        tl.store(token_R + at_row, tl.broadcast_to(t[:, None], (BT, EP)), mask=member)
        next_row += tl.sum(bits, axis=0).to(tl.int32)
        next_slot += tl.sum(each, axis=0).to(tl.int32)
    clear_tail(slot_R, token_R, pairs, S, part, tl.num_programs(0), 1024)
    for at in range(pairs + part * 1024, S, tl.num_programs(0) * 1024):
        s = at + tl.arange(0, 1024)
        tl.store(gate_S + s, tl.zeros((1024,), dtype=tl.float32), mask=s < S)
        tl.store(expert_S + s, tl.full((1024,), -1, tl.int32), mask=s < S)
        tl.store(row_S + s, tl.full((1024,), -1, tl.int32), mask=s < S)


@triton.jit(do_not_specialize=["T"])
def _rounding_backward_kernel(
    logits, expert, lse, members, slot_offsets, d_gate_S, d_logits, d_gate, T, stride_t, stride_e,
    scale,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr,
    NORM: tl.constexpr, RENORM: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Gradient of logits [T, E] and (renorm tc) of the plain gates [T, K]."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    inside = t < T
    row = t.to(tl.int64)
    column = tl.arange(0, EP)
    mask = inside[:, None] & (column < E)[None, :]
    bits = _member_tile(members, t, inside, E, EP)
    member = bits > 0
    slot = tl.load(slot_offsets + t, mask=inside, other=0)[:, None]
    slot += tl.cumsum(bits, axis=1).to(tl.int32) - bits
    d = tl.load(d_gate_S + slot, mask=member, other=0.0)
    if RENORM == _TC:
        for k in tl.static_range(K):
            id = tl.load(expert + row * K + k, mask=inside, other=-1)
            hit = column[None, :] == id[:, None]
            tl.store(d_gate + row * K + k, tl.sum(tl.where(hit, d, 0.0), axis=1), mask=inside)
            d = tl.where(hit, 0.0, d)
    at = row[:, None] * stride_t + column[None, :].to(tl.int64) * stride_e
    raw = tl.load(logits + at, mask=mask, other=_MINUS_INF).to(tl.float32)
    z = tl.where(raw != raw, _MINUS_INF, tl.minimum(raw, _FLT_MAX))
    live = z > _MINUS_INF
    row_lse = tl.load(lse + row, mask=inside, other=0.0)
    weight, inverse = _weights(z, live, row_lse, SCORE, NORM)
    d = d * scale
    if RENORM == _TR:
        total = (1.0 / (tl.sum(tl.where(member, weight, 0.0), axis=1) + 1e-20))[:, None]
        mean = tl.sum(tl.where(member, weight * d, 0.0), axis=1)[:, None] * total
        d = tl.where(member, (d - mean) * total, 0.0)
    if (SCORE == _SOFTMAX) or (NORM == _SOFTMAX_TOPK):
        dz = weight * (d - tl.sum(weight * d, axis=1)[:, None])
    else:
        s = weight
        if NORM != _PLAIN:
            s = tl.where(live, elementwise_score(z, SCORE), 0.0)
            d = (d - tl.sum(weight * d, axis=1)[:, None]) * inverse
        dz = d * score_slope(z, s, SCORE)
    used = tl.load(expert + row * K, mask=inside, other=-1) >= 0
    dz = tl.where(used[:, None] & live & (raw < float("inf")), dz, 0.0)
    tl.store(
        d_logits + row[:, None] * E + column[None, :], dz.to(d_logits.dtype.element_ty), mask=mask
    )


# ---------------------------------------------------------------------------------------- launchers

# Keys of one expert that a program of the selection holds in registers; more are read again for
# every bit.
_KEYS_IN_REGISTERS = 32768
# Tokens of one expert that a program of the whole rounding holds: keys and who is chosen.
_TOKENS_IN_REGISTERS = 16384
# Tokens of a program that fills slots.
_BLOCK = 128
# Counts of all blocks that every such program may add up itself, without a launch in between.
_SUMMED_AT_ONCE = 32768


class _Call(NamedTuple):
    """The fixed part of a call."""

    slots: int
    score: str
    norm: str
    scale: float
    variant: str
    tile: int
    min_tiles: int
    cap: int
    protect_top1: bool
    renorm: str


def _select(
    call: _Call, logits: Tensor, expert: Tensor, lse: Tensor, counts: Tensor, top1: Tensor,
    target: Tensor, keys: Tensor, last_key: Tensor, last_token: Tensor, mass: Tensor, force: int,
) -> None:  # fmt: skip
    T, E = logits.shape
    k = expert.shape[1]
    be = min(32, next_power_of_2(E))
    bt = 2048 // be
    launch(_rank_keys_kernel, (cdiv(T, bt), cdiv(E, be)),
        logits, expert, lse, counts, target, keys, T, logits.stride(0), logits.stride(1), call.tile,
        E=E, K=k, SCORE=SCORE_CODE[call.score], PROTECT=call.protect_top1, FORCE=force, BT=bt,
        BE=be, num_warps=4,
    )  # fmt: skip
    one = T <= _KEYS_IN_REGISTERS
    block = next_power_of_2(T) if one else 8192
    launch(_select_kernel, (E,),
        counts, target, top1, keys, last_key, last_token, mass, T, call.tile, k,
        SCORE=SCORE_CODE[call.score], PROTECT=call.protect_top1, FORCE=force, E=E,
        EP=next_power_of_2(E), ONE=one, BLOCK=block, BITS=T.bit_length(),
        num_warps=max(4, min(32, block // 1024)),
    )  # fmt: skip


def _targets(
    call: _Call, counts: Tensor, k: int, top1: Tensor, uniform: Tensor | None, gain: Tensor
) -> Tensor:
    E = counts.numel()
    ep = next_power_of_2(E)
    target = torch.empty_like(counts)
    launch(_targets_kernel, (1,),
        counts, top1, gain if uniform is None else uniform, gain, target, call.tile,
        call.min_tiles * call.tile, call.cap, k, VARIANT=_VARIANT[call.variant], E=E, EP=ep,
        CHUNK=max(1, min(32, 8192 // ep)), HAS_TOP1=call.protect_top1, HAS_CAP=call.cap > 0,
        num_warps=8 if ep >= 256 else 4,
    )  # fmt: skip
    return target


def _token_rounding_triton(
    logits_TE: Tensor,
    expert_TK: Tensor,
    gate_TK: Tensor,
    lse_T: Tensor,
    counts_E: Tensor,
    uniform_E: Tensor | None,
    *fixed,
) -> tuple[Tensor, ...]:
    call = _Call(*fixed)
    T, E = logits_TE.shape
    k = expert_TK.shape[1]
    ints = {"dtype": torch.int32, "device": logits_TE.device}
    floats = {"dtype": torch.float32, "device": logits_TE.device}
    S = call.slots
    ep = next_power_of_2(E)
    strides = (logits_TE.stride(0), logits_TE.stride(1))
    blocks = cdiv(T, _BLOCK)
    members = torch.empty(cdiv(T, 32), E, **ints)
    work = torch.empty(blocks, E, **ints)
    target = torch.empty(E, **ints)
    one = T <= _TOKENS_IN_REGISTERS
    given = not one or call.variant in ("score", "balanced")
    top1 = counts_E
    gain = lse_T
    with on_device(logits_TE):
        if call.protect_top1:
            first_T = expert_TK[:, 0].long()
            first_T = torch.where(first_T < 0, E, first_T)
            top1 = torch.zeros(E + 1, **ints).scatter_add_(
                0, first_T, torch.ones_like(expert_TK[:, 0])
            )
            top1 = top1[:E]
        if not one or call.variant == "score":
            keys, last = torch.empty(E, T, **ints), torch.empty(2, E, **ints)
        if call.variant == "score":
            mass = torch.empty(2, E, **floats)
            for force in (1, 2):
                _select(
                    call, logits_TE, expert_TK, lse_T, counts_E, top1, counts_E, keys, *last,
                    mass[force - 1], force,
                )  # fmt: skip
            gain = mass[0] - mass[1]
        if given:
            target = _targets(call, counts_E, k, top1, uniform_E, gain)
        if one:
            part = next_power_of_2(T)
            launch(_round_kernel, (E,),
                logits_TE, expert_TK, lse_T, counts_E, top1,
                gain if uniform_E is None else uniform_E, gain, target, members, work, T,
                call.tile, call.min_tiles * call.tile, call.cap, *strides,
                VARIANT=_VARIANT[call.variant], HAS_CAP=call.cap > 0, GIVEN=given,
                SCORE=SCORE_CODE[call.score], PROTECT=call.protect_top1, E=E, EP=ep, K=k,
                BLOCK=max(part, _BLOCK), BITS=T.bit_length(), PART=_BLOCK,
                CHUNK=max(1, min(32, 8192 // ep)), num_warps=max(4, min(32, part // 512)),
            )  # fmt: skip
        else:
            _select(
                call, logits_TE, expert_TK, lse_T, counts_E, top1, target, keys, *last, gain, 0
            )  # fmt: skip
            be = min(ep, 64)
            launch(_member_kernel, (blocks, cdiv(E, be)),
                logits_TE, expert_TK, lse_T, counts_E, target, *last, members, work, T, _BLOCK,
                *strides, E=E, BE=be, K=k, SCORE=SCORE_CODE[call.score],
                PROTECT=call.protect_top1, num_warps=4,
            )  # fmt: skip
        totals = work
        sums = max(1, 8192 // ep) if blocks * E <= _SUMMED_AT_ONCE else 0
        if not sums:
            totals = torch.empty(E, **ints)
            launch_finish(work, None, None, totals, None, None, prefix=True)
        gate_S = torch.empty(S, **floats)
        expert_S, row_S, slot_R, token_R = (torch.empty(S, **ints) for _ in range(4))
        offsets, slot_offsets = torch.empty(E + 1, **ints), torch.empty(T + 1, **ints)
        launch(_fill_kernel, (blocks,),
            logits_TE, expert_TK, gate_TK, lse_T, members, work, totals, gate_S, expert_S, row_S,
            slot_R, token_R, offsets, slot_offsets, T, S, _BLOCK, blocks, *strides, call.scale,
            E=E, EP=ep, K=k, SCORE=SCORE_CODE[call.score], NORM=NORM_CODE[call.norm],
            RENORM=_RENORM[call.renorm], BT=max(1, min(64, 4096 // ep)),
            SUM=min(sums, next_power_of_2(blocks)), num_warps=8,
        )  # fmt: skip
    return gate_S, expert_S, slot_offsets, target, row_S, slot_R, token_R, offsets, members


def _token_rounding_backward_triton(
    logits_TE: Tensor,
    expert_TK: Tensor,
    lse_T: Tensor,
    members: Tensor,
    slot_offsets_T1: Tensor,
    d_gate_S: Tensor,
    score: str,
    norm: str,
    scale: float,
    renorm: str,
) -> tuple[Tensor, Tensor]:
    T, E = logits_TE.shape
    k = expert_TK.shape[1]
    ep = next_power_of_2(E)
    d_logits = torch.empty(T, E, dtype=logits_TE.dtype, device=logits_TE.device)
    d_gate = torch.empty(T, k, dtype=torch.float32, device=logits_TE.device)
    bt = max(1, min(64, 2048 // ep))
    with on_device(logits_TE):
        launch(_rounding_backward_kernel, (cdiv(T, bt),),
            logits_TE, expert_TK, lse_T, members, slot_offsets_T1, d_gate_S.contiguous(), d_logits,
            d_gate, T, logits_TE.stride(0), logits_TE.stride(1), scale, E=E, EP=ep, K=k,
            SCORE=SCORE_CODE[score], NORM=NORM_CODE[norm], RENORM=_RENORM[renorm], BT=bt,
            num_warps=4,
        )  # fmt: skip
    return d_logits, d_gate


# --------------------------------------------------------------------------------- ops and autograd


def _fake(logits_TE, expert_TK, gate_TK, lse_T, counts_E, uniform_E, slots, *fixed):
    T, E = logits_TE.shape
    members = (-(-T // 32), E)
    shapes = ((slots,), (T + 1,), (E,), (slots,), (slots,), (slots,), (E + 1,), members)
    return (
        logits_TE.new_empty(slots, dtype=torch.float32),
        *(logits_TE.new_empty(shape, dtype=torch.int32) for shape in shapes),
    )


_FIXED = "str score, str norm, float scale"
_forward_op = define_op(
    "token_rounding(Tensor logits_TE, Tensor expert_TK, Tensor gate_TK, Tensor lse_T, "
    f"Tensor counts_E, Tensor? uniform_E, int slots, {_FIXED}, str variant, int tile, "
    "int min_tiles, int cap, bool protect_top1, str renorm) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _token_rounding_triton,
    _fake,
)
_backward_op = define_op(
    "token_rounding_backward(Tensor logits_TE, Tensor expert_TK, Tensor lse_T, Tensor members, "
    f"Tensor slot_offsets_T1, Tensor d_gate_S, {_FIXED}, str renorm) -> (Tensor, Tensor)",
    _token_rounding_backward_triton,
    lambda logits_TE, expert_TK, *rest: (
        torch.empty_like(logits_TE, memory_format=torch.contiguous_format),
        logits_TE.new_empty(expert_TK.shape, dtype=torch.float32),
    ),
)


class _TokenRounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE, expert_TK, gate_TK, lse_T, counts_E, uniform_E, *fixed):
        forward = _token_rounding_triton if is_eager(logits_TE) else _forward_op
        out = forward(logits_TE, expert_TK, gate_TK, lse_T, counts_E, uniform_E, *fixed)
        call = _Call(*fixed)
        ctx.save_for_backward(logits_TE, expert_TK, lse_T, out[8], out[2])
        ctx.form = (call.score, call.norm, call.scale, call.renorm)
        ctx.fixed = len(fixed)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_gate_S, *_rest):
        backward = _token_rounding_backward_triton if is_eager(d_gate_S) else _backward_op
        d_logits, d_gate = backward(*ctx.saved_tensors, d_gate_S, *ctx.form)
        d_gate = d_gate if ctx.form[3] == "tc" else None
        return d_logits, None, d_gate, None, None, None, *(None for _ in range(ctx.fixed))


# ------------------------------------------------------------------------------------------- public


class RoundedRouting(NamedTuple):
    """`RoundedPairs` and the index arrays between slots, rows and tokens, as `RoutingMetadata`."""

    gate_S: Tensor
    expert_S: Tensor
    slot_offsets_T1: Tensor
    target_E: Tensor
    row_S: Tensor
    slot_R: Tensor
    token_R: Tensor
    offsets_E1: Tensor


def token_rounding(
    logits_TE: Tensor,
    expert_TK: Tensor,
    gate_TK: Tensor,
    lse_T: Tensor,
    counts_E: Tensor,
    uniform_E: Tensor | None = None,
    *,
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
    backend: str,
) -> RoundedRouting:
    """Round a plain choice. `moe.rounding.round_tokens` explains and checks the arguments.

    Args:
        logits_TE, expert_TK, gate_TK, lse_T, counts_E: logits and the plain choice made of them.
        uniform_E: numbers in [0, 1) for "stochastic" and "systematic".
        slots: static number of slots, at least the pairs there can be.
        cap: CAP_UNIT times the capacity factor, 0 for none.
        backend: "reference" or "triton", already resolved.
    """
    fixed = (
        slots, score, norm, float(scale), variant, tile, min_tiles, cap, protect_top1, renorm
    )  # fmt: skip
    if backend == "reference":
        pairs = token_rounding_ref(logits_TE, expert_TK, gate_TK, lse_T, *fixed, uniform_E)
        meta = routing_metadata(
            pairs.expert_S,
            logits_TE.shape[1],
            slot_offsets_T1=pairs.slot_offsets_T1,
            backend="reference",
        )
        return RoundedRouting(*pairs, meta.row_S, meta.slot_R, meta.token_R, meta.offsets_E1)
    gate_TK, lse_T = gate_TK.contiguous(), lse_T.detach().contiguous()
    args = (logits_TE, expert_TK.contiguous(), gate_TK, lse_T, counts_E, uniform_E, *fixed)
    if torch.is_grad_enabled() and (logits_TE.requires_grad or gate_TK.requires_grad):
        return RoundedRouting(*_TokenRounding.apply(*args)[:8])
    run = _token_rounding_triton if is_eager(logits_TE) else _forward_op
    return RoundedRouting(*run(*args)[:8])
