"""Gradient of the gathered rows of X: dX̃ = dH · W1.

Rows stay in expert order; `combine` without weights sums them per token.

Shape letters: R rows (expert order), E experts, D model width, H columns of H.
"""

from __future__ import annotations

from torch import Tensor

from moe.kernels import hopper
from moe.kernels.common import tiles as _tiles
from moe.kernels.common.ops import define_op
from moe.kernels.common.reference import grouped_rows_ref
from moe.kernels.common.tiles import RowTiles
from moe.kernels.grouped.rows import rows_triton

# --------------------------------------------------------------------------------------- reference


def input_gradient_ref(dh_RH: Tensor, w1_EHD: Tensor, offsets_E1: Tensor) -> Tensor:
    """Plain torch version of `input_gradient`, any device and dtype."""
    return grouped_rows_ref(dh_RH, w1_EHD, offsets_E1)


# --------------------------------------------------------------------------------------- custom op


def _run(dh_RH, w1_EHD, offsets_E1, tiles, tile_rows, backend):
    if backend == "hopper":
        hopper.check_operands(dh_RH, w1_EHD, H=dh_RH.shape[1], D=w1_EHD.shape[2])
    if backend != "reference":
        tiles = _tiles.unpack(tiles, tile_rows, offsets_E1, dh_RH, backend)
        if backend == "hopper":
            from moe.kernels.hopper.rows import rows_hopper

            return rows_hopper(dh_RH, w1_EHD, None, tiles, transposed=False)
        return rows_triton(dh_RH, w1_EHD, None, None, tiles)
    return input_gradient_ref(dh_RH, w1_EHD, offsets_E1)


def _fake(dh_RH, w1_EHD, offsets_E1, tiles, tile_rows, backend):
    return dh_RH.new_empty(dh_RH.shape[0], w1_EHD.shape[2])


_op = define_op(
    "input_gradient(Tensor dh_RH, Tensor w1_EHD, Tensor offsets_E1, Tensor[] tiles, "
    "int tile_rows, str backend) -> Tensor",
    _run,
    _fake,
)

# ------------------------------------------------------------------------------------------ public


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
    return _op(dh_RH, w1_EHD, offsets_E1, *_tiles.pack(tiles), backend)
