"""Experts on several ranks against the same layer on one: outputs, gradients, summation order.

All cases run in one group of four processes; each test reads the result of its case.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe import MoE, MoEConfig, RouterConfig, Routing
from moe.control import begin_step
from moe.experts import experts
from moe.rules.mean_outputs import MeanOutputs
from parallel.config import EXCHANGES, AllToAll
from parallel.exchange.transport import Collective
from parallel.expert_parallel import (
    ExpertParallelMoE,
    expert_parallel,
    split_experts,
)
from parallel.mesh import Mesh, build_mesh, plan_mesh
from tests.distributed.launch import run

WORLD = 4
BASE = MoEConfig(
    hidden_size=12, expert_size=10, num_experts=8, num_experts_per_tok=3, shared_expert_size=6,
    selection_bias=True, init_std=0.3, router=RouterConfig(bias=None),
)  # fmt: skip
LAYOUTS = {
    "ep4": (4, 4, "across_nodes"),
    "ep2": (2, 2, "across_nodes"),
    "ep2 twice": (4, 2, "across_nodes"),
    "ep4 in a node": (1, 4, "within_node"),
    "ep1": (2, 1, "across_nodes"),
}
UNEVEN = (5, 0, 17, 3)


@dataclass(frozen=True)
class Case:
    layout: str = "ep4"
    config: MoEConfig = BASE
    options: Any = field(default_factory=AllToAll)
    counts: tuple[int, ...] = UNEVEN
    favoured: tuple[int, ...] = ()
    """Experts that every token chooses."""
    padding: bool = False
    recompute: bool = False
    frozen: tuple[str, ...] = ()
    apart: bool = False
    """Compare with the layer on each rank's tokens by themselves: rounding looks at all of them."""
    tolerance: float = 1e-12


MEANS = replace(BASE, router=RouterConfig(bias=None, gradient={"kind": "default"}))
DROPPED = replace(
    BASE,
    router=RouterConfig(
        bias=None,
        rounding={"to": "down", "tile": 4, "min_tiles": 0, "min_mean_tiles": 0, "dropped": {}},
    ),
)


def _options(kind: str = "all_to_all", **settings) -> Any:
    return EXCHANGES[kind](**settings)


def _float8_cases():
    # E4M3 rounds a dispatched element by up to 2^-4, and an expert's weight gradient may be made of
    # few tokens that all came from elsewhere.
    return {
        "float8 dispatch": Case(options=_options(payload="float8"), tolerance=0.12),
        "float8, pairwise": Case(options=_options("pairwise", payload="float8"), tolerance=0.12),
    }


