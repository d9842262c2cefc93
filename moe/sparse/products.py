"""Products by a pattern and its values, differentiable in the values and in the dense side.

    entries_product(pattern, values, x)    A · X, A with one value an entry
    blocks_product(pattern, blocks, x)     A · X, A with one block an entry
    sddmm(pattern, a, b)                   values of A · Bᵀ at the entries of a pattern
    sdd_stack(pattern, a, b, block)        blocks of A · B at the entries of a block pattern
    gather(pattern, x)                     A · X, A with a one at every entry

All sums are float32 (float64 for float64), all orders fixed: every product is deterministic, there
is no other mode. Gradients of transposed products walk the flipped pattern, which a matrix derives
once. No second derivatives: a backward with create_graph=True raises RuntimeError.

Shape letters: M, K rows and columns of the sparse matrix, N columns of the dense one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.autograd import first_order
from moe.kernels.common.backend import pick_backend
from moe.kernels.routing import spread as _spread
from moe.kernels.sparse import block_products
from moe.kernels.sparse import sddmm as _sddmm
from moe.kernels.sparse import spmm as _spmm
from moe.sparse.pattern import Pattern


def _wants(*tensors: Tensor | None) -> bool:
    """Whether a gradient will be asked for."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _derive(pattern: Pattern, *, rows: bool = False, flipped: bool = False, split: bool) -> None:
    """Derives what a product and its gradients will read from the pattern.

    Not left to the autograd functions, in which torch.compile allows no assignment.
    """
    _ = rows and pattern.rows, flipped and pattern.flipped
    _ = split and pattern.split, split and flipped and pattern.flipped[0].split


# ------------------------------------------------------------------------------------ by entries


def _product(pattern, transposed, values, x, add, alpha, beta, backend) -> Tensor:
    """alpha · A · X + beta · C, or with Aᵀ, by whichever kernel suits the pattern."""
    walked, order = pattern.flipped if transposed else (pattern, None)
    order = None if values is None else order
    if walked.row_length == 1 and add is None and alpha == 1 and (transposed or pattern.told):
        by_column, back = (pattern, None) if transposed else pattern.flipped
        return _spread.spread(
            by_column.indptr, by_column.indices, back, values, x, walked.indices,
            length=by_column.row_length, backend=backend,
        )  # fmt: skip
    return _spmm.spmm(
        walked.indptr, walked.indices, order, values, x, add, alpha=alpha, beta=beta,
        row_length=walked.row_length, split=walked.split if backend == "triton" else None,
        backend=backend,
    )  # fmt: skip


class _Spmm(torch.autograd.Function):
    """alpha · A · X + beta · C, or with Aᵀ; `values` None means ones."""

    @staticmethod
    def forward(ctx, values, x, add, pattern, transposed, alpha, beta, backend):
        ctx.save_for_backward(values, x)
        ctx.options = pattern, transposed, alpha, beta, backend
        return _product(pattern, transposed, values, x, add, alpha, beta, backend)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        values, x = ctx.saved_tensors
        pattern, transposed, alpha, beta, backend = ctx.options
        need_values, need_x, need_add = ctx.needs_input_grad[:3]
        dvalues = dx = dadd = None
        if need_values:
            a, b = (x, grad) if transposed else (grad, x)
            dvalues = _sddmm.sddmm(
                pattern.rows, pattern.indices, a, b, alpha=alpha, dtype=values.dtype,
                backend=backend,
            )  # fmt: skip
        if need_x:
            dx = _product(pattern, not transposed, values, grad, None, alpha, 0.0, backend)
        if need_add:
            dadd = grad * beta
        return dvalues, dx, dadd, *(None,) * 5


class _Sddmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, pattern, alpha, backend):
        ctx.save_for_backward(a, b)
        ctx.options = pattern, alpha, backend
        return _sddmm.sddmm(pattern.rows, pattern.indices, a, b, alpha=alpha, backend=backend)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        pattern, alpha, backend = ctx.options
        da = db = None
        if ctx.needs_input_grad[0]:
            da = _product(pattern, False, grad, b, None, alpha, 0.0, backend)
        if ctx.needs_input_grad[1]:
            db = _product(pattern, True, grad, a, None, alpha, 0.0, backend)
        return da, db, None, None, None


# ------------------------------------------------------------------------------------- by blocks


def _empty_like(x: Tensor) -> Tensor:
    """New memory with x's shape and order of axes."""
    return torch.empty_like(x, memory_format=torch.preserve_format)


class _Dsd(torch.autograd.Function):
    """out [G', R', N] of S · X, X [G, R, N] a stack."""

    @staticmethod
    def forward(ctx, blocks, x, add, pattern, transposed, out_shape, alpha, beta, backend):
        walked, order = pattern.flipped if transposed else (pattern, None)
        ctx.save_for_backward(blocks, x)
        ctx.options = pattern, transposed, alpha, beta, backend
        out = x.new_empty(out_shape)
        block_products.dsd(
            walked.indptr, walked.indices, order, blocks, x, out, add,
            transposed=transposed, alpha=alpha, beta=beta, backend=backend,
        )  # fmt: skip
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad):
        blocks, x = ctx.saved_tensors
        pattern, transposed, alpha, beta, backend = ctx.options
        need_blocks, need_x, need_add = ctx.needs_input_grad[:3]
        dblocks = dx = dadd = None
        if need_blocks:
            # S = A · B at its blocks with A = grad and B = Xᵀ; A must be one matrix, so for a
            # stack on that side the roles are exchanged and the pattern flipped.
            a, b = (x, grad) if transposed else (grad, x)
            if a.shape[0] != 1:
                raise RuntimeError("the rows of a block-sparse matrix cannot be those of a stack")
            dblocks = block_products.sdd(
                pattern.indptr, pattern.indices, a[0], b.mT, *blocks.shape[1:],
                alpha=alpha, backend=backend,
            )  # fmt: skip
        if need_x:
            walked, order = (pattern, None) if transposed else pattern.flipped
            dx = _empty_like(x)
            block_products.dsd(
                walked.indptr, walked.indices, order, blocks, grad, dx,
                transposed=not transposed, alpha=alpha, backend=backend,
            )  # fmt: skip
        if need_add:
            dadd = grad * beta
        return dblocks, dx, dadd, *(None,) * 6


