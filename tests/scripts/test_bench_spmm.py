"""scripts/bench_spmm.py on a CPU: it runs, and its arithmetic is right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch


def test_small_run(script, tmp_path, capsys):
    words = ["--small", "--densities", "50,5", "--seconds", "0", "--shapes", "32,48,8"]
    module = script("bench_spmm")
    assert module.main([*words, "--blocks", "1,16", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "spmm.json").read_text())
    assert (tmp_path / "spmm.png").stat().st_size > 1000
    rows = result["spmm"] + result["moe"] + result["layer"]
    assert not [row["failed"] for row in rows if "failed" in row]
    assert all(row["error"] < 1e-5 for row in rows)
    seen = {(row["block"], row["skew"], row["density"], row["method"]) for row in result["spmm"]}
    for block, peer in ((1, "cusparse"), (16, "bsr")):
        for skew in ("uniform", "power"):
            for density in (50, 5):
                assert {(block, skew, density, m) for m in ("ours", "dense", peer)} <= seen
    ours = [row for row in result["spmm"] if row["method"] == "ours"]
    assert ours[0]["tflops"] == pytest.approx(2 * ours[0]["entries"] * 8 / ours[0]["ms"] / 1e9)
    assert len(result["summary"]) == 4
    operations = {(row["operation"], row["method"]) for row in result["moe"]}
    assert {(o, "ours") for o in ("dispatch", "combine", "dispatch_back", "gate_grad")} < operations
    assert [row["method"] for row in result["layer"]] == ["spmm", "grouped"]
    assert "dense wins from" in capsys.readouterr().out


def test_rows_of_even_length_and_of_a_power_law(script):
    module = script("bench_spmm")
    for density in (0.5, 0.05):
        even, power = (
            module.keep_entries(400, 500, density, skew, "cpu").sum(1)
            for skew in ("uniform", "power")
        )
        for rows in (even, power):
            assert rows.sum() / (400 * 500) == pytest.approx(density, rel=0.05)
        assert power.max() > 2 * power.median()
        assert even.max() < 2 * even.median()


def test_crossover(script):
    """Between the densities around it, straight in the logarithms."""
    module = script("bench_spmm")
    times = {d: {"ours": d, "dense": 3.0} for d in (1, 2, 4, 8)}
    assert module.crossover(times) == pytest.approx(3.0)
    assert module.crossover({d: {"ours": 5.0, "dense": 1.0} for d in (1, 2)}) is None
    times = {1: {"ours": 1.0, "dense": 2.0}, 4: {"ours": 2.0, "dense": 1.0}}
    assert module.crossover(times) == pytest.approx(math.exp(math.log(4) / 2))


def test_without_a_gpu_it_asks_for_small(script, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="--small"):
        script("bench_spmm").main(["--out", str(tmp_path)])


def test_e23_the_picture_has_a_legend_however_many_shapes(script, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    file = Path(__file__).resolve().parents[2] / "docs" / "img" / "spmm.json"
    result = json.loads(file.read_text())
    script("bench_spmm").plot(result["spmm"], result["moe"], tmp_path / "spmm.png")
    left, right = drawn[0].axes
    assert len(left.lines) > 21
    named = [text.get_text() for text in left.get_legend().get_texts()]
    assert "over cuSPARSE, single entries" in named and "over dense cuBLAS, blocks of 64" in named
    looks = {(line.get_color(), line.get_linestyle()) for line in left.lines[:-1]}
    assert len(looks) == len(named), "what looks alike has one name"
    assert right.get_legend() is not None
