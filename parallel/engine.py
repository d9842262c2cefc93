"""What a sharding engine does for the training loop, and what all engines share.

    engine = make_engine("fsdp2", model, mesh, …)
    for i, batch in enumerate(batches):
        with engine.micro_batch(last=i == len(batches) - 1):
            engine.backward(loss_of(engine.model, batch))
        engine.terms += …                     # loss terms of the step, summed over ranks by step()
    outcome = engine.step(lr)

Gradients are sums over micro-batches and ranks, never means: the loss of a micro-batch must already
be divided by the targets of the whole step, on all ranks. The norm is that of the whole model's
gradient, each element counted once, the same bits on every rank; clipping and the decision whether
a step is applied follow from it on the device.

Names are logical: those of the model in one process, before experts were split or weights sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe import Router
from parallel.expert_parallel import ExpertParallelOptions, ExpertRange, split_experts
from parallel.flat_shard import FlatShard
from parallel.mesh import Mesh
from parallel.world import ParallelError, fingerprint


class Group(Protocol):
    """Parameters that share learning rate and weight decay; see `training.optim.master.Group`."""

    name: str
    parameters: Mapping[str, Any]
    """By logical name; only the names are used here."""
    lr_multiplier: float
    weight_decay: float


class Guard(Protocol):
    """Decides on the device whether a step is applied; `training.optim.master.StepGuard` is one."""

    def judge(self, norm: Tensor, terms: Tensor) -> Any:
        """Something with a field `skipped`: 1.0 leaves all weights and moments alone."""

    def state(self) -> dict[str, Tensor]:
        """Scalars to save."""


@dataclass(frozen=True)
class AdamSettings:
    """Of the update, the same for all groups."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float | None = 1.0


class Engine(Protocol):
    """ZeRO-3 inside a node and expert parallelism, around one model."""

    model: nn.Module
    """Call this; its forward gathers what it needs."""
    places: Mapping[str, Place]
    """Parameter of the split model → what it is."""
    terms: Tensor
    """float32: loss terms of the step on this rank; after `step` their sums over ranks."""
    routers_frozen: bool
    """Set it to True, and steps leave the routers' weights alone."""
    groups: Sequence[Group]
    group_norms: Tensor
    """float32, of the last step: the norm of each group's gradient, before clipping."""
    guard: Guard
    mesh: Mesh

    def zero_grad(self) -> None:
        """Forget gradients and terms of the last step."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; `last` of the step."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss that is divided by the step's global count already."""

    def gradients(self) -> dict[str, FlatShard]:
        """Copies of this rank's parts of the summed gradients by logical name, between the last
        backward and `step`; all ranks call it. For checks."""

    def step(self, lr: float) -> Any:
        """`set_lr` and `update`."""

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next `update`, before the groups' multipliers."""

    def update(self) -> Any:
        """Norm, guard, clip, update; what the guard returned. No host sync with FSDP2."""

    def tensors(self) -> dict[str, Any]:
        """`weights/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` as `FlatShard`s that loading fills;
        `adam_step` and `guard/NAME` as scalars. The form is that of a one-process checkpoint."""

    def shapes(self) -> dict[str, list[int]]:
        """Logical name → shape of every parameter."""

    def loaded(self) -> None:
        """After `tensors()` were filled: the rest follows them."""

    def fill(self, values: Callable[[str, range | None], Tensor]) -> None:
        """Set all weights, one tensor at a time: `values(name, None)` is a whole tensor,
        `values(name, experts)` those experts of an expert weight, stacked."""

    def all_finite(self) -> Tensor:
        """Boolean scalar on the device: weights and moments of all ranks are finite."""

    def lrs(self, lr: float) -> tuple[float, float | None]:
        """Learning rate of weights and of routers, None without routers."""


