"""Findings about made-up runs: each rule speaks up for its fault, and none about a healthy run."""

import json
import math
import random

import pytest
import yaml

from training.report.findings import findings
from training.report.plots import draw, figures, smoothed, thin
from training.report.record import Series, read_run, unigram_entropy

NOW = 2_000_000.0
CONFIG = {
    "run": {"name": "x"},
    "model": {"num_experts_per_tok": 4, "num_experts": 16},
    "router": {"balance": {"kind": "global", "coef": 0.01}},
    "optim": {"clip_norm": 1.0},
    "train": {"steps": 1000},
}


def healthy(step):
    """A logged line of a run that goes well."""
    noise = random.Random(step).uniform(-0.02, 0.02)
    return {
        "step": step,
        "attempt": 0,
        "time": NOW - (1000 - step),
        "loss": 3 + 5 * math.exp(-step / 200) + noise,
        "lr": 1e-3 * min(1, (1000 - step) / 200 + 0.01),
        "grad_norm": 0.6 + noise,
        "skipped_steps": 0,
        "tokens": step * 1000,
        "tokens_per_second": 5000.0 + 1000 * noise,
        "balance_loss": 1.02,
        "max_violation": 0.4 + noise,
        "dead_experts": 0.0,
        "router_entropy": 1.2,
        "layers/0/max_violation": 0.3,
        "layers/1/max_violation": 0.4 + noise,
        "layers/0/dead_experts": 0.0,
        "layers/1/dead_experts": 0.0,
    }


def make_run(folder, change=lambda line: line, config=CONFIG, steps=1000, events=()):
    """Write a run folder whose lines went through `change`; None leaves a line out."""
    folder.mkdir(exist_ok=True)
    lines = [healthy(step) for step in range(10, steps + 1, 10)]
    for line in lines:
        if line["step"] % 100 == 0:
            line["val_loss"] = line["loss"] + 0.1
    lines = [line for line in map(change, lines) if line is not None]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = "# Every setting\n# torch: 2.13.0\n\n" + yaml.safe_dump(config)
    (folder / "config.yaml").write_text(text)
    return folder


def told(folder, now=NOW):
    return findings(read_run(folder), now)


def test_a_healthy_run_gives_no_finding(tmp_path):
    assert told(make_run(tmp_path / "run")) == []


def test_time_between_attempts_is_none_of_training(tmp_path):
    """An attempt of 100 steps, a night, and a second one that resumes from step 50."""

    def change(line):
        step = line["step"]
        return line | ({"attempt": 0} if step <= 50 else {"attempt": 1, "time": line["time"] + 1e5})

    folder = make_run(tmp_path / "run", change, steps=200)
    lines = read_run(folder).lines
    assert lines[-1]["time"] - lines[0]["time"] == 1e5 + 190
    assert read_run(folder).training_seconds == 40 + 140


def after(step, **values):
    def change(line):
        return line | values if line["step"] > step else line

    return change


def at(steps, **values):
    return lambda line: line | values if line["step"] in steps else line


def flat(line):
    return line | {"loss": 4.0 + (line["loss"] % 0.0001), "lr": 1e-3}


def rising(line):
    return line | {"loss": line["loss"] + max(0, line["step"] - 600) / 400}


def overfit(line):
    if "val_loss" in line:
        line["val_loss"] += max(0, line["step"] - 500) / 500
    return line


def slower(line):
    return line | {"tokens_per_second": 5000.0 if line["step"] < 700 else 2000.0}


def uneven(line):
    return line | {"tokens_per_second": 5000.0 if line["step"] % 50 else 1500.0}


FAULTS = [
    # change of the lines, level, words of what was seen, word of the remedy
    (
        at([500, 510], loss="nan"),
        "problem",
        "not a number at 2 logged steps, first at step 500",
        "lr",
    ),
    (
        after(500, skipped_steps=40),
        "problem",
        "40 of 1000 steps were skipped (4.0%)",
        "events.jsonl",
    ),
    (after(500, skipped_steps=2), "note", "2 of 1000 steps were skipped", "harmless"),
    (at([500], loss=6.0), "note", "the loss jumped at 1 logged steps: 500", "spike_factor"),
    (at([500, 600, 700], loss=6.0), "warning", "jumped at 3 logged steps", "spike_factor"),
    (after(0, loss=8.0), "problem", "hardly moved: 8.000 at step 10", "optim.lr"),
    (rising, "problem", "the loss is rising", "optim.lr"),
    (overfit, "warning", "validation loss was best at step 500", "more text"),
    (after(300, dead_experts=6.0), "warning", "6 experts get less than a tenth", "coef (now 0.01)"),
    (after(300, max_violation=5.0), "warning", "max_violation is 5.0", "coef (now 0.01)"),
    (after(300, router_entropy=0.01), "warning", "nearly one-hot", "num_experts_per_tok"),
    (slower, "warning", "slowed down from 5k to 2k", "machine"),
    (uneven, "note", "speed is uneven", "data.workers"),
    (after(0, mfu=0.02), "note", "2.0% of its peak", "micro_batch_size"),
    (after(0, grad_norm=3.0), "note", "100% of the steps of the second half were clipped", "lr"),
]


