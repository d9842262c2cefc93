"""DeepSpeed's ZeRO-3 with split experts against the trainer's optimizer in one process.

Skipped where deepspeed is not installed. All cases run in one group of four processes, since
importing it takes long.
"""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.build import build_model, initial_values, parameter_kinds, reset_buffers
from models.execution import apply_checkpointing
from parallel import World
from parallel.config import AllGather, AllToAll
from parallel.mesh import build_mesh, plan_mesh
from parallel.offload import Offload
from tests.distributed import tiny
from tests.distributed.launch import run
from tests.engines import local_engine
from training.checkpoint.saver import Saver, Snapshot
from training.checkpoint.tensors import load_tensors, stored_tensors

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

WORLD = 4
# As for FSDP2: Adam's first steps are nearly signs, so tiny gradients show their rounding.
TOLERANCE = {"exp_avg": 1e-4, "exp_avg_sq": 2e-4, "weights": 2e-3}


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
    offload: Offload = field(default_factory=Offload)


FEW = (("num_experts", 3), ("num_experts_per_tok", 2))
CASES = {
    "2 nodes of 2, experts over nodes": Case(),
    "4 nodes, experts twice, recomputed": Case(nodes=4, checkpointing="full"),
    "1 node, experts inside, from meta": Case(
        nodes=1, expert=4, placement="within_node", meta=True
    ),
    "fewer experts than ranks": Case(nodes=1, expert=1, family="mixtral", changes=FEW),
    "recomputed attention": Case(family="olmoe", checkpointing="selective"),
    "tied weights": Case(family="qwen3_moe_sparse_step"),
    "all tokens to all": Case(options=AllGather(), family="olmoe"),
    "offload to host memory": Case(offload=Offload("cpu"), nodes=4),
    "weights too": Case(offload=Offload("cpu", "cpu")),
    "weights alone": Case(offload=Offload(weights="cpu"), nodes=1, expert=1),
    "all in files": Case(offload=Offload("nvme", "nvme", "@"), meta=True),
}
CASES["states in files"] = Case(offload=Offload("nvme", path="@"))


def _engine(case: Case, config, dtype: torch.dtype = torch.float32):
    mesh = build_mesh(
        plan_mesh(WORLD, case.nodes, case.expert, case.placement, config.num_experts),
        torch.device("cpu"), timeout_s=100,
    )  # fmt: skip
    model = build_model(config, device="meta") if case.meta else tiny.build(config)
    groups, kinds = tiny.groups_of(model), parameter_kinds(model)
    apply_checkpointing(model, case.checkpointing)
    engine = tiny.engine_of(
        "deepspeed", model, mesh, groups, exchange=case.options, offload=case.offload, dtype=dtype
    )
    if case.meta:
        shapes = engine.shapes()

        def values(name: str, experts: range | None) -> torch.Tensor:
            return initial_values(config, name, kinds[name], shapes[name], 1, experts)

        engine.fill(values)
        reset_buffers(model)
    return engine


@cache
def _reference(family: str, changes, meta: bool):
    config = tiny.config(family, **dict(changes))
    model = build_model(config, seed=1) if meta else tiny.build(config)
    gradients = tiny.gradients_one_process(model, config)
    for parameter in model.parameters():
        parameter.grad = None
    optimizer, seen = tiny.train_one_process(model, config, steps=3, poisoned=1)
    return gradients, optimizer, seen


def _run_case(case: Case, folder: str) -> str:
    if case.offload.path is not None:
        case = replace(case, offload=replace(case.offload, path=f"{folder}/disk"))
    config = tiny.config(case.family, **dict(case.changes))
    gradients, optimizer, want = _reference(case.family, case.changes, case.meta)
    engine = _engine(case, config)
    grads = {}
    got = tiny.train_engine(
        engine, config, dist.get_rank(), WORLD, steps=3, poisoned=1,
        watch=lambda engine: grads.update(tiny.copies(engine.gradients())),
    )  # fmt: skip
    found = tiny.difference(grads, gradients, 1e-5)
    found += tiny.numbers_differ(got, want, 5e-6)
    found += tiny.difference(engine.tensors(), optimizer.tensors(), TOLERANCE)
    if engine.shapes() != optimizer.shapes():
        found += f"shapes {engine.shapes()} instead of {optimizer.shapes()}; "
    if engine.lrs(1.0) != optimizer.lrs(1.0):
        found += f"learning rates {engine.lrs(1.0)}; "
    if not bool(engine.all_finite()):
        found += "not finite; "
    return found


