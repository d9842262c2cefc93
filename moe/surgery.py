"""Experts that come and go: a layer has slots, and some of them hold an expert.

    layer = MoE(MoEConfig(..., num_experts=16, start_experts=12))      # 16 slots, 4 of them free
    change_layer(layer, Change("clone", expert=12, parent=3))          # slot 12: a copy of expert 3
    change_layer(layer, Change("retire", expert=5))                    # slot 5 is free

A free slot has logits of -inf: no token goes there, it takes no part in any statistic or loss and
gets no gradient. Which slots are in use is a buffer of the router (`active_E`), so shapes, kernels
and graphs stay the same whatever happens, and a change costs the copy of one expert. It is made
between an optimizer step and the next forward, the same on all ranks.

    clone    a free slot gets a copy of another expert: weights, router row, router state. With
             `dormant` its selection bias is below every key that another expert can have: the layer
             computes the same bits as before, until the rule that moves the bias lets tokens in.
             Without, parent and copy answer the same tokens at once, and each of these spends two
             of its K choices on them: the output changes, and heals in some steps. With
             `MoEConfig.families` they form a family, of which a token chooses the best member
             alone: its output stays the same but for the noise that lets them part.
    retire   the slot is free: its tokens take the next best expert from then on.
    revive   an expert that got no tokens becomes a copy of another one: retire and clone at once.

Moments of an optimizer must follow (`rows`): those of zero beside a shared step count would make
the first update of a copy 3.2 times too large with betas (0.9, 0.999), and 0.45 times with (0.9,
0.95).

Shape letters: D model width, E slots.

Source: "Expert Upcycling" (arXiv 2604.19835) for copies with their optimizer state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe.layer import MoE
from moe.router import Router

Kind = Literal["clone", "retire", "revive"]
# Scores that lie in [0, 1], so that below the smallest bias less 2 no key comes first, and that do
# not change for the others when an expert comes (those of a softmax share their sum with it).
DORMANT_SCORES = ("sigmoid",)


@dataclass(frozen=True)
class Change:
    """One thing that happens to one slot of one layer."""

    kind: Kind
    expert: int
    """The slot that changes."""
    parent: int | None = None
    """Of clone and revive: what it becomes a copy of."""
    layer: int = 0
    """Number of the MoE layer in its model, from 0."""
    reason: str = ""


def check_change(
    change: Change,
    active_E: Sequence[bool],
    k: int,
    family_E: Sequence[float] | None = None,
) -> None:
    """Refuse what cannot happen to a layer with these experts.

    Args:
        active_E: which slots hold one.
        k: experts that every token needs to choose from.
        family_E: their families, of which a token needs as many.

    Raises:
        ValueError: naming layer, slot and what is allowed.
    """
    where = f"MoE layer {change.layer}: {change.kind} of slot {change.expert}"
    for slot in (change.expert, change.parent):
        if slot is not None and not 0 <= slot < len(active_E):
            raise ValueError(f"{where}: there is no slot {slot}; allowed: 0 to {len(active_E) - 1}")
    if (change.parent is None) != (change.kind == "retire"):
        raise ValueError(f"{where}: parent={change.parent}; clone and revive need one, retire none")
    if change.parent is not None and not active_E[change.parent]:
        raise ValueError(f"{where}: its parent {change.parent} is a free slot")
    if change.kind == "clone" and active_E[change.expert]:
        free = [slot for slot, active in enumerate(active_E) if not active]
        raise ValueError(f"{where}: it holds an expert; free are {free or 'none'}")
    if change.kind != "clone" and not active_E[change.expert]:
        raise ValueError(f"{where}: it holds no expert")
    if change.kind == "revive" and change.expert == change.parent:
        raise ValueError(f"{where}: it cannot be its own parent")
    if change.kind == "retire" and sum(active_E) <= k:
        raise ValueError(f"{where}: {sum(active_E)} experts are left, and a token needs {k}")
    if change.kind != "clone" and family_E is not None:
        stay = {f for e, (f, on) in enumerate(zip(family_E, active_E)) if on and e != change.expert}
        if len(stay) < k:
            raise ValueError(
                f"{where}: experts of {len(stay)} families would be left, and a token needs {k}"
            )


@torch.no_grad()
def change_state(router: Router, change: Change, dormant: bool = False) -> None:
    """Bring the router's buffers after a change; its weight is moved with the other weights.

    Args:
        dormant: of a clone: nothing chooses it until its selection bias has risen.

    Raises:
        ValueError: a change that cannot be, or a dormant clone where no selection bias could keep
            tokens away.
    """
    slots = router.config.num_experts
    active_E = [True] * slots if router.active_E is None else router.active_E.bool().tolist()
    family_E = None if router.family_E is None else router.family_E.tolist()
    check_change(change, active_E, router.training_k, family_E)
    if dormant and (router.selection_bias is None or router.config.score not in DORMANT_SCORES):
        raise ValueError(
            "a dormant clone needs a selection bias (router.bias) and score='sigmoid', "
            f"got score={router.config.score!r}"
        )
    if change.kind != "revive" and router.active_E is None:
        raise ValueError("the router has no free slots; it needs start_experts")
    for buffer in router.buffers():  # the mask is one of them
        if buffer.dim() and buffer.shape[0] % slots == 0:
            move_rows(buffer.view(slots, -1), change)
    if dormant:
        lowest = router.selection_bias.masked_fill(router.active_E == 0, float("inf")).amin()
        router.selection_bias[change.expert] = lowest - 2.0


def move_rows(rows_EX: Tensor, change: Change) -> None:
    """Bring a tensor [E, ...] of numbers that belong to each expert after a change: a copy has its
    parent's, a free slot zeros."""
    rows_EX[change.expert] = 0.0 if change.parent is None else rows_EX[change.parent]


