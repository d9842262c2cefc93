"""State of the router between steps: worked numbers, what must not change it, and a simulation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe import MoE, RouterConfig, RouterStats
from moe.config import BIASES
from moe.control import begin_step, needs_update, update_routers
from moe.metrics import layer_metrics
from moe.rules.quantile_bias import quantiles
from moe.scores import selection_keys
from moe.types import Form
from tests.moe.oracle import logits_layer, make_layer


def biased(dtype: torch.dtype = torch.float32, **fields) -> MoE:
    """A layer with a rule for its selection bias."""
    return make_layer(dtype, **{"score": "sigmoid", "bias": {"kind": "quantile"}, **fields})


def next_bias(bias_LE: torch.Tensor, stats: RouterStats, **settings) -> torch.Tensor:
    """By the rule with these settings."""
    rule = BIASES[settings["kind"]](**settings).build(Form(6, bias_LE.shape[1], 2))
    return type(rule).next_bias([rule], bias_LE, stats)


def stats_of(counts, quantile=None) -> RouterStats:
    counts_LE = torch.tensor([counts], dtype=torch.int32)
    zero_L, zero_LE = torch.zeros(1), torch.zeros(1, len(counts))
    tokens_L = counts_LE.sum(dim=1).float()
    quantile_LE = None if quantile is None else tokens_L * torch.tensor([quantile])
    return RouterStats(
        counts_LE,
        zero_LE,
        zero_L,
        zero_L,
        zero_L,
        tokens_L,
        zero_L,
        zero_LE,
        quantile_sum_E=quantile_LE,
    )


# ------------------------------------------------------------------------------- worked numbers


@pytest.mark.parametrize(
    ("update", "right"),
    [
        ("sign", [-1.5e-3, 0.5e-3, 0.5e-3, 0.5e-3]),
        ("min_load", [-0.25e-3, -0.25e-3, -0.25e-3, 0.75e-3]),
    ],
)
def test_rules_by_rate(update, right):
    settings = {"below": 0.5} if update == "min_load" else {}
    stats = stats_of([10, 4, 4, 2])
    new = next_bias(torch.zeros(1, 4), stats, kind=update, rate=1e-3, **settings)
    torch.testing.assert_close(new, torch.tensor([right]), rtol=1e-4, atol=1e-9)
    assert new.mean().abs() < 1e-9


SCORES = torch.tensor(
    [[0.9, 0.6, 0.1], [0.8, 0.7, 0.2], [0.9, 0.3, 0.4], [0.7, 0.5, 0.6], [0.8, 0.2, 0.3],
     [0.6, 0.55, 0.5]]
)  # fmt: skip


def test_quantile_worked():
    """One step from (6, 0, 0) tokens to (3, 2, 1), where it stays."""
    bias = torch.zeros(3)
    counts, found = [], []
    for _ in range(3):
        key = SCORES + bias
        first = torch.sort(key, dim=1, descending=True, stable=True).indices[:, 0]
        counts.append(torch.bincount(first, minlength=3).tolist())
        found.append(quantiles(SCORES, key, 1))
        stats = stats_of(counts[-1], found[-1].tolist())
        bias = next_bias(bias[None], stats, kind="quantile")[0]
    torch.testing.assert_close(found[0], torch.tensor([0.3, 0, 0]))
    torch.testing.assert_close(bias, torch.tensor([-0.2, 0.1, 0.1]))
    assert counts == [[6, 0, 0], [3, 2, 1], [3, 2, 1]]


def test_quantile_targets_and_old_bias():
    """Wanted loads 3 : 2 : 1 instead of 2 : 2 : 2, and half of the old bias kept."""
    wanted = quantiles(SCORES, SCORES, 1, (3.0, 2.0, 1.0))
    ranked = torch.sort(SCORES - SCORES.topk(2).values[:, 1:], dim=0, descending=True).values
    assert wanted.tolist() == [ranked[3, 0], ranked[2, 1], ranked[1, 2]]
    old, stats = torch.tensor([[0.2, 0.0, -0.2]]), stats_of([6, 0, 0], [0.3, 0, 0])
    new = next_bias(old, stats, kind="quantile", ema=0.5)
    torch.testing.assert_close(new, torch.tensor([[0.0, 0.05, -0.05]]))


@pytest.mark.parametrize(("ema", "balances"), [(None, True), (0.0, False)])
def test_quantile_balances_groups_of_experts_by_small_steps(ema, balances):
    """Which groups a token takes follows the biases: whole steps overshoot."""
    torch.manual_seed(0)
    layer = biased(
        hidden_size=64, num_experts=64, num_experts_per_tok=6, groups=16, groups_kept=2,
        selection_bias=True, bias={"kind": "quantile", "ema": ema}, init_std=0.02,
    ).train()  # fmt: skip
    shared_D, found = torch.randn(64), []
    for step in range(1, 51):
        stats = layer((torch.randn(2048, 64) + shared_D).view(1, 2048, 64))[1].detach()
        found.append((stats.counts_E.max() / stats.counts_E.float().mean() - 1).item())
        update_routers(layer, RouterStats.stack([stats]), step=step, applied=None)
    assert found[0] > 3
    assert (max(found[-5:]) < 0.6) is balances, found


def test_quantile_of_padding_groups_and_masked_experts():
    """Tokens that are none change nothing; an expert that nobody may choose gets a finite bias."""
    layer = biased(num_experts=8, groups=4, groups_kept=2, num_experts_per_tok=2, hidden_size=8)
    x, zero_E = torch.randn(3, 9, 8), torch.zeros(8)
    plain = layer(x)[1]
    padded = torch.cat([x, torch.full((3, 4, 8), float("nan"))], dim=1)
    valid = torch.arange(13).expand(3, 13) < 9
    torch.testing.assert_close(layer(padded, valid)[1].quantile_sum_E, plain.quantile_sum_E)
    masked = logits_layer(
        num_experts=4,
        num_experts_per_tok=1,
        score="sigmoid",
        norm="none",
        bias={"kind": "quantile"},
    )
    logits = torch.randn(20, 4)
    logits[:, 2] = -torch.inf
    assert masked(torch.zeros(0, 4))[1].quantile_sum_E.tolist() == [0, 0, 0, 0]
    gating, _ = masked.router.choose(logits)
    assert gating.counts_E[2] == 0
    score_TE, key_TE = selection_keys(
        x.view(-1, 8) @ layer.router.weight.T, layer.config.form, zero_E
    )
    chosen_TK = layer.router(x.view(-1, 8)).gating.expert_TK.long()
    assert torch.equal(key_TE.topk(2).indices, chosen_TK), "the keys are those that chose"
    assert ((key_TE > -torch.inf).sum(dim=1) == 4).all() and (score_TE > 0).all()
    keys = selection_keys(logits, masked.config.form, masked.router.selection_bias)
    assert torch.isfinite(quantiles(*keys, 1)).all()


# ------------------------------------------------------------------------------------ simulation


def simulate(steps: int, **bias) -> list[float]:
    """Max violation over fresh batches of one distribution, started badly out of balance."""
    E, T = 64, 8192
    torch.manual_seed(0)
    router = RouterConfig(bias=bias)
    layer = logits_layer(num_experts=E, num_experts_per_tok=8, score="sigmoid", router=router)
    offset_E = 0.55 * torch.randn(E)
    found = []
    for step in range(1, steps + 1):
        x = torch.randn(T, E) + offset_E
        stats = layer(x)[1]
        found.append(layer_metrics(stats)["max_violation"].item())
        update_routers(layer, stats, step=step)
    return found


@torch.no_grad()
def test_quantile_balances_within_ten_steps():
    found = simulate(10, kind="quantile")
    assert found[0] > 4.0
    assert max(found[3:]) < 0.2


@torch.no_grad()
def test_rates_balance_slowly_and_the_opposite_sign_grows(monkeypatch):
    right = simulate(10, kind="sign", rate=1e-2)
    assert right[-1] < right[0] - 1
    real = torch.Tensor.sign
    monkeypatch.setattr(torch.Tensor, "sign", lambda tensor: -real(tensor))
    wrong = simulate(10, kind="sign", rate=1e-2)
    assert wrong[0] == right[0]
    assert wrong[-1] > wrong[0] + 0.2


# ---------------------------------------------------------------------- when state changes


def test_forwards_evaluation_and_recomputation_leave_the_state_alone():
    """pytorch/torchtitan#4148: evaluation must not reach the next update."""
    layer = biased(selection={"kind": "ema", "decay": 0.9}, balance={"kind": "lagged"})
    x = torch.randn(4, 8, 6)
    before = copy.deepcopy(dict(layer.named_buffers()))
    stats = layer(x)[1]
    y, again = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    y.sum().backward()
    assert torch.equal(again.counts_E, stats.counts_E), "recomputation counts once"
    layer.eval()
    for _ in range(2):
        assert layer(torch.ones(4, 8, 6))[1].quantile_sum_E is None
    layer.train()
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_evaluation_between_two_steps_leaves_no_trace():
    """pytorch/torchtitan#4148, with skewed data and gradients left on."""
    biases = []
    for evaluations in (0, 2):
        torch.manual_seed(5)
        layer = biased(bias={"kind": "sign", "rate": 0.1})
        batches = torch.randn(2, 40, 6)
        for step, x in enumerate(batches, 1):
            update_routers(layer, layer(x)[1], step=step)
            layer.eval()
            for _ in range(evaluations):
                layer(torch.ones(30, 6))
            layer.train()
        biases.append(layer.router.selection_bias.clone())
    assert torch.equal(*biases)
    assert biases[0].abs().max() > 0


