"""Trackers get what the run logs, and are never in its way."""

import sys
import threading
import types
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from training.report.files import read_metrics
from training.report.trackers import (
    TRACKERS,
    Attempt,
    TensorBoard,
    Tracker,
    TrackerThread,
    Trackio,
    Wandb,
    bounded,
    finish,
)

ATTEMPT = Attempt(Path("runs/a"), 2, 10, {"lr": 1})


class Feed:
    place = "in memory"

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.lines, self.closed, self.gate = [], False, gate

    def log(self, step, numbers, pictures):
        if self.gate is not None:
            self.gate.wait(20)
        self.lines.append((step, numbers, pictures))

    def close(self):
        self.closed = True


class Mine(Tracker):
    title = "Mine"
    feeds: ClassVar[list[Feed]] = []

    kind: Literal["mine"] = "mine"

    def open(self, attempt):
        return self.feeds[-1]


def test_a_tracker_that_is_too_slow_loses_lines_and_not_time(monkeypatch):
    gate, warnings = threading.Event(), []
    monkeypatch.setattr(Mine, "feeds", [feed := Feed(gate)])
    monkeypatch.setattr(TrackerThread, "QUEUE", 5)
    monkeypatch.setattr(TrackerThread, "FINISH_S", 0.2)
    thread = TrackerThread(Mine(), ATTEMPT, say=[].append, warn=warnings.append)
    for step in range(50):
        thread.put(step, {}, {})
    finish([thread])
    assert len(warnings) == 1 and "Mine did not finish within 0.2 s" in warnings[0]
    gate.set()
    monkeypatch.setattr(TrackerThread, "FINISH_S", 20.0)
    finish([thread])
    # of the queue's five one made room for the end, and one more may have been taken
    assert len(feed.lines) in (4, 5) and feed.closed
    assert len(warnings) == 2 and f"{50 - len(feed.lines)} lines were not sent" in warnings[1]


def test_a_bounded_number_of_series():
    metrics = ("max_violation", "load_entropy", "dead_experts", "z_loss", "tile_waste")
    values = {f"layers/{layer}/{name}": 1.0 for layer in range(94) for name in metrics}
    shown = bounded({"loss": 2.0, "step": 3} | values)
    layers = {int(name.split("/")[1]) for name in shown if name.startswith("layers/")}
    assert len(layers) == 16
    assert {0, 93} <= layers
    assert len(shown) == 2 + 3 * 16
    few = {name: value for name, value in values.items() if name.startswith("layers/1/")}
    assert set(bounded(few)) == {f"layers/1/{name}" for name in metrics[:3]}
    assert bounded({"loss": 2.0}) == {"loss": 2.0}


@pytest.mark.parametrize("fault", ["hangs", "raises", "exits"])
def test_no_tracker_can_hang_or_fail_the_run(run, tmp_path, monkeypatch, capsys, fault):
    """Beside one that fails another one gets every line."""
    free = threading.Event()

    def init(**_):
        if fault == "hangs":
            free.wait(60)
        raise SystemExit(3) if fault == "exits" else RuntimeError("no network")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Image=None))
    monkeypatch.setitem(TRACKERS, "mine", Mine)
    monkeypatch.setattr(Mine, "feeds", [feed := Feed()])
    monkeypatch.setattr(TrackerThread, "FINISH_S", 0.5)
    words = "log.trackers=[{kind: wandb, mode: online}, {kind: mine}]"
    assert run("run.name=w", words, "train.steps=4") == 0
    said = capsys.readouterr().out
    assert "Weights & Biases" in said and "metrics.jsonl has everything" in said
    assert "Mine: in memory" in said
    lines = read_metrics(tmp_path / "runs/w")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    seen = [(step, numbers["loss"]) for step, numbers, _ in feed.lines if numbers]
    assert seen == [(line["step"], line["loss"]) for line in lines] and feed.closed
    free.set()
    for thread in threading.enumerate():
        if isinstance(thread, TrackerThread):
            thread.join(10)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    warnings = []
    thread = TrackerThread(TensorBoard(), ATTEMPT, say=pytest.fail, warn=warnings.append)
    finish([thread])
    assert len(warnings) == 1 and "TensorBoard stopped (ModuleNotFoundError" in warnings[0]


