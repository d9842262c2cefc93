"""The kernel of `down_backward` whose epilogue is the consumer's own, under the next products.

The finished tile of dA is held as bf16 pairs. Each range of its columns is finished with two
products of the next tile under way, so that the tensor cores wait for a range only if it takes
longer than both. The producer asks for the columns of H that a range needs a ring's length ahead.
dH and A' go to memory from registers, and nothing waits for them. For that pairs of lanes exchange
dA: each lane then has four neighbouring columns of a row, 16 bytes of H and dH and 8 of A', and
four lanes fill whole sectors of 32 bytes.

A thread has rows r and r + 8 of a tile, as wgmma leaves them. All here works on the two halves of a
tile, the first rows and the second: their places in memory differ by a constant, which costs no
registers, and there are none to spare.
"""

from __future__ import annotations

from moe.kernels.hopper._device import (
    gl,
    gluon,
    init_ring,
    mbarrier,
    mma_layout,
    next_stage,
    nvmma,
    pack_columns,
    pack_pairs,
    stack,
    swiglu_backward,
    tile_at,
    unpack_pair,
    warpgroup_mma_wait,
)
from moe.kernels.hopper.rows import multiply, produce_rows

_H_BUFS = gl.constexpr(4)
"""Ranges of H in shared memory."""

# ------------------------------------------------------------------------------------------- halves


