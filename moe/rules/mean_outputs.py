"""Running means of the experts' outputs, which stand for outputs that were not computed.

    m_e <- decay m_e + (1 - decay) (mean output over the step's tokens of e)

An expert without tokens keeps its own. One that was never seen has 0.

Shape letters: E experts, D model width.

Source: Default MoE (arXiv 2504.12463).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.rules.base import RouterView, Rule, RuleSettings
from moe.types import Form, RouterStats


class MeanOutputs(Rule):
    """Buffers: mean_ED [E, D], not yet corrected for its start at 0 (`means`); mean_count_E [E],
    steps in it."""

    output_sums = True

    def __init__(
        self,
        settings: RuleSettings,
        form: Form,
        device: torch.device | str | None = None,
        decay: float = 0.95,
    ) -> None:
        super().__init__(settings, form, device)
        self.decay = decay
        self.add_state("mean_ED", (form.experts, form.hidden_size), device)
        self.add_state("mean_count_E", (form.experts,), device)

    def means(self) -> Tensor:
        """Mean output of each expert, [E, D]; 0 for one that was never seen."""
        weight_E = 1.0 - self.decay**self.mean_count_E
        return torch.where(
            (self.mean_count_E > 0)[:, None],
            self.mean_ED / weight_E.clamp(min=1e-12)[:, None],
            0.0,
        )

    def after_step(
        self, router: RouterView, stats: RouterStats, step: int, applied: Tensor | None
    ) -> None:
        rows_E = stats.rows_E.to(self.mean_ED.dtype)
        seen_E = rows_E > 0
        if applied is not None:
            seen_E = seen_E & (applied > 0)
        mean_ED = stats.output_sum_ED.to(rows_E.dtype) / rows_E.clamp(min=1)[:, None]
        moved_ED = torch.lerp(mean_ED, self.mean_ED, self.decay)
        self.mean_ED.copy_(torch.where(seen_E[:, None], moved_ED, self.mean_ED))
        self.mean_count_E.add_(seen_E)
