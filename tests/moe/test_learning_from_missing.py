"""A layer whose router learns about experts that were not chosen: values, gradients, state."""

import dataclasses

import pytest
import torch

from moe import MoE, RouterConfig
from moe.control import begin_step, needs_update, update_routers
from moe.scores import probabilities
from tests.moe.oracle import expert_by_hand, make_layer

T, E, D, K = 24, 7, 6, 2
DEFAULT = {"kind": "default"}


def pair(gradient=None, rounding=None, **fields):
    """A plain layer and one with the same weights that learns."""
    torch.manual_seed(0)
    plain = make_layer(num_experts=E, num_experts_per_tok=K, **fields)
    given = plain.config.router.model_dump() | {"gradient": gradient, "rounding": rounding}
    other = MoE(dataclasses.replace(plain.config, router=RouterConfig(**given))).double()
    other.load_state_dict(plain.state_dict(), strict=False)
    begin_step(other, 1)
    return plain, other


def gradients(layer, x_TD, dy_TD):
    layer.zero_grad()
    x_TD = x_TD.clone().requires_grad_()
    y_TD, stats = layer(x_TD)
    y_TD.backward(dy_TD)
    found = {name: p.grad for name, p in layer.named_parameters()}
    return y_TD.detach(), stats, found, x_TD.grad


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return torch.randn(T, D).double(), torch.randn(T, D).double()


@pytest.mark.parametrize(
    ("score", "norm"), [("softmax", "topk_sum"), ("softmax", "none"), ("sigmoid", "topk_sum")]
)
def test_only_the_router_learns_more(score, norm, batch):
    x_TD, dy_TD = batch
    plain, other = pair(DEFAULT, score=score, norm=norm, route_scale=1.5)
    other.router.rules.gradient.mean_ED.normal_()
    other.router.rules.gradient.mean_count_E.fill_(3)
    y, _, grads, _ = gradients(plain, x_TD, dy_TD)
    y2, _, grads2, dx2 = gradients(other, x_TD, dy_TD)
    assert torch.equal(y, y2)
    for name in ("w1", "w2"):
        assert torch.equal(grads[name], grads2[name])

    # the rest of the router's gradient: sum over missing pairs of q <dy, what stands for E_e(x)>
    logits_TE = plain.router.logits(x_TD).detach().requires_grad_()
    chosen_TK = logits_TE.topk(K).indices
    missing_TE = torch.ones(T, E).scatter(1, chosen_TK, 0.0).double()
    stands_TED = other.router.rules.gradient.means().double().expand(T, E, D)
    q_TE = 1.5 * probabilities(logits_TE, score)
    (q_TE * missing_TE * (stands_TED * dy_TD[:, None]).sum(2)).sum().backward()
    extra_ED = logits_TE.grad.T @ x_TD
    found = grads2["router.weight"] - grads["router.weight"]
    assert extra_ED.norm() > 1e-3
    torch.testing.assert_close(found, extra_ED, rtol=1e-8, atol=1e-10)
    assert dx2 is not None


def test_all_experts_chosen_is_plain_training(batch):
    layers = []
    for gradient in (None, DEFAULT):
        torch.manual_seed(0)
        layers.append(make_layer(num_experts=4, num_experts_per_tok=4, gradient=gradient))
    grads = [gradients(layer, *batch)[2] for layer in layers]
    for name in grads[0]:
        assert torch.equal(grads[0][name], grads[1][name])


def test_evaluation_is_that_of_the_plain_layer(batch):
    plain, other = pair(DEFAULT)
    other.router.rules.gradient.mean_ED.normal_()
    other.router.rules.gradient.mean_count_E.fill_(1)
    assert torch.equal(plain.eval()(batch[0])[0], other.eval()(batch[0])[0])


