"""Backward of down-projection and activation, in one pass over dO.

    dA  = gathered dO · W2                        (not yet multiplied by the gate)
    dH  = activation'(H) · gate · dA
    A'  = gate · activation(H)                    (A is recomputed from H; A' feeds the gradient of
    W2) dS  = <dA, A> (+ <dO, b2>)                    (the gate's gradient, from the unscaled A)

Taking dS as an inner product over the expert width N means that neither Y nor A is kept (arXiv
2512.14080, kernel "B1"). dS is summed from per-tile partial sums in a fixed order, never by
atomics.

Shape letters: T tokens, R rows (expert order), S slots (token order), E experts, D model width, N
expert width, H columns of H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels._grouped import (
    arithmetic_dtype,
    define_op,
    expert_of_rows,
    gather_rows_ref,
    grouped_rows_ref,
    used_rows,
)
from moe.kernels.activations import activation_backward_ref, activation_ref

# --------------------------------------------------------------------------------------- reference


def _to_slots(value_R: Tensor, row_S: Tensor | None) -> Tensor:
    """Values by row → values by slot; 0 for a slot without row."""
    if row_S is None:
        return value_R
    if value_R.shape[0] == 0:
        return value_R.new_zeros(row_S.shape[0])
    return value_R.index_select(0, row_S.clamp_min(0)).masked_fill_(row_S < 0, 0.0)


def down_backward_ref(
    do_TD: Tensor,
    w2_EDN: Tensor,
    b2_ED: Tensor | None,
    h_RH: Tensor,
    gates_S: Tensor | None,
    token_R: Tensor | None,
    slot_R: Tensor | None,
    row_S: Tensor | None,
    offsets_E1: Tensor,
    activation: str,
    want_dh: bool,
    want_a: bool,
    want_dgate: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Plain torch version of `down_backward`, any device and dtype."""
    R = h_RH.shape[0]
    wide = arithmetic_dtype(h_RH.dtype)
    gate_R1 = None
    if gates_S is not None:
        gate_R = gates_S if slot_R is None or R == 0 else gates_S.index_select(0, slot_R)
        gate_R1 = gate_R[:, None].to(wide)
    if not (want_dh or want_dgate):
        a = activation_ref(h_RH, activation).to(wide)
        return None, (a if gate_R1 is None else a.mul_(gate_R1)).to(h_RH.dtype), None
    do_RD = gather_rows_ref(do_TD, token_R)
    da_RN = grouped_rows_ref(do_RD, w2_EDN, offsets_E1).to(wide)
    dh, a = activation_backward_ref(h_RH, da_RN, activation)
    dgate_S = None
    if want_dgate:
        assert gates_S is not None
        dgate_R = da_RN.mul_(a).sum(1)
        if b2_ED is not None:
            b2_RD = b2_ED.to(wide).index_select(0, expert_of_rows(offsets_E1, R))
            dgate_R += b2_RD.mul_(do_RD).sum(1)
        dgate_R.masked_fill_(~used_rows(offsets_E1, R), 0.0)
        dgate_S = _to_slots(dgate_R, row_S).to(gates_S.dtype)
    if gate_R1 is not None:
        dh, a = dh.mul_(gate_R1), a.mul_(gate_R1)
    return (
        dh.to(h_RH.dtype) if want_dh else None,
        a.to(h_RH.dtype) if want_a else None,
        dgate_S,
    )


# --------------------------------------------------------------------------------------- custom op


def _run(
    do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
    want_dh, want_a, want_dgate, tiles, backend,
):  # fmt: skip
    outs = down_backward_ref(
        do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
        want_dh, want_a, want_dgate,
    )  # fmt: skip
    return tuple(h_RH.new_empty(0) if out is None else out for out in outs)


def _fake(
    do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
    want_dh, want_a, want_dgate, tiles, backend,
):  # fmt: skip
    R, N = h_RH.shape[0], w2_EDN.shape[2]
    return (
        torch.empty_like(h_RH) if want_dh else h_RH.new_empty(0),
        h_RH.new_empty(R, N) if want_a else h_RH.new_empty(0),
        torch.empty_like(gates_S) if want_dgate else h_RH.new_empty(0),
    )


_op = define_op(
    "down_backward(Tensor do_TD, Tensor w2_EDN, Tensor? b2_ED, Tensor h_RH, "
    "Tensor? gates_S, Tensor? token_R, "
    "Tensor? slot_R, Tensor? row_S, Tensor offsets_E1, str activation, bool want_dh, "
    "bool want_a, bool want_dgate, "
    "Tensor[] tiles, str backend) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)

# ------------------------------------------------------------------------------------------ public


def down_backward(
    do_TD: Tensor,
    w2_EDN: Tensor,
    b2_ED: Tensor | None,
    h_RH: Tensor,
    gates_S: Tensor | None,
    token_R: Tensor | None,
    slot_R: Tensor | None,
    row_S: Tensor | None,
    offsets_E1: Tensor,
    *,
    activation: str,
    want_dh: bool = True,
    want_a: bool = True,
    want_dgate: bool = True,
    tiles: list[Tensor] | None = None,
    backend: str = "reference",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dh_RH, a_RN multiplied by the gates, dgate_S); None, and no work, for what is not wanted.

    Args:
        do_TD: gradient of the output; or, with token_R None, of the rows in expert order.
        w2_EDN: weights. b2_ED: bias or None (enters dgate only).
        h_RH: pre-activations as stored by `up_forward`.
        gates_S: weight of each slot; None means 1.
        token_R, slot_R: int32 token and slot of each row; slot_R None: gates are by row.
        row_S: int32 row of each slot, -1 for none; None: dgate is by row.
        offsets_E1: int32 first row of each expert; rows from the last entry on are left undefined
            in dh and a.
        backend: "reference" or "triton", already resolved.
    """
    dh, a, dgate = _op(
        do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
        want_dh, want_a, want_dgate, tiles or [], backend,
    )  # fmt: skip
    return dh if want_dh else None, a if want_a else None, dgate if want_dgate else None
