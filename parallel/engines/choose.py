"""Which engine a run uses, and making it.

The engines themselves know the parts that they share, and not each other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from torch import nn

from parallel.engines.base import Engine
from parallel.engines.deepspeed import DeepSpeedEngine
from parallel.engines.fsdp2 import Fsdp2Engine
from parallel.engines.local import LocalEngine
from parallel.engines.optimizer import Group, Optimizer
from parallel.engines.sharded import Sharding
from parallel.mesh import MeshPlan
from parallel.offload import Offload
from parallel.world import ParallelError

ENGINES = ("auto", "fsdp2", "deepspeed")
LOCAL = "local"


def resolve_engine(name: str, plan: MeshPlan, offload: Offload | None = None) -> str:
    """The engine that `parallel.engine` means here: "local" for one process that names none,
    "fsdp2" or "deepspeed".

    Raises:
        ParallelError: an unknown engine, one that is not installed, or one that cannot do what is
            asked.
    """
    offload = offload or Offload()
    if name not in ENGINES:
        raise ParallelError(f"parallel.engine={name!r} is unknown; allowed: {', '.join(ENGINES)}")
    if plan.world == 1 and name == "auto":
        if offload.asked:
            raise ParallelError(
                f"{offload.asked} needs an engine, and one process uses none unless it is named; "
                "give parallel.engine=deepspeed or fsdp2"
            )
        return LOCAL
    if name == "auto":
        name = "deepspeed" if offload.asked else "fsdp2"
    if name == "fsdp2" and offload.asked:
        _check_fsdp2(offload)
    if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        asked = "parallel.engine=deepspeed" if offload.asked is None else offload.asked
        both = (offload.state, offload.weights) == ("cpu", "cpu")
        hint = ", or parallel.engine=fsdp2" if both else ""
        raise ParallelError(
            f"{asked} needs the package: pip install 'tessera-moe[deepspeed]'{hint}"
        )
    return name


def _check_fsdp2(offload: Offload) -> None:
    if "nvme" in (offload.state, offload.weights):
        raise ParallelError(
            f"{offload.asked} needs parallel.engine=deepspeed (or auto); allowed with "
            "parallel.engine=fsdp2: parallel.offload={kind: cpu, weights: true}"
        )
    if offload.state != offload.weights:
        raise ParallelError(
            f"{offload.asked} alone needs parallel.engine=deepspeed (or auto): the weights of "
            "fsdp2 are its master weights; it can do parallel.offload={kind: cpu, weights: true}"
        )


def make_engine(
    name: str,
    model: nn.Module,
    groups: Sequence[Group],
    optimizer: Optimizer,
    sharding: Sharding,
    *,
    num_terms: int,
    seed: int = 0,
    accumulates: bool = True,
) -> Engine:
    """Give a model an optimizer, and shard both unless the engine is local; all ranks call it
    alike.

    Args:
        name: what `resolve_engine` gave.
        model: changed in place. For a sharding engine float32 weights (they become the master
            weights), on the device, or on "meta" and then filled by `fill` or from a checkpoint.
        groups: of the optimizer, by logical names.
        num_terms: loss terms of a step.
        seed: of stochastic rounding.
        accumulates: whether a step has several micro-batches; see `LocalEngine`.
    """
    if name == LOCAL:
        return LocalEngine(
            model, groups, optimizer, num_terms=num_terms, seed=seed, accumulates=accumulates
        )
    narrow = {str(p.dtype) for p in model.parameters() if p.dtype.itemsize < 4}
    if narrow:
        raise ValueError(
            f"the model's weights are {', '.join(sorted(narrow))}; an engine that shards needs "
            "float32 weights, which it keeps as master weights, and casts them itself"
        )
    sharded = {"fsdp2": Fsdp2Engine, "deepspeed": DeepSpeedEngine}[name]
    return sharded(model, groups, optimizer, sharding, num_terms=num_terms, seed=seed)
