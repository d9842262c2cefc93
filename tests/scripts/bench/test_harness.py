"""What all benchmarks share: clocks, errors, tables; no GPU needed."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from scripts.bench import harness

CPU = torch.device("cpu")


@pytest.fixture
def args(tmp_path):
    return Namespace(
        out=tmp_path / "new",
        command=["--x"],
        verbose=False,
        failed=0,
        written={},
    )


def test_rows_are_printed_and_written_as_they_come(args, capsys):
    table = harness.Table(args, "kind", "name:6s | ms:8.3f | error:.1e", about=1)
    with table.row(name="one") as row:
        row["ms"], row["error"], row["more"] = 1.5, 0.001, [1]
    path = args.out / "kind.json"
    first = json.loads(path.read_text())
    assert first["rows"] == [{"name": "one", "ms": 1.5, "error": 0.001, "more": [1]}]
    assert first["command"] == ["--x"] and first["about"] == 1
    assert first["torch"] == torch.__version__
    with table.row(name="two") as row:
        row["ms"] = 12.25
    assert len(json.loads(path.read_text())["rows"]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "",
        "name          ms    error",
        "one        1.500  1.0e-03",
        "two       12.250",
    ]


def test_what_is_absent_or_fails_keeps_nothing_from_running(args, capsys):
    table = harness.Table(args, "kind", "name:6s | ms:8.3f")
    with table.row(name="peer"):
        raise ImportError("no peer")
    with table.row(name="ours") as row:
        row["ms"] = 1.0
        raise RuntimeError("too large\nand more")
    with table.row(name="next") as row:
        row["ms"] = 2.0
    assert [row.get("absent") or row.get("failed") for row in table.rows] == [
        "no peer", "RuntimeError: too large", None
    ]  # fmt: skip
    assert harness.finish(args) == 1  # an absent peer alone is no failure
    told = capsys.readouterr()
    assert "peer    absent: no peer" in told.out
    assert told.err == "error: 1 rows failed; --verbose shows where\n"


def test_errors_are_relative_by_norm():
    want = torch.tensor([3.0, 4.0])
    assert harness.relative_error(want + torch.tensor([0.0, 0.5]), want) == pytest.approx(0.1)
    assert harness.relative_error(want, want) == 0
    # In float64: bfloat16 cannot hold the difference.
    near = torch.tensor([256.0]).bfloat16()
    assert harness.relative_error(near, torch.tensor([257.0])) == pytest.approx(1 / 257)


def test_the_median_is_of_as_many_calls_as_asked():
    calls = []
    ms = harness.median_ms(
        lambda: (calls.append(1), time.sleep(0.002)), 0.0, fewest=4, most=4, device=CPU
    )
    assert 2 <= ms < 500
    assert len(calls) == 2 + 3 + 4


def test_cycled_calls_are_divided_by_their_number(monkeypatch):
    monkeypatch.setattr(harness, "DEVICE", CPU)
    inputs = [torch.zeros(1) for _ in range(4)]
    us = harness.cycled_us(lambda x: time.sleep(0.001), inputs, repeats=3)
    assert 1000 <= us < 500_000


def test_steps_of_the_warmup_do_not_count(capsys):
    seen = []
    seconds = harness.step_seconds(lambda n: (seen.append(n), time.sleep(0.3 * (n == 0))), 2, 1)
    assert seen == [0, 1, 2] and len(seconds) == 2 and max(seconds) < 0.2
    assert capsys.readouterr().out.startswith("first step: 0.")


def test_time_covered_by_spans():
    assert harness.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert harness.covered([]) == 0


def test_events_are_those_of_the_last_call(monkeypatch):
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
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def events(self):
            return events[::-1]

    monkeypatch.setattr(torch.profiler, "profile", Recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    calls = []
    found = harness.device_events(lambda: calls.append(1), repeats=3)
    assert found == [(2000, 2010, "one"), (2014, 2020, "two")]
    assert len(calls) == 3


def test_figures(tmp_path):
    bars = [("x", {"p": 1.0, "q": 2.0}), ("y", {"q": 3.0})]
    harness.plot(tmp_path / "bars.png", {"a": bars, "b": []})
    lines = [("x, one", {1.0: 2.0, 10.0: 3.0}), ("x, two", {1.0: 1.0})]
    harness.plot(tmp_path / "lines.png", {"a": lines}, baseline=1.0)
    for name in ("bars", "lines"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
