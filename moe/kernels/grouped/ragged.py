"""Grouped products of experts of different widths, without padding any to the widest.

    up              H = gathered X · W1ᵀ, A = activation(H)
    rows            A · W2 (down-projection) and dH · W1 (gradient of the gathered X)
    down_backward   dA, dH, A' and the gates' gradient, as in `moe.kernels.grouped.down_backward`
    outer           gradients of W1 and W2

All experts' weights lie behind one another: W1 [P, D] with the gate and up rows of expert e's units
interleaved, W2 [U, D] with one row for each unit (the column of the down-projection that the unit
multiplies), so that both are cut along rows. H and A are as wide as the widest expert; what lies
beyond an expert's width in them is neither computed (but for the rest of a tile) nor read.

Programs are persistent and walk over the tiles of all experts; which expert a tile belongs to is
found in the kernel from two short lists, the first row and the first unit of every expert, so
nothing is read back by the host. Experts come in the order of falling width: the longest first.
Main loop and epilogues are those of the products of equal widths (`main_loop`).

Shape letters: T tokens, R rows (expert order), S slots, E experts, D model width, N width of the
widest expert, H columns of its pre-activations, U units of all experts, P rows of W1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.activations import (
    activation_backward_ref,
    activation_ref,
    activation_width,
)
from moe.kernels.common.backend import cdiv, next_power_of_2, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.ops import define_op
from moe.kernels.common.reference import (
    arithmetic_dtype,
    gather_rows_ref,
    to_slots,
    used_rows,
)
from moe.kernels.common.tiles import (
    descriptor,
    grid_size,
    ragged_descriptor,
    tma_serves,
    with_unit_stride,
)
from moe.kernels.common.tuning import Config, pick, size_class
from moe.kernels.grouped.configs import candidates, tile_rows
from moe.kernels.grouped.down_backward import backward_finish, sum_parts
from moe.kernels.grouped.main_loop import (
    expert_of,
    experts_table,
    in_parts,
    inclusive,
    ragged_products,
)
from moe.kernels.grouped.rows import row_part, rows_finish
from moe.kernels.grouped.up_forward import up_finish
from moe.kernels.grouped.weight_gradient import operand


class Widths(NamedTuple):
    """Widths of a layer's experts, and what follows from them."""

    sizes: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """First unit of each expert, and the number of all units."""
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size)
        return tuple(starts)

    @property
    def total(self) -> int:
        """U, units of all experts."""
        return sum(self.sizes)

    @property
    def widest(self) -> int:
        """N."""
        return max(self.sizes)

    def of(self, expert: int, width: int = 1) -> slice:
        """Rows of W2 that are an expert's; of W1 with `width` rows a unit."""
        start = sum(self.sizes[:expert]) * width
        return slice(start, start + self.sizes[expert] * width)


