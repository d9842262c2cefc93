"""Experts with biases and the clamped activation, against transformers' `GptOssExperts`.

The weights are of a size at which both clamps bite.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moe.experts import experts
from moe.kernels.common import tuning
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.common.tuning import Config
from moe.kernels.tiers import why_not_hopper
from moe.routing import Routing

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
T, D, N, E, K = 37, 24, 40, 5, 2
SMALL = {
    kind: Config(32, 64, 32, group=2, split=2) for kind in ("up", "rows", "down_backward", "outer")
}


def _of_transformers() -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """In our layout and float64: leaves (x, W1, W2, b1, b2, gates), the chosen experts, and the
    output with the gradients of the leaves."""
    theirs = GptOssExperts(
        GptOssConfig(hidden_size=D, intermediate_size=N, num_local_experts=E, num_experts_per_tok=K)
    ).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 3 * D**-0.5 if parameter.ndim == 3 else 2)
    x = (2 * torch.randn(T, D, dtype=torch.float64)).requires_grad_()
    expert_TK = torch.rand(T, E).topk(K).indices
    gate_TK = torch.rand(T, K, dtype=torch.float64).requires_grad_()
    if transformers.__version__.startswith("4."):  # a gate for every expert
        gate_TE = torch.zeros(T, E, dtype=torch.float64).scatter(1, expert_TK, gate_TK)
        out = theirs(x[None], expert_TK, gate_TE)[0]
    else:
        out = theirs(x, expert_TK, gate_TK)
    w1, w2 = theirs.gate_up_proj, theirs.down_proj
    b1, b2 = theirs.gate_up_proj_bias, theirs.down_proj_bias
    h = x.detach() @ w1[0] + b1[0]
    assert (h[:, 0::2] > 7).any()
    assert (h[:, 1::2].abs() > 7).any()
    dx, dw1, dw2, *others = torch.autograd.grad(_loss(out), [x, w1, w2, b1, b2, gate_TK])
    leaves = [x, w1.mT.contiguous(), w2.mT.contiguous(), b1, b2, gate_TK]
    wanted = [out.detach(), dx, dw1.mT, dw2.mT, *others]
    return [leaf.detach() for leaf in leaves], expert_TK, wanted


def _loss(out: Tensor) -> Tensor:
    return out.square().sum() / 2


def _ours(leaves: list[Tensor], expert_TK: Tensor, dtype: torch.dtype, **options) -> list[Tensor]:
    leaves = [leaf.to(dtype, copy=True).requires_grad_() for leaf in leaves]
    x, w1, w2, b1, b2, gate_TK = leaves
    routing = Routing.from_topk(expert_TK, gate_TK, E)
    out = experts(x, w1, w2, routing, activation="clamped_swiglu", biases=(b1, b2), **options)
    grads = torch.autograd.grad(_loss(out), leaves)
    return [out.detach(), *grads]


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def test_values_and_all_gradients_are_those_of_transformers():
    leaves, expert_TK, wanted = _of_transformers()
    for got, want in zip(_ours(leaves, expert_TK, torch.float64), wanted, strict=True):
        assert _error(got, want) < 1e-9


@needs_interpreter
@pytest.mark.parametrize("save", ["h", "x"])
def test_kernels_compute_the_same(save: str):
    leaves, expert_TK, wanted = _of_transformers()
    with tuning.forced(**SMALL):
        found = _ours(leaves, expert_TK, torch.float32, backend="triton", save=save)
    for got, want in zip(found, wanted, strict=True):
        assert _error(got, want) < 2e-6


@pytest.mark.parametrize("bias", [None, torch.zeros(2, 16)])
def test_the_hopper_kernels_refuse_it_by_name(bias: Tensor | None):
    x, w2 = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((8, 16), (2, 16, 8)))
    reason = why_not_hopper(x, w2, "clamped_swiglu", bias)
    assert reason == "activation='clamped_swiglu'; the kernels have 'swiglu'"
    assert why_not_hopper(x, w2, "swiglu", bias) == (None if bias is None else "biases")
