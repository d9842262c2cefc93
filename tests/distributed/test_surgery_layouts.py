"""Experts come and go alike in every layout: the same events, the same run as one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.processes import start_training
from tests.training.tiny import write_inputs
from training.checkpoint.tensors import read_weights
from training.report.files import read_lines, read_metrics

EVENTS = (
    "experts.events=[{step: 2, kind: clone, layer: 0}, {step: 3, kind: retire, layer: 0}, "
    "{step: 3, kind: revive, layer: 1, expert: 3, slot: 1}, {step: 5, kind: clone, layer: 1}, "
    "{step: 6, kind: retire, layer: 1, expert: 0}]"
)
WORDS = (
    "model.num_experts=6",
    "experts.start=4",
    "experts.importance.kind=gate_mass",
    EVENTS,
    "train.steps=8",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "checkpoint.every_steps=2",
    "checkpoint.keep.last=null",
    "eval.every_steps=null",
    "eval.rows=128",
)
LAYOUTS = {
    "experts over two": ("parallel.nodes=2", "parallel.expert=2"),
    "the other engine, one copy": ("parallel.engine=deepspeed", "parallel.expert=1"),
}
if importlib.util.find_spec("deepspeed") is None:
    del LAYOUTS["the other engine, one copy"]


def train(config: Path, folder: Path, name: str, world: int, *words: str) -> Path:
    group = start_training(
        [str(config), f"run.name={name}", *WORDS, *words], world=world, folder=folder
    )
    codes = group.wait(200)
    assert codes == [0] * world, group.output()
    return folder / "runs" / name


def changes(run: Path) -> list[tuple]:
    keys = ("step", "change", "layer", "expert", "parent", "experts")
    lines = read_lines(run / "events.jsonl")
    return [tuple(line[key] for key in keys) for line in lines if "change" in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("surgery")
    config = write_inputs(folder / "inputs")
    return config, train(config, folder, "alone", 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_makes_the_changes_of_one_process(layout, alone, tmp_path):
    config, run = alone
    other = train(config, tmp_path, "layout", 2, *LAYOUTS[layout])
    assert len(changes(run)) == 5
    assert changes(other) == changes(run)
    for ours, theirs in zip(read_metrics(other), read_metrics(run), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    for step in (2, 8):
        name = f"checkpoints/step_{step:08d}"
        ours, theirs = (read_weights((folder / name).resolve()) for folder in (other, run))
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-4, msg=key)
            if key.endswith("active_E"):
                assert torch.equal(ours[key], value)
