"""The Hopper kernels on a GPU of compute capability 9.x, against float32.

Every configuration that tuning may choose is forced in turn; elsewhere the first one runs.
"""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

from moe.experts import experts
from moe.kernels.common import tuning
from moe.kernels.common.tuning import Config
from moe.kernels.hopper import gating, selftest
from moe.kernels.hopper.configs import CONFIGS
from moe.kernels.products import row_tiles
from moe.kernels.routing.topk_gating import topk_routing as topk_routing_of
from moe.kernels.tiers import hopper_missing, pick_products
from moe.routing import Routing
from tests.moe.kernels.grouped_cases import (
    BOUND,
    check,
    compare,
    counted_routing,
    nan_memory,
    offsets_of,
    operands,
    ragged_routing,
    random,
    relative_error,
    run_experts,
    topk_routing,
    weights,
    with_gates,
)


def _cannot() -> str | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "needs a GPU of compute capability 9.x"
    return hopper_missing()


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_cannot() is not None, reason=str(_cannot())),
]
BF16 = torch.bfloat16
_compare = functools.partial(compare, backend="hopper")


@pytest.fixture(autouse=True)
def _no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_TUNE", "0")


@pytest.mark.parametrize(
    ("T", "D", "N", "E", "K"),
    [
        (2048, 1536, 256, 128, 8),
        (2048, 4096, 256, 256, 16),
        (2048, 2048, 1024, 64, 8),
        (2048, 2048, 768, 128, 8),
        (1024, 4096, 14336, 4, 2),
        (512, 7168, 2048, 16, 8),
    ],
)
def test_model_shapes(T: int, D: int, N: int, E: int, K: int):
    """The shapes of known models with fewer tokens, the last two with fewer experts."""
    _compare(topk_routing(T, E, K, device="cuda"), D, N)


@pytest.mark.parametrize("T", [1, 2, 7, 31, 64, 65, 127, 128, 129, 130, 8191, 8192])
def test_numbers_of_tokens(T: int):
    _compare(topk_routing(T, 4, 2, holes=True, device="cuda"), 264, 40)


@pytest.mark.parametrize(("D", "N"), [(8, 8), (24, 40), (40, 264), (264, 104), (304, 8), (72, 520)])
def test_widths(D: int, N: int):
    """Any multiple of 8: columns past the end of a tile are zeros and are not stored."""
    _compare(topk_routing(173, 3, 2, holes=True, device="cuda"), D, N)


def test_many_tokens():
    _compare(topk_routing(70_000, 16, 2, device="cuda"), 64, 64)


@pytest.mark.parametrize("counts", [[5, 0, 9, 3, 0, 2], [0, 0, 500], [0, 0], [0, 1000, 3]], ids=str)
def test_empty_experts(counts: list[int]):
    _compare(counted_routing(counts, device="cuda"), 264, 40)


def test_no_expert_at_all():
    routing = Routing.from_topk(
        torch.full((9, 2), -1, device="cuda"), torch.ones(9, 2, device="cuda"), 3
    )
    _compare(routing, 264, 40)


def test_ragged_tokens_and_recomputation():
    routing = ragged_routing(700, 6, device="cuda")
    _compare(routing, 264, 40)
    _compare(routing, 264, 40, save="x")


@pytest.mark.parametrize(
    "choice",
    [(kernel, config) for kernel, listed in CONFIGS.items() for config in listed],
    ids=lambda choice: f"{choice[0]} {choice[1]}",
)
def test_every_configuration(choice: tuple[str, Config]):
    """What tuning may choose must be right, with the tails of tiles, and equal bit for bit."""
    kernel, config = choice
    with tuning.forced(**{f"hopper {kernel}": config}):
        for T, D, N in ((3000, 1600, 328), (900, 584, 80)):
            routing = topk_routing(T, 8, 2, holes=True, device="cuda")
            _compare(routing, D, N)
            values = operands(routing, D, N)
            dout = random(T, D, dtype=BF16, device="cuda")
            first, again = (run_experts(values, routing, dout, backend="hopper") for _ in range(2))
            assert all(torch.equal(first[name], again[name]) for name in first)