@functools.lru_cache(maxsize=256)
def _lists(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 on the device: first unit of each expert [E + 1]; experts by falling width [E]."""
    order = sorted(range(len(sizes)), key=lambda e: (-sizes[e], e))
    starts = Widths(sizes).starts
    return tuple(torch.tensor(t, dtype=torch.int32, device=device) for t in (starts, order))


# --------------------------------------------------------------------------------------- reference


def _parts(offsets_E1: Tensor, sizes: Sequence[int], width: int) -> Iterator[tuple[slice, slice]]:
    """(rows, units · width) of every expert that has rows, as slices."""
    bounds, starts = offsets_E1.tolist(), Widths(tuple(sizes)).starts
    for e in range(len(sizes)):
        if bounds[e] < bounds[e + 1]:
            yield (
                slice(bounds[e], bounds[e + 1]),
                slice(starts[e] * width, starts[e + 1] * width),
            )


def up_ref(
    x: Tensor, w1_PD: Tensor, token_R: Tensor | None, offsets_E1: Tensor, sizes: Sequence[int],
    activation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Plain torch version of `up`; zeros where nothing is computed."""
    x_RD, width = gather_rows_ref(x, token_R), activation_width(activation)
    h_RH = x_RD.new_zeros(x_RD.shape[0], max(sizes) * width)
    for rows, cols in _parts(offsets_E1, sizes, width):
        h_RH[rows, : cols.stop - cols.start] = x_RD[rows] @ w1_PD[cols].T
    return h_RH, activation_ref(h_RH, activation)


def rows_ref(
    a_RI: Tensor, w_PD: Tensor, offsets_E1: Tensor, sizes: Sequence[int], width: int
) -> Tensor:
    """Plain torch version of `rows`; rows of no expert are zeros."""
    out_RD = a_RI.new_zeros(a_RI.shape[0], w_PD.shape[1])
    for rows, cols in _parts(offsets_E1, sizes, width):
        out_RD[rows] = a_RI[rows, : cols.stop - cols.start] @ w_PD[cols]
    return out_RD


def down_backward_ref(
    do: Tensor, w2_UD: Tensor, h_RH: Tensor, gates_S: Tensor | None, token_R: Tensor | None,
    slot_R: Tensor | None, row_S: Tensor | None, offsets_E1: Tensor, sizes: Sequence[int],
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Plain torch version of `down_backward`."""
    R, wide = h_RH.shape[0], arithmetic_dtype(h_RH.dtype)
    do_RD = gather_rows_ref(do, token_R)
    da_RN = torch.zeros(R, max(sizes), dtype=wide, device=h_RH.device)
    for rows, cols in _parts(offsets_E1, sizes, 1):
        da_RN[rows, : cols.stop - cols.start] = (do_RD[rows] @ w2_UD[cols].T).to(wide)
    dh, a = activation_backward_ref(h_RH, da_RN, activation)
    dgate_R = (da_RN * a).sum(1).masked_fill(~used_rows(offsets_E1, R), 0.0)
    if gates_S is None:
        return dh.to(h_RH.dtype), a.to(h_RH.dtype), h_RH.new_empty(0)
    gate_R = gates_S[:R] if slot_R is None or R == 0 else gates_S.index_select(0, slot_R)
    gate_R1 = gate_R[:, None].to(wide)
    dgate_S = to_slots(dgate_R, row_S).to(gates_S.dtype)
    return (dh * gate_R1).to(h_RH.dtype), (a * gate_R1).to(h_RH.dtype), dgate_S


def outer_ref(
    left_RI: Tensor, right: Tensor, token_R: Tensor | None, offsets_E1: Tensor,
    sizes: Sequence[int], width: int,
) -> Tensor:  # fmt: skip
    """Plain torch version of `outer`; exact zeros for an expert without rows."""
    right_RD = gather_rows_ref(right, token_R)
    out_PD = right_RD.new_zeros(sum(sizes) * width, right_RD.shape[1])
    for rows, cols in _parts(offsets_E1, sizes, width):
        out_PD[cols] = left_RI[rows, : cols.stop - cols.start].T @ right_RD[rows]
    return out_PD


# ------------------------------------------------------------------------------------------ kernels


@triton.jit(do_not_specialize=["E", "D", "H", "N", "P", "stride_x", "stride_w"])
def _up_kernel(
    x_ptr, x_desc, w_ptr, w_desc, h_ptr, h_desc, a_ptr, a_desc, token_ptr, offsets_ptr, starts_ptr,
    order_ptr, E, D, H, N, P, stride_x, stride_w,
    ACT: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr, STORE_H: tl.constexpr,
    TMA: tl.constexpr, EVEN: tl.constexpr, VEC: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    ragged_products(
        (x_ptr, x_desc, stride_x, token_ptr), (w_ptr, w_desc, stride_w, P),
        (offsets_ptr, starts_ptr, order_ptr, E), (None, None), D,
        (None, h_ptr, h_desc, H, a_ptr, a_desc, N, H, N), (ACT, WIDTH, STORE_H, False, TMA),
        up_finish, SPLIT, INNER=False, WIDTH=WIDTH, GATHER=GATHER, GATES=False, SLOTS=False,
        TMA=TMA, EVEN=EVEN, VEC=VEC, EP=EP, BM=BM, BN=BN, BK=BK, GROUP=GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["E", "D", "stride_a", "stride_w"])
def _rows_kernel(
    a_ptr, a_desc, w_ptr, w_desc, out_ptr, out_desc, offsets_ptr, starts_ptr, order_ptr,
    E, D, stride_a, stride_w,
    WIDTH: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    ragged_products(
        (a_ptr, a_desc, stride_a, None), (w_ptr, w_desc, stride_w, 0),
        (offsets_ptr, starts_ptr, order_ptr, E), (None, None), D,
        (None, out_ptr, out_desc, D), (False, TMA), rows_finish, SPLIT,
        INNER=True, WIDTH=WIDTH, GATHER=False, GATES=False, SLOTS=False,
        TMA=TMA, EVEN=EVEN, VEC=1, EP=EP, BM=BM, BN=BN, BK=BK, GROUP=GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["E", "R", "D", "H", "N", "U", "stride_do", "stride_w"])
def _down_backward_kernel(
    do_ptr, do_desc, w_ptr, w_desc, h_ptr, h_desc, gates_ptr, dh_ptr, dh_desc, a_ptr, a_desc,
    dot_ptr, token_ptr, slot_ptr, offsets_ptr, starts_ptr, order_ptr,
    E, R, D, H, N, U, stride_do, stride_w,
    ACT: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr, GATES: tl.constexpr,
    SLOTS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, VEC: tl.constexpr,
    EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    to = (h_ptr, h_desc, dh_ptr, dh_desc, H, a_ptr, a_desc, N, H, N)
    ragged_products(
        (do_ptr, do_desc, stride_do, token_ptr), (w_ptr, w_desc, stride_w, U),
        (offsets_ptr, starts_ptr, order_ptr, E), (gates_ptr, slot_ptr), D, (to, dot_ptr, R),
        (ACT, WIDTH, True, GATES, True, True, TMA, GATES), backward_finish, SPLIT,
        INNER=False, WIDTH=1, GATHER=GATHER, GATES=GATES, SLOTS=SLOTS,
        TMA=TMA, EVEN=EVEN, VEC=VEC, EP=EP, BM=BM, BN=BN, BK=BK, GROUP=GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["E", "I", "D", "stride_left", "stride_right"])
def _outer_kernel(
    left_ptr, left_desc, right_ptr, right_desc, token_ptr, out_ptr, out_desc, offsets_ptr,
    starts_ptr, order_ptr, E, I, D, stride_left, stride_right,
    WIDTH: tl.constexpr, GATHER: tl.constexpr, TMA: tl.constexpr, EVEN_LEFT: tl.constexpr,
    EVEN_RIGHT: tl.constexpr, VEC: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    _rows, units = experts_table(offsets_ptr, starts_ptr, order_ptr, E, EP)
    col_tiles = tl.cdiv(D, BN)
    tiles = tl.cdiv(units * WIDTH, BM) * col_tiles
    last = inclusive(tiles, EP)
    for t in tl.range(tl.program_id(0), tl.sum(tiles, axis=0), tl.num_programs(0)):
        e, within = expert_of(t, tiles, last, order_ptr, E, EP)
        start = tl.load(offsets_ptr + e)
        end = tl.load(offsets_ptr + e + 1)
        unit = tl.load(starts_ptr + e) * WIDTH
        unit_end = tl.load(starts_ptr + e + 1) * WIDTH
        row = within // col_tiles * BM
        col = within % col_tiles * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in tl.range(0, end - start, BK):
            left = operand(
                left_ptr, left_desc, None, start, end, k, row, I, stride_left,
                False, TMA, EVEN_LEFT, VEC, BK, BM,
            )  # fmt: skip
            right = operand(
                right_ptr, right_desc, token_ptr, start, end, k, col, D, stride_right,
                GATHER, TMA, EVEN_RIGHT, VEC, BK, BN,
            )  # fmt: skip
            acc = tl.dot(left.T, right, acc, input_precision="ieee")
        to = (None, out_ptr, out_desc, D)
        in_parts(acc, col, (e, unit + row, unit_end), to, (False, TMA), row_part, SPLIT)


# ---------------------------------------------------------------------------------------- launchers


def _pick(kernel: str, dtype: torch.dtype, bm: int | None, key: tuple, run, device) -> Config:
    listed = candidates(kernel, dtype, bm)
    return pick(kernel, ("ragged", dtype, bm, *key), listed, run, device)


def _bm(dtype: torch.dtype, rows: int, sizes: tuple[int, ...]) -> int:
    return tile_rows(dtype, rows, len(sizes))


def _padded(sizes: tuple[int, ...]) -> int:
    """Experts that a kernel's lists have room for."""
    return max(8, next_power_of_2(len(sizes)))


def _grid(device, c: Config, bm: int, rows: int, sizes: tuple[int, ...], columns: int) -> int:
    tiles = (rows // bm + min(len(sizes), rows)) * cdiv(columns, c.bn)
    return grid_size(device, c, tiles)


def up_triton(
    x: Tensor, w1_PD: Tensor, token_R: Tensor | None, offsets_E1: Tensor, sizes: tuple[int, ...],
    activation: str, save_h: bool, config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launches the kernel; see `up`. H has no rows when it is not saved."""
    (P, D), width, N = w1_PD.shape, activation_width(activation), max(sizes)
    H, R = N * width, (x if token_R is None else token_R).shape[0]
    h_RH = x.new_empty(R if save_h else 0, H)
    a_RN = x.new_empty(R, N)
    if R == 0:
        return h_RH, a_RN
    bm = _bm(x.dtype, R, sizes)
    c = config or _pick(
        "up", x.dtype, bm, (size_class(R), D, H, activation),
        lambda c: up_triton(x, w1_PD, token_R, offsets_E1, sizes, activation, save_h, c), x.device,
    )  # fmt: skip
    x, w1_PD = with_unit_stride(x), with_unit_stride(w1_PD)
    tma = tma_serves(x, w1_PD, a_RN, h_RH)
    vec = 16 // x.element_size() if tma else 1
    x_desc = w_desc = h_desc = a_desc = None
    cols = c.bn // c.split
    if tma:
        w_desc = descriptor(w1_PD[None], [1, c.bn, c.bk])
        a_desc = ragged_descriptor(a_RN, [c.bm, cols // width])
        if save_h:
            h_desc = ragged_descriptor(h_RH, [c.bm, cols])
        if token_R is None:
            x_desc = descriptor(x, [c.bm, c.bk])
    starts, order = _lists(sizes, x.device)
    launch(_up_kernel, (_grid(x.device, c, c.bm, R, sizes, H),),
        x, x_desc, w1_PD, w_desc, h_RH if save_h else None, h_desc, a_RN, a_desc, token_R,
        offsets_E1, starts, order, len(sizes), D, H, N, P, x.stride(0) // vec, w1_PD.stride(0),
        ACT=activation, WIDTH=width, GATHER=token_R is not None, STORE_H=save_h, TMA=tma,
        EVEN=D % c.bk == 0, VEC=vec, EP=_padded(sizes),
        BM=c.bm, BN=c.bn, BK=c.bk, GROUP=c.group, SPLIT=c.split,
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return h_RH, a_RN


def rows_triton(
    a_RI: Tensor, w_PD: Tensor, offsets_E1: Tensor, sizes: tuple[int, ...], width: int,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Launches the kernel; see `rows`."""
    (R, I), D = a_RI.shape, w_PD.shape[1]
    out_RD = a_RI.new_empty(R, D)
    if R == 0:
        return out_RD
    c = config or _pick(
        "rows", a_RI.dtype, _bm(a_RI.dtype, R, sizes), (size_class(R), I, D),
        lambda c: rows_triton(a_RI, w_PD, offsets_E1, sizes, width, c), a_RI.device,
    )  # fmt: skip
    a_RI, w_PD = with_unit_stride(a_RI), with_unit_stride(w_PD)
    whole = math.gcd(*sizes) * width % c.bk == 0
    tma = whole and tma_serves(a_RI, w_PD, out_RD)
    a_desc = w_desc = out_desc = None
    if tma:
        a_desc = descriptor(a_RI, [c.bm, c.bk])
        w_desc = descriptor(w_PD[None], [1, c.bk, c.bn])
        out_desc = ragged_descriptor(out_RD, [c.bm, c.bn // c.split])
    starts, order = _lists(sizes, a_RI.device)
    launch(_rows_kernel, (_grid(a_RI.device, c, c.bm, R, sizes, D),),
        a_RI, a_desc, w_PD, w_desc, out_RD, out_desc, offsets_E1, starts, order, len(sizes), D,
        a_RI.stride(0), w_PD.stride(0), WIDTH=width, TMA=tma, EVEN=whole, EP=_padded(sizes),
        BM=c.bm, BN=c.bn, BK=c.bk, GROUP=c.group, SPLIT=c.split,
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return out_RD


def down_backward_triton(
    do: Tensor, w2_UD: Tensor, h_RH: Tensor, gates_S: Tensor | None, token_R: Tensor | None,
    slot_R: Tensor | None, row_S: Tensor | None, offsets_E1: Tensor, sizes: tuple[int, ...],
    activation: str, config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launches the kernels; see `down_backward`."""
    (R, H), (U, D), width = h_RH.shape, w2_UD.shape, activation_width(activation)
    N, device = max(sizes), h_RH.device
    dh_RH, a_RN = torch.empty_like(h_RH), h_RH.new_empty(R, N)
    dgate_S = h_RH.new_empty(0) if gates_S is None else torch.empty_like(gates_S)
    if R == 0:
        return dh_RH, a_RN, dgate_S.zero_()
    c = config or _pick(
        "down_backward", h_RH.dtype, _bm(h_RH.dtype, R, sizes), (size_class(R), D, H, activation),
        lambda c: down_backward_triton(
            do, w2_UD, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, sizes, activation, c
        ),
        device,
    )  # fmt: skip
    do, w2_UD = with_unit_stride(do), with_unit_stride(w2_UD)
    gates_S = None if gates_S is None else gates_S.contiguous()
    tma = tma_serves(do, w2_UD, h_RH, a_RN)
    vec = 16 // h_RH.element_size() if tma else 1
    do_desc = w_desc = h_desc = dh_desc = a_desc = None
    cols = c.bn // c.split
    if tma:
        w_desc = descriptor(w2_UD[None], [1, c.bn, c.bk])
        h_desc = descriptor(h_RH, [c.bm, cols * width])
        dh_desc = ragged_descriptor(dh_RH, [c.bm, cols * width])
        a_desc = ragged_descriptor(a_RN, [c.bm, cols])
        if token_R is None:
            do_desc = descriptor(do, [c.bm, c.bk])
    dot = None
    if gates_S is not None:  # parts that a narrow expert does not have stay 0
        dot = torch.zeros(cdiv(N, c.bn), R, dtype=torch.float32, device=device)
    starts, order = _lists(sizes, device)
    launch(_down_backward_kernel, (_grid(device, c, c.bm, R, sizes, N),),
        do, do_desc, w2_UD, w_desc, h_RH, h_desc, gates_S, dh_RH, dh_desc, a_RN, a_desc, dot,
        token_R, slot_R, offsets_E1, starts, order, len(sizes), R, D, H, N, U,
        do.stride(0) // vec, w2_UD.stride(0),
        ACT=activation, WIDTH=width, GATHER=token_R is not None, GATES=gates_S is not None,
        SLOTS=slot_R is not None, TMA=tma, EVEN=D % c.bk == 0, VEC=vec,
        EP=_padded(sizes), BM=c.bm, BN=c.bn, BK=c.bk, GROUP=c.group,
        SPLIT=c.split, num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    if gates_S is not None:
        sum_parts(dot, row_S, dgate_S, offsets_E1[len(sizes) :])
    return dh_RH, a_RN, dgate_S


def outer_triton(
    left_RI: Tensor, right: Tensor, token_R: Tensor | None, offsets_E1: Tensor,
    sizes: tuple[int, ...], width: int, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Launches the kernel; see `outer`."""
    (R, I), D, P = left_RI.shape, right.shape[1], sum(sizes) * width
    out_PD = right.new_empty(P, D)
    if R == 0 or right.shape[0] == 0:
        return out_PD.zero_()
    c = config or _pick(
        "outer", right.dtype, None, (size_class(R), I, D),
        lambda c: outer_triton(left_RI, right, token_R, offsets_E1, sizes, width, c), right.device,
    )  # fmt: skip
    left_RI, right = with_unit_stride(left_RI), with_unit_stride(right)
    tma = tma_serves(left_RI, right, out_PD)
    vec = 16 // right.element_size() if tma else 1
    left_desc = right_desc = out_desc = None
    if tma:
        out_desc = ragged_descriptor(out_PD, [c.bm, c.bn // c.split])
        left_desc = ragged_descriptor(left_RI, [c.bk, c.bm])
        if token_R is None:
            right_desc = ragged_descriptor(right, [c.bk, c.bn])
    count = (P // c.bm + len(sizes)) * cdiv(D, c.bn)
    starts, order = _lists(sizes, right.device)
    launch(_outer_kernel, (grid_size(right.device, c, count),),
        left_RI, left_desc, right, right_desc, token_R, out_PD, out_desc, offsets_E1, starts,
        order, len(sizes), I, D, left_RI.stride(0) // vec, right.stride(0) // vec,
        WIDTH=width, GATHER=token_R is not None, TMA=tma, EVEN_LEFT=I % c.bm == 0,
        EVEN_RIGHT=D % c.bn == 0, VEC=vec, EP=_padded(sizes),
        BM=c.bm, BN=c.bn, BK=c.bk, SPLIT=c.split, num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return out_PD


# -------------------------------------------------------------------------------------- custom ops


def _run_up(x, w1, token, offsets, sizes, activation, save_h, backend):
    if backend != "reference":
        return up_triton(x, w1, token, offsets, tuple(sizes), activation, save_h)
    h, a = up_ref(x, w1, token, offsets, sizes, activation)
    return (h if save_h else h.new_empty(0, h.shape[1])), a


def _fake_up(x, w1, token, offsets, sizes, activation, save_h, backend):
    R, N = (x if token is None else token).shape[0], max(sizes)
    return x.new_empty(R if save_h else 0, N * activation_width(activation)), x.new_empty(R, N)


def _run_rows(a, w, offsets, sizes, width, backend):
    f = rows_ref if backend == "reference" else rows_triton
    return f(a, w, offsets, tuple(sizes), width)


def _fake_rows(a, w, offsets, sizes, width, backend):
    return a.new_empty(a.shape[0], w.shape[1])


def _run_down_backward(
    do, w2, h, gates, token, slot, row, offsets, sizes, activation, backend
):  # fmt: skip
    f = down_backward_ref if backend == "reference" else down_backward_triton
    return f(do, w2, h, gates, token, slot, row, offsets, tuple(sizes), activation)


def _fake_down_backward(
    do, w2, h, gates, token, slot, row, offsets, sizes, activation, backend
):  # fmt: skip
    dgate = h.new_empty(0) if gates is None else torch.empty_like(gates)
    return torch.empty_like(h), h.new_empty(h.shape[0], max(sizes)), dgate


def _run_outer(left, right, token, offsets, sizes, width, backend):
    f = outer_ref if backend == "reference" else outer_triton
    return f(left, right, token, offsets, tuple(sizes), width)


def _fake_outer(left, right, token, offsets, sizes, width, backend):
    return right.new_empty(sum(sizes) * width, right.shape[1])


_op_up = define_op(
    "ragged_up(Tensor x, Tensor w1, Tensor? token, Tensor offsets, int[] sizes, str activation, "
    "bool save_h, str backend) -> (Tensor, Tensor)",
    _run_up,
    _fake_up,
)
_op_rows = define_op(
    "ragged_rows(Tensor a, Tensor w, Tensor offsets, int[] sizes, int width, str backend) "
    "-> Tensor",
    _run_rows,
    _fake_rows,
)
_op_down_backward = define_op(
    "ragged_down_backward(Tensor grad, Tensor w2, Tensor h, Tensor? gates, Tensor? token, "
    "Tensor? slot, Tensor? row, Tensor offsets, int[] sizes, str activation, str backend) "
    "-> (Tensor, Tensor, Tensor)",
    _run_down_backward,
    _fake_down_backward,
)
_op_outer = define_op(
    "ragged_outer(Tensor left, Tensor right, Tensor? token, Tensor offsets, int[] sizes, "
    "int width, str backend) -> Tensor",
    _run_outer,
    _fake_outer,
)

# ------------------------------------------------------------------------------------------ public


def up(
    x: Tensor,
    w1_PD: Tensor,
    token_R: Tensor | None,
    offsets_E1: Tensor,
    widths: Widths,
    *,
    activation: str,
    save_h: bool = True,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """(h_RH, a_RN) of all rows, as wide as the widest expert; see the head of this file.

    Args:
        x: tokens; or, with token_R None, rows already in expert order.
        token_R: int32 token of each row.
        offsets_E1: int32 first row of each expert; rows from the last entry on are undefined.
        save_h: False leaves H out (its tensor has no rows).
        backend: "reference" or "triton", already resolved.
    """
    return _op_up(x, w1_PD, token_R, offsets_E1, widths.sizes, activation, save_h, backend)


def rows(
    a_RI: Tensor,
    w_PD: Tensor,
    offsets_E1: Tensor,
    widths: Widths,
    *,
    width: int = 1,
    backend: str = "reference",
) -> Tensor:
    """out_RD[r] = a[r] · (rows of W that are the expert's), `width` rows of W a unit."""
    return _op_rows(a_RI, w_PD, offsets_E1, widths.sizes, width, backend)


def down_backward(
    do: Tensor,
    w2_UD: Tensor,
    h_RH: Tensor,
    gates_S: Tensor | None,
    token_R: Tensor | None,
    slot_R: Tensor | None,
    row_S: Tensor | None,
    offsets_E1: Tensor,
    widths: Widths,
    *,
    activation: str,
    backend: str = "reference",
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh_RH, a_RN times the gates, dgate_S, empty without gates); arguments as those of
    `moe.kernels.grouped.down_backward.down_backward`."""
    return _op_down_backward(
        do, w2_UD, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, widths.sizes, activation,
        backend,
    )  # fmt: skip


def outer(
    left_RI: Tensor,
    right: Tensor,
    token_R: Tensor | None,
    offsets_E1: Tensor,
    widths: Widths,
    *,
    width: int = 1,
    backend: str = "reference",
) -> Tensor:
    """out_PD: for each expert the sum over its rows of left[r]ᵀ · right[r], `width` rows of the
    result a unit. `right` is gathered by token_R, if there is one."""
    return _op_outer(left_RI, right, token_R, offsets_E1, widths.sizes, width, backend)
