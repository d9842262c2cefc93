"""What the processes of test_world.py do. Each check runs on every process of a gloo group.

The reference is the same rows in one process, computed by every process for itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from parallel import (
    World,
    agree,
    barrier,
    from_main,
    gather,
    shutdown,
    start,
    sum_,
)
from parallel.mesh import build_mesh, plan_mesh
from tests.distributed import tiny
from tests.engines import local_engine
from tests.training import test_loop as alone
from training.checkpoint.files import CheckpointError, NonFiniteWeights, candidates, damage, newest
from training.checkpoint.saver import Saver, Snapshot
from training.checkpoint.tensors import load_tensors
from training.evaluate import validate
from training.optim.adamw import AdamW
from training.optim.groups import parameter_groups
from training.report.window import read_window
from training.step import agree_on_step, train_step

CPU = torch.device("cpu")


def run_all(folder: Path) -> None:
    """Every check below, in the same order on all processes."""
    torch.manual_seed(0)
    world = start("cpu", timeout_s=60)
    assert world.size == 2
    collectives(world)
    gradients(world)
    rank_without_targets(world)
    auxiliary_losses(world)
    one_bad_rank(world)
    validation(world)
    checkpoints(world, folder)
    print("all checks passed")
    shutdown(world)


def collectives(world: World) -> None:
    tensor = torch.tensor([1.0, 10.0]) * (world.rank + 1)
    assert sum_(world, tensor).tolist() == [3.0, 30.0]
    big = 2**53 + 1  # not a float64
    assert agree(world, [big if world.rank else 0, 1]) == [big, 2]
    assert from_main(world, {"rank": world.rank}) == {"rank": 0}
    assert gather(world, world.rank * 2) == [0, 2]
    barrier(world)


def build(world: World, setting=None):
    """The model of `alone.build` and its optimizer; on several processes both are split."""
    if world.size == 1:
        return alone.build(setting=setting)
    model, _ = alone.build(setting=setting)
    mesh = build_mesh(plan_mesh(world.size, world.size, num_experts=4), CPU, timeout_s=60)
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1)
    return model, tiny.engine_of("fsdp2", model, mesh, groups, AdamW(clip_norm=None))


def step(world: World, batches, setting, number: int = 1, poisoned: bool = False):
    """One step of this process's batches: gradients by name (this process's parts), the result, the
    state."""
    model, optimizer = build(world, setting)
    if poisoned:
        model.forward = alone._nan_after(model.forward)
    update, gradients = optimizer.update, {}

    def watched():
        gradients.update(tiny.copies(optimizer.gradients()))
        return update()

    optimizer.update = watched
    state = alone.state_of(model, optimizer, step=number, world=world)
    result = train_step(state, batches, agree_on_step(world, batches, stop=False))
    return gradients, result, state


def assert_equal_steps(got, expected) -> None:
    """Gradients, loss terms and norms, those of the groups as well."""
    assert tiny.difference(got[0], expected[0], 1e-5) == ""
    assert got[1].groups == expected[1].groups and len(got[1].groups) == 4
    torch.testing.assert_close(got[1].numbers, expected[1].numbers, rtol=1e-5, atol=1e-6)


def halves(world: World, data, size: int):
    """This process's half of the rows, and all rows, in micro-batches of `size`."""
    tokens, labels = data
    cut = [alone.batch_of(t, y) for t, y in zip(tokens.split(size), labels.split(size))]
    each = len(cut) // world.size
    return cut[world.rank * each : (world.rank + 1) * each], cut


def gradients(world: World) -> None:
    for size in (4, 1):
        mine, every = halves(world, alone.rows(), size)
        got = step(world, mine, alone.router(z=0.01))
        expected = step(World(), every, alone.router(z=0.01))
        assert_equal_steps(got, expected)
        assert (got[1].tokens, len(got[1].rows)) == (expected[1].tokens, len(mine) * size)


def rank_without_targets(world: World) -> None:
    """All labels of the second process ignored, then everybody's."""
    data = alone.rows(ignored=(4, 5, 6, 7))
    mine, every = halves(world, data, 2)
    assert (sum(batch.num_targets for batch in mine) == 0) == (world.rank == 1)
    assert_equal_steps(step(world, mine, alone.router()), step(World(), every, alone.router()))
    nothing, _ = halves(world, alone.rows(ignored=tuple(range(8))), 2)
    assert agree_on_step(world, nothing, stop=world.rank == 1) == dataclasses.replace(
        agree_on_step(world, nothing, stop=False), targets=0, stop=True
    )


