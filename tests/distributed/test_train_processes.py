"""Runs of train.py in processes of their own: killed, stopped, on another number of them."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from models.build import build_model
from models.config import ModelConfig
from moe import RouterConfig
from moe.control import routers_of
from tests.processes import Group, start_training
from tests.training.tiny import MODEL, write_inputs
from training.checkpoint.files import read_state
from training.checkpoint.tensors import read_weights
from training.checkpoint.weights import save_weights
from training.data.tokenizer import read_tokenizer
from training.report.files import read_lines, read_metrics

STEPS = 24
ENGINES = ["fsdp2"] + ["deepspeed"] * (importlib.util.find_spec("deepspeed") is not None)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), count=14)


def train(config: Path, folder: Path, *overrides: str, world: int = 1) -> Group:
    fixed = [f"train.steps={STEPS}", "checkpoint.every_steps=2", "eval.every_steps=8"]
    return start_training([str(config), *fixed, *overrides], world=world, folder=folder)


def finish(group: Group, code: int = 0) -> None:
    codes = group.wait()
    assert codes == [code] * len(codes), group.output()


def curve(folder: Path) -> dict[int, tuple]:
    return {
        line["step"]: (line["loss"], line["grad_norm"], line["lr"], line["tokens"])
        for line in read_metrics(folder)
    }


def last_step(folder: Path) -> int:
    return max((line["step"] for line in read_lines(folder / "metrics.jsonl")), default=0)


def wait_for_step(group: Group, folder: Path, step: int) -> bool:
    """Until a run has logged a step; False if it ended before."""
    while last_step(folder) < step:
        if not any(process.is_alive() for process in group.processes):
            return False
        time.sleep(0.02)
    return True


def assert_same(folder: Path, whole: Path) -> None:
    assert curve(folder) == curve(whole)
    ours, theirs = (read_weights((f / "checkpoints/latest").resolve()) for f in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = [read_state((f / "checkpoints/latest").resolve())["data"] for f in (folder, whole)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("packing", [True, False])
def test_killed_at_random_moments(config, tmp_path, packing):
    """SIGKILL again and again, with and without reader processes: bits of a run never killed."""
    setting = f"data.packing={str(packing).lower()}"
    finish(train(config, tmp_path, "run.name=whole", setting))
    folder = tmp_path / "runs/killed"
    draw = random.Random(7 + packing)
    kills = 0
    for attempt in range(4):
        group = train(config, tmp_path, "run.name=killed", setting, f"data.workers={attempt % 2}")
        if wait_for_step(group, folder, min(last_step(folder) + draw.randint(1, 5), STEPS - 1)):
            time.sleep(draw.uniform(0.0, 0.15))
            group.signal(signal.SIGKILL)
            kills += 1
        codes = group.wait()
        assert codes[0] in (-signal.SIGKILL, 0), group.output()
    finish(train(config, tmp_path, "run.name=killed", setting))
    assert kills >= 3
    assert_same(folder, tmp_path / "runs/whole")
    attempts = {line["attempt"] for line in read_metrics(folder)}
    assert len(attempts) >= 2, "the curve is pieced together from several attempts"


def test_two_processes_equal_one_and_take_over_from_each_other(config, tmp_path):
    """1 against 2 processes, and a run that goes 2 → 1 → 2, with the same rows throughout."""
    finish(train(config, tmp_path, "run.name=one"))
    finish(train(config, tmp_path, "run.name=two", world=2))
    one, two = curve(tmp_path / "runs/one"), curve(tmp_path / "runs/two")
    assert [row[3] for row in one.values()] == [row[3] for row in two.values()], "token stream"
    for step in one:
        assert two[step][0] == pytest.approx(one[step][0], rel=1e-6 if step < 4 else 1e-4), step

    folder = tmp_path / "runs/elastic"
    for world in (2, 1):
        group = train(config, tmp_path, "run.name=elastic", world=world)
        assert wait_for_step(group, folder, last_step(folder) + 3)
        # One process alone is asked: all must stop at the same step.
        os.kill(group.processes[-1].pid, signal.SIGTERM)
        finish(group, 75)
    finish(train(config, tmp_path, "run.name=elastic", world=2))
    elastic = curve(folder)
    assert list(elastic) == list(one)
    for step in one:
        assert elastic[step][0] == pytest.approx(one[step][0], rel=1e-4), step
        assert elastic[step][2:] == one[step][2:], "learning rate and tokens"
    starts = [e for e in read_lines(folder / "events.jsonl") if e["event"] == "start"]
    assert [event["world_size"] for event in starts] == [2, 1, 2]
    states = [
        read_state((tmp_path / f"runs/{name}/checkpoints/latest").resolve())["data"]
        for name in ("one", "elastic")
    ]
    assert states[0] == states[1]


def test_experts_are_revived_and_routers_learn_of_others_where_experts_are_split(config, tmp_path):
    """Experts over two processes: the events and the curve of one process."""
    words = (
        "experts.policy.kind=revive",
        "experts.policy.after=1",
        "model.init.router=5",
        "model.init.embedding=0.02",
        "router.gradient.kind=default",
    )
    words += ("train.steps=6", "log.every_steps=1")
    runs = [tmp_path / f"runs/of{world}" for world in (1, 2)]
    for world, folder in enumerate(runs, 1):
        split = ["parallel.nodes=2", "parallel.expert=2"] if world == 2 else []
        own = (f"run.name={folder.name}", *split)
        finish(train(config, tmp_path, *words, *own, world=world))
    told = [
        [(e["step"], e["layer"], e["expert"], e["parent"]) for e in lines]
        for lines in (
            [e for e in read_lines(f / "events.jsonl") if e["event"] == "expert_revived"]
            for f in runs
        )
    ]
    assert told[0] == told[1]
    assert told[0], "nothing was revived"
    one, two = (curve(folder) for folder in runs)
    for step in one:
        assert two[step][0] == pytest.approx(one[step][0], rel=1e-5), step


def test_two_processes_resume_exactly_and_a_second_signal_ends_at_once(config, tmp_path):
    finish(train(config, tmp_path, "run.name=whole", world=2))
    folder = tmp_path / "runs/stopped"
    group = train(config, tmp_path, "run.name=stopped", "log.every_steps=1", world=2)
    assert wait_for_step(group, folder, 5)
    group.signal(signal.SIGTERM)
    finish(group, 75)
    stopped_at = read_state((folder / "checkpoints/latest").resolve())["step"]
    assert 5 <= stopped_at < STEPS
    finish(train(config, tmp_path, "run.name=stopped", world=2))
    assert_same(folder, tmp_path / "runs/whole")

    long = ("train.steps=100000", "checkpoint.every_steps=null", "checkpoint.keep.last=3")
    group = train(config, tmp_path, "run.name=urgent", *long)
    assert wait_for_step(group, tmp_path / "runs/urgent", 2)
    os.kill(group.processes[0].pid, signal.SIGSTOP)  # it cannot finish a step between the two
    for number in (signal.SIGTERM, signal.SIGINT):
        group.signal(number)
    os.kill(group.processes[0].pid, signal.SIGCONT)
    (code,) = group.wait()
    assert code in (128 + signal.SIGTERM, 128 + signal.SIGINT), group.output()


def test_mistakes_are_told_once_by_several_processes(config, tmp_path):
    odd = ("train.global_batch_size=1", "train.micro_batch_size=1")
    group = train(config, tmp_path, *odd, "run.name=wrong", world=2)
    finish(group, 2)
    told = [line for line in group.output().splitlines() if "error" in line]
    assert len(told) == 1 and "the 2 processes without a row" in told[0], group.output()


def test_d5_rows_that_do_not_divide_train_the_same_model(config, tmp_path):
    """5 rows a step on one process, on 2 (3 and 2) and on 3 (2, 2 and 1), and from one to another:
    the same rows, losses, norms and validation."""
    words = ("train.global_batch_size=5", "train.steps=6", "checkpoint.every_steps=3")
    words += ("eval.every_steps=3", "eval.rows=5", "data.packing=false")
    for world in (1, 2, 3):
        finish(train(config, tmp_path, *words, f"run.name=of{world}", world=world))
    # from the third step of the run on three, on two
    shutil.copytree(
        tmp_path / "runs/of3/checkpoints/step_00000003",
        tmp_path / "runs/from3/checkpoints/step_00000003",
    )
    finish(train(config, tmp_path, *words, "run.name=from3", world=2))
    one = read_metrics(tmp_path / "runs/of1")
    for name, first in (("of2", 1), ("of3", 1), ("from3", 4)):
        other = read_metrics(tmp_path / f"runs/{name}")
        assert [line["step"] for line in other] == list(range(first, 7))
        for ours, theirs in zip(other, one[first - 1 :]):
            assert ours["tokens"] == theirs["tokens"]
            for key in {"loss", "grad_norm", "val_loss"} & theirs.keys():
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (name, key)
        assert sum("val_loss" in line for line in other) == (2 if first == 1 else 1)
        states = [
            read_state((tmp_path / f"runs/{run}/checkpoints/latest").resolve())["data"]
            for run in ("of1", name)
        ]
        assert states[0] == states[1]


def test_a_start_that_several_processes_refused_can_be_corrected(config, tmp_path):
    (tmp_path / "short.txt").write_text("a whale")
    words = ["run.name=mine", "run.resume=never", "data.tokenizer=null", "train.steps=4"]
    short = f"data.sources=[{{path: {tmp_path}/short.txt, name: text}}]"
    group = train(config, tmp_path, *words, short, world=2)
    assert group.wait() == [2, 2]
    assert "is too small" in group.output() and "Traceback" not in group.output()
    finish(train(config, tmp_path, *words, "data.tokenizer={kind: bpe, vocab_size: 280}", world=2))
    kept = read_tokenizer(tmp_path / "runs/mine/tokenizer")
    assert kept.vocab_size == 280, "not that of the short text"


@pytest.mark.parametrize("engine", ENGINES)
def test_initial_weights_bring_the_average_that_routes(config, tmp_path, engine):
    """Not moved by the weight's steps, it moves a tenth of the way to the weight in each."""
    model = ModelConfig(**MODEL)
    theirs = build_model(
        model, seed=5, router=RouterConfig(selection={"kind": "ema", "decay": 0.9})
    )
    for router in routers_of(theirs):
        router.rules.selection.weight_ema.mul_(3)
    words = [
        f"model.init_from={save_weights(theirs, tmp_path / 'source')}",
        "router.selection.kind=ema",
        "router.selection.decay=0.9",
    ]
    words += [
        "router.exportable=false",
        "optim.lr=1e-30",
        "optim.schedule.warmup_steps=0",
        "train.steps=1",
    ]
    words += ["run.name=next", f"parallel.engine={engine}", "train.micro_batch_size=1"]
    group = start_training([str(config), *words], world=2, folder=tmp_path)
    finish(group)
    ours = read_weights((tmp_path / "runs/next/checkpoints/latest").resolve())
    for layer, router in enumerate(routers_of(theirs)):
        average_ED = router.rules.selection.weight_ema
        expected = torch.lerp(average_ED, router.weight.detach(), 0.1)
        name = f"layers.{layer}.moe.router.rules.selection.weight_ema"
        torch.testing.assert_close(ours[name], expected)
