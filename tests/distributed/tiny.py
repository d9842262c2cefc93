"""A tiny model trained for some steps: in one process, and by an engine on several ranks.

Rows of very different length, one without any token, and auxiliary losses, so that nothing is
equal on all ranks by accident. The first Adam moment after a step is a tenth of the clipped
gradient, so comparing moments compares gradients, their scale included; comparing weights after an
Adam step alone would not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from moe import Router
from moe.balance import balance_loss, z_loss
from moe.surgery import Change
from parallel.engines.base import Engine
from parallel.engines.choose import make_engine
from parallel.engines.local import LocalEngine
from parallel.engines.sharded import Sharding
from parallel.flat_shard import FlatShard, local_of, with_local
from parallel.mesh import Mesh
from tests.engines import local_engine
from tests.models.tiny import next_tokens, randomise_buffers_and_norms, tiny_config, tokens
from training.optim.adamw import AdamW
from training.optim.groups import parameter_groups
from training.surgery.changes import make_changes

ROWS, LENGTH = 8, 16
LENGTHS = (16, 3, 9, 16, 1, 0, 12, 7)
"""Valid tokens of each row; row 5 is nothing but padding."""
CLIP = 0.05
"""Far below the norm, so that a wrong norm is a wrong update."""


def config(case: str = "glm4_moe", **changes: Any) -> ModelConfig:
    """97 tokens, so that nothing divides; initial weights small enough for a calm model."""
    common = {"vocab_size": 97, "initializer_range": 0.1, "n_shared_experts": 1}
    if not case.startswith("glm4"):
        del common["n_shared_experts"]
    return tiny_config(case, **common | changes)


def build(config: ModelConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build_model(config, dtype=dtype, seed=1)
    randomise_buffers_and_norms(model)
    return model


def groups_of(model: nn.Module, by_matrix: bool = False) -> list:
    return parameter_groups(
        model,
        parameter_kinds(model),
        weight_decay=0.1,
        router_lr_multiplier=0.5,
        by_matrix=by_matrix,
    )


def units_of(model: nn.Module) -> list[nn.Module]:
    if model.head.weight is model.embed.weight:
        return list(model.layers)
    return [model.embed, *model.layers, model.head]


OPTIMIZER = AdamW(clip_norm=CLIP, spike_factor=100.0)


def engine_of(
    name: str,
    model: nn.Module,
    mesh: Mesh,
    groups: list | None = None,
    optimizer: Any = OPTIMIZER,
    **sharing: Any,
) -> Engine:
    """A sharding engine around a model.

    Args:
        sharing: fields of `Sharding`.
    """
    groups = groups_of(model) if groups is None else groups
    sharding = Sharding(mesh, units_of(model), **sharing)
    return make_engine(name, model, groups, optimizer, sharding, num_terms=3)


def copies(found: dict[str, Any]) -> dict[str, Any]:
    """Tensors or shards with memory of their own."""
    return {name: with_local(value, local_of(value).clone()) for name, value in found.items()}


def micro_batches(config: ModelConfig, step: int, rows: Sequence[int]) -> list[dict[str, Tensor]]:
    tokens_BL = tokens(config, ROWS, LENGTH, seed=100 + step)
    valid_BL = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    labels_BL = next_tokens(tokens_BL).masked_fill(~valid_BL, -100)
    return [
        {
            "tokens_BL": tokens_BL[row : row + 1],
            "labels_BL": labels_BL[row : row + 1],
            "valid_BL": valid_BL[row : row + 1],
        }
        for row in rows
    ]


def loss_of(model: nn.Module, batch: dict[str, Tensor], poison: bool = False) -> Tensor:
    out = model(**batch)
    loss = out.loss_sum / sum(LENGTHS)
    aux_L = 0.02 * balance_loss(out.router) + 0.01 * z_loss(out.router)
    auxiliary = (out.router.tokens / sum(LENGTHS) * aux_L).sum()
    return (loss + auxiliary) * (float("nan") if poison else 1.0)


def gradients_one_process(model: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """Flat gradients of the first step by name, in the model's own dtype."""
    for batch in micro_batches(config, 0, range(ROWS)):
        loss_of(model, batch).backward()
    return {name: p.grad.reshape(-1) for name, p in model.named_parameters()}


