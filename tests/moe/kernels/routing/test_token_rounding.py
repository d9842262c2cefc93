"""Token rounding: targets and choice against plain Python, gradients, and the kernels."""

import pytest
import torch

from moe.kernels.common.backend import INTERPRET
from moe.kernels.routing import token_rounding as module
from moe.kernels.routing.token_rounding import (
    CAP_UNIT,
    RENORMS,
    VARIANTS,
    rank_key_ref,
    target_counts_ref,
    token_rounding,
    weights_ref,
)
from moe.kernels.routing.topk_gating import topk_gating

triton_only = pytest.mark.skipif(
    not INTERPRET, reason="kernels on a CPU need Triton's interpreter; tests/gpu has the others"
)
BACKENDS = ["reference", pytest.param("triton", marks=triton_only)]

FORMS = [
    ("softmax", "topk_sum"),
    ("softmax", "none"),
    ("sigmoid", "topk_sum"),
    ("sigmoid", "none"),
    ("sqrtsoftplus", "topk_sum"),
    ("identity", "softmax_topk"),
]
PLAIN = {
    "score": "softmax",
    "norm": "topk_sum",
    "scale": 1.0,
    "variant": "nearest",
    "tile": 4,
    "min_tiles": 0,
    "cap": 0,
    "protect_top1": False,
    "renorm": "tc",
}


def rounded(z, k, backend="reference", valid=None, uniform=None, slots=None, **change):
    call = {**PLAIN, **change}
    form = {name: call[name] for name in ("score", "norm", "scale")}
    g = topk_gating(z, k, valid_T=valid, backend="reference", **form)
    T, E = z.shape
    slots = T * E if slots is None else slots
    args = (z, g.expert_TK, g.gate_TK, g.lse_T, g.counts_E, uniform)
    return g, token_rounding(*args, slots=slots, backend=backend, **call)


def pairs_of(routing):
    """{(token, expert): gate} of all slots."""
    bounds = routing.slot_offsets_T1.tolist()
    ids, gates = routing.expert_S.tolist(), routing.gate_S.tolist()
    return {
        (t, ids[s]): gates[s]
        for t in range(len(bounds) - 1)
        for s in range(bounds[t], bounds[t + 1])
    }


# ---------------------------------------------------------------------------------------- targets

F = [130, 200, 10, 300, 64, 448]


@pytest.mark.parametrize(
    ("variant", "want"),
    [
        ("up", [256, 256, 128, 384, 128, 512]),
        ("down", [128, 128, 0, 256, 0, 384]),
        ("nearest", [128, 256, 0, 256, 128, 512]),
        ("nearest_even", [128, 256, 0, 256, 0, 512]),
        ("balanced", [128, 256, 0, 256, 128, 384]),
    ],
)
def test_worked_targets(variant, want):
    got = target_counts_ref(torch.tensor(F), torch.tensor(4096), 1, variant, 128)
    assert got.tolist() == want


def test_systematic_keeps_the_total_and_the_mean():
    f, tokens = torch.tensor(F), torch.tensor(4096)
    total = torch.zeros(6)
    draws = 128
    for i in range(draws):  # every residue of the tile once: the mean is then exact
        u = torch.full((6,), (i + 0.5) / draws)
        got = target_counts_ref(f, tokens, 1, "systematic", 128, uniform_E=u)
        assert got.sum().item() == 1152
        total += got
    assert torch.equal(total / draws, f.float())


def test_stochastic_mean():
    f, tokens = torch.tensor(F), torch.tensor(4096)
    total = torch.zeros(6)
    for i in range(128):
        u = torch.full((6,), (i + 0.5) / 128)
        total += target_counts_ref(f, tokens, 1, "stochastic", 128, uniform_E=u)
    assert torch.equal(total / 128, f.float())


def test_uniform_next_to_one_stays_below_the_tile():
    u = torch.full((1,), 1 - 2**-24)
    for tile in (100, 257, 1000):
        got = target_counts_ref(torch.tensor([tile - 1]), torch.tensor(9999), 1, "stochastic", tile,
                                uniform_E=u)  # fmt: skip
        assert got.item() == 0  # floor(u tile) is tile - 1 at most, which is not below the rest


