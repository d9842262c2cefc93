"""What the numbers of a config mean together for a number of processes."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.engines.choose import LOCAL
from parallel.expert_parallel import Exchanging
from parallel.mesh import MeshPlan
from parallel.offload import Offload


@dataclass(frozen=True)
class Plan:
    """What the numbers of a config mean together for a number of processes."""

    world_size: int
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """"float32" or "bfloat16"."""
    compile: bool
    whole_blocks: bool
    """Whether split experts are inside of the compiled blocks."""
    mesh: MeshPlan
    """Who holds what."""
    engine: str
    """"fsdp2" or "deepspeed"; "local" for one process that names none."""
    exchange: Exchanging
    """How tokens travel to experts of other processes."""
    offload: Offload
    """What lies outside of the device."""
    micro_batch_size: int
    """Rows of one forward pass in one process: the largest divisor of its rows up to the
    setting."""
    accumulation: int
    """Forward passes of one process in one optimizer step."""
    rows_per_rank: int
    """Rows of one process in one optimizer step; where they do not divide, the last ones have one
    less and an empty row instead."""
    tokens_per_step: int
    """Positions of one optimizer step over all processes."""

    @property
    def sharded(self) -> bool:
        """Whether an engine shards model and optimizer, be it over one process."""
        return self.engine != LOCAL