def train_one_process(
    model: nn.Module, config: ModelConfig, steps: int, poisoned: int | None = None
) -> tuple[LocalEngine, list[dict[str, float]]]:
    """The oracle: all rows in one process, by the trainer's own optimizer."""
    optimizer = local_engine(groups_of(model), model, clip_norm=CLIP, spike_factor=100.0)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        for i, batch in enumerate(micro_batches(config, step, range(ROWS))):
            loss = loss_of(model, batch, poison=step == poisoned and i == 3)
            loss.backward()
            optimizer.terms[0] += loss.detach()
        outcome = optimizer.step(1e-2)
        seen.append(_numbers(optimizer.terms, outcome))
    return optimizer, seen


def train_engine(
    engine: Any,
    config: ModelConfig,
    rank: int,
    world: int,
    steps: int,
    poisoned: int | None = None,
    first: int = 0,
    watch: Callable[[Any], None] | None = None,
) -> list[dict[str, float]]:
    """The same steps, each rank with its rows, each row a micro-batch.

    Args:
        watch: called with the engine between the gradients and the update of the first step.
    """
    share = ROWS // world
    rows = range(rank * share, (rank + 1) * share)
    seen = []
    for step in range(first, first + steps):
        engine.zero_grad()
        for i, batch in zip(rows, micro_batches(config, step, rows)):
            with engine.micro_batch(last=i == rows[-1]):
                loss = loss_of(engine.model, batch, poison=step == poisoned and i == 3)
                engine.backward(loss)
            engine.terms[0] += loss.detach()
        if watch is not None and step == first:
            watch(engine)
        outcome = engine.step(1e-2)
        seen.append(_numbers(engine.terms, outcome))
    return seen


def revived(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """All tensors after two experts were replaced, with moments that differ everywhere."""
    for name, value in optimizer.tensors().items():
        if not name.startswith(("weights/", "guard/", "updates")):
            local = local_of(value)
            first = value.start if isinstance(value, FlatShard) else 0
            local.copy_((torch.arange(first, first + local.numel()) % 8191 + 1.0) / 8191)
    optimizer.loaded()
    changes = [Change("revive", 2, 5, layer=0), Change("revive", 7, 0, layer=1)]
    make_changes(model, optimizer, changes, dormant=False, noise=0.01, seed=3, step=7)
    bias_E = next(m for m in model.modules() if isinstance(m, Router)).selection_bias
    return optimizer.tensors() | {"bias": bias_E}


def _numbers(terms: Tensor, outcome: Any) -> dict[str, float]:
    return {
        "loss": float(terms[0]),
        "norm": float(outcome.grad_norm),
        "skipped": float(outcome.skipped),
    }


def difference(
    found: dict[str, Any], whole: dict[str, Tensor], tolerance: float | dict[str, float]
) -> str:
    """What parts of `found` (shards) differ from the whole flat tensors; empty if nothing.

    Args:
        tolerance: relative to the largest element; by kind (the name up to "/"; 1e-5 for others).
    """
    text = "" if found.keys() == whole.keys() else f"names {found.keys() ^ whole.keys()}; "
    for name, want in whole.items():
        got = found.get(name)
        part, scale = want, want.abs().max().item() or 1.0
        if isinstance(got, FlatShard):
            if got.total != want.numel():
                text += f"{name}: {got.total} elements, not {want.numel()}; "
                continue
            part, got = want[got.start : got.stop], got.local
        error = (got.double() - part.double()).abs().max().item() / scale if part.numel() else 0.0
        allowed = tolerance
        if isinstance(tolerance, dict):
            allowed = tolerance.get(name.partition("/")[0], 1e-5)
        if not error <= allowed:
            text += f"{name}: off by {error:.1e} of its largest; "
    return text


def numbers_differ(got: list[dict], want: list[dict], tolerance: float) -> str:
    text = ""
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        for key in b:
            same = a[key] == b[key] or abs(a[key] - b[key]) <= tolerance * abs(b[key])
            both_nan = a[key] != a[key] and b[key] != b[key]
            if not (same or both_nan):
                text += f"step {step}: {key} {a[key]!r} instead of {b[key]!r}; "
    return text
