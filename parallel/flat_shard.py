"""A rank's part of a tensor, as a range of the flattened whole: the form of sharded checkpoints.

A ZeRO-3 partition, a row shard of FSDP2, the experts of one rank and a whole tensor are all ranges
`[start, start + n)` of the same flat logical tensor. Saved as such through
torch.distributed.checkpoint, by whatever layout, they are read back by any other: a rank asks for
its ranges, wherever they were written. Ranges that several ranks hold (replicas) are written once.

A checkpoint of one process holds the same names with whole flat tensors, so it loads into any
layout, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class FlatShard:
    """`local`, elements [start, start + local.numel()) of a flat tensor of `total` elements.

    Saved and loaded with the planners below. It has the size of the whole tensor where
    torch.distributed.checkpoint and the checkpoint code look at sizes; all else is asked of
    `local`.
    """

    local: Tensor
    """One-dimensional, contiguous; a view, so that loading fills what it was made from."""
    start: int
    total: int

    def __post_init__(self) -> None:
        assert self.local.dim() == 1 and self.local.is_contiguous(), self.local.shape
        assert self.start >= 0 and self.start + self.local.numel() <= self.total, (
            f"elements {self.start} to {self.start + self.local.numel()} of {self.total}"
        )

    def size(self) -> torch.Size:
        return torch.Size([self.total])

    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.total

    @property
    def stop(self) -> int:
        return self.start + self.local.numel()

    def with_local(self, local: Tensor) -> FlatShard:
        """The same range with other memory, as for a copy on the host."""
        assert local.shape == self.local.shape, f"{local.shape} for {self.local.shape}"
        return FlatShard(local, self.start, self.total)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return self.local.nbytes

    # --- what torch.distributed.checkpoint asks of an object (planner_helpers.py) -----------------

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            offsets=torch.Size([self.start]), sizes=torch.Size([self.local.numel()])
        )

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        if self.local.numel() == 0:
            return []
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self.local),
            size=self.size(),
        )
        index = MetadataIndex(name, torch.Size([self.start]))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.local.numel() else []


class ShardSavePlanner(DefaultSavePlanner):
    """torch's planner, which also writes `FlatShard`s; it refuses holes and overlaps."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = self.state_dict[index.fqn]
        return entry.local if isinstance(entry, FlatShard) else super().lookup_object(index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """torch's planner, which also fills `FlatShard`s."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        # torch looks for meta tensors first, and replaces what it does not know by None.
        shards = {k: entry for k, entry in state_dict.items() if isinstance(entry, FlatShard)}
        others = {k: entry for k, entry in state_dict.items() if k not in shards}
        super().set_up_planner(others, metadata, is_coordinator)
        self.state_dict = self.state_dict | shards

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        entry = self.state_dict[index.fqn]
        return entry.local if isinstance(entry, FlatShard) else super().lookup_tensor(index)


def local_of(value: Tensor | FlatShard) -> Tensor:
    """The memory behind an entry of a state dict."""
    return value.local if isinstance(value, FlatShard) else value


def with_local(value: Tensor | FlatShard, local: Tensor) -> Tensor | FlatShard:
    """The same entry with other memory: what a copy to the host puts in its place."""
    return value.with_local(local) if isinstance(value, FlatShard) else local


def read_range(value: Tensor | FlatShard, start: int, stop: int, device: torch.device) -> Tensor:
    """Elements [start, stop) of the whole flat tensor, a copy on `device`, on every rank the same
    bits. Where it is sharded all ranks call it alike."""
    if not isinstance(value, FlatShard):
        return value.view(-1)[start:stop].to(device, copy=True)
    found = torch.full((stop - start,), -torch.inf, dtype=value.local.dtype, device=device)
    first, last = max(start, value.start), min(stop, value.stop)
    if first < last:
        found[first - start : last - start] = value.local[first - value.start : last - value.start]
    dist.all_reduce(found, dist.ReduceOp.MAX)  # of replicas too, which a sum would count twice
    return found


def write_range(value: Tensor | FlatShard, start: int, elements: Tensor) -> None:
    """Set what is held here of the elements from `start` on."""
    whole = not isinstance(value, FlatShard)
    local, offset = (value.view(-1), 0) if whole else (value.local, value.start)
    first, last = max(start, offset), min(start + elements.numel(), offset + local.numel())
    if first < last:
        local[first - offset : last - offset] = elements[first - start : last - start]


def assemble(shards: Iterable[FlatShard]) -> Tensor:
    """The whole flat tensor, on the CPU, from the shards of all ranks; replicas may be among them.

    Raises:
        ValueError: shards of different tensors, or elements that no shard holds.
    """
    shards = sorted(shards, key=lambda shard: (shard.start, -shard.stop))
    totals = {shard.total for shard in shards}
    if len(totals) != 1:
        raise ValueError(f"shards of tensors of {sorted(totals)} elements cannot be one tensor")
    whole = torch.empty(shards[0].total, dtype=shards[0].local.dtype)
    stop = 0
    for shard in shards:
        if shard.local.numel() == 0:
            continue
        if shard.start > stop:
            raise ValueError(f"no shard holds elements {stop} to {shard.start} of {shard.total}")
        whole[shard.start : shard.stop] = shard.local.cpu()
        stop = max(stop, shard.stop)
    if stop < shards[0].total:
        raise ValueError(
            f"no shard holds elements {stop} to {shards[0].total} of {shards[0].total}"
        )
    return whole
