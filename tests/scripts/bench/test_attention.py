"""The benchmark of attention: on a CPU what runs there, with its error."""

from __future__ import annotations

import json

import pytest

from scripts.bench import attention as bench

SMALL = ["data.seq_len=64", "model.num_attention_heads=2", "model.num_key_value_heads=1"]


def test_what_runs_here_is_measured_and_right(tmp_path, capsys):
    arguments = ["configs/quickstart.yaml", *SMALL, "--rows", "3", "--repeats", "1"]
    assert bench.main([*arguments, "--out", str(tmp_path)]) == 0
    assert "2 heads, 1 of keys and values, width 32; " in capsys.readouterr().out
    found = json.loads((tmp_path / "attention.json").read_text())
    assert max(found["documents"]) <= 64
    ours, rows = found["rows"]
    assert ours["method"] == "ours" and ours["error"] < 1e-5
    assert rows["method"] == "rows" and "error" not in rows
    pairs = sum(n * (n + 1) / 2 for n in found["documents"])
    assert ours["forward TFLOP/s"] == pytest.approx(4 * pairs * 2 * 32 / ours["forward ms"] / 1e9)


def test_an_attention_across_borders_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(
        bench, "packed_attention", lambda q, k, v, *_: bench.causal_attention(q, k, v)
    )
    long = ["data.seq_len=1024", "model.max_position_embeddings=1024", "--rows", "6"]
    arguments = ["configs/quickstart.yaml", *SMALL, *long]
    assert bench.main([*arguments, "--repeats", "1", "--out", str(tmp_path)]) == 0
    ours, _ = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert ours["error"] > 0.1


def test_a_mistake_in_the_config_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["configs/quickstart.yaml", "model.hiden_size=3"])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "hidden_size" in told and told.count("\n") == 1