def _revived(case: Case) -> str:
    """What differs from a revival in one process: nothing may, to the bit."""
    config = tiny.config()
    engine = _engine(case, config)
    model = tiny.build(config)
    want = tiny.revived(local_engine(tiny.groups_of(model), model), model)
    found = tiny.difference(tiny.revived(engine, engine.model.module), want, 0.0)
    batch = tiny.micro_batches(config, 0, [0])[0]
    with torch.no_grad():
        losses = [float(each(**batch).loss_sum) for each in (engine.model, model)]
    if abs(losses[0] / losses[1] - 1) > 1e-6:
        found += f"loss {losses[0]} instead of {losses[1]}; "
    return found


def _bfloat16() -> dict[str, Any]:
    config = tiny.config()
    engine = _engine(Case(), config, torch.bfloat16)
    masters = {n: t.local.clone() for n, t in engine.tensors().items() if n.startswith("weights/")}
    whole = {
        f"weights/{n}": p.detach().reshape(-1) for n, p in tiny.build(config).named_parameters()
    }
    exact = all(
        torch.equal(masters[n], whole[n][t.start : t.stop])
        for n, t in engine.tensors().items() if n in masters
    )  # fmt: skip
    got = tiny.train_engine(engine, config, dist.get_rank(), WORLD, steps=1)
    _, want = tiny.train_one_process(tiny.build(config, torch.bfloat16), config, steps=1)
    layer = engine.model.module.layers[1].moe
    return {
        "got": got[0], "want": want[0], "exact": exact,
        "router": str(layer.router.weight.dtype), "bias": str(layer.router.selection_bias.dtype),
        "experts": str(layer.experts.w1.ds_tensor.dtype),
    }  # fmt: skip


def _crossed(folder: str) -> dict[str, str]:
    """Each engine goes on from the other's checkpoint, in another layout."""
    config, found = tiny.config(), {}
    group = dist.new_group(backend="gloo")
    world = World(dist.get_rank(), WORLD, 0, WORLD, dist.group.WORLD, group, group)
    _, want = tiny.train_one_process(tiny.build(config), config, steps=2)
    files = Offload("nvme", "nvme", f"{folder}/disk")

    def fsdp2(nodes: int):
        mesh = build_mesh(plan_mesh(WORLD, nodes, nodes, num_experts=8), torch.device("cpu"))
        return tiny.engine_of("fsdp2", tiny.build(config), mesh)

    for name, first, second in (
        ("deepspeed 2x2, files -> fsdp2 4x1", _engine(Case(offload=files), config), fsdp2(4)),
        (
            "fsdp2 2x2 -> deepspeed 4x1, host memory",
            fsdp2(2),
            _engine(Case(nodes=4, expert=4, offload=Offload("cpu", "cpu")), config),
        ),
    ):
        got = tiny.train_engine(first, config, dist.get_rank(), WORLD, steps=1)
        saver = Saver(Path(folder) / name.replace(" ", "_"), world, background=True)
        saver.save(Snapshot(step=1, tensors=first.tensors(), state={}, rng=b""))
        saver.wait()
        (saved,) = saver.poll()
        assert saved.folder is not None, saved.error
        whole = {
            key: torch.empty(value.size, dtype=value.properties.dtype)
            for key, value in stored_tensors(saved.folder).items()
        }
        load_tensors(saved.folder, whole)
        load_tensors(saved.folder, second.tensors())
        second.loaded()
        found[name] = tiny.difference(second.tensors(), whole, 0.0)
        got += tiny.train_engine(second, config, dist.get_rank(), WORLD, steps=1, first=1)
        found[name] += tiny.numbers_differ(got, want, 5e-6)
    return found


