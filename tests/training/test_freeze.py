"""Freezing the routers: no bit of their weights moves, and the others move as they would."""

import torch

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from moe.config import RouterConfig
from moe.control import begin_step
from tests.engines import local_engine
from tests.training.test_loop import batch_of, rows, take_step
from tests.training.tiny import MODEL
from training.optim.groups import parameter_groups


def run(freeze_at, steps=5):
    config = ModelConfig(**MODEL, initializer_range=0.3)
    router = RouterConfig(
        balance={"kind": "micro", "coef": 1.0},
        z_coef=0.0,
        selection={"kind": "ema", "decay": 0.5},
        freeze_at=freeze_at,
    )
    model = build_model(config, seed=1, router=router)
    groups = parameter_groups(
        model, parameter_kinds(model), weight_decay=0.1, router_weight_decay=0.1
    )
    optimizer = local_engine(groups, clip_norm=1.0)
    weights, norms = [], []
    batches = [batch_of(*rows())]
    for step in range(1, steps + 1):
        said = begin_step(model, step)
        take_step(model, optimizer, batches, step=step)
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        router = next(i for i, g in enumerate(optimizer.groups) if g.name == "router")
        norms.append((optimizer.group_norms[router].item(), said, optimizer.lrs(0.01)[1]))
    return weights, norms, model


def test_no_bit_moves_from_that_step_on():
    weights, norms, model = run(freeze_at=3)
    free, _, _ = run(freeze_at=None)
    name = "layers.0.moe.router.weight"
    for step in range(1, 3):
        assert torch.equal(weights[step - 1][name], free[step - 1][name])
    for step in range(3, 6):
        assert torch.equal(weights[step - 1][name], weights[1][name]), step
        assert not torch.equal(free[step - 1][name], free[step - 2][name])
        assert not torch.equal(weights[step - 1]["head.weight"], weights[step - 2]["head.weight"])
    assert [norm > 0 for norm, _, _ in norms] == [True, True, False, False, False]
    assert [len(said) for _, said, _ in norms] == [0, 0, 1, 0, 0]
    assert [lr for _, _, lr in norms] == [0.01, 0.01, 0.0, 0.0, 0.0]
    router = model.layers[0].moe.router
    gap = (router.rules.selection.weight_ema - router.weight).abs().max()
    assert 0 < gap < 0.01, "the average goes on towards the weight that stands still"
