"""The router: tokens in, experts and gates out, all in float32 whatever the model's dtype.

bf16 logits would change the chosen set of experts of some tokens and make ties that do not exist in
float32, so the weight, the selection bias and the product stay float32 through
`model.to(bfloat16)`, autocast, a bf16 default dtype and the loading of a bf16 checkpoint. A
float64 model gets a float64 router.

Shape letters: T tokens, D model width, E experts, K experts per token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.kernels.router_logits import router_logits
from moe.kernels.routing_metadata import RoutingMetadata
from moe.kernels.topk_gating import (
    GROUP_FLOOR,
    NORMS,
    SCORES,
    Gating,
    _scores,
    sanitised,
    topk_gating,
    topk_routing,
)
from moe.top_k import soften

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moe.layer import MoEConfig

# Gates that sum to a constant by construction: with one expert per token the gate is that constant.
RENORMALISED = ("topk_sum", "softmax_topk")


def gates_at(
    logits_TE: Tensor, expert_TK: Tensor, score: str, norm: str, scale: float = 1.0
) -> Tensor:
    """Gates [T, K] of a given choice: `topk_gating`'s, differentiable, without its selection.

    Args:
        logits_TE: [T, E] float32 or float64.
        expert_TK: int [T, K]; -1 = no expert, gate 0.
        score, norm, scale: as in `topk_gating`.
    """
    index_TK = expert_TK.clamp(min=0).long()
    picked_TK = logits_TE.gather(1, index_TK)
    none_TK = (expert_TK < 0) | (picked_TK == -math.inf)
    if norm == "softmax_topk" or (norm == "topk_sum" and score == "softmax"):
        masked_TK = picked_TK.masked_fill(none_TK & ~none_TK.all(dim=1, keepdim=True), -math.inf)
        gate_TK = torch.softmax(masked_TK, dim=1)
    else:
        if score == "softmax":
            gate_TK = torch.exp(picked_TK - torch.logsumexp(logits_TE, dim=1, keepdim=True))
        elif score == "sigmoid":
            gate_TK = torch.sigmoid(picked_TK)
        elif score == "sqrtsoftplus":
            gate_TK = F.softplus(picked_TK).sqrt()
        else:
            gate_TK = picked_TK
        gate_TK = gate_TK.masked_fill(none_TK, 0.0)
        if norm == "topk_sum":
            gate_TK = gate_TK / (gate_TK.sum(dim=1, keepdim=True) + 1e-20)
    return gate_TK.masked_fill(none_TK, 0.0) * scale


def probabilities(logits_TE: Tensor, score: str, valid_T: Tensor | None = None) -> Tensor:
    """Scores normalised to sum 1 over the experts, [T, E]: the summands of `Gating.prob_sum_E`.

    Zero for tokens that are not valid; the non-finite policy is that of `topk_gating`.
    """
    largest = torch.finfo(logits_TE.dtype).max
    z_TE = torch.nan_to_num(logits_TE, nan=-math.inf, posinf=largest, neginf=-math.inf)
    use_T = (z_TE > -math.inf).any(dim=1)
    if valid_T is not None:
        use_T = use_T & valid_T
    z_TE = torch.where(use_T[:, None], z_TE, 0.0)
    if score in ("softmax", "identity"):
        prob_TE = torch.softmax(z_TE, dim=1)
    else:
        score_TE = torch.sigmoid(z_TE) if score == "sigmoid" else F.softplus(z_TE).sqrt()
        prob_TE = score_TE / (score_TE.sum(dim=1, keepdim=True) + 1e-20)
    return torch.where(use_T[:, None], prob_TE, 0.0)


def kept_groups(key_TE: Tensor, groups: int, groups_kept: int, top: int) -> Tensor:
    """bool [T, E]: experts of the groups that `topk_gating` lets a token choose from."""
    T, E = key_TE.shape
    member = key_TE.clamp(min=GROUP_FLOOR).view(T, groups, E // groups)
    total = torch.topk(member, top, dim=-1).values.sum(dim=-1)
    order = torch.sort(total + 0.0, dim=-1, descending=True, stable=True).indices
    keep = torch.zeros_like(total, dtype=torch.bool)
    keep = keep.scatter(1, order[:, :groups_kept], torch.ones_like(keep))
    return keep.repeat_interleave(E // groups, dim=1)


def selection_keys(
    logits_TE: Tensor, config: MoEConfig, bias_E: Tensor, valid_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scores and biased scores [T, E], without gradient; -inf where an expert cannot be chosen."""
    with torch.no_grad():
        z_TE = sanitised(logits_TE.detach())
        usable_TE = z_TE > -math.inf
        if valid_T is not None:
            usable_TE = usable_TE & valid_T[:, None]
        # a row without any usable expert: zeros instead of a softmax over -inf
        hopeless_T1 = ~usable_TE.any(dim=1, keepdim=True)
        if config.score != "softmax":
            hopeless_T1 = ~usable_TE  # these scores are elementwise and want finite logits
        score_TE = _scores(torch.where(hopeless_T1, 0.0, z_TE), config.score)
        score_TE = torch.where(usable_TE, score_TE, -math.inf)
        key_TE = score_TE + bias_E
        if config.groups_kept < config.groups:
            kept_TE = kept_groups(key_TE, config.groups, config.groups_kept, config.group_top)
            key_TE = key_TE.masked_fill(~kept_TE, -math.inf)
        return score_TE, key_TE