def test_a_skipped_step_changes_no_bit_even_with_statistics_that_are_not_finite():
    layer = biased(selection={"kind": "ema", "decay": 0.5}, balance={"kind": "lagged"})
    update_routers(layer, layer(torch.randn(50, 6))[1], step=1)
    before = copy.deepcopy(dict(layer.named_buffers()))
    assert before["router.selection_bias"].abs().max() > 0
    stats = layer(torch.randn(50, 6))[1]._replace(quantile_sum_E=torch.full((7,), torch.nan))
    with torch.no_grad():
        layer.router.weight.add_(1)
    update_routers(layer, stats, step=2, applied=torch.tensor(0.0))
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name
    update_routers(layer, layer(torch.randn(50, 6))[1], step=2, applied=torch.tensor(1.0))
    for name, buffer in layer.named_buffers():
        assert not torch.equal(buffer, before[name]), name


def test_a_layer_without_update_does_not_stop_the_others():
    """pytorch/torchtitan#3686."""
    layers = nn.ModuleList([biased(), biased(bias=None, selection_bias=True), biased()])
    assert needs_update(layers)
    stats = RouterStats.stack([layer(torch.randn(60, 6))[1] for layer in layers])
    update_routers(layers, stats, step=1)
    moved = [bool(layer.router.selection_bias.abs().max() > 0) for layer in layers]
    assert moved == [True, False, True]
    single = biased()
    single.load_state_dict(layers[2].state_dict())
    nn.init.zeros_(single.router.selection_bias)
    alone = RouterStats(*(None if field is None else field[2] for field in stats))
    update_routers(single, alone, step=1)
    assert torch.equal(single.router.selection_bias, layers[2].router.selection_bias)
    with pytest.raises(ValueError, match="statistics of 1 layers, the model has 3 routers"):
        update_routers(layers, alone, step=1)


