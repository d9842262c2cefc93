"""Experts of different widths: out[t] = sum over its experts of gate · activation(x W1ᵀ) W2.

As `moe.experts`, with the weights of all experts behind one another
(`moe.kernels.grouped.ragged`): W1 [P, D] and W2 [U, D] have rows for the units that there are, and
no product is padded to the widest expert. Kept for backward: X, H, the gates and indices. H's rows
are as long as the widest expert's; what is beyond an expert's width there is memory that nothing
touches.

Wide experts beside narrow ones after HMoE (arXiv 2408.10681).

Shape letters: T tokens, R rows, S slots, E experts, D model width, N widest expert, H columns of
its pre-activations, U units of all experts, P rows of W1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.experts import autocast_as_linear
from moe.kernels.common.activations import activation_width
from moe.kernels.common.autograd import first_order
from moe.kernels.grouped import ragged
from moe.kernels.grouped.combine import combine
from moe.kernels.grouped.ragged import Widths
from moe.kernels.products import bias_gradient
from moe.kernels.tiers import pick_for_activation
from moe.routing import Routing

BACKENDS = ("reference", "triton")


class _Form(NamedTuple):
    """How the experts are computed: all that is no operand."""

    widths: Widths
    activation: str
    save: str
    backend: str  # resolved
    with_grad: bool
    output_sums: bool
    slots_per_token: int | None


class _MixedExperts(torch.autograd.Function):
    """`indices` are token_R, slot_R, row_S, offsets_E1 and slot_offsets_T1 of the routing."""

    @staticmethod
    def forward(ctx, x, w1_PD, w2_UD, gates_S, form, *indices):
        token_R, slot_R, row_S, offsets_E1, slot_offsets_T1 = indices
        widths, activation, backend = form.widths, form.activation, form.backend
        save_h = form.with_grad and form.save == "h"
        h_RH, a_RN = ragged.up(
            x, w1_PD, token_R, offsets_E1, widths, activation=activation, save_h=save_h,
            backend=backend,
        )  # fmt: skip
        y_RD = ragged.rows(a_RN, w2_UD, offsets_E1, widths, backend=backend)
        del a_RN
        sums_ED = None
        if form.output_sums:
            sums_ED = bias_gradient(y_RD, None, None, None, offsets_E1, backend=backend)
        out = combine(
            y_RD, gates_S, row_S, num_tokens=x.shape[0], slots_per_token=form.slots_per_token,
            slot_offsets_T1=slot_offsets_T1, backend=backend,
        )  # fmt: skip
        if form.with_grad:
            ctx.save_for_backward(
                x, w1_PD, w2_UD, gates_S, h_RH if save_h else None, token_R, slot_R, row_S,
                offsets_E1, slot_offsets_T1,
            )  # fmt: skip
            ctx.form = form
        if sums_ED is None:
            return out
        ctx.mark_non_differentiable(sums_ED)
        return out, sums_ED

    @staticmethod
    @first_order
    def backward(ctx, dout, *_):
        (
            x, w1_PD, w2_UD, gates_S, h_RH, token_R, slot_R, row_S, offsets_E1, slot_offsets_T1,
        ) = ctx.saved_tensors  # fmt: skip
        widths, activation, backend = ctx.form.widths, ctx.form.activation, ctx.form.backend
        need_x, need_w1, need_w2, need_gates = ctx.needs_input_grad[:4]
        width = activation_width(activation)
        dx = dw1 = dw2 = None
        if h_RH is None:
            h_RH, _ = ragged.up(
                x, w1_PD, token_R, offsets_E1, widths, activation=activation, backend=backend
            )
        dh_RH, a_RN, dgates = ragged.down_backward(
            dout, w2_UD, h_RH, gates_S, token_R, slot_R, row_S, offsets_E1, widths,
            activation=activation, backend=backend,
        )  # fmt: skip
        del h_RH
        if need_w2:
            dw2 = ragged.outer(a_RN, dout, token_R, offsets_E1, widths, backend=backend)
        del a_RN
        if need_x:
            dx = ragged.rows(dh_RH, w1_PD, offsets_E1, widths, width=width, backend=backend)
            dx = combine(
                dx, None, row_S, num_tokens=x.shape[0], slots_per_token=ctx.form.slots_per_token,
                slot_offsets_T1=slot_offsets_T1, backend=backend,
            )  # fmt: skip
        if need_w1:
            dw1 = ragged.outer(dh_RH, x, token_R, offsets_E1, widths, width=width, backend=backend)
        return dx, dw1, dw2, dgates if need_gates else None, *(None,) * 6


def mixed_experts(
    x_TD: Tensor,
    w1_PD: Tensor,
    w2_UD: Tensor,
    routing: Routing,
    widths: Widths,
    *,
    activation: str = "swiglu",
    save: str = "h",
    backend: str = "auto",
    output_sums: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gate-weighted sum of each token's experts, which differ in width.

    Args:
        x_TD: tokens; float32, float16 or bfloat16 (float64 with the reference).
        w1_PD: up-projections behind one another; gate and up rows of a unit interleaved.
        w2_UD: down-projections, one row a unit.
        routing: who goes where, with which gate; any number of experts per token.
        widths: units of each expert.
        save: "h" keeps the pre-activations for backward, "x" computes them again.
        backend: "auto", "triton" or "reference".

    The result, its dtype, the gradients, `output_sums` and the errors are those of
    `moe.experts.experts`; there are no biases.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, by name.
    """
    if routing.num_tokens != x_TD.shape[0]:
        raise ValueError(
            f"x_TD has {x_TD.shape[0]} tokens, the routing was made for {routing.num_tokens}"
        )
    x_TD, w1_PD, w2_UD = autocast_as_linear(x_TD, w1_PD, w2_UD)
    _check(x_TD, w1_PD, w2_UD, routing, widths, activation, save, backend)
    form = _Form(
        widths,
        activation,
        save,
        pick_for_activation(backend, x_TD, activation, BACKENDS),
        torch.is_grad_enabled(),
        output_sums,
        routing.slots_per_token,
    )
    return _MixedExperts.apply(
        x_TD, w1_PD, w2_UD, routing.gates_S, form, routing.token_R, routing.slot_R, routing.row_S,
        routing.offsets_E1, routing.slot_offsets_T1,
    )  # fmt: skip