@torch.no_grad()
def change_layer(
    layer: MoE,
    change: Change,
    *,
    moments: Sequence[Tensor] = (),
    dormant: bool = False,
    noise: float = 0.0,
    seed: str = "",
) -> None:
    """Make a change in a layer whose experts are whole in this process.

    Args:
        moments: [E, ...]; what else belongs to each expert, as an optimizer's moments. Zeros where
            an expert retires; its weights stay, out of reach.
        dormant: see `change_state`.
        noise: relative to the deviation of each of the copy's matrices, so that the two part.
        seed: fixes it.

    Raises:
        ValueError: a change that cannot be.
    """
    slots, router = layer.config.num_experts, layer.router
    change_state(router, change, dormant)
    for rows_EX in moments:
        move_rows(rows_EX, change)
    if change.parent is None:
        return
    for name in ("w1", "w2", "router.weight"):
        rows_EX = layer.get_parameter(name).view(slots, -1)
        move_rows(rows_EX, change)
        if noise:
            row_X = rows_EX[change.expert]
            row_X += noise_for(row_X.float(), noise, f"{seed}/{name}/{change.expert}").to(row_X)


def noise_for(row_X: Tensor, relative: float, name: str) -> Tensor:
    """Nearly normal noise of `relative` times the deviation of a row [X], by name and place: the
    same on all ranks, on every kind of device and after a restart, and drawn where the row is
    (millions of numbers from the host's generator would take longer than a step)."""
    digest = hashlib.sha256(name.encode()).digest()
    seed = int.from_bytes(digest[:8], "little", signed=True)
    word_X = _mixed(torch.arange(row_X.numel(), device=row_X.device), seed)
    # Four uniform numbers of 16 bits: their sum has the first three moments of a normal one.
    sum_X = sum((word_X >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    unit_X = (sum_X - 2 * 0xFFFF).to(torch.float32) / (65536 * 3**-0.5)
    return unit_X * (relative * row_X.std())


def _mixed(index_X: Tensor, seed: int) -> Tensor:
    """SplitMix64 (Steele, Lea & Flood, OOPSLA 2014) of seed + index; int64, whose products wrap."""
    golden, first, second = (
        value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
    )
    word_X = index_X * golden + seed
    for shift, factor in ((30, first), (27, second), (31, 1)):
        word_X = (word_X ^ (word_X >> shift & (1 << 64 - shift) - 1)) * factor
    return word_X
