"""Down-projection: the reference against a loop, the kernel against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe.kernels.common import tiles as _tiles
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.common.tiles import Config
from moe.kernels.grouped.down_forward import down_forward
from tests.moe.kernels.grouped_cases import BOUND, check, nan_memory, offsets_of, random, weights

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
SMALL = Config(32, 64, 32, group=2, split=2)
FLAT = Config(32, 64, 32, group=2, split=2, flatten=True)


def _by_hand(a_RN, w2_EDN, b2_ED, offsets, scale_R):
    rows = []
    for e, (start, end) in enumerate(itertools.pairwise(offsets)):
        y = a_RN[start:end] @ w2_EDN[e].T
        y = y if b2_ED is None else y + b2_ED[e]
        rows.append(y if scale_R is None else y * scale_R[start:end, None])
    return torch.cat(rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_reference_equals_a_loop(bias: bool, scaled: bool):
    counts = [5, 0, 9, 3, 0, 2]
    a = random(19, 4, dtype=torch.float64)
    _, w2, _, b2 = weights(6, 7, 4, dtype=torch.float64)
    b2, scale = (b2 if bias else None), (torch.rand(19).double() if scaled else None)
    offsets = offsets_of(counts)
    got = down_forward(a, w2, b2, offsets, scale_R=scale)
    torch.testing.assert_close(got, _by_hand(a, w2, b2, offsets.tolist(), scale))


def _compare(
    counts, D, N, *, config=SMALL, dtype=torch.float32, bias=False, scaled=False, pointers=False
):
    offsets = offsets_of(counts)
    R = sum(counts)
    a = random(R + 3, N, dtype=dtype)  # three unused rows
    _, w2, _, b2 = weights(len(counts), D, N, dtype=dtype)
    scale = torch.rand(R + 3) + 0.1
    with _tiles.forced(pointers=pointers, rows=config), nan_memory():
        y = down_forward(
            a, w2, b2 if bias else None, offsets,
            scale_R=scale if scaled else None, backend="triton",
        )  # fmt: skip
    want = _by_hand(
        a.double(), w2.double(), b2.double() if bias else None, offsets.tolist(),
        scale.double() if scaled else None,
    )  # fmt: skip
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
        {"scaled": True, "bias": True, "config": FLAT},
        {"pointers": True, "bias": True},
        {"pointers": True, "config": FLAT},
    ],
    ids=str,
)
def test_kernel_options(options: dict):
    _compare([11, 0, 30], 40, 24, **options)


@needs_interpreter
def test_kernel_takes_widths_that_tma_cannot():
    _compare([9, 12], 41, 23, scaled=True)


@needs_interpreter
@pytest.mark.parametrize("config", _tiles.all_configs("rows"), ids=str)
def test_every_configuration(config: Config):
    dtype = (
        torch.float32 if config in _tiles.candidates("rows", torch.float32, 64) else torch.float16
    )
    _compare([60, 10], 136, 72, config=config, dtype=dtype)


def test_no_rows_at_all():
    _, w2, *_ = weights(3, 8, 4)
    for backend in ("reference", *(("triton",) if HAVE_TRITON else ())):
        y = down_forward(torch.empty(0, 4), w2, None, offsets_of([0, 0, 0]), backend=backend)
        assert y.shape == (0, 8)
