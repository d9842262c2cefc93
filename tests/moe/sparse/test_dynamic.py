"""Weight masks on a schedule, and how sparse activations are for a tile of rows."""

from __future__ import annotations

import pytest
import torch

from moe.sparse import BCSR, CSR, spmm
from moe.sparse.activations import activation_density, union_density
from moe.sparse.dynamic import (
    DynamicMask,
    MaskSchedule,
    block_sums,
    keep_largest,
)
from tests.moe.kernels.grouped_cases import activate_by_hand, offsets_of, topk_routing, weights


@pytest.mark.parametrize("block", [1, 2, 5])
@pytest.mark.parametrize("shape", [(10, 12), (3, 7, 9)])
def test_density_is_exact(shape, block):
    w = torch.randn(shape)
    mask = DynamicMask(w, MaskSchedule(density=0.3, block=block))
    assert torch.equal(mask(w), w), "nothing is masked before the first update"
    mask.update(0, w)
    blocks = mask.keep.shape[-1] * mask.keep.shape[-2]
    assert (mask.keep.flatten(-2).sum(-1) == round(0.3 * blocks)).all()
    kept, dropped = block_sums(w, block)[mask.keep], block_sums(w, block)[~mask.keep]
    if w.dim() == 2:
        assert kept.min() >= dropped.max()
    masked = mask(w)
    assert torch.equal(masked != 0, mask.entries(w))
    assert torch.equal(masked[mask.entries(w)], w[mask.entries(w)])


def test_ties_keep_the_lowest_index():
    assert keep_largest(torch.ones(2, 3), 4).tolist() == [[True] * 3, [True, False, False]]


@pytest.mark.parametrize("method", ["straight_through", "regrow"])
def test_gradients(method):
    w = torch.randn(6, 8, requires_grad=True)
    mask = DynamicMask(w, MaskSchedule(density=0.25, method=method))
    mask.update(0, w, torch.zeros_like(w))
    x = torch.randn(8, 3)
    (grad,) = torch.autograd.grad((mask(w) @ x).square().sum(), w)
    dense = torch.autograd.functional.vjp(lambda m: (m @ x).square().sum(), mask(w).detach())[1]
    if method == "straight_through":
        assert torch.equal(grad, dense)
    else:
        assert torch.equal(grad, dense * mask.keep)
        assert not grad[~mask.keep].any()


def test_the_kept_weights_as_a_sparse_matrix():
    for block, kind in ((1, CSR), (4, BCSR)):
        w = torch.randn(12, 20, dtype=torch.float64, requires_grad=True)
        mask = DynamicMask(w, MaskSchedule(density=0.3, block=block, method="regrow"))
        mask.update(0, w, torch.zeros_like(w))
        a = mask.sparse(w)
        assert isinstance(a, kind)
        x = torch.randn(20, 5, dtype=torch.float64)
        got = spmm(a, x)
        torch.testing.assert_close(got, mask(w) @ x)
        torch.testing.assert_close(
            torch.autograd.grad(got.square().sum(), w)[0],
            torch.autograd.grad((mask(w) @ x).square().sum(), w)[0],
        )


def test_regrowth():
    """The smallest kept weights leave, the dropped ones with the largest gradients come in at 0."""
    w = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.5]])
    mask = DynamicMask(w, MaskSchedule(density=2 / 3, method="regrow", regrow=0.5, every=1))
    gradient = torch.tensor([[0.0, 0.0, 0.1, 0.0, 9.0, 8.0]])
    mask.keep[:] = torch.tensor([[True, True, True, True, False, False]])
    new = mask.update(0, w, gradient)
    assert mask.keep.tolist() == [[True, True, False, False, True, True]]
    assert new.tolist() == [[False] * 4 + [True] * 2]
    assert w.tolist() == [[5, 4, 3, 2, 0, 0]]
    # a dropped weight that comes straight back keeps its value
    new = mask.update(0, w, torch.tensor([[0.0, 0, 0, 0, 9, 8]]))
    assert not new.any()
    with pytest.raises(ValueError, match="needs the gradient"):
        mask.update(1, w)


def test_schedule():
    s = MaskSchedule(density=0.1, start=10, end=110, every=20, until=200)
    assert [s.density_at(t) for t in (0, 9, 10, 110, 500)] == [1, 1, 1, 0.1, 0.1]
    assert s.density_at(60) == pytest.approx(0.1 + 0.9 / 8)
    assert [t for t in range(300) if s.due(t)] == [*range(10, 200, 20), 200]
    assert s.regrow_at(10) == 0.3
    assert s.regrow_at(105) == pytest.approx(0.15)
    assert s.regrow_at(200) == pytest.approx(0)
    w = torch.randn(4, 4)
    mask = DynamicMask(w, s)
    assert mask.update(5, w) is None
    assert mask.update(31, w) is None
    assert mask.update(30, w) is not None


