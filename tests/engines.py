"""Engines for tests of what lies above them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from parallel.engines.local import LocalEngine
from parallel.engines.optimizer import Group
from training.optim.adamw import AdamW


def local_engine(
    groups: Sequence[Group],
    model: nn.Module | None = None,
    *,
    seed: int = 0,
    accumulates: bool = True,
    **optim: Any,
) -> LocalEngine:
    """AdamW in one process.

    Args:
        model: where it is called through the engine.
        optim: settings of `AdamW`.
    """
    return LocalEngine(
        model, groups, AdamW(**optim), num_terms=3, seed=seed, accumulates=accumulates
    )
