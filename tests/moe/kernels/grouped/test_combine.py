"""Combine: order and precision of the sum, slots without rows, ragged tokens, the kernel."""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.grouped.combine import combine
from moe.routing import Routing
from tests.moe.kernels.grouped_cases import (
    BOUND,
    check,
    nan_memory,
    ragged_routing,
    random,
    topk_routing,
)

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
BACKENDS = ["reference", pytest.param("triton", marks=needs_interpreter)]


def _by_hand(y_RD, gates_S, routing: Routing):
    """Sums slot after slot in the dtype of y."""
    K = routing.slots_per_token
    bounds = routing.slot_offsets_T1
    out = torch.zeros(routing.num_tokens, y_RD.shape[1], dtype=y_RD.dtype)
    for t in range(routing.num_tokens):
        slots = range(t * K, t * K + K) if K else range(int(bounds[t]), int(bounds[t + 1]))
        for s in slots:
            row = int(routing.row_S[s])
            if row >= 0:
                out[t] += y_RD[row] * (1 if gates_S is None else gates_S[s])
    return out


def _run(y, gates, routing: Routing, backend: str):
    with nan_memory():
        return combine(
            y, gates, routing.row_S, num_tokens=routing.num_tokens,
            slots_per_token=routing.slots_per_token, slot_offsets_T1=routing.slot_offsets_T1,
            backend=backend,
        )  # fmt: skip


def _with_nan_in_unused_rows(routing: Routing, D: int, dtype=torch.float32):
    y = random(routing.token_R.shape[0], D, dtype=dtype)
    y[int(routing.offsets_E1[-1]) :] = float("nan")
    return y


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["full", "holes", "ragged", "many"])
@pytest.mark.parametrize("weighted", [True, False])
def test_equals_a_loop(backend: str, kind: str, weighted: bool):
    T, E, K = (11, 24, 20) if kind == "many" else (23, 5, 3)  # 20: more slots than are unrolled
    if kind == "ragged":
        routing = ragged_routing(T, E)
    else:
        routing = topk_routing(T, E, K, holes=kind == "holes")
    y = _with_nan_in_unused_rows(routing, 40)
    gates = routing.gates_S if weighted else None
    got = _run(y, gates, routing, backend)
    want = _by_hand(y.double(), None if gates is None else gates.double(), routing)
    check("out", got, want, BOUND[torch.float32])
    empty = [t for t in range(T) if not want[t].any()]
    assert not got[empty].any(), "a token without experts must give exact zeros"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D", [1, 8, 24, 100, 264, 1500])
def test_widths(backend: str, D: int):
    routing = topk_routing(5, 4, 2, holes=True)
    y = _with_nan_in_unused_rows(routing, D, torch.float16)
    got = _run(y, routing.gates_S, routing, backend)
    assert got.dtype == torch.float16
    want = _by_hand(y.double(), routing.gates_S.double(), routing)
    check("out", got, want, BOUND[torch.float16])


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_terms_survive(backend: str):
    """2048 + 7 times 1 in float16: term by term it stays 2048, the exact sum 2055 rounds to 2056.

    The same as 256 + 7 times 1 in bfloat16, where sequential sums give 256 and the right answer is
    264; the interpreter has no bfloat16.
    """
    routing = Routing.from_topk(torch.arange(8)[None], torch.ones(1, 8), 8)
    y = torch.ones(8, 16, dtype=torch.float16)
    y[0] = 2048
    assert _by_hand(y, None, routing)[0, 0] == 2048
    assert (_run(y, routing.gates_S, routing, backend) == 2056).all()
    if backend == "reference":
        y = torch.ones(8, 16, dtype=torch.bfloat16)
        y[0] = 256
        assert (_run(y, routing.gates_S, routing, backend) == 264).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sum_is_in_slot_order(backend: str):
    """Float32 addition is not associative: 1e8 + 1 - 1e8 shows the order."""
    routing = Routing.from_topk(torch.tensor([[2, 0, 1]]), torch.ones(1, 3), 3)
    y = torch.tensor([[1.0], [-1e8], [1e8]]).expand(3, 8).contiguous()  # rows of experts 0, 1, 2
    assert (_run(y, None, routing, backend) == 0).all()  # (1e8 + 1) - 1e8
    routing = Routing.from_topk(torch.tensor([[2, 1, 0]]), torch.ones(1, 3), 3)
    assert (_run(y, None, routing, backend) == 1).all()  # (1e8 - 1e8) + 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_combine(backend: str):
    routing = Routing.from_topk(torch.full((4, 2), -1), torch.ones(4, 2), 3)
    y = torch.full((8, 16), float("nan"))
    assert not _run(y, routing.gates_S, routing, backend).any()
    none = torch.zeros(0, dtype=torch.int32)
    out = combine(torch.empty(0, 16), None, none, num_tokens=0, slots_per_token=2, backend=backend)
    assert out.shape == (0, 16)
    out = combine(
        torch.empty(0, 16), None, none, num_tokens=3, slots_per_token=None,
        slot_offsets_T1=torch.zeros(4, dtype=torch.int32), backend=backend,
    )  # fmt: skip
    assert out.shape == (3, 16)
    assert not out.any()
