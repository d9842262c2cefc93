"""What the host reads back in a layer: each such read is a wait for the device on a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import parallel
from moe import MoE, MoEConfig
from parallel.config import AllGather, AllToAll, Pairwise
from parallel.expert_parallel import expert_parallel
from parallel.mesh import build_mesh, plan_mesh
from tests.distributed.launch import run

WORLD = 2
EXCHANGES = {
    "all_to_all": AllToAll(),
    "all_to_all, float8": AllToAll(payload="float8"),
    "all_to_all, bounded": AllToAll(sizes="bounded"),
    "pairwise": Pairwise(),
    "all_gather": AllGather(),
    "all_gather, equal tokens": AllGather(equal_tokens=True),
}
# Each of these asks a tensor for its contents; of `x.cpu().numpy()` and the like the last one does.
READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"}


@contextmanager
def reads_of(folder: Path) -> Iterator[Counter[str]]:
    """Counts what reads the contents of a tensor in the files of a folder, in forward and backward.
    (Experts that are computed on a CPU read their sizes too, kernels on a GPU do not.)"""
    found: Counter[str] = Counter()

    def counting(name: str):
        real = getattr(torch.Tensor, name)

        def read(*args, **kwargs):
            if sys._getframe(1).f_code.co_filename.startswith(str(folder)):
                found[name] += 1
            return real(*args, **kwargs)

        return mock.patch.object(torch.Tensor, name, read)

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(counting(name))
        yield found


def counted() -> dict[str, tuple[dict[str, int], int, list[torch.Tensor]]]:
    """By exchange: reads, questions of the hosts to each other, and the layer's numbers."""
    mesh = build_mesh(plan_mesh(WORLD, 2, 2, num_experts=8), torch.device("cpu"), timeout_s=60)
    config = MoEConfig(hidden_size=16, expert_size=8, num_experts=8, num_experts_per_tok=2)
    torch.manual_seed(0)
    layer = MoE(config)
    torch.manual_seed(dist.get_rank())
    x_TD = torch.randn(24, 16, requires_grad=True)
    found = {}
    for name, exchange in EXCHANGES.items():
        split = expert_parallel(layer, mesh, exchange)
        asking = mock.patch("torch.distributed.all_gather", wraps=dist.all_gather)
        with reads_of(Path(parallel.__file__).parent) as reads, asking as asked:
            y_TD, _ = split(x_TD)
            (grad_TD,) = torch.autograd.grad(y_TD.square().sum(), x_TD)
        found[name] = (dict(reads), asked.call_count, [y_TD.detach(), grad_TD])
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run(WORLD, counted)


def test_the_counter_sees_reads_in_both_directions():
    class Nosy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * int(x.sum().item() > 0)

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.tolist()[0]

    with reads_of(Path(__file__)) as reads:
        Nosy.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert reads == {"item": 1, "tolist": 1}


@pytest.mark.parametrize("name", ["all_to_all", "all_to_all, float8", "pairwise"])
def test_exchanges_by_size_read_them_once_a_layer(outcomes, name):
    for outcome in outcomes:
        reads, asked, _ = outcome[name]
        assert (sum(reads.values()), asked) == (1, 0), (reads, asked)


def test_all_gather_reads_nothing_of_the_device(outcomes):
    for outcome in outcomes:
        reads, asked, numbers = outcome["all_gather"]
        assert (reads, asked) == ({"numpy": 1}, 1), "the numbers of tokens that hosts told"
        reads, asked, same = outcome["all_gather, equal tokens"]
        assert (reads, asked) == ({}, 0)
        assert all(torch.equal(a, b) for a, b in zip(numbers, same, strict=True))


def test_bounded_sizes_are_not_read(outcomes):
    for outcome in outcomes:
        reads, asked, _ = outcome["all_to_all, bounded"]
        assert (reads, asked) == ({}, 0)
