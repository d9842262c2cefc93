"""Router gating: logits → experts, gates and the statistics of the balance and z losses.

`moe.kernels.common.gating` has the definitions, `gating_kernels` beside this file the Triton
kernels, `moe.kernels.hopper.gating` those for Hopper.

Shape letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe.kernels import hopper
from moe.kernels.common.autograd import first_order
from moe.kernels.common.gating import NORMS, SCORES, Gating, topk_gating_ref
from moe.kernels.common.launch import on_device
from moe.kernels.common.ops import define_op, is_eager
from moe.kernels.routing.gating_kernels import topk_gating_backward_triton, topk_gating_triton
from moe.kernels.routing.router_logits import router_logits_again
from moe.kernels.routing.routing_metadata import RoutingMetadata, routing_metadata_ref
from moe.kernels.tiers import pick_gating

# What logits were made of by `router_logits`: tokens [T, D], weight [E, D], backend.
MadeOf = tuple[Tensor, Tensor, str]

# -------------------------------------------------------------------------------- ops and autograd


def _fake(
    logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T, metadata,
    backend,
):  # fmt: skip
    T, E = logits_TE.shape
    ints, floats = {"dtype": torch.int32}, {"dtype": torch.float32}
    out = [
        logits_TE.new_empty(T, k, **ints), logits_TE.new_empty(T, k, **floats),
        logits_TE.new_empty(T, **floats), logits_TE.new_empty(E, **ints),
        logits_TE.new_empty(E, **floats), logits_TE.new_empty((), **ints),
    ]  # fmt: skip
    sizes = (E + 1, T * k, T * k, T * k) if metadata else ()
    return out + [logits_TE.new_empty(size, **ints) for size in sizes]


def _forward(
    logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T, metadata,
    backend,
):  # fmt: skip
    if backend == "hopper":
        with on_device(logits_TE):
            return hopper.gating_hopper(logits_TE, k, score, norm, scale, bias_E, valid_T, metadata)
    return topk_gating_triton(
        logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T, metadata
    )


_forward_op = define_op(
    "topk_gating(Tensor logits_TE, int k, str score, str norm, float scale, Tensor? bias_E, "
    "int groups, int groups_kept, int group_top, Tensor? valid_T, bool metadata, str backend) -> "
    "Tensor[]",
    _forward,
    _fake,
)
_backward_op = define_op(
    "topk_gating_backward(Tensor? logits_TE, Tensor expert_TK, Tensor gate_TK, Tensor lse_T, "
    "Tensor? d_gate_TK, Tensor? d_lse_T, Tensor? d_prob_E, int num_experts, str score, str norm, "
    "float scale) -> Tensor",
    topk_gating_backward_triton,
    lambda logits_TE, expert_TK, gate_TK, lse_T, d_gate_TK, d_lse_T, d_prob_E, num_experts, *form: (
        gate_TK if logits_TE is None else logits_TE
    ).new_empty(expert_TK.shape[0], num_experts),
)


class _TopkGating(torch.autograd.Function):
    """x, weight: None, or what the logits were made of by the backend `made_by`; then those are
    kept, and the backward computes the logits again where it needs them."""

    @staticmethod
    def forward(ctx, logits_TE, x_TD, weight_ED, made_by, k, score, norm, scale, *rest):
        forward = _forward if is_eager(logits_TE) else _forward_op
        out = tuple(forward(logits_TE, k, score, norm, scale, *rest))
        expert, gate, lse = out[:3]
        if x_TD is None:
            ctx.save_for_backward(logits_TE, None, None, expert, gate, lse)
        else:
            ctx.save_for_backward(None, x_TD, weight_ED, expert, gate, lse)
        ctx.made_by = made_by
        ctx.num_experts = logits_TE.shape[1]
        ctx.form = (score, norm, scale)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(expert, out[3], *out[5:])
        return out

    @staticmethod
    @first_order
    def backward(ctx, _0, d_gate, d_lse, _3, d_prob, *_rest):
        logits_TE, x_TD, weight_ED, expert, gate, lse = ctx.saved_tensors
        score, norm, _ = ctx.form
        if d_lse is None and d_prob is None and gates_suffice(score, norm):
            logits_TE = None
        elif logits_TE is None:
            logits_TE = router_logits_again(x_TD, weight_ED, ctx.made_by)
        backward = topk_gating_backward_triton if is_eager(gate) else _backward_op
        d_logits = backward(
            logits_TE, expert, gate, lse, d_gate, d_lse, d_prob, ctx.num_experts, *ctx.form
        )
        return (d_logits, *(None for _ in range(14)))


def gates_suffice(score: str, norm: str) -> bool:
    """Whether the gradient of the gates can be told from the gates, without the logits."""
    return norm == "softmax_topk" or (norm == "topk_sum" and score == "softmax")


def _run(logits_TE: Tensor, made_of: MadeOf | None, *rest) -> tuple[Tensor, ...]:
    if logits_TE.requires_grad and torch.is_grad_enabled():
        x_TD, weight_ED, made_by = (None, None, "") if made_of is None else made_of
        if made_of is not None and (*x_TD.shape[:1], *weight_ED.shape[:1]) != logits_TE.shape:
            raise ValueError(
                f"made_of holds x {tuple(x_TD.shape)} and weight {tuple(weight_ED.shape)}, which "
                f"do not give logits_TE {tuple(logits_TE.shape)}"
            )
        return _TopkGating.apply(logits_TE, x_TD, weight_ED, made_by, *rest)
    return (_forward if is_eager(logits_TE) else _forward_op)(logits_TE, *rest)


# ------------------------------------------------------------------------------------------- public


def _check(
    logits_TE: Tensor,
    k: int,
    score: str,
    norm: str,
    scale: float,
    bias_E: Tensor | None,
    groups: int,
    groups_kept: int,
    group_top: int,
    valid_T: Tensor | None,
) -> None:
    if logits_TE.dim() != 2 or not logits_TE.dtype.is_floating_point:
        raise ValueError(
            "logits_TE must be a floating point tensor [T, E], got "
            f"{logits_TE.dtype} {tuple(logits_TE.shape)}"
        )
    T, E = logits_TE.shape
    if not 1 <= k <= E:
        raise ValueError(f"k={k} is not possible with {E} experts; allowed: 1 to {E}")
    if score not in SCORES:
        raise ValueError(f"score={score!r} is unknown; allowed: {', '.join(SCORES)}")
    if norm not in NORMS:
        raise ValueError(f"norm={norm!r} is unknown; allowed: {', '.join(NORMS)}")
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be a finite number")
    if groups < 1 or E % groups:
        raise ValueError(f"groups={groups} must be at least 1 and divide the {E} experts")
    if not 1 <= groups_kept <= groups:
        raise ValueError(f"groups_kept={groups_kept} must be between 1 and groups={groups}")
    if groups_kept < groups:
        if groups_kept * (E // groups) < k:
            raise ValueError(
                f"groups_kept={groups_kept} groups of {E // groups} experts hold fewer experts "
                f"than k={k}"
            )
        if not 1 <= group_top <= E // groups:
            raise ValueError(
                f"group_top={group_top} must be between 1 and the group size {E // groups}"
            )
    if bias_E is not None and tuple(bias_E.shape) != (E,):
        raise ValueError(f"bias_E must have shape ({E},), got {tuple(bias_E.shape)}")
    if valid_T is not None and (tuple(valid_T.shape) != (T,) or valid_T.dtype != torch.bool):
        raise ValueError(
            f"valid_T must be bool of shape ({T},), got {valid_T.dtype} {tuple(valid_T.shape)}"
        )


def topk_gating(
    logits_TE: Tensor,
    k: int,
    *,
    score: str = "softmax",
    norm: str = "topk_sum",
    scale: float = 1.0,
    bias_E: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    group_top: int = 2,
    valid_T: Tensor | None = None,
    backend: str = "auto",
    made_of: MadeOf | None = None,
) -> Gating:
    """Choose K experts for every token and compute gates, logsumexp, counts and probability sums.

    See `moe.kernels.common.gating` for the definitions; the gradient flows through `gate_TK`,
    `lse_T` and `prob_sum_E`, the selection is a constant, and `bias_E` never gets a gradient.

    Args:
        logits_TE: [T, E] float32 (16-bit floats are widened; float64 runs the reference in
            float64).
        k: experts per token, 1 to E.
        score, norm, scale: form of the gates.
        bias_E: [E] added to the score for the selection only.
        groups, groups_kept, group_top: group-limited selection; groups=1 is plain top-K.
        valid_T: [T] bool; rows that are False get expert -1 and gate 0 and are counted nowhere.
        backend: "auto" (kernels on CUDA up to 4096 experts and k = 64; on Hopper its own where
            they are faster), "triton" or "reference".
        made_of: (x_TD, weight_ED, backend) of the `router_logits` call that gave the logits; then
            the kernels keep those two for the backward in place of the logits, 4TE bytes, and
            compute the logits again if anything but the gates of a softmax has a gradient.

    Raises:
        ValueError: an argument out of range, by name and value.

    Sources: score forms and bias of DeepSeek-V3 (arXiv 2412.19437), z loss of ST-MoE (arXiv
    2202.08906), tie and NaN behaviour after the reports pytorch/pytorch#127196 and
    vllm-project/vllm#39391, two-stage selection after Chern et al. (arXiv 2206.14286).
    """
    _check(logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T)
    args = (logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T)
    tier = pick_gating(backend, logits_TE, k, limited=groups_kept < groups)
    if tier == "reference":
        return topk_gating_ref(*args)
    return Gating(*_run(logits_TE, made_of, *args[1:], False, tier))


def topk_routing(
    logits_TE: Tensor,
    k: int,
    *,
    score: str = "softmax",
    norm: str = "topk_sum",
    scale: float = 1.0,
    bias_E: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    group_top: int = 2,
    valid_T: Tensor | None = None,
    backend: str = "auto",
    made_of: MadeOf | None = None,
) -> tuple[Gating, RoutingMetadata]:
    """`topk_gating` and the `routing_metadata` of its choice, in fewer launches than the two.

    The counting sort starts from counts that the gating kernel makes anyway; a small batch is
    routed and sorted by a single launch. Arguments and errors are those of `topk_gating`.
    """
    _check(logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T)
    args = (logits_TE, k, score, norm, scale, bias_E, groups, groups_kept, group_top, valid_T)
    tier = pick_gating(backend, logits_TE, k, limited=groups_kept < groups)
    if tier == "reference":
        gating = topk_gating_ref(*args)
        E = logits_TE.shape[1]
        return gating, routing_metadata_ref(gating.expert_TK.reshape(-1), E, k)
    out = _run(logits_TE, made_of, *args[1:], True, tier)
    return Gating(*out[:6]), RoutingMetadata(*out[6:])
