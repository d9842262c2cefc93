"""Importance of the experts, as the policy of `training.surgery.changes` sees it.

The numbers lie on the device, follow every step without being read, and are part of a checkpoint: a
run that resumes from there takes the same decisions.

Shape letters: L MoE layers, E slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe.control import routers_of
from moe.metrics import relative_load
from moe.router import Router
from moe.surgery import Change, move_rows
from moe.types import RouterStats
from training.follower import Follower
from training.surgery.checks import importance, uses_slots

if TYPE_CHECKING:
    from parallel.engines.base import Engine
    from training.config.sections import Config

_LONG_AGO = -1e9


class ExpertImportance(Follower):
    """Importance of every expert, averaged over steps, and what the policy remembers.

    Averages start at 0 and share their factor, so only ratios mean anything.

    Attributes:
        importance_LE, load_LE: averages; the load is relative to the mean.
        low_LE: decisions in a row that found the expert not needed.
        changed_L: step of the layer's last change.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        *,
        how: str,
        decay: float,
        weights: Callable[[], Sequence[tuple[Tensor, Tensor]]] = tuple,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            how: see `moe.surgery.importance_sums`.
            weights: taylor: per layer the down projections and their gradient of a step, [E, X];
                asked for in every step, as gradients may lie elsewhere then.
        """
        self.how, self.decay, self.weights = how, decay, weights
        self.importance_LE = torch.zeros(layers, experts, device=device)
        self.load_LE = torch.zeros(layers, experts, device=device)
        self.low_LE = torch.zeros(layers, experts, device=device)
        self.changed_L = torch.full((layers,), _LONG_AGO, device=device)
        self._taylor_LE = torch.zeros_like(self.load_LE)

    @staticmethod
    def make(
        config: Config,
        model: nn.Module,
        optimizer: Engine,
        device: torch.device,
        steps: int,
    ) -> ExpertImportance | None:
        """What to follow in this run; None where no expert comes or goes."""
        routers = routers_of(model)
        if not uses_slots(config) or not routers:
            return None
        slots, how = config.model.config.num_experts, importance(config)
        return ExpertImportance(
            len(routers),
            slots,
            how=how,
            decay=config.expert_changes.importance.decay,
            weights=lambda: down_projections(model, optimizer, slots),
            device=device,
        )

    def tensors(self) -> dict[str, Tensor]:
        return {
            "surgery/importance": self.importance_LE.view(-1),
            "surgery/load": self.load_LE.view(-1),
            "surgery/low": self.low_LE.view(-1),
            "surgery/changed": self.changed_L,
        }

    @torch.no_grad()
    def before_update(self) -> None:
        """Read off the summed gradients what goes with the optimizer's step."""
        if self.how == "taylor":
            dtype = self._taylor_LE.dtype
            products = [(weight * grad).sum(dim=1, dtype=dtype) for weight, grad in self.weights()]
            self._taylor_LE.copy_(torch.stack(products).abs())

    @torch.no_grad()
    def after_update(self, stats: RouterStats, applied: Tensor) -> None:
        """Nothing moves in a step that was skipped."""
        load_LE = relative_load(stats)
        load_LE = torch.where(load_LE < torch.inf, load_LE, 0.0).to(self.load_LE.dtype)
        if self.how == "load":
            now_LE = load_LE
        elif self.how == "taylor":
            now_LE = self._taylor_LE
        else:
            per = stats.rows_E if self.how == "reap" else stats.tokens[:, None]
            now_LE = stats.importance_sum_E / per.clamp(min=1)
        done_L1 = ((stats.tokens > 0) & (applied > 0))[:, None]
        for average_LE, new_LE in ((self.importance_LE, now_LE), (self.load_LE, load_LE)):
            moved_LE = torch.lerp(new_LE.to(average_LE.dtype), average_LE, self.decay)
            average_LE.copy_(torch.where(done_L1, moved_LE, average_LE))

    @torch.no_grad()
    def expert_changed(self, change: Change, step: int) -> None:
        """A copy is taken for what its parent is; a free slot is worth nothing."""
        for rows_LE in (self.importance_LE, self.load_LE):
            move_rows(rows_LE[change.layer], change)
        self.low_LE[change.layer, change.expert] = 0.0
        self.changed_L[change.layer] = step


def down_projections(
    model: nn.Module, optimizer: Engine, slots: int
) -> list[tuple[Tensor, Tensor]]:
    """Per MoE layer the master weights w2 and their summed gradient, [E, X], between the last
    backward pass and the optimizer's step; of one process."""
    weights, gradients = optimizer.parts(), optimizer.gradients()
    names = [f"{prefix}w2" for prefix in layer_names(model)]
    return [
        (weights[f"weights/{name}"].view(slots, -1), gradients[name].view(slots, -1))
        for name in names
    ]


def layer_names(model: nn.Module) -> list[str]:
    """Prefixes of the parameters of the MoE layers, in the order of stacked statistics."""
    return [
        name.removesuffix("router")
        for name, module in model.named_modules()
        if isinstance(module, Router)
    ]
