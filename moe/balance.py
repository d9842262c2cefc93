"""Auxiliary losses of the router: load balance and z loss.

Everything is made of the sums in `RouterStats`, so padding never enters, and everything is
normalised the same way as the language-model loss: by the number of valid tokens of the whole
step. With m running over the micro-batches of all ranks, T_m valid tokens in m and T = sum of
T_m, a step's loss is

    CE_sum / targets  +  sum over m of T_m / T * (balance_coef * balance_m + z_coef * z_m)

and `auxiliary_loss(stats, step_tokens=T, ...)` is the m-th term. Gradients are summed over
micro-batches and ranks, never averaged. T_m z_m is a sum over tokens: value and gradient are the
same for any split. So is T_m balance_m when the load comes from the caller for the whole step
(`counts_E`), or when it is measured per sequence; with the load of the micro-batch alone it is
the mean of the micro-batch losses, by definition.

Shape letters: L layers, E experts. Values have the leading shape of the statistics: [] or [L].
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe.metrics import RouterStats


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
    2412.19437), so neither the size of the micro-batch nor the other sequences change it. Needs
    `MoEConfig.sequence_stats=True`; without it the value is 0.
    """
    return stats.sequence_sum / stats.tokens.clamp(min=1)


def sequence_sum(
    prob_TE: Tensor, expert_TK: Tensor, sequences: int, in_use: int | Tensor | None = None
) -> Tensor:
    """`RouterStats.sequence_sum` of equally long sequences: tokens * Switch loss, summed.

    Args:
        prob_TE: [T, E] probabilities that sum to 1, or zeros for tokens that are not valid.
        expert_TK: int [T, K]; -1 for tokens that are not valid.
        in_use: experts that the load is to be even over; None: all.
    """
    tokens, experts = prob_TE.shape
    sequence_T1 = torch.arange(tokens, device=prob_TE.device)[:, None] * sequences // max(tokens, 1)
    some_TK = expert_TK >= 0
    cell_TK = sequence_T1 * experts + expert_TK.clamp(min=0)
    counts = torch.zeros(sequences * experts, dtype=torch.int32, device=prob_TE.device)
    counts = counts.scatter_add(0, cell_TK.reshape(-1), some_TK.reshape(-1).to(torch.int32))
    fraction_BE = load_fractions(counts.view(sequences, experts)).to(prob_TE.dtype)
    prob_sum_BE = prob_TE.view(sequences, -1, experts).sum(dim=1)
    return (experts if in_use is None else in_use) * (fraction_BE * prob_sum_BE).sum()


def centred(bias_E: Tensor, active_E: Tensor | None = None) -> Tensor:
    """A bias [..., E] less its mean; over the experts in use alone where a mask says which those
    are, and 0 for the others."""
    if active_E is None:
        return bias_E - bias_E.mean(dim=-1, keepdim=True)
    active_E = active_E.to(bias_E.dtype)
    mean = (bias_E * active_E).sum(-1, keepdim=True) / active_E.sum(-1, keepdim=True)
    return torch.where(active_E > 0, bias_E - mean, 0.0)


@torch.no_grad()
def quantiles(
    score_TE: Tensor,
    key_TE: Tensor,
    k: int,
    targets: Sequence[float] | None = None,
    active_E: Tensor | None = None,
) -> Tensor:
    """Per expert the excess score that exactly the wanted number of tokens has; [E].

    With a_t the (k + 1)-th largest key of token t, expert e would get token t if its score were
    above a_t. So minus the (q + 1)-th largest s_te - a_t over the tokens is the bias with which
    about q tokens choose e: with q = tokens * k / E for all experts the load is balanced (quantile
    balancing: Su, kexue.fm 11619 and 11626; marin-community/marin#5502).

    Args:
        score_TE: scores without bias, -inf where an expert cannot be chosen or a token is no token.
        key_TE: the keys that chose: score plus bias, -inf likewise.
        k: experts per token, below E.
        targets: wanted share of the load per expert, up to a factor; None: the same for all.
        active_E: 1 for the experts in use, which alone share the load; None: all.
    """
    tokens, experts = score_TE.shape
    if not tokens:
        return score_TE.new_zeros(experts)
    rival_T1 = torch.topk(key_TE, k + 1, dim=1, sorted=True).values[:, k:]
    # a token with k usable experts or fewer has no choice, and says nothing
    counts_TE = (rival_T1 > -math.inf) & (key_TE > -math.inf)
    excess_TE = torch.where(counts_TE, score_TE - rival_T1, -math.inf)
    wanted_E = torch.full((experts,), k / experts, dtype=torch.float64, device=score_TE.device)
    if targets is not None:
        for expert, share in enumerate(targets):
            wanted_E[expert].fill_(k * share / sum(targets))  # an assignment waits for the device
    if active_E is not None:
        wanted_E = k * active_E.double() / active_E.double().sum()
    place_E = torch.round((rival_T1 > -math.inf).sum() * wanted_E).long().clamp(max=tokens - 1)
    ranked_TE = torch.sort(excess_TE, dim=0, descending=True).values
    found_E = ranked_TE.gather(0, place_E[None])[0]
    # fewer tokens than wanted may choose it at all: the lowest excess there is lets all of them in
    lowest_E = torch.where(counts_TE, excess_TE, math.inf).amin(dim=0)
    lowest_E = torch.where(lowest_E < math.inf, lowest_E, lowest_E.amin().clamp(max=0))
    return torch.where(found_E > -math.inf, found_E, lowest_E)


def z_loss(stats: RouterStats) -> Tensor:
    """Mean over valid tokens of logsumexp(logits)^2 per layer (ST-MoE, arXiv 2202.08906)."""
    return stats.z_sum / stats.tokens.clamp(min=1)


def auxiliary_loss(
    stats: RouterStats,
    *,
    step_tokens: Tensor | float,
    balance_coef: float = 0.0,
    z_coef: float = 0.0,
    sequence_coef: float = 0.0,
    counts_E: Tensor | None = None,
) -> Tensor:
    """A micro-batch's share of the step's auxiliary loss, summed over layers.

    Args:
        stats: of the micro-batch.
        step_tokens: valid tokens of the whole step over all micro-batches and ranks, T.
        balance_coef, z_coef, sequence_coef: strengths, per layer.
        counts_E: load of the whole step for the balance losses; the micro-batch's own when None.
    """
    loss = stats.tokens.new_zeros(stats.tokens.shape)
    if balance_coef:
        loss = loss + balance_coef * balance_loss(stats, counts_E)
    if z_coef:
        loss = loss + z_coef * z_loss(stats)
    if sequence_coef:
        loss = loss + sequence_coef * sequence_loss(stats)
    return (stats.tokens / step_tokens * loss).sum()


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
