"""A layer under a schedule of K: what training and evaluation choose, fading, and resume."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from moe import MoE
from moe.control import begin_step, update_routers
from moe.trace import RoutingTrace
from tests.moe.oracle import make_layer


def scheduled(kind="linear", start=6, end=2, soft=False, steps=16, **fields):
    """K falls from start to end in the first half of the run."""
    top_k = {"kind": kind, "start": start, "soft": soft}
    sizes = {"num_experts": 8, "num_experts_per_tok": end}
    return make_layer(**sizes, top_k=top_k, steps=steps, **fields)


def plain(layer, k):
    """The same layer with a fixed K."""
    router = layer.config.router.model_copy(update={"top_k": None})
    config = dataclasses.replace(layer.config, num_experts_per_tok=k, router=router)
    twin = MoE(config).to(layer.w1.dtype)
    state = {name: t for name, t in layer.state_dict().items() if "kappa" not in name}
    twin.load_state_dict(state)
    return twin.train(layer.training)


def test_training_follows_the_schedule_and_evaluation_its_end():
    layer, x = scheduled(), torch.randn(20, 6, dtype=torch.float64)
    ks, said = [], []
    for step in range(1, 12):
        said += begin_step(layer, step)
        ks.append(layer.router.training_k)
        y, stats = layer.train()(x)
        assert stats.counts_E.sum() == 20 * ks[-1]
        assert torch.equal(y, plain(layer, ks[-1])(x)[0])
        assert torch.equal(layer.eval()(x)[0], plain(layer, 2)(x)[0])
    assert ks == [6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 2]
    assert said[0] == "each token uses 6 experts from now on, no longer 2"
    assert said[1:] == [
        f"each token uses {k} experts from now on, no longer {k + 1}" for k in (5, 4, 3, 2)
    ]

    # evaluation as training does it
    begin_step(layer, 3)
    layer.eval().router.scheduled_evaluation = True
    assert torch.equal(layer(x)[0], plain(layer, 5)(x)[0])


def test_resume_lands_on_the_same_k():
    one, other = scheduled(soft=True), scheduled(soft=True)
    for step in range(1, 5):
        begin_step(one, step)
    other.load_state_dict(one.state_dict())
    begin_step(other, 4)
    a, b = one.router.rules.top_k, other.router.rules.top_k
    assert a.phase == b.phase == (5, True)
    assert a.kappa == b.kappa == 4.5
    x = torch.randn(9, 6, dtype=torch.float64)
    assert torch.equal(one(x)[0], other(x)[0])


def test_soft_k_has_no_jumps():
    """The output moves a little at every step of a soft ramp, and by much at the hard jumps."""
    x = torch.randn(64, 6, dtype=torch.float64)
    moved = {}
    for soft in (True, False):
        torch.manual_seed(0)
        layer = scheduled(soft=soft, steps=800)
        outs = []
        for step in range(1, 403):
            begin_step(layer, step)
            with torch.no_grad():
                outs.append(layer(x)[0])
        moved[soft] = max((a - b).norm() / a.norm() for a, b in pairwise(outs))
        assert torch.equal(outs[-1], plain(layer, 2)(x)[0].detach())
    assert moved[True] < 0.02
    assert moved[False] > 10 * moved[True]


def test_soft_gates_sum_to_one_and_have_their_gradient():
    layer = scheduled(soft=True)
    begin_step(layer, 4)  # kappa 4.5
    x = torch.randn(24, 6, dtype=torch.float64)
    trace = RoutingTrace(torch.nn.Sequential(layer))
    with trace.record():
        y, _ = layer(x)
    gates_TE = trace.entries["0"][0].choice.expand(None, "cpu", "auto").dense()
    torch.testing.assert_close(gates_TE.sum(1), torch.ones(24), atol=0.02, rtol=0)  # kept as bf16
    with trace.replay():  # live gates fade too
        assert torch.equal(layer(x)[0], y)

    # with the choice held fixed, by finite differences
    def value(weight):
        with torch.no_grad():
            layer.router.weight.copy_(weight)
        with trace.replay():
            return layer(x)[0].square().sum()

    weight = layer.router.weight.detach().clone()
    value(weight).backward()
    grad = layer.router.weight.grad
    for e, d in ((0, 0), (3, 2), (7, 5)):
        step = torch.zeros_like(weight)
        step[e, d] = 1e-6
        found = (value(weight + step) - value(weight - step)) / 2e-6
        torch.testing.assert_close(grad[e, d], found, rtol=1e-5, atol=1e-7)


def test_rounding_and_balance_follow_k():
    layer = scheduled(
        rounding={"to": "nearest", "tile": 8, "min_mean_tiles": 1.0},
        bias={"kind": "quantile"},
        start=6,
    )
    x = torch.randn(512, 6, dtype=torch.float64) + 0.5
    for step, k in ((1, 6), (9, 2)):
        begin_step(layer, step)
        _, stats = layer(x)
        assert stats.counts_E.sum() == 512 * k
        assert (stats.rows_E % 8 == 0).all()
        # quantile thresholds for q = T K / E tokens of each expert balance in a few steps
        assert stats.counts_E.max() > 1.2 * 512 * k / 8
        for _ in range(6):
            update_routers(layer, stats, step=step)
            _, stats = layer(x)
        assert stats.counts_E.max() < 1.1 * 512 * k / 8
        layer.router.selection_bias.zero_()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"start": 9},
            "router.top_k.start=9 must be above num_experts_per_tok=2 and at most the 8",
        ),
        ({"start": 2}, "router.top_k.start=2 must be above num_experts_per_tok=2"),
        ({"start": 8, "bias": {"kind": "quantile"}}, "at most the 7"),
        (
            {"soft": True, "rounding": {"to": "up", "gates": "rounded"}},
            "router.top_k.soft=true fades",
        ),
        ({"steps": None}, "need the number of its steps"),
    ],
)
def test_refusals(fields, told):
    with pytest.raises(ValueError, match=told):
        scheduled(**fields)


def test_state_stays_float32():
    layer = scheduled(soft=True).float().to(torch.bfloat16)
    begin_step(layer, 4)
    kappa = layer.router.rules.top_k.kappa
    assert kappa.dtype == torch.float32
    assert kappa == 4.5
