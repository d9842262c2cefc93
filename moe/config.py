"""What a router is told: its score, what balances it, and the options that differ from plain top-K.

    RouterConfig()                                          # the family's own balance
    RouterConfig(bias={"kind": "sign", "rate": 0.01}, balance=None)

An option that has settings of its own is null or one value of one of a few kinds (`moe.settings`).
This is the `router` section of a run's config and what a layer takes, one and the same object.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from moe.settings import Settings, one_of

Step = Annotated[int, Field(ge=1)]
"""Number of a step, from 1."""
Decay = Annotated[float, Field(ge=0, lt=1)]

# --- balance losses ------------------------------------------------------------------------------


class _LoadBalance(Settings):
    coef: Annotated[float, Field(gt=0)] = 0.01
    """Weight of the loss, mean over layers; a balanced layer has the value 1."""
    load: Literal["tokens", "flops"] = "tokens"
    """What becomes equal for all experts: their tokens, or their arithmetic, tokens times width,
    with `model.moe_expert_widths`. A selection bias follows it too."""


class GlobalBalance(_LoadBalance):
    """Compares with the load of the whole step over all ranks and micro-batches; with several
    micro-batches they are counted in a pass of their own first, a third more arithmetic."""

    kind: Literal["global"] = "global"


class LaggedBalance(_LoadBalance):
    """Compares with the load of the step before, which costs nothing."""

    kind: Literal["lagged"] = "lagged"


class MicroBalance(_LoadBalance):
    """Compares with the load of each rank's micro-batch."""

    kind: Literal["micro"] = "micro"


class SequenceBalance(Settings):
    """Compares with the load of each row of `data.seq_len` tokens."""

    kind: Literal["sequence"] = "sequence"
    coef: Annotated[float, Field(gt=0)] = 0.01
    """Weight of the loss, mean over layers; a balanced layer has the value 1."""


BALANCES: dict[str, type[Settings]] = {
    "global": GlobalBalance,
    "lagged": LaggedBalance,
    "micro": MicroBalance,
    "sequence": SequenceBalance,
}

# --- selection biases ----------------------------------------------------------------------------


class _Bias(Settings):
    balances: ClassVar[bool] = True
    """Whether no balance loss is needed beside it."""

    freeze_at: Step | None = None
    """From this step on the selection bias stays as it is; `null`: never."""
    calibrate: bool = False
    """Set the bias by the first micro-batch of each process, averaged, before the first step: fresh
    routers start balanced. Another layout starts from another, equally good bias."""

    @model_validator(mode="after")
    def _moves(self) -> _Bias:
        if self.freeze_at == 1 and not self.calibrate:
            raise ValueError(
                "freeze_at=1 never lets the bias move; allowed: 2 or more, or calibrate=true"
            )
        return self


class QuantileBias(_Bias):
    """Each expert's bias is set so that its wanted number of tokens would choose it: balanced in
    one or two steps, no rate."""

    kind: Literal["quantile"] = "quantile"
    ema: Decay = 0.0
    """Part of the old bias that is kept."""


class SignBias(_Bias):
    """Up for experts below the mean load, down for those above (arXiv 2408.15664)."""

    kind: Literal["sign"] = "sign"
    rate: Annotated[float, Field(gt=0)] = 1e-3
    """Step of the bias."""


class MinLoadBias(_Bias):
    """Up for experts far below the mean load alone: no expert dies, and above that the load is left
    to itself."""

    balances: ClassVar[bool] = False

    kind: Literal["min_load"] = "min_load"
    rate: Annotated[float, Field(gt=0)] = 1e-3
    """Step of the bias."""
    below: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Part of the mean load below which an expert's bias rises."""


BIASES: dict[str, type[Settings]] = {
    "quantile": QuantileBias,
    "sign": SignBias,
    "min_load": MinLoadBias,
}

# --- token rounding ------------------------------------------------------------------------------


class DroppedGradient(Settings):
    """Pairs that rounding dropped get the gradient of their expert's mean output (Default MoE,
    arXiv 2504.12463)."""

    decay: Decay = 0.95
    """Decay of the mean outputs from step to step."""


class Rounding(Settings):
    """Each expert's token count becomes whole tiles in training (SonicMoE, arXiv 2512.14080);
    evaluation never rounds."""

    to: Literal[
        "nearest", "nearest_even", "up", "down", "balanced", "stochastic", "systematic", "score"
    ]
    """To which multiple of the tile; the words are explained in moe/rounding.py."""
    tile: Annotated[int, Field(ge=2)] = 128
    """Rows of a tile."""
    min_tiles: Annotated[int, Field(ge=0)] = 1
    """Tiles that every expert with at least one token gets."""
    max_tiles: Annotated[float, Field(ge=1.25, le=1024)] | None = None
    """Most tiles of one expert, as a multiple of the mean; `null`: no limit."""
    min_mean_tiles: Annotated[float, Field(ge=0)] = 2.0
    """A micro-batch with fewer tiles per expert than this on average is not rounded."""
    protect_top1: bool = False
    """Never take a token's best expert from it."""
    gates: Literal["top_k", "rounded", "none"] = "top_k"
    """Denominator of the gates: the sum over the top-K set, over the set after rounding, or
    none."""
    dropped: DroppedGradient | None = None
    """What the gates of dropped pairs learn; `null`: nothing."""


