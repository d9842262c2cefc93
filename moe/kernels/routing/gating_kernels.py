"""Router gating in Triton: kernels, launch plans and launchers of forward and backward.

`moe.kernels.common.gating` has the definitions.

Shape letters: T tokens, E experts, K experts per token, G expert groups.
"""

# ruff: noqa: RUF005, SIM109 -- Triton's compiler takes neither (*a, b) nor `x in (a, b)`

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.backend import INTERPRET, cdiv, next_power_of_2, tl, triton
from moe.kernels.common.gating import (
    EMPTY_KEY,
    FLOOR_OF_GROUP,
    FLT_MAX,
    IDENTITY,
    MINUS_INF,
    NEG_INF_KEY,
    NO_NORM,
    NORM_CODE,
    SCORE_CODE,
    SIGMOID,
    SOFTMAX,
    SOFTMAX_TOPK,
    SQRTSOFTPLUS,
    TOPK_SUM,
    behind,
    elementwise_score,
    exp_below,
    key_value,
    ordered,
    score_slope,
    swap,
    unordered,
)
from moe.kernels.common.launch import counter, launch, on_device
from moe.kernels.common.networks import (
    largest,
    merge_descending,
    sort_descending,
    stack,
    top_of,
)
from moe.kernels.common.sort import clear_tail
from moe.kernels.routing.routing_metadata import (
    RoutingMetadata,
    expert_bits,
    launch_finish,
    launch_place,
    place_block,
    sums_fit,
    words_per_step,
)

