"""A rank's part of a tensor, as a range of the flattened whole: the form of sharded checkpoints.

A ZeRO-3 partition, a row shard of FSDP2, the experts of one rank and a whole tensor are all ranges
`[start, start + n)` of the same flat logical tensor. Saved as such through
torch.distributed.checkpoint, by whatever layout, they are read back by any other: a rank asks for
its ranges, wherever they were written. Ranges that several ranks hold (replicas) are written once.

A checkpoint of one process holds the same names with whole flat tensors, so it loads into any
layout, and the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class FlatShard:
    """`local`, elements [start, start + local.numel()) of a flat tensor of `total` elements.

    Quacks like a 1-D tensor of `total` elements where torch.distributed.checkpoint and the
    checkpoint code look at sizes; everything else is asked of `local`.
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

    # --- what torch.distributed.checkpoint asks of an object (planner_helpers.py, utils.py) -------

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

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local