# --- the packages themselves --------------------------------------------------------------------


def test_wandb_gets_every_line_on_its_own_step_axis(monkeypatch):
    """With the tracker's own step, points of a repeated stretch would be dropped."""
    lines, given, said = [], {}, []
    sent = types.SimpleNamespace(
        url="https://wandb.test/p",
        define_metric=lambda name, step_metric: given.update(axis=(name, step_metric)),
        log=lines.append,
        finish=lambda: given.update(finished=True),
    )
    fake = types.SimpleNamespace(init=lambda **s: given.update(s) or sent, Image=lambda path: path)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    settings = Wandb(mode="online", project="p")
    thread = TrackerThread(settings, ATTEMPT, say=said.append, warn=pytest.fail)
    for step in (1, 2, 12, 10, 11):
        thread.put(step, {"loss": 1.0}, {"pictures/load": Path("load.png")})
    finish([thread])
    assert said == ["Weights & Biases: https://wandb.test/p"]
    assert (given["project"], given["mode"], given["name"]) == ("p", "online", "a-2")
    assert (given["group"], given["config"]) == ("a", {"lr": 1})
    assert given["axis"] == ("*", "step") and given["finished"]
    assert [line["step"] for line in lines] == [1, 2, 12, 10, 11]
    assert lines[0]["loss"] == 1.0 and lines[0]["pictures/load"] == "load.png"


def test_wandb_offline(run, tmp_path):
    words = ("log.trackers=[{kind: wandb, mode: offline, project: tiny}]", "log.plots=true")
    assert run("run.name=offline", *words) == 0
    found = list((tmp_path / "runs/offline").glob("wandb/offline-run-*/run-*.wandb"))
    pictures = (tmp_path / "runs/offline").glob("wandb/offline-run-*/files/media/images/**/*.png")
    names = {path.name.split("_")[0] for path in pictures}
    assert {"load", "max", "routing"} <= names  # load, max_violation, load_entropy, routing_churn
    drawn = {path.stem for path in (tmp_path / "runs/offline/plots").glob("*.png")}
    assert {"load", "max_violation", "load_entropy", "routing_churn"} <= drawn
    assert len(found) == 1 and found[0].stat().st_size > 1000
    assert not [thread for thread in threading.enumerate() if "tracker" in thread.name]


def test_tensorboard_shows_one_curve_over_all_attempts(run, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = ("run.name=board", "log.trackers=[{kind: tensorboard}]", "log.plots=true")
    assert run(*words, "train.steps=4") == 0
    assert run(*words, "train.steps=6") == 0
    board = events.EventAccumulator(str(tmp_path / "runs/board/tensorboard"))
    board.Reload()
    lines = read_metrics(tmp_path / "runs/board")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    curve = [(point.step, point.value) for point in board.Scalars("loss")]
    assert curve == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in lines]
    assert "pictures/load" in board.Tags()["images"] and "step" not in board.Tags()["scalars"]


def test_trackio_keeps_every_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at import
    pytest.importorskip("trackio")
    said = []
    attempt = Attempt(tmp_path / "run", 0, 0, {"lr": 1})
    thread = TrackerThread(Trackio(project="tiny"), attempt, say=said.append, warn=pytest.fail)
    for step in (1, 2, 3):
        thread.put(step, {"loss": float(step)}, {})
    finish([thread])
    assert len(said) == 1 and "trackio show --project tiny" in said[0]
    from trackio.sqlite_storage import SQLiteStorage

    kept = SQLiteStorage.get_logs("tiny", "run-0")
    assert [(line["step"], line["loss"]) for line in kept] == [(1, 1.0), (2, 2.0), (3, 3.0)]
