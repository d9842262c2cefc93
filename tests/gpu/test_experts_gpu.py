"""The experts' kernels on a GPU, against float32 (float64 for float32 operands).

Variants of kernels are kept few: every one is a compilation. Tuning is off, so the first
configuration of each table runs, except where a test forces another.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from moe.experts import experts
from moe.kernels.common import tuning
from moe.kernels.common.activations import ACTIVATIONS
from moe.kernels.common.tuning import Config
from moe.kernels.grouped import configs
from moe.kernels.grouped.float8_rows import from_float8, to_float8
from moe.routing import Routing
from tests.moe.kernels.grouped_cases import (
    BOUND,
    check,
    compare,
    counted_routing,
    nan_memory,
    operands,
    ragged_routing,
    random,
    relative_error,
    run_experts,
    topk_routing,
    weights,
    with_gates,
)

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_TUNE", "0")


_compare = functools.partial(compare, backend="triton")


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_h_in_float8(backend: str):
    """The output stays exact, gradients move by the error of float8; auto takes Hopper's."""
    routing = topk_routing(900, 4, 2, device="cuda")
    values = operands(routing, 264, 136)
    dout = random(900, 264, dtype=BF16, device="cuda")
    with nan_memory():
        exact = run_experts(values, routing, dout, backend=backend)
        got = run_experts(values, routing, dout, backend=backend, save="fp8_h")
    wide = {k: t.detach().float().requires_grad_() for k, t in values.items()}
    want = run_experts(wide, routing, dout, backend="reference")
    assert torch.equal(got["out"], exact["out"])
    for name in values:
        error = relative_error(got[name], want[name])
        assert BOUND[BF16] < error < 5e-2, (name, error)


@pytest.mark.parametrize("width", [40, 512, 5000])
def test_float8_rows_equal_the_reference(width: int):
    x = random(300, width, dtype=BF16, device="cuda")
    x[0] = 0
    (q, scale), (want, want_scale) = to_float8(x, backend="triton"), to_float8(x)
    torch.testing.assert_close(scale, want_scale, rtol=3e-7, atol=0)
    same = q.view(torch.uint8) == want.view(torch.uint8)
    assert same.float().mean() > 0.999  # the GPU's quotients may differ in their last bit
    back = from_float8(q, scale, BF16, backend="triton")
    assert torch.equal(back, from_float8(q, scale, BF16))


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


@pytest.mark.parametrize("T", [1, 2, 7, 31, 64, 65, 127, 130, 8191, 8192])
def test_numbers_of_tokens(T: int):
    _compare(topk_routing(T, 4, 2, holes=True, device="cuda"), 264, 40)


@pytest.mark.parametrize(("D", "N"), [(8, 8), (24, 40), (40, 264), (100, 24), (264, 100), (300, 8)])
def test_widths(D: int, N: int):
    """Multiples of 16 bytes go through TMA, the others (100, 300) through pointers."""
    _compare(topk_routing(173, 3, 2, holes=True, device="cuda"), D, N)


def test_many_tokens():
    _compare(topk_routing(70_000, 16, 2, device="cuda"), 64, 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("D", "N"), [(264, 72), (41, 23)])
def test_other_dtypes(dtype: torch.dtype, D: int, N: int):
    _compare(topk_routing(300, 4, 2, holes=True, device="cuda"), D, N, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation: str):
    routing = topk_routing(400, 4, 2, holes=True, device="cuda")
    _compare(routing, 136, 72, activation=activation, bias=True)


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
    _compare(routing, 264, 40, bias=True)
    _compare(routing, 264, 40, save="x")


KERNELS = ("up", "rows", "down_backward", "outer")


@pytest.mark.parametrize(
    "choice",
    sorted({(k, c) for k in KERNELS for c in configs.candidates(k, BF16, 128)}),
    ids=lambda choice: f"{choice[0]} {choice[1]}",
)
def test_every_configuration(choice: tuple[str, Config]):
    """What tuning may choose must be right on this card, in bf16 and with the tails of tiles."""
    kernel, config = choice
    with tuning.forced(**{kernel: config}):
        _compare(topk_routing(3000, 8, 2, holes=True, device="cuda"), 584, 328)


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
    got = run_experts(views, routing, dout, backend="triton")
    want = run_experts(values, routing, dout.contiguous(), backend="triton")
    for name in want:
        check(name, got[name], want[name], 4e-3)


def test_main_gradients():
    routing = topk_routing(600, 4, 2, device="cuda")
    values = operands(routing, 264, 40)
    dout = random(600, 264, dtype=BF16, device="cuda")
    want = run_experts(values, routing, dout, backend="triton")
    mains = [torch.ones_like(values[k], dtype=torch.float32).detach() for k in ("w1", "w2")]
    out = experts(
        values["x"], values["w1"], values["w2"], routing, main_grads=tuple(mains), backend="triton"
    )
    out.backward(dout)
    assert values["w1"].grad is None
    assert values["w2"].grad is None
    check("main w1", mains[0] - 1, want["w1"], BOUND[BF16])
    check("main w2", mains[1] - 1, want["w2"], BOUND[BF16])


