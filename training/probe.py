"""A few fixed rows that the model is asked about while it trains: how its routing changes.

The rows are the first of the validation text (one on each process), or without any the first
micro-batch of this attempt, so that every log step sends the same tokens through the model, in
evaluation mode. Nothing is read back here; the numbers come over with those of the log step.

Shape letters: T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe.control import exported, routers_of
from moe.layer import MoE
from moe.sparse.activations import activation_density
from moe.trace import RoutingTrace
from parallel import World, sum_
from training.evaluate import evaluation

if TYPE_CHECKING:
    from models.transformer import Decoder
    from moe.routing import Routing
    from training.data import Batch, TrainData


def changed_pairs(before_TK: Tensor, now_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (token, expert) of `now` that `before` has not, and all pairs; -1 is no pair.

    With the same tokens, changed / all is the share of choices that changed: 0 for the same sets,
    whatever their order, 1 - K/E for independent random ones.
    """
    some_TK = now_TK >= 0
    kept_TK = (now_TK[:, :, None] == before_TK[:, None, :]).any(dim=2)
    return (some_TK & ~kept_TK).sum(), some_TK.sum()


class Probe:
    """The rows, and the experts they went to when asked last."""

    def __init__(self, model: Decoder, batch: Batch | None, world: World) -> None:
        """
        Args:
            batch: on the model's device; None: the first that `set_batch_if_missing` gets.
        """
        self.model, self.world = model, world
        self.batch = batch
        self.before: list[Tensor] | None = None
        self.any_experts = bool(routers_of(model))
        if batch is not None and self.any_experts:
            self.before, _ = self.run_forward()  # of the start, or the loaded checkpoint

    def set_batch_if_missing(self, batch: Batch, device: torch.device) -> None:
        """A batch to take if there is none yet."""
        if self.batch is None:
            self.batch = batch.to(device)
            if self.any_experts:
                self.before, _ = self.run_forward()

    def refresh_baseline(self) -> None:
        """Compare with the model as it is now: it was changed between steps, and a run that resumes
        from here would do so too."""
        if self.before is not None:
            self.before, _ = self.run_forward()

    @torch.no_grad()
    def churn(self) -> dict[str, Tensor]:
        """Share of the probe's expert choices that changed since the last call, over all processes,
        as a scalar on the device; empty without experts."""
        if self.before is None:
            return {}
        now, _ = self.run_forward()
        pairs = [torch.stack(changed_pairs(*layer)) for layer in zip(self.before, now)]
        self.before = now
        changed, total = sum_(self.world, torch.stack(pairs).double().sum(dim=0))
        return {"routing_churn": changed / total.clamp(min=1)}

    @torch.no_grad()
    def activations(self, threshold: float) -> dict[str, Tensor]:
        """Share of the experts' activations in the probe that a product could not skip, mean over
        layers, for tiles of 1 to 128 rows; see `moe.sparse.activations`. Scalars on the device.

        Args:
            threshold: absolute values up to this count as zero.
        """
        if self.batch is None or not self.any_experts:
            return {}
        found: list[dict[int, Tensor]] = []
        layers = [layer for layer in self.model.modules() if isinstance(layer, MoE)]

        def measured(layer: MoE, compute: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(x_TD: Tensor, routing: Routing, *args: Any, **options: Any) -> Any:
                w1, _ = layer.weights()
                c = layer.config
                backend = "reference" if c.kernels == "reference" else "auto"
                found.append(
                    activation_density(
                        x_TD.to(w1.dtype),
                        w1,
                        routing,
                        c.activation,
                        backend=backend,
                        threshold=threshold,
                    )
                )
                return compute(x_TD, routing, *args, **options)

            return wrapped

        for layer in layers:
            layer.compute = measured(layer, layer.compute)
        try:
            self.run_forward()
        finally:
            for layer in layers:
                del layer.compute
        return {
            f"activation_density_{rows}": torch.stack([one[rows] for one in found]).mean().double()
            for rows in found[0]
        }

    @torch.no_grad()
    def loss(self) -> float | None:
        """Mean loss of the probe's rows, over all processes; None without any target. Waits for
        the device."""
        batch = self.batch
        if batch is None or not self.any_experts:
            return None
        with evaluation(self.model), torch.compiler.set_stance("force_eager"):
            out = self.model(batch.tokens_BL, **batch.model_kwargs)
        targets = (batch.labels_BL >= 0).sum()
        total, count = sum_(self.world, torch.stack([out.loss_sum, targets]).double()).tolist()
        return total / count if count else None

    @torch.no_grad()
    def export_differs(self, selection_bias: bool) -> bool | None:
        """Whether a folder that holds the weights (and the selection bias, if the family has one)
        computes anything else for these rows; None without rows to compare. Waits for the device.
        """
        if self.batch is None:
            return None
        ours, logits = self.run_forward()
        with exported(self.model, selection_bias):
            theirs, other_logits = self.run_forward()
        # written so that a NaN differs
        same = [(a == b).all() for a, b in zip([*ours, logits], [*theirs, other_logits])]
        return bool(sum_(self.world, (~torch.stack(same)).sum().double()))

    def run_forward(self) -> tuple[list[Tensor], Tensor]:
        """Experts [T, K] of each layer with experts, and the logits of each row's last token."""
        batch = self.batch
        trace = RoutingTrace(self.model) if self.any_experts else None
        recording = nullcontext() if trace is None else trace.record()
        # blocks that are compiled would be compiled again for the recording
        with evaluation(self.model), torch.compiler.set_stance("force_eager"), recording:
            out = self.model(
                batch.tokens_BL,
                positions_BL=batch.positions_BL,
                documents=batch.documents,
                valid_BL=batch.valid_BL,
                logits="last",
            )
        entries = [] if trace is None else trace.entries.values()
        choices = [layer[0].choice for layer in entries]
        return [c.ids_S().view(c.num_tokens, -1) for c in choices], out.logits


def make_probe(model: Decoder, data: TrainData, world: World, device: torch.device) -> Probe:
    """A probe of the first validation row of each process."""
    sources = data.validation(
        micro_batch_size=1, rank=world.rank, world=world.size, max_rows=world.size
    )
    batch = next((batch for rows in sources.values() for batch in rows), None)
    return Probe(model, None if batch is None else batch.to(device), world)
