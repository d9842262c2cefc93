"""Experts that come and go: who is chosen, what moves with them, and whole runs with events."""

import types

import pytest
import torch

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from models.first_weights import FirstWeights
from models.hf import export_hf
from moe.surgery import Change
from tests.engines import local_engine
from tests.training.tiny import MODEL
from training.health import RoutingHealth
from training.optim.groups import parameter_groups
from training.surgery.changes import make_changes
from training.surgery.config import ExpertEvent, ExpertsConfig, Importance, Replace, Resize
from training.surgery.importance import ExpertImportance
from training.surgery.policy import Seen, choose_revivals, decide, level, scheduled

E = 8
NOISE = 0.01


def make(dtype=torch.float32, family="qwen3_moe", accumulates=True, **options):
    fields = MODEL | {"num_experts": E}
    if family == "glm4_moe":
        fields |= {"family": family, "first_k_dense_replace": 0}
    # small embeddings, so that tokens share the direction that a dead expert's row points away from
    options = {"first": FirstWeights(embedding=0.02)} | options
    model = build_model(ModelConfig(**fields), dtype=dtype, **options).train()
    return model, local_engine(parameter_groups_of(model), accumulates=accumulates)


def parameter_groups_of(model):
    return parameter_groups(model, parameter_kinds(model), weight_decay=0.1)


def revive(model, optimizer, changes, seed=0, step=0):
    make_changes(model, optimizer, changes, dormant=False, noise=NOISE, seed=seed, step=step)


def seen(counts_LE, dead_LE=None, **more):
    active_LE = torch.ones_like(counts_LE, dtype=torch.bool)
    dead_LE = torch.zeros(counts_LE.shape) if dead_LE is None else dead_LE
    return Seen(**{"active_LE": active_LE, "counts_LE": counts_LE, "dead_LE": dead_LE} | more)


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
            health.after_update(stats, torch.tensor(1.0))
            events = choose_revivals(seen(stats.counts_E, health.dead_LE), after=5)
            if remedy and events:
                told += [(step, event) for event in events]
                revive(model, optimizer, events, seed=0, step=step)
        loads[remedy] = stats.counts_E[1, 2].item() / stats.counts_E[1].float().mean().item()
        mine = [(step, event.reason) for step, event in told if event.layer == 1]
        assert (5, "dead for 5 steps") in mine if remedy else not mine
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
    event = Change("revive", layer=1, expert=2, parent=5)
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
    now = seen(counts_LE, dead_LE)
    found = [(c.layer, c.expert, c.parent, c.reason) for c in choose_revivals(now, 5)]
    assert found == [(0, 2, 0, "dead for 7 steps")]
    found = [(c.layer, c.expert, c.parent) for c in choose_revivals(now, 4)]
    assert found == [(0, 2, 0), (1, 0, 3)]


# --- who and when ---------------------------------------------------------------------------------


def test_events_see_those_before_them():
    now = seen(
        torch.ones(1, 4),
        active_LE=torch.tensor([[True, True, True, False]]),
        importance_LE=torch.tensor([[3.0, 1, 2, 0]]),
        load_LE=torch.tensor([[1.0, 1, 2, 0]]),
    )
    events = [
        ExpertEvent(step=5, kind="clone"),  # load times importance: 3, 1, 4
        ExpertEvent(step=5, kind="retire"),
        ExpertEvent(step=5, kind="clone", expert=0),  # into the place that is free now
        ExpertEvent(step=5, kind="revive", expert=3),
        ExpertEvent(step=6, kind="retire", expert=0),
    ]
    found = [(c.kind, c.expert, c.parent) for c in scheduled(events, 5, now)]
    assert found == [("clone", 3, 2), ("retire", 1, None), ("clone", 1, 0), ("revive", 2, 3)]
    assert [c.expert for c in scheduled(events, 6, now)] == [0]


def policy(**fields):
    kind = {"resize": Resize, "replace": Replace}[fields.pop("policy", "resize")]
    own = [key for key in fields if key in kind.model_fields]  # clone_above only of resize
    return kind(**{"every": 10, "cooldown": 100} | {key: fields[key] for key in own})


