"""Router gating: definitions, order of ties, non-finite policy, gradients, and the kernels.

On a CPU the kernels run in Triton's interpreter, in float32: that proves their indexing, masks and
order, not what the compiled code does with NaN or how fast it is (tests/gpu does).
"""

import math

import pytest
import torch

from moe.kernels.common.backend import INTERPRET
from moe.kernels.common.gating import NORMS, SCORES, topk_gating_ref
from moe.kernels.routing import gating_kernels
from moe.kernels.routing.topk_gating import topk_gating, topk_routing

INF, NAN = math.inf, math.nan
triton_only = pytest.mark.skipif(
    not INTERPRET, reason="kernels on a CPU need Triton's interpreter; tests/gpu has the others"
)


def oracle(row, k, score="softmax", norm="topk_sum", scale=1.0, bias=None):
    """Experts and gates of one row of finite logits, in Python floats, by sorting."""
    top = max(row)
    total = sum(math.exp(z - top) for z in row)
    softmax = [math.exp(z - top) / total for z in row]
    scores = {
        "softmax": softmax,
        "sigmoid": [1 / (1 + math.exp(-z)) for z in row],
        "sqrtsoftplus": [math.sqrt(math.log1p(math.exp(z))) for z in row],
        "identity": row,
    }[score]
    keys = row if bias is None else [s + b for s, b in zip(scores, bias)]
    order = sorted(range(len(row)), key=lambda e: (-keys[e], e))[:k]
    if norm == "softmax_topk":
        top = max(row[e] for e in order)
        gates = [math.exp(row[e] - top) for e in order]
        gates = [g / sum(gates) for g in gates]
    else:
        gates = [scores[e] for e in order]
        if norm == "topk_sum":
            gates = [g / (sum(gates) + 1e-20) for g in gates]
    return order, [g * scale for g in gates]


