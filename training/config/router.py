"""The `router` section of a run's config; what goes together is checked in config_checks.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from models.config import Count, Positive, Strict


class RouterConfig(Strict):
    """How tokens are spread over experts, and token rounding. docs/routing.md says when to touch
    what."""

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] | None = None
    """How logits become scores; empty: as the family has it."""
    balance_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the load-balance loss, mean over layers; a balanced layer has the value 1. Empty:
    0.01, or 0 where a `router.bias_update` balances."""
    balance_load: Literal["tokens", "flops"] = "tokens"
    """What the balance loss and the selection bias make equal for all experts: their tokens, or
    their arithmetic, tokens times width, with `model.moe_expert_widths`."""
    balance_scope: Literal["global", "lagged", "micro", "sequence"] = "global"
    """Load that the balance loss compares with: the whole step's over all ranks and micro-batches
    (global; with several micro-batches they are counted in a pass of their own first, a third more
    arithmetic), that of the step before (lagged, free), each rank's micro-batch's, or each row's of
    `data.seq_len` tokens (sequence)."""
    bias_update: Literal["none", "sign", "quantile", "min_load"] | None = None
    """How the selection bias follows the load after every step, see moe/control.py. Empty: quantile
    where the family has such a bias (glm4_moe), none elsewhere."""
    bias_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Step of the rules sign and min_load."""
    min_load: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Part of the mean load below which the rule min_load raises an expert's bias."""
    calibrate_bias: bool = False
    """Set the selection bias by the first micro-batch of each process, averaged, before the first
    step: fresh routers start balanced. Another layout starts from another, equally good bias."""
    bias_ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the old bias that the rule quantile keeps."""
    bias_freeze_at: Positive | None = None
    """From this step on the selection bias stays as it is; empty: never."""
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of an average of the router weights that selects the experts, while the weights
    themselves give the gates; empty: none."""
    freeze_at: Positive | None = None
    """From this step on the router weights stay as they are, but for the rows of experts that are
    cloned or revived; empty: never."""
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """While training, the router's input is multiplied by noise in 1 ± jitter."""
    expert_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """While training, probability that a token cannot choose an expert."""
    sample_temperature: Annotated[float, Field(ge=0)] = 0.0
    """While training, experts are drawn without replacement by exp(log p / temperature); 0: the
    best are taken."""
    sample_until: Positive | None = None
    """Last step that draws experts: the temperature falls to zero until then, so that the end of
    the run trains the choice that is exported. Empty: drawn to the end."""
    amplitude: bool = False
    """Experimental: routers of two rows an expert, the real and imaginary part of an amplitude
    whose squared absolute value is the probability. Classical sampling, no family has it."""
    capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """While training, most tokens of an expert in a micro-batch, as a multiple of the mean; the
    rest is dropped. Empty: no limit."""
    capacity_drop: Literal["probability", "position"] = "probability"
    """Which tokens a full expert drops: those of the lowest gates, or the last ones."""
    end_steps: Positive | None = None
    """The last so many steps train exactly what is exported: a selection bias that the family does
    not have falls to zero in as many steps before, averaged weights stop selecting, no token is
    dropped."""
    exportable: bool = True
    """false: train a router that no transformers family has, and never export it."""
    z_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the router z-loss (squared log-sum-exp of the logits)."""
    rounding: Literal[
        "none",
        "nearest",
        "nearest_even",
        "up",
        "down",
        "balanced",
        "stochastic",
        "systematic",
        "score",
    ] = "none"
    """Round each expert's token count to whole tiles in training (SonicMoE, arXiv 2512.14080);
    evaluation never rounds. The words are explained in moe/rounding.py."""
    rounding_tile: Positive = 128
    """Rows of a tile."""
    rounding_min_tiles: Count = 1
    """Tiles that every expert with at least one token gets."""
    rounding_max_tiles: Annotated[float, Field(ge=1.25, le=1024)] | None = None
    """Most tiles of one expert, as a multiple of the mean; empty: no limit."""
    rounding_min_mean_tiles: Annotated[float, Field(ge=0)] = 2.0
    """A micro-batch with fewer tiles per expert than this on average is not rounded."""
    rounding_protect_top1: bool = False
    """Never take a token's best expert from it."""
    rounding_renorm: Literal["tc", "tr", "none"] = "tc"
    """Denominator of gates: the top-K set (tc), the set after rounding (tr), or none."""
    rounding_dropped_grad: Literal["none", "default"] = "none"
    """Gradient for pairs that rounding dropped: none, or by the expert's mean output (default)."""
    gradient: Literal["plain", "default"] = "plain"
    """What routers learn about experts that a token did not choose: nothing (plain), or their mean
    output over the last steps (default, Default MoE, arXiv 2504.12463)."""
    default_decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the mean outputs from step to step."""
    top_k_schedule: Literal["none", "steps", "linear", "cosine", "geometric"] = "none"
    """Start with more experts per token and come down to `model.num_experts_per_tok`, which
    evaluation and export always take; the curves are in moe/top_k.py."""
    top_k_start: Positive | None = None
    """Experts per token in the first step."""
    top_k_ramp: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Part of the run in which their number falls (all schedules but steps)."""
    top_k_levels: list[Annotated[list[Positive], Field(min_length=2, max_length=2)]] = Field(
        default_factory=list
    )
    """[step, experts per token] of each change, for the schedule steps."""
    revive_after: Positive | None = None
    """Steps without load (a tenth of the mean) after which an expert becomes a copy of its layer's
    busiest one, optimizer state included; looked at in log steps. Empty: never."""
    soft_k: bool = False
    """Let the last of a token's experts fade out instead of dropping it from one step to the
    next."""
