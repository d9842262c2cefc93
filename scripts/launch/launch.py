#!/usr/bin/env python3
"""Start the processes of one host by PyTorch's elastic agent; the three launchers run it.

    python scripts/launch/launch.py --processes 8 -- configs/olmoe_1b_7b.yaml train.steps=100

`torchrun` runs the same agent. What differs, and why:

- The exit code is the run's (`training/faults.py`); torchrun's is 1 whatever happened.
- Only a killed process, or a lost process, host or device, starts them again, at most `--restarts`
  times. A mistake in the config, a stop on request or a run that failed would end as before.
- A stop (SIGTERM, Ctrl+C) is passed on, and the processes save for as long as they need; torchrun
  kills them after 30 s. A second one ends them at once.
- What ended the run is told in one line, by the run or here; torchrun adds a traceback of its own.

With several hosts their agents meet at `--first` and start again together. A host whose processes
ended for good closes the meeting, and so ends the others too.

With `--hosts 1:4` a run begins, and goes on, with as many of the four hosts as are there. A host
that is lost takes it to the last checkpoint on those that are left; one that comes (back) has the
others save and start again with it. `--first` must stay: the hosts find each other there.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
# Before torch is imported: the C++ side warns of every connection that a dead process leaves.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousHandler

from training import faults

# How long the others may take to end by themselves once one process has: each then tells what it
# was waiting for, and its exit code is its own and not that of the agent's SIGTERM.
SETTLE_S = 3.0
# After which an agent sees a host that has come: it asks for the list of those once a second.
SEEN_S = 3.0


def say(text: str) -> None:
    """A line on the error output."""
    print(text, file=sys.stderr, flush=True)


class Agent(LocalElasticAgent):
    """Starts the processes of this host, and starts them again where that can help."""

    def __init__(self, spec: WorkerSpec, elastic: bool = False) -> None:
        super().__init__(spec, DefaultLogsSpecs())
        self.elastic = elastic
        """Whether hosts may come and go."""
        self.stopping: int | None = None
        """The signal that asked for a stop."""
        self.code = faults.DONE
        """Exit code of the run as far as this host knows."""
        self.starting = threading.Lock()
        """Held while processes are started."""
        self.waiting = True
        """For other hosts, without processes."""

    def signal(self, number: int) -> None:
        """Send a signal to the processes that run."""
        if self._pcontext is None:
            return
        for pid in self._pcontext.pids().values():
            if _exit_code(pid) is None:
                os.kill(pid, number)

    # The two methods that agents are made of, as PyTorch documents them for subclasses.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        with self.starting:
            self.waiting, self.code = False, faults.DONE
            pids = super()._start_workers(worker_group)
        if self.stopping is not None:  # asked while they were being started
            self.signal(signal.SIGTERM)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._codes(worker_group)
        if not any(codes.values()) and len(codes) < len(worker_group.workers):
            return RunResult(state=WorkerState.HEALTHY)
        if any(codes.values()):  # the agent would end the others now
            end = time.monotonic() + SETTLE_S
            while len(codes) < len(worker_group.workers) and time.monotonic() < end:
                time.sleep(0.05)
                codes = self._codes(worker_group)
            if set(codes.values()) == {faults.STOPPED} and self._host_has_come():
                return RunResult(state=WorkerState.HEALTHY)
            self._decide(codes)
            self.waiting = self._remaining_restarts > 0
        return super()._monitor_workers(worker_group)

    def _host_has_come(self) -> bool:
        """Whether processes that stopped were asked to by a host that saw another one come."""
        end = time.monotonic() + (SEEN_S if self.elastic and self.stopping is None else 0.0)
        while time.monotonic() < end:
            if self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0:
                return True
            time.sleep(0.1)
        return False

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:  # nothing failed: a host has come
            say("launch: another host has come; saving, and starting again with it")
            self.signal(signal.SIGTERM)
            while len(self._codes(worker_group)) < len(worker_group.workers):
                time.sleep(0.05)  # a save may take minutes; one that hangs ends by its timeout
            self.waiting = True
        super()._restart_workers(worker_group)

    def _codes(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Exit codes by rank of the processes that have ended; minus the signal's number after a
        signal."""
        pids = self._pcontext.pids() if self._pcontext is not None else {}
        ended = {
            worker.global_rank: _exit_code(pids[worker.local_rank])
            for worker in worker_group.workers
            if worker.local_rank in pids
        }
        return {rank: code for rank, code in ended.items() if code is not None}

    def _decide(self, codes: dict[int, int]) -> None:
        """The run's exit code, and whether the processes start again."""
        killed = [(rank, -code) for rank, code in codes.items() if code < 0]
        if killed:  # the others fail because of it, in many ways, which are not the cause
            rank, number = killed[0]
            self.code = 128 + number
            who = f"process {rank} was killed by {signal.Signals(number).name}"
        else:
            self.code = min(code for code in codes.values() if code > 0)
            who = "a process, a host or a device was lost"
        most = self._worker_group.spec.max_restarts
        if self.stopping is not None:
            self._remaining_restarts = 0
            if killed:
                self.code = 128 + self.stopping
                say("launch: stopped before the run could save")
        elif not killed and self.code != faults.LOST:
            self._remaining_restarts = 0
        elif self._remaining_restarts > 0:
            number = most - self._remaining_restarts + 1
            say(f"launch: {who}; starting from the last checkpoint (restart {number} of {most})")
        else:
            say(f"error: {who}, and no restart is left; the same command resumes the run")


