"""Token rounding for training: expert batches that fill whole tiles.

A grouped product works on tiles of M rows; plain top-K leaves the last tile of every expert partly
empty, 0.5 E M / (T K) of the work on average. Rounding moves each expert's token count to a
multiple of M by dropping its lowest-scored tokens or adding the best-scored others, less than one
tile per expert. Use it for training only: the choice depends on the whole batch, so it is neither
causal nor independent of what else is in the batch. Evaluation and export use plain top-K.
Statistics for balancing come from the counts before rounding.

Shape letters: T tokens, E experts, K experts per token, D model width, S slots.

Source: SonicMoE, arXiv 2512.14080, algorithm 4 and its ablations.
"""

from __future__ import annotations

import warnings
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.kernels.common.autograd import first_order
from moe.kernels.common.backend import pick_backend
from moe.kernels.common.gating import Gating
from moe.kernels.routing.token_rounding import CAP_UNIT, token_rounding, weights_ref
from moe.routing import Routing
from moe.rules.base import RouterView, Rule, RuleSettings
from moe.rules.mean_outputs import MeanOutputs
from moe.scores import RENORMALISED
from moe.settings import Settings
from moe.types import Choice, Form

GATES = {"top_k": "tc", "rounded": "tr", "none": "none"}
"""Denominator of the gates → its name in `token_rounding`."""


class DroppedGradient(Settings):
    """Pairs that rounding dropped get the gradient of their expert's mean output (Default MoE,
    arXiv 2504.12463)."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the mean outputs from step to step."""


class Rounding(RuleSettings):
    """Each expert's token count becomes whole tiles in training (SonicMoE, arXiv 2512.14080);
    evaluation never rounds."""

    line: ClassVar = (
        "experts get at least two tiles each, and you want more speed on a GPU",
        "a sort per layer, less padding",
        "r = 4, 2: no effect seen (±0.10, ±0.03); r = 1: loss −0.07 ± 0.01",
    )

    to: Literal[
        "nearest", "nearest_even", "up", "down", "balanced", "stochastic", "systematic", "score"
    ]
    """To which multiple of the tile, with f tokens and low and high the multiples around f: nearest
    (tie up); nearest_even (tie to the even multiple); up; down; balanced (the right total, largest
    remainders go up); stochastic (up with probability (f - low) / tile, each expert alone);
    systematic (the same probability, one draw for all, so the total is right too); score (up if the
    joining tokens' score mass is at least the leaving ones')."""
    tile: Annotated[int, Field(ge=2)] = 128
    """Rows of a tile of the grouped products."""
    min_tiles: Annotated[int, Field(ge=0)] = 1
    """Tiles that every expert with at least one token gets; 0 lets rounding empty an expert, which
    then has no gradient and tends to stay empty."""
    max_tiles: Annotated[float, Field(ge=1.25, le=1024)] | None = None
    """Most tiles of one expert, as a multiple of the mean; `null`: no limit."""
    min_mean_tiles: Annotated[float, Field(ge=0)] = 2.0
    """A micro-batch with fewer tiles per expert than this on average is not rounded."""
    protect_top1: bool = False
    """Never take a token's best expert from it."""
    gates: Literal["top_k", "rounded", "none"] = "top_k"
    """Denominator of the gates: the sum over the top-K set (kept pairs keep their gate), over the
    set after rounding, or none."""
    dropped: DroppedGradient | None = None
    """What the gates of dropped pairs learn; `null`: nothing."""

    def build(self, form: Form, device: torch.device | str | None = None) -> Rule:
        if self.dropped is not None:
            return _RoundedWithMeans(self, form, device, self.dropped.decay)
        return _Rounded(self, form, device)

    def check(self, form: Form, router: Any) -> None:
        if self.gates != "top_k":
            # evaluation and export take a token's gates as the norm says; rounding may not train
            # others
            sums_to_one = form.norm in RENORMALISED
            if (self.gates == "rounded") != sums_to_one:
                gates = "sum to 1" if sums_to_one else "do not sum to 1"
                raise ValueError(
                    f"router.rounding.gates={self.gates}: the gates of a token {gates} in "
                    "evaluation and in an export; allowed: top_k, "
                    f"{'rounded' if sums_to_one else 'none'}"
                )
            if getattr(router.top_k, "soft", False):
                raise ValueError(
                    f"router.rounding.gates={self.gates} makes gates anew, without those that "
                    "router.top_k.soft=true fades; allowed with it: top_k"
                )
        if self.min_tiles == 0 and router.bias is router.balance is None:
            raise ValueError(
                "router.rounding.min_tiles=0 takes all tokens from an expert with less than half a "
                "tile of them, and without balancing nothing brings it back; allowed: 1 or more, "
                "or a router.balance or router.bias"
            )
        if form.start_experts is not None and self.max_tiles is not None:
            raise ValueError(
                f"router.rounding.max_tiles={self.max_tiles:g} does not go with experts that come "
                "and go; allowed: null"
            )