def test_sums_over_micro_batches_and_ranks_make_the_update():
    """The load's rules see one large batch; quantile takes the mean of the parts' thresholds."""
    for update in ("sign", "min_load", "quantile"):
        settings = {"kind": update} | ({} if update == "quantile" else {"rate": 0.1})
        layer = biased(bias=settings)
        x = torch.randn(40, 6)
        whole, parts = layer(x)[1], [layer(part)[1] for part in x.split([10, 30])]
        update_routers(layer, parts[0].plus(parts[1]), step=1)
        if update == "quantile":
            mean = -(10 * parts[0].quantile_sum_E / 10 + 30 * parts[1].quantile_sum_E / 30) / 40
            right = mean - mean.mean()
        else:
            right = next_bias(torch.zeros(1, 7), RouterStats.stack([whole]), **settings)[0]
        torch.testing.assert_close(layer.router.selection_bias, right, msg=update)


def test_state_survives_casts_and_loading_bit_for_bit():
    """NVIDIA/Megatron-LM#1482: a bias of 0.5 does not feel steps of 0.001 in bfloat16."""
    kept = {"bias": {"kind": "sign"}, "balance": {"kind": "lagged"}}
    kept["selection"] = {"kind": "ema", "decay": 0.9}
    layer = biased(**kept)
    update_routers(layer, layer(torch.randn(50, 6))[1], step=1)
    before = copy.deepcopy(dict(layer.named_buffers()))
    rules = {"router.rules.balance.load_E", "router.rules.selection.weight_ema"}
    assert set(before) == {"router.selection_bias", *rules}
    layer = layer.to(torch.bfloat16)
    other = biased(**kept).to(torch.bfloat16)
    other.load_state_dict(layer.state_dict(), assign=True)
    for name, buffer in other.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, before[name]), name
    x = torch.randn(50, 6, dtype=torch.bfloat16)
    for each in (layer, other):
        update_routers(each, each(x)[1], step=2)
    for (name, a), b in zip(layer.named_buffers(), other.buffers()):
        assert torch.equal(a, b), name
    rounded = {n: t.bfloat16() if n in before else t for n, t in layer.state_dict().items()}
    other.load_state_dict(rounded, assign=True)
    assert other.router.rules.selection.weight_ema.dtype == torch.float32
    with torch.no_grad():
        layer.router.selection_bias.fill_(0.5)
    for step in range(100):
        update_routers(layer, stats_of([0, 9, 9, 9, 9, 9, 9]), step=step)
    assert layer.router.selection_bias[0].item() == pytest.approx(6 / 7 * 0.2, rel=1e-3)


