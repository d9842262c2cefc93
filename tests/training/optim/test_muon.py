"""Muon against plain references: torch's for one matrix, and one matrix at a time for experts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models.build import parameter_kinds
from moe import MoE
from parallel.engines.local import LocalEngine
from parallel.engines.optimizer import Group
from tests.distributed import tiny
from tests.moe.oracle import layer_config
from training.optim.adamw import AdamW
from training.optim.groups import parameter_groups
from training.optim.muon import Muon
from training.optim.newton_schulz import orthogonalised, update_scale

D, N, E = 8, 6, 3
LR, DECAY, MOMENTUM = 0.01, 0.1, 0.9


def engine_of(model: nn.Module, kinds: dict[str, str], **settings) -> LocalEngine:
    groups = parameter_groups(model, kinds, weight_decay=DECAY, by_matrix=True)
    optimizer = Muon(momentum=MOMENTUM, clip_norm=None, **settings)
    return LocalEngine(model, groups, optimizer, num_terms=1)


def layer_of(**fields) -> tuple[MoE, dict[str, str]]:
    sizes = {"hidden_size": D, "expert_size": N, "num_experts": E, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    layer = MoE(layer_config(**sizes | fields))
    return layer, {name: parameter_kinds(layer)[name] for name, _ in layer.named_parameters()}


def step(engine: LocalEngine, gradients: dict[str, torch.Tensor], lr: float = LR):
    engine.zero_grad()
    for name, gradient in engine.gradients().items():
        gradient.copy_(gradients[name].reshape(-1))
    return engine.step(lr)


def random_gradients(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


class OneMatrix:
    """Muon of one matrix, as the papers write it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.momentum = weight.double().clone(), torch.zeros_like(weight).double()

    def step(self, gradient: torch.Tensor, lr: float = LR) -> None:
        self.momentum = MOMENTUM * self.momentum + gradient
        ahead = MOMENTUM * self.momentum + gradient
        update = orthogonalised(ahead[None], torch.float64)[0] * update_scale(*ahead.shape)
        self.weight = (1 - lr * DECAY) * self.weight - lr * update


def references(layer: MoE) -> dict[tuple, OneMatrix]:
    """(expert, gate 0 or up 1) and (expert, "down")."""
    found = {}
    for e in range(E):
        for turn in (0, 1):
            found[e, turn] = OneMatrix(layer.w1.detach()[e, turn::2])
        found[e, "down"] = OneMatrix(layer.w2.detach()[e])
    return found


def matrix(w1: torch.Tensor, w2: torch.Tensor, key: tuple) -> torch.Tensor:
    return w2[key[0]] if key[1] == "down" else w1[key[0], key[1] :: 2]


