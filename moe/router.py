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
from moe.kernels.topk_gating import NORMS, SCORES, Gating, topk_gating, topk_routing

if TYPE_CHECKING:
    from collections.abc import Callable

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
    none_TK = expert_TK < 0
    picked_TK = logits_TE.gather(1, index_TK)
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


class Router(nn.Module):
    """Scores every expert for every token and chooses K.

    Attributes:
        weight: parameter [E, D], float32.
        selection_bias: buffer [E], float32, or None; added to the scores for the selection alone,
            saved in checkpoints, without gradient. Nothing in a forward changes it.
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
        bias_E = None
        if config.selection_bias:
            bias_E = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("selection_bias", bias_E)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        std = self.config.router_init_std
        nn.init.normal_(self.weight, std=self.config.init_std if std is None else std)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def logits(self, x_TD: Tensor) -> Tensor:
        """float32 [T, E] (float64 for a float64 router) from x_TD of any float dtype."""
        if self.weight.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"router.weight is {self.weight.dtype}, allowed: float32. Module casts leave it "
                "alone; a mixed-precision wrapper must be told to leave the router out"
            )
        return router_logits(x_TD, self.weight, self.config.kernels)

    def choose(self, logits_TE: Tensor, valid_T: Tensor | None = None) -> Gating:
        """Experts, gates and statistics of [T, E] logits; see `moe.kernels.topk_gating`."""
        k = self.config.num_experts_per_tok
        return topk_gating(logits_TE, k, valid_T=valid_T, **self._form())

    def choose_and_sort(
        self, logits_TE: Tensor, valid_T: Tensor | None = None
    ) -> tuple[Gating, RoutingMetadata]:
        """`choose`, and the choice sorted by expert, in fewer launches than one after the other."""
        k = self.config.num_experts_per_tok
        return topk_routing(logits_TE, k, valid_T=valid_T, **self._form())

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
        return self.choose(self.logits(x_TD), valid_T)

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
        for name in ("weight", "selection_bias"):
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
