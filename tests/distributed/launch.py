"""Functions on several gloo processes, with a time limit: a hang is a failed test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel.processes import RankError, run_processes

__all__ = ["RankError", "run"]

# Far more than any case needs on two busy cores: the limit is there to end what would never end.
TIMEOUT_S = 240.0


def run(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """`function(*args)` on `world` processes; results by rank."""
    return run_processes(world, function, *args, timeout_s=timeout_s)