def _exit_code(pid: int) -> int | None:
    """Exit code of a child that has ended, which stays for others to read; None while it runs."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # read already
        return 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def hosts(text: str) -> tuple[int, int]:
    """Of argparse: "4", or "1:4" for any number from 1 to 4."""
    least, _, most = text.partition(":")
    least, most = int(least), int(most or least)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts, or MIN:MAX of them")
    return least, most


def is_first(host: str, port: int) -> bool:
    """Whether this host has the address at which all meet.

    Raises:
        OSError: it has, and the port is taken; or the name is not known.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False
            raise
    return True


def own_address(host: str, port: int) -> str | None:
    """The address of this host on its way to another; None if that is not seen from outside.

    A host's name, which agents tell each other otherwise, may mean another address elsewhere.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # chooses a route; sends nothing
        own = probe.getsockname()[0]
    return None if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own


def make_agent(given: argparse.Namespace) -> tuple[Agent, RendezvousHandler]:
    """The agent of this host, and what it meets other hosts by.

    Raises:
        OSError: see `is_first`.
        RendezvousError: the first host does not answer.
    """
    if given.hosts[0] < given.hosts[1]:
        # Agents that share their store with the processes keep its address from one meeting to the
        # next, and a host that comes later would never learn it.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    meeting, address = {"is_host": True}, "localhost"
    if given.hosts[1] > 1:
        host, _, port = given.first.rpartition(":")
        meeting = {"is_host": is_first(host, int(port)), "join_timeout": given.join_s}
        address = own_address(host, int(port))
    handler = registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=given.first,
            run_id=given.id,
            min_nodes=given.hosts[0],
            max_nodes=given.hosts[1],
            last_call_timeout=given.late_s,
            local_addr=address,
            **meeting,
        )
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=given.processes,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=("-u", str(given.script), *given.words),
        max_restarts=given.restarts,
        local_addr=address,
    )
    return Agent(spec, elastic=given.hosts[0] < given.hosts[1]), handler


def run(given: argparse.Namespace) -> int:
    """Start the processes and wait for their end; the exit code."""
    host, _, port = given.first.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        say(f"error: hosts cannot meet at {given.first}: it must be ADDRESS:PORT, PORT a number")
        return faults.USER_ERROR
    try:
        agent, handler = make_agent(given)
    except OSError as error:
        reason = f"{error.strerror}; give another address or port"
        say(f"error: hosts cannot meet at {given.first}: {reason}")
        return faults.USER_ERROR
    except RendezvousError as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        say(f"error: hosts cannot meet at {given.first}: {reason}")
        return faults.LOST
    problem: list[BaseException] = []

    def work() -> None:
        try:
            agent.run()
        except BaseException as error:
            problem.append(error)

    # Not in the main thread, where the agent would take the signals.
    thread = threading.Thread(target=work)
    asked_at = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if agent.stopping is None:
            agent.stopping, asked_at = number, now
            agent.signal(signal.SIGTERM)
        elif now - asked_at > faults.SAME_REQUEST_S:
            agent.signal(signal.SIGKILL)
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    if given.pid_file is not None:
        given.pid_file.write_text(str(os.getpid()))
    thread.start()
    while thread.is_alive():
        thread.join(0.2)  # in pieces, so that signals are handled in between
        with agent.starting:
            if agent.stopping is not None and agent.waiting and thread.is_alive():
                say("launch: stopped while waiting for the other hosts")
                os._exit(128 + agent.stopping)
    if problem and isinstance(problem[0], RendezvousError):
        # The other hosts are gone, or have ended for good.
        say(f"error: the other hosts did not come ({type(problem[0]).__name__}); the run has ended")
        return faults.LOST
    if problem:
        raise problem[0]
    handler.shutdown()  # other hosts that wait for this one end now
    return agent.code


def main(arguments: list[str]) -> int:
    """Parse the command line and run; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, required=True, help="of this host")
    parser.add_argument(
        "--hosts", type=hosts, default=(1, 1), help="that run this command (1), or MIN:MAX of them"
    )
    parser.add_argument("--first", default="localhost:0", help="ADDRESS:PORT of the first host")
    parser.add_argument(
        "--id", default=uuid.uuid4().hex, help="name of the run, equal on all hosts"
    )
    parser.add_argument("--restarts", type=int, default=3, help="at most (3)")
    parser.add_argument("--join-s", type=int, default=600, help="wait for other hosts (600)")
    parser.add_argument(
        "--late-s", type=int, default=30, help="wait for hosts beyond MIN that may still come (30)"
    )
    parser.add_argument("--pid-file", type=Path, help="where to write this process's id")
    parser.add_argument("--script", type=Path, default=ROOT / "train.py", help=argparse.SUPPRESS)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given = parser.parse_args(arguments[:cut])
    given.words = arguments[cut + 1 :]
    # What the agent logs repeats what is told in one line, or tells it of what is as it should be.
    logging.disable(logging.CRITICAL)
    if given.processes > 1:  # as torchrun does; otherwise each would take all cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
