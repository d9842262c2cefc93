"""The reference tier: what the grouped products compute, in plain torch on any device and dtype.

Each operator `f` of `moe.kernels.products` has its `f_ref` here; the other tiers are compared with
these, in tests and, on Hopper, before they run.

"Rows" products have one weight matrix per expert and rows sorted by expert; "outer" products sum
over an expert's rows and give one matrix per expert. `offsets_E1` (int32 [E + 1]) holds each
expert's first row; its last entry is the number of real rows; rows from there to R are unused.

Shape letters: T tokens, S slots (token order), R rows (expert order), E experts, D model width, N
expert width, H columns of the pre-activations, I inner width, O outer width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from moe.kernels.common.activations import activation_backward_ref, activation_ref


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: what sums and activations are computed in."""
    return torch.promote_types(dtype, torch.float32)


def expert_of_rows(offsets_E1: Tensor, rows: int) -> Tensor:
    """int64 [rows]: expert of each row; unused rows get the last expert."""
    row = torch.arange(rows, dtype=offsets_E1.dtype, device=offsets_E1.device)
    last = offsets_E1.shape[0] - 2
    return torch.searchsorted(offsets_E1[1:], row, right=True).clamp_(max=last)


def used_rows(offsets_E1: Tensor, rows: int) -> Tensor:
    """bool [rows]: whether the row belongs to an expert."""
    return torch.arange(rows, dtype=offsets_E1.dtype, device=offsets_E1.device) < offsets_E1[-1]


def _grouped_mm_serves(*operands: Tensor) -> bool:
    """Whether torch's grouped_mm takes these: bf16, CUDA capability 8 and up, 16-byte strides."""
    for t in operands:
        if not t.is_cuda or t.dtype != torch.bfloat16 or t.data_ptr() % 16 or 0 in t.shape:
            return False
        if torch.cuda.get_device_capability(t.device)[0] < 8:
            return False
        strides = sorted(t.stride()[-2:])
        if strides[0] != 1 or strides[1] % 8 or strides[1] < min(t.shape[-2:]):
            return False
    return True


def _grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    f = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return f(a, b, offs=ends_E)


def grouped_rows_ref(
    a_RI: Tensor, w_EIO: Tensor, offsets_E1: Tensor, bias_EO: Tensor | None = None
) -> Tensor:
    """out_RO[r] = a_RI[r] @ w_EIO[e] + bias_EO[e]; unused rows are zero on a CPU, else undefined.

    CUDA bf16 goes through torch's grouped_mm without a host sync. Elsewhere: one product per
    expert with rows.
    """
    R, O = a_RI.shape[0], w_EIO.shape[2]
    if _grouped_mm_serves(a_RI, w_EIO):
        out_RO = _grouped_mm(a_RI, w_EIO, offsets_E1[1:])
        if bias_EO is not None:
            out_RO += bias_EO.index_select(0, expert_of_rows(offsets_E1, R))
        return out_RO
    out_RO = a_RI.new_empty(R, O)
    bounds = offsets_E1.tolist()
    for e, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        if bias_EO is None:
            torch.mm(a_RI[start:end], w_EIO[e], out=out_RO[start:end])
        else:
            torch.addmm(bias_EO[e], a_RI[start:end], w_EIO[e], out=out_RO[start:end])
    out_RO[bounds[-1] :].zero_()
    return out_RO


def grouped_outer_ref(
    a_RI: Tensor, b_RO: Tensor, offsets_E1: Tensor, add_to_EIO: Tensor | None = None
) -> Tensor:
    """out_EIO[e] = sum over the rows r of e of a_RI[r]ᵀ b_RO[r]; exact zeros for an expert without.

    With `add_to_EIO` the sums are added to it in place, in its dtype, and it is returned.
    """
    E, I, O = offsets_E1.shape[0] - 1, a_RI.shape[1], b_RO.shape[1]
    if _grouped_mm_serves(a_RI, b_RO):
        out_EIO = _grouped_mm(a_RI.t(), b_RO, offsets_E1[1:])
        empty_E = offsets_E1[1:] == offsets_E1[:-1]
        # Whatever grouped_mm leaves there (github.com/pytorch/pytorch/issues/172439).
        out_EIO.masked_fill_(empty_E.view(E, 1, 1), 0.0)
        return out_EIO if add_to_EIO is None else add_to_EIO.add_(out_EIO)
    out_EIO = a_RI.new_empty(E, I, O) if add_to_EIO is None else add_to_EIO
    bounds = offsets_E1.tolist()
    for e, (start, end) in enumerate(pairwise(bounds)):
        a_t, b = a_RI[start:end].t(), b_RO[start:end]
        if add_to_EIO is None:
            if start == end:
                out_EIO[e].zero_()
            else:
                torch.mm(a_t, b, out=out_EIO[e])
        elif start < end:
            if add_to_EIO.dtype == a_RI.dtype:
                out_EIO[e].addmm_(a_t, b)
            else:
                out_EIO[e].addmm_(a_t.to(add_to_EIO.dtype), b.to(add_to_EIO.dtype))
    return out_EIO


