"""Schedules of K and router gradients on a GPU: no waiting for the device, the numbers of a CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from moe import MoE, MoEConfig
from moe.config import RouterConfig
from moe.control import begin_step
from moe.rules.mean_outputs import MeanOutputs
from parallel import World
from tests.engines import local_engine
from tests.gpu.test_training import CUDA, WIDE
from tests.training.test_loop import batch_of, rows, state_of
from training.health import RoutingHealth
from training.optim.groups import parameter_groups
from training.report.window import read_window
from training.step import agree_on_step, train_step

pytestmark = pytest.mark.gpu
ROUNDING = {"to": "nearest", "dropped": {}, "tile": 16, "min_mean_tiles": 0.1}
CASES = {
    "soft k": {"top_k": {"kind": "linear", "start": 4, "soft": True}},
    "default": {"gradient": {"kind": "default"}},
    "dropped pairs": {"rounding": ROUNDING},
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_never_waits_for_the_device(name):
    model = build_model(
        ModelConfig(**WIDE),
        dtype=torch.bfloat16,
        device=CUDA,
        router=RouterConfig(**{"balance": {"kind": "micro"}} | CASES[name]),
        steps=40,
    )
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1)
    optimizer, health = local_engine(groups), RoutingHealth(2, WIDE["num_experts"], CUDA)
    state = state_of(model, optimizer, device=CUDA, followers=[health])
    tokens, labels = rows()

    def step(number: int):
        begin_step(model, number)
        batches = [batch_of(tokens, labels).pin_memory() for _ in range(2)]
        state.step = number
        return train_step(state, batches, agree_on_step(World(), batches, False))

    for number in (4, 5):  # kernels are compiled and tuned; K is 4 in all these steps
        step(number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [step(number) for number in (6, 7)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    read = read_window(state, results)
    assert read.losses[7] < read.losses[6]
    assert read.health.dead_LE.shape == (2, WIDE["num_experts"])


@pytest.mark.parametrize("name", CASES)
def test_the_layer_agrees_with_the_cpu(name):
    torch.manual_seed(0)
    router = RouterConfig(**CASES[name])
    layer = MoE(MoEConfig(64, 64, 8, 2, init_std=0.1, router=router, steps=40))
    for rule in layer.router.rules.values():
        if isinstance(rule, MeanOutputs):
            rule.mean_ED.normal_()
            rule.mean_count_E.fill_(2)
    x_TD, dy_TD = torch.randn(256, 64), torch.randn(256, 64)
    grads = []
    for device in ("cpu", "cuda"):
        twin = copy.deepcopy(layer).to(device)
        begin_step(twin, 4)
        y_TD, _ = twin(x_TD.to(device))
        y_TD.backward(dy_TD.to(device))
        grads.append((y_TD.detach().cpu(), twin.router.weight.grad.cpu()))
    for found, expected in zip(*reversed(grads)):
        assert (found - expected).norm() / expected.norm() < 1e-2
