"""A limit on the tokens of an expert: who is dropped, and what stays as it was."""

import math

import pytest
import torch

from moe import MoE, RoutingTrace, balance_loss
from moe.control import begin_step
from moe.routing import Routing
from moe.rules.capacity import ranks
from tests.moe.oracle import check_gradients, expert_by_hand, logits_layer, make_layer


def limited(capacity: float, drop: str = "probability", dtype=torch.float64, **fields) -> MoE:
    return make_layer(dtype, capacity={"factor": capacity, "drop": drop}, **fields)


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_the_right_tokens_are_dropped(drop):
    layer = limited(1.0, drop)
    x = torch.randn(35, 6, dtype=torch.float64)
    y, stats = layer(x)
    gating = layer.router(x).gating
    limit = math.ceil(35 * 2 / 7)
    right = torch.zeros_like(y)
    for e in range(7):
        pairs = [
            (t, gating.gate_TK[t, k].item())
            for t in range(35) for k in range(2) if gating.expert_TK[t, k] == e
        ]  # fmt: skip
        if drop == "probability":
            pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        assert stats.rows_E[e] == min(len(pairs), limit)
        for t, gate in pairs[:limit]:
            right[t] += gate * expert_by_hand(layer, e, x[t])
    torch.testing.assert_close(y, right)
    assert (stats.counts_E > limit).any(), "something was dropped"
    assert torch.equal(stats.counts_E, gating.counts_E), "statistics are of the whole choice"


def test_ranks_follow_gates_then_tokens():
    expert = torch.tensor([[0, 1], [0, -1], [1, 0], [0, 1]])
    gate = torch.tensor([[0.2, 0.8], [0.9, 0.0], [0.8, 0.2], [0.5, 0.5]])
    routing = Routing.from_topk(expert, gate, 3)
    assert ranks(routing, "position").view(4, 2)[expert >= 0].tolist() == [0, 0, 1, 1, 2, 3, 2]
    assert ranks(routing, "probability").view(4, 2)[expert >= 0].tolist() == [2, 0, 0, 1, 3, 1, 2]


def test_real_tokens_come_before_padding():
    """Padding in front takes no place of an expert, and does not raise the limit."""
    for drop in ("probability", "position"):
        layer = limited(1.0, drop)
        x = torch.randn(21, 6, dtype=torch.float64)
        padded = torch.cat([torch.ones(14, 6, dtype=torch.float64), x])
        valid = torch.arange(35) >= 14
        torch.testing.assert_close(layer(padded, valid)[0][14:], layer(x)[0])


def test_evaluation_drops_nothing_and_the_limit_ends():
    layer = limited(1.0)
    plain = make_layer()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(35, 6, dtype=torch.float64)
    right = plain(x)[0]
    assert not torch.equal(layer(x)[0], right)
    assert torch.equal(layer.eval()(x)[0], right)
    layer.train()
    ends = make_layer(capacity={"factor": 1.0}, end_steps=4, steps=9)
    ends.load_state_dict(layer.state_dict())
    assert begin_step(ends, 5) == []
    assert torch.equal(ends(x)[0], layer(x)[0])
    assert begin_step(ends, 6) == ["no expert drops tokens from now on"]
    assert torch.equal(ends(x)[0], right)


def test_limits_by_hand():
    """ceil(1.25 * 64 / 4) of float32 arithmetic must not become 21."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 1}
    layer = logits_layer(**sizes, norm="none", capacity={"factor": 1.25})
    logits = torch.zeros(64, 4)
    logits[:, 0] = torch.linspace(1, 2, 64)
    _, stats = layer(logits)
    assert stats.rows_E.tolist() == [20, 0, 0, 0]


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_gradients_by_finite_differences(drop):
    layer = limited(1.0, drop)
    x = torch.randn(28, 6, dtype=torch.float64, requires_grad=True)

    def value():
        y, stats = layer(x)
        return y.square().sum() + balance_loss(stats)

    check_gradients(value, {"x": x, **dict(layer.named_parameters())}, atol=1e-6)


@pytest.mark.parametrize("gates", ["live", "frozen"])
def test_a_trace_keeps_choice_and_drops_apart(gates):
    layer = limited(1.0)
    x = torch.randn(28, 6, dtype=torch.float64)
    trace = RoutingTrace(layer, gate_dtype=torch.float64)
    with trace.record():
        y, stats = layer(x)
    layer.router.rules.capacity.limited = False  # what was dropped stays dropped
    with trace.replay(gates=gates):
        again, again_stats = layer(x)
    torch.testing.assert_close(again, y)
    assert torch.equal(again_stats.counts_E, stats.counts_E)
    assert torch.equal(again_stats.rows_E, stats.rows_E)
    assert stats.rows_E.sum() < stats.counts_E.sum()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0.0}, "greater than 0"),
        ({"factor": 3.5}, "factor=3.5 has no effect: no expert can get more than 3.5 times"),
        ({"factor": 1.0, "drop": "random"}, "'probability' or 'position'"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        make_layer(capacity=fields)


def test_rounding_is_refused_beside_it():
    with pytest.raises(ValueError, match="both decide how many tokens"):
        make_layer(capacity={"factor": 1.0}, rounding={"to": "nearest"})