def same(a, b, atol=2e-6):
    """Two gatings agree: integers exactly, floats to a few units of float32."""
    for name in ("expert_TK", "counts_E", "nonfinite"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("gate_TK", "lse_T", "prob_sum_E"):
        torch.testing.assert_close(
            getattr(a, name), getattr(b, name), rtol=3e-6, atol=atol, msg=lambda m, n=name: n + m
        )


# ------------------------------------------------------------------------------------ definitions


@pytest.mark.parametrize(
    ("score", "norm", "scale", "gates"),
    [
        ("softmax", "none", 1.0, (0.5601, 0.2060)),
        ("softmax", "topk_sum", 1.0, (0.7311, 0.2689)),
        ("softmax", "softmax_topk", 1.0, (0.7311, 0.2689)),
        ("sigmoid", "topk_sum", 1.0, (0.5464, 0.4536)),
        ("sigmoid", "topk_sum", 2.5, (1.3661, 1.1339)),
        ("sqrtsoftplus", "topk_sum", 1.0, (0.5600, 0.4400)),
        ("identity", "none", 1.0, (2.0, 1.0)),
    ],
)
def test_worked_values(score, norm, scale, gates):
    z = torch.tensor([[2.0, 1.0, 1.0, -1.0]])
    out = topk_gating(z, 2, score=score, norm=norm, scale=scale)
    assert out.expert_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(out.gate_TK, torch.tensor([gates]), atol=6e-5, rtol=0)
    torch.testing.assert_close(out.lse_T, torch.tensor([2.5797]), atol=6e-5, rtol=0)
    assert out.counts_E.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("biased", [False, True])
def test_against_sorting(score, norm, biased):
    T, E, k = 40, 13, 4
    z = torch.randn(T, E, dtype=torch.float64) * 2
    z[::3] = (z[::3] * 2).round() / 2  # ties
    bias = torch.randn(E, dtype=torch.float64) * 0.5 if biased else None
    out = topk_gating(z, k, score=score, norm=norm, scale=1.5, bias_E=bias)
    for t in range(T):
        ids, gates = oracle(z[t].tolist(), k, score, norm, 1.5, bias.tolist() if biased else None)
        assert out.expert_TK[t].tolist() == ids
        torch.testing.assert_close(out.gate_TK[t], torch.tensor(gates, dtype=torch.float64))
    torch.testing.assert_close(out.lse_T, torch.logsumexp(z, 1))
    assert torch.equal(out.counts_E.long(), torch.bincount(out.expert_TK.flatten(), minlength=E))
    if score in ("softmax", "identity"):
        prob = torch.softmax(z, 1)
    else:
        prob = torch.sigmoid(z) if score == "sigmoid" else torch.log1p(z.exp()).sqrt()
        prob = prob / prob.sum(1, keepdim=True)
    torch.testing.assert_close(out.prob_sum_E, prob.sum(0))


@pytest.mark.parametrize("E", [1, 2, 3, 60, 96, 160, 384, 1024])
@pytest.mark.parametrize("k", [1, 2, 6, 8, 0])
def test_sizes(E, k):
    k = k or E
    if k > E:
        pytest.skip("k > E is refused, see test_refused")
    z = torch.randn(9, E)
    out = topk_gating(z, k)
    wide = topk_gating(z.double(), k)
    assert torch.equal(out.expert_TK, wide.expert_TK)
    torch.testing.assert_close(out.gate_TK, wide.gate_TK.float(), atol=2e-6, rtol=0)
    if E == 1:
        assert torch.equal(out.gate_TK, torch.ones(9, 1))
    if k == E:
        plain = torch.softmax(z, 1).sort(1, descending=True).values
        torch.testing.assert_close(out.gate_TK, plain, atol=2e-6, rtol=0)


def test_softmax_then_topk_is_topk_then_softmax():
    z = torch.randn(50, 16, dtype=torch.float64)
    a = topk_gating(z, 3, norm="topk_sum")
    b = topk_gating(z, 3, norm="softmax_topk")
    p = torch.softmax(z, 1).gather(1, a.expert_TK.long())
    torch.testing.assert_close(a.gate_TK, b.gate_TK)
    torch.testing.assert_close(a.gate_TK, p / p.sum(1, keepdim=True))


# ------------------------------------------------------------------------ ties, masks, non-finite


def test_ties_go_to_the_lowest_index():
    z = torch.tensor([[3.0, 2.0, 3.0, 2.0, 1.0, 1.0]])
    assert topk_gating(z, 2).expert_TK.tolist() == [[0, 2]]
    assert topk_gating(z, 1).expert_TK.tolist() == [[0]]
    zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert topk_gating(zeros, 3).expert_TK.tolist() == [[0, 1, 2]]
    pair = torch.tensor([[1.0010, 1.0020]])
    assert topk_gating(pair, 1).expert_TK.tolist() == [[1]]  # a tie in bf16, none in float32


def test_saturated_scores_keep_the_order_of_the_logits():
    z = torch.tensor([[20.0, 30.0, 40.0, 25.0]])  # sigmoid is 1.0 in float32 for all
    assert topk_gating(z, 2, score="sigmoid").expert_TK.tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("row", "ids", "gates", "counted"),
    [
        ([NAN, 1.0, 0.0, -1.0], [1, 2], None, 1),
        ([INF, INF, 0.0], [0, 1], [0.5, 0.5], 1),
        ([-INF] * 4, [0, 1], [0.0, 0.0], 1),
        ([NAN] * 4, [0, 1], [0.0, 0.0], 1),
        ([1.0] * 4, [0, 1], [0.5, 0.5], 0),
        ([-INF, -INF, 2.0, -INF], [2, 0], [1.0, 0.0], 1),
        ([-INF, 1.0, 2.0, -INF], [2, 1], None, 0),
        ([3.4e38, -3.4e38, 0.0], [0, 2], [1.0, 0.0], 0),
    ],
)
@pytest.mark.parametrize("score", SCORES)
def test_nonfinite_rows(row, ids, gates, counted, score):
    out = topk_gating(torch.tensor([row, [0.0] * len(row)]), 2, score=score, norm="softmax_topk")
    assert out.expert_TK[0].tolist() == ids
    if gates is not None:
        assert out.gate_TK[0].tolist() == gates
    assert out.expert_TK[1].tolist() == [0, 1]
    assert out.nonfinite.item() == counted
    for value in (out.gate_TK, out.lse_T, out.prob_sum_E):
        assert not value.isnan().any()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("norm", NORMS)
