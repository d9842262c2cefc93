"""While training, each expert is closed to a token with some probability; gates are as without. A
token always keeps K experts to choose from.

Shape letters: T tokens, E experts.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe.rules.base import RouterView, Rule, RuleSettings
from moe.scores import selection_keys
from moe.types import Form


class ExpertDropout(RuleSettings):
    """While training, a token cannot choose some of the experts."""

    line: ClassVar = ("comparisons", "noise in training", "–")

    kind: Literal["dropout"] = "dropout"
    probability: Annotated[float, Field(gt=0, lt=1)]
    """Probability of that for each expert."""

    def build(self, form: Form, device: torch.device | str | None = None) -> Rule:
        return _ExpertDropout(self, form, device)

    def check(self, form: Form, router: Any) -> None:
        if form.groups_kept < form.groups or form.experts == form.k:
            raise ValueError(
                f"router.noise.probability={self.probability:g} needs experts to choose from in "
                f"every group; allowed with num_experts={form.experts}, num_experts_per_tok="
                f"{form.k}, n_group={form.groups}, topk_group={form.groups_kept}: router.noise=null"
            )


class _ExpertDropout(Rule):
    draws = True

    def selection(
        self, router: RouterView, x_TD: Tensor, select_TE: Tensor, valid_T: Tensor | None
    ) -> Tensor | None:
        if not self.training:
            return None
        key_TE = selection_keys(select_TE, self.form, router.selection_bias, valid_T)[1]
        masked_TE = torch.rand_like(key_TE) < self.settings.probability
        return select_TE.masked_fill(~left(key_TE, masked_TE, router.active_k), -math.inf)


def left(key_TE: Tensor, masked_TE: Tensor, k: int) -> Tensor:
    """bool [T, E]: what is not masked, and the best of the masked where fewer than k are left."""
    # Shifted below all others; that the shift rounds matters only between masked experts.
    finite_TE = torch.where(key_TE > -math.inf, key_TE, 0.0)
    span_T1 = finite_TE.amax(dim=1, keepdim=True) - finite_TE.amin(dim=1, keepdim=True) + 1.0
    ranked_TE = torch.where(masked_TE, key_TE - span_T1, key_TE)
    best_TK = torch.topk(ranked_TE, k, dim=1).indices
    return (~masked_TE).scatter(1, best_TK, True)