def test_mean_outputs_over_two_steps(batch):
    x_TD, dy_TD = batch
    _, layer = pair(DEFAULT)
    assert needs_update(layer)
    decay, m, seen = 0.95, torch.zeros(E, D).double(), torch.zeros(E)
    for step, rows in ((1, x_TD[:2]), (2, x_TD[2:4])):
        _, stats, _, _ = gradients(layer, rows, dy_TD[: len(rows)])
        chosen = layer.router.logits(rows).topk(K).indices
        for e in range(E):
            mine = [expert_by_hand(layer, e, rows[t]) for t in range(len(rows)) if e in chosen[t]]
            if mine:
                m[e] = decay * m[e] + (1 - decay) * torch.stack(mine).mean(0).detach()
                seen[e] += 1
        before = layer.router.rules.gradient.mean_ED.clone()
        update_routers(layer, stats, step=step, applied=torch.tensor(0.0))
        assert torch.equal(
            layer.router.rules.gradient.mean_ED, before
        )  # a skipped step changes nothing
        update_routers(layer, stats, step=step)
        assert torch.equal(layer.router.rules.gradient.mean_count_E.double(), seen.double())
        torch.testing.assert_close(
            layer.router.rules.gradient.mean_ED.double(), m, rtol=1e-6, atol=1e-7
        )
    assert 0 in seen  # an expert without a token keeps 0, and 0 is what stands for it
    corrected = layer.router.rules.gradient.means().double()
    assert not corrected[seen == 0].any()
    once = (seen == 1).nonzero()[0]
    torch.testing.assert_close(corrected[once], m[once] / (1 - decay), rtol=1e-5, atol=1e-6)


def test_dropped_pairs_learn_by_mean_outputs(batch):
    x_TD, dy_TD = batch
    rounding = {"to": "down", "tile": 4, "min_tiles": 0, "min_mean_tiles": 1.0}
    grads = {}
    for dropped in ("none", "default"):
        _, layer = pair(rounding=rounding | ({"dropped": {}} if dropped == "default" else {}))
        if dropped == "default":
            rule = layer.router.rules.rounding
            rule.mean_ED.normal_()
            rule.mean_count_E.fill_(2)
            m_ED = rule.means().double()
        _, stats, grads[dropped], _ = gradients(layer, x_TD, dy_TD)
    assert stats.rows_E.sum() < stats.counts_E.sum()
    for name in ("w1", "w2"):
        assert torch.equal(grads["none"][name], grads["default"][name])

    # d/dz of sum over dropped pairs of gate <dy, m>, with gates of plain top-K
    logits_TE = layer.router.logits(x_TD).detach().requires_grad_()
    value_TK, chosen_TK = logits_TE.topk(K)
    gate_TK = torch.softmax(value_TK, 1)
    kept = torch.zeros(T, E, dtype=torch.bool)
    for e in range(E):  # the largest whole number of tiles of each expert's best-scored tokens
        tokens = (chosen_TK == e).any(1).nonzero().flatten()
        p = torch.softmax(logits_TE, 1)[tokens, e]
        best = tokens[p.argsort(descending=True)[: len(tokens) // 4 * 4]]
        kept[best, e] = True
    dropped_TK = ~kept.gather(1, chosen_TK)
    dot_TK = (dy_TD[:, None] * m_ED[chosen_TK]).sum(2)
    (gate_TK * dot_TK * dropped_TK).sum().backward()
    extra_ED = logits_TE.grad.T @ x_TD
    found = grads["default"]["router.weight"] - grads["none"]["router.weight"]
    assert extra_ED.norm() > 1e-3
    torch.testing.assert_close(found, extra_ED, rtol=1e-8, atol=1e-10)


def test_state_survives_casts_and_padding_counts_nowhere(batch):
    _, layer = pair(DEFAULT)
    layer.to(torch.bfloat16)
    assert layer.router.rules.gradient.mean_ED.dtype == torch.float64  # never narrowed
    _, layer = pair(DEFAULT)
    x = torch.cat([batch[0], torch.full((3, D), float("nan")).double()])
    valid = torch.arange(T + 3) < T
    y, stats = layer(x, valid)
    _, expected = layer(batch[0])
    torch.testing.assert_close(stats.output_sum_ED, expected.output_sum_ED)
    y[:T].sum().backward()
    assert torch.isfinite(layer.router.weight.grad).all()


def test_under_compile(batch):
    _, layer = pair(DEFAULT)
    x_TD, dy_TD = batch
    expected = gradients(layer, x_TD, dy_TD)[2]
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    layer.zero_grad()
    compiled(x_TD.requires_grad_())[0].backward(dy_TD)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)