CASES = {
    **{f"layout {name}": Case(layout=name) for name in LAYOUTS},
    **{
        f"{chunks} chunks": Case(layout="ep2", options=_options(chunks=chunks))
        for chunks in (1, 3, 40)
    },
    "pairwise": Case(options=_options("pairwise")),
    "pairwise in a node": Case(layout="ep4 in a node", options=_options("pairwise")),
    **{
        f"whole, {name}": Case(layout=name, options=_options("all_gather"))
        for name in LAYOUTS
        if name != "ep1"
    },
    "whole, 3 chunks": Case(options=_options("all_gather", chunks=3)),
    "whole, recomputed": Case(
        options=_options("all_gather"), recompute=True, layout="ep2", favoured=(0, 1)
    ),
    "whole, no tokens at all": Case(options=_options("all_gather"), counts=(0, 0, 0, 0)),
    "whole, padding": Case(
        options=_options("all_gather"), padding=True, layout="ep2", counts=(9, 4, 6, 2)
    ),
    "whole, all to one rank": Case(options=_options("all_gather"), favoured=(2, 3)),
    "whole, mean outputs": Case(config=MEANS, options=_options("all_gather")),
    "no tokens at all": Case(counts=(0, 0, 0, 0)),
    "one token in all": Case(counts=(0, 1, 0, 0), options=_options(chunks=3)),
    "all tokens to the first rank": Case(favoured=(0, 1)),
    "all tokens to the last rank": Case(favoured=(6, 7)),
    "all tokens to one node": Case(layout="ep2", favoured=(4, 5, 6)),
    "pairwise, all to one rank": Case(favoured=(2, 3), options=_options("pairwise")),
    "one expert a token": Case(
        config=replace(BASE, num_experts_per_tok=1, norm="none"), layout="ep2"
    ),
    "all experts for every token": Case(config=replace(BASE, num_experts_per_tok=8)),
    "no shared expert": Case(config=replace(BASE, shared_expert_size=0)),
    "ungated, save x": Case(config=replace(BASE, activation="relu2", save="x"), layout="ep2"),
    "padding tokens": Case(padding=True, layout="ep2", counts=(9, 4, 6, 2)),
    "recomputed in backward": Case(recompute=True, options=_options(chunks=3)),
    "recomputed, uneven, one node": Case(recompute=True, layout="ep2", favoured=(0, 1)),
    "frozen experts": Case(frozen=("experts.w1", "experts.w2")),
    "frozen router": Case(frozen=("router.weight",), layout="ep2"),
    "frozen input": Case(frozen=("x",)),
    **_float8_cases(),
    **{f"mean outputs, {name}": Case(config=MEANS, layout=name) for name in LAYOUTS},
    "mean outputs, 3 chunks": Case(config=MEANS, options=_options(chunks=3)),
    "mean outputs, pairwise, recomputed": Case(
        config=MEANS, recompute=True, options=_options("pairwise")
    ),
    "mean outputs, no tokens at all": Case(config=MEANS, counts=(0, 0, 0, 0)),
    "mean outputs, padding tokens": Case(
        config=replace(MEANS, norm="none"), padding=True, layout="ep2", counts=(9, 4, 6, 2)
    ),
    "gradient of dropped pairs": Case(config=DROPPED, counts=(9, 0, 17, 13), apart=True),
    "gradient of dropped pairs, padding": Case(
        config=DROPPED, counts=(9, 0, 17, 13), apart=True, padding=True, layout="ep2"
    ),
}


# --- in the processes -----------------------------------------------------------------------------


_MESHES: dict[str, Mesh] = {}


def _mesh(layout: str) -> Mesh:
    if layout not in _MESHES:
        nodes, expert, placement = LAYOUTS[layout]
        plan = plan_mesh(WORLD, nodes, expert, placement, num_experts=8)
        _MESHES[layout] = build_mesh(plan, torch.device("cpu"), timeout_s=100)
    return _MESHES[layout]


def _layer(config: MoEConfig, favoured: tuple[int, ...], dtype: torch.dtype) -> MoE:
    torch.manual_seed(3)
    layer = MoE(config, dtype=dtype)
    layer.router.weight.data = torch.randn(config.num_experts, config.hidden_size, dtype=dtype)
    if favoured:
        layer.router.selection_bias[list(favoured)] = 1e4
    for rule in layer.router.rules.values():
        if isinstance(rule, MeanOutputs):
            rule.mean_ED.copy_(torch.randn(rule.mean_ED.shape, dtype=dtype))
            rule.mean_count_E.fill_(3)
    begin_step(layer, 1)
    return layer