class _Sdd(torch.autograd.Function):
    """Blocks of A · B; a [R, I], b [G, I, C] a stack of matrices beside each other."""

    @staticmethod
    def forward(ctx, a, b, pattern, height, width, alpha, backend):
        ctx.save_for_backward(a, b)
        ctx.options = pattern, alpha, backend
        return block_products.sdd(
            pattern.indptr, pattern.indices, a, b, height, width, alpha=alpha, backend=backend
        )

    @staticmethod
    @first_order
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        pattern, alpha, backend = ctx.options
        grad = grad.contiguous()
        da = db = None
        if ctx.needs_input_grad[0]:
            da = torch.empty_like(a, memory_format=torch.contiguous_format)
            block_products.dsd(
                pattern.indptr, pattern.indices, None, grad, b.mT, da[None],
                alpha=alpha, backend=backend,
            )  # fmt: skip
        if ctx.needs_input_grad[1]:
            walked, order = pattern.flipped
            db = _empty_like(b)
            block_products.dsd(
                walked.indptr, walked.indices, order, grad, a[None], db.mT,
                transposed=True, alpha=alpha, backend=backend,
            )  # fmt: skip
        return da, db, *(None,) * 5


# ----------------------------------------------------------------------------------------- public


def entries_product(
    pattern: Pattern,
    values: Tensor,
    x: Tensor,
    add: Tensor | None = None,
    *,
    transposed: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """alpha · A · X + beta · C of the matrix with these values at the entries of a pattern.

    Args:
        values: [Z].
        x: [K, N].
        add: C, [M, N].
        transposed: Aᵀ instead of A.
    """
    backend = pick_backend(backend, x)
    _derive(
        pattern,
        rows=_wants(values),
        flipped=transposed or _wants(x),
        split=backend == "triton",
    )
    return _Spmm.apply(values, x, add, pattern, transposed, alpha, beta, backend)


def blocks_product(
    pattern: Pattern,
    blocks: Tensor,
    x: Tensor,
    add: Tensor | None = None,
    *,
    rows: int,
    transposed: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """alpha · A · X + beta · C of the matrix with these blocks at the entries of a pattern.

    Args:
        blocks: [Z, H, W], in any dtype; computed in that of x.
        rows: of the result; the last block may stick out.
    """
    add = None if add is None else add[None]
    _derive(pattern, flipped=transposed or _wants(x), split=False)
    return _Dsd.apply(
        blocks.to(x.dtype), x[None], add, pattern, transposed, (1, rows, x.shape[1]), alpha, beta,
        pick_backend(backend, x),
    )[0]  # fmt: skip


def gather(pattern: Pattern, x: Tensor, *, backend: str = "auto") -> Tensor:
    """A · X of the matrix with a one at every entry of the pattern; differentiable in x.

    With one entry a row it copies rows of x, and its gradient adds them up again.
    """
    backend = pick_backend(backend, x)
    _derive(pattern, flipped=_wants(x), split=backend == "triton")
    return _Spmm.apply(None, x, None, pattern, False, 1.0, 0.0, backend)


def sddmm(
    pattern: Pattern, a: Tensor, b: Tensor, *, alpha: float = 1.0, backend: str = "auto"
) -> Tensor:
    """Values of alpha · A · Bᵀ at the entries of a pattern; a [M, N], b [K, N] of one dtype.

    Unused entries give 0. Differentiable in a and b.
    """
    if a.shape[0] != pattern.shape[0] or b.shape != (pattern.shape[1], a.shape[1]):
        raise ValueError(
            f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}; for a pattern of "
            f"{tuple(pattern.shape)} they must have that many rows and one width"
        )
    backend = pick_backend(backend, a)
    _derive(pattern, rows=True, flipped=_wants(b), split=_wants(a, b) and backend == "triton")
    return _Sddmm.apply(a, b, pattern, float(alpha), backend)


def sdd_stack(
    pattern: Pattern,
    a: Tensor,
    b_GIC: Tensor,
    block: tuple[int, int],
    *,
    alpha: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Blocks [Z, H, W] of alpha · A · (b_0 | b_1 | …), the matrices of a stack beside each other.

    C must be a multiple of the block's width, so that no block crosses from one to the next.
    """
    _derive(pattern, flipped=_wants(b_GIC), split=False)
    return _Sdd.apply(a, b_GIC, pattern, *block, float(alpha), pick_backend(backend, a))


def dsd_stack(pattern: Pattern, blocks: Tensor, x_GRN: Tensor, *, backend: str = "auto") -> Tensor:
    """S · X with X's rows in a stack of matrices of R rows each, a multiple of the block's width.

    Args:
        pattern: of S, in blocks.
        blocks: [Z, H, W].

    Returns:
        [block rows · H, N].
    """
    shape = (1, pattern.shape[0] * blocks.shape[1], x_GRN.shape[2])
    backend = pick_backend(backend, x_GRN)
    _derive(pattern, flipped=_wants(x_GRN), split=False)
    return _Dsd.apply(blocks, x_GRN, None, pattern, False, shape, 1.0, 0.0, backend)[0]
