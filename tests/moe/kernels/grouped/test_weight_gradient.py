"""Weight and bias gradients: empty experts, accumulation, gathered operands, the kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe.kernels.common import tuning
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.common.tuning import Config
from moe.kernels.grouped import configs
from moe.kernels.products import bias_gradient, weight_gradient
from tests.moe.kernels.grouped_cases import (
    BOUND,
    check,
    counted_routing,
    nan_memory,
    offsets_of,
    random,
    topk_routing,
)

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
BACKENDS = ["reference", pytest.param("triton", marks=needs_interpreter)]
SMALL = Config(32, 64, 32, split=2)


def _by_hand(left_RI, right_RO, offsets):
    bounds = itertools.pairwise(offsets)
    return torch.stack([left_RI[start:end].T @ right_RO[start:end] for start, end in bounds])


def _operands(routing, side: str, I: int, O: int, dtype):
    """left, right, their token arrays, and both in expert order in float64."""
    T, R = routing.num_tokens, routing.token_R.shape[0]
    rows = int(routing.offsets_E1[-1])
    left = random(T if side == "left" else R, I, dtype=dtype)
    right = random(T if side == "right" else R, O, dtype=dtype)
    token = routing.token_R
    for operand, name in ((left, "left"), (right, "right")):
        if name != side:
            operand[rows:] = float("nan")
    left_token = token if side == "left" else None
    right_token = token if side == "right" else None
    ordered = (
        (x[token[:rows].long()] if t is not None else x[:rows]).double()
        for x, t in ((left, left_token), (right, right_token))
    )
    return (left, right, left_token, right_token), *ordered


def _compare(
    routing, I, O, *, side="right", backend="triton", config=SMALL, dtype=torch.float32,
    pointers=False, add_dtype=None,
):  # fmt: skip
    args, left, right = _operands(routing, side, I, O, dtype)
    want = _by_hand(left, right, routing.offsets_E1.tolist())
    main = None
    if add_dtype is not None:
        main = random(*want.shape, dtype=add_dtype)
        want = want + main.double()
    with tuning.forced(pointers=pointers, outer=config), nan_memory():
        got = weight_gradient(*args, routing.offsets_E1, add_to_EIO=main, backend=backend)
    if main is None:
        assert got.dtype == dtype
        check("dw", got, want, BOUND[dtype])
        empty = routing.counts_E == 0
        assert not got[empty].any(), "an expert without rows must have exact zeros"
    else:
        assert got is None
        check("main", main, want, BOUND[torch.float32] if add_dtype != dtype else BOUND[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [[5, 0, 9, 3, 0, 2], [0, 0, 70], [0, 0]], ids=str)
@pytest.mark.parametrize("side", ["left", "right", "neither"])
def test_empty_experts_are_exactly_zero(backend: str, counts: list[int], side: str):
    """Also in NaN-filled memory."""
    _compare(counted_routing(counts), 24, 40, side=side, backend=backend)


@needs_interpreter
@pytest.mark.parametrize(
    ("T", "I", "O"), [(1, 8, 8), (2, 24, 40), (31, 100, 24), (65, 8, 264), (130, 40, 8)]
)
def test_kernel_at_odd_sizes(T: int, I: int, O: int):
    dtype = torch.float32 if T % 2 else torch.float16
    side = "left" if T % 3 else "right"
    _compare(topk_routing(T, 3, 2, holes=True), I, O, side=side, dtype=dtype)


@needs_interpreter
@pytest.mark.parametrize("side", ["left", "right", "neither"])
def test_kernel_with_pointers(side: str):
    routing = topk_routing(21, 3, 2, holes=True)
    _compare(routing, 24, 40, side=side, pointers=True)
    _compare(routing, 23, 41, side=side)


@needs_interpreter
@pytest.mark.parametrize("config", configs.all_configs("outer"), ids=str)
def test_every_configuration(config: Config):
    full = configs.candidates("outer", torch.float32, None)
    dtype = torch.float32 if config in full else torch.float16
    _compare(topk_routing(70, 2, 1), 136, 264, config=config, dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "add_dtype"), [(torch.float32, torch.float32), (torch.float16, torch.float32)]
)
def test_accumulation(backend: str, dtype: torch.dtype, add_dtype: torch.dtype):
    """Sums are added unrounded to a wider buffer; experts without rows are left as they were."""
    routing = counted_routing([5, 0, 40])
    _compare(routing, 24, 40, backend=backend, dtype=dtype, add_dtype=add_dtype)
    if backend == "triton":
        _compare(routing, 23, 41, dtype=dtype, add_dtype=add_dtype, pointers=True)
    left, right = random(45, 8, dtype=dtype), random(45, 8, dtype=dtype)
    main = torch.ones(3, 8, 8, dtype=add_dtype)
    with tuning.forced(outer=SMALL):
        weight_gradient(
            left, right, None, None, offsets_of([5, 0, 40]), add_to_EIO=main, backend=backend
        )
    assert (main[1] == 1).all()
    assert not (main[0] == 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_at_all(backend: str):
    args = (torch.empty(0, 8), torch.empty(0, 16), None, None, offsets_of([0, 0]))
    with nan_memory():
        dw = weight_gradient(*args, backend=backend)
        db = bias_gradient(torch.empty(0, 8), None, None, None, offsets_of([0, 0]), backend=backend)
    assert dw.shape == (2, 8, 16)
    assert not dw.any()
    assert db.shape == (2, 8)
    assert not db.any()
    main = torch.ones(2, 8, 16)
    weight_gradient(*args, add_to_EIO=main, backend=backend)
    assert (main == 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_bias_gradient(backend: str, gathered: bool, weighted: bool):
    routing = topk_routing(45, 4, 2, holes=True)
    rows = int(routing.offsets_E1[-1])
    token = routing.token_R[:rows].long()
    g = random(45 if gathered else 90, 100)
    if not gathered:
        g[rows:] = float("nan")
    with nan_memory():
        got = bias_gradient(
            g, routing.token_R if gathered else None, routing.gates_S if weighted else None,
            routing.slot_R if weighted else None, routing.offsets_E1, backend=backend,
        )  # fmt: skip
    ordered = (g[token] if gathered else g[:rows]).double()
    if weighted:
        ordered = ordered * routing.gates_S.double()[routing.slot_R[:rows].long(), None]
    offsets = routing.offsets_E1.tolist()
    want = torch.stack([ordered[a:b].sum(0) for a, b in itertools.pairwise(offsets)])
    check("db", got, want, BOUND[torch.float32])
    assert not got[routing.counts_E == 0].any()
