"""Numbers read from router statistics: worked values, stacking, packing."""

import math

import pytest
import torch

from moe import RouterStats, layer_metrics, model_metrics, to_host
from moe.metrics import pack
from tests.moe.oracle import make_layer


def stats_of(counts, prob_sum=None, *, tokens=None, rows=None, **fields) -> RouterStats:
    counts_E = torch.tensor(counts, dtype=torch.int32)
    tokens = float(counts_E.sum()) if tokens is None else tokens
    zero = torch.zeros(())
    values = {
        "counts_E": counts_E,
        "prob_sum_E": torch.tensor(prob_sum or [tokens / len(counts)] * len(counts)),
        "z_sum": zero,
        "sequence_sum": zero,
        "entropy_sum": zero,
        "tokens": torch.tensor(tokens),
        "nonfinite": torch.zeros((), dtype=torch.int32),
        "rows_E": counts_E if rows is None else torch.tensor(rows, dtype=torch.int32),
    }
    return RouterStats(**{**values, **fields})


WORKED = stats_of([4, 2, 1, 1], [0.4 * 8, 0.3 * 8, 0.2 * 8, 0.1 * 8])


def test_worked_values():
    """F = (.5, .25, .125, .125), P = (.4, .3, .2, .1)."""
    found = {name: value.item() for name, value in layer_metrics(WORKED).items()}
    right = {
        "max_violation": 1.0,
        "min_violation": 0.5,
        "load_cv2": 0.375,
        "load_entropy": 0.875,
        "effective_experts": 3.364,
        "inverse_simpson": 2.909,
        "balance_loss": 1.25,
        "dead_experts": 0.0,
    }
    for name, value in right.items():
        assert found[name] == pytest.approx(value, abs=5e-4), name
    variance = WORKED.counts_E.double().div(8).var(correction=0).item()
    assert variance == pytest.approx(0.0234375)
    assert found["load_cv2"] == pytest.approx(4**2 * variance)


def test_dead_experts_are_below_a_tenth_of_the_mean():
    # mean 100: below 10 is dead, 10 is not
    assert layer_metrics(stats_of([9, 10, 181, 200])).get("dead_experts").item() == 1
    assert layer_metrics(stats_of([0, 0, 0, 8])).get("dead_experts").item() == 3


def test_tile_waste_counts_the_rows_that_are_computed():
    plain = stats_of([130, 200, 10, 300, 64, 448])
    padded = 256 + 256 + 128 + 384 + 128 + 512
    assert layer_metrics(plain)["tile_waste"].item() == pytest.approx(padded / 1152 - 1)
    assert layer_metrics(plain, tile_rows=1)["tile_waste"].item() == 0
    rounded = stats_of([130, 200, 10, 300, 64, 448], rows=[128, 256, 0, 256, 128, 512])
    assert layer_metrics(rounded)["tile_waste"].item() == 0
    assert layer_metrics(rounded)["max_violation"] == layer_metrics(plain)["max_violation"]


def test_balanced_and_empty_batches():
    for stats in (stats_of([5] * 8), stats_of([0] * 8)):
        found = {name: value.item() for name, value in layer_metrics(stats).items()}
        assert found["max_violation"] == found["min_violation"] == found["dead_experts"] == 0
        assert found["load_entropy"] == pytest.approx(1.0)
        assert found["effective_experts"] == pytest.approx(8.0)
        assert all(math.isfinite(value) for value in found.values())
    assert layer_metrics(stats_of([0] * 8))["balance_loss"].item() == 0
    one = layer_metrics(stats_of([3]))
    assert (one["load_entropy"].item(), one["effective_experts"].item()) == (1.0, 1.0)


def test_gate_entropy_of_a_layer():
    layer = make_layer(torch.float32, num_experts_per_tok=3)
    with torch.no_grad():
        layer.router.weight.zero_()
    _, stats = layer(torch.randn(20, 6))
    assert layer_metrics(stats)["router_entropy"].item() == pytest.approx(math.log(3), rel=1e-6)
    with torch.no_grad():
        layer.router.weight[2] = 1000.0
    _, stats = layer(torch.rand(20, 6) + 1)
    assert layer_metrics(stats)["router_entropy"].item() == 0
    scaled = make_layer(torch.float32, num_experts_per_tok=2, score="sigmoid", route_scale=2.5)
    x_TD = torch.randn(20, 6)
    gate_TK = scaled.router(x_TD).gating.gate_TK.detach() / 2.5
    right = -(gate_TK * gate_TK.log()).sum(dim=1).mean().item()
    _, stats = scaled(x_TD)
    assert layer_metrics(stats)["router_entropy"].item() == pytest.approx(right, rel=1e-5)


def test_statistics_stack_and_add_up():
    layer = make_layer(torch.float32)
    x_TD = torch.randn(30, 6)
    whole = layer(x_TD)[1]
    parts = [layer(part)[1] for part in x_TD.split([7, 23])]
    together = parts[0].plus(parts[1])
    for name, b in whole.measured().items():
        a = getattr(together, name)
        torch.testing.assert_close(a, b, msg=name)
        assert a.dtype == b.dtype
    stacked = RouterStats.stack([parts[0], whole])
    assert stacked.counts_E.shape == (2, 7)
    assert stacked.tokens.shape == (2,)
    assert stacked.prob_sum_E.requires_grad
    assert not stacked.detach().prob_sum_E.requires_grad
    layers = layer_metrics(stacked)
    assert all(value.shape == (2,) for value in layers.values())
    single = layer_metrics(whole)
    assert all(torch.equal(layers[name][1], single[name]) for name in single)


def test_stack_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="no layers given"):
        RouterStats.stack([])
    with pytest.raises(ValueError, match=r"different numbers of experts: \[2, 4\]"):
        RouterStats.stack([WORKED, stats_of([1, 1])])


def test_model_metrics():
    stacked = RouterStats.stack([WORKED, stats_of([0, 8, 4, 4]), stats_of([4, 4, 4, 4])])
    layers = layer_metrics(stacked)
    model = model_metrics(layers)
    assert model["max_violation"].item() == 1.0  # the worst layer
    assert model["dead_experts"].item() == 1  # all layers together
    assert model["load_cv2"].item() == pytest.approx(layers["load_cv2"].mean().item())


def test_to_host_is_one_transfer(monkeypatch):
    tree = {"loss": torch.tensor(1.5), "stats": WORKED, "step": 7, "none": None}
    moved = []
    move = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: moved.append(t.numel()) or move(t))
    out = to_host(tree)
    assert moved == [1 + 4 + 4 + 1 + 1 + 1 + 1 + 1 + 4]
    assert out["step"] == 7
    assert out["none"] is None
    assert out["loss"].item() == 1.5
    assert isinstance(out["stats"], RouterStats)
    assert out["stats"].measured().keys() == WORKED.measured().keys()
    for name, b in WORKED.measured().items():
        a = getattr(out["stats"], name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert to_host({"step": 7}) == {"step": 7}


def test_packed_statistics_can_be_reduced():
    """Counts above 2^24, which float32 cannot count, survive the sum over ranks."""
    a = stats_of([2**25 + 1, 3, 0, 0])
    flat_P, unpack = pack(a)
    assert flat_P.dtype == torch.float64
    even = stats_of([2**24 + 1, 2**24])
    assert 0 < layer_metrics(even)["max_violation"].item() < 1e-7
    reduced = unpack(flat_P + flat_P)
    assert reduced.counts_E.tolist() == [2**26 + 2, 6, 0, 0]
    assert reduced.counts_E.dtype == torch.int32
    assert reduced.tokens.item() == 2 * a.tokens.item()
