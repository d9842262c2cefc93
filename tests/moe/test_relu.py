"""ReLU routing: values, gradients, the penalty that keeps it sparse, and its weight's rule."""

import pytest
import torch

from moe import RoutingTrace, auxiliary_loss
from moe.balance import l1_loss
from moe.control import RouterControl, update_routers
from tests.moe.oracle import check_gradients, expert_by_hand, logits_layer, make_layer


def relu_layer(dtype=torch.float64, **fields):
    control = RouterControl(l1_start=1e-8, l1_factor=fields.pop("l1_factor", 1.2))
    return make_layer(dtype, score="relu", norm="none", control=control, **fields)


@torch.no_grad()
def test_value_is_the_sum_over_positive_logits():
    layer = relu_layer(route_scale=1.5)
    x = torch.randn(20, 6, dtype=torch.float64)
    x[3] = 0  # no expert at all
    y, stats = layer(x)
    z = x @ layer.router.weight.T
    right = torch.stack(
        [
            sum((1.5 * z_E[e] * expert_by_hand(layer, e, x_D) for e in range(7) if z_E[e] > 0),
                torch.zeros(6, dtype=torch.float64))
            for x_D, z_E in zip(x, z)
        ]
    )  # fmt: skip
    torch.testing.assert_close(y, right)
    assert stats.counts_E.tolist() == (z > 0).sum(dim=0).tolist()
    torch.testing.assert_close(stats.gate_sum_E, z.relu().sum(dim=0))


@torch.no_grad()
def test_at_most_so_many_experts():
    layer = relu_layer(relu_most=3, num_experts_per_tok=2)
    x = torch.randn(50, 6, dtype=torch.float64)
    z = x @ layer.router.weight.T
    gating, _ = layer.router.rectify(z)
    assert gating.expert_TK.shape == (50, 3)
    kept = (gating.expert_TK >= 0).sum(dim=1)
    assert torch.equal(kept, (z > 0).sum(dim=1).clamp(max=3))
    torch.testing.assert_close(gating.gate_TK, z.topk(3).values.relu())


@torch.no_grad()
def test_c9_the_router_alone_gives_what_the_layer_routes_by():
    layer = relu_layer()
    x = torch.randn(20, 6, dtype=torch.float64)
    valid = torch.arange(20) < 17
    _, stats = layer(x, valid)
    gating = layer.router(x, valid)
    assert torch.equal(gating.counts_E, stats.counts_E)
    want, _ = layer.router.rectify(layer.router.logits(x), valid)
    assert torch.equal(gating.expert_TK, want.expert_TK)
    assert torch.equal(gating.gate_TK, want.gate_TK)
    assert (gating.gate_TK[17:] == 0).all() and (gating.expert_TK[17:] == -1).all()


@torch.no_grad()
def test_output_does_not_jump_where_a_gate_closes():
    layer = logits_layer(torch.float64, num_experts=4, num_experts_per_tok=2, score="relu",
                         norm="none")  # fmt: skip
    base = torch.tensor([[0.7, 0.0, -0.3, 1.1]], dtype=torch.float64)
    side = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    jump = (layer(base + 1e-9 * side)[0] - layer(base - 1e-9 * side)[0]).abs().max()
    assert jump < 1e-8


