"""What holds a model's weights and optimizer states, as the training loop sees it.

    engine = make_engine("auto", model, groups, optimizer, …)
    for i, batch in enumerate(batches):
        with engine.micro_batch(last=i == len(batches) - 1):
            engine.backward(loss_of(engine.model, batch))
        engine.terms += …                     # loss terms of the step, summed over ranks
    outcome = engine.step(lr)

Gradients are sums over micro-batches and ranks, never means: the loss of a micro-batch must already
be divided by the targets of the whole step, on all ranks. The norm is that of the whole model's
gradient, each element counted once, the same bits on every rank; clipping and the decision whether
a step is applied follow from it on the device.

Names are logical: those of the model in one process, before experts were split or weights sharded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel.engines.optimizer import ROUTER, Group, Optimizer, Piece, Scalars
from parallel.flat_shard import FlatShard

Values = Callable[["str", "range | None"], Tensor]
"""`values(name, None)`: a whole tensor; `values(name, experts)`: those experts, stacked."""


class Outcome(NamedTuple):
    """What a step did; float32 scalars on the device."""

    grad_norm: Tensor  # before clipping
    skipped: Tensor  # 0 applied, 1 skipped
    reason: Tensor  # 0 none, 1 not finite, 2 spike, 3 after a stop


class StepGuard:
    """Decides on the device, the same on every process, whether a step is applied.

    A step is skipped when its loss or the norm of its gradients is not finite, and, with
    `spike_factor`, when the norm exceeds that multiple of its running mean once `HISTORY` steps
    were seen. A spike enters the mean cut to the limit, so a lasting change of scale is followed
    within some steps and not refused forever; a step that is not finite leaves the mean alone.

    With `stop` (`optim.on_nonfinite=stop`) everything after the first step that is not finite is
    left out as well, so the weights stay those before it until the host learns of it at the next
    log step.
    """

    HISTORY = 20
    DECAY = 0.98

    def __init__(
        self, device: torch.device, spike_factor: float | None = None, stop: bool = False
    ) -> None:
        self.spike_factor = spike_factor
        self.stop = stop
        self.mean_norm = torch.zeros((), device=device)
        self.seen = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)  # in all, over attempts
        self.halted = torch.zeros((), device=device)

    def state(self) -> dict[str, Tensor]:
        return {"mean_norm": self.mean_norm, "seen": self.seen, "skipped": self.skipped}

    def judge(self, norm: Tensor, terms: Tensor) -> Outcome:
        """The outcome for a step with this gradient norm and these loss terms."""
        bad = ~torch.isfinite(norm + terms.sum())
        limit = torch.full_like(norm, float("inf"))
        if self.spike_factor is not None:
            ready = self.seen >= self.HISTORY
            limit = torch.where(ready, self.mean_norm * self.spike_factor, limit)
        spike = ~bad & (norm > limit)
        halted = self.halted > 0
        reason = torch.where(halted, 3.0, torch.where(bad, 1.0, torch.where(spike, 2.0, 0.0)))
        reason = reason.to(norm.dtype)
        if self.stop:
            self.halted.copy_(torch.maximum(self.halted, bad.to(norm.dtype)))
        counts = ~bad & ~halted
        norm_cut = torch.minimum(norm, limit)
        first = self.seen == 0
        mean = torch.where(
            first, norm_cut, self.DECAY * self.mean_norm + (1 - self.DECAY) * norm_cut
        )
        # torch.where, not a product: 0 * NaN is NaN.
        self.mean_norm.copy_(torch.where(counts, mean, self.mean_norm))
        self.seen.add_(counts)
        skipped = (reason > 0).to(norm.dtype)
        self.skipped.add_(skipped)
        return Outcome(norm, skipped, reason)


class Engine(ABC):
    """A model with its optimizer.

    Attributes:
        model: call this for a training step; its forward gathers what it needs.
        groups: of the optimizer.
        rule: the optimizer.
        terms: float32: loss terms of the step on this rank; after `update` their sums over ranks.
        group_norms: float32, of the last step: the norm of each group's gradient, before clipping.
        guard: decides whether steps are applied.
        routers_frozen: set it to True, and steps leave the routers' weights alone.
        updates: float32 scalar: steps that were applied.
    """

    model: nn.Module

    def __init__(
        self, groups: Sequence[Group], optimizer: Optimizer, device: torch.device, num_terms: int
    ) -> None:
        names = [name for group in groups for name in group.parameters]
        if len(names) != len(set(names)):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"parameters in several groups: {', '.join(twice)}")
        self.groups, self.rule, self.device = groups, optimizer, device
        self.guard = StepGuard(device, optimizer.spike_factor, optimizer.on_nonfinite == "stop")
        self.terms = torch.zeros(num_terms, device=device)
        self.group_norms = torch.zeros(len(groups), device=device)
        self.updates = torch.zeros((), device=device)
        self.routers_frozen = False
        self._lrs = torch.zeros(len(groups), device=device)
        """Of each group in the next update: on the device, where a captured step finds it."""

    # --- a step -----------------------------------------------------------------------------------

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget gradients and terms of the last step."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; `last` of the step."""
        del last
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss that is divided by the step's global count already."""
        loss.backward()

    @abstractmethod
    def gradients(self) -> dict[str, Tensor | FlatShard]:
        """This process's parts of the summed gradients by logical name, flat, between the last
        backward and `update`: the memory that it reads, to look at or to change. All ranks call it.
        """

    def step(self, lr: float) -> Outcome:
        """Norm, guard, clip, update; see `StepGuard`.

        Args:
            lr: learning rate before the groups' multipliers.
        """
        self.set_lr(lr)
        return self.update()

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next `update`."""
        for number, group in enumerate(self.groups):
            frozen = self.routers_frozen and group.kind == ROUTER
            self._lrs[number].fill_(0.0 if frozen else lr * group.lr_multiplier)

    @abstractmethod
    def update(self) -> Outcome:
        """`step` with the learning rate that was set; no host sync but with DeepSpeed, and the same
        work on the device every time."""

    def lrs(self, lr: float) -> tuple[float, float | None]:
        """Learning rate of the weights and of the routers (None without routers)."""
        router = [group.lr_multiplier for group in self.groups if group.kind == ROUTER]
        if not router:
            return lr, None
        return lr, 0.0 if self.routers_frozen else lr * router[0]

    def _judge(self, norm: Tensor) -> Outcome:
        """Whether this step is applied, and how it is clipped: for `_apply`."""
        outcome = self.guard.judge(norm, self.terms)
        self._keep = 1 - outcome.skipped
        self.updates.add_(self._keep)
        self._divisor = torch.ones_like(norm)
        if self.rule.clip_norm is not None:
            self._divisor = torch.clamp(norm / self.rule.clip_norm, min=1.0)
        return outcome

    def _apply(self, number: int, pieces: Sequence[Piece]) -> None:
        """Update pieces of a group, all on one device."""
        group = self.groups[number]
        scalars = Scalars(self._lrs[number], self.updates, self._divisor, self._keep)
        device = pieces[0].weight.device
        if device != self.device:  # offloaded
            scalars = Scalars(*(scalar.to(device) for scalar in scalars))
        self.rule.of(group).update(group, pieces, scalars)

    # --- state ------------------------------------------------------------------------------------

    @abstractmethod
    def parts(self) -> dict[str, Tensor | FlatShard]:
        """`weights/NAME`, and `STATE/NAME` for each state of the optimizer: flat, of the tensor of
        the whole model (`FlatShard` where this process holds a part), views that loading fills."""

    def tensors(self) -> dict[str, Tensor | FlatShard]:
        """Everything to save, by logical names that know nothing of layouts: `parts()`, and the
        scalars `updates` and `guard/NAME`."""
        guard = {f"guard/{name}": value for name, value in self.guard.state().items()}
        return {**self.parts(), "updates": self.updates, **guard}

    def states(self, name: str) -> list[str]:
        """Names of the optimizer's states of a parameter."""
        group = next(group for group in self.groups if name in group.parameters)
        return list(self.rule.of(group).states(group))

    @abstractmethod
    def shapes(self) -> dict[str, list[int]]:
        """Logical name → shape of every parameter, to undo the flattening of `tensors`."""

    @abstractmethod
    def loaded(self) -> None:
        """After `tensors()` were filled: the rest follows them."""

    @abstractmethod
    def fill(self, values: Values) -> None:
        """Set all weights, one tensor at a time."""

    @abstractmethod
    def all_finite(self) -> Tensor:
        """Boolean scalar on the device: weights and states of all ranks are finite."""

    @abstractmethod
    def check_replicas(self) -> None:
        """Refuse to train when ranks that should hold the same weights hold different ones.

        Raises:
            ParallelError: which ranks differ from the first of their group, in what.
        """


def any_not_finite(buffers: Iterable[Tensor], device: torch.device) -> Tensor:
    """Boolean scalar on `device`: whether some element is not finite; no mask is built."""
    # A sum is finite only if every element is (or it overflows, as bad).
    sums = [buffer.sum(dtype=torch.float32).to(device) for buffer in buffers]
    return (~torch.isfinite(torch.stack(sums))).any()
