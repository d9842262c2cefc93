"""What a layer and its router are told.

    MoEConfig(512, 256, num_experts=64, num_experts_per_tok=8)
    MoEConfig(..., router=RouterConfig(bias={"kind": "sign", "rate": 0.01}, balance=None))

`RouterConfig` is the `router` section of a run's config and what a layer takes, one and the same
object. An option that has settings of its own is null or one value of one of a few kinds
(`moe.settings`), each in a file of `moe/rules`; the tables below are the one list that a new kind
is added to, from a file of your own too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from pydantic import Field

from moe.experts import SAVE
from moe.importance import IMPORTANCES
from moe.kernels.common.activations import activation_width
from moe.kernels.common.backend import BACKENDS
from moe.kernels.common.gating import NORMS, SCORES
from moe.kernels.grouped.ragged import Widths
from moe.mixed_experts import check_widths
from moe.rules.amplitude import Amplitudes
from moe.rules.base import RuleSettings
from moe.rules.bias import Step
from moe.rules.capacity import Capacity
from moe.rules.default_gradient import DefaultGradient
from moe.rules.ema_selection import EmaSelection
from moe.rules.expert_dropout import ExpertDropout
from moe.rules.global_balance import GlobalBalance
from moe.rules.jitter import Jitter
from moe.rules.lagged_balance import LaggedBalance
from moe.rules.micro_balance import MicroBalance
from moe.rules.min_load_bias import MinLoadBias
from moe.rules.quantile_bias import QuantileBias
from moe.rules.rounding import Rounding
from moe.rules.sampled_selection import SampledSelection
from moe.rules.sequence_balance import SequenceBalance
from moe.rules.sign_bias import SignBias
from moe.rules.top_k import CosineTopK, GeometricTopK, LinearTopK, StepsTopK
from moe.scores import RENORMALISED
from moe.settings import Settings, one_of
from moe.sparse.experts import check_spmm
from moe.types import Form

Table = dict[str, type[RuleSettings]]
BALANCES: Table = {
    "global": GlobalBalance,
    "lagged": LaggedBalance,
    "micro": MicroBalance,
    "sequence": SequenceBalance,
}
BIASES: Table = {"quantile": QuantileBias, "sign": SignBias, "min_load": MinLoadBias}
TOP_KS: Table = {
    "linear": LinearTopK,
    "cosine": CosineTopK,
    "geometric": GeometricTopK,
    "steps": StepsTopK,
}
SELECTIONS: Table = {"ema": EmaSelection, "sample": SampledSelection}
PROBABILITIES: Table = {"amplitude": Amplitudes}
NOISES: Table = {"jitter": Jitter, "dropout": ExpertDropout}
GRADIENTS: Table = {"default": DefaultGradient}

Balance = one_of(BALANCES, default="global", words=("auto",))
Bias = one_of(BIASES, words=("auto",))
TopK = one_of(TOP_KS)
Selection = one_of(SELECTIONS)
Score = one_of(PROBABILITIES, words=("softmax", "sigmoid", "sqrtsoftplus"))
Noise = one_of(NOISES)
Gradient = one_of(GRADIENTS)


class RouterConfig(Settings):
    """How tokens are spread over experts. docs/routing.md says when to touch what."""

    score: Score | None = None
    """How logits become scores: softmax, sigmoid, sqrtsoftplus, or {kind: amplitude}; `null`: as
    the family has it."""
    z_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the router z-loss (squared log-sum-exp of the logits)."""
    balance: Balance | None = "auto"
    """The load-balance loss. auto: {kind: global, coef: 0.01}, or `null` where a bias balances."""
    bias: Bias | None = "auto"
    """How a selection bias follows the load after every step. auto: {kind: quantile} where the
    family has such a bias (glm4_moe), `null` elsewhere."""
    rounding: Rounding | None = None
    """Token rounding: experts compute whole tiles."""
    top_k: TopK | None = None
    """Start with more experts per token and come down to `model.num_experts_per_tok`, which
    evaluation and export always take."""
    selection: Selection | None = None
    """What chooses a token's experts in place of its best scores."""
    noise: Noise | None = None
    """Noise on the choice while training; none is known to help pretraining."""
    capacity: Capacity | None = None
    """Limit on the tokens of an expert while training."""
    gradient: Gradient | None = None
    """What routers learn about experts that a token did not choose; `null`: nothing."""
    freeze_at: Step | None = None
    """From this step on the router weights stay as they are, but for the rows of experts that are
    cloned or revived; `null`: never."""
    end_steps: Step | None = None
    """The last so many steps train exactly what is exported: a selection bias that the family does
    not have falls to zero in as many steps before, averaged weights stop selecting, no token is
    dropped."""
    exportable: bool = True
    """false: train a router that no transformers family has, and never export it."""

    def resolved(self, score: str, has_bias: bool) -> RouterConfig:
        """The same with `auto` and an open score spelled out.

        Args:
            score: of the family.
            has_bias: whether the family adds a selection bias to the scores.
        """
        bias, balance = self.bias, self.balance
        if bias == "auto":
            bias = QuantileBias() if has_bias else None
        if balance == "auto":
            balance = None if bias is not None and bias.balances else GlobalBalance()
        known = {"score": self.score or score, "bias": bias, "balance": balance}
        same = all(getattr(self, key) is value for key, value in known.items())
        return self if same else self.model_copy(update=known)

    def rules(self) -> dict[str, RuleSettings]:
        """The rules in use by the key that has them, in the order in which they act."""
        given = {key: getattr(self, key) for key in type(self).model_fields}
        return {key: value for key, value in given.items() if isinstance(value, RuleSettings)}


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
    """softmax | sigmoid | sqrtsoftplus | identity; see `moe.kernels.routing.topk_gating`. Of the
    family; `router.score` replaces it."""
    norm: str = "topk_sum"
    """How gates come from scores: topk_sum (they sum to 1), none, softmax_topk."""
    route_scale: float = 1.0
    """Factor of all gates (DeepSeek-V3: 2.5)."""
    selection_bias: bool = False
    """Whether the family adds a bias to the scores for the selection alone: a float32 buffer, zero
    at first. A `router.bias` makes one for every family."""
    groups: int = 1
    """Expert groups of the group-limited selection; 1 = plain top-K."""
    groups_kept: int = 1
    group_top: int = 2
    """Scores that make a group's score; read when groups_kept < groups."""
    activation: str = "swiglu"
    """One of `moe.kernels.common.activations.ACTIVATIONS`."""
    shared_expert_size: int = 0
    """Inner width of the expert that every token uses; 0 = none."""
    shared_expert_gate: bool = False
    """Whether its output is multiplied by sigmoid(w · x), w learned (Qwen2-MoE)."""
    expert_widths: tuple[int, ...] | None = None
    """Inner width of each expert, where they differ; see `moe.mixed_experts`."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """What balances the router and what it does beyond top-K; `auto` is spelled out here."""
    steps: int | None = None
    """Of the whole run; read by rules that end with it (`router.end_steps`, `router.top_k`)."""
    start_experts: int | None = None
    """Slots that hold an expert at first; the others are free: no token goes there until
    `moe.surgery` puts an expert in. None: all hold one forever, and there is no mask."""
    families: bool = False
    """A token chooses one of each family of copies (`moe.surgery`) at most, its best one."""
    importance: str = "load"
    """What is measured of each expert beyond its load, see `moe.importance`."""
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
        if not isinstance(self.router, RouterConfig):
            raise TypeError(f"router={self.router!r} must be a RouterConfig")
        router = self.router.resolved(self.score, self.selection_bias)
        score = "softmax" if isinstance(router.score, RuleSettings) else router.score
        object.__setattr__(self, "score", score)
        object.__setattr__(self, "router", router)
        self._check_sizes()
        self._check_experts()
        self._check_router()

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "expert_size", "num_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.shared_expert_size < 0:
            raise ValueError(f"shared_expert_size={self.shared_expert_size} must be 0 or more")
        if self.shared_expert_gate and not self.shared_expert_size:
            raise ValueError(
                "shared_expert_gate=True has no effect with shared_expert_size=0; allowed: False"
            )
        for name in ("init_std", "router_init_std"):
            std = getattr(self, name)
            if std is not None and not (math.isfinite(std) and std >= 0):
                raise ValueError(f"{name}={std} must be a finite number, 0 or more")
        for name, words in (
            ("kernels", BACKENDS),
            ("save", SAVE),
            ("score", SCORES),
            ("norm", NORMS),
            ("importance", IMPORTANCES),
        ):
            if (word := getattr(self, name)) not in words:
                raise ValueError(f"{name}={word!r} is unknown; allowed: {', '.join(words)}")

    def _check_experts(self) -> None:
        activation_width(self.activation)
        widths = self.expert_widths
        if widths is not None:
            check_widths(widths, self.kernels)
            if len(widths) != self.num_experts or max(widths) != self.expert_size:
                raise ValueError(
                    f"expert_widths={list(widths)} must be num_experts={self.num_experts} widths, "
                    f"the widest expert_size={self.expert_size}"
                )
            if self.save == "fp8_h":
                raise ValueError("save='fp8_h' does not go with expert_widths; allowed: h, x")
        if self.kernels == "spmm":
            check_spmm(self.expert_size, self.save)

    def _check_router(self) -> None:
        experts, k, groups, kept = (
            self.num_experts, self.num_experts_per_tok, self.groups, self.groups_kept,
        )  # fmt: skip
        if not 1 <= k <= experts:
            raise ValueError(
                f"num_experts_per_tok={k} is not possible with num_experts={experts}; "
                f"allowed: 1 to {experts}"
            )
        if k == 1 and self.norm in RENORMALISED:
            # minimind#858: such a router is trained by nothing but the auxiliary losses
            raise ValueError(
                f"num_experts_per_tok=1 with norm={self.norm!r} makes every gate the constant "
                f"{self.route_scale:g}: the router would get no gradient from the loss; "
                "allowed with one expert per token: norm='none'"
            )
        if self.score == "identity" and self.norm == "topk_sum":
            raise ValueError(
                "norm='topk_sum' divides by the sum of the scores, which can be zero or negative "
                "with score='identity'; allowed with it: 'none', 'softmax_topk'"
            )
        if not (math.isfinite(self.route_scale) and self.route_scale > 0):
            raise ValueError(f"route_scale={self.route_scale} must be a finite number above 0")
        if groups < 1 or experts % groups:
            raise ValueError(f"groups={groups} must be at least 1 and divide num_experts={experts}")
        if not 1 <= kept <= groups:
            raise ValueError(f"groups_kept={kept} must be between 1 and groups={groups}")
        size = experts // groups
        if kept * size < k:
            raise ValueError(
                f"groups_kept={kept} groups of {size} experts hold {kept * size} experts, fewer "
                f"than num_experts_per_tok={k}"
            )
        if kept < groups and not 1 <= self.group_top <= size:
            raise ValueError(
                f"group_top={self.group_top} must be between 1 and the {size} experts of a group"
            )
        end = self.router.end_steps
        rules = self.router.rules()
        if self.steps is None and (end is not None or any(r.needs_steps for r in rules.values())):
            raise ValueError(
                "steps=None: router.end_steps and a router.top_k that falls over a part of the run "
                "need the number of its steps"
            )
        if end is not None and 2 * end >= self.steps:
            raise ValueError(
                f"router.end_steps={end} must be less than half of the run's {self.steps} steps: "
                "as many steps before them are there for annealing"
            )
        if self.start_experts is not None:
            self._check_slots()
        elif self.families:
            raise ValueError("families=True has no effect without start_experts; allowed: False")
        for rule in rules.values():
            rule.check(self.form, self.router)

    def _check_slots(self) -> None:
        start, k = self.start_experts, self.num_experts_per_tok
        least = k + max((rule.beyond_k for rule in self.router.rules().values()), default=0)
        if not least <= start <= self.num_experts:
            raise ValueError(
                f"start_experts={start} must be from {least} (a token takes {k}) to "
                f"num_experts={self.num_experts}"
            )
        for name, value, allowed in (
            ("groups", self.groups, 1),
            ("expert_widths", self.expert_widths, None),
        ):
            if value != allowed:
                raise ValueError(
                    f"{name}={value!r} does not go with start_experts={start}, which lets experts "
                    f"come and go; allowed: {allowed}"
                )

    @cached_property
    def form(self) -> Form:
        """What the router's rules may know of the layer."""
        rules, widths = self.router.rules(), self.expert_widths
        by_work = getattr(self.router.balance, "load", None) == "flops" and widths is not None
        return Form(
            hidden_size=self.hidden_size,
            experts=self.num_experts,
            k=self.num_experts_per_tok,
            score=self.score,
            norm=self.norm,
            scale=self.route_scale,
            groups=self.groups,
            groups_kept=self.groups_kept,
            group_top=self.group_top,
            backend=self.kernels,
            rows=max((rule.rows for rule in rules.values()), default=1),
            biased=self.selection_bias,
            start_experts=self.start_experts,
            families=self.families,
            widths=widths,
            shares=tuple(1 / width for width in widths) if by_work else None,
            steps=self.steps,
            end_steps=self.router.end_steps,
        )

    @property
    def widths(self) -> Widths | None:
        """Of the experts, where they differ."""
        return None if self.expert_widths is None else Widths(self.expert_widths)
