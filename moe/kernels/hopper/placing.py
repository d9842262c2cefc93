"""From the bits of `gating` to the pairs in the experts' order, for up to 256 experts.

    _sum    one expert a program: its pairs in all and before each tile, its probabilities.
    _place  one tile a program, its pairs twice. In the tokens' order a pair looks up the next row
            of its expert in its group of 32 tokens and adds the bits below its own: slot → row. In
            the experts' order threads take the bits of the words, a few each, so that neighbours
            write neighbouring rows: row → slot and row → token, by the sector where scattered pairs
            write a sector for each number. Pairs behind those few are left to the first way.

Both kernels are launched while the one before still runs, and wait at their head until it has
ended and its writes are seen (programmatic dependent launch): that hides the time of a launch.

Plain Triton: the interpreter runs it too.

Shape letters: T tokens, E experts (P: padded), K experts per token, B tiles of 32 G tokens, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import INTERPRET, next_power_of_2, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.networks import stack
from moe.kernels.common.sort import clear_tail, popcount


@triton.jit(do_not_specialize=["tiles"])
def _sum(
    tile_counts, tile_prob, tile_odd, counts, prob_sum, odd, before, tiles,
    E: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, PREFIX: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Of one expert: sums over all tiles, and (PREFIX) its pairs before each tile."""
    if ASM:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e = tl.program_id(0)
    total = 0
    prob = 0.0
    rows = 0
    for first in range(0, tiles, BT):
        tile = first + tl.arange(0, BT)
        some = tile < tiles
        each = tl.load(tile_counts + tile * P + e, mask=some, other=0).to(tl.int32)
        prob += tl.sum(tl.load(tile_prob + tile * P + e, mask=some, other=0.0), axis=0)
        if PREFIX:
            up_to = tl.cumsum(each, axis=0).to(tl.int32)
            tl.store(before + tile * P + e, total + up_to - each, mask=some)
        if e == 0:
            strange = tl.load(tile_odd + tile, mask=some, other=0)
            rows += tl.sum(strange, axis=0).to(tl.int32)
        total += tl.sum(each, axis=0).to(tl.int32)
    tl.store(counts + e, total)
    tl.store(prob_sum + e, prob)
    if e == 0:
        tl.store(odd, rows)


@triton.jit
def _first_byte(x, ASM: tl.constexpr):
    """Number of the lowest byte of x whose top bit is set; x has no other bits, and not none."""
    return popcount((x - 1) & ~x, ASM) >> 3


@triton.jit
def _zero_bytes(x):
    """The top bits of bytes of x; of those set, the lowest is in the first byte that is 0."""
    return (x - 0x01010101) & ~x & -0x7F7F7F80


