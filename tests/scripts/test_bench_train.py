"""The benchmark of whole steps: it runs, counts tokens right, and forces the balance it names."""

from __future__ import annotations

import json

import pytest
import torch

from moe import MoE, MoEConfig
from training.config import load_config
from training.flops import flops_per_token

SMALL = [
    "model.hidden_size=32", "model.num_hidden_layers=2", "data.seq_len=64",
    "train.micro_batch_size=2", "model.num_attention_heads=2", "model.num_key_value_heads=2",
]  # fmt: skip


@pytest.fixture
def bench(script):
    return script("bench_train")


def test_steps_are_timed_beside_transformers(bench, tmp_path, capsys):
    arguments = ["configs/quickstart.yaml", *SMALL, "--steps", "1", "--warmup", "0", "--peer"]
    assert bench.main([*arguments, "--micro-batches", "2", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert [row["name"].split()[0] for row in rows] == ["real", "balanced", "transformers"]
    config = load_config("configs/quickstart.yaml", SMALL)
    for row in rows:
        assert row["tokens_per_step"] == 2 * 2 * 64
        assert row["tokens_per_second"] == pytest.approx(256 / row["seconds"][0])
        assert row["flops_per_token"] == flops_per_token(config.model.config, 64)
    assert "tok/s" in capsys.readouterr().out


def test_a_mistake_in_the_config_is_one_line(bench, tmp_path, capsys):
    assert bench.main(["configs/quickstart.yaml", "model.hiden_size=3"]) == 2
    assert "hidden_size" in capsys.readouterr().err


def test_forced_balance_gives_every_expert_the_same_load(bench):
    layer = MoE(MoEConfig(hidden_size=8, expert_size=8, num_experts=4, num_experts_per_tok=2))
    layer.routing_hook = bench.force_balance
    _, stats = layer(torch.randn(16, 8))
    assert stats.counts_E.tolist() == [8, 8, 8, 8]
    assert stats.rows_E.tolist() == [8, 8, 8, 8]
