"""Which engine shards a model, and making it.

    engine = make_engine("fsdp2", model, mesh, …)

The engines themselves know the parts that they share (`parallel.engine`), and not each other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

from parallel.engine import AdamSettings, Engine, Group, Guard
from parallel.expert_parallel import ExpertParallelOptions
from parallel.fsdp2_engine import Fsdp2Engine
from parallel.mesh import Mesh, MeshPlan
from parallel.offload import Offload
from parallel.world import ParallelError

ENGINES = ("auto", "fsdp2", "deepspeed")


def resolve_engine(
    name: str, plan: MeshPlan, offload: Offload | None = None, device_type: str = "cpu"
) -> str | None:
    """The engine that `parallel.engine` means here; None for one process that names none.

    Args:
        device_type: "cpu" or "cuda", of the run.

    Raises:
        ValueError: an unknown engine, one that is not installed, or one that cannot do what is
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
        return None
    if name == "auto":
        name = "deepspeed" if offload.asked else "fsdp2"
    if name == "fsdp2" and offload.asked:
        _check_fsdp2(offload)
    if name == "deepspeed":
        if importlib.util.find_spec("deepspeed") is None:
            asked = "parallel.engine=deepspeed" if offload.asked is None else offload.asked
            hint = (
                ", or parallel.engine=fsdp2"
                if (offload.state, offload.weights, offload.adam) == ("cpu", "cpu", "torch")
                else ""
            )
            raise ParallelError(
                f"{asked} needs the package: pip install 'tessera-moe[deepspeed]'{hint}"
            )
        if offload.adam == "deepspeed":
            # its import of PyTorch's builder warns where there is a compiler and no GPU
            from parallel.deepspeed_adam import check_adam

            check_adam("cuda" if offload.state == "none" and device_type == "cuda" else "cpu")
    return name


def _check_fsdp2(offload: Offload) -> None:
    if "nvme" in (offload.state, offload.weights) or offload.adam != "torch":
        wanted = next(f"{k}={v}" for k, v in offload.named() if v in ("nvme", "deepspeed"))
        raise ParallelError(
            f"parallel.{wanted} needs parallel.engine=deepspeed (or auto); allowed with "
            "parallel.engine=fsdp2: offload=cpu with offload_weights=cpu, adam=torch"
        )
    if offload.state != offload.weights:
        raise ParallelError(
            f"{offload.asked} alone needs parallel.engine=deepspeed (or auto): the weights of "
            "fsdp2 are its master weights; it can do parallel.offload=cpu together with "
            "parallel.offload_weights=cpu"
        )


def make_engine(
    name: str,
    model: nn.Module,
    mesh: Mesh,
    groups: Sequence[Group],
    units: Sequence[nn.Module],
    guard: Guard,
    *,
    num_terms: int,
    settings: AdamSettings | None = None,
    options: ExpertParallelOptions | None = None,
    dtype: torch.dtype = torch.float32,
    offload: Offload | None = None,
) -> Engine:
    """Shard a model and give it an optimizer; all ranks call it alike.

    Args:
        name: `parallel.engine`; auto is deepspeed when something is offloaded, else fsdp2.
        model: float32 weights (they become the master weights), on the device, or on "meta" and
            then filled by `fill` or from a checkpoint. Changed in place.
        groups: of the optimizer, by logical names.
        units: modules whose weights are gathered together, in the order of the forward: the blocks,
            and embedding and head if they share no weight.
        guard: decides about skipping.
        num_terms: loss terms of a step.
        dtype: of weights and activations in forward and backward; gradients are reduced in
            float32 whatever it is.
        offload: what lies outside of the device; None: nothing.

    Raises:
        ValueError: an unknown engine, one that is not installed or cannot do what is asked.
    """
    offload = offload or Offload()
    resolved = resolve_engine(name, mesh.plan, offload, mesh.device.type)
    if resolved is None:
        raise ParallelError(
            f"parallel.engine={name} means no engine for one process; allowed: fsdp2, deepspeed"
        )
    narrow = {str(p.dtype) for p in model.parameters() if p.dtype.itemsize < 4}
    if narrow:
        raise ValueError(
            f"the model's weights are {', '.join(sorted(narrow))}; an engine needs float32 "
            "weights, which it keeps as master weights, and casts them itself"
        )
    arguments = (model, mesh, groups, units, guard)
    common = {
        "offload": offload,
        "num_terms": num_terms,
        "settings": settings or AdamSettings(),
        "options": options or ExpertParallelOptions(),
        "dtype": dtype,
    }
    if resolved == "deepspeed":
        from parallel.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(*arguments, **common)
    return Fsdp2Engine(*arguments, **common)
