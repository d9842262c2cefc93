"""The Mixture-of-Experts layer, usable alone: `from moe import MoE, MoEConfig`.

Here live the layer, its router, the routing value that passes from one to the other, the losses
and metrics of balance, and the kernels. Models, data and training loops live elsewhere, and nothing
here imports them.
"""

from moe.balance import attach_loss, auxiliary_loss, balance_loss, sequence_loss, z_loss
from moe.layer import MoE, MoEConfig
from moe.metrics import RouterStats, layer_metrics, model_metrics, to_host
from moe.router import Router
from moe.routing import CompactRouting, Routing
from moe.trace import RoutingTrace

__all__ = [
    "CompactRouting",
    "MoE",
    "MoEConfig",
    "Router",
    "RouterStats",
    "Routing",
    "RoutingTrace",
    "attach_loss",
    "auxiliary_loss",
    "balance_loss",
    "layer_metrics",
    "model_metrics",
    "sequence_loss",
    "to_host",
    "z_loss",
]