# --- experts per token ---------------------------------------------------------------------------


class _Ramp(Settings):
    start: Annotated[int, Field(ge=1)]
    """Experts per token in the first step; `model.num_experts_per_tok` at the end."""
    over: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Part of the run in which their number falls."""
    soft: bool = False
    """Let the last of a token's experts fade out instead of dropping it from one step to the
    next."""


class LinearTopK(_Ramp):
    """Their number falls on a straight line."""

    kind: Literal["linear"] = "linear"


class CosineTopK(_Ramp):
    """Their number falls on half a cosine."""

    kind: Literal["cosine"] = "cosine"


class GeometricTopK(_Ramp):
    """Their number falls by equal factors."""

    kind: Literal["geometric"] = "geometric"


class StepsTopK(Settings):
    """Their number falls at given steps."""

    kind: Literal["steps"] = "steps"
    start: Annotated[int, Field(ge=1)]
    """Experts per token in the first step."""
    levels: list[Annotated[list[Step], Field(min_length=2, max_length=2)]]
    """[step, experts per token] of each change; the last is `model.num_experts_per_tok`."""


TOP_KS: dict[str, type[Settings]] = {
    "linear": LinearTopK,
    "cosine": CosineTopK,
    "geometric": GeometricTopK,
    "steps": StepsTopK,
}

# --- the rest ------------------------------------------------------------------------------------


class EmaSelection(Settings):
    """An average of the router weights selects the experts, while the weights themselves give the
    gates."""

    kind: Literal["ema"] = "ema"
    decay: Decay
    """Decay of the average from step to step."""


class SampledSelection(Settings):
    """While training, experts are drawn without replacement by exp(log p / temperature)."""

    kind: Literal["sample"] = "sample"
    temperature: Annotated[float, Field(gt=0)]
    """1 draws by the probabilities; towards 0 the best are taken."""
    until: Step | None = None
    """Last step that draws experts: the temperature falls to zero until then, so that the end of
    the run trains the choice that is exported. `null`: drawn to the end."""


class Amplitudes(Settings):
    """Experimental: routers of two rows an expert, the real and imaginary part of an amplitude
    whose squared absolute value is the probability. Classical sampling, no family has it."""

    kind: Literal["amplitude"] = "amplitude"


class Jitter(Settings):
    """While training, the router's input is multiplied by noise (arXiv 2101.03961)."""

    kind: Literal["jitter"] = "jitter"
    size: Annotated[float, Field(gt=0, lt=1)]
    """The noise is in 1 ± size."""


class ExpertDropout(Settings):
    """While training, a token cannot choose some of the experts."""

    kind: Literal["dropout"] = "dropout"
    probability: Annotated[float, Field(gt=0, lt=1)]
    """Probability of that for each expert."""


class Capacity(Settings):
    """While training, a limit on the tokens of an expert in a micro-batch; the rest is dropped."""

    factor: Annotated[float, Field(gt=0)]
    """Most tokens, as a multiple of the mean."""
    drop: Literal["probability", "position"] = "probability"
    """Which tokens a full expert drops: those of the lowest gates, or the last ones."""


class DefaultGradient(Settings):
    """Routers learn about experts that a token did not choose from their mean output over the last
    steps (Default MoE, arXiv 2504.12463)."""

    kind: Literal["default"] = "default"
    decay: Decay = 0.95
    """Decay of the mean outputs from step to step."""


SELECTIONS: dict[str, type[Settings]] = {"ema": EmaSelection, "sample": SampledSelection}
LOGITS: dict[str, type[Settings]] = {"amplitude": Amplitudes}
NOISES: dict[str, type[Settings]] = {"jitter": Jitter, "dropout": ExpertDropout}
GRADIENTS: dict[str, type[Settings]] = {"default": DefaultGradient}

# --- the router ----------------------------------------------------------------------------------

Balance = one_of(BALANCES, default="global", words=("auto",))
Bias = one_of(BIASES, words=("auto",))
TopK = one_of(TOP_KS)
Selection = one_of(SELECTIONS)
Logits = one_of(LOGITS)
Noise = one_of(NOISES)
Gradient = one_of(GRADIENTS)