def test_nonfinite_rows_have_finite_gradients(score, norm):
    z = torch.randn(6, 5)
    z[0], z[1], z[2, 0], z[3, :2] = NAN, -INF, NAN, INF
    z.requires_grad_()
    out = topk_gating(z, 2, score=score, norm=norm)
    (out.gate_TK[:, 0].sum() + out.lse_T.sum() + out.prob_sum_E[0]).backward()
    assert z.grad.isfinite().all()
    assert (z.grad[0] == 0).all() and z.grad[2, 0] == 0


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("norm", NORMS)
def test_large_logits_have_finite_gradients(score, norm):
    z = (torch.randn(4, 6) * torch.tensor([[200.0], [1e4], [1e30], [0.0]])).requires_grad_()
    with torch.no_grad():
        z[3] = 3e38
    out = topk_gating(z, 2, score=score, norm=norm)
    (out.gate_TK[:, 0].sum() + out.lse_T[:3].sum() + out.prob_sum_E[0]).backward()
    assert z.grad.isfinite().all()


def test_group_limit():
    c = torch.tensor([[0.9, 0.1, 0.8, 0.75, 0.7, 0.6, 0.05, 0.02]])
    two = topk_gating(c, 2, score="identity", groups=4, groups_kept=2, group_top=2)
    one = topk_gating(c, 2, score="identity", groups=4, groups_kept=2, group_top=1)
    assert two.expert_TK.tolist() == [[2, 3]]
    assert one.expert_TK.tolist() == [[0, 2]]


def test_group_limit_with_negative_keys():
    # masking other groups with 0 instead of -inf would let them win
    c = torch.tensor([[-1.0, -2.0, -9.0, -9.0]])
    out = topk_gating(c, 2, score="identity", groups=2, groups_kept=1, group_top=2)
    assert out.expert_TK.tolist() == [[0, 1]]
    bias = torch.tensor([-5.0, -5.0, -9.0, -9.0])
    out = topk_gating(c, 2, score="sigmoid", bias_E=bias, groups=2, groups_kept=1, group_top=1)
    assert out.expert_TK.tolist() == [[0, 1]]


def test_all_groups_kept_is_plain():
    z = torch.randn(30, 12)
    same(topk_gating(z, 3), topk_gating(z, 3, groups=4, groups_kept=4), atol=0)


def test_padding_changes_nothing():
    z = torch.randn(10, 6)
    valid = torch.rand(10) > 0.4
    padded = z.clone()
    padded[~valid] = NAN
    out = topk_gating(padded, 2, valid_T=valid)
    alone = topk_gating(z[valid], 2)
    assert torch.equal(out.expert_TK[valid], alone.expert_TK)
    assert torch.equal(out.counts_E, alone.counts_E)
    torch.testing.assert_close(out.prob_sum_E, alone.prob_sum_E)
    assert out.nonfinite.item() == 0
    assert (out.expert_TK[~valid] == -1).all()
    assert (out.gate_TK[~valid] == 0).all() and (out.lse_T[~valid] == 0).all()


def test_no_tokens():
    z = torch.empty(0, 6, requires_grad=True)
    out, meta = topk_routing(z, 2)
    assert out.expert_TK.shape == (0, 2) and out.expert_TK.dtype == torch.int32
    assert out.counts_E.tolist() == [0] * 6 and meta.offsets_E1.tolist() == [0] * 7
    (out.gate_TK.sum() + out.prob_sum_E.sum() + out.lse_T.sum()).backward()
    assert z.grad.shape == (0, 6)


# -------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("norm", NORMS)
def test_gradcheck(score, norm):
    z = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([True, True, False, True])
    bias = torch.randn(6, dtype=torch.float64)

    def run(z):
        out = topk_gating(z, 3, score=score, norm=norm, scale=1.5, bias_E=bias, valid_T=valid)
        return out.gate_TK, out.lse_T, out.prob_sum_E

    assert torch.autograd.gradcheck(run, (z,))


