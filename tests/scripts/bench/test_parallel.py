"""The benchmark of exchanges: a layer over two processes, and mistakes told in one line."""

from __future__ import annotations

import json

import pytest

from scripts.bench import parallel as bench  # its processes import it by this name


def test_a_layer_over_two_processes(tmp_path):
    told = tmp_path / "layer.json"
    arguments = ["layer", "--cpu", "--nproc", "2", "--tokens", "32", "--repeats", "2"]
    assert bench.main([*arguments, "--modes", "^2 chunks$", "--out", str(tmp_path)]) == 0
    (row,) = json.loads(told.read_text())["rows"]
    assert row["mode"] == "2 chunks"
    assert row["rows sent"] > 0
    assert min(row["forward ms"], row["backward ms"]) > 0


def test_a_mistake_in_the_config_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["engine", "configs/quickstart.yaml", "model.hiden_size=3", "--nproc", "2"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "hidden_size" in error
    assert error.count("\n") == 1


def test_a_layout_without_split_experts_hides_nothing(capsys):
    arguments = ["engine", "configs/quickstart.yaml", "--cpu", "--small", "--nproc", "2"]
    with pytest.raises(SystemExit) as stop:
        bench.main([*arguments, "parallel.nodes=1", "--exposed"])
    assert stop.value.code == 2
    assert "not split" in capsys.readouterr().err


def test_whole_steps_over_two_processes(tmp_path):
    told = tmp_path / "engine.json"
    arguments = ["engine", "configs/quickstart.yaml", "--cpu", "--small", "--nproc", "2"]
    settings = ["data.seq_len=32", "train.global_batch_size=4", "train.micro_batch_size=1"]
    arguments += [
        *settings,
        "parallel.nodes=2",
        "parallel.expert=2",
        "--repeats",
        "1",
        "--routing",
        "balanced",
    ]
    assert bench.main([*arguments, "--exposed", "--out", str(tmp_path)]) == 0
    rows = json.loads(told.read_text())["rows"]
    assert len(rows) == 2
    for row in rows:
        assert row["tokens/s"] == pytest.approx(4 * 32 / row["step s"])
        assert len(row["losses"].split()) == 3
        slowest = max(row["step s"] for row in rows)
        hidden = 1 - (slowest - row["free step s"]) / row["alone s"]
        assert row["hidden"] == pytest.approx(hidden, abs=1e-3)  # sent in float32


def test_modes_that_do_not_exist_are_named(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["layer", "--cpu", "--nproc", "2", "--modes", "teleport"])
    assert stop.value.code == 2
    assert "--modes='teleport' finds none of whole, pull, " in capsys.readouterr().err
