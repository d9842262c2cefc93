"""Free slots take no part in anything; clones, retirements and revivals do what they say."""

import pytest
import torch

from moe import MoE, update_routers
from moe.balance import balance_loss, sequence_loss, z_loss
from moe.config import BIASES
from moe.metrics import layer_metrics
from moe.surgery import (
    Change,
    _mixed,
    change_layer,
    change_state,
    check_change,
    noise_for,
)
from tests.moe.oracle import layer_config

D, N, E, K, T = 16, 8, 8, 2, 96
USED = [0, 2, 3, 5, 6]


def make(dtype=torch.float32, **fields):
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "expert_size": N, "num_experts": E, "num_experts_per_tok": K}
    std = {"router_init_std": 0.3, "init_std": 0.3}
    return MoE(layer_config(**sizes | std | fields), dtype=dtype)


def with_free_slots(used=USED, **fields):
    """A layer of which only these slots are in use, with rubbish in the others; and one that has
    nothing but their experts."""
    layer = make(start_experts=E, **fields)
    with torch.no_grad():
        layer.router.active_E.zero_()[used] = 1.0
        for parameter in (layer.w1, layer.w2):
            for slot in set(range(E)) - set(used):
                parameter[slot] = 1e4
    small = make(**fields | {"num_experts": len(used), "families": False})
    with torch.no_grad():
        for name in ("w1", "w2", "router.weight"):
            small.get_parameter(name).copy_(layer.get_parameter(name)[used])
        if layer.router.selection_bias is not None:
            bias_E = torch.linspace(-0.1, 0.1, len(used))
            small.router.selection_bias.copy_(bias_E)
            layer.router.selection_bias.zero_()[used] = bias_E
            if len(used) < E:
                layer.router.selection_bias[1] = 9.0  # would win every token
    return layer, small


