"""Training on a GPU: no waiting for the device inside a step, skipped steps, saves, whole runs."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
from functools import partial

import pytest
import torch

import train
from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from models.documents import Documents
from models.execution import compile_blocks
from moe.control import routers_of
from parallel import World
from parallel.engines.base import Outcome
from parallel.engines.gradients import collect, norm
from tests.engines import local_engine
from tests.training.test_loop import batch_of, router, rows, take_step
from tests.training.test_train import before_step, by_step, events
from tests.training.tiny import MODEL, write_inputs
from training.checkpoint.saver import Saver, Snapshot
from training.checkpoint.tensors import load_tensors
from training.graph import StepGraph, computation, launch_now, own_stream
from training.optim.adamw import Rates, adamw, rates_numbers
from training.optim.groups import parameter_groups
from training.report.files import read_metrics

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
# Wide enough for the kernels' tiles.
WIDE = {**MODEL, "hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32}


def build(dtype: torch.dtype = torch.bfloat16, scope: str = "micro"):
    setting = router(0.01, 0.001, scope)
    model = build_model(ModelConfig(**WIDE), dtype=dtype, device=CUDA, router=setting)
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1)
    return model, local_engine(groups, spike_factor=100.0)


def step(model, optimizer, number: int):
    tokens, labels = rows()
    batches = [batch_of(tokens, labels).pin_memory() for _ in range(2)]
    return take_step(model, optimizer, batches, step=number, device=CUDA)


@pytest.mark.parametrize("scope", ["micro", "global"])
def test_a_step_never_waits_for_the_device(scope):
    model, optimizer = build(scope=scope)
    for number in (1, 2):  # kernels are compiled and tuned in the first
        step(model, optimizer, number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [step(model, optimizer, number) for number in (3, 4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses = [result.numbers[0].item() for result in results]
    assert losses[1] < losses[0]


def test_a_skipped_step_leaves_no_trace():
    model, optimizer = build()
    step(model, optimizer, 1)
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    parameters = copy.deepcopy(dict(model.named_parameters()))
    optimizer.zero_grad()
    sum(parameter.float().sum() for parameter in model.parameters()).backward()
    optimizer.gradient[7] = float("nan")
    outcome = optimizer.step(0.01)
    assert outcome.skipped.item() == 1 and outcome.reason.item() == 1
    for name, tensor in optimizer.tensors().items():
        assert name == "guard/skipped" or torch.equal(tensor, before[name]), name
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, parameters[name]), name
    step(model, optimizer, 2)
    assert optimizer.tensors()["updates"].item() == 2


def test_background_save_holds_the_moment_it_was_asked_for(tmp_path):
    """Updates queued right after the save must not reach the copy."""
    flat = torch.zeros(1 << 24, device=CUDA)
    saver = Saver(tmp_path, World())
    for number in range(3):
        flat.fill_(number)
        saver.save(Snapshot(number, {"weights/w": flat[: 1 << 23]}, {}, b""))
        for _ in range(50):
            flat.add_(1.0)
    saver.wait()
    assert all(saved.error is None for saved in saver.poll())
    for number in range(3):
        back = {"weights/w": torch.empty(1 << 23)}
        load_tensors(tmp_path / f"step_0000000{number}", back)
        assert torch.all(back["weights/w"] == number), number


def _batches(number: int) -> list:
    """Two micro-batches whose documents are others in every step."""
    torch.manual_seed(number)
    found = []
    for _ in range(2):
        tokens, labels = rows()
        batch = batch_of(tokens.roll(number, 1), labels.roll(number, 1))
        cut = 1 + (5 * number) % (tokens.shape[1] - 1)
        lengths = [cut, tokens.shape[1] - cut] * tokens.shape[0]
        documents = Documents.from_lengths(lengths)
        positions = documents.positions().view(tokens.shape)
        found.append(dataclasses.replace(batch, documents=documents, positions_BL=positions))
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("states", [{}, {"weights": "bfloat16", "moments": "bfloat16"}])
def test_a_captured_step_gives_the_bits_of_a_launched_one(compiled, states):
    """Losses, norms, weights and moments over steps with other documents, another learning rate,
    a step that is skipped and a router that is frozen on the way."""

    def run(captured: bool):
        model = build_model(ModelConfig(**WIDE), dtype=torch.bfloat16, device=CUDA)
        groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1)
        optimizer = local_engine(groups, spike_factor=100.0, **states)
        if compiled:
            compile_blocks(model)
        graph = StepGraph(partial(computation, model))
        numbers = []
        for number in range(1, 11):
            if number == 6:
                optimizer.guard.mean_norm.fill_(1e-9)  # with `seen` below: a spike
                optimizer.guard.seen.fill_(100)
            if number == 7:
                optimizer.guard.mean_norm.fill_(1e9)
            if number == 8:
                for r in routers_of(model):
                    r.frozen = True
            batches = _batches(number)
            result = take_step(
                model, optimizer, batches, step=number,
                lr=0.01 / number, device=CUDA, launch=graph.run if captured else launch_now,
            )  # fmt: skip
            numbers.append(result.numbers.tolist())
        state = {n: t.clone() for n, t in optimizer.tensors().items()}
        return numbers, state, any(form.graph is not None for form in graph._forms.values())

    before = torch.cuda.current_stream()
    try:
        own_stream(CUDA)
        plain, plain_state, _ = run(captured=False)
        replayed, replayed_state, was_captured = run(captured=True)
    finally:
        torch.cuda.synchronize()
        torch.cuda.set_stream(before)
    assert was_captured
    skipped = 3 + Outcome._fields.index("skipped")
    assert [row[skipped] for row in plain] == [0.0] * 5 + [1.0] + [0.0] * 4
    assert replayed == plain
    for name, tensor in plain_state.items():
        assert torch.equal(replayed_state[name], tensor), name


GRAPH = ("train.cuda_graph=true", "router.balance.kind=lagged")
NARROW = ("optim.storage.weights=bfloat16", "optim.storage.moments=bfloat16")
ONE = ("train.micro_batch_size=4",)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("train.checkpointing=selective",),
        GRAPH,
        NARROW,
        ONE,
        (*ONE, *NARROW, *GRAPH),
    ],
    ids=str,
)
def test_a_run_stops_and_goes_on_exactly(tmp_path, monkeypatch, settings):
    """bfloat16, compiled blocks, Triton kernels: bit-equal losses after a stop."""
    config = write_inputs(tmp_path / "inputs", count=14)
    monkeypatch.chdir(tmp_path)
    overrides = [f"model.{key}={value}" for key, value in WIDE.items() if value != MODEL[key]]
    command = [str(config), "run.device=cuda", "train.steps=8", *overrides, *settings]
    assert train.main([*command, "run.name=whole"]) == 0
    with monkeypatch.context() as patch:
        before_step(patch, 5, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert train.main([*command, "run.name=stopped"]) == 75
    assert train.main([*command, "run.name=stopped"]) == 0
    whole, stopped = tmp_path / "runs/whole", tmp_path / "runs/stopped"
    assert by_step(stopped) == by_step(whole)
    assert not events(stopped, "step_skipped")
    lines = read_metrics(whole)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert 0 < lines[-1]["max_memory_gib"] < 2
    if "H200" in torch.cuda.get_device_name():
        assert 0 < lines[-1]["mfu"] < 1


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_updates_round_with_the_bits_of_the_reference(weights, moments):
    """On a buffer whose places cross 2^32; sums of gradients and their norm beside it."""
    size, first = 1_000_003, (1 << 32) - 500_000
    gradient = torch.randn(size, device=CUDA).bfloat16()
    total = torch.randn(size, device=CUDA)
    expected = total + gradient.float()
    collect(total, gradient, add=True)
    assert torch.equal(total, expected)
    want = torch.linalg.vector_norm(torch.cat([total, gradient.float()]).double()).item()
    assert norm([total, gradient]).item() == pytest.approx(want, rel=3e-7)

    scalars = [torch.tensor(value, device=CUDA) for value in (0.01, 3.0, 1.5, 1.0)]
    lr, count, divisor, keep = scalars
    numbers = rates_numbers(lr, 0.1, (0.9, 0.95), count, divisor, keep)
    states = [
        torch.randn(size, device=CUDA).to(weights),
        (torch.randn(size, device=CUDA) * 0.1).to(moments),
        (torch.rand(size, device=CUDA) * 0.01).to(moments),
        gradient,
    ]
    reference = [tensor.cpu() for tensor in states]
    copy = torch.empty(size, device=CUDA, dtype=torch.bfloat16)
    copy = copy if weights == torch.float32 else None
    rates = Rates(numbers, (0.9, 0.95), 1e-8, 0xDEADBEEF)
    adamw(states[0], copy, *states[1:], rates, first=first)
    adamw(reference[0], None, *reference[1:], rates._replace(numbers=numbers.cpu()), first=first)
    for mine, theirs in zip(states, reference):
        if mine.dtype == torch.bfloat16:  # float32 that differs in its last bit may round otherwise
            assert (mine.cpu() != theirs).float().mean() < 2e-3
        torch.testing.assert_close(mine.cpu().float(), theirs.float(), rtol=1e-2, atol=1e-6)
    if copy is not None:
        assert torch.equal(copy, states[0].bfloat16())
