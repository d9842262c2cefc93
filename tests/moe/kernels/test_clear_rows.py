"""Rows that belong to no expert become zero, the others stay."""

from __future__ import annotations

import pytest
import torch

from moe.kernels._triton import HAVE_TRITON, INTERPRET
from moe.kernels.clear_rows import clear_rows
from tests.moe.kernels.grouped_cases import offsets_of

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("counts", [[0, 0], [3, 4], [9, 1]])
@pytest.mark.parametrize("width", [1, 40, 1500])
def test_only_unused_rows_are_cleared(backend: str, counts: list[int], width: int):
    y = torch.full((10, width), float("nan"))
    used = sum(counts)
    y[:used] = 1
    assert clear_rows(y, offsets_of(counts), backend=backend) is y
    assert (y[:used] == 1).all()
    assert (y[used:] == 0).all()


def test_rows_with_gaps_are_refused():
    with pytest.raises(AssertionError, match="contiguous"):
        clear_rows(torch.zeros(4, 8).T, offsets_of([2]))
