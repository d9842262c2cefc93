"""Spread: each row of the result is one row of X, times a value; X is read once.

The product with a matrix that has at most one entry a row (dispatch of tokens to experts, and the
backward of combine), walked by columns: a program reads a row of X and writes it to every place
that names it. Walked by rows, as `moe.kernels.sparse.spmm` does, rows in expert order read each
token again for each of its experts, from memory when X is larger than the cache: on an H200 with
16384 tokens of width 4096 to 8 experts 0.45 ms, where the bytes alone need 0.29 ms.

Shape letters: K rows of X, N columns, M rows of the result, Z entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv, tl, triton
from moe.kernels.common.launch import on_device
from moe.kernels.common.ops import define_op
from moe.kernels.common.reference import arithmetic_dtype
from moe.kernels.common.tiles import with_unit_stride
from moe.kernels.common.tuning import Config, pick, size_class

# --------------------------------------------------------------------------------------- reference


def spread_ref(
    indptr_K1: Tensor,
    rows_Z: Tensor,
    order_Z: Tensor | None,
    values_Z: Tensor | None,
    x_KN: Tensor,
    columns_M: Tensor,
) -> Tensor:
    """Plain torch version of `spread`, any device and dtype."""
    M, N = columns_M.shape[0], x_KN.shape[1]
    if x_KN.shape[0] == 0:
        return x_KN.new_zeros(M, N)
    out_MN = x_KN.index_select(0, columns_M.clamp_min(0).long())
    if values_Z is not None:
        value_Z = values_Z if order_Z is None else values_Z[order_Z.long()]
        value_M1 = value_Z.new_zeros(M + 1)
        value_M1[torch.where(rows_Z < 0, M, rows_Z).long()] = value_Z
        wide = arithmetic_dtype(x_KN.dtype)
        out_MN = (out_MN.to(wide) * value_M1[:M, None].to(wide)).to(x_KN.dtype)
    return out_MN.masked_fill_((columns_M < 0)[:, None], 0.0)


# ------------------------------------------------------------------------------------------- kernel


@triton.jit(do_not_specialize=["K", "M"])
def _spread_kernel(
    indptr_ptr, rows_ptr, order_ptr, values_ptr, x_ptr, columns_ptr, out_ptr, K, M, N, stride_x,
    LENGTH: tl.constexpr, VALUES: tl.constexpr, ORDER: tl.constexpr, EVEN: tl.constexpr,
    BN: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    some = cols < N
    if EVEN:
        some = tl.full((BN,), 1, tl.int1)
    if i < K:
        x = tl.load(x_ptr + i.to(tl.int64) * stride_x + cols, mask=some, other=0.0)
        if LENGTH > 0:
            start = i.to(tl.int64) * LENGTH
            end = start + LENGTH
        else:
            start = tl.load(indptr_ptr + i).to(tl.int64)
            end = tl.load(indptr_ptr + i + 1).to(tl.int64)
        entry = rows_ptr + start
        at = start
        for _ in tl.range(start, end):
            row = tl.load(entry)
            y = x
            if VALUES:
                source = at
                if ORDER:
                    source = tl.load(order_ptr + at).to(tl.int64)
                value = tl.load(values_ptr + source).to(tl.float32)
                y = (x.to(tl.float32) * value).to(x.dtype)
            tl.store(out_ptr + row.to(tl.int64) * N + cols, y, mask=some & (row >= 0))
            entry += 1
            at += 1
    else:  # rows of the result that no entry names
        first = (i - K) * CLEAR
        zero = tl.zeros((BN,), dtype=out_ptr.dtype.element_ty)
        for j in tl.static_range(CLEAR):
            row = first + j
            column = tl.load(columns_ptr + row, mask=row < M, other=0)
            tl.store(out_ptr + row.to(tl.int64) * N + cols, zero, mask=some & (column < 0))


# ----------------------------------------------------------------------------------------- launcher

_CLEAR = 16


def configs(dtype: torch.dtype, N: int) -> list[Config]:
    """Configurations worth trying, the default first."""
    line = 32 * 16 // dtype.itemsize  # columns that a warp reads with 16 bytes a lane
    widest = size_class(max(N, 16))
    listed = [(4 * line, 4), (4 * line, 2), (8 * line, 4), (2 * line, 2)]
    fitting = (Config(1, min(bn, widest), 1, max(1, min(w, widest // line))) for bn, w in listed)
    return list(dict.fromkeys(fitting))


def spread_triton(
    indptr_K1: Tensor,
    rows_Z: Tensor,
    order_Z: Tensor | None,
    values_Z: Tensor | None,
    x_KN: Tensor,
    columns_M: Tensor,
    length: int = 0,
    config: Config | None = None,
) -> Tensor:
    """Launches the kernel; see `spread`."""
    (K, N), M = x_KN.shape, columns_M.shape[0]
    out_MN = x_KN.new_empty(M, N)
    if M == 0 or N == 0 or K == 0:
        return out_MN.zero_()
    c = config or pick(
        "spread", (size_class(K), size_class(M), N, str(x_KN.dtype), values_Z is not None),
        configs(x_KN.dtype, N),
        lambda c: spread_triton(
            indptr_K1, rows_Z, order_Z, values_Z, x_KN, columns_M, length, c
        ),
        x_KN.device,
    )  # fmt: skip
    x_KN = with_unit_stride(x_KN)
    with on_device(x_KN):
        _spread_kernel[(K + cdiv(M, _CLEAR), cdiv(N, c.bn))](
            indptr_K1, rows_Z, order_Z, values_Z, x_KN, columns_M, out_MN, K, M, N, x_KN.stride(0),
            LENGTH=length, VALUES=values_Z is not None, ORDER=order_Z is not None,
            EVEN=N % c.bn == 0, BN=c.bn, CLEAR=_CLEAR, num_warps=c.warps,
        )  # fmt: skip
    return out_MN


# ---------------------------------------------------------------------------------------- custom op


def _run(indptr, rows, order, values, x, columns, length, backend):
    if backend == "reference":
        return spread_ref(indptr, rows, order, values, x, columns)
    return spread_triton(indptr, rows, order, values, x, columns, length)


def _fake(indptr, rows, order, values, x, columns, length, backend):
    return x.new_empty(columns.shape[0], x.shape[1])


_op = define_op(
    "spread(Tensor indptr, Tensor rows, Tensor? order, Tensor? values, Tensor x, Tensor columns, "
    "SymInt length, str backend) -> Tensor",
    _run,
    _fake,
)


def spread(
    indptr_K1: Tensor,
    rows_Z: Tensor,
    order_Z: Tensor | None,
    values_Z: Tensor | None,
    x_KN: Tensor,
    columns_M: Tensor,
    *,
    length: int | None = None,
    backend: str = "reference",
) -> Tensor:
    """out_MN[rows_Z[z]] = value of z · x_KN[k] for the entries z of row k of X; no gradient.

    Args:
        indptr_K1: int32 or int64, first entry of each row of X.
        rows_Z: int32 or int64 row of the result of each entry, each row at most once; -1 = unused.
        order_Z: where the value of each entry lies in `values_Z`; None = at the entry's own place.
        values_Z: any floating dtype; None = ones.
        x_KN: dense; float32, float16, bfloat16 (float64 with the reference).
        columns_M: the same entries by row of the result: its row of X; -1 = none, it becomes 0.
        length: entries of a row, where all have the same number.
        backend: "reference" or "triton", already resolved.
    """
    return _op(indptr_K1, rows_Z, order_Z, values_Z, x_KN, columns_M, length or 0, backend)
