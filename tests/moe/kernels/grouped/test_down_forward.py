"""Down-projection: the reference against a loop, the kernel against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe.kernels.common import tuning
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.common.tuning import Config
from moe.kernels.grouped import configs
from moe.kernels.products import down_forward
from tests.moe.kernels.grouped_cases import BOUND, check, nan_memory, offsets_of, random, weights

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
SMALL = Config(32, 64, 32, group=2, split=2)


def _by_hand(a_RN, w2_EDN, b2_ED, offsets):
    rows = []
    for e, (start, end) in enumerate(itertools.pairwise(offsets)):
        y = a_RN[start:end] @ w2_EDN[e].T
        rows.append(y if b2_ED is None else y + b2_ED[e])
    return torch.cat(rows)


@pytest.mark.parametrize("bias", [False, True])
def test_reference_equals_a_loop(bias: bool):
    counts = [5, 0, 9, 3, 0, 2]
    a = random(19, 4, dtype=torch.float64)
    _, w2, _, b2 = weights(6, 7, 4, dtype=torch.float64)
    b2 = b2 if bias else None
    offsets = offsets_of(counts)
    got = down_forward(a, w2, b2, offsets)
    torch.testing.assert_close(got, _by_hand(a, w2, b2, offsets.tolist()))


def _compare(counts, D, N, *, config=SMALL, dtype=torch.float32, bias=False, pointers=False):
    offsets = offsets_of(counts)
    R = sum(counts)
    a = random(R + 3, N, dtype=dtype)  # three unused rows
    _, w2, _, b2 = weights(len(counts), D, N, dtype=dtype)
    with tuning.forced(pointers=pointers, rows=config), nan_memory():
        y = down_forward(a, w2, b2 if bias else None, offsets, backend="triton")
    want = _by_hand(a.double(), w2.double(), b2.double() if bias else None, offsets.tolist())
    check("y", y[:R], want, BOUND[dtype])
    assert y[R:].isnan().all()


@needs_interpreter
@pytest.mark.parametrize(
    ("counts", "D", "N"),
    [([1], 8, 8), ([0, 2, 0], 24, 40), ([40, 25], 40, 24), ([3, 0, 70], 264, 8), ([33], 100, 100)],
)
def test_kernel_at_odd_sizes(counts: list[int], D: int, N: int):
    _compare(counts, D, N, dtype=torch.float16 if D % 16 == 8 else torch.float32)


@needs_interpreter
@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"pointers": True, "bias": True},
        {"pointers": True},
    ],
    ids=str,
)
def test_kernel_options(options: dict):
    _compare([11, 0, 30], 40, 24, **options)


@needs_interpreter
def test_kernel_takes_widths_that_tma_cannot():
    _compare([9, 12], 41, 23)


@needs_interpreter
@pytest.mark.parametrize("config", configs.all_configs("rows"), ids=str)
def test_every_configuration(config: Config):
    dtype = (
        torch.float32 if config in configs.candidates("rows", torch.float32, 64) else torch.float16
    )
    _compare([60, 10], 136, 72, config=config, dtype=dtype)


def test_no_rows_at_all():
    _, w2, *_ = weights(3, 8, 4)
    for backend in ("reference", *(("triton",) if HAVE_TRITON else ())):
        y = down_forward(torch.empty(0, 4), w2, None, offsets_of([0, 0, 0]), backend=backend)
        assert y.shape == (0, 8)
