"""A backend computes what it was asked for or refuses; an unknown one is refused by name."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

from models.cross_entropy import cross_entropy
from moe import kernels
from moe.kernels.common.ops import define_op
from moe.kernels.products import (
    down_backward,
    down_forward,
    input_gradient,
    up_forward,
    weight_gradient,
)

E, R, D, N = 2, 3, 16, 8
OFFSETS = torch.tensor([0, 1, 3], dtype=torch.int32)


def made(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def up(x=None, bias=None, activation="swiglu", n=N):
    x = made(R, D) if x is None else x
    return up_forward(
        x, made(E, 2 * n, D), bias, None, OFFSETS, activation=activation, backend="hopper"
    )


def down(bias=None, n=N):
    return down_forward(made(R, n), made(E, D, n), bias, OFFSETS, backend="hopper")


def backward(bias=None, activation="swiglu", n=N):
    return down_backward(
        made(R, D), made(E, D, n), bias, made(R, 2 * n), torch.ones(R), None, None, None, OFFSETS,
        activation=activation, backend="hopper",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: up(activation="gelu"), "activation='gelu'"),
        (lambda: up(bias=made(E, 2 * N)), "biases"),
        (lambda: up(x=torch.zeros(R, D)), "torch.float32"),
        (lambda: up(n=6), "D=16, H=12"),
        (lambda: down(bias=made(E, D)), "biases"),
        (lambda: down(n=6), "D=16, N=6"),
        (lambda: backward(activation="geglu"), "activation='geglu'"),
        (lambda: backward(bias=made(E, D)), "biases"),
        (lambda: backward(n=6), "D=16, N=6"),
        (
            lambda: input_gradient(made(R, 12), made(E, 12, D), OFFSETS, backend="hopper"),
            "H=12, D=16",
        ),
        (
            lambda: weight_gradient(made(R, 12), made(R, D), None, None, OFFSETS, backend="hopper"),
            "I=12, O=16",
        ),
    ],
)
def test_c7_what_the_hopper_kernels_would_leave_out_is_refused(call, reason: str):
    with pytest.raises(ValueError, match=f"backend='hopper' cannot run this: .*{reason}"):
        call()


def test_c7_every_operator_refuses_a_backend_that_is_not_resolved():
    names = [info.name for info in pkgutil.walk_packages(kernels.__path__, "moe.kernels.")]
    checked = 0
    for name in names:
        for op in vars(importlib.import_module(name)).values():
            at = getattr(op, "backend_at", None)
            if at is None:
                continue
            for wrong in ("auto", "spmm", "Triton"):
                with pytest.raises(ValueError, match=f"backend='{wrong}' is not a resolved"):
                    op(*(wrong if i == at else None for i in range(at + 1)))
            checked += 1
    assert checked >= 20
    with pytest.raises(ValueError, match="cross_entropy: backend='auto'"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), None, "auto")


def test_c7_an_operator_without_a_backend_is_not_concerned():
    op = define_op("test_c7_double(Tensor x) -> Tensor", lambda x: 2 * x, torch.empty_like)
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))
