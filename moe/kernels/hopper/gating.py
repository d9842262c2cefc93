"""The router's top-K on Hopper, for many tokens and 64 to 256 experts (Gluon).

No row's data go through memory between threads, and the sort needs no second look at the choice:

    _gate   128 tokens a program. Rows come in whole, 16 bytes a thread, for softmax and
            probability sums; the maxima of buckets of 4 columns go through shared memory to one
            thread a row, which finds the K best buckets and, reading those again from the cache,
            the K best experts. Each group of 32 tokens leaves one word of bits per expert: who
            chose it. From there `placing` puts the pairs in the experts' order.

The selection compares 32-bit keys whose low bits hold a bucket or a column in place of the value's
lowest bits; the runner-up behind the cut is compared exactly, so only rows with three candidates
that agree in all other bits, with masked experts among the best K, or with values that are not
finite are left to `_exact_rows`.

Shape letters: T tokens, E experts (P: padded), K experts per token, V buckets of 4 columns, N rows
of a step, B rows of a program.
"""

# ruff: noqa: SIM109 -- Triton's compiler does not take `x in (a, b)`

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv, next_power_of_2, tl
from moe.kernels.common.gating import (
    EMPTY_KEY,
    NORM_CODE,
    SCORE_CODE,
    behind,
    elementwise_score,
    exp_below,
    key_value,
    ordered,
    swap,
    topk_gating_ref,
    unordered,
)
from moe.kernels.common.launch import launch
from moe.kernels.common.networks import merge_descending, runner_up, sort_descending, top_of
from moe.kernels.hopper.device import barrier, gl, gluon
from moe.kernels.hopper.placing import place_pairs
from moe.kernels.hopper.selftest import refuse_wrong, relative_error

_FLT_MAX = gl.constexpr(3.4028234663852886e38)
_NEG_INF = gl.constexpr(float("-inf"))
_INF = gl.constexpr(float("inf"))
_NEG_INF_KEY = gl.constexpr(-2139095041)
_EMPTY = gl.constexpr(-2147483648)
_SOFTMAX = gl.constexpr(SCORE_CODE["softmax"])
_SIGMOID = gl.constexpr(SCORE_CODE["sigmoid"])
_SQRTSOFTPLUS = gl.constexpr(SCORE_CODE["sqrtsoftplus"])
_TOPK_SUM = gl.constexpr(NORM_CODE["topk_sum"])
_SOFTMAX_TOPK = gl.constexpr(NORM_CODE["softmax_topk"])


