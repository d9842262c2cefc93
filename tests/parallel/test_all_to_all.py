"""Forms on the wire and sums over copies; no process group."""

import pytest
import torch

from parallel.exchange.all_to_all import Copies, Float8, Plain, WithIds, collect, spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 77, 128, 129, 512])
def test_float8_keeps_gaussians_to_three_percent(dtype, width):
    codec = Float8()
    x = (torch.randn(199, width) * torch.logspace(-3, 3, 199)[:, None]).to(dtype)
    wire = codec.encode(x)
    assert wire.dtype == torch.uint8
    assert wire.shape == (199, width + 4 * -(-width // 128))
    back = codec.decode(wire)
    assert back.dtype == dtype and back.shape == x.shape
    error = (back.double() - x.double()).norm(dim=1) / x.double().norm(dim=1)
    # E4M3 has 3 mantissa bits: at most 2^-4 relative an element, 2.6 % RMS on Gaussians.
    assert error.max() <= 2**-4
    assert error.square().mean().sqrt() < 0.03
    if width > 1:
        assert error.mean() > 0.015, "nothing was rounded"


def test_float8_bytes_at_the_width_of_deepseek_v3():
    wire = Float8().encode(torch.randn(3, 7168, dtype=torch.bfloat16))
    assert wire.shape[1] == 7392  # against 14336 in bf16


def test_float8_keeps_zeros_and_shows_what_is_not_finite():
    codec = Float8()
    x = torch.zeros(4, 256)
    x[1, 3], x[2, 200] = float("nan"), float("inf")
    back = codec.decode(codec.encode(x))
    assert torch.equal(back[0], x[0]) and torch.equal(back[3], x[3])
    assert back[1, :128].isnan().any() and torch.equal(back[1, 128:], x[1, 128:])
    assert not back[2, 128:].isfinite().all()


def test_float8_scales_each_group_alone():
    codec = Float8()
    x = torch.cat([torch.full((1, 128), 1e-4), torch.full((1, 128), 1e4)], dim=1)
    assert torch.allclose(codec.decode(codec.encode(x)), x, rtol=1e-6)


@pytest.mark.parametrize("codec", [Plain(), Float8()])
def test_no_rows(codec):
    x = torch.randn(0, 130)
    assert codec.decode(codec.encode(x)).shape == (0, 130)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_numbers_with_ids(dtype, count):
    gates = torch.randn(count, dtype=dtype)
    ids = torch.arange(count, dtype=torch.int32) * 100_003
    codec = WithIds(ids)
    wire = codec.encode(gates)
    assert wire.shape == (count, 4 + gates.element_size())
    codec.ids = None
    back = codec.decode(wire)
    assert torch.equal(back, gates)
    assert torch.equal(codec.ids, ids)


def _copies(slots=3):
    # rows: 0 of token 2, 1 of token 0, 2 of token 2; token 1 has none
    row_S = torch.tensor([1, -1, -1, -1, -1, -1, 2, -1, 0], dtype=torch.int32)
    source_R = torch.tensor([2, 0, 2], dtype=torch.int32)
    if slots:
        return Copies(source_R, row_S, 3, 3, None, "reference")
    offsets = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    return Copies(source_R, row_S, 3, None, offsets, "reference")


@pytest.mark.parametrize("slots", [3, 0])
def test_spread_and_collect_are_each_others_transpose(slots):
    copies = _copies(slots)
    x, rows = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(spread(x, copies), x[[2, 0, 2]])
    assert torch.equal(collect(rows, copies)[1], torch.zeros(4, dtype=torch.float64))
    assert torch.allclose((spread(x, copies) * rows).sum(), (x * collect(rows, copies)).sum())
    x.requires_grad_()
    rows.requires_grad_()
    torch.autograd.gradcheck(lambda x: spread(x, copies), (x,))
    torch.autograd.gradcheck(lambda rows: collect(rows, copies), (rows,))


def test_sums_are_float32_in_slot_order_and_rounded_once():
    copies = _copies()
    rows = torch.tensor([[1.0], [3.0], [2.0**-9]]).bfloat16()  # 1 + 2^-9 is lost in bf16
    assert collect(rows, copies).tolist() == [[3.0], [0.0], [1.0]]
    rows = torch.tensor([[1.0], [3.0], [2.0**-8 + 2.0**-10]]).bfloat16()
    assert collect(rows, copies)[2].item() == 1.0 + 2.0**-7