@pytest.mark.parametrize(
    ("change", "level", "seen", "remedy"), FAULTS, ids=[fault[2][:30] for fault in FAULTS]
)
def test_each_fault_is_told_with_a_remedy(tmp_path, change, level, seen, remedy):
    (finding,) = told(make_run(tmp_path / "run", change))
    assert finding.level == level
    assert seen in finding.seen
    assert remedy in finding.remedy


def test_a_flat_loss_is_told_while_the_rate_is_high_only(tmp_path):
    def falls_then_flat(line):
        return flat(line) if line["step"] > 300 else line

    (finding,) = told(make_run(tmp_path / "run", falls_then_flat))
    assert "flat for the last fifth" in finding.seen
    decayed = make_run(
        tmp_path / "two", lambda line: falls_then_flat(line) | {"lr": healthy(1000)["lr"]}
    )
    lines = [json.loads(x) for x in (decayed / "metrics.jsonl").read_text().splitlines()]
    lines[0]["lr"] = 1e-3  # the peak, long before
    (decayed / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert told(decayed) == []


def test_dead_experts_name_their_layers(tmp_path):
    change = after(300, dead_experts=3.0, **{"layers/1/dead_experts": 3.0})
    (finding,) = told(make_run(tmp_path / "run", change))
    assert "MoE layer 1: 3" in finding.seen
    assert "layer 0" not in finding.seen


@pytest.mark.parametrize(
    ("steps", "warmup", "calm"),
    [(190, 0, True), (210, 0, False), (590, 600, True), (610, 600, False)],
)
def test_an_uneven_load_is_a_note_at_first(tmp_path, steps, warmup, calm):
    config = {**CONFIG, "optim": {"schedule": {"warmup_steps": warmup}}}
    lines = after(0, dead_experts=3.0, max_violation=5.0, router_entropy=0.01)
    found = told(make_run(tmp_path / "run", lines, config, steps), now=NOW - 1000 + steps)
    assert {f.level for f in found if "mean load" in f.seen} == {"note" if calm else "warning"}
    assert {f.level for f in found if "one-hot" in f.seen} == {"warning"}
    words = f"early, before step {max(200, warmup)}, this often heals by itself"
    assert [f.remedy.startswith(words) for f in found if "mean load" in f.seen] == [calm] * 2


@pytest.mark.parametrize(("steps", "advice"), [(50, None), (240, 60), (640, 160), (9000, 200)])
def test_the_advised_revival_fits_into_the_run(tmp_path, steps, advice):
    config = {**CONFIG, "train": {"steps": steps}}
    folder = make_run(tmp_path / "run", after(0, dead_experts=3.0), config, min(steps, 1000))
    (remedy,) = (f.remedy for f in told(folder, now=NOW) if "tenth" in f.seen)
    assert ("kind: revive" in remedy) == (advice is not None)
    assert advice is None or f"experts.policy={{kind: revive, after: {advice}}}" in remedy


def test_worst_first(tmp_path):
    def change(line):
        return after(500, skipped_steps=2, max_violation=5.0, loss=9.0)(line)

    levels = [finding.level for finding in told(make_run(tmp_path / "run", change))]
    assert levels == ["problem", "warning", "warning", "note"]


def test_a_run_that_stopped(tmp_path):
    folder = make_run(tmp_path / "run", steps=500)
    assert told(folder, now=NOW - 500 + 30) == [], "a line half a minute ago: at work"
    (finding,) = told(folder, now=NOW - 500 + 3700)
    assert finding.level == "problem"
    assert "stopped at step 500 of 1000, 1h01m ago; it has no checkpoint" in finding.seen
    (folder / "checkpoints" / "step_00000400").mkdir(parents=True)
    (finding,) = told(folder, now=NOW + 3600)
    assert finding.level == "warning"
    assert "its newest checkpoint is step_00000400" in finding.seen
    assert "same command" in finding.remedy


def test_steps_come_from_the_start_event_with_epochs(tmp_path):
    config = {**CONFIG, "train": {"steps": None, "epochs": 2}}
    event = {"event": "start", "attempt": 0, "time": NOW - 1000, "steps": 800}
    folder = make_run(tmp_path / "run", config=config, steps=500, events=[event])
    (finding,) = told(folder, now=NOW + 9999)
    assert "step 500 of 800" in finding.seen


def test_folders_that_are_none(tmp_path):
    make_run(tmp_path / "some")
    (tmp_path / "refused/tokenizer").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"does not exist; .* holds 'some'$"):
        read_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no run folder"):
        read_run(tmp_path)
    (finding,) = told(make_run(tmp_path / "run", lambda line: None))
    assert "no logged step yet" in finding.seen


