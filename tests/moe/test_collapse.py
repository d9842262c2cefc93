"""A planted dead expert comes back under each remedy, and does not without; a calibrated start."""

import math

import pytest
import torch

from moe import MoE, MoEConfig, RouterConfig
from moe.calibrate import calibrating
from moe.control import begin_step, update_routers

T, E, K, D = 512, 8, 2, 16
MEAN = T * K / E


def planted(row_scale=-100.0, score="softmax", bias=None, **router):
    """A layer whose expert 2 has a router row of -100 times the mean direction of its tokens."""
    torch.manual_seed(0)
    config = RouterConfig(bias=bias, **router)
    std = {"init_std": 0.3, "router_init_std": 0.2}
    layer = MoE(MoEConfig(D, 8, E, K, score=score, router=config, **std))
    with torch.no_grad():
        layer.router.weight[2] = row_scale * direction()
    return layer


def direction():
    return torch.ones(D) / math.sqrt(D)


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(T, D, generator=generator) + 4 * direction()


def share_of_dead(layer, steps):
    """Load of expert 2 / mean load after each step of updates from the loads alone."""
    found = []
    for step in range(1, steps + 1):
        begin_step(layer, step)
        _, stats = layer(tokens(step))
        update_routers(layer, stats, step=step)
        found.append(stats.counts_E[2].item() / MEAN)
    return found


@pytest.mark.parametrize(
    ("bias", "steps", "goal"),
    [
        # scores are sigmoids: a bias of about 1 lifts an expert of score 0 above all others
        ({"kind": "sign", "rate": 0.05}, 40, 0.25),
        ({"kind": "min_load", "rate": 0.05}, 40, 0.2),
        ({"kind": "quantile"}, 6, 0.7),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_a_bias_brings_it_back(bias, steps, goal):
    layer = planted(score="sigmoid", bias=bias)
    shares = share_of_dead(layer, steps)
    assert shares[0] == 0
    assert sum(shares[-3:]) / 3 > goal
    frozen = planted(score="sigmoid")
    assert share_of_dead(frozen, steps)[-1] == 0


def test_min_load_leaves_the_others_alone():
    """Only experts below the threshold are raised, by the same for all: no order among the others
    changes, and a load above it is no reason to move."""
    layer = planted(score="sigmoid", bias={"kind": "min_load", "rate": 0.05, "below": 0.25})
    begin_step(layer, 1)
    _, stats = layer(tokens(1))
    update_routers(layer, stats, step=1)
    bias_E, counts_E = layer.router.selection_bias, stats.counts_E
    low_E = counts_E < 0.25 * MEAN
    assert low_E[2]
    assert not low_E.all()
    assert len(set(bias_E[low_E].tolist())) == len(set(bias_E[~low_E].tolist())) == 1
    assert bias_E[2] - bias_E[~low_E][0] == pytest.approx(0.05)
    assert bias_E.sum().abs() < 1e-6


def test_min_tiles_brings_a_starved_expert_back():
    """An expert with a few tokens, all of which rounding takes from it, has no gradient; with a
    tile of its own it has, and here every token that reaches it gains by it."""
    shares = {}
    for min_tiles in (0, 1):
        rounding = {"to": "nearest", "tile": 64, "min_tiles": min_tiles, "min_mean_tiles": 1.0}
        layer = planted(row_scale=-0.2, rounding=rounding)
        with torch.no_grad():  # some tokens still want it
            layer.router.weight[2] += 0.15 * torch.randn(D)
        optimizer = torch.optim.Adam([layer.router.weight], lr=0.02)
        for step in range(40):
            routing = layer.router(tokens(step)).routing
            if step == 0:
                assert 0 < layer(tokens(0))[1].counts_E[2] < 32, "less than half a tile"
                assert routing.counts_E[2] == 64 * min_tiles
            loss = -(routing.gates_S * (routing.expert_S == 2)).sum() / T
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        shares[min_tiles] = layer.eval()(tokens(99))[1].counts_E[2].item() / MEAN
    assert shares[0] < 0.25
    assert shares[1] > 1


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_calibrated_bias_balances_the_next_batch_too(score):
    experts, k, count = 64, 8, 8192
    torch.manual_seed(3)
    router = RouterConfig(bias=None)
    layer = MoE(MoEConfig(experts, 4, experts, k, score=score, selection_bias=True, router=router))
    offset_E = torch.randn(experts)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(experts))

    def violation(seed):
        x = torch.randn(count, experts, generator=torch.Generator().manual_seed(seed)) + offset_E
        counts_E = layer(x)[1].counts_E.float()
        return (counts_E.max() / counts_E.mean() - 1).item()

    assert violation(1) > 2
    before = [p.clone() for p in layer.parameters()]
    with calibrating(layer):
        violation(2)
    assert layer.routing_hook is None
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters()))
    floor = math.sqrt(2 * math.log(experts) / (count * k / experts))
    assert violation(3) < floor + 0.1


def test_calibration_asks_for_a_bias():
    with pytest.raises(ValueError, match="it needs a router"), calibrating(planted()):
        pass
