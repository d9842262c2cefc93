"""Optimizers of one's own: a rule in one file trains in one process and sharded, and resumes."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from parallel.engines.matrices import on_matrices
from parallel.mesh import Mesh, build_mesh, plan_mesh
from tests import ideas
from tests.distributed import tiny
from tests.distributed.launch import run
from training.optim.adamw import AdamW
from training.optim.config import OptimConfig

CPU = torch.device("cpu")


class Normalised(OptimConfig):
    """Momentum divided by the norm of its whole matrix; AdamW for what is no matrix."""

    granularity = "matrices"
    kind: Literal["normalised"] = "normalised"

    def of(self, group):
        return self if group.matrices.keys() == group.parameters.keys() else AdamW()

    def states(self, group):
        return {"momentum": self.state_dtype(group)}

    def update(self, group, pieces, scalars):
        momenta = [0.9 * p.states["momentum"] + p.gradient / scalars.divisor for p in pieces]
        for piece, momentum, step in zip(pieces, momenta, on_matrices(pieces, momenta, _unit)):
            piece.store(scalars, piece.weight - scalars.lr * step, momentum=momentum)


def _unit(x_BMN):
    return x_BMN / (x_BMN.norm(dim=(-2, -1), keepdim=True) + 1e-12)


RULES = {
    "lion": ideas.own("An optimizer", "Lion")(clip_norm=tiny.CLIP, spike_factor=100.0),
    "matrices": Normalised(clip_norm=tiny.CLIP, spike_factor=100.0),
}
STEPS = 20


def _engine(name: str, rule: Any, config, world: int):
    """Two nodes of one rank: experts are split. One node of two: all matrices are cut in parts."""
    if name == "local":
        mesh = Mesh(plan_mesh(1, num_experts=8), CPU)
    else:
        expert = 2 if name == "nodes" else 1
        mesh = build_mesh(plan_mesh(world, expert, expert, num_experts=8), CPU, timeout_s=100)
    kind = "local" if name == "local" else "fsdp2"
    model = tiny.build(config)
    groups = tiny.groups_of(model, by_matrix=rule.granularity == "matrices")
    return tiny.engine_of(kind, model, mesh, groups, rule)


def _trained(name: str, rule: Any, stop_at: int | None = None) -> tuple[Any, list[dict]]:
    """After `STEPS` steps, the third of them skipped; with `stop_at` in two engines, of which the
    second has nothing but what the first would save."""
    config, world, rank = tiny.config(), 1, 0
    if name != "local":
        world, rank = dist.get_world_size(), dist.get_rank()
    engine, seen = _engine(name, rule, config, world), []
    for first, last in ((0, stop_at or STEPS), (stop_at or STEPS, STEPS)):
        if first and first < last:
            saved = tiny.copies(engine.tensors())
            engine = _engine(name, rule, config, world)
            for key, value in tiny.copies(saved).items():
                into = engine.tensors()[key]
                getattr(into, "local", into).copy_(getattr(value, "local", value))
            engine.loaded()
        seen += tiny.train_engine(
            engine, config, rank, world, last - first, poisoned=2, first=first
        )
    return engine, seen


def _compare() -> dict[str, str]:
    found = {}
    for kind, rule in RULES.items():
        want, numbers = _trained("local", rule)
        for name in ("nodes", "shards"):
            engine, got = _trained(name, rule)
            again, _ = _trained(name, rule, stop_at=7)
            key = f"{kind} {name}"
            found[key] = tiny.numbers_differ(got, numbers, 1e-4)
            found[key] += tiny.difference(engine.tensors(), want.tensors(), 1e-3)
            whole = {n: getattr(v, "local", v) for n, v in engine.tensors().items()}
            mine = {n: getattr(v, "local", v) for n, v in again.tensors().items()}
            found[key] += tiny.difference(mine, whole, 0.0)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    return run(2, _compare)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("layout", ["nodes", "shards"])
def test_a_rule_of_ones_own_trains_alike_and_resumes_bit_for_bit(results, kind, layout):
    assert [result[f"{kind} {layout}"] for result in results] == ["", ""]


@pytest.mark.parametrize("kind", RULES)
def test_one_process_resumes_bit_for_bit(kind):
    whole, _ = _trained("local", RULES[kind])
    again, _ = _trained("local", RULES[kind], stop_at=7)
    assert tiny.difference(again.tensors(), whole.tensors(), 0.0) == ""
    states = {name.partition("/")[0] for name in whole.tensors() if "layers.1.moe.w1" in name}
    assert states == {"weights", "momentum"}