def test_training_under_a_mask_learns_and_resumes():
    torch.manual_seed(0)
    target, x = torch.randn(8, 8), torch.randn(64, 8)
    schedule = MaskSchedule(density=0.5, every=5, end=20, method="regrow", until=60)

    def train(model, steps):
        for step in steps:
            masked = model.mask(model.w)
            masked.retain_grad()
            loss = (x @ (masked - target).mT).square().mean()
            loss.backward()
            model.mask.update(step, model.w.data, masked.grad)
            with torch.no_grad():
                model.w -= 0.1 * model.w.grad
            model.w.grad = None
        return loss.item()

    def fresh():
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.full((8, 8), 0.1))
        model.mask = DynamicMask(model.w, schedule)
        return model

    whole, first, second = fresh(), fresh(), fresh()
    start = train(whole, range(1))
    whole = fresh()
    end = train(whole, range(80))
    assert end < 0.5 * start
    assert int(whole.mask.keep.sum()) == 32
    train(first, range(33))
    second.load_state_dict(first.state_dict())
    assert train(second, range(33, 80)) == end
    assert torch.equal(second.w, whole.w)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_union_density(rows):
    counts = [5, 0, 9, 8]
    a = torch.randn(25, 40) * (torch.rand(25, 40) < 0.1)
    a[22:] = float("nan")  # belongs to no expert
    hits, tiles, start = 0, 0, 0
    for count in counts:
        for at in range(0, count, rows):
            hits += int((a[start + at : start + min(at + rows, count)] != 0).any(0).sum())
            tiles += 1
        start += count
    got = union_density(a, offsets_of(counts), rows)
    assert got.item() == pytest.approx(hits / (tiles * 40))


def test_union_density_of_independent_zeros():
    """1 - (1 - density)^rows: 5 % becomes 81 % for 32 rows."""
    a = (torch.rand(32 * 200, 200) < 0.05).float()
    offsets = offsets_of([32 * 150, 32 * 50])
    for rows in (1, 8, 32):
        want = 1 - 0.95**rows
        assert union_density(a, offsets, rows).item() == pytest.approx(want, abs=0.01)
    assert union_density(torch.zeros(0, 4), offsets_of([0, 0]), 8) == 0


@pytest.mark.parametrize("kind", ["relu2", "reglu", "silu"])
def test_density_of_a_layer(kind):
    """Against activations computed one row at a time."""
    T, E, D, N = 30, 3, 12, 16
    routing = topk_routing(T, E, 2, holes=True)
    w1 = weights(E, D, N, kind)[0]
    x = torch.randn(T, D) - 0.5
    got = activation_density(x, w1, routing, kind, tiles=(1, 4))
    hits, tiles = {1: 0, 4: 0}, {1: 0, 4: 0}
    for e in range(E):
        start, end = routing.offsets_E1[e : e + 2].tolist()
        some = activate_by_hand(x[routing.token_R[start:end].long()] @ w1[e].mT, kind) != 0
        for rows in hits:
            for at in range(0, end - start, rows):
                hits[rows] += int(some[at : at + rows].any(0).sum())
                tiles[rows] += 1
    for rows, density in got.items():
        assert density.item() == pytest.approx(hits[rows] / (tiles[rows] * N))
    assert (got[1] == 1) == (kind == "silu")
    assert got[4] >= got[1]


def test_mistakes_are_refused():
    for fields, message in (
        ({"density": 0.0}, "density=0.0 must be above 0"),
        ({"density": 1.5}, "at most 1"),
        ({"density": 0.5, "every": 0}, "every=0"),
        ({"density": 0.5, "block": 0}, "block=0"),
        ({"density": 0.5, "method": "x"}, "method='x' is unknown; allowed: straight_through"),
    ):
        with pytest.raises(ValueError, match=message):
            MaskSchedule(**fields)
    with pytest.raises(ValueError, match="a matrix or a stack"):
        DynamicMask(torch.ones(3), MaskSchedule(0.5))
    with pytest.raises(ValueError, match="must be one matrix"):
        DynamicMask(torch.ones(2, 3, 3), MaskSchedule(0.5)).sparse(torch.ones(2, 3, 3))
