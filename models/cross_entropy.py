"""Cross-entropy of rows of logits, and the gradient of the logits right with it.

Plain PyTorch passes over the logits about ten times, each time through memory; the kernel reads
them twice and writes the gradient once, in the dtype of the matrix products that follow.

Shape letters: P rows (a piece of the tokens), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.common.backend import check_resolved, next_power_of_2, tl, triton
from moe.kernels.common.launch import launch

IGNORED = -100
"""Label of a token without a target."""


def cross_entropy_ref(
    logits_PV: Tensor, labels_P: Tensor, grad_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Plain torch version of `cross_entropy`; overwrites the logits."""
    valid_P = labels_P != IGNORED
    target_P1 = labels_P.masked_fill(~valid_P, 0)[:, None]
    lse_P1 = logits_PV.logsumexp(-1, keepdim=True)
    losses_P = (lse_P1 - logits_PV.gather(1, target_P1))[:, 0].masked_fill(~valid_P, 0.0)
    if grad_dtype is None:
        return losses_P, None
    grad_PV = logits_PV.sub_(lse_P1).exp_()
    grad_PV.scatter_add_(1, target_P1, grad_PV.new_full((), -1.0).expand_as(target_P1))
    return losses_P, grad_PV.masked_fill_(~valid_P[:, None], 0.0).to(grad_dtype)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, grad_ptr, V, row_stride,
    IGNORED: tl.constexpr, GRAD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits_ptr += row * row_stride
    grad_ptr += row * V
    cols = tl.arange(0, BV)
    if label == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        if GRAD:
            for start in range(0, V, BV):
                zero = tl.zeros((BV,), tl.float32).to(grad_ptr.dtype.element_ty)
                tl.store(grad_ptr + start + cols, zero, mask=start + cols < V)
    else:
        # The running maximum and sum of the online softmax (arXiv 1805.02867), per lane: lanes meet
        # only once, after the loop.
        top = tl.full((BV,), -float("inf"), tl.float32)
        total = tl.zeros((BV,), tl.float32)
        for start in range(0, V, BV):
            mask = start + cols < V
            z = tl.load(logits_ptr + start + cols, mask=mask, other=-float("inf")).to(tl.float32)
            new = tl.maximum(top, z)
            # a lane that has only seen -inf has the sum 0, not exp(-inf + inf)
            safe = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(top - safe) + tl.exp(z - safe)
            top = new
        most = tl.max(top, 0)
        lse = most + tl.log(tl.sum(total * tl.exp(top - most), 0))
        tl.store(losses_ptr + row, lse - tl.load(logits_ptr + label).to(tl.float32))
        if GRAD:
            for start in range(0, V, BV):
                mask = start + cols < V
                z = tl.load(logits_ptr + start + cols, mask=mask, other=-float("inf"))
                grad = tl.exp(z.to(tl.float32) - lse)
                grad = tl.where(start + cols == label, grad - 1.0, grad)
                tl.store(grad_ptr + start + cols, grad.to(grad_ptr.dtype.element_ty), mask=mask)


def cross_entropy_triton(
    logits_PV: Tensor, labels_P: Tensor, grad_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Launches the kernel; see `cross_entropy`."""
    rows, words = logits_PV.shape
    losses_P = logits_PV.new_empty(rows, dtype=torch.float32)
    grad_PV = None
    if grad_dtype is not None:
        grad_PV = torch.empty(rows, words, dtype=grad_dtype, device=logits_PV.device)
    if rows == 0:
        return losses_P, grad_PV
    block = min(4096, next_power_of_2(words))
    launch(_cross_entropy_kernel, (rows,),
        logits_PV, labels_P.contiguous(), losses_P, losses_P if grad_PV is None else grad_PV,
        words, logits_PV.stride(0),
        IGNORED=IGNORED, GRAD=grad_PV is not None, BV=block, num_warps=max(1, block // 512),
    )  # fmt: skip
    return losses_P, grad_PV


def cross_entropy(
    logits_PV: Tensor, labels_P: Tensor, grad_dtype: torch.dtype | None, backend: str
) -> tuple[Tensor, Tensor | None]:
    """Losses of rows and the gradient of their sum. No autograd: the caller's function keeps both.

    Args:
        logits_PV: fp32 (fp64 with "reference"); may be overwritten.
        labels_P: int64 in [0, V), or -100 for a row that gives 0 and zeros.
        grad_dtype: dtype of the gradient; None: no gradient is made.
        backend: "reference" or "triton".

    Returns losses_P in the logits' dtype and grad_PV or None.
    """
    check_resolved("cross_entropy", backend)
    function = cross_entropy_ref if backend == "reference" else cross_entropy_triton
    return function(logits_PV, labels_P, grad_dtype)
