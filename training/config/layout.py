"""From the `parallel` section of a config to who holds what, the engine, and how tokens travel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moe.settings import Settings
from parallel.engines.choose import resolve_engine
from parallel.expert_parallel import Exchanging, check_exchange
from parallel.mesh import MeshPlan, plan_mesh
from parallel.offload import Offload
from parallel.world import ParallelError, own_queues
from training.config.load import ConfigError
from training.estimate.cost import fastest

if TYPE_CHECKING:
    from training.config.sections import Config


def plan_layout(
    config: Config, world_size: int, device: str, hosts: int, micro_batch: int, accumulation: int
) -> tuple[MeshPlan, str, Exchanging, Offload]:
    """Layout, engine ("local" for one process that names none), exchange and what lies outside of
    the device; no process group is needed for it.

    Args:
        micro_batch: rows of a process's forward pass.
        accumulation: forward passes of a step.

    Raises:
        ConfigError: what cannot work with this many processes, or has no effect there.
    """
    parallel, model = config.parallel, config.model.config
    experts = model.num_experts if model.moe_layers else None
    try:
        mesh = plan_mesh(
            world_size,
            parallel.nodes,
            parallel.expert or 1,
            parallel.expert_placement,
            experts,
            hosts,
        )
        exchange = parallel.exchange
        offload = _offload(parallel.offload)
        if parallel.expert is None and len(mesh.degrees) > 1:
            plans = [replace(mesh, expert=degree) for degree in mesh.degrees]
            plans = [plan for plan in plans if _works(exchange, plan, device)] or plans
            tokens = micro_batch * config.data.seq_len
            memory = _memory(device) if offload == Offload() else None
            mesh = fastest(plans, model, tokens, config.data.seq_len, accumulation, memory)
        check_exchange(exchange, mesh, device)
        engine = resolve_engine(parallel.engine, mesh, offload)
    except ParallelError as error:
        raise ConfigError(str(error)) from None
    return mesh, engine, exchange, offload


def _offload(given: Settings | None) -> Offload:
    """What lies outside of the device as an engine takes it."""
    if given is None:
        return Offload()
    states, weights = (given.kind if on else "none" for on in (given.states, given.weights))
    return Offload(states, weights, getattr(given, "path", None))


def _works(exchange: Exchanging, plan: MeshPlan, device: str) -> bool:
    """Whether what a config says of the exchange has a meaning in a layout."""
    try:
        check_exchange(exchange, plan, device)
    except ParallelError:
        return False
    return True


def _memory(device: str) -> int | None:
    """Bytes of this host's GPUs; None where there are none, as in a plan for another machine."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    own_queues()  # before CUDA is used for the first time
    return torch.cuda.get_device_properties(0).total_memory
