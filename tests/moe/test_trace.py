"""Recording and replaying the routing of a model."""

import copy
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe import MoE, MoEConfig, RouterStats, RoutingTrace
from tests.moe.oracle import check_gradients, make_layer


class Model(torch.nn.Module):
    """Two MoE layers with residuals, run under activation checkpointing if asked."""

    def __init__(self, dtype=torch.float32, recompute=False, **fields):
        super().__init__()
        self.first = make_layer(dtype, **fields)
        self.second = make_layer(dtype, **fields)
        self.recompute = recompute

    def forward(self, x, valid=None):
        stats = []
        for layer in (self.first, self.second):
            if self.recompute:
                y, one = checkpoint(layer, x, valid, use_reentrant=False)
            else:
                y, one = layer(x, valid)
            x = x + y
            stats.append(one)
        return x, RouterStats.stack(stats)


def recorded(model, *batches) -> RoutingTrace:
    trace = RoutingTrace(model)
    with trace.record():
        for x in batches:
            model(x)
    return trace


def chosen(trace, layer="first", forward=0):
    return trace.entries[layer][forward].choice.ids_S()


@pytest.mark.parametrize("gates", ["live", "frozen"])
def test_replay_of_the_same_model_is_the_same(gates):
    model = Model(shared_expert_size=3)
    a, b = torch.randn(9, 6), torch.randn(5, 6)
    right = [model(a), model(b)]
    trace = recorded(model, a, b)
    assert [len(entries) for entries in trace.entries.values()] == [2, 2]
    with trace.replay(gates=gates):
        for x, (y, stats) in zip((a, b), right):
            again, again_stats = model(x)
            torch.testing.assert_close(again, y)
            for found, wanted in zip(again_stats, stats):
                torch.testing.assert_close(found, wanted)


