"""How a run ends before its end: requests to stop, exit codes, and errors told in one line.

Exit codes: 0 done; 2 a mistake in the config or the data; 75 stopped on request with a checkpoint
saved (EX_TEMPFAIL: the same command again goes on); 1 anything else. `torchrun` itself ends with 1
whenever one of its processes ends with anything but 0.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from models.errors import UserError
from parallel import ParallelError
from training.checkpoint import CheckpointError
from training.config_load import ConfigError
from training.logging import DISK_FULL

DONE = 0
FAILED = 1
USER_ERROR = 2
STOPPED = 75

# torchrun passes a signal on to processes that a terminal's Ctrl+C has already reached, so within
# this time a second signal is taken for the same request.
_SAME_REQUEST_S = 3.0

# How long a run of several processes that ends early waits for a save that is under way.
PATIENCE_S = 20.0


# Told in one line. Any other ValueError comes from a fault of the program or of a library.
USER_ERRORS = (UserError, ParallelError)


class RunFailed(RuntimeError):
    """The run cannot go on; the message is one line for the user, without a traceback."""


class StopRequest:
    """SIGTERM or SIGINT as a flag, inside a `with` block: the step is finished and saved, then the
    run ends with 75.

    A second signal ends the process at once with 128 + the signal's number, as shells do.
    """

    def __init__(self) -> None:
        self.received: str | None = None
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
        if "TORCHELASTIC_RUN_ID" in os.environ and now - self._at < _SAME_REQUEST_S:
            return
        # No clean-up at all: whoever asks twice does not want to wait. A checkpoint that is being
        # written stays a .tmp folder, which is never loaded.
        os._exit(128 + number)

    def __bool__(self) -> bool:
        return self.received is not None


def out_of_memory_message(
    error: BaseException,
    *,
    rank: int,
    step: int,
    counts_LE: Tensor | None,
    settings: Sequence[tuple[str, object]],
) -> str:
    """What to say when the device's memory ran out.

    Args:
        counts_LE: int [L, E], tokens per expert and layer of the last micro-batch that this process
        finished. settings: (section.key, present value) of what can be lowered, most effective
        first.
    """
    text = f"out of memory on process {rank} at step {step}: {str(error).splitlines()[0]}"
    if counts_LE is not None:
        counts_LE = counts_LE.float().cpu()
        mean = counts_LE.mean().item()
        worst = counts_LE.max().item()
        layer, expert = divmod(int(counts_LE.argmax()), counts_LE.shape[1])
        ratio = worst / mean if mean else 0.0
        text += (
            f". Tokens per expert of the last micro-batch: max {worst:.0f} (MoE layer {layer}, "
            f"expert {expert}), mean {mean:.0f}, max/mean {ratio:.2f}"
        )
        if ratio > 2:
            text += "; routing is skewed, so a larger router.balance_coef lowers the peak too"
    lower = ", ".join(f"{name} (now {value})" for name, value in settings)
    return f"{text}. To need less memory, lower or change: {lower}"


def no_memory(error: RuntimeError) -> bool:
    """Whether memory ran out; for the host's PyTorch has no error of its own."""
    texts = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in texts)


def at_start(error: Exception) -> Exception | None:
    """An error that ended a start, in one line, where it is one of those a run can meet; None for
    what shows a traceback."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return RunFailed(f"no space to write the run or its data: {error}; free some")
    if isinstance(error, RuntimeError) and no_memory(error):
        return RunFailed(
            f"no memory for this model: {error}; lower model.* or train.micro_batch_size"
        )
    return None


def failed_collective(error: BaseException, timeout_s: float) -> str | None:
    """In one line, who waited for whom in which operation; None if that is not what went wrong.

    Found in the traceback: PyTorch's own messages name neither the operation nor the processes.
    """
    found: tuple[str, Any] | None = None
    file = ""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        file, function = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        group = frame.f_locals.get("group")
        if file.endswith("distributed/distributed_c10d.py") and function != "wrapper":
            if found is None or not found[0].startswith(("all_", "reduce", "broadcast", "barrier")):
                found = (function, group)
        elif "/_fully_shard/" in file:
            gathers = "gather" in function or "unshard" in function
            what = "all_gather of weights" if gathers else "reduce_scatter of gradients"
            found = found or (f"{what} (fsdp2)", None)
        elif file.endswith(("parallel/transport.py", "parallel/pull.py")):
            group = getattr(frame.f_locals.get("self"), "group", None)
            found = ("all_to_all of tokens on their way to experts or back", group)
        trace = trace.tb_next
    inside = "torch/distributed/" in file or file.endswith(("transport.py", "pull.py"))
    if found is None or not inside or not dist.is_initialized():
        return None
    name, group = found
    if not isinstance(group, dist.ProcessGroup):
        group = dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    reason = " ".join(str(error).split())[:200]
    return (
        f"process {dist.get_rank()} on host {socket.gethostname()}: {name} over processes "
        f"{', '.join(map(str, ranks))} failed: {reason}. One of them is gone, cut off, or did not "
        f"come within parallel.timeout_s={timeout_s:g}; the same command goes on from the last "
        "checkpoint"
    )


def tell(rank: int, error: BaseException, code: int) -> int:
    """Print an error in one line on the error output; returns the exit code.

    All processes read the same config, so only the first tells of a mistake in it.
    """
    text = " ".join(str(error).split())
    if rank == 0:
        print(f"error: {text}", file=sys.stderr, flush=True)
    elif not isinstance(error, ConfigError):
        print(f"error on process {rank}: {text}", file=sys.stderr, flush=True)
    return code


def leave(code: int) -> NoReturn:
    """End the program. Processes that failed do not wait for what may never answer."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # a full disk, where the output goes to a file: the code still counts
        os._exit(code)
    stuck = any(thread.name == "wandb" for thread in threading.enumerate())
    if stuck or dist.is_initialized():
        os._exit(code)
    sys.exit(code)