class _Rounded(Rule):
    keeps_logits = True  # of the pairs that join

    @property
    def draws(self) -> bool:
        return self.settings.to in ("stochastic", "systematic")

    def make_routing(self, router: RouterView, logits_TE: Tensor, gating: Gating) -> Routing:
        form = self.form
        return round_tokens(
            logits_TE, gating, self.settings, score=form.score, norm=form.norm, scale=form.scale,
            backend=form.backend,
        )  # fmt: skip


class _RoundedWithMeans(_Rounded, MeanOutputs):
    def output(self, y_TD: Tensor, choice: Choice, valid_T: Tensor | None) -> Tensor:
        gating = choice.gating
        dropped_TK = dropped_pairs(choice.routing, gating.expert_TK)
        return dropped_pair_gradient(
            y_TD, gating.gate_TK, gating.expert_TK, dropped_TK, self.means()
        )


def rounding_applies(config: Rounding, tokens: int, k: int, num_experts: int) -> bool:
    """Whether a batch of this shape is rounded: it has full tiles to give and enough of them per
    expert."""
    return tokens >= config.tile and tokens * k >= config.min_mean_tiles * num_experts * config.tile


def max_slots(config: Rounding, tokens: int, k: int, num_experts: int) -> int:
    """Static upper bound on the pairs after rounding, whatever the counts."""
    joins = config.tile - 1  # tokens that can join one expert
    if config.to == "down":
        joins = 0
    elif config.to in ("nearest", "nearest_even"):
        joins = config.tile // 2
    if config.min_tiles:
        joins = max(joins, config.min_tiles * config.tile - 1)
    if config.protect_top1:
        joins = max(joins, config.tile - 1)
    extra = num_experts * joins
    if config.to in ("balanced", "systematic") and not (config.min_tiles or config.protect_top1):
        extra = min(extra, config.tile)  # only the total is rounded, experts trade among themselves
    return min(tokens * k + extra, tokens * num_experts)


_noticed: set[tuple[int, int, int, int]] = set()


def _notice(config: Rounding, tokens: int, k: int, num_experts: int) -> None:
    if torch.compiler.is_compiling():
        return  # a warning would break the graph
    key = (tokens, k, num_experts, config.tile)
    if key in _noticed:
        return
    _noticed.add(key)
    warnings.warn(
        f"token rounding is off for batches of {tokens} tokens: the mean of "
        f"{tokens * k / num_experts:.0f} tokens per expert is less than "
        f"{config.min_mean_tiles:g} tiles of {config.tile}; plain top-K is used",
        stacklevel=3,
    )


def round_tokens(
    logits_TE: Tensor,
    gating: Gating,
    config: Rounding,
    *,
    score: str = "softmax",
    norm: str = "topk_sum",
    scale: float = 1.0,
    uniform_E: Tensor | None = None,
    backend: str = "auto",
) -> Routing:
    """Round a plain top-K choice to whole tiles per expert. For training; evaluate with plain
    top-K.

    Args:
        logits_TE: [T, E], the logits that `gating` was made from; tokens that were not valid there
            are never taken here.
        gating: `topk_gating(logits_TE, k, score=score, norm=norm, scale=scale, …)`.
        config: to what, tile and the rest.
        score, norm, scale: as given to `topk_gating`.
        uniform_E: [E] numbers in [0, 1) for the variants stochastic and systematic; drawn from the
            device's generator if None.

    Returns:
        A ragged `Routing`, slots in (token, expert) order, `max_slots(...)` slots allocated; or the
        plain top-K routing itself when `rounding_applies` is False (tile 1, or too few tokens: one
        warning).

    Raises:
        ValueError: arguments that do not fit, by name and value.
    """
    T, E = logits_TE.shape
    k = gating.expert_TK.shape[1]
    if gating.expert_TK.shape[0] != T or gating.counts_E.shape[0] != E:
        raise ValueError(
            f"gating is of {gating.expert_TK.shape[0]} tokens and {gating.counts_E.shape[0]} "
            f"experts, logits_TE of {T} and {E}"
        )
    if uniform_E is not None and tuple(uniform_E.shape) != (E,):
        raise ValueError(f"uniform_E must have shape ({E},), got {tuple(uniform_E.shape)}")
    backend = pick_backend(backend, logits_TE)
    if not rounding_applies(config, T, k, E):
        _notice(config, T, k, E)
        return Routing.from_topk(gating.expert_TK, gating.gate_TK, E, backend=backend)
    if config.to in ("stochastic", "systematic") and uniform_E is None:
        uniform_E = torch.rand(E, device=logits_TE.device)
    rounded = token_rounding(
        logits_TE,
        gating.expert_TK,
        gating.gate_TK,
        gating.lse_T,
        gating.counts_E,
        uniform_E,
        slots=max_slots(config, T, k, E),
        score=score,
        norm=norm,
        scale=scale,
        variant=config.to,
        tile=config.tile,
        min_tiles=config.min_tiles,
        cap=0 if config.max_tiles is None else round(config.max_tiles * CAP_UNIT),
        protect_top1=config.protect_top1,
        renorm=GATES[config.gates],
        backend=backend,
    )
    return Routing(
        gates_S=rounded.gate_S,
        expert_S=rounded.expert_S,
        row_S=rounded.row_S,
        token_R=rounded.token_R,
        slot_R=rounded.slot_R,
        offsets_E1=rounded.offsets_E1,
        num_tokens=T,
        slots_per_token=None,
        slot_offsets_T1=rounded.slot_offsets_T1,
    )


