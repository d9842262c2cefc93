"""How much of an expert's activations a kernel could skip.

A kernel can skip a column of activations for a tile of rows only if all of them are 0 there, so
what counts is the union density of a tile: 1 - (1 - density)^rows for independent zeros, near 1 for
any tile worth a matrix instruction. `union_density` measures it, `activation_density` for a layer.

Shape letters: T tokens, D model width, R rows in expert order, E experts, N expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import pick_backend
from moe.kernels.common.reference import expert_of_rows, used_rows
from moe.kernels.products import up_forward
from moe.routing import Routing


@torch.no_grad()
def union_density(a_RN: Tensor, offsets_E1: Tensor, rows: int) -> Tensor:
    """Share of columns that a tile of `rows` rows of one expert cannot skip, mean over tiles.

    Args:
        a_RN: activations, rows sorted by expert.
        offsets_E1: first row of each expert; rows from its last entry on are left out.
        rows: of a tile; 1 gives the plain density.

    Returns:
        float32 scalar, on the device.
    """
    (R, N), E = a_RN.shape, offsets_E1.shape[0] - 1
    offsets_E1 = offsets_E1.long()
    tiles_E = (offsets_E1.diff() + (rows - 1)) // rows
    first_E1 = torch.cat([tiles_E.new_zeros(1), tiles_E.cumsum(0)])
    expert_R = expert_of_rows(offsets_E1, R)
    most = R // rows + min(E, R)
    row_R = torch.arange(R, device=a_RN.device) - offsets_E1[expert_R]
    tile_R = first_E1[expert_R] + row_R // rows
    tile_R = torch.where(used_rows(offsets_E1, R), tile_R, most)
    hit = torch.zeros(most + 1, N, dtype=torch.int32, device=a_RN.device)
    hit.index_add_(0, tile_R, (a_RN != 0).to(torch.int32))
    return (hit[:most] > 0).sum() / (first_E1[-1] * N).clamp_min(1)


@torch.no_grad()
def activation_density(
    x_TD: Tensor,
    w1_EHD: Tensor,
    routing: Routing,
    activation: str,
    tiles: tuple[int, ...] = (1, 8, 32, 128),
    backend: str = "auto",
    threshold: float = 0.0,
) -> dict[int, Tensor]:
    """Rows of a tile -> `union_density` of the activations of a layer's experts.

    Only activations with zeros have anything to skip: relu2 and reglu; others only if what is small
    may be taken for zero. For 128 rows, the tile of the products of training, expect a number near
    1.

    Args:
        x_TD, w1_EHD, routing, activation: as for `moe.experts.experts`.
        tiles: rows of a tile.
        backend: who computes the activations.
        threshold: absolute values up to this count as zero.
    """
    backend = pick_backend(backend, x_TD)
    _, a_RN = up_forward(
        x_TD, w1_EHD, None, routing.token_R, routing.offsets_E1,
        activation=activation, save_h=False, backend=backend,
    )  # fmt: skip
    if threshold:
        a_RN = torch.where(a_RN.abs() > threshold, a_RN, 0.0)
    return {rows: union_density(a_RN, routing.offsets_E1, rows) for rows in tiles}
