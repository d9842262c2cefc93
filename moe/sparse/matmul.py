"""Products of sparse and dense matrices, differentiable in the values and in the dense side.

matmul(a, x), matmul(x, a)     either side sparse: CSR, CSC, COO or BCSR; also a @ x, x @ a
spmm(a, x, add, alpha, beta)   alpha · A · X + beta · C
sdd(pattern, a, b, block)      A · B at the blocks of a pattern, as BCSR
"""

from __future__ import annotations

from torch import Tensor

from moe.sparse.formats import BCSR, COO, CSC, CSR
from moe.sparse.pattern import Pattern
from moe.sparse.products import sdd_stack

Sparse = COO | CSR | CSC | BCSR


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
    return a.times(x, add, alpha=alpha, beta=beta, backend=backend)


def matmul(a: Sparse | Tensor, b: Sparse | Tensor, *, backend: str = "auto") -> Tensor:
    """A · B of one sparse and one dense matrix, in the dtype of the dense one; see `spmm`."""
    if isinstance(a, Tensor) == isinstance(b, Tensor):
        raise ValueError("one side of matmul must be sparse and one a dense tensor")
    if isinstance(b, Tensor):
        return a.times(b, backend=backend)
    return b.times_from_left(a, backend=backend)


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
    values = sdd_stack(pattern, a, b[None], block, alpha=alpha, backend=backend)
    return BCSR(pattern, values, (a.shape[0], b.shape[1]))
