"""The benchmark of layers on a CPU: what is measured, what is said of it, what errors show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts.bench import moe as bench_moe
from scripts.bench import peers


def _row(name: str, routing: str, speed: float, label: str = "a") -> dict:
    return {"label": label, "name": name, "routing": routing, "both TFLOP/s": speed}


def test_ratios_compare_equal_routing_and_the_bound():
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


def test_speeds_of_forward_and_backward():
    row = bench_moe.speeds(6e9, 1.0, 4.0)
    assert row["backward ms"] == 3.0
    assert [row[f"{part} TFLOP/s"] for part in ("forward", "backward", "both")] == [6.0, 4.0, 4.5]


def run(tmp_path, *words: str) -> list[dict]:
    kind = "rounding" if "--rounding" in words else "layers"
    assert bench_moe.main(["--small", *words, "--out", str(tmp_path)]) == 0
    return json.loads((tmp_path / f"{kind}.json").read_text())["rows"]


def test_a_small_run_beside_peers(tmp_path, capsys):
    rows = run(tmp_path, "--peers", "tessera,grouped_mm,eager loop,SonicMoE")
    names = ("tessera", "grouped_mm", "eager loop", "SonicMoE")
    seen = [(row["name"], row.get("routing")) for row in rows]
    assert [name for name, _ in seen] == [*(n for n in names for _ in range(2)), "cuBLAS bound"]
    assert seen[:2] == [("tessera", "random"), ("tessera", "balanced")]
    assert all(row[f"{key} error"] < 0.01 for row in rows[:2] for key in bench_moe.ERRORS)
    for row in rows[:6]:
        flops = 18 * 512 * 2 * 16 * 32
        assert row["both TFLOP/s"] == pytest.approx(flops / row["both ms"] / 1e9)
    assert all("sonicmoe" in row["absent"] for row in rows[6:8])
    assert rows[0]["tile fill"] < rows[1]["tile fill"] == 1.0
    assert (tmp_path / "layers.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert "absent: No module named 'sonicmoe'" in out
    assert "tessera balanced over: grouped_mm " in out


def test_an_error_in_a_layer_shows(tmp_path, monkeypatch):
    def wrong(shape, route):
        layer = peers.ours(shape, route)
        return lambda x, router, w1, w2: layer(x, router, w1.roll(1, 0), w2)

    monkeypatch.setitem(peers.PEERS, "tessera", wrong)
    row, _ = run(tmp_path, "--peers", "tessera", "--routing", "random")
    assert row["out error"] > 0.5 and row["dw1 error"] > 0.5


def test_rounding_beside_top_k(tmp_path, capsys):
    rows = run(tmp_path, "--rounding")
    assert [row["name"] for row in rows] == [
        "top-K, layer", "top-K, experts", "rounded, layer", "rounded, experts"
    ]  # fmt: skip
    assert [row["tile fill"] for row in rows[2:]] == [1.0, 1.0] > [row["tile fill"] for row in rows]
    assert "rounded / top-K, experts, both TFLOP/s: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--peers", "tesera"], "--peers='tesera' is unknown; allowed: tessera, "),
        (["--shapes", "7"], "--shapes: '7' is none of 0 to 5, or all"),
        (["--tune", "--small"], "error: --tune needs a CUDA device"),
        ([], "needs a CUDA device; allowed here: --small"),
    ],
)
def test_mistakes_are_told(words, told, capsys, monkeypatch):
    cpu = not words or "--tune" in words
    monkeypatch.setattr("scripts.bench.harness.DEVICE", torch.device("cpu" if cpu else "cuda"))
    with pytest.raises(SystemExit) as stop:
        bench_moe.main(words)
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


def test_timeline_has_gaps(monkeypatch):
    events = [(2000, 2010, "one"), (2014, 2020, "two")]
    monkeypatch.setattr(bench_moe, "device_events", lambda run, repeats: events)
    assert bench_moe.timeline(lambda: None) == [
        {"name": "one", "us": 10, "gap us": 0},
        {"name": "two", "us": 6, "gap us": 4},
    ]


def test_e23_the_legend_lies_on_no_bar(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    file = Path(__file__).resolve().parents[3] / "docs" / "img" / "moe.json"
    bench_moe.plot_speeds(tmp_path / "moe.png", json.loads(file.read_text())["rows"])
    (figure,) = drawn
    assert all(axes.get_legend() is None for axes in figure.axes)
    (legend,) = figure.legends
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
    heights = [bar.get_height() for axes in figure.axes for bar in axes.patches]
    assert min(heights) > 0, "no gaps: every series was measured at every shape"


def test_exact_tiles_are_those_of_the_products():
    """The products that --tune compares with, on a CPU: from plain torch over all rows."""
    shape = (64, 32, 16, 4, 2)
    x, router, w1, w2 = peers.operands(shape)
    with torch.no_grad():
        r = peers.Route(shape, False).routing(x, router)
    R = 128
    h, a = (torch.randn(R, n, dtype=torch.bfloat16) for n in (32, 16))
    exact = bench_moe.exact_tiles(x, w1, w2, h, a, r)
    of_R = torch.repeat_interleave(torch.arange(4), r.counts_E.long())
    rows = x[r.token_R.long()].float()
    up = torch.einsum("rd,rnd->rn", rows, w1.float()[of_R])
    act = torch.nn.functional.silu(up[:, 0::2]) * up[:, 1::2]
    outputs = {
        "up": (up, act),
        "down": (torch.einsum("rn,rdn->rd", a.float(), w2.float()[of_R]),),
        "dX": (torch.einsum("rn,rnd->rd", h.float(), w1.float()[of_R]),),
        "dW2": (torch.stack([rows[of_R == e].t() @ a[of_R == e].float() for e in range(4)]),),
        "dW1": (torch.stack([h[of_R == e].float().t() @ rows[of_R == e] for e in range(4)]),),
    }
    for name, out in outputs.items():
        for got, want in exact[name](out):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels on a CPU")
def test_tuning_measures_every_product_with_its_error(tmp_path, monkeypatch):
    listed = bench_moe.candidates
    monkeypatch.setattr(bench_moe, "candidates", lambda kernel, dtype: listed(kernel, dtype)[:1])
    monkeypatch.setattr(bench_moe, "busy_clock", lambda run, ms: None)
    monkeypatch.setattr(bench_moe, "median_ms", lambda run, **_: (run(), 1.0)[1])
    for module in (bench_moe, peers):  # the interpreter has no bfloat16
        monkeypatch.setattr(module, "BF16", torch.float32)
    monkeypatch.setattr(bench_moe, "hopper_launches", lambda *_: {})
    args = bench_moe.bench_parser("", "x").parse_args(["--out", str(tmp_path), "--verbose"])
    more = {"command": [], "failed": 0, "written": {}, "zeros": False, "kernels": []}
    vars(args).update(more, routings=[False], tier="triton")
    table = bench_moe.Table(args, "tune", bench_moe.COLUMNS["tune"])
    bench_moe.tune(args, table, [("small", (64, 32, 32, 4, 2))])
    assert not args.failed, [row for row in table.rows if "failed" in row]
    ours = [row for row in table.rows if row["config"].startswith("triton")]
    assert [row["kernel"] for row in ours] == ["up", "down", "dH", "dX", "dW2", "dW1"]
    assert all(row["error"] < 1e-2 and not row["wrong"] for row in ours)
    assert [row["config"] for row in table.rows if row["kernel"] == "combine"] == [
        "weighted", "plain"
    ]  # fmt: skip
