"""Blocks with room for all that can be sent: the numbers of exact sizes, and no block overflows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe import MoE, MoEConfig, RouterConfig
from moe.control import begin_step
from parallel.config import AllToAll
from parallel.exchange.bounded import Bounds, bounds_of
from parallel.exchange.dispatch import DispatchPlan
from parallel.expert_parallel import expert_parallel
from parallel.mesh import build_mesh, plan_mesh
from tests.distributed.launch import run

WORLD, TOKENS = 4, 20
BASE = MoEConfig(
    hidden_size=12, expert_size=10, num_experts=8, num_experts_per_tok=3, shared_expert_size=6,
    selection_bias=True, init_std=0.3, router=RouterConfig(bias=None),
)  # fmt: skip
LIMITED = replace(BASE, router=RouterConfig(bias=None, capacity={"factor": 1.1}))


@dataclass(frozen=True)
class Case:
    expert: int = 4
    config: MoEConfig = BASE
    chunks: int = 1
    favoured: tuple[int, ...] = ()
    """Experts that every token chooses."""
    tokens: int = TOKENS
    padding: bool = False
    recompute: bool = False


CASES = {
    "over 4": Case(),
    "over 2, 3 chunks": Case(2, chunks=3),
    "all to one rank": Case(favoured=(2, 3)),
    "all to the last rank, recomputed": Case(favoured=(6, 7), recompute=True),
    "padding": Case(padding=True),
    "no tokens": Case(tokens=0),
    "all experts for every token": Case(config=replace(BASE, num_experts_per_tok=8)),
    "limited": Case(config=LIMITED),
    "limited, all to one rank, 2 chunks": Case(config=LIMITED, favoured=(2, 3), chunks=2),
}


def outputs(case: Case, exchange: AllToAll, layer: MoE) -> list[Tensor]:
    """Output and gradients of this rank."""
    plan = plan_mesh(WORLD, case.expert, case.expert, num_experts=8)
    split = expert_parallel(layer, build_mesh(plan, torch.device("cpu"), 60), exchange)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TD = torch.randn(case.tokens, 12, generator=generator, dtype=torch.float64).requires_grad_()
    valid_T = torch.rand(case.tokens, generator=generator) < 0.6 if case.padding else None
    if case.recompute:
        y_TD, _ = checkpoint(split, x_TD, valid_T, use_reentrant=False)
    else:
        y_TD, _ = split(x_TD, valid_T)
    weights = [split.router.weight, split.experts.w1, split.experts.w2]
    wanted = [x_TD, *weights, *split.shared.parameters()]
    return [y_TD.detach(), *torch.autograd.grad(y_TD.square().sum(), wanted)]


def differences(case: Case) -> list[float]:
    """Of each number from that of exact sizes, relative to the largest."""
    torch.manual_seed(3)
    layer = MoE(case.config, dtype=torch.float64)
    layer.router.weight.data = torch.randn(8, 12, dtype=torch.float64)
    if case.favoured:
        layer.router.selection_bias[list(case.favoured)] = 1e4
    begin_step(layer, 1)
    got, want = (
        outputs(case, AllToAll(sizes=sizes, chunks=case.chunks), layer)
        for sizes in ("bounded", "exact")
    )
    return [
        float((got - want).abs().max() / want.abs().max().clamp(min=1e-30)) if want.numel() else 0.0
        for got, want in zip(got, want, strict=True)
    ]


def all_differences() -> dict[str, list[float]]:
    return {name: differences(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[float]]]:
    return run(WORLD, all_differences)


@pytest.mark.parametrize("name", CASES)
def test_bounded_blocks_give_the_numbers_of_exact_sizes(found, name):
    for rank in found:
        assert max(rank[name]) < 1e-14, rank[name]


def bounds(config: MoEConfig, tokens: int, **options: Any) -> Bounds:
    layer = MoE(config)
    begin_step(layer, 1)
    routing = layer.router(torch.randn(tokens, 12), None).routing
    return bounds_of(routing, DispatchPlan(4, 2, **options))


def test_a_limit_of_the_experts_bounds_what_is_sent():
    """64 tokens with 3 of 8 experts: an expert of two takes at most ceil(1.1 · 24) = 27 of them."""
    assert bounds(BASE, 64) == Bounds(rows=64, pairs=128, local=128)
    assert bounds(LIMITED, 64) == Bounds(rows=54, pairs=54, local=54)
    assert bounds(LIMITED, 64, chunks=2) == Bounds(rows=32, pairs=54, local=54)
