"""Repeated launches: the kept kernel is the one that Triton would have chosen."""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common import launch as launch_module
from moe.kernels.common.backend import HAVE_TRITON, tl, triton
from moe.kernels.common.launch import launch

pytestmark = pytest.mark.gpu

if HAVE_TRITON:

    @triton.jit
    def _scale_kernel(x, out, n, factor, BLOCK: tl.constexpr, TWICE: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n, other=0.0) * factor
        if TWICE:
            value = value * 2
        tl.store(out + i, value, mask=i < n)


def test_every_class_of_arguments_gets_its_own_kernel(monkeypatch):
    monkeypatch.setattr(launch_module, "_compiled", {})
    memory = torch.randn(5000, device="cuda")
    for _ in range(2):
        for dtype in (torch.float32, torch.float16):
            for start in (0, 1, 4):  # pointers of 16, 4 and 2 bytes' alignment
                for n in (1, 16, 17, 4096):
                    for factor, twice in ((3, False), (0.5, True), (1, False)):
                        x = memory.to(dtype)[start : start + n]
                        out = torch.full((n + 1,), 7.0, device="cuda", dtype=dtype)
                        launch(
                            _scale_kernel, (triton.cdiv(n, 128),), x, out, n, factor,
                            BLOCK=128, TWICE=twice, num_warps=4,
                        )  # fmt: skip
                        assert torch.equal(out[:n], x * factor * (2 if twice else 1))
                        assert out[n] == 7.0


def test_the_second_launch_asks_triton_for_nothing(monkeypatch):
    monkeypatch.setattr(launch_module, "_compiled", {})
    x = torch.ones(64, device="cuda")
    out = torch.empty_like(x)
    for factor in (2, 3):
        launch(_scale_kernel, (1,), x, out, 64, factor, BLOCK=64, TWICE=False)
        monkeypatch.setattr(type(_scale_kernel), "run", None)
        assert (out == factor).all()


def test_a_tensor_of_the_cpu_is_refused_by_a_kept_kernel_too():
    x = torch.ones(64, device="cuda")
    pinned = torch.zeros(64).pin_memory()
    for out in (x, pinned):
        launch(_scale_kernel, (1,), x, out, 64, 2, BLOCK=64, TWICE=False)
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            launch(_scale_kernel, (1,), x, x.cpu(), 64, 2, BLOCK=64, TWICE=False)
    torch.cuda.synchronize()
    assert (pinned == 4).all()


def test_constants_by_position_are_refused():
    x = torch.ones(64, device="cuda")
    with pytest.raises(TypeError, match="constants must be keywords"):
        launch(_scale_kernel, (1,), x, x, 64, 2, 64, TWICE=False)
