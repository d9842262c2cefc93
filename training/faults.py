"""How a run ends before its end: requests to stop, exit codes, and errors told in one line.

Exit codes: 0 done; 2 a mistake in the config or the data; 69 another process, a host or a device
was lost (EX_UNAVAILABLE: a restart may help); 75 stopped on request with a checkpoint saved
(EX_TEMPFAIL: the same command resumes); 1 anything else. `torchrun` itself ends with 1 whenever one
of its processes ends with anything but 0; the launchers in scripts/launch/ end with the run's.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from models.errors import UserError
from parallel import ParallelError
from parallel.exchange.transport import ExchangeError
from training.checkpoint.files import CheckpointError
from training.config.load import ConfigError
from training.device import no_memory
from training.report.files import DISK_FULL
from training.report.trackers import TrackerThread

DONE = 0
FAILED = 1
USER_ERROR = 2
LOST = 69
STOPPED = 75

# A launcher passes a signal on to processes that have got it from elsewhere too, as from Slurm or a
# terminal, so within this time a second signal is taken for the same request.
SAME_REQUEST_S = 3.0

STARTED = time.monotonic()
"""When this program began."""

# How long a run of several processes that ends early waits for a save that is under way.
PATIENCE_S = 20.0


# Told in one line. Any other ValueError comes from a fault of the program or of a library.
USER_ERRORS = (UserError, ParallelError)
# Scripts have no run to lose: what they cannot read or write is the user's to mend.
SCRIPT_ERRORS = (*USER_ERRORS, CheckpointError, OSError)


class RunFailed(RuntimeError):
    """The run cannot go on; the message is one line for the user, without a traceback."""


class StopRequest:
    """SIGTERM or SIGINT as a flag, inside a `with` block: the step is finished and saved, then the
    run ends with 75. So does the end of the time that the run may take.

    A second signal ends the process at once with 128 + the signal's number, as shells do.
    """

    def __init__(self, after_hours: float | None = None) -> None:
        """
        Args:
            after_hours: from the start of this program; None: no end.
        """
        self.received: str | None = None
        self._end = None if after_hours is None else STARTED + 3600 * after_hours
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = signal.Signals(number).name, now
            return
        if "TORCHELASTIC_RUN_ID" in os.environ and now - self._at < SAME_REQUEST_S:
            return
        # No clean-up at all: whoever asks twice does not want to wait. A checkpoint that is being
        # written stays a .tmp folder, which is never loaded.
        os._exit(128 + number)

    def __bool__(self) -> bool:
        return self.received is not None or (self._end is not None and time.monotonic() > self._end)


def failed_collective(error: BaseException, timeout_s: float) -> str | None:
    """In one line, who waited for whom in which operation; None if that is not what went wrong.

    PyTorch's own messages name neither. The project's exchanges say it (`ExchangeError`); an error
    of any other was raised inside `torch.distributed`, as its last frame of Python shows: gloo's
    errors have no type of their own.
    """
    if not dist.is_initialized():
        if not isinstance(error, (ExchangeError, dist.DistError)):
            return None
        return f"the processes did not find one another: {error}; the same command tries again"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ExchangeError):
            operation, group = cause.operation, cause.group
            break
        place = _in_torch_distributed(cause)
        if place is not None:
            operation, group = place
            break
        cause = cause.__cause__
    else:
        return None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    reason = " ".join(str(cause).split())[:200]
    return (
        f"process {dist.get_rank()} on host {socket.gethostname()}: {operation} over processes "
        f"{', '.join(map(str, ranks))} failed: {reason}. One of them is gone, cut off, or did not "
        f"come within parallel.timeout_s={timeout_s:g}; the same command resumes from the last "
        "checkpoint"
    )


def _in_torch_distributed(error: BaseException) -> tuple[str, dist.ProcessGroup | None] | None:
    """The operation in which `torch.distributed` raised the error, and its group where known."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or not isinstance(error, (RuntimeError, dist.DistError)):
        return None
    ours = [vars(dist.distributed_c10d) is frame.f_globals for frame in frames]
    package = frames[-1].f_globals.get("__name__", "")
    if not isinstance(error, dist.DistError) and not package.startswith(f"{dist.__name__}."):
        return None
    if not any(ours):  # an engine that waits for what it has started
        return "an exchange of weights or gradients", None
    frame = frames[ours.index(True)]
    group = frame.f_locals.get("group")
    if not isinstance(group, dist.ProcessGroup):
        group = None
    # Decorators of torch's own come first; the function itself knows its name.
    names = [f.f_code.co_name for f, own in zip(frames, ours) if own]
    return names[-1], group


def report(error: Exception, rank: int, timeout_s: float, training: bool) -> int:
    """Say what ended a run, in one line where that says all, else with the traceback of a fault in
    the program; the exit code.

    Args:
        rank: of this process. All read the same config, so only the first tells of a mistake in it.
        training: the error came up after the start, where one in the data is this process's own.
    """
    if isinstance(error, USER_ERRORS):
        return report_error(rank, error, USER_ERROR, everywhere=training)
    lost = failed_collective(error, timeout_s)
    if lost is not None:
        return report_error(rank, RunFailed(lost), LOST)
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        error = RunFailed(f"no space to write the run or its data: {error}; free some")
    elif isinstance(error, RuntimeError) and no_memory(error):
        error = RunFailed(
            f"no memory for this model: {error}; lower model.* or train.micro_batch_size"
        )
    if isinstance(error, (RunFailed, CheckpointError)):
        return report_error(rank, error, FAILED)
    traceback.print_exception(error)
    return LOST if training and isinstance(error, torch.AcceleratorError) else FAILED


def report_error(rank: int, error: BaseException, code: int, everywhere: bool = False) -> int:
    """Print an error in one line on the error output; returns the exit code.

    Args:
        everywhere: a mistake in the config too is told by every process, not by the first alone.
    """
    text = " ".join(str(error).split())
    if rank == 0:
        print(f"error: {text}", file=sys.stderr, flush=True)
    elif everywhere or not isinstance(error, ConfigError):
        print(f"error on process {rank}: {text}", file=sys.stderr, flush=True)
    return code


def exit_process(code: int) -> NoReturn:
    """End the program. Processes that failed do not wait for what may never answer."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # a full disk, where the output goes to a file: the code still counts
        os._exit(code)
    stuck = any(isinstance(thread, TrackerThread) for thread in threading.enumerate())
    if stuck or dist.is_initialized():
        os._exit(code)
    sys.exit(code)
