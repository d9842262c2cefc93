"""Scaled dot-product attention over rows, packed documents, or cached tokens.

Four ways to the same causal attention, chosen by what is given and what is installed:
- FlashAttention-4 (models/attention/flash4.py) for rows and documents, where it can be;
- one document per row: `scaled_dot_product_attention(is_causal=True)`;
- several documents per row, CUDA, bf16/fp16 and head widths that are multiples of 8 up to 256:
  PyTorch's variable-length flash attention;
- several documents per row otherwise: one call per document, so that no bit of one document can
  reach another (a mask with -inf would still mix them through the kernel's blocks).

Shape letters: B rows, L tokens per row, T = B*L, H query heads, G key/value heads, C head width,
N documents, S cached tokens per row.
"""

from __future__ import annotations

import inspect
import math
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
    q_BLHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, choice: Choice = "pytorch"
) -> Tensor:
    """Each token attends to its row up to itself. [B, L, H, C].

    Args:
        choice: see `packed_backend`.
    """
    rows, length, _, width = q_BLHC.shape
    if packed_backend(q_BLHC.device, q_BLHC.dtype, width, choice) != "flash4":
        return causal_attention(q_BLHC, k_BLGC, v_BLGC)
    ends = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q_BLHC.device)
    parts = (part.flatten(0, 1) for part in (q_BLHC, k_BLGC, v_BLGC))
    return flash4(*parts, ends, longest=length).view(q_BLHC.shape)


def causal_attention(q_BLHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor) -> Tensor:
    """`row_attention` by PyTorch's `scaled_dot_product_attention`."""
    q, k, v = (part.transpose(1, 2) for part in (q_BLHC, k_BLGC, v_BLGC))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=_grouped(q, k))
    return y.transpose(1, 2)


def cached_attention(
    q_BLHC: Tensor, keys_BSGC: Tensor, values_BSGC: Tensor, positions_BL: Tensor
) -> Tensor:
    """New tokens at `positions_BL` attend to all cached ones up to themselves. [B, L, H, C]."""
    q, k, v = (part.transpose(1, 2) for part in (q_BLHC, keys_BSGC, values_BSGC))
    seen_BLS = torch.arange(k.shape[2], device=k.device) <= positions_BL[..., None]
    k, v = k.to(q.dtype), v.to(q.dtype)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen_BLS[:, None], enable_gqa=_grouped(q, k)
    )
    return y.transpose(1, 2)


def packed_attention(
    q_BLHC: Tensor,
    k_BLGC: Tensor,
    v_BLGC: Tensor,
    cu_seqlens_N1: Tensor,
    lengths_N: Tensor,
    choice: Choice = "pytorch",
) -> Tensor:
    """Each token attends to its document up to itself.

    cu_seqlens_N1: int32 on the device of q; lengths_N: int64 on the CPU. Only one of them is read,
    by kind of device, so neither costs a copy. N may change from call to call without recompiling.
    """
    q_THC, k_TGC, v_TGC = (part.flatten(0, 1) for part in (q_BLHC, k_BLGC, v_BLGC))
    backend = packed_backend(q_BLHC.device, q_BLHC.dtype, q_BLHC.shape[-1], choice)
    if backend == "flash4":
        y_THC = flash4(q_THC, k_TGC, v_TGC, cu_seqlens_N1, longest=q_BLHC.shape[1])
    elif backend == "flash":
        y_THC = _flash(q_THC, k_TGC, v_TGC, cu_seqlens_N1, longest=q_BLHC.shape[1])
    else:
        y_THC = torch.ops.tessera.document_attention(q_THC, k_TGC, v_TGC, lengths_N)
    return y_THC.view(q_BLHC.shape)


def packed_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, choice: Choice = "pytorch"
) -> Literal["flash4", "flash", "sdpa"]:
    """What computes `packed_attention`: FlashAttention-4, "flash" (PyTorch's variable-length flash
    attention), or "sdpa" (its scaled_dot_product_attention, one document after the other).

    Args:
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


def _flash(
    q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, cu_seqlens_N1: Tensor, longest: int
) -> Tensor:
    """PyTorch's variable-length flash attention.

    `longest` only sizes the launch. The row length is given, not the longest document: a number
    that changed with every batch would make the compiler start again.
    """
    causal = {"window_size": (-1, 0)} if "window_size" in _VARLEN else {"is_causal": True}
    if "enable_gqa" in _VARLEN:  # before 2.12 fewer key/value heads were taken without asking
        causal["enable_gqa"] = q_THC.shape[1] != k_TGC.shape[1]
    return varlen_attn(
        q_THC, k_TGC, v_TGC, cu_seqlens_N1, cu_seqlens_N1, longest, longest, **causal
    )


# ---------------------------------------------------------------- one call per document, as an op
# An operator, so that the compiler sees one node for any number of documents.


def _per_document(q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, lengths: list[int]) -> Tensor:
    parts = zip(*(part.split(lengths) for part in (q_THC, k_TGC, v_TGC)), strict=True)
    return torch.cat([causal_attention(*(x[None] for x in part))[0] for part in parts])


@torch.library.custom_op("tessera::document_attention", mutates_args=())
def _document_attention(q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, lengths_N: Tensor) -> Tensor:
    return _per_document(q_THC, k_TGC, v_TGC, lengths_N.tolist())


@_document_attention.register_fake
def _(q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, lengths_N: Tensor) -> Tensor:
    return q_THC.new_empty(q_THC.shape)


@torch.library.custom_op("tessera::document_attention_backward", mutates_args=())
def _document_attention_backward(
    grad_THC: Tensor, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, lengths_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # Autograd does not run inside an operator, so the softmax's backward is written out.
    lengths = lengths_N.tolist()
    parts = [part.split(lengths) for part in (grad_THC, q_THC, k_TGC, v_TGC)]
    grads = [_causal_backward(*part) for part in zip(*parts, strict=True)]
    return tuple(torch.cat(part) for part in zip(*grads, strict=True))


def _causal_backward(
    grad_LHC: Tensor, q_LHC: Tensor, k_LGC: Tensor, v_LGC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of softmax(q·kᵀ/√C + causal)·v of one document, in fp32 at least."""
    length, heads, width = q_LHC.shape
    shape = (length, k_LGC.shape[1], heads // k_LGC.shape[1], width)  # heads of one group together
    wide = torch.promote_types(q_LHC.dtype, torch.float32)
    grad, q = (part.to(wide).view(shape) for part in (grad_LHC, q_LHC))
    k, v = k_LGC.to(wide), v_LGC.to(wide)
    scores = torch.einsum("qgrc,kgc->grqk", q, k) / math.sqrt(width)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    p = scores.masked_fill_(later, -torch.inf).softmax(-1)
    dv = torch.einsum("grqk,qgrc->kgc", p, grad)
    dp = torch.einsum("qgrc,kgc->grqk", grad, v)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(width)
    dq = torch.einsum("grqk,kgc->qgrc", ds, k).reshape(q_LHC.shape)
    dk = torch.einsum("grqk,qgrc->kgc", ds, q)
    return dq.to(q_LHC.dtype), dk.to(k_LGC.dtype), dv.to(v_LGC.dtype)


@_document_attention_backward.register_fake
def _(grad_THC: Tensor, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, lengths_N: Tensor):
    return tuple(part.new_empty(part.shape) for part in (q_THC, k_TGC, v_TGC))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


@first_order
def _backward(ctx, grad_THC: Tensor):
    return *torch.ops.tessera.document_attention_backward(grad_THC, *ctx.saved_tensors), None


_document_attention.register_autograd(_backward, setup_context=_save)
