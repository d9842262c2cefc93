"""Experts of different widths: reference and kernels against a loop in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe.balance import flop_weights
from moe.experts import experts
from moe.kernels.common import tuning
from moe.kernels.common.activations import ACTIVATIONS
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET, interpreter_faults
from moe.kernels.common.tuning import Config
from moe.kernels.grouped import ragged
from moe.kernels.grouped.ragged import Widths
from moe.layer import MoE, MoEConfig
from moe.mixed_experts import mixed_experts
from tests.moe.kernels.grouped_cases import (
    BOUND,
    activate_by_hand,
    check,
    counted_routing,
    nan_memory,
    ragged_routing,
    random,
    topk_routing,
)

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
SMALL = {
    name: Config(32, 64, 32, group=2, split=2) for name in ("up", "rows", "down_backward", "outer")
}
NAMES = ("out", "x", "w1", "w2", "gates")


def _leaves(T, D, sizes, routing, activation, dtype, device="cpu"):
    width, U = ACTIVATIONS[activation].width, sum(sizes)
    return [
        random(T, D, dtype=dtype, device=device),
        random(U * width, D, dtype=dtype, device=device, scale=D**-0.5),
        random(U, D, dtype=dtype, device=device, scale=U**-0.5 * len(sizes) ** 0.5),
        routing.gates_S.clone(),
    ]


def _by_hand(x, w1, w2, gates_S, routing, sizes, activation):
    """A loop over experts and their rows, differentiable."""
    out, widths, width = torch.zeros_like(x), Widths(sizes), ACTIVATIONS[activation].width
    bounds, slots = routing.offsets_E1.tolist(), routing.slot_R.long()
    for e, (start, end) in enumerate(itertools.pairwise(bounds)):
        token = routing.token_R[start:end].long()
        h = x[token] @ w1[widths.of(e, width)].T
        y = activate_by_hand(h, activation) @ w2[widths.of(e)]
        out = out.index_add(0, token, gates_S[slots[start:end], None].to(x) * y)
    return out


def _results(function, leaves, grad):
    own = [t.detach().clone().requires_grad_() for t in leaves]
    with nan_memory():
        out = function(*own)
        return out, *torch.autograd.grad(out, own, grad.to(out.dtype))


def _compare(
    routing, T, D, sizes, *, activation="swiglu", dtype=torch.float32, backend="triton", save="h",
    device="cpu",
):  # fmt: skip
    leaves = _leaves(T, D, sizes, routing, activation, dtype, device)
    grad = random(T, D, dtype=dtype, device=device)

    def ours(x, w1, w2, gates):
        one = type(routing)(**{**vars(routing), "gates_S": gates})
        return mixed_experts(
            x, w1, w2, one, Widths(sizes), activation=activation, save=save, backend=backend
        )

    def hand(x, w1, w2, gates):
        return _by_hand(x, w1, w2, gates, routing, sizes, activation)

    got = _results(ours, leaves, grad)
    want = _results(hand, [t.double() for t in leaves], grad)
    for name, one, other in zip(NAMES, got, want):
        bound = max(2 * BOUND[dtype], 1e-6) if name == "gates" else BOUND[dtype]  # float32 gates
        check(name, one, other, bound)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("save", ["h", "x"])
def test_reference_equals_a_loop(activation: str, save: str):
    routing = topk_routing(23, 4, 2, holes=True)
    _compare(
        routing, 23, 8, (6, 2, 12, 4), activation=activation, dtype=torch.float64,
        backend="reference", save=save,
    )  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize(("activation", "pointers"), [("swiglu", False), ("relu2", True)])
def test_kernels_equal_float64(activation: str, pointers: bool):
    # widths of one tile, part of one, and several; an expert without rows; unused slots
    routing = topk_routing(45, 4, 2, holes=True)
    with tuning.forced(pointers=pointers, **SMALL):
        _compare(routing, 45, 96, (64, 32, 96, 32), activation=activation)


@needs_interpreter
def test_kernels_at_odd_sizes():
    """Widths that no tile divides go through masked loads; so do odd widths of the model."""
    with tuning.forced(**SMALL):
        _compare(ragged_routing(21, 4), 21, 29, (7, 33, 1, 20))
        _compare(topk_routing(17, 2, 1), 17, 64, (16, 48), save="x")


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_in_half_precision(dtype):
    if any(str(dtype).removeprefix("torch.") in fault for fault in interpreter_faults()):
        pytest.skip(f"the interpreter computes {dtype} wrongly")
    with tuning.forced(**SMALL):
        _compare(topk_routing(50, 3, 2), 50, 64, (64, 128, 32), dtype=dtype)


@needs_interpreter
def test_a_damaged_width_is_seen():
    """The comparison fails where a kernel takes an expert for one unit narrower than it is."""
    routing, sizes = topk_routing(20, 3, 2), (8, 16, 24)
    real = ragged._lists

    def wrong(sizes, device):
        starts, order = real(sizes, device)
        return starts - torch.tensor([0, 1, 0, 0], dtype=torch.int32), order

    ragged._lists = wrong
    try:
        with tuning.forced(**SMALL), pytest.raises(AssertionError):
            _compare(routing, 20, 32, sizes)
    finally:
        ragged._lists = real


def test_equal_widths_equal_the_layer_of_one_width():
    """Bit for bit, but for the gradient of W2, whose product is transposed."""
    T, D, E, N = 30, 16, 4, 8
    routing = topk_routing(T, E, 2)
    leaves = _leaves(T, D, (N,) * E, routing, "swiglu", torch.float32)
    grad = random(T, D)

    def mixed(x, w1, w2, gates):
        one = type(routing)(**{**vars(routing), "gates_S": gates})
        return mixed_experts(x, w1, w2, one, Widths((N,) * E), backend="reference")

    def same(x, w1, w2, gates):
        one = type(routing)(**{**vars(routing), "gates_S": gates})
        w1_EHD, w2_EDN = w1.view(E, 2 * N, D), w2.view(E, N, D).mT
        return experts(x, w1_EHD, w2_EDN, one, backend="reference")

    for name, got, want in zip(NAMES, _results(mixed, leaves, grad), _results(same, leaves, grad)):
        if name == "w2":
            torch.testing.assert_close(got, want)
        else:
            assert torch.equal(got, want), name


def test_a_layer_of_zeros_beyond_each_width_is_the_same_function():
    """Padding to the widest expert with zeros changes nothing: what export does."""
    T, D, sizes = 40, 16, (4, 8, 12)
    routing = topk_routing(T, 3, 2)
    x, w1, w2, _ = _leaves(T, D, sizes, routing, "swiglu", torch.float64)
    widths, N = Widths(sizes), max(sizes)
    w1_EHD, w2_EDN = torch.zeros(3, 2 * N, D).double(), torch.zeros(3, D, N).double()
    for e, n in enumerate(sizes):
        w1_EHD[e, : 2 * n], w2_EDN[e, :, :n] = w1[widths.of(e, 2)], w2[widths.of(e)].T
    got = mixed_experts(x, w1, w2, routing, widths, backend="reference")
    want = experts(x, w1_EHD, w2_EDN, routing, backend="reference")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_experts_and_batches_without_rows(backend):
    sizes = (8, 16, 24)
    with tuning.forced(**SMALL):
        for routing in (counted_routing([0, 9, 0]), topk_routing(0, 3, 2)):
            T = routing.num_tokens
            leaves = _leaves(T, 32, sizes, routing, "swiglu", torch.float32)
            _, _, w1, w2, _ = _results(
                lambda x, w1, w2, g, routing=routing: mixed_experts(
                    x, w1, w2, type(routing)(**{**vars(routing), "gates_S": g}), Widths(sizes),
                    backend=backend,
                ),
                leaves, random(T, 32),
            )  # fmt: skip
            for e in range(3) if T == 0 else (0, 2):
                assert not w1[Widths(sizes).of(e, 2)].any()
                assert not w2[Widths(sizes).of(e)].any()


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_sums_of_each_expert_s_outputs(backend):
    sizes, T, D = (8, 16, 24), 20, 32
    routing = topk_routing(T, 3, 2)
    x, w1, w2, _ = _leaves(T, D, sizes, routing, "swiglu", torch.float32)
    with tuning.forced(**SMALL), nan_memory():
        _, sums_ED = mixed_experts(
            x, w1, w2, routing, Widths(sizes), backend=backend, output_sums=True
        )
    bounds = routing.offsets_E1.tolist()
    for e, (start, end) in enumerate(itertools.pairwise(bounds)):
        token = routing.token_R[start:end].long()
        h = x[token] @ w1[Widths(sizes).of(e, 2)].T
        want = (activate_by_hand(h, "swiglu") @ w2[Widths(sizes).of(e)]).sum(0)
        torch.testing.assert_close(sums_ED[e], want, rtol=1e-4, atol=1e-5)


def test_a_layer_is_compiled_whole():
    config = MoEConfig(
        hidden_size=16, expert_size=12, num_experts=3, num_experts_per_tok=2,
        expert_widths=(4, 8, 12), kernels="reference",
    )  # fmt: skip
    layer = MoE(config)
    x = torch.randn(20, 16)
    want = torch.autograd.grad(layer(x)[0].square().sum(), layer.w1)[0]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(x)[0].square().sum(), layer.w1)[0]
    torch.testing.assert_close(got, want)


def test_what_does_not_fit_is_refused_by_name():
    routing = topk_routing(5, 3, 2)
    x, w1, w2, _ = _leaves(5, 8, (2, 4, 6), routing, "swiglu", torch.float32)
    good = {"routing": routing, "widths": Widths((2, 4, 6))}
    for change, words in (
        ({"widths": Widths((2, 4))}, "widths has 2 experts"),
        ({"widths": Widths((2, 4, 8))}, r"w1 has shape \(24, 8\)"),
        ({"widths": Widths((2, 10, 0))}, "at least 1"),
        ({"backend": "hopper"}, "kernels='hopper'"),
        ({"save": "y"}, "save='y'"),
    ):
        with pytest.raises(ValueError, match=words):
            mixed_experts(x, w1, w2, **{**good, **change})
    with pytest.raises(ValueError, match=r"w2 is torch.float64"):
        mixed_experts(x, w1, w2.double(), **good)
    config = {"hidden_size": 8, "expert_size": 6, "num_experts": 2, "num_experts_per_tok": 1}
    with pytest.raises(ValueError, match="save='fp8_h' does not go with expert_widths"):
        MoEConfig(**config, norm="none", expert_widths=(4, 6), save="fp8_h")


def test_weights_of_the_load_first_asked_for_in_inference_serve_training():
    with torch.inference_mode():
        flop_weights(((3, 5, 7),), torch.device("cpu"))
    load_E = torch.ones(3, requires_grad=True)
    (load_E * flop_weights(((3, 5, 7),), torch.device("cpu"))[0]).sum().backward()
    torch.testing.assert_close(load_E.grad, torch.tensor([0.6, 1.0, 1.4]))
