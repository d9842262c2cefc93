"""What engines share that split a model over processes: which part is where, norm, shards, checks.

The parts of a parameter that the ranks of its sharding group hold are equally long, one behind the
other, but for the last ones. Replicas hold the same parts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe import Router
from parallel.config import AllToAll
from parallel.engines.base import Engine, Outcome, Values, any_not_finite
from parallel.engines.optimizer import DENSE, EXPERT, ROUTER, Group, Kind, Optimizer, Piece
from parallel.engines.rounding import buffer_seed
from parallel.expert_parallel import Exchanging, ExpertRange, split_experts
from parallel.flat_shard import FlatShard
from parallel.mesh import Mesh
from parallel.offload import Offload
from parallel.world import ParallelError, fingerprint

# The groups of a mesh that a kind of parameter is sharded over, and that hold the same shard.
SHARD_GROUP = {DENSE: "shard", EXPERT: "expert_shard"}
REPLICA_GROUP = {DENSE: "replica", EXPERT: "expert_replica"}


@dataclass(frozen=True)
class Sharding:
    """How a model is shared."""

    mesh: Mesh
    units: Sequence[nn.Module] = ()
    """Modules whose weights are gathered together, in the order of the forward: the blocks, and
    embedding and head if they share no weight."""
    exchange: Exchanging = field(default_factory=AllToAll)
    """How tokens travel."""
    offload: Offload = field(default_factory=Offload)
    """What lies outside of the device."""
    dtype: torch.dtype = torch.float32
    """Of weights and activations in forward and backward; gradients are reduced in float32
    whatever it is."""
    whole_blocks: bool = False
    """Whether blocks will be compiled as a whole, experts included (fsdp2 alone)."""


class Place(NamedTuple):
    """A parameter of the split model, and what part of which logical tensor it is."""

    name: str
    shape: tuple[int, ...]
    """Of the logical tensor."""
    start: int
    """First element of the parameter in it, flattened."""
    count: int
    """Elements of the parameter."""
    kind: Kind
    group: int
    """Number of the optimizer's group."""

    @property
    def total(self) -> int:
        """Elements of the logical tensor."""
        return torch.Size(self.shape).numel()

    def fill(self, piece: Tensor, first: int, values: Values) -> None:
        """Fill a flat piece that begins at element `first` of the logical tensor."""
        if piece.numel() == 0:
            return
        experts = None
        if self.kind == EXPERT:
            # The experts that the piece touches; the first and the last perhaps in part.
            size = self.shape[1] * self.shape[2]
            experts = range(first // size, -(-(first + piece.numel()) // size))
            first -= experts.start * size
        whole = values(self.name, experts).reshape(-1)
        piece.copy_(whole[first : first + piece.numel()])


def prepare(
    model: nn.Module, groups: Sequence[Group], sharding: Sharding, flat_experts: bool
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
    group_of = {name: number for number, group in enumerate(groups) for name in group.parameters}
    ranges = split_experts(
        model, sharding.mesh, sharding.exchange, flat_experts, sharding.whole_blocks
    )
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
        kind = EXPERT if name in ranges else ROUTER if name in routers else DENSE
        count = parameter.numel()
        number = group_of[place.name]
        places[name] = Place(place.name, place.shape, place.start, count, kind, number)
    return places


class ShardedEngine(Engine):
    """See `parallel.engines.base.Engine`. A child splits the model, and holds all parameters.

    Attributes:
        places: parameter of the split model → what it is.
        pieces: the same → what this rank holds of it.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        optimizer: Optimizer,
        sharding: Sharding,
        places: dict[str, Place],
        *,
        num_terms: int,
        seed: int,
    ) -> None:
        super().__init__(groups, optimizer, sharding.mesh.device, num_terms)
        self.mesh, self.places = sharding.mesh, places
        self.on_host = sharding.offload.state != "none"
        """Whether gradients, master weights and states are outside of the device."""
        self.pieces: dict[str, Piece] = {}
        self._seed = seed
        self._router_grads = torch.zeros(0)
        self._routers_summed = False

    # --- building ---------------------------------------------------------------------------------

    def named(self, *kinds: str) -> list[str]:
        """Names of the parameters of some kinds."""
        return [name for name, place in self.places.items() if place.kind in kinds]

    def new_states(self, number: int, weight: Tensor) -> dict[str, Tensor]:
        """The states of weights of a group, 0."""
        group = self.groups[number]
        dtypes = self.rule.of(group).states(group)
        return {name: torch.zeros_like(weight, dtype=dtype) for name, dtype in dtypes.items()}

    def hold(
        self, name: str, weight: Tensor, states: dict[str, Tensor], start: int, per_rank: int
    ) -> None:
        """This rank's part of a parameter.

        Args:
            start: its first element in the parameter.
            per_rank: elements of every rank's part but the last ones'.
        """
        place = self.places[name]
        matrices = self.groups[place.group].matrices.get(place.name)
        ranks = None if place.kind == ROUTER else self.mesh.group(SHARD_GROUP[place.kind])
        if ranks is not None and dist.get_world_size(ranks) == 1:
            ranks = None
        self.pieces[name] = Piece(
            weight,
            weight.new_empty(0),  # before the first step
            states,
            seed=buffer_seed(self._seed, crc32(place.name.encode())),
            first=place.start + start,
            start=start,
            matrices=None if matrices is None else matrices.within(place.start, place.count),
            per_rank=per_rank,
            ranks=ranks,
            device=self.device,
        )

    def hold_routers(self, routers: dict[str, nn.Parameter]) -> None:
        """The routers, whole. Their gradients lie together, so that one all-reduce sums them."""
        sizes = [router.numel() for router in routers.values()]
        dtype = next((router.dtype for router in routers.values()), torch.float32)
        self._router_grads = torch.zeros(sum(sizes), dtype=dtype, device=self.device)
        for (name, router), grad in zip(routers.items(), self._router_grads.split(sizes)):
            weight = router.detach().view(-1)
            router.grad = grad.view_as(router)
            states = self.new_states(self.places[name].group, weight)
            self.hold(name, weight, states, 0, router.numel())
            self.pieces[name].gradient = grad

    # --- a step -----------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        self._router_grads.zero_()
        self._routers_summed = False
        self.terms.zero_()

    @abstractmethod
    def find_gradients(self) -> None:
        """Give the pieces of all but routers the gradients that this step has summed."""

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        if self.mesh.plan.world > 1 and self._router_grads.numel() and not self._routers_summed:
            dist.all_reduce(self._router_grads)
        self._routers_summed = True
        self.find_gradients()

    def gradients(self) -> dict[str, FlatShard]:
        self._finish_gradients()
        return {
            place.name: FlatShard(
                self.pieces[name].gradient, place.start + self.pieces[name].start, place.total
            )
            for name, place in self.places.items()
        }

    def judge(self) -> Outcome:
        """One all-reduce of the squared norms of all gradients and of the loss terms, and what
        follows from them; `terms` become their sums, `group_norms` are filled."""
        self._finish_gradients()
        parts: dict[tuple[str, int], list[Tensor]] = {}
        for name, place in self.places.items():
            if self.pieces[name].gradient.numel():
                parts.setdefault((place.kind, place.group), []).append(self.pieces[name].gradient)
        plan = self.mesh.plan
        # How many ranks hold the same element, by kind of parameter.
        copies = {DENSE: plan.nodes, EXPERT: plan.expert_replica, ROUTER: plan.world}
        squares: list[list[Tensor]] = [[] for _ in self.groups]
        for (kind, group), these in parts.items():
            # On a CPU float32 squares are added up one after the other: an error of 1e-4 over
            # millions of elements.
            wide = torch.float64 if these[0].device.type == "cpu" else None
            norms = torch.stack(torch._foreach_norm(these, 2, dtype=wide)).double()
            squares[group].append(norms.square().sum().to(self.device) / copies[kind])
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        sums = torch.cat([torch.stack([sum(s, none) for s in squares]), self.terms.double()])
        if plan.world > 1:
            # Every rank gets the same bits, so all clip and skip alike.
            dist.all_reduce(sums)
        count = len(squares)
        self.terms.copy_(sums[count:])
        self.group_norms.copy_(sums[:count].sqrt())
        return self._judge(sums[:count].sum().sqrt().float())

    def apply(self, names: Sequence[str]) -> None:
        """Update the pieces of some parameters."""
        rows: dict[tuple[int, torch.device], list[Piece]] = {}
        for name in names:
            piece = self.pieces[name]
            rows.setdefault((self.places[name].group, piece.weight.device), []).append(piece)
        for (number, _), pieces in rows.items():
            self._apply(number, pieces)

    # --- state ------------------------------------------------------------------------------------

    def parts(self) -> dict[str, FlatShard]:
        found = {}
        for name, place in self.places.items():
            piece = self.pieces[name]
            for kind, flat in {"weights": piece.weight, **piece.states}.items():
                found[f"{kind}/{place.name}"] = FlatShard(
                    flat, place.start + piece.start, place.total
                )
        return found

    def shapes(self) -> dict[str, list[int]]:
        return {place.name: list(place.shape) for place in self.places.values()}

    @torch.no_grad()
    def fill(self, values: Values) -> None:
        for name, place in self.places.items():
            piece = self.pieces[name]
            place.fill(piece.weight, place.start + piece.start, values)
        self.loaded()

    def all_finite(self) -> Tensor:
        buffers = [b for p in self.pieces.values() for b in (p.weight, *p.states.values())]
        bad = any_not_finite(buffers, self.device).float()
        if self.mesh.plan.world > 1:
            dist.all_reduce(bad)
        return bad == 0

    def check_replicas(self) -> None:
        # They were drawn from the same seed or read from the same files, so a difference is a fault
        # (another library version on one host, a damaged file) that summed gradients would hide.
        groups = {kind: self.mesh.group(name) for kind, name in REPLICA_GROUP.items()}
        groups[ROUTER] = dist.group.WORLD
        wrong = []
        for kind, group in groups.items():
            parts = [self.pieces[name].weight for name in self.named(kind)]
            mine = torch.tensor([fingerprint(parts)], device=self.device)
            all_ = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(all_, mine, group=group)
            ranks = dist.get_process_group_ranks(group)
            different = [r for r, value in zip(ranks, all_) if value.item() != all_[0].item()]
            if different:
                wrong.append(f"{kind} weights of ranks {different} differ from rank {ranks[0]}'s")
        # All ranks stop together: one whose own group agrees would go on and wait for the others.
        told: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, wrong)
        first = next((text for texts in told for text in texts), None)
        if first is not None:
            raise ParallelError(
                f"{first}; check that all hosts have the same library versions and see the same "
                "files"
            )
