"""What the launcher of local processes reports when one of them raises, dies or hangs."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import RankError, run


def _rank_and_sum(start: int) -> tuple[int, float]:
    total = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def test_results_come_by_rank():
    assert run(3, _rank_and_sum, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def _one_raises():
    if dist.get_rank() == 1:
        raise KeyError("a word to find")
    dist.barrier()


def test_an_error_is_told_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*_one_raises.*a word to find"):
        run(2, _one_raises)


def _one_dies():
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60)


def test_a_dead_process_is_told():
    with pytest.raises(RankError, match="rank 1 died without a word"):
        run(2, _one_dies)


def _hangs_here():
    if dist.get_rank() == 0:
        time.sleep(600)


def test_a_hang_is_told_with_the_stack():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)ranks \[0\] did not answer in time.*_hangs_here"):
        run(2, _hangs_here, timeout_s=3)
    assert time.monotonic() - start < 60
