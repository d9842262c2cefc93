"""Gradients of experts that were not chosen, against autograd on the loss that they stand for."""

import pytest
import torch

from moe import router_gradient
from moe.experts import experts
from moe.router_gradient import (
    default_gradient,
    default_weights,
    dense_gradient,
    dense_weights,
    filled_in,
    missing_pairs,
)
from moe.routing import Routing
from tests.moe.oracle import FORMS, expert_by_hand, make_layer

T, E, D = 9, 7, 6


def all_outputs(layer, x_TD):
    """E_e(x_t) of every pair, [T, E, D]."""
    return torch.stack(
        [torch.stack([expert_by_hand(layer, e, x_D) for e in range(E)]) for x_D in x_TD]
    )


def chosen(logits_TE, k):
    return logits_TE.argsort(dim=1, descending=True, stable=True)[:, :k].int()


@pytest.fixture
def case():
    torch.manual_seed(0)
    layer = make_layer(num_experts=E, num_experts_per_tok=2)
    x_TD = torch.randn(T, D, dtype=torch.float64)
    logits_TE = torch.randn(T, E, dtype=torch.float64).abs()  # usable as scores of any form
    dy_TD = torch.randn(T, D, dtype=torch.float64)
    return layer, x_TD, logits_TE, dy_TD


@pytest.mark.parametrize(("score", "norm"), FORMS)
@pytest.mark.parametrize("chunk", [1, 1 << 26])
def test_dense_gradient_is_that_of_all_experts(case, score, norm, chunk, monkeypatch):
    """With q_te = score / (sum of the chosen scores, held): d/dz of sum q_te <dy_t, E_e(x_t)>."""
    monkeypatch.setattr(router_gradient, "_CHUNK", chunk)
    layer, x_TD, logits_TE, dy_TD = case
    expert_TK = chosen(logits_TE, 2)
    missing_TE = missing_pairs(expert_TK, E)
    assert missing_TE.sum() == T * (E - 2)
    assert not missing_TE.gather(1, expert_TK.long()).any()

    z_TE = logits_TE.clone().requires_grad_()
    y_TD = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    weight_TE = dense_weights(z_TE, expert_TK, score, norm, 1.5)
    out_TD = dense_gradient(y_TD, weight_TE, missing_TE, x_TD, layer.w1, layer.w2, "swiglu")
    assert torch.equal(out_TD, y_TD)
    out_TD.backward(dy_TD)
    assert torch.equal(y_TD.grad, dy_TD)
    assert layer.w1.grad is None

    # by finite differences, with scores written down again
    dots_TE = (all_outputs(layer, x_TD) @ dy_TD[:, :, None]).squeeze(2).detach()

    def scores(z):
        if norm == "softmax_topk" or score == "softmax":
            return torch.softmax(z, 1)
        return {
            "sigmoid": lambda: 1 / (1 + torch.exp(-z)),
            "sqrtsoftplus": lambda: torch.log1p(torch.exp(z)).sqrt(),
            "identity": lambda: z,
        }[score]()

    held_T1 = 1.0
    if norm != "none":
        held_T1 = scores(logits_TE).gather(1, expert_TK.long()).sum(1, keepdim=True)

    def value(z):
        return (1.5 * scores(z) / held_T1 * dots_TE * missing_TE).sum()

    eps, found = 1e-6, torch.zeros_like(logits_TE)
    for t in range(T):
        for e in range(E):
            step = torch.zeros_like(logits_TE)
            step[t, e] = eps
            found[t, e] = (value(logits_TE + step) - value(logits_TE - step)) / (2 * eps)
    torch.testing.assert_close(z_TE.grad, found, rtol=1e-6, atol=1e-8)


