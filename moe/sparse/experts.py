"""The experts of an MoE layer as sparse-matrix products, after MegaBlocks (arXiv 2211.15841).

    x_P = D · x          dispatch: D [P, T] has a one in the row of every routed pair
    H   = SDD(x_P, W1)   block-sparse: rows of an expert times the columns of its weight
    A   = activation of H's blocks
    y_P = DSD(A, W2)
    y   = C · y_P        combine: C [T, P] holds the gates

Every expert's rows start a new block, so up to E blocks are partly padding. Backward is that of the
products: Dᵀ and Cᵀ are walked by their flipped patterns, the gates' gradient is an SDDMM, W2's and
W1's are block-sparse products by columns. It is the same function as the grouped products of
`moe.experts`, for comparison and teaching; it keeps more for backward (x_P, H, A and y_P).

Shape letters: T tokens, D model width, N expert width, E experts, K experts per token, R rows, S
slots of the routing; P padded rows, B blocks of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.activations import activation_backward_ref, activation_ref, activation_width
from moe.kernels.common.autograd import first_order
from moe.kernels.common.backend import pick_backend
from moe.kernels.common.ops import define_op
from moe.kernels.common.reference import expert_of_rows, used_rows
from moe.routing import Routing
from moe.sparse.formats import CSR
from moe.sparse.pattern import Pattern
from moe.sparse.products import dsd_stack, gather, sdd_stack


class Topology(NamedTuple):
    """The patterns of one routing."""

    dispatch: Pattern
    """D [P, T]."""
    combine: CSR
    """C [T, P]; its values are the gates of the routing."""
    blocks: Pattern
    """Of H and A, in blocks."""
    by_expert: Pattern
    """[E, P]: the rows of each expert."""


def block_height(rows: int, num_experts: int) -> int:
    """Rows of a block: 128, fewer where the mean expert would not fill one."""
    mean = rows // max(num_experts, 1)
    return next((height for height in (128, 64, 32) if mean >= height), 16)


def block_width(expert_size: int, gated: bool) -> int:
    """Columns of a block of A: the largest power of two that divides N; H's has 128 at most."""
    return min(64 if gated else 128, expert_size & -expert_size)


def check_spmm(expert_size: int, save: str) -> None:
    """Refuses what cannot be computed as products of sparse matrices.

    Raises:
        ValueError: save="x", or an expert width that blocks of 16 columns do not divide.
    """
    if save != "h":
        raise ValueError(f"save={save!r} does not go with kernels='spmm'; allowed: 'h'")
    if expert_size % 16:
        raise ValueError(
            f"expert width {expert_size} with kernels='spmm' must be a multiple of 16, so that "
            "blocks do not cross from one expert to the next"
        )


@torch.no_grad()
def topology(routing: Routing, height: int, columns: int) -> Topology:
    """Patterns of a routing, made on its device without reading memory back.

    Args:
        height: rows of a block.
        columns: blocks side by side of one expert.
    """
    offsets_E1, device = routing.offsets_E1.long(), routing.offsets_E1.device
    E, T, R = routing.num_experts, routing.num_tokens, routing.token_R.shape[0]
    B = R // height + min(E, R)
    P = B * height
    blocks_E = (offsets_E1.diff() + (height - 1)) // height
    first_E1 = torch.cat([offsets_E1.new_zeros(1), blocks_E.cumsum(0)])

    row_R = torch.arange(R, device=device)
    expert_R = expert_of_rows(offsets_E1, R)
    place_R = row_R - offsets_E1[expert_R] + first_E1[expert_R] * height
    place_R = torch.where(used_rows(offsets_E1, R), place_R, P).to(torch.int32)

    def spread(value_R: Tensor, empty: int) -> Tensor:
        out_P1 = value_R.new_full((P + 1,), empty)
        return out_P1.index_copy_(0, place_R.long(), value_R)[:P]

    token_P, slot_P = spread(routing.token_R, -1), spread(routing.slot_R, 0)
    place_S = routing.row_S
    if R:
        place_S = torch.where(place_S >= 0, place_R[place_S.clamp_min(0).long()], -1)
    bounds_P1 = torch.arange(P + 1, dtype=torch.int32, device=device)
    by_row = Pattern(bounds_P1, token_P, (P, T), 1)
    by_token = Pattern(routing.csr()[0], place_S, (T, P), routing.slots_per_token, longest=E)

    block_B = torch.arange(B, device=device)
    expert_B1 = torch.searchsorted(first_E1[1:].contiguous(), block_B, right=True)[:, None]
    column = expert_B1 * columns + torch.arange(columns, device=device)
    column = torch.where(expert_B1 < E, column, -1).flatten().to(torch.int32)
    bounds_B1 = torch.arange(B + 1, dtype=torch.int32, device=device) * columns
    return Topology(
        by_row.with_flipped(by_token, slot_P),  # D holds ones: the order of its values is idle
        CSR(by_token.with_flipped(by_row, slot_P), routing.gates_S),
        Pattern(bounds_B1, column, (B, E * columns), columns),
        Pattern((first_E1 * height).to(torch.int32), bounds_P1[:-1], (E, P)),
    )