def rounded_gates(
    config: Rounding, form: Form, logits_TE: Tensor, gating: Gating, routing: Routing
) -> Tensor:
    """Gates [S] of given pairs, normalised as `config` says; differentiable."""
    T, E = logits_TE.shape
    token_S, expert_S = routing.token_S.long(), routing.expert_S.long()
    used_S = expert_S >= 0
    cell_S = torch.where(used_S, token_S * E + expert_S, 0)
    weight_TE = weights_ref(logits_TE, form.score, form.norm)
    if config.gates == "rounded":
        weight_S = torch.where(used_S, weight_TE.reshape(-1)[cell_S], 0.0)
        total_T = weight_S.new_zeros(T + 1).index_add(0, token_S, weight_S)
        return weight_S / (total_T[token_S] + 1e-20) * form.scale
    gate_TE = weight_TE * form.scale
    if config.gates == "top_k":
        # pairs of the top-K choice have the gate they have without rounding
        gate_TE = gate_TE.scatter(1, gating.expert_TK.long().clamp(min=0), gating.gate_TK)
    return torch.where(used_S, gate_TE.reshape(-1)[cell_S], 0.0)


def dropped_pairs(routing: Routing, expert_TK: Tensor) -> Tensor:
    """bool [T, K]: pairs of the plain choice `expert_TK` that a routing of `round_tokens` lacks."""
    if routing.slot_offsets_T1 is None:
        return torch.zeros_like(expert_TK, dtype=torch.bool)
    T, E = routing.num_tokens, routing.num_experts
    device = expert_TK.device
    slot = torch.arange(routing.expert_S.numel(), dtype=torch.int32, device=device)
    token_S = torch.searchsorted(routing.slot_offsets_T1, slot, right=True).long() - 1
    # one ascending number per pair; unused slots, which all come last, get the largest
    code_S = torch.where(routing.expert_S >= 0, token_S * E + routing.expert_S, T * E)
    token_T1 = torch.arange(T, device=device)[:, None]
    code_TK = token_T1 * E + expert_TK
    place_TK = torch.searchsorted(code_S, code_TK).clamp(max=max(code_S.numel() - 1, 0))
    return (code_S[place_TK] != code_TK) & (expert_TK >= 0)


class _DefaultVectorGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_TD, gate_TK, expert_TK, dropped_TK, default_ED):
        ctx.save_for_backward(expert_TK, dropped_TK, default_ED)
        ctx.gate_dtype = gate_TK.dtype
        return y_TD.view_as(y_TD)

    @staticmethod
    @first_order
    def backward(ctx, dy_TD):
        expert_TK, dropped_TK, default_ED = ctx.saved_tensors
        dot_TE = dy_TD.to(ctx.gate_dtype) @ default_ED.to(ctx.gate_dtype).T
        dgate_TK = dot_TE.gather(1, expert_TK.long().clamp(min=0))
        dgate_TK = torch.where(dropped_TK, dgate_TK, torch.zeros_like(dgate_TK))
        return dy_TD, dgate_TK, None, None, None


def dropped_pair_gradient(
    y_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, dropped_TK: Tensor, default_ED: Tensor
) -> Tensor:
    """Return `y_TD` unchanged; in backward a dropped pair's gate gets <dy_t, m_e>.

    The expert output of a dropped pair was never computed; the default vector m_e (a running mean
    of the expert's outputs) stands for it, in the gradient alone (Default MoE, arXiv 2504.12463).

    Args:
        y_TD: [T, D] output of the experts.
        gate_TK: [T, K] gates of the plain choice, differentiable.
        expert_TK: [T, K] int, the plain choice.
        dropped_TK: [T, K] bool, see `dropped_pairs`.
        default_ED: [E, D] default vectors; no gradient flows to them.
    """
    if dropped_TK.shape != gate_TK.shape or expert_TK.shape != gate_TK.shape:
        raise ValueError(
            f"gate_TK {tuple(gate_TK.shape)}, expert_TK {tuple(expert_TK.shape)} and dropped_TK "
            f"{tuple(dropped_TK.shape)} must have one shape"
        )
    if default_ED.shape[-1] != y_TD.shape[-1]:
        raise ValueError(
            f"default_ED has width {default_ED.shape[-1]}, y_TD has width {y_TD.shape[-1]}"
        )
    return _DefaultVectorGradient.apply(y_TD, gate_TK, expert_TK, dropped_TK, default_ED.detach())