def gather_rows_ref(x_TI: Tensor, token_R: Tensor | None) -> Tensor:
    """Rows of x in expert order; x itself when its rows already are (token_R None)."""
    if token_R is None:
        return x_TI
    if x_TI.shape[0] == 0:  # unused rows name token 0, which is not there
        return x_TI.new_zeros(token_R.shape[0], x_TI.shape[1])
    return x_TI.index_select(0, token_R)


# -------------------------------------------------------------------------------- of each operator


def up_forward_ref(
    x_TD: Tensor,
    w1_EHD: Tensor,
    b1_EH: Tensor | None,
    token_R: Tensor | None,
    offsets_E1: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Plain torch version of `up_forward`, any device and dtype."""
    x_RD = gather_rows_ref(x_TD, token_R)
    h_RH = grouped_rows_ref(x_RD, w1_EHD.transpose(1, 2), offsets_E1, b1_EH)
    return h_RH, activation_ref(h_RH, activation)


def down_forward_ref(
    a_RN: Tensor, w2_EDN: Tensor, b2_ED: Tensor | None, offsets_E1: Tensor
) -> Tensor:
    """Plain torch version of `down_forward`, any device and dtype."""
    return grouped_rows_ref(a_RN, w2_EDN.transpose(1, 2), offsets_E1, b2_ED)


def to_slots(value_R: Tensor, row_S: Tensor | None) -> Tensor:
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
        gate_R = gates_S[:R] if slot_R is None or R == 0 else gates_S.index_select(0, slot_R)
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
        dgate_S = to_slots(dgate_R, row_S).to(gates_S.dtype)
    if gate_R1 is not None:
        dh, a = dh.mul_(gate_R1), a.mul_(gate_R1)
    return (
        dh.to(h_RH.dtype) if want_dh else None,
        a.to(h_RH.dtype) if want_a else None,
        dgate_S,
    )


def input_gradient_ref(dh_RH: Tensor, w1_EHD: Tensor, offsets_E1: Tensor) -> Tensor:
    """Plain torch version of `input_gradient`, any device and dtype."""
    return grouped_rows_ref(dh_RH, w1_EHD, offsets_E1)


def weight_gradient_ref(
    left_RI: Tensor,
    right_RO: Tensor,
    left_token_R: Tensor | None,
    right_token_R: Tensor | None,
    offsets_E1: Tensor,
    add_to_EIO: Tensor | None = None,
) -> Tensor:
    """Plain torch version of `weight_gradient`, any device and dtype."""
    left_RI, right_RO = (
        gather_rows_ref(left_RI, left_token_R),
        gather_rows_ref(right_RO, right_token_R),
    )
    return grouped_outer_ref(left_RI, right_RO, offsets_E1, add_to_EIO)


def bias_gradient_ref(
    g_RO: Tensor,
    token_R: Tensor | None,
    gates_S: Tensor | None,
    slot_R: Tensor | None,
    offsets_E1: Tensor,
) -> Tensor:
    """Plain torch version of `bias_gradient`, any device and dtype."""
    wide = arithmetic_dtype(g_RO.dtype)
    g = gather_rows_ref(g_RO, token_R).to(wide, copy=True)
    R = g.shape[0]
    if gates_S is not None and R:
        g.mul_((gates_S if slot_R is None else gates_S.index_select(0, slot_R))[:, None])
    g.masked_fill_(~used_rows(offsets_E1, R)[:, None], 0.0)
    out_EO = g.new_zeros(offsets_E1.shape[0] - 1, g.shape[1])
    if not g.is_cuda:
        return out_EO.index_add_(0, expert_of_rows(offsets_E1, R), g).to(g_RO.dtype)
    # index_add_ on CUDA is atomic; a segmented sum keeps the order and so the bits.
    return torch.segment_reduce(
        g, "sum", offsets=offsets_E1.long(), axis=0, unsafe=True, initial=0.0
    ).to(g_RO.dtype)
