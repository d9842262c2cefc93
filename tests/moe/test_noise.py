"""Jitter and expert dropout: what they touch, and what they leave alone."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from models.execution import run_checkpointed
from moe.rules.expert_dropout import left
from tests.moe.oracle import make_layer

DROPOUT = {"kind": "dropout", "probability": 0.1}
X = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))


def run(layer, x=X, seed=0):
    torch.manual_seed(seed)
    layer.zero_grad()
    y, stats = layer(x)
    y.square().sum().backward()
    return y.detach(), stats.detach(), layer.router.weight.grad.clone()


@pytest.mark.parametrize(
    "noise", [{"kind": "jitter", "size": 0.3}, {"kind": "dropout", "probability": 0.3}]
)
def test_off_and_evaluation_are_plain_routing(noise):
    noisy, off = make_layer(torch.float32, noise=noise), make_layer(torch.float32)
    off.load_state_dict(noisy.state_dict())
    assert not torch.equal(run(noisy)[0], run(off)[0])
    assert torch.equal(noisy.eval()(X)[0], off(X)[0])


def test_jitter_reaches_the_router_alone():
    layer = make_layer(torch.float32, noise={"kind": "jitter", "size": 0.01})
    seen = {}
    real = layer.compute
    layer.compute = lambda x_TD, *rest: seen.update(x=x_TD) or real(x_TD, *rest)
    noisy = layer.router.rules.noise.input(X)
    layer(X)
    assert torch.equal(seen["x"], X), "the experts see the clean input"
    ratio = noisy / X
    assert 0.99 <= ratio.min() < 0.9905 and 1.0095 < ratio.max() <= 1.01
    assert abs(ratio.mean() - 1) < 5e-4
    fine = layer.router.rules.noise.input(X.bfloat16())
    assert fine.dtype == torch.float32, "noise finer than bfloat16"


def test_dropout_masks_restores_and_does_not_rescale():
    p = 0.4
    layer = make_layer(
        torch.float32,
        score="sigmoid",
        selection_bias=True,
        bias=None,
        noise={"kind": "dropout", "probability": p},
    )
    x = X.repeat(20, 1)
    logits = layer.router.logits(x)
    torch.manual_seed(0)
    select = layer.router.selection(x, logits)
    out = select == -torch.inf
    assert torch.equal(select[~out], logits[~out])
    assert out.sum(dim=1).max() == 5, "two experts always stay"
    plain, _ = layer.router.choose(logits)
    noisy, _ = layer.router.choose(logits, None, select)
    # the best expert stays with probability 1 - p, or when it is restored for lack of others
    kept = (noisy.expert_TK == plain.expert_TK[:, :1]).any(dim=1).float().mean().item()
    all_others = p**6 + 6 * (1 - p) * p**5  # at most one of the other six is left
    assert kept == pytest.approx(1 - p + p * all_others, abs=0.02)
    score = torch.sigmoid(logits)
    picked = score.gather(1, noisy.expert_TK.long())
    torch.testing.assert_close(noisy.gate_TK, picked / picked.sum(dim=1, keepdim=True))
    torch.testing.assert_close(noisy.prob_sum_E, plain.prob_sum_E)
    assert noisy.nonfinite == 0


def test_the_best_masked_come_back():
    key = torch.tensor([[5.0, 4, 3, 2], [5, 4, 3, 2], [-5, -4, -3, -2]])
    masked = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]]).bool()
    assert left(key, masked, 2).tolist() == [[True, False, False, True], [True, True, False, False],
                             [True, True, False, False]]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"noise": {"kind": "jitter", "size": 0.3}},
        {"noise": {"kind": "dropout", "probability": 0.3}},
        {"rounding": {"to": "stochastic", "tile": 16, "min_mean_tiles": 1}},
    ],
)
def test_recomputation_draws_the_same(fields):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = make_layer(torch.float32, **fields)

        def forward(self, x):
            return self.moe(x)

    block = Block()
    assert block.moe.draws
    torch.manual_seed(3)
    y, _ = block(X)
    y.square().sum().backward()
    right = block.moe.router.weight.grad.clone()
    block.zero_grad()
    torch.manual_seed(3)
    y, _ = run_checkpointed(block, X.clone().requires_grad_())
    torch.rand(7)  # something else draws before the backward
    y.square().sum().backward()
    assert torch.equal(block.moe.router.weight.grad, right)
    block.zero_grad()
    torch.manual_seed(3)
    y, _ = checkpoint(block, X.clone().requires_grad_(), use_reentrant=False,
                      preserve_rng_state=False)  # fmt: skip
    y.square().sum().backward()
    assert not torch.equal(block.moe.router.weight.grad, right), "the test can fail"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"noise": {"kind": "jitter", "size": 1.0}}, "less than 1"),
        ({"noise": {"kind": "dropout", "probability": -0.1}}, "greater than 0"),
        (
            {"num_experts": 8, "groups": 4, "groups_kept": 2, "noise": DROPOUT},
            "needs experts to choose from in every group",
        ),
        ({"num_experts_per_tok": 7, "noise": DROPOUT}, "needs experts to choose from"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        make_layer(**fields)
