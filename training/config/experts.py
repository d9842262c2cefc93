"""The `surgery` section of a run's config: experts that come and go (docs/surgery.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from models.config import Count, Positive, Strict


class SurgeryEvent(Strict):
    """Something that happens to experts after a step."""

    step: Positive
    """After this step."""
    kind: Literal["clone", "retire", "revive"]
    """clone: a free slot gets a copy of an expert. retire: an expert goes. revive: a copy of one
    expert takes the place of another one."""
    layer: Count | None = None
    """Number of the MoE layer, from 0; empty: every one."""
    expert: Count | None = None
    """Who is copied, or who retires. Empty: of largest load times importance, or of least
    importance."""
    slot: Count | None = None
    """Where the copy goes. Empty: the first free slot, or (revive) that of the expert of least
    importance."""


class SurgeryConfig(Strict):
    """Experts that come and go: `model.num_experts` are slots, of which some hold an expert."""

    start_experts: Positive | None = None
    """Slots of each layer that hold an expert at first; empty: all `model.num_experts`."""
    events: list[SurgeryEvent] = Field(default_factory=list)
    """What happens at fixed steps."""
    policy: Literal["none", "replace", "resize"] = "none"
    """none; replace: an expert that is not needed becomes a copy of the one that is needed most;
    resize: those that are not needed retire, and those that are overloaded are cloned."""
    every: Positive = 500
    """Steps between the policy's decisions; at most one change in a layer each time."""
    dry_run: bool = False
    """true: the policy only logs what it would do."""
    importance: Literal["load", "gate_mass", "reap", "taylor"] = "taylor"
    """What an expert is worth: its tokens; its gates; gate times norm of its output (an experts'
    forward on top); or the loss that would go with it, to first order. The last two need one
    process."""
    importance_decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Of the averages over steps of importance and load."""
    retire_below: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Part of the layer's median importance below which an expert is not needed. Nor is one that
    has been dead for 200 steps."""
    retire_after: Positive = 2
    """Decisions in a row for which that must hold."""
    clone_above: Annotated[float, Field(gt=1)] = 1.5
    """resize: load above which an expert is cloned, as a multiple of the mean."""
    cooldown: Positive = 1000
    """Steps for which the policy leaves a layer alone after a change in it."""
    min_experts: Positive | None = None
    """resize: fewest experts of a layer; empty: as many as a token needs."""
    max_experts: Positive | None = None
    """resize: most experts of a layer; empty: all slots."""
    clone: Literal["dormant", "family", "copy"] | None = None
    """How copies begin. dormant: no token chooses it until `router.bias_update=quantile` has raised
    its bias, so the step after the change computes the same bits; needs the score sigmoid. copy: at
    work at once. family: likewise, but a token chooses one of a family of copies at most, its best
    one, so the output stays but for `noise`; no transformers family has that (`router.end_steps`).
    Empty: dormant where it is possible, else copy."""
    noise: Annotated[float, Field(ge=0)] = 0.01
    """Noise on a copy's weights, relative to their deviation."""