def _plain(function):
    """The function inside DeepSpeed's profiling wrapper, which does not say what it wraps."""
    for cell in getattr(function, "__closure__", None) or ():
        inner = cell.cell_contents
        if inspect.isfunction(inner):
            return _plain(inner)
    return function


def _contract() -> list[str]:
    """What the adapter leans on, by name and form."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Zero

    found = []
    for owner, name, parameters in (
        (Zero, "partition_grads", ["self", "params_to_release", "grad_partitions"]),
        (Zero, "_get_norm_groups", ["self"]),
        (Zero, "_optimizer_step", ["self", "sub_group_id"]),
        (Zero, "_reassign_or_swap_out_partitioned_parameters", ["self", "sub_group_id"]),
        (Zero, "_get_fp32_grad_state_partition", ["self", "param", "release_swap_buffers"]),
        (Zero, "get_param_id", ["self", "param"]),
        (Init, "_convert_to_zero_parameters", ["self", "param_list"]),
    ):
        have = list(inspect.signature(_plain(getattr(owner, name))).parameters)
        if have != parameters:
            found.append(f"{name}{have}")
    text = inspect.getsource(Init._convert_to_deepspeed_param)
    if "ds_zero_partition_process_group" not in text:
        found.append("ds_zero_partition_process_group is not read")
    if deepspeed.__version__.split("+")[0] != "0.19.8":
        found.append(deepspeed.__version__)
    return found


def _wrong_version() -> str:
    import deepspeed

    from parallel.engines import deepspeed as deepspeed_engine

    deepspeed_engine.VERSION = "9.9.9"
    try:
        _engine(Case(), tiny.config())
    except ValueError as error:
        return str(error)
    finally:
        deepspeed_engine.VERSION = deepspeed.__version__.split("+")[0]
    return "accepted"


def _everything(folder: str) -> dict:
    cases = {}
    for name, case in CASES.items():
        try:
            cases[name] = _run_case(case, folder)
        except Exception:
            raise RuntimeError(f"case {name!r}:\n{traceback.format_exc()}") from None
    return {
        "cases": cases,
        "revived": [
            _revived(Case()),
            _revived(Case(offload=Offload("cpu", "cpu"), nodes=4)),
            _revived(Case(offload=Offload("nvme", "nvme", f"{folder}/revived"))),
        ],
        "bf16": _bfloat16(),
        "contract": _contract(),
        "crossed": _crossed(folder),
        "version": _wrong_version(),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    return run(WORLD, _everything, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(results, name):
    found = {rank: r["cases"][name] for rank, r in enumerate(results) if r["cases"][name]}
    assert not found


def test_a_revival_writes_the_bits_that_one_process_writes(results):
    assert [result["revived"] for result in results] == [["", "", ""]] * WORLD


def test_bfloat16_keeps_float32_masters_and_router(results):
    for result in results:
        got = result["bf16"]
        assert got["exact"], "the masters are not the float32 weights that were given"
        assert (got["router"], got["bias"]) == ("torch.float32", "torch.float32")
        assert got["experts"] == "torch.bfloat16"
        assert got["got"]["loss"] == pytest.approx(got["want"]["loss"], rel=2e-3)
        assert got["got"]["norm"] == pytest.approx(got["want"]["norm"], rel=2e-2)


def test_each_engine_goes_on_from_the_others_checkpoint(results):
    for result in results:
        assert set(result["crossed"].values()) == {""}, result["crossed"]


def test_deepspeed_is_what_the_adapter_was_made_for(results):
    assert results[0]["contract"] == []


def test_another_version_is_refused(results):
    assert "parallel.engine=deepspeed is made for deepspeed 9.9.9, found" in results[0]["version"]
