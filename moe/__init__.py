"""The Mixture-of-Experts layer, usable alone:

    from moe import MoE, MoEConfig

    layer = MoE(MoEConfig(hidden_size=512, expert_size=256, num_experts=64, num_experts_per_tok=8))
    y, stats = layer(x)
    loss = your_loss(y) + layer.loss(stats)  # balance and z loss: the router trains badly without

Here live the layer, its router, the routing value that passes from one to the other, the losses
and metrics of balance, and the kernels. Models, data and training loops live elsewhere, and nothing
here imports them.
"""

from moe.balance import attach_loss, balance_loss, sequence_loss, z_loss
from moe.config import MoEConfig, RouterConfig
from moe.control import begin_step, needs_update, router_losses, routers_of, update_routers
from moe.layer import MoE
from moe.metrics import layer_metrics, model_metrics, to_host
from moe.router import Router
from moe.routing import CompactRouting, Routing
from moe.trace import RoutingTrace
from moe.types import RouterStats

__all__ = [
    "CompactRouting",
    "MoE",
    "MoEConfig",
    "Router",
    "RouterConfig",
    "RouterStats",
    "Routing",
    "RoutingTrace",
    "attach_loss",
    "balance_loss",
    "begin_step",
    "layer_metrics",
    "model_metrics",
    "needs_update",
    "router_losses",
    "routers_of",
    "sequence_loss",
    "to_host",
    "update_routers",
    "z_loss",
]