def test_gradient_formulas():
    z = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    d = torch.randn(7, 2, dtype=torch.float64)
    out = topk_gating(z, 2)
    (out.gate_TK * d).sum().backward()
    g = out.gate_TK.detach()
    inner = g * (d - (g * d).sum(1, keepdim=True))
    want = torch.zeros_like(z).scatter(1, out.expert_TK.long(), inner)
    torch.testing.assert_close(z.grad, want)

    z.grad = None
    (topk_gating(z, 2, norm="none").gate_TK * d).sum().backward()
    p = torch.softmax(z.detach(), 1)
    h = torch.zeros_like(p).scatter(1, out.expert_TK.long(), d)
    torch.testing.assert_close(z.grad, p * (h - (p * h).sum(1, keepdim=True)))


def test_renormalised_gates_ignore_a_constant_in_their_gradient():
    z = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    d = torch.randn(5, 3, dtype=torch.float64)
    (a,) = torch.autograd.grad((topk_gating(z, 3).gate_TK * d).sum(), z)
    (b,) = torch.autograd.grad((topk_gating(z, 3).gate_TK * (d + 7)).sum(), z)
    torch.testing.assert_close(a, b)


def test_bias_gets_no_gradient():
    bias = torch.randn(6, requires_grad=True)
    z = torch.randn(5, 6, requires_grad=True)
    out = topk_gating(z, 2, score="sigmoid", bias_E=bias)
    out.gate_TK.sum().backward()
    assert bias.grad is None


# --------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 9}, "k=9 .* 8 experts"),
        ({"score": "tanh"}, "score='tanh'"),
        ({"norm": "max"}, "norm='max'"),
        ({"scale": INF}, "scale=inf"),
        ({"groups": 3}, "groups=3"),
        ({"groups": 4, "groups_kept": 5}, "groups_kept=5"),
        ({"groups": 4, "groups_kept": 1, "k": 3}, "groups_kept=1 .* k=3"),
        ({"groups": 4, "groups_kept": 2, "group_top": 3}, "group_top=3"),
        ({"bias_E": torch.zeros(7)}, r"bias_E .*\(8,\)"),
        ({"valid_T": torch.ones(4)}, "valid_T"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"backend": "hopper"}, "backend='hopper'"),
    ],
)
def test_refused(change, message):
    args = {"k": 2, **change}
    k = args.pop("k")
    with pytest.raises(ValueError, match=message):
        topk_gating(torch.randn(4, 8), k, **args)


@pytest.mark.parametrize("z", [torch.zeros(4), torch.zeros(2, 2, dtype=torch.int32)])
def test_refused_logits(z):
    with pytest.raises(ValueError, match="logits_TE"):
        topk_gating(z, 1)


@triton_only
def test_what_kernels_do_not_take():
    with pytest.raises(ValueError, match="float64"):
        topk_gating(torch.zeros(2, 4, dtype=torch.float64), 1, backend="triton")
    with pytest.raises(ValueError, match="k=65"):
        topk_gating(torch.zeros(1, 100), 65, backend="triton")


# ---------------------------------------------------------------------------------------- kernels


def special_rows(z):
    """Put every kind of difficult row at the head."""
    E = z.shape[1]
    z[0], z[1], z[2] = NAN, -INF, 1.0
    z[3, :2] = INF
    z[4, ::2] = -INF
    z[5] = torch.where(torch.arange(E) % 2 == 0, -0.0, 0.0)
    z[6, 0] = NAN
    return z


def compare(z, k, **form):
    """Kernels against the reference: outputs, metadata and gradient."""
    results = []
    for backend in ("reference", "triton"):
        leaf = z.clone().requires_grad_()
        gating, meta = topk_routing(leaf, k, backend=backend, **form)
        weight = torch.Generator().manual_seed(1)
        loss = (gating.gate_TK * torch.randn(gating.gate_TK.shape, generator=weight)).sum()
        usable = gating.lse_T.detach().abs() < 1e30
        loss = loss + (gating.lse_T * usable * torch.randn(len(z), generator=weight)).sum()
        loss = loss + (gating.prob_sum_E * torch.randn(z.shape[1], generator=weight)).sum()
        loss.backward()
        results.append((gating, meta, leaf.grad))
    (a, am, ag), (b, bm, bg) = results
    same(a, b)
    for name, x, y in zip(am._fields, am, bm):
        assert torch.equal(x, y), name
    torch.testing.assert_close(ag, bg, rtol=1e-4, atol=1e-5)
    return b