def test_more_than_all_tokens_is_rounded_down():
    got = target_counts_ref(torch.tensor([100, 30]), torch.tensor(110), 1, "up", 64)
    assert got.tolist() == [64, 64]


def test_balanced_gives_the_tile_to_one_that_can_take_it():
    # the largest remainder cannot grow past the number of tokens
    got = target_counts_ref(torch.tensor([100, 30]), torch.tensor(110), 1, "balanced", 64)
    assert got.tolist() == [64, 64]


def test_least_most_and_top1():
    f, tokens = torch.tensor([3, 0, 130, 70]), torch.tensor(400)
    args = (f, tokens, 1, "nearest", 64)
    assert target_counts_ref(*args).tolist() == [0, 0, 128, 64]
    assert target_counts_ref(*args, min_tiles=1).tolist() == [64, 0, 128, 64]
    assert target_counts_ref(*args, min_tiles=2).tolist() == [128, 0, 128, 128]
    # cap: 64 * ceil(1.25 * 400 / (4 * 64)) = 128; with half the tokens 64
    cap = int(1.25 * CAP_UNIT)
    assert target_counts_ref(torch.tensor([390, 0, 0, 0]), tokens, 1, "down", 64, cap=cap)[0] == 128
    few = target_counts_ref(torch.tensor([190, 0, 0, 0]), torch.tensor(200), 1, "down", 64, cap=cap)
    assert few[0] == 64
    top1 = torch.tensor([3, 0, 129, 10])
    assert target_counts_ref(*args, top1_E=top1).tolist() == [64, 0, 192, 64]
    # no whole tile holds them: protection goes before the tile
    got = target_counts_ref(torch.tensor([70]), torch.tensor(100), 1, "down", 64,
                            top1_E=torch.tensor([70]))  # fmt: skip
    assert got.tolist() == [70]


