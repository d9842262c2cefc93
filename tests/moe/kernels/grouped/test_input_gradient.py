"""Gradient of the gathered rows: the same kernel as the down-projection, with W1 not transposed."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe.kernels.common import tuning
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.common.tuning import Config
from moe.kernels.grouped import configs
from moe.kernels.products import input_gradient
from tests.moe.kernels.grouped_cases import BOUND, check, nan_memory, offsets_of, random, weights

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
SMALL = Config(32, 64, 32, group=2, split=2)


def _by_hand(dh_RH, w1_EHD, offsets):
    bounds = enumerate(itertools.pairwise(offsets))
    return torch.cat([dh_RH[start:end] @ w1_EHD[e] for e, (start, end) in bounds])


def test_reference_equals_a_loop():
    offsets = offsets_of([5, 0, 9, 3, 0, 2])
    dh = random(19, 8, dtype=torch.float64)
    w1, *_ = weights(6, 7, 4, dtype=torch.float64)
    got = input_gradient(dh, w1, offsets)
    torch.testing.assert_close(got, _by_hand(dh, w1, offsets.tolist()))


def _compare(counts, D, N, *, config=SMALL, dtype=torch.float32, pointers=False):
    offsets = offsets_of(counts)
    R = sum(counts)
    w1, *_ = weights(len(counts), D, N, dtype=dtype)
    dh = random(R, 2 * N, dtype=dtype)
    with tuning.forced(pointers=pointers, rows=config), nan_memory():
        dx = input_gradient(dh, w1, offsets, backend="triton")
    check("dx", dx, _by_hand(dh.double(), w1.double(), offsets.tolist()), BOUND[dtype])


@needs_interpreter
@pytest.mark.parametrize(
    ("counts", "D", "N"),
    [([1], 8, 8), ([0, 2, 0], 40, 24), ([40, 25], 24, 40), ([3, 0, 70], 264, 8), ([9], 41, 23)],
)
@pytest.mark.parametrize("pointers", [False, True])
def test_kernel_at_odd_sizes(counts: list[int], D: int, N: int, pointers: bool):
    dtype = torch.float16 if D % 16 == 8 else torch.float32
    _compare(counts, D, N, dtype=dtype, pointers=pointers)


@needs_interpreter
@pytest.mark.parametrize("config", configs.all_configs("rows")[:2], ids=str)
def test_real_tiles(config: Config):
    """The other configurations run in the test of the down-projection: it is the same kernel."""
    _compare([60, 10], 264, 36, config=config, dtype=torch.float16)


@needs_interpreter
def test_a_neighbour_with_nan_does_no_harm():
    """Row tiles read past their end into the next expert's rows; weights have neighbours too."""
    offsets = offsets_of([5, 20])
    w1, *_ = weights(2, 40, 12)
    dh = random(25, 24)
    dh[5:] = float("nan")
    w1[1] = float("nan")
    with tuning.forced(rows=SMALL):
        dx = input_gradient(dh, w1, offsets, backend="triton")
    check("dx", dx[:5], dh[:5].double() @ w1[0].double(), BOUND[torch.float32])
