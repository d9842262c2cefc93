"""Router logits in float32 from bfloat16 activations, at tensor-core speed.

A float32 number is the sum of three bfloat16 numbers of falling size (8 + 8 + 8 bits), products of
two bfloat16 numbers are exact in float32, and tensor cores add in float32. So x_TD @ w_EDᵀ with x
in bfloat16 and w in float32 is one bfloat16 product of x with the three parts of w side by side,
summed. It keeps no float32 copy of x for the backward.

One H200, forward + backward in ms (pytest -s tests/gpu/test_moe_layer.py -k speed):

    T, D, E             split            float32 product of a widened x
    24576, 1536, 128    0.069 + 0.124    0.347 + 0.609
    32768, 2048, 64     0.067 + 0.126    0.415 + 0.734

Shape letters: T tokens, D model width, E experts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moe.kernels.common.autograd import first_order
from moe.kernels.common.backend import cdiv, on_gpu, pick_backend, tl, triton
from moe.kernels.common.launch import launch
from moe.kernels.common.ops import define_op

# ---------------------------------------------------------------------------------------- reference


def router_logits_ref(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x_TD @ weight_EDᵀ in the weight's dtype; any device."""
    return _matmul(x_TD.to(weight_ED.dtype), weight_ED.t())


def router_logits_bwd_ref(
    grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x (in its dtype) and of the weight (in its own)."""
    dx_TD = dw_ED = None
    if need_x:
        dx_TD = _matmul(grad_TE, weight_ED).to(x_TD.dtype)
    if need_weight:
        dw_ED = _matmul(grad_TE.t(), x_TD.to(weight_ED.dtype))
    return dx_TD, dw_ED


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the operands' full precision, whatever the TF32 settings say."""
    precision = torch.get_float32_matmul_precision()
    if a.is_cuda and precision != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        return a @ b
    finally:
        if a.is_cuda and precision != "highest":
            torch.set_float32_matmul_precision(precision)


def split_ref(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bfloat16 tensors, large to small, whose sum is x to float32's last bit or two."""
    high = x.to(torch.bfloat16)
    rest = x - high
    mid = rest.to(torch.bfloat16)
    return high, mid, (rest - mid).to(torch.bfloat16)


# ------------------------------------------------------------------------------------------- kernel


@triton.jit
def _split_kernel(x_ptr, out_ptr, numel, row, REVERSED: tl.constexpr, BLOCK: tl.constexpr):
    """Each row of x becomes four: low, mid, high, high; REVERSED: high, high, mid, low."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    x = tl.load(x_ptr + i, mask=mask, other=0.0)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    mid = rest.to(tl.bfloat16)
    low = (rest - mid.to(tl.float32)).to(tl.bfloat16)
    at = out_ptr + (i // row) * 4 * row + i % row
    if REVERSED:
        tl.store(at, high, mask=mask)
        tl.store(at + row, high, mask=mask)
        tl.store(at + 2 * row, mid, mask=mask)
        tl.store(at + 3 * row, low, mask=mask)
    else:
        tl.store(at, low, mask=mask)
        tl.store(at + row, mid, mask=mask)
        tl.store(at + 2 * row, high, mask=mask)
        tl.store(at + 3 * row, high, mask=mask)


# ----------------------------------------------------------------------------------------- launcher


def _split(x: Tensor, row: int, reverse: bool) -> Tensor:
    """bfloat16, flat, four times x: the parts of every `row` numbers one after the other."""
    x = x.contiguous()
    out = x.new_empty(4 * x.numel(), dtype=torch.bfloat16)
    if x.numel():
        grid = (cdiv(x.numel(), 1024),)
        launch(_split_kernel, grid, x, out, x.numel(), row, REVERSED=reverse, BLOCK=1024)
    return out


def split_weight(weight_ED: Tensor) -> Tensor:
    """bfloat16 [4E, D]: low, mid, high, high below one another."""
    E, D = weight_ED.shape
    return _split(weight_ED, E * D, reverse=False).view(4 * E, D)


def split_gradient(grad_TE: Tensor) -> Tensor:
    """bfloat16 [T, 4E]: high, high, mid, low side by side."""
    T, E = grad_TE.shape
    return _split(grad_TE, E, reverse=True).view(T, 4 * E)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """bfloat16 product, added and kept in float32."""
    if on_gpu(a.device):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # the same numbers where there are no tensor cores


def _forward(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    E = weight_ED.shape[0]
    low_mid_high = split_weight(weight_ED)[: 3 * E]
    return _mm(x_TD, low_mid_high.t()).view(x_TD.shape[0], 3, E).sum(dim=1)


def _backward(
    grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    E = weight_ED.shape[0]
    parts_TQ = split_gradient(grad_TE)  # Q = 4E
    dx_TD = dw_ED = None
    if need_x:
        # high with mid, high with high, mid with high; the products of two smaller parts are lost
        # in the rounding of dx to bfloat16
        dx_TD = parts_TQ[:, : 3 * E] @ split_weight(weight_ED)[E:]
    if need_weight:
        dw_ED = _mm(parts_TQ[:, E:].t(), x_TD).view(3, *weight_ED.shape).sum(dim=0)
    return dx_TD, dw_ED


def _splits(x_TD: Tensor, weight_ED: Tensor, backend: str) -> bool:
    """Whether the parts are exact: bfloat16 tokens, float32 weight."""
    dtypes = (x_TD.dtype, weight_ED.dtype)
    return backend == "triton" and dtypes == (torch.bfloat16, torch.float32)


# ---------------------------------------------------------------------------------------- custom op


def _no_autocast(x: Tensor) -> AbstractContextManager:
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def _run(x_TD: Tensor, weight_ED: Tensor, backend: str, again: bool = False) -> Tensor:
    """`again` tells a backward's call from the forward's: a compiler that took the two for one
    product would keep its result."""
    with _no_autocast(x_TD):
        if _splits(x_TD, weight_ED, backend):
            return _forward(x_TD, weight_ED)
        return router_logits_ref(x_TD, weight_ED)


def _run_backward(
    grad_TE: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
    need_x: bool,
    need_weight: bool,
    backend: str,
) -> list[Tensor]:
    """[dx, dw], each without elements where it is not needed."""
    with _no_autocast(x_TD):
        run = _backward if _splits(x_TD, weight_ED, backend) else router_logits_bwd_ref
        dx_TD, dw_ED = run(grad_TE, x_TD, weight_ED, need_x, need_weight)
    return [
        x_TD.new_empty(0) if dx_TD is None else dx_TD,
        weight_ED.new_empty(0) if dw_ED is None else dw_ED,
    ]


def _fake_backward(grad_TE, x_TD, weight_ED, need_x, need_weight, backend):
    return [
        x_TD.new_empty(x_TD.shape if need_x else 0),
        weight_ED.new_empty(weight_ED.shape if need_weight else 0),
    ]


_op = define_op(
    "router_logits(Tensor x, Tensor weight, str backend, bool again=False) -> Tensor",
    _run,
    lambda x_TD, weight_ED, *rest: weight_ED.new_empty(x_TD.shape[0], weight_ED.shape[0]),
)
_op_backward = define_op(
    "router_logits_backward(Tensor grad, Tensor x, Tensor weight, bool need_x, bool need_weight, "
    "str backend) -> Tensor[]",
    _run_backward,
    _fake_backward,
)

# ----------------------------------------------------------------------------------------- autograd


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.backend = backend
        return _op(x_TD, weight_ED, backend)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TD, weight_ED = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        if not (need_x or need_weight):
            return None, None, None
        dx_TD, dw_ED = _op_backward(grad_TE, x_TD, weight_ED, need_x, need_weight, ctx.backend)
        return dx_TD if need_x else None, dw_ED if need_weight else None, None


# ------------------------------------------------------------------------------------------- public


def router_logits(x_TD: Tensor, weight_ED: Tensor, backend: str = "auto") -> Tensor:
    """x_TD @ weight_EDᵀ in full float32 precision, untouched by autocast and TF32 settings.

    Args:
        x_TD: any float dtype; kept as it is for the backward.
        weight_ED: float32, or float64 for an exact router.
        backend: "auto", "triton" or "reference". Triton serves bfloat16 x with a float32 weight
            through split products; other dtypes go through the plain product in any case.

    Returns:
        logits_TE in the weight's dtype. Gradients come in the dtype of what they belong to; a
        backward with create_graph=True raises RuntimeError.

    Raises:
        ValueError: shapes, dtypes or a backend that do not fit.
    """
    if weight_ED.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"weight_ED is {weight_ED.dtype}; allowed: float32, float64")
    if x_TD.ndim != 2 or weight_ED.ndim != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        raise ValueError(
            f"x_TD {tuple(x_TD.shape)} and weight_ED {tuple(weight_ED.shape)} must be [T, D] "
            "and [E, D]"
        )
    return _RouterLogits.apply(x_TD, weight_ED, pick_backend(backend, x_TD))


def router_logits_again(x_TD: Tensor, weight_ED: Tensor, backend: str) -> Tensor:
    """The same product in a backward, without gradient: for what would else keep its result."""
    return _op(x_TD, weight_ED, pick_backend(backend, x_TD), True)
