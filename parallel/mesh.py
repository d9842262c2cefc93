"""Who holds what: a mesh of (node × local), and the process groups that follow from it.

    rank = node * L + local                     M nodes of L local ranks

    shard            ranks of one node                   dense weights are sharded over it (ZeRO-3)
    replica          same place on every node            dense gradients are summed over it
    expert           ranks that hold different experts   tokens travel in it (expert parallelism)
    expert_shard     ranks that share the same experts   these are sharded over it (ZeRO-3)
    expert_replica   ranks that hold the same shard      expert gradients are summed over it

`expert_placement=across_nodes` (the default) splits experts over nodes: an expert group has one
rank of each of `expert` consecutive nodes, and a node holds all its experts on its local ranks.
With fewer expert ranks than nodes the experts are replicated, once for each block of nodes.
`within_node` splits them over neighbours inside a node, and every node holds all of them.

Megatron-LM and torchtitan put expert groups inside the node by default. Across nodes trades weight
gathers on the fast links for tokens on the slow ones; it pays when tokens are sent once per node
(`all_to_all.py`) and travel while experts compute.

`plan_mesh` is pure and knows no process group, so a config can refuse impossible sizes before
anything starts. `build_mesh` makes the groups, in one fixed order on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.world import ParallelError

PLACEMENTS = ("across_nodes", "within_node")
GROUPS = ("shard", "replica", "expert", "expert_shard", "expert_replica")


@dataclass(frozen=True)
class MeshPlan:
    """Sizes of a layout and the members of its groups. Make it with `plan_mesh`."""

    nodes: int
    local: int
    expert: int = 1
    """Ranks that the experts are split over (the degree of expert parallelism)."""
    placement: str = "across_nodes"
    num_experts: tuple[int, ...] = ()
    """Experts of the model's MoE layers, each number once; empty for a dense model."""

    @property
    def world(self) -> int:
        return self.nodes * self.local

    @property
    def degrees(self) -> list[int]:
        """Degrees of expert parallelism that these nodes, placement and experts allow."""
        limit = self.nodes if self.placement == "across_nodes" else self.local
        if not self.num_experts:
            return [1]
        return [d for d in _divisors(limit) if not any(count % d for count in self.num_experts)]

    @property
    def expert_shard(self) -> int:
        """Ranks that a set of experts is sharded over."""
        return self.local if self.placement == "across_nodes" else self.local // self.expert

    @property
    def expert_replica(self) -> int:
        """Copies of every expert."""
        return self.world // (self.expert * self.expert_shard)

    def key(self, rank: int, group: str) -> tuple[int, ...]:
        """Ranks with equal keys are in the same group of that name."""
        node, local = divmod(rank, self.local)
        if self.placement == "across_nodes":
            block, expert = divmod(node, self.expert)
            shard = local
        else:
            block, shard = node, local // self.expert
            expert = local % self.expert
        return {
            "shard": (node,),
            "replica": (local,),
            "expert": (block, shard),
            "expert_shard": (node, expert),
            "expert_replica": (expert, shard),
        }[group]

    def members(self, group: str) -> list[list[int]]:
        """The world cut into the groups of that name, in order of their lowest rank."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            found.setdefault(self.key(rank, group), []).append(rank)
        return list(found.values())

    def place(self, rank: int, group: str) -> int:
        """Index of a rank inside its group."""
        return next(ranks.index(rank) for ranks in self.members(group) if rank in ranks)

    def placed(self, kind: str) -> str:
        """In a few words, where parameters lie: kind is dense, expert or router."""
        if kind == "router":
            return f"whole on {self.world} ranks"
        if kind == "expert":
            split = f"split over {self.expert}, " if self.expert > 1 else ""
            shards, copies = self.expert_shard, self.expert_replica
        else:
            split, shards, copies = "", self.local, self.nodes
        text = f"{split}sharded {shards}-fold" if shards > 1 or not split else split[:-2]
        return text + (f", {copies} replicas" if copies > 1 else "")

    def describe(self) -> str:
        """One line for the log."""
        text = f"{self.nodes} node(s) × {self.local} local: dense weights sharded {self.local}-fold"
        if self.nodes > 1:
            text += f", {self.nodes} replicas"
        if self.num_experts:
            text += (
                f"; experts split over {self.expert} ({self.placement}), each part sharded "
                f"{self.expert_shard}-fold"
            )
            if self.expert_replica > 1:
                text += f", {self.expert_replica} replicas"
        return text


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def plan_mesh(
    world: int,
    nodes: int | None = None,
    expert: int = 1,
    placement: str = "across_nodes",
    num_experts: int | Sequence[int] | None = None,
    hosts: int = 1,
) -> MeshPlan:
    """The layout for these settings, without starting anything.

    Args:
        world: processes.
        nodes: `parallel.nodes`; None = the number of hosts.
        expert: `parallel.expert`.
        placement: `parallel.expert_placement`.
        num_experts: experts of an MoE layer, or of each when they differ; None = dense model.
        hosts: machines that the processes run on, equally many on each.

    Raises:
        ValueError: sizes that do not fit, with the numbers and what is allowed.
    """
    if isinstance(num_experts, int):
        num_experts = (num_experts,)
    counts = tuple(sorted(set(num_experts or ())))
    if world < 1 or hosts < 1 or world % hosts:
        raise ParallelError(f"{world} processes on {hosts} hosts: every host must run equally many")
    if nodes is None:
        nodes = hosts
    if nodes < 1 or world % nodes:
        raise ParallelError(
            f"parallel.nodes={nodes} does not divide the {world} processes; allowed: "
            f"{_listed([d for d in _divisors(world) if d % hosts == 0])}"
        )
    if nodes % hosts:
        raise ParallelError(
            f"parallel.nodes={nodes} on {hosts} hosts would make a node of ranks of several "
            f"hosts; allowed: {_listed([d for d in _divisors(world) if d % hosts == 0])}"
        )
    if placement not in PLACEMENTS:
        raise ParallelError(
            f"parallel.expert_placement={placement!r} is unknown; allowed: {', '.join(PLACEMENTS)}"
        )
    local = world // nodes
    across = placement == "across_nodes"
    limit = nodes if across else local
    fitting = MeshPlan(nodes, local, 1, placement, counts).degrees
    if expert < 1 or limit % expert:
        what = (
            f"parallel.nodes={nodes}: experts are split over nodes"
            if across
            else f"the {local} ranks of a node"
        )
        other = local if across else nodes
        hint = ""
        if expert > 1 and other % expert == 0:
            hint = f" (or parallel.expert_placement={PLACEMENTS[1 if across else 0]})"
        raise ParallelError(
            f"parallel.expert={expert} does not divide {what}; allowed: {_listed(fitting)}{hint}"
        )
    if expert > 1 and not counts:
        raise ParallelError(f"parallel.expert={expert}, but the model has no experts; allowed: 1")
    for count in counts:
        if count % expert:
            raise ParallelError(
                f"parallel.expert={expert} does not divide num_experts={count}; allowed: "
                f"{_listed(fitting)}"
            )
    return MeshPlan(nodes, local, expert, placement, counts)


@dataclass(frozen=True)
class Mesh:
    """A plan seen from one rank, with its process groups."""

    plan: MeshPlan
    device: torch.device
    rank: int = 0
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """By name, see `GROUPS`; empty in a world of one process."""
    meshes: dict[str, DeviceMesh] = field(default_factory=dict)
    """"dense" and "expert": (replica, shard) meshes over the same groups, as FSDP2 takes them."""

    @property
    def node(self) -> int:
        return self.rank // self.plan.local

    @property
    def local(self) -> int:
        return self.rank % self.plan.local

    def place(self, group: str) -> int:
        """This rank's index in its group of that name."""
        return self.plan.place(self.rank, group)

    def group(self, name: str) -> dist.ProcessGroup | None:
        return self.groups.get(name)

    def local_experts(self, num_experts: int) -> range:
        """The experts, by their number in the whole model, that this rank computes."""
        count = num_experts // self.plan.expert
        first = self.place("expert") * count
        return range(first, first + count)