def tokens(seed=0, rows=T):
    x_BTD = torch.randn(2, rows // 2, D, generator=torch.Generator().manual_seed(seed))
    valid_BT = torch.ones(2, rows // 2, dtype=torch.bool)
    valid_BT[1, -7:] = False
    return x_BTD, valid_BT


ROUNDED = {"tile": 8, "min_mean_tiles": 1.0}
FORMS = {
    "plain": {},
    "sigmoid": {"score": "sigmoid", "route_scale": 1.8},
    "bias": {"score": "sigmoid", "selection_bias": True},
    "raw": {"norm": "none"},
    "softmax_topk": {"norm": "softmax_topk", "score": "identity"},
    "sequence": {"balance": {"kind": "sequence"}},
    "ema": {"selection": {"kind": "ema", "decay": 0.9}},
    "quantile": {"bias": {"kind": "quantile"}},
    "capacity": {"capacity": {"factor": 1.1}},
    "amplitude": {"score": {"kind": "amplitude"}},
    "gate_mass": {"importance": "gate_mass"},
    "reap": {"importance": "reap"},
} | {
    f"rounded {variant}": {"rounding": ROUNDED | {"to": variant}}
    for variant in ("nearest", "up", "balanced", "systematic", "score")
}


@pytest.mark.parametrize("form", FORMS)
def test_free_slots_are_as_if_they_were_not_there(form):
    fields = FORMS[form]
    if form == "amplitude":
        layer, small = make(start_experts=E, **fields), make(**fields | {"num_experts": 5})
        with torch.no_grad():
            layer.router.active_E.zero_()[USED] = 1.0
            small.w1.copy_(layer.w1[USED])
            small.w2.copy_(layer.w2[USED])
            rows = layer.router.weight.view(E, 2, D)[USED]
            small.router.weight.copy_(rows.reshape(-1, D))
    else:
        layer, small = with_free_slots(**fields)
    small = small if form not in ("gate_mass", "reap") else with_mask(small, fields)
    for one in (layer, small):
        one.router.start_state()
    x, valid = tokens()
    found = []
    for one in (layer, small):
        torch.manual_seed(3)
        inner = x.clone().requires_grad_()
        y, stats = one(inner, valid)
        loss = y.square().mean() + 2 * balance_loss(stats)
        loss = loss + z_loss(stats) + sequence_loss(stats)
        loss.backward()
        found.append((y.detach(), inner.grad, stats.detach(), one))
    (y, dx, stats, _), (y_small, dx_small, stats_small, _) = found
    torch.testing.assert_close(y, y_small)
    torch.testing.assert_close(dx, dx_small)
    rows = 2 if form == "amplitude" else 1
    for name in ("w1", "w2", "router.weight"):
        mine = layer.get_parameter(name).grad.unflatten(0, (E, -1))
        theirs = small.get_parameter(name).grad.unflatten(0, (len(USED), -1))
        torch.testing.assert_close(mine[USED], theirs)
        free = [slot for slot in range(E) if slot not in USED]
        assert not mine[free].any()
        assert mine.shape[1] == (rows if name == "router.weight" else mine.shape[1])
    assert torch.equal(stats.counts_E[USED], stats_small.counts_E)
    assert torch.equal(stats.rows_E[USED], stats_small.rows_E)
    assert stats.counts_E.sum() == stats_small.counts_E.sum()
    if stats.importance_sum_E is not None:
        torch.testing.assert_close(stats.importance_sum_E[USED], stats_small.importance_sum_E)
        assert stats.importance_sum_E.sum() > 0
    for name, value in layer_metrics(stats_small).items():
        torch.testing.assert_close(layer_metrics(stats)[name], value, msg=name)


def with_mask(small, fields):
    """The same layer with a mask that lets all in, for what is measured only with one."""
    masked = make(**fields | {"num_experts": len(USED), "start_experts": len(USED)})
    masked.load_state_dict(small.state_dict() | {"router.active_E": torch.ones(len(USED))})
    return masked


@pytest.mark.parametrize("kind", BIASES)
def test_selection_biases_balance_the_experts_in_use_alone(kind):
    bias = {"kind": kind} | ({} if kind == "quantile" else {"rate": 0.05})
    layer, small = with_free_slots(score="sigmoid", bias=bias)
    layer.router.selection_bias[1] = 0.0
    for step in range(1, 6):
        for one in (layer, small):
            _, stats = one(*tokens(step))
            update_routers(one, stats, step=step)
    bias_E = layer.router.selection_bias
    torch.testing.assert_close(bias_E[USED], small.router.selection_bias)
    assert bias_E[USED].abs().max() > 1e-3
    assert bias_E[[1, 4, 7]].tolist() == [0.0, 0.0, 0.0]


def test_a_dormant_clone_changes_no_bit_and_is_let_in():
    used = [0, 1, 2, 3, 4]
    for norm in ("topk_sum", "none"):
        fields = {"score": "sigmoid", "norm": norm, "bias": {"kind": "quantile"}}
        layer, _ = with_free_slots(used, **fields)
        layer.router.selection_bias[used] = torch.tensor([0.3, -0.9, 0.2, 0.4, 0.0])
        before, _ = layer(*tokens())
        change_layer(layer, Change("clone", 6, parent=3), dormant=True)
        after, stats = layer(*tokens())
        assert torch.equal(before, after)
        assert stats.counts_E[6] == 0
        assert torch.equal(layer.w1[6], layer.w1[3])
        assert torch.equal(layer.w2[6], layer.w2[3])
        assert torch.equal(layer.router.weight[6], layer.router.weight[3])
        for step in (1, 2, 3):  # two of them for biases that were far from right before
            update_routers(layer, stats, step=step)
            _, stats = layer(*tokens(step))
        mean = stats.counts_E.sum() / 6
        assert stats.counts_E[6] > 0.7 * mean
        naive = layer(*tokens())[0]
        assert (naive - before).norm() > 0.05 * before.norm(), "a copy at work is felt"


@pytest.mark.parametrize("form", ["plain", "raw", "bias", "sigmoid", "quantile"])
def test_a_family_is_chosen_once_and_changes_nothing_but_noise(form):
    used = [0, 1, 2, 3, 4]
    layer, _ = with_free_slots(used, families=True, **FORMS[form])
    if layer.router.selection_bias is not None:
        layer.router.selection_bias.zero_()
    before, stats_before = layer(*tokens())
    counts = stats_before.counts_E.tolist()
    change_layer(layer, Change("clone", 6, parent=3))
    layer.router.selection_bias is None or layer.router.selection_bias.zero_()
    after, stats = layer(*tokens())
    # equal rows: the first slot takes all, to the bit
    assert torch.equal(before, after)
    assert stats.counts_E.tolist() == counts
    with torch.no_grad():
        row_D = layer.router.weight[6]
        row_D += noise_for(row_D, 0.01, "row")
    after, stats = layer(*tokens())
    assert stats.counts_E[3] + stats.counts_E[6] == counts[3]
    assert 0.2 < stats.counts_E[6] / counts[3] < 0.8
    assert (after - before).norm() < 0.01 * before.norm()
    # no token has both
    expert_TK = layer.router(tokens()[0].reshape(-1, D)).gating.expert_TK
    assert not ((expert_TK == 3).any(1) & (expert_TK == 6).any(1)).any()
    # a grandchild is of the same family; apart, copies are chosen together
    change_layer(layer, Change("clone", 1 + 6, parent=6))
    assert layer.router.family_E.tolist() == [0, 1, 2, 3, 4, 5, 3, 3]
    layer.router.exclusive = False
    naive, _ = layer(*tokens())
    assert (naive - before).norm() > 0.05 * before.norm()


def test_the_last_families_cannot_retire():
    layer, _ = with_free_slots([0, 1], families=True)
    change_layer(layer, Change("clone", 2, parent=0))
    with pytest.raises(ValueError, match="experts of 1 families would be left, and a token needs"):
        change_layer(layer, Change("retire", 1))
    with pytest.raises(ValueError, match="experts of 1 families"):
        change_layer(layer, Change("revive", 1, parent=0))
    change_layer(layer, Change("retire", 0))
    assert layer.router.active_E.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]


def test_a_retired_expert_is_gone_and_the_others_are_as_before():
    layer, _ = with_free_slots([*range(E)])
    _, small = with_free_slots([0, 1, 2, 4, 5, 6, 7])
    moments = [torch.ones_like(layer.w1), torch.ones_like(layer.w2)]
    weights = layer.w1.detach().clone()
    change_layer(layer, Change("retire", 3), moments=moments)
    torch.testing.assert_close(layer(*tokens())[0], small(*tokens())[0])
    assert torch.equal(layer.w1, weights)
    for moment in moments:
        assert not moment[3].any()
        assert moment.sum() == moment.numel() * 7 / 8


def test_a_revived_expert_is_its_parent_but_for_noise():
    ema = {"kind": "ema", "decay": 0.9}
    layer = make(selection=ema, balance={"kind": "lagged"})  # without a mask
    rules = layer.router.rules
    rules.balance.load_E.copy_(torch.arange(8.0))
    moment = torch.arange(8.0)[:, None].expand(8, 3).clone()
    total = sum(p.numel() for p in layer.parameters())
    options = {"moments": [moment], "noise": 0.01}
    change_layer(layer, Change("revive", 2, parent=5), seed="a", **options)
    assert sum(p.numel() for p in layer.parameters()) == total
    assert rules.balance.load_E.tolist() == [0, 1, 5, 3, 4, 5, 6, 7]
    assert moment[:, 0].tolist() == [0, 1, 5, 3, 4, 5, 6, 7]
    assert torch.equal(*rules.selection.weight_ema[[2, 5]])
    for name in ("w1", "w2", "router.weight"):
        parameter = layer.get_parameter(name)
        off = (parameter[2] - parameter[5]) / parameter[5].std()
        assert 0.005 < off.std() < 0.015
    once = layer.w1[2].clone()
    change_layer(layer, Change("revive", 2, parent=5), seed="a", **options)
    assert torch.equal(layer.w1[2], once)
    change_layer(layer, Change("revive", 2, parent=5), seed="b", **options)
    assert not torch.equal(layer.w1[2], once)


def test_noise_is_nearly_normal_and_by_name():
    row_X = torch.randn(200_000) * 3
    noise_X = noise_for(row_X, 0.01, "a") / (0.01 * row_X.std())
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3 - 1.2 / 4)):
        assert noise_X.double().pow(power).mean() == pytest.approx(moment, abs=0.03)
    assert torch.corrcoef(torch.stack([noise_X[1:], noise_X[:-1]]))[0, 1].abs() < 0.01
    assert torch.equal(noise_for(row_X, 0.01, "a"), noise_for(row_X, 0.01, "a"))
    other_X = noise_for(row_X, 0.01, "b") / (0.01 * row_X.std())
    assert torch.corrcoef(torch.stack([noise_X, other_X]))[0, 1].abs() < 0.01
    # the algorithm's own first numbers from seed 0
    words = [int(_mixed(torch.tensor([i]), 0)) % 2**64 for i in (1, 2)]
    assert words == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Change("clone", 0, 1), r"layer 0: clone of slot 0: it holds an expert; free are \[3\]"),
        (Change("clone", 3, 3), "its parent 3 is a free slot"),
        (Change("clone", 3), "parent=None; clone and revive need one"),
        (Change("clone", 9, 0), "there is no slot 9; allowed: 0 to 3"),
        (Change("retire", 1, 0), "parent=0; clone and revive need one, retire none"),
        (Change("retire", 3), "it holds no expert"),
        (Change("revive", 3, 1), "it holds no expert"),
        (Change("revive", 1, 1), "it cannot be its own parent"),
        (Change("retire", 1, layer=4), "MoE layer 4: retire of slot 1: 3 experts are left"),
    ],
)
def test_impossible_changes_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        check_change(change, [True, True, True, False], k=3)