def test_c16_untuned_configurations_are_checked_before_they_run(monkeypatch):
    """Without tuning, and those of the backward too."""
    monkeypatch.setattr(selftest, "_errors", {})
    monkeypatch.setattr(tuning, "_picked", {})
    routing = topk_routing(3000, 16, 4, device="cuda")
    values = operands(routing, 264, 136)
    dout = random(3000, 264, dtype=BF16, device="cuda")
    run_experts(values, routing, dout, backend="hopper")
    checked = {kernel.removeprefix("hopper ") for kernel, *_ in selftest._errors}
    assert checked == {"up", "rows", "down_backward", "outer_left", "outer_right"}
    assert max(selftest._errors.values()) < 1e-2
    count = len(selftest._errors)
    run_experts(values, routing, dout, backend="hopper")
    assert len(selftest._errors) == count  # nothing is checked again


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus", "identity"])
def test_the_router_is_checked_before_it_runs(monkeypatch, score, biased):
    monkeypatch.setattr(selftest, "_errors", {})
    logits = torch.randn(1 << 14, 64, device="cuda")
    bias = torch.randn(64, device="cuda") if biased else None
    topk_routing_of(logits, 8, score=score, norm="none", bias_E=bias)
    (error,) = selftest._errors.values()
    assert error < 1e-4, error


@pytest.mark.parametrize("experts", [64, 100, 256])
def test_a_wrong_router_is_refused(monkeypatch, experts):
    monkeypatch.setattr(selftest, "_errors", {})
    monkeypatch.setattr(gating, "NORM_CODE", {**gating.NORM_CODE, "topk_sum": 1})
    with pytest.raises(RuntimeError, match=r"hopper gating .*use kernels='triton'"):
        topk_routing_of(torch.randn(1 << 15, experts, device="cuda"), 4)


