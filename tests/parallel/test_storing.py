"""Storing with stochastic rounding: the kernel gives the bits of the reference."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from moe.kernels.common.backend import INTERPRET
from parallel.engines.rounding import store
from tests.moe.kernels.compile_sm90 import compile_only, needs_tools, report, rows_of

BF16 = torch.bfloat16
needs_interpreter = pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")


def stored(backend: str, dtypes, size: int, first: int = 0, keep: float = 1.0, step: float = 7.0):
    generator = torch.Generator().manual_seed(size)
    targets = [torch.ones(size, dtype=dtype) for dtype in dtypes]
    values = [torch.randn(size, generator=generator) for _ in dtypes]
    values[0][0] = torch.nan
    store(targets, values, torch.tensor(keep), 0xF0000001, torch.tensor(step), first, backend)
    return targets, values


@needs_interpreter
@pytest.mark.parametrize("size", [1, 77, 5000])
@pytest.mark.parametrize("first", [0, 1, (1 << 32) - 2500])
def test_the_kernel_rounds_as_the_reference(size, first):
    dtypes = (BF16, torch.float32, BF16, BF16)
    want, values = stored("reference", dtypes, size, first)
    got, _ = stored("triton", dtypes, size, first)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert got[0][0].isnan() and torch.equal(got[1], values[1])
    error = (got[0].float() - values[0])[1:].abs()
    assert (error <= 2**-7 * values[0][1:].abs()).all()
    other, _ = stored("triton", dtypes, size, first, step=8.0)
    assert size == 1 or not torch.equal(other[2], got[2]), "other bits in another step"


@needs_interpreter
def test_a_skipped_step_stores_nothing():
    for backend in ("reference", "triton"):
        targets, _ = stored(backend, (BF16, torch.float32), 100, keep=0.0)
        assert all((target == 1).all() for target in targets)


def _compile() -> None:
    import contextlib

    import parallel.engines.rounding as module

    module.on_device = lambda tensor: contextlib.nullcontext()
    module.pick_backend = lambda name, tensor: "triton"
    compile_only(lambda name, kernel: print(json.dumps(report(kernel)), flush=True))
    for first in (0, 1 << 33):
        stored("triton", (BF16,) * 3, 1 << 14, first)


@needs_tools
def test_compiles_for_hopper_without_spills(tmp_path):
    rows = rows_of(__file__, tmp_path)
    assert len(rows) == 6
    for row in rows:
        assert row["spilled bytes"] == 0 and row["registers"] <= 64, row


if __name__ == "__main__":
    sys.exit(_compile())