def test_dense_gradient_with_softmax_is_the_formula(case):
    """Raw softmax gates: sparse and dense parts together are dz = p (h - <p, h>) with h dense."""
    layer, x_TD, logits_TE, dy_TD = case
    outputs_TED = all_outputs(layer, x_TD).detach()
    expert_TK = chosen(logits_TE, 2)
    z_TE = logits_TE.clone().requires_grad_()
    p_TE = torch.softmax(z_TE, 1)
    missing_TE = missing_pairs(expert_TK, E)
    sparse_TD = ((p_TE * ~missing_TE)[:, :, None] * outputs_TED).sum(1)
    weight_TE = dense_weights(z_TE, expert_TK, "softmax", "none", 1.0)
    dense_gradient(sparse_TD, weight_TE, missing_TE, x_TD, layer.w1, layer.w2, "swiglu").backward(
        dy_TD
    )
    p_TE = p_TE.detach()
    h_TE = (outputs_TED @ dy_TD[:, :, None]).squeeze(2)
    expected = p_TE * (h_TE - (p_TE * h_TE).sum(1, keepdim=True))
    torch.testing.assert_close(z_TE.grad, expected, rtol=1e-10, atol=1e-12)


def test_default_gradient_and_fill(case):
    _, _, logits_TE, dy_TD = case
    m_ED = torch.randn(E, D, dtype=torch.float64)
    expert_TK = chosen(logits_TE, 2)
    missing_TE = missing_pairs(expert_TK, E)
    y_TD = torch.randn(T, D, dtype=torch.float64)
    grads = []
    for combine in (default_gradient, filled_in):
        z_TE = logits_TE.clone().requires_grad_()
        weight_TE = default_weights(z_TE, "softmax", 2.0)
        out_TD = combine(y_TD.clone().requires_grad_(), weight_TE, missing_TE, m_ED)
        if combine is default_gradient:
            assert torch.equal(out_TD, y_TD)
        else:
            expected = y_TD + (2.0 * torch.softmax(logits_TE, 1) * missing_TE) @ m_ED
            torch.testing.assert_close(out_TD, expected)
        out_TD.backward(dy_TD)
        grads.append(z_TE.grad)
    torch.testing.assert_close(*grads)
    h_TE = (dy_TD @ m_ED.T) * missing_TE
    p_TE = torch.softmax(logits_TE, 1)
    expected = 2.0 * p_TE * (h_TE - (p_TE * h_TE).sum(1, keepdim=True))
    torch.testing.assert_close(grads[0], expected)


def test_what_token_rounding_computes_is_not_missing():
    expert_TK = torch.tensor([[0, 1], [2, 0], [-1, -1]], dtype=torch.int32)
    token = torch.tensor([0, 0, 1])  # 0 keeps 1 and gains 3; 1 keeps 2 and loses 0
    expert = torch.tensor([1, 3, 2])
    routing = Routing.from_pairs(token, expert, torch.ones(3), num_tokens=3, num_experts=4)
    missing = missing_pairs(expert_TK, 4, routing)
    assert missing.int().tolist() == [[0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]]


def test_nothing_is_missing_when_all_are_chosen(case):
    _, _, logits_TE, _ = case
    assert not missing_pairs(chosen(logits_TE, E), E).any()


@pytest.mark.parametrize("save", ["h", "x"])
def test_output_sums_of_the_experts(case, save):
    layer, x_TD, logits_TE, _ = case
    expert_TK = chosen(logits_TE, 2)
    expert_TK[expert_TK == 3] = -1  # an expert without tokens, and slots without expert
    gate_TK = torch.rand(T, 2, dtype=torch.float64, requires_grad=True)
    routing = Routing.from_topk(expert_TK, gate_TK, E)
    plain_TD = experts(x_TD, layer.w1, layer.w2, routing, save=save)
    y_TD, sums_ED = experts(x_TD, layer.w1, layer.w2, routing, save=save, output_sums=True)
    assert torch.equal(plain_TD, y_TD)
    assert not sums_ED.requires_grad
    expected = torch.zeros(E, D, dtype=torch.float64)
    for t, row in enumerate(expert_TK.tolist()):
        for e in row:
            if e >= 0:
                expected[e] += expert_by_hand(layer, e, x_TD[t]).detach()
    torch.testing.assert_close(sums_ED, expected)
    assert not sums_ED[3].any()
    plain_grads = torch.autograd.grad(plain_TD.sum(), [layer.w1, layer.w2, gate_TK])
    grads = torch.autograd.grad(y_TD.sum(), [layer.w1, layer.w2, gate_TK])
    for plain, grad in zip(plain_grads, grads):
        assert torch.equal(plain, grad)
