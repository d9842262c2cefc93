"""Joining the other processes; sums and agreements between all of them.

One process needs none of this and starts no process group; `World` then describes a world of one,
and every function below does nothing. So the training code has a single path.

Three process groups, each with one job:

- `data`: metrics and loads of experts, on the device (NCCL on CUDA, gloo on a CPU).
- `control`: a few integers a step over gloo, in host memory. It carries the number of targets (the
  divisor of the loss) and whether any process was asked to stop. Host memory, because reading a
  device tensor back each step would stall the GPU's queue.
- `checkpoint`: gloo; saving in the background must not share a group with the training thread (the
  two threads' collectives would pair up wrongly).
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from parallel.exchange.transport import ExchangeError

# Until all processes are there: hosts may take very unequal times to start Python and import.
JOIN_S = 300.0


class ParallelError(ValueError):
    """A setting of `parallel`, or a way of starting processes, that cannot work here; one line for
    the user. Other ValueErrors of this package are faults of the program."""


@dataclass(frozen=True)
class World:
    """This process among all. `size` 1 means no process group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    checkpoint: dist.ProcessGroup | None = None

    @property
    def main(self) -> bool:
        """Whether this process writes logs and files that exist once."""
        return self.rank == 0


def _launched(name: str, otherwise: int | None, environ: Mapping[str, str]) -> int:
    """A number that a launcher sets in the environment."""
    value = environ.get(name, otherwise)
    if not re.fullmatch("[0-9]+", str(value)):
        told = f"{name}={value!r} is no whole number"
        if value is None:
            told = f"{name} is not set, but WORLD_SIZE={environ['WORLD_SIZE']} is"
        raise ParallelError(f"environment: {told}; start several processes with torchrun")
    return int(value)


def launched_rank(environ: Mapping[str, str] | None = None) -> int:
    """This process among those that a launcher started, before any group exists."""
    environ = os.environ if environ is None else environ
    return _launched("RANK", 0 if launched_size(environ) == 1 else None, environ)


def launched_size(environ: Mapping[str, str] | None = None) -> int:
    """Number of processes that torchrun (or a like launcher) started, before any group exists."""
    return max(1, _launched("WORLD_SIZE", 1, os.environ if environ is None else environ))


def launched_hosts(environ: Mapping[str, str] | None = None) -> int:
    """Number of hosts that torchrun (or a like launcher) started processes on.

    Raises:
        ValueError: not equally many processes on every host.
    """
    environ = os.environ if environ is None else environ
    size = launched_size(environ)
    local = max(1, _launched("LOCAL_WORLD_SIZE", size, environ))
    if size % local:
        raise ParallelError(
            f"{size} processes with {local} on this host: every host must run equally many"
        )
    return size // local


def start(device_type: str, timeout_s: float = 600.0, *, alone: bool = False) -> World:
    """Join the other processes, if a launcher started any.

    Args:
        device_type: "cuda" or "cpu"; gradients travel over NCCL or gloo.
        timeout_s: a collective that waits longer ends the process with an error instead of hanging.
        alone: make the groups of one process too, which an engine needs.

    Raises:
        ValueError: more processes on this host than CUDA devices.
    """
    size = launched_size()
    if size == 1 and not alone:
        return World()
    local_rank = _launched("LOCAL_RANK", launched_rank(), os.environ)
    local_size = _launched("LOCAL_WORLD_SIZE", size, os.environ)
    device = None
    if device_type == "cuda":
        own_queues()
        if local_rank >= torch.cuda.device_count():
            raise ParallelError(
                f"--nproc-per-node={local_size} is more than this host's CUDA devices "
                f"({torch.cuda.device_count()}); start at most one process for each"
            )
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    rank, store = 0, dist.HashStore()
    if size > 1:
        shared, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))
        store = _fresh(shared, rank, size, JOIN_S)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )
    return joined(timeout_s)


