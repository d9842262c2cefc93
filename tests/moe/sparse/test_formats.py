"""COO, CSR, CSC, BCSR: conversions, what they share, what they refuse, gradients of conversions."""

from __future__ import annotations

import pytest
import torch

from moe.sparse import BCSR, COO, CSC, CSR, Pattern, from_torch, routing_csc, routing_csr, spmm
from tests.moe.kernels.grouped_cases import ragged_routing, topk_routing
from tests.moe.sparse.cases import EMPTY, SHAPES, sparse_dense


def _forms(w: torch.Tensor) -> dict:
    a = CSR.from_dense(w)
    forms = {"coo": a.coo(), "csr": a, "csc": a.csc()}
    forms |= {f"bcsr {b}": BCSR.from_dense(w, b) for b in (1, 4, (2, 16), (16, 3))}
    return forms


@pytest.mark.parametrize("shape", [*SHAPES, *((*s, 0.5) for s in EMPTY)])
def test_every_conversion_keeps_the_matrix(shape):
    w = sparse_dense(shape[0], shape[1], shape[3], torch.float64)
    for a in _forms(w).values():
        for b in (a, a.coo(), a.csr(), a.csc(), a.bcsr(4), a.bcsr((3, 5))):
            assert torch.equal(b.dense(), w), (type(a), type(b))
            assert torch.equal(b.t().dense(), w.mT)
            assert b.shape == tuple(w.shape)
            if not isinstance(b, COO):
                b.validate()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_conversions_keep_the_index_type(index):
    w = sparse_dense(9, 14, 0.4)
    a = CSR.from_dense(w)
    a = CSR(a.pattern.to(index=index), a.values)
    for b in (a, a.csc(), a.coo().csr(), a.bcsr(4), a.bcsr(4).csr(), a.bcsr(4).t()):
        assert b.pattern.indices.dtype == b.pattern.indptr.dtype == index
        assert torch.equal(b.validate().dense(), w.mT if b.shape[0] == 14 else w)


def test_round_trip_restores_the_arrays():
    a = CSR.from_dense(sparse_dense(30, 20, 0.3))
    for b in (a.coo().csr(), a.csc().csr(), a.csc().csr().csc().csr()):
        for one, other in (
            (a.pattern.indptr, b.pattern.indptr),
            (a.pattern.indices, b.pattern.indices),
            (a.values, b.values),
        ):
            assert torch.equal(one, other)


def test_transposes_share_memory():
    a = CSR.from_dense(sparse_dense(6, 8, 0.5))
    assert isinstance(a.t(), CSC)
    assert a.t().values is a.values
    assert a.t().t().pattern is a.pattern
    assert a.coo().t().rows.data_ptr() != 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_duplicates_are_summed(dtype):
    five = torch.ones(5, dtype=torch.int64)
    a = COO(five * 0, five, torch.arange(1, 6).to(dtype), (2, 3))
    assert a.csr().values.tolist() == [15.0]
    for b in (a, a.t().t(), a.csr(), a.csc(), a.bcsr(2)):
        assert b.dense().tolist() == [[0, 15, 0], [0, 0, 0]]
        x = torch.tensor([[1.0], [2.0], [4.0]], dtype=dtype)
        assert spmm(b, x, backend="reference").tolist() == [[30], [0]]
    assert from_torch(a.torch()).dense().tolist() == a.torch().to_dense().tolist()
    # many small terms: float16 alone would stop at 2048
    many = torch.zeros(4096, dtype=torch.int64)
    assert COO(many, many, torch.ones(4096, dtype=torch.float16), (1, 1)).csr().values == 4096


def test_gradients_of_conversions():
    rows, columns = torch.tensor([2, 0, 2, 1, 2]), torch.tensor([1, 3, 1, 0, 0])
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64)

    def through(name):
        def run(values):
            a = COO(rows, columns, values, (3, 4))
            b = {
                "csr": a.csr,
                "csc": a.csc,
                "coo": a.coo,
                "bcsr": lambda: a.bcsr(2),
                "back": lambda: a.bcsr((2, 3)).csc().csr().coo(),
            }[name]()
            return b.dense() * weight

        return run

    for name in ("csr", "csc", "bcsr", "coo", "back"):
        torch.autograd.gradcheck(through(name), (values,))


