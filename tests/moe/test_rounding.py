"""Token rounding as a user sees it: guarantees over random scores, settings, and when it is off."""

import warnings

import pytest
import torch

from moe import MoE
from moe.kernels.common.backend import INTERPRET
from moe.kernels.routing.token_rounding import VARIANTS
from moe.kernels.routing.topk_gating import topk_gating
from moe.routing import Routing
from moe.rules import rounding as module
from moe.rules.rounding import (
    Rounding,
    dropped_pair_gradient,
    dropped_pairs,
    max_slots,
    round_tokens,
    rounding_applies,
)
from tests.moe.oracle import layer_config

triton_only = pytest.mark.skipif(
    not INTERPRET, reason="kernels on a CPU need Triton's interpreter; tests/gpu has the others"
)
BACKENDS = ["reference", pytest.param("triton", marks=triton_only)]


def setting(**change):
    plain = {"to": "nearest", "tile": 8, "min_mean_tiles": 0.0, "min_tiles": 0}
    return Rounding(**plain | change)


def scores(T, E, seed=0):
    """Random logits with popular and unpopular experts."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(T, E, generator=g) + torch.randn(E, generator=g)


def dense(routing, T, E):
    """bool [T, E]: which pairs the routing holds, read from the row arrays."""
    held = torch.zeros(T, E, dtype=torch.bool)
    bounds = routing.offsets_E1.tolist()
    for e in range(E):
        held[routing.token_R[bounds[e] : bounds[e + 1]].long(), e] = True
    return held


# ------------------------------------------------------------------------------------- guarantees


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("protect", [False, True])
@pytest.mark.parametrize("least", [0, 1])
def test_guarantees(variant, protect, least):
    T, E, K, M = 96, 7, 2, 8
    config = setting(to=variant, protect_top1=protect, min_tiles=least)
    for seed in range(6):
        z = scores(T, E, seed)
        g = topk_gating(z, K)
        r = round_tokens(z, g, config)
        held = dense(r, T, E)
        plain = torch.zeros(T, E, dtype=torch.bool).scatter(1, g.expert_TK.long(), True)
        f, target = g.counts_E, r.counts_E
        assert torch.equal(held.sum(0).int(), target)  # realised count, no pair twice
        assert (target % M == 0).all()
        low, high = f - f % M, f - f % M + M * (f % M > 0)
        floor = torch.where(f > 0, least * M, 0)
        inside = (target >= low) & (target <= torch.maximum(high, floor))
        assert inside.all()
        if variant in ("nearest", "nearest_even") and not protect and not least:
            assert ((target - f).abs() <= M // 2).all()
        for e in range(E):  # an expert's tokens are a subset or a superset of its plain choice
            a, b = held[:, e], plain[:, e]
            assert not (a & ~b).any() or not (b & ~a).any()
        each = held.sum(1)
        if variant == "up":
            assert (each >= K).all()
        if variant == "down" and not protect and not least:
            assert (each <= K).all()
        if protect:
            assert held.gather(1, g.expert_TK[:, :1].long()).all()
        if least:
            assert ((target >= M) == (f > 0)).all()
        assert r.slot_offsets_T1[1:].sub(r.slot_offsets_T1[:-1]).tolist() == each.tolist()
        assert r.gates_S.shape[0] == max_slots(config, T, K, E)
        assert r.offsets_E1[-1] <= r.gates_S.shape[0]
        assert r.gates_S.isfinite().all() and (r.expert_S[r.offsets_E1[-1] :] == -1).all()


def test_balanced_keeps_the_total_within_half_a_tile():
    for seed in range(20):
        z = scores(200, 9, seed)
        r = round_tokens(z, topk_gating(z, 2), setting(to="balanced"))
        assert abs(int(r.offsets_E1[-1]) - 400) <= 4


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("change", [{}, {"min_tiles": 2}, {"protect_top1": True}])
def test_slots_are_enough_for_the_worst_counts(variant, change):
    # counts that all sit just where they grow most
    config = setting(to=variant, **change)
    T, E = 64, 6
    for residue in range(1, 8):
        z = torch.full((T, E), -9.0)
        t = 0
        for e in range(E - 1):
            z[t : t + residue, e] = 1.0
            t += residue
        z[t:, E - 1] = 1.0
        r = round_tokens(z, topk_gating(z, 1), config)
        assert int(r.offsets_E1[-1]) <= max_slots(config, T, 1, E) == r.expert_S.numel()


def test_a_capacity_above_all_tokens_drops_nothing():
    # capacity M ceil(c T K / (E M)) = 8 ceil(1.5 * 4 * 2 / 16) = 8, twice the tokens there are
    z = scores(4, 2)
    g = topk_gating(z, 2)
    r = round_tokens(z, g, setting(tile=2, max_tiles=1.5, to="nearest"))
    assert r.counts_E.tolist() == [4, 4]


def test_capacity_takes_its_ceiling_last():
    # 1.25 * 5 * 2 / 4 = 3.125 tiles of one row → 4
    z = torch.full((5, 4), -9.0)
    z[:, 0], z[:, 1] = 2.0, 1.0
    g = topk_gating(z, 2)
    from moe.kernels.routing.token_rounding import CAP_UNIT, target_counts_ref

    args = (g.counts_E, torch.tensor(5), 2, "nearest", 1)
    assert target_counts_ref(*args, cap=int(1.25 * CAP_UNIT)).tolist() == [4, 4, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_takes_no_place(backend):
    # six pads prefer the same expert as the two real tokens; one of them has an id a pad has
    z = torch.tensor([[3.0, 0.0], [2.5, 0.0]])
    pads = torch.tensor([[9.0, -9.0]]).repeat(6, 1)
    valid = torch.tensor([True, False, False, True, False, False, False, False])
    both = torch.empty(8, 2)
    both[valid], both[~valid] = z, pads
    config = setting(tile=2, to="nearest", max_tiles=1.25)
    a = round_tokens(z, topk_gating(z, 1), config, backend=backend)
    b = round_tokens(both, topk_gating(both, 1, valid_T=valid), config, backend=backend)
    assert dense(b, 8, 2)[valid].tolist() == dense(a, 2, 2).tolist() == [[True, False]] * 2
    assert not dense(b, 8, 2)[~valid].any()


def test_pads_are_never_taken_to_fill_a_tile():
    z = scores(64, 5)
    valid = torch.arange(64) % 4 > 0
    z[~valid] += 20
    g = topk_gating(z, 2, valid_T=valid)
    for variant in VARIANTS:
        held = dense(round_tokens(z, g, setting(to=variant, min_tiles=1)), 64, 5)
        assert not held[~valid].any()


def test_tokens_without_an_expert():
    z = scores(256, 8, seed=3) * 2
    g = topk_gating(z, 2)
    for gates in ("top_k", "rounded", "none"):
        r = round_tokens(z, g, setting(tile=64, to="down", gates=gates))
        each = r.slot_offsets_T1.diff()
        assert (each == 0).any()  # it happens; their gates are no NaN, they just have no slot
        assert r.gates_S.isfinite().all()
    r = round_tokens(z, g, setting(tile=64, to="up"))
    assert (r.slot_offsets_T1.diff() > 2).any()


def test_the_choice_looks_ahead():
    # why evaluation must be plain top-K: a later token changes what an earlier one gets
    z = scores(32, 4)
    config = setting(to="nearest")
    before = dense(round_tokens(z, topk_gating(z, 2), config), 32, 4)[:-1]
    changed = []
    for last in torch.eye(4) * 9:
        other = torch.cat([z[:-1], last[None]])
        g = topk_gating(other, 2)
        changed.append(not torch.equal(before, dense(round_tokens(other, g, config), 32, 4)[:-1]))
        assert torch.equal(g.expert_TK[:-1], topk_gating(z, 2).expert_TK[:-1])
    assert any(changed)


def test_same_draw_same_routing():
    z = scores(80, 5)
    g = topk_gating(z, 2)
    for variant in ("stochastic", "systematic"):
        torch.manual_seed(7)
        a = round_tokens(z, g, setting(to=variant))
        torch.manual_seed(7)
        b = round_tokens(z, g, setting(to=variant))
        assert torch.equal(a.expert_S, b.expert_S)


# --------------------------------------------------------------------------------- when it is off


def test_too_few_tokens_are_routed_plainly_with_one_notice():
    z = scores(64, 8)
    g = topk_gating(z, 2)
    config = Rounding(to="nearest", tile=16)  # mean of 16 tokens per expert = 1 tile < 2
    module._noticed.clear()
    with pytest.warns(UserWarning, match="64 tokens.*less than 2 tiles of 16"):
        r = round_tokens(z, g, config)
    assert torch.equal(r.expert_S, g.expert_TK.flatten())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        round_tokens(z, g, config)


@pytest.mark.parametrize(
    ("config", "tokens", "applies"),
    [
        (Rounding(to="nearest", tile=128), 16384, True),  # 4 tiles at E = 64, K = 2
        (Rounding(to="nearest", tile=128), 8192, True),  # exactly 2
        (Rounding(to="nearest", tile=128), 8191, False),
        (Rounding(to="nearest", tile=128, min_mean_tiles=0), 200, True),
        (Rounding(to="nearest", tile=128, min_mean_tiles=0), 100, False),  # no whole tile to give
    ],
)
def test_when_it_applies(config, tokens, applies):
    assert rounding_applies(config, tokens, 2, 64) == applies


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"to": "closest"}, "'nearest', 'nearest_even'"),
        ({"gates": "all"}, "'top_k', 'rounded' or 'none'"),
        ({"tile": 1}, "greater than or equal to 2"),
        ({"min_tiles": -1}, "greater than or equal to 0"),
        ({"max_tiles": 1.0}, "greater than or equal to 1.25"),
        ({"max_tiles": float("nan")}, "finite number"),
        ({"min_mean_tiles": -1.0}, "greater than or equal to 0"),
    ],
)
def test_refused_settings(change, message):
    with pytest.raises(ValueError, match=message):
        setting(**change)


def test_refused_arguments():
    z = scores(32, 4)
    g = topk_gating(z, 2)
    with pytest.raises(ValueError, match="32 tokens and 4 experts, logits_TE of 31"):
        round_tokens(z[1:], g, setting())
    with pytest.raises(ValueError, match=r"uniform_E .*\(4,\)"):
        round_tokens(z, g, setting(to="systematic"), uniform_E=torch.rand(3))


# -------------------------------------------------------------------------------------- gradients


def test_gradient_of_realised_pairs_is_exact():
    z = scores(24, 4).double().requires_grad_()
    target = torch.randn(24, 4, dtype=torch.float64)

    def loss(z):
        r = round_tokens(z, topk_gating(z, 2), setting(tile=4))
        token = torch.repeat_interleave(torch.arange(24), r.slot_offsets_T1.diff())
        n = len(token)
        return (r.gates_S[:n] * target[token, r.expert_S[:n].long()]).sum()

    assert torch.autograd.gradcheck(loss, (z,))


@pytest.mark.parametrize("variant", ["down", "nearest", "up"])
def test_dropped_pairs(variant):
    z = scores(60, 5)
    g = topk_gating(z, 2)
    r = round_tokens(z, g, setting(to=variant))
    held = dense(r, 60, 5)
    assert torch.equal(dropped_pairs(r, g.expert_TK), ~held.gather(1, g.expert_TK.long()))
    plain = Routing.from_topk(g.expert_TK, g.gate_TK, 5)
    assert not dropped_pairs(plain, g.expert_TK).any()


def test_dropped_pairs_without_any_slot():
    z = scores(9, 5)
    g = topk_gating(z, 1)
    r = round_tokens(z, g, setting(to="down", tile=9))
    assert int(r.offsets_E1[-1]) == 0
    assert dropped_pairs(r, g.expert_TK).all()


def test_default_vectors_stand_for_dropped_outputs():
    z = scores(40, 4).double().requires_grad_()
    g = topk_gating(z, 2)
    r = round_tokens(z, g, setting(to="down"))
    dropped = dropped_pairs(r, g.expert_TK)
    assert dropped.any()
    m = torch.randn(4, 3, dtype=torch.float64)
    y = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    out = dropped_pair_gradient(y, g.gate_TK, g.expert_TK, dropped, m)
    assert torch.equal(out, y)
    dy = torch.randn_like(y)
    got = torch.autograd.grad((out * dy).sum(), (y, g.gate_TK, z), retain_graph=True)
    want = (m[g.expert_TK.long()] * dy[:, None]).sum(-1) * dropped
    assert torch.equal(got[0], dy)
    torch.testing.assert_close(got[1], want)
    assert got[2].abs().sum() > 0


def test_dropped_pair_gradient_refuses_other_shapes():
    y, gate, ids = torch.zeros(4, 3), torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="must have one shape"):
        dropped_pair_gradient(y, gate, ids, torch.zeros(4, 1, dtype=torch.bool), torch.zeros(5, 3))
    with pytest.raises(ValueError, match="width 2"):
        dropped_pair_gradient(y, gate, ids, ids > 0, torch.zeros(5, 2))


# ------------------------------------------------------------------------------------ compilation


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend):
    config = setting(to="nearest", tile=4)

    def step(z):
        g = topk_gating(z, 2, backend=backend)
        r = round_tokens(z, g, config, backend=backend)
        return r.gates_S.square().sum(), r.expert_S, r.row_S, r.token_R

    z = scores(16, 4)
    plain, compiled = z.clone().requires_grad_(), z.clone().requires_grad_()
    want = step(plain)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    for a, b in zip(got[1:], want[1:]):
        assert torch.equal(a, b)
    got[0].backward()
    want[0].backward()
    torch.testing.assert_close(compiled.grad, plain.grad)


@pytest.mark.parametrize("norm", ["topk_sum", "none", "softmax_topk"])
@pytest.mark.parametrize("gates", ["top_k", "rounded", "none"])
def test_c5_rounding_trains_the_gates_that_evaluation_takes(gates, norm):
    """Gates of a token sum to 1 in both, or in neither; what would not is refused."""
    fields = {"hidden_size": 8, "expert_size": 4, "num_experts": 4, "norm": norm}
    fields["rounding"] = {"to": "nearest", "gates": gates, "tile": 4, "min_mean_tiles": 1}
    sums = norm != "none"
    if gates != "top_k" and (gates == "rounded") != sums:
        with pytest.raises(
            ValueError, match=f"router.rounding.gates={gates}: the gates of a token"
        ):
            layer_config(**fields)
        return
    layer = MoE(layer_config(**fields))
    torch.nn.init.normal_(layer.router.weight)
    x = torch.randn(64, 8)
    totals = {}
    for training in (True, False):
        seen = []

        def look(_layer, _logits, gating, routing, seen=seen):
            seen.append(routing)
            return gating, routing

        layer.train(training).routing_hook = look
        layer(x)
        gates_T = torch.zeros(64).index_add(0, seen[0].token_R.long(), seen[0].gates_R)
        totals[training] = gates_T[gates_T > 0]
    assert ((totals[False] - 1).abs() < 1e-5).all() == sums
    if gates == "rounded":
        assert ((totals[True] - 1).abs() < 1e-5).all()
    elif not sums:
        assert totals[True].max() < 1 + 1e-5 and totals[True].mean() < 0.99
