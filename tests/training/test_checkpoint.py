"""Checkpoints: complete or not there at all, verified, retained, and readable without the run."""

import json
import os
import resource
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from parallel import World
from training.checkpoint import files, saver
from training.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    NonFiniteWeights,
    candidates,
    damage,
    defect,
    newest,
    point_latest,
    read_rng,
    read_state,
    resolve,
)
from training.checkpoint.saver import Saved, Saver, Snapshot
from training.checkpoint.tensors import load_tensors, read_weights
from training.device import restore_rng, rng_bytes, seed_all, untouched_rng

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def snapshot(step: int, value: float | None = None, **changes) -> Snapshot:
    """A small state whose numbers depend on the step; the tensors are views, as in training."""
    value = float(step) if value is None else value
    flat = torch.arange(100, dtype=torch.float32) + value
    tensors = {
        "weights/a.w": flat[0:6],
        "weights/b.w": flat[16:20],
        "exp_avg/a.w": flat[32:38] * 2,
        "buffers/router.bias": torch.full((3,), value, dtype=torch.float64),
        "updates": torch.tensor(value),
    }
    settings = {
        "state": {"shapes": {"a.w": [2, 3], "b.w": [4], "router.bias": [3]}, "tokens": 10 * step},
        "rng": rng_bytes(),
        "files": {"config.yaml": b"run: {}\n", "model/config.json": b"{}"},
        "finite": torch.isfinite(flat).all(),
    } | changes
    return Snapshot(step, tensors, **settings)


def save(root: Path, step: int, *, keep_last: int | None = None, **changes) -> Saved:
    saver = Saver(root, World(), keep_last=keep_last, background=False, last_step=step - 1)
    saver.save(snapshot(step, **changes))
    (result,) = saver.poll()
    return result


def loaded_value(folder: Path) -> float:
    tensors = {"weights/a.w": torch.zeros(6), "updates": torch.zeros(())}
    load_tensors(folder, tensors)
    assert torch.equal(tensors["weights/a.w"], torch.arange(6.0) + tensors["updates"])
    return tensors["updates"].item()


def test_values_are_converted_where_a_run_keeps_another_dtype(tmp_path):
    """float32 masters into bfloat16 weights, to the nearest; back exactly."""
    wide = torch.linspace(-1, 1, 33)
    for step, kept, given in ((1, wide, torch.bfloat16), (2, wide.bfloat16(), torch.float32)):
        saver = Saver(tmp_path, World(), background=False)
        saver.save(Snapshot(step, {"weights/w": kept}, {}, b""))
        found = {"weights/w": torch.empty(33, dtype=given)}
        load_tensors(saver.poll()[0].folder, found)
        assert torch.equal(found["weights/w"], kept.to(given))


# --- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_what_is_saved_comes_back(tmp_path, background):
    saver = Saver(tmp_path, World(), background=background)
    original = snapshot(7)
    saver.save(original)
    saver.wait()
    (result,) = saver.poll()
    assert result.error is None and result.step == 7 and saver.poll() == []
    folder = tmp_path / "step_00000007"
    assert result.folder == folder and (tmp_path / "latest").resolve() == folder.resolve()
    assert os.readlink(tmp_path / "latest") == "step_00000007", "relative: the run can be moved"
    back = {name: torch.full_like(tensor, -1) for name, tensor in original.tensors.items()}
    load_tensors(folder, back)
    for name, tensor in original.tensors.items():
        assert torch.equal(back[name], tensor), name
    state = read_state(folder)
    assert state["step"] == 7 and state["tokens"] == 70 and state["world_size"] == 1
    weights = read_weights(folder)
    assert {name: list(w.shape) for name, w in weights.items()} == state["shapes"]
    assert torch.equal(weights["a.w"].reshape(-1), original.tensors["weights/a.w"])
    assert weights["router.bias"].dtype == torch.float64
    assert list(read_weights(folder, ["b.w"])) == ["b.w"]
    assert (folder / "model" / "config.json").read_text() == "{}"
    assert read_rng(folder, 0) == original.rng and read_rng(folder, 1) is None
    assert damage(folder) is None


def test_only_the_elements_of_a_view_are_stored(tmp_path):
    big = torch.zeros(1_000_000)
    tensors = {f"weights/{i}": big[i * 64 : i * 64 + 8] for i in range(20)}
    saver = Saver(tmp_path, World(), background=False)
    saver.save(Snapshot(1, tensors, {}, b""))
    assert saver.poll()[0].bytes < 100_000


