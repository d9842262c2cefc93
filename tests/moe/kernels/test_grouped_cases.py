"""The checks themselves: a damaged output must not pass."""

from __future__ import annotations

import pytest
import torch

from tests.moe.kernels.grouped_cases import (
    check,
    nan_memory,
    offsets_of,
    ragged_routing,
    relative_error,
    topk_routing,
    worst_stripe,
)


def _pair():
    want = torch.randn(4, 64, 256)
    return want * (1 + 1e-7 * torch.randn_like(want)), want


def test_equal_tensors_pass():
    check("same", *_pair(), 1e-5)


@pytest.mark.parametrize("damage", ["zeros", "nan", "repeat", "shift", "scale"])
def test_one_damaged_tile_fails(damage: str):
    """A 16 x 16 tile out of 64K numbers: what a wrong launch bound leaves behind."""
    got, want = _pair()
    tile = got[2, 32:48, 48:64]
    if damage == "zeros":
        tile.zero_()
    elif damage == "nan":
        tile[3, 5] = float("nan")
    elif damage == "repeat":
        tile.copy_(got[2, 32:48, 32:48].clone())
    elif damage == "shift":
        tile.copy_(tile.roll(1, 0).clone())
    else:
        tile.mul_(1.01)
    with pytest.raises(AssertionError, match="relative error"):
        check("damaged", got, want, 1e-5)


def test_stripes_see_what_the_whole_tensor_hides():
    """Small columns beside large ones: the norm of the whole is blind to them."""
    want = torch.randn(64, 256)
    want[:, 48:64] *= 1e-4
    got = want.clone()
    got[:, 48:64] = 0
    assert relative_error(got, want) < 1e-4
    assert worst_stripe(got, want) == pytest.approx(1.0)
    with pytest.raises(AssertionError, match="stripe"):
        check("hidden", got, want, 1e-4)


def test_zero_must_be_exactly_zero():
    want = torch.zeros(8, 32)
    check("zero", torch.zeros(8, 32), want, 1e-5)
    with pytest.raises(AssertionError):
        check("almost zero", torch.full((8, 32), 1e-4), want, 1e-5)


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="shape"):
        check("shape", torch.zeros(8, 32), torch.zeros(8, 33), 1e-5)


def test_new_memory_is_nan():
    with nan_memory():
        assert torch.empty(7, 3).isnan().all()
        assert torch.zeros(1, dtype=torch.float16).new_empty(5).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_routings_are_what_they_say():
    assert offsets_of([2, 0, 3]).tolist() == [0, 2, 2, 5]
    routing = topk_routing(20, 6, 2, holes=True)
    assert routing.counts_E[5] == 0
    assert (routing.expert_S < 0).any()
    ragged = ragged_routing(40, 4)
    assert ragged.slots_per_token is None
    assert (ragged.expert_S == -1).any()
    assert int(ragged.offsets_E1[-1]) == int((ragged.expert_S >= 0).sum())
