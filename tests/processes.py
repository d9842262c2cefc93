"""Training in processes of its own that can be killed and can form a group, without the wait for
imports.

A fork server imports torch and the training code once; each process is a fork of it. What a process
prints goes to a file. Used where a test must end a process by a signal, or needs several of them.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["train", "tests.processes"])


@dataclass
class Group:
    """Processes that were started together; rank i is number i."""

    processes: list[BaseProcess]
    outputs: list[Path]

    def wait(self, timeout_s: float = 120.0) -> list[int]:
        """Exit codes (minus the signal's number after a signal). Ends what hangs, and fails."""
        end = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in hanging:
            self.processes[rank].kill()
            self.processes[rank].join()
        assert not hanging, f"processes {hanging} hang after {timeout_s} s:\n{self.output()}"
        return [process.exitcode for process in self.processes]

    def output(self) -> str:
        """What all have printed so far."""
        return "\n".join(path.read_text(errors="replace") for path in self.outputs if path.exists())

    def signal(self, number: int) -> None:
        """Send a signal to those that still run."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)


def start(target: Callable[..., Any], *arguments: Any, world: int = 1, folder: Path) -> Group:
    """Run `target(*arguments)` in `world` processes with torchrun's variables set, inside
    `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("output-*")))
    variables = {"OMP_NUM_THREADS": "1"}
    if world > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    group = Group([], [])
    for rank in range(world):
        own = variables | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})
        output = folder / f"output-{number + rank}"
        process = _context.Process(target=_run, args=(target, arguments, own, folder, output))
        process.start()
        group.processes.append(process)
        group.outputs.append(output)
    return group


def start_training(arguments: Sequence[str], *, world: int = 1, folder: Path) -> Group:
    """`train.py ARGUMENTS` in `world` processes."""
    return start(_train, list(arguments), world=world, folder=folder)


def _train(arguments: list[str]) -> None:
    import train
    from training import faults

    faults.exit_process(train.main(arguments))


def _run(
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    variables: dict[str, str],
    folder: Path,
    output: Path,
) -> None:
    os.environ.update(variables)
    os.chdir(folder)
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    import torch

    torch.set_num_threads(1)
    # A child of a fork server starts its own children from one too, unlike a program on its own;
    # and reader processes of a killed trainer would then outlive it, as the server is their parent.
    multiprocessing.set_start_method("fork", force=True)
    target(*arguments)
