"""Settings that all optimizers have, and the schedules of the learning rate."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from models.config import Count
from moe.settings import Settings, one_of
from parallel.engines.optimizer import Group

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


# --- course of the learning rate ------------------------------------------------------------------


class _Warmup(Settings):
    warmup_steps: Count = 100
    """Steps of linear warm-up from zero; in a run of no more steps than that, a tenth of them."""


class _Decay(_Warmup):
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


class Constant(_Warmup):
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


class RouterRates(Settings):
    """How the routers' updates differ from those of other matrices."""

    lr_multiplier: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the routers, as a multiple of `optim.lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the routers."""


class Storage(Settings):
    """What an optimizer keeps of a bfloat16 model; what is kept in bfloat16 is rounded up or down
    at random, so that it is right in the mean."""

    weights: Literal["float32", "bfloat16"] = "float32"
    """What is updated: float32 master weights, or the model's own weights."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Form of the optimizer's states."""


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
    """Course of the learning rate: warm-up, then as its kind says."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of all gradients together; `null`: no clipping."""
    storage: Storage | None = None
    """Less memory for the states of a bfloat16 model; `null`: float32 master weights and states."""
    router: RouterRates | None = None
    """Other rates for the routers; `null`: `optim.lr`, and no weight decay."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """What to do with a step whose loss or gradient is NaN or infinite."""
    spike_factor: Annotated[float, Field(gt=1)] | None = None
    """Skip a step whose gradient norm exceeds this multiple of its running mean; `null`: never."""

    @property
    def weights(self) -> str:
        """What is updated of a bfloat16 model, float32 or bfloat16."""
        return (self.storage or Storage()).weights

    @property
    def moments(self) -> str:
        """Form of the states of a bfloat16 model, float32 or bfloat16."""
        return (self.storage or Storage()).moments

    def of(self, group: Group) -> OptimConfig:
        """See `parallel.engines.optimizer.Optimizer`."""
        del group
        return self

    def state_dtype(self, group: Group) -> torch.dtype:
        """Of a group's states, by `moments`."""
        return getattr(torch, self.moments) if group.dtype == torch.bfloat16 else torch.float32
