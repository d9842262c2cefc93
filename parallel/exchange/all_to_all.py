"""An exchange of rows in two halves, `issue` and `wait`, with what computes meanwhile in between.

    ticket, exchange = issue(rows, transport, split)
    …                                   # the rows travel
    received = wait(ticket, exchange)

Both are autograd nodes. In backward `wait` sends the gradient off and `issue` collects it, and
whatever was recorded between them in forward runs between them in backward, because autograd takes
the node recorded last first: the overlap mirrors itself. What must hold on all ranks of a group:
the same exchanges in the same order, also with zero rows, and the same inputs that need gradients.

Handles and buffers belong to one call: recomputation by activation checkpointing makes new ones.
(The split of an asynchronous exchange into two autograd nodes follows TorchRec's
`comm_ops`, github.com/meta-pytorch/torchrec.)

Shape letters: R rows sent, Q rows received, D width, G groups of a row that share a scale, T
sources, S slots (token order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.common.autograd import first_order
from moe.kernels.grouped.combine import combine
from parallel.exchange.transport import Pending, Split, Transport

# --- what goes over the wire ----------------------------------------------------------------------


class Plain:
    """Rows as they are."""

    def encode(self, rows: Tensor) -> Tensor:
        return rows.contiguous()

    def decode(self, wire: Tensor) -> Tensor:
        return wire


class Float8:
    """Rows in E4M3 with one float32 scale for each 128 columns; gradients travel unchanged.

    0.516 of bf16's bytes at D=7168 (DeepSeek-V3's dispatch, arXiv 2412.19437). Rounding is treated
    as the identity in backward.
    """

    GROUP = 128
    LARGEST = 448.0  # of float8_e4m3fn

    def encode(self, rows: Tensor) -> Tensor:
        """Bytes to send for rows [R, D]: the quantised values, then the scales."""
        self._width, self._dtype = rows.shape[1], rows.dtype
        groups = -(-self._width // self.GROUP)
        x_RGC = F.pad(rows.float(), (0, groups * self.GROUP - self._width))
        x_RGC = x_RGC.view(rows.shape[0], groups, self.GROUP)
        scale_RG = x_RGC.abs().amax(dim=2).clamp(min=1e-30) / self.LARGEST
        # Division can land a hair above the largest value, which converts to NaN.
        x_RGC = (x_RGC / scale_RG[..., None]).clamp(-self.LARGEST, self.LARGEST)
        q_RD = x_RGC.flatten(1)[:, : self._width].to(torch.float8_e4m3fn).view(torch.uint8)
        scale_RG = scale_RG.clone(
            memory_format=torch.contiguous_format
        )  # a width of 1 has stride 0
        return torch.cat([q_RD, scale_RG.view(torch.uint8)], dim=1)

    def decode(self, wire: Tensor) -> Tensor:
        q_QD = _cut(wire, 0, self._width).view(torch.float8_e4m3fn).float()
        scale_QG = _cut(wire, self._width, None).view(torch.float32)
        scale_QD = scale_QG.repeat_interleave(self.GROUP, dim=1)[:, : self._width]
        return (q_QD * scale_QD).to(self._dtype)


class WithIds:
    """Numbers [R] with gradient (gates) and an int32 id beside each, in one exchange.

    After `wait`, `ids` holds the received ids [Q].
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def encode(self, rows: Tensor) -> Tensor:
        self._dtype = rows.dtype
        parts = (self.ids.to(torch.int32), rows)
        return torch.cat([part[:, None].contiguous().view(torch.uint8) for part in parts], dim=1)

    def decode(self, wire: Tensor) -> Tensor:
        self.ids = _cut(wire, 0, 4).view(torch.int32).view(-1)
        return _cut(wire, 4, None).view(self._dtype).view(-1)


def _cut(wire: Tensor, start: int, stop: int | None) -> Tensor:
    """Columns as a tensor of their own: a view of another dtype needs an aligned first byte."""
    return wire[:, start:stop].clone(memory_format=torch.contiguous_format)


# --- issue and wait -------------------------------------------------------------------------------


@dataclass
class Exchange:
    """One exchange between `issue` and `wait`, and its gradient's."""

    transport: Transport
    split: Split
    codec: Plain | Float8 | WithIds
    forward: Pending | None = None
    backward: Pending | None = None


class _Issue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.forward = exchange.transport.start(exchange.codec.encode(rows), exchange.split)
        # The ticket ties the two nodes together; the rows are in flight and not part of the graph.
        return rows.new_empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, ticket_grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        assert exchange.backward is not None, "issue ran backward before wait"
        grad, exchange.backward = exchange.backward.wait(), None
        return grad, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        ctx.ticket_dtype = ticket.dtype
        assert exchange.forward is not None, "an exchange is waited for once"
        wire, exchange.forward = exchange.forward.wait(), None
        return exchange.codec.decode(wire)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.backward = exchange.transport.start(grad.contiguous(), exchange.split.reversed())
        return grad.new_empty(0, dtype=ctx.ticket_dtype), None


def issue(
    rows: Tensor, transport: Transport, split: Split, codec: Plain | Float8 | WithIds | None = None
) -> tuple[Tensor, Exchange]:
    """Send rows off; returns what `wait` needs.

    Args:
        rows: [R, …], ordered by destination, R = sum(split.send).
        codec: form on the wire; `Plain` by default. Gradients always travel plainly.
    """
    exchange = Exchange(transport, split, codec or Plain())
    return _Issue.apply(rows, exchange), exchange


def wait(ticket: Tensor, exchange: Exchange) -> Tensor:
    """The received rows [Q, …], ordered by source, in the dtype of those sent."""
    return _Wait.apply(ticket, exchange)


# --- rows and their sources -----------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """Which source each row is a copy of, and back: slots per source that point at its rows."""

    source_R: Tensor | None
    """int [R]; None: row r is source r."""
    row_S: Tensor
    """int32 [S] row of a slot, -1 for none; the order of a source's slots is that of its sum."""
    sources: int
    slots_per_source: int | None
    slot_offsets_T1: Tensor | None
    backend: str

    def pick(self, x_TD: Tensor) -> Tensor:
        return x_TD if self.source_R is None else x_TD.index_select(0, self.source_R)

    def sum(self, rows_RD: Tensor) -> Tensor:
        return combine(
            rows_RD,
            None,
            self.row_S,
            num_tokens=self.sources,
            slots_per_token=self.slots_per_source,
            slot_offsets_T1=self.slot_offsets_T1,
            backend=self.backend,
        )


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return copies.pick(x_TD)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.sum(grad_RD.contiguous()), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return copies.sum(rows_RD.contiguous())

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.pick(grad_TD), None


def spread(x_TD: Tensor, copies: Copies) -> Tensor:
    """rows_RD[r] = x_TD[source of r]; the gradient is summed as `collect` sums."""
    return _Spread.apply(x_TD, copies)


def collect(rows_RD: Tensor, copies: Copies) -> Tensor:
    """out_TD[t] = sum of the rows of t, in slot order, in float32, rounded once; 0 without rows."""
    return _Collect.apply(rows_RD, copies)
