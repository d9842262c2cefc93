"""Experts drawn by Gumbel top-K, and probabilities from amplitudes."""

import pytest
import torch
import torch.nn.functional as F

from moe.control import begin_step
from moe.rules.sampled_selection import gumbel
from tests.moe.oracle import logits_layer, make_layer

DRAWN = {"kind": "sample", "temperature": 1.0}
P = (0.5, 0.25, 0.15, 0.1)


def drawn(count: int, temperature: float = 1.0, score: str = "softmax", k: int = 2):
    """Experts [count, k] of a layer in training mode, every token with the probabilities P."""
    p_E = torch.tensor(P) ** temperature  # exp(log p' / temperature) is P again
    logits_E = p_E.log() if score == "softmax" else torch.logit(p_E / p_E.sum() * 0.5)
    layer = logits_layer(
        num_experts=4,
        num_experts_per_tok=k,
        score=score,
        selection={"kind": "sample", "temperature": temperature},
    )
    return layer.router(logits_E.expand(count, 4).contiguous()).gating


@pytest.mark.parametrize(
    ("score", "temperature"), [("softmax", 1.0), ("softmax", 0.5), ("sigmoid", 1.0)]
)
def test_frequencies(score, temperature):
    """Of draws without replacement: inclusion and order, exact values by hand."""
    expert_TK = drawn(400_000, temperature, score).expert_TK
    included = F.one_hot(expert_TK.long(), 4).sum(1).float().mean(0)
    for got, want in zip(included.tolist(), (0.81046, 0.57190, 0.36667, 0.25098)):
        assert got == pytest.approx(want, abs=0.003)
    first_second = ((expert_TK[:, 0] == 0) & (expert_TK[:, 1] == 1)).float().mean().item()
    # which of the two has the larger key is which was drawn first: 0.5 · 0.25 / 0.5
    assert first_second == pytest.approx(0.25, abs=0.003)


def test_gates_are_those_of_the_probabilities():
    gating = drawn(1000)
    p = torch.tensor(P)[gating.expert_TK.long()]
    torch.testing.assert_close(gating.gate_TK, p / p.sum(1, keepdim=True))


def test_a_small_temperature_takes_the_best():
    layer = logits_layer(
        num_experts=4,
        num_experts_per_tok=2,
        selection={"kind": "sample", "temperature": 1e-3},
    )
    gating = layer.router(torch.tensor(P).log().expand(1000, 4).contiguous()).gating
    assert (gating.expert_TK == torch.arange(2)).all()


def test_evaluation_and_no_temperature_are_plain():
    sampled, plain = (
        make_layer(selection={"kind": "sample", "temperature": 1.0}),
        make_layer(),
    )
    sampled.load_state_dict(plain.state_dict())
    assert sampled.draws and not plain.draws
    x = torch.randn(50, 6, dtype=torch.float64)
    assert not torch.equal(sampled(x)[0], plain(x)[0])
    assert torch.equal(sampled.eval()(x)[0], plain(x)[0])


def test_the_temperature_falls_to_the_plain_choice():
    layer = make_layer(selection={"kind": "sample", "temperature": 2.0, "until": 4})
    plain = make_layer()
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "temperature" not in k})
    x = torch.randn(50, 6, dtype=torch.float64)
    found, said = [], []
    for step in range(1, 7):
        said.append(begin_step(layer, step))
        found.append(layer.router.rules.selection.temperature.item())
        assert torch.equal(layer(x)[0], plain(x)[0]) == (step > 4), step
    assert found == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert [len(one) for one in said] == [0, 0, 0, 0, 1, 0]
    begin_step(layer, 2)  # as after a restart
    assert layer.router.rules.selection.temperature.item() == 1.5
    assert not torch.equal(layer(x)[0], plain(x)[0])
    assert layer.router.changes == 1


def test_noise_is_that_of_gumbel():
    noise = gumbel(torch.zeros(200_000), "softmax", 1.0)
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(1.6449, rel=0.02)
    assert noise.isfinite().all()


def test_amplitudes():
    """a = (0.6, 0.3 + 0.4i, -0.5, 0.1i): p = |a|² / 0.87, whatever phase is common to all."""
    a_E = torch.tensor([0.6, 0.3 + 0.4j, -0.5, 0.1j], dtype=torch.complex128)
    layer = make_layer(
        num_experts=4,
        num_experts_per_tok=2,
        hidden_size=1,
        score={"kind": "amplitude"},
    )
    assert layer.router.weight.shape == (8, 1)
    want = torch.tensor([0.41379, 0.28736, 0.28736, 0.01149], dtype=torch.float64)
    x = torch.ones(1, 1, dtype=torch.float64)
    for phase in (0.0, 0.7, 2.0):
        turned = torch.view_as_real(a_E * torch.exp(torch.tensor(1j * phase)))
        with torch.no_grad():
            layer.router.weight.copy_(turned.reshape(8, 1))
        p = layer.router.logits(x).softmax(1)[0]
        torch.testing.assert_close(p, want, rtol=0, atol=1e-5)
        gating = layer.router(x).gating
        assert gating.expert_TK[0, 0] == 0
        assert gating.gate_TK[0, 0].item() == pytest.approx(0.36 / (0.36 + 0.25))


def test_real_amplitudes_are_a_softmax_of_logarithms():
    layer = make_layer(score={"kind": "amplitude"})
    with torch.no_grad():
        layer.router.weight[1::2] = 0
    x = torch.randn(20, 6, dtype=torch.float64)
    a_TE = x @ layer.router.weight[0::2].T
    got = layer.router.logits(x).softmax(1)
    torch.testing.assert_close(got, (2 * a_TE.abs().log()).softmax(1))


def test_amplitudes_learn():
    layer = make_layer(
        selection={"kind": "sample", "temperature": 1.0}, score={"kind": "amplitude"}
    )
    x = torch.randn(30, 6, dtype=torch.float64)
    y, _ = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), layer.router.weight)
    assert gradient.isfinite().all() and gradient.any(1).all()
    layer(torch.zeros(3, 6, dtype=torch.float64))[0].sum().backward()
    assert layer.router.weight.grad.isfinite().all(), "amplitudes of exactly 0"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"selection": {"kind": "sample", "temperature": -1.0}}, "greater than 0"),
        ({"selection": {"kind": "sample", "temperature": 1.0, "until": 0}}, "than or equal to 1"),
        ({"num_experts_per_tok": 7, "selection": DRAWN}, "allowed: below 7"),
        ({"score": "sqrtsoftplus", "selection": DRAWN}, "allowed: softmax, sigmoid"),
        (
            {"score": "sigmoid", "selection_bias": True, "selection": DRAWN},
            "kind=sample .* does not go with the family's selection bias",
        ),
    ],
)
def test_mistakes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        make_layer(**fields)
