"""Two gloo processes against one: collectives, gradients, losses, validation, checkpoints."""

from __future__ import annotations

import pytest
import torch

from parallel import World, agree, barrier, broadcast_, from_main, gather, sum_
from parallel.world import fingerprint, launched_hosts, launched_rank, launched_size
from tests import processes
from tests.distributed import checks


def test_two_processes_agree_with_one(tmp_path):
    """All checks of checks.py in one start of two processes."""
    group = processes.start(checks.run_all, tmp_path, world=2, folder=tmp_path / "work")
    codes = group.wait(150)
    assert codes == [0, 0] and group.output().count("all checks passed") == 2, group.output()


def test_one_process_needs_no_group():
    world = World()
    tensor = torch.ones(3)
    assert sum_(world, tensor) is tensor and tensor.tolist() == [1, 1, 1]
    assert agree(world, [1, 2]) == [1, 2] and from_main(world, "x") == "x"
    assert gather(world, 5) == [5] and world.main
    barrier(world)
    assert broadcast_(world, tensor) is tensor


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set, but WORLD_SIZE=2 is"),
        ({"WORLD_SIZE": "2", "RANK": "abc"}, "RANK='abc' is no whole number"),
        ({"WORLD_SIZE": "abc", "RANK": "0"}, "WORLD_SIZE='abc' is no whole number"),
    ],
)
def test_what_a_launcher_should_have_set_is_told_by_name(environ, message):
    with pytest.raises(ValueError, match=message):
        launched_rank(environ)


def test_launched_size():
    assert launched_rank({}) == 0
    assert launched_rank({"WORLD_SIZE": "2", "RANK": "1"}) == 1
    assert launched_size({}) == 1
    assert launched_size({"WORLD_SIZE": "4"}) == 4
    assert launched_hosts({}) == 1
    assert launched_hosts({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}) == 3
    with pytest.raises(ValueError, match="6 processes with 4 on this host"):
        launched_hosts({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_fingerprint_sees_every_element_and_the_order(dtype):
    tensor = torch.arange(50).to(dtype)
    seen = {fingerprint([tensor])}
    for index in range(50):
        changed = tensor.clone()
        changed[index] += 100
        seen.add(fingerprint([changed]))
    swapped = tensor.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    seen.add(fingerprint([swapped]))
    assert len(seen) == 52
    assert fingerprint([tensor.clone()]) == fingerprint([tensor])
    assert fingerprint([tensor[:20], tensor[20:]]) == fingerprint([tensor])
    assert fingerprint([tensor[20:], tensor[:20]]) != fingerprint([tensor])
    assert fingerprint([]) == 0
