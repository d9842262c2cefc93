"""Scaled dot-product attention over rows, packed documents, or cached tokens.

Four ways to the same causal attention, chosen by what is given and what is installed:
- FlashAttention-4 (models/attention/flash4.py) for rows and documents, where it can be;
- one document per row: `scaled_dot_product_attention(is_causal=True)`;
- several documents per row, CUDA, bf16/fp16 and head widths that are multiples of 8 up to 256:
  PyTorch's variable-length flash attention;
- several documents per row otherwise: one call per document, so that no bit of one document can
  reach another (a mask with -inf would still mix them through the kernel's blocks).

Values may have heads of another width than queries and keys; the first and third of these are then
given zeros up to the wider one. Scores are divided by the root of the query's width unless `scale`
says by what they are multiplied.

Shape letters: B rows, L tokens per row, T = B*L, H query heads, G key/value heads, C head width,
V head width of the values, N documents, S cached tokens per row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from models.attention.flash4 import flash4
from moe.kernels.common.autograd import first_order
from moe.kernels.common.backend import on_gpu

Choice = Literal["flash4", "pytorch"]

# Options of varlen_attn; they differ between PyTorch 2.10 and 2.13.
_VARLEN = frozenset(inspect.signature(varlen_attn).parameters)


def row_attention(
    q_BLHC: Tensor,
    k_BLGC: Tensor,
    v_BLGV: Tensor,
    choice: Choice = "pytorch",
    scale: float | None = None,
) -> Tensor:
    """Each token attends to its row up to itself. [B, L, H, V].

    Args:
        choice: see `packed_backend`.
    """
    rows, length = q_BLHC.shape[:2]
    if packed_backend(q_BLHC.device, q_BLHC.dtype, _widest(q_BLHC, v_BLGV), choice) != "flash4":
        return causal_attention(q_BLHC, k_BLGC, v_BLGV, scale)
    ends = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q_BLHC.device)
    parts = (part.flatten(0, 1) for part in (q_BLHC, k_BLGC, v_BLGV))
    return _of_one_width(flash4, *parts, ends, length, scale).view(*q_BLHC.shape[:3], -1)


def causal_attention(
    q_BLHC: Tensor, k_BLGC: Tensor, v_BLGV: Tensor, scale: float | None = None
) -> Tensor:
    """`row_attention` by PyTorch's `scaled_dot_product_attention`."""
    q, k, v = (part.transpose(1, 2) for part in (q_BLHC, k_BLGC, v_BLGV))
    grouped = _grouped(q, k)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return y.transpose(1, 2)


def cached_attention(
    q_BLHC: Tensor,
    keys_BSGC: Tensor,
    values_BSGV: Tensor,
    positions_BL: Tensor,
    scale: float | None = None,
) -> Tensor:
    """New tokens at `positions_BL` attend to all cached ones up to themselves. [B, L, H, V]."""
    q, k, v = (part.transpose(1, 2) for part in (q_BLHC, keys_BSGC, values_BSGV))
    seen_BLS = torch.arange(k.shape[2], device=k.device) <= positions_BL[..., None]
    k, v = k.to(q.dtype), v.to(q.dtype)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen_BLS[:, None], scale=scale, enable_gqa=_grouped(q, k)
    )
    return y.transpose(1, 2)


def packed_attention(
    q_BLHC: Tensor,
    k_BLGC: Tensor,
    v_BLGV: Tensor,
    cu_seqlens_N1: Tensor,
    lengths_N: Tensor,
    choice: Choice = "pytorch",
    scale: float | None = None,
) -> Tensor:
    """Each token attends to its document up to itself. [B, L, H, V].

    cu_seqlens_N1: int32 on the device of q; lengths_N: int64 on the CPU. Only one of them is read,
    by kind of device, so neither costs a copy. N may change from call to call without recompiling.
    """
    q_THC, k_TGC, v_TGV = (part.flatten(0, 1) for part in (q_BLHC, k_BLGC, v_BLGV))
    longest = q_BLHC.shape[1]
    backend = packed_backend(q_BLHC.device, q_BLHC.dtype, _widest(q_BLHC, v_BLGV), choice)
    if backend == "flash4":
        y_THV = _of_one_width(flash4, q_THC, k_TGC, v_TGV, cu_seqlens_N1, longest, scale)
    elif backend == "flash":
        y_THV = _of_one_width(_flash, q_THC, k_TGC, v_TGV, cu_seqlens_N1, longest, scale)
    else:
        y_THV = torch.ops.tessera.document_attention(q_THC, k_TGC, v_TGV, lengths_N, scale)
    return y_THV.view(*q_BLHC.shape[:3], -1)


def packed_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, choice: Choice = "pytorch"
) -> Literal["flash4", "flash", "sdpa"]:
    """What computes `packed_attention`: FlashAttention-4, "flash" (PyTorch's variable-length flash
    attention), or "sdpa" (its scaled_dot_product_attention, one document after the other).

    Args:
        head_dim: the wider one, where values have another than queries and keys.
        choice: the first of these, which `models.attention.flash4.fits` must allow, or one of the
            others. Never looked for here: this is compiled code.
    """
    if choice == "flash4":
        return "flash4"
    narrow = dtype in (torch.bfloat16, torch.float16)
    usual = head_dim % 8 == 0 and head_dim <= 256
    return "flash" if on_gpu(device) and narrow and usual else "sdpa"


