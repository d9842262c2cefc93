"""From expert ids to the index arrays that grouped products read: a stable counting sort.

Shape letters: T tokens, E experts, S slots (token order), R rows (expert order, R >= S allocated),
B row tiles.

A slot is one (token, expert) pair in token order. Its row is its place when pairs are sorted by
expert, stable by slot. Ids outside [0, E) mean "no expert": the slot has no row. Everything stays
on the device.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.backend import INTERPRET, cdiv, next_power_of_2, pick_backend, tl, triton
from moe.kernels.common.launch import launch, on_device
from moe.kernels.common.ops import define_op, is_eager
from moe.kernels.common.sort import clear_tail, popcount


class RoutingMetadata(NamedTuple):
    """Index arrays of a routing, all int32. Rows at or after offsets_E1[E] are unused: token 0,
    slot 0."""

    offsets_E1: Tensor  # first row of each expert; the last entry is the number of real rows
    row_S: Tensor  # slot -> row, -1 for a slot without expert
    slot_R: Tensor  # row -> slot
    token_R: Tensor  # row -> token


# ---------------------------------------------------------------------------------------- reference


def routing_metadata_ref(
    expert_S: Tensor,
    num_experts: int,
    slots_per_token: int | None = None,
    token_S: Tensor | None = None,
    max_rows: int | None = None,
) -> RoutingMetadata:
    """Plain torch version of `routing_metadata`, any device."""
    S = expert_S.numel()
    R = S if max_rows is None else max_rows
    expert_S = expert_S.reshape(-1).long()
    some_S = (expert_S >= 0) & (expert_S < num_experts)
    bin_S = torch.where(some_S, expert_S, num_experts)
    slot_of_rank = torch.argsort(bin_S, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert_S.device)
    counts = counts.scatter_add(0, bin_S, torch.ones_like(bin_S))
    offsets_E1 = torch.zeros_like(counts)
    offsets_E1[1:] = counts[:num_experts].cumsum(0)
    rank = torch.arange(S, device=expert_S.device)
    row_S = torch.empty_like(bin_S).scatter_(0, slot_of_rank, rank)
    row_S = torch.where(some_S, row_S, -1)
    slot_R = torch.zeros(R, dtype=torch.int64, device=expert_S.device)
    slot_R[:S] = torch.where(rank < offsets_E1[-1], slot_of_rank, 0)
    if token_S is None:
        token_R = slot_R // (slots_per_token or 1)
    elif S:
        used = torch.arange(R, device=expert_S.device) < offsets_E1[-1]
        token_R = torch.where(used, token_S.long()[slot_R], 0)
    else:
        token_R = torch.zeros_like(slot_R)
    i32 = torch.int32
    return RoutingMetadata(offsets_E1.to(i32), row_S.to(i32), slot_R.to(i32), token_R.to(i32))


def slots_of_rows_ref(
    row_S: Tensor, offsets_E1: Tensor, slots_per_token: int
) -> tuple[Tensor, Tensor]:
    """Plain torch version of `slots_of_rows`, any device."""
    S = row_S.numel()
    slot = torch.arange(S, dtype=row_S.dtype, device=row_S.device)
    place = torch.where(row_S >= 0, row_S, S).long()  # entry S is thrown away
    slot_R = torch.zeros(S + 1, dtype=row_S.dtype, device=row_S.device)
    slot_R = slot_R.scatter(0, place, slot)[:S]
    return slot_R, slot_R // slots_per_token


# ------------------------------------------------------------------------------------------ kernels
# Counting sort over blocks of slots. Inside a block, 32 slots make one word: for every bit of the
# expert ids a word holds that bit of 32 slots, so that "slots of this word with expert e" is an AND
# over bit words, its population the count of e and its lower bits the stable rank. The cost per
# slot grows with log2(E) * E / 32 instead of E.


@triton.jit
def _word_bits(flag_G32, lane):
    """int32 [G]: bit i of a word is flag i of 32."""
    return tl.sum(tl.where(flag_G32, (1 << lane)[None, :], 0), axis=1).to(tl.int32)


@triton.jit
def _chunk(
    expert, first, end, E: tl.constexpr, EP: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Slots first … first + 32 G - 1: id, whether it is an expert, rank in its word, counts."""
    # Rows g of a tile with the same g % SIDE lie in the same threads: they get neighbouring words,
    # so that a running sum over the words leaves the threads only once.
    SIDE: tl.constexpr = 16 if G >= 16 else G
    lane = tl.arange(0, 32)
    row = tl.arange(0, G)
    word_of_row = (row % SIDE) * (G // SIDE) + row // SIDE
    slot = first + word_of_row[:, None] * 32 + lane[None, :]
    e = tl.load(expert + slot, mask=slot < end, other=-1).to(tl.int32)
    ok = (e >= 0) & (e < E)
    e = tl.where(ok, e, 0)
    column = tl.arange(0, EP)[None, :]
    some = _word_bits(ok, lane)
    same = tl.broadcast_to(some[:, None], (G, 32))
    word = tl.broadcast_to(some[:, None], (G, EP))
    for b in tl.static_range(BITS):
        plane = _word_bits(((e >> b) & 1) > 0, lane)[:, None]
        same = same & ~(plane ^ -((e >> b) & 1))
        word = word & ~(plane ^ -((column >> b) & 1))
    rank = popcount(same & ((1 << lane) - 1)[None, :], ASM)
    return slot, e, ok, rank, popcount(word, ASM)


@triton.jit
def _at_expert(table_GE, e_G32, EP: tl.constexpr):
    """table[g, e[g, i]] for every slot."""
    if EP <= 16:
        # Triton 3.6 fails on gathers from rows shorter than a warp, when a program has many warps
        column = tl.arange(0, EP)[None, :]
        out = e_G32 * 0
        for c in tl.static_range(EP):
            value = tl.sum(tl.where(column == c, table_GE, 0), axis=1).to(tl.int32)
            out = tl.where(e_G32 == c, value[:, None], out)
        return out
    else:
        return tl.gather(table_GE, e_G32, axis=1)


@triton.jit
def _count_slots(
    expert, begin, end, E: tl.constexpr, EP: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """int32 [EP]: slots of each expert between begin and end."""
    counts = tl.zeros((EP,), dtype=tl.int32)
    for first in range(begin, end, G * 32):
        _, _, _, _, count = _chunk(expert, first, end, E, EP, BITS, G, ASM)
        counts += tl.sum(count, axis=0).to(tl.int32)
    return counts


@triton.jit
def _store_rows(
    token, row_S, slot_R, token_R, slot, row, ok, end, PER_TOKEN: tl.constexpr,
    HAS_TOKEN: tl.constexpr,
):  # fmt: skip
    """Write slots and tokens to their rows and rows to the slots; -1 where not ok: no expert."""
    tl.store(row_S + slot, tl.where(ok, row, -1), mask=slot < end)
    if HAS_TOKEN:
        t = tl.load(token + slot, mask=ok, other=0).to(tl.int32)
    else:
        t = slot // PER_TOKEN
    tl.store(slot_R + row, slot, mask=ok)
    tl.store(token_R + row, t, mask=ok)


@triton.jit
def _place_slots(
    expert, token, row_S, slot_R, token_R, begin, end, base,
    PER_TOKEN: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr,
    HAS_TOKEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write the rows of the slots between begin and end; base [EP] is each expert's next row."""
    SIDE: tl.constexpr = 16 if G >= 16 else G
    for first in range(begin, end, G * 32):
        slot, e, ok, rank, count = _chunk(expert, first, end, E, EP, BITS, G, ASM)
        count = tl.reshape(count, (G // SIDE, SIDE, EP))
        within = tl.cumsum(count, axis=0).to(tl.int32) - count
        whole = tl.sum(count, axis=0).to(tl.int32)
        before = tl.cumsum(whole, axis=0).to(tl.int32) - whole + base[None, :]
        before = tl.reshape(within + before[None, :, :], (G, EP))
        row = _at_expert(before, e, EP) + rank
        _store_rows(token, row_S, slot_R, token_R, slot, row, ok, end, PER_TOKEN, HAS_TOKEN)
        base += tl.sum(whole, axis=0).to(tl.int32)


@triton.jit
def _place_by_memory(
    expert, token, row_S, slot_R, token_R, begin, end, following,
    PER_TOKEN: tl.constexpr, E: tl.constexpr, HAS_TOKEN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`_place_slots` for so many experts that their next rows would not fit in registers: they are
    in memory, `following` [E], and the slots of a step are compared with one another."""
    i = tl.arange(0, STEP)
    for first in range(begin, end, STEP):
        slot = first + i
        e = tl.load(expert + slot, mask=slot < end, other=-1).to(tl.int32)
        ok = (e >= 0) & (e < E)
        same = e[:, None] == e[None, :]
        rank = tl.sum((same & (i[None, :] < i[:, None])).to(tl.int32), axis=1).to(tl.int32)
        later = tl.sum((same & (i[None, :] > i[:, None])).to(tl.int32), axis=1)
        row = tl.load(following + e, mask=ok, other=0, volatile=True) + rank
        tl.debug_barrier()  # all have read
        tl.store(following + e, row + 1, mask=ok & (later == 0))
        _store_rows(token, row_S, slot_R, token_R, slot, row, ok, end, PER_TOKEN, HAS_TOKEN)
        tl.debug_barrier()  # the next step reads what was stored


@triton.jit
def place_block(
    expert, token, total, before, following, offsets, row_S, slot_R, token_R, begin, end, R, part,
    parts,
    PER_TOKEN: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr,
    HAS_TOKEN: tl.constexpr, CLEAR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows of the slots begin … end - 1, block `part` of `parts`, from the `total` [EP] of every
    expert and its slots `before` [EP] this block. `following` [E] is overwritten if EP > 1024."""
    EP: tl.constexpr = 1 << BITS
    column = tl.arange(0, EP)
    base = tl.cumsum(total, axis=0).to(tl.int32) - total
    rows = tl.sum(total, axis=0).to(tl.int32)
    if part == 0:
        tl.store(offsets + column, base, mask=column < E)
        tl.store(offsets + E, rows)
    if EP > 1024:
        tl.store(following + column, base + before, mask=column < E)
        tl.debug_barrier()
        _place_by_memory(
            expert, token, row_S, slot_R, token_R, begin, end, following,
            PER_TOKEN, E, HAS_TOKEN, 64,
        )  # fmt: skip
    else:
        _place_slots(
            expert, token, row_S, slot_R, token_R, begin, end, base + before,
            PER_TOKEN, E, EP, BITS, G, HAS_TOKEN, ASM,
        )  # fmt: skip
    if CLEAR:
        clear_tail(slot_R, token_R, rows, R, part, parts, 1024)


@triton.jit(do_not_specialize=["S", "block"])
def _count_kernel(
    expert, work, S, block,
    E: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """work[b, :] = slots of each expert in block b."""
    EP: tl.constexpr = 1 << BITS
    b = tl.program_id(0)
    counts = _count_slots(expert, b * block, tl.minimum(b * block + block, S), E, EP, BITS, G, ASM)
    column = tl.arange(0, EP)
    tl.store(work + b * E + column, counts, mask=column < E)


@triton.jit(do_not_specialize=["blocks"])
def _finish_kernel(
    work_counts, work_prob, work_odd, counts, prob_sum, odd, blocks,
    E: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, PREFIX: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Add up the partial results of all blocks, in block order; PREFIX: replace each block's counts
    by those of the blocks before it."""
    column = tl.program_id(0) * BE + tl.arange(0, BE)
    total = tl.zeros((BE,), dtype=tl.int32)
    prob = tl.zeros((BE,), dtype=tl.float32)
    rows = tl.zeros((BB,), dtype=tl.int32)
    for first in range(0, blocks, BB):
        b = first + tl.arange(0, BB)
        at = b[:, None] * E + column[None, :]
        mask = (b < blocks)[:, None] & (column < E)[None, :]
        count = tl.load(work_counts + at, mask=mask, other=0)
        if PREFIX:
            before = tl.cumsum(count, axis=0).to(tl.int32) - count + total[None, :]
            tl.store(work_counts + at, before, mask=mask)
        total += tl.sum(count, axis=0).to(tl.int32)
        if STATS:
            prob += tl.sum(tl.load(work_prob + at, mask=mask, other=0.0), axis=0)
            rows += tl.load(work_odd + b, mask=b < blocks, other=0)
    tl.store(counts + column, total, mask=column < E)
    if STATS:
        tl.store(prob_sum + column, prob, mask=column < E)
        if tl.program_id(0) == 0:
            tl.store(odd, tl.sum(rows, axis=0).to(tl.int32))


@triton.jit(do_not_specialize=["S", "R", "block", "blocks"])
def _place_kernel(
    expert, token, counts, before, work_counts, work_prob, work_odd, prob_sum, odd, offsets, row_S,
    slot_R, token_R, S, R, block, blocks,
    PER_TOKEN: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr,
    HAS_TOKEN: tl.constexpr, MODE: tl.constexpr, BB: tl.constexpr, CLEAR: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Rows of one block of slots. MODE 0: the only program, which counts first; 1: `counts` and
    those `before` each block are known (overwritten if EP > 1024); 2: from the counts of the
    blocks, all BB at once, and the first program writes their sums as `_finish_kernel` does."""
    b = tl.program_id(0)
    begin = b * block
    end = tl.minimum(begin + block, S)
    EP: tl.constexpr = 1 << BITS
    column = tl.arange(0, EP)
    if MODE == 0:
        total = _count_slots(expert, begin, end, E, EP, BITS, G, ASM)
        ahead = total * 0
    elif MODE == 1:
        total = tl.load(counts + column, mask=column < E, other=0)
        ahead = tl.load(before + b * E + column, mask=column < E, other=0)
    else:
        other = tl.arange(0, BB)
        at = other[:, None] * E + column[None, :]
        mask = (other < blocks)[:, None] & (column < E)[None, :]
        some = tl.load(work_counts + at, mask=mask, other=0)
        total = tl.sum(some, axis=0).to(tl.int32)
        ahead = tl.sum(tl.where((other < b)[:, None], some, 0), axis=0).to(tl.int32)
        if b == 0:
            tl.store(counts + column, total, mask=column < E)
            prob = tl.sum(tl.load(work_prob + at, mask=mask, other=0.0), axis=0)
            tl.store(prob_sum + column, prob, mask=column < E)
            rows = tl.load(work_odd + other, mask=other < blocks, other=0)
            tl.store(odd, tl.sum(rows, axis=0).to(tl.int32))
    place_block(
        expert, token, total, ahead, before + b * E, offsets, row_S, slot_R, token_R, begin, end, R,
        b, tl.num_programs(0), PER_TOKEN, E, BITS, G, HAS_TOKEN, CLEAR, ASM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["S"])
def _slots_kernel(
    row_S, offsets, slot_R, token_R, S,
    PER_TOKEN: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """slot_R and token_R [S] from row_S; zero where no slot has the row."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_S + slot, mask=slot < S, other=-1)
    tl.store(slot_R + row, slot, mask=row >= 0)
    tl.store(token_R + row, slot // PER_TOKEN, mask=row >= 0)
    unused = (slot < S) & (slot >= tl.load(offsets + E))
    zero = tl.zeros((BLOCK,), dtype=tl.int32)
    tl.store(slot_R + slot, zero, mask=unused)
    tl.store(token_R + slot, zero, mask=unused)


# --------------------------------------------------------------------------------------- launchers


@functools.cache
def expert_bits(num_experts: int) -> int:
    """Bits of an id in the sort, at least 2: Triton 3.6 cannot compile scans over two columns with
    eight warps."""
    return max(2, (num_experts - 1).bit_length())


@functools.cache
def words_per_step(num_experts: int) -> int:
    """Words of 32 slots that a program handles at once: a few thousand (word, expert) counts.

    A program has no more warps than this: a gather from a row must not leave its warp.
    """
    counts = next_power_of_2(num_experts)
    return max(1, min(32, (4096 if counts <= 128 else 2048) // counts))


def launch_finish(
    work_counts: Tensor,
    work_prob: Tensor | None,
    work_odd: Tensor | None,
    counts: Tensor,
    prob_sum: Tensor | None,
    odd: Tensor | None,
    *,
    prefix: bool,
) -> None:
    """Sum the blocks' partial counts [blocks, E] (and statistics); see `_finish_kernel`."""
    blocks, E = work_counts.shape
    stats = work_prob is not None
    be = min(4, next_power_of_2(E))
    unused = counts
    launch(_finish_kernel, (cdiv(E, be),),
        work_counts, work_prob if stats else unused, work_odd if stats else unused,
        counts, prob_sum if stats else unused, odd if stats else unused, blocks,
        E=E, BE=be, BB=min(1024, next_power_of_2(blocks)), PREFIX=prefix, STATS=stats,
        num_warps=4,
    )  # fmt: skip


def launch_place(
    meta: RoutingMetadata,
    expert_S: Tensor,
    per_token: int,
    token_S: Tensor | None,
    counts: Tensor | None,
    before: Tensor | None,
    block: int,
    *,
    clear: bool,
    sums: tuple[Tensor, ...] | None = None,
) -> None:
    """Fill `meta`, given all counts [E] and those before each block of slots [blocks, E], which may
    be overwritten; with None one program counts first. `clear`: rows after the last real one may
    exist.

    sums: (counts, probabilities, odd rows) of each block and (probabilities, odd rows) of all, in
    place of `before`: few blocks, `sums_fit`, whose sums each program then makes itself; those of
    all are written to `counts` and the last two.
    """
    S, R, E = expert_S.numel(), meta.token_R.numel(), meta.offsets_E1.numel() - 1
    unused = meta.offsets_E1
    mode, blocks, together = 0, 1, 1
    if sums is not None:
        mode, blocks = 2, sums[0].shape[0]
        together = next_power_of_2(blocks)
    elif before is not None:
        mode, blocks = 1, before.shape[0]
    words = words_per_step(E)
    if E <= 1024:
        warps = min(4, words)
    else:
        warps = 4
        before = torch.empty(E, dtype=torch.int32, device=expert_S.device) if mode == 0 else before
    launch(_place_kernel, (blocks,),
        expert_S, expert_S if token_S is None else token_S,
        unused if counts is None else counts, unused if before is None else before,
        *((unused,) * 5 if sums is None else sums), *meta, S, R, block, blocks,
        PER_TOKEN=per_token, E=E, BITS=expert_bits(E), G=words, HAS_TOKEN=token_S is not None,
        MODE=mode, BB=together, CLEAR=clear, ASM=not INTERPRET, num_warps=warps,
    )  # fmt: skip


def sums_fit(blocks: int, num_experts: int) -> bool:
    """Whether every program of the sort may add up all blocks' counts itself."""
    return next_power_of_2(blocks) * next_power_of_2(num_experts) <= 2048


# A single program sorts up to this many slots: below, a second and third launch cost more.
_ONE_PROGRAM_SLOTS = 4096


def _routing_metadata_triton(
    expert_S: Tensor,
    num_experts: int,
    slots_per_token: int | None,
    token_S: Tensor | None,
    max_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    S, E = expert_S.numel(), num_experts
    ints = {"dtype": torch.int32, "device": expert_S.device}
    meta = RoutingMetadata(
        torch.empty(E + 1, **ints),
        torch.empty(S, **ints),
        torch.empty(max_rows, **ints),
        torch.empty(max_rows, **ints),
    )
    expert_S = expert_S.reshape(-1).contiguous()
    token_S = None if token_S is None else token_S.contiguous()
    per_token = slots_per_token or 1
    with on_device(expert_S):
        if S <= _ONE_PROGRAM_SLOTS:
            launch_place(meta, expert_S, per_token, token_S, None, None, max(S, 1), clear=True)
            return tuple(meta)
        step = 32 * words_per_step(E)
        block = step * max(1, min(8, S // (512 * step)))
        work = torch.empty(cdiv(S, block), E, **ints)
        counts = torch.empty(E, **ints)
        launch(_count_kernel, (work.shape[0],),
            expert_S, work, S, block, E=E, BITS=expert_bits(E), G=words_per_step(E),
            ASM=not INTERPRET, num_warps=4,
        )  # fmt: skip
        launch_finish(work, None, None, counts, None, None, prefix=True)
        launch_place(meta, expert_S, per_token, token_S, counts, work, block, clear=True)
    return tuple(meta)


def _slots_of_rows_triton(
    row_S: Tensor, offsets_E1: Tensor, slots_per_token: int
) -> tuple[Tensor, Tensor]:
    S = row_S.numel()
    slot_R, token_R = torch.empty_like(row_S), torch.empty_like(row_S)
    if S:
        with on_device(row_S):
            launch(_slots_kernel, (cdiv(S, 1024),),
                row_S, offsets_E1, slot_R, token_R, S,
                PER_TOKEN=slots_per_token, E=offsets_E1.numel() - 1, BLOCK=1024, num_warps=4,
            )  # fmt: skip
    return slot_R, token_R


# ---------------------------------------------------------------------------------------------- ops

_metadata_op = define_op(
    "routing_metadata(Tensor expert_S, int num_experts, int? slots_per_token, Tensor? token_S, "
    "int max_rows) -> (Tensor, Tensor, Tensor, Tensor)",
    _routing_metadata_triton,
    lambda expert_S, num_experts, slots_per_token, token_S, max_rows: tuple(
        expert_S.new_empty(n, dtype=torch.int32)
        for n in (num_experts + 1, expert_S.numel(), max_rows, max_rows)
    ),
)
_slots_op = define_op(
    "slots_of_rows(Tensor row_S, Tensor offsets_E1, int slots_per_token) -> (Tensor, Tensor)",
    _slots_of_rows_triton,
    lambda row_S, *rest: (torch.empty_like(row_S), torch.empty_like(row_S)),
)
# ------------------------------------------------------------------------------------------- public


def routing_metadata(
    expert_S: Tensor,
    num_experts: int,
    *,
    slots_per_token: int | None = None,
    slot_offsets_T1: Tensor | None = None,
    token_S: Tensor | None = None,
    max_rows: int | None = None,
    backend: str = "auto",
) -> RoutingMetadata:
    """Sort slots by expert, stable, and return the index arrays between slots, rows and tokens.

    Args:
        expert_S: int32 or int64 expert of each slot in token order, any shape (flattened); ids
            outside [0, num_experts) are slots without expert.
        num_experts: E.
        slots_per_token: K if token t owns slots tK … tK+K-1. Exactly one of the three token sources
            is given.
        slot_offsets_T1: [T+1] when token t owns slots slot_offsets_T1[t] … slot_offsets_T1[t+1]-1.
        token_S: [S] token of each slot.
        max_rows: rows to allocate, at least S (default S).

    Raises:
        ValueError: an argument out of range, by name and value.
    """
    S = expert_S.numel()
    if expert_S.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert_S must be int32 or int64, got {expert_S.dtype}")
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} must be at least 1")
    if sum(source is not None for source in (slots_per_token, slot_offsets_T1, token_S)) != 1:
        raise ValueError("give exactly one of slots_per_token, slot_offsets_T1 and token_S")
    if slots_per_token is not None and (slots_per_token < 1 or S % slots_per_token):
        raise ValueError(
            f"slots_per_token={slots_per_token} must be at least 1 and divide the {S} slots"
        )
    if token_S is not None and token_S.numel() != S:
        raise ValueError(f"token_S has {token_S.numel()} entries, expert_S has {S}")
    if max_rows is not None and max_rows < S:
        raise ValueError(f"max_rows={max_rows} must be at least the number of slots {S}")
    if slot_offsets_T1 is not None:
        slot = torch.arange(S, dtype=slot_offsets_T1.dtype, device=expert_S.device)
        token_S = torch.searchsorted(slot_offsets_T1, slot, right=True) - 1
    args = (expert_S, num_experts, slots_per_token, token_S, S if max_rows is None else max_rows)
    if pick_backend(backend, expert_S) == "reference":
        return routing_metadata_ref(*args)
    return RoutingMetadata(
        *(_routing_metadata_triton if is_eager(expert_S) else _metadata_op)(*args)
    )


def slots_of_rows(
    row_S: Tensor, offsets_E1: Tensor, slots_per_token: int, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """slot_R and token_R of `routing_metadata` from its row_S: what need not be kept beside it.

    For a fixed number of slots a token and as many rows as slots.
    """
    if pick_backend(backend, row_S) == "reference":
        return slots_of_rows_ref(row_S, offsets_E1, slots_per_token)
    return tuple(_slots_op(row_S, offsets_E1, slots_per_token))
