"""The router's kernels on a GPU against the plain torch reference, at the sizes people use.

Selection without a bias compares float32 logits, so experts must agree to the last one, also with a
float64 reference. Distinct (E, K) are kept few: every one is a compilation.
"""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common import launch as launch_module
from moe.kernels.common.gating import NORMS, SCORES
from moe.kernels.common.row_tiles import tile_schedule
from moe.kernels.routing import gating_kernels
from moe.kernels.routing.routing_metadata import routing_metadata
from moe.kernels.routing.topk_gating import topk_gating, topk_routing
from moe.kernels.tiers import hopper_missing, pick_gating
from moe.rules.rounding import Rounding, dropped_pairs, round_tokens

pytestmark = pytest.mark.gpu
CUDA = "cuda"
TOKENS = [1, 7, 4096, 8191, 8192, 65537, 70000]
EXPERTS = [
    (1, 1), (3, 2), (8, 2), (60, 4), (64, 8), (128, 8), (160, 6), (256, 16), (512, 10), (1024, 2),
    (2048, 8), (4096, 8),
]  # fmt: skip


def special_rows(z):
    """Every kind of difficult row at the head."""
    z[0], z[1], z[2] = float("nan"), float("-inf"), 1.0
    z[3, :2] = float("inf")
    z[4, ::2] = float("-inf")
    z[5] = torch.where(torch.arange(z.shape[1], device=z.device) % 2 == 0, -0.0, 0.0)
    z[6, 0] = float("nan")
    return z


