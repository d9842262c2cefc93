"""A model on paper: what a step costs in a layout, and which degree of expert parallelism wins.

Bytes follow from the layout and are exact for uniform routing; seconds are bytes over a bandwidth
and FLOPs over a speed. A step takes at least as long as the busiest of arithmetic, links inside a
node and links between nodes ("all hidden"), and at most all of them one after the other ("none
hidden"). docs/scaling.md says what follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb

from models.config import ModelConfig
from models.errors import UserError
from parallel.mesh import MeshPlan, plan_mesh
from training.estimate.counts import held, parameter_counts
from training.estimate.flops import flops_per_token

# Weights, gradients and both moments of a parameter in float32, as the engines shard them.
STATE_BYTES = 16
# Part of a GPU that they may take: the rest is for activations and gathered blocks.
STATE_SHARE = 0.6


@dataclass(frozen=True)
class Machine:
    """One GPU and its links; bandwidths are what it sends, in bytes a second.

    The default is an H200 with a 400 Gbit/s card of its own; docs/scaling.md says which of the
    numbers were measured.
    """

    flops: float = 400e12
    intra_node: float = 270e9
    inter_node: float = 40e9
    device: float | None = None
    """Measured: seconds that the GPU computes for a step of one micro-batch; takes the place of
    FLOPs over a speed."""
    host: float = 0.0
    """Measured: seconds that the host needs to queue that step."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one step of one micro-batch."""

    compute: float
    intra_node: float
    """Links inside a node: gathering and reducing weights, and tokens within_node."""
    inter_node: float
    """Links between nodes: gradients of replicas, and tokens across_nodes."""
    tokens: float
    """Of those, the tokens' share."""
    host: float = 0.0
    """Queueing the step, beside all of them."""

    @property
    def best(self) -> float:
        """All hidden: the busiest of them."""
        return max(self.compute, self.intra_node, self.inter_node, self.host)

    @property
    def worst(self) -> float:
        """None hidden: device and links one after the other."""
        return max(self.compute + self.intra_node + self.inter_node, self.host)


def copies(experts: int, k: int, ranks: int) -> float:
    """Other ranks that hold some of a token's K experts, on average over uniform choices."""
    mine = experts // ranks
    untouched = comb(experts - mine, k) / comb(experts, k)
    return (ranks - 1) * (1 - untouched)


def step_cost(
    model: ModelConfig,
    plan: MeshPlan,
    machine: Machine,
    tokens: int,
    seq_len: int,
    micro_batches: int = 1,
    counts: Mapping[str, int] | None = None,
) -> Cost:
    """The cost of a step of `micro_batches` of `tokens` tokens on each rank.

    Weights are gathered in bf16 for the forward and again for the backward pass and their gradients
    reduced in float32, for each micro-batch; replicas are summed in float32 once a step. Tokens go
    out and back in bf16, in both passes, once to each rank that has experts for them.
    """
    counts = counts or parameter_counts(model)
    expert, router = counts.get("expert", 0), counts.get("router", 0)
    dense = sum(counts.values()) - expert - router
    intra = inter = 0.0

    def shared(count: float, ranks: int) -> float:
        """Bytes that a rank sends to gather twice and reduce once what `ranks` of them share."""
        return micro_batches * count * (ranks - 1) / ranks * (2 + 2 + 4)

    def summed(count: float, ranks: int) -> float:
        """Bytes that a rank sends to sum its shard over replicas."""
        return 4 * count * 2 * (ranks - 1) / ranks

    intra += shared(dense, plan.local)
    intra += shared(expert / plan.expert, plan.expert_shard)
    inter += summed(dense / plan.local, plan.nodes)
    inter += summed(expert / plan.expert / plan.expert_shard, plan.expert_replica)
    inter += summed(router, plan.world)
    rows = 0.0
    if model.moe_layers:
        rows = copies(model.num_experts, model.num_experts_per_tok, plan.expert)
    sent = 4 * len(model.moe_layers) * micro_batches * tokens * rows * 2 * model.hidden_size
    if plan.placement == "across_nodes":
        inter, bandwidth = inter + sent, machine.inter_node
    else:
        intra, bandwidth = intra + sent, machine.intra_node
    flops = flops_per_token(model, seq_len) * tokens * micro_batches
    return Cost(
        compute=micro_batches * machine.device if machine.device else flops / machine.flops,
        intra_node=intra / machine.intra_node,
        inter_node=inter / machine.inter_node,
        tokens=sent / bandwidth,
        host=micro_batches * machine.host,
    )


def layouts(gpus: int, per_node: int, experts: int | None) -> list[MeshPlan]:
    """Every way to split so many experts, or a model without any: by placement, then by degree.

    Raises:
        UserError: the GPUs do not fill their nodes.
    """
    if gpus > per_node and gpus % per_node:
        raise UserError(f"{gpus} GPUs are no multiple of the {per_node} in each node")
    nodes = max(1, gpus // per_node)
    placements = ["within_node"] if nodes == 1 else ["across_nodes", "within_node"]
    whole = [plan_mesh(gpus, nodes, 1, placement, experts) for placement in placements]
    found = [replace(plan, expert=degree) for plan in whole for degree in plan.degrees]
    return [plan for plan in found if plan.expert > 1 or plan.placement == placements[0]]


def fastest(
    plans: Sequence[MeshPlan],
    model: ModelConfig,
    tokens: int,
    seq_len: int,
    micro_batches: int = 1,
    memory: int | None = None,
) -> MeshPlan:
    """The plan whose step takes least, in the middle between all and nothing hidden.

    Splitting experts further needs less memory and gathers fewer weights, but sends more tokens,
    and from a few ranks on those cost more than they save. Where the fastest does not fit, the next
    one that does is taken, and where none fits the one with least memory.

    Args:
        tokens: of a rank's micro-batch.
        micro_batches: of a step.
        memory: bytes of a GPU; None does not ask whether states fit.
    """
    counts = parameter_counts(model)
    sizes = [STATE_BYTES * held(counts, plan) for plan in plans]
    limit = max(min(sizes), STATE_SHARE * memory) if memory is not None else max(sizes)
    fitting = [plan for plan, size in zip(plans, sizes) if size <= limit]

    def middle(plan: MeshPlan) -> float:
        cost = step_cost(model, plan, Machine(), tokens, seq_len, micro_batches, counts)
        return cost.best + cost.worst

    return min(fitting, key=middle)
