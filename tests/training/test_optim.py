"""Parameter groups, float32 master weights, clipping, and steps that are skipped on the device."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

from parallel.engines.local import LocalEngine
from parallel.engines.optimizer import Group
from tests.engines import local_engine
from training.optim.adamw import AdamW
from training.optim.groups import DECAYED, group_table, parameter_groups

NARROW = {"storage": {"weights": "bfloat16", "moments": "bfloat16"}}


class Block(nn.Module):
    """The kinds of parameter of a Mixture-of-Experts layer with biases and QK-norm, in small."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        d, e, n = 4, 3, 5
        self.q = nn.Linear(d, d, bias=True, dtype=dtype)
        self.q_norm = nn.Parameter(torch.ones(d, dtype=dtype))
        self.router = nn.Parameter(torch.randn(e, d))
        self.w1 = nn.Parameter(torch.randn(e, 2 * n, d, dtype=dtype))
        self.b1 = nn.Parameter(torch.zeros(e, 2 * n, dtype=dtype))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=dtype)
        self.layers = nn.ModuleList(Block(dtype) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(4, dtype=dtype))
        self.head = nn.Linear(4, 7, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight


KIND_OF = {
    "embed.weight": "embedding",
    "q.weight": "attention",
    "q.bias": "bias",
    "q_norm": "norm",
    "router": "router",
    "w1": "expert",
    "b1": "bias",
    "norm": "norm",
    "head.weight": "head",
}


def kinds(model: nn.Module) -> dict[str, str]:
    return {
        name: KIND_OF[name.split(".", 2)[2] if name.startswith("layers") else name]
        for name, _ in model.named_parameters()
    }


def build(model: nn.Module, **settings) -> LocalEngine:
    decay = {"weight_decay": settings.pop("weight_decay", 0.1)}
    for key in ("router_weight_decay", "router_lr_multiplier"):
        if key in settings:
            decay[key] = settings.pop(key)
    return local_engine(parameter_groups(model, kinds(model), **decay), model, **settings)


def fill_gradients(model: nn.Module, scale: float = 1.0, seed: int = 0) -> None:
    """One backward pass whose gradients are `scale` times fixed random numbers."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for parameter in model.parameters():
        weight = torch.randn(parameter.shape, generator=generator) * scale
        loss = loss + (parameter.float() * weight).sum()
    loss.backward()


def snapshot(optimizer: LocalEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in optimizer.tensors().items()}


# --- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_in_one_group_with_the_decay_of_the_rule(dtype, tied):
    model = Model(dtype, tied=tied)
    groups = parameter_groups(
        model,
        kinds(model),
        weight_decay=0.1,
        router_weight_decay=0.03,
        router_lr_multiplier=0.5,
    )
    seen: dict[str, Group] = {}
    for group in groups:
        assert len({p.dtype for p in group.parameters.values()}) == 1
        for name in group.parameters:
            assert name not in seen, f"{name} is in {group.name} and in {seen[name].name}"
            seen[name] = group
    assert set(seen) == {name for name, _ in model.named_parameters()}
    expected = {
        "embed.weight": 0.0,
        "norm": 0.0,
        "head.weight": 0.1,
        **{
            f"layers.{i}.{name}": decay
            for i in (0, 1)
            for name, decay in {
                "q.weight": 0.1,
                "q.bias": 0.0,
                "q_norm": 0.0,
                "router": 0.03,
                "w1": 0.1,
                "b1": 0.0,  # two-dimensional, and still a bias
            }.items()
        },
    }
    if tied:
        del expected["head.weight"]
    assert {name: group.weight_decay for name, group in seen.items()} == expected
    assert {n for n, g in seen.items() if g.lr_multiplier == 0.5} == {
        "layers.0.router",
        "layers.1.router",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a5_a_run_that_ended_leaves_no_memory_behind(dtype):
    """Parameters know the optimizer by their hooks, which Python's collector does not see."""
    model = Model(dtype)
    optimizer = build(model)
    gone = [weakref.ref(optimizer), weakref.ref(model.head.weight)]
    assert all(reference() is not None for reference in gone)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_table_accounts_for_every_element():
    model = Model()
    rows = group_table(
        parameter_groups(model, kinds(model), weight_decay=0.1, router_lr_multiplier=0.5),
        optim=AdamW(lr=2.0),
        placement=lambda group: f"where {group} lies",
    )
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in model.parameters())
    assert {row["group"]: (row["lr"], row["weight_decay"]) for row in rows} == {
        "decayed": (2.0, 0.1),
        "experts": (2.0, 0.1),
        "not decayed": (2.0, 0.0),
        "router": (1.0, 0.0),
    }
    assert rows[0]["placement"] == "where dense lies"


