"""What a rule of a router is: where it may act, what it keeps, what it means for an export.

    class Halve(RuleSettings):
        kind: Literal["halve"] = "halve"
        line = ("comparisons", "none", "not run")

        def build(self, form, device=None):
            return Halving(self, form, device)

    class Halving(Rule):
        def gates(self, gate_TK):
            return gate_TK / 2

    moe.config.NOISES["halve"] = Halve      # router.noise={kind: halve}

A hook that a rule does not override is never called, so a plain router pays for none of them.

Shape letters: L layers, T tokens, E experts, K experts per token, D model width.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from moe.float32 import Float32Module
from moe.kernels.common.gating import Gating
from moe.routing import Routing
from moe.settings import Settings
from moe.types import Choice, Form, RouterStats

Export = Literal["training only", "in the family", "ends", "never"]
HOOKS = (
    "input", "logits", "experts_per_token", "selection", "gates", "make_routing", "limit_routing",
    "output", "measure", "losses", "update", "after_step",
)  # fmt: skip


class RouterView(Protocol):
    """What a rule may read of the router that it belongs to."""

    weight: nn.Parameter
    """[E, D], or more rows where the logits are made otherwise."""
    form: Form
    selection_bias: Tensor | None
    """[E]; added to the scores for the choice alone."""
    active_E: Tensor | None
    """[E]; 1 for the slots that hold an expert; None: all do."""
    training: bool

    @property
    def active_k(self) -> int:
        """Experts per token of a forward now."""

    @property
    def experts_in_use(self) -> Tensor | None:
        """How many slots hold an expert, on the device; None: all of them."""

    def product(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """Logits [T, E] by another weight than the router's own."""


class RuleSettings(Settings):
    """The settings of a rule; a subclass has a field `kind` if its option has several."""

    export: ClassVar[Export] = "training only"
    """What a folder of a Hugging Face family makes of it: nothing is missing there (training only);
    families with a selection bias say it, for others it must end (in the family); it must end
    before the run does (ends); nothing can say it (never)."""
    lacks: ClassVar[str] = ""
    """What an exported folder would lack."""
    ended: ClassVar[str] = "switched off"
    """How `router.end_steps` ends it."""
    rows: ClassVar[int] = 1
    """Rows of the router's weight for an expert, where the rule makes one logit of several."""
    beyond_k: ClassVar[int] = 0
    """Experts beyond its K best that a token must be able to choose from."""
    compares: ClassVar[str] = "its own kind"
    """Of a balance loss: whose load it compares with, for the log."""
    needs_steps: ClassVar[bool] = False
    """Whether the number of the run's steps must be known (`Form.steps`)."""
    line: ClassVar[tuple[str, str, str]]
    """Its line in the table of docs/routing.md: when to touch it, cost, what our runs saw."""

    def build(self, form: Form, device: torch.device | str | None = None) -> Rule:
        """The rule of one layer."""
        raise NotImplementedError

    def check(self, form: Form, router: Any) -> None:
        """Refuse what cannot be with such a layer or beside other rules.

        Args:
            router: `moe.RouterConfig` with nothing left to `auto`.

        Raises:
            ValueError: key, value, what is allowed.
        """


