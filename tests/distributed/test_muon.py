"""Muon on four processes: as one process, whether matrices are whole on a rank or cut over some."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.engines import matrices
from parallel.flat_shard import local_of
from parallel.mesh import Mesh, build_mesh, plan_mesh
from parallel.offload import Offload
from tests.distributed import tiny
from tests.distributed.launch import run
from training.optim.muon import Muon

CPU = torch.device("cpu")
RULE = Muon(clip_norm=tiny.CLIP, spike_factor=100.0)
WORLD, STEPS = 4, 4
# AdamW has the rest; its first steps are nearly signs, so tiny gradients show their rounding.
ADAMW = ("bias", "norm", "embed", "head", "router")


@dataclass(frozen=True)
class Case:
    engine: str = "fsdp2"
    nodes: int = 2
    expert: int = 2
    experts: int = 8
    offload: Offload = field(default_factory=Offload)
    stops: bool = False


CASES = {
    "2 nodes of 2": Case(),
    "dense cut over 4": Case(nodes=1, expert=1),
    "experts cut too": Case(nodes=1, expert=1, experts=3, stops=True),
    "deepspeed, 2 nodes of 2": Case("deepspeed", stops=True),
    "deepspeed, experts cut too": Case("deepspeed", nodes=1, expert=1, experts=3),
    "deepspeed, in files": Case("deepspeed", offload=Offload("nvme", path="@")),
}
if importlib.util.find_spec("deepspeed") is None:
    CASES = {name: case for name, case in CASES.items() if case.engine == "fsdp2"}


def _config(case: Case):
    few = {"num_experts": case.experts, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return tiny.config(**few if case.experts < 8 else {})


def _engine(case: Case, folder: str):
    config = _config(case)
    model = tiny.build(config)
    groups = tiny.groups_of(model, by_matrix=True)
    mesh = build_mesh(
        plan_mesh(WORLD, case.nodes, case.expert, num_experts=case.experts), CPU, timeout_s=100
    )
    offload = case.offload
    if offload.path is not None:
        offload = Offload(offload.state, offload.weights, f"{folder}/disk")
    return model, tiny.engine_of(case.engine, model, mesh, groups, RULE, offload=offload)


@cache
def _alone(experts: int):
    config = _config(Case(experts=experts))
    model = tiny.build(config)
    mesh = Mesh(plan_mesh(1, num_experts=experts), CPU)
    groups = tiny.groups_of(model, by_matrix=True)
    engine = tiny.engine_of("local", model, mesh, groups, RULE)
    seen = tiny.train_engine(engine, config, 0, 1, STEPS, poisoned=1)
    trained = tiny.copies(engine.tensors())
    return trained, seen, _momenta(tiny.revived(engine, model)) if experts == 8 else {}


def _momenta(found):
    return {name: value for name, value in found.items() if name.startswith("momentum/")}


def _train(engine, config, count: int, first: int = 0) -> list[dict]:
    rank = dist.get_rank()
    return tiny.train_engine(engine, config, rank, WORLD, count, poisoned=1, first=first)


def _case(case: Case, folder: str) -> str:
    config, (want, numbers, revived) = _config(case), _alone(case.experts)
    model, engine = _engine(case, folder)
    found = tiny.numbers_differ(_train(engine, config, STEPS), numbers, 1e-6)
    got = engine.tensors()
    strict = {name for name in want if not any(part in name for part in ADAMW)}
    found += tiny.difference({n: got[n] for n in strict}, {n: want[n] for n in strict}, 1e-6)
    rest = want.keys() - strict
    found += tiny.difference({n: got[n] for n in rest}, {n: want[n] for n in rest}, 1e-4)
    if case.stops:
        found += _stopped(case, folder, engine)
    if revived:
        found += tiny.difference(_momenta(tiny.revived(engine, model)), revived, 0.0)
    return found


def _stopped(case: Case, folder: str, engine) -> str:
    """What differs from `engine` after the same steps with a stop, resumed by an engine that has
    nothing but what would be saved."""
    config, (_, again), (_, resumed) = _config(case), _engine(case, folder), _engine(case, folder)
    _train(again, config, 2)
    saved = tiny.copies(again.tensors())
    for key, into in resumed.tensors().items():
        local_of(into).copy_(local_of(saved[key]))
    resumed.loaded()
    _train(resumed, config, STEPS - 2, first=2)
    mine = resumed.tensors()
    different = [
        name
        for name, value in engine.tensors().items()
        if not torch.equal(local_of(mine[name]), local_of(value))
    ]
    return "".join(f"{name} after a stop; " for name in different)


def _all(folder: str) -> dict[str, Any]:
    return {name: _case(case, folder) for name, case in CASES.items()} | {"owned": _owned()}


def _owned() -> list[list[int]]:
    """How many cut matrices each rank owns: of all dense ones of the model."""
    _, engine = _engine(CASES["dense cut over 4"], "")
    pieces = [p for p in engine.pieces.values() if p.matrices is not None and len(p.weight)]
    ranks = [0] * WORLD
    plan = matrices._plan(tuple((p.matrices, p.per_rank) for p in pieces), WORLD, dist.get_rank())
    for cut in plan.cuts:
        ranks[cut.owner] += 1
    return ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    return run(WORLD, _all, str(tmp_path_factory.mktemp("muon")))


@pytest.mark.parametrize("case", CASES)
def test_four_processes_train_and_resume_as_one(results, case):
    assert [result[case] for result in results] == [""] * WORLD


def test_owners_share_the_work(results):
    first, *others = [result["owned"] for result in results]
    assert all(other == first for other in others)
    assert min(first) > 0 and max(first) <= 2 * min(first)
