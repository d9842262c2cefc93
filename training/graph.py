"""The device's work of a step, captured once as a CUDA graph and replayed (`train.cuda_graph`).

A small model's step is hundreds of launches of a few microseconds each, and the host cannot send
them as fast as the device runs them. A graph sends them all at once. It repeats exactly what was
captured, so whatever changes from step to step must be read from memory:

- tokens, labels, positions and borders of documents are copied into fixed buffers. Borders are
  padded with empty documents at the end to a power of two; each such number has a graph of its own;
- divisors of the loss and learning rates are scalars on the device;
- what changes the computation itself (experts per token, a frozen router) starts over.

The first steps of each form run without a graph, so that kernels are compiled and tuned before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from models.documents import Documents
from moe.control import routers_of

if TYPE_CHECKING:
    from training.data import Batch

# (batches, targets, tokens) → tensors; the last two are scalars on the device.
Work = Callable[["Sequence[Batch]", Tensor, Tensor], Any]
# (work, batches on the device, targets, tokens) → what the work returns.
Launch = Callable[[Work, "Sequence[Batch]", int, int], Any]

FEWEST_DOCUMENTS = 16


def launch_now(work: Work, batches: Sequence[Batch], targets: int, tokens: int) -> Any:
    """The work as it is: every kernel is launched by the host."""
    device = batches[0].tokens_BL.device
    # Scalars on the device, as a graph needs them, so that both ways divide alike.
    return work(batches, *(torch.full((), float(n), device=device) for n in (targets, tokens)))


def computation(model: nn.Module) -> Hashable:
    """What fixes the computation of a step besides shapes: the state of the routers that
    `moe.control.begin_step` sets."""
    return tuple(router.phase for router in routers_of(model))


def pad_documents(documents: Documents, count: int) -> Documents:
    """The same borders, with empty documents at the end up to `count`."""
    missing = count - len(documents.lengths)
    if missing < 0:
        raise ValueError(f"{len(documents.lengths)} documents do not fit {count} places")
    ends_N1 = documents.cu_seqlens_N1
    padded_N1 = torch.cat([ends_N1, ends_N1[-1:].expand(missing)])
    return Documents(padded_N1, (*documents.lengths, *(0,) * missing))


def places(batches: Sequence[Batch]) -> int:
    """Documents that a graph for these batches has room for."""
    most = max(len(batch.documents.lengths) for batch in batches)
    return max(FEWEST_DOCUMENTS, 1 << (most - 1).bit_length())


class _Form:
    """The fixed buffers of one form of step, and its graph once there is one."""

    def __init__(self, batches: Sequence[Batch], count: int) -> None:
        self.count = count
        self.batches = [
            dataclasses.replace(
                batch.map(torch.clone), documents=pad_documents(batch.documents, count)
            )
            for batch in batches
        ]
        device = batches[0].tokens_BL.device
        self.targets, self.tokens = (torch.ones((), device=device) for _ in range(2))
        self.runs = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None
        self.work: Work | None = None
        """What was captured, with the tensors it refers to."""

    def fill(self, batches: Sequence[Batch], targets: int, tokens: int) -> None:
        for mine, batch in zip(self.batches, batches, strict=True):
            for name in ("tokens_BL", "labels_BL", "positions_BL", "valid_BL"):
                getattr(mine, name).copy_(getattr(batch, name))
            padded = pad_documents(batch.documents, self.count)
            mine.documents.cu_seqlens_N1.copy_(padded.cu_seqlens_N1)
        self.targets.fill_(targets)
        self.tokens.fill_(tokens)


class StepGraph:
    """Runs the work of steps: at first as it is, later by replaying a graph.

    Everything must happen on one stream that is not the default one (`own_stream`), from the
    making of the optimizer on: autograd adds gradients on the stream where their parameters were
    first used.
    """

    WARMUP = 2

    def __init__(self, computation: Callable[[], Hashable]) -> None:
        """
        Args:
            computation: what fixes the computation of the next step besides shapes; another value
                starts over.
        """
        self._current = computation
        self._forms: dict[Hashable, _Form] = {}
        self._computation: Hashable = None
        self._pool: Any = None

    def run(self, work: Work, batches: Sequence[Batch], targets: int, tokens: int) -> Any:
        """What `work` returns: a tree of tensors that no later step changes.

        Args:
            work: no host sync, nothing on the host that later steps need; the same function in
                every step, but for what `computation` tells apart.
            batches: on the device.
        """
        computation = self._current()
        if computation != self._computation:  # graphs of the past would keep their memory
            self._forms.clear()
            self._computation = computation
        count = places(batches)
        key = (count, tuple(batch.tokens_BL.shape for batch in batches))
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _Form(batches, count)
        form.fill(batches, targets, tokens)
        form.runs += 1
        if form.runs <= self.WARMUP:
            return work(form.batches, form.targets, form.tokens)
        if form.graph is None:
            self._capture(form, work)
        form.graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, form.result)

    def _capture(self, form: _Form, work: Work) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        form.graph = torch.cuda.CUDAGraph()
        # Only this thread is held to what a capture allows: others pin memory for the next batch.
        with torch.cuda.graph(
            form.graph,
            pool=self._pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            form.result = work(form.batches, form.targets, form.tokens)
        form.work = work


def own_stream(device: torch.device) -> None:
    """Make a new stream the current one from here on; graphs cannot be captured on the default."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)
