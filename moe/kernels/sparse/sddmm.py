"""SDDMM: the product of two dense matrices at the entries of a sparse pattern only.

out[z] = alpha · ⟨a[row of z], b[column of z]⟩, the gradient of a sparse matrix's values. Work is
divided by entries, so rows of any skew are balanced; sums are float32, without atomics.

Shape letters: M rows, K columns of the pattern; N inner width; Z entries.
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

_TERMS = 1 << 24  # numbers that the reference holds at once


def sddmm_ref(
    rows_Z: Tensor,
    indices_Z: Tensor,
    a_MN: Tensor,
    b_KN: Tensor,
    alpha: float,
    dtype: torch.dtype,
) -> Tensor:
    """Plain torch version of `sddmm`, any device and dtype."""
    M, N = a_MN.shape
    Z = indices_Z.shape[0]
    wide = arithmetic_dtype(a_MN.dtype)
    out_Z = torch.zeros(Z, dtype=wide, device=a_MN.device)
    used_Z = (indices_Z >= 0) & (rows_Z < M)
    if M and N and Z and b_KN.shape[0] and alpha != 0:
        row_Z = rows_Z.clamp_max(M - 1).long()
        column_Z = indices_Z.clamp(0, b_KN.shape[0] - 1).long()
        step = max(1, _TERMS // Z)
        for n in range(0, N, step):
            a_ZN = a_MN[:, n : n + step].index_select(0, row_Z).to(wide)
            b_ZN = b_KN[:, n : n + step].index_select(0, column_Z).to(wide)
            out_Z += (a_ZN * b_ZN).sum(1)
        out_Z *= alpha
    return torch.where(used_Z, out_Z, 0.0).to(dtype)


# ------------------------------------------------------------------------------------------- kernel


@triton.jit(do_not_specialize=["M", "Z"])
def _sddmm_kernel(
    rows_ptr, indices_ptr, a_ptr, b_ptr, out_ptr, M, N, Z, stride_a, stride_b, alpha,
    EVEN: tl.constexpr, BN: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64) * U + tl.arange(0, U)
    row = tl.load(rows_ptr + e, mask=e < Z, other=M)
    column = tl.load(indices_ptr + e, mask=e < Z, other=-1)
    used = (row < M) & (column >= 0)
    a_at = row.to(tl.int64) * stride_a
    b_at = column.to(tl.int64) * stride_b
    acc = tl.zeros((U, BN), dtype=tl.float32)
    for n in tl.range(0, N, BN):
        cols = n + tl.arange(0, BN)
        some = used[:, None]
        if not EVEN:
            some = some & (cols < N)[None, :]
        a = tl.load(a_ptr + a_at[:, None] + cols[None, :], mask=some, other=0.0)
        b = tl.load(b_ptr + b_at[:, None] + cols[None, :], mask=some, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)
    out = tl.sum(acc, axis=1) * alpha
    tl.store(out_ptr + e, out.to(out_ptr.dtype.element_ty), mask=e < Z)


# ----------------------------------------------------------------------------------------- launcher


def configs(dtype: torch.dtype, N: int) -> list[Config]:
    """Configurations worth trying, the default first."""
    line = 32 * 16 // dtype.itemsize
    widest = size_class(max(N, 16))
    listed = [(line, 4, 1), (2 * line, 4, 2), (2 * line, 8, 2)]
    fitting = (Config(1, min(bn, widest), u, max(1, min(w, widest // line))) for bn, u, w in listed)
    return list(dict.fromkeys(fitting))


def sddmm_triton(
    rows_Z: Tensor,
    indices_Z: Tensor,
    a_MN: Tensor,
    b_KN: Tensor,
    alpha: float,
    dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """Launches the kernel; see `sddmm`."""
    M, N = a_MN.shape
    Z = indices_Z.shape[0]
    out_Z = torch.empty(Z, dtype=dtype, device=a_MN.device)
    if Z == 0 or M == 0 or N == 0 or b_KN.shape[0] == 0 or alpha == 0:
        return out_Z.zero_()
    c = config or pick(
        "sddmm", (size_class(-(-Z // M)), N, str(a_MN.dtype)), configs(a_MN.dtype, N),
        lambda c: sddmm_triton(rows_Z, indices_Z, a_MN, b_KN, alpha, dtype, c), a_MN.device,
    )  # fmt: skip
    a_MN, b_KN = with_unit_stride(a_MN), with_unit_stride(b_KN)
    with on_device(a_MN):
        _sddmm_kernel[(cdiv(Z, c.bk),)](
            rows_Z, indices_Z, a_MN, b_KN, out_Z, M, N, Z, a_MN.stride(0), b_KN.stride(0), alpha,
            EVEN=N % c.bn == 0, BN=c.bn, U=c.bk, num_warps=c.warps,
        )  # fmt: skip
    return out_Z


# ---------------------------------------------------------------------------------------- custom op


def _run(rows, indices, a, b, alpha, dtype, backend):
    f = sddmm_ref if backend == "reference" else sddmm_triton
    return f(rows, indices, a, b, alpha, dtype)


def _fake(rows, indices, a, b, alpha, dtype, backend):
    return a.new_empty(indices.shape[0], dtype=dtype)


_op = define_op(
    "sddmm(Tensor rows, Tensor indices, Tensor a, Tensor b, float alpha, ScalarType dtype, "
    "str backend) -> Tensor",
    _run,
    _fake,
)


def sddmm(
    rows_Z: Tensor,
    indices_Z: Tensor,
    a_MN: Tensor,
    b_KN: Tensor,
    *,
    alpha: float = 1.0,
    dtype: torch.dtype | None = None,
    backend: str = "reference",
) -> Tensor:
    """out_Z[z] = alpha · ⟨a_MN[rows_Z[z]], b_KN[indices_Z[z]]⟩; no gradient.

    Args:
        rows_Z: int32 or int64 row of each entry; M and more = unused, gives 0.
        indices_Z: int32 or int64 column of each entry; -1 = unused, gives 0.
        a_MN, b_KN: dense, one dtype: float32, float16, bfloat16 (float64 with the reference).
        dtype: of the result; None = that of a.
        backend: "reference" or "triton", already resolved.
    """
    return _op(rows_Z, indices_Z, a_MN, b_KN, alpha, dtype or a_MN.dtype, backend)
