"""A checkpoint of any layout loads into any other, one process included, with all experts and both
moments (the failures of KempnerInstitute/KempnerForge#202 and deepspeedai/DeepSpeed#8147)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from models.hf import export_hf
from parallel import World
from parallel.engines.local import LocalEngine
from parallel.flat_shard import FlatShard, ShardSavePlanner
from parallel.mesh import build_mesh, plan_mesh
from tests.distributed import tiny
from tests.distributed.launch import run
from tests.engines import local_engine
from training.checkpoint.saver import Saver, Snapshot
from training.checkpoint.tensors import load_tensors
from training.checkpoint.weights import load_initial, save_weights

CONFIG = tiny.config(num_experts=4, n_group=1, topk_group=1, num_hidden_layers=2)
LAYOUTS = {
    "2x2, experts over 2": (2, 2, "across_nodes"),
    "1x4, experts over 4 inside": (1, 4, "within_node"),
    "4x1, experts over 2, twice": (4, 2, "across_nodes"),
}


def _engine(layout: str):
    nodes, expert, placement = LAYOUTS[layout]
    plan = plan_mesh(dist.get_world_size(), nodes, expert, placement, CONFIG.num_experts)
    model = tiny.build(CONFIG)
    return tiny.engine_of("fsdp2", model, build_mesh(plan, torch.device("cpu"), timeout_s=100))


def _world() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo")
    return World(rank, size, rank, size, dist.group.WORLD, group, group)


def _save(tensors: dict[str, Any], folder: Path, world: World) -> Path:
    saver = Saver(folder, world, background=False)
    saver.save(Snapshot(step=1, tensors=tensors, state={}, rng=b""))
    (saved,) = saver.poll()
    assert saved.folder is not None, saved.error
    return saved.folder


def _one_process() -> LocalEngine:
    return local_engine(tiny.groups_of(tiny.build(CONFIG)), clip_norm=tiny.CLIP, spike_factor=100.0)


def _marked(tensors: dict[str, Any]) -> dict[str, Any]:
    """Fill experts with their number (moments: + 10 and + 20), everything else by its place."""
    for name, value in tensors.items():
        if not isinstance(value, FlatShard) and value.dim() == 0:
            value.fill_(7.0)
            continue
        start, total = (value.start, value.total) if isinstance(value, FlatShard) else (0, None)
        local = value.local if isinstance(value, FlatShard) else value
        place = torch.arange(start, start + local.numel())
        extra = {"weights": 0.0, "exp_avg": 10.0, "exp_avg_sq": 20.0}[name.partition("/")[0]]
        if name.endswith((".w1", ".w2")):
            total = total or local.numel()
            local.copy_(place // (total // CONFIG.num_experts) + extra)
        else:
            local.copy_(place % 251 + extra)
    return tensors


def _all_layouts(folder: str) -> dict[str, str]:
    """Every layout saves; every layout, and one process, loads it."""
    world, found = _world(), {}
    right = _marked({name: t.clone() for name, t in _one_process().tensors().items()})
    engines = {name: _engine(name) for name in LAYOUTS}
    for saver, engine in engines.items():
        path = _save(_marked(engine.tensors()), Path(folder) / saver, world)
        for loader, other in engines.items():
            for value in other.tensors().values():
                (value.local if isinstance(value, FlatShard) else value).fill_(-1.0)
            load_tensors(path, other.tensors())
            other.loaded()
            found[f"{saver} -> {loader}"] = tiny.difference(other.tensors(), right, 0.0)
            if float(other.updates) != 7.0:
                found[f"{saver} -> {loader}"] += f"{other.updates} updates"
        whole = _one_process()
        load_tensors(path, whole.tensors())
        found[f"{saver} -> one process"] = tiny.difference(whole.tensors(), right, 0.0)
    one = _one_process()
    path = [None]
    if dist.get_rank() == 0:
        path = [_save(_marked(one.tensors()), Path(folder) / "one process", World())]
    dist.broadcast_object_list(path)
    for loader, engine in engines.items():
        load_tensors(path[0], engine.tensors())
        found[f"one process -> {loader}"] = tiny.difference(engine.tensors(), right, 0.0)
    return found


def _continued(folder: str) -> str:
    """One step in one layout, saved, one more in another: as two steps in one process."""
    first = _engine("2x2, experts over 2")
    got = tiny.train_engine(first, CONFIG, dist.get_rank(), 4, steps=1)
    path = _save(first.tensors(), Path(folder) / "run", _world())
    second = _engine("4x1, experts over 2, twice")
    load_tensors(path, second.tensors())
    second.loaded()
    got += tiny.train_engine(second, CONFIG, dist.get_rank(), 4, steps=1, first=1)
    _, want = tiny.train_one_process(tiny.build(CONFIG), CONFIG, steps=2)
    return tiny.numbers_differ(got, want, 5e-6)


def _initial(folder: str) -> dict[str, str]:
    """First weights out of a Hugging Face folder, and out of a checkpoint without an optimizer."""
    model = tiny.build(CONFIG)
    if dist.get_rank() == 0:
        export_hf(model, f"{folder}/hf")
        save_weights(model, Path(folder) / "weights")
    dist.barrier()
    right = {f"weights/{name}": p.detach().reshape(-1) for name, p in model.named_parameters()}
    found = {}
    for layout in ("2x2, experts over 2", "4x1, experts over 2, twice"):
        for source in ("hf", "weights"):
            engine = _engine(layout)
            for name, value in engine.tensors().items():
                if name.startswith("weights/"):
                    value.local.fill_(-1.0)
            for buffer in engine.model.buffers():
                buffer.fill_(-1.0)
            load_initial(engine, engine.model, f"{folder}/{source}")
            got = {n: t for n, t in engine.tensors().items() if n.startswith("weights/")}
            text = tiny.difference(got, right, 0.0)
            for name, buffer in model.named_buffers():
                if not torch.equal(engine.model.get_buffer(name), buffer):
                    text += f"{name} differs; "
            found[f"{source} -> {layout}"] = text
    other = tiny.config(num_experts=8, n_group=1, topk_group=1, num_hidden_layers=2)
    save_weights(tiny.build(other), Path(folder) / f"other{dist.get_rank()}")
    try:
        load_initial(engine, engine.model, f"{folder}/other{dist.get_rank()}")
        found["another model"] = "accepted"
    except ValueError as error:
        found["another model"] = "" if "layers.1.moe.w1" in str(error) else str(error)
    return found


def _holes(folder: str) -> list[str]:
    """A range that no rank holds, and one that two hold in part, are refused on saving."""
    rank, found = dist.get_rank(), []
    for bounds in ([(0, 4), (4, 8), (9, 12), (12, 16)], [(0, 4), (4, 9), (8, 12), (12, 16)]):
        start, stop = bounds[rank]
        shard = FlatShard(torch.zeros(stop - start), start, 16)
        try:
            dcp.save(
                {"weight": shard},
                checkpoint_id=f"{folder}/{len(found)}",
                planner=ShardSavePlanner(),
            )
            found.append("saved")
        except BaseException as error:
            found.append(type(error).__name__)
    return found


def _fewer_ranks(path: str) -> str:
    """Two ranks load what four have written."""
    nodes_of_one = {"2x1": (2, 2, "across_nodes"), "1x2": (1, 1, "across_nodes")}
    LAYOUTS.update(nodes_of_one)
    right = _marked({name: t.clone() for name, t in _one_process().tensors().items()})
    found = ""
    for layout in nodes_of_one:
        engine = _engine(layout)
        load_tensors(Path(path), engine.tensors())
        found += tiny.difference(engine.tensors(), right, 0.0)
    return found


def _everything(folder: str) -> dict[str, Any]:
    return {
        "layouts": _all_layouts(folder),
        "continued": _continued(folder),
        "initial": _initial(folder),
        "holes": _holes(folder),
    }


@pytest.fixture(scope="module")
def results():
    with tempfile.TemporaryDirectory() as folder:
        found = run(4, _everything, folder)
        saved = f"{folder}/2x2, experts over 2/step_00000001"
        yield found, run(2, _fewer_ranks, saved)


NAMES = [*LAYOUTS, "one process"]


@pytest.mark.parametrize("saver", NAMES)
def test_every_layout_loads_what_any_has_saved(results, saver):
    for rank, result in enumerate(results[0]):
        for loader in NAMES:
            if loader == saver == "one process":
                continue
            assert result["layouts"][f"{saver} -> {loader}"] == "", (rank, loader)


def test_fewer_processes_load_it_too(results):
    assert results[1] == ["", ""]


def test_first_weights_from_a_folder_or_a_checkpoint(results):
    for result in results[0]:
        assert len(result["initial"]) == 5 and set(result["initial"].values()) == {""}, result


def test_training_goes_on_in_another_layout(results):
    assert [result["continued"] for result in results[0]] == [""] * 4


def test_holes_and_overlaps_are_refused(results):
    for result in results[0]:
        assert "saved" not in result["holes"]