def follower(importance_E, load_E=(1.0, 1, 1, 1), active_E=(True,) * 4, low_E=(0.0,) * 4, **more):
    return seen(
        torch.ones(1, 4),
        active_LE=torch.tensor([active_E]),
        importance_LE=torch.tensor([importance_E]),
        load_LE=torch.tensor([load_E]),
        low_LE=torch.tensor([low_E]),
        **{"changed_L": torch.tensor([-1e9])} | more,
    )


def kinds(found):
    return [(change.kind, change.expert, change.parent) for change in found[0]]


def test_who_is_not_needed_twice_in_a_row_retires():
    idle = [1.0, 0.001, 1.2, 0.9]
    found = decide(policy(), follower(idle), 500, (2, 4))
    assert kinds(found) == []
    assert found[1].tolist() == [[0, 1, 0, 0]]
    found = decide(policy(), follower(idle, low_E=(0, 1.0, 0, 0)), 500, (2, 4))
    assert kinds(found) == [("retire", 1, None)]
    assert "importance 0.0011 of the median" in found[0][0].reason
    # above the line: forgotten
    found = decide(policy(), follower([1.0, 0.02, 1.2, 0.9], low_E=(0, 1.0, 0, 0)), 500, (2, 4))
    assert kinds(found) == []
    assert not found[1].any()


def test_limits_cooldown_and_the_last_release_hold():
    idle, busy = [1.0, 0.001, 1.2, 0.9], (0.6, 0.6, 2.0, 0.6)
    twice = {"low_E": (0, 1.0, 0, 0)}
    assert kinds(decide(policy(), follower(idle, **twice), 500, (4, 4))) == []
    recent = {"changed_L": torch.tensor([401.0])}
    assert kinds(decide(policy(), follower(idle, **twice, **recent), 500, (2, 4))) == []
    recent = {"changed_L": torch.tensor([400.0])}
    assert kinds(decide(policy(), follower(idle, **twice, **recent), 500, (2, 4))) != []
    three = (True, True, True, False)
    loaded = follower([1.0, 1, 1.2, 0], (*busy[:3], 0.0), three)  # 2.0 of a mean of 1.07
    assert kinds(decide(policy(), loaded, 500, (2, 4))) == [("clone", 3, 2)]
    assert kinds(decide(policy(), loaded, 500, (2, 3))) == []
    assert kinds(decide(policy(clone_above=1.9), loaded, 500, (2, 4))) == []
    assert kinds(decide(policy(), loaded, 500, (2, 4), may_clone=False)) == []


def test_replacing_keeps_the_number_and_the_dead_go_first():
    dead = {"dead_LE": torch.tensor([[0.0, 0, 0, 200]])}
    now = follower([1.0, 0.5, 1.2, 0.9], (1.0, 1, 2, 0), **dead)
    assert kinds(decide(policy(policy="replace"), now, 500, (2, 4))) == [("revive", 3, 2)]
    assert kinds(decide(policy(), now, 500, (2, 4))) == [("retire", 3, None)]
    now = follower([1.0, 0.5, 1.2, 0.9], (1.0, 1, 2, 0))
    assert kinds(decide(policy(policy="replace"), now, 500, (2, 4))) == []


def test_layers_are_levelled_by_importance():
    now = seen(
        torch.ones(3, 4),
        active_LE=torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 1]]).bool(),
        importance_LE=torch.tensor([[1.0, 2, 0, 0], [4, 1, 3, 2], [1, 0, 1, 0.5]]),
    )
    found = [(c.kind, c.layer, c.expert) for c in level(now)]
    assert found == [("retire", 1, 1), ("retire", 1, 3), ("retire", 2, 3)]


