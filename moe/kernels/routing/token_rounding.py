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

    _extremes  32 tokens by all experts a group: each expert's best candidate, and the plain choice
               as bits. Rounding moves less than a tile of an expert's tokens, so that few groups
               can hold them.
    _change    one expert a program: among the best groups the tokens that join or leave.
    _fill      slots and rows of the pairs.

The gradient of the gates of realised pairs is exact; targets and selection are constants.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.autograd import first_order
from moe.kernels.common.backend import (
    INTERPRET,
    capability,
    cdiv,
    check_resolved,
    next_power_of_2,
    tl,
    triton,
)
from moe.kernels.common.gating import (
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
from moe.kernels.common.launch import launch, on_device
from moe.kernels.common.ops import define_op, is_eager
from moe.kernels.common.sort import clear_tail, popcount
from moe.kernels.routing.routing_metadata import routing_metadata

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
def _after_the_kernel_before(PDL: tl.constexpr):
    """Let the next kernel be launched, and wait until the one before has ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _total(flag):
    return tl.sum(flag.to(tl.int32), axis=0).to(tl.int32)


@triton.jit
def _unsigned(key):
    """int32 → uint32 of the same order; EMPTY_KEY becomes 0."""
    return key.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit(do_not_specialize=["T", "groups", "tile", "least", "cap"])
def _extremes_kernel(
    logits, expert, lse, counts, top1, uniform, gain, target, extremes, members, T, groups, tile,
    least, cap, stride_t, stride_e,
    VARIANT: tl.constexpr, HAS_CAP: tl.constexpr, GIVEN: tl.constexpr, FORCE: tl.constexpr,
    SCORE: tl.constexpr, PROTECT: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    BG: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of BG groups of 32 tokens and BE experts: the best key that each expert finds in each group
    (`extremes` [E, groups], in the order of the search) and the plain choice (`members`
    [groups, E], bit t % 32 of word [t / 32, e]).

    A growing expert looks for the highest key among the other tokens, a shrinking one for the
    lowest among its own, but for its protected ones: it searches backwards and with ~key.
    GIVEN: the targets are known. Else they are computed here, of all experts, and written.
    FORCE 1, 2: all experts with an incomplete tile grow, shrink by it.
    """
    _after_the_kernel_before(PDL)
    group = tl.program_id(0) * BG + tl.arange(0, BG)
    column = tl.program_id(1) * BE + tl.arange(0, BE)
    real = column < E
    f = tl.load(counts + column, mask=real, other=0)
    if FORCE > 0:
        grow = f >= (FORCE - 1) * 0x7FFFFFFF
        moves = f % tile > 0
    else:
        if GIVEN:
            goal = tl.load(target + column, mask=real, other=0)
        else:
            goal, _ = _goals(
                counts, top1, uniform, gain, tile, least, cap, K, VARIANT, E, BE, CHUNK, PROTECT,
                HAS_CAP,
            )  # fmt: skip
            if tl.program_id(0) == 0:
                tl.store(target + column, goal, mask=real)
        grow = goal > f
        moves = goal != f
    wanted = (group < groups)[:, None] & (real & moves)[None, :]
    best = tl.full((BG, BE), EMPTY_KEY, tl.int32)
    word = tl.full((BG, BE), 0, tl.int32)
    for begin in range(0, 32, 4):  # a few loads under way, not too many registers
        for i in tl.static_range(4):
            t = group * 32 + begin + i
            inside = t < T
            row = t.to(tl.int64)
            at = row[:, None] * stride_t + column[None, :].to(tl.int64) * stride_e
            z = tl.load(logits + at, mask=wanted & inside[:, None], other=0.0).to(tl.float32)
            key = _keys_of(z, tl.load(lse + row, mask=inside, other=0.0), SCORE)
            first = tl.load(expert + row * K, mask=inside, other=-1)
            own = column[None, :] == first[:, None]
            may = (first >= 0)[:, None]
            if PROTECT:
                may = may & (own == 0)
            for k in tl.static_range(1, K):
                other = tl.load(expert + row * K + k, mask=inside, other=-1)
                own = own | (column[None, :] == other[:, None])
            may = may & (own != grow[None, :])
            best = tl.maximum(best, tl.where(may, tl.where(grow[None, :], key, ~key), EMPTY_KEY))
            word = word | (own.to(tl.int32) << (begin + i))
    mask = (group < groups)[:, None] & real[None, :]
    tl.store(members + group[:, None] * E + column[None, :], word, mask=mask)
    place = tl.where(grow[None, :], group[:, None], groups - 1 - group[:, None])
    tl.store(extremes + column[None, :] * groups + place, best, mask=wanted)


@triton.jit
def _counts(keys, low, high, n, ONE: tl.constexpr, BLOCK: tl.constexpr, key):
    """How many of n keys are at least `low` and how many at least `high`, as unsigned numbers."""
    if ONE:
        both = tl.sum((key >= low).to(tl.int32) + ((key >= high).to(tl.int32) << 16), axis=0)
        return both & 0xFFFF, (both >> 16) & 0xFFFF
    else:
        some = tl.full((), 0, tl.int32)
        fewer = tl.full((), 0, tl.int32)
        for first in range(0, n, BLOCK):
            at = first + tl.arange(0, BLOCK)
            key = _unsigned(tl.load(keys + at, mask=at < n, other=EMPTY_KEY))
            some += _total(key >= low)
            fewer += _total(key >= high)
        return some, fewer


@triton.jit
def _count_equal(keys, value, before, n, ONE: tl.constexpr, BLOCK: tl.constexpr, key):
    """How many of the keys earlier than `before` equal `value`."""
    if ONE:
        return _total((key == value) & (tl.arange(0, BLOCK) < before))
    else:
        count = tl.full((), 0, tl.int32)
        for first in range(0, n, BLOCK):
            at = first + tl.arange(0, BLOCK)
            key = _unsigned(tl.load(keys + at, mask=at < n, other=EMPTY_KEY))
            count += _total((key == value) & (at < before))
        return count


@triton.jit
def _last_taken(keys, key, quota, n, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """Key, as unsigned number, and place of the last of `quota` taken of n in (key descending,
    place) order; as many are not empty. A search of the key in thirds by counting, then, if some
    tie there, one of the place in halves. ONE: the keys are `key` [BLOCK], else in memory."""
    low = tl.full((), 1, tl.uint32)
    high = tl.full((), 0xFF800000, tl.uint32)  # infinity, and above every ~key
    if ONE:
        low = tl.min(tl.where(key > 0, key, high), axis=0)
        high = tl.max(key, axis=0)
    while low < high:
        step = (high - low) // 3 + 1
        first = low + step
        second = first + step
        some, fewer = _counts(keys, first, second, n, ONE, BLOCK, key)
        high = tl.where(fewer >= quota, high, tl.where(some >= quota, second - 1, first - 1))
        low = tl.where(fewer >= quota, second, tl.where(some >= quota, first, low))
    some, above = _counts(keys, low, low + 1, n, ONE, BLOCK, key)
    place = n
    if some > quota:
        least = n * 0  # fewer than the wanted number of ties come before it
        while least < place:
            middle = (least + place + 1) // 2
            few = _count_equal(keys, low, middle, n, ONE, BLOCK, key) < quota - above
            least = tl.where(few, middle, least)
            place = tl.where(few, place, middle - 1)
    return low, place


@triton.jit
def _candidates(
    logits, expert, lse, members, chosen, e, at, end, grow, T, stride_t, stride_e,
    SCORE: tl.constexpr, PROTECT: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Keys of candidates `at` of expert e in the order of the search, 32 to each of the `chosen`
    groups, EMPTY_KEY for those that it may not choose; and their bits in `members`."""
    bit = tl.where(grow, at % 32, 31 - at % 32)
    group = tl.load(chosen + at // 32, mask=at < end, other=0)
    word = tl.load(members + group * E + e, mask=at < end, other=0)
    t = group * 32 + bit
    inside = (at < end) & (t < T)
    row = t.to(tl.int64)
    first = tl.load(expert + row * K, mask=inside, other=-1)
    may = (((word >> bit) & 1) != grow.to(tl.int32)) & (first >= 0)
    if PROTECT:
        may = may & (first != e)
    z = tl.load(logits + row * stride_t + e.to(tl.int64) * stride_e, mask=may, other=0.0)
    z = z.to(tl.float32)
    z = tl.where(z != z, _MINUS_INF, tl.minimum(z, _FLT_MAX))
    if SCORE == _SOFTMAX:
        z = z - tl.load(lse + row, mask=may, other=0.0)
    key = ordered(z + 0.0)
    return tl.where(may, tl.where(grow, key, ~key), EMPTY_KEY), bit


@triton.jit(do_not_specialize=["T", "groups", "tile"])
def _change_kernel(
    logits, expert, lse, counts, top1, target, extremes, chosen, keys, members, before, mass, T,
    groups, tile, stride_t, stride_e,
    FORCE: tl.constexpr, SCORE: tl.constexpr, PROTECT: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, K: tl.constexpr, BG: tl.constexpr, ALL_GROUPS: tl.constexpr,
    BC: tl.constexpr, ALL_KEYS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The q tokens that join or leave expert e: their bits of `members` turn.

    The first q of all candidates lie in the first q groups of 32, these in the order of their
    `extremes`: a candidate of any other group has at least q ahead of it. So q of the groups are
    searched, then q of the candidates in these. At the end `before` [groups, E] gets the members
    before each group.
    FORCE: only the score mass of the tokens that would join (1) or leave (2).
    ALL_GROUPS, ALL_KEYS: all groups fit into BG, all candidates of the chosen ones into BC.
    """
    _after_the_kernel_before(PDL)
    e = tl.program_id(0)
    f = tl.load(counts + e)
    kept = 0
    if PROTECT:
        kept = tl.load(top1 + e)
    if FORCE > 0:
        goal = f - f % tile
        if FORCE == 1:
            ids = tl.arange(0, EP)
            total = tl.sum(tl.load(counts + ids, mask=ids < E, other=0), axis=0).to(tl.int32)
            goal = tl.minimum(tl.where(f % tile > 0, goal + tile, goal), total // K)
    else:
        goal = tl.load(target + e)
    grow = goal > f
    quota = tl.where(grow, goal - f, f - tl.maximum(goal, kept))
    row = e.to(tl.int64) * groups
    extremes += row
    chosen += row
    keys += row * 32
    total = 0.0
    if quota > 0:
        # ------------------------------------------------------------------------------- groups
        at = tl.arange(0, BG)
        key = tl.full((BG,), 0, tl.uint32)
        if ALL_GROUPS:
            key = _unsigned(tl.load(extremes + at, mask=at < groups, other=EMPTY_KEY))
        one = tl.full((), 1, tl.uint32)
        some, _ = _counts(extremes, one, one, groups, ALL_GROUPS, BG, key)
        some = tl.minimum(some, quota)
        value, last = _last_taken(extremes, key, some, groups, ALL_GROUPS, BG)
        place = 0
        for first in range(0, groups, BG):
            number = first + at
            key = _unsigned(tl.load(extremes + number, mask=number < groups, other=EMPTY_KEY))
            taken = (key > value) | ((key == value) & (number <= last))
            nth = tl.cumsum(taken.to(tl.int32), axis=0).to(tl.int32)
            number = tl.where(grow, number, groups - 1 - number)
            tl.store(chosen + place + nth - 1, number, mask=taken)
            place += _total(taken)
        tl.debug_barrier()
        # ----------------------------------------------------------------------------- candidates
        at = tl.arange(0, BC)
        end = some * 32
        key = tl.full((BC,), 0, tl.uint32)
        if ALL_KEYS:
            found, bit = _candidates(
                logits, expert, lse, members, chosen, e, at, end, grow, T, stride_t, stride_e,
                SCORE, PROTECT, E, K,
            )  # fmt: skip
            key = _unsigned(found)
        else:
            for first in range(0, end, BC):
                fresh, _bits = _candidates(
                    logits, expert, lse, members, chosen, e, first + at, end, grow, T, stride_t,
                    stride_e, SCORE, PROTECT, E, K,
                )  # fmt: skip
                tl.store(keys + first + at, fresh, mask=first + at < end)
            tl.debug_barrier()
        value, last = _last_taken(keys, key, quota, end, ALL_KEYS, BC)
        for first in range(0, end, BC):
            number = first + at
            if not ALL_KEYS:
                found, bit = _candidates(
                    logits, expert, lse, members, chosen, e, number, end, grow, T, stride_t,
                    stride_e, SCORE, PROTECT, E, K,
                )  # fmt: skip
                key = _unsigned(found)
            taken = (key > value) | ((key == value) & (number <= last))
            if FORCE > 0:
                u = unordered(tl.where(grow, found, ~found))
                if SCORE == _SOFTMAX:
                    s = tl.exp(u)
                else:
                    s = elementwise_score(u, SCORE)
                total += tl.sum(tl.where(taken, s, 0.0), axis=0)
            else:
                turned = tl.reshape(taken.to(tl.int32) << bit, (BC // 32, 32))
                turned = tl.sum(turned, axis=1).to(tl.int32)
                slot = first // 32 + tl.arange(0, BC // 32)
                where = members + tl.load(chosen + slot, mask=slot < some, other=0) * E + e
                turned = turned ^ tl.load(where, mask=slot < some, other=0)
                tl.debug_barrier()
                tl.store(where, turned, mask=slot < some)
    if FORCE > 0:
        tl.store(mass + e, total)
    else:
        tl.debug_barrier()
        ahead = 0
        for first in range(0, groups, BG):
            group = first + tl.arange(0, BG)
            some_e = tl.load(members + group * E + e, mask=group < groups, other=0)
            each = popcount(some_e, ASM)
            up_to = tl.cumsum(each, axis=0).to(tl.int32)
            tl.store(before + group * E + e, ahead + up_to - each, mask=group < groups)
            ahead += tl.sum(each, axis=0).to(tl.int32)


@triton.jit
def _member_tile(members, row, inside, E: tl.constexpr, EP: tl.constexpr):
    """int32 [B, EP] of 0 and 1 from the bits of `members`."""
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


@triton.jit(do_not_specialize=["T", "S"])
def _fill_kernel(
    logits, expert, gate, lse, members, before, target, gate_S, expert_S, row_S, slot_R, token_R,
    offsets, slot_offsets, T, S, stride_t, stride_e, scale,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr,
    NORM: tl.constexpr, RENORM: tl.constexpr, BT: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Slots and rows of the pairs of BT tokens of one group of 32, from the pairs of each expert in
    all (`target` [E]) and before each group (`before` [groups, E])."""
    _after_the_kernel_before(PDL)
    column = tl.arange(0, EP)
    real = column < E
    part = tl.program_id(0)
    begin = part * BT
    total_e = tl.load(target + column, mask=real, other=0)
    at = begin // 32 * E + column
    word = tl.load(members + at, mask=real, other=0) & ((1 << (begin % 32)) - 1)
    ahead = tl.load(before + at, mask=real, other=0) + popcount(word, ASM)
    pairs = tl.sum(total_e, axis=0).to(tl.int32)
    start_e = tl.cumsum(total_e, axis=0).to(tl.int32) - total_e
    if part == 0:
        tl.store(offsets + column, start_e, mask=real)
        tl.store(offsets + E, pairs)
        tl.store(slot_offsets + T, pairs)
    t = begin + tl.arange(0, BT)
    inside = t < T
    row = t.to(tl.int64)
    bits = _member_tile(members, t, inside, E, EP)
    member = bits > 0
    each = tl.sum(bits, axis=1).to(tl.int32)
    first_slot = tl.sum(ahead, axis=0).to(tl.int32) + tl.cumsum(each, axis=0).to(tl.int32) - each
    tl.store(slot_offsets + t, first_slot, mask=inside)
    slot = first_slot[:, None] + tl.cumsum(bits, axis=1).to(tl.int32) - bits
    at_row = (start_e + ahead)[None, :] + tl.cumsum(bits, axis=0).to(tl.int32) - bits

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

# Keys of one expert that a program holds; more are read again for every step of the search.
_KEYS_IN_REGISTERS = 8192
# Experts of a program that looks for extremes; targets of more are computed before.
_COLUMNS = 256


def _overlap(device: torch.device) -> dict[str, bool]:
    """Options of launches that begin under the kernel before and wait at their head until it has
    ended (programmatic dependent launch), where the device has that: it hides the time of a
    launch."""
    can = device.type == "cuda" and capability(device)[0] >= 9
    return {"PDL": can, "launch_pdl": can}


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


def _most_changes(call: _Call, tokens: int) -> int:
    """Bound on the tokens that join or leave one expert."""
    if call.cap:
        return tokens
    most = call.tile - 1  # for the variant score: of either of the two targets
    if call.variant in ("nearest", "nearest_even") and not call.protect_top1:
        most = call.tile // 2
    return min(tokens, max(most, call.min_tiles * call.tile))


def _change(
    call: _Call, logits: Tensor, expert: Tensor, lse: Tensor, counts: Tensor, top1: Tensor,
    uniform: Tensor, gain: Tensor, target: Tensor, members: Tensor, before: Tensor, mass: Tensor,
    work: Tensor, force: int, given: bool,
) -> None:  # fmt: skip
    """`members` and `before` of the `target`, which is computed unless `given`; with `force` only
    the `mass`. work: int32 [2, E, groups]."""
    (T, E), groups = logits.shape, members.shape[0]
    form = {"SCORE": SCORE_CODE[call.score], "PROTECT": call.protect_top1, "FORCE": force}
    form |= {"E": E, "K": expert.shape[1]} | _overlap(logits.device)
    strides, ep = (logits.stride(0), logits.stride(1)), next_power_of_2(E)
    be = min(ep, _COLUMNS)
    bg = max(1, min(next_power_of_2(groups), 256 // be))
    launch(_extremes_kernel, (cdiv(groups, bg), cdiv(E, be)),
        logits, expert, lse, counts, top1, uniform, gain, target, work[0], members, T, groups,
        call.tile, call.min_tiles * call.tile, call.cap, *strides, VARIANT=_VARIANT[call.variant],
        HAS_CAP=call.cap > 0, GIVEN=given, **form, BG=bg, BE=be, CHUNK=32, num_warps=4,
    )  # fmt: skip
    most = 32 * next_power_of_2(min(groups, _most_changes(call, T)))
    bc = most if most <= _KEYS_IN_REGISTERS else max(32, _KEYS_IN_REGISTERS // 8)
    bg = min(next_power_of_2(groups), max(1, _KEYS_IN_REGISTERS))
    keys = work if bc == most else work.new_empty(E, groups * 32)
    launch(_change_kernel, (E,),
        logits, expert, lse, counts, top1, target, *work, keys, members, before, mass, T, groups,
        call.tile, *strides, **form, EP=ep, BG=bg, ALL_GROUPS=bg >= groups, BC=bc,
        ALL_KEYS=bc == most, ASM=not INTERPRET,
        num_warps=max(4, min(32, max(bc, bg) // (512 if bc == most else 256))),
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
    groups = cdiv(T, 32)
    members, before = (torch.empty(groups, E, **ints) for _ in range(2))
    work = torch.empty(2, E, groups, **ints)
    target = torch.empty(E, **ints)
    given = ep > _COLUMNS or call.variant in ("score", "balanced")
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
        router = (logits_TE, expert_TK, lse_T, counts_E, top1)
        if call.variant == "score":
            mass = torch.empty(2, E, **floats)
            for force in (1, 2):
                _change(
                    call, *router, gain, gain, target, members, before, mass[force - 1], work,
                    force, True,
                )  # fmt: skip
            gain = mass[0] - mass[1]
        if given:
            target = _targets(call, counts_E, k, top1, uniform_E, gain)
        uniform = gain if uniform_E is None else uniform_E
        _change(call, *router, uniform, gain, target, members, before, gain, work, 0, given)
        gate_S = torch.empty(S, **floats)
        expert_S, row_S, slot_R, token_R = (torch.empty(S, **ints) for _ in range(4))
        offsets, slot_offsets = torch.empty(E + 1, **ints), torch.empty(T + 1, **ints)
        bt = max(1, min(32, 1024 // ep))
        launch(_fill_kernel, (cdiv(T, bt),),
            logits_TE, expert_TK, gate_TK, lse_T, members, before, target, gate_S, expert_S,
            row_S, slot_R, token_R, offsets, slot_offsets, T, S, logits_TE.stride(0),
            logits_TE.stride(1), call.scale, E=E, EP=ep, K=k, SCORE=SCORE_CODE[call.score],
            NORM=NORM_CODE[call.norm], RENORM=_RENORM[call.renorm], BT=bt,
            ASM=not INTERPRET, num_warps=max(1, min(8, bt * ep // 256)),
            **_overlap(logits_TE.device),
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
    @first_order
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
    """Round a plain choice. `moe.rules.rounding.round_tokens` explains and checks the arguments.

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
    check_resolved("token_rounding", backend)
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
