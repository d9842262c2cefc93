"""Cross-entropy of a linear output layer without ever holding all logits.

The logits of T tokens over V words are the largest tensor of a small model's step (16k tokens and
150k words: 10 GB in fp32). Here tokens are taken in chunks; the gradient of a chunk is computed
right after its loss, as the logits are there, so that backward only scales it
(mgmalek/efficient_cross_entropy, Liger-Kernel arXiv 2410.10989).

Shape letters: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

IGNORED = -100
"""Label of a token without a target."""

Backend = Literal["auto", "chunked", "liger"]


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    chunk: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Sum of -log softmax(x · weightᵀ)[label] over the tokens whose label is not -100.

    Args:
        x_TD: hidden states; matrix products run in their dtype, or in autocast's.
        weight_VD: output matrix, possibly shared with the embedding.
        labels_T: int64 in [0, V) or -100. They belong to the same position: nothing is shifted
        here. chunk: tokens per piece; default: as many as keep the logits about as large as x_TD.
        backend: "chunked" on any device; "liger" needs CUDA and liger-kernel; "auto": see
            `loss_backend`.

    Returns an fp32 scalar (fp64 for fp64 input): 0 with zero gradients when no label is valid.
    Accumulation over tokens is in fp32, for the weight's gradient too. Not twice differentiable.
    """
    if x_TD.dim() != 2 or weight_VD.dim() != 2 or labels_T.shape != x_TD.shape[:1]:
        raise ValueError(
            "linear_cross_entropy expects [T, D], [V, D] and [T], got "
            f"{tuple(x_TD.shape)}, {tuple(weight_VD.shape)} and {tuple(labels_T.shape)}"
        )
    if backend == "auto":
        backend = loss_backend(x_TD.device)
    dtype = x_TD.dtype
    if torch.is_autocast_enabled(x_TD.device.type):
        dtype = torch.get_autocast_dtype(x_TD.device.type)
    if backend == "liger":
        return _liger(x_TD.to(dtype), weight_VD, labels_T)
    if chunk is None:
        chunk = default_chunk(*x_TD.shape, weight_VD.shape[0])
    return _ChunkedCrossEntropy.apply(x_TD, weight_VD, labels_T, chunk, dtype)


def loss_backend(device: torch.device) -> Literal["chunked", "liger"]:
    """What "auto" means on this device."""
    return "liger" if device.type == "cuda" and find_spec("liger_kernel") else "chunked"


def default_chunk(tokens: int, width: int, words: int) -> int:
    """Tokens per chunk: a power of two, at least 128, with about tokens · width logits."""
    wanted = max(128, -(-tokens * width // words))
    return max(1, min(tokens, 1 << (wanted - 1).bit_length()))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, dtype: torch.dtype
    ) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        with torch.autocast(x_TD.device.type, enabled=False):
            loss, grad_x_TD, grad_weight_VD = _forward(
                x_TD, weight_VD, labels_T, chunk, dtype, need_x, need_weight
            )
        ctx.save_for_backward(grad_x_TD, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        # Out of place: with retain_graph=True this may run twice on the same saved gradients.
        grad_x_TD, grad_weight_VD = ctx.saved_tensors
        if grad_x_TD is not None:
            grad_x_TD = (grad_x_TD * grad).to(grad_x_TD.dtype)
        if grad_weight_VD is not None:
            grad_weight_VD = (grad_weight_VD * grad).to(ctx.weight_dtype)
        return grad_x_TD, grad_weight_VD, None, None, None


def _forward(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunk: int,
    dtype: torch.dtype,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    wide = torch.promote_types(dtype, torch.float32)
    losses_T = torch.empty(x_TD.shape[0], dtype=wide, device=x_TD.device)
    grad_x_TD = torch.empty_like(x_TD) if need_x else None
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if need_weight else None
    cast_VD = weight_VD.to(dtype)
    for start in range(0, x_TD.shape[0], chunk):
        piece = slice(start, start + chunk)
        x_PD, labels_P = x_TD[piece].to(dtype), labels_T[piece]
        valid_P = labels_P != IGNORED
        target_P1 = labels_P.masked_fill(~valid_P, 0)[:, None]
        logits_PV = _matmul(x_PD, cast_VD.t(), wide)
        lse_P1 = logits_PV.logsumexp(-1, keepdim=True)
        losses_P = (lse_P1 - logits_PV.gather(1, target_P1))[:, 0]
        losses_T[piece] = losses_P.masked_fill(~valid_P, 0.0)
        if not (need_x or need_weight):
            continue
        # softmax - onehot, in place of the logits
        grad_PV = logits_PV.sub_(lse_P1).exp_()
        grad_PV.scatter_add_(1, target_P1, grad_PV.new_full((), -1.0).expand_as(target_P1))
        grad_PV = grad_PV.masked_fill_(~valid_P[:, None], 0.0).to(dtype)
        if grad_x_TD is not None:
            grad_x_TD[piece] = grad_PV @ cast_VD
        if grad_weight_VD is not None:
            grad_weight_VD += _matmul(grad_PV.t(), x_PD, wide)
    return losses_T.sum(), grad_x_TD, grad_weight_VD


def _matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Product in `out_dtype` without rounding to the operands' dtype first, where the device
    can.
    """
    if a.is_cuda and a.dtype != out_dtype:
        return torch.mm(a, b, out_dtype=out_dtype)
    return (a @ b).to(out_dtype)


def _liger(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        x_TD,
        weight_VD,
        labels_T,
        None,  # bias
        None,  # class weights
        IGNORED,
        0.0,  # z-loss
        0.0,  # label smoothing
        "sum",
        None,  # softcap
        False,  # return the z-loss
        torch.float32,  # accumulate the weight's gradient in
    )
    return loss
