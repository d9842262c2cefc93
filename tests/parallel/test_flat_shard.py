"""Ranges of flat tensors, alone and through torch.distributed.checkpoint, in one process."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from parallel.flat_shard import (
    FlatShard,
    ShardLoadPlanner,
    ShardSavePlanner,
    assemble,
    local_of,
    with_local,
)


def _save(folder, **entries):
    writer = dcp.FileSystemWriter(folder)
    dcp.save(entries, storage_writer=writer, planner=ShardSavePlanner(), no_dist=True)


def _load(folder, **entries):
    reader = dcp.FileSystemReader(folder)
    dcp.load(entries, storage_reader=reader, planner=ShardLoadPlanner(), no_dist=True)


def test_a_whole_tensor_is_read_by_any_range(tmp_path):
    whole = torch.randn(103)
    _save(tmp_path, weight=whole)
    for start, count in ((0, 103), (0, 1), (7, 50), (102, 1), (50, 0)):
        shard = FlatShard(torch.zeros(count), start, 103)
        _load(tmp_path, weight=shard)
        assert torch.equal(shard.local, whole[start : start + count])


def test_loading_fills_the_memory_that_the_shard_is_a_view_of(tmp_path):
    whole, memory = torch.randn(12), torch.zeros(2, 4)
    _save(tmp_path, weight=whole)
    _load(tmp_path, weight=FlatShard(memory.view(-1), 4, 12))
    assert torch.equal(memory, whole[4:].view(2, 4))


def test_a_range_that_covers_everything_is_a_whole_tensor(tmp_path):
    whole, back = torch.randn(12), torch.zeros(12)
    _save(tmp_path, weight=FlatShard(whole, 0, 12))
    _load(tmp_path, weight=back)
    assert torch.equal(back, whole)
    assert dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["weight"].size == (
        12,
    )


def test_another_size_is_refused(tmp_path):
    _save(tmp_path, weight=torch.randn(12))
    with pytest.raises(CheckpointException, match=r"12.*13"):
        _load(tmp_path, weight=FlatShard(torch.zeros(3), 0, 13))


@pytest.mark.parametrize(("start", "count"), [(-1, 3), (8, 5), (13, 0)])
def test_a_range_must_lie_inside(start, count):
    with pytest.raises(AssertionError, match="of 12"):
        FlatShard(torch.zeros(count), start, 12)


def test_assemble_finds_holes_and_takes_replicas():
    whole = torch.randn(10)
    parts = [(0, 4), (4, 4), (8, 2), (4, 4), (10, 0), (2, 5)]
    shards = [FlatShard(whole[start : start + n].clone(), start, 10) for start, n in parts]
    assert torch.equal(assemble(shards), whole)
    with pytest.raises(ValueError, match="elements 8 to 10 of 10"):
        assemble([shard for shard in shards if shard.start != 8])
    with pytest.raises(ValueError, match="elements 0 to 2 of 10"):
        assemble(shards[1:])
    with pytest.raises(ValueError, match=r"\[10, 11\] elements"):
        assemble([shards[0], FlatShard(torch.zeros(1), 0, 11)])


def test_entries_keep_their_range_with_other_memory():
    shard, tensor = FlatShard(torch.arange(4.0), 2, 9), torch.arange(3.0)
    for entry in (shard, tensor):
        copy = with_local(entry, local_of(entry).clone())
        assert type(copy) is type(entry)
        assert torch.equal(local_of(copy), local_of(entry))
        assert local_of(copy).data_ptr() != local_of(entry).data_ptr()
    assert (with_local(shard, torch.zeros(4)).start, shard.nbytes, shard.numel()) == (2, 16, 9)
