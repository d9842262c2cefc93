"""Muon on a GPU: in bfloat16, without waiting for the device, and as part of a captured step."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from parallel.engines.local import LocalEngine
from tests.gpu.test_training import WIDE, step
from tests.training.test_loop import batch_of, router, rows, take_step
from training.graph import StepGraph, computation, launch_now, own_stream
from training.optim.groups import parameter_groups
from training.optim.muon import Muon

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def build(device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16, **settings):
    model = build_model(
        ModelConfig(**WIDE), dtype=dtype, device=device, router=router(0.01, 0.001), seed=1
    )
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1, by_matrix=True)
    return model, LocalEngine(model, groups, Muon(**settings), num_terms=3)


@pytest.mark.parametrize("storage", [None, {"weights": "bfloat16", "moments": "bfloat16"}])
def test_a_step_never_waits_for_the_device(storage):
    model, optimizer = build(storage=storage)
    for number in (1, 2):
        step(model, optimizer, number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [step(model, optimizer, number) for number in (3, 4, 5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses = [result.numbers[0].item() for result in results]
    assert losses[-1] < losses[0]


def test_an_update_is_that_of_the_cpu_up_to_bfloat16():
    engines = []
    for device in (torch.device("cpu"), CUDA):
        _, engine = build(device, torch.float32, clip_norm=None)
        engine.zero_grad()
        for number, gradient in enumerate(engine.gradients().values()):
            values = torch.randn(gradient.numel(), generator=torch.Generator().manual_seed(number))
            gradient.copy_(values)
        before = {name: tensor.clone() for name, tensor in engine.parts().items()}
        engine.step(0.01)
        engines.append((before, engine.parts()))
    (before, cpu), (_, gpu) = engines
    for name in before:
        if not name.startswith("weights/") or f"momentum/{name[8:]}" not in before:
            continue
        moved = cpu[name] - before[name]
        assert (gpu[name].cpu() - cpu[name]).norm() < 0.05 * moved.norm(), name


def test_a_captured_step_is_the_plain_one():
    def run(captured: bool):
        torch.manual_seed(0)
        model, optimizer = build()
        graph = StepGraph(partial(computation, model))
        tokens, labels = rows()
        for number in range(1, 7):
            batches = [batch_of(tokens.roll(number, 1), labels.roll(number, 1))]
            launch = graph.run if captured else launch_now
            take_step(model, optimizer, batches, step=number, device=CUDA, launch=launch)
        state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
        return state, any(form.graph is not None for form in graph._forms.values())

    before = torch.cuda.current_stream()
    try:
        own_stream(CUDA)
        plain, _ = run(captured=False)
        replayed, was_captured = run(captured=True)
    finally:
        torch.cuda.set_stream(before)
    assert was_captured
    for name, tensor in plain.items():
        assert torch.equal(tensor, replayed[name]), name