def poison():
    """Fill what the allocator will hand out next with NaN, so that unwritten output shows."""
    for size in (1 << 10, 1 << 16, 1 << 22, 1 << 27):
        blocks = [torch.full((size // 4,), float("nan"), device=CUDA) for _ in range(8)]
        del blocks


def same(a, b, atol=2e-6, prob=1e-4):
    for name in ("expert_TK", "counts_E", "nonfinite"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    torch.testing.assert_close(a.gate_TK, b.gate_TK, rtol=3e-6, atol=atol)
    torch.testing.assert_close(a.lse_T, b.lse_T, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(a.prob_sum_E, b.prob_sum_E, rtol=prob, atol=1e-5)


def compare(z, k, kernels="triton", **form):
    """Kernels against the reference on the same GPU: outputs, metadata, gradient."""
    results = []
    for backend in ("reference", kernels):
        poison()
        leaf = z.clone().requires_grad_()
        gating, meta = topk_routing(leaf, k, backend=backend, **form)
        draw = torch.Generator(CUDA).manual_seed(1)
        weights = [
            torch.randn(x.shape, generator=draw, device=CUDA)
            for x in (gating.gate_TK, gating.lse_T, gating.prob_sum_E)
        ]
        usable = gating.lse_T.detach().abs() < 1e30
        loss = (gating.gate_TK * weights[0]).sum() + (gating.prob_sum_E * weights[2]).sum()
        loss = loss + (gating.lse_T * usable * weights[1]).sum()
        loss.backward()
        results.append((gating, meta, leaf.grad))
    (a, am, ag), (b, bm, bg) = results
    same(a, b)
    for name, x, y in zip(am._fields, am, bm):
        assert torch.equal(x, y), name
    torch.testing.assert_close(ag, bg, rtol=2e-4, atol=2e-5)
    return b, bm


@pytest.mark.parametrize(("E", "k"), EXPERTS)
def test_experts(E, k):
    z = torch.randn(513, E, device=CUDA)
    if E >= 8:
        special_rows(z)
    gating, _ = compare(z, k)
    wide = topk_gating(z[7:].double(), k, backend="reference")
    assert torch.equal(gating.expert_TK[7:], wide.expert_TK)
    torch.testing.assert_close(gating.gate_TK[7:], wide.gate_TK.float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize(("E", "k"), [(8, 2), (128, 8)])
def test_tokens(T, E, k):
    compare(torch.randn(T, E, device=CUDA), k)


HOPPER = {  # T, E, k and the form
    "plain": (65536, 128, 8, {}),
    "odd number of tokens": (8219, 128, 6, {}),
    "64 experts": (16411, 64, 8, {"norm": "none", "scale": 2.5}),
    "256 experts": (5000, 256, 4, {"norm": "softmax_topk"}),
    "padded experts": (11001, 96, 2, {}),
    "200 experts": (8200, 200, 7, {}),
    "256 experts of 8": (5001, 256, 8, {"score": "sigmoid"}),
    "3 of 128": (8192, 128, 3, {}),
    "sigmoid": (9000, 128, 8, {"score": "sigmoid"}),
    "identity": (9000, 128, 8, {"score": "identity", "norm": "none"}),
    "valid": (9001, 128, 8, {"score": "sqrtsoftplus", "valid_T": True}),
}


@pytest.mark.parametrize("logits", ["random", "special", "ties", "equal", "skewed", "strided"])
@pytest.mark.parametrize("case", HOPPER)
def test_on_hopper(case, logits):
    """The kernels of `moe.kernels.hopper.gating`, and that they are taken."""
    T, E, k, form = HOPPER[case]
    if logits not in ("random", "skewed") and case not in ("plain", "valid", "sigmoid"):
        pytest.skip("one kernel of each kind is enough")
    z = torch.randn(T, E + 20, device=CUDA)[:, :E]
    if logits == "ties":
        z = (z * 4).round() / 4
    if logits == "equal":
        z = torch.zeros_like(z)
    if logits == "skewed":
        z += 6 * torch.randn(E, device=CUDA)
    if logits != "strided":
        z = z.contiguous()
    if logits == "special":
        special_rows(z)
        z[400:420] *= 1e30
        z[500] = 3e38
    if "valid_T" in form:
        valid = torch.rand(T, device=CUDA) > 0.3
        z = z.masked_fill(~valid[:, None], float("nan")) if logits == "special" else z
        form = {**form, "valid_T": valid}
    available = torch.cuda.get_device_capability(z.device)[0] == 9 and hopper_missing() is None
    assert (pick_gating("auto", z, k, False) == "hopper") == available
    if not available:
        pytest.skip("needs a Hopper GPU")
    compare(z, k, "auto", **form)
    again = topk_routing(z, k, **form), topk_routing(z, k, **form)
    for first, second in zip(*((*gating, *meta) for gating, meta in again), strict=True):
        assert torch.equal(first, second)
    alone = topk_gating(z, k, **form)
    for first, second in zip(alone, again[0][0], strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_selection_bias_on_hopper(score):
    z = torch.randn(10000, 128, device=CUDA)
    bias = torch.randn(128, device=CUDA) * 0.1
    bias[3], bias[5] = float("-inf"), float("nan")
    form = {"score": score, "bias_E": bias, "norm": "none"}
    auto, right = topk_gating(z, 8, **form), topk_gating(z, 8, backend="reference", **form)
    # scores are rounded differently: a pair of equal biased scores may swap
    assert (auto.expert_TK != right.expert_TK).sum() <= 4
    torch.testing.assert_close(auto.counts_E, right.counts_E, atol=4, rtol=0)
    torch.testing.assert_close(auto.prob_sum_E, right.prob_sum_E, rtol=1e-4, atol=1e-5)
    same = (auto.expert_TK == right.expert_TK).all(dim=1)
    torch.testing.assert_close(auto.gate_TK[same], right.gate_TK[same], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("T", [300, 5000])
def test_no_tokens_and_padding(T):
    z = torch.randn(T, 128, device=CUDA)
    valid = torch.rand(T, device=CUDA) > 0.3
    z[~valid] = float("nan")
    gating, meta = compare(z, 8, valid_T=valid)
    assert meta.offsets_E1[-1] == 8 * valid.sum()
    assert (gating.expert_TK[~valid] == -1).all()
    empty = torch.empty(0, 128, device=CUDA, requires_grad=True)
    none, meta = topk_routing(empty, 8)
    assert meta.offsets_E1.tolist() == [0] * 129
    (none.gate_TK.sum() + none.prob_sum_E.sum()).backward()
    assert empty.grad.shape == (0, 128)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("E", "k"), [(4, 4), (4, 2), (8, 2), (3, 2), (2, 2), (2, 1), (16, 4)])
@pytest.mark.parametrize("T", [7, 96, 192, 400])
@pytest.mark.parametrize("masked", [False, True])
def test_few_experts_and_tokens(T, E, k, masked):
    """Tiles that are not full, rows that are not valid, as few experts as threads share."""
    valid = torch.rand(T, device=CUDA) > 0.3 if masked else None
    compare(torch.randn(T, E, device=CUDA), k, valid_T=valid)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("norm", NORMS)
def test_forms(score, norm):
    if (score, norm) == ("identity", "topk_sum"):
        z = torch.rand(300, 16, device=CUDA) + 0.1  # a denominator that is not near zero
    else:
        z = special_rows(torch.randn(300, 16, device=CUDA))
    compare(z, 3, score=score, norm=norm, scale=1.5)


@pytest.mark.parametrize(("score", "norm"), [("softmax", "none"), ("sqrtsoftplus", "topk_sum")])
def test_forms_in_two_stages(score, norm):
    compare(special_rows(torch.randn(300, 128, device=CUDA)), 8, score=score, norm=norm, scale=1.5)


@pytest.mark.parametrize(
    "form",
    [
        {"score": "sigmoid"},
        {"score": "softmax"},
        {"score": "sigmoid", "norm": "none"},
        {"score": "sigmoid", "groups": 8, "groups_kept": 4},
        {"score": "sigmoid", "groups": 8, "groups_kept": 3, "group_top": 1},
    ],
)
def test_bias_and_groups(form):
    # scores and biases on coarse grids: two keys are equal, or far apart beside rounding
    z = torch.randint(-40, 40, (3000, 256), device=CUDA) / 8
    bias = torch.randint(0, 2, (256,), device=CUDA) * 0.5
    compare(z, 8, bias_E=bias, **form)


@pytest.mark.parametrize("E", [64, 2048])
def test_ties_and_near_ties(E):
    z = torch.zeros(64, E, device=CUDA)
    step = torch.randperm(E, device=CUDA).float()
    z[1] = step % 3
    z[2] = 1 + step * 2**-23
    z[3] = -1 - step * 2**-22
    z[4] = step * 1e-45
    z[5, ::7] = 5.0
    z[6:20] = torch.randn(14, E, device=CUDA).bfloat16().float()  # bf16 makes ties at the cut
    z[20:] = torch.randn(44, E, device=CUDA) * 1e9
    for k in (2, 8):
        gating, _ = compare(z, k)
        wide = topk_gating(z.double(), k, backend="reference")
        assert torch.equal(gating.expert_TK, wide.expert_TK)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "shifted", "bfloat16"])
def test_layouts(layout):
    z = torch.randn(4096, 132, device=CUDA)
    z = {
        "transposed": torch.randn(128, 4096, device=CUDA).t(),
        "sliced": z[:, 1:129],
        "shifted": torch.randn(4096 * 128 + 1, device=CUDA)[1:].view(4096, 128),
        "bfloat16": z[:, :128].bfloat16(),
    }[layout]
    got = topk_gating(z, 8)
    same(topk_gating(z.contiguous().float(), 8, backend="reference"), got)


@pytest.mark.parametrize("plan", [{"exact": 1}, {"sub": 1}, {"sub": 2}, {"sub": 4, "each": 3}])
def test_plans(plan, monkeypatch):
    monkeypatch.setattr(gating_kernels, "forced_plan", plan)
    compare(special_rows(torch.randn(5001, 128, device=CUDA)), 8)


def test_repeats_are_bit_equal():
    z = torch.randn(65537, 128, device=CUDA)

    def run():
        leaf = z.clone().requires_grad_()
        gating, meta = topk_routing(leaf, 8)
        (gating.gate_TK.square().sum() + gating.prob_sum_E.square().sum()).backward()
        return (*gating, *meta, leaf.grad)

    first = run()
    for _ in range(5):
        poison()
        for x, y in zip(first, run()):
            assert torch.equal(x, y)


LAST_SORTS = [(513, 8, 2), (1024, 8, 2), (2048, 8, 2), (3000, 2, 1), (1365, 3, 3), (512, 24, 7)]


@pytest.mark.parametrize(("T", "E", "k"), LAST_SORTS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_last_program_sorts(T, E, k, masked):
    assert gating_kernels.gating_plan(T, E, k, 1, 1, True).last_sorts
    z = special_rows(torch.randn(T, E, device=CUDA))
    valid = torch.arange(T, device=CUDA) % 5 > 1 if masked else None
    compare(z, k, valid_T=valid)
    gating, meta = topk_routing(z, k, valid_T=valid)
    first = (*gating, *meta)
    for _ in range(200):
        gating, meta = topk_routing(z, k, valid_T=valid)
        for x, y in zip(first, (*gating, *meta)):
            assert torch.equal(x, y)


@pytest.mark.parametrize("set_aside", [True, False])
def test_calls_on_other_streams_and_in_graphs_do_not_meet(set_aside, monkeypatch):
    """Launches that count their finished programs, several at a time; with counters set aside for
    graphs and with one that the graph clears."""
    zs = [special_rows(torch.randn(T, 8, device=CUDA)) for T in (1024, 2048, 600)]

    def route():
        out = []
        for z in zs:
            gating, meta = topk_routing(z, 2)
            out += [*gating, *meta]
        return out

    want = route()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with monkeypatch.context() as patch:
        if not set_aside:
            patch.setattr(launch_module, "_unused_counters", {})
        with torch.cuda.graph(graph, stream=streams[0]):
            captured = route()
    results = [captured]
    for _ in range(100):
        with torch.cuda.stream(streams[1]):
            graph.replay()
        for stream in (streams[0], streams[2]):
            with torch.cuda.stream(stream):
                results.append(route())
    torch.cuda.synchronize()
    for got in results:
        for x, y in zip(want, got):
            assert torch.equal(x, y)


# ------------------------------------------------------------------------------- routing metadata


@pytest.mark.parametrize("S", [0, 1, 31, 4096, 4097, 70000, 1_000_003])
@pytest.mark.parametrize("E", [1, 8, 128, 384, 1500, 4096])
def test_metadata(S, E):
    poison()
    ids = torch.randint(-1, E, (S,), device=CUDA, dtype=torch.int32)
    token = torch.arange(S, device=CUDA, dtype=torch.int32) // 3
    for rows in (S, S + 1000):
        a = routing_metadata(ids, E, token_S=token, max_rows=rows, backend="reference")
        b = routing_metadata(ids, E, token_S=token, max_rows=rows)
        for name, x, y in zip(a._fields, a, b):
            assert torch.equal(x, y), name
    for tile in (1, 64, 128):
        a = tile_schedule(b.offsets_E1, tile, S, backend="reference")
        b_tiles = tile_schedule(b.offsets_E1, tile, S)
        for name, x, y in zip(a._fields[:4], a, b_tiles):
            assert torch.equal(x, y), name


def equal(x, y) -> bool:
    """Of tensors, and of the numbers beside them (`RowTiles.rows`)."""
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("S", [31, 700, 4097, 70000])
@pytest.mark.parametrize("E", [2, 3, 4])
def test_metadata_of_few_experts(S, E):
    """By one program and by several; expert ids as they come, and all the same."""
    ids = torch.randint(-1, E, (S,), device=CUDA, dtype=torch.int32)
    for chosen in (ids, torch.full_like(ids, E - 1)):
        poison()
        a = routing_metadata(chosen, E, slots_per_token=1, backend="reference")
        b = routing_metadata(chosen, E, slots_per_token=1)
        for name, x, y in zip(a._fields, a, b):
            assert torch.equal(x, y), name
        a = tile_schedule(b.offsets_E1, 64, S, backend="reference")
        for name, x, y in zip(a._fields, a, tile_schedule(b.offsets_E1, 64, S)):
            assert equal(x, y), name


# --------------------------------------------------------------------------------- token rounding


def compare_rounding(z, k, config, score="softmax", norm="topk_sum", valid=None):
    uniform = torch.rand(z.shape[1], device=CUDA)
    results = []
    gating = topk_gating(z, k, score=score, norm=norm, valid_T=valid)  # one choice, one lse
    for backend in ("reference", "triton"):
        poison()
        leaf = z.clone().requires_grad_()
        gate = gating.gate_TK.clone().requires_grad_()
        given = gating._replace(gate_TK=gate)
        form = {"score": score, "norm": norm, "uniform_E": uniform, "backend": backend}
        r = round_tokens(leaf, given, config, **form)
        weight = torch.randn(r.gates_S.shape, generator=torch.Generator(CUDA).manual_seed(1),
                             device=CUDA)  # fmt: skip
        (r.gates_S * weight).sum().backward()
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        results.append((r, grad, gate.grad))
    (a, da, ga), (b, db, gb) = results
    for name in ("expert_S", "row_S", "token_R", "slot_R", "offsets_E1", "slot_offsets_T1"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    torch.testing.assert_close(a.gates_S, b.gates_S, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(da, db, rtol=1e-4, atol=1e-5)
    if ga is not None:
        assert torch.equal(ga, gb)
    return b, gating


@pytest.mark.parametrize(("T", "E", "k"), [(16384, 128, 2), (16384, 256, 4), (70000, 64, 4)])
@pytest.mark.parametrize("variant", ["nearest", "up", "down", "systematic", "balanced"])
def test_rounding(T, E, k, variant):
    z = torch.randn(T, E, device=CUDA) + torch.randn(E, device=CUDA) * 0.5
    r, gating = compare_rounding(z, k, Rounding(to=variant))
    assert (r.counts_E % 128 == 0).all()
    assert ((r.counts_E > 0) == (gating.counts_E > 0)).all()
    dropped = dropped_pairs(r, gating.expert_TK)
    assert dropped.sum() == (gating.counts_E - r.counts_E).clamp(min=0).sum()


@pytest.mark.parametrize("renorm", ["tc", "tr", "none"])
@pytest.mark.parametrize(
    ("score", "norm"), [("softmax", "none"), ("sigmoid", "topk_sum"), ("identity", "softmax_topk")]
)
def test_rounding_forms(renorm, score, norm):
    z = torch.randn(3000, 60, device=CUDA) + torch.randn(60, device=CUDA)
    valid = torch.rand(3000, device=CUDA) > 0.2
    config = Rounding(
        to="nearest",
        gates={"tc": "top_k", "tr": "rounded"}.get(renorm, renorm),
        tile=64,
        protect_top1=True,
        max_tiles=1.5,
        min_mean_tiles=0.0,
    )
    r, _ = compare_rounding(z, 3, config, score, norm, valid)
    rows = r.token_R[: int(r.offsets_E1[-1])].long()
    assert valid[rows].all()


@pytest.mark.parametrize(("E", "k"), [(2, 1), (2, 2), (3, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("T", [96, 1500])
@pytest.mark.parametrize("masked", [False, True])
def test_rounding_of_few_experts(T, E, k, masked):
    z = torch.randn(T, E, device=CUDA)
    valid = torch.rand(T, device=CUDA) > 0.3 if masked else None
    for variant in ("nearest", "systematic"):
        config = Rounding(to=variant, tile=32, min_mean_tiles=0.0)
        compare_rounding(z, k, config, valid=valid)


def test_rounding_of_ties():
    z = torch.randn(8192, 16, device=CUDA).bfloat16().float().round()
    compare_rounding(z, 2, Rounding(to="up", tile=256, min_mean_tiles=0.0))


def test_rounding_that_drops_many():
    z = torch.randn(40000, 16, device=CUDA)
    z[:, :2] += 3.0  # more candidates than a program holds
    for variant in ("nearest", "score"):
        compare_rounding(z, 2, Rounding(to=variant, max_tiles=1.25))
        compare_rounding(z.bfloat16().float(), 2, Rounding(to=variant, max_tiles=1.25))


# ------------------------------------------------------------------------ syncs, graphs, compiler


def whole_router(z, config):
    """All of a training step's router: gating, metadata, rounding, tiles."""
    gating, meta = topk_routing(z, 8)
    rounded = round_tokens(z, gating, config)
    tiles = tile_schedule(rounded.offsets_E1, 128, rounded.token_R.numel())
    loss = rounded.gates_S.square().sum() + gating.lse_T.sum() + gating.prob_sum_E.square().sum()
    return loss, (gating.expert_TK, *meta, rounded.expert_S, rounded.row_S, *tiles)


def test_no_host_sync():
    config = Rounding(to="systematic")
    z = torch.randn(8192, 32, device=CUDA, requires_grad=True)
    whole_router(z, config)[0].backward()  # compile first
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, _ = whole_router(z, config)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph():
    config = Rounding(to="nearest")
    fixed = torch.randn(8192, 32, device=CUDA, requires_grad=True)

    def step():
        loss, ints = whole_router(fixed, config)
        (grad,) = torch.autograd.grad(loss, fixed)
        return loss, grad, ints

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, grad, ints = step()
    for _ in range(2):
        with torch.no_grad():
            fixed.copy_(torch.randn_like(fixed))
        graph.replay()
        want_loss, want_grad, want_ints = step()
        torch.testing.assert_close(loss, want_loss, rtol=0, atol=0)
        assert torch.equal(grad, want_grad)
        for x, y in zip(ints, want_ints):
            assert equal(x, y)


def test_compiles_as_one_graph():
    config = Rounding(to="nearest")
    z = torch.randn(8192, 32, device=CUDA)
    plain, compiled = z.clone().requires_grad_(), z.clone().requires_grad_()
    want, ints = whole_router(plain, config)
    run = torch.compile(whole_router, fullgraph=True)
    got, got_ints = run(compiled, config)
    for x, y in zip(ints, got_ints):
        assert equal(x, y)
    torch.testing.assert_close(got, want)
    want.backward()
    got.backward()
    torch.testing.assert_close(compiled.grad, plain.grad)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_device_than_the_current():
    z = torch.randn(100, 64, device="cuda:1")
    same(topk_gating(z, 4, backend="reference"), topk_gating(z, 4))