def test_unknown_kinds_frozen_parameters_and_doubles():
    model = Model()
    named = kinds(model)
    with pytest.raises(ValueError, match=r"parameter norm is of kind 'nrom'; the decay rule knows"):
        parameter_groups(model, named | {"norm": "nrom"}, weight_decay=0.1)
    del named["norm"]
    with pytest.raises(ValueError, match="parameter norm is of kind None"):
        parameter_groups(model, named, weight_decay=0.1)
    model.norm.requires_grad_(False)
    groups = parameter_groups(model, named, weight_decay=0.1)
    assert all("norm" not in group.parameters for group in groups)
    with pytest.raises(ValueError, match="in several groups"):
        local_engine([*groups, groups[0]])
    assert "router" not in DECAYED


# --- the update ---------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_equals_torch_adamw_with_clipping(micro_batches):
    model = Model()
    oracle = copy.deepcopy(model)
    named = kinds(model)
    optimizer = build(model, clip_norm=1.5, betas=[0.8, 0.9], router_lr_multiplier=0.1)
    reference = torch.optim.AdamW(
        [
            {
                "params": [p],
                "weight_decay": 0.1 if DECAYED.get(named[name]) else 0.0,
                "lr": 0.01 * (0.1 if named[name] == "router" else 1.0),
            }
            for name, p in oracle.named_parameters()
        ],
        betas=(0.8, 0.9),
    )
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        for micro in range(micro_batches):
            fill_gradients(model, seed=10 * step + micro)
            fill_gradients(oracle, seed=10 * step + micro)
        norm = nn.utils.clip_grad_norm_(oracle.parameters(), 1.5)
        outcome = optimizer.step(0.01)
        reference.step()
        assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert outcome.skipped == 0 and outcome.reason == 0
    for (name, a), b in zip(model.named_parameters(), oracle.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


def test_the_norm_of_many_gradients_is_accurate():
    model = nn.Linear(2048, 2048, bias=False)
    group = Group("all", dict(model.named_parameters()), 1.0, 0.0)
    optimizer = local_engine([group])
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(0)
    model.weight.grad.copy_(torch.randn(2048, 2048, generator=generator))
    want = torch.linalg.vector_norm(model.weight.grad.double()).item()
    assert optimizer.step(0.0).grad_norm.item() == pytest.approx(want, rel=3e-7)


def test_bfloat16_weights_move_by_their_float32_masters():
    """p = 1, 100 steps of 6e-4 in one direction: a bfloat16 weight alone would stay at 1."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    group = Group("decayed", {"w": weight}, 1.0, 0.0)
    optimizer = local_engine([group], eps=1e-12, clip_norm=None)
    exact = torch.ones(3, dtype=torch.float64, requires_grad=True)
    reference = torch.optim.AdamW([exact], betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    for _ in range(100):
        optimizer.zero_grad()
        weight.sum().backward()
        assert weight.grad is None, "the hook keeps no bfloat16 gradient"
        optimizer.step(6e-4)
        exact.grad = torch.ones_like(exact)
        reference.param_groups[0]["lr"] = 6e-4
        reference.step()
    master = optimizer.tensors()["weights/w"]
    assert master.dtype == torch.float32 and optimizer.tensors()["exp_avg/w"].dtype == torch.float32
    assert (master - exact).abs().max() < 1e-4
    assert abs(exact[0].item() - 0.94) < 1e-6
    assert torch.equal(weight.detach(), master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", [{}, NARROW])
def test_masters_are_filled_without_rounding(dtype, states):
    """Tied weights too; the parameters stay where they are, and frozen ones what they are."""
    model = Model(dtype, tied=True)
    model.norm.requires_grad_(False)
    optimizer = build(model, **states)
    before = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    value, shapes = torch.tensor(1 / 3), optimizer.shapes()  # on no grid
    optimizer.fill(lambda name, experts: value.expand(shapes[name]))
    assert before == {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    assert model.head.weight is model.embed.weight
    tensors = optimizer.tensors()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert (parameter == 1).all(), name
            continue
        assert (parameter == value.to(parameter.dtype)).all(), name
        master = tensors[f"weights/{name}"]
        assert (master == value.to(master.dtype)).all(), name
    fill_gradients(model)
    assert optimizer.step(0.01).grad_norm > 0
    assert not torch.equal(model.head.weight, torch.full_like(model.head.weight, value))


def test_narrow_states_are_those_of_bfloat16_parameters_alone():
    model = Model(torch.bfloat16)
    optimizer = build(model, **NARROW, seed=3)
    optimizer.zero_grad()
    fill_gradients(model)
    optimizer.step(0.01)
    tensors = optimizer.tensors()
    for name, parameter in model.named_parameters():
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            assert tensors[f"{kind}/{name}"].dtype == parameter.dtype, (kind, name)
        assert torch.equal(tensors[f"weights/{name}"].view(parameter.shape), parameter)
    assert tensors["weights/layers.0.router"].dtype == torch.float32
    assert len({flat.seed for flat in optimizer.flats}) == len(optimizer.flats)


def test_stochastic_rounding_follows_the_seed_and_the_step():
    def run(seed: int, steps: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = Model(torch.bfloat16)
        optimizer = build(model, **NARROW, seed=seed)
        for step in range(steps):
            optimizer.zero_grad()
            fill_gradients(model, seed=step)
            optimizer.step(1e-3)
        return torch.cat(
            [tensor.float() for tensor in optimizer.tensors().values() if tensor.dim()]
        )

    assert torch.equal(run(1, 3), run(1, 3))
    assert not torch.equal(run(1, 3), run(2, 3))


def test_bfloat16_gradients_of_micro_batches_add_up_in_float32():
    """256 + 64 times 1: bfloat16 sums stop at 256."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = local_engine([Group("decayed", {"w": weight}, 1.0, 0.0)])
    (weight * 256).sum().backward()
    for _ in range(64):
        weight.sum().backward()
    assert optimizer.gradient[0] == 320


@pytest.mark.parametrize("states", [{}, NARROW])
def test_one_micro_batch_needs_no_buffer(states):
    """Gradients are read where autograd left them: the same weights and moments."""
    runs = []
    for accumulates in (True, False):
        torch.manual_seed(0)
        model = Model(torch.bfloat16)
        optimizer = build(model, **states, accumulates=accumulates, clip_norm=0.5)
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:  # parameters without gradient
                (model.norm.float().sum() + model.layers[0].router.sum()).backward()
            else:
                fill_gradients(model, seed=step)
            gradients = {n: g.float().clone() for n, g in optimizer.gradients().items()}
            outcome = optimizer.step(0.01)
            assert all(p.grad is None for p in model.parameters() if p.dtype == torch.bfloat16)
        runs.append((snapshot(optimizer), gradients, outcome))
    (with_buffer, wanted, known), (without, found, seen) = runs
    assert seen.grad_norm.item() == pytest.approx(known.grad_norm.item(), rel=1e-6)
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name
    for name, tensor in with_buffer.items():
        torch.testing.assert_close(without[name].float(), tensor.float(), rtol=2e-2, atol=1e-5)
        if tensor.dtype == torch.float32 and tensor.dim():
            torch.testing.assert_close(without[name], tensor, rtol=1e-5, atol=1e-7)
    routers = sum(p.numel() for name, p in model.named_parameters() if "router" in name)
    assert optimizer.gradient.numel() < 2 * 64 * 2 + 3 + routers, "the routers' alone"


def test_a_second_micro_batch_is_refused_where_none_was_expected():
    model = Model(torch.bfloat16)
    optimizer = build(model, accumulates=False)
    optimizer.zero_grad()
    fill_gradients(model)
    with pytest.raises(RuntimeError, match="a second micro-batch in a step"):
        fill_gradients(model)


def test_a_parameter_without_gradient_keeps_none_of_the_last_step():
    """The buffer is not filled with zeros; each step's first gradient overwrites it."""
    model = Model(torch.bfloat16)
    optimizer = build(model, clip_norm=None)
    optimizer.zero_grad()
    fill_gradients(model)
    before = {name: g.clone() for name, g in optimizer.gradients().items()}
    assert all(gradient.any() for gradient in before.values())
    optimizer.step(0.01)
    optimizer.zero_grad()
    for _ in range(2):
        (model.norm.float().sum() + model.layers[0].router.sum()).backward()
    after = optimizer.gradients()
    seen = {"norm", "layers.0.router"}
    for name, gradient in after.items():
        assert torch.equal(gradient, torch.full_like(gradient, 2.0 if name in seen else 0.0)), name
    want = sum(2.0**2 * after[name].numel() for name in seen) ** 0.5
    assert optimizer.step(0.01).grad_norm.item() == pytest.approx(want)


def test_weight_decay_and_multiplier_act_on_the_router_alone():
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build(model, router_lr_multiplier=0.1, weight_decay=0.0, clip_norm=None)
    optimizer.zero_grad()
    fill_gradients(model)
    optimizer.step(0.01)
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - before[name]).abs()
        # Adam's first step has the size of the learning rate, whatever the gradient.
        expected = 0.001 if "router" in name else 0.01
        torch.testing.assert_close(moved, torch.full_like(moved, expected), rtol=2e-3, atol=0)
    assert optimizer.lrs(0.01) == (0.01, pytest.approx(0.001))


