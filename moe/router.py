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

from moe.kernels.common.gating import Gating, kept_groups, plain_scores, sanitised
from moe.kernels.routing.router_logits import router_logits
from moe.kernels.routing.routing_metadata import RoutingMetadata
from moe.kernels.routing.topk_gating import MadeOf, topk_gating, topk_routing
from moe.router_checks import RENORMALISED, check_router
from moe.top_k import soften

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moe.layer import MoEConfig


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


def selection_keys(
    logits_TE: Tensor, config: MoEConfig, bias_E: Tensor | None, valid_T: Tensor | None = None
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
        score_TE = plain_scores(torch.where(hopeless_T1, 0.0, z_TE), config.score)
        score_TE = torch.where(usable_TE, score_TE, -math.inf)
        # Without a bias the logits chose: the same order, and no ties where the score saturates.
        key_TE = torch.where(usable_TE, z_TE, -math.inf) if bias_E is None else score_TE + bias_E
        if config.groups_kept < config.groups:
            kept_TE = kept_groups(key_TE, config.groups, config.groups_kept, config.group_top)
            key_TE = key_TE.masked_fill(~kept_TE, -math.inf)
        return score_TE, key_TE


def best_of_each(logits_TE: Tensor, family_E: Tensor) -> Tensor:
    """bool [T, E]: the expert of largest logit in each family, the first one where several are."""
    with torch.no_grad():
        family_TE = family_E.long().expand(logits_TE.shape)
        place_TE = torch.arange(family_E.numel(), device=logits_TE.device).expand(logits_TE.shape)
        largest_TE = torch.full_like(logits_TE, -math.inf)
        largest_TE = largest_TE.scatter_reduce(1, family_TE, logits_TE, "amax").gather(1, family_TE)
        place_TE = torch.where(logits_TE == largest_TE, place_TE, family_E.numel())
        first_TE = torch.full_like(place_TE, family_E.numel())
        first_TE = first_TE.scatter_reduce(1, family_TE, place_TE, "amin").gather(1, family_TE)
        return place_TE == first_TE


# Added to |a|²: an amplitude of 0 has a finite logarithm.
AMPLITUDE_EPS = 1e-20


def gumbel(logits_TE: Tensor, score: str, temperature: float | Tensor) -> Tensor:
    """log p / temperature plus Gumbel noise, up to a constant per token.

    The K largest are a draw of K experts without replacement, each time with the probabilities of
    those that are left (W. Kool et al., "Stochastic Beams and Where to Find Them", arXiv
    1903.06059).
    """
    log_TE = logits_TE if score == "softmax" else torch.nn.functional.logsigmoid(logits_TE)
    noise_TE = torch.empty_like(log_TE).exponential_().log().neg()
    return log_TE / temperature + noise_TE


def _left(key_TE: Tensor, masked_TE: Tensor, k: int) -> Tensor:
    """bool [T, E]: what is not masked, and the best of the masked where fewer than k are left."""
    # Shifted below all others; that the shift rounds matters only between masked experts.
    finite_TE = torch.where(key_TE > -math.inf, key_TE, 0.0)
    span_T1 = finite_TE.amax(dim=1, keepdim=True) - finite_TE.amin(dim=1, keepdim=True) + 1.0
    ranked_TE = torch.where(masked_TE, key_TE - span_T1, key_TE)
    best_TK = torch.topk(ranked_TE, k, dim=1).indices
    return (~masked_TE).scatter(1, best_TK, True)


class Router(nn.Module):
    """Scores every expert for every token and chooses K.

    State without gradient lies in float32 buffers, saved in checkpoints. No forward changes them;
    `moe.control.update_routers` does, once per optimizer step.

    Attributes:
        weight: parameter [E, D], float32.
        selection_bias: buffer [E] or None; added to the scores for the selection alone.
        load_E: buffer [E] or None; tokens per expert in the last step (`control.keep_load`).
        weight_ema: buffer [E, D] or None; average of the weight (`control.ema`).
        temperature: buffer [] or None; that of the draws, where it falls (`control.sample_until`).
        active_E: buffer [E] or None; 1 for the slots that hold an expert, 0 for the free ones,
            whose logits are -inf (`start_experts`).
        family_E: buffer [E] or None; number of the family of copies that an expert is of.
        kappa: buffer [] or None; the real number of experts per token (`control.top_k.soft`).
        default_ED: buffer [E, D] or None; running mean of each expert's output, not yet corrected
            for its start at 0 (`defaults`).
        default_count_E: buffer [E] or None; steps in it.
        k: experts per token now, while training.
        fading: whether the last of them fades out now, by `kappa`.
        scheduled_evaluation: whether evaluation too takes `k` experts, and not those of the end.
        exclusive: whether a token chooses one of each family at most now.
        select_by_ema: whether `weight_ema` selects the experts now.
        capacity: the limit of `control.capacity` now, or None.
        frozen: whether the weight stays as it is now.
        sampling: whether experts are drawn now, while training.
    """

    parameter_kind = "router"

    def __init__(self, config: MoEConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        check_router(config)
        self.config = config
        # dtype by name: under a bf16 default dtype a bare torch.empty would be bf16
        rows = config.num_experts * (2 if config.amplitude else 1)
        weight_ED = torch.empty(rows, config.hidden_size, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(weight_ED)
        control, experts = config.control, config.num_experts
        self._starts: dict[str, float] = {}
        self.add_state("selection_bias", (experts,) if config.selection_bias else None, device)
        self.add_state("load_E", (experts,) if control.keep_load else None, device)
        self.add_state("weight_ema", None if control.ema is None else weight_ED.shape, device)
        masked = config.start_experts is not None
        self.add_state("active_E", (experts,) if masked else None, device, start=1.0)
        self.add_state("family_E", (experts,) if config.families else None, device)
        soft = control.top_k is not None and control.top_k.soft
        self.add_state("kappa", () if soft else None, device, config.num_experts_per_tok)
        falls = config.sample_temperature > 0 and control.sample_until is not None
        start = config.sample_temperature
        self.add_state("temperature", () if falls else None, device, start=start)
        keeps = config.keeps_outputs
        self.add_state("default_ED", weight_ED.shape if keeps else None, device)
        self.add_state("default_count_E", (experts,) if keeps else None, device)
        # What follows from the number of the step; set by `moe.control.begin_step`.
        self.k = config.num_experts_per_tok
        self.fading = False
        self.scheduled_evaluation = False
        self.exclusive = config.families
        self.select_by_ema = control.ema is not None
        self.capacity = control.capacity
        self.frozen = False
        self.sampling = config.sample_temperature > 0
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
        if self.active_E is not None:
            self.active_E[self.config.start_experts :] = 0.0
        if self.family_E is not None:
            self.family_E.copy_(torch.arange(self.config.num_experts))

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

    @property
    def experts_in_use(self) -> Tensor | None:
        """How many slots hold an expert, on the device; None: all of them."""
        return None if self.active_E is None else self.active_E.sum()

    def defaults(self) -> Tensor:
        """Mean output of each expert, [E, D]; 0 for one that was never seen."""
        weight_E = 1.0 - self.config.control.default_decay**self.default_count_E
        return torch.where(
            (self.default_count_E > 0)[:, None],
            self.default_ED / weight_E.clamp(min=1e-12)[:, None],
            0.0,
        )

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
        return self._logits(x_TD, self.weight.detach() if self.frozen else self.weight)

    def made_of(self, x_TD: Tensor) -> MadeOf | None:
        """What `logits(x_TD)` is a plain product of; None where it is not: amplitudes, masks."""
        if self.config.amplitude or self.active_E is not None or self.exclusive:
            return None
        weight_ED = self.weight.detach() if self.frozen else self.weight
        return x_TD.detach(), weight_ED.detach(), self.config.kernels

    def _logits(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        logits_TE = router_logits(x_TD, weight_ED, self.config.kernels)
        if self.config.amplitude:
            # softmax(log |a|²) = |a|² / sum: rows 2e and 2e + 1 are real and imaginary part of a_e
            logits_TE = logits_TE.unflatten(1, (-1, 2)).square().sum(2).add(AMPLITUDE_EPS).log()
        if self.active_E is not None:
            logits_TE = logits_TE.masked_fill(self.active_E == 0, -math.inf)
        if self.exclusive:
            logits_TE = logits_TE.masked_fill(~best_of_each(logits_TE, self.family_E), -math.inf)
        return logits_TE

    def jittered(self, x_TD: Tensor) -> Tensor:
        """While training, x with every element times U(1 - jitter, 1 + jitter) (Switch
        Transformer, arXiv 2101.03961); float32, for the router alone."""
        size = self.config.jitter
        if not self.training or not size:
            return x_TD
        wide_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
        return wide_TD * (1 - size + 2 * size * torch.rand_like(wide_TD))

    def selection_logits(
        self, x_TD: Tensor, logits_TE: Tensor, valid_T: Tensor | None = None
    ) -> Tensor | None:
        """What the experts are chosen by, where it is not `logits_TE`; [T, E] without gradient."""
        dropout = self.config.expert_dropout if self.training else 0.0
        sampling = self.sampling and self.training
        if not self.select_by_ema and not dropout and not sampling:
            return None
        with torch.no_grad():
            select_TE = logits_TE.detach()
            if self.select_by_ema:
                select_TE = self._logits(x_TD.detach(), self.weight_ema)
            if sampling:
                fixed = self.temperature is None
                temperature = self.config.sample_temperature if fixed else self.temperature
                select_TE = gumbel(select_TE, self.config.score, temperature)
            if dropout:
                key_TE = selection_keys(select_TE, self.config, self.selection_bias, valid_T)[1]
                masked_TE = torch.rand_like(key_TE) < dropout
                select_TE = select_TE.masked_fill(
                    ~_left(key_TE, masked_TE, self.active_k), -math.inf
                )
            return select_TE

    def choose(
        self,
        logits_TE: Tensor,
        valid_T: Tensor | None = None,
        select_TE: Tensor | None = None,
        made_of: MadeOf | None = None,
    ) -> Gating:
        """Experts, gates and statistics of [T, E] logits; see `moe.kernels.routing.topk_gating`.

        Args:
            select_TE: logits that choose the experts in place of `logits_TE`, which then gives
                gates, probabilities and logsumexp alone.
            made_of: `self.made_of(x_TD)`, if nothing else keeps the logits for the backward: then
                this does not either.
        """
        k = self.active_k
        gating = topk_gating(logits_TE, k, valid_T=valid_T, made_of=made_of, **self._form())
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
        made_of: MadeOf | None = None,
    ) -> tuple[Gating, RoutingMetadata]:
        """`choose`, and the choice sorted by expert, in fewer launches than one after the other."""
        k = self.active_k
        if select_TE is None:
            gating, meta = topk_routing(
                logits_TE, k, valid_T=valid_T, made_of=made_of, **self._form()
            )
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
        """Experts and gates of each token, before the layer's capacity and rounding; the noise of
        `jittered` is the caller's.

        Args:
            x_TD: tokens. valid_T: bool, False for padding.
        """
        logits_TE = self.logits(x_TD)
        select_TE = self.selection_logits(x_TD, logits_TE, valid_T)
        return self.choose(logits_TE, valid_T, select_TE, self.made_of(x_TD))

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
