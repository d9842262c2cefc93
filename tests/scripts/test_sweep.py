"""Sweeps: the statistics, what a file may say, and a small one run for real."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from scripts import _sweep_report as report
from tests.training.test_record import make_run
from tests.training.tiny import write_inputs
from training.config.load import ConfigError
from training.estimate.flops import run_flops
from training.report.record import read_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sweep(script):
    return script("sweep")


def test_differences_are_paired():
    values = {
        "a": {0: {"loss": 1.0}, 1: {"loss": 5.0}, 2: {"loss": 9.0}},
        "b": {0: {"loss": 1.5}, 1: {"loss": 5.7}, 2: {"loss": 9.6}, 3: {"loss": 99.0}},
    }
    table = report.compare(values, "a", ["loss"])
    assert table["a"]["loss"].difference is None
    assert table["b"]["loss"].value.count == 4
    difference = table["b"]["loss"].difference
    assert difference.count == 3  # seed 3 has no partner
    assert difference.mean == pytest.approx(0.6)
    # of 0.5, 0.7, 0.6: the standard deviation is 0.1, whatever the spread between the seeds is
    assert difference.error == pytest.approx(0.1 / math.sqrt(3))
    assert difference.interval == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert report.verdict(difference) == "higher"


def test_small_differences_are_not_seen():
    def told(*pairs):
        return report.verdict(report.Mean.of(pairs))

    assert told(0.1, -0.1, 0.2) == "none at ±0.38"
    assert told(-0.11, -0.1, -0.12) == "lower"
    assert told(-0.1) == "one pair"
    many = report.Mean.of([0.0, 1.0] * 20)
    assert many.interval == pytest.approx(2.228 * many.error)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"control": "c"}, "control: 'c' is none of the arms"),
        ({"arm": {}}, "unknown section or key 'arm'; did you mean arms?"),
        ({"arms": {"weak": [], "b": ["optim.lr=fast"]}}, "arm 'b': optim.lr"),
        ({"arms": {"weak": [], "b": ["optim.rl=1"]}}, "arm 'b': unknown key optim.rl"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(
    change, told, sweep, tiny_sweep, tmp_path, capsys
):
    values = yaml.safe_load(tiny_sweep.read_text()) | change
    path = tiny_sweep.parent / "wrong.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(SystemExit) as caught:
        sweep.main([str(path), "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "ablations").glob("*.yaml")), ids=str)
def test_every_sweep_of_the_repository_is_valid(path, sweep):
    found = sweep.read_sweep(path)
    runs = sweep.plan_runs(path, found, [], found.seeds)
    assert len({run.key for run in runs}) == len(found.arms) * len(found.seeds)


def test_equal_flops(sweep, tiny_sweep):
    """8 steps with 2 experts each cost what fewer steps with 4 to 2 experts cost."""
    values = yaml.safe_load(tiny_sweep.read_text())
    ramp = ["router.top_k.kind=linear", "router.top_k.start=4"]
    values |= {"settings": ["train.steps=1000"], "arms": {"weak": [], "wide": ramp}}
    path = tiny_sweep.parent / "equal.yaml"
    path.write_text(yaml.safe_dump(values | {"equal_flops": ["wide"]}))
    found = sweep.read_sweep(path)
    (steps,) = sweep.equal_steps(path, found, []).values()
    runs = {run.arm: run for run in sweep.plan_runs(path, found, [], [0])}
    assert runs["weak"].config.train.steps == 1000
    assert runs["wide"].config.train.steps == steps < 1000
    costs = [run_flops(run.config, run.config.train.steps) for run in runs.values()]
    assert costs[0] * 0.997 < costs[1] <= costs[0]


@pytest.fixture(scope="module")
def tiny_sweep(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    write_inputs(folder)
    path = folder / "sweep.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "title": "Balance",
                "base": "config.yaml",
                "control": "weak",
                "settings": ["train.steps=4"],
                "arms": {"weak": [], "strong": ["router.balance.coef=1"]},
                "seeds": [0, 1],
            }
        )
    )
    return path


@pytest.mark.slow
def test_a_sweep_of_real_runs(sweep, tiny_sweep, tmp_path, capsys):
    other = tiny_sweep.parent / "other.yaml"
    values = yaml.safe_load(tiny_sweep.read_text())
    values["arms"] = {
        "weak": [],
        "none": ["router.balance=null"],
        # infinite weights in the first step, and a run that stops then
        "fails": ["optim.lr=1e38", "optim.on_nonfinite=stop"],
    }
    other.write_text(yaml.safe_dump(values | {"seeds": [0]}))

    # a limit that is over at once: nothing is trained, and it says so
    out = tmp_path / "out"
    arguments = [str(tiny_sweep), str(other), "--out", str(out), "log.every_steps=2"]
    assert sweep.main([*arguments, "--time-limit", "0"]) == 75
    capsys.readouterr()
    assert sweep.main([*arguments, "--jobs", "2"]) == 1  # one fails, the others go on
    told = capsys.readouterr().out
    assert "6 runs, 6 to train" in told  # weak with seed 0 is in both files
    assert "FAILED fails-seed0" in told
    assert "not finite" in told
    assert "| none | 1 |" in told
    assert "| fails | 0 |" in told

    result = json.loads((out / "sweep.json").read_text())
    runs = {name: arm["runs"] for name, arm in result["arms"].items()}
    assert set(runs["weak"]) == set(runs["strong"]) == {"0", "1"}
    cell = result["arms"]["strong"]["metrics"]["val_loss"]
    pairs = [runs["strong"][s]["val_loss"] - runs["weak"][s]["val_loss"] for s in "01"]
    assert cell["difference"]["mean"] == pytest.approx(sum(pairs) / 2)
    assert "| strong | 2 |" in (out / "sweep.md").read_text()
    assert (out / "sweep.png").read_bytes()[:4] == b"\x89PNG"

    # arms of a seed start alike, seeds do not
    first = {}
    for folder in (out / "runs").glob("[!f]*"):
        first[folder.name.rsplit("-", 1)[0]] = read_run(folder).series("loss").values[0]
        assert not (folder / "checkpoints").exists()
    assert first["weak-seed0"] == first["strong-seed0"] == first["none-seed0"]
    assert first["weak-seed1"] == first["strong-seed1"] != first["weak-seed0"]

    # once more: nothing to do; with another setting it is another run
    assert sweep.main([str(tiny_sweep), *arguments[2:]]) == 0
    assert "4 runs, 0 to train" in capsys.readouterr().out
    found = sweep.read_sweep(tiny_sweep)
    run = sweep.plan_runs(tiny_sweep, found, ["log.every_steps=2", "optim.lr=0.5"], [0])[0]
    sweep.place_run(run, out / "runs")
    assert not run.done

    # finished runs of elsewhere count, those that are not finished do not, and nothing is trained
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "runs").mkdir(parents=True)
    for folder in (out / "runs").glob("*-seed1-*"):
        folder.rename(elsewhere / "runs" / folder.name)
    words = [str(tiny_sweep), *arguments[2:], "--time-limit", "0", "--seeds"]
    assert sweep.main([*words, "0-1"]) == 75
    assert "4 runs, 2 to train" in capsys.readouterr().out
    assert sweep.main([*words, "2", "--also", str(elsewhere)]) == 0
    assert "4 runs, 0 to train" in capsys.readouterr().out
    assert json.loads((out / "sweep.json").read_text())["arms"] == result["arms"]
    events = next((elsewhere / "runs").glob("weak-*")) / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if '"done"' not in line))
    assert sweep.main([*words, "2", "--also", str(elsewhere)]) == 75
    assert "4 runs, 1 to train" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_asked_to_stop_saves_its_runs(tiny_sweep, tmp_path):
    words = ["--out", str(tmp_path), "train.steps=100000", "log.every_steps=1", "eval.rows=1"]
    process = subprocess.Popen([sys.executable, ROOT / "scripts/sweep.py", tiny_sweep, *words])
    end = time.monotonic() + 120
    while not any(path.stat().st_size for path in tmp_path.glob("runs/*/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.2)
    process.terminate()
    assert process.wait(60) == 75
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "checkpoints/latest").exists()


@pytest.mark.parametrize(
    ("word", "seeds"),
    [("1", [0]), ("3", [0, 1, 2]), ("2-4", [2, 3, 4]), ("7-7", [7])],
)
def test_seeds(word, seeds, sweep):
    assert list(sweep.read_seeds(word)) == seeds


@pytest.mark.parametrize("word", ["0", "-1", "4-2", "two", "1,2", ""])
def test_seeds_that_are_none(word, sweep):
    with pytest.raises(ConfigError, match=f"--seeds={word} must be a number N"):
        sweep.read_seeds(word)


def test_a_folder_without_runs_is_an_error(sweep, tiny_sweep, tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main([str(tiny_sweep), "--out", str(tmp_path / "out"), "--also", str(tmp_path)])
    assert f"--also {tmp_path} holds no folder runs" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_an_error(sweep, tiny_sweep, capsys):
    with pytest.raises(SystemExit):
        sweep.main([str(tiny_sweep), "--out", str(tiny_sweep / "out")])
    assert capsys.readouterr().err == f"error: {tiny_sweep}/out/runs: Not a directory\n"


def test_an_unreadable_file_is_an_error(sweep, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        sweep.read_sweep(tmp_path / "none.yaml")


def test_e23_no_two_arms_look_alike(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    arms = {f"arm {number}": [] for number in range(14)}
    sweep = SimpleNamespace(
        title="t", arms=arms, control="arm 0", metrics=["loss"], curve="max_violation"
    )
    folder = make_run(tmp_path / "run")
    runs = [SimpleNamespace(arm=arm, seed=seed, folder=folder) for arm in arms for seed in (0, 1)]
    values = {arm: {0: {"loss": 1.0}, 1: {"loss": 2.0}} for arm in arms}
    report.plot(tmp_path / "t.png", sweep, runs, values)
    left, right = drawn[0].axes
    curves = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in right.lines}
    assert len(set(curves.values())) == len(arms)
    dots = [line for line in left.lines if line.get_marker() in ("o", "s")]
    looks = {(line.get_color(), line.get_marker()) for line in dots}
    assert len(looks) == len(arms) - 1