def test_background_save_holds_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    """The next update of the weights must not reach a checkpoint that is being written."""
    gate = threading.Event()
    write = Saver._write_tensors
    monkeypatch.setattr(
        Saver, "_write_tensors", lambda *arguments: (gate.wait(20), write(*arguments))[1]
    )
    flat = torch.zeros(64)
    saver = Saver(tmp_path, World())
    saver.save(Snapshot(1, {"weights/w": flat[:8]}, {}, b""))
    flat.fill_(9.0)
    assert saver.poll() == [], "not ended yet"
    assert not (tmp_path / "latest").exists(), "latest must not move before the files are there"
    gate.set()
    saver.save(Snapshot(2, {"weights/w": flat[:8]}, {}, b""))
    saver.wait()
    assert [result.step for result in saver.poll()] == [1, 2]
    for step, value in ((1, 0.0), (2, 9.0)):
        back = {"weights/w": torch.full((8,), -1.0)}
        load_tensors(tmp_path / f"step_0000000{step}", back)
        assert torch.equal(back["weights/w"], torch.full((8,), value))


def test_retention_keeps_the_newest_and_leaves_strangers_alone(tmp_path):
    (tmp_path / "step_of_my_own").mkdir()
    (tmp_path / "step_00000001").mkdir()  # never finished
    for step in (2, 3, 4, 5):
        assert save(tmp_path, step, keep_last=2).error is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step_00000001",
        "step_00000004",
        "step_00000005",
        "step_of_my_own",
    ]


@pytest.mark.parametrize(("keep_last", "left"), [(1, [4, 8, 9]), (3, [4, 7, 8, 9]), (None, None)])
def test_milestones_stay(tmp_path, keep_last, left):
    saver = Saver(tmp_path, World(), keep_last=keep_last, keep_every=4, background=False)
    for step in range(1, 10):
        saver.save(snapshot(step))
    kept = [int(path.name[5:]) for path in reversed(candidates(tmp_path))]
    assert kept == (left or list(range(1, 10)))


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))


@pytest.mark.parametrize(("keep_last", "left"), [(1, [10, 12]), (3, [6, 8, 10, 12])])
def test_retention_does_not_count_what_was_passed_over(tmp_path, keep_last, left):
    """Damage that only a checksum shows, above and between the ones of a run that went on."""
    for step in (2, 4, 6, 10):
        save(tmp_path, step)
    flip(tmp_path / "step_00000010" / "state.json")
    assert newest(tmp_path)[0].name == "step_00000006"
    saver = Saver(tmp_path, World(), keep_last=keep_last, background=False, last_step=6)
    for step in (8, 12):
        saver.save(snapshot(step))
        (saved,) = saver.poll()
        assert damage(saved.folder) is None, "what was just announced stays"
    assert [int(path.name[5:]) for path in reversed(candidates(tmp_path))] == left


def test_a_folder_written_anew_counts_again(tmp_path):
    save(tmp_path, 4)
    flip(tmp_path / "step_00000004" / "state.json")
    saver = Saver(tmp_path, World(), keep_last=1, background=False)
    for step in (4, 6):
        saver.save(snapshot(step))
    assert [path.name for path in candidates(tmp_path)] == ["step_00000006"]


def test_leftovers_of_killed_saves_go_with_the_next_save(tmp_path):
    for name in ("step_00000009.tmp", "step_00000002.retired", "step_00000003.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    save(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000004"]


def test_a_damaged_folder_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "step_00000004" / "state.json").write_text("{}")
    assert save(tmp_path, 4, value=5.0).error is None
    assert damage(tmp_path / "step_00000004") is None
    assert loaded_value(tmp_path / "step_00000004") == 5.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000004"]


# --- failures of writing ------------------------------------------------------------------------


def test_non_finite_weights_never_replace_a_healthy_checkpoint(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep_last=3)
    result = save(tmp_path, 4, keep_last=3, value=float("nan"))
    assert isinstance(result.error, NonFiniteWeights)
    assert "not finite at step 4" in str(result.error)
    folder, skipped = newest(tmp_path)
    assert folder.name == "step_00000003" and skipped == []
    assert len(candidates(tmp_path)) == 3 and (tmp_path / "latest").resolve() == folder.resolve()