def auxiliary_losses(world: World) -> None:
    """global: as one process that has all rows in one micro-batch. micro: the mean of both."""
    data = alone.rows()
    mine, _ = halves(world, data, 4)
    whole = [alone.batch_of(*data)]
    assert_equal_steps(
        step(world, mine, alone.router(balance=0.5, z=0.1, scope="global")),
        step(World(), whole, alone.router(balance=0.5, z=0.1)),
    )
    _, every = halves(world, data, 4)
    assert_equal_steps(
        step(world, mine, alone.router(balance=0.5)),
        step(World(), every, alone.router(balance=0.5)),
    )


def one_bad_rank(world: World) -> None:
    """NaN on the second process alone: both skip, both know why, and the batch is named in full."""
    mine, _ = halves(world, alone.rows(), 4)
    _, result, state = step(world, mine, alone.router(), number=7, poisoned=world.rank == 1)
    _, untouched = alone.build()
    before = {n: t for n, t in untouched.tensors().items() if n != "guard/skipped"}
    after = {n: t for n, t in state.optimizer.tensors().items() if n != "guard/skipped"}
    assert tiny.difference(after, before, 0.0) == ""
    read = read_window(state, [result])
    assert read.metrics["skipped_steps"] == 1
    (bad,) = read.skipped
    assert (bad.step, bad.reason) == (7, "not finite")
    assert bad.rows == [[0, 0, row] for row in (0, 1, 2, 3)] * 2, "rows of both processes"


def validation(world: World) -> None:
    """Three batches on two processes: the last one of the second process is empty."""
    model, _ = alone.build()
    tokens, labels = alone.rows(6)
    three = [alone.batch_of(t, y) for t, y in zip(tokens.split(2), labels.split(2))]
    empty = alone.batch_of(
        torch.zeros_like(tokens[:2]),
        torch.full_like(labels[:2], -100),
        torch.zeros_like(tokens[:2], dtype=torch.bool),
    )
    mine = three[:2] if world.rank == 0 else [three[2], empty]
    got = validate(model, {"a": mine, "b": mine[:1]}, world=world, device=CPU)
    expected = validate(model, {"a": three, "b": three[::2]}, world=World(), device=CPU)
    assert got == pytest.approx(expected, rel=1e-6)
    assert set(got) == {
        *("val_loss", "val_loss/a", "val_loss/b"),
        *("val_perplexity", "val_perplexity/a", "val_perplexity/b"),
    }


def snapshot(step_number: int, world: World) -> Snapshot:
    config = ModelConfig(**alone.MODEL)
    model = build_model(config, seed=step_number)
    optimizer = local_engine(parameter_groups(model, parameter_kinds(model), weight_decay=0.1))
    return Snapshot(
        step_number,
        optimizer.tensors(),
        {"shapes": optimizer.shapes()},
        f"random state of {world.rank}".encode(),
        finite=optimizer.all_finite(),
    )


def checkpoints(world: World, folder: Path) -> None:
    for background in (False, True):
        root = folder / f"checkpoints-{background}"
        saver = Saver(root, world, background=background)
        first = snapshot(1, world)
        saver.save(first)
        saver.wait()
        (saved,) = saver.poll()
        assert saved.error is None, saved.error
        assert damage(saved.folder, world) is None
        for rank in range(world.size):
            content = (saved.folder / f"rng_{rank:05d}.pt").read_bytes()
            assert content == f"random state of {rank}".encode()
        back = {name: torch.full_like(t, -1) for name, t in first.tensors.items()}
        load_tensors(saved.folder, back)
        assert all(torch.equal(back[name], t) for name, t in first.tensors.items())
        size = sum(path.stat().st_size for path in saved.folder.glob("*.distcp"))
        stored = sum(t.nbytes for t in first.tensors.values())
        assert size < 1.5 * stored + 200_000, "equal tensors are written once"

        failing_rank(world, saver)
        poisoned = dataclasses.replace(snapshot(3, world), finite=torch.tensor(world.rank == 0))
        saver.save(poisoned)
        saver.wait()
        (failed,) = saver.poll()
        assert isinstance(failed.error, NonFiniteWeights)
        found, passed_over = newest(root, world)
        assert found == saved.folder and passed_over == []


def failing_rank(world: World, saver: Saver) -> None:
    """Writing fails on the second process alone: both know, nothing is left, nobody hangs."""
    write = Saver._write_small
    if world.rank == 1:

        def full(*arguments):
            raise OSError(28, "No space left on device")

        saver._write_small = full
    saver.save(snapshot(2, world))
    saver.wait()
    (failed,) = saver.poll()
    assert isinstance(failed.error, CheckpointError)
    assert "no space to write checkpoint step_00000002" in str(failed.error)
    saver._write_small = write.__get__(saver)
    barrier(world)
    assert [path.name for path in candidates(saver.root)] == ["step_00000001"]
    barrier(world)
