"""Up-projection: the reference against a loop, the kernel against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe.kernels.common import tuning
from moe.kernels.common.activations import ACTIVATIONS
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.common.tuning import Config
from moe.kernels.grouped import configs
from moe.kernels.products import up_forward
from tests.moe.kernels.grouped_cases import (
    BOUND,
    activate_by_hand,
    check,
    nan_memory,
    offsets_of,
    random,
    topk_routing,
    weights,
)

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
SMALL = Config(32, 64, 32, group=2, split=2)


def _by_hand(x_RD, w1_EHD, b1_EH, offsets, activation):
    rows = []
    for e, (start, end) in enumerate(itertools.pairwise(offsets)):
        h = x_RD[start:end] @ w1_EHD[e].T
        rows.append(h if b1_EH is None else h + b1_EH[e])
    h_RH = torch.cat(rows)
    return h_RH, activate_by_hand(h_RH, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_equals_a_loop(activation: str):
    routing = topk_routing(13, 5, 2)
    x = random(13, 6, dtype=torch.float64)
    w1, _, b1, _ = weights(5, 6, 4, activation, torch.float64)
    for bias in (None, b1):
        h, a = up_forward(x, w1, bias, routing.token_R, routing.offsets_E1, activation=activation)
        h_want, a_want = _by_hand(
            x[routing.token_R.long()], w1, bias, routing.offsets_E1.tolist(), activation
        )
        torch.testing.assert_close(h, h_want)
        torch.testing.assert_close(a, a_want)


def _compare(
    T, D, N, E, K, *, config=SMALL, activation="swiglu", dtype=torch.float32, bias=False,
    gather=True, pointers=False, save_h=True, holes=False,
):  # fmt: skip
    """The kernel in NaN-filled memory against float64."""
    routing = topk_routing(T, E, K, holes=holes)
    x = random(T, D, dtype=dtype)
    w1, _, b1, _ = weights(E, D, N, activation, dtype)
    token_R, source = routing.token_R, x
    if not gather:
        source, token_R = x[token_R.long()].contiguous(), None
    with tuning.forced(pointers=pointers, up=config), nan_memory():
        h, a = up_forward(
            source, w1, b1 if bias else None, token_R, routing.offsets_E1,
            activation=activation, save_h=save_h, backend="triton",
        )  # fmt: skip
    offsets = routing.offsets_E1.tolist()
    rows = offsets[-1]
    h_want, a_want = _by_hand(
        x.double()[routing.token_R.long()], w1.double(), b1.double() if bias else None, offsets,
        activation,
    )  # fmt: skip
    assert h.dtype == a.dtype == dtype
    if save_h:
        check("h", h[:rows], h_want, BOUND[dtype])
    else:
        assert h.shape[0] == 0
    check("a", a[:rows], a_want, BOUND[dtype])
    return h, a, h_want


@needs_interpreter
@pytest.mark.parametrize(
    ("T", "D", "N"),
    [(1, 8, 8), (2, 24, 40), (7, 40, 24), (31, 100, 8), (64, 8, 100), (65, 24, 264), (130, 40, 40)],
)
def test_kernel_at_odd_sizes(T: int, D: int, N: int):
    """TMA where D and N are multiples of 16 bytes; each size in one of two dtypes."""
    dtype = torch.float32 if T % 2 else torch.float16
    _compare(T, D, N, 3, 2, dtype=dtype)


@needs_interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernel_activations_and_bias(activation: str):
    _compare(17, 24, 40, 4, 2, activation=activation, bias=True)


@needs_interpreter
@pytest.mark.parametrize(
    "options",
    [
        {"gather": False},
        {"pointers": True},
        {"pointers": True, "gather": False, "bias": True},
        {"save_h": False},
        {"holes": True},
    ],
    ids=str,
)
def test_kernel_options(options: dict):
    _compare(33, 40, 24, 4, 2, **options)


@needs_interpreter
def test_kernel_takes_widths_that_tma_cannot():
    _compare(19, 23, 41, 3, 2, bias=True)


@needs_interpreter
@pytest.mark.parametrize("config", configs.all_configs("up"), ids=str)
def test_every_configuration(config: Config):
    """The real tiles, larger than the problem: float16 because float32 has tiles of its own."""
    full = configs.candidates("up", torch.float32, 64)
    dtype = torch.float32 if config in full else torch.float16
    _compare(70, 72, 140, 2, 1, config=config, dtype=dtype)


@needs_interpreter
def test_a_damaged_tile_is_seen():
    """The check of this file on an output of the kernel with one tile as it was before."""
    h, _, h_want = _compare(40, 24, 40, 3, 2)
    h[16:32, 32:64] = float("nan")
    with pytest.raises(AssertionError, match="h: relative error inf"):
        check("h", h, h_want, BOUND[torch.float32])
    h[16:32, 32:64] = 0
    with pytest.raises(AssertionError, match="relative error"):
        check("h", h, h_want, BOUND[torch.float32])


@needs_interpreter
def test_rows_outside_are_not_written():
    """Rows that belong to no expert keep what they held: the last expert's tile stops in time."""
    w1, *_ = weights(2, 24, 8)
    x = random(40, 24)
    with tuning.forced(up=SMALL), nan_memory():
        h, a = up_forward(
            x, w1, None, None, offsets_of([5, 20]), activation="swiglu", backend="triton"
        )
    assert h[25:].isnan().all()
    assert a[25:].isnan().all()
    assert not h[:25].isnan().any()


@needs_interpreter
@pytest.mark.parametrize("kind", ["columns", "rows", "offset", "transposed weight"])
def test_operands_of_any_stride(kind: str):
    """Views that TMA cannot address give the numbers of their contiguous copies."""
    T, D, N, E = 12, 24, 16, 3
    routing = topk_routing(T, E, 2)
    w1, *_ = weights(E, D, N)
    x = random(T, D)
    view, w1_view = x, w1
    if kind == "columns":
        view = x.T.contiguous().T
    elif kind == "rows":
        view = random(2 * T, D)[::2]
        x = view.contiguous()
    elif kind == "offset":
        flat = torch.empty(w1.numel() + 1)
        w1_view = flat[1:].view_as(w1).copy_(w1)
    else:
        w1_view = w1.transpose(1, 2).contiguous().transpose(1, 2)
    with tuning.forced(up=SMALL):
        got, want = (
            up_forward(
                *operands, None, routing.token_R, routing.offsets_E1,
                activation="swiglu", backend="triton",
            )
            for operands in ((view, w1_view), (x, w1))
        )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_no_rows_at_all():
    w1, *_ = weights(3, 8, 4)
    for backend in ("reference", *(("triton",) if HAVE_TRITON else ())):
        h, a = up_forward(
            torch.empty(0, 8), w1, None, None, offsets_of([0, 0, 0]),
            activation="swiglu", backend=backend,
        )  # fmt: skip
        assert (h.shape, a.shape) == ((0, 8), (0, 4))