@pytest.mark.parametrize("background", [False, True])
def test_full_disk(tmp_path, background):
    """Writing fails midway: a clear message, the old checkpoint stays, no half of a folder."""
    save(tmp_path, 1)
    big = {"weights/w": torch.zeros(300_000)}
    saver = Saver(tmp_path, World(), background=background)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        saver.save(Snapshot(2, big, {}, b""))
        saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (result,) = saver.poll()
    assert result.folder is None
    assert "no space to write checkpoint step_00000002" in str(result.error)
    assert "checkpoint.keep.last" in str(result.error) and "\n" not in str(result.error)
    assert [path.name for path in candidates(tmp_path)] == ["step_00000001"]
    assert damage((tmp_path / "latest").resolve()) is None
    saver.save(Snapshot(3, big, {}, b""))
    saver.wait()
    assert saver.poll()[0].error is None, "the next save works again"


def test_unwritable_place(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    result = save(tmp_path / "checkpoints", 1)
    assert "checkpoint step_00000001 could not be written" in str(result.error)
    assert "\n" not in str(result.error)


class Killed(BaseException):
    """What is left of a process that was killed at this point: nothing after it runs."""


def test_a_writer_killed_after_any_file_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    """RLinf/RLinf#1469: each call that touches the disk is the last once; a whole one is left."""
    names = ("_write", "_sync_file", "sync_folder", "sha256", "point_latest")
    calls = [(saver, name) for name in names] + [(files, name) for name in names[2:4]]
    originals = {name: getattr(saver, name) for name in names}
    originals["rename"], write_tensors = Path.rename, saver.dcp.save
    countdown, inside = [0], [False]

    def tick():
        if countdown[0] == 0:
            raise Killed
        countdown[0] -= 1

    def counted(call):
        def run(*arguments, **keywords):
            if not inside[0]:
                tick()
            return call(*arguments, **keywords)

        return run

    def save_tensors(*arguments, **keywords):
        tick()
        inside[0] = True  # it turns whatever is raised inside into its own exception
        try:
            write_tensors(*arguments, **keywords)
        finally:
            inside[0] = False
        tick()

    outcomes = []
    for last in range(200):
        root = tmp_path / str(last)
        with monkeypatch.context() as patch:
            save(root, 1)
            for module, name in calls:
                patch.setattr(module, name, counted(originals[name]))
            patch.setattr(Path, "rename", counted(originals["rename"]))
            patch.setattr(saver.dcp, "save", save_tensors)
            patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
            countdown[0] = last
            try:
                save(root, 2, keep_last=1)
                finished = True
            except Killed:
                finished = False
        folder, skipped = newest(root)
        assert folder is not None, f"nothing left after {last} calls"
        value = loaded_value(folder)
        assert folder.name == f"step_0000000{value:.0f}"
        pointed = (root / "latest").resolve()
        assert pointed.name in ("step_00000001", "step_00000002")
        if value == 1:
            assert damage(pointed) is None
            half = (root / "step_00000002.tmp").exists()
            assert bool(skipped) == half, (last, skipped)
            assert all("step_00000002.tmp is passed over" in text for text in skipped)
        outcomes.append(value)
        assert save(root, 3, keep_last=2).error is None, "the next save cleans up"
        assert loaded_value(newest(root)[0]) == 3
        if finished:
            break
    assert finished and len(outcomes) > 15, f"only {len(outcomes)} places were tried"
    assert outcomes == sorted(outcomes) and {1.0, 2.0} == set(outcomes)


# --- failures of reading ------------------------------------------------------------------------


def files_of(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_any_damage_is_named_and_the_older_checkpoint_taken(tmp_path):
    whole = tmp_path / "whole"
    save(whole, 1)
    save(whole, 2)
    names = files_of(whole / "step_00000002")
    assert {MANIFEST, "state.json", ".metadata", "rng_00000.pt", "config.yaml"} <= set(names)
    for number, name in enumerate(names):
        for kind in ("missing", "cut", "flipped"):
            root = tmp_path / f"{number}-{kind}"
            shutil.copytree(whole, root, symlinks=True)
            path = root / "step_00000002" / name
            content = path.read_bytes()
            if kind == "missing":
                path.unlink()
            elif kind == "cut":
                path.write_bytes(content[:-1])
            else:
                middle = len(content) // 2
                flipped = bytes([content[middle] ^ 4])
                path.write_bytes(content[:middle] + flipped + content[middle + 1 :])
            folder, skipped = newest(root)
            assert folder is not None and folder.name == "step_00000001", (name, kind)
            assert len(skipped) == 1 and "step_00000002" in skipped[0], (name, kind)
            if name != MANIFEST:
                assert name in skipped[0], (name, kind, skipped)
            with pytest.raises(CheckpointError, match="step_00000002"):
                resolve(root / "step_00000002")
            assert resolve(root).name == "step_00000001"


def test_every_flipped_bit_of_the_tensor_file_is_seen(tmp_path):
    """torch.distributed.checkpoint alone loads most of these without a word."""
    save(tmp_path, 1)
    path = next((tmp_path / "step_00000001").glob("*.distcp"))
    content = bytearray(path.read_bytes())
    generator = torch.Generator().manual_seed(0)
    for bit in torch.randint(len(content) * 8, (60,), generator=generator).tolist():
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        assert "does not match its checksum" in (damage(tmp_path / "step_00000001") or "no"), bit
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert damage(tmp_path / "step_00000001") is None


def test_nothing_to_resume(tmp_path):
    assert newest(tmp_path / "not there") == (None, [])
    (tmp_path / "step_00000003.tmp").mkdir()
    folder, skipped = newest(tmp_path)
    assert folder is None and skipped == ["step_00000003.tmp is passed over: it was never finished"]


def test_paths_a_user_may_give(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        save(root, step)
    for path in (root / "latest", root, tmp_path / "run", root / "step_00000002"):
        assert resolve(path).name == "step_00000002", path
    assert resolve(root / "step_00000001").name == "step_00000001"
    with pytest.raises(
        CheckpointError, match=r"exist; .*checkpoints holds 'step_00000002', 'step_0000"
    ):
        resolve(root / "step_00000009")
    with pytest.raises(CheckpointError, match="is no checkpoint, nor a run or another folder that"):
        resolve(tmp_path)
    (root / "step_00000002" / MANIFEST).unlink()
    (root / "step_00000001" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"no complete checkpoint: .*no {MANIFEST}"):
        resolve(root)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "step_00000001"
    with pytest.raises(CheckpointError, match=r"weights/c\.w has 5 elements here and none there"):
        load_tensors(folder, {"weights/c.w": torch.zeros(5)})
    with pytest.raises(CheckpointError, match=r"weights/a\.w has 7 elements here and 6 there"):
        load_tensors(folder, {"weights/a.w": torch.zeros(7)})


@pytest.mark.parametrize("name", ["state.json", ".metadata"])
def test_a_manifest_without_what_every_checkpoint_has(tmp_path, name):
    for step in (1, 2):
        save(tmp_path, step)
    path = tmp_path / "step_00000002" / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["files"][name]
    path.write_text(json.dumps(manifest))
    (path.parent / name).unlink()
    folder, skipped = newest(tmp_path)
    assert folder.name == "step_00000001"
    assert skipped == [f"step_00000002 is passed over: its {MANIFEST} does not list {name}"]


def test_a_newer_format_is_not_read(tmp_path):
    save(tmp_path, 1)
    path = tmp_path / "step_00000001" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    assert defect(path.parent) == "its format is 99, this version reads 1"


def test_latest_moves_in_one_step(tmp_path):
    """A reader that looks all the time never finds `latest` gone."""
    for name in ("step_00000001", "step_00000002"):
        (tmp_path / name).mkdir()
    point_latest(tmp_path, tmp_path / "step_00000001")
    seen, end = set(), time.monotonic() + 0.3

    def look():
        while time.monotonic() < end:
            seen.add((tmp_path / "latest").resolve().name)

    reader = threading.Thread(target=look)
    reader.start()
    while time.monotonic() < end:
        for name in ("step_00000002", "step_00000001"):
            point_latest(tmp_path, tmp_path / name)
    reader.join()
    assert seen == {"step_00000001", "step_00000002"}


# --- random states ------------------------------------------------------------------------------


def draw() -> list[float]:
    import random

    import numpy as np

    return [random.random(), float(np.random.rand()), torch.rand(()).item()]  # noqa: NPY002


def test_random_states_come_back_and_differ_by_process():
    seed_all(3, 0)
    draw()
    saved = rng_bytes()
    expected = [draw(), draw()]
    seed_all(3, 1)
    assert draw() != expected[0]
    restore_rng(saved)
    assert [draw(), draw()] == expected
    restore_rng(saved)
    with untouched_rng():
        draw()
    assert draw() == expected[0]