def check_widths(sizes: tuple[int, ...], kernels: str = "auto") -> None:
    """Refuses widths that are none, and kernels that know only one width.

    Raises:
        ValueError: by name.
    """
    wrong = [size for size in sizes if size < 1]
    if wrong or not sizes:
        raise ValueError(f"expert_widths={list(sizes)} must be widths of at least 1")
    if kernels not in ("auto", *BACKENDS):
        raise ValueError(
            f"kernels={kernels!r} computes experts of one width only; allowed with expert_widths: "
            f"auto, {', '.join(BACKENDS)}"
        )


def _check(x, w1_PD, w2_UD, routing, widths, activation, save, backend) -> None:
    check_widths(widths.sizes, backend)
    if save not in ("h", "x"):
        raise ValueError(f"save={save!r} is unknown; allowed: h, x")
    if len(widths.sizes) != routing.num_experts:
        raise ValueError(
            f"widths has {len(widths.sizes)} experts, the routing {routing.num_experts}"
        )
    D, U = x.shape[-1], widths.total
    for name, weight, rows in (("w1", w1_PD, U * activation_width(activation)), ("w2", w2_UD, U)):
        if tuple(weight.shape) != (rows, D):
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}; with {U} units, activation="
                f"{activation!r} and x of width {D} it must be {(rows, D)}"
            )
        if weight.dtype != x.dtype:
            raise ValueError(
                f"{name} is {weight.dtype} and x is {x.dtype}: they must agree, as in a linear "
                "layer (or use autocast)"
            )
        if weight.device != x.device:
            raise ValueError(f"{name} is on {weight.device} and x on {x.device}")
