"""Auxiliary losses of the router: load balance and z loss.

Everything is made of the sums in `RouterStats`, so padding never enters, and everything is
normalised the same way as the language-model loss: by the number of valid tokens of the whole
step. With m running over the micro-batches of all ranks, T_m valid tokens in m and T = sum of
T_m, a step's loss is

    CE_sum / targets  +  sum over m of T_m / T * (balance_coef * balance_m + z_coef * z_m)

and `moe.router_losses(model, stats, T, ...)` gives the m-th term, with values that are means over
layers. Gradients are summed over micro-batches and ranks, never averaged. T_m z_m is a sum over
tokens: value and gradient are the same for any split. So is T_m balance_m when the load is that of
the whole step (`counts_E`), or when it is measured per sequence; with the load of the micro-batch
alone it is the mean of the micro-batch losses, by definition.

Shape letters: L layers, E experts. Values have the leading shape of the statistics: [] or [L].
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moe.types import RouterStats


def load_fractions(counts_E: Tensor) -> Tensor:
    """F_e = counts_e / sum of counts, float64 [..., E]; uniform where nothing was counted."""
    counts_E = counts_E.detach().double()
    total = counts_E.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, counts_E / total.clamp(min=1), 1.0 / counts_E.shape[-1])


@functools.lru_cache(maxsize=64)
def flop_weights(
    widths: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[L, E] width of every expert over the mean of its layer: a load times this is a load in
    arithmetic. Balanced against it, narrow experts get more tokens; the balance value is that of
    HMoE's parameter penalty (arXiv 2408.10681), E · sum of F_e · n_e · P_e / mean n, divided by the
    part of the mean width that tokens met, so that 1.0 is balanced here too. For equal widths all
    is 1. Made once for a model: nothing is copied to the device in a step.
    """
    with torch.inference_mode(False):  # kept: a later training step may be the next to use it
        sizes_LE = torch.tensor(widths, dtype=torch.float64)
        return (sizes_LE / sizes_LE.mean(dim=1, keepdim=True)).to(device, dtype)


def balance_loss(stats: RouterStats, counts_E: Tensor | None = None) -> Tensor:
    """Switch load-balance loss per layer: E * sum over e of F_e * P_e; 1.0 = balanced.

    F_e = counts_e / sum of counts, the share of the chosen (token, expert) pairs, without
    gradient: dividing by all pairs, not by tokens, makes the value 1.0 for every K. P_e =
    prob_sum_e / tokens, the mean probability, with gradient. The gradient for a token's logits is
    E * p * (F - <p, F>) / tokens.

    Args:
        stats: of one micro-batch; zero valid tokens give 0.
        counts_E: load to balance against, [..., E], instead of the micro-batch's own: counts
            summed over ranks and micro-batches make the "global" scope of arXiv 2501.11873. The
            probabilities stay those of the micro-batch, so that the token-weighted sum over
            micro-batches and ranks is exactly the loss of the whole batch.

    Sources: Switch Transformer (arXiv 2101.03961), GShard (arXiv 2006.16668).
    """
    fraction_E = load_fractions(stats.counts_E if counts_E is None else counts_E)
    prob_E = stats.prob_sum_E / stats.tokens.clamp(min=1)[..., None]
    return stats.experts * (fraction_E.to(prob_E.dtype) * prob_E).sum(dim=-1)


def sequence_loss(stats: RouterStats) -> Tensor:
    """Mean of the sequences' Switch losses, weighted by their valid tokens; 1.0 = balanced.

    The load and the probabilities are measured inside every sequence (DeepSeek-V3, arXiv
    2412.19437), so neither the size of the micro-batch nor the other sequences change it. 0 unless
    the router's balance is {kind: sequence}, which measures it.
    """
    return stats.sequence_sum / stats.tokens.clamp(min=1)


def z_loss(stats: RouterStats) -> Tensor:
    """Mean over valid tokens of logsumexp(logits)^2 per layer (ST-MoE, arXiv 2202.08906)."""
    return stats.z_sum / stats.tokens.clamp(min=1)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, aux: Tensor) -> Tensor:
        ctx.aux_shape, ctx.aux_dtype = aux.shape, aux.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        return grad_y, grad_y.new_ones(ctx.aux_shape, dtype=ctx.aux_dtype)


def attach_loss(y: Tensor, aux: Tensor) -> Tensor:
    """y itself, whose backward also runs that of `aux.sum()`: a loss for code that only hands y on.

    The auxiliary gradient does not depend on what is done with y later, its scale included, so
    `aux` must already carry its coefficient and normalisation. If y takes no part in the loss,
    neither does aux.
    """
    return _Attach.apply(y, aux)