@triton_only
@pytest.mark.parametrize("variant", VARIANTS)
def test_targets_kernel(variant):
    g = torch.Generator().manual_seed(VARIANTS.index(variant))
    for E, tile, tokens, k in ((6, 8, 60, 2), (33, 5, 90, 3)):
        f = torch.randint(0, 2 * tokens * k // E, (E,), generator=g).clamp(max=tokens)
        f[0] += -f.sum() % k  # the kernel takes the number of tokens from the counts
        counts = f.int()
        tokens = torch.tensor(int(f.sum()) // k)
        top1 = torch.minimum(torch.randint(0, 9, (E,), generator=g), f).int()
        u, gain = torch.rand(E, generator=g), torch.randn(E, generator=g)
        for least, cap, protect in ((0, 0, False), (1, 1300, False), (2, 0, True)):
            call = module._Call(0, "softmax", "none", 1.0, variant, tile, least, cap, protect, "tc")
            uniform = u if variant in ("stochastic", "systematic") else None
            got = module._targets(call, counts, k, top1, uniform, gain)
            want = target_counts_ref(
                f, tokens, k, variant, tile, least, cap, top1 if protect else None, u, gain
            )
            assert got.tolist() == want.tolist(), (E, least, cap, protect)


# ----------------------------------------------------------------------------------------- choice


def by_sorting(z, g, target, protect, score):
    """{expert: tokens} by sorting every expert's tokens."""
    key = rank_key_ref(z, g.lse_T, score)
    T, E = z.shape
    ids = g.expert_TK.tolist()
    taken = {}
    for e in range(E):
        order = sorted(
            (t for t in range(T) if ids[t][0] >= 0),
            key=lambda t: (not (protect and ids[t][0] == e), e not in ids[t], -float(key[t, e]), t),
        )
        taken[e] = set(order[: int(target[e])])
    return taken


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("protect", [False, True])
def test_choice(variant, protect, backend):
    T, E, k = 31, 5, 2
    z = torch.randn(T, E) + torch.randn(E)
    z[::2] = z[::2].round()  # ties between tokens of one expert
    valid = torch.arange(T) % 5 != 3
    g, r = rounded(z, k, backend, valid, torch.rand(E), variant=variant, protect_top1=protect)
    taken = by_sorting(z, g, r.target_E, protect, "softmax")
    assert set(pairs_of(r)) == {(t, e) for e in taken for t in taken[e]}
    assert r.target_E.sum() == r.offsets_E1[-1] == r.slot_offsets_T1[-1]
    if variant not in ("score", "stochastic", "systematic"):
        # the formula's targets, from the counts before rounding
        top1 = torch.bincount(g.expert_TK[valid][:, 0], minlength=E) if protect else None
        want = target_counts_ref(g.counts_E, valid.sum(), k, variant, 4, top1_E=top1)
        assert r.target_E.tolist() == want.tolist()


def test_score_variant_compares_the_marginal_tiles():
    # expert 0: one token over the tile; it leaves if the three that would join weigh less
    z = torch.full((8, 2), -9.0)
    z[:5, 0], z[5:, 1] = 3.0, 3.0
    z[5:, 0] = 2.9  # strong runners-up
    _, r = rounded(z, 1, variant="score")
    assert r.target_E.tolist()[0] == 8
    z[5:, 0] = -9.0
    _, r = rounded(z, 1, variant="score")
    assert r.target_E.tolist()[0] == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_scores_decide_not_their_bf16_rounding(backend):
    # probabilities so close that bf16 sees one value: the best must still join
    z = torch.zeros(40, 2)
    z[:5, 0] = 5.0
    z[5:, 1] = 1.0
    z[5:, 0] = torch.arange(35) * 1e-5
    _, r = rounded(z, 1, backend, variant="up")
    joined = {t for t, e in pairs_of(r) if e == 0} - set(range(5))
    assert joined == {37, 38, 39}


# ------------------------------------------------------------------------------------------ gates


@pytest.mark.parametrize(
    ("score", "norm", "backend"),
    [(*form, "reference") for form in FORMS]
    + [pytest.param("sigmoid", "topk_sum", "triton", marks=triton_only)],
)
def test_gates(score, norm, backend):
    T, E, k, scale = 30, 5, 2, 1.5
    z = torch.randn(T, E) + torch.randn(E)
    w = weights_ref(z, score, norm)
    got = {}
    for renorm in RENORMS:
        form = {"score": score, "norm": norm, "scale": scale, "renorm": renorm}
        g, r = rounded(z, k, backend, variant="nearest", **form)
        got[renorm] = pairs_of(r)
    plain = {
        (t, int(e)): float(v)
        for t in range(T)
        for e, v in zip(g.expert_TK[t], g.gate_TK[t])
    }  # fmt: skip
    kept = [p for p in got["tc"] if p in plain]
    added = [p for p in got["tc"] if p not in plain]
    assert added and len(kept) < len(plain)  # both kinds happened
    for p in kept:
        assert got["tc"][p] == plain[p]  # to the bit: a kept pair keeps its evaluation gate
    for t, e in added:
        assert got["tc"][t, e] == pytest.approx(float(w[t, e]) * scale, rel=1e-5)
    for t, e in got["none"]:
        assert got["none"][t, e] == pytest.approx(float(w[t, e]) * scale, rel=1e-5)
    for t in range(T):
        gates = [v for (u, _), v in got["tr"].items() if u == t]
        assert sum(gates) == pytest.approx(scale if gates else 0, rel=1e-5)


def test_weights_are_the_probabilities_of_the_balance_loss():
    z = torch.randn(9, 6)
    for score, norm in FORMS:
        if norm == "none" and score != "softmax":
            continue
        total = topk_gating(z, 2, score=score, norm=norm).prob_sum_E
        torch.testing.assert_close(weights_ref(z, score, norm).sum(0), total)


@pytest.mark.parametrize("renorm", RENORMS)
@pytest.mark.parametrize(("score", "norm"), FORMS)
def test_gradcheck(score, norm, renorm):
    z = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)

    def gates(z):
        return rounded(z, 2, score=score, norm=norm, renorm=renorm, scale=1.5)[1].gate_S

    assert torch.autograd.gradcheck(gates, (z,))


# ---------------------------------------------------------------------------------------- kernels


def compare(z, k, **change):
    out = []
    for backend in ("reference", "triton"):
        leaf = z.clone().requires_grad_()
        _, r = rounded(leaf, k, backend, **change)
        weight = torch.randn(r.gate_S.shape, generator=torch.Generator().manual_seed(1))
        (r.gate_S * weight).sum().backward()
        out.append((r, leaf.grad))
    (a, da), (b, db) = out
    for name, x, y in zip(a._fields[1:], a[1:], b[1:]):
        assert torch.equal(x, y), name
    torch.testing.assert_close(a.gate_S, b.gate_S, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(da, db, rtol=1e-4, atol=1e-5)
    return b


@triton_only
@pytest.mark.parametrize("renorm", RENORMS)
@pytest.mark.parametrize(("score", "norm"), FORMS)
def test_kernel_forms(score, norm, renorm):
    z = torch.randn(21, 6) + torch.randn(6)
    form = {"score": score, "norm": norm, "renorm": renorm, "scale": 0.5}
    compare(z, 3, valid=torch.arange(21) % 6 > 0, **form)


@triton_only
@pytest.mark.parametrize(("T", "E", "k", "tile"), [(9, 34, 3, 3), (65, 2, 1, 16), (5, 3, 3, 2)])
def test_kernel_sizes(T, E, k, tile):
    compare(torch.randn(T, E), k, tile=tile, variant="up", min_tiles=2)


@triton_only
@pytest.mark.parametrize("in_registers", [1, 32, 128])
@pytest.mark.parametrize("variant", ["up", "down", "score"])
def test_keys_that_do_not_fit_into_registers(monkeypatch, in_registers, variant):
    # ties inside one expert, over the blocks of keys that are read again for every step
    monkeypatch.setattr(module, "_KEYS_IN_REGISTERS", in_registers)
    z = (torch.randn(300, 3) * 2).round() / 2
    compare(z, 1, tile=64, variant=variant)
    compare(torch.randn(300, 3), 1, tile=64, variant=variant)


@triton_only
@pytest.mark.parametrize("variant", ["nearest", "up", "down", "score"])
@pytest.mark.parametrize("coarse", [False, True])
def test_few_of_many_groups(variant, coarse):
    """Fewer changes than groups of tokens, with ties between groups, and crowded groups."""
    z = torch.randn(1000, 4)
    z[:40] += 3.0  # the best tokens are neighbours
    z = (z * 2).round() / 2 if coarse else z
    valid = torch.rand(1000) < 0.9
    compare(z, 2, tile=16, variant=variant, valid=valid)
    compare(z, 2, tile=16, variant=variant, valid=valid, score="sigmoid", protect_top1=True)


@triton_only
def test_more_experts_leave_the_targets_to_another_launch(monkeypatch):
    monkeypatch.setattr(module, "_COLUMNS", 4)
    compare(torch.randn(100, 7), 2, tile=8, variant="nearest")


@triton_only
def test_capped_experts_lose_many(monkeypatch):
    z = torch.randn(400, 4)
    z[:, 0] += 3.0
    compare(z, 2, tile=16, variant="nearest", cap=CAP_UNIT * 5 // 4)
    monkeypatch.setattr(module, "_KEYS_IN_REGISTERS", 64)
    compare(z, 2, tile=16, variant="nearest", cap=CAP_UNIT * 5 // 4)


@triton_only
def test_masked_and_infinite_logits():
    z = torch.randn(24, 4)
    z[0, 1], z[1, 2], z[2] = float("inf"), float("nan"), -float("inf")
    z[:, 3] = -float("inf")  # a masked expert is chosen by nobody and gets nobody
    z[3:, :3] += torch.randn(3)
    r = compare(z, 1, variant="down")
    assert r.target_E[3] == 0
    assert r.gate_S.isfinite().all()


@triton_only
def test_operator():
    z = torch.randn(8, 4)
    g = topk_gating(z, 2)
    fixed = (32, "softmax", "topk_sum", 1.0, "nearest", 4, 1, 0, False, "tc")
    args = (z, g.expert_TK, g.gate_TK, g.lse_T, g.counts_E, None, *fixed)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tessera.token_rounding.default, args, test_utils=checks)


@triton_only
def test_double_backward_is_an_error():
    z = torch.randn(16, 4, requires_grad=True)
    gate = rounded(z, 2, "triton")[1].gate_S
    with pytest.raises(RuntimeError, match="create_graph=True is not supported"):
        torch.autograd.grad(gate.square().sum(), z, create_graph=True)