@triton.jit(do_not_specialize=["T"])
def _place(
    expert, words, counts, before, offsets, row_S, slot_R, token_R, T,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr,
    ITEMS: tl.constexpr, CLEAR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The rows of the pairs of one tile."""
    if ASM:
        tl.extra.cuda.gdc_wait()
    TOKENS: tl.constexpr = 32 * GROUPS
    b = tl.program_id(0)
    column = tl.arange(0, P)
    group = tl.arange(0, GROUPS)
    i = tl.arange(0, TOKENS * KP)
    local = i // KP
    k = i % KP
    t = b * TOKENS + local
    inside = (t < T) & (k < K)
    slot = t * K + k
    chose = tl.load(words + (b * GROUPS + group[:, None]) * P + column[None, :])
    e = tl.load(expert + slot, mask=inside, other=-1)
    total = tl.load(counts + column, mask=column < E, other=0)
    ahead = tl.load(before + b * P + column, mask=column < E, other=0)
    start = tl.cumsum(total, axis=0).to(tl.int32) - total
    if b == 0:
        tl.store(offsets + column, start, mask=column < E)
        tl.store(offsets + E, tl.sum(total, axis=0).to(tl.int32))
    # the next row of each expert at the beginning of each group of 32 tokens
    each = popcount(chose, ASM)
    base = tl.cumsum(each, axis=0).to(tl.int32) - each + (start + ahead)[None, :]

    # ------------------------------------------------------------------------- in tokens' order
    ok = e >= 0
    at = (local // 32) * P + tl.where(ok, e, 0)
    lower = (tl.full((), 1, tl.int32) << (local % 32)) - 1
    nth = popcount(tl.gather(tl.reshape(chose, (GROUPS * P,)), at, axis=0) & lower, ASM)
    row = tl.gather(tl.reshape(base, (GROUPS * P,)), at, axis=0) + nth
    tl.store(row_S + slot, tl.where(ok, row, -1), mask=inside)
    late = ok & (nth >= ITEMS)
    tl.store(slot_R + row, slot, mask=late)
    tl.store(token_R + row, t, mask=late)

    # ------------------------------------------------------------------------ in experts' order
    # A token's ids as bytes, four in a number; padding stands behind the id that is looked for.
    FOUR: tl.constexpr = 4 if KP >= 4 else KP
    byte = (e & 255) << ((i % FOUR) * 8)
    ids = tl.sum(tl.reshape(byte, (TOKENS * KP // FOUR, FOUR)), axis=1).to(tl.int32)
    word = tl.arange(0, P * GROUPS)  # of expert word // GROUPS
    rest = tl.reshape(tl.trans(chose), (P * GROUPS,))
    first = tl.reshape(tl.trans(base), (P * GROUPS,))
    size = tl.reshape(tl.trans(each), (P * GROUPS,))
    found = ()
    for _ in tl.static_range(ITEMS):
        # the lowest bit; any number where there is none
        found += ((popcount((rest - 1) & ~rest, ASM) & 31) + (word % GROUPS) * 32,)
        rest = rest & (rest - 1)
    N: tl.constexpr = P * GROUPS * ITEMS
    token = tl.reshape(stack(found, ITEMS), (N,))
    same = tl.reshape(tl.zeros((1, ITEMS), tl.int32) + (word // GROUPS * 0x01010101)[:, None], (N,))
    if KP == 8:
        low = _zero_bytes(tl.gather(ids, token * 2, axis=0) ^ same)
        high = _zero_bytes(tl.gather(ids, token * 2 + 1, axis=0) ^ same)
        place = _first_byte(tl.where(low != 0, low, high), ASM) + tl.where(low != 0, 0, 4)
    else:
        place = _first_byte(_zero_bytes(tl.gather(ids, token, axis=0) ^ same), ASM)
    nth = tl.arange(0, ITEMS)[None, :]
    some = tl.reshape(nth < size[:, None], (N,))
    row = tl.reshape(first[:, None] + nth, (N,))
    slot = (b * TOKENS + token) * K + place
    tl.store(slot_R + row, slot, mask=some)
    tl.store(token_R + row, slot.to(tl.uint32) // K, mask=some)
    if CLEAR:
        pairs = tl.sum(total, axis=0).to(tl.int32)
        clear_tail(slot_R, token_R, pairs, T * K, b, tl.num_programs(0), 1024)


def place_pairs(
    expert_TK: Tensor,
    words: Tensor,
    tile_counts: Tensor,
    tile_prob: Tensor,
    tile_odd: Tensor,
    num_experts: int,
    metadata: bool,
    *,
    clear: bool,
) -> tuple[Tensor, ...]:
    """Sums over the tiles and, if wanted, the sorting metadata.

    Args:
        expert_TK: int32 [T, K], all in [0, E) or -1.
        words: int32 [BG, P], bit i of [g, e]: token 32 g + i chose e.
        tile_counts, tile_prob: uint8 and float32 [B, P], pairs and probabilities by expert.
        tile_odd: int32 [B], rows that needed the non-finite policy.
        clear: pairs without expert may exist.

    Returns:
        int32 counts [E], float32 probabilities [E], int32 odd rows [] and, if wanted, the four
        arrays of `RoutingMetadata`.
    """
    (T, k), E, (tiles, padded) = expert_TK.shape, num_experts, tile_counts.shape
    i32 = {"dtype": torch.int32, "device": expert_TK.device}
    counts, prob_sum, odd = torch.empty(E, **i32), tile_prob.new_empty(E), torch.empty((), **i32)
    before = torch.empty(tiles, padded, **i32) if metadata else counts
    launch(_sum, (E,),
        tile_counts, tile_prob, tile_odd, counts, prob_sum, odd, before, tiles,
        E=E, P=padded, BT=min(1024, next_power_of_2(tiles)), PREFIX=metadata,
        ASM=not INTERPRET, num_warps=4, launch_pdl=not INTERPRET,
    )  # fmt: skip
    if not metadata:
        return counts, prob_sum, odd
    offsets, row_S = torch.empty(E + 1, **i32), torch.empty(T * k, **i32)
    slot_R, token_R = torch.empty(T * k, **i32), torch.empty(T * k, **i32)
    wide = next_power_of_2(k)
    launch(_place, (tiles,),
        expert_TK, words, counts, before, offsets, row_S, slot_R, token_R, T,
        E=E, K=k, KP=wide, P=padded, GROUPS=words.shape[0] // tiles,
        ITEMS=max(2, 64 * wide // padded), CLEAR=clear, ASM=not INTERPRET, num_warps=4,
        launch_pdl=not INTERPRET,
    )  # fmt: skip
    return counts, prob_sum, odd, offsets, row_S, slot_R, token_R
