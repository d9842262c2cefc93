"""The grouped products of the experts: one function for each, whatever the tier.

    up_forward       H = gathered X · W1ᵀ (+ b1), A = activation(H)
    down_forward     Y = A · W2ᵀ (+ b2)
    down_backward    dH, A times the gates, the gates' gradient
    input_gradient   gradient of the gathered X: dH · W1
    weight_gradient  per expert, the sum of outer products of its rows
    bias_gradient    per expert, the sum of its rows

`backend` is what `moe.kernels.tiers` picked: "reference" (`moe.kernels.common.reference`), "triton"
(`moe.kernels.grouped`) or "hopper" (`moe.kernels.hopper`). Each is a custom operator, so that
torch.compile sees one node. "Rows" below are in expert order: expert e has rows offsets_E1[e] …
offsets_E1[e + 1] - 1, and rows from offsets_E1[E] on belong to nobody and are left undefined.

Shape letters: T tokens, S slots (token order), R rows (expert order), E experts, D model width, N
expert width, H columns of the pre-activations (2N for gated activations, gate and up interleaved),
I inner width, O outer width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels import hopper
from moe.kernels.common import reference
from moe.kernels.common.activations import activation_width
from moe.kernels.common.ops import define_op
from moe.kernels.common.row_tiles import RowTiles, tile_schedule
from moe.kernels.grouped.configs import tile_rows
from moe.kernels.grouped.down_backward import down_backward_triton, scaled_activation, sum_parts
from moe.kernels.grouped.rows import rows_triton
from moe.kernels.grouped.up_forward import up_forward_triton
from moe.kernels.grouped.weight_gradient import bias_gradient_triton, weight_gradient_triton
from moe.kernels.tiers import check_hopper

# ---------------------------------------------------------------------------------------- row tiles


def row_tiles(
    offsets_E1: Tensor, rows: int, dtype: torch.dtype, backend: str = "triton"
) -> RowTiles:
    """The tile list that all row products of one call share; made on the device."""
    experts = offsets_E1.shape[0] - 1
    size = hopper.ROWS if backend == "hopper" else tile_rows(dtype, rows, experts)
    return tile_schedule(offsets_E1, size, rows)


def _pack(tiles: RowTiles | None) -> tuple[list[Tensor], int]:
    """The tiles as arguments of a custom op; an empty list asks the op to make them."""
    return ([], 0) if tiles is None else (list(tiles[:4]), tiles.rows)


def _unpack(
    tiles: list[Tensor], rows: int, offsets_E1: Tensor, per_row: Tensor, backend: str
) -> RowTiles:
    """The tiles from the arguments of a custom op; `per_row` has one entry a row."""
    if tiles:
        return RowTiles(*tiles, rows)
    return row_tiles(offsets_E1, per_row.shape[0], per_row.dtype, backend)


# --------------------------------------------------------------------------------------- up_forward


def _up(x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, tiles, tile_rows, backend):
    if backend == "reference":
        h_RH, a_RN = reference.up_forward_ref(
            x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation
        )  # fmt: skip
        return (h_RH if save_h else h_RH.new_empty(0, h_RH.shape[1])), a_RN
    per_row = x_TD if token_R is None else token_R
    if backend == "hopper":
        D, H = x_TD.shape[1], w1_EHD.shape[1]
        check_hopper(x_TD, w1_EHD, activation=activation, bias=b1_EH, D=D, H=H)
        tiles = _unpack(tiles, tile_rows, offsets_E1, per_row, backend)
        return hopper.up_forward_hopper(x_TD, w1_EHD, token_R, save_h, tiles)
    tiles = _unpack(tiles, tile_rows, offsets_E1, per_row, backend)
    return up_forward_triton(x_TD, w1_EHD, b1_EH, token_R, activation, save_h, tiles)


def _fake_up(
    x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, tiles, tile_rows, backend
):  # fmt: skip
    R = (x_TD if token_R is None else token_R).shape[0]
    H = w1_EHD.shape[1]
    N = H // activation_width(activation)
    return x_TD.new_empty(R if save_h else 0, H), x_TD.new_empty(R, N)


up_op = define_op(
    "up_forward(Tensor x_TD, Tensor w1_EHD, Tensor? b1_EH, Tensor? token_R, Tensor offsets_E1, "
    "str activation, bool save_h, Tensor[] tiles, int tile_rows, str backend) "
    "-> (Tensor, Tensor)",
    _up,
    _fake_up,
)


def up_forward(
    x_TD: Tensor,
    w1_EHD: Tensor,
    b1_EH: Tensor | None,
    token_R: Tensor | None,
    offsets_E1: Tensor,
    *,
    activation: str,
    save_h: bool = True,
    tiles: RowTiles | None = None,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """H and A of all rows.

    Args:
        x_TD: tokens; or, with token_R None, rows already in expert order.
        w1_EHD: weights, gate and up rows interleaved for gated activations.
        b1_EH: bias or None.
        token_R: int32 token of each row.
        offsets_E1: int32 first row of each expert; rows from the last entry on are left undefined.
        activation: a name in `activations.ACTIVATIONS`.
        save_h: False leaves H out (its tensor has no rows).
        tiles: row tiles of `offsets_E1` as made by `row_tiles`, or None to make them here.
        backend: "reference", "triton" or "hopper", already resolved.

    Returns:
        (h_RH, a_RN) in the dtype of x.
    """
    return up_op(
        x_TD, w1_EHD, b1_EH, token_R, offsets_E1, activation, save_h, *_pack(tiles), backend
    )


# -------------------------------------------------------------------- down_forward, input_gradient


def _down(a_RN, w2_EDN, b2_ED, offsets_E1, tiles, tile_rows, backend):
    if backend == "reference":
        return reference.down_forward_ref(a_RN, w2_EDN, b2_ED, offsets_E1)
    if backend == "hopper":
        D, N = w2_EDN.shape[1:]
        check_hopper(a_RN, w2_EDN, bias=b2_ED, D=D, N=N)
        tiles = _unpack(tiles, tile_rows, offsets_E1, a_RN, backend)
        return hopper.rows_hopper(a_RN, w2_EDN, tiles, transposed=True)
    tiles = _unpack(tiles, tile_rows, offsets_E1, a_RN, backend)
    return rows_triton(a_RN, w2_EDN.transpose(1, 2), b2_ED, tiles)


def _fake_down(a_RN, w2_EDN, b2_ED, offsets_E1, tiles, tile_rows, backend):
    return a_RN.new_empty(a_RN.shape[0], w2_EDN.shape[1])


down_op = define_op(
    "down_forward(Tensor a_RN, Tensor w2_EDN, Tensor? b2_ED, Tensor offsets_E1, Tensor[] tiles, "
    "int tile_rows, str backend) -> Tensor",
    _down,
    _fake_down,
)


def down_forward(
    a_RN: Tensor,
    w2_EDN: Tensor,
    b2_ED: Tensor | None,
    offsets_E1: Tensor,
    *,
    tiles: RowTiles | None = None,
    backend: str = "reference",
) -> Tensor:
    """y_RD in the dtype of A; rows that belong to no expert are left undefined.

    Args:
        a_RN: activations, rows in expert order.
        w2_EDN: weights.
        b2_ED: bias or None.
        offsets_E1: int32 first row of each expert.
        tiles: row tiles, see `up_forward`.
        backend: "reference", "triton" or "hopper", already resolved.
    """
    return down_op(a_RN, w2_EDN, b2_ED, offsets_E1, *_pack(tiles), backend)


def _input_gradient(dh_RH, w1_EHD, offsets_E1, tiles, tile_rows, backend):
    if backend == "reference":
        return reference.input_gradient_ref(dh_RH, w1_EHD, offsets_E1)
    if backend == "hopper":
        check_hopper(dh_RH, w1_EHD, H=dh_RH.shape[1], D=w1_EHD.shape[2])
        tiles = _unpack(tiles, tile_rows, offsets_E1, dh_RH, backend)
        return hopper.rows_hopper(dh_RH, w1_EHD, tiles, transposed=False)
    tiles = _unpack(tiles, tile_rows, offsets_E1, dh_RH, backend)
    return rows_triton(dh_RH, w1_EHD, None, tiles)


def _fake_input_gradient(dh_RH, w1_EHD, offsets_E1, tiles, tile_rows, backend):
    return dh_RH.new_empty(dh_RH.shape[0], w1_EHD.shape[2])


input_gradient_op = define_op(
    "input_gradient(Tensor dh_RH, Tensor w1_EHD, Tensor offsets_E1, Tensor[] tiles, "
    "int tile_rows, str backend) -> Tensor",
    _input_gradient,
    _fake_input_gradient,
)


def input_gradient(
    dh_RH: Tensor,
    w1_EHD: Tensor,
    offsets_E1: Tensor,
    *,
    tiles: RowTiles | None = None,
    backend: str = "reference",
) -> Tensor:
    """dx_RD in the dtype of dH; rows that belong to no expert are left undefined.

    Args:
        dh_RH: gradient of the pre-activations, rows in expert order.
        w1_EHD: weights of the up-projection.
        offsets_E1: int32 first row of each expert.
        tiles: row tiles, see `up_forward`.
        backend: "reference", "triton" or "hopper", already resolved.
    """
    return input_gradient_op(dh_RH, w1_EHD, offsets_E1, *_pack(tiles), backend)


# ------------------------------------------------------------------------------------ down_backward


def _down_backward(
    do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
    want_dh, want_a, want_dgate, tiles, tile_rows, backend,
):  # fmt: skip
    wanted = (want_dh, want_a, want_dgate)
    if backend == "reference":
        outs = reference.down_backward_ref(
            do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
            *wanted,
        )  # fmt: skip
    elif not (want_dh or want_dgate):
        outs = (None, scaled_activation(h_RH, gates_S, slot_R, offsets_E1, activation), None)
    else:
        if backend == "hopper":  # one kernel makes all three; what is not wanted is dropped
            D, N = w2_EDN.shape[1:]
            check_hopper(do_TD, w2_EDN, h_RH, activation=activation, bias=b2_ED, D=D, N=N)
            tiles = _unpack(tiles, tile_rows, offsets_E1, h_RH, backend)
            dh, a, dot = hopper.down_backward_hopper(
                do_TD, w2_EDN, h_RH, gates_S, token_R, slot_R, tiles
            )
        else:
            tiles = _unpack(tiles, tile_rows, offsets_E1, h_RH, backend)
            dh, a, dot = down_backward_triton(
                do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, activation, wanted, tiles
            )
        dgate_S = None
        if want_dgate:
            dgate_S = torch.empty_like(gates_S)
            sum_parts(dot, row_S, dgate_S, offsets_E1[-1:])
        outs = (dh if want_dh else None, a if want_a else None, dgate_S)
    return tuple(h_RH.new_empty(0) if out is None else out for out in outs)


def _fake_down_backward(
    do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
    want_dh, want_a, want_dgate, tiles, tile_rows, backend,
):  # fmt: skip
    R, N = h_RH.shape[0], w2_EDN.shape[2]
    return (
        torch.empty_like(h_RH) if want_dh else h_RH.new_empty(0),
        h_RH.new_empty(R, N) if want_a else h_RH.new_empty(0),
        torch.empty_like(gates_S) if want_dgate else h_RH.new_empty(0),
    )


down_backward_op = define_op(
    "down_backward(Tensor do_TD, Tensor w2_EDN, Tensor? b2_ED, Tensor h_RH, Tensor? gates_S, "
    "Tensor? token_R, Tensor? slot_R, Tensor? row_S, Tensor offsets_E1, str activation, "
    "bool want_dh, bool want_a, bool want_dgate, Tensor[] tiles, int tile_rows, str backend) "
    "-> (Tensor, Tensor, Tensor)",
    _down_backward,
    _fake_down_backward,
)


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
    tiles: RowTiles | None = None,
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
        backend: "reference", "triton" or "hopper", already resolved.
    """
    dh, a, dgate = down_backward_op(
        do_TD, w2_EDN, b2_ED, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, activation,
        want_dh, want_a, want_dgate, *_pack(tiles), backend,
    )  # fmt: skip
    return dh if want_dh else None, a if want_a else None, dgate if want_dgate else None