def _activation_fake(h_RH: Tensor, kind: str) -> Tensor:
    return h_RH.new_empty(h_RH.shape[0], h_RH.shape[1] // activation_width(kind))


# Operators, as torch.compile cannot trace writes to every second column.
_activation = define_op(
    "activation(Tensor h, str kind) -> Tensor", activation_ref, _activation_fake
)
_activation_backward = define_op(
    "activation_backward(Tensor h, Tensor da, str kind) -> Tensor",
    lambda h_RH, da_RN, kind: activation_backward_ref(h_RH, da_RN, kind)[0].to(h_RH.dtype),
    lambda h_RH, da_RN, kind: torch.empty_like(h_RH),
)


class _Activation(torch.autograd.Function):
    """Of all numbers of H's blocks, gate and up columns interleaved."""

    @staticmethod
    def forward(ctx, h_RH, kind):
        ctx.save_for_backward(h_RH)
        ctx.kind = kind
        return _activation(h_RH, kind)

    @staticmethod
    @first_order
    def backward(ctx, da_RN):
        return _activation_backward(*ctx.saved_tensors, da_RN, ctx.kind), None


def spmm_experts(
    x_TD: Tensor,
    w1_EHD: Tensor,
    w2_EDN: Tensor,
    routing: Routing,
    *,
    activation: str = "swiglu",
    height: int | None = None,
    backend: str = "auto",
    output_sums: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gate-weighted sum of each token's experts; arguments as those of `moe.experts.experts`.

    Args:
        height: rows of a block, a power of two; None = by the mean load.
        backend: who computes the products: "auto", "triton" or "reference".

    Raises:
        ValueError: an expert width that is no multiple of 16, with Triton.
    """
    backend = pick_backend(backend, x_TD)
    E, N = w2_EDN.shape[0], w2_EDN.shape[2]
    T, R = x_TD.shape[0], routing.token_R.shape[0]
    wide = activation_width(activation)
    width = block_width(N, wide == 2)
    height = height or block_height(R, E)
    dispatch, combine, blocks, by_expert = topology(routing, height, N // width)
    if T == 0 or R == 0:  # the weights still get their zeros
        out_TD = x_TD * 0.0 + w1_EHD.flatten()[:0].sum() + w2_EDN.flatten()[:0].sum()
        return (out_TD, x_TD.new_zeros(E, x_TD.shape[1])) if output_sums else out_TD
    x_PD = gather(dispatch, x_TD, backend=backend)
    h_ZBH = sdd_stack(blocks, x_PD, w1_EHD.mT, (height, wide * width), backend=backend)
    a_ZBN = _Activation.apply(h_ZBH.flatten(0, 1), activation).view(-1, height, width)
    y_PD = dsd_stack(blocks, a_ZBN, w2_EDN.mT, backend=backend)
    out_TD = combine.times(y_PD, backend=backend)
    if output_sums:  # rows that fill up a block are zeros
        return out_TD, gather(by_expert, y_PD.detach(), backend=backend)
    return out_TD
