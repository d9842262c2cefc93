"""The sparse products on a GPU, against dense float64.

Every configuration of every kernel is forced once; otherwise tuning is off and the first runs.
"""

from __future__ import annotations

import pytest
import torch

from moe.experts import experts
from moe.kernels.routing import spread as spread_kernel
from moe.kernels.sparse import block_products
from moe.kernels.sparse import sddmm as sddmm_kernel
from moe.kernels.sparse import spmm as spmm_kernel
from moe.kernels.sparse.spmm import split_rows
from moe.routing import Routing
from moe.sparse import BCSR, CSR, Pattern, gather, routing_csr, sdd, spmm
from moe.sparse.experts import spmm_experts
from tests.moe.kernels.grouped_cases import (
    BOUND,
    check,
    nan_memory,
    ragged_routing,
    random,
    topk_routing,
    weights,
)
from tests.moe.sparse.cases import (
    EMPTY,
    SHAPES,
    check_alpha_beta,
    check_products,
    check_sdd,
    check_sddmm,
    index,
    sparse_dense,
)

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCKS = [(16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (128, 32)]


@pytest.fixture(autouse=True)
def _no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_TUNE", "0")


@pytest.mark.parametrize("dtype", DTYPES, ids=("single", "half", "brain"))
@pytest.mark.parametrize("shape", [*SHAPES[:3], (300, 1024, 512, 0.05), (200, 4096, 96, 0.02)])
def test_csr_and_csc(shape, dtype):
    M, K, N, density = shape
    w = sparse_dense(M, K, density, dtype, "cuda", skew=True)
    x = random(K, N, dtype=dtype, device="cuda")
    a = CSR.from_dense(w)
    check_products(a, w, x, "triton")
    check_products(index(a.csc(), torch.int64), w, x, "triton")
    check_alpha_beta(a, w, x, "triton")
    check_sddmm(a, random(M, N, dtype=dtype, device="cuda"), x.mT.contiguous().mT, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=("single", "half", "brain"))
@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"by{b[0]}x{b[1]}")
def test_blocks(block, dtype):
    for M, K, N in ((100, 300, 40), (384, 640, 256)):
        w = sparse_dense(M, K, 0.01, dtype, "cuda")
        a = BCSR.from_dense(w, block)
        check_products(a, w, random(K, N, dtype=dtype, device="cuda"), "triton")
        x, y = (random(*s, dtype=dtype, device="cuda") for s in ((M, N), (N, K)))
        check_sdd(a, x, y, "triton")


@pytest.mark.parametrize(("M", "K", "N"), EMPTY)
def test_empty(M, K, N):
    a = CSR.from_dense(torch.zeros(M, K, device="cuda"))
    with nan_memory():
        for b in (a, a.csc(), a.bcsr(16)):
            out = spmm(b, torch.ones(K, N, device="cuda"))
            assert out.shape == (M, N)
            assert not out.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_long_row_of_ones(dtype):
    a = CSR.from_dense(torch.ones(1, 4096, dtype=dtype, device="cuda"))
    x = torch.ones(4096, 8, dtype=dtype, device="cuda")
    assert (spmm(a, x) == 4096).all()
    assert (spmm(a.bcsr(64), x) == 4096).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=("single", "half", "brain"))
