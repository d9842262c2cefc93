"""Schedules of K: the values, their averages, what is refused, and gates that fade out."""

import math

import pytest
import torch

from moe.rules.top_k import TopKSchedule, soften


def schedule(kind="geometric", start=16, end=4, ramp_steps=1000, **fields):
    return TopKSchedule(kind, start, end, 0 if kind == "steps" else ramp_steps, **fields)


@pytest.mark.parametrize(
    ("kind", "mean"), [("linear", 10.0), ("cosine", 10.0), ("geometric", 12 / math.log(4))]
)
def test_ramps(kind, mean):
    one = schedule(kind)
    kappas = [one.kappa(step) for step in range(1, 1002)]
    assert kappas[0] == 16
    assert kappas[-1] == 4 == one.kappa(10**6)
    assert kappas == sorted(kappas, reverse=True)
    assert sum(kappas) / len(kappas) == pytest.approx(mean, abs=0.02)
    assert 12 / math.log(4) == pytest.approx(8.66, abs=0.01)
    ks = [one.k(step) for step in range(1, 1002)]
    assert all(k == max(4, math.floor(kappa + 0.5)) for k, kappa in zip(ks, kappas))
    assert set(ks) == set(range(4, 17))
    assert [k for _, k in one.changes()] == list(range(15, 3, -1))


def test_values_in_the_middle():
    assert schedule("linear").kappa(501) == 10
    assert schedule("cosine").kappa(501) == pytest.approx(10)
    assert schedule("geometric").kappa(501) == pytest.approx(8)
    assert schedule("cosine").kappa(251) == pytest.approx(4 + 6 * (1 + math.cos(math.pi / 4)))
    # halves go up
    assert [schedule("linear", 4, 2, 4).k(step) for step in range(1, 7)] == [4, 4, 3, 3, 2, 2]
    soft = TopKSchedule("linear", 4, 2, 4, soft=True)
    assert [soft.kappa(step) for step in range(1, 7)] == [4, 3.5, 3, 2.5, 2, 2]
    assert [soft.k(step) for step in range(1, 7)] == [4, 4, 3, 3, 2, 2]
    geometric = TopKSchedule("geometric", 16, 4, 1000, soft=True)
    assert geometric.k(501) == 8  # 8.000000000000002 is 8


def test_levels():
    one = schedule("steps", levels=((11, 12), (21, 8), (31, 6), (41, 4)))
    assert [one.k(s) for s in (1, 10, 11, 20, 21, 40, 41, 999)] == [16, 16, 12, 12, 8, 6, 4, 4]
    assert one.changes() == [(11, 12), (21, 8), (31, 6), (41, 4)]
    assert one.last_change == 41


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: schedule("slow"), "top_k.kind='slow'"),
        (lambda: schedule(start=4), "top_k.start=4"),
        (lambda: schedule(ramp_steps=0), "top_k.over"),
        (lambda: schedule("linear", ramp_steps=2), "from 16 to 10 at step 2"),
        (lambda: schedule("steps"), "top_k.levels"),
        (lambda: schedule("steps", levels=((5, 8), (9, 4))), "from 16 to 8 at step 5"),
        (lambda: schedule("steps", levels=((9, 12), (5, 8))), "ascending"),
        (lambda: schedule("steps", levels=((5, 12), (9, 8))), "must fall"),
        (lambda: schedule("steps", levels=((5, 12), (9, 4)), soft=True), "top_k.soft"),
    ],
)
def test_refusals(make, told):
    with pytest.raises(ValueError) as caught:
        make()
    assert told in str(caught.value)


def test_a_short_ramp_is_possible_when_soft():
    assert schedule("linear", ramp_steps=2, soft=True).k(2) == 10


def test_soft_gates():
    gates = {2: (0.667, 0.333), 2.5: (0.606, 0.303, 0.091), 3: (0.556, 0.278, 0.167)}
    for kappa, expected in gates.items():
        g_TK = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64)[:, : math.ceil(kappa)]
        g_TK = g_TK / g_TK.sum()
        soft_TK = soften(g_TK, torch.tensor(kappa), True)
        torch.testing.assert_close(
            soft_TK[0], torch.tensor(expected).double(), atol=6e-4, rtol=0, check_dtype=False
        )
        assert soft_TK.sum() == pytest.approx(1)
        if kappa == int(kappa):
            assert torch.equal(soft_TK, g_TK)
    raw_TK = torch.tensor([[0.5, 0.25, 0.15]])
    soft_TK = soften(raw_TK, torch.tensor(2.5), False)
    torch.testing.assert_close(soft_TK, torch.tensor([[0.5, 0.25, 0.075]]))


def test_soft_gates_have_no_jumps():
    """A gate that leaves at a whole kappa is zero before, so dropping it changes nothing."""
    g_TK = torch.rand(5, 4, dtype=torch.float64)
    almost = soften(g_TK, torch.tensor(3 + 1e-9, dtype=torch.float64), True)
    less_TK = g_TK[:, :3] * (g_TK.sum(1, keepdim=True) / g_TK[:, :3].sum(1, keepdim=True))
    torch.testing.assert_close(almost[:, :3], less_TK, atol=1e-8, rtol=0)
    assert almost[:, 3].max() < 1e-8


@pytest.mark.parametrize("renormalise", [True, False])
def test_gradient_of_soft_gates(renormalise):
    g_TK = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    kappa = torch.tensor(3.3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda g: soften(g, kappa, renormalise), g_TK)
