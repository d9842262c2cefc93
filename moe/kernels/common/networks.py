"""Sorting networks on tuples of tensors, for keeping the few largest of many values in registers.

A tuple of N tensors holds N values for every position; all functions work position by position.
Networks: Batcher's odd-even merge sort, and the bitonic merge that keeps the larger half of two
sorted lists. Loops over the tuple unroll at compile time; indices are constants.
"""

# ruff: noqa: RUF005 -- tuples grow by concatenation, the one form that Triton's compiler takes

from __future__ import annotations

from moe.kernels.common.backend import tl, triton


@triton.jit
def _stage(v, P: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """One stage of Batcher's sort: exchange positions i and i + D inside blocks of 2 P."""
    out = ()
    for i in tl.static_range(N):
        if (
            (i >= D % P)
            and (i + D < N)
            and ((i - D % P) % (2 * D) < D)
            and (i // (2 * P) == (i + D) // (2 * P))
        ):
            out = out + (tl.maximum(v[i], v[i + D]),)
        elif (
            (i >= D + D % P)
            and ((i - D - D % P) % (2 * D) < D)
            and ((i - D) // (2 * P) == i // (2 * P))
        ):
            out = out + (tl.minimum(v[i - D], v[i]),)
        else:
            out = out + (v[i],)
    return out


@triton.jit
def sort_descending(v, N: tl.constexpr):
    """Sort tuples of N = 2, 4, 8 or 16 values, largest first."""
    v = _stage(v, 1, 1, N)
    if N >= 4:
        v = _stage(v, 2, 2, N)
        v = _stage(v, 2, 1, N)
    if N >= 8:
        v = _stage(v, 4, 4, N)
        v = _stage(v, 4, 2, N)
        v = _stage(v, 4, 1, N)
    if N >= 16:
        v = _stage(v, 8, 8, N)
        v = _stage(v, 8, 4, N)
        v = _stage(v, 8, 2, N)
        v = _stage(v, 8, 1, N)
    return v


@triton.jit
def _half(v, D: tl.constexpr, N: tl.constexpr):
    out = ()
    for i in tl.static_range(N):
        if i % (2 * D) < D:
            out = out + (tl.maximum(v[i], v[i + D]),)
        else:
            out = out + (tl.minimum(v[i - D], v[i]),)
    return out


@triton.jit
def merge_descending(a, b, N: tl.constexpr):
    """The N largest, sorted, of two sorted tuples of N values."""
    v = ()
    for i in tl.static_range(N):
        v = v + (tl.maximum(a[i], b[N - 1 - i]),)
    if N >= 16:
        v = _half(v, 8, N)
    if N >= 8:
        v = _half(v, 4, N)
    if N >= 4:
        v = _half(v, 2, N)
    return _half(v, 1, N)


@triton.jit
def top_of(v, M: tl.constexpr, N: tl.constexpr, EMPTY: tl.constexpr):
    """The N largest, sorted, of a tuple of M int32 tensors; EMPTY fills where there are fewer."""
    for part in tl.static_range((M + N - 1) // N):
        some = ()
        for i in tl.static_range(N):
            if part * N + i < M:
                some = some + (v[part * N + i],)
            else:
                some = some + (tl.full(v[0].shape, EMPTY, tl.int32),)
        some = sort_descending(some, N)
        if part == 0:
            best = some
        else:
            best = merge_descending(best, some, N)
    return best


@triton.jit
def runner_up(keys, last, N: tl.constexpr, LOW: tl.constexpr):
    """Of N different keys the largest below `last`, at least two of which are, and whether the one
    behind it too agrees with `last` in all but the bits LOW."""
    # distances modulo 2^32, so that what is not below `last` comes after all that is
    first = (last - 1 - keys[0]).to(tl.uint32, bitcast=True)
    second = first | 0xFFFFFFFF
    for i in tl.static_range(1, N):
        distance = (last - 1 - keys[i]).to(tl.uint32, bitcast=True)
        second = tl.minimum(second, tl.maximum(first, distance))
        first = tl.minimum(first, distance)
    crowded = second < (last & LOW).to(tl.uint32, bitcast=True)
    return last - 1 - first.to(tl.int32, bitcast=True), crowded


# `tl.reduce` wants its combine functions with one parameter per tensor.


@triton.jit
def _merge2(a, b, p, q):
    return merge_descending((a, b), (p, q), 2)


@triton.jit
def _merge8(a, b, c, d, e, f, g, h, i, j, k, m, n, p, q, r):
    return merge_descending((a, b, c, d, e, f, g, h), (i, j, k, m, n, p, q, r), 8)


@triton.jit
def _merge16(
    a, b, c, d, e, f, g, h, i, j, k, m, n, p, q, r,
    a1, b1, c1, d1, e1, f1, g1, h1, i1, j1, k1, m1, n1, p1, q1, r1,
):  # fmt: skip
    return merge_descending(
        (a, b, c, d, e, f, g, h, i, j, k, m, n, p, q, r),
        (a1, b1, c1, d1, e1, f1, g1, h1, i1, j1, k1, m1, n1, p1, q1, r1),
        16,
    )


@triton.jit
def largest(v, axis: tl.constexpr, N: tl.constexpr):
    """The N = 2, 8 or 16 largest along `axis` of tuples sorted at each position; sorted tuple."""
    if N == 2:
        return tl.reduce(v, axis, _merge2)
    elif N == 8:
        return tl.reduce(v, axis, _merge8)
    else:
        return tl.reduce(v, axis, _merge16)


@triton.jit
def stack(v, N: tl.constexpr):
    """Tuple of N = 2, 4, 8 or 16 tensors [B] → tensor [B, N]."""
    if N == 2:
        return tl.join(v[0], v[1])
    elif N == 4:
        both = tl.join(tl.join(v[0], v[2]), tl.join(v[1], v[3]))
        return tl.reshape(both, (v[0].shape[0], 4))
    elif N == 8:
        even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
        odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
        return tl.reshape(tl.join(even, odd), (v[0].shape[0], 8))
    else:
        low = tl.join(
            tl.join(tl.join(v[0], v[8]), tl.join(v[4], v[12])),
            tl.join(tl.join(v[2], v[10]), tl.join(v[6], v[14])),
        )
        high = tl.join(
            tl.join(tl.join(v[1], v[9]), tl.join(v[5], v[13])),
            tl.join(tl.join(v[3], v[11]), tl.join(v[7], v[15])),
        )
        return tl.reshape(tl.join(low, high), (v[0].shape[0], 16))