def test_freezing_and_annealing_the_bias():
    bias = {"kind": "sign", "rate": 0.1, "freeze_at": 3}
    layer = biased(bias=bias, end_steps=3, steps=11)
    seen = []
    for step in range(1, 11):
        update_routers(layer, stats_of([9, 1, 1, 1, 1, 1, 1]), step=step)
        seen.append(layer.router.selection_bias[0].item() / -0.1714286)
    right = [1, 2, 2, 2, 2, 2 * 2 / 3, 2 / 3, 0, 0, 0]
    assert seen == pytest.approx(right, rel=1e-5)
    assert torch.equal(layer.router.selection_bias, torch.zeros(7))


def test_the_load_of_the_step_is_kept():
    layer = make_layer(torch.float32, balance={"kind": "lagged"})
    stats = layer(torch.randn(30, 6))[1]
    update_routers(layer, stats, step=1)
    assert layer.router.rules.balance.load_E.tolist() == stats.counts_E.tolist()


# --------------------------------------------------------------------------- average of the weight


def test_the_average_selects_and_the_weight_gates():
    layer = make_layer(selection={"kind": "ema", "decay": 0.9})
    plain = make_layer()
    x = torch.randn(40, 6, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict(), strict=False)
    chosen = plain.router(x).gating.expert_TK
    with torch.no_grad():
        layer.router.weight.add_(torch.randn_like(layer.router.weight))
    found = layer.router(x).gating
    assert torch.equal(found.expert_TK, chosen)
    z = x @ layer.router.weight.T
    gates = torch.softmax(z.gather(1, chosen.long()), dim=1)
    torch.testing.assert_close(found.gate_TK, gates)
    torch.testing.assert_close(found.lse_T, torch.logsumexp(z, dim=1))
    # gradient of the weight: plain gating of the given choice
    weight = layer.router.weight
    seed = torch.randn_like(gates)
    (right,) = torch.autograd.grad((gates * seed).sum(), weight)
    (grad,) = torch.autograd.grad((found.gate_TK * seed).sum(), weight)
    torch.testing.assert_close(grad, right)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_decay_zero_is_plain_routing_bit_for_bit(score):
    layer, plain = (
        biased(score=score, bias=None, selection_bias=True, selection=selection)
        for selection in ({"kind": "ema", "decay": 0.0}, None)
    )
    x = torch.randn(40, 6)
    for step in range(1, 3):
        with torch.no_grad():
            layer.router.weight.mul_(1.5).add_(torch.randn_like(layer.router.weight))
        update_routers(layer, layer(x)[1], step=step)
        plain.load_state_dict(layer.state_dict(), strict=False)
        results = []
        for each in (layer, plain):
            each.zero_grad()
            y, stats = each(x)
            y.square().sum().backward()
            results.append((y, stats.counts_E, each.router.weight.grad))
        for a, b in zip(*results):
            assert torch.equal(a, b)


def test_the_average_follows_a_weight_that_stands_still():
    layer = make_layer(torch.float32, selection={"kind": "ema", "decay": 0.5})
    start = layer.router.weight.detach().clone()
    with torch.no_grad():
        layer.router.weight.add_(1.0)
    for step in range(1, 5):
        update_routers(layer, layer(torch.randn(9, 6))[1], step=step)
        torch.testing.assert_close(layer.router.rules.selection.weight_ema, start + 1 - 0.5**step)


def test_the_average_selects_until_the_step_that_is_said():
    router = RouterConfig(selection={"kind": "ema", "decay": 0.9}, end_steps=3)
    layer = make_layer(torch.float32, router=router, steps=7)
    said = [begin_step(layer, step) for step in range(1, 7)]
    assert [len(lines) for lines in said] == [0, 0, 0, 0, 1, 0]
    assert not layer.router.rules.selection.selecting
    begin_step(layer, 2)  # as after a restart
    assert layer.router.rules.selection.selecting


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 7}, "every token takes all 7 experts"),
        ({"bias": {"kind": "sign", "freeze_at": 1}}, "freeze_at=1 never lets the bias move"),
        (
            {
                "bias": {"kind": "sign"},
                "balance": {"load": "flops"},
                "expert_size": 9,
                "expert_widths": (1, *[9] * 6),
            },
            "may be at most 1/2 of all, got 0.6",
        ),
        (
            {"balance": {"load": "flops"}},
            "router.balance.load=.flops. needs model.moe_expert_widths",
        ),
        ({"end_steps": 3}, "steps=None: router.end_steps"),
        ({"end_steps": 3, "steps": 6}, "router.end_steps=3 must be less than half of the run"),
    ],
)
def test_impossible_settings_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        biased(**fields)


def test_a_plain_layer_needs_no_update():
    assert not needs_update(make_layer())