@triton_only
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("norm", NORMS)
def test_kernel_forms(score, norm):
    compare(special_rows(torch.randn(8, 12)), 3, score=score, norm=norm, scale=1.5)


@triton_only
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("norm", NORMS)
def test_kernel_large_logits(score, norm):
    z = torch.randn(9, 24) * torch.tensor([1.0, 200, 1e4, 1e9, 1e30, 1, 1, 1, 1])[:, None]
    z[5] = 3e38
    compare(z, 3, score=score, norm=norm, valid_T=torch.arange(9) % 4 > 0)


@triton_only
@pytest.mark.parametrize(
    "form",
    [
        {"score": "sigmoid", "bias_E": torch.linspace(-0.5, 0.5, 24)},
        {"score": "softmax", "norm": "none", "bias_E": torch.linspace(0.5, -0.5, 24)},
        {"score": "sigmoid", "groups": 4, "groups_kept": 2},
        {"score": "sigmoid", "groups": 4, "groups_kept": 2, "bias_E": torch.linspace(-2, -9, 24)},
        {"groups": 3, "groups_kept": 2, "group_top": 3, "bias_E": torch.linspace(0.5, -0.5, 24)},
        {"valid_T": torch.arange(9) % 3 > 0},
    ],
)
def test_kernel_selection(form):
    compare(special_rows(torch.randn(9, 24)), 4, **form)


@triton_only
@pytest.mark.parametrize(
    ("T", "E", "k"), [(0, 8, 2), (1, 1, 1), (1, 2, 2), (3, 3, 3), (5, 60, 2), (70, 5, 1)]
)
def test_kernel_sizes(T, E, k):
    compare(torch.randn(T, E), k)


@triton_only
def test_several_programs(monkeypatch):
    monkeypatch.setattr(gating_kernels, "_ONE_PROGRAM_LOGITS", 0)
    monkeypatch.setattr(gating_kernels, "_ONE_PROGRAM_ROWS", 0)
    compare(special_rows(torch.randn(300, 6)), 2, valid_T=torch.arange(300) % 7 > 0)


@triton_only
@pytest.mark.parametrize(
    ("T", "E", "k", "masked"),
    [
        (513, 8, 2, False), (1000, 8, 2, True), (2048, 8, 2, False), (3000, 2, 1, True),
        (1999, 3, 2, False), (1365, 3, 3, True), (777, 5, 4, False), (600, 16, 6, True),
        (512, 16, 8, False), (1500, 12, 1, True), (512, 24, 7, False), (129, 64, 5, True),
    ],
)  # fmt: skip
def test_the_last_program_sorts(T, E, k, masked):
    assert gating_kernels.gating_plan(T, E, k, 1, 1, True).last_sorts == (E < 64)
    z = special_rows(torch.randn(T, E))
    compare(z, k, valid_T=torch.arange(T) % 5 > 1 if masked else None)


@triton_only
@pytest.mark.parametrize("small", [True, False])
def test_the_last_program_sorts_in_two_stages(small, monkeypatch):
    """With rows that the second stage leaves to the scan; and with more slots than one step."""
    monkeypatch.setattr(gating_kernels, "_RANKED_SLOTS", 1 << 10)
    monkeypatch.setattr(gating_kernels, "_LAST_PROGRAM_SLOTS", 1 << 20)
    gating_kernels._known_plan.cache_clear()
    T = 100 if small else 700
    assert gating_kernels.gating_plan(T, 64, 8, 1, 1, True).last_sorts
    compare(special_rows(torch.randn(T, 64)), 8, valid_T=torch.arange(T) % 5 > 1)
    gating_kernels._known_plan.cache_clear()


