"""The experts of an MoE layer: out[t] = sum over its e of gate · W2[e] · activation(W1[e] · x[t]).

One autograd function composed of the operators under `moe/kernels`, for any `Routing`. Kept for
backward: X, H, the gates and int32 indices, 2TD + 4TKN bytes in bf16 and gated activations; with
save="fp8_h" H is kept in float8 (half of it), with save="x" it is computed again. The graph of
operators follows SonicMoE (arXiv 2512.14080); neither the gathered X, A, Y nor their gradients
outlive the call.

Shape letters: T tokens, R rows (expert order), S slots (token order), E experts, K experts per
token, D model width, N expert width, H columns of the up-projection (2N for gated activations,
gate and up rows interleaved; else N).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe.kernels.common.activations import activation_width
from moe.kernels.common.autograd import first_order
from moe.kernels.common.reference import gather_rows_ref
from moe.kernels.common.row_tiles import RowTiles
from moe.kernels.grouped.combine import combine
from moe.kernels.grouped.float8_rows import from_float8, to_float8
from moe.kernels.grouped.float8_rows import why_not as why_not_float8
from moe.kernels.products import (
    bias_gradient,
    down_backward,
    down_forward,
    input_gradient,
    row_tiles,
    up_forward,
    weight_gradient,
)
from moe.kernels.routing.routing_metadata import slots_of_rows
from moe.kernels.tiers import pick_products
from moe.routing import Routing
from moe.sparse.experts import check_spmm, spmm_experts

SAVE = ("h", "fp8_h", "x")


class _Form(NamedTuple):
    """How the experts are computed: all that is no operand."""

    activation: str
    save: str
    backend: str  # resolved
    with_grad: bool
    output_sums: bool
    slots_per_token: int | None


class _Experts(torch.autograd.Function):
    """`indices` are token_R, slot_R, row_S, offsets_E1 and slot_offsets_T1 of the routing; `mains`
    the buffers to which gradients of w1 and w2 are added."""

    @staticmethod
    def forward(ctx, x, w1_EHD, w2_EDN, gates_S, b1_EH, b2_ED, form, mains, *indices):
        token_R, slot_R, row_S, offsets_E1, slot_offsets_T1 = indices
        backend = form.backend
        num_rows = token_R.shape[0]
        tiles = (
            None if backend == "reference" else row_tiles(offsets_E1, num_rows, x.dtype, backend)
        )
        rows, source_R = x, token_R
        if backend == "reference":  # gather once, in front, where the products are torch's own
            rows, source_R = gather_rows_ref(x, token_R), None
        save_h = form.with_grad and form.save != "x"
        h_RH, a_RN = up_forward(
            rows, w1_EHD, b1_EH, source_R, offsets_E1,
            activation=form.activation, save_h=save_h, tiles=tiles, backend=backend,
        )  # fmt: skip
        del rows
        scale_R = None
        if save_h and form.save == "fp8_h":
            h_RH, scale_R = to_float8(h_RH, backend=backend)
        y_RD = down_forward(a_RN, w2_EDN, b2_ED, offsets_E1, tiles=tiles, backend=backend)
        del a_RN
        sums_ED = None
        if form.output_sums:
            sums_ED = bias_gradient(y_RD, None, None, None, offsets_E1, backend=backend)
        out = combine(
            y_RD, gates_S, row_S, num_tokens=x.shape[0], slots_per_token=form.slots_per_token,
            slot_offsets_T1=slot_offsets_T1, backend=backend,
        )  # fmt: skip
        if form.with_grad:
            # Of a routing with K slots for every token the slots tell the rows; backward inverts.
            inverted = form.slots_per_token is not None and num_rows == len(row_S)
            kept_R = (None, None) if inverted else (token_R, slot_R)
            ctx.save_for_backward(
                x, w1_EHD, w2_EDN, gates_S, b1_EH, b2_ED, h_RH if save_h else None, scale_R,
                *kept_R, row_S, offsets_E1, slot_offsets_T1, *(tiles or ())[:4],
            )  # fmt: skip
            ctx.tile_rows = tiles.rows if tiles else 0
            ctx.mains, ctx.form = mains, form
        if sums_ED is None:
            return out
        ctx.mark_non_differentiable(sums_ED)
        return out, sums_ED

    @staticmethod
    @first_order
    def backward(ctx, dout, *_):
        (
            x, w1_EHD, w2_EDN, gates_S, b1_EH, b2_ED, h_RH, scale_R, token_R, slot_R, row_S,
            offsets_E1, slot_offsets_T1, *tiles,
        ) = ctx.saved_tensors  # fmt: skip
        tiles = RowTiles(*tiles, ctx.tile_rows) if tiles else None
        need_x, need_w1, need_w2, need_gates, need_b1, need_b2 = ctx.needs_input_grad[:6]
        main_w1, main_w2 = ctx.mains
        form, backend = ctx.form, ctx.form.backend
        if token_R is None:
            slot_R, token_R = slots_of_rows(
                row_S, offsets_E1, form.slots_per_token, backend=backend
            )
        dx = dw1 = dw2 = dgates = db1 = db2 = None

        do, do_token_R = dout, token_R
        if backend == "reference":
            do, do_token_R = gather_rows_ref(dout, token_R), None
        if need_b2:
            db2 = bias_gradient(do, do_token_R, gates_S, slot_R, offsets_E1, backend=backend)
        need_dh = need_x or need_w1 or need_b1
        if not (need_dh or need_w2 or need_gates):
            return (*(None,) * 5, db2, *(None,) * 7)

        def gathered_x():
            return (gather_rows_ref(x, token_R), None) if backend == "reference" else (x, token_R)

        if h_RH is None:
            rows, source_R = gathered_x()
            h_RH, _ = up_forward(
                rows, w1_EHD, b1_EH, source_R, offsets_E1,
                activation=form.activation, tiles=tiles, backend=backend,
            )  # fmt: skip
            del rows
        elif scale_R is not None:
            h_RH = from_float8(h_RH, scale_R, x.dtype, backend=backend)
        dh_RH, a_RN, dgates = down_backward(
            do, w2_EDN, b2_ED, h_RH, gates_S, do_token_R, slot_R, row_S, offsets_E1,
            activation=form.activation, want_dh=need_dh, want_a=need_w2, want_dgate=need_gates,
            tiles=tiles, backend=backend,
        )  # fmt: skip
        del h_RH
        if need_w2:
            dw2 = weight_gradient(
                do, a_RN, do_token_R, None, offsets_E1, add_to_EIO=main_w2, backend=backend
            )
        del do, a_RN
        if need_x:
            dx = input_gradient(dh_RH, w1_EHD, offsets_E1, tiles=tiles, backend=backend)
            dx = combine(
                dx, None, row_S, num_tokens=x.shape[0], slots_per_token=form.slots_per_token,
                slot_offsets_T1=slot_offsets_T1, backend=backend,
            )  # fmt: skip
        if need_b1:
            db1 = bias_gradient(dh_RH, None, None, None, offsets_E1, backend=backend)
        if need_w1:
            rows, source_R = gathered_x()
            dw1 = weight_gradient(
                dh_RH, rows, None, source_R, offsets_E1, add_to_EIO=main_w1, backend=backend
            )
        return (dx, dw1, dw2, dgates, db1, db2, *(None,) * 7)


# ------------------------------------------------------------------------------------------ public


def experts(
    x_TD: Tensor,
    w1_EHD: Tensor,
    w2_EDN: Tensor,
    routing: Routing,
    *,
    activation: str = "swiglu",
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    save: str = "h",
    backend: str = "auto",
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
    output_sums: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gate-weighted sum of each token's experts.

    Args:
        x_TD: tokens; float32, float16 or bfloat16 (float64 with the reference).
        w1_EHD: up-projections (E, 2N, D) with gate and up rows interleaved (2j gate, 2j + 1 up),
            or (E, N, D) for ungated activations.
        w2_EDN: down-projections.
        routing: who goes where, with which gate; any number of experts per token.
        activation: swiglu, geglu, reglu, clamped_swiglu (gated), relu2, gelu or silu; see
            `moe.kernels.common.activations`.
        biases: b1_EH and b2_ED, or None.
        save: what is kept for backward of the pre-activations: "h" all, "fp8_h" a float8 copy with
            a scale for each row (half the bytes, gradients 3 to 4 % off by norm; bfloat16 and
            float16), "x" nothing, they are computed again.
        backend: "auto", "triton", "hopper" (see `moe.kernels.hopper`), "reference", or "spmm" for
            products of sparse matrices (`moe.sparse.experts`; no biases, no main_grads,
            save="h"). "auto" takes the fastest that can do what is asked.
        main_grads: buffers, usually float32, to which the gradients of w1 and w2 are added in
            backward in place of making gradients (their `.grad` then stays None). Not under
            torch.compile.
        output_sums: give also the sum of each expert's outputs over its tokens, without gates.

    Returns:
        out_TD in the dtype that a linear layer would give: that of x, or the autocast dtype. With
        `output_sums` also sums_ED, summed in float32, in the same dtype, without gradient.

    Gradients: x, weights, gates (`routing.gates_S`) and biases; what is frozen costs nothing.
    Float32 sums, one rounding and no atomics: the same bits every time. No second
    derivatives: a backward with create_graph=True raises RuntimeError.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, by name.
    """
    if routing.num_tokens != x_TD.shape[0]:
        raise ValueError(
            f"x_TD has {x_TD.shape[0]} tokens, the routing was made for {routing.num_tokens}"
        )
    x, w1_EHD, w2_EDN, b1_EH, b2_ED = autocast_as_linear(x_TD, w1_EHD, w2_EDN, *biases)
    _check(x, w1_EHD, w2_EDN, b1_EH, b2_ED, routing.offsets_E1, activation, save)
    main_w1, main_w2 = main_grads
    if backend == "spmm":
        if any(t is not None for t in (b1_EH, b2_ED, main_w1, main_w2)):
            raise ValueError(
                "backend='spmm' works without biases and main_grads; "
                "use 'auto', 'triton' or 'reference'"
            )
        check_spmm(w2_EDN.shape[2], save)
        return spmm_experts(
            x, w1_EHD, w2_EDN, routing, activation=activation, output_sums=output_sums
        )
    for name, main, weight in (("w1", main_w1, w1_EHD), ("w2", main_w2, w2_EDN)):
        if main is not None and (main.shape != weight.shape or not main.is_contiguous()):
            raise ValueError(
                f"main_grads of {name} must be contiguous with shape {tuple(weight.shape)}, "
                f"got shape {tuple(main.shape)} and strides {main.stride()}"
            )
    if save == "fp8_h" and (reason := why_not_float8(x)) is not None:
        raise ValueError(f"save='fp8_h' cannot be: {reason}; use 'h' or 'x'")
    form = _Form(
        activation,
        save,
        pick_products(
            backend, x, w2_EDN, activation, routing.token_R.shape[0],
            bias=b2_ED if b1_EH is None else b1_EH,
        ),
        torch.is_grad_enabled(),
        output_sums,
        routing.slots_per_token,
    )  # fmt: skip
    return _Experts.apply(
        x, w1_EHD, w2_EDN, routing.gates_S, b1_EH, b2_ED, form, main_grads, routing.token_R,
        routing.slot_R, routing.row_S, routing.offsets_E1, routing.slot_offsets_T1,
    )  # fmt: skip


