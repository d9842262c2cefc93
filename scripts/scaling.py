#!/usr/bin/env python3
"""A model on paper: what a step costs on 8 to 1,024 GPUs, and which placement of experts wins.

    python scripts/scaling.py configs/olmoe_1b_7b.yaml
    python scripts/scaling.py configs/qwen3_30b_a3b.yaml --tokens 8192 --between 25

Bytes follow from the layout and are exact for uniform routing; seconds are bytes over a bandwidth
and FLOPs over a speed. A step takes at least as long as the busiest of arithmetic, links inside a
node and links between nodes ("all hidden"), and at most all of them one after the other ("none
hidden"). docs/scaling.md says which of the numbers were measured and what follows.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from math import comb
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from parallel.mesh import MeshPlan, plan_mesh
from training.config import ConfigError, fail, load_config
from training.config_load import expand_home
from training.flops import flops_per_token


@dataclass(frozen=True)
class Machine:
    """One GPU and its links; bandwidths are what it sends, in bytes a second."""

    flops: float
    inside: float
    between: float


@dataclass(frozen=True)
class Cost:
    """Seconds of one step of one micro-batch."""

    compute: float
    inside: float
    """Links inside a node: gathering and reducing weights, and tokens within_node."""
    between: float
    """Links between nodes: gradients of replicas, and tokens across_nodes."""
    tokens: float
    """Of those, the tokens' share."""

    @property
    def best(self) -> float:
        return max(self.compute, self.inside, self.between)

    @property
    def worst(self) -> float:
        return self.compute + self.inside + self.between


def copies(experts: int, k: int, ranks: int) -> float:
    """Other ranks that hold some of a token's K experts, on average over uniform choices."""
    mine = experts // ranks
    untouched = comb(experts - mine, k) / comb(experts, k)
    return (ranks - 1) * (1 - untouched)


def parameters(model: ModelConfig) -> dict[str, int]:
    """Number of them by dense, expert and router."""
    meta = build_model(model, device="meta")
    kinds = parameter_kinds(meta)
    found = {"dense": 0, "expert": 0, "router": 0}
    for name, parameter in meta.named_parameters():
        kind = kinds[name] if kinds[name] in ("expert", "router") else "dense"
        found[kind] += parameter.numel()
    return found


def step_cost(
    model: ModelConfig,
    plan: MeshPlan,
    machine: Machine,
    tokens: int,
    seq_len: int,
    micro_batches: int = 1,
    counts: dict[str, int] | None = None,
) -> Cost:
    """The cost of a step of `micro_batches` of `tokens` tokens on each rank.

    Weights are gathered in bf16 for the forward and again for the backward pass and their gradients
    reduced in float32, for each micro-batch; replicas are summed in float32 once a step. Tokens go
    out and back in bf16, in both passes, once to each rank that has experts for them.
    """
    counts = counts or parameters(model)
    inside = between = 0.0

    def shared(count: float, ranks: int) -> float:
        """Bytes that a rank sends to gather twice and reduce once what `ranks` of them share."""
        return micro_batches * count * (ranks - 1) / ranks * (2 + 2 + 4)

    def summed(count: float, ranks: int) -> float:
        """Bytes that a rank sends to sum its shard over replicas."""
        return 4 * count * 2 * (ranks - 1) / ranks

    inside += shared(counts["dense"], plan.local)
    inside += shared(counts["expert"] / plan.expert, plan.expert_shard)
    between += summed(counts["dense"] / plan.local, plan.nodes)
    held = counts["expert"] / plan.expert / plan.expert_shard
    between += summed(held, plan.expert_replica)
    between += summed(counts["router"], plan.world)
    rows = copies(model.num_experts, model.num_experts_per_tok, plan.expert)
    sent = 4 * len(model.moe_layers) * micro_batches * tokens * rows * 2 * model.hidden_size
    if plan.placement == "across_nodes":
        between += sent
    else:
        inside += sent
    wire = machine.between if plan.placement == "across_nodes" else machine.inside
    flops = flops_per_token(model, seq_len) * tokens * micro_batches
    return Cost(
        flops / machine.flops, inside / machine.inside, between / machine.between, sent / wire
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=expand_home)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node (8)")
    parser.add_argument("--expert", type=int, nargs="*", help="degrees to show (the largest)")
    parser.add_argument("--gpus", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=16384, help="of a GPU's micro-batch (16384)")
    parser.add_argument("--micro-batches", type=int, default=1, help="in a step (1)")
    parser.add_argument("--tflops", type=float, default=400, help="of a GPU in a step (400)")
    parser.add_argument("--inside", type=float, default=270, help="GB/s of a GPU in a node (270)")
    parser.add_argument("--between", type=float, default=40, help="GB/s between nodes (40)")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(given.config, given.overrides)
    except ConfigError as error:
        fail(error)
    model = config.model.config
    counts = parameters(model)
    machine = Machine(given.tflops * 1e12, given.inside * 1e9, given.between * 1e9)
    print(
        f"{given.micro_batches} micro-batch(es) of {given.tokens} tokens a GPU, {given.tflops:g} "
        f"TFLOP/s, {given.inside:g} GB/s in a node of {given.per_node}, {given.between:g} between"
    )
    print(
        "| GPUs | experts | split over | copies | compute | in node | between | of it tokens "
        "| all hidden | none hidden |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for gpus in given.gpus:
        nodes = max(1, gpus // given.per_node)
        for placement in ("across_nodes", "within_node"):
            if placement == "across_nodes" and nodes == 1:
                continue
            for degree in given.expert or [None]:
                try:
                    plan = plan_mesh(gpus, nodes, degree, placement, model.num_experts)
                except ValueError:
                    continue  # a degree that this number of nodes does not have
                cost = step_cost(
                    model,
                    plan,
                    machine,
                    given.tokens,
                    config.data.seq_len,
                    given.micro_batches,
                    counts,
                )
                print(
                    f"| {gpus} | {placement} | {plan.expert} | {plan.expert_replica} "
                    f"| {1e3 * cost.compute:.0f} ms | {1e3 * cost.inside:.0f} "
                    f"| {1e3 * cost.between:.0f} | {1e3 * cost.tokens:.0f} "
                    f"| {cost.compute / cost.best:.0%} | {cost.compute / cost.worst:.0%} |"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