class Router(nn.Module):
    """Scores every expert for every token and chooses K.

    State without gradient lies in float32 buffers, saved in checkpoints. No forward changes them;
    `moe.control.update_routers` does, once per optimizer step.

    Attributes:
        weight: parameter [E, D], float32.
        selection_bias: buffer [E] or None; added to the scores for the selection alone.
        load_E: buffer [E] or None; tokens per expert in the last step (`control.keep_load`).
        weight_ema: buffer [E, D] or None; average of the weight (`control.ema`).
        kappa: buffer [] or None; the real number of experts per token (`control.top_k.soft`).
        k: experts per token now, while training.
        fading: whether the last of them fades out now, by `kappa`.
        scheduled_evaluation: whether evaluation too takes `k` experts, and not those of the end.
        select_by_ema: whether `weight_ema` selects the experts now.
    """

    def __init__(self, config: MoEConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        check_router(config)
        self.config = config
        # dtype by name: under a bf16 default dtype a bare torch.empty would be bf16
        weight_ED = torch.empty(
            config.num_experts, config.hidden_size, dtype=torch.float32, device=device
        )
        self.weight = nn.Parameter(weight_ED)
        control, experts = config.control, config.num_experts
        self._starts: dict[str, float] = {}
        self.add_state("selection_bias", (experts,) if config.selection_bias else None, device)
        self.add_state("load_E", (experts,) if control.keep_load else None, device)
        self.add_state("weight_ema", None if control.ema is None else weight_ED.shape, device)
        soft = control.top_k is not None and control.top_k.soft
        self.add_state("kappa", () if soft else None, device, config.num_experts_per_tok)
        # What follows from the number of the step; set by `moe.control.begin_step`.
        self.k = config.num_experts_per_tok
        self.fading = False
        self.scheduled_evaluation = False
        self.select_by_ema = control.ema is not None
        self.reset_parameters()

    def add_state(
        self,
        name: str,
        shape: Sequence[int] | None,
        device: torch.device | str | None = None,
        start: float = 0.0,
    ) -> None:
        """A float32 buffer that is saved, moved but never cast down, and starts as `start`; None
        if there is no shape."""
        buffer = None
        if shape is not None:
            buffer = torch.full(tuple(shape), start, dtype=torch.float32, device=device)
            self._starts[name] = start
        self.register_buffer(name, buffer)

    def reset_parameters(self) -> None:
        std = self.config.router_init_std
        nn.init.normal_(self.weight, std=self.config.init_std if std is None else std)
        self.reset_state()
        self.start_state()

    @torch.no_grad()
    def reset_state(self) -> None:
        """Put every buffer back to its start value."""
        for name, start in self._starts.items():
            getattr(self, name).fill_(start)

    @torch.no_grad()
    def start_state(self) -> None:
        """Set the buffers that start from the weight; call it once weights are drawn or loaded."""
        if self.weight_ema is not None:
            self.weight_ema.copy_(self.weight)

    @property
    def follows_schedule(self) -> bool:
        """Whether a forward now is one of training, or of evaluation as if it were."""
        return self.training or self.scheduled_evaluation

    @property
    def active_k(self) -> int:
        """Experts per token of a forward now: evaluation takes those of the schedule's end."""
        return self.k if self.follows_schedule else self.config.num_experts_per_tok

    def fade(self, gate_TK: Tensor) -> Tensor:
        """Gates as the schedule wants them now; they come in the order of the choice."""
        if not (self.fading and self.follows_schedule):
            return gate_TK
        return soften(gate_TK, self.kappa, self.config.norm in RENORMALISED)

    def logits(self, x_TD: Tensor) -> Tensor:
        """float32 [T, E] (float64 for a float64 router) from x_TD of any float dtype."""
        if self.weight.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"router.weight is {self.weight.dtype}, allowed: float32. Module casts leave it "
                "alone; a mixed-precision wrapper must be told to leave the router out"
            )
        return router_logits(x_TD, self.weight, self.config.kernels)

    def selection_logits(self, x_TD: Tensor, logits_TE: Tensor) -> Tensor | None:
        """What the experts are chosen by, where it is not `logits_TE`; [T, E] without gradient."""
        if not self.select_by_ema:
            return None
        with torch.no_grad():
            return router_logits(x_TD.detach(), self.weight_ema, self.config.kernels)

    def choose(
        self,
        logits_TE: Tensor,
        valid_T: Tensor | None = None,
        select_TE: Tensor | None = None,
    ) -> Gating:
        """Experts, gates and statistics of [T, E] logits; see `moe.kernels.topk_gating`.

        Args:
            select_TE: logits that choose the experts in place of `logits_TE`, which then gives
                gates, probabilities and logsumexp alone.
        """
        k = self.active_k
        gating = topk_gating(logits_TE, k, valid_T=valid_T, **self._form())
        if select_TE is not None:
            with torch.no_grad():
                chosen = topk_gating(select_TE, k, valid_T=valid_T, **self._form())
            gating = self._regated(logits_TE, gating, chosen)
        return gating._replace(gate_TK=self.fade(gating.gate_TK))

    def choose_and_sort(
        self,
        logits_TE: Tensor,
        valid_T: Tensor | None = None,
        select_TE: Tensor | None = None,
    ) -> tuple[Gating, RoutingMetadata]:
        """`choose`, and the choice sorted by expert, in fewer launches than one after the other."""
        k = self.active_k
        if select_TE is None:
            gating, meta = topk_routing(logits_TE, k, valid_T=valid_T, **self._form())
        else:
            gating = topk_gating(logits_TE, k, valid_T=valid_T, **self._form())
            with torch.no_grad():
                chosen, meta = topk_routing(select_TE, k, valid_T=valid_T, **self._form())
            gating = self._regated(logits_TE, gating, chosen)
        return gating._replace(gate_TK=self.fade(gating.gate_TK)), meta

    def _regated(self, logits_TE: Tensor, gating: Gating, chosen: Gating) -> Gating:
        """`gating` with the experts of `chosen`, whose gates come from `logits_TE`."""
        c = self.config
        gate_TK = gates_at(sanitised(logits_TE), chosen.expert_TK, c.score, c.norm, c.route_scale)
        return gating._replace(
            expert_TK=chosen.expert_TK,
            gate_TK=gate_TK,
            counts_E=chosen.counts_E,
            nonfinite=torch.maximum(gating.nonfinite, chosen.nonfinite),
        )

    def _form(self) -> dict[str, Any]:
        config = self.config
        return {
            "score": config.score,
            "norm": config.norm,
            "scale": config.route_scale,
            "bias_E": self.selection_bias,
            "groups": config.groups,
            "groups_kept": config.groups_kept,
            "group_top": config.group_top,
            "backend": config.kernels,
        }

    def forward(self, x_TD: Tensor, valid_T: Tensor | None = None) -> Gating:
        logits_TE = self.logits(x_TD)
        return self.choose(logits_TE, valid_T, self.selection_logits(x_TD, logits_TE))

    def extra_repr(self) -> str:
        c = self.config
        text = f"{c.hidden_size} -> {c.num_experts_per_tok} of {c.num_experts}, {c.score}, {c.norm}"
        return text + (", selection_bias" if c.selection_bias else "")

    # ------------------------------------------------------------------------------- stay float32

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Every move and cast of a module comes through here: moves are done, narrowing is not."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if _narrow(moved) and not _narrow(tensor) else moved

        return super()._apply(move, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # load_state_dict(assign=True) would put a checkpoint's bf16 tensor in the parameter's place
        for name in ("weight", *self._starts):
            tensor = state_dict.get(prefix + name)
            if isinstance(tensor, Tensor) and _narrow(tensor):
                state_dict[prefix + name] = tensor.float()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64)


