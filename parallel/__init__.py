"""What differs between one process and many.

    world             joining the other processes, sums and agreements between them
    mesh              nodes × local ranks, and who shares what
    expert_parallel   MoE layers whose experts live on several ranks (all_to_all, dispatch,
                      transport and pull: how tokens travel)
    engine            what sharding engines share: gradient norm, update, shards
    engines           choosing one: ZeRO-3 by FSDP2 or DeepSpeed
    flat_shard        parts of tensors in checkpoints
    processes         several processes of this machine, for checks and benchmarks

Nothing here knows models or data. The names below need no more than torch; the rest is imported
from its modules by those who use it.
"""

from parallel.world import (
    ParallelError,
    World,
    agree,
    barrier,
    broadcast_,
    from_main,
    gather,
    launched_hosts,
    launched_rank,
    launched_size,
    shutdown,
    start,
    sum_,
)

__all__ = [
    "ParallelError",
    "World",
    "agree",
    "barrier",
    "broadcast_",
    "from_main",
    "gather",
    "launched_hosts",
    "launched_rank",
    "launched_size",
    "shutdown",
    "start",
    "sum_",
]