class RouterConfig(Settings):
    """How tokens are spread over experts. docs/routing.md says when to touch what."""

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] | None = None
    """How logits become scores; `null`: as the family has it."""
    z_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the router z-loss (squared log-sum-exp of the logits)."""
    balance: Balance | None = "auto"
    """The load-balance loss. auto: {kind: global, coef: 0.01}, or `null` where a bias balances."""
    bias: Bias | None = "auto"
    """How a selection bias follows the load after every step. auto: {kind: quantile} where the
    family has such a bias (glm4_moe), `null` elsewhere."""
    rounding: Rounding | None = None
    """Token rounding: experts compute whole tiles."""
    top_k: TopK | None = None
    """Start with more experts per token and come down to `model.num_experts_per_tok`, which
    evaluation and export always take."""
    selection: Selection | None = None
    """What chooses a token's experts in place of its best scores."""
    logits: Logits | None = None
    """How logits come from the router's weights in place of one row an expert."""
    noise: Noise | None = None
    """Noise on the choice while training; none is known to help pretraining."""
    capacity: Capacity | None = None
    """Limit on the tokens of an expert while training."""
    gradient: Gradient | None = None
    """What routers learn about experts that a token did not choose; `null`: nothing."""
    freeze_at: Step | None = None
    """From this step on the router weights stay as they are, but for the rows of experts that are
    cloned or revived; `null`: never."""
    end_steps: Step | None = None
    """The last so many steps train exactly what is exported: a selection bias that the family does
    not have falls to zero in as many steps before, averaged weights stop selecting, no token is
    dropped."""
    exportable: bool = True
    """false: train a router that no transformers family has, and never export it."""

    def resolved(self, score: str, has_bias: bool) -> RouterConfig:
        """The same with `auto` and an open score spelled out.

        Args:
            score: of the family.
            has_bias: whether the family adds a selection bias to the scores.
        """
        bias, balance = self.bias, self.balance
        if bias == "auto":
            bias = QuantileBias() if has_bias else None
        if balance == "auto":
            balance = None if bias is not None and bias.balances else GlobalBalance()
        known = {"score": self.score or score, "bias": bias, "balance": balance}
        return self.model_copy(update=known)


def check_router(
    router: RouterConfig,
    *,
    experts: int,
    k: int,
    groups: int = 1,
    groups_kept: int = 1,
    sums_to_one: bool = True,
) -> None:
    """Refuse what no router of this shape can do.

    Args:
        router: with nothing left to `auto`.
        experts, k: experts of the layer, and of a token.
        groups, groups_kept: of the group-limited selection.
        sums_to_one: whether a token's gates are divided by their sum.

    Raises:
        ValueError: key, value, what is allowed.
    """
    choice = experts // groups * groups_kept
    bias, rounding, top_k = router.bias, router.rounding, router.top_k
    if bias is not None and choice <= k:
        raise ValueError(
            f"router.bias.kind={bias.kind} cannot balance anything: every token takes all {choice} "
            "experts that it may choose from; allowed: router.bias=null"
        )
    if top_k is not None:
        most = choice - isinstance(bias, QuantileBias)  # it looks at the next one too
        if not k < top_k.start <= most:
            raise ValueError(
                f"router.top_k.start={top_k.start} must be above num_experts_per_tok={k} and at "
                f"most the {most} experts that a token may choose from"
            )
    if rounding is not None and rounding.gates != "top_k":
        if (rounding.gates == "rounded") != sums_to_one:
            gates = "sum to 1" if sums_to_one else "do not sum to 1"
            raise ValueError(
                f"router.rounding.gates={rounding.gates}: the gates of a token {gates} in "
                "evaluation and in an export; allowed: top_k, "
                f"{'rounded' if sums_to_one else 'none'}"
            )
        if getattr(top_k, "soft", False):
            raise ValueError(
                f"router.rounding.gates={rounding.gates} makes gates anew, without those that "
                "router.top_k.soft=true fades; allowed with it: top_k"
            )
    if rounding is not None and rounding.min_tiles == 0 and bias is router.balance is None:
        raise ValueError(
            "router.rounding.min_tiles=0 takes all tokens from an expert with less than half a "
            "tile of them, and without balancing nothing brings it back; allowed: 1 or more, or a "
            "router.balance or router.bias"
        )
    if isinstance(router.noise, ExpertDropout) and (groups_kept < groups or experts == k):
        raise ValueError(
            f"router.noise.probability={router.noise.probability:g} needs experts to choose from "
            f"in every group; allowed with num_experts={experts}, num_experts_per_tok={k}, "
            f"n_group={groups}, topk_group={groups_kept}: router.noise=null"
        )
    if isinstance(router.selection, SampledSelection):
        for wrong, what, allowed in (
            (router.score == "sqrtsoftplus", "router.score='sqrtsoftplus'", "softmax, sigmoid"),
            (bias is not None, f"router.bias.kind={getattr(bias, 'kind', None)}", "null"),
            (groups_kept < groups, f"topk_group={groups_kept}", f"{groups}"),
            (experts == k, f"num_experts_per_tok={k}", f"below {experts}"),
        ):
            if wrong:
                raise ValueError(
                    f"router.selection.kind=sample does not go with {what}; allowed: {allowed}"
                )
    if isinstance(router.logits, Amplitudes) and router.score != "softmax":
        raise ValueError(
            f"router.logits.kind=amplitude has probabilities of its own, which router.score="
            f"{router.score!r} does not give; allowed: softmax"
        )
    if router.capacity is not None:
        if rounding is not None:
            raise ValueError(
                "router.capacity and router.rounding both decide how many tokens an expert gets; "
                "with rounding give router.rounding.max_tiles"
            )
        if router.capacity.factor * k >= experts:
            raise ValueError(
                f"router.capacity.factor={router.capacity.factor:g} has no effect: no expert can "
                f"get more than {experts / k:g} times the mean; allowed: below that"
            )