@gluon.constexpr_function
def range_layout(rows: int, columns: int, each: int) -> gl.DistributedLinearLayout:
    """A range of a tile (128 rows) or of one half (64) over eight warps, each with the rows that
    `mma_layout` gives it and `each` neighbouring columns a lane."""
    registers = [[0, 2**i] for i in range((each - 1).bit_length())]
    registers += [[0, c] for c in (4 * each, 8 * each) if c < columns]
    registers += [[8, 0]] if rows == 128 else []
    lanes = [[0, 2 * each], [0, each], [1, 0], [2, 0], [4, 0]]
    warps = [[rows // 8, 0], [rows // 4, 0], [rows // 2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.jit
def _halves(x, EACH: gl.constexpr):
    """[128, C] → the first and the second 8 rows of every 16, two tensors [64, C]; free."""
    C: gl.constexpr = x.shape[1]
    layout: gl.constexpr = range_layout(64, C, EACH)
    first, second = x.reshape(8, 2, 8, C).permute(0, 2, 3, 1).split()
    first = gl.convert_layout(first.reshape(64, C), layout, assert_trivial=True)
    second = gl.convert_layout(second.reshape(64, C), layout, assert_trivial=True)
    return first, second


@gluon.jit
def _rows_of_half(layout: gl.constexpr):
    """The first half's rows of the tile; the second's are 8 further on."""
    i = gl.arange(0, 64, layout=layout)
    return i + i // 8 * 8


# ----------------------------------------------------------------------------------------- epilogue


@gluon.jit
def _swap_lanes(x):
    """Exchanges the numbers of neighbouring lanes."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", "=r,r", [x], dtype=gl.float32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _finish_half(
    da, pairs, gate, dot, dh_ptr, a_ptr, rows, col,
    N: gl.constexpr, WHOLE: gl.constexpr, COLS: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """`_finish_range` of one half: dA [64, COLS / 2] and H [64, COLS], both pairs of bf16."""
    layout: gl.constexpr = range_layout(64, COLS, 4)
    half: gl.constexpr = range_layout(64, COLS // 2, 2)
    HINT: gl.constexpr = ".cs" if STREAM else ""
    even, odd = pairs.reshape(64, COLS // 2, 2).split()
    even = gl.convert_layout(even, half, assert_trivial=True)
    odd = gl.convert_layout(odd, half, assert_trivial=True)
    da_even, da_odd = unpack_pair(da)
    g = gate[:, None]
    dgate_even, dup_even, a_even, dot_even = swiglu_backward(da_even, even, g)
    dgate_odd, dup_odd, a_odd, dot_odd = swiglu_backward(da_odd, odd, g)
    dh = gl.join(pack_pairs(dgate_even, dup_even), pack_pairs(dgate_odd, dup_odd))
    dh = gl.convert_layout(dh.reshape(64, COLS), layout, assert_trivial=True)
    a = gl.join(a_even, a_odd).reshape(64, COLS).to(gl.bfloat16)
    a = gl.convert_layout(a, layout, assert_trivial=True)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    row = _rows_of_half(by_row)
    column = gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    some = (row < rows)[:, None]
    if not WHOLE:
        some = some & (col + column < N)[None, :]
    at = row[:, None] * N + column[None, :]
    gl.store(dh_ptr + at, dh, mask=some, cache_modifier=HINT)
    gl.store(a_ptr + at, a, mask=some, cache_modifier=HINT)
    share = gl.sum((dot_even + dot_odd).reshape(64, COLS // 4, 2), axis=2)  # within a lane
    return _swap_lanes(dot + gl.convert_layout(share, dot.type.layout, assert_trivial=True))


@gluon.jit
def _finish_range(
    part, gates, dots, dh_ptr, a_ptr, h_smem, start, rows, col,
    N: gl.constexpr, WHOLE: gl.constexpr, BM: gl.constexpr, COLS: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    """Stores dH and A' of a range of columns; returns `dots` with each lane's share of <dA, A>.

    A number of dA has one place in memory: of a pair of dH, and of a bf16 of A'.

    Four lanes have the shares of a row, which are summed after the last range. So the shares may
    change lanes among those, and do: ptxas would else put off all additions, with what they need
    in registers, to where the sum is stored.
    """
    h = h_smem._reinterpret(gl.int32, [BM, COLS], nvmma([BM, COLS], gl.int32))
    pairs = _halves(h.load(range_layout(BM, COLS, 4)), 4)
    da = _halves(gl.convert_layout(part, range_layout(BM, COLS // 2, 2)), 2)
    place = start.to(gl.int64) * N + col
    first = _finish_half(
        da[0], pairs[0], gates[0], dots[0], dh_ptr + place, a_ptr + place, rows, col,
        N, WHOLE, COLS, STREAM,
    )  # fmt: skip
    place += 8 * N
    second = _finish_half(
        da[1], pairs[1], gates[1], dots[1], dh_ptr + place, a_ptr + place, rows - 8, col,
        N, WHOLE, COLS, STREAM,
    )  # fmt: skip
    return first, second


@gluon.jit
def _store_dot(dot, dot_ptr, rows):
    sums = gl.sum(dot, axis=1)
    by_row: gl.constexpr = sums.type.layout
    row = _rows_of_half(by_row)
    gl.store(dot_ptr + row, sums, mask=row < rows)


@gluon.jit
def _store_dots(dots, dot_ptr, rows):
    _store_dot(dots[0], dot_ptr, rows)
    _store_dot(dots[1], dot_ptr + 8, rows - 8)


# ----------------------------------------------------------------------------------------- consumer


@gluon.jit
def _consume(
    dh_ptr, a_ptr, gates_ptr, slot_ptr, dot_ptr, start_ptr, end_ptr, R, row_tiles, col_tiles,
    steps, do_bufs, w_bufs, full, empty, h_bufs, h_full,
    N: gl.constexpr, GATES: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = BN // PARTS
    WHOLE: gl.constexpr = N % BN == 0  # every tile has all its columns
    by_row: gl.constexpr = gl.SliceLayout(1, range_layout(64, COLS // 2, 2))
    ones = gl.full([64], 1.0, gl.float32, by_row)
    zeros = gl.zeros([64, COLS // 4], gl.float32, range_layout(64, COLS // 4, 1))
    acc = gl.zeros([BM, BN], gl.float32, mma_layout(BN, gl.num_warps()))
    held = pack_columns(acc, PARTS)
    gates = (ones, ones)
    held_start = 0
    held_rows = 0  # nothing is held yet
    held_col = 0
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        acc = multiply(acc, do_bufs, w_bufs, full, stage, phase, False, False, BN, BK)
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
        dots = (zeros, zeros)
        for i in gl.static_range(PARTS):
            acc = multiply(acc, do_bufs, w_bufs, full, stage, phase, True, False, BN, BK)
            mbarrier.wait(h_full.index(i % _H_BUFS), (i // _H_BUFS) & 1)
            dots = _finish_range(
                held[i], gates, dots, dh_ptr, a_ptr, h_bufs.index(i % _H_BUFS), held_start,
                held_rows, held_col + i * COLS, N, WHOLE, BM, COLS, STREAM,
            )  # fmt: skip
            # What the tile's own epilogue needs comes late, when the held one has left registers.
            if i == PARTS // 2:
                row_tile, col_tile = tile_at(t, row_tiles, col_tiles, GROUP)
                start = gl.load(start_ptr + row_tile)
                end = gl.load(end_ptr + row_tile)
            if i == PARTS // 2 + 2 and GATES:
                first = gl.minimum(start + _rows_of_half(by_row), end - 1)
                second = gl.minimum(start + _rows_of_half(by_row) + 8, end - 1)
                if SLOTS:
                    first, second = gl.load(slot_ptr + first), gl.load(slot_ptr + second)
            if i == PARTS // 2 + 4 and GATES:
                first = gl.load(gates_ptr + first).to(gl.float32)
                second = gl.load(gates_ptr + second).to(gl.float32)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)  # and the range of H is free
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        _store_dots(dots, dot_ptr + (held_col // BN).to(gl.int64) * R + held_start, held_rows)
        for _ in range(PARTS + 1, steps):
            acc = multiply(acc, do_bufs, w_bufs, full, stage, phase, True, False, BN, BK)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        held = pack_columns(acc, PARTS)
        if GATES:
            gates = (first, second)
        held_start = start
        held_rows = end - start
        held_col = col_tile * BN
    dots = (zeros, zeros)
    for i in gl.static_range(PARTS):
        mbarrier.wait(h_full.index(i % _H_BUFS), (i // _H_BUFS) & 1)
        dots = _finish_range(
            held[i], gates, dots, dh_ptr, a_ptr, h_bufs.index(i % _H_BUFS), held_start, held_rows,
            held_col + i * COLS, N, WHOLE, BM, COLS, STREAM,
        )  # fmt: skip
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    _store_dots(dots, dot_ptr + (held_col // BN).to(gl.int64) * R + held_start, held_rows)


# ------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["R", "vectors", "row_vectors", "steps", "col_tiles"])
def down_backward_held_kernel(
    do_desc, do_ptr, token_ptr, w_desc, h_desc, dh_ptr, a_ptr, gates_ptr, slot_ptr, dot_ptr,
    expert_ptr, start_ptr, end_ptr, count_ptr, R, vectors, row_vectors, steps, col_tiles,
    N: gl.constexpr, GATHER: gl.constexpr, EVEN: gl.constexpr, GATES: gl.constexpr,
    SLOTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, GROUP: gl.constexpr, STREAM: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Launched by `down_backward_hopper`; `steps` is at least PARTS + 1."""
    # A range of H is read when a stage is freed as many steps later as there are stages, and every
    # tile fills each of its buffers an even number of times.
    gl.static_assert(_H_BUFS >= STAGES and PARTS % (2 * _H_BUFS) == 0)
    W_BLOCK: gl.constexpr = [1, BK, BN]
    H_BLOCK: gl.constexpr = [BM, 2 * BN // PARTS]
    do_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], nvmma([BM, BK]))
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(STAGES, W_BLOCK), nvmma(W_BLOCK))
    h_bufs = gl.allocate_shared_memory(gl.bfloat16, stack(_H_BUFS, H_BLOCK), nvmma(H_BLOCK))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    h_full = gl.allocate_shared_memory(gl.int64, [_H_BUFS, 1], mbarrier.MBarrierLayout())
    init_ring(full, empty, STAGES, 1 if GATHER else 0)
    for i in gl.static_range(_H_BUFS):
        mbarrier.init(h_full.index(i), count=1)
    row_tiles = gl.load(count_ptr)
    gl.warp_specialize(
        [
            (_consume, (
                dh_ptr, a_ptr, gates_ptr, slot_ptr, dot_ptr, start_ptr, end_ptr, R, row_tiles,
                col_tiles, steps, do_bufs, w_bufs, full, empty, h_bufs, h_full,
                N, GATES, SLOTS, BM, BN, BK, STAGES, PARTS, GROUP, STREAM,
            )),
            (produce_rows, (
                do_desc, do_ptr, token_ptr, w_desc, expert_ptr, start_ptr, end_ptr, row_tiles,
                col_tiles, steps, vectors, row_vectors, do_bufs, w_bufs, full, empty,
                h_desc, h_bufs, h_full, GATHER, EVEN, False, BM, BN, BK, STAGES, GROUP, PARTS,
            )),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