def test_the_multiplier_is_exact_where_a_weight_of_the_loss_does_nothing():
    """Under Adam the steps of a router scale with its learning rate and with nothing else."""

    def moved(multiplier: float, gradient: float) -> dict[str, torch.Tensor]:
        model = Model()
        optimizer = build(
            model, router_lr_multiplier=multiplier, weight_decay=0.0, clip_norm=None, eps=1e-12
        )
        for name, tensor in optimizer.tensors().items():
            if name.startswith("weights/"):  # from zero, the weight is the sum of the steps
                tensor.zero_()
        optimizer.loaded()
        for step in range(4):
            optimizer.zero_grad()
            fill_gradients(model, gradient, seed=step)
            optimizer.step(0.01)
        return {name: p.detach() for name, p in model.named_parameters()}

    plain, slow, weak = moved(1.0, 1.0), moved(0.1, 1.0), moved(1.0, 0.1)
    for name, steps in plain.items():
        factor = 0.1 if "router" in name else 1.0
        torch.testing.assert_close(slow[name], factor * steps, rtol=1e-5, atol=0)
        torch.testing.assert_close(weak[name], steps, rtol=1e-5, atol=1e-8)


def test_pieces_are_aligned_and_cover_the_parameters():
    model = Model(torch.bfloat16)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build(model)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() % 64 == 0, name  # what malloc itself gives
        assert torch.equal(parameter, values[name]), f"{name} changed when it moved"
    shapes = optimizer.shapes()
    for name in values:
        piece = optimizer.tensors()[f"weights/{name}"]
        assert torch.equal(piece.view(shapes[name]), values[name].float())


