"""Experts as products of sparse matrices: equal to the grouped products, forward and backward."""

from __future__ import annotations

import pytest
import torch

from moe import MoE, MoEConfig, Routing
from moe.experts import experts
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.sparse import CSR
from moe.sparse.experts import block_height, block_width, spmm_experts, topology
from tests.moe.kernels.grouped_cases import (
    BOUND,
    check,
    counted_routing,
    nan_memory,
    ragged_routing,
    random,
    topk_routing,
    weights,
)

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
ROUTINGS = {
    "full": lambda: topk_routing(13, 5, 2),
    "holes": lambda: topk_routing(13, 5, 2, holes=True),
    "ragged": lambda: ragged_routing(11, 4),
    "one expert takes all": lambda: counted_routing([0, 37, 0]),
    "nothing": lambda: Routing.from_topk(torch.full((3, 2), -1), torch.ones(3, 2), 3),
}


def _both(routing, dtype, backend, activation, height=16, D=20, N=16):
    w1, w2, _, _ = weights(routing.num_experts, D, N, activation, dtype)
    leaves = [random(routing.num_tokens, D, dtype=dtype), w1, w2, routing.gates_S.to(dtype)]
    leaves = [t.requires_grad_() for t in leaves]
    routing = Routing(**{**vars(routing), "gates_S": leaves[3]})
    grad = random(routing.num_tokens, D, dtype=dtype)
    with nan_memory():
        got = spmm_experts(
            *leaves[:3], routing, activation=activation, backend=backend, height=height
        )
        got = (got, *torch.autograd.grad(got, leaves, grad, materialize_grads=True))
    want = experts(*leaves[:3], routing, activation=activation, backend="reference")
    want = (want, *torch.autograd.grad(want, leaves, grad))
    return dict(zip(("out", "x", "w1", "w2", "gates"), zip(got, want)))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_equals_the_grouped_products(kind, activation):
    for name, (got, want) in _both(
        ROUTINGS[kind](), torch.float64, "reference", activation
    ).items():
        check(name, got, want, BOUND[torch.float64])
        assert got.stride() == want.stride(), f"{name} would be copied into .grad"


@needs_interpreter
@pytest.mark.parametrize("kind", ["holes", "ragged"])
def test_the_kernels(kind):
    for name, (got, want) in _both(
        ROUTINGS[kind](), torch.float32, "triton", "swiglu", D=18
    ).items():
        check(name, got, want, BOUND[torch.float32])


@pytest.mark.parametrize("height", [1, 4, 32])
def test_the_height_of_blocks_changes_nothing(height):
    for name, (got, want) in _both(
        ROUTINGS["holes"](), torch.float64, "reference", "geglu", height
    ).items():
        check(name, got, want, BOUND[torch.float64])


@pytest.mark.parametrize("kind", ROUTINGS)
def test_topology(kind):
    """Dispatch has the experts' rows in order, each expert on new blocks; combine the gates."""
    routing = ROUTINGS[kind]()
    height, columns = 4, 3
    dispatch, combine, blocks, _ = topology(routing, height, columns)
    used = int(routing.offsets_E1[-1])
    token_P = dispatch.indices.tolist()
    assert [t for t in token_P if t >= 0] == routing.token_R[:used].tolist()
    block = 0
    for e, count in enumerate(routing.counts_E.tolist()):
        for _ in range(-(-count // height)):
            row = blocks.indices[block * columns : (block + 1) * columns]
            assert row.tolist() == [e * columns + c for c in range(columns)]
            block += 1
    assert (blocks.indices[block * columns :] == -1).all()
    assert all(t == -1 for t in token_P[block * height :])
    dense = (
        combine.dense() @ (dispatch.indices[:, None] == torch.arange(routing.num_tokens)).float()
    )
    assert torch.allclose(dense.diagonal(), routing.dense().sum(1))
    for pattern in (dispatch, combine.pattern):
        told = pattern.flipped[0]
        for p in (pattern, told):
            if p.row_length is not None:
                assert p.entries == p.shape[0] * p.row_length
        ones = torch.ones(pattern.entries)
        one = CSR(pattern, ones).dense()
        assert torch.equal(CSR(told, torch.ones(told.entries)).dense(), one.mT)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_sums_of_outputs(kind):
    routing = ROUTINGS[kind]()
    w1, w2, _, _ = weights(routing.num_experts, 20, 16, "swiglu", torch.float64)
    x = random(routing.num_tokens, 20, dtype=torch.float64)
    got, want = (
        experts(x, w1, w2, routing, backend=backend, output_sums=True)
        for backend in ("spmm", "reference")
    )
    for name, g, w in zip(("out", "sums"), got, want):
        check(name, g, w, BOUND[torch.float64])


def test_in_a_layer():
    torch.manual_seed(3)
    fields = {"hidden_size": 24, "expert_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
    layer = MoE(MoEConfig(**fields, shared_expert_size=8, init_std=0.3))
    other = MoE(MoEConfig(**fields, shared_expert_size=8, kernels="spmm"))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, 24)
    valid = torch.rand(3, 7) < 0.8
    results = []
    for one in (layer, other):
        leaf = x.clone().requires_grad_()
        y, stats = one(leaf, valid)
        grads = torch.autograd.grad(y.square().sum(), [leaf, *one.parameters()])
        results.append((y, *grads, stats.counts_E))
    for got, want in zip(*reversed(results)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_torch_compile():
    layer = MoE(MoEConfig(24, 32, 6, 2, kernels="spmm", init_std=0.3))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(10, 24, requires_grad=True)
    leaves = [x, *layer.parameters()]
    got, want = (one(x)[0] for one in (compiled, layer))
    assert torch.equal(got, want)
    for one, other in zip(
        torch.autograd.grad(got.square().sum(), leaves),
        torch.autograd.grad(want.square().sum(), leaves),
    ):
        assert torch.equal(one, other)


def test_autocast():
    layer = MoE(MoEConfig(16, 16, 4, 2, kernels="spmm", init_std=0.3))
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(torch.randn(5, 16))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.w1.grad.dtype == torch.float32


def test_no_tokens():
    layer = MoE(MoEConfig(16, 16, 4, 2, kernels="spmm"))
    y, _ = layer(torch.zeros(0, 16))
    y.sum().backward()
    assert y.shape == (0, 16)
    assert not layer.w1.grad.any()


def test_sizes_of_blocks():
    assert [block_height(r, 4) for r in (0, 63, 130, 300, 512)] == [16, 16, 32, 64, 128]
    assert [block_width(n, True) for n in (16, 24, 96, 128, 1024)] == [16, 8, 32, 64, 64]
    assert block_width(1024, False) == 128


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="expert width 24 with kernels='spmm' must be a multiple"):
        MoEConfig(16, 24, 4, 2, kernels="spmm")
    with pytest.raises(ValueError, match="save='x' does not go with kernels='spmm'"):
        MoEConfig(16, 32, 4, 2, kernels="spmm", save="x")
    routing = topk_routing(5, 3, 2)
    w1, w2, b1, b2 = weights(3, 8, 16)
    with pytest.raises(ValueError, match="without biases and main_grads"):
        experts(torch.ones(5, 8), w1, w2, routing, biases=(b1, b2), backend="spmm")
