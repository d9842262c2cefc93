"""Settings that all optimizers have, and the schedules of the learning rate."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from models.config import Count
from moe.settings import Settings, one_of
from parallel.engines.optimizer import Group

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


# --- course of the learning rate after warm-up ----------------------------------------------------


class _Decay(Settings):
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end, as a part of the peak."""


class WarmupStableDecay(_Decay):
    """Constant, then down at the end."""

    kind: Literal["wsd"] = "wsd"
    decay_fraction: Fraction = 0.2
    """Last part of the run, in which the learning rate falls."""


class Cosine(_Decay):
    """Down on half a cosine from the warm-up on."""

    kind: Literal["cosine"] = "cosine"


class Linear(_Decay):
    """Down on a straight line from the warm-up on."""

    kind: Literal["linear"] = "linear"


class Constant(Settings):
    """The peak to the end."""

    kind: Literal["constant"] = "constant"


SCHEDULES: dict[str, type[Settings]] = {
    "wsd": WarmupStableDecay,
    "cosine": Cosine,
    "linear": Linear,
    "constant": Constant,
}
Schedule = one_of(SCHEDULES, default="wsd")

# --- what all optimizers have --------------------------------------------------------------------


class OptimConfig(Settings):
    """Optimizer, learning-rate schedule and what happens to bad steps.

    An optimizer derives from it (`training.optim.adamw.AdamW`) and is then what engines ask:
    `parallel.engines.optimizer.Optimizer`.
    """

    granularity: ClassVar[Literal["elements", "matrices"]] = "elements"

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    schedule: Schedule = WarmupStableDecay()
    """Course of the learning rate after warm-up."""
    warmup_steps: Count = 100
    """Steps of linear warm-up from zero; in a run of no more steps than that, a tenth of them."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of all gradients together; `null`: no clipping."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """What is updated of a bfloat16 model: float32 master weights, or the model's own weights, with
    updates rounded up or down at random so that they are right in the mean."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Form of the optimizer's states of a bfloat16 model; bfloat16 is rounded at random too."""
    router_lr_multiplier: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the routers, as a multiple of `optim.lr`."""
    router_weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the routers."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """What to do with a step whose loss or gradient is NaN or infinite."""
    spike_factor: Annotated[float, Field(gt=1)] | None = None
    """Skip a step whose gradient norm exceeds this multiple of its running mean; `null`: never."""

    def of(self, group: Group) -> OptimConfig:
        """See `parallel.engines.optimizer.Optimizer`."""
        del group
        return self

    def state_dtype(self, group: Group) -> torch.dtype:
        """Of a group's states, by `moments`."""
        return getattr(torch, self.moments) if group.dtype == torch.bfloat16 else torch.float32
