"""Whole runs with the router's settings together: each ends, and one that dies goes on bit for bit.

What a setting means is tested where it is computed; here it is its state between steps, and that
the parts of a run put up with one another.
"""

from __future__ import annotations

import json

import pytest
import torch

import train

TIMES = ("attempt", "time", "tokens_per_second", "time_left_s", "mfu", "max_memory_gib")
FALLING = ["router.top_k.kind=linear", "router.top_k.start=4", "router.top_k.soft=true"]
FREE = "router.exportable=false"
QUANTILE = ["router.bias.kind=quantile", "router.bias.ema=0.5", FREE]
ROUNDED = ["router.rounding.tile=4", "router.rounding.min_mean_tiles=1"]
COMBINATIONS = {
    "last load": ["router.balance.kind=lagged"],
    "falling K, systematic rounding, bias": [
        *FALLING[:2], "router.top_k.start=3", *QUANTILE, "router.rounding.to=systematic", *ROUNDED,
    ],
    "falling K, noise, capacity, average": [
        *FALLING, "router.noise.kind=dropout", "router.noise.probability=0.2",
        "router.selection.kind=ema", "router.selection.decay=0.5",
        "router.capacity.factor=1.1", "router.end_steps=2",
    ],
    "noise, stochastic rounding, recomputed": [
        "router.noise.kind=jitter", "router.noise.size=0.2", "router.rounding.to=stochastic",
        *ROUNDED, "train.checkpointing=full",
        "router.selection.kind=sample", "router.selection.temperature=1",
    ],
    "bfloat16 states, rounded at random": [
        "train.dtype=bfloat16", "optim.storage.weights=bfloat16", "optim.storage.moments=bfloat16",
        "train.micro_batch_size=4",  # a step is one micro-batch: no buffer for gradients
    ],
    "bfloat16 moments, recomputed": [
        "train.dtype=bfloat16", "optim.storage.moments=bfloat16", "train.checkpointing=full",
        "train.micro_batch_size=4",
    ],
    "muon": ["optim.kind=muon"],
    "muon, bfloat16 states": [
        "optim.kind=muon", "train.dtype=bfloat16", "optim.storage.weights=bfloat16",
        "optim.storage.moments=bfloat16", "train.micro_batch_size=4",
    ],
    "revived, average": [
        "experts.policy.kind=revive", "experts.policy.after=1",
        "model.init.router=5", "model.init.embedding=0.02",
        "router.selection.kind=ema", "router.selection.decay=0.9", FREE,
        "checkpoint.every_steps=1",
    ],
}  # fmt: skip


def metrics(folder):
    """Step → numbers of its last attempt that are no times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {
        line["step"]: {key: value for key, value in line.items() if key not in TIMES}
        for line in lines
    }


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_run_that_dies_goes_on_bit_for_bit(name, tiny_config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_config), "train.steps=7", "checkpoint.every_steps=3", *COMBINATIONS[name]]
    assert train.main([*words, "run.name=whole"]) == 0
    real = train.train_step

    def dies(*arguments, **keywords):
        if arguments[0].step == 5:
            raise RuntimeError("a fault")
        return real(*arguments, **keywords)

    monkeypatch.setattr(train, "train_step", dies)
    assert train.main([*words, "run.name=parts"]) == 1
    monkeypatch.setattr(train, "train_step", real)
    assert train.main([*words, "run.name=parts"]) == 0
    whole, parts = (metrics(tmp_path / "runs" / run) for run in ("whole", "parts"))
    assert list(whole) == list(range(1, 8))
    assert whole == parts
    events = (tmp_path / "runs" / "parts" / "events.jsonl").read_text()
    assert ("expert_revived" in events) == (name == "revived, average")


def test_calibration_draws_nothing_of_the_run(tiny_config, monkeypatch, tmp_path):
    """The first step's noise is what it would have been without it."""
    monkeypatch.chdir(tmp_path)
    states = []
    real = train.calibrate

    def calibrate(job):
        states.append(torch.get_rng_state())
        real(job)
        states.append(torch.get_rng_state())
        assert all(block.moe.router.selection_bias.any() for block in job.model.layers)

    monkeypatch.setattr(train, "calibrate", calibrate)
    words = [
        "router.bias.calibrate=true",
        "router.bias.freeze_at=1",
        "router.noise.kind=jitter",
        "router.noise.size=0.1",
    ]
    words += [*QUANTILE, "train.steps=4", "eval.every_steps=null", "eval.rows=128"]
    assert train.main([str(tiny_config), *words, "run.name=calibrated"]) == 0
    assert len(states) == 2
    assert torch.equal(*states)