def test_frozen_subsets_get_none_and_change_nothing():
    routing = topk_routing(300, 4, 2, device="cuda")
    values = operands(routing, 264, 40)
    dout = random(300, 264, dtype=BF16, device="cuda")
    want = run_experts(values, routing, dout, backend="triton")
    for free in itertools.chain.from_iterable(
        itertools.combinations(values, n) for n in range(1, 4)
    ):
        frozen = {k: t.detach().requires_grad_(k in free) for k, t in values.items()}
        out = experts(
            frozen["x"], frozen["w1"], frozen["w2"], with_gates(routing, frozen["gates"]),
            backend="triton",
        )  # fmt: skip
        out.backward(dout)
        for name, t in frozen.items():
            if name in free:
                check(f"{free} {name}", t.grad, want[name], 0.0 if len(free) > 1 else 4e-3)
            else:
                assert t.grad is None, (free, name)


def test_ten_repeats_have_the_same_bits():
    routing = topk_routing(3000, 16, 4, device="cuda")
    values = operands(routing, 264, 136)
    dout = random(3000, 264, dtype=BF16, device="cuda")
    first = run_experts(values, routing, dout, backend="triton")
    for _ in range(9):
        again = run_experts(values, routing, dout, backend="triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_nothing_is_read_back():
    expert_TK = torch.rand(500, 8, device="cuda").argsort(1)[:, :2].int()
    gates = torch.rand(500, 2, device="cuda", requires_grad=True)
    w1, w2, *_ = weights(8, 264, 40, dtype=BF16, device="cuda")
    w1.requires_grad_()
    x = random(500, 264, dtype=BF16, device="cuda").requires_grad_()

    def step():
        routing = Routing.from_topk(expert_TK, gates, 8)
        experts(x, w1, w2, routing, backend="triton").sum().backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_compiled_graph():
    expert_TK = torch.rand(300, 8, device="cuda").argsort(1)[:, :2].int()
    routing = Routing.from_topk(expert_TK, torch.rand(300, 2, device="cuda"), 8)
    values = operands(routing, 264, 40)
    dout = random(300, 264, dtype=BF16, device="cuda")

    def layer(x, w1, w2, gates):
        made = Routing.from_topk(expert_TK, gates.view(300, 2), 8)
        return experts(x, w1, w2, made, backend="triton") * 1.0

    want = run_experts(values, routing, dout, backend="triton")
    compiled = torch.compile(layer, fullgraph=True)
    out = compiled(*values.values())
    grads = torch.autograd.grad(out, list(values.values()), dout)
    for name, got in (("out", out), *zip(values, grads)):
        check(name, got, want[name], 4e-3)


def test_cuda_graph_of_a_training_step():
    """Forward, backward and optimizer captured once; replays equal eager steps bit for bit."""
    expert_TK = torch.rand(256, 8, device="cuda").argsort(1)[:, :2].int()
    w1, w2, *_ = weights(8, 264, 40, dtype=BF16, device="cuda")
    batches = [random(256, 264, dtype=BF16, device="cuda") for _ in range(3)]

    def make():
        params = [w1.clone().requires_grad_(), w2.clone().requires_grad_()]
        params.append(torch.full((256, 2), 0.5, device="cuda", requires_grad=True))
        return params, torch.optim.SGD(params, lr=0.1)

    def step(x, params, optimizer):
        routing = Routing.from_topk(expert_TK, params[2], 8)
        out = experts(x, params[0], params[1], routing, backend="triton")
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    eager, optimizer = make()
    for x in batches:
        step(x, eager, optimizer)

    captured, optimizer = make()
    start = [p.detach().clone() for p in captured]
    static_x = batches[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(static_x, captured, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(static_x, captured, optimizer)
    with torch.no_grad():
        for p, value in zip(captured, start):
            p.copy_(value)
    for x in batches:
        static_x.copy_(x)
        graph.replay()
    for name, a, b in zip(("w1", "w2", "gates"), captured, eager):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("save", ["h", "x"])
def test_kept_memory(save: str):
    """What backward needs: H, gates and int32 indices (x and out are the caller's)."""
    T, D, N, E, K = 8192, 512, 256, 32, 8
    w1, w2, *_ = weights(E, D, N, dtype=BF16, device="cuda")
    x = random(T, D, dtype=BF16, device="cuda").requires_grad_()
    routing = topk_routing(T, E, K, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = experts(x, w1, w2, routing, save=save, backend="triton")
    kept = torch.cuda.memory_allocated() - before - out.numel() * 2
    h_bytes = 4 * T * K * N if save == "h" else 0
    assert h_bytes <= kept <= h_bytes + 2**20, f"kept {kept} bytes, H has {h_bytes}"


def test_autocast_gives_the_dtype_of_a_linear_layer():
    routing = topk_routing(50, 4, 2, device="cuda")
    values = operands(routing, 264, 40, torch.float32)
    linear = torch.nn.Linear(264, 8, device="cuda")
    with torch.autocast("cuda", dtype=BF16):
        out = experts(values["x"], values["w1"], values["w2"], routing)
        assert out.dtype == linear(values["x"]).dtype == BF16
    out.sum().backward()
    assert values["w1"].grad.dtype == torch.float32
