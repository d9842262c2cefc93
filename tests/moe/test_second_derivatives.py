"""No backward gives wrong second derivatives: it refuses, or it is right."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import models
import moe
import parallel
import training
from models.loss import linear_cross_entropy
from moe import MoE, MoEConfig, RouterConfig, attach_loss
from moe.sparse.dynamic import _Masked
from moe.sparse.formats import _SumDuplicates

REFUSED = pytest.raises(RuntimeError, match="create_graph=True is not supported")
# Their backwards are operations that autograd differentiates; checked by gradgradcheck below.
TWICE = {"_Attach", "_Masked", "_SumDuplicates"}


def _modules() -> list:
    found = []
    for package in (models, moe, parallel, training):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            try:
                found.append(importlib.import_module(info.name))
            except ModuleNotFoundError as error:
                if error.name.split(".")[0] in ("models", "moe", "parallel", "training"):
                    raise  # else an optional library
    return found


def _descendants(cls: type) -> list[type]:
    return [d for child in cls.__subclasses__() for d in (child, *_descendants(child))]


def test_c1_every_hand_written_backward_is_marked():
    names = {module.__name__ for module in _modules()}
    written = [
        cls for cls in _descendants(torch.autograd.Function)
        if cls.__module__ in names and "backward" in vars(cls)
    ]  # fmt: skip
    assert len(written) > 15
    unmarked = {cls.__name__ for cls in written if not hasattr(cls.backward, "first_order")}
    assert unmarked == TWICE
    held = [value for name in names for value in vars(sys.modules[name]).values()]
    operators = [op._backward_fn for op in held if isinstance(op, torch.library.CustomOpDef)]
    differentiable = [fn for fn in operators if fn is not None]
    assert differentiable and all(hasattr(fn, "first_order") for fn in differentiable)


def test_c1_backwards_of_plain_operations_are_right_twice():
    w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(3, 4) > 0.5
    for straight in (False, True):
        (g,) = torch.autograd.grad(
            _Masked.apply(w, keep, straight).pow(3).sum(), w, create_graph=True
        )
        (found,) = torch.autograd.grad(g.square().sum(), w)
        masked = torch.where(keep, w, 0.0).detach()
        # g = 3 m², of w straight through or through the mask once more
        assert torch.allclose(found, 36 * masked.pow(3))
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ends, order = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([3, 0, 1, 4, 2])

    def sums(v):
        return _SumDuplicates.apply(v, ends, order).square()

    assert torch.autograd.gradgradcheck(sums, values)
    aux = torch.randn((), dtype=torch.float64, requires_grad=True)
    y = attach_loss(w.square(), aux.square())
    g_w, g_aux = torch.autograd.grad(y.sum(), (w, aux), create_graph=True)
    (found,) = torch.autograd.grad(g_w.square().sum() + g_aux, aux)
    assert torch.allclose(found, torch.tensor(2.0, dtype=torch.float64))


SIZES = {"hidden_size": 6, "expert_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "plain": {},
    "spmm": {"kernels": "spmm", "expert_size": 16},
    "widths": {"expert_widths": (4, 8, 8, 4)},
    "rounding": {"router": RouterConfig(rounding={"to": "nearest", "tile": 4})},
    "default": {"router": RouterConfig(gradient={"kind": "default"})},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_c1_second_derivatives_of_a_layer_are_refused(name: str):
    torch.manual_seed(0)
    layer = MoE(MoEConfig(**{**SIZES, **CONFIGS[name]}), dtype=torch.float64)
    x = torch.randn(16, 6, dtype=torch.float64, requires_grad=True)
    with REFUSED:
        torch.autograd.grad((x + layer(x)[0]).square().sum(), x, create_graph=True)
    # Pruned to the weights of the experts the router takes no part.
    with REFUSED:
        torch.autograd.grad((x + layer(x)[0]).square().sum(), layer.w1, create_graph=True)
    (g,) = torch.autograd.grad((x + layer(x)[0]).square().sum(), x)
    assert g.isfinite().all()


def test_c1_second_derivatives_of_the_loss_are_refused():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.tensor([1, 2, 3, 4]))
    with REFUSED:
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("how", ["reentrant", "checkpoint", "compiled"])
def test_c1_first_derivatives_remain_and_second_ones_do_not(how: str):
    torch.manual_seed(0)
    layer = MoE(MoEConfig(6, 8, 4, 2, init_std=0.5), dtype=torch.float64)
    x = torch.randn(16, 6, dtype=torch.float64, requires_grad=True)

    def block(x):
        return x + layer(x)[0]

    run = {
        "reentrant": lambda x: checkpoint(block, x, use_reentrant=True),
        "checkpoint": lambda x: checkpoint(block, x, use_reentrant=False),
        "compiled": torch.compile(block, fullgraph=True, backend="aot_eager"),
    }[how]
    block(x).square().sum().backward()
    want, want_w1, x.grad, layer.w1.grad = x.grad, layer.w1.grad, None, None
    run(x).square().sum().backward()
    assert torch.allclose(x.grad, want) and torch.allclose(layer.w1.grad, want_w1)

    def twice():
        (g,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        torch.autograd.grad(g.square().sum(), layer.w1)

    # A reentrant checkpoint takes no `autograd.grad` at all.
    with pytest.raises(RuntimeError, match=r"create_graph|double backward|\.grad\(\)"):
        twice()