@pytest.mark.parametrize("text", ["x: [", "- 1", b"\xff\xfe"])
def test_a_config_that_is_none_is_named(tmp_path, text):
    file = make_run(tmp_path / "run") / "config.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"run/config\.yaml"):
        read_run(tmp_path / "run")


def test_a_checkpoint_stands_for_its_run(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run")
    saved = folder / "checkpoints" / "step_00001000"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    (saved / "config.yaml").write_text("{}")
    (folder / "checkpoints" / "latest").symlink_to(saved.name)
    for path in (saved, folder / "checkpoints" / "latest"):
        assert read_run(path).folder == folder
        assert told(path) == []
    monkeypatch.chdir(saved)
    assert read_run(".").folder == folder
    alone = saved.rename(tmp_path / "alone")
    with pytest.raises(ValueError, match="alone is a checkpoint outside a run"):
        read_run(alone)


def test_series_and_layers(tmp_path):
    record = read_run(make_run(tmp_path / "run", at([20], loss="inf", grad_norm="nan")))
    loss = record.series("loss")
    assert loss.steps[:3] == [10, 20, 30]
    assert math.isinf(loss.values[1])
    assert math.isnan(record.series("grad_norm").values[1])
    assert len(loss.finite) == len(loss) - 1
    assert loss.tail(0.1).steps == list(range(910, 1001, 10))
    assert record.series("nothing").steps == []
    assert list(record.layers("max_violation")) == [0, 1]
    assert record.setting("train.steps") == 1000
    assert record.setting("train.nothing", 7) == 7
    assert record.head == ["Every setting", "torch: 2.13.0"]


def test_unigram_entropy_is_read_from_the_last_start(tmp_path):
    events = [{"event": "start", "steps": 1, "unigram_entropy": u, "time": NOW} for u in (5.0, 6.5)]
    assert unigram_entropy(read_run(make_run(tmp_path / "run", events=events))) == 6.5
    assert unigram_entropy(read_run(make_run(tmp_path / "run"))) is None


def test_thinning_keeps_extremes_and_ends():
    values = [0.0] * 10_000
    values[1234], values[9876] = 5.0, -3.0
    series = thin(Series(list(range(10_000)), values), points=100)
    assert len(series) <= 110
    assert (max(series.values), min(series.values)) == (5.0, -3.0)
    assert (series.steps[0], series.steps[-1]) == (0, 9999)
    assert series.steps == sorted(set(series.steps))
    short = Series([1, 2], [3.0, 4.0])
    assert thin(short) is short


def test_pictures_are_drawn_for_what_was_logged(tmp_path):
    folder = make_run(tmp_path / "run", at([20], loss="nan"))
    written = draw(folder)
    names = {path.stem for path in written}
    assert {"loss", "lr", "grad_norm", "tokens_per_second", "max_violation"} <= names
    assert "load_by_layer" in names
    assert "mfu" not in names, "was not logged"
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (folder / "plots").iterdir()} == {f"{n}.png" for n in names}


def test_smoothing_weighs_by_distance_and_leaves_out_what_is_no_number():
    steps = list(range(60))  # a third of the weight is that of a point itself
    assert smoothed(Series(steps, [2.0] * 60)).values == pytest.approx([2.0] * 60)
    jump = smoothed(Series(steps, [0.0] * 30 + [1.0] * 30)).values
    assert jump[29] == 0 and jump[30] == pytest.approx(1 / 3, abs=0.01) and jump[-1] > 0.99
    gap = smoothed(Series(steps, [1.0] * 30 + [math.nan] + [1.0] * 29)).values
    assert gap == pytest.approx([1.0] * 60)


def test_the_loss_picture_holds_the_data(tmp_path):
    record = read_run(make_run(tmp_path / "run"))
    pictures = {name: figure for name, _, figure in figures(record, unigram_entropy=6.5)}
    axes = pictures["loss"].axes[0]
    raw, *lines = axes.lines
    labels = {line.get_label(): line for line in lines}
    assert set(labels) == {"training", "validation", "unigram entropy"}
    assert list(raw.get_ydata()) == record.series("loss").values
    assert list(labels["training"].get_ydata()) == smoothed(record.series("loss")).values
    assert set(labels["unigram entropy"].get_ydata()) == {6.5}
    grid = pictures["load_by_layer"].axes[0].images[0].get_array()
    assert grid.shape[0] == 2
    assert grid[0, 0] == pytest.approx(0.3)
