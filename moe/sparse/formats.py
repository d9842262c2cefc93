"""Sparse matrices: COO, CSR, CSC and BCSR.

    a = CSR.from_dense(w)                   a = COO(rows, columns, values, (M, K)).csr()
    y = a @ x        y = x @ a              a.t(), a.csc(), a.bcsr(16), a.dense(), a.torch()

`density` is the share of entries that are stored; sparsity is 1 - density. Conversions carry the
gradient of the values. Those that must count entries (to a smaller set of them, or from a dense
matrix) read memory back; CSR to CSC and every transpose do not.

Shape letters: M rows, K columns, Z stored entries (blocks, in BCSR); H, W height and width of a
block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.kernels.common.backend import pick_backend
from moe.kernels.sparse.spmm import spmm
from moe.sparse.pattern import INDEX, Pattern
from moe.sparse.products import blocks_product, entries_product


class _Sparse:
    """What the formats share."""

    values: Tensor
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def density(self) -> float:
        """Stored numbers over M · K; unused entries count as stored."""
        return self.values.numel() / max(1, self.shape[0] * self.shape[1])

    def with_values(self, values: Tensor):
        """The same entries with other values of the same shape."""
        if values.shape != self.values.shape:
            raise ValueError(
                f"values has shape {tuple(values.shape)}, must be {tuple(self.values.shape)}"
            )
        return replace(self, values=values)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        """On another device, or with values of another dtype."""
        values = self.values.to(device, dtype)
        if device is None or values.device == self.values.device:
            return replace(self, values=values)
        return replace(self, values=values, pattern=self.pattern.to(values.device))

    def times(
        self,
        x: Tensor,
        add: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        backend: str = "auto",
    ) -> Tensor:
        """alpha · A · X + beta · C; see `moe.sparse.spmm`."""
        if x.dim() != 2 or x.shape[0] != self.shape[1]:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; with a matrix of {tuple(self.shape)} it must have "
                f"{self.shape[1]} rows"
            )
        self._check(x)
        if beta != 0 and add is None:
            raise ValueError(f"beta={beta} needs `add`, which is None")
        out = (self.shape[0], x.shape[1])
        if add is not None and add.shape != out:
            raise ValueError(f"add has shape {tuple(add.shape)}, must be {out}")
        add = None if beta == 0 else add
        return self._times(x, add, alpha=float(alpha), beta=float(beta), backend=backend)

    def times_from_left(self, x: Tensor, *, backend: str = "auto") -> Tensor:
        """X · A, computed as (Aᵀ · Xᵀ)ᵀ: blocks are read in place, entries from a copy of Xᵀ."""
        if x.dim() != 2 or x.shape[1] != self.shape[0]:
            raise ValueError(
                f"the dense matrix has shape {tuple(x.shape)}, its columns must be the "
                f"{self.shape[0]} rows of the sparse one"
            )
        self._check(x)
        return self._transpose_times(x.mT, backend=backend).mT.contiguous()

    def _times(self, x: Tensor, add: Tensor | None, **options) -> Tensor:
        raise NotImplementedError

    def _transpose_times(self, x: Tensor, *, backend: str) -> Tensor:
        return self.t().times(x.contiguous(), backend=backend)

    def _check(self, x: Tensor) -> None:
        if self.device != x.device:
            raise ValueError(f"the sparse matrix is on {self.device} and x on {x.device}")
        if not x.dtype.is_floating_point:
            raise ValueError(f"x is {x.dtype}; allowed: floating dtypes")

    def __matmul__(self, x: Tensor) -> Tensor:
        return self.times(x)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return self.times_from_left(x)


@dataclass(frozen=True)
class COO(_Sparse):
    """Entries as (row, column, value), in any order; entries at one place add up.

    Raises:
        ValueError: arrays that differ in length, or (reads memory) rows or columns out of range.
    """

    rows: Tensor
    """int32 or int64 [Z]."""
    columns: Tensor
    """int32 or int64 [Z]."""
    values: Tensor
    """floating [Z]."""
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        for name, size in (("rows", self.shape[0]), ("columns", self.shape[1])):
            t = getattr(self, name)
            if t.dtype not in INDEX or t.shape != self.values.shape or t.dim() != 1:
                raise ValueError(
                    f"{name} must be int32 or int64 of the values' shape "
                    f"{tuple(self.values.shape)}, got {t.dtype} {tuple(t.shape)}"
                )
            wrong = t[(t < 0) | (t >= size)]
            if wrong.numel():
                raise ValueError(
                    f"{name} holds {int(wrong[0])}; allowed: 0 to {size - 1}"
                    if size
                    else f"{name} holds {int(wrong[0])}, but the matrix of shape "
                    f"{tuple(self.shape)} has no {name}"
                )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> COO:
        values = self.values.to(device, dtype)
        return COO(self.rows.to(values.device), self.columns.to(values.device), values, self.shape)

    def csr(self) -> CSR:
        """Sorted by row, then column, duplicates summed in the order given, in float32 or wider."""
        K = self.shape[1]
        key = self.rows.long() * K + self.columns.long()
        sorted_, order = key.sort(stable=True)
        place, count = torch.unique_consecutive(sorted_, return_counts=True)
        if place.shape[0] == key.shape[0]:
            values = self.values[order]
        else:
            ends = torch.cat([count.new_zeros(1), count.cumsum(0)])
            values = _SumDuplicates.apply(self.values, ends, order)
        row = place // max(K, 1)
        pattern = Pattern.from_sorted(row, place - row * K, self.shape, self.columns.dtype)
        return CSR(pattern, values)

    def coo(self) -> COO:
        return self

    def csc(self) -> CSC:
        return self.csr().csc()

    def bcsr(self, block: int | tuple[int, int]) -> BCSR:
        """See `CSR.bcsr`."""
        return self.csr().bcsr(block)

    def _times(self, x: Tensor, add: Tensor | None, **options) -> Tensor:
        return self.csr()._times(x, add, **options)

    def t(self) -> COO:
        """The transpose, sharing all arrays."""
        return COO(self.columns, self.rows, self.values, self.shape[::-1])

    def dense(self) -> Tensor:
        return self.csr().dense()

    def torch(self) -> Tensor:
        """torch.sparse_coo tensor; not coalesced."""
        indices = torch.stack([self.rows.long(), self.columns.long()])
        return torch.sparse_coo_tensor(
            indices, self.values, self.shape, check_invariants=False, is_coalesced=False
        )


class _SumDuplicates(torch.autograd.Function):
    """Sums of runs of values, in order, in float32 or wider."""

    @staticmethod
    def forward(ctx, values, ends, order):
        ctx.save_for_backward(ends, order)
        backend = pick_backend("auto", values)
        return spmm(ends, order, None, None, values.detach()[:, None], backend=backend)[:, 0]

    @staticmethod
    def backward(ctx, grad):
        ends, order = ctx.saved_tensors
        spread = torch.repeat_interleave(grad, ends.diff(), output_size=order.shape[0])
        return torch.empty_like(spread).index_copy_(0, order, spread), None, None


@dataclass(frozen=True)
class _Compressed(_Sparse):
    """CSR and CSC: a pattern and one value an entry."""

    pattern: Pattern
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.shape != self.pattern.indices.shape:
            raise ValueError(
                f"values has shape {tuple(self.values.shape)}, the pattern has "
                f"{self.pattern.entries} entries"
            )

    def _flip(self) -> tuple[Pattern, Tensor]:
        pattern, order = self.pattern.flipped
        return pattern, self.values[order]

    def _times(self, x: Tensor, add: Tensor | None, **options) -> Tensor:
        transposed = self.AXES[0] == "column"
        return entries_product(self.pattern, self.values, x, add, transposed=transposed, **options)

    def validate(self):
        """Check the entries, reading memory; returns self. See `Pattern.validate`."""
        self.pattern.validate(*self.AXES)
        return self

    def coo(self) -> COO:
        """Drops unused entries."""
        p = self.pattern
        used = torch.nonzero((p.indices >= 0) & (p.rows < p.shape[0])).flatten()
        major, minor = p.rows[used].to(p.indices.dtype), p.indices[used]
        rows, columns = (major, minor) if self.AXES[0] == "row" else (minor, major)
        return COO(rows, columns, self.values[used], self.shape)

    def bcsr(self, block: int | tuple[int, int]) -> BCSR:
        """Blocks that hold an entry; a block's other numbers are zeros.

        Args:
            block: height and width of a block, or both. Need not divide the shape.
        """
        H, W = (block, block) if isinstance(block, int) else block
        coo = self.csr().coo()
        M, K = -(-self.shape[0] // H), -(-self.shape[1] // W)
        row, column = coo.rows.long(), coo.columns.long()
        place, at = torch.unique((row // H) * max(K, 1) + column // W, return_inverse=True)
        values = self.values.new_zeros(place.shape[0] * H * W)
        values = values.index_put(
            ((at * H + row % H) * W + column % W,), coo.values, accumulate=True
        )
        block_row = place // max(K, 1)
        index = self.pattern.indices.dtype
        pattern = Pattern.from_sorted(block_row, place - block_row * K, (M, K), index)
        return BCSR(pattern, values.view(-1, H, W), self.shape)


@dataclass(frozen=True)
class CSR(_Compressed):
    """Rows of entries."""

    AXES = ("row", "column")

    @classmethod
    def make(cls, indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> CSR:
        """A checked matrix from its arrays (reads memory; `CSR(Pattern(...), values)` does not).

        Raises:
            ValueError: what does not fit, see `Pattern.validate`.
        """
        return cls(Pattern(indptr, indices, tuple(shape)), values).validate()

    @classmethod
    def from_dense(cls, x: Tensor, keep: Tensor | None = None) -> CSR:
        """The entries of x where `keep` [M, K] is true, or that are not 0; int32 indices."""
        row, column = torch.nonzero(x.detach() != 0 if keep is None else keep, as_tuple=True)
        pattern = Pattern.from_sorted(row, column, tuple(x.shape), torch.int32)
        return cls(pattern, x[row, column])

    @property
    def shape(self) -> tuple[int, int]:
        return self.pattern.shape

    def csr(self) -> CSR:
        return self

    def csc(self) -> CSC:
        """By column, stable; nothing is read back."""
        return CSC(*self._flip())

    def t(self) -> CSC:
        """The transpose, sharing all arrays."""
        return CSC(self.pattern, self.values)

    def dense(self) -> Tensor:
        """[M, K]; entries at one place add up."""
        M, K = self.shape
        p = self.pattern
        used = (p.indices >= 0) & (p.rows < M)
        place = torch.where(used, p.rows.long() * K + p.indices.long(), M * K)
        flat = self.values.new_zeros(M * K + 1).index_add(0, place, self.values)
        return flat[: M * K].view(M, K)

    def torch(self) -> Tensor:
        """torch.sparse_csr tensor sharing the arrays, which must hold no unused entry."""
        return torch.sparse_csr_tensor(
            self.pattern.indptr, self.pattern.indices, self.values, self.shape,
            check_invariants=False,
        )  # fmt: skip


@dataclass(frozen=True)
class CSC(_Compressed):
    """Columns of entries; `pattern` is that of the transpose."""

    AXES = ("column", "row")

    @classmethod
    def make(cls, indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> CSC:
        """A checked matrix from its arrays: pointers of columns, rows of entries."""
        return cls(Pattern(indptr, indices, tuple(shape)[::-1]), values).validate()

    @property
    def shape(self) -> tuple[int, int]:
        return self.pattern.shape[::-1]

    def csr(self) -> CSR:
        """By row, stable; nothing is read back."""
        return CSR(*self._flip())

    def csc(self) -> CSC:
        return self

    def t(self) -> CSR:
        """The transpose, sharing all arrays."""
        return CSR(self.pattern, self.values)

    def dense(self) -> Tensor:
        return self.t().dense().t()

    def torch(self) -> Tensor:
        """torch.sparse_csc tensor sharing the arrays, which must hold no unused entry."""
        return torch.sparse_csc_tensor(
            self.pattern.indptr, self.pattern.indices, self.values, self.shape,
            check_invariants=False,
        )  # fmt: skip


@dataclass(frozen=True)
class BCSR(_Sparse):
    """Rows of dense blocks; `pattern` counts in blocks, the last of which may stick out.

    Raises:
        ValueError: values that do not fit the pattern, or a pattern that does not cover the shape.
    """

    pattern: Pattern
    values: Tensor
    """[Z, H, W]; zeros where a block sticks out of the matrix."""
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if self.values.dim() != 3 or self.values.shape[0] != self.pattern.entries:
            raise ValueError(
                f"values has shape {tuple(self.values.shape)}, must be [{self.pattern.entries}, "
                "height, width]"
            )
        H, W = self.values.shape[1:]
        if self.pattern.shape != (-(-self.shape[0] // H), -(-self.shape[1] // W)):
            raise ValueError(
                f"blocks of {H} x {W} cover a matrix of {tuple(self.shape)} in "
                f"{-(-self.shape[0] // H)} x {-(-self.shape[1] // W)} blocks, "
                f"the pattern has {tuple(self.pattern.shape)}"
            )

    @classmethod
    def make(cls, indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> BCSR:
        """A checked matrix from its arrays (reads memory): block pointers and block columns."""
        if values.dim() != 3 or 0 in values.shape[1:]:
            raise ValueError(
                f"values must be [entries, height, width], got shape {tuple(values.shape)}"
            )
        H, W = values.shape[1:]
        blocks = (-(-shape[0] // H), -(-shape[1] // W))
        return cls(Pattern(indptr, indices, blocks), values, tuple(shape)).validate()

    @classmethod
    def from_dense(
        cls, x: Tensor, block: int | tuple[int, int], keep: Tensor | None = None
    ) -> BCSR:
        """The blocks of x where `keep` [block rows, block columns] is true, or that are not 0."""
        H, W = (block, block) if isinstance(block, int) else block
        tiles = _tiles(x, H, W)
        if keep is None:
            keep = (tiles.detach() != 0).any(-1).any(-1)
        row, column = torch.nonzero(keep, as_tuple=True)
        pattern = Pattern.from_sorted(row, column, tuple(tiles.shape[:2]), torch.int32)
        return cls(pattern, tiles[row, column], tuple(x.shape))

    @property
    def block(self) -> tuple[int, int]:
        """(height, width)."""
        return tuple(self.values.shape[1:])

    def validate(self) -> BCSR:
        """Check the entries, reading memory; returns self.

        Raises:
            ValueError: see `Pattern.validate`; also numbers other than 0 outside the matrix.
        """
        self.pattern.validate("block row", "block column")
        (M, K), (H, W) = self.shape, self.block
        row = self.pattern.rows[:, None] * H + torch.arange(H, device=self.device)
        column = self.pattern.indices[:, None] * W + torch.arange(W, device=self.device)
        outside = (row >= M)[:, :, None] | (column >= K)[:, None, :]
        if (outside & (self.values != 0)).any():
            raise ValueError(f"blocks hold numbers other than 0 outside the shape {(M, K)}")
        return self

    def csr(self) -> CSR:
        """Every number of the stored blocks becomes an entry, zeros included."""
        p, (H, W), (M, K) = self.pattern, self.block, self.shape
        row = p.rows[:, None, None].long() * H + torch.arange(H, device=self.device)[:, None]
        column = p.indices[:, None, None].long() * W + torch.arange(W, device=self.device)
        used = ((p.rows < p.shape[0]) & (p.indices >= 0))[:, None, None]
        used = torch.nonzero((used & (row < M) & (column < K)).flatten()).flatten()
        shape, index = self.values.shape, p.indices.dtype
        row, column = (t.expand(shape).reshape(-1)[used].to(index) for t in (row, column))
        return COO(row, column, self.values.reshape(-1)[used], self.shape).csr()

    def coo(self) -> COO:
        return self.csr().coo()

    def csc(self) -> CSC:
        return self.csr().csc()

    def _times(self, x: Tensor, add: Tensor | None, **options) -> Tensor:
        return blocks_product(self.pattern, self.values, x, add, rows=self.shape[0], **options)

    def _transpose_times(self, x: Tensor, *, backend: str) -> Tensor:
        return blocks_product(
            self.pattern, self.values, x, rows=self.shape[1], transposed=True, backend=backend
        )

    def bcsr(self, block: int | tuple[int, int]) -> BCSR:
        """The same matrix in blocks of another size."""
        block = (block, block) if isinstance(block, int) else tuple(block)
        return self if block == self.block else self.csr().bcsr(block)

    def t(self) -> BCSR:
        """The transpose; copies the blocks in their new order."""
        pattern, order = self.pattern.flipped
        return BCSR(pattern, self.values[order].mT.contiguous(), self.shape[::-1])

    def dense(self) -> Tensor:
        """[M, K]."""
        return self.csr().dense()

    def torch(self) -> Tensor:
        """torch.sparse_bsr tensor sharing the arrays.

        Raises:
            ValueError: a shape that is no multiple of the block, which torch cannot hold.
        """
        for name, size, block in zip(("rows", "columns"), self.shape, self.block):
            if size % block:
                raise ValueError(
                    f"torch.sparse_bsr needs {name}={size} to be a multiple of {block}"
                )
        return torch.sparse_bsr_tensor(
            self.pattern.indptr, self.pattern.indices, self.values, self.shape,
            check_invariants=False,
        )  # fmt: skip


def _tiles(x: Tensor, H: int, W: int) -> Tensor:
    """[block rows, block columns, H, W] of a dense matrix, filled up with zeros."""
    M, K = x.shape
    x = torch.nn.functional.pad(x, (0, -K % W, 0, -M % H))
    return x.view(x.shape[0] // H, H, x.shape[1] // W, W).transpose(1, 2)


def from_torch(x: Tensor) -> COO | CSR | CSC | BCSR:
    """A torch.sparse matrix in the format of the same name, sharing its arrays; checked.

    Raises:
        ValueError: other layouts, matrices with dense or batch dimensions, malformed entries.
    """
    if x.dim() != 2:
        raise ValueError(f"only matrices can be converted, got shape {tuple(x.shape)}")
    shape = tuple(x.shape)
    if x.layout == torch.sparse_coo:
        if x.dense_dim():
            raise ValueError("a sparse_coo matrix with dense dimensions cannot be converted")
        return COO(*x._indices(), x._values(), shape)
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        kind = CSR if x.layout == torch.sparse_csr else BCSR
        return kind.make(x.crow_indices(), x.col_indices(), x.values(), shape)
    if x.layout == torch.sparse_csc:
        return CSC.make(x.ccol_indices(), x.row_indices(), x.values(), shape)
    raise ValueError(
        f"layout {x.layout} cannot be converted; allowed: sparse_coo, sparse_csr, sparse_csc, "
        "sparse_bsr"
    )
