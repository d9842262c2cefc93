"""The Mixture-of-Experts layer: router, routing, experts, shared expert.

    layer = MoE(MoEConfig(hidden_size=512, expert_size=256, num_experts=64, num_experts_per_tok=8))
    y, stats = layer(x)
    loss = your_loss(y) + stats.loss()

Shape letters: T tokens, D model width, N expert width, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moe.balance import quantiles, sequence_sum
from moe.capacity import limit_capacity
from moe.control import RouterControl
from moe.experts import SAVE, experts
from moe.kernels.common.activations import activation_of, activation_width
from moe.kernels.common.backend import BACKENDS
from moe.kernels.common.gating import Gating
from moe.kernels.grouped.ragged import Widths
from moe.kernels.routing.topk_gating import MadeOf
from moe.metrics import RouterStats
from moe.mixed_experts import check_widths, mixed_experts
from moe.rounding import RoundingConfig, dropped_pair_gradient, dropped_pairs, round_tokens
from moe.router import Router, probabilities, selection_keys
from moe.router_checks import check_router
from moe.router_gradient import (
    default_gradient,
    default_weights,
    missing_pairs,
)
from moe.routing import Routing
from moe.sparse.experts import check_spmm
from moe.surgery import importance_sums

# (layer, logits_TE, gating, routing) -> (gating, routing); how a trace reads and replaces a choice
RoutingHook = Callable[["MoE", Tensor, Gating, Routing], tuple[Gating, Routing]]


@dataclass(frozen=True)
class MoEConfig:
    """Everything that fixes a layer, besides its device and dtype.

    Raises:
        ValueError: impossible values and combinations, by field, value and what is allowed.
    """

    hidden_size: int
    """Model width D."""
    expert_size: int
    """Inner width N of one expert; of the widest, where they differ."""
    num_experts: int
    num_experts_per_tok: int
    """K."""
    score: str = "softmax"
    """softmax | sigmoid | sqrtsoftplus | identity; see `moe.kernels.routing.topk_gating`."""
    norm: str = "topk_sum"
    """How gates come from scores: topk_sum (they sum to 1), none, softmax_topk."""
    route_scale: float = 1.0
    """Factor of all gates (DeepSeek-V3: 2.5)."""
    selection_bias: bool = False
    """A float32 buffer, zero at first, added to the scores for the selection alone."""
    groups: int = 1
    """Expert groups of the group-limited selection; 1 = plain top-K."""
    groups_kept: int = 1
    group_top: int = 2
    """Scores that make a group's score; read when groups_kept < groups."""
    activation: str = "swiglu"
    """One of `moe.kernels.common.activations.ACTIVATIONS`."""
    shared_expert_size: int = 0
    """Inner width of the expert that every token uses; 0 = none."""
    expert_widths: tuple[int, ...] | None = None
    """Inner width of each expert, where they differ; see `moe.mixed_experts`."""
    rounding: RoundingConfig | None = None
    """Round each expert's tokens to whole tiles while training; evaluation is plain top-K."""
    sequence_stats: bool = False
    """Measure the balance of each sequence too, for `moe.balance.sequence_loss`."""
    jitter: float = 0.0
    """While training, the router's input is multiplied by noise in 1 ± jitter."""
    expert_dropout: float = 0.0
    """While training, the probability that an expert cannot be chosen by a token; gates are as
    without. A token always keeps K experts to choose from."""
    sample_temperature: float = 0.0
    """While training, a token's K experts are drawn without replacement, with probabilities of
    exp(log p / temperature) (Gumbel top-K); gates are as without. 0 = the K best."""
    amplitude: bool = False
    """Experimental: probabilities are squared absolute values of complex amplitudes (two rows of
    the router's weight an expert), p_e = |a_e|² / sum of |a|²."""
    start_experts: int | None = None
    """Slots that hold an expert at first; the others are free: no token goes there until
    `moe.surgery` puts an expert in. None: all hold one for ever, and there is no mask."""
    families: bool = False
    """A token chooses one of each family of copies (`moe.surgery`) at most, its best one."""
    importance: str = "load"
    """What is measured of each expert beyond its load, see `moe.surgery.importance_sums`."""
    control: RouterControl = field(default_factory=RouterControl)
    """State of the router and how it changes between steps; see `moe.control`."""
    kernels: str = "auto"
    """auto | hopper | triton | reference | spmm; auto takes what is fastest on the tensors' device,
    spmm computes the experts by products of sparse matrices (`moe.sparse.experts`)."""
    save: str = "h"
    """What the experts keep for the backward: h (pre-activations), fp8_h (the same in float8), or x
    and compute h again; see `moe.experts`."""
    init_std: float = 0.02
    """Standard deviation of all initial weights."""
    router_init_std: float | None = None
    """That of the router's weight, if it is to differ."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "expert_size", "num_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.shared_expert_size < 0:
            raise ValueError(f"shared_expert_size={self.shared_expert_size} must be 0 or more")
        for name in ("init_std", "router_init_std"):
            std = getattr(self, name)
            if std is not None and not (math.isfinite(std) and std >= 0):
                raise ValueError(f"{name}={std} must be a finite number, 0 or more")
        if self.kernels not in BACKENDS:
            raise ValueError(f"kernels={self.kernels!r} is unknown; allowed: {', '.join(BACKENDS)}")
        if self.save not in SAVE:
            raise ValueError(f"save={self.save!r} is unknown; allowed: {', '.join(SAVE)}")
        activation_width(self.activation)
        if self.expert_widths is not None:
            self._check_widths()
        if self.kernels == "spmm":
            check_spmm(self.expert_size, self.save)
        check_router(self)

    def _check_widths(self) -> None:
        widths = self.expert_widths
        check_widths(widths, self.kernels)
        if len(widths) != self.num_experts or max(widths) != self.expert_size:
            raise ValueError(
                f"expert_widths={list(widths)} must be num_experts={self.num_experts} widths, the "
                f"widest expert_size={self.expert_size}"
            )
        if self.save == "fp8_h":
            raise ValueError("save='fp8_h' does not go with expert_widths; allowed: h, x")

    @property
    def widths(self) -> Widths | None:
        """Of the experts, where they differ."""
        return None if self.expert_widths is None else Widths(self.expert_widths)

    @property
    def keeps_outputs(self) -> bool:
        """Whether the router keeps the mean output of each expert."""
        dropped = self.rounding is not None and self.rounding.dropped_grad == "default"
        return dropped or self.control.gradient == "default"


class SharedExpert(nn.Module):
    """The feed-forward network that every token goes through next to its routed experts."""

    parameter_kind = "mlp"

    def __init__(
        self,
        hidden_size: int,
        size: int,
        activation: str = "swiglu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        options = {"bias": False, "device": device, "dtype": dtype}
        gated = activation_width(activation) == 2
        self.gate_proj = nn.Linear(hidden_size, size, **options) if gated else None
        self.up_proj = nn.Linear(hidden_size, size, **options)
        self.down_proj = nn.Linear(size, hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up_proj(x) if self.gate_proj is None else self.gate_proj(x)
        inner = activation_of(self.activation).inner(inner)
        if self.gate_proj is not None:
            inner = inner * self.up_proj(x)
        return self.down_proj(inner)


class MoE(nn.Module):
    """A drop-in feed-forward layer whose parameters are chosen per token.

    Attributes:
        router: `Router`; its weight [E, D] ([2E, D] for amplitudes) and selection bias [E] stay
            float32 whatever the layer's dtype.
        w1: [E, 2N, D] gate and up projections, rows interleaved (2j gate, 2j + 1 up); [E, N, D]
            for activations without gate.
        w2: [E, D, N] down projections. With `expert_widths` both lie as `moe.mixed_experts` has
            them: w1 [2 · sum of widths, D], w2 [sum of widths, D].
        shared: `SharedExpert` or None.
        routing_hook: None, or what `RoutingTrace` puts there while it records or replays.
    """

    parameter_kind = "expert"

    def __init__(
        self,
        config: MoEConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, MoEConfig):
            raise TypeError(
                f"MoE takes a MoEConfig, not {config!r}: MoE(MoEConfig(hidden_size=…, "
                "expert_size=…, num_experts=…, num_experts_per_tok=…))"
            )
        self.config = config
        E, D, N = config.num_experts, config.hidden_size, config.expert_size
        rows = activation_width(config.activation)
        shapes = (E, rows * N, D), (E, D, N)
        if config.widths is not None:
            shapes = (rows * config.widths.total, D), (config.widths.total, D)
        self.router = Router(config, device=device)
        self.w1, self.w2 = (
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in shapes
        )
        self.shared = None
        if config.shared_expert_size:
            self.shared = SharedExpert(
                D, config.shared_expert_size, config.activation, device=device, dtype=dtype
            )
        self.routing_hook: RoutingHook | None = None
        # Masks of w1 and w2 while hidden weights go on learning (`training.sparsity`); a list, so
        # that they are no part of the module and its state.
        self.masks: list[nn.Module] = []
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights from N(0, init_std²); zero the selection bias."""
        self.router.reset_parameters()
        for weight in (self.w1, self.w2):
            nn.init.normal_(weight, std=self.config.init_std)
        if self.shared is not None:
            for weight in self.shared.parameters():
                nn.init.normal_(weight, std=self.config.init_std)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """The layer's output and what its router did.

        Args:
            x: [..., D] in any float dtype, any number of leading axes, any of them 0. The last
                leading axis is the sequence that `sequence_stats` measures.
            valid: bool [...]; tokens that are False are padding: they give 0, take no part in any
                statistic or gradient, and what they hold (even NaN) changes nothing.

        Returns:
            y: [..., D], in the dtype that a linear layer would give (the autocast dtype under
                autocast).
            stats: sums over the valid tokens; see `RouterStats`. No buffer of the layer changes.

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        c, D = self.config, self.config.hidden_size
        if x.shape[-1:] != (D,):
            raise ValueError(f"x has shape {tuple(x.shape)}; its last axis must be hidden_size={D}")
        x_TD = x.reshape(math.prod(x.shape[:-1]), D)
        valid_T = None
        if valid is not None:
            if valid.shape != x.shape[:-1] or valid.dtype != torch.bool:
                raise ValueError(
                    f"valid must be bool of shape {tuple(x.shape[:-1])}, got {valid.dtype} "
                    f"{tuple(valid.shape)}"
                )
            valid_T = valid.reshape(-1)
            # 0 * NaN is NaN: a zero gate alone would let the content of padding into weight
            # gradients
            x_TD = torch.where(valid_T[:, None], x_TD, 0.0)

        router = self.router
        router_x_TD = router.jittered(x_TD)
        logits_TE = router.logits(router_x_TD)
        select_TE = router.selection_logits(router_x_TD, logits_TE, valid_T)
        made_of = None if self._keeps_logits(select_TE) else router.made_of(router_x_TD)
        gating, routing = self._route(logits_TE, valid_T, select_TE, made_of)
        if self.routing_hook is not None:
            gating, routing = self.routing_hook(self, logits_TE, gating, routing)

        sums_ED = None
        if self.training and c.keeps_outputs:
            y_TD, sums_ED = self.compute(x_TD, routing, output_sums=True)
        else:
            y_TD = self.compute(x_TD, routing)
        y_TD = self._by_defaults(y_TD, logits_TE, gating, routing, valid_T)
        sequences = math.prod(x.shape[:-2]) if x.dim() > 2 else 1
        importance_E = importance_sums(self, x_TD, routing) if self.training else None
        select_TE = logits_TE if select_TE is None else select_TE
        if sums_ED is not None:
            sums_ED = sums_ED.to(gating.lse_T.dtype)
        stats = self._stats(
            logits_TE, select_TE, gating, routing, valid_T, sequences,
            output_sum_ED=sums_ED, importance_sum_E=importance_E,
        )  # fmt: skip
        return y_TD.view(x.shape), stats

    def _by_defaults(
        self,
        y_TD: Tensor,
        logits_TE: Tensor,
        gating: Gating,
        routing: Routing,
        valid_T: Tensor | None,
    ) -> Tensor:
        """y with the gradient of pairs that were not computed."""
        c, expert_TK = self.config, gating.expert_TK
        if not (self.training and torch.is_grad_enabled()):
            return y_TD
        if c.control.gradient == "default":
            missing_TE = missing_pairs(expert_TK, c.num_experts, routing)
            weight_TE = default_weights(logits_TE, c.score, c.route_scale, valid_T)
            y_TD = default_gradient(y_TD, weight_TE, missing_TE, self.router.defaults())
        if c.rounding is not None and c.rounding.dropped_grad == "default":
            dropped_TK = dropped_pairs(routing, expert_TK)
            y_TD = dropped_pair_gradient(
                y_TD, gating.gate_TK, expert_TK, dropped_TK, self.router.defaults()
            )
        return y_TD

    def weights(self) -> tuple[Tensor, Tensor]:
        """w1 and w2 as they are computed with."""
        weights = (self.w1, self.w2)
        if self.masks:
            return tuple(mask(weight) for mask, weight in zip(self.masks, weights))
        return weights

    def compute(
        self, x_TD: Tensor, routing: Routing, output_sums: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Routed experts plus shared expert; what expert parallelism replaces.

        Args:
            output_sums: give the sum of each routed expert's outputs [E, D] too.
        """
        c, weights = self.config, self.weights()
        options = {
            "activation": c.activation,
            "save": c.save,
            "backend": c.kernels,
            "output_sums": output_sums,
        }
        if c.widths is None:
            found = experts(x_TD, *weights, routing, **options)
        else:
            found = mixed_experts(x_TD, *weights, routing, c.widths, **options)
        y_TD, *sums = found if output_sums else (found,)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return (y_TD, *sums) if output_sums else y_TD

    def _keeps_logits(self, select_TE: Tensor | None) -> bool:
        """Whether something besides the gating keeps the logits for the backward."""
        c = self.config
        rounds = self.training and c.rounding is not None
        others = select_TE is not None or c.sequence_stats or c.control.gradient != "plain"
        return rounds or others or self.routing_hook is not None

    def _route(
        self,
        logits_TE: Tensor,
        valid_T: Tensor | None,
        select_TE: Tensor | None,
        made_of: MadeOf | None = None,
    ) -> tuple[Gating, Routing]:
        c, router = self.config, self.router
        if self.training and c.rounding is not None:
            gating = router.choose(logits_TE, valid_T, select_TE)
            routing = round_tokens(
                logits_TE,
                gating,
                c.rounding,
                score=c.score,
                norm=c.norm,
                scale=c.route_scale,
                backend=c.kernels,
            )
            return gating, routing
        gating, meta = router.choose_and_sort(logits_TE, valid_T, select_TE, made_of)
        routing = Routing.from_topk(
            gating.expert_TK, gating.gate_TK, c.num_experts, c.kernels, meta
        )
        if self.training and router.capacity is not None:
            routing = limit_capacity(
                routing,
                gating,
                router.capacity,
                c.control.capacity_drop,
                c.kernels,
                router.experts_in_use,
            )
        return gating, routing

    def _stats(
        self,
        logits_TE: Tensor,
        select_TE: Tensor,
        gating: Gating,
        routing: Routing,
        valid_T: Tensor | None,
        sequences: int,
        **measured: Tensor | None,
    ) -> RouterStats:
        sequence = gating.lse_T.new_zeros(())
        if self.config.sequence_stats and logits_TE.shape[0]:
            prob_TE = probabilities(logits_TE, self.config.score, valid_T)
            experts = self.router.experts_in_use
            sequence = sequence_sum(prob_TE, gating.expert_TK, sequences, experts)
        with torch.no_grad():
            share_TK = gating.gate_TK.clamp(min=0)
            share_TK = share_TK / share_TK.sum(dim=1, keepdim=True).clamp(min=1e-20)
            entropy = torch.special.entr(share_TK).sum()
            if valid_T is None:
                tokens = gating.lse_T.new_full((), logits_TE.shape[0])
            else:
                tokens = valid_T.sum(dtype=gating.lse_T.dtype)
            quantile_E = None
            if self.training and self.config.control.bias_update == "quantile":
                keys = selection_keys(select_TE, self.config, self.router.selection_bias, valid_T)
                k, targets = self.router.active_k, self.config.control.bias_targets
                quantile_E = tokens * quantiles(*keys, k, targets, self.router.active_E)
            if self.router.active_E is not None:
                measured["active_sum_E"] = tokens * self.router.active_E
        # Made in one call: Dynamo of torch 2.11 cannot return what `_replace` gives.
        return RouterStats(
            counts_E=gating.counts_E,
            prob_sum_E=gating.prob_sum_E,
            z_sum=gating.lse_T.square().sum(),
            sequence_sum=sequence,
            entropy_sum=entropy,
            tokens=tokens,
            nonfinite=gating.nonfinite,
            rows_E=routing.counts_E,
            quantile_sum_E=quantile_E,
            **measured,
        )

    @property
    def draws(self) -> bool:
        """Whether a forward pass in training mode draws random numbers."""
        c = self.config
        rounding = c.rounding is not None and c.rounding.variant in ("stochastic", "systematic")
        return bool(c.jitter or c.expert_dropout or c.sample_temperature or rounding)

    def extra_repr(self) -> str:
        c = self.config
        sizes = c.expert_widths or (c.expert_size,)
        size = f"{min(sizes)} to {max(sizes)}" if len(set(sizes)) > 1 else f"{sizes[0]}"
        text = f"{c.num_experts} experts of {size}, {c.activation}, kernels={c.kernels}"
        return text + (f", {c.rounding}" if c.rounding else "")