@gluon.constexpr_function
def rows_layout(V: int, ROWS: int, num_warps: int) -> gl.BlockedLayout:
    """[N, V, 4]: 16 bytes of ROWS neighbouring rows a thread, a warp's threads along the rows."""
    lanes = min(32, V)
    return gl.BlockedLayout([ROWS, 1, 4], [32 // lanes, lanes, 1], [num_warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def sums_layout(V: int, num_warps: int) -> gl.BlockedLayout:
    """[N, V]: 8 values a thread, each row in the warp that has it in `rows_layout`."""
    lanes = V // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def thread_layout(width: int, num_warps: int) -> gl.BlockedLayout:
    """[B, width]: one row a thread."""
    return gl.BlockedLayout([1, width], [32, 1], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def swizzle(V: int) -> gl.SwizzledSharedLayout:
    """[B, V] int32, written by rows and read 16 bytes a thread, one row a thread."""
    return gl.SwizzledSharedLayout(4, 1, min(8, V // 4), [1, 0])


@gluon.jit
def _vectors(x, N: gl.constexpr):
    """[B, N] → tuple of its N columns [B]; free where a thread holds whole rows."""
    if N == 2:
        left, right = x.split()
        return (left, right)
    else:
        left, right = x.reshape(x.shape[0], 2, N // 2).permute(0, 2, 1).split()
        return _vectors(left, N // 2) + _vectors(right, N // 2)


@gluon.jit
def _beside(v, N: gl.constexpr):
    """Tuple of N tensors [B] → [B, N]; the inverse of `_vectors`."""
    if N == 2:
        return gl.join(v[0], v[1])
    else:
        left = ()
        right = ()
        for i in gl.static_range(N // 2):
            left += (v[i],)
            right += (v[N // 2 + i],)
        both = gl.join(_beside(left, N // 2), _beside(right, N // 2))
        return both.permute(0, 2, 1).reshape(v[0].shape[0], N)


@gluon.jit
def _popcount(x):
    return gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _reciprocal(x):
    """1 / x to one unit in the last place, in one instruction."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _exchange(x, lane, J: gl.constexpr, LOW: gl.constexpr):
    """One step of `_transposed`: swap blocks of J bits with the lane that differs in bit J."""
    low = (lane & J) == 0
    turn = gl.where(low, J, 32 - J)
    keep = gl.where(low, LOW, ~LOW)
    # the other lane's word, turned, fills what is not kept: (x & keep) | (y & ~keep)
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 y;
        shfl.sync.bfly.b32 y, $1, $2, 31, -1;
        shf.l.wrap.b32 y, y, y, $3;
        lop3.b32 $0, $1, y, $4, 0xE4;
        }""",
        "=r,r,r,r,r", [x, x * 0 + J, turn, keep], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _transposed(x, lane):
    """Bit i of lane j ↔ bit j of lane i, for the 32 lanes of each warp; x [B] one a thread."""
    x = _exchange(x, lane, 16, 0x0000FFFF)
    x = _exchange(x, lane, 8, 0x00FF00FF)
    x = _exchange(x, lane, 4, 0x0F0F0F0F)
    x = _exchange(x, lane, 2, 0x33333333)
    return _exchange(x, lane, 1, 0x55555555)


@gluon.jit
def _gates(z, shift, inverse, scale, K: gl.constexpr, SCORE: gl.constexpr, NORM: gl.constexpr):
    """Gates of K selected logits, a tuple; the row's softmax is e^(z - shift) * inverse."""
    gates = ()
    if (NORM == _SOFTMAX_TOPK) or ((NORM == _TOPK_SUM) and (SCORE == _SOFTMAX)):
        top = z[0]
        for k in gl.static_range(1, K):
            top = gl.maximum(top, z[k])
        top = gl.where(top > _NEG_INF, top, 0.0)
        total = top * 0.0
        for k in gl.static_range(K):
            g = gl.where(z[k] > _NEG_INF, gl.exp(z[k] - top), 0.0)
            total += g
            gates += (g,)
        factor = scale / gl.where(total > 0.0, total, 1.0)
    else:
        total = shift * 0.0
        for k in gl.static_range(K):
            if SCORE == _SOFTMAX:
                g = gl.exp(z[k] - shift) * inverse
            else:
                g = elementwise_score(z[k], SCORE)
            g = gl.where(z[k] > _NEG_INF, g, 0.0)
            total += g
            gates += (g,)
        factor = total * 0.0 + scale
        if NORM == _TOPK_SUM:
            factor = scale / (total + 1e-20)
    scaled = ()
    for k in gl.static_range(K):
        scaled += (gates[k] * factor,)
    return scaled


@gluon.jit
def _exact_rows(
    logits, bias, valid, expert, gate, lse, base, T, stride_t, scale, odd,
    E: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, SCORE: gl.constexpr,
    NORM: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_VALID: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Routes the program's rows by K rounds of arg-max, any input, straight to memory.

    Returns their probability sums [V, 4] and `odd` plus the rows that needed the non-finite policy.
    """
    layout: gl.constexpr = rows_layout(V, ROWS, gl.num_warps())
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    N: gl.constexpr = ROWS * (32 // min(32, V)) * gl.num_warps()
    bucket = gl.arange(0, V, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    column = bucket[None, :, None] * 4 + four[None, None, :]
    real = column < E
    prob_sum = gl.zeros([V, 4], gl.float32, gl.SliceLayout(0, layout))
    for first in range(0, B, N):
        row = base + first + gl.arange(0, N, layout=row_layout)
        inside = row < T
        row = row.to(gl.int64)
        use = inside
        if HAS_VALID:
            use = use & (gl.load(valid + row, mask=inside, other=0) != 0)
        at = (logits + row * stride_t)[:, None, None] + column
        raw = gl.load(at, mask=inside[:, None, None] & real, other=_NEG_INF).to(gl.float32)
        strange = (raw != raw) | (raw == _INF)
        z = gl.where(raw != raw, _NEG_INF, gl.minimum(raw, _FLT_MAX)) + 0.0
        live = z > _NEG_INF
        shift = gl.max(gl.max(z, axis=2), axis=1)
        some = shift > _NEG_INF
        shift = gl.where(some, shift, 0.0)
        exps = gl.exp(z - shift[:, None, None])
        total = gl.where(some, gl.sum(gl.sum(exps, axis=2), axis=1), 1.0)
        inverse = 1.0 / total
        counted = use & some
        gl.store(lse + row, gl.where(counted, shift + gl.log(total), 0.0), mask=inside)
        score = z
        prob = exps * inverse[:, None, None]
        if SCORE == _SOFTMAX:
            score = prob
        elif (SCORE == _SIGMOID) or (SCORE == _SQRTSOFTPLUS):
            score = elementwise_score(z, SCORE)
            prob = score / (gl.sum(gl.sum(score, axis=2), axis=1) + 1e-20)[:, None, None]
        prob_sum += gl.sum(gl.where(counted[:, None, None], prob, 0.0), axis=0)
        value = z
        if HAS_BIAS:
            value = score + gl.load(bias + column, mask=real, other=0.0).to(gl.float32)
            value = gl.where(value != value, _NEG_INF, gl.minimum(value, _FLT_MAX))
            value = gl.where(live, value, _NEG_INF)
        key = gl.where(real, ordered(value), _EMPTY)
        picked = ()
        usable = row.to(gl.int32) * 0
        for k in gl.static_range(K):
            best = gl.max(gl.max(key, axis=2), axis=1)
            first_column = gl.where(key == best[:, None, None], column, 4 * V)
            pick = gl.min(gl.min(first_column, axis=2), axis=1)
            hit = column == pick[:, None, None]
            if HAS_BIAS:
                z_k = gl.sum(gl.sum(gl.where(hit, z, 0.0), axis=2), axis=1)
                z_k = gl.where(best > _NEG_INF_KEY, z_k, _NEG_INF)
            else:
                z_k = unordered(best)
            picked += (z_k,)
            usable += (z_k > _NEG_INF).to(gl.int32)
            gl.store(expert + row * K + k, gl.where(use, pick, -1), mask=inside)
            key = gl.where(hit, _EMPTY, key)
        gates = _gates(picked, shift, inverse, scale, K, SCORE, NORM)
        for k in gl.static_range(K):
            gl.store(gate + row * K + k, gl.where(use, gates[k], 0.0), mask=inside)
        bad = gl.max(gl.max(strange.to(gl.int32), axis=2), axis=1) > 0
        odd += gl.sum((use & (bad | (usable < K))).to(gl.int32), axis=0)
    return prob_sum, odd


@gluon.jit(do_not_specialize=["T"])
def _gate(
    logits, bias, valid, expert, gate, lse, words, tile_counts, tile_prob, tile_odd, T, stride_t,
    scale,
    E: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, SCORE: gl.constexpr,
    NORM: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_VALID: gl.constexpr,
):  # fmt: skip
    """Experts, gates and logsumexp of B rows; who chose whom, counts and probability sums."""
    W: gl.constexpr = gl.num_warps()
    B: gl.constexpr = 32 * W
    N: gl.constexpr = ROWS * (32 // min(32, V)) * W
    P: gl.constexpr = 4 * V
    layout: gl.constexpr = rows_layout(V, ROWS, W)
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    sums: gl.constexpr = sums_layout(V, W)
    vector: gl.constexpr = thread_layout(4, W)
    thread: gl.constexpr = gl.SliceLayout(1, vector)
    keys_s = gl.allocate_shared_memory(gl.int32, [B, V], swizzle(V))
    total_s = gl.allocate_shared_memory(gl.float32, [B], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if HAS_BIAS:
        shift_s = gl.allocate_shared_memory(gl.float32, [B], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    base = gl.program_id(0) * B

    # ---------------------------------------------------------------------- rows, whole warps
    bucket = gl.arange(0, V, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    column = bucket[None, :, None] * 4 + four[None, None, :]
    tag = (V - 1 - bucket)[None, :]
    tile_at = logits + base.to(gl.int64) * stride_t
    for step in gl.static_range(B // N):
        # rows that are not there or not valid are read like others and count for nothing
        local = gl.minimum(step * N + gl.arange(0, N, layout=row_layout), T - 1 - base)
        at = tile_at + ((local * stride_t)[:, None, None] + column)
        if E < P:
            x = gl.load(at, mask=column < E, other=_NEG_INF).to(gl.float32)
        else:
            x = gl.load(at).to(gl.float32)
        if HAS_BIAS:
            shift = gl.max(gl.max(x, axis=2), axis=1)
        else:
            # the best of the bucket maxima, but for its low bits, serves as the shift
            key = (ordered(gl.max(x, axis=2) + 0.0) & -V) | tag
            keys_s.slice(step * N, N, dim=0).store(key)
            shift = unordered(gl.max(key, axis=1) & -V)
        e = exp_below(x, shift[:, None, None], True)
        total = gl.sum(gl.convert_layout(gl.sum(e, axis=2), sums), axis=1)
        norm = _reciprocal(total)
        if HAS_BIAS:
            inverse = gl.convert_layout(norm, row_layout)
        prob = e
        if (SCORE == _SIGMOID) or (SCORE == _SQRTSOFTPLUS):
            prob = elementwise_score(x, SCORE)
            part = gl.convert_layout(gl.sum(prob, axis=2), sums)
            norm = _reciprocal(gl.sum(part, axis=1) + 1e-20)
        if HAS_BIAS:
            b = gl.load(bias + column, mask=column < E, other=0.0).to(gl.float32)
            value = key_value(x, shift[:, None, None], inverse[:, None, None], b, SCORE, True)
            key = (ordered(gl.max(value, axis=2) + 0.0) & -V) | tag
            keys_s.slice(step * N, N, dim=0).store(key)
            shift_s.slice(step * N, N, dim=0).store(shift)
        total_s.slice(step * N, N, dim=0).store(total)
        row = base + step * N + gl.arange(0, N, layout=gl.SliceLayout(1, sums))
        use = row < T
        if HAS_VALID:
            use = use & (gl.load(valid + row, mask=use, other=0) != 0)
        # not finite where a row's softmax is not: then `_exact_rows` sums again
        norm = gl.convert_layout(gl.where(use, norm, 0.0), row_layout)
        prob *= norm[:, None, None]
        part = gl.sum(prob.reshape(N // ROWS, ROWS, V, 4), axis=1)
        if step == 0:
            prob_part = part
        else:
            prob_part += part
    prob_sum = gl.convert_layout(gl.sum(prob_part, axis=0), gl.SliceLayout(0, layout))

    # ---------------------------------------------------------------------- rows, one a thread
    tl.extra.cuda.gdc_launch_dependents()
    keys = _vectors(keys_s.load(thread_layout(V, W)), V)
    top = top_of(keys, V, 8, EMPTY_KEY)
    last = top[K - 1]
    next_key, crowded = runner_up(keys, last, V, V - 1)
    flag = gl.convert_layout(crowded, thread)

    row = base + gl.arange(0, B, layout=thread)
    inside = row < T
    lane = row % 32
    row = row.to(gl.int64)
    use = inside
    if HAS_VALID:
        use = use & (gl.load(valid + row, mask=inside, other=0) != 0)
    total = total_s.load(thread)
    if HAS_BIAS:
        shift = shift_s.load(thread)
    else:
        shift = unordered(gl.convert_layout(top[0], thread) & -V)
    inverse = 1.0 / total
    row_lse = shift + gl.log(total)
    gl.store(lse + row, gl.where(use, row_lse, 0.0), mask=inside)
    at = logits + gl.minimum(row, T - 1) * stride_t
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, vector))[None, :]
    tiles = ()
    old_v = shift
    old_c = lane
    for k in gl.static_range(K + 1):
        if k < K:
            c = gl.convert_layout(top[k], thread)
        else:
            c = gl.convert_layout(next_key, thread)
        c = ((V - 1 - (c & (V - 1))) * 4)[:, None] + four
        if E < P:
            z = gl.load(at[:, None] + c, mask=c < E, other=_NEG_INF).to(gl.float32)
        else:
            z = gl.load(at[:, None] + c).to(gl.float32)
        b = z
        if HAS_BIAS:
            b = gl.load(bias + c, mask=c < E, other=0.0).to(gl.float32)
        v = key_value(z, shift[:, None], inverse[:, None], b, SCORE, HAS_BIAS) + 0.0
        if k == K:  # the runner-up takes the last bucket's place if its maximum is larger
            new = gl.max(v, axis=1)
            old = gl.max(old_v, axis=1)
            old_c0 = gl.min(old_c, axis=1)
            new_c0 = gl.min(c, axis=1)
            better = (new > old) | ((new == old) & (new_c0 < old_c0))
            v = gl.where(better[:, None], v, old_v)
            c = gl.where(better[:, None], c, old_c)
        if k == K - 1:
            old_v = v
            old_c = c
        else:
            tiles += (_vectors((ordered(v) & -P) | (P - 1 - c), 4),)
    for i in gl.static_range(4):
        some = ()
        for k in gl.static_range(8):
            if k < K:
                some += (tiles[k][i],)
            else:
                some += (tiles[0][i] * 0 + _EMPTY,)
        some = sort_descending(some, 8)
        if i == 0:
            best = some
        else:
            best = merge_descending(best, some, 8)
    last = best[K - 1]
    keys = ()
    for k in gl.static_range(K):
        keys += tiles[k]
    next_key, crowded = runner_up(keys, last, 4 * K, P - 1)
    flag = flag | gl.convert_layout(crowded, thread)

    # Keys that agree in all but the low bits may stand in the wrong order, the runner-up too: one
    # pass of exchanges of neighbours by the exact values, then a check.
    columns = ()
    zs = ()
    values = ()
    for k in gl.static_range(K + 1):
        if k < K:
            c = gl.convert_layout(best[k], thread)
        else:
            c = gl.convert_layout(next_key, thread)
        c = P - 1 - (c & (P - 1))
        if E < P:
            z = gl.load(at + c, mask=c < E, other=_NEG_INF).to(gl.float32) + 0.0
        else:
            z = gl.load(at + c).to(gl.float32) + 0.0
        b = z
        if HAS_BIAS:
            b = gl.load(bias + c, mask=c < E, other=0.0).to(gl.float32)
        columns += (c,)
        zs += (z,)
        values += (key_value(z, shift, inverse, b, SCORE, HAS_BIAS),)
    for first in gl.static_range(2):
        swaps = behind(values, columns, K + 1)
        columns = swap(columns, swaps, first, K + 1)
        zs = swap(zs, swaps, first, K + 1)
        values = swap(values, swaps, first, K + 1)
    swaps = behind(values, columns, K + 1)
    for k in gl.static_range(K):
        flag = flag | swaps[k]
    flag = flag | ((values[K - 1] > _NEG_INF) == 0)
    # of rows without use too: their probabilities times 0 are not 0 if they are not finite
    flag = (flag & use) | ((gl.abs(row_lse) < _INF) == 0)

    odd = gl.program_id(0) * 0
    slot = gl.arange(0, 8, layout=gl.SliceLayout(0, thread_layout(8, W)))[None, :]
    out_row = base + gl.arange(0, B, layout=gl.SliceLayout(1, thread_layout(8, W)))
    if gl.max(flag.to(gl.int32), axis=0) > 0:
        more, odd = _exact_rows(
            logits, bias, valid, expert, gate, lse, base, T, stride_t, scale, odd,
            E, K, V, 1, SCORE, NORM, HAS_BIAS, HAS_VALID, B,
        )  # fmt: skip
        prob_sum = gl.convert_layout(more, gl.SliceLayout(0, layout))
        barrier()
        ids = ()
        for k in gl.static_range(K):
            ids += (gl.load(expert + row * K + k, mask=inside, other=-1),)
    else:
        gates = _gates(zs, shift, inverse, scale, K, SCORE, NORM)
        ids = ()
        wide_ids = ()
        wide_gates = ()
        for k in gl.static_range(8):
            wide_ids += (gl.where(use, columns[k if k < K else 0], -1),)
            wide_gates += (gl.where(use, gates[k if k < K else 0], 0.0),)
            if k < K:
                ids += (gl.where(use, columns[k], -1),)
        wide: gl.constexpr = thread_layout(8, W)
        at_out = out_row.to(gl.int64)[:, None] * K + slot
        some_out = (out_row < T)[:, None] & (slot < K)
        gl.store(expert + at_out, gl.convert_layout(_beside(wide_ids, 8), wide), mask=some_out)
        gl.store(gate + at_out, gl.convert_layout(_beside(wide_gates, 8), wide), mask=some_out)

    # ------------------------------------------------------------- who chose whom, 32 rows a word
    chose = ()
    for q in gl.static_range(P // 32):
        bits = lane * 0
        for k in gl.static_range(K):
            bits |= gl.where((ids[k] >> 5) == q, (lane * 0 + 1) << (ids[k] & 31), 0)
        bits = _transposed(bits, lane)
        group = (base // 32) + gl.arange(0, B, layout=thread) // 32
        gl.store(words + group * P + q * 32 + lane, bits)
        chose += (_popcount(bits),)
    counts = gl.sum(_beside(chose, P // 32).reshape(W, 32, P // 32), axis=0)
    low: gl.constexpr = gl.BlockedLayout([1, P // 32], [32, 1], [1, W], [1, 0])
    counts = gl.convert_layout(counts, low)
    expert_of = gl.arange(0, 32, layout=gl.SliceLayout(1, low))[:, None]
    expert_of = expert_of + 32 * gl.arange(0, P // 32, layout=gl.SliceLayout(0, low))[None, :]
    tile = gl.program_id(0) * P
    gl.store(tile_counts + tile + expert_of, counts.to(gl.uint8))
    flat = gl.arange(0, V, layout=gl.SliceLayout(1, gl.SliceLayout(0, layout)))[:, None] * 4
    flat = flat + gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :]
    gl.store(tile_prob + tile + flat, prob_sum)
    gl.store(tile_odd + gl.program_id(0), odd)


# ----------------------------------------------------------------------------------------- launcher

# What the benchmark sets to time other plans: "warps" of a program of `_gate` (32 tokens each, 4 at
# most: counts are bytes), "rows" of a thread in one step.
forced_plan: dict[str, int] = {}


def gating_hopper(
    logits_TE: Tensor,
    k: int,
    score: str,
    norm: str,
    scale: float,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    metadata: bool,
) -> tuple[Tensor, ...]:
    """What `topk_gating_triton` returns, without group limit."""
    E = logits_TE.shape[1]
    form = (k, score, norm, scale)

    def error() -> float:
        return _error(E, *form, bias_E is not None, valid_T is not None, logits_TE.device)

    variant = (E, *form, bias_E is not None, valid_T is not None)
    refuse_wrong("hopper gating", variant, error, logits_TE.device)
    return _launch(logits_TE, *form, bias_E, valid_T, metadata)


def _launch(
    logits_TE: Tensor,
    k: int,
    score: str,
    norm: str,
    scale: float,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    metadata: bool,
) -> tuple[Tensor, ...]:
    T, E = logits_TE.shape
    device = logits_TE.device
    i32, f32 = {"dtype": torch.int32, "device": device}, {"dtype": torch.float32, "device": device}
    warps = forced_plan.get("warps", 4)
    padded = max(64, next_power_of_2(E))
    tile = 32 * warps
    tiles = cdiv(T, tile)
    expert, gate, lse = torch.empty(T, k, **i32), torch.empty(T, k, **f32), torch.empty(T, **f32)
    words = torch.empty(tiles * warps, padded, **i32)
    tile_counts = torch.empty(tiles, padded, dtype=torch.uint8, device=device)
    tile_prob, tile_odd = torch.empty(tiles, padded, **f32), torch.empty(tiles, **i32)
    launch(_gate, (tiles,),
        logits_TE, logits_TE if bias_E is None else bias_E.contiguous(),
        logits_TE if valid_T is None else valid_T.contiguous(), expert, gate, lse, words,
        tile_counts, tile_prob, tile_odd, T, logits_TE.stride(0), scale,
        E=E, K=k, V=padded // 4, ROWS=forced_plan.get("rows", 8 if padded <= 128 else 4),
        SCORE=SCORE_CODE[score], NORM=NORM_CODE[norm], HAS_BIAS=bias_E is not None,
        HAS_VALID=valid_T is not None, num_warps=warps,
    )  # fmt: skip
    placed = place_pairs(
        expert, words, tile_counts, tile_prob, tile_odd, E, metadata, clear=valid_T is not None
    )
    return expert, gate, lse, *placed


# ---------------------------------------------------------------------------------------- self-test

_TOKENS = 300  # two whole programs and a part of one


def _error(
    num_experts: int, k: int, score: str, norm: str, scale: float, biased: bool, padded: bool,
    device: torch.device,
) -> float:  # fmt: skip
    """Largest of the errors of gates, lse and sums and of the share of other choices; infinite if
    the sort is not that of the choices."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(_TOKENS, num_experts, generator=generator, device=device)
    bias = torch.randn(num_experts, generator=generator, device=device) if biased else None
    valid = torch.rand(_TOKENS, generator=generator, device=device) < 0.9 if padded else None
    expert, gate, lse, counts, prob, odd, offsets, row_S, slot_R, token_R = _launch(
        logits, k, score, norm, scale, bias, valid, True
    )
    want = topk_gating_ref(logits, k, score, norm, scale, bias, valid_T=valid)
    pair_S = expert.flatten().long()
    pairs = torch.bincount(pair_S[pair_S >= 0], minlength=num_experts)
    order = torch.where(pair_S < 0, num_experts, pair_S).argsort(stable=True)
    used = int(pairs.sum())
    row = torch.full_like(pair_S, -1).index_put_((order[:used],), torch.arange(used, device=device))
    sorted_right = (
        torch.equal(counts.long(), pairs)
        and torch.equal(offsets[1:].long(), pairs.cumsum(0))
        and torch.equal(row_S.long(), row)
        and torch.equal(slot_R[:used].long(), order[:used])
        and torch.equal(token_R[:used].long(), order[:used] // k)
    )
    if not sorted_right or odd.item() != 0:
        return float("inf")
    other = (expert != want.expert_TK).float().mean().item()
    got = (gate, lse, prob)
    return max(other, relative_error(got, (want.gate_TK, want.lse_T, want.prob_sum_E)))
