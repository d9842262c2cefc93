"""train.py in layouts: what one saves, any other goes on from, with the other engine or alone."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

from tests.processes import start_training
from tests.training.tiny import write_inputs
from training.checkpoint.tensors import read_weights
from training.report.files import read_lines, read_metrics

STEPS, SAVED = 8, 4
FIRST = ("parallel.nodes=2", "parallel.expert=2")
LAYOUTS = {  # name → processes, overrides
    "the same": (4, FIRST),
    "one process": (1, ()),
    "2 processes, ZeRO-3 alone": (2, ()),
    "4 nodes of 1, experts over 4": (4, ("parallel.nodes=4", "parallel.expert=4")),
    "the other engine, experts inside": (
        4,
        ("parallel.engine=deepspeed", "parallel.expert=2", "parallel.expert_placement=within_node"),
    ),
    "c17 one process, fsdp2": (1, ("parallel.engine=fsdp2",)),
    "c17 one process, deepspeed offloading": (
        1,
        ("parallel.engine=deepspeed", "parallel.offload.kind=cpu", "parallel.offload.weights=true"),
    ),
}
if importlib.util.find_spec("deepspeed") is None:
    del LAYOUTS["the other engine, experts inside"]
    del LAYOUTS["c17 one process, deepspeed offloading"]


def train(config: Path, folder: Path, name: str, world: int, *overrides: str) -> None:
    fixed = [f"run.name={name}", f"train.steps={STEPS}", "train.micro_batch_size=2"]
    fixed += [f"checkpoint.every_steps={SAVED}", "checkpoint.keep.last=null"]
    fixed += ["eval.every_steps=8", "eval.rows=6", "eval.sample.prompt=the whale"]
    fixed += ["eval.sample.tokens=5"]
    group = start_training([str(config), *fixed, *overrides], world=world, folder=folder)
    codes = group.wait(200)
    assert codes == [0] * world, group.output()


def curve(folder: Path) -> dict[int, tuple[float, float, int]]:
    return {
        line["step"]: (line["loss"], line["grad_norm"], line["tokens"])
        for line in read_metrics(folder)
    }


def val_loss(folder: Path) -> float:
    return read_metrics(folder)[-1]["val_loss"]


def sample(folder: Path) -> str:
    events = read_lines(folder / "events.jsonl")
    return [event["sample"] for event in events if event["event"] == "sample"][-1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Path]:
    """A config, and the folder of a run of four processes that was never stopped."""
    folder = tmp_path_factory.mktemp("runs")
    config = write_inputs(folder / "inputs", count=14)
    train(config, folder, "whole", 4, *FIRST)
    return config, folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_goes_on_from_the_checkpoint_of_another(whole, name):
    config, folder = whole
    world, overrides = LAYOUTS[name]
    run = folder / "runs" / name.replace(" ", "-").replace(",", "")
    shutil.copytree(
        folder / f"runs/whole/checkpoints/step_{SAVED:08d}",
        run / f"checkpoints/step_{SAVED:08d}",
    )
    train(config, folder, run.name, world, *overrides)
    expected, got = curve(folder / "runs/whole"), curve(run)
    assert list(got) == list(range(SAVED + 1, STEPS + 1))
    for step, (loss, norm, tokens) in got.items():
        assert loss == pytest.approx(expected[step][0], rel=1e-6), step
        assert norm == pytest.approx(expected[step][1], rel=1e-4), step
        assert tokens == expected[step][2], "the token stream"
    # The same rows of validation in any layout, and a sample that all draw.
    whole_run = folder / "runs/whole"
    assert val_loss(run) == pytest.approx(val_loss(whole_run), rel=1e-6)
    assert sample(run) == sample(whole_run)
    if name == "the same":
        assert got == {step: expected[step] for step in got}
        ours, theirs = (
            read_weights(f / f"checkpoints/step_{STEPS:08d}") for f in (run, folder / "runs/whole")
        )
        assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in theirs)


def test_the_log_holds_the_norm_of_each_group_and_the_layout(whole):
    line = read_metrics(whole[1] / "runs/whole")[-1]
    groups = [line[f"grad_norm/{name}"] for name in ("decayed", "experts", "not_decayed", "router")]
    assert sum(norm**2 for norm in groups) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-5)
    printed = "".join(path.read_text() for path in whole[1].glob("output-*"))
    assert "layout: 2 node(s) × 2 local: dense weights sharded 2-fold" in printed
    assert "split over 2, sharded 2-fold" in printed
