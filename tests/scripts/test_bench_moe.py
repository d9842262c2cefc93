"""What bench_moe says of its rows, and what it leaves when it is cut short; no GPU needed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch


def _row(name: str, routing: str, speed: float, label: str = "a") -> dict:
    return {"label": label, "name": name, "routing": routing, "both TFLOP/s": speed}


def test_ratios_compare_equal_routing_and_the_bound(script):
    bench_moe = script("bench_moe")
    rows = [
        _row("tessera", "random", 10.0),
        _row("tessera", "balanced", 12.0),
        _row("SonicMoE", "random", 8.0),
        _row("cuBLAS bound", "balanced", 16.0),
        _row("SonicMoE", "random", 1.0, label="b"),
        {"label": "a", "name": "Liger", "failed": "ImportError"},
    ]
    assert bench_moe.ratios(rows, "a") == [
        "  tessera random over: SonicMoE 1.25, cuBLAS bound 0.62",
        "  tessera balanced over: cuBLAS bound 0.75",
    ]
    assert bench_moe.ratios(rows, "b") == []


def test_rows_are_written_as_they_come(script, tmp_path, monkeypatch):
    bench_moe = script("bench_moe")
    monkeypatch.setattr(bench_moe.torch.cuda, "get_device_name", lambda: "a card")
    args = SimpleNamespace(out=tmp_path / "new")
    for rows in ([], [_row("tessera", "random", 1.0)]):
        bench_moe.write(args, "layers", rows)
        found = json.loads((tmp_path / "new" / "layers.json").read_text())
        assert found["rows"] == rows
        assert found["card"] == "a card"


def test_a_row_says_what_the_device_takes_alone(script):
    bench_moe = script("bench_moe")
    row = {"name": "tessera", **bench_moe.speeds(6e9, 1.0, 4.0)}
    assert row["backward ms"] == 3.0
    assert [row[f"{part} TFLOP/s"] for part in ("forward", "backward", "both")] == [6.0, 4.0, 4.5]
    eager = bench_moe.line(row)
    row |= {f"graph {key}": value for key, value in bench_moe.speeds(6e9, 0.5, 0.75).items()}
    assert bench_moe.line(row) == (
        eager + "   as a graph fwd    0.500 ms bwd    0.250 ms both    24"
    )


def test_timeline_is_the_last_call_with_its_gaps(script, monkeypatch):
    bench_moe = script("bench_moe")
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [
        SimpleNamespace(time_range=SimpleNamespace(start=a, end=b), name=name, device_type=on_gpu)
        for call in (0, 1000, 2000)
        for a, b, name in ((call, call + 10, "one"), (call + 14, call + 20, "two"))
    ]
    events.append(SimpleNamespace(device_type=torch.autograd.DeviceType.CPU, name="host",
                                  time_range=SimpleNamespace(start=0, end=9000)))  # fmt: skip

    class Recorded:
        def __init__(self, activities):
            self.calls = 0

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def events(self):
            return events[::-1]

    monkeypatch.setattr(torch.profiler, "profile", Recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = []
    assert bench_moe.timeline(lambda: calls.append(1)) == [
        {"name": "one", "us": 10, "gap us": 0},
        {"name": "two", "us": 6, "gap us": 4},
    ]
    assert len(calls) == 3


def test_e23_the_legend_lies_on_no_bar(script, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    file = Path(__file__).resolve().parents[2] / "docs" / "img" / "moe.json"
    script("bench_moe").plot(json.loads(file.read_text())["rows"], tmp_path / "moe.png")
    (figure,) = drawn
    assert all(axes.get_legend() is None for axes in figure.axes)
    (legend,) = figure.legends
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
    heights = [bar.get_height() for axes in figure.axes for bar in axes.patches]
    assert min(heights) > 0, "no gaps: every series was measured at every shape"
