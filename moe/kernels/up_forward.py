"""Up-projection of the experts: H = gathered X · W1ᵀ (+ b1), A = activation(H).

The rows of X are gathered while they are loaded, the activation runs on the float32 sums, and both
H (for backward) and A are stored; the gathered X never exists in memory. After SonicMoE
(arXiv 2512.14080), kernel "F1".

Shape letters: T tokens, R rows (expert order), E experts, D model width, N expert width, H columns
of H (2N for gated activations, gate and up interleaved, else N).
"""

from __future__ import annotations

from torch import Tensor

from moe.kernels._grouped import define_op, gather_rows_ref, grouped_rows_ref
from moe.kernels.activations import WIDTH, activation_ref

# --------------------------------------------------------------------------------------- reference


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


# --------------------------------------------------------------------------------------- custom op


def _run(x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, tiles, backend):
    h_RH, a_RN = up_forward_ref(x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation)
    return (h_RH if save_h else h_RH.new_empty(0, h_RH.shape[1])), a_RN


def _fake(x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, tiles, backend):
    R = (x_TD if token_R is None else token_R).shape[0]
    H = w1_EHD.shape[1]
    return x_TD.new_empty(R if save_h else 0, H), x_TD.new_empty(R, H // WIDTH[activation])


_op = define_op(
    "up_forward(Tensor x_TD, Tensor w1_EHD, Tensor? b1_EH, Tensor? token_R, "
    "Tensor offsets_E1, str activation, "
    "bool save_h, Tensor[] tiles, str backend) -> (Tensor, Tensor)",
    _run,
    _fake,
)

# ------------------------------------------------------------------------------------------ public


def up_forward(
    x_TD: Tensor,
    w1_EHD: Tensor,
    b1_EH: Tensor | None,
    token_R: Tensor | None,
    offsets_E1: Tensor,
    *,
    activation: str,
    save_h: bool = True,
    tiles: list[Tensor] | None = None,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """H and A of all rows.

    Args:
        x_TD: tokens; or, with token_R None, rows already in expert order.
        w1_EHD: weights, gate and up rows interleaved for gated activations.
        b1_EH: bias or None.
        token_R: int32 token of each row.
        offsets_E1: int32 first row of each expert; rows from the last entry on are left undefined.
        activation: a name in `activations.WIDTH`.
        save_h: False leaves H out (its tensor has no rows).
        tiles: row tiles of `offsets_E1` as made by `_grouped.row_tiles`, or None to make them here.
        backend: "reference" or "triton", already resolved.

    Returns:
        (h_RH, a_RN) in the dtype of x.
    """
    return _op(x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, tiles or [], backend)
