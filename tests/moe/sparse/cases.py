"""Random sparse matrices and the checks that the tests of the products share."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.sparse import BCSR, CSR, matmul, sdd, sddmm, spmm
from tests.moe.kernels.grouped_cases import BOUND, check, nan_memory, random

# M, K, N, density: odd sizes, one row, one column, long rows
SHAPES = [(5, 7, 3, 0.4), (9, 40, 17, 0.15), (1, 40, 20, 0.9), (6, 16, 1, 0.5), (7, 1, 24, 0.5)]
EMPTY = [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0), (3, 10, 150)]


def sparse_dense(
    M: int, K: int, density: float, dtype=torch.float32, device="cpu", skew: bool = False
) -> Tensor:
    """A dense matrix of random values, most of them 0: first, a middle and last row empty."""
    keep = torch.rand(M, K, device=device) < density
    if skew and M:
        keep[M // 3] = True
    if M > 3:
        keep[0], keep[M // 2], keep[-1] = False, False, False
    return random(M, K, dtype=dtype, device=device) * keep


def index(a, dtype: torch.dtype):
    """The matrix with indices of another integer type."""
    pattern = a.pattern.to(index=dtype)
    return (
        type(a)(pattern, a.values, a.shape) if isinstance(a, BCSR) else type(a)(pattern, a.values)
    )


def check_products(a, dense: Tensor, x: Tensor, backend: str, bound: float | None = None) -> None:
    """A · X, Xᵀ · Aᵀ with every gradient, in NaN-filled memory, against dense float64."""
    bound = BOUND[x.dtype] if bound is None else bound
    want_a, want_x = (t.detach().double().requires_grad_() for t in (dense, x))
    want = want_a @ want_x
    grad = random(*want.shape, dtype=x.dtype, device=x.device)
    want_da, want_dx = torch.autograd.grad(want, (want_a, want_x), grad.double())
    stored = a.with_values(torch.ones_like(a.values)).dense() != 0
    for side in ("left", "right"):
        values = a.values.detach().clone().requires_grad_()
        leaf = x.detach().clone().requires_grad_()
        with nan_memory():
            one = a.with_values(values)
            if side == "left":
                out = matmul(one, leaf, backend=backend)
            else:
                out = matmul(leaf.mT, one.t(), backend=backend).mT
            dvalues, dx = torch.autograd.grad(out, (values, leaf), grad)
        assert out.dtype == x.dtype
        check(f"{side} out", out, want, bound)
        check(f"{side} dx", dx, want_dx, bound)
        check(f"{side} dvalues", a.with_values(dvalues).dense(), want_da * stored, bound)


def check_alpha_beta(a, dense: Tensor, x: Tensor, backend: str) -> None:
    """alpha · A · X + beta · C and its gradients; what is not read stays out."""
    add = random(dense.shape[0], x.shape[1], dtype=x.dtype, device=x.device).requires_grad_()
    leaf = x.detach().clone().requires_grad_()
    out = spmm(a, leaf, add, alpha=-0.5, beta=2.0, backend=backend)
    want = -0.5 * (dense.double() @ x.double()) + 2 * add.double()
    check("out", out, want, BOUND[x.dtype])
    grad = random(*out.shape, dtype=x.dtype, device=x.device)
    dx, dadd = torch.autograd.grad(out, (leaf, add), grad)
    check("dx", dx, -0.5 * (dense.double().mT @ grad.double()), BOUND[x.dtype])
    assert torch.equal(dadd, 2 * grad)
    nan = torch.full_like(add, float("nan"))
    out = spmm(a, x, nan, alpha=1.0, beta=0.0, backend=backend)
    check("beta = 0", out, dense.double() @ x.double(), BOUND[x.dtype])
    out = spmm(a, torch.full_like(x, float("nan")), add, alpha=0.0, beta=1.0, backend=backend)
    assert torch.equal(out, add)


def check_sddmm(a: CSR, x: Tensor, y: Tensor, backend: str) -> None:
    """Values of X · Yᵀ at A's entries, and the gradients."""
    x, y = (t.detach().clone().requires_grad_() for t in (x, y))
    wide_x, wide_y = (t.detach().double().requires_grad_() for t in (x, y))
    mask = a.with_values(torch.ones_like(a.values)).dense() != 0
    with nan_memory():
        got = sddmm(a.pattern, x, y, alpha=1.5, backend=backend)
        grad = torch.randn_like(got)
        gradients = torch.autograd.grad(got, (x, y), grad)
    want = 1.5 * (wide_x @ wide_y.mT) * mask
    check("values", a.with_values(got).dense(), want, BOUND[x.dtype])
    full = a.with_values(grad).dense().double()
    for name, g, w in zip("xy", gradients, torch.autograd.grad(want, (wide_x, wide_y), full)):
        check(f"d{name}", g, w, BOUND[x.dtype])


def check_sdd(a: BCSR, x: Tensor, y: Tensor, backend: str) -> None:
    """Blocks of X · Y at A's blocks, and the gradients."""
    x, y = (t.detach().clone().requires_grad_() for t in (x, y))
    wide_x, wide_y = (t.detach().double().requires_grad_() for t in (x, y))
    mask = a.with_values(torch.ones_like(a.values)).dense() != 0
    with nan_memory():
        got = sdd(a.pattern, x, y, a.block, alpha=1.5, backend=backend)
        grad = torch.randn_like(got.values)
        gradients = torch.autograd.grad(got.values, (x, y), grad)
    want = 1.5 * (wide_x @ wide_y) * mask
    check("blocks", got.validate().dense(), want, BOUND[x.dtype])
    full = a.with_values(grad).dense().double()
    for name, g, w in zip("xy", gradients, torch.autograd.grad(want, (wide_x, wide_y), full)):
        check(f"d{name}", g, w, BOUND[x.dtype])
