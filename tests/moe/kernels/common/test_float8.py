"""Float8 in blocks: errors, odd sizes, and blocks of zeros, tiny numbers, infinities and NaN."""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common.float8 import (
    BLOCK,
    FLOAT8,
    dequantise_rows_ref,
    dequantise_weight_ref,
    quantise_rows_ref,
    quantise_weight_ref,
)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 127), (5, 128), (129, 300), (0, 40)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_rows_keep_three_bits(rows: int, columns: int, size: float):
    x = torch.randn(rows, columns) * size
    q, scale = quantise_rows_ref(x)
    assert (q.dtype, q.shape) == (FLOAT8, x.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, (rows, -(-columns // BLOCK)))
    step = scale.repeat_interleave(BLOCK, 1)[:, :columns]
    # half a step of 3 bits, or of the smallest numbers, in units of the block's scale
    bound = torch.maximum(x.abs() / 16, step * 2**-10) * 1.0001
    assert ((dequantise_rows_ref(q, scale) - x).abs() <= bound).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (130, 300), (256, 128)])
def test_weights_have_a_scale_for_each_square_whichever_way_they_lie(rows: int, columns: int):
    w = torch.randn(3, rows, columns)
    w[1] *= 100
    q, scale = quantise_weight_ref(w)
    assert scale.shape == (3, -(-rows // BLOCK), -(-columns // BLOCK))
    error = dequantise_weight_ref(q, scale) - w
    assert error.norm() < 0.035 * w.norm()
    turned, turned_scale = quantise_weight_ref(w.mT)
    assert torch.equal(turned.view(torch.uint8), q.mT.contiguous().view(torch.uint8))
    assert torch.equal(turned_scale, scale.mT)


def test_blocks_of_zeros_tiny_numbers_infinities_and_nan():
    x = torch.ones(5, 2 * BLOCK)
    x[0, :BLOCK] = 0.0
    x[1, :BLOCK] = 1e-40  # denormal
    x[2, 3] = float("inf")
    x[3, 3] = float("nan")
    x[4, 3] = torch.finfo(torch.float32).max
    q, scale = quantise_rows_ref(x)
    y = dequantise_rows_ref(q, scale)
    assert (y[0, :BLOCK] == 0).all()
    assert (y[1, :BLOCK].abs() <= 1e-33).all()
    assert y[2, :BLOCK].isnan().all()
    assert y[3, :BLOCK].isnan().nonzero().flatten().tolist() == [3]
    assert y[4].isfinite().all()
    torch.testing.assert_close(y[4, 3], x[4, 3])
    # neighbouring blocks are left alone
    torch.testing.assert_close(y[:, BLOCK:], x[:, BLOCK:])


def test_a_square_of_a_weight_that_is_not_finite():
    w = torch.ones(1, 2 * BLOCK, BLOCK)
    w[0, 3, 5] = float("inf")
    y = dequantise_weight_ref(*quantise_weight_ref(w))
    assert y[0, :BLOCK].isnan().all()
    torch.testing.assert_close(y[0, BLOCK:], w[0, BLOCK:])