@pytest.mark.parametrize(
    ("indptr", "indices", "shape", "message"),
    [
        ([0, 3, 2], [0, 1], (2, 2), r"indptr\[1\] is 3 and indptr\[2\] is 2"),
        ([0, 1, 1], [0, 1], (2, 2), "indptr must run from 0 to 2"),
        ([0, 3, 2, 3], [0, 1, 2], (3, 3), r"indptr\[1\] is 3 and indptr\[2\] is 2"),
        ([1, 2], [0, 1], (1, 2), "it runs from 1 to 2"),
        ([0, 2], [0, 2], (1, 2), "entry 1 has column 2; allowed: 0 to 1"),
        ([0, 1], [-1], (1, 2), "entry 0 has column -1"),
        ([0, 1], [0], (1, 0), "there are no columns"),
        ([0, 2], [1, 0], (1, 2), "row 0 has column 0 after column 1"),
        ([0, 0, 2], [1, 1], (2, 2), "row 1 has column 1 after column 1"),
        ([0, 1], [0], (2, 2), "indptr has 2 entries, 2 rows need 3"),
        ([0, 0], [], (1, -1), "must not be negative"),
    ],
)
def test_malformed_structure_is_refused(indptr, indices, shape, message):
    indptr, indices = torch.tensor(indptr), torch.tensor(indices, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        CSR.make(indptr, indices, torch.ones(len(indices)), shape)
    with pytest.raises(ValueError, match=message.replace("column", "(block )?column")):
        BCSR.make(indptr, indices, torch.ones(len(indices), 1, 1), shape)


def test_other_mistakes_are_refused():
    one = torch.tensor([0])
    with pytest.raises(ValueError, match="rows holds 3; allowed: 0 to 2"):
        COO(torch.tensor([3]), one, torch.ones(1), (3, 1))
    with pytest.raises(ValueError, match="has no columns"):
        COO(one, one, torch.ones(1), (3, 0))
    with pytest.raises(ValueError, match="int32 or int64"):
        COO(one.float(), one, torch.ones(1), (1, 1))
    with pytest.raises(ValueError, match="int32 or int64"):
        Pattern(torch.tensor([0.0, 1.0]), one, (1, 1))
    with pytest.raises(ValueError, match="the pattern has 1 entries"):
        CSR(Pattern(torch.tensor([0, 1]), one, (1, 1)), torch.ones(2))
    with pytest.raises(ValueError, match="in 2 x 1 blocks, the pattern has"):
        BCSR(Pattern(torch.tensor([0, 1]), one, (1, 1)), torch.ones(1, 2, 2), (3, 2))
    with pytest.raises(ValueError, match="outside the shape"):
        BCSR.make(torch.tensor([0, 1]), one, torch.ones(1, 2, 2), (1, 2))
    with pytest.raises(ValueError, match=r"rows=3 .* multiple of 2"):
        BCSR.from_dense(torch.ones(3, 4), 2).torch()
    with pytest.raises(ValueError, match="dense dimensions"):
        from_torch(torch.ones(2, 2).to_sparse(1))
    with pytest.raises(ValueError, match="layout"):
        from_torch(torch.ones(2, 2))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_torch_sparse_both_ways():
    w = sparse_dense(12, 8, 0.4, torch.float64)
    layouts = {
        COO: w.to_sparse_coo(), CSR: w.to_sparse_csr(), CSC: w.to_sparse_csc(),
        BCSR: w.to_sparse_bsr((4, 2)),
    }  # fmt: skip
    for kind, theirs in layouts.items():
        ours = from_torch(theirs)
        assert isinstance(ours, kind)
        assert torch.equal(ours.dense(), w)
        assert torch.equal(ours.torch().to_dense(), w)
        assert ours.torch().layout == theirs.layout
        if kind is CSR:
            assert ours.values.data_ptr() == theirs.values().data_ptr()


@pytest.mark.parametrize("kind", ["full", "holes", "ragged"])
def test_the_routing_matrix(kind):
    routing = (
        ragged_routing(11, 5) if kind == "ragged" else topk_routing(9, 6, 2, holes=kind != "full")
    )
    want = routing.dense()
    csr, csc = routing_csr(routing), routing_csc(routing)
    for a in (csr, csc, csr.csc(), csc.csr(), csr.coo().csr(), csr.bcsr(4)):
        assert torch.equal(a.dense(), want)
    assert csr.values is routing.gates_S
    assert csr.pattern.indices is routing.expert_S
    assert csc.pattern.indptr is routing.offsets_E1
    assert csc.pattern.indices is routing.token_R
    # the transpose that is told is the one that would be found
    found = Pattern(csr.pattern.indptr, csr.pattern.indices, csr.pattern.shape).flipped[0]
    told = csr.pattern.flipped[0]
    used = int(told.indptr[-1])
    assert torch.equal(found.indptr, told.indptr)
    assert torch.equal(found.indices[:used], told.indices[:used])
    if kind == "full":
        by_expert = csc.validate().t()
        assert torch.equal(by_expert.pattern.indptr, routing.offsets_E1)


def test_density_and_devices():
    a = CSR.from_dense(torch.eye(4))
    assert a.density == 0.25
    assert a.bcsr(2).density == 0.5
    assert a.to(dtype=torch.float64).dense().dtype == torch.float64
    assert a.to("cpu").pattern is a.pattern
    meta = a.to("meta")
    assert meta.pattern.indices.device.type == "meta"
    assert a.coo().to("cpu", torch.float64).values.dtype == torch.float64
    with pytest.raises(ValueError, match="must be \\(4,\\)"):
        a.with_values(torch.ones(3))
