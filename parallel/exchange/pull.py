"""A transport for GPUs of one host: every rank reads its rows out of the peers' memory.

NCCL's all-to-all runs on the SMs and so slows the products that it should hide behind: of an
exchange of 0.26 ms beside an 8192³ bf16 product 0 to 35 % were hidden on two H200s, of one by plain
copies out of the peer's buffer, which run on the copy engine, 86 to 88 %. Pushing hid 0 to 50 %.

The sender packs its rows into a buffer that its peers have mapped and raises its flag at each of
them; who sees a peer's flag copies its part, at offsets that follow from the split. Buffers are
used in turn. A rank may overwrite a buffer two exchanges later: it has then seen all flags of the
exchange in between, which its peers raised only behind their copies of the first.

Flags are written and waited for by the stream itself (cuStreamWriteValue, cuStreamWaitValue), not
by a kernel: a kernel would wait for a free SM, and the persistent products that the exchange should
hide behind leave none.

Nothing here needs CUDA but `SymmetricMemory`; the protocol is tested on a CPU with shared files.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from parallel.exchange.transport import Pending, Split, exchanging

SLOTS = 2
_GRAIN = 1 << 21  # bytes; buffers grow in whole grains


class PeerMemory(Protocol):
    """Equal pieces of memory, one of each rank, that all ranks of a group can read."""

    stream: torch.cuda.Stream | None
    """On which everything below happens; None on a CPU, where it happens at once."""

    def reserve(self, nbytes: int) -> None:
        """Replace the pieces by larger ones; all ranks call it, with the same size."""

    def write(self, rows: Tensor, at: int) -> None:
        """Copy contiguous rows into the own piece, from byte `at` on."""

    def read(self, rank: int, at: int, nbytes: int, rows: Tensor, into: int) -> None:
        """Copy bytes of a rank's piece to byte `into` of contiguous rows."""

    def barrier(self) -> None:
        """Hold back the stream until those of all ranks have come here."""


class SymmetricMemory:
    """Peer memory by torch's symmetric memory (CUDA, GPUs that can map each other's memory)."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # NVLink multicast is not used, and setting it up has taken GPUs out of service.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self.group = group
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._pieces: list[Tensor] = []
        self._handles: list[Any] = []  # hold the mappings
        ranks = group.size()
        self._beside = _can_copy_beside(self.stream)
        # One flag of 32 bits for each rank, the number of the last exchange that it has packed.
        self._flags = self._map(4 * ranks, clear=True)
        self._own = group.rank()
        self._raised = 0

    def _map(self, nbytes: int, clear: bool = False) -> list[Tensor]:
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        if clear:
            own.zero_()
        handle = symmetric.rendezvous(own, self.group)
        self._handles.append(handle)
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group, device_ids=[self.device.index])
        return [
            own if rank == handle.rank else handle.get_buffer(rank, [nbytes], torch.uint8)
            for rank in range(handle.world_size)
        ]

    def reserve(self, nbytes: int) -> None:
        # Peers may still be reading the old piece, and this stream may still be copying.
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group, device_ids=[self.device.index])
        self._pieces, self._handles = [], self._handles[:1]
        self._pieces = self._map(nbytes)

    def write(self, rows: Tensor, at: int) -> None:
        # By the driver: what torch puts around a copy takes a slow host longer than all the rest.
        to, nbytes = self._pieces[self._own].data_ptr() + at, rows.numel() * rows.element_size()
        if nbytes == 0:
            return
        if self._beside:
            _copy_beside(to, rows.data_ptr(), nbytes, self.stream.cuda_stream)
        else:
            _driver("cuMemcpyAsync", to, rows.data_ptr(), nbytes, self.stream.cuda_stream)

    def read(self, rank: int, at: int, nbytes: int, rows: Tensor, into: int) -> None:
        to, of = rows.data_ptr() + into, self._pieces[rank].data_ptr() + at
        _driver("cuMemcpyAsync", to, of, nbytes, self.stream.cuda_stream)

    def barrier(self) -> None:
        self._raised += 1
        stream = self.stream.cuda_stream
        others = [rank for rank in range(len(self._flags)) if rank != self._own]
        for rank in others:  # what this stream has written so far is visible before its flag
            flag = self._flags[rank].data_ptr() + 4 * self._own
            _driver("cuStreamWriteValue32_v2", stream, flag, self._raised, 0)
        for rank in others:
            flag = self._flags[self._own].data_ptr() + 4 * rank
            _driver("cuStreamWaitValue32_v2", stream, flag, self._raised, 0)  # at least that


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA 13."""

    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER, _BESIDE_COMPUTE = 1, 1
