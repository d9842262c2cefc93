"""Balance losses and the state of routers for any layout: processes, accumulation, padding.

Steps are taken by the trainer's own `train_step` in float64, so that what differs is a difference;
a stand-in for the optimizer keeps the gradient as it is.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from moe.config import RouterConfig
from moe.control import begin_step, routers_of
from parallel import World
from parallel.engines.base import Outcome
from tests.distributed.launch import run
from tests.training import test_loop as alone
from tests.training.tiny import MODEL
from training.step import TERMS, agree_on_step, train_step

ROWS = 16
GLM = {"family": "glm4_moe", "first_k_dense_replace": 0}
# name → fields of the model, and of its routers' config beside the balance of kind global
CASES = {
    "global": ({}, {}),
    "lagged": ({}, {"balance": {"kind": "lagged", "coef": 0.5}}),
    "sequence": ({}, {"balance": {"kind": "sequence", "coef": 0.5}}),
    "bias": (GLM, {"bias": {"kind": "sign", "rate": 0.1, "freeze_at": 2}}),
    "ema": ({}, {"selection": {"kind": "ema", "decay": 0.5}}),
    "default": ({}, {"gradient": {"kind": "default"}}),
}


class Keep:
    """Takes no step but plain descent, and keeps the summed float64 gradient."""

    def __init__(self, model, world: World) -> None:
        self.model, self.world = model, world
        self.parameters = dict(model.named_parameters())
        self.terms = torch.zeros(len(TERMS), dtype=torch.float64)
        self.groups, self.group_norms = (), torch.zeros(0)

    def zero_grad(self):
        self.terms.zero_()
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def set_lr(self, lr):
        self.lr = lr

    def micro_batch(self, last):
        return nullcontext()

    def backward(self, loss):
        loss.backward()

    @torch.no_grad()
    def update(self):
        for tensor in [self.terms, *(p.grad for p in self.parameters.values())]:
            if self.world.size > 1:
                dist.all_reduce(tensor)
        for parameter in self.parameters.values():
            parameter -= self.lr * parameter.grad
        zero = torch.zeros((), dtype=torch.float64)
        return Outcome(zero, zero, zero)


def data(padded: bool):
    """Rows with unequal numbers of valid tokens; some rows hold none at all."""
    tokens, labels = alone.rows(ROWS)
    lengths = torch.tensor([alone.LENGTH - row % 4 for row in range(ROWS)])
    lengths[5] = lengths[11] = 0
    valid = torch.arange(alone.LENGTH) < lengths[:, None]
    labels = labels.masked_fill(~valid, -100)
    if padded:  # what padding holds, and how much of it there is, changes nothing
        tokens = torch.where(valid, tokens, 7)
    return tokens, labels, valid


def batches_of(world: World, accumulation: int, padded: bool):
    size = ROWS // world.size // accumulation
    mine = slice(world.rank * ROWS // world.size, (world.rank + 1) * ROWS // world.size)
    parts = [tensor[mine].split(size) for tensor in data(padded)]
    batches = [alone.batch_of(*part) for part in zip(*parts)]
    return [_widened(batch) for batch in batches] if padded else batches


def _widened(batch):
    """Five more columns of padding."""
    pad = {"tokens_BL": 3, "labels_BL": -100, "positions_BL": 0, "valid_BL": False}
    wide = {key: F.pad(getattr(batch, key), (0, 5), value=value) for key, value in pad.items()}
    template = alone.make_batch(
        [None] * len(batch.rows), ((-1, 0, 0),) * len(batch.rows), alone.LENGTH + 5, 0
    )
    return dataclasses.replace(batch, **wide, documents=template.documents)


def steps(
    case: str, world: World, accumulation: int, padded: bool, repeats: int = 1
) -> dict[str, torch.Tensor]:
    """Two steps, the first of so many copies of the rows: balance value, router gradients and state
    after the second."""
    fields, given = CASES[case]
    config = ModelConfig(**MODEL | fields, initializer_range=0.3)
    balance = {"balance": {"kind": "global", "coef": 0.5}, "z_coef": 0.01, "bias": None}
    router = RouterConfig(**balance | given)
    model = build_model(config, dtype=torch.float64, seed=1, router=router)
    optimizer = Keep(model, world)
    batches = batches_of(world, accumulation, padded)
    for step in (1, 2):
        begin_step(model, step)
        now = batches * repeats if step == 1 else batches
        totals = agree_on_step(world, now, stop=False)
        state = alone.state_of(model, optimizer, step=step, lr=0.3, world=world)
        train_step(state, now, totals)
    found = {"balance": optimizer.terms[1:2].clone()}
    for name, kind in parameter_kinds(model).items():
        if kind == "router":
            found[name] = optimizer.parameters[name].grad.clone()
    for layer, each in enumerate(routers_of(model)):
        found |= {f"{layer} {name}": b.double().clone() for name, b in each.named_buffers()}
    return found


def layouts(
    accumulations, cases=tuple(CASES), paddings=(False, True)
) -> dict[tuple, dict[str, torch.Tensor]]:
    world = World()
    if dist.is_initialized():
        world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return {
        (case, accumulation, padded): steps(case, world, accumulation, padded)
        for case in cases
        for accumulation in accumulations
        for padded in paddings
    }


@pytest.fixture(scope="module")
def whole():
    """One process, all rows in one micro-batch, no more padding than the rows need."""
    return {case: steps(case, World(), 1, False) for case in CASES}


def compare(found, whole):
    for (case, accumulation, padded), tensors in found.items():
        where = f"{case}, accumulation {accumulation}, padded {padded}"
        assert tensors.keys() == whole[case].keys()
        for name, right in whole[case].items():
            error = (tensors[name] - right).norm() / right.norm().clamp(min=1e-12)
            assert error < 1e-6, f"{where}: {name} differs by {error:.2g}"


def test_one_process(whole):
    compare(layouts([1, 2, 4]), whole)
    for case, tensors in whole.items():
        assert all(tensor.norm() > 0 for tensor in tensors.values()), case
        buffers = {"global": 0, "sequence": 0, "default": 4}
        assert len(tensors) == 3 + buffers.get(case, 2)


@pytest.mark.parametrize(
    ("world", "accumulations", "cases"),
    [
        (2, [4], tuple(CASES)),
        (2, [1, 2], ("global",)),
        (4, [1, 2, 4], ("global", "lagged", "bias", "default")),
    ],
)
def test_several_processes(whole, world, accumulations, cases):
    results = run(world, layouts, accumulations, cases, (True,))
    for found in results:
        compare(found, whole)
    for key, tensors in results[0].items():
        for other in results[1:]:
            for name, tensor in tensors.items():
                assert torch.equal(other[key][name], tensor), f"{key}: ranks differ in {name}"


def test_a_last_load_of_more_tokens_is_the_same_load(whole):
    compare({("lagged", 1, False): steps("lagged", World(), 1, False, repeats=3)}, whole)


def test_the_micro_scope_does_depend_on_the_layout(whole):
    """So that the comparison above can fail."""
    CASES["micro"] = ({}, {"balance": {"kind": "micro", "coef": 0.5}})
    try:
        one, four = (steps("micro", World(), accumulation, False) for accumulation in (1, 4))
    finally:
        del CASES["micro"]
    assert (one["balance"] - four["balance"]).abs().item() > 1e-3