# ------------------------------------------------------------------------------------ the update


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_plain_matrix_moves_as_by_torch(shape):
    """Which iterates in bfloat16: hence a tolerance of percents of the update."""
    model = nn.Linear(shape[1], shape[0], bias=False)
    oracle = copy.deepcopy(model)
    engine = engine_of(model, {"weight": "attention"})
    reference = torch.optim.Muon(
        oracle.parameters(), lr=LR, weight_decay=DECAY, momentum=MOMENTUM, nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    for seed in range(5):
        start = oracle.weight.detach().clone()
        step(engine, random_gradients(model, seed))
        oracle.weight.grad = random_gradients(oracle, seed)["weight"]
        reference.step()
        moved = (oracle.weight - start).norm()
        assert (model.weight - oracle.weight).norm() < 0.03 * moved * (seed + 1)
    assert moved > 1e-3


def test_every_matrix_of_every_expert_moves_by_itself():
    layer, kinds = layer_of(shared_expert_size=10)
    shared = OneMatrix(layer.shared.up_proj.weight.detach())
    wanted = references(layer)
    engine = engine_of(layer, kinds)
    for seed in range(3):
        gradients = random_gradients(layer, seed)
        gradients["w1"][0] *= 1e-6  # one expert's size is no other one's business
        step(engine, gradients)
        shared.step(gradients["shared.up_proj.weight"])
        for key, reference in wanted.items():
            reference.step(matrix(gradients["w1"], gradients["w2"], key))
            got = matrix(layer.w1, layer.w2, key).double()
            torch.testing.assert_close(got, reference.weight, rtol=0, atol=1e-6)
    got = layer.shared.up_proj.weight.double()
    torch.testing.assert_close(got, shared.weight, rtol=0, atol=1e-6)


def test_experts_of_different_widths_move_by_themselves():
    widths = (2, 6, 4)
    layer, kinds = layer_of(expert_widths=widths)
    before = [layer.w1.detach().clone(), layer.w2.detach().clone()]
    gradients = random_gradients(layer, 1)
    step(engine_of(layer, kinds), gradients)
    first = 0
    for size in widths:
        rows = {0: slice(2 * first, 2 * (first + size)), 1: slice(first, first + size)}
        first += size
        for number, weight in enumerate((layer.w1, layer.w2)):
            turns = 2 - number
            for turn in range(turns):
                old, gradient, new = (
                    t[rows[number]][turn::turns]
                    for t in (before[number], gradients[("w1", "w2")[number]], weight)
                )
                reference = OneMatrix(old)
                reference.step(gradient)
                torch.testing.assert_close(new.double(), reference.weight, rtol=0, atol=1e-6)


def test_an_expert_without_gradient_is_not_moved_and_moves_no_other():
    runs = []
    for idle in (True, False):
        layer, kinds = layer_of()
        engine = engine_of(layer, kinds)
        step(engine, random_gradients(layer, 0))
        before, momentum = layer.w1.detach().clone(), engine.tensors()["momentum/w1"].clone()
        gradients = random_gradients(layer, 1)
        if idle:
            gradients["w1"][1] = gradients["w2"][1] = 0
        step(engine, gradients)
        runs.append((layer, before, momentum.view(E, -1), engine.tensors()["momentum/w1"]))
    (layer, before, momentum, after), (other, *_) = runs
    torch.testing.assert_close(layer.w1[1], (1 - LR * DECAY) * before[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(after.view(E, -1)[1], MOMENTUM * momentum[1], rtol=1e-6, atol=0)
    assert not torch.equal(layer.w1[1], other.w1[1])
    for e in (0, 2):
        torch.testing.assert_close(layer.w1[e], other.w1[e], rtol=0, atol=1e-7)
        torch.testing.assert_close(layer.w2[e], other.w2[e], rtol=0, atol=1e-7)


def test_a_skipped_step_keeps_every_bit():
    layer, kinds = layer_of()
    engine = engine_of(layer, kinds)
    step(engine, random_gradients(layer, 0))
    kept = {name: tensor.clone() for name, tensor in engine.parts().items()}
    gradients = random_gradients(layer, 1)
    gradients["w1"][1, 2, 3] = float("nan")
    assert step(engine, gradients).skipped == 1
    for name, tensor in engine.parts().items():
        assert torch.equal(tensor, kept[name]), name


@pytest.mark.parametrize("least", [1, 150])
def test_large_pieces_are_taken_one_after_the_other_and_cut(monkeypatch, least):
    runs = []
    for most in (least, 1 << 25):
        monkeypatch.setattr("parallel.engines.matrices.BATCH", most)
        layer, kinds = layer_of(shared_expert_size=6)
        engine = engine_of(layer, kinds)
        for seed in range(2):
            step(engine, random_gradients(layer, seed))
        runs.append(engine.tensors())
    for name, tensor in runs[0].items():
        torch.testing.assert_close(tensor, runs[1][name], rtol=0, atol=1e-6, msg=name)


def test_calls_follow_the_shapes_and_not_the_layers(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "training.optim.muon.orthogonalised", lambda x: calls.append(len(x)) or orthogonalised(x)
    )
    model = tiny.build(tiny.config("olmoe", num_hidden_layers=3))
    engine = engine_of(model, parameter_kinds(model))
    step(engine, random_gradients(model, 0))
    layers, experts = 3, model.config.num_experts
    assert sum(calls) == layers * (4 + 3 * experts)
    attention = {p.shape for n, p in model.named_parameters() if ".attn." in n and p.dim() == 2}
    assert len(calls) == 2 + len(attention)  # gate and up; down


# ------------------------------------------------------------------------------------ who gets it


def test_the_rest_is_adamw_with_the_same_settings():
    model = tiny.build(tiny.config("qwen3_moe"))
    engine = engine_of(model, parameter_kinds(model), betas=[0.8, 0.7], eps=1e-3)
    kinds, states = parameter_kinds(model), {}
    for name in kinds:
        states.setdefault(kinds[name], set()).add(tuple(engine.states(name)))
    one, two = {("momentum",)}, {("exp_avg", "exp_avg_sq")}
    inside = dict.fromkeys(("attention", "mlp", "expert"), one)
    assert states == inside | dict.fromkeys(("embedding", "head", "norm", "bias", "router"), two)
    rules = {group.name: engine.rule.of(group) for group in engine.groups}
    assert {name for name, rule in rules.items() if isinstance(rule, Muon)} == {
        "matrices", "experts"
    }  # fmt: skip
    head = rules["decayed"]
    assert isinstance(head, AdamW) and head.betas == [0.8, 0.7] and head.eps == 1e-3
    decays = {group.name: group.weight_decay for group in engine.groups}
    assert decays["matrices"] == decays["decayed"] == decays["experts"] == DECAY


def test_a_vector_inside_of_a_layer_does_not_take_the_matrices_from_muon():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.sinks = nn.Parameter(torch.ones(4))

    kinds = {"weight": "attention", "sinks": "attention"}
    engine = engine_of(Layer(), kinds)
    assert engine.states("weight") == ["momentum"]
    assert engine.states("sinks") == ["exp_avg", "exp_avg_sq"]


def test_narrow_states_are_rounded_at_random():
    model = nn.Linear(16, 16, bias=False).bfloat16()
    storage = {"weights": "bfloat16", "moments": "bfloat16"}
    engine = engine_of(model, {"weight": "mlp"}, storage=storage)
    wide = OneMatrix(model.weight.detach())
    for seed in range(3):
        gradients = random_gradients(model, seed)
        step(engine, gradients)
        wide.step(gradients["weight"])
    momentum = engine.tensors()["momentum/weight"]
    assert momentum.dtype == model.weight.dtype == torch.bfloat16
    error = (momentum.double().view(16, 16) - (1 - MOMENTUM) * wide.momentum).abs().max()
    assert 0 < error < 0.01
    assert 0 < (model.weight.double() - wide.weight).abs().max() < 0.01


def test_a_group_of_ones_own_without_matrices_is_adamw():
    weight = nn.Parameter(torch.ones(4, 4))
    engine = LocalEngine(nn.Module(), [Group("all", {"w": weight})], Muon(), num_terms=1)
    assert engine.states("w") == ["exp_avg", "exp_avg_sq"]


# ------------------------------------------------------------------------- experts that are copied


def test_momentum_follows_copied_experts():
    model = tiny.build(tiny.config())
    groups = tiny.groups_of(model, by_matrix=True)
    engine = LocalEngine(model, groups, Muon(), num_terms=3)
    found = tiny.revived(engine, model)
    names = [name for name in found if name.startswith("momentum/") and name.endswith("moe.w1")]
    first, second = (found[name].view(8, -1) for name in names)
    assert torch.equal(first[2], first[5]) and torch.equal(second[7], second[0])
    assert first[2].any() and not torch.equal(first[1], first[5])
