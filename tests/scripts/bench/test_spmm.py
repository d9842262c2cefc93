"""scripts/bench/spmm.py on a CPU: it runs, and its arithmetic is right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from scripts.bench import spmm as module


def test_small_run(tmp_path, capsys):
    words = ["--small", "--densities", "50,5", "--seconds", "0", "--shapes", "32,48,8"]
    assert module.main([*words, "--blocks", "1,16", "--out", str(tmp_path)]) == 0
    result = {
        kind: json.loads((tmp_path / f"{kind}.json").read_text())["rows"]
        for kind in ("spmm", "summary", "moe", "widths")
    }
    assert (tmp_path / "spmm.png").stat().st_size > 1000
    rows = [row for kind in ("spmm", "moe", "widths") for row in result[kind]]
    assert not [row["failed"] for row in rows if "failed" in row]
    assert all(row["error"] < 1e-5 for row in rows)
    seen = {(row["block"], row["skew"], row["density"], row["method"]) for row in result["spmm"]}
    for block, peer in ((1, "cusparse"), (16, "bsr")):
        for skew in ("uniform", "power"):
            for density in (50, 5):
                assert {(block, skew, density, m) for m in ("ours", "dense", peer)} <= seen
    ours = [row for row in result["spmm"] if row["method"] == "ours"]
    assert ours[0]["TFLOP/s"] == pytest.approx(2 * ours[0]["entries"] * 8 / ours[0]["ms"] / 1e9)
    assert [row["over"] for row in result["summary"]] == [
        "cusparse", "dense", "cusparse", "dense", "bsr", "dense", "bsr", "dense"
    ]  # fmt: skip
    operations = {(row["operation"], row["method"]) for row in result["moe"]}
    assert {(o, "ours") for o in ("dispatch", "combine", "dispatch_back", "gate_grad")} < operations
    assert [row["method"] for row in result["widths"]] == [
        "mixed", "one width, reference", "one width, spmm", "padded, reference"
    ]  # fmt: skip
    assert "crossover" in capsys.readouterr().out


def test_widths_have_the_mean_that_is_asked_for():
    for _, _, N, E, _ in module.WIDTHS:
        sizes = module.spread(N, E, 64)
        assert len(sizes) == E
        assert all(size % 64 == 0 and size > 0 for size in sizes)
        assert abs(sum(sizes) / E / N - 1) < 0.06
        assert max(sizes) >= 1.4 * N


def test_rows_of_even_length_and_of_a_power_law():
    for density in (0.5, 0.05):
        even, power = (
            module.keep_entries(400, 500, density, skew).sum(1) for skew in ("uniform", "power")
        )
        for rows in (even, power):
            assert rows.sum() / (400 * 500) == pytest.approx(density, rel=0.05)
        assert power.max() > 2 * power.median()
        assert even.max() < 2 * even.median()


def test_crossover():
    """Between the densities around it, straight in the logarithms."""
    times = {d: {"ours": d, "dense": 3.0} for d in (1, 2, 4, 8)}
    assert module.crossover(times) == pytest.approx(3.0)
    assert module.crossover({d: {"ours": 5.0, "dense": 1.0} for d in (1, 2)}) is None
    times = {1: {"ours": 1.0, "dense": 2.0}, 4: {"ours": 2.0, "dense": 1.0}}
    assert module.crossover(times) == pytest.approx(math.exp(math.log(4) / 2))


def test_sizes_that_are_none(capsys):
    for words in (["--shapes", "1,2"], ["--shapes", "1,2,x"], ["--shapes", "0,1,1"]):
        with pytest.raises(SystemExit) as stop:
            module.main(["--small", *words])
        assert stop.value.code == 2
        assert f"error: {words[0]}: {words[1]!r} is not " in capsys.readouterr().err


def test_e23_the_picture_has_a_legend_however_many_shapes(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    file = Path(__file__).resolve().parents[3] / "docs" / "img" / "spmm.json"
    result = json.loads(file.read_text())
    module.draw(tmp_path / "spmm.png", result["spmm"], result["moe"])
    (figure,) = drawn
    left, right = figure.axes
    assert len(left.lines) > 21
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert "over cuSPARSE, single entries" in named and "over dense cuBLAS, blocks of 64" in named
    looks = {(line.get_color(), line.get_linestyle()) for line in left.lines[:-1]}
    assert len(looks) == len([name for name in named if name.startswith("over ")])
    assert "dispatch" in named and right.patches
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
