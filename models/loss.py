"""Cross-entropy of a linear output layer without ever holding all logits.

The logits of T tokens over V words are the largest tensor of a small model's step (16k tokens and
150k words: 10 GB in fp32). Here tokens are taken in chunks; the gradient of a chunk is computed
right after its loss, as the logits are there, so that backward only scales it
(mgmalek/efficient_cross_entropy, Liger-Kernel arXiv 2410.10989).

Shape letters: T tokens, P tokens of one chunk, D model width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.cross_entropy import IGNORED, cross_entropy
from moe.kernels.common.autograd import first_order
from moe.kernels.common.backend import on_gpu, pick_backend

__all__ = ["IGNORED", "default_chunk", "linear_cross_entropy"]


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    chunk: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Sum of -log softmax(x · weightᵀ)[label] over the tokens whose label is not -100.

    Args:
        x_TD: hidden states; matrix products run in their dtype, or in autocast's.
        weight_VD: output matrix, possibly shared with the embedding.
        labels_T: int64 in [0, V) or -100. They belong to the same position: nothing is shifted
            here.
        chunk: tokens per piece; default: `default_chunk`.
        backend: auto (triton on CUDA, reference elsewhere), reference or triton.

    Returns an fp32 scalar (fp64 for fp64 input): 0 with zero gradients when no label is valid.
    Logits are fp32, and so is accumulation over tokens, for the weight's gradient too. Not twice
    differentiable.
    """
    if x_TD.dim() != 2 or weight_VD.dim() != 2 or labels_T.shape != x_TD.shape[:1]:
        raise ValueError(
            "linear_cross_entropy expects [T, D], [V, D] and [T], got "
            f"{tuple(x_TD.shape)}, {tuple(weight_VD.shape)} and {tuple(labels_T.shape)}"
        )
    dtype = x_TD.dtype
    if torch.is_autocast_enabled(x_TD.device.type):
        dtype = torch.get_autocast_dtype(x_TD.device.type)
    backend = pick_backend(backend, x_TD)
    if chunk is None:
        chunk = default_chunk(*x_TD.shape, weight_VD.shape[0], x_TD.device)
    # Inside forward, ctx.needs_input_grad is true under no_grad too.
    train = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(x_TD, weight_VD, labels_T, chunk, dtype, backend, train)


# Logits of one chunk on a GPU: 1 GiB in fp32. With fewer tokens the matrix products are small, and
# every chunk reads and writes the weight's whole gradient once. Forward and backward on an H200
# with T=16384, D=2048, V=151936, bf16 (python scripts/bench/loss.py): 97 ms in chunks of 256, 59
# of 1024, 52 of 2048, 53 of 4096; plain PyTorch operations 82, Liger-Kernel 0.8.5 93.
_GPU_LOGITS = 1 << 28


def default_chunk(tokens: int, width: int, words: int, device: torch.device) -> int:
    """Tokens per chunk: a power of two of at least 128, with about as many logits as x has
    elements; on a GPU at least 2^28 logits."""
    logits = tokens * width
    if on_gpu(device):
        logits = max(logits, _GPU_LOGITS)
    chunk = 2 ** round(math.log2(max(128, logits / words)))
    return max(1, min(tokens, chunk))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        chunk: int,
        dtype: torch.dtype,
        backend: str,
        train: bool,
    ) -> Tensor:
        need_x, need_weight = (train and need for need in ctx.needs_input_grad[:2])
        with torch.autocast(x_TD.device.type, enabled=False):
            loss, grad_x_TD, grad_weight_VD = _forward(
                x_TD, weight_VD, labels_T, chunk, dtype, backend, need_x, need_weight
            )
        ctx.save_for_backward(grad_x_TD, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    @first_order
    def backward(ctx, grad: Tensor):
        # Out of place: with retain_graph=True this may run twice on the same saved gradients.
        grad_x_TD, grad_weight_VD = ctx.saved_tensors
        if grad_x_TD is not None:
            grad_x_TD = torch.mul(grad_x_TD, grad, out=torch.empty_like(grad_x_TD))
        if grad_weight_VD is not None:
            out_VD = torch.empty_like(grad_weight_VD, dtype=ctx.weight_dtype)
            grad_weight_VD = torch.mul(grad_weight_VD, grad, out=out_VD)
        return grad_x_TD, grad_weight_VD, None, None, None, None, None


def _forward(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunk: int,
    dtype: torch.dtype,
    backend: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    wide = torch.promote_types(dtype, torch.float32)
    losses_T = torch.empty(x_TD.shape[0], dtype=wide, device=x_TD.device)
    grad_x_TD = torch.empty_like(x_TD) if need_x else None
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if need_weight else None
    grad_dtype = dtype if need_x or need_weight else None
    cast_VD = weight_VD.to(dtype)
    for start in range(0, x_TD.shape[0], chunk):
        piece = slice(start, start + chunk)
        x_PD = x_TD[piece].to(dtype)
        logits_PV = _product(x_PD, cast_VD.t(), wide)
        losses_T[piece], grad_PV = cross_entropy(logits_PV, labels_T[piece], grad_dtype, backend)
        del logits_PV
        if grad_x_TD is not None:
            grad_x_TD[piece] = grad_PV @ cast_VD
        if grad_weight_VD is not None:
            add_product(grad_weight_VD, grad_PV.t(), x_PD)
    return losses_T.sum(), grad_x_TD, grad_weight_VD


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a · b in `dtype` without rounding to the operands' dtype first, where the device can."""
    if on_gpu(a.device) and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, in place and in the dtype of `total`, without memory of its own."""
    if on_gpu(a.device) and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += (a @ b).to(total.dtype)