def test_families_do_not_fall_below_k():
    """Two are needed: 3 is the last of its family, and 1 may not follow 0."""
    families = {"family_LE": torch.tensor([[0.0, 0, 0, 3]]), "k": 2}
    dead = {"dead_LE": torch.tensor([[0.0, 200, 0, 300]])}
    for which, kind, parent in (("resize", "retire", None), ("replace", "revive", 2)):
        for more, expert in (({}, 3), (families, 1)):
            now = follower([1.0, 0.5, 1.2, 0.4], (1.0, 1, 2, 1), **dead, **more)
            found = decide(policy(policy=which, clone_above=9), now, 500, (2, 4))
            assert kinds(found) == [(kind, expert, parent)]
    counts_LE, alone = torch.tensor([[9.0, 0, 1, 0]]), torch.tensor([[0.0, 0, 0, 300]])
    now = seen(counts_LE, dead["dead_LE"], **families)
    assert [(c.expert, c.parent) for c in choose_revivals(now, 5)] == [(1, 0)]
    assert [c.expert for c in choose_revivals(seen(counts_LE, alone), 5)] == [3]
    assert not choose_revivals(seen(counts_LE, alone, **families), 5)
    first = torch.tensor([[300.0, 0, 0, 0]])
    of_first = families | {"family_LE": torch.tensor([[0.0, 1, 1, 1]])}
    assert not choose_revivals(seen(counts_LE, first, **of_first), 5)
    assert choose_revivals(seen(counts_LE, first, **of_first | {"k": 1}), 5)


def test_levelling_leaves_k_families():
    now = seen(
        torch.ones(2, 4),
        active_LE=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool(),
        importance_LE=torch.tensor([[3.0, 2, 2.5, 1], [1, 1, 0, 0]]),
        load_LE=torch.ones(2, 4),
        family_LE=torch.tensor([[0.0, 0, 0, 3], [0, 1, 0, 0]]),
        k=2,
    )
    assert [(c.kind, c.layer, c.expert) for c in level(now)] == [("retire", 0, 1), ("retire", 0, 2)]
    assert now.active_LE.tolist() == [[True, False, False, True], [True, True, False, False]]


def test_a_copy_is_of_the_family_of_its_parent():
    now = seen(
        torch.ones(1, 4),
        active_LE=torch.tensor([[True, True, True, False]]),
        importance_LE=torch.tensor([[3.0, 1, 2, 0]]),
        load_LE=torch.ones(1, 4),
        family_LE=torch.tensor([[0.0, 1, 2, 0]]),
        k=2,
    )
    scheduled([ExpertEvent(step=5, kind="clone", expert=2)], 5, now)
    assert now.family_LE.tolist() == [[0, 1, 2, 2]]
    assert now.spare(0).all()
    scheduled([ExpertEvent(step=6, kind="retire", expert=1)], 6, now)
    assert now.spare(0).tolist() == [False, False, True, True]


# --- what is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["load", "gate_mass", "reap", "taylor"])
def test_importance_is_an_average_over_applied_steps(how):
    model, optimizer = make(start_experts=6, importance=how)
    config = types.SimpleNamespace(
        expert_changes=ExpertsConfig(
            importance=Importance(kind=how, decay=0.5), policy={"kind": "resize"}
        ),
        model=types.SimpleNamespace(config=model.config),
    )
    follower = ExpertImportance.make(config, model, optimizer, torch.device("cpu"), 8)
    wanted_LE = torch.zeros(2, E)
    for step in range(4):
        optimizer.zero_grad()
        tokens_BL = tokens(step)
        out = model(tokens_BL, labels_BL=tokens_BL.roll(-1, 1))
        (out.loss_sum / tokens_BL.numel()).backward()
        stats = out.router.detach()
        applied = torch.tensor(float(step != 2))
        follower.before_update()
        if step != 2:
            now_LE = {
                "load": 6 * stats.counts_E / stats.counts_E.sum(1, keepdim=True),
                "gate_mass": stats.importance_sum_E,
                "reap": stats.importance_sum_E,
                "taylor": torch.stack([
                    (layer.moe.w2 * layer.moe.w2.grad).sum((1, 2)).abs() for layer in model.layers
                ]),
            }[how]  # fmt: skip
            if how == "gate_mass":
                assert (now_LE.sum(1) < stats.tokens).all()  # gates of a raw softmax
                now_LE = now_LE / stats.tokens[:, None]
            if how == "reap":
                now_LE = now_LE / stats.rows_E.clamp(min=1)
            wanted_LE = 0.5 * wanted_LE + 0.5 * now_LE
        optimizer.step(1e-3)
        follower.after_update(stats, applied)
    assert wanted_LE[:, :6].min() > 0
    torch.testing.assert_close(follower.importance_LE, wanted_LE.float().detach())
    assert not follower.importance_LE[:, 6:].any()
    follower.expert_changed(Change("clone", 7, 2, layer=1), 40)
    follower.expert_changed(Change("retire", 0, layer=0), 50)
    assert follower.importance_LE[1, 7] == follower.importance_LE[1, 2] > 0
    assert follower.importance_LE[0, 0] == follower.load_LE[0, 0] == 0
    assert follower.changed_L.tolist() == [50, 40]


