"""Activations: reference against autograd, kernels' device code against the reference."""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common.activations import (
    ACTIVATIONS,
    act,
    act_and_slope,
    activation_backward_ref,
    activation_ref,
    activation_width,
    through_up,
    up_factor,
)
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET, tl, triton
from moe.kernels.products import up_forward
from moe.layer import SharedExpert
from tests.moe.kernels.grouped_cases import activate_by_hand

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_reference_equals_torch_and_autograd(kind: str):
    h = torch.randn(17, 2 * 11, dtype=torch.float64, requires_grad=True)
    want = activate_by_hand(h, kind)
    torch.testing.assert_close(activation_ref(h.detach(), kind), want)
    da = torch.randn_like(want)
    (dh_want,) = torch.autograd.grad(want, h, da)
    dh, a = activation_backward_ref(h.detach(), da, kind)
    torch.testing.assert_close(dh, dh_want)
    torch.testing.assert_close(a, want.detach())


def _around_the_bounds() -> torch.Tensor:
    """Pairs of a gate and an up column, [81, 18]: inside, on and beyond the clamps."""
    values = torch.tensor([-50.0, -7.5, -7.0, -3.0, 0.0, 2.0, 7.0, 7.5, 50.0])
    return torch.cartesian_prod(values, values).repeat(1, 9)


def test_clamps_of_values_and_of_gradients():
    h = _around_the_bounds().double().requires_grad_()
    want = activate_by_hand(h, "clamped_swiglu")
    (dh_want,) = torch.autograd.grad(want.sum(), h)
    torch.testing.assert_close(activation_ref(h.detach(), "clamped_swiglu"), want)
    dh, a = activation_backward_ref(h.detach(), torch.ones_like(want), "clamped_swiglu")
    torch.testing.assert_close(dh, dh_want)
    torch.testing.assert_close(a, want.detach())
    assert (dh == 0).any()
    assert a.abs().max() == pytest.approx(7 * 8, rel=1e-4)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_reference_leaves_its_input_alone(kind: str):
    h = torch.randn(5, 8)
    before = h.clone()
    activation_ref(h, kind)
    activation_backward_ref(h, torch.randn(5, 8 // ACTIVATIONS[kind].width), kind)
    assert torch.equal(h, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_half_types_are_computed_in_float32(kind: str, dtype: torch.dtype):
    h = (torch.randn(50, 64) * 3).to(dtype)
    assert activation_ref(h, kind).dtype == dtype
    assert torch.equal(activation_ref(h, kind), activation_ref(h.float(), kind).to(dtype))
    da = torch.randn(50, 64 // ACTIVATIONS[kind].width).to(dtype)
    for got, want in zip(
        activation_backward_ref(h, da, kind), activation_backward_ref(h.float(), da.float(), kind)
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want)


def test_large_inputs_stay_finite():
    h = torch.tensor([[-1e4, 1.0, 1e4, 1.0, -88.0, 2.0, 0.0, 5.0]])
    for kind in ACTIVATIONS:
        dh, a = activation_backward_ref(h, torch.ones(1, 8 // ACTIVATIONS[kind].width), kind)
        assert torch.isfinite(dh).all()
        assert torch.isfinite(a).all()


def test_unknown_name_is_refused_with_the_nearest():
    assert activation_width("swiglu") == 2
    assert activation_width("relu2") == 1
    with pytest.raises(ValueError, match=r"'swiglo'.*allowed: swiglu.*did you mean 'swiglu'"):
        activation_width("swiglo")
    with pytest.raises(ValueError, match="None"):
        activation_width(None)


def test_c8_an_activation_outside_the_table_is_an_error_everywhere():
    h = torch.randn(3, 8)
    with pytest.raises(ValueError, match="'tanh' is unknown"):
        activation_ref(h, "tanh")
    with pytest.raises(ValueError, match="'tanh' is unknown"):
        activation_backward_ref(h, torch.randn(3, 8), "tanh")
    with pytest.raises(ValueError, match="'tanh' is unknown"):
        up_forward(h, torch.randn(2, 4, 8), None, None, torch.tensor([0, 1, 3]), activation="tanh")
    shared = SharedExpert(8, 4, "swiglu")
    shared.activation = "tanh"
    with pytest.raises(ValueError, match="'tanh' is unknown"):
        shared(h)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_c8_the_shared_expert_computes_the_activations_of_the_table(kind: str):
    shared = SharedExpert(8, 4, kind, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    h = shared.up_proj(x)
    if shared.gate_proj is not None:
        h = torch.stack([shared.gate_proj(x), h], dim=-1).flatten(-2)
    torch.testing.assert_close(shared(x), shared.down_proj(activate_by_hand(h, kind)))


@triton.jit
def _device_kernel(x_ptr, f_ptr, g_ptr, slope_ptr, KIND: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, B)
    x = tl.load(x_ptr + at)
    f, slope = act_and_slope(x, KIND)
    tl.store(f_ptr + at, act(x, KIND))
    tl.store(g_ptr + at, f)
    tl.store(slope_ptr + at, slope)


@needs_interpreter
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_device_code_equals_autograd(kind: str):
    x = torch.cat([torch.linspace(-12, 12, 250), torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4, 1])])
    f, g, slope = (torch.empty_like(x) for _ in range(3))
    _device_kernel[(1,)](x, f, g, slope, KIND=kind, B=256)
    inner = {"swiglu": "silu", "geglu": "gelu"}.get(kind, kind)
    y = x.double().requires_grad_()
    if kind == "clamped_swiglu":  # an up column of zeros makes a factor of 1
        want = activate_by_hand(torch.stack([y, torch.zeros_like(y)], -1).flatten(), kind)
    else:
        want = torch.relu(y) if inner == "reglu" else activate_by_hand(y, inner)
    (slope_want,) = torch.autograd.grad(want.sum(), y)
    for got, expected in ((f, want), (g, want), (slope, slope_want)):
        torch.testing.assert_close(got.double(), expected.detach(), rtol=2e-6, atol=2e-6)


@triton.jit
def _up_kernel(up_ptr, factor_ptr, slope_ptr, KIND: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, B)
    up = tl.load(up_ptr + at)
    tl.store(factor_ptr + at, up_factor(up, KIND))
    tl.store(slope_ptr + at, through_up(up * 0.0 + 2.0, up, KIND))


@needs_interpreter
@pytest.mark.parametrize("kind", [kind for kind, act in ACTIVATIONS.items() if act.width == 2])
def test_device_code_of_the_up_column(kind: str):
    up = torch.cat([torch.linspace(-12, 12, 62), torch.tensor([-7.0, 7.0])])
    factor, slope = torch.empty_like(up), torch.empty_like(up)
    _up_kernel[(1,)](up, factor, slope, KIND=kind, B=64)
    own = ACTIVATIONS[kind]
    assert torch.equal(factor, up if own.up is None else own.up(up))
    assert torch.equal(slope, 2.0 * torch.ones_like(up) * (own.up_slope(up) if own.up else 1))


@needs_interpreter
def test_c8_device_code_refuses_an_activation_outside_the_table():
    x = torch.zeros(16)
    with pytest.raises(Exception, match="unknown activation"):
        _device_kernel[(1,)](x, x, x, x, KIND="tanh", B=16)
