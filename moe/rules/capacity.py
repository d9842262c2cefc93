"""A limit on the tokens of an expert, as GShard and Switch Transformer have it: off by default.

With a limit of `factor` times the mean an expert drops the tokens beyond it, which then lack its
part of their output. Padding takes no places: it has no pairs at all. The gates of the pairs that
stay are those without a limit; statistics and balance losses see the choice before it.

Shape letters: T tokens, E experts, K experts per token, S slots (token order).

Sources: GShard (arXiv 2006.16668), Switch Transformer (arXiv 2101.03961).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.kernels.common.gating import Gating
from moe.routing import Routing
from moe.rules.base import Export, RouterView, Rule, RuleSettings
from moe.types import Form


class Capacity(RuleSettings):
    """While training, a limit on the tokens of an expert in a micro-batch; the rest is dropped."""

    export: ClassVar[Export] = "ends"
    lacks: ClassVar[str] = "limit on the tokens of an expert"
    line: ClassVar = ("comparisons", "dropped tokens; a sort", "–")

    factor: Annotated[float, Field(gt=0)]
    """Most tokens, as a multiple of the mean."""
    drop: Literal["probability", "position"] = "probability"
    """Which tokens a full expert drops: those of the lowest gates, or the last ones."""

    def build(self, form: Form, device: torch.device | str | None = None) -> Rule:
        return _Capacity(self, form, device)

    def check(self, form: Form, router: Any) -> None:
        if router.rounding is not None:
            raise ValueError(
                "router.capacity and router.rounding both decide how many tokens an expert gets; "
                "with rounding give router.rounding.max_tiles"
            )
        if self.factor * form.k >= form.experts:
            raise ValueError(
                f"router.capacity.factor={self.factor:g} has no effect: no expert can get more "
                f"than {form.experts / form.k:g} times the mean; allowed: below that"
            )


class _Capacity(Rule):
    def __init__(self, settings: Capacity, form: Form, device=None) -> None:
        super().__init__(settings, form, device)
        self.limited = True

    def begin_step(self, step: int) -> str | None:
        until, before = self.form.last_acting, self.limited
        self.limited = until is None or step <= until
        return "no expert drops tokens from now on" if before and not self.limited else None

    @property
    def phase(self) -> bool:
        return self.limited

    @property
    def changes(self) -> int:
        return int(self.form.last_acting is not None)

    def limit_routing(self, router: RouterView, gating: Gating, routing: Routing) -> Routing:
        if not self.limited:
            return routing
        settings, form = self.settings, self.form
        return limit_capacity(
            routing, gating, settings.factor, settings.drop, form.backend, router.experts_in_use
        )


def limit_capacity(
    routing: Routing,
    gating: Gating,
    factor: float,
    drop: str,
    backend: str = "auto",
    experts: int | Tensor | None = None,
) -> Routing:
    """The routing without the pairs beyond each expert's limit, ceil(factor * pairs / E).

    Args:
        routing: of the whole top-K choice.
        gating: it was made from; its pairs, without padding, are what the mean is of.
        drop: "probability": an expert keeps the tokens of its largest gates (ties: the earlier
            ones); "position": its first tokens.
        experts: over which the mean is; None: all.
    """
    # in float64, so that 1.25 * 64 is 80 and not 81
    mean = gating.counts_E.sum().double() / (routing.num_experts if experts is None else experts)
    limit = torch.ceil(factor * mean - 1e-9).long()
    rank_S = ranks(routing, drop)
    expert_S = torch.where(rank_S < limit, routing.expert_S, -1)
    gates_S = torch.where(expert_S >= 0, routing.gates_S, 0.0)
    shape = gating.expert_TK.shape
    limited = Routing.from_topk(
        expert_S.view(shape), gates_S.view(shape), routing.num_experts, backend
    )
    if isinstance(experts, Tensor):
        return limited
    most = math.ceil(factor * gating.expert_TK.numel() / (experts or routing.num_experts) - 1e-9)
    return replace(limited, most_per_expert=most)


def ranks(routing: Routing, drop: str) -> Tensor:
    """int64 [S]: place of each pair among those of its expert, from 0, in the order of dropping
    (the last are dropped first)."""
    expert_S = routing.expert_S.long().clamp(min=0)
    if drop == "position":
        return routing.row_S.long() - routing.offsets_E1.long()[expert_S]
    gates_S = routing.gates_S.detach().masked_fill(routing.expert_S < 0, -1.0)
    by_gate_S = torch.sort(gates_S, descending=True, stable=True).indices
    group_S = torch.where(routing.expert_S < 0, routing.num_experts, routing.expert_S)
    by_expert_S = torch.sort(group_S[by_gate_S], stable=True).indices
    order_S = by_gate_S[by_expert_S]  # by expert, then by falling gate
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    return place_S - routing.offsets_E1.long()[expert_S]
