"""Orthogonalisation of matrices by a Newton–Schulz iteration, in batches: the heart of Muon.

Muon (Jordan et al., kellerjordan.github.io/posts/muon; Moonlight, arXiv 2502.16982) replaces the
momentum M = U S V^T of a matrix by about U V^T. The iteration needs products alone, so it runs in
bfloat16 on a GPU. Its coefficients are those of the first source: steep at 0, so that five steps
bring every singular value of a normalised matrix into about 0.7 to 1.2 instead of exactly to 1.

Shape letters: B matrices in a batch, M rows, N columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# Elements of a batch that are worked on at once, so that the temporaries stay small beside the
# model: 64 Mi elements are 128 MiB a temporary in bfloat16.
MOST_ELEMENTS = 1 << 26


def orthogonalised(x_BMN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """About U V^T of every matrix; a matrix of zeros gives zeros.

    Each matrix depends on itself alone, also in the last bit if `torch.bmm` gives the same bits for
    every place in a batch.

    Args:
        x_BMN: [B, M, N] in any float dtype; not changed.
        dtype: of the products; None: bfloat16 on CUDA, float32 elsewhere.

    Returns:
        [B, M, N] in the dtype of the products.
    """
    if x_BMN.dim() != 3:
        raise ValueError(f"orthogonalised takes [B, M, N], got {tuple(x_BMN.shape)}")
    if dtype is None:
        dtype = torch.bfloat16 if x_BMN.is_cuda else torch.float32
    most = max(1, MOST_ELEMENTS // max(1, x_BMN[0].numel() if len(x_BMN) else 1))
    if len(x_BMN) > most:
        return torch.cat([orthogonalised(part, dtype) for part in x_BMN.split(most)])
    # The short side first: its Gram matrix is the smaller one.
    tall = x_BMN.shape[1] > x_BMN.shape[2]
    x = x_BMN.mT if tall else x_BMN
    # The largest singular value is at most the Frobenius norm; the margin is for the rounding to
    # bfloat16. By the largest element first, whose square might leave the range of the dtype.
    x = x if x.dtype == torch.float64 else x.float()
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax(dim=(1, 2), keepdim=True).clamp(min=tiny)
    x = (x / (1.01 * torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)).clamp(min=tiny)).to(
        dtype
    )
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b G + c G^2
        x = torch.baddbmm(x, poly, x, beta=a)  # a X + (b G + c G^2) X
    return x.mT if tall else x


def flops(rows: int, columns: int) -> int:
    """Floating-point operations of one matrix."""
    short, long = sorted((rows, columns))
    return STEPS * (4 * short * short * long + 2 * short**3)


def update_scale(rows: int, columns: int) -> float:
    """Factor that gives an orthogonalised update the root mean square of AdamW's, about 0.2, so
    that its learning rate and weight decay carry over (Moonlight, arXiv 2502.16982)."""
    return 0.2 * max(rows, columns) ** 0.5