# --- skipped steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["nan", "inf", "loss", "overflow"])
def test_a_bad_step_leaves_no_trace(dtype, fault):
    """Weights, moments, step count equal bit for bit those of a run that never saw the step."""
    torch.manual_seed(0)
    faulty = Model(dtype)
    clean = copy.deepcopy(faulty)
    a, b = build(faulty, spike_factor=100.0), build(clean, spike_factor=100.0)
    for step in range(5):
        a.zero_grad()
        if step == 2:
            fill_gradients(faulty, seed=99)
            if fault == "loss":
                a.terms[0] = float("nan")
            else:
                bad = {"nan": float("nan"), "inf": float("inf"), "overflow": 3e38}[fault]
                a.gradient[5:9] = bad
            outcome = a.step(0.01)
            assert outcome.skipped == 1 and outcome.reason == 1
            continue
        b.zero_grad()
        fill_gradients(faulty, seed=step)
        fill_gradients(clean, seed=step)
        assert a.step(0.01).skipped == 0
        b.step(0.01)
    kept, expected = snapshot(a), snapshot(b)
    assert kept.pop("guard/skipped") == 1 and expected.pop("guard/skipped") == 0
    for name in expected:
        assert torch.equal(kept[name], expected[name]), name
    for p, q in zip(faulty.parameters(), clean.parameters()):
        assert torch.equal(p, q)
    assert kept["updates"] == 4


