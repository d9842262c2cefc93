"""The benchmark of the output layer on a CPU."""

from __future__ import annotations

import json

import pytest
import torch

from scripts.bench import loss as bench


def test_a_small_run(tmp_path):
    assert bench.main(["--small", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "loss.json").read_text())["rows"]
    assert [(row["backend"], row["chunk"]) for row in rows] == [
        ("reference", "64"), ("triton", "64"), ("triton", "16"), ("liger", "None"),
    ]  # fmt: skip
    for row in rows[:3]:
        assert row["dx error"] < 0.01 and row["dw error"] < 0.01
        assert row["TFLOP/s"] == pytest.approx(6 * 64 * 32 * 500 / row["ms"] / 1e9)
    if not torch.cuda.is_available():
        assert rows[3]["absent"] == "needs CUDA and liger-kernel"
