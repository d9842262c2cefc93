"""The `experts` section of a run's config: experts that come and go (docs/surgery.md)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moe.settings import Settings, one_of

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class ExpertEvent(Settings):
    """Something that happens to experts after a step."""

    step: Positive
    """After this step."""
    kind: Literal["clone", "retire", "revive"]
    """clone: a free slot gets a copy of an expert. retire: an expert goes. revive: a copy of one
    expert takes the place of another one."""
    layer: Count | None = None
    """Number of the MoE layer, from 0; `null`: every one."""
    expert: Count | None = None
    """Who is copied, or who retires. `null`: of largest load times importance, or of least
    importance."""
    slot: Count | None = None
    """Where the copy goes. `null`: the first free slot, or (revive) that of the expert of least
    importance."""


class Revive(Settings):
    """A dead expert becomes a copy of its layer's busiest one, optimizer state included; looked at
    in log steps."""

    decides: ClassVar[bool] = False
    """Whether it decides by importance, at fixed steps."""

    kind: Literal["revive"] = "revive"
    after: Positive = 200
    """Steps without load (a tenth of the mean) that make an expert dead."""


class Deciding(Settings):
    """A policy that goes by what experts are worth."""

    decides: ClassVar[bool] = True

    every: Positive = 500
    """Steps between decisions; at most one change in a layer each time."""
    dry_run: bool = False
    """true: only log what would be done."""
    retire_below: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Part of the layer's median importance below which an expert is not needed. Nor is one that
    has been dead for 200 steps."""
    retire_after: Positive = 2
    """Decisions in a row for which that must hold."""
    cooldown: Positive = 1000
    """Steps for which a layer is left alone after a change in it."""


class Replace(Deciding):
    """An expert that is not needed becomes a copy of the one that is needed most."""

    kind: Literal["replace"] = "replace"


class Resize(Deciding):
    """Experts that are not needed retire, and those that are overloaded are cloned."""

    kind: Literal["resize"] = "resize"
    clone_above: Annotated[float, Field(gt=1)] = 1.5
    """Load above which an expert is cloned, as a multiple of the mean."""
    min_experts: Positive | None = None
    """Fewest experts of a layer; `null`: as many as a token needs."""
    max_experts: Positive | None = None
    """Most experts of a layer; `null`: all slots."""


POLICIES: dict[str, type[Settings]] = {"revive": Revive, "replace": Replace, "resize": Resize}
Policy = one_of(POLICIES)


class Copies(Settings):
    """How copies of experts begin."""

    kind: Literal["auto", "dormant", "copy", "family"] = "auto"
    """dormant: no token chooses it until `router.bias={kind: quantile}` has raised its bias, so the
    step after the change computes the same bits; needs the score sigmoid. copy: at work at once.
    family: likewise, but a token chooses one of a family of copies at most, its best one, so the
    output stays but for `noise`; no transformers family has that (`router.end_steps`). auto:
    dormant where it is possible, else copy."""
    noise: Annotated[float, Field(ge=0)] = 0.01
    """Noise on a copy's weights, relative to their deviation."""


class Importance(Settings):
    """What an expert is worth, measured where a policy or an event goes by it."""

    kind: Literal["load", "gate_mass", "reap", "taylor"] = "taylor"
    """Its tokens; its gates; gate times norm of its output (an experts' forward on top); or the
    loss that would go with it, to first order. The last two need one process."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Of the averages over steps of importance and load."""


class ExpertsConfig(Settings):
    """Experts that come and go: `model.num_experts` are slots, of which some hold an expert."""

    start: Positive | None = None
    """Slots of each layer that hold an expert at first; `null`: all `model.num_experts`."""
    events: list[ExpertEvent] = Field(default_factory=list)
    """What happens at fixed steps."""
    policy: Policy | None = None
    """What happens by itself."""
    copies: Copies = Copies()
    """How copies begin."""
    importance: Importance = Importance()
    """What an expert is worth."""