_ATTRIBUTES = _CopyAttributes(access_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)


def _copy_beside(to: int, of: int, nbytes: int, stream: int) -> None:
    """A copy within the GPU that leaves the SMs to products: they would have to wait for it.

    A plain one runs on the SMs, and a product that wants all of them begins only when it ends
    (34 µs for 64 MB on an H200). CUDA 13 can be asked to use a copy engine.
    """
    _driver(
        "cuMemcpyBatchAsync_v2",
        (ctypes.c_uint64 * 1)(to), (ctypes.c_uint64 * 1)(of), (ctypes.c_size_t * 1)(nbytes), 1,
        ctypes.byref(_ATTRIBUTES), (ctypes.c_size_t * 1)(0), 1, stream,
    )  # fmt: skip


def _can_copy_beside(stream: torch.cuda.Stream) -> bool:
    """Whether this driver has such copies: older ones have not."""
    one = torch.zeros(2, dtype=torch.int32, device=stream.device)
    torch.cuda.synchronize(stream.device)
    try:
        _copy_beside(one.data_ptr(), one.data_ptr() + 4, 4, stream.cuda_stream)
    except (AttributeError, RuntimeError):
        return False
    torch.cuda.synchronize(stream.device)
    return True


_P, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_VALUE = (_P, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
_ARGUMENTS = {
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, _SIZE, _P),
    "cuMemcpyBatchAsync_v2": (_P, _P, _P, _SIZE, _P, _P, _SIZE, _P),
    "cuStreamWriteValue32_v2": _VALUE,
    "cuStreamWaitValue32_v2": _VALUE,
}


@cache
def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = _ARGUMENTS[name]
    return function


def _driver(name: str, *arguments: Any) -> None:
    error = _function(name)(*arguments)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error}")


class Pull:
    """Transport over `PeerMemory` of the processes of `group`."""

    def __init__(self, memory: PeerMemory, group: dist.ProcessGroup | None = None) -> None:
        self.memory = memory
        self.group = group
        self.capacity = 0  # bytes of one slot
        self.count = 0

    def start(self, rows: Tensor, split: Split) -> Pending:
        memory = self.memory
        received = rows.new_empty(split.received, *rows.shape[1:])
        width = rows.element_size() * rows.shape[1:].numel()
        if split.most * width > self.capacity or not self.capacity:  # the same on all ranks
            self.capacity = max(1, -(-split.most * width * 5 // 4 // _GRAIN)) * _GRAIN
            with exchanging(self.group):
                memory.reserve(SLOTS * self.capacity)
        base = self.count % SLOTS * self.capacity
        self.count += 1
        if memory.stream is not None:
            memory.stream.wait_event(torch.cuda.current_stream(rows.device).record_event())
        memory.write(rows, base)
        memory.barrier()
        for source, at, count, into in split.reads:
            memory.read(source, base + at * width, count * width, received, into * width)
        event = None if memory.stream is None else memory.stream.record_event()
        return _Pulling(received, rows, event)


class _Pulling:
    def __init__(self, received: Tensor, sent: Tensor, event: torch.cuda.Event | None) -> None:
        self.received, self.sent, self.event = received, sent, event

    def wait(self) -> Tensor:
        if self.event is not None:
            torch.cuda.current_stream(self.received.device).wait_event(self.event)
        # Only now may the allocator give these to work of the current stream.
        self.sent = None
        return self.received