def own_queues() -> None:
    """Give CUDA streams hardware queues of their own; before the first use of CUDA.

    Of the default 8 queues two streams may share one, and then work behind a stream that waits for
    another GPU (`parallel.exchange.pull`) would wait with it.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def _fresh(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """A part of the store that no earlier attempt has written to.

    torchrun keeps its store over restarts, and the addresses in it that a killed attempt has left
    would be taken for those of this one (github.com/pytorch/pytorch/issues/135712, 167288). Its own
    count of restarts differs between hosts. So the first process draws a name and tells it to each
    of the others in answer to a number that this one has just drawn.

    Raises:
        ExchangeError: on the first process, with the processes that did not come in time.
    """
    if rank:
        number = uuid.uuid4().hex
        store.set(f"tessera/asks/{rank}", number)
        name = store.get(f"tessera/answer/{number}").decode()
        store.set(f"{name}/heard/{rank}", "")
        return dist.PrefixStore(name, store)
    name, missing, answered = uuid.uuid4().hex, set(range(1, size)), set()
    end = time.monotonic() + timeout_s
    while missing:
        for other in sorted(missing):
            if store.check([f"{name}/heard/{other}"]):
                missing.discard(other)
            elif store.check([f"tessera/asks/{other}"]):
                number = store.get(f"tessera/asks/{other}").decode()
                if number not in answered:  # perhaps of a process that is gone: then it asks anew
                    store.set(f"tessera/answer/{number}", name)
                    answered.add(number)
        if missing and time.monotonic() > end:
            raise ExchangeError(
                "joining",
                None,
                f"processes {', '.join(map(str, sorted(missing)))} of {size} did not join within "
                f"{timeout_s:g} s",
            )
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def joined(timeout_s: float = 600.0) -> World:
    """This process among those of the default process group, which exists; all of them call it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    timeout = timedelta(seconds=timeout_s)
    return World(
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        data=dist.group.WORLD,
        control=dist.new_group(backend="gloo", timeout=timeout, group_desc="tessera_control"),
        checkpoint=dist.new_group(backend="gloo", timeout=timeout, group_desc="tessera_checkpoint"),
    )


def shutdown(world: World) -> None:
    """Leave the process groups together. Not after a failure: the others may never answer, and the
    launcher ends them when this process exits."""
    if not dist.is_initialized() or world.control is None:
        return
    dist.barrier(group=world.control)
    dist.destroy_process_group()


# --- collectives --------------------------------------------------------------------------------

# The older name warns from torch 2.13 on; the newer is not in torch 2.10.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sum_(world: World, tensor: Tensor) -> Tensor:
    """`tensor` replaced by its sum over all processes, on its device, without a host sync."""
    if world.size > 1:
        dist.all_reduce(tensor, group=world.data)
    return tensor


def broadcast_(world: World, tensor: Tensor) -> Tensor:
    """`tensor` replaced by the first process's, on its device."""
    if world.size > 1:
        dist.broadcast(tensor, src=0, group=world.data)
    return tensor


def agree(world: World, values: Sequence[int]) -> list[int]:
    """Exact sums of whole numbers over all processes, in host memory, the same everywhere."""
    if world.size == 1:
        return list(values)
    sums = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(sums, group=world.control)
    return sums.tolist()


def from_main(world: World, value: Any) -> Any:
    """A picklable value of the first process, on all; what the others pass is ignored."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=world.control)
    return box[0]


def gather(world: World, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every process's picklable value, by rank, on all processes."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=group or world.control)
    return values


def barrier(world: World) -> None:
    """Wait until every process is here."""
    if world.size > 1:
        dist.barrier(group=world.control)


# --- checks -------------------------------------------------------------------------------------


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """A number that (but for collisions) only equal bits in equal order give; one read-back."""
    total = 0
    sums: list[Tensor] = []
    words_of = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for tensor in tensors:
        words = tensor.detach().reshape(-1).view(words_of[tensor.element_size()])
        for piece in words.split(1 << 24):  # the int64 copies below stay small
            # Weights by place, so that swapped elements are seen; int64 wraps, as is well defined.
            place = torch.arange(piece.numel(), device=piece.device) + (total + 1)
            sums.append((piece.to(torch.int64) * (place * 2654435761 + 1)).sum())
            total += piece.numel()
    return int(torch.stack(sums).sum().item()) if sums else 0