# ------------------------------------------------------------------ weight_gradient, bias_gradient


def _weight_gradient(left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend):
    operands = (left_RI, right_RO, left_token_R, right_token_R, offsets_E1)
    if backend == "reference":
        return reference.weight_gradient_ref(*operands)
    if backend == "hopper":
        check_hopper(left_RI, right_RO, I=left_RI.shape[1], O=right_RO.shape[1])
        return hopper.weight_gradient_hopper(*operands)
    return weight_gradient_triton(*operands)


def _fake_weight_gradient(left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend):
    return left_RI.new_empty(offsets_E1.shape[0] - 1, left_RI.shape[1], right_RO.shape[1])


def _add(add_to_EIO, left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend):
    f = reference.weight_gradient_ref if backend == "reference" else weight_gradient_triton
    f(left_RI, right_RO, left_token_R, right_token_R, offsets_E1, add_to_EIO)


def _fake_add(add_to_EIO, left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend):
    return None


def _bias_gradient(g_RO, token_R, gates_S, slot_R, offsets_E1, backend):
    f = reference.bias_gradient_ref if backend == "reference" else bias_gradient_triton
    return f(g_RO, token_R, gates_S, slot_R, offsets_E1)


def _fake_bias_gradient(g_RO, token_R, gates_S, slot_R, offsets_E1, backend):
    return g_RO.new_empty(offsets_E1.shape[0] - 1, g_RO.shape[1])