class Rule(Float32Module):
    """One rule of one router. Every hook does nothing unless a subclass overrides it.

    State lies in float32 buffers (`add_state`), is saved, and is changed by `update` alone: once
    per optimizer step, from statistics over all ranks and micro-batches, so that neither evaluation
    nor recomputation changes it. What follows from the number of the step is no state: `begin_step`
    sets it, also after a restart. Nothing reads device memory back.

    Attributes:
        settings: what it was built from.
        hooks: names of the hooks that it overrides.
        on: False inside `moe.control.exported` for what an exported folder lacks.
    """

    biases: ClassVar[bool] = False
    """Whether the router needs a selection bias, which `update` moves."""
    draws: ClassVar[bool] = False
    """Whether a forward in training mode draws random numbers."""
    keeps_logits: ClassVar[bool] = False
    """Whether backward needs the logits for something else than gates, probabilities and z loss."""
    output_sums: ClassVar[bool] = False
    """Whether `RouterStats.output_sum_ED` is to be measured in training."""
    counts_step: ClassVar[bool] = False
    """Of a balance loss: whether it compares with the load of the whole step, which must be counted
    before the first of several micro-batches."""

    def __init__(
        self, settings: RuleSettings, form: Form, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.settings, self.form = settings, form
        self.on = True
        self.hooks = frozenset(hook for hook in HOOKS if _overrides(type(self), hook))

    # ------------------------------------------------------------------------------- by the step

    def begin_step(self, step: int) -> str | None:
        """Set what follows from the number of the step; a sentence when something changes."""

    @property
    def phase(self) -> Hashable:
        """What a forward depends on besides tensors: it is compiled and captured anew after a
        change of it."""
        return ()

    @property
    def scheduled(self) -> bool:
        """Whether training now takes other experts per token than evaluation."""
        return False

    @property
    def changes(self) -> int:
        """How often `phase` changes in a run."""
        return 0

    def start(self, router: RouterView) -> None:
        """Set the state that starts from the router's weight, once that is drawn or loaded."""

    # ------------------------------------------------------------------------------- in a forward

    def input(self, x_TD: Tensor) -> Tensor:
        """What the router reads in place of x; float32."""
        return x_TD

    def logits(self, row_TR: Tensor) -> Tensor:
        """Logits [T, E] from the products of x with the rows of the weight [T, E · rows]."""
        return row_TR

    def experts_per_token(self, k: int) -> int:
        """K. Training only, and evaluation as if it were (`moe.control.scheduled_evaluation`)."""
        return k

    def selection(
        self, router: RouterView, x_TD: Tensor, select_TE: Tensor, valid_T: Tensor | None
    ) -> Tensor | None:
        """Logits [T, E] that choose in place of `select_TE`, without gradient; None: those. Gates
        and probabilities still come from the router's own."""

    def gates(self, gate_TK: Tensor) -> Tensor:
        """Gates of the choice, which come in its order, best first. When `experts_per_token` is."""
        return gate_TK

    def make_routing(self, router: RouterView, logits_TE: Tensor, gating: Gating) -> Routing | None:
        """What the experts compute in place of the choice; None: the choice. Training only."""

    def limit_routing(self, router: RouterView, gating: Gating, routing: Routing) -> Routing:
        """The routing of the choice with fewer pairs. Training only."""
        return routing

    def output(self, y_TD: Tensor, choice: Choice, valid_T: Tensor | None) -> Tensor:
        """The layer's output, for what acts in its backward. Training with gradients only."""
        return y_TD

    def measure(
        self, router: RouterView, choice: Choice, valid_T: Tensor | None, sequences: int
    ) -> dict[str, Tensor]:
        """Fields of `RouterStats` that the rule needs, sums over the valid tokens."""
        return {}

    # ------------------------------------------------------------------- once a step, over layers

    @classmethod
    def losses(
        cls, rules: Sequence[Rule], stats: RouterStats, load_LE: Tensor | None
    ) -> Tensor | None:
        """Values [L] of a balance loss, weighted by `settings.coef`; 1.0 means balanced.

        Args:
            stats: of one micro-batch, stacked.
            load_LE: of the whole step (`counts_step`), or what `load` gives; None: unknown.
        """

    @classmethod
    def load(cls, rules: Sequence[Rule]) -> Tensor | None:
        """The load [L, E] that a balance loss compares with, where state says it."""

    @classmethod
    def update(
        cls,
        rules: Sequence[Rule],
        routers: Sequence[RouterView],
        stats: RouterStats,
        step: int,
        applied: Tensor | None,
    ) -> None:
        """After the optimizer's step, for the layers [L] that have this rule with these settings:
        override it where the number of layers shall cost no launches, else `after_step`.

        Args:
            stats: of the step, over all ranks and micro-batches, stacked, without gradient.
            step: its number, from 1.
            applied: scalar on the device, 0 if the step was skipped: then no bit may change; None:
                done.
        """
        for layer, (rule, router) in enumerate(zip(rules, routers)):
            one = RouterStats(*(None if field is None else field[layer] for field in stats))
            rule.after_step(router, one, step, applied)

    def after_step(
        self, router: RouterView, stats: RouterStats, step: int, applied: Tensor | None
    ) -> None:
        """The update of one layer."""


def _overrides(kind: type[Rule], hook: str) -> bool:
    own, plain = (getattr(cls, hook) for cls in (kind, Rule))
    return getattr(own, "__func__", own) is not getattr(plain, "__func__", plain)


def assign(buffers: Sequence[Tensor], new_LE: Tensor, done_L: Tensor) -> None:
    """buffers[l] = new_LE[l] where done_L; by choice, not by product: 0 * NaN is NaN."""
    for buffer, new_E, done in zip(buffers, new_LE.unbind(), done_L.unbind()):
        buffer.copy_(torch.where(done, new_E.to(buffer.dtype), buffer))


def done_layers(stats: RouterStats, applied: Tensor | None) -> Tensor:
    """bool [L]: layers that saw tokens in a step that was not skipped."""
    done_L = stats.tokens > 0
    return done_L if applied is None else done_L & (applied > 0)