def test_ten_repeats_have_the_same_bits():
    routing = topk_routing(3000, 16, 4, device="cuda")
    values = operands(routing, 264, 136)
    dout = random(3000, 264, dtype=BF16, device="cuda")
    first = run_experts(values, routing, dout, backend="hopper")
    for _ in range(9):
        again = run_experts(values, routing, dout, backend="hopper")
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_rows_of_other_experts_are_left_alone():
    """A store of a ragged tile ends at the expert's last row, not at the tile's."""
    from moe.kernels.hopper.rows import rows_hopper

    counts = [3, 130, 0, 1, 250]
    offsets = offsets_of(counts, device="cuda")
    a, w = random(512, 72, dtype=BF16, device="cuda"), random(5, 264, 72, dtype=BF16, device="cuda")
    tiles = row_tiles(offsets, 512, BF16, "hopper")
    with nan_memory():
        out = rows_hopper(a, w, tiles, transposed=True)
    for e, (start, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        want = a[start:end].float() @ w[e].float().t()
        assert relative_error(out[start:end], want) < BOUND[BF16], e
    assert out[sum(counts) :].isnan().all()


def test_poisoned_rows_stay_with_their_expert():
    """NaN in one expert's tokens reaches neither another's gradients nor an empty expert's."""
    expert_T1 = torch.arange(300, device="cuda")[:, None] % 3
    routing = Routing.from_topk(expert_T1, torch.ones(300, 1, device="cuda"), 4)
    values = operands(routing, 264, 72)
    with torch.no_grad():
        values["x"][0::3] = float("nan")
    dout = random(300, 264, dtype=BF16, device="cuda")
    got = run_experts(values, routing, dout, backend="hopper")
    assert got["w1"][0].isnan().any()
    for name in ("w1", "w2"):
        assert got[name][1:3].isfinite().all(), name
        assert not got[name][3].any(), name
    assert got["out"][1::3].isfinite().all()


@pytest.mark.parametrize("kind", ["transposed x", "flat weight", "transposed weight", "sum"])
def test_operands_of_any_stride(kind: str):
    """Views that TMA cannot address give the numbers of contiguous copies."""
    routing = topk_routing(200, 4, 2, device="cuda")
    values = operands(routing, 264, 40)
    dout = random(200, 264, dtype=BF16, device="cuda")
    views = {k: t.detach() for k, t in values.items()}
    if kind == "transposed x":
        views["x"] = views["x"].T.contiguous().T
        dout = dout.T.contiguous().T
    elif kind == "flat weight":
        flat = torch.empty(views["w1"].numel() + 1, dtype=BF16, device="cuda")
        views["w1"] = flat[1:].view_as(views["w1"]).copy_(views["w1"])
    elif kind == "transposed weight":
        views["w2"] = views["w2"].mT.contiguous().mT
    else:
        dout = torch.ones((), dtype=BF16, device="cuda").expand(200, 264)
    views = {k: t.requires_grad_() for k, t in views.items()}
    got = run_experts(views, routing, dout, backend="hopper")
    want = run_experts(values, routing, dout.contiguous(), backend="hopper")
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_main_gradients_and_frozen_operands():
    routing = topk_routing(600, 4, 2, device="cuda")
    values = operands(routing, 264, 40)
    dout = random(600, 264, dtype=BF16, device="cuda")
    want = run_experts(values, routing, dout, backend="hopper")
    mains = [torch.ones_like(values[k], dtype=torch.float32).detach() for k in ("w1", "w2")]
    out = experts(
        values["x"], values["w1"], values["w2"], routing, main_grads=tuple(mains), backend="hopper"
    )
    out.backward(dout)
    check("main w1", mains[0] - 1, want["w1"], BOUND[BF16])
    check("main w2", mains[1] - 1, want["w2"], BOUND[BF16])
    for free in (("x",), ("w1",), ("w2",), ("gates",), ("x", "w2"), ("w1", "gates")):
        frozen = {k: t.detach().requires_grad_(k in free) for k, t in values.items()}
        out = experts(
            frozen["x"], frozen["w1"], frozen["w2"], with_gates(routing, frozen["gates"]),
            backend="hopper",
        )  # fmt: skip
        out.backward(dout)
        for name, t in frozen.items():
            if name in free:
                check(f"{free} {name}", t.grad, want[name], 4e-3)
            else:
                assert t.grad is None, (free, name)


def test_nothing_is_read_back():
    expert_TK = torch.rand(500, 8, device="cuda").argsort(1)[:, :2].int()
    gates = torch.rand(500, 2, device="cuda", requires_grad=True)
    w1, w2, *_ = weights(8, 264, 40, dtype=BF16, device="cuda")
    w1.requires_grad_()
    x = random(500, 264, dtype=BF16, device="cuda").requires_grad_()

    def step():
        routing = Routing.from_topk(expert_TK, gates, 8)
        experts(x, w1, w2, routing, backend="hopper").sum().backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_compiled_graph():
    """auto is resolved while tracing, too."""
    T = 600  # 150 rows an expert: auto takes these kernels
    expert_TK = torch.rand(T, 8, device="cuda").argsort(1)[:, :2].int()
    routing = Routing.from_topk(expert_TK, torch.rand(T, 2, device="cuda"), 8)
    values = operands(routing, 264, 40)
    dout = random(T, 264, dtype=BF16, device="cuda")

    def layer(x, w1, w2, gates):
        made = Routing.from_topk(expert_TK, gates.view(T, 2), 8)
        return experts(x, w1, w2, made) * 1.0

    want = run_experts(values, routing, dout, backend="hopper")
    compiled = torch.compile(layer, fullgraph=True)
    out = compiled(*values.values())
    grads = torch.autograd.grad(out, list(values.values()), dout)
    for name, got in (("out", out), *zip(values, grads)):
        check(name, got, want[name], 4e-3)


def test_cuda_graph_replays_equal_eager_calls():
    routing = topk_routing(256, 8, 2, device="cuda")
    values = operands(routing, 264, 40)
    dout = random(256, 264, dtype=BF16, device="cuda")
    want = run_experts(values, routing, dout, backend="hopper")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_experts(values, routing, dout, backend="hopper")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run_experts(values, routing, dout, backend="hopper")
    for t in got.values():
        t.fill_(float("nan"))
    graph.replay()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_auto_takes_them_where_they_serve():
    _, w2, *_ = weights(4, 64, 64, dtype=BF16, device="cuda")
    x = random(400, 64, dtype=BF16, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pick_products("auto", x, w2, "swiglu", 256) == "hopper"
        assert pick_products("auto", x, w2, "swiglu", 255) == "triton"
        assert pick_products("auto", x.float(), w2.float(), "swiglu", 400) == "triton"
        assert pick_products("auto", x, w2, "geglu", 400) == "triton"