def _grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


def _widest(q: Tensor, v: Tensor) -> int:
    return max(q.shape[-1], v.shape[-1])


def _of_one_width(
    kernel: Callable[..., Tensor],
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGV: Tensor,
    cu_seqlens_N1: Tensor,
    longest: int,
    scale: float | None,
) -> Tensor:
    """A kernel that knows one head width for all three. [T, H, V]."""
    width, narrow = _widest(q_THC, v_TGV), v_TGV.shape[-1]
    if q_THC.shape[-1] == narrow:
        return kernel(q_THC, k_TGC, v_TGV, cu_seqlens_N1, longest=longest, scale=scale)
    scale = q_THC.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (F.pad(part, (0, width - part.shape[-1])) for part in (q_THC, k_TGC, v_TGV))
    return kernel(q, k, v, cu_seqlens_N1, longest=longest, scale=scale)[..., :narrow]


def _flash(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    cu_seqlens_N1: Tensor,
    longest: int,
    scale: float | None,
) -> Tensor:
    """PyTorch's variable-length flash attention.

    `longest` only sizes the launch. The row length is given, not the longest document: a number
    that changed with every batch would make the compiler start again.
    """
    options = {"window_size": (-1, 0)} if "window_size" in _VARLEN else {"is_causal": True}
    if "enable_gqa" in _VARLEN:  # before 2.12 fewer key/value heads were taken without asking
        options["enable_gqa"] = q_THC.shape[1] != k_TGC.shape[1]
    if scale is not None and "scale" in _VARLEN:
        options["scale"] = scale
    elif scale is not None:
        q_THC = q_THC * (scale * math.sqrt(q_THC.shape[-1]))
    return varlen_attn(
        q_THC, k_TGC, v_TGC, cu_seqlens_N1, cu_seqlens_N1, longest, longest, **options
    )


# ---------------------------------------------------------------- one call per document, as an op
# An operator, so that the compiler sees one node for any number of documents.


def _per_document(
    q_THC: Tensor, k_TGC: Tensor, v_TGV: Tensor, lengths: list[int], scale: float | None
) -> Tensor:
    parts = zip(*(part.split(lengths) for part in (q_THC, k_TGC, v_TGV)), strict=True)
    return torch.cat([causal_attention(*(x[None] for x in part), scale)[0] for part in parts])


@torch.library.custom_op("tessera::document_attention", mutates_args=())
def _document_attention(
    q_THC: Tensor, k_TGC: Tensor, v_TGV: Tensor, lengths_N: Tensor, scale: float | None = None
) -> Tensor:
    return _per_document(q_THC, k_TGC, v_TGV, lengths_N.tolist(), scale)


@_document_attention.register_fake
def _(q_THC, k_TGC, v_TGV, lengths_N, scale=None):
    return q_THC.new_empty((*q_THC.shape[:2], v_TGV.shape[-1]))


@torch.library.custom_op("tessera::document_attention_backward", mutates_args=())
def _document_attention_backward(
    grad_THV: Tensor,
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGV: Tensor,
    lengths_N: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    # Autograd does not run inside an operator, so the softmax's backward is written out.
    lengths = lengths_N.tolist()
    divisor = math.sqrt(q_THC.shape[-1]) if scale is None else 1 / scale
    parts = [part.split(lengths) for part in (grad_THV, q_THC, k_TGC, v_TGV)]
    grads = [_causal_backward(*part, divisor) for part in zip(*parts, strict=True)]
    return tuple(torch.cat(part) for part in zip(*grads, strict=True))


def _causal_backward(
    grad_LHV: Tensor, q_LHC: Tensor, k_LGC: Tensor, v_LGV: Tensor, divisor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of softmax(q·kᵀ/divisor + causal)·v of one document, in fp32 at least."""
    length, groups = k_LGC.shape[:2]
    wide = torch.promote_types(q_LHC.dtype, torch.float32)
    # heads of one group together
    grad, q = (part.to(wide).unflatten(1, (groups, -1)) for part in (grad_LHV, q_LHC))
    k, v = k_LGC.to(wide), v_LGV.to(wide)
    scores = torch.einsum("qgrc,kgc->grqk", q, k) / divisor
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    p = scores.masked_fill_(later, -torch.inf).softmax(-1)
    dv = torch.einsum("grqk,qgrc->kgc", p, grad)
    dp = torch.einsum("qgrc,kgc->grqk", grad, v)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / divisor
    dq = torch.einsum("grqk,kgc->qgrc", ds, k).reshape(q_LHC.shape)
    dk = torch.einsum("grqk,qgrc->kgc", ds, q)
    return dq.to(q_LHC.dtype), dk.to(k_LGC.dtype), dv.to(v_LGV.dtype)


@_document_attention_backward.register_fake
def _(grad_THV, q_THC, k_TGC, v_TGV, lengths_N, scale=None):
    return tuple(part.new_empty(part.shape) for part in (q_THC, k_TGC, v_TGV))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


@first_order
def _backward(ctx, grad_THV: Tensor):
    grads = torch.ops.tessera.document_attention_backward(grad_THV, *ctx.saved_tensors, ctx.scale)
    return *grads, None, None


_document_attention.register_autograd(_backward, setup_context=_save)
