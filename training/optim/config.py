"""Settings that all optimizers have."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from models.config import Count
from moe.settings import Settings
from parallel.engines.optimizer import Group

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


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
    schedule: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """Course of the learning rate after warm-up. wsd: constant, then down at the end."""
    warmup_steps: Count = 100
    """Steps of linear warm-up from zero; in a run of no more steps than that, a tenth of them."""
    decay_fraction: Fraction = 0.2
    """Last part of the run in which wsd lowers the learning rate."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end, as a part of the peak."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of all gradients together; empty: no clipping."""
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
    """Skip a step whose gradient norm exceeds this multiple of its running mean; empty: never."""

    def of(self, group: Group) -> OptimConfig:
        """See `parallel.engines.optimizer.Optimizer`."""
        del group
        return self

    def state_dtype(self, group: Group) -> torch.dtype:
        """Of a group's states, by `moments`."""
        return getattr(torch, self.moments) if group.dtype == torch.bfloat16 else torch.float32
