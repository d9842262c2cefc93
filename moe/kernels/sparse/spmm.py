"""SpMM: a sparse matrix in CSR times a dense one, out = alpha · A · X + beta · C.

One program sums the entries of (at most `chunk` of) one row for a strip of columns, in float32, in
the order in which they are stored; U entries are in flight together. Rows longer than `chunk` are
cut into parts (`split_rows`), whose sums a second launch adds in order. No atomics: the same bits
every time, on any card, for one configuration. Splitting long rows follows the "row splitting" of
C. Yang, A. Buluç and J. Owens, "Design principles for sparse matrix multiplication on the GPU"
(arXiv 1803.08601).

An entry whose column is -1 is unused and adds nothing, whatever its value. What is not stored is
not multiplied: NaN and Inf of X reach only the rows that name them.

Shape letters: M rows, K columns of A; N columns of X; Z entries; I items of work, J split rows,
P parts of split rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv, tl, triton
from moe.kernels.common.launch import on_device
from moe.kernels.common.ops import define_op
from moe.kernels.common.reference import arithmetic_dtype
from moe.kernels.common.tiles import with_unit_stride
from moe.kernels.common.tuning import Config, pick, size_class

# --------------------------------------------------------------------------------------- reference

_TERMS = 1 << 24  # numbers that the reference holds at once


def spmm_ref(
    indptr_M1: Tensor,
    indices_Z: Tensor,
    order_Z: Tensor | None,
    values_Z: Tensor | None,
    x_KN: Tensor,
    add_MN: Tensor | None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    """Plain torch version of `spmm`, any device and dtype."""
    M, N, Z = indptr_M1.shape[0] - 1, x_KN.shape[1], indices_Z.shape[0]
    wide = arithmetic_dtype(x_KN.dtype)
    out_MN = torch.zeros(M, N, dtype=wide, device=x_KN.device)
    if M and N and Z and x_KN.shape[0] and alpha != 0:
        value_Z = None
        if values_Z is not None:
            value_Z = (values_Z if order_Z is None else values_Z[order_Z.long()]).to(wide)[:, None]
        column_Z = indices_Z.clamp(0, x_KN.shape[0] - 1).long()
        unused_Z1 = (indices_Z < 0)[:, None]
        step = max(1, _TERMS // Z)
        for n in range(0, N, step):
            term_ZN = x_KN[:, n : n + step].index_select(0, column_Z).to(wide)
            if value_Z is not None:
                term_ZN = term_ZN * value_Z
            term_ZN = term_ZN.masked_fill(unused_Z1, 0.0)
            out_MN[:, n : n + step] = torch.segment_reduce(
                term_ZN, "sum", offsets=indptr_M1.long(), axis=0, unsafe=True, initial=0.0
            )
        out_MN *= alpha
    if add_MN is not None and beta != 0:
        out_MN += beta * add_MN
    return out_MN.to(x_KN.dtype)


# -------------------------------------------------------------------------------------- split rows


class Split(NamedTuple):
    """Work items for rows of any length; all int32, made on the device without reading back."""

    row_I: Tensor
    """Row of each item; M = no item."""
    chunk_I: Tensor
    """Which chunk of its row."""
    part_M1: Tensor
    """First part of each row; a row that is one item has no parts."""
    row_J: Tensor
    """Rows that have parts; M = none."""
    chunk: int
    """Entries of an item, at most."""


def chunk_size(entries: int, rows: int) -> int:
    """Entries an item may have: twice the mean row, so that even rows are not cut."""
    return min(1024, max(64, size_class(2 * entries // max(rows, 1))))


def split_rows(indptr_M1: Tensor, entries: int, chunk: int) -> Split | None:
    """Items of at most `chunk` entries; None when no row can be longer than that."""
    M = indptr_M1.shape[0] - 1
    if entries <= chunk or M == 0:
        return None
    device = indptr_M1.device
    count_M = (indptr_M1[1:] - indptr_M1[:-1] + (chunk - 1)) // chunk
    zero = torch.zeros(1, dtype=torch.int64, device=device)

    def sums(count_M: Tensor) -> Tensor:
        return torch.cat([zero, count_M.cumsum(0, dtype=torch.int64)])

    def find(sum_M1: Tensor, n: int) -> Tensor:
        n_N = torch.arange(n, device=device)
        return torch.searchsorted(sum_M1[1:].contiguous(), n_N, right=True)

    item_M1 = sums(count_M.clamp_min(1))
    row_I = find(item_M1, M + entries // chunk)
    chunk_I = torch.arange(row_I.shape[0], device=device) - item_M1[row_I]
    parts_M1 = sums(torch.where(count_M > 1, count_M, 0))
    row_J = find(sums(count_M > 1), entries // (chunk + 1))
    return Split(*(t.to(torch.int32) for t in (row_I, chunk_I, parts_M1, row_J)), chunk)


# ------------------------------------------------------------------------------------------- kernel


@triton.jit
def _entry(
    indices_ptr, order_ptr, values_ptr, e, end, VALUES: tl.constexpr, ORDER: tl.constexpr
):  # fmt: skip
    """(column, value) of entries; column -1 from `end` on."""
    column = tl.load(indices_ptr + e, mask=e < end, other=-1)
    value = tl.full(e.shape, 1.0, tl.float32)
    if VALUES:
        at = e
        if ORDER:
            at = tl.load(order_ptr + e, mask=e < end, other=0).to(tl.int64)
        value = tl.load(values_ptr + at, mask=e < end, other=0.0).to(tl.float32)
    return column, value


@triton.jit
def _finish(
    acc, add_ptr, out_ptr, row, cols, some, N, stride_add, alpha, beta, ADD: tl.constexpr
):  # fmt: skip
    acc *= alpha
    if ADD:
        at = row.to(tl.int64) * stride_add + cols
        acc += beta * tl.load(add_ptr + at, mask=some, other=0.0).to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * N + cols, out, mask=some)


@triton.jit(do_not_specialize=["M", "chunk"])
def _spmm_kernel(
    indptr_ptr, indices_ptr, order_ptr, values_ptr, x_ptr, add_ptr, out_ptr, parts_ptr,
    item_row_ptr, item_chunk_ptr, first_part_ptr, M, N, stride_x, stride_add, alpha, beta, chunk,
    K: tl.constexpr, SPLIT: tl.constexpr, VALUES: tl.constexpr, ORDER: tl.constexpr,
    ADD: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    some = cols < N
    if EVEN:
        some = tl.full((BN,), 1, tl.int1)
    row = i
    real = True
    if SPLIT:
        row = tl.load(item_row_ptr + i)
        real = row < M
        row = tl.minimum(row, M - 1)
    if K > 0:  # every row has K entries
        start = row.to(tl.int64) * K
        end = start + K
    else:
        start = tl.load(indptr_ptr + row)
        end = tl.load(indptr_ptr + row + 1)
    if SPLIT:
        number = tl.load(item_chunk_ptr + i)
        start += number * chunk
        end = tl.where(real, tl.minimum(end, start + chunk), start)
    acc = tl.zeros((U, BN), dtype=tl.float32)
    e = start + tl.arange(0, U)
    column, value = _entry(indices_ptr, order_ptr, values_ptr, e, end, VALUES, ORDER)
    for _ in tl.range(start, end, U):
        e += U
        # The next columns are on their way while the rows of these are.
        next_column, next_value = _entry(
            indices_ptr, order_ptr, values_ptr, e, end, VALUES, ORDER
        )  # fmt: skip
        at = column.to(tl.int64)[:, None] * stride_x + cols[None, :]
        x = tl.load(x_ptr + at, mask=(column >= 0)[:, None] & some[None, :], other=0.0)
        if VALUES:  # not 0 · value: an unused entry may hold NaN
            value = tl.where(column >= 0, value, 0.0)
            acc += value[:, None] * x.to(tl.float32)
        else:
            acc += x.to(tl.float32)
        column = next_column
        value = next_value
    total = tl.sum(acc, axis=0)
    if SPLIT:
        part = tl.load(first_part_ptr + row)
        if tl.load(first_part_ptr + row + 1) > part:
            at = (part + number).to(tl.int64) * N + cols
            tl.store(parts_ptr + at, total, mask=some & real)
        else:
            _finish(
                total, add_ptr, out_ptr, row, cols, some & real, N, stride_add, alpha, beta, ADD
            )  # fmt: skip
    else:
        _finish(total, add_ptr, out_ptr, row, cols, some, N, stride_add, alpha, beta, ADD)


@triton.jit(do_not_specialize=["M"])
def _parts_kernel(
    parts_ptr, first_part_ptr, split_row_ptr, add_ptr, out_ptr, M, N, stride_add, alpha, beta,
    ADD: tl.constexpr, BN: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    row = tl.load(split_row_ptr + tl.program_id(0))
    real = row < M
    row = tl.minimum(row, M - 1)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    some = (cols < N) & real
    first = tl.load(first_part_ptr + row)
    last = tl.where(real, tl.load(first_part_ptr + row + 1), first)
    acc = tl.zeros((U, BN), dtype=tl.float32)
    for p in tl.range(first, last, U):  # U parts are on their way together
        parts = p + tl.arange(0, U)
        at = parts.to(tl.int64)[:, None] * N + cols[None, :]
        mask = (parts < last)[:, None] & some[None, :]
        acc += tl.load(parts_ptr + at, mask=mask, other=0.0)
    total = tl.sum(acc, axis=0)
    _finish(total, add_ptr, out_ptr, row, cols, some, N, stride_add, alpha, beta, ADD)


# ----------------------------------------------------------------------------------------- launcher


def configs(dtype: torch.dtype, mean: int, N: int) -> list[Config]:
    """Configurations worth trying for rows of `mean` entries, the default first."""
    line = 32 * 16 // dtype.itemsize  # columns that a warp reads with 16 bytes a lane
    widest = size_class(max(N, 16))
    u = min(8, size_class(max(mean, 1)))
    if u < 8:
        listed = [(4 * line, u, 4), (4 * line, u, 2), (8 * line, u, 4)]
    else:
        listed = [(line, 4, 1), (2 * line, 8, 1), (4 * line, 8, 4)]
    fitting = (Config(1, min(bn, widest), u, max(1, min(w, widest // line))) for bn, u, w in listed)
    return list(dict.fromkeys(fitting))


def spmm_triton(
    indptr_M1: Tensor,
    indices_Z: Tensor,
    order_Z: Tensor | None,
    values_Z: Tensor | None,
    x_KN: Tensor,
    add_MN: Tensor | None,
    alpha: float = 1.0,
    beta: float = 0.0,
    row_length: int = 0,
    split: Split | None = None,
    config: Config | None = None,
) -> Tensor:
    """Launches the kernels; see `spmm`."""
    M, N, Z = indptr_M1.shape[0] - 1, x_KN.shape[1], indices_Z.shape[0]
    out_MN = x_KN.new_empty(M, N)
    add_MN = None if beta == 0 else add_MN
    if M == 0 or N == 0 or Z == 0 or x_KN.shape[0] == 0 or alpha == 0:
        return out_MN.zero_() if add_MN is None else torch.mul(add_MN, beta, out=out_MN)
    mean = -(-Z // M)
    c = config or pick(
        "spmm", (size_class(mean), N, str(x_KN.dtype), split is not None, order_Z is not None),
        configs(x_KN.dtype, mean, N),
        lambda c: spmm_triton(
            indptr_M1, indices_Z, order_Z, values_Z, x_KN, add_MN, alpha, beta, row_length, split, c
        ),
        x_KN.device,
    )  # fmt: skip
    x_KN = with_unit_stride(x_KN)
    add_MN = None if add_MN is None else with_unit_stride(add_MN)
    stride_add = 0 if add_MN is None else add_MN.stride(0)
    items, parts = M, None
    if split is not None:
        items = split.row_I.shape[0]
        parts = x_KN.new_empty(2 * (items - M) + 2, N, dtype=torch.float32)
    with on_device(x_KN):
        _spmm_kernel[(items, cdiv(N, c.bn))](
            indptr_M1, indices_Z, order_Z, values_Z, x_KN, add_MN, out_MN, parts,
            *((None,) * 3 if split is None else split[:3]), M, N, x_KN.stride(0), stride_add,
            alpha, beta, 0 if split is None else split.chunk,
            K=row_length, SPLIT=split is not None, VALUES=values_Z is not None,
            ORDER=order_Z is not None, ADD=add_MN is not None, EVEN=N % c.bn == 0,
            BN=c.bn, U=c.bk, num_warps=c.warps,
        )  # fmt: skip
        if split is not None and split.row_J.shape[0]:
            BN = min(256, size_class(max(N, 16)))
            _parts_kernel[(split.row_J.shape[0], cdiv(N, BN))](
                parts, split.part_M1, split.row_J, add_MN, out_MN, M, N, stride_add, alpha, beta,
                ADD=add_MN is not None, BN=BN, U=8, num_warps=max(1, BN // 128),
            )  # fmt: skip
    return out_MN


# ---------------------------------------------------------------------------------------- custom op


def _run(
    indptr, indices, order, values, x, add, alpha, beta, row_length, split, chunk, backend
):  # fmt: skip
    if backend == "reference":
        return spmm_ref(indptr, indices, order, values, x, add, alpha, beta)
    split = Split(*split, chunk) if split else None
    return spmm_triton(indptr, indices, order, values, x, add, alpha, beta, row_length, split)


def _fake(
    indptr, indices, order, values, x, add, alpha, beta, row_length, split, chunk, backend
):  # fmt: skip
    return x.new_empty(indptr.shape[0] - 1, x.shape[1])


_op = define_op(
    "spmm(Tensor indptr, Tensor indices, Tensor? order, Tensor? values, Tensor x, Tensor? add, "
    "float alpha, float beta, SymInt row_length, Tensor[] split, int chunk, str backend) -> Tensor",
    _run,
    _fake,
)

# ------------------------------------------------------------------------------------------ public


def spmm(
    indptr_M1: Tensor,
    indices_Z: Tensor,
    order_Z: Tensor | None,
    values_Z: Tensor | None,
    x_KN: Tensor,
    add_MN: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    row_length: int | None = None,
    split: Split | None = None,
    backend: str = "reference",
) -> Tensor:
    """out_MN = alpha · A · x_KN + beta · add_MN in the dtype of x; no gradient.

    Args:
        indptr_M1: int32 or int64, first entry of each row; entries from its last on are unused.
        indices_Z: int32 or int64 column of each entry; -1 = unused.
        order_Z: where the value of each entry lies in `values_Z`; None = at the entry's own place.
        values_Z: any floating dtype; None = ones.
        x_KN: dense; float32, float16, bfloat16 (float64 with the reference).
        add_MN: not read when beta is 0, so its NaN stay out; the product is not read when alpha
            is 0 (as in BLAS).
        row_length: K, when row r has exactly the entries r · K … r · K + K - 1.
        split: items of work where rows are long, see `split_rows`; the reference needs none.
        backend: "reference" or "triton", already resolved.
    """
    parts = [] if split is None else list(split[:4])
    chunk = 0 if split is None else split.chunk
    return _op(
        indptr_M1, indices_Z, order_Z, values_Z, x_KN, add_MN, alpha, beta, row_length or 0,
        parts, chunk, backend,
    )  # fmt: skip
