"""Down-projection of the experts: Y = A · W2ᵀ (+ b2), each row optionally multiplied by its gate.

Rows stay in expert order and are stored contiguously; `combine` gathers them per token. Scattering
in this kernel's store was measured slower on Hopper (arXiv 2512.14080, section on expert
aggregation).

Shape letters: R rows (expert order), E experts, D model width, N expert width.
"""

from __future__ import annotations

from torch import Tensor

from moe.kernels import hopper
from moe.kernels.common import tiles as _tiles
from moe.kernels.common.ops import define_op
from moe.kernels.common.reference import arithmetic_dtype, grouped_rows_ref, used_rows
from moe.kernels.common.tiles import RowTiles
from moe.kernels.grouped.rows import rows_triton

# --------------------------------------------------------------------------------------- reference


def down_forward_ref(
    a_RN: Tensor,
    w2_EDN: Tensor,
    b2_ED: Tensor | None,
    offsets_E1: Tensor,
    scale_R: Tensor | None = None,
) -> Tensor:
    """Plain torch version of `down_forward`, any device and dtype."""
    y_RD = grouped_rows_ref(a_RN, w2_EDN.transpose(1, 2), offsets_E1, b2_ED)
    if scale_R is not None:
        scaled = y_RD.to(arithmetic_dtype(y_RD.dtype)) * scale_R[:, None]
        used = used_rows(offsets_E1, y_RD.shape[0])
        y_RD = scaled.masked_fill_(~used[:, None], 0.0).to(y_RD.dtype)
    return y_RD


# --------------------------------------------------------------------------------------- custom op


def _run(a_RN, w2_EDN, b2_ED, offsets_E1, scale_R, tiles, tile_rows, backend):
    if backend == "hopper":
        D, N = w2_EDN.shape[1:]
        hopper.check_operands(a_RN, w2_EDN, bias=b2_ED, D=D, N=N)
    if backend != "reference":
        tiles = _tiles.unpack(tiles, tile_rows, offsets_E1, a_RN, backend)
        if backend == "hopper":
            from moe.kernels.hopper.rows import rows_hopper

            return rows_hopper(a_RN, w2_EDN, scale_R, tiles, transposed=True)
        return rows_triton(a_RN, w2_EDN.transpose(1, 2), b2_ED, scale_R, tiles)
    return down_forward_ref(a_RN, w2_EDN, b2_ED, offsets_E1, scale_R)


def _fake(a_RN, w2_EDN, b2_ED, offsets_E1, scale_R, tiles, tile_rows, backend):
    return a_RN.new_empty(a_RN.shape[0], w2_EDN.shape[1])


_op = define_op(
    "down_forward(Tensor a_RN, Tensor w2_EDN, Tensor? b2_ED, Tensor offsets_E1, Tensor? scale_R, "
    "Tensor[] tiles, int tile_rows, str backend) -> Tensor",
    _run,
    _fake,
)

# ------------------------------------------------------------------------------------------ public


def down_forward(
    a_RN: Tensor,
    w2_EDN: Tensor,
    b2_ED: Tensor | None,
    offsets_E1: Tensor,
    *,
    scale_R: Tensor | None = None,
    tiles: RowTiles | None = None,
    backend: str = "reference",
) -> Tensor:
    """y_RD in the dtype of A; rows that belong to no expert are left undefined.

    Args:
        a_RN: activations, rows in expert order.
        w2_EDN: weights.
        b2_ED: bias or None.
        offsets_E1: int32 first row of each expert.
        scale_R: fp32 factor of each row (after the bias), or None.
        tiles: row tiles, see `up_forward`.
        backend: "reference", "triton" or "hopper", already resolved.
    """
    return _op(a_RN, w2_EDN, b2_ED, offsets_E1, scale_R, *_tiles.pack(tiles), backend)