def test_replay_holds_the_choice_when_the_router_would_choose_otherwise():
    model = Model()
    x = torch.randn(30, 6)
    trace = recorded(model, x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.router.weight.neg_()
        other.second.router.weight.neg_()
    assert not torch.equal(chosen(recorded(other, x)), chosen(trace))
    again = RoutingTrace(other)
    counts = []
    with trace.replay(other):
        _, stats = other(x)
        counts.append(stats.counts_E)
    assert torch.equal(counts[0], model(x)[1].counts_E)  # the recorded load, not the router's own
    assert not torch.equal(other(x)[1].counts_E, counts[0])
    assert again.entries == {"first": [], "second": []}


def test_live_and_frozen_gates():
    model = Model()
    x = torch.randn(30, 6)
    trace = recorded(model, x)
    right = model(x)[0].detach()
    with torch.no_grad():
        model.first.router.weight.mul_(0.5)
    with trace.replay(gates="frozen"):
        torch.testing.assert_close(model(x)[0].detach(), right)
    with trace.replay(gates="live"):
        y, _ = model(x)
    assert (y - right).abs().max() > 1e-3
    y.sum().backward()
    assert model.first.router.weight.grad.abs().max() > 0
    model.zero_grad()
    with trace.replay(gates="frozen"):
        y, stats = model(x)
    y.sum().backward(retain_graph=True)
    weight = model.second.router.weight
    assert weight.grad is None or weight.grad.abs().max() == 0
    stats.z_sum.sum().backward()  # the auxiliary losses still reach the router
    assert weight.grad.abs().max() > 0


@pytest.mark.parametrize("norm", ["topk_sum", "none"])
def test_live_gates_are_differentiable(norm):
    model = Model(torch.float64, norm=norm, route_scale=1.3)
    x = torch.randn(7, 6, dtype=torch.float64)
    trace = recorded(model, x)

    def value():
        with trace.replay():
            return model(x)[0].square().sum()

    tensors = {"first": model.first.router.weight, "second": model.second.router.weight}
    check_gradients(value, tensors)


def test_same_routing_in_another_precision():
    """bf16 sends some tokens elsewhere; under the replay only the arithmetic differs."""
    sizes = {"hidden_size": 32, "expert_size": 16, "num_experts": 32, "num_experts_per_tok": 4}
    model = Model(**{**sizes, "init_std": 0.3})
    x = torch.randn(400, 32)
    right = model(x)[0]
    trace = recorded(model, x)
    low = copy.deepcopy(model).bfloat16()
    moved = recorded(low, x.bfloat16())
    sets = [chosen(t, "second").view(-1, 4).sort(dim=1).values for t in (trace, moved)]
    assert not torch.equal(*sets)
    with trace.replay(low):
        held = low(x.bfloat16())[0].float()
    free = low(x.bfloat16())[0].float()

    def worst(y):
        return ((y - right).norm(dim=1) / right.norm(dim=1)).max().item()

    assert worst(held) < 0.1 < worst(free)  # 0.045 and 0.42


def test_padding_is_replayed():
    model = Model()
    x, valid = torch.randn(9, 6), torch.arange(9) < 6
    right, stats = model(x, valid)
    trace = RoutingTrace(model)
    with trace.record():
        model(x, valid)
    for gates in ("live", "frozen"):
        with trace.replay(gates=gates):
            y, again = model(x, valid)
        torch.testing.assert_close(y, right)
        assert torch.equal(again.counts_E, stats.counts_E)
        assert torch.equal(again.rows_E, stats.rows_E)


def test_save_and_load():
    model = Model(num_experts=257, hidden_size=6, expert_size=2)
    x = torch.randn(9, 6)
    trace = recorded(model, x)
    buffer = io.BytesIO()
    torch.save(trace.state_dict(), buffer)
    buffer.seek(0)
    loaded = RoutingTrace(model)
    loaded.load_state_dict(torch.load(buffer))
    entry = loaded.entries["second"][0].choice
    assert entry.expert_S.dtype == torch.uint16
    assert torch.equal(entry.ids_S(), chosen(trace, "second"))
    with loaded.replay(gates="frozen"):
        found = model(x)[0]
    torch.testing.assert_close(found, model(x)[0])
    with pytest.raises(
        ValueError, match=r"holds layers \['other'\], the model has \['first', 'sec"
    ):
        loaded.load_state_dict({"other": []})


# ------------------------------------------------------------------------------ token rounding


def rounded_model(gates, score="softmax", norm="topk_sum", dtype=torch.float64) -> Model:
    rounding = {"to": "nearest", "gates": gates, "tile": 4, "min_mean_tiles": 1}
    return Model(dtype, score=score, norm=norm, route_scale=1.5, rounding=rounding)


@pytest.mark.parametrize(
    ("gates", "score", "norm"),
    [
        ("top_k", "softmax", "topk_sum"),
        ("rounded", "softmax", "topk_sum"),
        ("top_k", "sigmoid", "none"),
        ("none", "sigmoid", "none"),
    ],
)
def test_rounded_routing_is_replayed(gates, score, norm):
    """Values, statistics and gradients of a rounded forward, with live gates."""
    model = rounded_model(gates, score, norm)
    x, valid = torch.randn(40, 6, dtype=torch.float64), torch.arange(40) < 35
    weight = model.first.router.weight

    def run():
        y, stats = model(x, valid)
        return y.detach(), stats.detach(), torch.autograd.grad(y.square().sum(), weight)[0]

    y, stats, gradient = run()
    assert not torch.equal(stats.counts_E, stats.rows_E)
    assert (stats.rows_E % 4 == 0).all()
    trace = RoutingTrace(model, gate_dtype=torch.float64)
    with trace.record():
        run()
    loaded = RoutingTrace(model)
    loaded.load_state_dict(trace.state_dict())
    for one in (trace, loaded):
        with one.replay():
            again_y, again_stats, again_gradient = run()
        torch.testing.assert_close(again_y, y)
        torch.testing.assert_close(again_gradient, gradient)
        for a, b in zip(again_stats, stats):
            torch.testing.assert_close(a, b)
    with trace.replay(gates="frozen"):
        torch.testing.assert_close(model(x, valid)[0], y, rtol=1e-6, atol=1e-6)


def test_rounded_trace_on_a_model_without_rounding():
    model = rounded_model("top_k", dtype=torch.float32)
    x = torch.randn(40, 6)
    trace = recorded(model, x)
    plain = Model()
    plain.load_state_dict(model.state_dict())
    right = model(x)[0]
    assert not torch.allclose(plain(x)[0], right)
    with trace.replay(plain, gates="frozen"):
        torch.testing.assert_close(plain(x)[0], right)
    with trace.replay(plain), pytest.raises(ValueError, match="recorded with token rounding"):
        plain(x)


# ------------------------------------------------------------------------------ recomputation


@pytest.mark.parametrize("gates", ["live", "frozen"])
def test_recomputation_is_neither_recorded_nor_counted(gates):
    plain = Model()
    model = copy.deepcopy(plain)
    model.recompute = True
    batches = [torch.randn(9, 6), torch.randn(9, 6)]

    def step(model):
        model.zero_grad()
        for x in batches:  # forward and backward of one micro-batch after the other
            y, stats = model(x)
            (y.square().sum() + stats.z_sum.sum()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    trace = RoutingTrace(model)
    with trace.record():
        step(model)
    assert [len(entries) for entries in trace.entries.values()] == [2, 2]
    for name in ("first", "second"):
        for forward in (0, 1):
            right = chosen(recorded(plain, *batches), name, forward)
            assert torch.equal(chosen(trace, name, forward), right)
    for net in (model, plain):  # a replay must hold the choice in the recomputation too
        with torch.no_grad():
            net.first.router.weight.neg_()
    with trace.replay(plain, gates=gates):
        right = step(plain)
    with trace.replay(gates=gates):
        found = step(model)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


def test_recomputation_that_cannot_be_told_apart_is_an_error():
    model = Model(recompute=True)
    x = torch.randn(9, 6)
    trace = recorded(model, x, x)
    with (
        trace.replay(),
        pytest.raises(RuntimeError, match="could be of any of 2 replayed forwards"),
    ):
        (model(x)[0].sum() + model(x)[0].sum()).backward()


# ------------------------------------------------------------------------------ misuse


def test_errors():
    model = Model()
    x = torch.randn(9, 6)
    trace = recorded(model, x)
    with pytest.raises(ValueError, match="gates='dead' is unknown; allowed: live, frozen"):
        with trace.replay(gates="dead"):
            pass
    with trace.replay():
        model(x)
        with pytest.raises(RuntimeError, match="first: 1 forwards were recorded, this is one more"):
            model(x)
    with trace.replay(), pytest.raises(ValueError, match=r"was \(9, 7, 2\) .* is \(4, 7, 2\) now"):
        model(x[:4])
    with pytest.raises(
        ValueError, match=r"holds layers \['first', 'second'\], the model has \[''\]"
    ):
        with trace.replay(model.first):
            pass
    with pytest.raises(ValueError, match="Linear has no MoE layer to trace"):
        RoutingTrace(torch.nn.Linear(2, 2))
    with trace.record(), pytest.raises(RuntimeError, match="recorded or replayed already"):
        with trace.replay():
            pass


def test_hooks_are_gone_after_an_error():
    model = Model()
    trace = RoutingTrace(model)
    with pytest.raises(ZeroDivisionError), trace.record():
        raise ZeroDivisionError
    assert model.first.routing_hook is None
    assert trace.entries == {"first": [], "second": []}


def test_names_without_wrappers():
    layer = MoE(MoEConfig(6, 5, 7, 2))
    model = torch.nn.ModuleDict({"block": layer})
    compiled = torch.nn.ModuleDict({"block": torch.compile(layer, backend="eager")})
    assert set(RoutingTrace(model).entries) == set(RoutingTrace(compiled).entries) == {"block"}