def test_gradients_by_finite_differences():
    layer = relu_layer()
    x = torch.randn(15, 6, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(15, 6, dtype=torch.float64)

    def value():
        y, stats = layer(x)
        load = stats.counts_E.detach()
        return (y * seed).sum() + 3 * l1_loss(stats, 2, load, 15.0) + 0.1 * stats.z_sum

    check_gradients(value, {"x": x, **dict(layer.named_parameters())}, atol=1e-6)
    trace = RoutingTrace(layer, gate_dtype=torch.float64)
    with trace.record():
        layer(x)
    right = layer(x)[0]
    with trace.replay():
        torch.testing.assert_close(layer(x)[0], right)


def test_penalty_worked_and_independent_of_the_split():
    """E / (K T^2) * sum of f_e * sum of g_te, and its gradient E / (K T^2) * f_e where g > 0."""
    logits = torch.tensor([[1.0, -1, 2], [0.5, 1, -1], [-1, -1, -1], [1, 1, 1]],
                          dtype=torch.float64, requires_grad=True)  # fmt: skip
    layer = logits_layer(torch.float64, num_experts=3, num_experts_per_tok=2, score="relu",
                         norm="none")  # fmt: skip
    stats = layer(logits)[1]
    value = l1_loss(stats, 2)
    f, sums = torch.tensor([3.0, 2, 2]), torch.tensor([2.5, 2.0, 3.0])
    assert value.item() == pytest.approx(3 / (2 * 16) * (f * sums).sum().item())
    (gradient,) = torch.autograd.grad(value, logits)
    right = 3 / (2 * 16) * f.double() * (logits > 0)
    torch.testing.assert_close(gradient, right)
    whole = stats.counts_E
    parts = [layer(part)[1] for part in logits.split([1, 3])]
    split = sum(
        auxiliary_loss(p, step_tokens=4.0, l1_coef=torch.tensor(0.5), k=2, counts_E=whole)
        for p in parts
    )
    torch.testing.assert_close(split, 0.5 * value)


def test_without_a_load_it_is_even():
    """K tokens in E for every expert: the penalty is then the mean of a token's gates."""
    stats = relu_layer()(torch.randn(20, 6, dtype=torch.float64))[1]
    none = torch.zeros_like(stats.counts_E)
    right = stats.gate_sum_E.sum() / 20
    torch.testing.assert_close(l1_loss(stats, 2, none, 20.0), right)
    even = torch.full_like(stats.gate_sum_E, 20 * 2 / 7)
    torch.testing.assert_close(l1_loss(stats, 2, even, 20.0), right)


def test_padding_changes_nothing():
    layer = relu_layer()
    x = torch.randn(10, 6, dtype=torch.float64)
    padded = torch.cat([x, torch.full((4, 6), float("nan"), dtype=torch.float64)])
    y, stats = layer(x)
    padded_y, padded_stats = layer(padded, torch.arange(14) < 10)
    torch.testing.assert_close(padded_y[:10], y)
    for name, right in stats.measured().items():
        torch.testing.assert_close(getattr(padded_stats, name), right, msg=name)


def test_rule_of_the_weight():
    layer = relu_layer(torch.float32)
    coef, seen = 1e-8, []
    for step, bias in enumerate([1.0, 1.0, -1.0, -1.0, 1.0], 1):
        x = torch.randn(30, 6)
        with torch.no_grad():
            layer.router.weight.copy_(bias * torch.ones(7, 6))
        stats = layer(x.abs())[1]
        update_routers(layer, stats, step=step)
        coef = coef * 1.2 if stats.counts_E.sum() > 2 * 30 else coef / 1.2
        seen.append(layer.router.l1_coef.item() / coef)
    assert seen == pytest.approx([1.0] * 5, rel=1e-5)
    layer.to(torch.bfloat16)
    assert layer.router.l1_coef.dtype == torch.float32


def test_the_mean_number_of_experts_settles_at_k():
    """From half of all experts to K of E, against a loss that wants other logits."""
    torch.manual_seed(0)
    E, K, T = 16, 4, 256
    control = RouterControl(l1_start=1e-2, l1_factor=1.02)
    layer = make_layer(torch.float32, num_experts=E, num_experts_per_tok=K, hidden_size=16,
                       score="relu", norm="none", control=control, init_std=0.2)  # fmt: skip
    layer.compute = lambda x_TD, *_: x_TD  # the experts take no part
    wanted = 0.2 * torch.randn(E, 16)
    optimizer = torch.optim.Adam([layer.router.weight], lr=0.02)
    active = []
    for step in range(1, 181):
        x = torch.randn(T, 16)
        x[:, -1] = 1.0
        stats = layer(x)[1]
        active.append(stats.counts_E.sum().item() / T)
        main = 0.5 * (x @ (layer.router.weight - wanted).T).square().mean()
        aux = auxiliary_loss(stats, step_tokens=T, l1_coef=layer.router.l1_coef, k=K)
        optimizer.zero_grad()
        (main + aux).backward()
        optimizer.step()
        update_routers(layer, stats, step=step)
    assert active[0] > 1.5 * K
    settled = sum(active[-60:]) / 60
    assert abs(settled - K) < 0.02 * K, settled


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "topk_sum"}, "norm='topk_sum' does not go with score='relu'"),
        ({"selection_bias": True}, "selection_bias=True does not go with score='relu'"),
        ({"relu_most": 1}, "relu_most=1 must be between num_experts_per_tok=2"),
        ({"score": "softmax", "relu_most": 3}, "relu_most has no effect with score='softmax'"),
        ({"score": "softmax", "control": RouterControl(l1_start=1.0)}, "l1_start has no effect"),
        ({"expert_dropout": 0.1}, "expert_dropout=0.1 does not go with"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        make_layer(**{"score": "relu", "norm": "none", **fields})
