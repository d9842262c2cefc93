"""Weight gradients of the experts: for each expert the sum over its rows of an outer product.

    dW1[e] = sum over rows r of e of dH[r]ᵀ · X[token of r]          (E, H, D)
    dW2[e] = sum over rows r of e of dO[token of r]ᵀ · A'[r]         (E, D, N)

One operand is in expert order, the other is gathered while it is loaded. An expert without rows
gets exact zeros (other implementations have left stale memory there:
github.com/pytorch/pytorch/issues/172439). With `add_to` the sums are added to an existing buffer,
usually a float32 main gradient, instead of making a new tensor.

Shape letters: R rows (expert order), E experts, I rows of a weight, O columns of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels._grouped import (
    arithmetic_dtype,
    define_op,
    expert_of_rows,
    gather_rows_ref,
    grouped_outer_ref,
    used_rows,
)

# --------------------------------------------------------------------------------------- reference


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


# -------------------------------------------------------------------------------------- custom ops


def _run(left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend):
    return weight_gradient_ref(left_RI, right_RO, left_token_R, right_token_R, offsets_E1)


def _fake(left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend):
    return left_RI.new_empty(offsets_E1.shape[0] - 1, left_RI.shape[1], right_RO.shape[1])


def _run_add(add_to_EIO, left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend):
    weight_gradient_ref(left_RI, right_RO, left_token_R, right_token_R, offsets_E1, add_to_EIO)


def _fake_add(add_to_EIO, left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend):
    return None


def _run_bias(g_RO, token_R, gates_S, slot_R, offsets_E1, backend):
    return bias_gradient_ref(g_RO, token_R, gates_S, slot_R, offsets_E1)


def _fake_bias(g_RO, token_R, gates_S, slot_R, offsets_E1, backend):
    return g_RO.new_empty(offsets_E1.shape[0] - 1, g_RO.shape[1])


_ARGUMENTS = (
    "Tensor left_RI, Tensor right_RO, Tensor? left_token_R, Tensor? right_token_R, "
    "Tensor offsets_E1, str backend"
)
_op = define_op(f"weight_gradient({_ARGUMENTS}) -> Tensor", _run, _fake)
_op_add = define_op(
    f"weight_gradient_add(Tensor(a!) add_to_EIO, {_ARGUMENTS}) -> ()", _run_add, _fake_add
)
_op_bias = define_op(
    "bias_gradient(Tensor g_RO, Tensor? token_R, Tensor? gates_S, Tensor? slot_R, "
    "Tensor offsets_E1, str backend) "
    "-> Tensor",
    _run_bias,
    _fake_bias,
)

# ------------------------------------------------------------------------------------------ public


def weight_gradient(
    left_RI: Tensor,
    right_RO: Tensor,
    left_token_R: Tensor | None,
    right_token_R: Tensor | None,
    offsets_E1: Tensor,
    *,
    add_to_EIO: Tensor | None = None,
    backend: str = "reference",
) -> Tensor | None:
    """out_EIO[e] = sum over rows r of e of left[r]ᵀ right[r], summed in float32.

    Args:
        left_RI, right_RO: operands, in expert order or, with a token array, gathered by it. At
            most one is gathered.
        offsets_E1: int32 first row of each expert.
        add_to_EIO: buffer to add to in place (its own dtype); the result is then None.
        backend: "reference" or "triton", already resolved.
    """
    if add_to_EIO is None:
        return _op(left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend)
    _op_add(add_to_EIO, left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend)
    return None


def bias_gradient(
    g_RO: Tensor,
    token_R: Tensor | None,
    gates_S: Tensor | None,
    slot_R: Tensor | None,
    offsets_E1: Tensor,
    *,
    backend: str = "reference",
) -> Tensor:
    """out_EO[e] = sum over rows r of e of gate of r · g[r], summed in float32.

    Args:
        g_RO: gradients, in expert order or, with token_R, gathered by it.
        gates_S: factor of each slot (by row when slot_R is None), or None for 1.
        offsets_E1: int32 first row of each expert.
        backend: "reference" or "triton", already resolved.
    """
    return _op_bias(g_RO, token_R, gates_S, slot_R, offsets_E1, backend)