# ------------------------------------------------------------------------------------------ kernels


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
    member = tl.reshape(tl.maximum(biased, FLOOR_OF_GROUP), (BT, GP, EGP))
    place = tl.arange(0, EGP)[None, None, :]
    total = tl.max(member, axis=2)
    best = total
    for _ in tl.static_range(1, TOP):
        first = tl.min(tl.where(member == best[:, :, None], place, EGP), axis=2)
        member = tl.where(place == first[:, :, None], -FLT_MAX, member)
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
    if (NORM == SOFTMAX_TOPK) or ((NORM == TOPK_SUM) and (SCORE == SOFTMAX)):
        top = tl.max(tl.where(ok, sel_z, MINUS_INF), axis=1)
        top = tl.where(top > MINUS_INF, top, 0.0)
        gate = tl.where(ok, tl.exp(sel_z - top[:, None]), 0.0)
        total = tl.sum(gate, axis=1)
        gate = gate / tl.where(total > 0.0, total, 1.0)[:, None]
    else:
        if SCORE == SOFTMAX:
            gate = tl.exp(sel_z - shift[:, None]) * inverse[:, None]
        else:
            gate = elementwise_score(sel_z, SCORE)
        gate = tl.where(ok, gate, 0.0)
        if NORM == TOPK_SUM:
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
    raw = tl.load(at, mask=inside[:, None] & real[None, :], other=MINUS_INF).to(tl.float32)
    use = inside
    if HAS_VALID:
        use = use & (tl.load(valid + row, mask=inside, other=0) != 0)
    # The comparison is explicit: what max and min do with NaN differs between compilers.
    strange = (raw != raw) | (raw == float("inf"))
    z = tl.where(raw != raw, MINUS_INF, tl.minimum(raw, FLT_MAX)) + 0.0
    live = z > MINUS_INF
    shift = tl.max(z, axis=1)
    some = shift > MINUS_INF
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
    if SCORE == SOFTMAX:
        score = exps * inverse[:, None]
        prob = score
    elif SCORE == SIGMOID or SCORE == SQRTSOFTPLUS:
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
            biased = tl.where(biased != biased, MINUS_INF, tl.minimum(biased, FLT_MAX))
            biased = tl.where(live, biased, MINUS_INF)
            key = biased
        else:
            biased = tl.where(live, biased, MINUS_INF)
        if KEPT < G:
            key = tl.where(_kept_groups(biased, BT, G, GP, EGP, KEPT, TOP), key, MINUS_INF)
    key = tl.where(real[None, :], ordered(key), EMPTY_KEY)

    slot = tl.arange(0, KP)[None, :]
    sel_z = tl.full((BT, KP), MINUS_INF, dtype=tl.float32)
    sel_id = tl.zeros((BT, KP), dtype=tl.int32)
    for k in range(rounds):
        best = tl.max(key, axis=1)
        pick = tl.min(tl.where(key == best[:, None], place[None, :], EP), axis=1)
        hit = place[None, :] == pick[:, None]
        if HAS_BIAS or KEPT < G:
            picked = tl.sum(tl.where(hit, z, 0.0), axis=1)
            picked = tl.where(best > NEG_INF_KEY, picked, MINUS_INF)
        else:
            picked = unordered(best)
        if GP != 1:
            pick = (pick // EGP) * EG + pick % EGP
        sel_z = tl.where(slot == k, picked[:, None], sel_z)
        sel_id = tl.where(slot == k, pick[:, None], sel_id)
        key = tl.where(hit, EMPTY_KEY, key)

    ok = sel_z > MINUS_INF
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
        xs = xs + (tl.load(at + i * W, mask=mask, other=MINUS_INF).to(tl.float32),)
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
    if SCORE == SIGMOID or SCORE == SQRTSOFTPLUS:
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
            z = tl.load(base[:, None] + c, mask=mask, other=MINUS_INF).to(tl.float32)
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
        z = tl.load(base + c, mask=mask, other=MINUS_INF).to(tl.float32) + 0.0
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
    return columns, zs, flag | ((values[K - 1] > MINUS_INF) == 0)


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
    SOFTMAX_KEPT: tl.constexpr = (SCORE == SOFTMAX) and (HAS_BIAS or (NORM == NO_NORM))
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
    raw = tl.load(logits + at, mask=mask, other=MINUS_INF).to(tl.float32)
    z = tl.where(raw != raw, MINUS_INF, tl.minimum(raw, FLT_MAX))
    live = z > MINUS_INF
    # not e^(z - lse): lse is a rounded number, and in rows of large logits a coarse one
    shift = tl.max(z, axis=1)
    shift = tl.where(shift > MINUS_INF, shift, 0.0)
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
        if SCORE == SIGMOID or SCORE == SQRTSOFTPLUS:
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
        zk = tl.load(logits + at_id, mask=slots & (id >= 0), other=MINUS_INF).to(tl.float32)
        zk = tl.where(zk != zk, MINUS_INF, tl.minimum(zk, FLT_MAX))
        # slots that were filled for want of usable experts have the constant gate 0
        ok = (id >= 0) & (zk > MINUS_INF)
        if (NORM == SOFTMAX_TOPK) or (SCORE != IDENTITY):
            ok = ok & (g != 0.0)
        dg = tl.where(ok, dg, 0.0)
        if (NORM == SOFTMAX_TOPK) or ((NORM == TOPK_SUM) and (SCORE == SOFTMAX)):
            g = _gates(zk, ok, shift, shift, 1.0, SCORE, NORM)
            dk = g * (dg - tl.sum(g * dg, axis=1)[:, None])
        elif SCORE == SOFTMAX:
            dk = tl.where(ok, tl.exp(zk - shift[:, None]) * inverse_total[:, None], 0.0) * dg
            on_p -= tl.sum(dk, axis=1)
        else:
            sk = tl.where(ok, elementwise_score(zk, SCORE), 0.0)
            dk = dg
            if NORM == TOPK_SUM:
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
        finite = tl.load(lse + row, mask=inside, other=0.0) < FLT_MAX
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


class Plan(NamedTuple):
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


def two_stage_sizes(E: int, k: int) -> dict[str, int] | None:
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


def gating_plan(*shape: int) -> Plan:
    return _new_plan(*shape) if forced_plan else _known_plan(*shape)


@functools.lru_cache(256)
def _known_plan(*shape: int) -> Plan:
    return _new_plan(*shape)


def _new_plan(T: int, E: int, k: int, *form: int) -> Plan:
    plan = _division(T, E, k, *form)
    few = T * k <= forced_plan.get("last", _LAST_PROGRAM_SLOTS)
    if plan.blocks == 1 or not few or not sums_fit(plan.blocks, E):
        return plan
    if plan.block * plan.sizes["KP"] > _RANKED_SLOTS:
        return plan
    sizes = plan.sizes | {"BB": next_power_of_2(plan.blocks), "BLOCK": plan.block}
    sizes["maxnreg"] = 168  # else the assembler spills to fit more programs on an SM
    return plan._replace(sizes=sizes, last_sorts=True)


def _division(T: int, E: int, k: int, groups: int, groups_kept: int, contiguous: bool) -> Plan:
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
    fast = None if limited or not contiguous or k == 1 else two_stage_sizes(E, k)
    if fast is None or forced_plan.get("exact"):
        # with 32 rows of 64 columns some forms spill
        sizes["BX"] = forced_plan.get(
            "bx", max(1, min(256, (1024 if width == 64 else 2048) // width))
        )
        if T * width <= forced_plan.get("one", _ONE_PROGRAM_LOGITS) and T <= _ONE_PROGRAM_ROWS:
            warps = forced_plan.get("warps", 8)
            elements = forced_plan.get("elements", 8)
            sizes["BX"] = min(np2(max(T, 1)), max(1, warps * 32 * elements // width))
            return Plan(1, max(T, 1), sizes, warps)
        # few tokens: many programs of few rows each, whose counts the sort adds up itself
        while "bx" not in forced_plan and sizes["BX"] > 8 and 64 * sizes["BX"] > T:
            sizes["BX"] //= 2
        tiles = cdiv(T, sizes["BX"])
        each = forced_plan.get("each", max(1, min(16, tiles // 1024)))
        return Plan(cdiv(tiles, each), each * sizes["BX"], sizes, 4)
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
    return Plan(cdiv(max(tiles, 1), each), each * sub * sizes["BT"], sizes, warps)


def topk_gating_triton(
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
) -> tuple[Tensor, ...]:
    """The fields of a gating and, if wanted, of routing metadata: one launch for small batches,
    else two or three."""
    T, E = logits_TE.shape
    device = logits_TE.device
    plan = gating_plan(T, E, k, groups, groups_kept, logits_TE.stride(1) == 1)
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


def topk_gating_backward_triton(
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
