"""The Mixture-of-Experts layer: router, routing, experts, shared expert.

    layer = MoE(MoEConfig(hidden_size=512, expert_size=256, num_experts=64, num_experts_per_tok=8))
    y, stats = layer(x)
    loss = your_loss(y) + layer.loss(stats)

Shape letters: T tokens, D model width, N expert width, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.control import router_losses
from moe.experts import experts
from moe.importance import importance_sums
from moe.kernels.common.activations import activation_of, activation_width
from moe.kernels.common.gating import Gating
from moe.matrices import Matrices
from moe.mixed_experts import mixed_experts
from moe.router import Router
from moe.routing import Routing
from moe.types import RouterStats

# (layer, logits_TE, gating, routing) -> (gating, routing); how a trace reads and replaces a choice
RoutingHook = Callable[["MoE", Tensor, Gating, Routing], tuple[Gating, Routing]]


class SharedExpert(nn.Module):
    """The feed-forward network that every token goes through next to its routed experts.

    Args:
        output_gate: multiply the output by sigmoid(w · x), w [1, D] learned (Qwen2-MoE).
    """

    parameter_kind = "mlp"

    def __init__(
        self,
        hidden_size: int,
        size: int,
        activation: str = "swiglu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        options = {"bias": False, "device": device, "dtype": dtype}
        gated = activation_width(activation) == 2
        self.gate_proj = nn.Linear(hidden_size, size, **options) if gated else None
        self.up_proj = nn.Linear(hidden_size, size, **options)
        self.down_proj = nn.Linear(size, hidden_size, **options)
        self.output_gate = nn.Linear(hidden_size, 1, **options) if output_gate else None

    def forward(self, x: Tensor) -> Tensor:
        activation = activation_of(self.activation)
        inner = self.up_proj(x) if self.gate_proj is None else self.gate_proj(x)
        inner = activation.inner(inner)
        if self.gate_proj is not None:
            up = self.up_proj(x)
            inner = inner * (up if activation.up is None else activation.up(up))
        y = self.down_proj(inner)
        return y if self.output_gate is None else y * torch.sigmoid(self.output_gate(x))


class MoE(nn.Module):
    """A drop-in feed-forward layer whose parameters are chosen per token.

    Attributes:
        router: `Router`; its weight [E, D], selection bias [E] and rules stay float32 whatever the
            layer's dtype.
        w1: [E, 2N, D] gate and up projections, rows interleaved (2j gate, 2j + 1 up); [E, N, D]
            for activations without gate.
        w2: [E, D, N] down projections. With `expert_widths` both lie as `moe.mixed_experts` has
            them: w1 [2 · sum of widths, D], w2 [sum of widths, D].
        shared: `SharedExpert` or None.
        routing_hook: None, or what `RoutingTrace` puts there while it records or replays.
    """

    parameter_kind = "expert"

    def __init__(
        self,
        config: MoEConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, MoEConfig):
            raise TypeError(
                f"MoE takes a MoEConfig, not {config!r}: MoE(MoEConfig(hidden_size=…, "
                "expert_size=…, num_experts=…, num_experts_per_tok=…))"
            )
        self.config = config
        E, D, N = config.num_experts, config.hidden_size, config.expert_size
        rows = activation_width(config.activation)
        shapes = (E, rows * N, D), (E, D, N)
        if config.widths is not None:
            shapes = (rows * config.widths.total, D), (config.widths.total, D)
        self.router = Router(config, device=device)
        self.w1, self.w2 = (
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in shapes
        )
        self.shared = None
        if config.shared_expert_size:
            self.shared = SharedExpert(
                D,
                config.shared_expert_size,
                config.activation,
                device=device,
                dtype=dtype,
                output_gate=config.shared_expert_gate,
            )
        self.routing_hook: RoutingHook | None = None
        # Masks of w1 and w2 while hidden weights go on learning (`training.sparsity`); a list, so
        # that they are no part of the module and its state.
        self.masks: list[nn.Module] = []
        self.reset_parameters()

    def matrices(self) -> dict[str, Matrices]:
        """How `w1` and `w2` divide into the matrices of the experts."""
        turns, widths = activation_width(self.config.activation), self.config.widths
        if widths is None:
            return {"w1": Matrices.of(self.w1.shape, turns), "w2": Matrices.of(self.w2.shape)}
        columns = self.config.hidden_size
        return {
            "w1": Matrices(tuple(turns * size for size in widths.sizes), columns, turns),
            "w2": Matrices(widths.sizes, columns),
        }

    def reset_parameters(self) -> None:
        """Draw all weights from N(0, init_std²); zero the selection bias."""
        self.router.reset_parameters()
        for weight in (self.w1, self.w2):
            nn.init.normal_(weight, std=self.config.init_std)
        if self.shared is not None:
            for weight in self.shared.parameters():
                nn.init.normal_(weight, std=self.config.init_std)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """The layer's output and what its router did.

        Args:
            x: [..., D] in any float dtype, any number of leading axes, any of them 0. The last
                leading axis is the sequence that a balance of kind sequence measures.
            valid: bool [...]; tokens that are False are padding: they give 0, take no part in any
                statistic or gradient, and what they hold (even NaN) changes nothing.

        Returns:
            y: [..., D], in the dtype that a linear layer would give (the autocast dtype under
                autocast).
            stats: sums over the valid tokens; see `RouterStats`. No buffer of the layer changes.

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        c, D = self.config, self.config.hidden_size
        if x.shape[-1:] != (D,):
            raise ValueError(f"x has shape {tuple(x.shape)}; its last axis must be hidden_size={D}")
        x_TD = x.reshape(math.prod(x.shape[:-1]), D)
        valid_T = None
        if valid is not None:
            if valid.shape != x.shape[:-1] or valid.dtype != torch.bool:
                raise ValueError(
                    f"valid must be bool of shape {tuple(x.shape[:-1])}, got {valid.dtype} "
                    f"{tuple(valid.shape)}"
                )
            valid_T = valid.reshape(-1)
            # 0 * NaN is NaN: a zero gate alone would let the content of padding into weight
            # gradients
            x_TD = torch.where(valid_T[:, None], x_TD, 0.0)

        router = self.router
        choice = router(x_TD, valid_T, keep_logits=self.routing_hook is not None)
        if self.routing_hook is not None:
            found = self.routing_hook(self, choice.logits_TE, choice.gating, choice.routing)
            choice = choice._replace(gating=found[0], routing=found[1])
        measured = {}
        if self.training and any(rule.output_sums for rule in router.rules.values()):
            y_TD, sums_ED = self.compute(x_TD, choice.routing, output_sums=True)
            measured["output_sum_ED"] = sums_ED.to(choice.gating.lse_T.dtype)
        else:
            y_TD = self.compute(x_TD, choice.routing)
        if self.training and torch.is_grad_enabled():
            for rule in router.acting("output"):
                y_TD = rule.output(y_TD, choice, valid_T)
        if self.training and router.active_E is not None:
            # Split experts have no weights of the whole layer, and are not asked for "reap".
            weights = self.weights() if c.importance == "reap" else (None, None)
            measured["importance_sum_E"] = importance_sums(
                c.importance, x_TD, *weights, choice.routing, c.activation, c.kernels
            )
        sequences = math.prod(x.shape[:-2]) if x.dim() > 2 else 1
        stats = router.stats(choice, valid_T, sequences, **measured)
        return y_TD.view(x.shape), stats

    def loss(self, stats: RouterStats) -> Tensor:
        """What is added to the loss of this batch so that the experts stay balanced, a scalar: the
        balance loss and the z loss that `config.router` asks for, by default with the coefficients
        of OLMoE (arXiv 2409.02060). For several layers, micro-batches or ranks a step see
        `moe.router_losses`."""
        stacked = RouterStats.stack([stats])
        return router_losses([self.router], stacked, stats.tokens.clamp(min=1))[0]

    def weights(self) -> tuple[Tensor, Tensor]:
        """w1 and w2 as they are computed with."""
        weights = (self.w1, self.w2)
        if self.masks:
            return tuple(mask(weight) for mask, weight in zip(self.masks, weights))
        return weights

    def compute(
        self, x_TD: Tensor, routing: Routing, output_sums: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Routed experts plus shared expert; what expert parallelism replaces.

        Args:
            output_sums: give the sum of each routed expert's outputs [E, D] too.
        """
        c, weights = self.config, self.weights()
        options = {
            "activation": c.activation,
            "save": c.save,
            "backend": c.kernels,
            "output_sums": output_sums,
        }
        if c.widths is None:
            found = experts(x_TD, *weights, routing, **options)
        else:
            found = mixed_experts(x_TD, *weights, routing, c.widths, **options)
        y_TD, *sums = found if output_sums else (found,)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return (y_TD, *sums) if output_sums else y_TD

    @property
    def draws(self) -> bool:
        """Whether a forward pass in training mode draws random numbers."""
        return any(rule.draws for rule in self.router.rules.values())

    def extra_repr(self) -> str:
        c = self.config
        sizes = c.expert_widths or (c.expert_size,)
        size = f"{min(sizes)} to {max(sizes)}" if len(set(sizes)) > 1 else f"{sizes[0]}"
        return f"{c.num_experts} experts of {size}, {c.activation}, kernels={c.kernels}"