def test_what_cannot_be_dormant_or_have_free_slots_is_refused():
    layer = make(start_experts=6)
    with pytest.raises(ValueError, match="needs a selection bias"):
        change_state(layer.router, Change("clone", 7, 0), dormant=True)
    with pytest.raises(ValueError, match="it needs start_experts"):
        change_state(make().router, Change("retire", 7))
    for score in ("sqrtsoftplus", "softmax"):
        layer = make(start_experts=6, selection_bias=True, score=score)
        with pytest.raises(ValueError, match=f"score='sigmoid', got score='{score}'"):
            change_state(layer.router, Change("clone", 7, 0), dormant=True)
    for fields, text in (
        ({"start_experts": 1}, "start_experts=1 must be from 2"),
        ({"start_experts": 9}, "start_experts=9 must be from 2"),
        ({"start_experts": 6, "groups": 2}, "groups=2 does not go with start_experts=6"),
        (
            {"start_experts": 6, "gradient": {"kind": "default"}},
            "gradient.kind=default does not go",
        ),
        (
            {"start_experts": 6, "rounding": ROUNDED | {"to": "nearest", "max_tiles": 2.0}},
            "max_tiles=2 does not go",
        ),
        ({"families": True}, "families=True has no effect without start_experts"),
        (
            {
                "start_experts": 6,
                "families": True,
                "selection": {"kind": "ema", "decay": 0.9},
            },
            "selection.kind=ema does not go with copies",
        ),
        ({"start_experts": 6, "importance": "size"}, "importance='size' is unknown"),
        ({"importance": "size"}, "importance='size' is unknown; allowed: load, gate_mass"),
        (
            {"start_experts": 2, "bias": {"kind": "quantile"}},
            "start_experts=2 must be from 3",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            make(**fields)


def test_taylor_is_the_loss_that_goes_with_the_expert():
    """<w2, dL/dw2> is sum of g dL/dg, and the slope of the loss in the expert's gates."""
    layer = make(dtype=torch.float64, start_experts=6, importance="taylor")
    layer.router.double()
    x_BTD, valid = tokens()
    x_BTD = x_BTD.double()
    target = torch.randn(x_BTD.shape, dtype=torch.float64)

    def loss():
        return (layer(x_BTD, valid)[0] - target).square().sum()

    loss().backward()
    taylor_E = (layer.w2 * layer.w2.grad).flatten(1).sum(1)
    assert not taylor_E[6:].any()
    step = 1e-6
    for expert in range(6):
        found = []
        for factor in (1 + step, 1 - step):
            with torch.no_grad():
                old = layer.w2[expert].clone()
                layer.w2[expert] *= factor
                found.append(loss().item())
                layer.w2[expert] = old
        slope = (found[0] - found[1]) / (2 * step)
        assert slope == pytest.approx(taylor_E[expert].item(), rel=1e-6, abs=1e-6)


def test_reap_and_gate_mass_are_sums_over_pairs():
    x_BTD, valid = tokens()
    for how in ("reap", "gate_mass"):
        layer = make(start_experts=6, importance=how)
        _, stats = layer(x_BTD, valid)
        x_TD = x_BTD.reshape(-1, D)[valid.reshape(-1)]
        gating = layer.router(x_TD).gating
        wanted_E = torch.zeros(E)
        for x_D, expert_K, gate_K in zip(x_TD, gating.expert_TK, gating.gate_TK):
            for expert, gate in zip(expert_K.tolist(), gate_K):
                hidden = layer.w1[expert] @ x_D
                y_D = layer.w2[expert] @ (torch.nn.functional.silu(hidden[0::2]) * hidden[1::2])
                wanted_E[expert] += gate * (y_D.norm() if how == "reap" else 1.0)
        torch.testing.assert_close(stats.importance_sum_E, wanted_E.detach())
        layer.eval()
        assert layer(x_BTD, valid)[1].importance_sum_E is None


def test_a_change_compiles_nothing_anew():
    torch._dynamo.reset()
    layer = make(
        start_experts=6,
        score="sigmoid",
        selection_bias=True,
        kernels="reference",
    )
    compiles = []

    def backend(graph, inputs):
        compiles.append(1)
        return graph.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x_BTD, valid = tokens()
    compiled(x_BTD, valid)[0].sum().backward()
    first = len(compiles)
    change_layer(layer, Change("clone", 7, parent=0), dormant=True)
    change_layer(layer, Change("retire", 1))
    y = compiled(x_BTD, valid)[0]
    assert first == len(compiles) >= 1
    torch.testing.assert_close(y, layer(x_BTD, valid)[0])