def test_every_configuration(dtype):
    w = sparse_dense(130, 700, 0.1, dtype, "cuda", skew=True)
    x = random(700, 600, dtype=dtype, device="cuda")
    p, values = CSR.from_dense(w).pattern, CSR.from_dense(w).values
    want = w.double() @ x.double()
    for mean in (1, 2, 4, 99):
        for c in spmm_kernel.configs(dtype, mean, 600):
            for split in (None, split_rows(p.indptr, p.entries, 100)):
                got = spmm_kernel.spmm_triton(
                    p.indptr, p.indices, None, values, x, None, split=split, config=c
                )
                check(str(c), got, want, BOUND[dtype])
    index = torch.randperm(1300, device="cuda").int()  # row of the result of each entry
    column = torch.empty_like(index)
    column[index.long()] = torch.arange(1300, device="cuda").int() // 10
    bounds = torch.arange(0, 1301, 10, device="cuda").int()
    y, value = random(130, 600, dtype=dtype, device="cuda"), torch.rand(1300, device="cuda")
    want = torch.empty(1300, 600, dtype=torch.float64, device="cuda")
    want[index.long()] = y.double().repeat_interleave(10, 0) * value[:, None].double()
    for c in spread_kernel.configs(dtype, 600):
        got = spread_kernel.spread_triton(bounds, index, None, value, y, column, 10, c)
        check(str(c), got, want, BOUND[dtype])
    a = random(130, 600, dtype=dtype, device="cuda")
    want = (a.double() @ x.double().mT)[p.rows.long(), p.indices.long()]
    for c in sddmm_kernel.configs(dtype, 600):
        got = sddmm_kernel.sddmm_triton(p.rows, p.indices, a, x, 1.0, dtype, c)
        check(str(c), got, want, BOUND[dtype])
    s = BCSR.from_dense(sparse_dense(256, 768, 0.001, dtype, "cuda"), 128)
    x = random(768, 300, dtype=dtype, device="cuda")
    a = random(256, 300, dtype=dtype, device="cuda")
    for c in block_products.configs(dtype, 128, None, 128):
        out = torch.empty(1, 256, 300, dtype=dtype, device="cuda")
        block_products.dsd_triton(
            s.pattern.indptr, s.pattern.indices, None, s.values, False, x[None], out, None,
            1.0, 0.0, c,
        )  # fmt: skip
        check(f"dsd {c}", out[0], s.dense().double() @ x.double(), BOUND[dtype])
    mask = s.with_values(torch.ones_like(s.values)).dense()
    for c in block_products.configs(dtype, 128, 128, None):
        got = block_products.sdd_triton(
            s.pattern.indptr, s.pattern.indices, a, x.mT[None], 128, 128, 1.0, c
        )
        check(f"sdd {c}", s.with_values(got).dense(), (a.double() @ x.double().mT) * mask,
              BOUND[dtype])  # fmt: skip


def test_repeats_are_bit_equal():
    w = sparse_dense(500, 3000, 0.2, torch.bfloat16, "cuda", skew=True)
    x = random(3000, 512, dtype=torch.bfloat16, device="cuda")
    a = CSR.from_dense(w)
    for b in (a, a.csc(), BCSR.from_dense(w, 32)):
        first = spmm(b, x)
        assert all(torch.equal(spmm(b, x), first) for _ in range(10))


def test_64_bit_offsets():
    """A dense side of more than 2^31 numbers."""
    K, N = 1_100_000, 2048
    x = torch.empty(K, N, dtype=torch.float16, device="cuda")
    x[[0, K - 1]] = random(2, N, dtype=torch.float16, device="cuda")
    pattern = Pattern(
        torch.tensor([0, 1, 2], device="cuda"), torch.tensor([K - 1, 0], device="cuda"), (2, K), 1
    )
    assert torch.equal(gather(pattern, x), x[[K - 1, 0]])


@pytest.mark.parametrize("dtype", DTYPES, ids=("single", "half", "brain"))
@pytest.mark.parametrize("kind", ["full", "holes", "ragged", "few"])
def test_experts(kind, dtype):
    T, E, D, N = (40, 16, 136, 32) if kind == "few" else (700, 6, 264, 96)
    routing = (
        ragged_routing(T, E, device="cuda")
        if kind == "ragged"
        else topk_routing(T, E, 2, holes=kind == "holes", device="cuda")
    )
    w1, w2, _, _ = weights(E, D, N, "swiglu", dtype, "cuda")
    leaves = [random(T, D, dtype=dtype, device="cuda"), w1, w2, routing.gates_S.clone()]
    grad = random(T, D, dtype=dtype, device="cuda")
    results = {}
    for kernels in ("spmm", "reference"):
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        own = [
            t.detach().to(wide if kernels == "reference" else t.dtype).requires_grad_()
            for t in leaves
        ]
        one = Routing(**{**vars(routing), "gates_S": own[3]})
        with nan_memory():
            out = experts(*own[:3], one, backend=kernels)
            results[kernels] = (out, *torch.autograd.grad(out, own, grad.to(out.dtype)))
    for name, got, want in zip(("out", "x", "w1", "w2", "gates"), *results.values()):
        check(name, got, want, BOUND[dtype] * (2 if name == "gates" else 1))


def test_nothing_is_read_back():
    routing = topk_routing(512, 8, 2, device="cuda")
    w1, w2, _, _ = weights(8, 128, 64, "swiglu", torch.bfloat16, "cuda")
    x = random(512, 128, dtype=torch.bfloat16, device="cuda").requires_grad_()

    def step():
        spmm_experts(x, w1, w2, routing).float().square().mean().backward()
        a = routing_csr(routing)
        spmm(a, w1[:, 0].contiguous())
        sdd(Pattern(*(t.int() for t in (torch.arange(5, device="cuda"),
            torch.zeros(4, device="cuda"))), (4, 1)), x[:64], x[:16].mT, 16)  # fmt: skip

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
