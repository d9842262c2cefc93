"""What an engine asks of an optimizer, and what it gives it to update.

An optimizer is one file (training/optim/adamw.py): its settings, the names and dtypes of its
states, and its update. Engines keep the states, shard, save, load and offload them, and call the
update on whatever they hold; they know no optimizer by name.

Shape letters: P elements of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

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


def _unchanged(flat: Tensor) -> Tensor:
    return flat


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
    shape: Sequence[int] = field(default_factory=tuple)
    """granularity="matrices": [..., rows, columns] of the whole parameter, whose first element here
    is `start`."""
    start: int = 0
    gather: Callable[[Tensor], Tensor] = _unchanged
    """granularity="matrices": a flat tensor of the whole parameter from one of this process's part;
    all processes call it alike."""

    def whole(self, part_P: Tensor) -> Tensor:
        """The matrices that this is a part of, in their shape."""
        return self.gather(part_P).view(*self.shape)

    def part(self, whole: Tensor) -> Tensor:
        """This process's elements of whole matrices, [P]."""
        return whole.reshape(-1)[self.start : self.start + self.weight.numel()]

    def store(self, scalars: Scalars, weight_P: Tensor, **states_P: Tensor) -> None:
        """Set weight and states, unless the step is skipped; bfloat16 is rounded at random."""
        targets = [self.weight, *(self.states[name] for name in states_P)]
        values = [weight_P, *states_P.values()]
        store(targets, values, scalars.keep, self.seed, scalars.count, self.first)
        if self.copy is not None:
            self.copy.copy_(self.weight)


class Optimizer(Protocol):
    """The settings of an optimizer, which are also its rule."""

    granularity: Literal["elements", "matrices"]
    """elements: every element is updated by itself, so a piece may be any part of a group.
    matrices: each piece is of one parameter, whose whole matrices `Piece.whole` gives."""
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
