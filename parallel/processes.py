"""Run a function on several processes of this machine: for checks, benchmarks and tests.

Training does not use it: torchrun starts its processes.

Processes are forked from one server that has imported torch already, as importing it costs each of
them seconds. The function must be importable by name; arguments and results are pickled. A process
that raises, dies or does not answer in time ends the others; stacks are shown.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.world import own_queues

_PRELOAD = ["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "moe", "parallel"]


class RankError(RuntimeError):
    """A process raised, died or did not answer."""


def run_processes(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    device_type: str = "cpu",
    timeout_s: float = 600.0,
) -> list[Any]:
    """`function(*args)` on `world` processes that form the default process group.

    Args:
        device_type: "cpu" (gloo) or "cuda" (NCCL, process i on device i).
        timeout_s: for everything together.

    Returns:
        The results, by rank.

    Raises:
        RankError: a process raised (with its traceback), died, or did not end within `timeout_s`
            (with the stacks of all that did not).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        receivers: list[Connection] = []
        processes = []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(rank, world, folder, device_type, timeout_s, sender, function, args),
                daemon=True,
            )
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            return _collect(receivers, Path(folder), time.monotonic() + timeout_s + 15)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(receivers: list[Connection], folder: Path, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = {c: rank for rank, c in enumerate(receivers) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = "\n".join(
                f"--- rank {rank}\n{(folder / f'stack_{rank}').read_text()}"
                for rank in waiting.values()
                if (folder / f"stack_{rank}").exists()
            )
            raise RankError(f"ranks {sorted(waiting.values())} did not answer in time\n{stacks}")
        for connection in ready:
            rank = waiting[connection]
            try:
                good, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not good:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _child(
    rank: int,
    world: int,
    folder: str,
    device_type: str,
    timeout_s: float,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    stacks = open(f"{folder}/stack_{rank}", "w")  # noqa: SIM115 (open until the process ends)
    faulthandler.dump_traceback_later(timeout_s, file=stacks)
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
        }
        device = None
        if device_type == "cuda":
            own_queues()
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=dist.FileStore(f"{folder}/store", world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's clean-up: gloo's threads may still wait for a rank that failed.
    os._exit(0 if answer[0] else 1)
