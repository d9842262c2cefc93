"""A selection bias that balances a model before its first step.

    with calibrating(model):
        model(first_batch)

Fresh routers are uneven by chance: an expert whose row happens to point along the mean of the
tokens gets most of them. The bias that evens this out for one batch fits the next one too, as that
mean is a property of the text and not of the batch. Quantile balancing finds it in a few rounds on
the logits of each layer as they come; the layer then routes by it, so that the next one sees what
it will see in training.

Shape letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moe.kernels.common.gating import Gating
from moe.layer import MoE
from moe.routing import Routing
from moe.rules.bias import centred
from moe.rules.quantile_bias import quantiles
from moe.scores import selection_keys

ROUNDS = 5


@contextmanager
def calibrating(
    model: nn.Module, average: Callable[[Tensor], Tensor] | None = None
) -> Iterator[None]:
    """Inside, every forward sets the selection biases so that its tokens are spread evenly.

    Args:
        average: of a bias [E] over all ranks that share the router; None: this one alone.

    Raises:
        ValueError: a layer without selection bias.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if any(layer.router.selection_bias is None for layer in layers):
        raise ValueError("calibrating: a router has no selection bias; it needs a router.bias")

    def hook(layer: MoE, logits_TE: Tensor, gating: Gating, _: Routing) -> tuple[Gating, Routing]:
        router, valid_T = layer.router, gating.expert_TK[:, 0] >= 0
        bias_E = router.selection_bias
        for _ in range(ROUNDS):
            keys = selection_keys(logits_TE, router.form, bias_E, valid_T)
            found_E = quantiles(*keys, router.active_k, router.form.shares, router.active_E)
            new_E = centred(-found_E, router.active_E)
            bias_E.copy_(new_E if average is None else average(new_E))
        return router.route(logits_TE, valid_T)

    before = [layer.routing_hook for layer in layers]
    try:
        for layer in layers:
            layer.routing_hook = hook
        with torch.no_grad():
            yield
    finally:
        for layer, old in zip(layers, before):
            layer.routing_hook = old
