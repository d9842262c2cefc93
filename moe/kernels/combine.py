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

from moe.kernels._grouped import arithmetic_dtype, define_op

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


# --------------------------------------------------------------------------------------- custom op


def _run(y_RD, gates_S, row_S, num_tokens, slots_per_token, slot_offsets_T1, backend):
    return combine_ref(y_RD, gates_S, row_S, num_tokens, slots_per_token, slot_offsets_T1)


def _fake(y_RD, gates_S, row_S, num_tokens, slots_per_token, slot_offsets_T1, backend):
    return y_RD.new_empty(num_tokens, y_RD.shape[1])


_op = define_op(
    "combine(Tensor y_RD, Tensor? gates_S, Tensor row_S, SymInt num_tokens, "
    "SymInt? slots_per_token, "
    "Tensor? slot_offsets_T1, str backend) -> Tensor",
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
        backend: "reference" or "triton", already resolved.
    """
    return _op(y_RD, gates_S, row_S, num_tokens, slots_per_token, slot_offsets_T1, backend)
