"""Products of sparse and dense matrices against dense float64, references and kernels."""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.common.tuning import Config
from moe.kernels.sparse import block_products
from moe.kernels.sparse import sddmm as sddmm_kernel
from moe.kernels.sparse import spmm as spmm_kernel
from moe.kernels.sparse.spmm import chunk_size, split_rows
from moe.sparse import BCSR, COO, CSR, Pattern, gather, matmul, sdd, sddmm, spmm
from tests.moe.kernels.grouped_cases import BOUND, check, nan_memory, random
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

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
TRITON = pytest.param("triton", torch.float32, marks=needs_interpreter)
BACKENDS = [("reference", torch.float64), TRITON]


@pytest.fixture(autouse=True)
def _few_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow by the turn; other configurations have a test of their own."""
    if INTERPRET:
        monkeypatch.setattr(spmm_kernel, "configs", lambda *sizes: [Config(32, 16, 1)])


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_entries(shape, backend, dtype):
    M, K, N, density = shape
    w = sparse_dense(M, K, density, dtype, skew=True)
    x = random(K, N, dtype=dtype)
    a = CSR.from_dense(w)
    check_products(a, w, x, backend)
    check_products(index(a.csc(), torch.int64), w, x, backend)
    check_sddmm(a, random(M, N, dtype=dtype), x.mT.contiguous().mT, backend)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("block", [16, (16, 32), (32, 16)])
@pytest.mark.parametrize(("M", "K"), [(48, 16), (16, 48), (40, 56)])
def test_blocks(block, M, K, backend, dtype):
    """One, three and two and a half blocks of rows and of columns."""
    w = sparse_dense(M, K, 0.02, dtype)
    a = BCSR.from_dense(w, block)
    check_products(a, w, random(K, 20, dtype=dtype), backend)
    check_sdd(a, random(M, 20, dtype=dtype), random(20, K, dtype=dtype), backend)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_alpha_and_beta(backend, dtype):
    w = sparse_dense(9, 20, 0.3, dtype)
    x = random(20, 7, dtype=dtype)
    for a in (CSR.from_dense(w), CSR.from_dense(w).csc(), BCSR.from_dense(w, 16)):
        check_alpha_beta(a, w, x, backend)
    none = CSR.from_dense(torch.zeros_like(w))
    add = random(9, 7, dtype=dtype)
    assert torch.equal(spmm(none, x, add, beta=2.0, backend=backend), 2 * add)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize(("M", "K", "N"), EMPTY)
def test_no_stored_values(M, K, N, backend, dtype):
    """Exact zeros of the right shape, in the outputs and in the gradients."""
    with nan_memory():
        a = CSR.from_dense(torch.zeros(M, K, dtype=dtype))
        assert a.pattern.indptr.tolist() == [0] * (M + 1)
        x = torch.ones(K, N, dtype=dtype, requires_grad=True)
        for b in (a, a.csc(), a.coo(), a.bcsr(16), a.bcsr((32, 16))):
            out = spmm(b, x, backend=backend)
            assert out.shape == (M, N)
            assert not out.any()
            assert not torch.autograd.grad(out.sum(), x)[0].any()
            assert matmul(torch.ones(N, M, dtype=dtype), b, backend=backend).shape == (N, K)
        assert sddmm(a.pattern, torch.ones(M, N), torch.ones(K, N), backend=backend).shape == (0,)
        blocks = sdd(a.bcsr(16).pattern, torch.ones(M, N), torch.ones(N, K), 16, backend=backend)
        assert not blocks.dense().any()


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_what_is_not_stored_is_not_multiplied(backend, dtype):
    """NaN of the dense side reaches the rows that name it, and a stored zero times NaN is NaN."""
    a = CSR.make(
        torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2, 1]),
        torch.tensor([1.0, 2.0, 0.0], dtype=dtype), (3, 3),
    )  # fmt: skip
    x = torch.ones(3, 2, dtype=dtype)
    x[1] = float("nan")
    for b in (a, a.csc()):
        out = spmm(b, x, backend=backend)
        assert out[:2].tolist() == [[1, 1], [2, 2]]
        assert out[2].isnan().all()


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_unused_entries_add_nothing(backend, dtype):
    """Columns of -1 and entries behind the last row; their values may be NaN."""
    nan = float("nan")
    pattern = Pattern(torch.tensor([0, 2, 3]), torch.tensor([1, -1, 0, 2]), (2, 3))
    values = torch.tensor([2.0, nan, 3.0, nan], dtype=dtype, requires_grad=True)
    a = CSR(pattern, values)
    x = random(3, 5, dtype=dtype)
    want = torch.stack([2 * x[1], 3 * x[0]])
    check("out", spmm(a, x, backend=backend), want, BOUND[dtype])
    check("transposed", spmm(a.t(), x[:2], backend=backend),
          torch.stack([3 * x[1], 2 * x[0], 0 * x[1]]), BOUND[dtype])  # fmt: skip
    (dvalues,) = torch.autograd.grad(spmm(a, x, backend=backend).sum(), values)
    check("dvalues", dvalues, torch.stack([x[1].sum(), x[0, 0] * 0, x[0].sum(), x[0, 0] * 0]),
          BOUND[dtype])  # fmt: skip
    assert torch.equal(gather(pattern, x, backend=backend), torch.stack([x[1], x[0]]))


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_long_rows_are_summed_in_float32(backend):
    """4096 ones in float16: 4096, where sums in float16 stop at 2048."""
    one = torch.ones(1, 4096, dtype=torch.float16)
    for a in (
        CSR.from_dense(one),
        CSR.from_dense(one.mT).csc().t(),
        BCSR.from_dense(one, (16, 64)),
    ):
        assert (spmm(a, torch.ones(4096, 3, dtype=torch.float16), backend=backend) == 4096).all()
    pattern = CSR.from_dense(torch.ones(1, 1)).pattern
    assert sddmm(pattern, one, one, backend=backend) == 4096
    if backend == "reference":  # the interpreter has no bfloat16; sums there stop at 256
        a = CSR.from_dense(one.bfloat16())
        assert (spmm(a, torch.ones(4096, 3, dtype=torch.bfloat16)) == 4096).all()


@needs_interpreter
def test_the_result_does_not_depend_on_the_configuration():
    w = sparse_dense(3, 40, 0.5, skew=True)
    x = random(40, 20)
    p, values = CSR.from_dense(w).pattern, CSR.from_dense(w).values
    want = w.double() @ x.double()
    for bn, unroll in ((32, 4), (16, 16)):
        for chunk in (None, 7, 30):
            split = None if chunk is None else split_rows(p.indptr, p.entries, chunk)
            with nan_memory():
                got = spmm_kernel.spmm_triton(
                    p.indptr, p.indices, None, values, x, None, split=split,
                    config=Config(bn, unroll, 1),
                )  # fmt: skip
            check(f"{bn} {unroll} {chunk}", got, want, 1e-5)
        got = sddmm_kernel.sddmm_triton(
            p.rows, p.indices, want.float(), x, 1.0, torch.float32, Config(bn, unroll, 1)
        )
        all_pairs = want.float() @ x.mT
        check("sddmm", got, all_pairs[p.rows.long(), p.indices.long()], 1e-5)
    s = BCSR.from_dense(sparse_dense(48, 64, 0.003), (16, 32))
    x, a = random(64, 20), random(48, 20)
    mask = s.with_values(torch.ones_like(s.values)).dense()
    for c in ((16, 16, 16), (16, 32, 32)):
        c = block_products.Config(*c, 4, 1)
        out = torch.full((1, 48, 20), float("nan"))
        block_products.dsd_triton(
            s.pattern.indptr, s.pattern.indices, None, s.values, False, x[None], out, None,
            1.0, 0.0, c,
        )  # fmt: skip
        check(f"dsd {c}", out[0], s.dense() @ x, 1e-5)
        c = c._replace(bn=min(c.bn, 32))
        got = block_products.sdd_triton(
            s.pattern.indptr, s.pattern.indices, a, x.mT[None], 16, 32, 1.0, c
        )
        check(f"sdd {c}", s.with_values(got).dense(), (a @ x.mT) * mask, 1e-5)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("ragged", [False, True])
def test_one_entry_a_row_is_spread(backend, dtype, ragged, monkeypatch):
    """Written from each row of X, which is read once; the other kernel must not run."""
    rows = torch.tensor([[3, 0], [-1, 5], [1, -1]])  # of the result, for each row of X
    indptr = torch.tensor([0, 2, 4, 6])
    column = torch.tensor([0, 2, -1, 0, -1, 1])
    entry = torch.tensor([1, 4, 0, 0, 0, 3])
    back = Pattern(indptr, rows.flatten(), (3, 6), None if ragged else 2)
    pattern = Pattern(torch.arange(7), column, (6, 3), 1).with_flipped(back, torch.zeros(6))
    x = random(3, 20, dtype=dtype)
    want = torch.stack([x[c] if c >= 0 else torch.zeros(20, dtype=dtype) for c in column])
    for name in ("spmm_ref", "spmm_triton"):
        monkeypatch.setattr(f"moe.kernels.sparse.spmm.{name}", None)
    with nan_memory():
        assert torch.equal(gather(pattern, x, backend=backend), want)
    values = random(6, dtype=dtype)
    told = back.with_flipped(pattern, entry)
    with nan_memory():
        got = spmm(CSR(told, values).t(), x, backend=backend)
    check("out", got, want * values[entry][:, None], BOUND[dtype])


def test_split_rows_covers_every_entry_once():
    for lengths in ([0, 5, 0, 100, 7, 0], [64], [0, 0], [1] * 50, [200, 0, 199]):
        indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        for chunk in (1, 7, 64):
            split = split_rows(indptr, sum(lengths), chunk)
            if split is None:
                assert sum(lengths) <= chunk
                continue
            seen = []
            for row, number in zip(split.row_I.tolist(), split.chunk_I.tolist()):
                if row < len(lengths):
                    start = int(indptr[row]) + number * chunk
                    seen += range(start, min(start + chunk, int(indptr[row + 1])))
            assert sorted(seen) == list(range(sum(lengths)))
            cut = [r for r, n in enumerate(lengths) if n > chunk]
            assert [r for r in split.row_J.tolist() if r < len(lengths)] == cut
            items = len(split.row_I)
            assert int(split.part_M1[-1]) <= 2 * (items - len(lengths)) + 2
    one, many = torch.tensor([0, 5000]), torch.arange(5000)
    assert Pattern(one, many, (1, 5000)).split is not None
    assert Pattern(one, many, (1, 5000), longest=5000).split is not None
    assert Pattern(one, many, (1, 5000), longest=1000).split is None
    assert CSR.from_dense(torch.eye(300)).pattern.longest == 1
    assert chunk_size(4096 * 41, 4096) == 128
    assert chunk_size(0, 0) == 64
    assert chunk_size(1 << 30, 2) == 1024


def test_gradients_by_finite_differences():
    torch.manual_seed(1)
    w = sparse_dense(5, 6, 0.5, torch.float64)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    add = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    for a in (CSR.from_dense(w), CSR.from_dense(w).csc(), BCSR.from_dense(w, (2, 4))):
        values = a.values.detach().clone().requires_grad_()
        torch.autograd.gradcheck(
            lambda v, x, c, a=a: spmm(a.with_values(v), x, c, alpha=0.5, beta=-2.0),
            (values, x, add),
        )
        torch.autograd.gradcheck(lambda v, y, a=a: matmul(y.mT, a.with_values(v)), (values, y))
    pattern = CSR.from_dense(w).pattern
    torch.autograd.gradcheck(lambda y, x: sddmm(pattern, y, x, alpha=2.0), (y, x))
    blocks = BCSR.from_dense(w, (2, 4)).pattern
    torch.autograd.gradcheck(lambda y, x: sdd(blocks, y, x.mT, (2, 4)).values, (y, x))


def test_only_what_needs_a_gradient_is_computed(monkeypatch):
    a = CSR.from_dense(sparse_dense(6, 7, 0.5))
    x = torch.randn(7, 2, requires_grad=True)
    out = spmm(a, x)
    monkeypatch.setattr("moe.sparse.products._sddmm.sddmm", None)
    out.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("fullgraph", [True])
def test_torch_compile(fullgraph):
    a = CSR.from_dense(sparse_dense(6, 7, 0.5))
    pattern = a.pattern

    @torch.compile(fullgraph=fullgraph, backend="aot_eager")
    def run(values, x):
        return spmm(CSR(pattern, values), x).square().sum()

    values, x = a.values.requires_grad_(), torch.randn(7, 2, requires_grad=True)
    got = torch.autograd.grad(run(values, x), (values, x))
    want = torch.autograd.grad(spmm(a, x).square().sum(), (values, x))
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w)


def test_mistakes_are_refused():
    a, x = CSR.from_dense(torch.eye(3)), torch.ones(3, 2)
    with pytest.raises(ValueError, match="it must have 3 rows"):
        spmm(a, x[:2])
    with pytest.raises(ValueError, match=r"beta=1.0 needs `add`"):
        spmm(a, x, beta=1.0)
    with pytest.raises(ValueError, match=r"add has shape \(2, 2\), must be \(3, 2\)"):
        spmm(a, x, x[:2], beta=1.0)
    with pytest.raises(ValueError, match="one side of matmul must be sparse"):
        matmul(x, x)
    with pytest.raises(ValueError, match="its columns must be the 3 rows"):
        matmul(x, a)
    with pytest.raises(ValueError, match=r"torch\.int64; allowed: floating"):
        spmm(a, x.long())
    for matrix in (a, BCSR.from_dense(torch.eye(3), 1)):
        with pytest.raises(ValueError, match=r"torch\.int64; allowed: floating"):
            matmul(x.mT.long(), matrix)
    with pytest.raises(ValueError, match="they must have that many rows"):
        sddmm(a.pattern, x, x[:2])
    with pytest.raises(ValueError, match="inner sizes differ"):
        sdd(a.pattern, x, x, 1)
    y = torch.ones(3, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True is not supported"):
        torch.autograd.grad(spmm(a, y).square().sum(), y, create_graph=True)
    assert torch.equal(a @ x, x)
    assert torch.equal(x.mT @ a, x.mT)
    assert torch.equal(x.mT @ COO(*(torch.arange(3),) * 2, torch.ones(3), (3, 3)), x.mT)


@needs_interpreter
def test_blocks_of_other_sizes_are_refused_by_the_kernels():
    a = BCSR.from_dense(torch.ones(8, 8), 8)
    with pytest.raises(ValueError, match="backend='triton' allows 16, 32, 64 and 128"):
        spmm(a, torch.ones(8, 2), backend="triton")
    with pytest.raises(ValueError, match="allows 16, 32"):
        sdd(a.pattern, torch.ones(8, 2), torch.ones(2, 8), 8, backend="triton")
