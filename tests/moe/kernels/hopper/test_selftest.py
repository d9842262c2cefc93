"""The router's self-test: what is right passes, every kind of damage is seen. (That of the products
runs on a Hopper GPU alone: tests/gpu/test_hopper.py.)"""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common.gating import topk_gating_ref
from moe.kernels.hopper.selftest import BOUND
from moe.kernels.routing.routing_metadata import routing_metadata_ref

gating = pytest.importorskip("moe.kernels.hopper.gating")
CPU = torch.device("cpu")


def _right(logits, k, score, norm, scale, bias, valid, metadata):
    found = topk_gating_ref(logits, k, score, norm, scale, bias, valid_T=valid)
    sort = routing_metadata_ref(found.expert_TK.reshape(-1), logits.shape[1], k)
    return [*found, *sort]


FORMS = [
    (64, 8, "softmax", "topk_sum", 1.0, False, False),
    (100, 4, "sigmoid", "none", 2.5, True, True),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_reference_passes(monkeypatch, form):
    monkeypatch.setattr(gating, "_launch", _right)
    assert gating._error(*form, CPU) < 1e-6


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("at", "damage"),
    [
        (0, lambda t: t.roll(1, 0)),  # experts of the next token
        (1, lambda t: t * 1.1),
        (2, lambda t: t + 1),
        (3, lambda t: t + 1),
        (4, lambda t: t.roll(1)),
        (5, lambda t: t + 1),
        (6, lambda t: t.roll(1)),
        (7, lambda t: t.roll(1)),
        (8, lambda t: t.flip(0)),
        (9, lambda t: t + 1),
    ],
)
def test_damage_is_seen(monkeypatch, form, at, damage):
    def wrong(*arguments):
        out = _right(*arguments)
        out[at] = damage(out[at])
        return out

    monkeypatch.setattr(gating, "_launch", wrong)
    assert not gating._error(*form, CPU) <= BOUND
