"""Who waited for whom, wherever the code lies that says so."""

from __future__ import annotations

import time
from datetime import timedelta
from types import FunctionType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from parallel.exchange import transport
from parallel.exchange.transport import Collective, RingTransport, Split
from tests.distributed.launch import run
from training.faults import failed_collective

WAIT_S = 1.0


def move(function: FunctionType) -> None:
    """As if its file had another name."""
    function.__code__ = function.__code__.replace(co_filename="/elsewhere/renamed.py")


def tokens(kind: type, group: dist.ProcessGroup) -> None:
    split = Split(np.ones((2, 2), dtype=np.int64), group.rank())
    kind(group).start(torch.zeros(2, 3), split).wait()


def weights(group: dist.ProcessGroup) -> None:
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh=torch.arange(2))
    fully_shard(torch.nn.Linear(4, 4), mesh=mesh)(torch.zeros(1, 4))


OPERATIONS = {
    "all_to_all of tokens": lambda group: tokens(Collective, group),
    "all_to_all of tokens on": lambda group: tokens(RingTransport, group),
    "all_reduce": lambda group: dist.all_reduce(torch.zeros(1), group=group),
    "all_gather": weights,
}


def lose(name: str, moved: bool) -> str | None:
    """What the first process says of an operation to which the second one does not come."""
    group = dist.new_group(timeout=timedelta(seconds=WAIT_S))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(2 * WAIT_S)
        return None
    if moved:
        for function in (Collective.start, RingTransport.start, transport._Flying.wait):
            move(function)
        for function in (dist.all_reduce, dist.all_gather_into_tensor):
            move(function)
            move(function.__wrapped__)
    try:
        OPERATIONS[name](group)
    except Exception as error:
        wrapped = RuntimeError("a save failed")  # as a background save tells of it
        wrapped.__cause__ = error
        told = failed_collective(error, 7.0)
        assert told == failed_collective(wrapped, 7.0)
        return told
    return "nothing failed"


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_d8_a_lost_process_is_told_whatever_files_are_called(name, moved):
    told, _ = run(2, lose, name, moved)
    assert told is not None and f": {name}" in told, told
    assert " over processes 0, 1 failed: " in told and "parallel.timeout_s=7;" in told


def other_errors() -> list[str | None]:
    def bug() -> None:
        torch.zeros(2) @ torch.zeros(3)

    def misuse() -> None:
        dist.all_reduce([1])

    def outer() -> None:  # a collective on the stack, and an error of what it calls
        dist.gather_object(lambda: None, [None] * 2 if dist.get_rank() == 0 else None)

    found = []
    for wrong in (bug, misuse, outer):
        try:
            wrong()
        except Exception as error:
            found.append(failed_collective(error, 7.0))
        else:
            found.append("nothing failed")
    return found


def test_d8_other_errors_are_not_taken_for_a_lost_process():
    assert run(2, other_errors) == [[None] * 3] * 2
