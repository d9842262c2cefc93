"""DeepSpeed's own Adam kernels, compiled by its op builder when they are first asked for.

FusedAdam updates on the GPU, CPUAdam in host memory with the CPU's vector instructions. Both take
their step count as a Python number and know neither a scale of gradients nor a flag that skips, so
`DeepSpeedEngine` divides gradients and skips itself, which reads the flag on the host.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from parallel.world import ParallelError

REMEDY = "or leave parallel.adam=torch"


def _builder(device_type: str) -> Any:
    from deepspeed.ops import op_builder

    return op_builder.FusedAdamBuilder() if device_type == "cuda" else op_builder.CPUAdamBuilder()


def check_adam(device_type: str) -> None:
    """Refuse where DeepSpeed's Adam cannot be built; nothing is built yet.

    Args:
        device_type: where the update runs: "cuda" or "cpu".

    Raises:
        ValueError: what is missing, and the remedy.
    """
    name = {"cuda": "FusedAdam", "cpu": "CPUAdam"}[device_type]
    if device_type == "cuda" and not torch.cuda.is_available():
        return  # planned on another machine than it will run on
    missing = []
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        missing.append("a C++ compiler")
    if not cpp_extension.is_ninja_available():
        missing.append("ninja")
    if device_type == "cuda" and cpp_extension.CUDA_HOME is None:
        missing.append("CUDA's compiler nvcc (set CUDA_HOME)")
    if missing:
        raise ParallelError(
            f"parallel.adam=deepspeed: building {name} needs {' and '.join(missing)}; install "
            f"{'it' if len(missing) == 1 else 'them'}, {REMEDY}"
        )
    try:
        builder = _builder(device_type)
        fits = builder.is_compatible(verbose=False)
        reason = getattr(builder, "error_log", None) or "DeepSpeed calls it incompatible"
    except Exception as error:  # DeepSpeed raises many kinds
        fits, reason = False, error
    if not fits:
        told = " ".join(str(reason).split())
        raise ParallelError(
            f"parallel.adam=deepspeed: {name} cannot be built here: {told}; {REMEDY}"
        )


def make_adam(rows: list[dict[str, Any]], device_type: str, **settings: Any) -> Any:
    """The optimizer over parameter groups `rows`; all ranks call it together.

    One process of each host compiles, the others load what it made: many at once would wait for
    each other's lock, and for ever for that of a build that was killed.

    Raises:
        ValueError: on all ranks, when one of them cannot build or load it.
    """
    error = None
    for turn in (True, False):
        if (int(os.environ.get("LOCAL_RANK", "0")) == 0) == turn:
            error = _load(device_type)
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        first = next((text for text in errors if text is not None), None)
        if first is not None:
            raise ParallelError(first)
    if device_type == "cuda":
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(rows, adam_w_mode=True, **settings)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(rows, adamw_mode=True, **settings)


def _load(device_type: str) -> str | None:
    """Build or load the operator; what went wrong."""
    builder = _builder(device_type)
    # The lock of a build that was killed stays, and torch waits for it without a word.
    lock = Path(cpp_extension._get_build_directory(builder.name, verbose=False)) / "lock"
    if lock.exists():
        return (
            f"parallel.adam=deepspeed: {lock} is there: another process is building, or one was "
            f"killed while it did; wait, or remove the file if none is, {REMEDY}"
        )
    try:
        builder.load(verbose=False)
    except Exception as error:
        text = " ".join(str(error).split())[-300:]
        return f"parallel.adam=deepspeed: {builder.name} could not be built: {text}; {REMEDY}"
    return None
