"""From expert ids to the index arrays that grouped products read: a stable counting sort.

Shape letters: T tokens, E experts, S slots (token order), R rows (expert order, R >= S allocated),
B row tiles.

A slot is one (token, expert) pair in token order. Its row is its place when pairs are sorted by
expert, stable by slot. Ids outside [0, E) mean "no expert": the slot has no row. Everything stays
on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels._triton import pick_backend


class RoutingMetadata(NamedTuple):
    """Index arrays of a routing, all int32. Rows at or after offsets_E1[E] are unused: token 0,
    slot 0."""

    offsets_E1: Tensor  # first row of each expert; the last entry is the number of real rows
    row_S: Tensor  # slot -> row, -1 for a slot without expert
    slot_R: Tensor  # row -> slot
    token_R: Tensor  # row -> token


class TileSchedule(NamedTuple):
    """Row tiles of a grouped product, all int32 [B]; unused tiles have expert -1 and an empty
    range."""

    expert_B: Tensor
    start_B: Tensor  # first row
    end_B: Tensor  # one past the last row of the tile
    count: Tensor  # int32 scalar: tiles in use


# ---------------------------------------------------------------------------------------- reference


def routing_metadata_ref(
    expert_S: Tensor,
    num_experts: int,
    slots_per_token: int | None = None,
    token_S: Tensor | None = None,
    max_rows: int | None = None,
) -> RoutingMetadata:
    """Plain torch version of `routing_metadata`, any device."""
    S = expert_S.numel()
    R = S if max_rows is None else max_rows
    expert_S = expert_S.reshape(-1).long()
    some_S = (expert_S >= 0) & (expert_S < num_experts)
    bin_S = torch.where(some_S, expert_S, num_experts)
    slot_of_rank = torch.argsort(bin_S, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert_S.device)
    counts = counts.scatter_add(0, bin_S, torch.ones_like(bin_S))
    offsets_E1 = torch.zeros_like(counts)
    offsets_E1[1:] = counts[:num_experts].cumsum(0)
    rank = torch.arange(S, device=expert_S.device)
    row_S = torch.empty_like(bin_S).scatter_(0, slot_of_rank, rank)
    row_S = torch.where(some_S, row_S, -1)
    slot_R = torch.zeros(R, dtype=torch.int64, device=expert_S.device)
    slot_R[:S] = torch.where(rank < offsets_E1[-1], slot_of_rank, 0)
    if token_S is None:
        token_R = slot_R // (slots_per_token or 1)
    elif S:
        used = torch.arange(R, device=expert_S.device) < offsets_E1[-1]
        token_R = torch.where(used, token_S.long()[slot_R], 0)
    else:
        token_R = torch.zeros_like(slot_R)
    i32 = torch.int32
    return RoutingMetadata(offsets_E1.to(i32), row_S.to(i32), slot_R.to(i32), token_R.to(i32))


def max_tiles(num_experts: int, tile_rows: int, max_rows: int) -> int:
    """Most row tiles that `max_rows` rows over `num_experts` experts can need: sum of ceil(f_e /
    tile_rows)."""
    busy = min(num_experts, max_rows)
    return busy + (max_rows - busy) // tile_rows


def tile_schedule_ref(offsets_E1: Tensor, tile_rows: int, max_rows: int) -> TileSchedule:
    """Plain torch version of `tile_schedule`, any device."""
    E = offsets_E1.numel() - 1
    B = max_tiles(E, tile_rows, max_rows)
    offsets = offsets_E1.long()
    tiles_E = (offsets[1:] - offsets[:-1] + tile_rows - 1) // tile_rows
    last_E = tiles_E.cumsum(0)  # one past the last tile of each expert
    tile_B = torch.arange(B, device=offsets_E1.device)
    count = last_E[-1]
    used_B = tile_B < count
    expert_B = torch.searchsorted(last_E, tile_B, right=True).clamp(max=E - 1)
    start_B = offsets[expert_B] + (tile_B - (last_E - tiles_E)[expert_B]) * tile_rows
    end_B = torch.minimum(start_B + tile_rows, offsets[expert_B + 1])
    i32 = torch.int32
    return TileSchedule(
        torch.where(used_B, expert_B, -1).to(i32),
        torch.where(used_B, start_B, 0).to(i32),
        torch.where(used_B, end_B, 0).to(i32),
        count.to(i32),
    )


# ------------------------------------------------------------------------------------------- public


def routing_metadata(
    expert_S: Tensor,
    num_experts: int,
    *,
    slots_per_token: int | None = None,
    slot_offsets_T1: Tensor | None = None,
    token_S: Tensor | None = None,
    max_rows: int | None = None,
    backend: str = "auto",
) -> RoutingMetadata:
    """Sort slots by expert, stable, and return the index arrays between slots, rows and tokens.

    Args:
        expert_S: int32 or int64 expert of each slot in token order, any shape (flattened); ids
            outside
            [0, num_experts) are slots without expert.
        num_experts: E.
        slots_per_token: K if token t owns slots tK … tK+K-1. Exactly one of the three token sources
            is given.
        slot_offsets_T1: [T+1] when token t owns slots slot_offsets_T1[t] … slot_offsets_T1[t+1]-1.
        token_S: [S] token of each slot.
        max_rows: rows to allocate, at least S (default S).

    Raises:
        ValueError: an argument out of range, by name and value.
    """
    S = expert_S.numel()
    if expert_S.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert_S must be int32 or int64, got {expert_S.dtype}")
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} must be at least 1")
    if sum(source is not None for source in (slots_per_token, slot_offsets_T1, token_S)) != 1:
        raise ValueError("give exactly one of slots_per_token, slot_offsets_T1 and token_S")
    if slots_per_token is not None and (slots_per_token < 1 or S % slots_per_token):
        raise ValueError(
            f"slots_per_token={slots_per_token} must be at least 1 and divide the {S} slots"
        )
    if token_S is not None and token_S.numel() != S:
        raise ValueError(f"token_S has {token_S.numel()} entries, expert_S has {S}")
    if max_rows is not None and max_rows < S:
        raise ValueError(f"max_rows={max_rows} must be at least the number of slots {S}")
    if slot_offsets_T1 is not None:
        slot = torch.arange(S, dtype=slot_offsets_T1.dtype, device=expert_S.device)
        token_S = torch.searchsorted(slot_offsets_T1, slot, right=True) - 1
    pick_backend(backend, expert_S, available=("reference",))
    return routing_metadata_ref(expert_S, num_experts, slots_per_token, token_S, max_rows)


def tile_schedule(
    offsets_E1: Tensor, tile_rows: int, max_rows: int, *, backend: str = "auto"
) -> TileSchedule:
    """Cut each expert's rows into tiles of at most `tile_rows` rows, in expert order.

    Args:
        offsets_E1: [E+1] int32 first row of each expert.
        tile_rows: rows of a tile.
        max_rows: static upper bound on offsets_E1[E]; the arrays have `max_tiles(E, tile_rows,
            max_rows)` entries.
    """
    if tile_rows < 1:
        raise ValueError(f"tile_rows={tile_rows} must be at least 1")
    if max_rows < 0:
        raise ValueError(f"max_rows={max_rows} must not be negative")
    pick_backend(backend, offsets_E1, available=("reference",))
    return tile_schedule_ref(offsets_E1, tile_rows, max_rows)
