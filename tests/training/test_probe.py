"""The churn of a probe's expert choices."""

import numpy as np
import pytest
import torch

from models.build import build_model
from models.config import ModelConfig
from parallel import World
from tests.training.tiny import MODEL
from training.data.batch import make_batch
from training.data.order import Row
from training.probe import Probe, changed_pairs


def share(before, now):
    changed, pairs = changed_pairs(torch.tensor(before), torch.tensor(now))
    return (changed / pairs).item()


def test_worked():
    """Sets {01, 23, 45} → {01, 25, 67}: flips 0, 1/2 and 1."""
    assert share([[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 5], [6, 7]]) == 0.5
    assert share([[0, 1], [2, 3]], [[1, 0], [3, 2]]) == 0, "the order of a set is no change"
    # tokens without experts, and of different numbers of them
    assert share([[-1, -1], [2, 3]], [[-1, -1], [2, 4]]) == 0.5
    assert share([[0, 1, 2, 3]], [[0, 4, -1, -1]]) == 0.5


def test_independent_choices_change_as_chance_says():
    T, K, E = 4000, 2, 8
    draw = torch.Generator().manual_seed(0)
    before, now = (torch.rand(T, E, generator=draw).argsort(1)[:, :K] for _ in range(2))
    assert share(before.tolist(), now.tolist()) == pytest.approx(1 - K / E, abs=0.02)


def test_a_probe_sees_what_changed_since_it_was_asked():
    model = build_model(ModelConfig(**MODEL), seed=0)
    text = np.random.default_rng(0).integers(0, 288, 33)
    batch = make_batch([Row(text[:-1], text[1:], [32])], ((0, 0, 0),), 32, 0)
    probe = Probe(model, batch, World())
    assert probe.churn()["routing_churn"] == 0
    with torch.no_grad():  # every token of the first layer has two other experts
        model.layers[0].moe.router.weight.neg_()
    assert 0.5 <= probe.churn()["routing_churn"].item() <= 1, "half of all pairs at least"
    assert probe.churn()["routing_churn"] == 0
    with torch.no_grad():
        model.layers[0].moe.router.weight.neg_()
    probe.refresh_baseline()
    assert probe.churn()["routing_churn"] == 0, "changed by hand, and looked at"
    assert model.training
