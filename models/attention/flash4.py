"""FlashAttention-4, an optional package: causal attention of packed documents on recent GPUs.

Twice as fast as what PyTorch ships on Hopper. `pip install -e .[gpu]` installs it; `installed`
says whether it is there, `fits` whether it computes a given attention. Its two halves are wrapped
as operators, so that the compiler sees one node and the backward keeps the log-sum-exp of the
forward. The package's backward is not part of its documented interface, so its version is pinned.

Shape letters: T tokens, H query heads, G key/value heads, C head width, N documents.
Source: Tri Dao et al., github.com/Dao-AILab/flash-attention (flash_attn/cute).
"""

from __future__ import annotations

import functools
from importlib import metadata

import torch
from torch import Tensor

from moe.kernels.common.autograd import first_order

# Compute capabilities whose kernels have been tried here.
CAPABILITIES = ((9, 0),)


@functools.cache
def installed() -> str | None:
    """Version of the package, or None. The kernels come with CUTLASS for the CUDA of the driver;
    without it the package does not import."""
    try:
        version = metadata.version("flash-attn-4")
        import flash_attn.cute.interface  # noqa: F401
    except ImportError:  # PackageNotFoundError is one
        return None
    return version


def fits(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the installed package computes attention of this kind here."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and torch.cuda.get_device_capability(device) in CAPABILITIES
        and installed() is not None
    )


def flash4(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    cu_seqlens_N1: Tensor,
    longest: int,
    scale: float | None = None,
) -> Tensor:
    """Each token attends to its document up to itself; [T, H, C].

    Deterministic: sums of the backward have a fixed order.

    Args:
        cu_seqlens_N1: int32 on the device, first token of each document and T.
        longest: at least the tokens of the longest document; sizes the launch.
        scale: multiplies the scores; None: one over the root of C.
    """
    return torch.ops.tessera.flash4(q_THC, k_TGC, v_TGC, cu_seqlens_N1, longest, scale)[0]


def _scaled(scale: float | None) -> dict[str, float]:
    return {} if scale is None else {"softmax_scale": scale}


@torch.library.custom_op("tessera::flash4", mutates_args=())
def _flash4(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    cu_seqlens_N1: Tensor,
    longest: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import flash_attn_varlen_func

    y_THC, lse_HT = flash_attn_varlen_func(
        q_THC,
        k_TGC,
        v_TGC,
        cu_seqlens_q=cu_seqlens_N1,
        cu_seqlens_k=cu_seqlens_N1,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
        return_lse=True,
        **_scaled(scale),
    )
    return y_THC, lse_HT


@_flash4.register_fake
def _(q_THC, k_TGC, v_TGC, cu_seqlens_N1, longest, scale=None):
    tokens, heads, _ = q_THC.shape
    return q_THC.new_empty(q_THC.shape), q_THC.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("tessera::flash4_backward", mutates_args=())
def _flash4_backward(
    grad_THC: Tensor,
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    y_THC: Tensor,
    lse_HT: Tensor,
    cu_seqlens_N1: Tensor,
    longest: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(
        q_THC,
        k_TGC,
        v_TGC,
        y_THC,
        grad_THC.contiguous(),
        lse_HT,
        causal=True,
        cu_seqlens_q=cu_seqlens_N1,
        cu_seqlens_k=cu_seqlens_N1,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        deterministic=True,
        **_scaled(scale),
    )


@_flash4_backward.register_fake
def _(grad_THC, q_THC, k_TGC, v_TGC, y_THC, lse_HT, cu_seqlens_N1, longest, scale=None):
    return tuple(part.new_empty(part.shape) for part in (q_THC, k_TGC, v_TGC))


def _save(ctx, inputs, output) -> None:
    q_THC, k_TGC, v_TGC, cu_seqlens_N1, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(q_THC, k_TGC, v_TGC, *output, cu_seqlens_N1)


@first_order
def _backward(ctx, grad_THC: Tensor, _: Tensor):
    grads = torch.ops.tessera.flash4_backward(grad_THC, *ctx.saved_tensors, ctx.longest, ctx.scale)
    return *grads, None, None, None


_flash4.register_autograd(_backward, setup_context=_save)
