"""Bringing a dead expert back: it becomes a copy of the busiest one of its layer.

Everything of the parent is copied: weights, the router's row, Adam's moments and the router's state
(selection bias, averages). Fresh moments of zero beside the shared step count would make the first
update of the copy several times too large or too small. A little noise on the weights lets the two
grow apart. Parent and copy answer the same tokens at first, so each of these spends two of its K
choices on them: the output changes at the event, and heals in some steps.

It happens between a step and the next, the same on all processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe.layer import MoE
from parallel.flat_shard import read_range, write_range

if TYPE_CHECKING:
    from parallel.engine import Engine
    from training.job import Job
    from training.optim import MasterAdamW

NOISE = 0.01
"""Standard deviation of the noise, relative to that of the copied weights."""


@dataclass(frozen=True)
class Revival:
    """An expert that is to be replaced by a copy of another one of its layer."""

    layer: int
    """Number of the MoE layer, from 0."""
    expert: int
    parent: int
    dead_steps: int


def choose_revivals(dead_LE: Tensor, counts_LE: Tensor, after: int) -> list[Revival]:
    """At most one in each layer: the expert that has been dead longest, if for `after` steps.

    Args:
        dead_LE, counts_LE: on the host; steps without load, and the last step's load.
    """
    found = []
    for layer, (dead_E, counts_E) in enumerate(zip(dead_LE, counts_LE)):
        expert = int(dead_E.argmax())
        if dead_E[expert] >= after:
            parent = int(counts_E.argmax())
            found.append(Revival(layer, expert, parent, int(dead_E[expert])))
    return found


@torch.no_grad()
def revive(
    model: nn.Module,
    optimizer: MasterAdamW | Engine,
    revivals: Sequence[Revival],
    *,
    seed: int,
    step: int,
) -> None:
    """Make the copies, in the master weights, the moments, and the model.

    All processes call it alike; a row that they share is put together and each keeps its part.

    Args:
        seed, step: fix the noise, so that all processes and a resumed run draw the same.
    """
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, MoE)]
    held = optimizer.tensors()
    for event in revivals:
        name, layer = layers[event.layer]
        for parameter in ("w1", "w2", "router.weight"):
            full = f"{name}.{parameter}"
            for kind in ("weights", "exp_avg", "exp_avg_sq"):
                whole = held[f"{kind}/{full}"]
                size = whole.numel() // layer.config.num_experts
                first = event.parent * size
                row = read_range(whole, first, first + size, layer.router.weight.device)
                if kind == "weights":
                    row += _noise(row, f"{seed}/{step}/{full}/{event.expert}")
                write_range(whole, event.expert * size, row)
        for buffer in layer.router.buffers():
            if buffer.dim() and buffer.shape[0] == layer.config.num_experts:
                buffer[event.expert].copy_(buffer[event.parent])
    optimizer.loaded()  # the model's own weights follow the master weights


def _noise(row: Tensor, name: str) -> Tensor:
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    noise = torch.empty(row.shape, dtype=torch.float32).normal_(generator=generator)
    return noise.to(row.device) * (NOISE * row.std())


def revive_dead(job: Job) -> list[Revival]:
    """Replace the experts that the last log step found dead; all that was done."""
    after, read, health = job.config.router.revive_after, job.read, job.trainee.health
    if after is None or read is None or read.counts_LE is None:
        return []
    dead_LE = read.health["health/dead"].view(read.counts_LE.shape)
    events = choose_revivals(dead_LE, read.counts_LE, after)
    if events:
        revive(job.model, job.optimizer, events, seed=job.config.run.seed, step=job.progress.step)
        job.probe.look()
    for event in events:
        health.dead_LE[event.layer, event.expert] = 0.0
    return events
