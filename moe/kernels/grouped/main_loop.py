"""The main loop of the row products: out[r] = finish(a[r] · W[e(r)]), for all tiles of rows.

    for each tile (persistent: program p takes tiles p, p + programs, …):
        acc = sum over k of A tile · W tile
        FINISH(acc, gate, e, start, end, col, width, args, FORM, SPLIT)

An operator is a kernel that hands its operands and its FINISH, a function, to `row_products`, or to
`ragged_products` where experts differ in width:

    up_forward     H and activation(H)
    rows           the product, with a bias or without
    down_backward  dH, A' and <dA, A>

What the next tile needs of lists (expert, rows, tokens) is loaded while this one is worked on,
which hides the latency of those loads.

Shape letters: R rows (expert order), I inner width, O outer width.
"""

from __future__ import annotations

from moe.kernels.common.backend import tl, triton
from moe.kernels.common.tiles import halves, look_up, source_rows, tile_of, weight_tile


@triton.jit
def product(
    acc, a, a_at, w, e, start, k, row, col, I, ROWS, O,
    GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    VEC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + A · W for inner columns k … k + BK - 1 of A, below I, and the tile of W at (row, col),
    within ROWS rows and O columns."""
    a_ptr, a_desc = a
    BN: tl.constexpr = acc.shape[1]
    if GATHER or not TMA:
        # Whole vectors of VEC elements keep the loads 16 bytes wide and asynchronous.
        cols = tl.arange(0, BK)
        at = ((a_at + k // VEC) * VEC)[:, None] + cols[None, :]
        if EVEN:
            a_tile = tl.load(a_ptr + at)
        else:
            a_tile = tl.load(a_ptr + at, mask=(k + cols < I)[None, :], other=0.0)
    else:  # rows past the end of the tile are another expert's; the store cuts them off
        a_tile = a_desc.load([start, k])
    w_tile = weight_tile(w, e, row, col, ROWS, O, BK, BN, TRANSPOSED, TMA)
    return tl.dot(a_tile, w_tile, acc, input_precision="ieee")


@triton.jit
def row_products(
    a, w, tiles, factors, I, O, args, FORM,
    FINISH: tl.constexpr, SPLIT: tl.constexpr, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr,
    GATES: tl.constexpr, SLOTS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    VEC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Walks over the tiles of this program.

    Args:
        a: (pointer, descriptor, row stride in vectors of VEC, token of each row).
        w: (pointer, descriptor, strides of expert, inner and outer axis).
        tiles: (expert, first row, end row of each row tile; number of tiles).
        factors: (gates by slot, slot of each row); SLOTS False: gates are by row.
        args, FORM: what FINISH needs besides: tensors and numbers, and compile-time constants.
        FINISH: epilogue of a tile, which it may handle in SPLIT parts.
        TRANSPOSED: W in memory is (E, O, I).
    """
    a_ptr, a_desc, stride_a, token_ptr = a
    gates_ptr, slot_ptr = factors
    expert_ptr, start_ptr, end_ptr, count_ptr = tiles
    row_tiles = tl.load(count_ptr)
    col_tiles = tl.cdiv(O, BN)
    count = row_tiles * col_tiles
    first = tl.program_id(0)
    step = tl.num_programs(0)
    next_e, next_start, next_end, next_col = look_up(
        first, count, row_tiles, col_tiles, expert_ptr, start_ptr, end_ptr, GROUP
    )
    next_sources = source_rows(token_ptr, next_start, next_end, BM, GATHER)
    next_slots = source_rows(slot_ptr, next_start, next_end, BM, SLOTS)
    for t in tl.range(first, count, step, disallow_acc_multi_buffer=True):
        e, start, end, col = next_e, next_start, next_end, next_col * BN
        a_at = next_sources.to(tl.int64) * stride_a
        gate = gates_of(gates_ptr, next_slots, BM, GATES)
        next_e, next_start, next_end, next_col = look_up(
            t + step, count, row_tiles, col_tiles, expert_ptr, start_ptr, end_ptr, GROUP
        )
        next_sources = source_rows(token_ptr, next_start, next_end, BM, GATHER)
        next_slots = source_rows(slot_ptr, next_start, next_end, BM, SLOTS)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in tl.range(0, I, BK):
            acc = product(
                acc, (a_ptr, a_desc), a_at, w, e, start, k, k, col, I, I, O,
                GATHER, TRANSPOSED, TMA, EVEN, VEC, BK,
            )  # fmt: skip
        FINISH(acc, gate, e, start, end, col, O, args, FORM, SPLIT)


@triton.jit
def ragged_products(
    a, w, lists, factors, O, args, FORM,
    FINISH: tl.constexpr, SPLIT: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    GATHER: tl.constexpr, GATES: tl.constexpr, SLOTS: tl.constexpr, TMA: tl.constexpr,
    EVEN: tl.constexpr, VEC: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`row_products` for weights [units, O] of experts of different widths behind one another:
    A · W over the units of the expert (INNER), or else A · Wᵀ, which gives a column for each unit.

    Args:
        a, factors, args, FORM, FINISH: as there.
        w: (pointer, descriptor, stride of a unit, number of units).
        lists: (first row of each expert, its first unit in WIDTHs, experts by falling width; E).
    """
    a_ptr, a_desc, stride_a, token_ptr = a
    w_ptr, w_desc, stride_w, all_units = w
    offsets_ptr, starts_ptr, order_ptr, E = lists
    gates_ptr, slot_ptr = factors
    rows, units = experts_table(offsets_ptr, starts_ptr, order_ptr, E, EP)
    if INNER:
        tiles = tl.cdiv(rows, BM) * tl.cdiv(O, BN)
    else:
        tiles = tl.cdiv(rows, BM) * tl.cdiv(units * WIDTH, BN)
    last = inclusive(tiles, EP)
    for t in tl.range(tl.program_id(0), tl.sum(tiles, axis=0), tl.num_programs(0)):
        e, within = expert_of(t, tiles, last, order_ptr, E, EP)
        first = tl.load(offsets_ptr + e)
        end = tl.load(offsets_ptr + e + 1)
        unit = tl.load(starts_ptr + e) * WIDTH
        width = tl.load(starts_ptr + e + 1) * WIDTH - unit
        across = O if INNER else width
        row, col = tile_of(within, tl.cdiv(end - first, BM), tl.cdiv(across, BN), GROUP)
        start, col = first + row * BM, col * BN
        a_at = source_rows(token_ptr, start, end, BM, GATHER).to(tl.int64) * stride_a
        gate = gates_of(gates_ptr, source_rows(slot_ptr, start, end, BM, SLOTS), BM, GATES)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if INNER:
            for k in tl.range(0, width, BK):
                acc = product(
                    acc, (a_ptr, a_desc), a_at, (w_ptr, w_desc, 0, stride_w, 1), e * 0, start, k,
                    unit + k, col, width, unit + width, O, GATHER, False, TMA, EVEN, VEC, BK,
                )  # fmt: skip
        else:
            for k in tl.range(0, O, BK):
                acc = product(
                    acc, (a_ptr, a_desc), a_at, (w_ptr, w_desc, 0, 1, stride_w), e * 0, start, k,
                    k, unit + col, O, O, all_units, GATHER, True, TMA, EVEN, VEC, BK,
                )  # fmt: skip
        FINISH(acc, gate, e, start, end, col, width, args, FORM, SPLIT)


@triton.jit
def gates_of(gates_ptr, slots, BM: tl.constexpr, GATES: tl.constexpr):
    """Gate of each row; asked for long before it is used, so that nothing waits for it."""
    if GATES:
        return tl.load(gates_ptr + slots).to(tl.float32)
    else:
        return tl.zeros((BM,), dtype=tl.float32)


@triton.jit
def in_parts(acc, col, tile, args, FORM, PART: tl.constexpr, SPLIT: tl.constexpr):
    """PART(columns of acc, first column, tile, args, FORM) for SPLIT parts of a tile's columns:
    fewer registers and less staging than the whole at once. Returns the sum of what PART returns.
    """
    if SPLIT > 1:
        left, right = halves(acc)
        HALF: tl.constexpr = acc.shape[1] // 2
        a = in_parts(left, col, tile, args, FORM, PART, SPLIT // 2)
        b = in_parts(right, col + HALF, tile, args, FORM, PART, SPLIT // 2)
        return a + b
    else:
        return PART(acc, col, tile, args, FORM)


# ---------------------------------------------------------------------- experts of different widths


@triton.jit
def experts_table(offsets_ptr, starts_ptr, order_ptr, E, EP: tl.constexpr):
    """(rows, units) of every expert, in the order in which experts are walked."""
    i = tl.arange(0, EP)
    some = i < E
    e = tl.load(order_ptr + i, mask=some, other=0)
    rows = tl.load(offsets_ptr + e + 1, mask=some, other=0)
    rows -= tl.load(offsets_ptr + e, mask=some, other=0)
    units = tl.load(starts_ptr + e + 1, mask=some, other=0)
    units -= tl.load(starts_ptr + e, mask=some, other=0)
    return rows, units


@triton.jit
def inclusive(tiles, EP: tl.constexpr):
    """Sums of tiles 0 … i, compared and added: Triton 3.6 refuses to compile some scans of fewer
    numbers than threads. Above 128 experts EP squared are too many, and a scan is long."""
    if EP > 128:
        out = tl.cumsum(tiles, axis=0)
    else:
        i = tl.arange(0, EP)
        below = i[None, :] <= i[:, None]
        out = tl.sum(tl.where(below, tl.broadcast_to(tiles[None, :], (EP, EP)), 0), axis=1)
    return out


@triton.jit
def expert_of(t, tiles, last, order_ptr, E, EP: tl.constexpr):
    """(expert, number of the tile in it) of tile t; `last` is the inclusive sum of `tiles`."""
    before = last <= t
    place = tl.minimum(tl.sum(before.to(tl.int32), axis=0), E - 1)
    first = tl.sum(tl.where(before, tiles, 0), axis=0)
    return tl.load(order_ptr + place), t - first
