"""A layer filled from a dense network computes the same; what changes it, changes what it says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moe.upcycle import add_noise, drop_columns, upcycle_layer
from tests.moe.oracle import make_layer

D, N = 6, 12


def _dense(dtype=torch.float64):
    gate, up, down = (torch.randn(s, dtype=dtype) for s in ((N, D), (N, D), (D, N)))
    return (gate, up, down), lambda x: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("granularity", [1, 2, 3])
@pytest.mark.parametrize(
    "router",
    [
        {},
        {"norm": "softmax_topk"},
        {"shared_expert_size": N, "shared_expert_gate": True, "route_scale": 2.5},
        {
            "score": "sigmoid",
            "route_scale": 2.5,
            "selection_bias": True,
            "bias": None,
        },
    ],
)
def test_the_function_is_preserved(granularity, router):
    K = 2 * granularity
    layer = make_layer(
        num_experts=4 * granularity, num_experts_per_tok=K, expert_size=N // granularity, **router
    )
    weights, dense = _dense()
    assert upcycle_layer(layer, *weights, granularity=granularity)
    x = torch.randn(50, D, dtype=torch.float64)
    y, stats = layer(x)
    torch.testing.assert_close(y, dense(x), rtol=1e-12, atol=1e-12)
    assert len(set(stats.counts_E.tolist())) > 1, "the router must not be uniform for this to tell"


def test_a_token_takes_whole_copies():
    """Also when two copies have equal keys: the shards of the first come first."""
    layer = make_layer(num_experts=12, num_experts_per_tok=6, expert_size=N // 3)
    weights, dense = _dense()
    upcycle_layer(layer, *weights, granularity=3)
    x = torch.randn(40, D, dtype=torch.float64)
    chosen = layer.router(x).gating.expert_TK.sort(1).values.view(40, 2, 3)
    assert (chosen % 3 == torch.arange(3)).all()
    assert (chosen // 3 == (chosen // 3)[:, :, :1]).all()
    with torch.no_grad():
        layer.router.weight.zero_()
    torch.testing.assert_close(layer(x)[0], dense(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_raw_gates_are_right_on_average_only(score):
    layer = make_layer(
        num_experts=4, num_experts_per_tok=2, expert_size=N, norm="none", score=score,
        route_scale=1.5,
    )  # fmt: skip
    weights, dense = _dense()
    assert not upcycle_layer(layer, *weights)
    x = torch.randn(20, D, dtype=torch.float64)
    assert (layer(x)[0] - dense(x)).abs().max() > 1e-3
    with torch.no_grad():
        layer.router.weight.zero_()
    torch.testing.assert_close(layer(x)[0], dense(x), rtol=1e-12, atol=1e-12)


def test_dropped_columns():
    layer = make_layer(num_experts=3, expert_size=200, hidden_size=40, dtype=torch.float32)
    gate, up, down = torch.randn(200, 40) + 1, torch.randn(200, 40), torch.randn(40, 200) * 3
    upcycle_layer(layer, gate, up, down)
    kept = [w.detach().clone() for w in (layer.w1, layer.w2)]
    drop_columns(layer, 0.25, torch.Generator().manual_seed(1))
    changed = [(layer.w1 != kept[0]).any(-1), (layer.w2 != kept[1]).any(1)]
    assert (changed[0].view(3, 200, 2).all(-1) == changed[1]).all()
    assert (changed[1].sum(1) == 50).all()
    assert (changed[1][0] != changed[1][1]).any(), "each expert loses columns of its own"
    columns = changed[1][0]
    assert layer.w1.detach()[0, 0::2][columns].mean() == pytest.approx(1, abs=0.1)
    assert layer.w2.detach()[0, :, columns].std() == pytest.approx(3, rel=0.1)
    drop_columns(layer, 0.0, torch.Generator())
    assert (changed[1] == (layer.w2 != kept[1]).any(1)).all()


def test_noise():
    layer = make_layer(num_experts=2, expert_size=100, hidden_size=40, dtype=torch.float32)
    dense = torch.randn(100, 40) * 2, torch.randn(100, 40) * 2, torch.randn(40, 100)
    upcycle_layer(layer, *dense)
    before = layer.w1.detach().clone()
    add_noise(layer, 0.0, torch.Generator())
    assert torch.equal(layer.w1, before)
    add_noise(layer, 0.01, torch.Generator().manual_seed(0))
    difference = layer.w1.detach() - before
    assert difference.std() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(difference[0], difference[1])


@pytest.mark.parametrize(
    ("fields", "granularity", "message"),
    [
        (
            {"expert_size": N, "num_experts": 8},
            2,
            "expert_size=12 must be the dense width 12",
        ),
        ({"expert_size": 4, "num_experts": 4}, 3, "granularity=3 must divide num_experts=4"),
        ({"expert_size": 3, "num_experts": 8}, 4, "num_experts_per_tok=2"),
        ({"expert_size": N, "activation": "relu2"}, 1, "must be a gated one"),
        ({"expert_size": N, "shared_expert_size": 4}, 1, "a shared expert must be as wide"),
        ({"expert_size": N, "score": "identity", "norm": "none"}, 1, "score='identity' with norm="),
    ],
)
def test_what_does_not_fit_is_refused(fields, granularity, message):
    layer = make_layer(**fields)
    with pytest.raises(ValueError, match=message):
        upcycle_layer(layer, *_dense()[0], granularity=granularity)
    with pytest.raises(ValueError, match="share=2"):
        drop_columns(layer, 2, torch.Generator())
    with pytest.raises(ValueError, match="must not be negative"):
        add_noise(layer, -1, torch.Generator())