_OUTER = (
    "Tensor left_RI, Tensor right_RO, Tensor? left_token_R, Tensor? right_token_R, "
    "Tensor offsets_E1, str backend"
)
weight_gradient_op = define_op(
    f"weight_gradient({_OUTER}) -> Tensor", _weight_gradient, _fake_weight_gradient
)
weight_gradient_add_op = define_op(
    f"weight_gradient_add(Tensor(a!) add_to_EIO, {_OUTER}) -> ()", _add, _fake_add
)
bias_gradient_op = define_op(
    "bias_gradient(Tensor g_RO, Tensor? token_R, Tensor? gates_S, Tensor? slot_R, "
    "Tensor offsets_E1, str backend) -> Tensor",
    _bias_gradient,
    _fake_bias_gradient,
)


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
        add_to_EIO: buffer to add to in place (its own dtype), usually a float32 main gradient; the
            result is then None. "hopper" does this with the Triton kernel.
        backend: "reference", "triton" or "hopper", already resolved.
    """
    operands = (left_RI, right_RO, left_token_R, right_token_R, offsets_E1, backend)
    if add_to_EIO is None:
        return weight_gradient_op(*operands)
    weight_gradient_add_op(add_to_EIO, *operands)
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
        backend: "reference", "triton" or "hopper", already resolved.
    """
    return bias_gradient_op(g_RO, token_R, gates_S, slot_R, offsets_E1, backend)