def autocast_as_linear(*tensors: Tensor | None) -> list[Tensor | None]:
    """Casts as autocast does in front of a linear layer (everything floating but float64)."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype in (dtype, torch.float64) else t.to(dtype) for t in tensors]


def _check(x, w1_EHD, w2_EDN, b1_EH, b2_ED, offsets_E1, activation, save) -> None:
    """Refuses by name what no backend can do, before anything is launched."""
    width = activation_width(activation)
    if save not in SAVE:
        raise ValueError(f"save={save!r} is unknown; allowed: {', '.join(SAVE)}")
    if x.ndim != 2:
        raise ValueError(f"x must have 2 dimensions (rows, D), got shape {tuple(x.shape)}")
    if w1_EHD.ndim != 3 or w2_EDN.ndim != 3:
        raise ValueError(
            f"w1 and w2 must have 3 dimensions, got shapes {tuple(w1_EHD.shape)} "
            f"and {tuple(w2_EDN.shape)}"
        )
    E, D, N = w2_EDN.shape
    if x.shape[1] != D:
        raise ValueError(f"x has width {x.shape[1]}, w2 (E, D, N) has D={D}")
    if tuple(w1_EHD.shape) != (E, width * N, D):
        raise ValueError(
            f"w1 has shape {tuple(w1_EHD.shape)}; with w2 {tuple(w2_EDN.shape)} and "
            f"activation={activation!r} "
            f"it must be {(E, width * N, D)}"
        )
    if offsets_E1.shape[0] != E + 1:
        raise ValueError(f"the routing has {offsets_E1.shape[0] - 1} experts, the weights have {E}")
    if E < 1 or D < 1 or N < 1:
        raise ValueError(f"E, D and N must be at least 1, got E={E}, D={D}, N={N}")
    for name, bias, shape in (("b1", b1_EH, (E, width * N)), ("b2", b2_ED, (E, D))):
        if bias is not None and tuple(bias.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(bias.shape)}, must be {shape}")
    for name, t in (("w1", w1_EHD), ("w2", w2_EDN), ("b1", b1_EH), ("b2", b2_ED)):
        if t is not None and t.dtype != x.dtype:
            raise ValueError(
                f"{name} is {t.dtype} and x is {x.dtype}: they must agree, as in a linear layer "
                "(or use autocast)"
            )
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} is on {t.device} and x on {x.device}")
    if offsets_E1.device != x.device:
        raise ValueError(f"the routing is on {offsets_E1.device} and x on {x.device}")