def check_router(config: MoEConfig) -> None:
    """Refuse what no router can do.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    experts, k = config.num_experts, config.num_experts_per_tok
    if not 1 <= k <= experts:
        raise ValueError(
            f"num_experts_per_tok={k} is not possible with num_experts={experts}; "
            f"allowed: 1 to {experts}"
        )
    if config.score not in SCORES:
        raise ValueError(f"score={config.score!r} is unknown; allowed: {', '.join(SCORES)}")
    if config.norm not in NORMS:
        raise ValueError(f"norm={config.norm!r} is unknown; allowed: {', '.join(NORMS)}")
    if k == 1 and config.norm in RENORMALISED:
        # minimind#858: such a router is trained by nothing but the auxiliary losses
        raise ValueError(
            f"num_experts_per_tok=1 with norm={config.norm!r} makes every gate the constant "
            f"{config.route_scale:g}: the router would get no gradient from the loss; "
            "allowed with one expert per token: norm='none'"
        )
    if config.score == "identity" and config.norm == "topk_sum":
        raise ValueError(
            "norm='topk_sum' divides by the sum of the scores, which can be zero or negative with "
            "score='identity'; allowed with it: 'none', 'softmax_topk'"
        )
    if not (math.isfinite(config.route_scale) and config.route_scale > 0):
        raise ValueError(f"route_scale={config.route_scale} must be a finite number above 0")
    _check_bias_update(config)
    if config.control.top_k is not None:
        _check_top_k(config)
    groups, kept = config.groups, config.groups_kept
    if groups < 1 or experts % groups:
        raise ValueError(f"groups={groups} must be at least 1 and divide num_experts={experts}")
    if not 1 <= kept <= groups:
        raise ValueError(f"groups_kept={kept} must be between 1 and groups={groups}")
    size = experts // groups
    if kept * size < k:
        raise ValueError(
            f"groups_kept={kept} groups of {size} experts hold {kept * size} experts, fewer than "
            f"num_experts_per_tok={k}"
        )
    if kept < groups and not 1 <= config.group_top <= size:
        raise ValueError(
            f"group_top={config.group_top} must be between 1 and the {size} experts of a group"
        )


def _check_top_k(config: MoEConfig) -> None:
    schedule, rounding = config.control.top_k, config.rounding
    choice = config.num_experts // config.groups * config.groups_kept
    most = choice - (config.control.bias_update == "quantile")  # it looks at the next one too
    if schedule.start > most:
        raise ValueError(
            f"top_k_start={schedule.start} is more than the {most} experts that a token may take "
            f"of num_experts={config.num_experts}"
        )
    if schedule.end != config.num_experts_per_tok:
        raise ValueError(
            f"the schedule of K ends at {schedule.end}, num_experts_per_tok is "
            f"{config.num_experts_per_tok}: evaluation takes that many"
        )
    if schedule.soft and rounding is not None and rounding.renorm != "tc":
        raise ValueError(
            f"rounding_renorm={rounding.renorm!r} makes gates anew, without those that soft_k=true "
            "fades; allowed with it: tc"
        )


def _check_bias_update(config: MoEConfig) -> None:
    control, experts = config.control, config.num_experts
    if control.bias_update == "none":
        return
    if not config.selection_bias:
        raise ValueError(
            f"control.bias_update={control.bias_update!r} has no bias to update; it needs "
            "selection_bias=True"
        )
    choice = experts // config.groups * config.groups_kept
    if choice <= config.num_experts_per_tok:
        raise ValueError(
            f"control.bias_update={control.bias_update!r} cannot balance anything: every token "
            f"takes all {choice} experts that it may choose from; allowed: 'none'"
        )
    targets = control.bias_targets
    if targets is not None and len(targets) != experts:
        raise ValueError(f"control.bias_targets has {len(targets)} values for {experts} experts")
    if targets is not None and max(targets) * config.num_experts_per_tok > sum(targets):
        raise ValueError(
            f"control.bias_targets asks for more tokens of an expert than there are: its share "
            f"may be at most 1/{config.num_experts_per_tok} of the sum, got "
            f"{max(targets) / sum(targets):.3g}"
        )