def run_norms(norms: list[float], **settings) -> list[int]:
    """Reasons of steps whose gradients have these norms."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = local_engine([Group("decayed", {"w": weight}, 1.0, 0.0)], **settings)
    reasons = []
    for norm in norms:
        optimizer.zero_grad()
        optimizer.gradient[0] = norm
        reasons.append(int(optimizer.step(0.01).reason))
    return reasons


def test_spikes_are_skipped_after_some_history():
    assert run_norms([1.0] * 25 + [100.0, 1.0, 4.9], spike_factor=5.0)[25:] == [2, 0, 0]
    assert run_norms([1.0] * 10 + [100.0], spike_factor=5.0)[-1] == 0, "too early to tell"
    assert run_norms([1.0] * 25 + [100.0])[-1] == 0, "no factor, no limit"


def test_a_lasting_change_of_scale_is_followed():
    reasons = run_norms([1.0] * 30 + [20.0] * 60, spike_factor=4.0)
    assert 2 in reasons, "at first it looks like a spike"
    assert reasons[-1] == 0, "and must not be refused forever"


def test_nan_does_not_enter_the_running_mean():
    reasons = run_norms([1.0] * 25 + [math.nan] * 3 + [2.0, 50.0], spike_factor=5.0)
    assert reasons[25:] == [1, 1, 1, 0, 2]


def test_stop_policy_holds_the_weights_until_the_host_looks():
    reasons = run_norms([1.0, math.inf, 1.0, 1.0], on_nonfinite="stop")
    assert reasons == [0, 1, 3, 3]
    assert run_norms([1.0, math.inf, 1.0], on_nonfinite="skip") == [0, 1, 0]


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "states"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, NARROW)],
)
def test_state_moves_to_another_optimizer_bit_for_bit(dtype, states):
    torch.manual_seed(0)
    model = Model(dtype)
    optimizer = build(model, router_lr_multiplier=0.1, **states)
    for step in range(3):
        optimizer.zero_grad()
        fill_gradients(model, seed=step)
        optimizer.step(0.01)
    saved = snapshot(optimizer)

    torch.manual_seed(1)
    other_model = Model(dtype)
    other = build(other_model, router_lr_multiplier=0.1, **states)
    for name, tensor in other.tensors().items():
        tensor.copy_(saved[name])
    other.loaded()
    for (name, p), q in zip(model.named_parameters(), other_model.parameters()):
        assert torch.equal(p, q), name
    before = {name: p.detach().clone() for name, p in other_model.named_parameters()}
    for each, optim in ((model, optimizer), (other_model, other)):
        optim.zero_grad()
        fill_gradients(each, seed=7)
        optim.step(0.01)
    for (name, p), q in zip(model.named_parameters(), other_model.named_parameters()):
        assert torch.equal(p, q[1]), name
    moved = {n: (p.detach() - before[n]).abs().max() for n, p in other_model.named_parameters()}
    assert moved["layers.0.router"] < 0.2 * moved["layers.0.w1"], "the multiplier survives"


def test_finite_check_sees_weights_and_moments():
    model = Model()
    optimizer = build(model)
    assert optimizer.all_finite()
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        piece = optimizer.tensors()[f"{kind}/layers.1.w1"]
        piece[3] = float("nan")
        assert not optimizer.all_finite(), kind
        piece[3] = 0.0
    assert optimizer.all_finite()