def build_mesh(plan: MeshPlan, device: torch.device, timeout_s: float = 600.0) -> Mesh:
    """Make the process groups of a plan; all ranks of the default group must call it.

    Groups of the same ranks are still different groups: DeepSpeed's ZeRO-3 tells dense from expert
    buckets by group object.

    Raises:
        ValueError: the plan is for another number of processes.
    """
    if not dist.is_initialized():
        if plan.world != 1:
            raise ValueError(f"the plan needs {plan.world} processes and no process group exists")
        return Mesh(plan, device)
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != plan.world:
        raise ValueError(f"the plan is for {plan.world} processes, {world} are running")
    timeout = timedelta(seconds=timeout_s)
    groups = {}
    for name in GROUPS:
        for ranks in plan.members(name):
            # Every rank makes every group, in this order: a rank that skipped the others' would
            # number its own differently, and the first collective would wait forever.
            group = dist.new_group(ranks, timeout=timeout, group_desc=f"tessera_{name}")
            if rank in ranks:
                groups[name] = group
    meshes = {
        kind: _device_mesh(plan, rank, device.type, [groups[name] for name in names], names)
        for kind, names in (
            ("dense", ("replica", "shard")),
            ("expert", ("expert_replica", "expert_shard")),
        )
    }
    return Mesh(plan, device, rank, groups, meshes)


def _device_mesh(
    plan: MeshPlan,
    rank: int,
    device_type: str,
    groups: list[dist.ProcessGroup],
    names: tuple[str, str],
) -> DeviceMesh:
    """The (replica, shard) mesh that this rank is part of."""
    replicas, shards = names
    mine = next(ranks for ranks in plan.members(replicas) if rank in ranks)
    rows = [next(ranks for ranks in plan.members(shards) if first in ranks) for first in mine]
    return DeviceMesh.from_group(groups, device_type, mesh=torch.tensor(rows), mesh_dim_names=names)
