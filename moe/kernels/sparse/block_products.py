"""Products of block-sparse matrices (BCSR): one kernel each for S · X (DSD) and A · B at S (SDD).

Everything else is these two with other strides: X · S is (Sᵀ Xᵀ)ᵀ, and a transposed S is walked by
columns through its flipped pattern, its blocks read transposed. A dense operand, or the result,
whose rows are those of S's blocks may be a stack of G matrices (expert weights [E, N, D]); a block
never crosses from one to the next. Sums are float32 in the stored order of blocks, without
atomics. Names and the walk by columns follow MegaBlocks (T. Gale et al., arXiv 2211.15841).

A block whose column is -1 is unused. Numbers of a block that lie outside the matrix (its last block
row or column, when the size is no multiple of the block) must be zero, and are when made here.

Shape letters: Z stored blocks; H, W height and width of a block; I inner width; G matrices of a
stack; N columns of the dense side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import cdiv, tl, triton
from moe.kernels.common.launch import on_device
from moe.kernels.common.ops import define_op
from moe.kernels.common.reference import arithmetic_dtype
from moe.kernels.common.tuning import Config, pick, size_class

# --------------------------------------------------------------------------------------- reference


def _block_rows(indptr: Tensor, blocks: int) -> Tensor:
    """Block row of each stored block; the number of block rows for those past the last."""
    at = torch.arange(blocks, dtype=indptr.dtype, device=indptr.device)
    return torch.searchsorted(indptr[1:].contiguous(), at, right=True)


def _stacked(x: Tensor, block: int) -> Tensor:
    """[blocks, block, N] of [G, R, N]; each matrix is filled up with zero rows to whole blocks."""
    G, R, N = x.shape
    fill = -R % block
    if fill:
        x = torch.cat([x, x.new_zeros(G, fill, N)], 1)
    return x.reshape(-1, block, N)


def dsd_ref(
    indptr: Tensor,
    indices_Z: Tensor,
    order_Z: Tensor | None,
    blocks_ZHW: Tensor,
    transposed: bool,
    x_GRN: Tensor,
    out_GRN: Tensor,
    add_GRN: Tensor | None,
    alpha: float,
    beta: float,
) -> None:
    """Plain torch version of `dsd`, any device and dtype; writes `out_GRN`."""
    S = blocks_ZHW if order_Z is None else blocks_ZHW[order_Z.long()]
    S = S.mT if transposed else S
    rows, (Z, height, width) = indptr.shape[0] - 1, S.shape
    wide = arithmetic_dtype(x_GRN.dtype)
    G, R, N = out_GRN.shape
    out = torch.zeros(rows, height * N, dtype=wide, device=S.device)
    if alpha != 0 and Z and x_GRN.numel() and out.numel():
        x_BWN = _stacked(x_GRN, width)
        x_ZWN = x_BWN[indices_Z.clamp(0, x_BWN.shape[0] - 1).long()].to(wide)
        term = (S.to(wide) @ x_ZWN).masked_fill_((indices_Z < 0)[:, None, None], 0.0)
        out = alpha * torch.segment_reduce(
            term.view(Z, -1), "sum", offsets=indptr.long(), axis=0, unsafe=True, initial=0.0
        )
    out = out.view(G, rows // G * height, N)[:, :R]
    if add_GRN is not None and beta != 0:
        out = out + beta * add_GRN
    out_GRN.copy_(out)


def sdd_ref(
    indptr: Tensor,
    indices_Z: Tensor,
    a_RI: Tensor,
    b_GIC: Tensor,
    height: int,
    width: int,
    alpha: float,
) -> Tensor:
    """Plain torch version of `sdd`, any device and dtype."""
    Z, wide = indices_Z.shape[0], arithmetic_dtype(a_RI.dtype)
    rows = indptr.shape[0] - 1
    if not (Z and a_RI.numel() and b_GIC.numel() and alpha != 0):
        return a_RI.new_zeros(Z, height, width)
    row_Z = _block_rows(indptr, Z)
    used_Z = (indices_Z >= 0) & (row_Z < rows)
    a_ZHI = _stacked(a_RI[None], height)[row_Z.clamp_max(rows - 1)].to(wide)
    b_ZWI = _stacked(b_GIC.mT, width)[indices_Z.clamp_min(0).long()].to(wide)
    out_ZHW = alpha * (a_ZHI @ b_ZWI.mT)
    return out_ZHW.masked_fill_(~used_Z[:, None, None], 0.0).to(a_RI.dtype)


# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def _stack_base(block, per, stride_g, stride_r, SIZE: tl.constexpr):
    """(offset of a block's first row in a stack of matrices of `per` blocks, rows before it)."""
    g = block // per
    row = (block - g * per) * SIZE
    return g.to(tl.int64) * stride_g + row.to(tl.int64) * stride_r, row


@triton.jit
def _dsd_kernel(
    indptr_ptr, indices_ptr, order_ptr, blocks_ptr, x_ptr, add_ptr, out_ptr, N,
    x_rows, x_per, stride_xg, stride_xr, stride_xn,
    out_rows, out_per, stride_og, stride_or, stride_on, stride_ag, stride_ar, stride_an,
    alpha, beta,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, ORDER: tl.constexpr,
    ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # A block is (M0, K0) as it is used, stored as (HEIGHT, WIDTH).
    M0: tl.constexpr = WIDTH if TRANSPOSED else HEIGHT
    K0: tl.constexpr = HEIGHT if TRANSPOSED else WIDTH
    PARTS: tl.constexpr = M0 // BM
    STEPS: tl.constexpr = K0 // BK
    tile = tl.program_id(0)
    block_row = tile // PARTS
    m = (tile - block_row * PARTS) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    start = tl.load(indptr_ptr + block_row).to(tl.int32)
    count = tl.load(indptr_ptr + block_row + 1).to(tl.int32) - start
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in tl.range(0, count * STEPS):
        e = start + step // STEPS
        k = (step % STEPS) * BK + tl.arange(0, BK)
        column = tl.load(indices_ptr + e).to(tl.int32)
        used = column >= 0
        source = e.to(tl.int64)
        if ORDER:
            source = tl.load(order_ptr + e).to(tl.int64)
        if TRANSPOSED:
            at = k[None, :] * WIDTH + m[:, None]
        else:
            at = m[:, None] * WIDTH + k[None, :]
        s = tl.load(blocks_ptr + source * (HEIGHT * WIDTH) + at, mask=used, other=0.0)
        base, first = _stack_base(tl.maximum(column, 0), x_per, stride_xg, stride_xr, K0)
        some = used & (first + k < x_rows)[:, None] & (cols < N)[None, :]
        at = k.to(tl.int64)[:, None] * stride_xr + cols.to(tl.int64)[None, :] * stride_xn
        x = tl.load(x_ptr + base + at, mask=some, other=0.0)
        acc = tl.dot(s, x, acc, input_precision="ieee")
    acc *= alpha
    base, first = _stack_base(block_row, out_per, stride_og, stride_or, M0)
    some = (first + m < out_rows)[:, None] & (cols < N)[None, :]
    if ADD:
        add_base, _ = _stack_base(block_row, out_per, stride_ag, stride_ar, M0)
        at = m.to(tl.int64)[:, None] * stride_ar + cols.to(tl.int64)[None, :] * stride_an
        acc += beta * tl.load(add_ptr + add_base + at, mask=some, other=0.0).to(tl.float32)
    at = m.to(tl.int64)[:, None] * stride_or + cols.to(tl.int64)[None, :] * stride_on
    tl.store(out_ptr + base + at, acc.to(out_ptr.dtype.element_ty), mask=some)


@triton.jit
def _sdd_kernel(
    rows_ptr, indices_ptr, a_ptr, b_ptr, out_ptr, block_rows, a_rows, I, b_cols, b_per,
    stride_ar, stride_ai, stride_bg, stride_bi, stride_bc, alpha,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    PARTS_M: tl.constexpr = HEIGHT // BM
    PARTS_N: tl.constexpr = WIDTH // BN
    tile = tl.program_id(0)
    e = tile // (PARTS_M * PARTS_N)
    part = tile - e * (PARTS_M * PARTS_N)
    m = (part // PARTS_N) * BM + tl.arange(0, BM)
    n = (part % PARTS_N) * BN + tl.arange(0, BN)
    block_row = tl.load(rows_ptr + e).to(tl.int32)
    column = tl.load(indices_ptr + e).to(tl.int32)
    used = (column >= 0) & (block_row < block_rows)
    row = tl.where(used, block_row, 0) * HEIGHT + m
    base, first = _stack_base(tl.maximum(column, 0), b_per, stride_bg, stride_bc, WIDTH)
    some_m = (row < a_rows)[:, None]
    some_n = (first + n < b_cols)[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for i in tl.range(0, tl.where(used, I, 0), BK):
        k = i + tl.arange(0, BK)
        at = row.to(tl.int64)[:, None] * stride_ar + k.to(tl.int64)[None, :] * stride_ai
        a = tl.load(a_ptr + at, mask=some_m & (k < I)[None, :], other=0.0)
        at = k.to(tl.int64)[:, None] * stride_bi + n.to(tl.int64)[None, :] * stride_bc
        b = tl.load(b_ptr + base + at, mask=some_n & (k < I)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    out = (acc * alpha).to(out_ptr.dtype.element_ty)
    at = e.to(tl.int64) * (HEIGHT * WIDTH) + m[:, None] * WIDTH + n[None, :]
    tl.store(out_ptr + at, out)


# ---------------------------------------------------------------------------------------- launchers


_HALF = [
    Config(128, 128, 64, 8, 3),
    Config(128, 128, 64, 4, 3),
    Config(64, 128, 64, 4, 4),
    Config(128, 256, 64, 8, 3),
]
_FULL = [Config(64, 64, 32, 4, 2)]  # float32 on the plain cores: accuracy first


def configs(
    dtype: torch.dtype, most_m: int, most_n: int | None, most_k: int | None
) -> list[Config]:
    """Configurations for blocks of these sizes (None: any), the default first."""
    listed = _FULL if dtype == torch.float32 else _HALF
    return list(
        dict.fromkeys(
            Config(
                min(c.bm, most_m),
                min(c.bn, most_n or c.bn),
                min(c.bk, most_k or c.bk),
                c.warps if min(c.bm, most_m) * min(c.bn, most_n or c.bn) > 4096 else 4,
                c.stages,
            )
            for c in listed
        )
    )


def _check_block(height: int, width: int) -> None:
    for size in (height, width):
        if size not in (16, 32, 64, 128):
            raise ValueError(
                f"blocks are {height} x {width}; backend='triton' allows 16, 32, 64 and 128"
            )


def dsd_triton(
    indptr: Tensor,
    indices_Z: Tensor,
    order_Z: Tensor | None,
    blocks_ZHW: Tensor,
    transposed: bool,
    x_GRN: Tensor,
    out_GRN: Tensor,
    add_GRN: Tensor | None,
    alpha: float,
    beta: float,
    config: Config | None = None,
) -> None:
    """Launches the kernel; see `dsd`."""
    Z, H, W = blocks_ZHW.shape
    _check_block(H, W)
    rows, N = indptr.shape[0] - 1, x_GRN.shape[2]
    add_GRN = None if beta == 0 else add_GRN
    if out_GRN.numel() == 0:
        return
    if Z == 0 or x_GRN.numel() == 0 or alpha == 0:
        if add_GRN is None:
            out_GRN.zero_()
        else:
            torch.mul(add_GRN, beta, out=out_GRN)
        return
    M0, K0 = (W, H) if transposed else (H, W)
    c = config or pick(
        "dsd", (size_class(rows), size_class(Z), N, H, W, transposed, str(x_GRN.dtype)),
        configs(x_GRN.dtype, M0, None, K0),
        lambda c: dsd_triton(
            indptr, indices_Z, order_Z, blocks_ZHW, transposed, x_GRN, out_GRN, add_GRN,
            alpha, beta, c,
        ),
        x_GRN.device,
    )  # fmt: skip
    blocks_ZHW = blocks_ZHW.contiguous()
    bn = min(c.bn, max(16, size_class(N)))
    add_strides = (0, 0, 0) if add_GRN is None else add_GRN.stride()
    with on_device(x_GRN):
        _dsd_kernel[(rows * (M0 // c.bm), cdiv(N, bn))](
            indptr, indices_Z, order_Z, blocks_ZHW, x_GRN, add_GRN, out_GRN, N,
            x_GRN.shape[1], cdiv(x_GRN.shape[1], K0), *x_GRN.stride(),
            out_GRN.shape[1], cdiv(out_GRN.shape[1], M0), *out_GRN.stride(), *add_strides,
            alpha, beta, HEIGHT=H, WIDTH=W, TRANSPOSED=transposed, ORDER=order_Z is not None,
            ADD=add_GRN is not None, BM=c.bm, BN=bn, BK=c.bk,
            num_warps=c.warps, num_stages=c.stages,
        )  # fmt: skip


def sdd_triton(
    indptr: Tensor,
    indices_Z: Tensor,
    a_RI: Tensor,
    b_GIC: Tensor,
    height: int,
    width: int,
    alpha: float,
    config: Config | None = None,
) -> Tensor:
    """Launches the kernel; see `sdd`."""
    _check_block(height, width)
    Z, I = indices_Z.shape[0], a_RI.shape[1]
    out_ZHW = a_RI.new_empty(Z, height, width)
    if Z == 0 or a_RI.numel() == 0 or b_GIC.numel() == 0 or alpha == 0:
        return out_ZHW.zero_()
    rows = indptr.shape[0] - 1
    c = config or pick(
        "sdd", (size_class(rows), size_class(Z), I, height, width, str(a_RI.dtype)),
        configs(a_RI.dtype, height, width, None),
        lambda c: sdd_triton(indptr, indices_Z, a_RI, b_GIC, height, width, alpha, c),
        a_RI.device,
    )  # fmt: skip
    tiles = Z * (height // c.bm) * (width // c.bn)
    with on_device(a_RI):
        _sdd_kernel[(tiles,)](
            _block_rows(indptr, Z), indices_Z, a_RI, b_GIC, out_ZHW, rows,
            a_RI.shape[0], I, b_GIC.shape[2], cdiv(b_GIC.shape[2], width), *a_RI.stride(),
            *b_GIC.stride(), alpha, HEIGHT=height, WIDTH=width, BM=c.bm, BN=c.bn, BK=c.bk,
            num_warps=c.warps, num_stages=c.stages,
        )  # fmt: skip
    return out_ZHW


# --------------------------------------------------------------------------------------- custom ops


def _run_dsd(indptr, indices, order, blocks, transposed, x, out, add, alpha, beta, backend):
    f = dsd_ref if backend == "reference" else dsd_triton
    f(indptr, indices, order, blocks, transposed, x, out, add, alpha, beta)


def _run_sdd(indptr, indices, a, b, height, width, alpha, backend):
    f = sdd_ref if backend == "reference" else sdd_triton
    return f(indptr, indices, a, b, height, width, alpha)


_dsd_op = define_op(
    "block_dsd(Tensor indptr, Tensor indices, Tensor? order, Tensor blocks, bool transposed, "
    "Tensor x, Tensor(a!) out, Tensor? add, float alpha, float beta, str backend) -> ()",
    _run_dsd,
    lambda *args: None,
)
_sdd_op = define_op(
    "block_sdd(Tensor indptr, Tensor indices, Tensor a, Tensor b, int height, int width, "
    "float alpha, str backend) -> Tensor",
    _run_sdd,
    lambda indptr, indices, a, b, height, width, alpha, backend: a.new_empty(
        indices.shape[0], height, width
    ),
)

# ------------------------------------------------------------------------------------------ public


def dsd(
    indptr: Tensor,
    indices_Z: Tensor,
    order_Z: Tensor | None,
    blocks_ZHW: Tensor,
    x_GRN: Tensor,
    out_GRN: Tensor,
    add_GRN: Tensor | None = None,
    *,
    transposed: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    backend: str = "reference",
) -> None:
    """out_GRN = alpha · S · x_GRN + beta · add_GRN, written in place; no gradient.

    Args:
        indptr, indices_Z: first block of each block row; block column of each block, -1 = unused.
        order_Z: where each block lies in `blocks_ZHW`; None = at its own place.
        blocks_ZHW: the stored blocks, used transposed if `transposed`.
        x_GRN: dense side, G matrices on top of each other with R rows each, any strides.
        out_GRN: the result, its rows stacked likewise, any strides.
        add_GRN: not read when beta is 0.
        backend: "reference" or "triton", already resolved.
    """
    _dsd_op(
        indptr, indices_Z, order_Z, blocks_ZHW, transposed, x_GRN, out_GRN, add_GRN,
        alpha, beta, backend,
    )  # fmt: skip


def sdd(
    indptr: Tensor,
    indices_Z: Tensor,
    a_RI: Tensor,
    b_GIC: Tensor,
    height: int,
    width: int,
    *,
    alpha: float = 1.0,
    backend: str = "reference",
) -> Tensor:
    """blocks_ZHW of alpha · a_RI · b at the stored blocks; no gradient.

    Args:
        indptr, indices_Z: first block of each block row; block column of each block, -1 = unused
            (its numbers are zeros).
        a_RI: dense, any strides.
        b_GIC: dense, G matrices beside each other with C columns each, any strides.
        height, width: of a block.
        backend: "reference" or "triton", already resolved.
    """
    return _sdd_op(indptr, indices_Z, a_RI, b_GIC, height, width, alpha, backend)
