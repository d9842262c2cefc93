"""The benchmark of whole steps: it runs, counts tokens right, and forces the balance it names."""

from __future__ import annotations

import json

import pytest
import torch

from moe import MoE, MoEConfig
from scripts.bench import train as bench
from training.config.build import load_config
from training.estimate.flops import flops_per_token

SMALL = [
    "model.hidden_size=32", "model.num_hidden_layers=2", "data.seq_len=64",
    "train.micro_batch_size=2", "model.num_attention_heads=2", "model.num_key_value_heads=2",
]  # fmt: skip


def test_steps_are_timed_beside_transformers(tmp_path, capsys):
    arguments = ["configs/quickstart.yaml", *SMALL, "--steps", "1", "--warmup", "0", "--peer"]
    assert bench.main([*arguments, "--micro-batches", "2", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert [row["name"].split()[0] for row in rows] == ["real", "balanced", "transformers"]
    config = load_config("configs/quickstart.yaml", SMALL)
    for row in rows:
        assert row["tokens_per_step"] == 2 * 2 * 64
        assert row["tok/s"] == pytest.approx(256 / row["seconds"][0])
        assert row["flops_per_token"] == flops_per_token(config.model.config, 64)
        assert row["step s"] == row["seconds"][0]
    assert "tok/s" in capsys.readouterr().out


def test_a_mistake_in_the_config_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["configs/quickstart.yaml", "model.hiden_size=3"])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "hidden_size" in told and told.count("\n") == 1


def test_what_needs_a_gpu_is_refused_without(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as stop:
        bench.main(["configs/quickstart.yaml", "--profile"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: --profile needs a CUDA device\n"


def test_profile_sums_kernels_and_gaps(monkeypatch, capsys):
    events = [(0.0, 2000.0, "void a(int)"), (1000.0, 3000.0, "b"), (4000.0, 5000.0, "b")]
    monkeypatch.setattr(bench, "device_events", lambda run: events)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = bench.profile(lambda number: None)
    assert found == {
        "kernels": {"b": [3.0, 2], "void a(int)": [2.0, 1]}, "busy_ms": 4.0, "idle_ms": 1.0,
    }  # fmt: skip
    assert "one step: 4.0 ms of kernels, 1.0 ms between them" in capsys.readouterr().out


def test_forced_balance_gives_every_expert_the_same_load():
    layer = MoE(MoEConfig(hidden_size=8, expert_size=8, num_experts=4, num_experts_per_tok=2))
    layer.routing_hook = bench.force_balance
    _, stats = layer(torch.randn(16, 8))
    assert stats.counts_E.tolist() == [8, 8, 8, 8]
    assert stats.rows_E.tolist() == [8, 8, 8, 8]
