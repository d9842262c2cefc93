"""Rows in float8: how far off, what becomes of zeros and of what is not finite, and refusals."""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.grouped.float8_rows import from_float8, to_float8, why_not

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
BACKENDS = ["reference", pytest.param("triton", marks=needs_interpreter)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 24, 300, 5000])  # the last one in two blocks
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_error_of_a_number_and_of_a_row(backend: str, width: int, size: float):
    x = (torch.randn(5, width) * size).half() if size < 1e3 else torch.randn(5, width) * size
    q, scale = to_float8(x, backend=backend)
    assert q.dtype == torch.float8_e4m3fn
    assert (scale.dtype, scale.shape) == (torch.float32, (5,))
    y = from_float8(q, scale, torch.float32, backend=backend)
    # half a step of 3 bits, or of the smallest numbers, in units of the row's scale
    bound = torch.maximum(x.float().abs() / 16, scale[:, None] * 2**-10) * 1.0001
    assert ((y - x.float()).abs() <= bound).all()
    top = x.float().abs().amax(dim=1)
    torch.testing.assert_close(y.abs().amax(dim=1), top, rtol=1e-5, atol=0)
    if width >= 24:
        error = (y - x.float()).norm() / x.float().norm()
        assert 0.015 < error < 0.035


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_zeros_and_no_rows(backend: str):
    q, scale = to_float8(torch.zeros(3, 40).half(), backend=backend)
    assert (from_float8(q, scale, torch.float16, backend=backend) == 0).all()
    q, scale = to_float8(torch.zeros(0, 40).half(), backend=backend)
    assert from_float8(q, scale, torch.float16, backend=backend).shape == (0, 40)


@pytest.mark.parametrize("backend", BACKENDS)
def test_not_finite_stays_so(backend: str):
    x = torch.ones(3, 16).half()
    x[0, 3] = float("nan")
    x[1, 5] = float("inf")
    q, scale = to_float8(x, backend=backend)
    y = from_float8(q, scale, torch.float16, backend=backend)
    assert y[0].isnan().nonzero().flatten().tolist() == [3]
    assert (y[0].nan_to_num(nan=1.0) == 1).all()
    assert not y[1, 5].isfinite()
    assert (y[2] == 1).all()


@needs_interpreter
def test_kernels_equal_the_reference_in_every_bit():
    x = torch.randn(37, 200).half()
    x[0] = torch.linspace(-1, 1, 200)  # ties and the smallest numbers
    x[1, 1:] = torch.linspace(0, 2**-7, 199)
    x[1, 0] = 448  # a scale of 1
    (q, scale), (want, want_scale) = to_float8(x, backend="triton"), to_float8(x)
    assert torch.equal(scale, want_scale)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    ones = torch.ones(1)
    decoded = (from_float8(codes, ones, torch.float32, backend=b) for b in ("triton", "reference"))
    torch.testing.assert_close(*decoded, rtol=0, atol=0, equal_nan=True)


def test_what_it_refuses():
    x = torch.zeros(2, 8)
    assert "float32 rows would lose" in why_not(x)
    assert why_not(x.bfloat16()) is None
