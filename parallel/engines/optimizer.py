"""What an engine asks of an optimizer, and what it gives it to update.

An optimizer is one file (training/optim/adamw.py): its settings, the names and dtypes of its
states, and its update. Engines keep the states, shard, save, load and offload them, and call the
update on whatever they hold; they know no optimizer by name.

Shape letters: P elements of a piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.matrices import Matrices
from parallel.engines.rounding import store

DENSE, EXPERT, ROUTER = "dense", "expert", "router"
Kind = Literal["dense", "expert", "router"]


@dataclass(frozen=True)
class Group:
    """Parameters that share learning rate, weight decay, dtype and kind."""

    name: str
    parameters: dict[str, nn.Parameter]
    """By logical name, the same in every layout."""
    lr_multiplier: float = 1.0
    weight_decay: float = 0.0
    kind: Kind = DENSE
    matrices: Mapping[str, Matrices] = field(default_factory=dict)
    """Of the weights inside of layers that multiply activations: how each divides into matrices.
    Embeddings, the output matrix, routers, norms and biases are not in it."""

    @property
    def count(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parameters.values())).dtype

    @property
    def metric(self) -> str:
        """Name of the norm of its gradients in metrics.jsonl."""
        return f"grad_norm/{self.name.partition(' (')[0].replace(' ', '_')}"


class Scalars(NamedTuple):
    """What an update follows besides the tensors; float32 scalars where these are."""

    lr: Tensor
    """Learning rate of the group."""
    count: Tensor
    """Updates that were applied, with this one."""
    divisor: Tensor
    """Clipping: the gradient is to be divided by it."""
    keep: Tensor
    """1; or 0: the step is skipped, and every weight and state must keep its bits."""


@dataclass
class Piece:
    """Elements of one group that are updated together, flat: of one parameter or of several, whole
    or this process's part."""

    weight: Tensor
    """[P] float32, or bfloat16 without a master copy."""
    gradient: Tensor
    """[P] float32 or bfloat16, before clipping; must not be changed."""
    states: dict[str, Tensor]
    """[P] each, by the names that the optimizer has given them."""
    copy: Tensor | None = None
    """[P] bfloat16: gets the weight rounded to the nearest."""
    seed: int = 0
    first: int = 0
    """Of the random bits: of the buffer, and the place of the first element in it."""
    start: int = 0
    """First element in the parameter, of a piece of one."""
    matrices: Matrices | None = None
    """granularity="matrices": those of the whole parameter, of which each rank of `ranks` holds
    `per_rank` elements, one part behind the other, and the last ones perhaps fewer."""
    per_rank: int = 0
    ranks: dist.ProcessGroup | None = None
    """None: one process holds all."""
    device: torch.device | None = None
    """Where matrices are computed and travel, if not where the piece is."""

    def store(self, scalars: Scalars, weight_P: Tensor, **states_P: Tensor) -> None:
        """Set weight and states, unless the step is skipped; bfloat16 is rounded at random."""
        targets = [self.weight, *(self.states[name] for name in states_P)]
        values = [weight_P, *states_P.values()]
        store(targets, values, scalars.keep, self.seed, scalars.count, self.first)
        if self.copy is not None:
            self.copy.copy_(self.weight)


def store_all(
    pieces: Sequence[Piece],
    scalars: Scalars,
    weights: Sequence[Tensor],
    **states: Sequence[Tensor],
) -> None:
    """`Piece.store` of several pieces on one device, with few launches where all is float32."""
    targets = [piece.weight for piece in pieces]
    values = list(weights)
    for name, these in states.items():
        targets += [piece.states[name] for piece in pieces]
        values += these
    if any(target.dtype == torch.bfloat16 for target in targets):
        for number, piece in enumerate(pieces):
            own = {name: these[number] for name, these in states.items()}
            piece.store(scalars, weights[number], **own)
        return
    applied = scalars.keep > 0
    kept = [torch.where(applied, *pair) for pair in zip(values, targets)]
    torch._foreach_copy_(targets, kept)
    copied = [piece for piece in pieces if piece.copy is not None]
    if copied:
        torch._foreach_copy_([p.copy for p in copied], [p.weight for p in copied])


class Optimizer(Protocol):
    """The settings of an optimizer, which are also its rule."""

    granularity: Literal["elements", "matrices"]
    """elements: every element is updated by itself, so a piece may be any part of a group.
    matrices: each piece is of one parameter; `parallel.engines.matrices.on_matrices` computes
    with its whole matrices."""
    clip_norm: float | None
    weights: str
    """bfloat16: one process updates the weights of a bfloat16 model themselves, not a copy."""
    spike_factor: float | None
    on_nonfinite: str

    def of(self, group: Group) -> Optimizer:
        """The optimizer of a group, itself as a rule; another one for what is no matrix, say."""

    def states(self, group: Group) -> Mapping[str, torch.dtype]:
        """Names and dtypes of the states of a group; each as large as the weights, at first 0."""

    def update(self, group: Group, pieces: Sequence[Piece], scalars: Scalars) -> None:
        """Change weights and states in place, on the device, without a host sync."""
