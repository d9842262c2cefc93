"""FSDP2 with split experts against the trainer's optimizer in one process.

Losses, norms, weights and both moments after three steps, one of them poisoned with a NaN on one
rank. All cases run in one group of four processes.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from models.build import build_model, initial_values, parameter_kinds, reset_buffers
from models.execution import apply_checkpointing, compile_blocks
from moe.control import routers_of
from parallel.config import AllGather, AllToAll, Pairwise
from parallel.engines.choose import resolve_engine
from parallel.engines.local import LocalEngine
from parallel.flat_shard import FlatShard
from parallel.mesh import build_mesh, plan_mesh
from parallel.offload import Offload
from parallel.world import ParallelError
from tests.distributed import tiny
from tests.distributed.launch import run
from tests.engines import local_engine

WORLD = 4
# One process and several round differently; Adam's first steps are nearly signs, so a rounding
# error of a tiny gradient shows in its weight. (A sign turned round would show as 0.05.)
TOLERANCE = {"numbers": 5e-6, "exp_avg": 1e-4, "exp_avg_sq": 2e-4, "weights": 2e-3}


@dataclass(frozen=True)
class Case:
    nodes: int = 2
    expert: int = 2
    placement: str = "across_nodes"
    family: str = "glm4_moe"
    changes: tuple[tuple[str, Any], ...] = ()
    options: Any = field(default_factory=AllToAll)
    checkpointing: str = "none"
    meta: bool = False
    compiled: bool = False
    offload: Offload = field(default_factory=Offload)


FEW = (("num_experts", 3), ("num_experts_per_tok", 2))
CASES = {
    "2 nodes of 2, experts over nodes": Case(),
    "1 node, experts inside": Case(nodes=1, expert=4, placement="within_node"),
    "2 nodes, experts not split": Case(expert=1),
    "1 node, ZeRO-3 alone": Case(nodes=1, expert=1),
    "fewer experts than ranks": Case(nodes=1, expert=1, family="mixtral", changes=FEW),
    "tied weights": Case(family="qwen3_moe_sparse_step"),
    "recomputed blocks": Case(checkpointing="full", options=AllToAll(chunks=3)),
    "4 nodes, experts twice, recomputed attention": Case(checkpointing="selective", nodes=4),
    "compiled blocks": Case(compiled=True, checkpointing="full"),
    "all tokens to all": Case(options=AllGather()),
    "pairwise": Case(nodes=4, expert=4, options=Pairwise()),
}
TRAINED = {
    "2 nodes of 2, experts over nodes": Case(),
    "4 nodes, experts twice, recomputed": Case(nodes=4, checkpointing="full"),
    "from meta, fewer experts than ranks": Case(
        nodes=1, expert=1, family="mixtral", meta=True, changes=FEW
    ),
    "offloaded, from meta": Case(meta=True, offload=Offload("cpu", "cpu")),
}


def _engine(case: Case, config, dtype: torch.dtype = torch.float32):
    mesh = build_mesh(
        plan_mesh(WORLD, case.nodes, case.expert, case.placement, config.num_experts),
        torch.device("cpu"), timeout_s=100,
    )  # fmt: skip
    wide = torch.promote_types(dtype, torch.float32)
    model = build_model(config, device="meta") if case.meta else tiny.build(config, wide)
    groups = tiny.groups_of(model)
    apply_checkpointing(model, case.checkpointing)
    engine = tiny.engine_of(
        "fsdp2", model, mesh, groups, exchange=case.options, offload=case.offload, dtype=dtype
    )
    if case.compiled:
        compile_blocks(model, backend="eager")
    return engine


def _draw(config, model):
    """What `Engine.fill` asks for, drawn as `build_model` draws it."""
    kinds = parameter_kinds(model)

    def values(name: str, experts: range | None) -> torch.Tensor:
        shape = model.get_parameter(name).shape
        return initial_values(config, name, kinds[name], shape, 1, experts)

    return values


@cache
def _reference(case: Case) -> dict[str, torch.Tensor]:
    """Gradients of the first step in float64. Layouts of one model share them."""
    config = tiny.config(case.family, **dict(case.changes))
    return tiny.gradients_one_process(tiny.build(config, torch.float64), config)


def _gradients(case: Case) -> str:
    """What differs from the gradients of one process, in float64."""
    config = tiny.config(case.family, **dict(case.changes))
    engine = _engine(case, config, torch.float64)
    want = _reference(Case(family=case.family, changes=case.changes))
    got = {}
    seen = tiny.train_engine(
        engine, config, dist.get_rank(), WORLD, steps=1,
        watch=lambda engine: got.update(tiny.copies(engine.gradients())),
    )  # fmt: skip
    missing = [n for n, p in engine.model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, f"no gradient, not even zeros: {missing}"
    norm = torch.stack([g.norm() for g in want.values()]).norm().item()
    found = tiny.difference(got, want, 1e-11)
    if abs(seen[0]["norm"] / norm - 1) > 1e-6:
        found += f"norm {seen[0]['norm']} instead of {norm}"
    return found


def _training(case: Case) -> str:
    """What differs after three steps in float32, the second of them skipped."""
    config = tiny.config(case.family, **dict(case.changes))
    engine = _engine(case, config)
    if case.meta:
        reference = build_model(config, seed=1)
        engine.fill(_draw(config, reference))
        reset_buffers(engine.model)
    else:
        reference = tiny.build(config)
    got = tiny.train_engine(engine, config, dist.get_rank(), WORLD, steps=3, poisoned=1)
    optimizer, want = tiny.train_one_process(reference, config, steps=3, poisoned=1)
    found = tiny.numbers_differ(got, want, TOLERANCE["numbers"])
    found += tiny.difference(engine.tensors(), optimizer.tensors(), TOLERANCE)
    if engine.shapes() != optimizer.shapes():
        found += f"shapes {engine.shapes()} instead of {optimizer.shapes()}; "
    if engine.lrs(1.0) != optimizer.lrs(1.0):
        found += f"learning rates {engine.lrs(1.0)}; "
    if not bool(engine.all_finite()):
        found += "not finite; "
    if want[1]["skipped"] != 1.0:
        found += "the poisoned step was not skipped; "
    if (got[0]["norm"] / tiny.CLIP) < 3:
        found += f"nothing was clipped at norm {got[0]['norm']}; "
    return found


def _coverage() -> dict[str, list[tuple[int, int]]]:
    """Ranges of every tensor that this rank holds."""
    engine = _engine(Case(nodes=4), tiny.config())
    return {
        name: (value.start, value.stop, value.total)
        for name, value in engine.tensors().items()
        if hasattr(value, "stop")
    }


def _memory() -> tuple[int, int]:
    """Elements of weights held, and of the whole model."""
    engine = _engine(Case(), tiny.config())
    shards = [v for n, v in engine.tensors().items() if n.startswith("weights/")]
    return sum(v.local.numel() for v in shards), sum(v.total for v in shards)


def _not_finite() -> list[bool]:
    """A NaN moment on one rank is seen by all."""
    engine = _engine(Case(), tiny.config())
    before = bool(engine.all_finite())
    if dist.get_rank() == 2:
        next(reversed(engine.pieces.values())).states["exp_avg_sq"].fill_(float("nan"))
    return [before, bool(engine.all_finite())]


def _bfloat16() -> dict[str, float]:
    """One step in bf16: norms of the engine and of one process, and the largest difference."""
    config = tiny.config()
    engine = _engine(Case(), config, torch.bfloat16)
    dtypes = set()

    def watch(engine):
        dtypes.update(p.grad.dtype for p in engine.model.parameters() if p.grad is not None)

    angles = set()
    engine.model.layers[1].attn.register_forward_pre_hook(
        lambda module, args: angles.update(str(leaf.dtype) for leaf in tree_leaves(args[1]))
    )
    got = tiny.train_engine(engine, config, dist.get_rank(), WORLD, steps=1, watch=watch)
    optimizer, want = tiny.train_one_process(tiny.build(config, torch.bfloat16), config, steps=1)
    moments = {n: t for n, t in optimizer.tensors().items() if n.startswith("exp_avg/")}
    mine = {n: t for n, t in engine.tensors().items() if n.startswith("exp_avg/")}
    return {
        "angles": sorted(angles), "got": got[0], "want": want[0],
        "dtypes": [str(d) for d in dtypes],
        "moments": tiny.difference(mine, moments, 0.3),
        "router": str(engine.model.layers[1].moe.router.weight.dtype),
    }  # fmt: skip


def _replicas() -> list[str]:
    """One rank starts from other weights, by kind of weight."""
    found = []
    for nodes, name in ((2, None), (2, "embed.weight"), (4, "layers.1.moe.experts.w1"),
                        (2, "layers.2.moe.router.weight")):  # fmt: skip
        case = Case(nodes=nodes)
        engine = _engine(case, tiny.config())
        if name is not None and dist.get_rank() == 3:
            engine.pieces[name].weight[0] += 1e-7
        try:
            engine.check_replicas()
            found.append("")
        except ValueError as error:
            found.append(str(error).partition(";")[0])
    return found


REVIVED = {
    "2 nodes of 2, experts over nodes": Case(),
    "4 nodes, experts twice": Case(nodes=4),
    "1 node, ZeRO-3 alone": Case(nodes=1, expert=1),
    "offloaded": Case(offload=Offload("cpu", "cpu")),
}


def _revived(case: Case) -> str:
    """What differs from a revival in one process: nothing may, to the bit."""
    config = tiny.config()
    engine = _engine(case, config)
    model = tiny.build(config)
    want = tiny.revived(local_engine(tiny.groups_of(model), model), model)
    got = tiny.revived(engine, engine.model)
    found = tiny.difference(got, want, 0.0)
    engine.check_replicas()
    # what the model computes with is what was written
    batch = tiny.micro_batches(config, 0, [0])[0]
    with torch.no_grad():
        losses = [float(each(**batch).loss_sum) for each in (engine.model, model)]
    if abs(losses[0] / losses[1] - 1) > 1e-6:
        found += f"loss {losses[0]} instead of {losses[1]}; "
    return found


def _evaluated_then_loaded() -> list[float]:
    """Losses before and after all weights are replaced by zeros, evaluation coming first."""
    config = tiny.config("qwen3_moe_sparse_step")
    engine = _engine(Case(), config)
    batch = tiny.micro_batches(config, 0, [0])[0]
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(float(engine.model(**batch).loss_sum))
        for name, shard in engine.tensors().items():
            if name.startswith("weights/"):
                shard.local.zero_()
        engine.loaded()
    return losses


def _nothing_then_everything() -> dict[str, Any]:
    """Two steps: all tokens to the first node's experts, then all to the second's."""
    config = tiny.config(n_group=1, topk_group=1)
    engine, model = _engine(Case(), config), tiny.build(config)
    optimizer = local_engine(tiny.groups_of(model), model, clip_norm=tiny.CLIP, spike_factor=100.0)
    largest = []
    for step, favoured in enumerate((slice(0, 4), slice(4, 8))):
        for whole in (engine.model, model):
            for router in routers_of(whole):
                router.selection_bias.zero_()[favoured] = 1e4
        seen: dict[str, FlatShard] = {}
        tiny.train_engine(
            engine, config, dist.get_rank(), WORLD, steps=1, first=step,
            watch=lambda engine, seen=seen: seen.update(tiny.copies(engine.gradients())),
        )  # fmt: skip
        experts = [g.local for name, g in seen.items() if name.endswith((".w1", ".w2"))]
        largest.append(max(part.abs().max().item() for part in experts))
        optimizer.zero_grad()
        for batch in tiny.micro_batches(config, step, range(tiny.ROWS)):
            tiny.loss_of(model, batch).backward()
        optimizer.step(1e-2)
    return {
        "largest": largest,
        "differs": tiny.difference(engine.tensors(), optimizer.tensors(), TOLERANCE),
    }


def _refusals() -> list[str]:
    config = tiny.config()
    model = tiny.build(config)
    groups = tiny.groups_of(model)
    mesh = build_mesh(plan_mesh(WORLD, 2, 2, num_experts=8), torch.device("cpu"), timeout_s=100)
    found = []
    for name, these, options in (
        ("fsdp2", groups[1:], {}),
        ("fsdp2", groups, {"half": True}),
    ):
        try:
            given = tiny.build(config)
            if options.pop("half", False):
                given = given.bfloat16()
            tiny.engine_of(name, given, mesh, these)
            found.append("accepted")
        except ValueError as error:
            found.append(str(error))
    return found


def _everything() -> dict:
    cases = {}
    for table, check in ((CASES, _gradients), (TRAINED, _training), (REVIVED, _revived)):
        for name, case in table.items():
            try:
                cases[check.__name__, name] = check(case)
            except Exception:
                raise RuntimeError(f"case {name!r}:\n{traceback.format_exc()}") from None
    return {
        "cases": cases,
        "coverage": _coverage(),
        "memory": _memory(),
        "finite": _not_finite(),
        "bf16": _bfloat16(),
        "refusals": _refusals(),
        "turns": _nothing_then_everything(),
        "replicas": _replicas(),
        "loaded": _evaluated_then_loaded(),
    }


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(WORLD, _everything)


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_norm_equal_one_process(results, name):
    key = "_gradients", name
    assert not {rank: r["cases"][key] for rank, r in enumerate(results) if r["cases"][key]}


@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_one_process(results, name):
    key = "_training", name
    assert not {rank: r["cases"][key] for rank, r in enumerate(results) if r["cases"][key]}


@pytest.mark.parametrize("name", REVIVED)
def test_a_revival_writes_the_bits_that_one_process_writes(results, name):
    key = "_revived", name
    assert not {rank: r["cases"][key] for rank, r in enumerate(results) if r["cases"][key]}


def test_shards_cover_every_tensor_without_overlap(results):
    for name, (_, _, total) in results[0]["coverage"].items():
        stop = 0
        for first, last, _ in sorted({r["coverage"][name] for r in results}):
            if first < last:
                assert first == stop, name
                stop = last
        assert stop == total, name


def test_memory_is_shared(results):
    """Experts are a quarter each, dense weights a half, routers whole."""
    held = [r["memory"][0] for r in results]
    total = results[0]["memory"][1]
    assert max(held) < 0.45 * total, (held, total)


def test_a_bad_number_on_one_rank_is_seen_by_all(results):
    assert [r["finite"] for r in results] == [[True, False]] * WORLD


def test_bfloat16_reduces_in_float32_and_leaves_the_router_alone(results):
    for result in results:
        got = result["bf16"]
        assert got["dtypes"] == ["torch.float32"]
        assert got["router"] == "torch.float32"
        assert got["angles"] == ["torch.float32"], "inputs of a block were cast"
        # Only weights and activations are rounded, in both; sums are in another order.
        assert got["got"]["loss"] == pytest.approx(got["want"]["loss"], rel=2e-3)
        assert got["got"]["norm"] == pytest.approx(got["want"]["norm"], rel=2e-2)
        # A token at the border of two experts may go to another one; a factor of 2 would be 0.5.
        assert got["moments"] == ""


def test_ranks_that_start_from_other_weights_are_named_everywhere(results):
    for result in results:
        assert result["replicas"] == [
            "",
            "dense weights of ranks [3] differ from rank 1's",
            "expert weights of ranks [3] differ from rank 1's",
            "router weights of ranks [3] differ from rank 0's",
        ]


def test_no_gathered_weight_outlives_loading(results):
    labels = 15  # of row 0
    for result in results:
        before, after = result["loaded"]
        assert after == pytest.approx(labels * math.log(97)), (before, after)
        assert before != pytest.approx(after)


def test_one_process_that_names_no_engine_shards_nothing():
    mesh = build_mesh(plan_mesh(1, num_experts=8), torch.device("cpu"))
    assert resolve_engine("auto", mesh.plan) == "local"
    engine = tiny.engine_of("local", tiny.build(tiny.config()), mesh)
    assert isinstance(engine, LocalEngine)


def test_engines_that_cannot_be_are_refused():
    plan = plan_mesh(WORLD, 2, 2, num_experts=8)
    with pytest.raises(ParallelError) as error:
        resolve_engine("zero", plan)
    assert str(error.value) == (
        "parallel.engine='zero' is unknown; allowed: auto, fsdp2, deepspeed"
    )
    with pytest.raises(ParallelError, match=r"parallel\.offload\.kind=cpu alone needs"):
        resolve_engine("fsdp2", plan, Offload("cpu"))


def test_refusals(results):
    for result in results:
        group, half = result["refusals"]
        assert "is in no optimizer group" in group
        assert "torch.bfloat16" in half and "float32" in half


def test_a_rank_that_gets_no_token_and_then_all_of_them(results):
    """NVIDIA/Megatron-LM#3626, #4851: zeros, not none, and nobody waits for it in backward."""
    for rank, result in enumerate(results):
        first, second = result["turns"]["largest"]
        node = rank // 2
        assert (first == 0.0, second == 0.0) == (node == 1, node == 0)
        assert result["turns"]["differs"] == ""
