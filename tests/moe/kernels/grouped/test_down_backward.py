"""Backward of down-projection and activation: dH, A', dS and what each one costs."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe.kernels.common import tuning
from moe.kernels.common.activations import ACTIVATIONS
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.common.tuning import Config
from moe.kernels.grouped import configs
from moe.kernels.products import down_backward
from tests.moe.kernels.grouped_cases import (
    BOUND,
    activate_by_hand,
    check,
    nan_memory,
    offsets_of,
    ragged_routing,
    random,
    topk_routing,
    weights,
)

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
SMALL = Config(32, 64, 32, group=2, split=2)


def _by_hand(do_TD, w2_EDN, b2_ED, h_RH, gates_S, routing, activation):
    """By autograd, in float64, through Y = A W2ᵀ + b2 and the gate-weighted rows."""
    offsets = routing.offsets_E1.tolist()
    rows = offsets[-1]
    h = h_RH[:rows].double().requires_grad_()
    gates = gates_S.double().requires_grad_()
    a = activate_by_hand(h, activation)
    gate_R = gates[routing.slot_R[:rows].long()]
    out = do_TD.new_zeros(do_TD.shape, dtype=torch.float64)
    for e, (start, end) in enumerate(itertools.pairwise(offsets)):
        y = a[start:end] @ w2_EDN[e].double().T
        y = y if b2_ED is None else y + b2_ED[e].double()
        out = out.index_add(0, routing.token_R[start:end].long(), y * gate_R[start:end, None])
    dh, dgates = torch.autograd.grad(out, (h, gates), do_TD.double())
    return dh, (a * gate_R[:, None]).detach(), dgates


def _compare(
    routing, D, N, *, backend="triton", config=SMALL, activation="swiglu", dtype=torch.float32,
    bias=False, gather=True, pointers=False, want=(True, True, True),
):  # fmt: skip
    E, T = routing.num_experts, routing.num_tokens
    R = routing.token_R.shape[0]
    do = random(T, D, dtype=dtype)
    _, w2, _, b2 = weights(E, D, N, activation, dtype)
    b2 = b2 if bias else None
    h = random(R, ACTIVATIONS[activation].width * N, dtype=dtype)
    h[int(routing.offsets_E1[-1]) :] = float("nan")
    gates = routing.gates_S
    source, token_R = do, routing.token_R
    if not gather:
        source, token_R = do[token_R.long()].contiguous(), None
    with tuning.forced(pointers=pointers, down_backward=config), nan_memory():
        dh, a, dgates = down_backward(
            source, w2, b2, h, gates, token_R, routing.slot_R, routing.row_S, routing.offsets_E1,
            activation=activation, want_dh=want[0], want_a=want[1], want_dgate=want[2],
            backend=backend,
        )  # fmt: skip
    dh_want, a_want, dgates_want = _by_hand(do, w2, b2, h, gates, routing, activation)
    rows = dh_want.shape[0]
    for wanted, got in zip(want, (dh, a, dgates)):
        assert wanted == (got is not None)
    bound = BOUND[torch.float32] if dtype == torch.float64 else BOUND[dtype]
    if want[0]:
        assert dh.dtype == dtype
        check("dh", dh[:rows], dh_want, bound)
    if want[1]:
        assert a.dtype == dtype
        check("a", a[:rows], a_want, bound)
    if want[2]:
        assert dgates.dtype == gates.dtype
        check("dgates", dgates, dgates_want, bound)
        assert not dgates[routing.row_S < 0].any(), "a slot without row has no gradient"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_reference_equals_autograd(activation: str, bias: bool):
    routing = topk_routing(13, 5, 2, holes=True)
    _compare(
        routing, 6, 4, backend="reference", activation=activation, bias=bias, dtype=torch.float64
    )


@needs_interpreter
@pytest.mark.parametrize(
    ("T", "D", "N"), [(1, 8, 8), (7, 40, 24), (31, 100, 8), (64, 8, 100), (65, 24, 264)]
)
def test_kernel_at_odd_sizes(T: int, D: int, N: int):
    dtype = torch.float32 if T % 2 else torch.float16
    routing = topk_routing(T, 3, 2, holes=True)
    _compare(routing, D, N, dtype=dtype)


@needs_interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernel_activations_and_bias(activation: str):
    _compare(topk_routing(17, 4, 2), 24, 40, activation=activation, bias=True)


@needs_interpreter
@pytest.mark.parametrize(
    "options",
    [
        {"gather": False, "bias": True},
        {"gather": False},
        {"pointers": True, "bias": True},
        {"pointers": True},
        {"want": (True, False, False)},
        {"want": (False, True, False)},
        {"want": (False, False, True)},
        {"want": (True, True, False), "pointers": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_options(options: dict, backend: str):
    _compare(topk_routing(33, 4, 2, holes=True), 40, 24, backend=backend, **options)


@needs_interpreter
def test_ragged_tokens_and_widths_that_tma_cannot():
    _compare(ragged_routing(21, 3), 23, 41, bias=True)


@needs_interpreter
@pytest.mark.parametrize("config", configs.all_configs("down_backward"), ids=str)
def test_every_configuration(config: Config):
    full = configs.candidates("down_backward", torch.float32, 64)
    dtype = torch.float32 if config in full else torch.float16
    _compare(topk_routing(70, 2, 1), 72, 140, config=config, dtype=dtype)


@needs_interpreter
@pytest.mark.parametrize("gates", [True, False])
def test_gates_by_row(gates: bool):
    """Rows that are already permuted: gates and their gradient are by row, 0 for unused rows."""
    offsets = offsets_of([5, 0, 9])
    R, D, N = 17, 24, 16
    do, h = random(R, D), random(R, 2 * N)
    _, w2, *_ = weights(3, D, N)
    gate_R = torch.rand(R) if gates else None
    args = (do, w2, None, h, gate_R, None, None, None, offsets)
    want = {"activation": "swiglu", "want_dgate": gates}
    expected = down_backward(*args, **want)
    with tuning.forced(down_backward=SMALL), nan_memory():
        got = down_backward(*args, **want, backend="triton")
    check("dh", got[0][:14], expected[0][:14], BOUND[torch.float32])
    check("a", got[1][:14], expected[1][:14], BOUND[torch.float32])
    if gates:
        check("dgate", got[2], expected[2], BOUND[torch.float32])
        assert not got[2][14:].any()


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_no_rows_at_all(backend: str):
    _, w2, *_ = weights(2, 8, 4)
    none = torch.zeros(0, dtype=torch.int32)
    dh, a, dgates = down_backward(
        torch.randn(3, 8), w2, None, torch.empty(0, 8), torch.rand(6), none, none,
        torch.full((6,), -1, dtype=torch.int32), offsets_of([0, 0]),
        activation="swiglu", backend=backend,
    )  # fmt: skip
    assert (dh.shape, a.shape) == ((0, 8), (0, 4))
    assert dgates.shape == (6,)
    assert not dgates.any()


@needs_interpreter
def test_repeats_have_the_same_bits():
    routing = topk_routing(40, 4, 2)
    do, h = random(40, 24), random(80, 200)
    _, w2, *_ = weights(4, 24, 100)
    args = (do, w2, None, h, routing.gates_S, routing.token_R, routing.slot_R, routing.row_S)
    with tuning.forced(down_backward=SMALL):
        runs = [
            down_backward(*args, routing.offsets_E1, activation="swiglu", backend="triton")[2]
            for _ in range(3)
        ]
    assert all(torch.equal(runs[0], run) for run in runs[1:])