def _inputs(counts, width: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and cotangents of every rank, the same on all."""
    generator = torch.Generator().manual_seed(11)
    draw = [torch.randn(2, n, width, generator=generator, dtype=dtype) for n in counts]
    return [both[0] for both in draw], [both[1] for both in draw]


def _sum_over(tensor: Tensor, mesh: Mesh, *groups: str) -> Tensor:
    total = tensor.clone()
    for group in groups:
        dist.all_reduce(total, group=mesh.group(group))
    return total


def _compare(name: str, got: Tensor, want: Tensor, tolerance: float) -> str:
    scale = max(want.abs().max().item(), 1e-30) if want.numel() else 1.0
    error = (got - want).abs().max().item() / scale if want.numel() else 0.0
    if want.numel() and want.abs().max() == 0:
        error = got.abs().max().item()
    return "" if error <= tolerance else f"{name}: off by {error:.1e} of its largest; "


def _run_case(case: Case) -> str:
    """Empty, or what differs."""
    mesh, rank, dtype = _mesh(case.layout), dist.get_rank(), torch.float64
    layer = _layer(case.config, case.favoured, dtype)
    xs, cotangents = _inputs(case.counts, case.config.hidden_size, dtype)
    valids = [torch.arange(n) % 3 > 0 if case.padding else None for n in case.counts]
    parallel = expert_parallel(_layer(case.config, case.favoured, dtype), mesh, case.options)
    mine = mesh.local_experts(case.config.num_experts)
    for name, parameter in parallel.named_parameters():
        parameter.requires_grad_(name not in case.frozen)

    x = xs[rank].clone().requires_grad_("x" not in case.frozen)
    if case.recompute:
        y, stats = checkpoint(parallel, x, valids[rank], use_reentrant=False)
    else:
        y, stats = parallel(x, valids[rank])
    ((y * cotangents[rank]).sum() + stats.z_sum).backward()

    whole = torch.cat(xs).requires_grad_()
    if case.apart:
        parts = [layer(part, valid) for part, valid in zip(whole.split(case.counts), valids)]
        want, want_stats = torch.cat([part for part, _ in parts]), parts[0][1]
        for _, more in parts[1:]:
            want_stats = want_stats.plus(more)
    else:
        want, want_stats = layer(whole, torch.cat(valids) if case.padding else None)
    ((want * torch.cat(cotangents)).sum() + want_stats.z_sum).backward()

    found = _compare("output", y, want.split(case.counts)[rank], case.tolerance)
    if "x" not in case.frozen:
        found += _compare("x", x.grad, whole.grad.split(case.counts)[rank], case.tolerance)
    counts = _sum_over(stats.counts_E, mesh, "shard", "replica")
    if not torch.equal(counts, want_stats.counts_E):
        found += f"counts {counts.tolist()} against {want_stats.counts_E.tolist()}; "
    if want_stats.output_sum_ED is not None:
        sums = _sum_over(stats.output_sum_ED, mesh, "shard", "replica")
        found += _compare("sums of outputs", sums, want_stats.output_sum_ED, case.tolerance)
    holders = ("expert_shard", "expert_replica")
    for name, parameter in parallel.named_parameters():
        if name in case.frozen:
            if parameter.grad is not None:
                found += f"{name} is frozen and has a gradient; "
            continue
        if parameter.grad is None:
            found += f"{name} has no gradient, not even zeros; "
            continue
        if name.startswith("experts."):
            reference = getattr(layer, name.removeprefix("experts."))
            grad = _sum_over(parameter.grad, mesh, *holders).view(len(mine), -1)
            want = reference.grad[mine.start : mine.stop].flatten(1)
        else:
            grad = _sum_over(parameter.grad, mesh, "shard", "replica")
            want = layer.get_parameter(name).grad
        found += _compare(name, grad, want, case.tolerance)
    return found


def _exact_layer() -> tuple[MoEConfig, MoE]:
    """Products with one term each, so that a row's result does not depend on its neighbours.

    Then all that rounding can show is the order in which rows are summed.
    """
    config = MoEConfig(
        hidden_size=16, expert_size=16, num_experts=8, num_experts_per_tok=4, activation="relu2"
    )
    layer = _layer(config, (), torch.float32)
    generator = torch.Generator().manual_seed(5)
    for weight in (layer.w1, layer.w2):
        scales = torch.rand(8, 16, generator=generator) + 0.5
        weight.data = torch.diag_embed(scales)[:, torch.randperm(16, generator=generator)]
    return config, layer


ORDERS = {
    "2 chunks": _options(),
    "1 chunk": _options(chunks=1),
    "7 chunks": _options(chunks=7),
    "pairwise": _options("pairwise"),
    "whole": _options("all_gather"),
    "whole, 3 chunks": _options("all_gather", chunks=3),
}


def _all_bits() -> dict[str, list[Tensor]]:
    """Output and input gradient of every mode in float32."""
    mesh, rank = _mesh("ep4"), dist.get_rank()
    _, layer = _exact_layer()
    xs, cotangents = _inputs((37, 50, 0, 23), 16, torch.float32)
    results = {}
    for name, options in ORDERS.items():
        parallel = expert_parallel(_exact_layer()[1], mesh, options)
        x = xs[rank].clone().requires_grad_()
        y, _ = parallel(x)
        (y * cotangents[rank]).sum().backward()
        results[name] = [y.detach(), x.grad]
    x = xs[rank].clone().requires_grad_()
    y, _ = layer(x)
    (y * cotangents[rank]).sum().backward()
    results["one process"] = [y.detach(), x.grad]
    return results


def _ragged_whole() -> str:
    try:
        return _ragged("ep2", _options("all_gather"))
    except ValueError as error:
        return str(error)


def _ragged(layout: str, options: Any) -> str:
    """Any number of experts for a token, none included, as token rounding gives them."""
    mesh, rank = _mesh(layout), dist.get_rank()
    layer = _layer(replace(BASE, shared_expert_size=0), (), torch.float64)
    parallel = expert_parallel(layer, mesh, options)
    xs, cotangents = _inputs(UNEVEN, BASE.hidden_size, torch.float64)
    generator = torch.Generator().manual_seed(rank)
    chosen_TE = torch.rand(UNEVEN[rank], 8, generator=generator) < 0.4
    token_P, expert_P = chosen_TE.nonzero(as_tuple=True)
    # unused pairs in the middle and padding behind the last token are part of the form
    expert_P = torch.where(torch.arange(len(expert_P)) % 5 == 4, -1, expert_P)
    token_P = torch.cat([token_P, torch.full((3,), UNEVEN[rank])])
    expert_P = torch.cat([expert_P, torch.full((3,), -1)])
    gate_P = torch.rand(len(token_P), generator=generator, dtype=torch.float64)
    results = []
    for one in (False, True):
        x, gates = xs[rank].clone().requires_grad_(), gate_P.clone().requires_grad_()
        routing = Routing.from_pairs(token_P, expert_P, gates, UNEVEN[rank], 8)
        if one and UNEVEN[rank] == 0:
            y = x * gates.sum()
        elif one:
            y = experts(x, layer.w1, layer.w2, routing)
        else:
            y = parallel.experts(x, routing)
        (y * cotangents[rank]).sum().backward()
        results.append((y, x.grad, gates.grad))
    names = ("output", "x", "gates")
    return "".join(_compare(*each, 1e-12) for each in zip(names, *results))


def _crossings() -> dict[str, int]:
    """Rows that leave the ranks, by mode."""
    mesh = _mesh("ep4")
    _, layer = _exact_layer()
    found = {}
    for name, options in ORDERS.items():
        transport = _Counting(mesh.group("expert"))
        expert_parallel(layer, mesh, options, transport)(_inputs((64,), 16, torch.float32)[0][0])
        found[name] = transport.rows
    return found


@dataclass(frozen=True)
class _Counting(Collective):
    """Counts rows of tokens, there and back (gates travel as bytes)."""

    seen: list[int] = field(default_factory=list)

    def start(self, rows, split):
        if rows.dtype != torch.uint8:
            self.seen.append(rows.shape[0])
        return super().start(rows, split)

    @property
    def rows(self) -> int:
        return sum(self.seen)


def _evaluation() -> list[bool]:
    """Without gradients, in the three forms that evaluation has, the same values."""
    mesh, rank = _mesh("ep2"), dist.get_rank()
    parallel = expert_parallel(_layer(BASE, (), torch.float64), mesh)
    x = _inputs(UNEVEN, BASE.hidden_size, torch.float64)[0][rank]
    want = parallel(x)[0]
    with torch.no_grad():
        first = parallel(x)[0]
    with torch.inference_mode():
        second = parallel(x)[0]
    return [torch.equal(first, want), torch.equal(second, want), not first.requires_grad]


def _autocast() -> str:
    mesh, rank = _mesh("ep2"), dist.get_rank()
    layer = _layer(BASE, (), torch.float32)
    parallel = expert_parallel(layer, mesh)
    x = _inputs((6, 6, 6, 6), BASE.hidden_size, torch.float32)[0][rank]
    with torch.autocast("cpu", torch.bfloat16):
        want, got = layer(x)[0], parallel(x)[0]
    if got.dtype != want.dtype:
        return f"{got.dtype} instead of {want.dtype}"
    return _compare("output", got.float(), want.float(), 0.02)


def _whole_model() -> dict:
    """`split_experts` over a small model: names, ranges, one transport for all layers."""
    mesh = _mesh("ep2")
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 12), _layer(BASE, (), torch.float32), _layer(BASE, (), torch.float32)
    )
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    ranges = split_experts(model, mesh)
    good = True
    for name, place in ranges.items():
        part = model.get_parameter(name).detach().flatten()
        full = whole[place.name]
        good &= tuple(full.shape) == place.shape
        good &= torch.equal(part, full.flatten()[place.start : place.start + part.numel()])
    return {
        "names": sorted((name, place.name) for name, place in ranges.items()),
        "good": good,
        "one transport": model[1].experts.transport is model[2].experts.transport,
        "kinds": [type(module) is ExpertParallelMoE for module in model],
        "is MoE": isinstance(model[1], MoE),
    }


def _everything() -> dict:
    cases = {}
    for name, case in CASES.items():
        try:
            cases[name] = _run_case(case)
        except Exception:
            raise RuntimeError(f"case {name!r}:\n{traceback.format_exc()}") from None
    return {
        "cases": cases,
        "bits": _all_bits(),
        "ragged": [_ragged("ep4", o) for o in ORDERS.values() if o.kind != "all_gather"]
        + [_ragged("ep2", _options())],
        "ragged whole": _ragged_whole(),
        "crossings": _crossings(),
        "evaluation": _evaluation(),
        "autocast": _autocast(),
        "model": _whole_model(),
    }


# --- tests ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(WORLD, _everything)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(results, name):
    found = {rank: r["cases"][name] for rank, r in enumerate(results) if r["cases"][name]}
    assert not found


@pytest.mark.parametrize("name", ["1 chunk", "7 chunks", "pairwise"])
def test_modes_sum_in_the_same_order(results, name):
    """Outputs and gradients bit by bit, however the tokens travel."""
    for rank, result in enumerate(results):
        for what, got, want in zip(
            ("output", "x"), result["bits"][name], result["bits"]["2 chunks"]
        ):
            assert torch.equal(got, want), (rank, what, (got - want).abs().max())


def test_the_order_is_seen_by_rounding(results):
    """Else the test above would prove nothing: one process sums in another order."""
    result = results[0]["bits"]
    got, want = result["2 chunks"][0], result["one process"][0]
    assert not torch.equal(got, want)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def test_ragged_routings(results):
    for result in results:
        assert result["ragged"] == [""] * 5


def test_a_token_crosses_once_to_each_rank(results):
    """4 of 8 experts over 4 ranks of 2: 4 · 3/4 = 3 pairs leave a token's rank, fewer copies."""
    total = {name: sum(r["crossings"][name] for r in results) / (2 * 64 * WORLD) for name in ORDERS}
    assert total["2 chunks"] == total["1 chunk"] == total["7 chunks"] == total["pairwise"]
    # expected copies: 3 · (1 - C(6,4) / C(8,4)) = 2.36
    assert 2.1 < total["2 chunks"] < 2.6


def test_evaluation_without_gradients(results):
    assert all(result["evaluation"] == [True] * 3 for result in results)


def test_autocast(results):
    assert [result["autocast"] for result in results] == [""] * WORLD


def test_splitting_a_model(results):
    for result in results:
        assert result["model"] == {
            "names": [
                ("1.experts.w1", "1.w1"),
                ("1.experts.w2", "1.w2"),
                ("2.experts.w1", "2.w1"),
                ("2.experts.w2", "2.w2"),
            ],
            "good": True,
            "one transport": True,
            "kinds": [False, True, True],
            "is MoE": True,
        }


# --- settings -------------------------------------------------------------------------------------


def test_pull_needs_cuda():
    mesh = Mesh(plan_mesh(2, 2, 2, num_experts=8), torch.device("cpu"), groups={"expert": object()})
    with pytest.raises(ValueError, match=r"exchange\.transport=pull needs CUDA .*: collective"):
        expert_parallel(_layer(BASE, (), torch.float32), mesh, _options(transport="pull"))


def test_experts_must_divide():
    mesh = Mesh(plan_mesh(3, 3, 3, num_experts=9), torch.device("cpu"), groups={"expert": object()})
    with pytest.raises(ValueError, match=r"parallel\.expert=3 does not divide num_experts=8"):
        expert_parallel(_layer(BASE, (), torch.float32), mesh)


def test_whole_refuses_tokens_with_unequal_numbers_of_experts(results):
    for result in results:
        assert (
            "parallel.exchange.kind=all_gather needs equally many experts" in result["ragged whole"]
        )
