"""Combine: each token's output is the gate-weighted sum of its experts' rows.

Rows are gathered by slot → row and summed in float32 in slot order with one rounding at the end:
no atomics, so the result has the same bits every time and small terms survive. The backward of the
gather uses the same operator without weights (the gradient of x is the plain sum over a token's
rows).

Shape letters: T tokens, K slots per token, S slots (token order), R rows (expert order), D model
    width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv, next_power_of_2, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.ops import define_op
from moe.kernels.common.reference import arithmetic_dtype

# --------------------------------------------------------------------------------------- reference


def combine_ref(
    y_RD: Tensor,
    gates_S: Tensor | None,
    row_S: Tensor,
    num_tokens: int,
    slots_per_token: int | None,
    slot_offsets_T1: Tensor | None,
) -> Tensor:
    """Plain torch version of `combine`, any device and dtype."""
    R, D = y_RD.shape
    T, K = num_tokens, slots_per_token
    wide = arithmetic_dtype(y_RD.dtype)
    if R == 0 or T == 0 or row_S.shape[0] == 0:
        return y_RD.new_zeros(T, D)

    def rows(row: Tensor, gate: Tensor | None) -> Tensor:
        picked = y_RD.index_select(0, row.clamp_min(0)).to(wide)
        if gate is not None:
            picked = picked * gate[:, None]
        return picked.masked_fill_(
            (row < 0)[:, None], 0.0
        )  # not a product: an unused row may hold NaN

    if K is None:
        assert slot_offsets_T1 is not None
        terms = rows(row_S, gates_S)
        return torch.segment_reduce(
            terms, "sum", offsets=slot_offsets_T1.long(), axis=0, unsafe=True, initial=0.0
        ).to(y_RD.dtype)
    row_TK = row_S.view(T, K)
    gate_TK = None if gates_S is None else gates_S.view(T, K)
    out_TD = rows(row_TK[:, 0], None if gate_TK is None else gate_TK[:, 0])
    for k in range(1, K):
        out_TD += rows(row_TK[:, k], None if gate_TK is None else gate_TK[:, k])
    return out_TD.to(y_RD.dtype)


# ------------------------------------------------------------------------------------------- kernel


@triton.jit
def _term(y_ptr, gates_ptr, row_ptr, slot, cols, some, D, GATES: tl.constexpr):
    """gate · row of one slot, float32; zeros for a slot without row."""
    row = tl.load(row_ptr + slot)
    at = row.to(tl.int64) * D + cols
    y = tl.load(y_ptr + at, mask=some & (row >= 0), other=0.0).to(tl.float32)
    if GATES:
        y *= tl.load(gates_ptr + slot).to(tl.float32)
    return y


@triton.jit
def _combine_kernel(
    y_ptr, gates_ptr, row_ptr, bounds_ptr, out_ptr, D,
    K: tl.constexpr, GATES: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    some = cols < D
    if EVEN:
        some = tl.full((BD,), 1, tl.int1)
    acc = tl.zeros((BD,), dtype=tl.float32)
    if K > 0:  # the loads of all K rows are in flight together
        for k in tl.static_range(K):
            slot = t.to(tl.int64) * K + k
            acc += _term(y_ptr, gates_ptr, row_ptr, slot, cols, some, D, GATES)
    else:
        start = tl.load(bounds_ptr + t)
        end = tl.load(bounds_ptr + t + 1)
        for slot in tl.range(start, end):
            acc += _term(y_ptr, gates_ptr, row_ptr, slot, cols, some, D, GATES)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t.to(tl.int64) * D + cols, out, mask=some)


# ----------------------------------------------------------------------------------------- launcher

_MOST_UNROLLED = 16


def combine_triton(
    y_RD: Tensor,
    gates_S: Tensor | None,
    row_S: Tensor,
    num_tokens: int,
    slots_per_token: int | None,
    slot_offsets_T1: Tensor | None,
) -> Tensor:
    """Launches the kernel; see `combine`."""
    D = y_RD.shape[1]
    out_TD = y_RD.new_empty(num_tokens, D)
    if num_tokens == 0:
        return out_TD
    if row_S.shape[0] == 0:
        return out_TD.zero_()
    K = slots_per_token or 0
    if K > _MOST_UNROLLED:  # a loop over slots, as for ragged routings
        slot_offsets_T1 = torch.arange(num_tokens + 1, dtype=torch.int32, device=y_RD.device) * K
        K = 0
    BD = 1024
    while BD > 128 and D % BD:  # the widest block without a tail, as long as it is not tiny
        BD //= 2
    if D % BD:
        BD = min(1024, next_power_of_2(D))
    y_RD = y_RD.contiguous()
    gates_S = None if gates_S is None else gates_S.contiguous()
    launch(_combine_kernel, (num_tokens, cdiv(D, BD)),
        y_RD, gates_S, row_S, slot_offsets_T1 if K == 0 else None, out_TD, D,
        K=K, GATES=gates_S is not None, BD=BD, EVEN=D % BD == 0, num_warps=max(1, BD // 256),
    )  # fmt: skip
    return out_TD


# ---------------------------------------------------------------------------------------- custom op


def _run(y_RD, gates_S, row_S, num_tokens, slots_per_token, slot_offsets_T1, backend):
    f = combine_ref if backend == "reference" else combine_triton
    return f(y_RD, gates_S, row_S, num_tokens, slots_per_token, slot_offsets_T1)


def _fake(y_RD, gates_S, row_S, num_tokens, slots_per_token, slot_offsets_T1, backend):
    return y_RD.new_empty(num_tokens, y_RD.shape[1])


_op = define_op(
    "combine(Tensor y_RD, Tensor? gates_S, Tensor row_S, SymInt num_tokens, "
    "SymInt? slots_per_token, Tensor? slot_offsets_T1, str backend) -> Tensor",
    _run,
    _fake,
)

# ------------------------------------------------------------------------------------------ public


def combine(
    y_RD: Tensor,
    gates_S: Tensor | None,
    row_S: Tensor,
    *,
    num_tokens: int,
    slots_per_token: int | None,
    slot_offsets_T1: Tensor | None = None,
    backend: str = "reference",
) -> Tensor:
    """out_TD[t] = sum over the slots s of t, in order, of gates_S[s] · y_RD[row_S[s]].

    Args:
        y_RD: rows in expert order.
        gates_S: weight of each slot, or None for a plain sum.
        row_S: int32 row of each slot; -1 adds nothing.
        num_tokens: T.
        slots_per_token: K if every token has K slots, else None and `slot_offsets_T1` (int32 [T +
            1]) is given.
        backend: "reference", "triton" or "hopper" (as "triton"), already resolved.
    """
    return _op(y_RD, gates_S, row_S, num_tokens, slots_per_token, slot_offsets_T1, backend)