class Place(NamedTuple):
    """A parameter of the split model, and what part of which logical tensor it is."""

    name: str
    shape: tuple[int, ...]
    """Of the logical tensor."""
    start: int
    """First element of the parameter in it, flattened."""
    kind: str
    """dense, expert or router."""
    group: Any

    def fill(
        self, piece: Tensor, start: int, values: Callable[[str, range | None], Tensor]
    ) -> None:
        """Fill a flat piece that begins at element `start` of the parameter; see `Engine.fill`."""
        if piece.numel() == 0:
            return
        first, experts = self.start + start, None
        if self.kind == "expert":
            # The experts that the piece touches; the first and the last perhaps in part.
            size = self.shape[1] * self.shape[2]
            experts = range(first // size, -(-(first + piece.numel()) // size))
            first -= experts.start * size
        whole = values(self.name, experts).reshape(-1)
        piece.copy_(whole[first : first + piece.numel()])


def prepare(
    model: nn.Module,
    mesh: Mesh,
    groups: Sequence[Group],
    options: ExpertParallelOptions,
    flat_experts: bool,
) -> dict[str, Place]:
    """Split the experts of a model, and say what every trainable parameter is.

    Routers stay whole on every rank, in float32: they are small, must not be cast with the rest,
    and their forward is not one call that a sharding engine could hook.

    Args:
        flat_experts: see `split_experts`.

    Returns:
        name of each trainable parameter as the model now has it → its place.

    Raises:
        ValueError: a trainable parameter in no group.
    """
    group_of = {name: group for group in groups for name in group.parameters}
    ranges = split_experts(model, mesh, options, flat_experts)
    routers = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, Router)
        for name, _ in module.named_parameters()
    }
    places = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        place = ranges.get(name) or ExpertRange(name, tuple(parameter.shape), 0)
        if place.name not in group_of:
            raise ValueError(f"parameter {place.name} is in no optimizer group")
        kind = "expert" if name in ranges else "router" if name in routers else "dense"
        places[name] = Place(place.name, place.shape, place.start, kind, group_of[place.name])
    return places


class GlobalSums:
    """One all-reduce a step: the squared norm of all gradients, and the loss terms."""

    def __init__(self, mesh: Mesh, terms: Tensor, groups: Sequence[Group]) -> None:
        self.mesh = mesh
        self.terms = terms
        self.group_norms = torch.zeros(len(groups), device=terms.device)
        self._number = {group.name: number for number, group in enumerate(groups)}
        plan = mesh.plan
        # How many ranks hold the same element, by kind of parameter.
        self.copies = {"dense": plan.nodes, "expert": plan.expert_replica, "router": plan.world}

    def reduce(self, gradients: Sequence[tuple[Place, Tensor]]) -> Tensor:
        """The norm, float32 scalar; `terms` become their sums, `group_norms` are filled.

        Args:
            gradients: this rank's parts.
        """
        parts: dict[tuple[str, str], list[Tensor]] = {}
        for place, part in gradients:
            if part.numel():
                parts.setdefault((place.kind, place.group.name), []).append(part)
        squares: list[list[Tensor]] = [[] for _ in self._number]
        for (kind, group), these in parts.items():
            # On a CPU float32 squares are added up one after the other: an error of 1e-4 over
            # millions of elements.
            wide = torch.float64 if these[0].device.type == "cpu" else None
            norms = torch.stack(torch._foreach_norm(these, 2, dtype=wide)).double()
            square = norms.square().sum().to(self.terms.device) / self.copies[kind]
            squares[self._number[group]].append(square)
        none = torch.zeros((), dtype=torch.float64, device=self.terms.device)
        sums = torch.cat([torch.stack([sum(s, none) for s in squares]), self.terms.double()])
        if self.mesh.plan.world > 1:
            # Every rank gets the same bits, so all clip and skip alike.
            dist.all_reduce(sums)
        count = len(squares)
        self.terms.copy_(sums[count:])
        self.group_norms.copy_(sums[:count].sqrt())
        return sums[:count].sum().sqrt().float()

    def all_finite(self, buffers: Sequence[Tensor]) -> Tensor:
        """Whether these are finite on all ranks: a boolean scalar on the device."""
        # A sum is finite only if every element is (or it overflows, as bad).
        sums = torch.stack([buffer.sum().to(self.terms.device) for buffer in buffers])
        bad = (~torch.isfinite(sums)).any().float()
        if self.mesh.plan.world > 1:
            dist.all_reduce(bad)
        return bad == 0