@pytest.mark.parametrize("accumulates", [True, False])
def test_what_goes_with_an_expert_is_read_wherever_its_gradient_lies(accumulates):
    """bfloat16 gradients of a step of one micro-batch stay where autograd put them."""
    model, optimizer = make(
        torch.bfloat16, accumulates=accumulates, start_experts=6, importance="taylor"
    )
    config = types.SimpleNamespace(
        expert_changes=ExpertsConfig(
            importance=Importance(kind="taylor", decay=0.0), policy={"kind": "resize"}
        ),
        model=types.SimpleNamespace(config=model.config),
    )
    follower = ExpertImportance.make(config, model, optimizer, torch.device("cpu"), 8)
    for step in range(3):
        optimizer.zero_grad()
        out = model(tokens(step), labels_BL=tokens(step).roll(-1, 1))
        (out.loss_sum / 256).backward()
        follower.before_update()
        follower.after_update(out.router.detach(), torch.tensor(1.0))
        held, gradients = optimizer.tensors(), optimizer.gradients()
        for layer in range(2):
            name = f"layers.{layer}.moe.w2"
            product = held[f"weights/{name}"].double() * gradients[name].double()
            wanted_E = product.view(E, -1).sum(1).abs().float()
            assert wanted_E[:6].min() > 0
            torch.testing.assert_close(
                follower.importance_LE[layer], wanted_E, rtol=1e-3, atol=1e-7
            )
        optimizer.step(1e-2)


def test_a_clone_brings_moments_and_a_retirement_leaves_none():
    model, optimizer = make(start_experts=7)
    for step in range(2):
        train_step(model, optimizer, step)
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    changes = [Change("clone", 7, 1, layer=0), Change("retire", 2, layer=1)]
    revive(model, optimizer, changes)
    for name, tensor in optimizer.tensors().items():
        kind, _, rest = name.partition("/")
        if ".moe." not in rest:
            assert torch.equal(tensor, before[name])
            continue
        was, now = before[name].view(E, -1), tensor.view(E, -1)
        slot = 7 if "layers.0" in rest else 2
        others = [e for e in range(E) if e != slot]
        assert torch.equal(now[others], was[others])
        if slot == 2:
            assert torch.equal(now[2], was[2]) if kind == "weights" else not now[2].any()
        elif kind == "weights":
            assert 0 < (now[7] - was[1]).std() < 0.02 * was[1].std()
        else:
            assert torch.equal(now[7], was[1])
    assert model.layers[0].moe.router.active_E.sum() == 8
    assert model.layers[1].moe.router.active_E.tolist() == [1, 1, 0, 1, 1, 1, 1, 0]


def test_uneven_layers_are_not_exported(tmp_path):
    model, _ = make(start_experts=7)
    revive(model, local_engine(parameter_groups_of(model)), [Change("retire", 2, layer=1)])
    with pytest.raises(ValueError, match=r"layer 0: 7, layer 1: 6\), which qwen3_moe cannot say"):
        export_hf(model, tmp_path / "hf")
