"""Balance and z losses: worked values, gradients by hand and by finite differences, invariances."""

import pytest
import torch

from moe import (
    RouterStats,
    RoutingTrace,
    attach_loss,
    balance_loss,
    router_losses,
    sequence_loss,
    z_loss,
)
from tests.moe.oracle import check_gradients, logits_layer, make_layer
from tests.moe.test_metrics import WORKED, stats_of


def log_probs(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32).log()


# ------------------------------------------------------------------------------ worked values


def test_worked_values():
    assert balance_loss(WORKED).item() == pytest.approx(1.25)
    # not a true loss: a load against the probabilities scores below 1
    assert balance_loss(stats_of([6, 4], [4.0, 6.0])).item() == pytest.approx(0.96)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_uniform_probabilities_score_one_for_every_k(k):
    layer = logits_layer(
        num_experts=4,
        num_experts_per_tok=k,
        norm="none",
        balance={"kind": "sequence"},
    )
    _, stats = layer(torch.zeros(2, 6, 4))
    assert balance_loss(stats).item() == pytest.approx(1.0)
    assert sequence_loss(stats).item() == pytest.approx(1.0)


def test_z_loss_worked():
    layer = logits_layer(torch.float64, num_experts=4, num_experts_per_tok=2)
    logits = torch.tensor([[2.0, 1, 1, -1]], dtype=torch.float64, requires_grad=True)
    value = z_loss(layer(logits)[1])
    assert value.item() == pytest.approx(6.6550, abs=5e-5)
    assert value.sqrt().item() == pytest.approx(2.5797, abs=5e-5)
    (gradient,) = torch.autograd.grad(value, logits)
    right = torch.tensor([[2.8896, 1.0630, 1.0630, 0.1439]], dtype=torch.float64)
    torch.testing.assert_close(gradient, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance_gradient_by_hand(score):
    """For softmax dL/dz = E p (F - <p, F>) / T; for sigmoid the chain rule through s / sum(s)."""
    T, E = 30, 7
    layer = logits_layer(torch.float64, num_experts=E, num_experts_per_tok=2, score=score)
    z = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    _, stats = layer(z)
    (gradient,) = torch.autograd.grad(balance_loss(stats), z)
    F_E = stats.counts_E.double() / (2 * T)
    s = torch.softmax(z, 1) if score == "softmax" else torch.sigmoid(z)
    p = s / s.sum(1, keepdim=True)
    inner = F_E - (p * F_E).sum(1, keepdim=True)
    slope = p if score == "softmax" else p * (1 - s)
    torch.testing.assert_close(gradient, E * slope * inner / T)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_gradients_by_finite_differences(score):
    layer = make_layer(score=score, balance={"kind": "sequence"})
    x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    trace = RoutingTrace(layer)
    with trace.record():
        layer(x)
    for loss in (balance_loss, z_loss, sequence_loss):

        def value(loss=loss):
            with trace.replay():
                return loss(layer(x)[1])

        check_gradients(value, {"router.weight": layer.router.weight, "x": x})


def test_balance_changes_when_routing_changes():
    layer = logits_layer(num_experts=3, num_experts_per_tok=1, norm="none")
    spread = layer(torch.eye(3) * 3)[1]
    piled = layer(torch.tensor([[3.0, 0, 0]] * 3))[1]
    assert balance_loss(spread).item() == pytest.approx(1.0)
    assert balance_loss(piled).item() > 2.5


# ------------------------------------------------------------------------------ padding


def test_padding_does_not_enter_the_balance_loss():
    """Two tokens (.9, .1), (.1, .9) and two pads that would pull the loss to 1.25."""
    layer = logits_layer(num_experts=2, num_experts_per_tok=1, norm="none")
    x_TD = log_probs([[0.9, 0.1], [0.1, 0.9], [1 - 1e-6, 1e-6], [1 - 1e-6, 1e-6]])
    valid_T = torch.tensor([True, True, False, False])
    assert balance_loss(layer(x_TD, valid_T)[1]).item() == pytest.approx(1.0)
    assert balance_loss(layer(x_TD)[1]).item() == pytest.approx(1.25, abs=1e-5)


def test_padding_does_not_enter_the_z_loss():
    layer = logits_layer(num_experts=4, num_experts_per_tok=2)
    x_TD = torch.cat([torch.zeros(2, 4), torch.full((2, 4), 10.0)])
    valid_T = torch.tensor([True, True, False, False])
    assert z_loss(layer(x_TD, valid_T)[1]).item() == pytest.approx(1.9218, abs=1e-4)
    assert z_loss(layer(x_TD)[1]).item() == pytest.approx(65.8, abs=0.05)


def test_padding_does_not_enter_the_sequence_loss():
    layer = make_layer(balance={"kind": "sequence"})
    x = torch.randn(3, 7, 6, dtype=torch.float64)
    valid = (torch.arange(7) < 4).expand(3, 7)
    right = sequence_loss(layer(x[:, :4])[1])
    torch.testing.assert_close(sequence_loss(layer(x, valid)[1]), right)


def total(layer, stats: RouterStats, step_tokens, counts_E=None) -> torch.Tensor:
    load_LE = None if counts_E is None else counts_E[None]
    return router_losses([layer.router], RouterStats.stack([stats]), step_tokens, load_LE)[0]


KINDS = ("global", "sequence")


def balanced(kind: str, coef: float = 0.5, z_coef: float = 0.1, **fields):
    return make_layer(balance={"kind": kind, "coef": coef}, z_coef=z_coef, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_no_valid_token_gives_zero(kind):
    layer = balanced(kind)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    _, stats = layer(x, torch.zeros(2, 3, dtype=torch.bool))
    value = total(layer, stats, 4)
    assert value.item() == 0
    assert balance_loss(stats).item() == z_loss(stats).item() == sequence_loss(stats).item() == 0
    value.backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


# ------------------------------------------------------------------------------ accumulation, ranks


def router_gradient(layer, parts, valids, counts_E=None) -> tuple[float, torch.Tensor]:
    """Value and router gradient of a step summed over its micro-batches."""
    layer.zero_grad()
    step_tokens = sum(int(valid.sum()) for valid in valids)
    value = 0.0
    for x, valid in zip(parts, valids):
        loss = total(layer, layer(x, valid)[1], step_tokens, counts_E)
        loss.backward()
        value += loss.item()
    return value, layer.router.weight.grad.clone()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_the_step_does_not_depend_on_accumulation(kind, pieces):
    """Eight rows with unequal numbers of valid tokens, cut into 1 to 8 micro-batches.

    With the load of the whole step ("global") and with that of each sequence, value and gradient
    are those of the whole batch.
    """
    layer = balanced(kind)
    x = torch.randn(8, 5, 6, dtype=torch.float64)
    valid = torch.arange(5) < torch.tensor([5, 1, 3, 5, 2, 4, 5, 1])[:, None]
    counts_E = layer(x, valid)[1].counts_E
    right = router_gradient(layer, [x], [valid])
    found = router_gradient(layer, x.chunk(pieces), valid.chunk(pieces), counts_E)
    assert found[0] == pytest.approx(right[0], rel=1e-12)
    torch.testing.assert_close(found[1], right[1])


def test_micro_scope_is_the_token_weighted_mean_of_micro_losses():
    layer = balanced("micro", z_coef=0.0)
    x = torch.randn(30, 6, dtype=torch.float64)
    parts = x.split([10, 20])
    step = sum(total(layer, layer(part)[1], 30).item() for part in parts)
    losses = [balance_loss(layer(part)[1]).item() for part in parts]
    assert step == pytest.approx(0.5 * (10 * losses[0] + 20 * losses[1]) / 30)


def test_local_and_global_scope_of_two_ranks():
    """Rank 0 sends all to expert 0, rank 1 all to expert 1: local mean 2.0, global 1.0."""
    balance = {"kind": "global", "coef": 1.0}
    layer = logits_layer(
        num_experts=2, num_experts_per_tok=1, norm="none", balance=balance, z_coef=0.0
    )
    ranks = [layer(torch.tensor([[40.0, 0]] * 4))[1], layer(torch.tensor([[0, 40.0]] * 4))[1]]
    counts_E = ranks[0].counts_E + ranks[1].counts_E
    local = [total(layer, s, 8) for s in ranks]
    reduced = [total(layer, s, 8, counts_E) for s in ranks]
    assert sum(local).item() == pytest.approx(2.0)
    assert sum(reduced).item() == pytest.approx(1.0)


def test_sequence_loss_is_the_mean_over_sequences():
    layer = make_layer(balance={"kind": "sequence"})
    x = torch.randn(4, 9, 6, dtype=torch.float64)
    alone = torch.stack([balance_loss(layer(row)[1]) for row in x])
    torch.testing.assert_close(sequence_loss(layer(x)[1]), alone.mean())
    assert sequence_loss(layer(x)[1]) > balance_loss(layer(x)[1])  # balance inside a row is harder


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_mean_over_layers(kind):
    layer = balanced(kind)
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    _, stats = layer(x)
    both = RouterStats.stack([stats, stats])
    loss, values = router_losses([layer.router] * 2, both, 18)
    balance = balance_loss(stats) if kind == "global" else sequence_loss(stats)
    assert loss.item() == pytest.approx((0.5 * balance + 0.1 * z_loss(stats)).item())
    assert layer.loss(stats).item() == pytest.approx(loss.item())
    assert [v.item() for v in values] == pytest.approx([balance.item(), z_loss(stats).item()])
    counts_LE = torch.stack([stats.counts_E, stats.counts_E.flip(0)])
    assert balance_loss(both, counts_LE).shape == (2,)


def test_coefficient_zero_is_nothing():
    layer = make_layer(balance=None, z_coef=0.0)
    _, stats = layer(torch.randn(5, 6, dtype=torch.float64))
    assert not layer.loss(stats).requires_grad


# ------------------------------------------------------------------------------ attach


def test_attach_leaves_the_value_and_adds_the_gradient():
    layer = balanced("global", 0.3)
    x = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, layer.router.weight, layer.w1]

    y, stats = layer(x)
    aux = layer.loss(stats)
    right = torch.autograd.grad((y * 3.0).sum() + aux, inputs)

    y, stats = layer(x)
    aux = layer.loss(stats)
    attached = attach_loss(y, aux)
    assert torch.equal(attached, y)
    # the factor 3 reaches y's gradient and not that of aux
    found = torch.autograd.grad((attached * 3.0).sum(), inputs)
    for a, b in zip(found, right):
        torch.testing.assert_close(a, b)


def test_attach_takes_losses_per_layer():
    y = torch.randn(3, requires_grad=True)
    aux_L = torch.randn(4, requires_grad=True)
    attach_loss(y, aux_L).sum().backward()
    assert aux_L.grad.tolist() == [1.0] * 4
    assert y.grad.tolist() == [1.0] * 3