@triton_only
@pytest.mark.parametrize("first", [0, 17, 63])
def test_which_program_is_the_last_changes_nothing(first, monkeypatch):
    """Programs run in another order, `first` the first; the counter is zero again after them."""
    from triton.runtime.interpreter import interpreter_builder

    z, valid = special_rows(torch.randn(1024, 8)), torch.arange(1024) % 5 > 1
    count, begin = torch.zeros(1, dtype=torch.int32), interpreter_builder.set_grid_idx
    monkeypatch.setattr(gating_kernels, "counter", lambda device: count)
    want = topk_routing(z, 2, valid_T=valid, backend="triton")

    def begin_another(x, y, z):
        begin((first + 5 * x) % 64, y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", begin_another)
    got = topk_routing(z, 2, valid_T=valid, backend="triton")
    assert count.item() == 0
    for x, y in zip((*want[0], *want[1]), (*got[0], *got[1])):
        assert torch.equal(x, y)


@triton_only
def test_strided_logits():
    z = torch.randn(12, 20)
    out = topk_gating(z.t(), 3, backend="triton")
    same(out, topk_gating(z.t().contiguous(), 3, backend="reference"))
    out = topk_gating(z[:, 3:11], 3, backend="triton")
    same(out, topk_gating(z[:, 3:11].contiguous(), 3, backend="reference"))
    leaf = z.clone().requires_grad_()
    topk_gating(leaf.t(), 3, norm="none", backend="triton").gate_TK.sum().backward()
    other = z.clone().requires_grad_()
    topk_gating(other.t(), 3, norm="none", backend="reference").gate_TK.sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


@triton_only
def test_repeats_are_bit_equal():
    z = torch.randn(5, 64)
    a, b = (topk_gating(z, 4, backend="triton") for _ in range(2))
    for x, y in zip(a, b):
        assert torch.equal(x, y)


class TestTwoStage:
    """The selection over buckets; the interpreter lets a test count how often it is not certain."""

    pytestmark = triton_only

    @pytest.fixture
    def scans(self, monkeypatch):
        """Counts the tiles that were scanned again."""
        count = []
        exact = gating_kernels._exact_tile

        def counting(*args, **kwargs):
            count.append(1)
            return exact(*args, **kwargs)

        monkeypatch.setattr(gating_kernels, "_exact_tile", counting)
        return count

    @pytest.mark.parametrize(("E", "k"), [(64, 2), (64, 8), (96, 3), (160, 6)])
    def test_random_rows_need_no_second_scan(self, scans, E, k):
        assert gating_kernels.two_stage_sizes(E, k)
        compare(torch.randn(3, E), k)
        assert not scans

    def test_sixteen(self, scans):
        compare(torch.randn(2, 128), 12, norm="none")
        assert not scans

    def test_all_winners_in_one_bucket(self, scans):
        # columns 4 … 7 are one bucket, so are 12 … 15; in either all four are among the best eight
        z = torch.randn(3, 64) * 0.1
        z[0, 4:8] = torch.tensor([5.0, 8.0, 7.0, 6.0])
        z[0, 12:16] = torch.tensor([9.0, 4.0, 3.0, 10.0])
        z[1, 60:] = torch.tensor([5.0, 8.0, 7.0, 6.0])
        z[2] = torch.linspace(0, 1, 64)
        out = compare(z, 8)
        assert out.expert_TK[0].tolist() == [15, 12, 5, 6, 7, 4, 13, 14]
        assert not scans

    def test_ties_over_buckets(self, scans):
        z = torch.zeros(4, 64)
        z[1, ::5] = 1.0
        z[2, 63] = z[2, 0] = 2.0
        z[3] = -z[1]
        out = compare(z, 4)
        assert out.expert_TK[0].tolist() == list(range(4))
        assert scans

    def test_values_that_differ_in_the_last_bits(self):
        # closer than the keys of either stage can tell
        step = torch.randperm(64).float()
        compare(torch.stack([1 + step * 2**-23, -1 - step * 2**-22, step * 1e-45]), 4)

    def test_two_neighbours_closer_than_a_key(self, scans):
        # the order inside the best eight is mended without a second scan
        z = torch.linspace(-1, 1, 64).repeat(2, 1)
        z[0, 7], z[0, 40] = 3.0, 3.0 + 2**-21
        z[1, 40], z[1, 7] = 3.0, 3.0 + 2**-21
        out = compare(z, 8)
        assert out.expert_TK[:, :2].tolist() == [[40, 7], [7, 40]]
        assert not scans

    def test_cut_between_neighbours_closer_than_a_key(self, scans):
        # one bucket holds both; only the second stage can see that it cannot tell
        z = torch.linspace(-1, 1, 64).repeat(2, 1)
        z[:, 4:8] = torch.tensor([3.0, 3.0 + 2**-21, 5.0, -1.0])
        out = compare(z, 2)
        assert out.expert_TK.tolist() == [[6, 5]] * 2
        assert scans

    def test_cut_between_buckets_closer_than_a_key(self, scans):
        z = torch.linspace(-1, 1, 64).repeat(2, 1)
        z[:, 4], z[:, 36], z[:, 60] = 3.0, 3.0 + 2**-21, 5.0
        out = compare(z, 2)
        assert out.expert_TK.tolist() == [[60, 36]] * 2
        assert scans

    def test_difficult_rows(self):
        compare(special_rows(torch.randn(8, 64)), 3, valid_T=torch.arange(8) != 2)

    def test_overflowing_logits(self):
        z = torch.randn(3, 64)
        z[0] *= 1e9
        z[1] = 3.0e38
        compare(z, 2)

    @pytest.mark.parametrize("score", ["softmax", "sigmoid"])
    def test_bias(self, scans, score):
        compare(torch.randn(3, 64), 3, score=score, bias_E=torch.randn(64) * 0.3)
        assert not scans

    def test_thousands_of_experts(self, scans):
        compare(torch.randn(1, 2048), 2)
        assert not scans


# ------------------------------------------------------------------------------ operator contract


@triton_only
def test_operator():
    ids, gate, lse = topk_gating(torch.randn(5, 6), 2, backend="triton")[:3]
    z = torch.randn(5, 6)
    checks = ("test_schema", "test_faketensor")
    args = (z, 2, "softmax", "topk_sum", 1.0, None, 1, 1, 2, None, True, "triton")
    torch.library.opcheck(torch.ops.tessera.topk_gating.default, args, test_utils=checks)
    given = (torch.randn(5, 2), None, torch.randn(6), 6)
    for back in (
        (z, ids, gate, lse, *given, "softmax", "none", 1.0),
        (None, ids, gate, lse, given[0], None, None, 6, "softmax", "topk_sum", 1.0),
    ):
        op = torch.ops.tessera.topk_gating_backward.default
        torch.library.opcheck(op, back, test_utils=checks)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=triton_only)])
