"""A dead expert becomes a copy of the busiest one, optimizer state included, and works again."""

import types

import pytest
import torch

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from tests.training.tiny import MODEL
from training.health import RoutingHealth
from training.loop import Window
from training.optim import MasterAdamW, parameter_groups
from training.revive import NOISE, Revival, choose_revivals, revive, revive_dead

E = 8


def make(dtype=torch.float32, family="qwen3_moe"):
    fields = MODEL | {"num_experts": E}
    if family == "glm4_moe":
        fields |= {"family": family, "first_k_dense_replace": 0}
    model = build_model(ModelConfig(**fields), dtype=dtype).train()
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1)
    return model, MasterAdamW(groups)


def tokens(seed):
    return torch.randint(0, 288, (8, 32), generator=torch.Generator().manual_seed(seed))


def train_step(model, optimizer, seed, lr=1e-3):
    """One step with a balance loss too weak to bring a dead expert back; its statistics."""
    optimizer.zero_grad()
    tokens_BL = tokens(seed)
    out = model(tokens_BL, labels_BL=tokens_BL.roll(-1, 1))
    (out.loss_sum / tokens_BL.numel()).backward()
    optimizer.step(lr)
    return out.router.detach()


def plant(model, optimizer, layer=1, expert=2):
    """An expert whose router row is -100 times the mean direction of what the router sees."""
    held = optimizer.tensors()
    held["weights/embed.weight"].view(288, -1).add_(0.03)  # so that there is such a direction
    optimizer.loaded()
    seen = []
    moe = model.layers[layer].moe
    hook = moe.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(tokens(0))
    hook.remove()
    mean_D = seen[0].flatten(0, 1).mean(0)
    name = f"weights/layers.{layer}.moe.router.weight"
    held[name].view(E, -1)[expert] = -100 * mean_D / mean_D.norm()
    optimizer.loaded()


def test_without_remedy_it_stays_dead_and_with_revival_it_works():
    loads = {}
    for remedy in (False, True):
        model, optimizer = make()
        plant(model, optimizer)
        health = RoutingHealth(2, E)
        told = []
        for step in range(1, 31):
            stats = train_step(model, optimizer, step)
            health.update(stats)
            events = choose_revivals(health.dead_LE, stats.counts_E, after=5)
            if remedy and events:
                told += [(step, event) for event in events]
                revive(model, optimizer, events, seed=0, step=step)
        loads[remedy] = stats.counts_E[1, 2].item() / stats.counts_E[1].float().mean().item()
        mine = [(step, event.dead_steps) for step, event in told if event.layer == 1]
        assert (5, 5) in mine if remedy else not mine
    assert loads[False] == 0
    assert loads[True] > 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_of_the_parent_is_copied(dtype):
    model, optimizer = make(dtype, family="glm4_moe")
    for step in range(3):
        train_step(model, optimizer, step)
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.router.selection_bias.copy_(torch.arange(E) / E)
    before = {name: t.clone() for name, t in optimizer.tensors().items()}
    event = Revival(layer=1, expert=2, parent=5, dead_steps=9)
    revive(model, optimizer, [event], seed=3, step=7)
    after = optimizer.tensors()

    moe = model.layers[1].moe
    assert moe.router.selection_bias[2] == moe.router.selection_bias[5] == 5 / E
    assert model.layers[0].moe.router.selection_bias[2] == 2 / E
    touched = set()
    for parameter in ("w1", "w2", "router.weight"):
        shape = moe.get_parameter(parameter).shape
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            name = f"{kind}/layers.1.moe.{parameter}"
            touched.add(name)
            was, now = before[name].view(shape), after[name].view(shape)
            others = [e for e in range(E) if e != 2]
            assert torch.equal(was[others], now[others])
            if kind != "weights":
                assert torch.equal(now[2], was[5])
                assert now[2].any()
                continue
            noise = (now[2] - was[5]) / was[5].std()
            assert 0.5 * NOISE < noise.std() < 1.5 * NOISE
            assert torch.equal(moe.get_parameter(parameter).detach(), now.to(moe.w1.dtype)) or (
                parameter == "router.weight" and torch.equal(moe.router.weight.detach(), now)
            )
    for name in set(before) - touched:
        assert torch.equal(before[name], after[name]), name

    # the same seed and step draw the same noise, another step draws other noise
    found = []
    for step in (7, 7, 8):
        for name, tensor in optimizer.tensors().items():
            tensor.copy_(before[name])
        revive(model, optimizer, [event], seed=3, step=step)
        found.append(optimizer.tensors()["weights/layers.1.moe.w1"].clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_who_is_revived():
    dead_LE = torch.tensor([[0.0, 4, 7, 0], [4, 4, 0, 0], [0, 0, 0, 0]])
    counts_LE = torch.tensor([[9, 0, 0, 3], [0, 0, 1, 8], [1, 1, 1, 1]])
    assert choose_revivals(dead_LE, counts_LE, 5) == [Revival(0, 2, 0, 7)]
    assert choose_revivals(dead_LE, counts_LE, 4) == [Revival(0, 2, 0, 7), Revival(1, 0, 3, 4)]


def test_a_log_step_revives_and_the_counter_starts_again():
    model, optimizer = make()
    health = RoutingHealth(2, E)
    health.dead_LE[0, 3] = 6
    counts_LE = torch.arange(2 * E).view(2, E)
    read = Window({}, [], {}, counts_LE, {n: t.clone() for n, t in health.tensors().items()})
    looked = []
    job = types.SimpleNamespace(
        config=types.SimpleNamespace(
            router=types.SimpleNamespace(revive_after=7), run=types.SimpleNamespace(seed=0)
        ),
        read=read,
        trainee=types.SimpleNamespace(health=health),
        model=model,
        optimizer=optimizer,
        progress=types.SimpleNamespace(step=40),
        probe=types.SimpleNamespace(look=lambda: looked.append(1)),
    )
    assert revive_dead(job) == []
    job.config.router.revive_after = 6
    assert revive_dead(job) == [Revival(0, 3, E - 1, 6)]
    assert looked == [1], "the next churn is that of training alone"
    assert not health.dead_LE.any()
    difference = model.layers[0].moe.w2[3] - model.layers[0].moe.w2[E - 1]
    assert 0 < difference.norm() < 0.02 * model.layers[0].moe.w2[3].norm()
