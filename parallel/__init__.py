"""What differs between one process and many: process groups, sums of gradients, agreements.

Nothing here knows the model, the data or the optimizer.
"""

from parallel.data_parallel import (
    World,
    agree,
    barrier,
    check_same_weights,
    from_main,
    gather,
    launched_size,
    shutdown,
    start,
    sum_,
)

__all__ = [
    "World",
    "agree",
    "barrier",
    "check_same_weights",
    "from_main",
    "gather",
    "launched_size",
    "shutdown",
    "start",
    "sum_",
]
