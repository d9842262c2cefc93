"""Gradients of experts that were not chosen, against autograd on the loss that they stand for."""

import pytest
import torch

from moe.experts import experts
from moe.routing import Routing
from moe.rules.default_gradient import (
    default_gradient,
    default_weights,
    missing_pairs,
)
from tests.moe.oracle import expert_by_hand, make_layer

T, E, D = 9, 7, 6


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


def test_default_gradient(case):
    _, _, logits_TE, dy_TD = case
    m_ED = torch.randn(E, D, dtype=torch.float64)
    expert_TK = chosen(logits_TE, 2)
    missing_TE = missing_pairs(expert_TK, E)
    y_TD = torch.randn(T, D, dtype=torch.float64)
    z_TE = logits_TE.clone().requires_grad_()
    weight_TE = default_weights(z_TE, "softmax", 2.0)
    out_TD = default_gradient(y_TD.clone().requires_grad_(), weight_TE, missing_TE, m_ED)
    assert torch.equal(out_TD, y_TD)
    out_TD.backward(dy_TD)
    h_TE = (dy_TD @ m_ED.T) * missing_TE
    p_TE = torch.softmax(logits_TE, 1)
    expected = 2.0 * p_TE * (h_TE - (p_TE * h_TE).sum(1, keepdim=True))
    torch.testing.assert_close(z_TE.grad, expected)


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
