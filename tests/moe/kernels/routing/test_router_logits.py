"""Router logits: float32 precision from bfloat16 tokens, in both backends."""

import pytest
import torch

from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.routing.router_logits import router_logits, split_gradient, split_ref, split_weight

TRITON = pytest.mark.skipif(
    not (HAVE_TRITON and (INTERPRET or torch.cuda.is_available())), reason="needs Triton"
)
BACKENDS = ["reference", pytest.param("triton", marks=TRITON)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# by norm; the tensor cores' sums lose a little more than those of float32 units
BOUND = 1e-6 if DEVICE == "cpu" else 2e-5


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.double() - right).norm() / right.norm()).item()


def data(T: int, D: int, E: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x_TD = torch.randn(T, D, device=DEVICE).to(dtype)
    # rows of very different size, as the gradients of real routers have
    grad_TE = torch.randn(T, E, device=DEVICE) * 10 ** (-4 * torch.rand(T, 1, device=DEVICE))
    return x_TD, torch.randn(E, D, device=DEVICE), grad_TE


def test_three_parts_hold_a_float32():
    x = torch.randn(10_000) * 10 ** (8 * torch.rand(10_000) - 4)
    high, mid, low = (part.double() for part in split_ref(x))
    assert ((high + mid + low - x.double()).abs() <= x.double().abs() * 2**-24).all()
    assert not torch.equal(high + mid, x.double())


@TRITON
@pytest.mark.parametrize(("T", "E"), [(1, 1), (7, 5), (77, 60), (199, 128)])
def test_split_kernel(T, E):
    x_TE = torch.randn(T, E, device=DEVICE)
    high, high2, mid, low = split_gradient(x_TE).split(E, dim=1)
    by_rows = split_weight(x_TE).split(T)
    assert all(torch.equal(a, b) for a, b in zip(by_rows, (low, mid, high, high2)))
    assert torch.equal(high, high2)
    total = high.double() + mid.double() + low.double()
    assert ((total - x_TE.double()).abs() <= x_TE.double().abs() * 2**-24).all()
    if not INTERPRET:  # which cuts floats off where the GPU rounds them to bfloat16
        assert all(torch.equal(a, b) for a, b in zip((high, mid, low), split_ref(x_TE)))
    turned_TE = torch.randn(E, T, device=DEVICE).t()
    assert torch.equal(split_gradient(turned_TE), split_gradient(turned_TE.contiguous()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "D", "E"), [(1, 8, 1), (77, 40, 5), (130, 264, 60), (9, 33, 128)])
def test_values_and_gradients(backend, dtype, T, D, E):
    x_TD, weight_ED, grad_TE = data(T, D, E, dtype)
    x_TD.requires_grad_()
    weight_ED.requires_grad_()
    logits_TE = router_logits(x_TD, weight_ED, backend)
    assert logits_TE.dtype == torch.float32
    dx_TD, dw_ED = torch.autograd.grad(logits_TE, (x_TD, weight_ED), grad_TE)
    x, w, g = x_TD.double(), weight_ED.double(), grad_TE.double()
    assert error(logits_TE, x @ w.t()) < BOUND
    assert error(dw_ED, g.t() @ x) < BOUND
    assert (dx_TD.dtype, dw_ED.dtype) == (dtype, torch.float32)
    right = g @ w
    if dtype == torch.float32:
        assert error(dx_TD, right) < BOUND
    else:  # one rounding of every element, plus the small products left out
        unit = 2**-8 if dtype == torch.bfloat16 else 2**-11
        left_out = 2**-14 * (g.abs() @ w.abs()) + 2**-24  # and half the least float16
        assert ((dx_TD.double() - right).abs() <= unit * right.abs() + left_out).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend):
    x_TD = torch.zeros(0, 6, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    weight_ED = torch.randn(5, 6, device=DEVICE, requires_grad=True)
    logits_TE = router_logits(x_TD, weight_ED, backend)
    assert logits_TE.shape == (0, 5)
    logits_TE.sum().backward()
    assert x_TD.grad.shape == (0, 6)
    assert torch.equal(weight_ED.grad, torch.zeros_like(weight_ED))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_frozen_sides_cost_nothing(backend, frozen, monkeypatch):
    x_TD, weight_ED, grad_TE = data(9, 6, 5, torch.bfloat16)
    x_TD.requires_grad_(frozen == "weight")
    weight_ED.requires_grad_(frozen == "x")
    logits_TE = router_logits(x_TD, weight_ED, backend)
    if frozen == "both":
        assert not logits_TE.requires_grad
        return
    logits_TE.backward(grad_TE)
    assert (x_TD.grad is None) == (frozen == "x")
    assert (weight_ED.grad is None) == (frozen == "weight")


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_reach_the_product(backend):
    for dtype in (torch.float32, torch.bfloat16):
        x_TD, weight_ED, grad_TE = data(50, 40, 7, dtype)
        weight_ED.requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            logits_TE = router_logits(x_TD, weight_ED, backend)
            logits_TE.backward(grad_TE)
        assert error(logits_TE, x_TD.double() @ weight_ED.double().t()) < BOUND
        assert error(weight_ED.grad, grad_TE.double().t() @ x_TD.double()) < BOUND


def test_float64_weight_is_exact():
    x_TD, weight_ED, _ = data(20, 6, 5, torch.float64)
    weight_ED = weight_ED.double().requires_grad_()
    x_TD.requires_grad_()
    assert router_logits(x_TD, weight_ED).dtype == torch.float64
    assert torch.autograd.gradcheck(router_logits, (x_TD, weight_ED), fast_mode=True)


@TRITON
def test_compiles():
    x_TD, weight_ED, grad_TE = data(30, 6, 5, torch.bfloat16)
    weight_ED.requires_grad_()
    compiled = torch.compile(router_logits, fullgraph=True, backend="aot_eager")
    found = compiled(x_TD, weight_ED, "triton")
    right = router_logits(x_TD, weight_ED, "triton")
    assert torch.equal(found, right)
    (a,) = torch.autograd.grad(found, weight_ED, grad_TE)
    (b,) = torch.autograd.grad(right, weight_ED, grad_TE)
    assert torch.equal(a, b)


def test_second_backward_is_an_error():
    x_TD, weight_ED, _ = data(4, 6, 5, torch.float32)
    weight_ED.requires_grad_()
    value = router_logits(x_TD, weight_ED).square().sum()
    with pytest.raises(RuntimeError, match="create_graph=True is not supported"):
        torch.autograd.grad(value, weight_ED, create_graph=True)


@pytest.mark.parametrize(
    ("x", "weight", "backend", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(2, 5), "auto", r"x_TD \(3, 4\) and weight_ED \(2, 5\)"),
        (torch.zeros(3, 4), torch.zeros(2, 4).bfloat16(), "auto", "weight_ED is torch.bfloat16"),
        (torch.zeros(3, 4), torch.zeros(2, 4), "cuda", "backend='cuda' is unknown"),
    ],
)
def test_errors(x, weight, backend, message):
    with pytest.raises(ValueError, match=message):
        router_logits(x, weight, backend)
