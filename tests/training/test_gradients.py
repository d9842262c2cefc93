"""Sums of gradients and their norm: the kernels against float64."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from moe.kernels.common.backend import INTERPRET
from parallel.engines.gradients import collect, norm
from tests.moe.kernels.compile_sm90 import compile_only, needs_tools, report, rows_of

needs_interpreter = pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")
BACKENDS = ["reference", pytest.param("triton", marks=needs_interpreter)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 64, 4096, 9001])
def test_gradients_are_added_in_float32(backend, size):
    gradient = torch.randn(size).bfloat16()
    gradient[0] = torch.inf
    total = torch.full((size,), torch.nan)
    collect(total, gradient, add=False, backend=backend)
    assert torch.equal(total, gradient.float())
    more = torch.randn(size).bfloat16()
    collect(total, more, add=True, backend=backend)
    assert torch.equal(total, gradient.float() + more.float())


@needs_interpreter
def test_gradients_of_any_layout_are_added():
    gradient = torch.randn(6, 5).bfloat16().T
    total = torch.zeros(5, 6)
    collect(total, gradient, add=True, backend="triton")
    assert torch.equal(total, gradient.float())
    with pytest.raises(ValueError, match=r"not torch\.float32 to torch\.float32"):
        collect(total, total.clone(), add=True, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_that_of_float64(backend, dtype):
    buffers = [(torch.randn(size) * 1e-3).to(dtype) for size in (1, 64, 8192, 8192 * 3 + 5)]
    want = torch.linalg.vector_norm(torch.cat(buffers).double()).item()
    assert norm(buffers, backend).item() == pytest.approx(want, rel=3e-7)
    assert norm(buffers, backend).dtype == torch.float32
    for bad in (torch.nan, torch.inf, 3e38):
        buffers[-1][-1] = bad
        if backend == "triton" or bad != 3e38:  # sums of squares that overflow, in float32
            assert not norm(buffers, backend).isfinite()


def _compile() -> None:
    import contextlib

    import parallel.engines.gradients as module

    module.on_device = lambda tensor: contextlib.nullcontext()
    module.pick_backend = lambda name, tensor: "triton"
    compile_only(lambda name, kernel: print(json.dumps(report(kernel)), flush=True))
    buffer = torch.zeros(1 << 16)
    for add in (False, True):
        collect(buffer, buffer.bfloat16(), add)
    norm([buffer, buffer.bfloat16()])


@needs_tools
def test_compiles_for_hopper_without_spills(tmp_path):
    rows = rows_of(__file__, tmp_path)
    assert len(rows) == 4
    for row in rows:
        assert row["spilled bytes"] == 0 and row["registers"] <= 64, row


if __name__ == "__main__":
    sys.exit(_compile())
