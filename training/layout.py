"""From the `parallel` section of a config to who holds what, the engine, and how tokens travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel import ParallelError
from parallel.engine import resolve_engine
from parallel.expert_parallel import ExpertParallelOptions
from parallel.mesh import MeshPlan, plan_mesh
from parallel.offload import Offload
from training.config_load import ConfigError

if TYPE_CHECKING:
    from models.config import ModelConfig
    from training.config import ParallelConfig


def plan_layout(
    parallel: ParallelConfig, model: ModelConfig, world_size: int, device: str, hosts: int
) -> tuple[MeshPlan, str | None, ExpertParallelOptions, Offload]:
    """Layout, engine (None for one process), exchange and what lies outside of the device; no
    process group is needed for it.

    Raises:
        ConfigError: what cannot work with this many processes, or has no effect there.
    """
    experts = model.num_experts if model.moe_layers else None
    try:
        mesh = plan_mesh(
            world_size, parallel.nodes, parallel.expert, parallel.expert_placement, experts, hosts
        )
        exchange = ExpertParallelOptions(
            chunks=parallel.chunks,
            schedule=parallel.schedule,
            deduplicate=parallel.deduplicate,
            payload=parallel.payload,
            transport=parallel.transport,
        )
        exchange.check(mesh, device)
        offload = Offload(
            parallel.offload, parallel.offload_weights, parallel.offload_path, parallel.adam
        )
        engine = resolve_engine(parallel.engine, mesh, offload, device)
    except ParallelError as error:
        raise ConfigError(str(error)) from None
    return mesh, engine, exchange, offload
