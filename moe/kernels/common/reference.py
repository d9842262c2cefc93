"""Reference products: what the grouped products compute, in plain torch on any device.

"Rows" products have one weight matrix per expert and rows sorted by expert; "outer" products sum
over an expert's rows and give one matrix per expert. `offsets_E1` (int32 [E + 1]) holds each
expert's first row; its last entry is the number of real rows; rows from there to R are unused.

Shape letters: R rows (expert order), E experts, I inner width, O outer width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


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