class ShardedAdamW:
    """AdamW (arXiv 1711.05101) over flat float32 parts of parameters, in place.

    `torch.optim.AdamW` in its fused form takes `grad_scale` and `found_inf` as tensors, so clipping
    and skipping need no host sync.
    """

    def __init__(self, parts: Mapping[str, tuple[Tensor, Place]], settings: AdamSettings) -> None:
        """
        Args:
            parts: parameter name → flat float32 view of what this rank holds, and its place.
        """
        self.parts = {name: nn.Parameter(flat) for name, (flat, _) in parts.items()}
        self.places = {name: place for name, (_, place) in parts.items()}
        devices: dict[torch.device, dict[tuple, list[nn.Parameter]]] = {}
        for name, part in self.parts.items():
            place = self.places[name]
            group, router = place.group, place.kind == "router"
            key = (group.lr_multiplier, group.weight_decay, router)
            devices.setdefault(part.device, {}).setdefault(key, []).append(part)
        # One for each device, as the scale and the flag must be read where the parts are.
        self.adamws = {
            device: torch.optim.AdamW(
                [
                    {"params": members, "weight_decay": decay, "multiplier": mult, "router": router}
                    for (mult, decay, router), members in rows.items()
                ],
                betas=settings.betas,
                eps=settings.eps,
                fused=True,
            )
            for device, rows in devices.items()
        }
        for part in self.parts.values():  # now, as a checkpoint is loaded into them
            self.adamws[part.device].state[part] = {
                "step": torch.zeros((), device=part.device),
                "exp_avg": torch.zeros_like(part),
                "exp_avg_sq": torch.zeros_like(part),
            }

    def _state(self, part: nn.Parameter) -> dict[str, Tensor]:
        return self.adamws[part.device].state[part]

    def step(self, lr: float, scale: Tensor, skip: Tensor, routers_frozen: bool = False) -> None:
        """Update from the parts' `.grad`, divided by `scale`, unless `skip` is 1."""
        for device, adamw in self.adamws.items():
            adamw.grad_scale, adamw.found_inf = scale.to(device), skip.to(device)
            for group in adamw.param_groups:
                frozen = routers_frozen and group["router"]
                group["lr"] = 0.0 if frozen else lr * group["multiplier"]
            adamw.step()

    def tensors(self, starts: Mapping[str, int]) -> dict[str, FlatShard]:
        """Weights and moments; `starts`: first element of each part in its logical tensor."""
        found = {}
        for name, part in self.parts.items():
            place, state = self.places[name], self._state(part)
            total = torch.Size(place.shape).numel()
            for kind, flat in (
                ("weights", part.detach()),
                ("exp_avg", state["exp_avg"]),
                ("exp_avg_sq", state["exp_avg_sq"]),
            ):
                found[f"{kind}/{place.name}"] = FlatShard(flat, starts[name], total)
        return found

    def counter(self) -> Tensor:
        """Updates applied so far: a scalar that stands for all parts'."""
        return self._state(next(iter(self.parts.values())))["step"]

    def spread_counter(self) -> None:
        """Give all parts the count of the first, which a checkpoint has filled."""
        counter = self.counter()
        for part in self.parts.values():
            step = self._state(part)["step"]
            if step is not counter:
                step.copy_(counter)

    def buffers(self) -> list[Tensor]:
        """All weights and moments."""
        found = []
        for part in self.parts.values():
            state = self._state(part)
            found += [part.detach(), state["exp_avg"], state["exp_avg_sq"]]
        return found


def check_replicas(engine: Engine, mesh: Mesh) -> None:
    """Refuse to train when ranks that should hold the same weights hold different ones.

    They were drawn from the same seed or read from the same files, so a difference is a fault
    (another library version on one host, a damaged file) that summing gradients would hide.

    Raises:
        ValueError: which ranks differ from the first of their group, in what.
    """
    kinds = {place.name: place.kind for place in engine.places.values()}
    groups = {
        "dense": mesh.group("replica"),
        "expert": mesh.group("expert_replica"),
        "router": dist.group.WORLD,
    }
    parts: dict[str, list[Tensor]] = {kind: [] for kind in groups}
    for name, shard in engine.tensors().items():
        kind, _, logical = name.partition("/")
        if kind == "weights":
            parts[kinds[logical]].append(shard.local)
    wrong = []
    for kind, group in groups.items():
        mine = torch.tensor([fingerprint(parts[kind])], device=mesh.device)
        all_ = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(all_, mine, group=group)
        ranks = dist.get_process_group_ranks(group)
        different = [r for r, value in zip(ranks, all_) if value.item() != all_[0].item()]
        if different:
            wrong.append(f"{kind} weights of ranks {different} differ from rank {ranks[0]}'s")
    # All ranks stop together: a rank whose own group agrees would go on and wait for the others.
    told: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, wrong)
    first = next((text for texts in told for text in texts), None)
    if first is not None:
        raise ParallelError(
            f"{first}; check that all hosts have the same library versions and see the same files"
        )
