#!/usr/bin/env python3
"""A model on paper: what a step costs on 8 to 1,024 GPUs, and which placement of experts wins.

    python scripts/scaling.py configs/olmoe_1b_7b.yaml
    python scripts/scaling.py configs/qwen3_30b_a3b.yaml --tokens 8192 --between 25

The model is training/estimate/cost.py, which also chooses `parallel.expert` where a config leaves
it open. docs/scaling.md says which of the numbers were measured and what follows.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.config import ModelConfig
from parallel.mesh import MeshPlan, plan_mesh
from training.config.build import ConfigError, fail, load_config
from training.config.load import expand_home
from training.estimate.cost import Machine, parameters, step_cost


def layouts(given: argparse.Namespace, model: ModelConfig) -> list[MeshPlan]:
    """A plan for each row of the table.

    Raises:
        ConfigError: numbers that give no row, or other nodes than asked for.
    """
    single = ("per_node", "tokens", "micro_batches")
    numbers = [(name, getattr(given, name)) for name in single]
    numbers += [("gpus", n) for n in given.gpus] + [("expert", n) for n in given.expert or ()]
    for name, number in numbers:
        if number < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {number} must be at least 1")
    found = []
    for gpus in given.gpus:
        if gpus > given.per_node and gpus % given.per_node:
            raise ConfigError(
                f"--gpus {gpus} is more than --per-node {given.per_node}, so it must be a multiple"
            )
        nodes = max(1, gpus // given.per_node)
        for placement in ("across_nodes", "within_node")[nodes == 1 :]:
            whole = plan_mesh(gpus, nodes, 1, placement, model.num_experts)
            degrees = [d for d in whole.degrees if given.expert is None or d in given.expert]
            found += [replace(whole, expert=degree) for degree in degrees]
    if not found:
        raise ConfigError(
            f"--expert {' '.join(map(str, given.expert))}: no layout of --gpus "
            f"{' '.join(map(str, given.gpus))} splits {model.num_experts} experts so"
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=expand_home)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node (8)")
    parser.add_argument("--expert", type=int, nargs="+", help="degrees to show (all)")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=16384, help="of a GPU's micro-batch (16384)")
    parser.add_argument("--micro-batches", type=int, default=1, help="in a step (1)")
    parser.add_argument("--tflops", type=float, default=400, help="of a GPU in a step (400)")
    parser.add_argument("--inside", type=float, default=270, help="GB/s of a GPU in a node (270)")
    parser.add_argument("--between", type=float, default=40, help="GB/s between nodes (40)")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(given.config, given.overrides)
        model = config.model.config
        plans = layouts(given, model)
    except ConfigError as error:
        fail(error)
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
    for plan in plans:
        cost = step_cost(
            model, plan, machine, given.tokens, config.data.seq_len, given.micro_batches, counts
        )
        print(
            f"| {plan.world} | {plan.placement} | {plan.expert} | {plan.expert_replica} "
            f"| {1e3 * cost.compute:.0f} ms | {1e3 * cost.inside:.0f} "
            f"| {1e3 * cost.between:.0f} | {1e3 * cost.tokens:.0f} "
            f"| {cost.compute / cost.best:.0%} | {cost.compute / cost.worst:.0%} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
