"""The router: tokens in, experts and gates out, all in float32 whatever the model's dtype.

    logits -> selection -> top-K -> gates -> routing

bf16 logits would change the chosen set of experts of some tokens and make ties that do not exist in
float32, so the weight, the selection bias and the product stay float32 through
`model.to(bfloat16)`, autocast, a bf16 default dtype and the loading of a bf16 checkpoint. A
float64 model gets a float64 router.

What goes beyond plain top-K are rules (`moe.rules`), which act at each of these places; none is
named here.

Shape letters: T tokens, D model width, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.float32 import Float32Module
from moe.kernels.common.gating import Gating, sanitised
from moe.kernels.routing.router_logits import router_logits
from moe.kernels.routing.routing_metadata import RoutingMetadata
from moe.kernels.routing.topk_gating import MadeOf, topk_gating, topk_routing
from moe.routing import Routing
from moe.rules.base import Rule
from moe.scores import gates_at
from moe.types import Choice, RouterStats, valid_tokens


class Router(Float32Module):
    """Scores every expert for every token and chooses K.

    State without gradient lies in float32 buffers, saved in checkpoints. No forward changes them;
    `moe.control.update_routers` does, once per optimizer step.

    Attributes:
        weight: parameter [E, D], float32; more rows where a rule makes logits of several.
        selection_bias: buffer [E] or None; added to the scores for the selection alone.
        active_E: buffer [E] or None; 1 for the slots that hold an expert, 0 for the free ones,
            whose logits are -inf (`start_experts`).
        family_E: buffer [E] or None; number of the family of copies that an expert is of.
        rules: the rules by their key in `RouterConfig`.
        exclusive: whether a token chooses one of each family at most now.
        frozen: whether the weight stays as it is now.
        scheduled_evaluation: whether evaluation too takes the experts per token of training.
    """

    parameter_kind = "router"

    def __init__(self, config: MoEConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config, self.form = config, config.form
        shape = (config.num_experts * self.form.rows, config.hidden_size)
        # dtype by name: under a bf16 default dtype a bare torch.empty would be bf16
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))
        rules = config.router.rules()
        self.rules = nn.ModuleDict({key: s.build(self.form, device) for key, s in rules.items()})
        biased = config.selection_bias or any(rule.biases for rule in self.rules.values())
        experts = (config.num_experts,)
        self.add_state("selection_bias", experts if biased else None, device)
        masked = config.start_experts is not None
        self.add_state("active_E", experts if masked else None, device, start=1.0)
        self.add_state("family_E", experts if config.families else None, device)
        self.exclusive = config.families
        self.frozen = False
        self.scheduled_evaluation = False
        self.reset_parameters()

    # ------------------------------------------------------------------------------ state, phase

    def reset_parameters(self) -> None:
        std = self.config.router_init_std
        nn.init.normal_(self.weight, std=self.config.init_std if std is None else std)
        self.reset_state()
        self.start_state()

    @torch.no_grad()
    def reset_state(self) -> None:
        """Put every buffer, those of the rules included, back to its start value."""
        super().reset_state()
        if self.active_E is not None:
            self.active_E[self.config.start_experts :] = 0.0
        if self.family_E is not None:
            self.family_E.copy_(torch.arange(self.config.num_experts))
        for rule in self.rules.values():
            rule.reset_state()

    def start_state(self, loaded: Collection[str] = ()) -> None:
        """Set the state that starts from the weight; call it once weights are drawn or loaded.

        Args:
            loaded: keys of rules whose state was loaded too.
        """
        for key, rule in self.rules.items():
            if key not in loaded:
                rule.start(self)

    def begin_step(self, step: int) -> list[str]:
        """Set what follows from the number of the step; a sentence for each change."""
        said = [rule.begin_step(step) for rule in self.rules.values()]
        until, before = self.form.last_acting, self.exclusive
        self.exclusive = self.family_E is not None and (until is None or step <= until)
        if before and not self.exclusive:
            said.append("copies of one expert may be chosen together from now on")
        before, freeze_at = self.frozen, self.config.router.freeze_at
        self.frozen = freeze_at is not None and step >= freeze_at
        if self.frozen and not before:
            said.append("the routers' weights stay as they are from now on")
        return [text for text in said if text is not None]

    @property
    def phase(self) -> Hashable:
        """What a forward depends on besides tensors and the mode."""
        return self.exclusive, self.frozen, *(rule.phase for rule in self.rules.values())

    @property
    def changes(self) -> int:
        """How often `phase` changes in a run: each time it is compiled anew."""
        own = self.config.router.freeze_at is not None
        own += self.config.families and self.form.last_acting is not None
        return own + sum(rule.changes for rule in self.rules.values())

    def acting(self, hook: str) -> list[Rule]:
        """The rules that override a hook of `moe.rules.base.Rule`, in the order of acting."""
        return [rule for rule in self.rules.values() if rule.on and hook in rule.hooks]

    @property
    def follows_schedule(self) -> bool:
        """Whether a forward now is one of training, or of evaluation as if it were."""
        return self.training or self.scheduled_evaluation

    @property
    def active_k(self) -> int:
        """Experts per token of a forward now."""
        return self.training_k if self.follows_schedule else self.config.num_experts_per_tok

    @property
    def training_k(self) -> int:
        """Experts per token of training now."""
        k = self.config.num_experts_per_tok
        for rule in self.acting("experts_per_token"):
            k = rule.experts_per_token(k)
        return k

    @property
    def experts_in_use(self) -> Tensor | None:
        """How many slots hold an expert, on the device; None: all of them."""
        return None if self.active_E is None else self.active_E.sum()

    # ---------------------------------------------------------------------------------- a forward

    def forward(
        self, x_TD: Tensor, valid_T: Tensor | None = None, keep_logits: bool = False
    ) -> Choice:
        """Experts, gates and routing of each token.

        Args:
            x_TD: tokens, any float dtype.
            valid_T: bool, False for padding, which gets no expert.
            keep_logits: whether the caller uses the logits for something differentiable; else they
                may be recomputed in backward.
        """
        for rule in self.acting("input"):
            x_TD = rule.input(x_TD)
        logits_TE = self.logits(x_TD)
        select_TE = self.selection(x_TD, logits_TE, valid_T)
        keep_logits = keep_logits or select_TE is not None
        keep_logits = keep_logits or any(rule.keeps_logits for rule in self.rules.values())
        made_of = None if keep_logits else self.made_of(x_TD)
        gating, routing = self.route(logits_TE, valid_T, select_TE, made_of)
        return Choice(logits_TE, select_TE, gating, routing)

    def logits(self, x_TD: Tensor) -> Tensor:
        """float32 [T, E] (float64 for a float64 router) from x_TD of any float dtype."""
        if self.weight.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"router.weight is {self.weight.dtype}, allowed: float32. Module casts leave it "
                "alone; a mixed-precision wrapper must be told to leave the router out"
            )
        return self.product(x_TD, self.weight.detach() if self.frozen else self.weight)

    def product(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """Logits [T, E] by a weight that may be another than the router's own."""
        logits_TE = router_logits(x_TD, weight_ED, self.config.kernels)
        for rule in self.acting("logits"):
            logits_TE = rule.logits(logits_TE)
        if self.active_E is not None:
            logits_TE = logits_TE.masked_fill(self.active_E == 0, -math.inf)
        if self.exclusive:
            logits_TE = logits_TE.masked_fill(~best_of_each(logits_TE, self.family_E), -math.inf)
        return logits_TE

    def made_of(self, x_TD: Tensor) -> MadeOf | None:
        """What `logits(x_TD)` is a plain product of; None where it is not."""
        if self.acting("logits") or self.active_E is not None or self.exclusive:
            return None
        return x_TD.detach(), self.weight.detach(), self.config.kernels

    @torch.no_grad()
    def selection(
        self, x_TD: Tensor, logits_TE: Tensor, valid_T: Tensor | None = None
    ) -> Tensor | None:
        """What the experts are chosen by, where it is not `logits_TE`; [T, E] without gradient."""
        select_TE = None
        for rule in self.acting("selection"):
            before_TE = logits_TE.detach() if select_TE is None else select_TE
            found_TE = rule.selection(self, x_TD.detach(), before_TE, valid_T)
            select_TE = select_TE if found_TE is None else found_TE
        return select_TE

    def route(
        self,
        logits_TE: Tensor,
        valid_T: Tensor | None = None,
        select_TE: Tensor | None = None,
        made_of: MadeOf | None = None,
    ) -> tuple[Gating, Routing]:
        """The choice of given logits, and what the experts compute of it."""
        makers = self.acting("make_routing") if self.training else []
        if makers:
            gating, _ = self.choose(logits_TE, valid_T, select_TE, sort=False)
            for rule in makers:
                if (routing := rule.make_routing(self, logits_TE, gating)) is not None:
                    return gating, routing
            meta = None
        else:
            gating, meta = self.choose(logits_TE, valid_T, select_TE, made_of)
        c = self.config
        routing = Routing.from_topk(
            gating.expert_TK, gating.gate_TK, c.num_experts, c.kernels, meta
        )
        for rule in self.acting("limit_routing") if self.training else []:
            routing = rule.limit_routing(self, gating, routing)
        return gating, routing

    def choose(
        self,
        logits_TE: Tensor,
        valid_T: Tensor | None = None,
        select_TE: Tensor | None = None,
        made_of: MadeOf | None = None,
        sort: bool = True,
    ) -> tuple[Gating, RoutingMetadata | None]:
        """Experts, gates and statistics of [T, E] logits; see `moe.kernels.routing.topk_gating`.

        Args:
            select_TE: logits that choose the experts in place of `logits_TE`, which then gives
                gates, probabilities and logsumexp alone.
            made_of: `self.made_of(x_TD)`, if nothing else keeps the logits for the backward: then
                this does not either.
            sort: give the choice sorted by expert too, in fewer launches than one after the other.
        """
        k, form = self.active_k, self._form()

        def gate(z_TE: Tensor, **more: Any) -> tuple[Gating, RoutingMetadata | None]:
            if sort:
                return topk_routing(z_TE, k, valid_T=valid_T, **form, **more)
            return topk_gating(z_TE, k, valid_T=valid_T, **form, **more), None

        if select_TE is None:
            gating, meta = gate(logits_TE, made_of=made_of)
        else:
            gating = topk_gating(logits_TE, k, valid_T=valid_T, **form)
            with torch.no_grad():
                chosen, meta = gate(select_TE)
            gating = self._regated(logits_TE, gating, chosen)
        return gating._replace(gate_TK=self.gates(gating.gate_TK)), meta

    def gates(self, gate_TK: Tensor) -> Tensor:
        """Gates as the rules want them now; they come in the order of the choice."""
        for rule in self.acting("gates") if self.follows_schedule else []:
            gate_TK = rule.gates(gate_TK)
        return gate_TK

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
        c = self.config
        return {
            "score": c.score,
            "norm": c.norm,
            "scale": c.route_scale,
            "bias_E": self.selection_bias,
            "groups": c.groups,
            "groups_kept": c.groups_kept,
            "group_top": c.group_top,
            "backend": c.kernels,
        }

    # --------------------------------------------------------------------------------- statistics

    def stats(
        self, choice: Choice, valid_T: Tensor | None, sequences: int, **measured: Tensor | None
    ) -> RouterStats:
        """Sums over the valid tokens of a choice.

        Args:
            sequences: equally long ones that the tokens are of.
            measured: fields of `RouterStats` that the layer knows.
        """
        gating = choice.gating
        for rule in self.acting("measure"):
            measured |= rule.measure(self, choice, valid_T, sequences)
        with torch.no_grad():
            share_TK = gating.gate_TK.clamp(min=0)
            share_TK = share_TK / share_TK.sum(dim=1, keepdim=True).clamp(min=1e-20)
            entropy = torch.special.entr(share_TK).sum()
            tokens = valid_tokens(choice, valid_T)
            if self.active_E is not None:
                measured["active_sum_E"] = tokens * self.active_E
        measured.setdefault("sequence_sum", gating.lse_T.new_zeros(()))
        # Made in one call: Dynamo of torch 2.11 cannot return what `_replace` gives.
        return RouterStats(
            counts_E=gating.counts_E,
            prob_sum_E=gating.prob_sum_E,
            z_sum=gating.lse_T.square().sum(),
            entropy_sum=entropy,
            tokens=tokens,
            nonfinite=gating.nonfinite,
            rows_E=choice.routing.counts_E,
            **measured,
        )

    def extra_repr(self) -> str:
        c = self.config
        text = f"{c.hidden_size} -> {c.num_experts_per_tok} of {c.num_experts}, {c.score}, {c.norm}"
        return text + ("" if self.selection_bias is None else ", selection_bias")


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
