"""Experts whose weights are masked while they train: when, how, and what the optimizer sees.

Masks keep an exact share of each expert's matrices (`moe.sparse.dynamic`). They are made between an
optimizer step and the next, from the master weights, and are part of a checkpoint. There are two
ways for a weight to be hidden:

    soft   it is left out of the product and keeps learning, straight through the mask
    hard   it is 0, as are the optimizer's states of it; its gradient is taken away before the norm
           is measured

"regrow" is hard from the first mask on. "straight_through" is soft until its last mask and hard
after it, so the end of the run trains exactly what is exported; in between a checkpoint says that
an export would lack the masks. A step that the guard skips changes no mask; only the last mask is
made all the same, of the weights alone. Nothing is read back.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe.layer import MoE
from moe.sparse.dynamic import DynamicMask, MaskSchedule
from training.config.load import ConfigError
from training.follower import Follower

if TYPE_CHECKING:
    from models.transformer import Decoder
    from moe.types import RouterStats
    from parallel.engines.base import Engine
    from training.config.sections import Config


def mask_schedule(config: Config, steps: int) -> MaskSchedule:
    """The masks of a run of so many steps."""
    masks = config.train.sparsity
    start, end, until = masks.steps(steps)
    return MaskSchedule(
        density=masks.density,
        every=masks.every,
        start=start,
        end=end,
        block=masks.block,
        method=masks.kind,
        until=until,
        **({"regrow": masks.regrow} if masks.kind == "regrow" else {}),
    )


class Sparsity(Follower):
    """The masks of a model's experts.

    Attributes:
        step: the one that is prepared or at work.
        masks: by the name of the parameter.
    """

    def __init__(self, model: Decoder, optimizer: Engine, schedule: MaskSchedule) -> None:
        self.schedule, self.optimizer = schedule, optimizer
        self.layers = [(n, layer) for n, layer in model.named_modules() if isinstance(layer, MoE)]
        self.weights: dict[str, Tensor] = {
            f"{name}.{key}": getattr(layer, key)
            for name, layer in self.layers
            for key in ("w1", "w2")
        }
        self.masks = {name: DynamicMask(w, schedule) for name, w in self.weights.items()}
        self._gradients: dict[str, Tensor] = {}
        self._cleared = False  # hidden weights and states are known to be zero
        # An update of whole matrices moves weights whose gradient and states are zero.
        self._moves_zeros = optimizer.rule.granularity == "matrices"
        self.step = 1

    @staticmethod
    def make(
        config: Config, model: Decoder, optimizer: Engine, device: torch.device, steps: int
    ) -> Sparsity | None:
        """None where no masks are asked for."""
        if config.train.sparsity is None:
            return None
        return Sparsity(model, optimizer, mask_schedule(config, steps))

    def tensors(self) -> dict[str, Tensor]:
        return {f"masks/{name}": mask.keep.view(-1) for name, mask in self.masks.items()}

    def hard(self, step: int) -> bool:
        """Whether hidden weights are zero while step `step` runs."""
        s = self.schedule
        return step > (s.start if s.method == "regrow" else s.until)

    @torch.no_grad()
    def prepare_step(self, step: int) -> None:
        self.step = step
        hard = self.hard(step)
        soft = step > self.schedule.start and not hard
        for name, layer in self.layers:
            layer.masks = [self.masks[f"{name}.{key}"] for key in ("w1", "w2")] if soft else []
        if hard and not self._cleared:
            self._clear_hidden()

    @torch.no_grad()
    def before_update(self) -> None:
        due, hard = self.schedule.due(self.step), self.hard(self.step)
        if not (hard or (due and self.schedule.method == "regrow")):
            return
        gradients = self.optimizer.gradients()
        if due and self.schedule.method == "regrow":  # the next mask is made of all of it
            self._gradients = {name: gradients[name].clone() for name in self.masks}
        if hard:
            for name in self.masks:
                self._clear(name, gradients[name])

    @torch.no_grad()
    def after_update(self, stats: RouterStats | None, applied: Tensor) -> None:
        step = self.step
        if self._moves_zeros and self.hard(step):
            self._clear_hidden()
        if not self.schedule.due(step):
            return
        held = self.optimizer.tensors()
        for name, mask in self.masks.items():
            weight = held[f"weights/{name}"].view(self.weights[name].shape)
            gradient = self._gradients.pop(name, None)
            if gradient is not None:  # that of a skipped step may hold anything
                gradient = torch.where(applied > 0, gradient, 0.0).view_as(weight)
            before = mask.keep.clone()
            mask.choose(step, weight, gradient)
            if step != self.schedule.last:
                mask.keep.copy_(torch.where(applied > 0, mask.keep, before))
        self._cleared = False

    def _clear_hidden(self) -> None:
        """Zeros for hidden weights and their states."""
        held = self.optimizer.tensors()
        for name in self.masks:
            for kind in ("weights", *self.optimizer.states(name)):
                self._clear(name, held[f"{kind}/{name}"])
        self.optimizer.loaded()  # the model's own weights follow the master weights
        self._cleared = True

    def _clear(self, name: str, flat: Tensor) -> None:
        values = flat.view(self.weights[name].shape)
        values.masked_fill_(~self.masks[name].entries(values), 0.0)

    @torch.no_grad()
    def metrics(self) -> dict[str, Tensor]:
        """Share of the experts' weights that is kept."""
        kept = [mask.entries(self.weights[name]).sum() for name, mask in self.masks.items()]
        total = sum(weight.numel() for weight in self.weights.values())
        return {"weight_density": torch.stack(kept).sum().double() / total}

    def start_late(self, checkpoint: Path, step: int) -> None:
        if step >= self.schedule.last:
            raise ConfigError(
                f"train.sparsity is set, but {checkpoint} at step {step} has no masks and the last "
                f"one is made after step {self.schedule.last}; give a train.sparsity.until above "
                f"{step}"
            )
