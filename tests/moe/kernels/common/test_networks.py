"""The few largest of many values, position by position, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common.backend import HAVE_TRITON, INTERPRET, tl, triton

if not (HAVE_TRITON and INTERPRET):
    pytest.skip("kernels on a CPU need Triton's interpreter", allow_module_level=True)

from moe.kernels.common.networks import runner_up, stack, top_of


@triton.jit
def _best(keys, best, next_key, crowded, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
          K: tl.constexpr, LOW: tl.constexpr):  # fmt: skip
    at = tl.arange(0, B)
    some = ()
    for m in tl.static_range(M):
        some += (tl.load(keys + at * M + m),)
    top = top_of(some, M, N, -2147483648)
    tl.store(best + at[:, None] * N + tl.arange(0, N)[None, :], stack(top, N))
    behind, full = runner_up(some, top[K - 1], M, LOW)
    tl.store(next_key + at, behind)
    tl.store(crowded + at, full)


@pytest.mark.parametrize("N", [2, 4, 8])
@pytest.mark.parametrize("step", [1, 2**19])
def test_largest_and_runner_up(N, step):
    B, M, LOW = 64, 16, 7
    keys = torch.stack([torch.randperm(64)[:M] for _ in range(B)]) * step - 30 * step
    keys[0, :2] = torch.tensor([2**31 - 1, -(2**31)])  # the widest range there is
    best = torch.empty(B, N, dtype=torch.int32)
    next_key = torch.empty(B, dtype=torch.int32)
    crowded = torch.empty(B, dtype=torch.int8)
    right = keys.sort(dim=1, descending=True).values
    for K in range(1, N + 1):
        _best[(1,)](keys.int(), best, next_key, crowded, B=B, M=M, N=N, K=K, LOW=LOW)
        assert torch.equal(best.long(), right[:, :N])
        assert torch.equal(next_key.long(), right[:, K])
        third = right[:, K + 1] >= (right[:, K - 1] & ~LOW)
        assert torch.equal(crowded.bool(), third)
    assert third.any() == (step == 1)
