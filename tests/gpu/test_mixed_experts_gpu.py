"""Experts of different widths on a GPU: kernels against a loop in float64."""

from __future__ import annotations

import pytest
import torch

from moe.kernels.common import tuning
from moe.kernels.grouped import configs, ragged
from moe.kernels.grouped.ragged import Widths
from moe.mixed_experts import mixed_experts
from tests.moe.kernels.grouped_cases import (
    counted_routing,
    ragged_routing,
    random,
    topk_routing,
)
from tests.moe.test_mixed_experts import _compare, _leaves

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_TUNE", "0")


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_widths_of_tiles(dtype):
    sizes = (256, 64, 640, 128, 192, 64, 512, 320)
    _compare(topk_routing(700, 8, 2, device="cuda"), 700, 512, sizes, dtype=dtype, device="cuda")


@pytest.mark.parametrize("kind", ["holes", "ragged", "one", "pointers"])
def test_routings_and_odd_widths(kind):
    sizes = (256, 64, 128, 192, 72, 320) if kind != "pointers" else (33, 7, 100, 64, 1, 50)
    routing = {
        "holes": lambda: topk_routing(500, 6, 3, holes=True, device="cuda"),
        "ragged": lambda: ragged_routing(500, 6, device="cuda"),
        "one": lambda: counted_routing([0, 0, 500, 0, 0, 0], device="cuda"),
        "pointers": lambda: topk_routing(500, 6, 3, device="cuda"),
    }[kind]()
    D = 264 if kind != "pointers" else 77
    _compare(routing, 500, D, sizes, dtype=BF16, device="cuda", save="x")


@pytest.mark.parametrize("name", ["up", "rows", "down_backward", "outer"])
def test_every_configuration(name):
    sizes = (256, 64, 192, 320)
    routing = topk_routing(600, 4, 2, device="cuda")
    for config in configs.candidates(name, BF16, 128):
        with tuning.forced(**{name: config}):
            _compare(routing, 600, 256, sizes, dtype=BF16, device="cuda")


def test_repeats_are_bit_equal_and_read_nothing_back():
    sizes = (256, 64, 640, 128)
    routing = topk_routing(1000, 4, 2, device="cuda")
    leaves = [
        t.requires_grad_() for t in _leaves(1000, 256, sizes, routing, "swiglu", BF16, "cuda")
    ]
    grad = random(1000, 256, dtype=BF16, device="cuda")

    def step():
        x, w1, w2, gates = leaves
        one = type(routing)(**{**vars(routing), "gates_S": gates})
        out = mixed_experts(x, w1, w2, one, Widths(sizes))
        return out, *torch.autograd.grad(out, leaves, grad)

    first = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert ragged._lists.cache_info().hits > 0
