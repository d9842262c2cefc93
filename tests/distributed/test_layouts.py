"""Every layout trains as one process does: scripts/verify.py over engines, placements, degrees of
expert parallelism and accumulation.

Rows are short and unequal, and one of them has no token; with one micro-batch a step that is a rank
without any. Gradients are compared to 1e-6 of their norm, in float32: experts' that are averaged
over their replicas alone come out as many times too large as experts are split
(pytorch/pytorch#160285, deepspeedai/DeepSpeed#5618, databricks/megablocks#86).
"""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from scripts import verify
from tests.distributed.launch import run
from training.config.build import load_config

# processes → layouts: overrides, micro-batches of a process
LAYOUTS = {
    2: [("parallel.nodes=2 parallel.expert=2", 1)],
    4: [
        ("parallel.nodes=2 parallel.expert=2", 3),
        ("parallel.expert=4 parallel.expert_placement=within_node", 1),
        ("parallel.nodes=2 parallel.expert=2 parallel.engine=deepspeed", 3),
        ("parallel.expert=2 parallel.expert_placement=within_node parallel.engine=deepspeed", 1),
        (
            "parallel.nodes=2 parallel.expert=2 router.gradient.kind=default "
            "train.checkpointing=full",
            1,
        ),
        (
            "parallel.expert=2 parallel.expert_placement=within_node router.gradient.kind=default "
            "parallel.engine=deepspeed",
            1,
        ),
    ],
    8: [("parallel.nodes=4 parallel.expert=4", 1)],
}
if importlib.util.find_spec("deepspeed") is None:
    LAYOUTS[4] = [layout for layout in LAYOUTS[4] if "deepspeed" not in layout[0]]


def _case(overrides: str, world: int):
    words = ["run.device=cpu", "model.num_experts=16", *overrides.split()]
    return verify.plans(load_config("configs/quickstart.yaml", words), world)


def _all(world: int) -> list[dict]:
    found = []
    for overrides, micro_batches in LAYOUTS[world]:
        small, plan, _ = _case(overrides, world)
        found.append(verify.as_layout(small, plan, micro_batches))
    return found + ([_spoilt()] if world == 2 else [])


@cache
def _ranks(world: int) -> list[list[dict]]:
    return run(world, _all, world)


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_is_equal_to_one_process(world):
    ranks = _ranks(world)
    oracles: dict[tuple, dict] = {}
    for number, (overrides, micro_batches) in enumerate(LAYOUTS[world]):
        own = " ".join(word for word in overrides.split() if word.startswith("router."))
        if (own, micro_batches) not in oracles:
            small, _, alone = _case(own, world)
            key = own, micro_batches
            oracles[key] = verify.one_process(small, alone, world, micro_batches)
        one = oracles[own, micro_batches]
        whole = verify.put_together([results[number] for results in ranks])
        lines = verify.compare(one, whole)
        assert not [line for line in lines if not line.good], overrides
        engine = "DeepSpeedEngine" if "deepspeed" in overrides else "Fsdp2Engine"
        assert whole["engine"] == engine
    # What the rows of a step bring with them.
    assert any(row is None for row in verify.rows_of(0, world)), "no rank without a token"
    counts = [one["counts"][0] for one in oracles.values()]
    assert world > 2 or min(int(count.min()) for count in counts) == 0, "no expert without a token"


def test_a_difference_is_found():
    """A gradient that misses one rank, as a mean over too few would be."""
    ranks = [results[-1] for results in _ranks(2)]
    small, _, alone = _case("parallel.nodes=2 parallel.expert=2", 2)
    lines = verify.compare(verify.one_process(small, alone, 2, 1), verify.put_together(ranks))
    wrong = [line.what for line in lines if not line.good]
    assert "gradient layers.0.moe.router.weight" in wrong
    assert "gradient layers.0.attn.q.weight" not in wrong


def _spoilt() -> dict:
    from parallel.engines.fsdp2 import Fsdp2Engine

    gradients = Fsdp2Engine.gradients

    def halved(self):
        found = gradients(self)
        for name, shard in found.items():
            if "router" in name:
                found[name] = shard.with_local(shard.local * 0.5)
        return found

    Fsdp2Engine.gradients = halved
    try:
        small, plan, _ = _case("parallel.nodes=2 parallel.expert=2", 2)
        return verify.as_layout(small, plan, 1)
    finally:
        Fsdp2Engine.gradients = gradients
