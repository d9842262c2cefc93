"""Products of sparse and dense matrices, differentiable in the values and in the dense side.

    matmul(a, x), matmul(x, a)     either side sparse: CSR, CSC, COO or BCSR
    spmm(a, x, add, alpha, beta)   alpha · A · X + beta · C
    sddmm(pattern, a, b)           values of A · Bᵀ at the entries of a pattern
    sdd(pattern, a, b, block)      blocks of A · B at the entries of a block pattern

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
from moe.sparse.formats import BCSR, COO, CSC, CSR
from moe.sparse.pattern import Pattern

Sparse = COO | CSR | CSC | BCSR


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


# ------------------------------------------------------------------------------------------ public


def spmm(
    a: Sparse,
    x: Tensor,
    add: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """alpha · A · X + beta · C.

    Args:
        a: [M, K] in any format; COO is sorted first (reads memory).
        x: [K, N]; float32, float16, bfloat16 (float64 with the reference).
        add: C, [M, N]; with beta=0 it is not read, so its NaN stay out. With alpha=0 the product
            is not read.
        backend: "auto", "triton" or "reference".

    Returns:
        [M, N] in the dtype of x, contiguous. What is not stored is not multiplied: NaN and Inf of
        x reach only the rows that name them. A stored 0 times NaN is NaN.

    Raises:
        ValueError: shapes, devices or options that do not fit.
    """
    _check(a, x, "x", a.shape[1])
    if beta != 0 and add is None:
        raise ValueError(f"beta={beta} needs `add`, which is None")
    if add is not None and add.shape != (a.shape[0], x.shape[1]):
        raise ValueError(f"add has shape {tuple(add.shape)}, must be {(a.shape[0], x.shape[1])}")
    backend = pick_backend(backend, x)
    add = None if beta == 0 else add
    alpha, beta = float(alpha), float(beta)
    if isinstance(a, BCSR):
        add = None if add is None else add[None]
        values = a.values.to(x.dtype)
        shape = (1, a.shape[0], x.shape[1])
        _derive(a.pattern, flipped=_wants(x), split=False)
        return _Dsd.apply(values, x[None], add, a.pattern, False, shape, alpha, beta, backend)[0]
    a = a.csr() if isinstance(a, COO) else a
    transposed = isinstance(a, CSC)
    _derive(
        a.pattern, rows=_wants(a.values), flipped=transposed or _wants(x), split=backend == "triton"
    )
    return _Spmm.apply(a.values, x, add, a.pattern, transposed, alpha, beta, backend)


def gather(pattern: Pattern, x: Tensor, *, backend: str = "auto") -> Tensor:
    """A · X of the matrix with a one at every entry of the pattern; differentiable in x.

    With one entry a row it copies rows of x, and its gradient adds them up again.
    """
    backend = pick_backend(backend, x)
    _derive(pattern, flipped=_wants(x), split=backend == "triton")
    return _Spmm.apply(None, x, None, pattern, False, 1.0, 0.0, backend)


def matmul(a: Sparse | Tensor, b: Sparse | Tensor, *, backend: str = "auto") -> Tensor:
    """A · B of one sparse and one dense matrix, in the dtype of the dense one; see `spmm`.

    X · A is computed as (Aᵀ · Xᵀ)ᵀ: blocks are read in place, entries from a transposed copy of X.
    """
    if isinstance(a, Tensor) == isinstance(b, Tensor):
        raise ValueError("one side of matmul must be sparse and one a dense tensor")
    if isinstance(b, Tensor):
        return spmm(a, b, backend=backend)
    if a.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"the dense matrix has shape {tuple(a.shape)}, its columns must be the "
            f"{b.shape[0]} rows of the sparse one"
        )
    if isinstance(b, BCSR):
        _check(b, a.mT, "x", b.shape[0])
        shape = (1, b.shape[1], a.shape[0])
        _derive(b.pattern, flipped=True, split=False)
        out = _Dsd.apply(
            b.values.to(a.dtype), a.mT[None], None, b.pattern, True, shape, 1.0, 0.0,
            pick_backend(backend, a),
        )  # fmt: skip
        return out[0].mT.contiguous()
    return spmm(b.t(), a.mT.contiguous(), backend=backend).mT.contiguous()


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


def sdd(
    pattern: Pattern,
    a: Tensor,
    b: Tensor,
    block: int | tuple[int, int],
    *,
    alpha: float = 1.0,
    backend: str = "auto",
) -> BCSR:
    """alpha · A · B at the blocks of a pattern; a [M, N], b [N, K]. Differentiable in both."""
    block = (block, block) if isinstance(block, int) else tuple(block)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a is {tuple(a.shape)} and b {tuple(b.shape)}: inner sizes differ")
    _derive(pattern, flipped=_wants(b), split=False)
    values = _Sdd.apply(a, b[None], pattern, *block, float(alpha), pick_backend(backend, a))
    return BCSR(pattern, values, (a.shape[0], b.shape[1]))


def sdd_stack(
    pattern: Pattern, a: Tensor, b_GIC: Tensor, block: tuple[int, int], *, backend: str = "auto"
) -> Tensor:
    """Blocks [Z, H, W] of A · (b_0 | b_1 | …), the matrices of a stack beside each other.

    C must be a multiple of the block's width, so that no block crosses from one to the next.
    """
    _derive(pattern, flipped=_wants(b_GIC), split=False)
    return _Sdd.apply(a, b_GIC, pattern, *block, 1.0, pick_backend(backend, a))


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


def _check(a: Sparse, x: Tensor, name: str, rows: int) -> None:
    if x.dim() != 2 or x.shape[0] != rows:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; with a matrix of {tuple(a.shape)} it must have "
            f"{rows} rows"
        )
    if a.device != x.device:
        raise ValueError(f"the sparse matrix is on {a.device} and {name} on {x.device}")
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name} is {x.dtype}; allowed: floating dtypes")
