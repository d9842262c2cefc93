"""Effective speedups from made-up curves whose answer is known; dense twins and leaving one out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from models.config import ModelConfig
from models.dense_twin import dense_twin
from models.errors import UserError
from scripts import _sweep_report as report
from scripts._scaling_law import fit_law
from tests.models.tiny import tiny_config
from tests.training.tiny import write_inputs
from training.config.load import ConfigError
from training.estimate.flops import matmul_weights

# --------------------------------------------------------------------------------------- the law


@pytest.mark.parametrize(("floor", "scale", "exponent"), [(2.0, 1.5, 0.3), (0.0, 4.0, 0.08)])
def test_a_law_is_found_again_from_its_own_losses(floor, scale, exponent):
    compute = [0.25, 0.5, 1.0, 2.0]
    law = fit_law(compute, [floor + scale * c**-exponent for c in compute])
    assert law.floor == pytest.approx(floor, abs=1e-4)
    assert law.exponent == pytest.approx(exponent, rel=1e-3)
    for more in (0.3, 1.0, 4.0):
        assert law.compute(floor + scale * more**-exponent) == pytest.approx(more, rel=1e-3)
    assert law.compute(floor) == math.inf
    assert law.covers(0.25) and law.covers(2.0) and not law.covers(2.1) and not law.covers(0.2)


def test_noise_moves_a_law_little_between_its_points():
    compute = [0.25, 0.5, 1.0, 2.0]
    noise = [0.004, -0.004, 0.003, -0.003]
    law = fit_law(compute, [2 + c**-0.3 + n for c, n in zip(compute, noise)])
    assert law.compute(2 + 1.5**-0.3) == pytest.approx(1.5, rel=0.05)


def test_losses_that_do_not_fall_and_too_few_lengths_give_none():
    assert fit_law([0.5, 1, 2], [3.0, 3.1, 3.2]) is None
    assert fit_law([0.5, 1, 1], [3.0, 2.9, 2.9]) is None


# ---------------------------------------------------------------------------------- the speedups


def write_run(folder: Path, loss: float, tokens: int, speed: float) -> Path:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "loss": 9.0, "tokens": tokens * step // 4, "tokens_per_second": speed}
        for step in range(1, 5)
    ]
    lines[-1]["val_loss"] = loss
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text("{}\n")
    return folder


def made_up(tmp_path: Path, gain: float, seeds: int = 3) -> list[report.RunValues]:
    """A control by the law 2 + C^-0.3, an arm that is worth `gain` times its compute and runs at
    half the speed, and one with half the FLOPs per token that is worth nothing; seeds differ."""
    runs = []
    for seed in range(seeds):
        better = 0.01 * seed

        def add(arm, loss, length=1.0, flops=1e12, speed=1000.0, seed=seed):
            name = tmp_path / f"{arm}-{length}-{seed}"
            folder = write_run(name, loss, int(1000 * length), speed)
            runs.append(report.RunValues(arm, seed, folder, length, flops * length))

        for length in (0.5, 1.0, 2.0, 4.0):
            add("control", 2 - better + length**-0.3, length)
        add("good", 2 - better + (gain + 0.1 * (seed - 1)) ** -0.3, speed=500.0)
        add("cheap", 2 - better + 0.5**-0.3, flops=0.5e12, speed=2000.0)
    return runs


def test_speedups_are_those_that_were_made_up(tmp_path):
    table, laws = report.speedups(made_up(tmp_path, gain=1.5), "control", "val_loss")
    assert sorted(laws) == [0, 1, 2]
    good, cheap = table["good"], table["cheap"]
    assert good.compute.mean == pytest.approx(1.5, rel=2e-3)
    assert good.compute.error == pytest.approx(0.1 / math.sqrt(3), rel=2e-2)  # 1.4, 1.5, 1.6
    assert good.time.mean == pytest.approx(0.75, rel=2e-3), "at half the speed"
    assert cheap.compute.mean == pytest.approx(1.0, rel=2e-3)
    assert cheap.time.mean == pytest.approx(1.0, rel=2e-3)
    assert not good.beyond and not cheap.beyond
    lines = "\n".join(report.speedup_lines(table, laws, "val_loss"))
    assert "| good | 1.50" in lines and "beyond" not in lines.splitlines()[3]


def test_what_lies_beyond_the_law_is_told(tmp_path):
    table, laws = report.speedups(made_up(tmp_path / "far", gain=8), "control", "val_loss")
    assert table["good"].beyond and table["good"].compute.mean == pytest.approx(8, rel=1e-2)
    assert "(beyond the fit)" in "\n".join(report.speedup_lines(table, laws, "val_loss"))
    # below the floor no compute is enough
    runs = made_up(tmp_path / "below", gain=1.5)
    folder = write_run(tmp_path / "deep", 0.5, 1000, 1000.0)
    runs.append(report.RunValues("deep", 0, folder, 1.0, 1e12))
    table, _ = report.speedups(runs, "control", "val_loss")
    assert "deep" not in table and "good" in table
    assert "No law" in "\n".join(report.speedup_lines({}, {}, "val_loss"))


# ------------------------------------------------------------------------------- arms by one word


@pytest.fixture(scope="module")
def sweep(script):
    return script("sweep")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("speedup")
    write_inputs(folder)
    path = folder / "sweep.yaml"
    values = {
        "title": "Balance", "base": "config.yaml", "control": "plain",
        "settings": ["train.steps=4"], "seeds": [0, 1],
        "arms": {
            "plain": [], "strong": ["router.balance.coef=1"], "fast": ["optim.lr=0.02"],
            "slow router": ["optim.router.lr_multiplier=0.1"],
        },
    }  # fmt: skip
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_moe_sparse_step", "glm4_moe"])
def test_a_dense_twin_has_the_active_weights_of_its_model(case):
    config = tiny_config(case)
    twin = ModelConfig(**config.model_dump() | dense_twin(config))
    assert not twin.moe_layers
    router = len(config.moe_layers) * config.hidden_size * config.num_experts
    layers, width = config.num_hidden_layers, config.hidden_size
    active, every = matmul_weights(twin)
    assert (
        active
        == every
        == pytest.approx(matmul_weights(config)[0] - router, abs=3 * width * layers / 2)
    )
    with pytest.raises(UserError, match="a dense twin already"):
        dense_twin(twin)


@pytest.mark.parametrize("case", ["olmoe", "mixtral"])
def test_a_family_without_dense_layers_is_refused(case):
    with pytest.raises(UserError, match=f"the family {case} has no dense layers"):
        dense_twin(tiny_config(case))


def test_lengths_and_the_twin_are_planned(sweep, plain):
    options = sweep.parse_arguments([str(plain), "--dense-twin", "--lengths", "0.5,2"])
    ((name, found, runs),) = sweep.read_all([plain], [], options)
    assert name == "sweep" and list(found.arms)[-1] == "dense twin"
    steps = {(run.arm, run.length): run.config.train.steps for run in runs}
    assert steps["plain", 0.5] == 2 and steps["plain", 2.0] == 8 and steps["dense twin", 1.0] == 4
    assert len(runs) == 2 * 7
    twin = next(run for run in runs if run.arm == "dense twin")
    assert not twin.config.model.config.moe_layers
    folders = set()
    for run in runs:
        sweep.place_run(run, Path("nowhere"))
        folders.add(run.folder)
    assert len(folders) == len(runs)


def test_one_is_left_out_at_a_time(sweep, plain):
    options = sweep.parse_arguments([str(plain), "--leave-one-out", "--seeds", "1"])
    ((name, found, runs),) = sweep.read_all([plain], [], options)
    assert name == "sweep-leave-one-out" and found.control == "all"
    told = {
        run.arm: (
            run.config.router.balance.coef,
            run.config.optim.lr,
            getattr(run.config.optim.router, "lr_multiplier", 1.0),
        )
        for run in runs
    }
    plain_values = told["none"]
    assert told["all"] == (1.0, 0.02, 0.1)
    assert told["without strong"] == (plain_values[0], 0.02, 0.1)
    assert told["without fast"] == (1.0, plain_values[1], 0.1)
    assert told["without slow router"] == (1.0, 0.02, 1.0)


@pytest.mark.parametrize(
    ("change", "words", "told"),
    [
        ({"arms": {"plain": [], "b": []}}, ["--leave-one-out"], "needs two arms"),
        (
            {"arms": {"plain": [], "b": ["optim.lr=1"], "c": ["optim.lr=2"]}},
            ["--leave-one-out"],
            "the arms 'b' and 'c' both set optim.lr",
        ),
        ({}, ["--lengths", "0.5"], "are too few for a law"),
        ({"lengths": [0.5, -2.0]}, [], "lengths"),
        ({"arms": {"plain": [], "dense twin": []}}, ["--dense-twin"], "already"),
        (
            {"settings": ["train.steps=null", "train.epochs=1"]},
            ["--lengths", "0.5,2"],
            "lengths needs train.steps",
        ),
    ],
)
def test_mistakes_are_told(change, words, told, sweep, plain):
    path = plain.parent / "wrong.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(plain.read_text()) | change))
    options = sweep.parse_arguments([str(path), *words])
    with pytest.raises(ConfigError, match=told):
        sweep.read_all([path], [], options)


@pytest.mark.slow
def test_a_sweep_of_real_runs_tells_speedups(sweep, plain, tmp_path, capsys):
    words = ["--out", str(tmp_path), "--seeds", "1", "--dense-twin", "--lengths", "0.5,3"]
    assert sweep.main([str(plain), *words, "train.steps=12", "--jobs", "2"]) == 0
    assert "effective speedup, compute" in capsys.readouterr().out
    result = json.loads((tmp_path / "sweep.json").read_text())
    assert set(result["arms"]["dense twin"]["runs"]) == {"0"}
    assert result["laws"]["0"]["scale"] > 0 and set(result["speedups"]) <= set(result["arms"])
    assert len(list((tmp_path / "runs").iterdir())) == 7