def test_compiles_as_one_graph(backend):
    def step(z):
        gating, meta = topk_routing(z, 2, score="sigmoid", backend=backend)
        loss = gating.gate_TK.square().sum() + gating.lse_T.sum() + gating.prob_sum_E.square().sum()
        return loss, gating.expert_TK, meta.row_S

    z = torch.randn(6, 5)
    plain, compiled = z.clone().requires_grad_(), z.clone().requires_grad_()
    want, ids, rows = step(plain)
    got, got_ids, got_rows = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(ids, got_ids) and torch.equal(rows, got_rows)
    torch.testing.assert_close(got, want)
    want.backward()
    got.backward()
    torch.testing.assert_close(compiled.grad, plain.grad)


@triton_only
def test_double_backward_is_an_error():
    z = torch.randn(4, 6, requires_grad=True)
    gate = topk_gating(z, 2, backend="triton").gate_TK
    with pytest.raises(RuntimeError, match="create_graph=True is not supported"):
        torch.autograd.grad(gate.square().sum(), z, create_graph=True)


@triton_only
def test_dispatch_modes_see_an_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []
    with Names():
        topk_gating(torch.randn(3, 4), 2, backend="triton")
    assert any("tessera.topk_gating" in name for name in seen)


def test_reference_needs_no_kernels():
    z = torch.ones(2, 3)
    same(topk_gating_ref(z, 2), topk_gating(z, 2, backend="reference"))
