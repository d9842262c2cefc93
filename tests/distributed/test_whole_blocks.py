"""Blocks compiled as a whole, split experts included: one graph, the same bits, and nothing that
was recorded for a backward is left over."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from models.execution import apply_checkpointing, compile_blocks
from moe import MoE, MoEConfig, Routing
from parallel.config import AllGather, AllToAll
from parallel.exchange import operator
from parallel.exchange.operator import experts_operator
from parallel.expert_parallel import WholeMoE, expert_parallel
from parallel.mesh import Mesh, build_mesh, plan_mesh
from tests.distributed import tiny
from tests.distributed.launch import run

WORLD, STEPS = 2, 1


@dataclass(frozen=True)
class Case:
    nodes: int = 2
    expert: int = 2
    exchange: Any = field(default_factory=AllToAll)
    checkpointing: str = "none"
    family: str = "glm4_moe"


CASES = {
    "chunks, recomputed": Case(checkpointing="full"),
    "all tokens to all, float8": Case(
        exchange=AllGather(payload="float8"), checkpointing="selective"
    ),
    "not split, no shared expert": Case(nodes=1, expert=1, family="qwen3_moe"),
}


def engine_of(case: Case, whole: bool):
    config = tiny.config(case.family)
    plan = plan_mesh(WORLD, case.nodes, case.expert, num_experts=config.num_experts)
    model = tiny.build(config)
    groups = tiny.groups_of(model)
    apply_checkpointing(model, case.checkpointing)
    engine = tiny.engine_of(
        "fsdp2", model, build_mesh(plan, torch.device("cpu"), timeout_s=100), groups,
        exchange=case.exchange, whole_blocks=whole,
    )  # fmt: skip
    return engine, config


def train(case: Case, backend: Any = None) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Numbers of the steps, and this rank's tensors afterwards."""
    engine, config = engine_of(case, backend is not None)
    if backend is not None:
        compile_blocks(engine.model, whole=True, fullgraph=True, backend=backend)
    seen = tiny.train_engine(engine, config, dist.get_rank(), WORLD, steps=STEPS)
    with torch.no_grad():  # as validation runs it
        batch = tiny.micro_batches(config, 9, [0])[0]
        seen.append({"loss": float(engine.model(**batch).loss_sum)})
        with torch.compiler.set_stance("force_eager"):
            seen.append({"loss": float(engine.model(**batch).loss_sum)})
    return seen, {name: tiny.local_of(value).clone() for name, value in engine.tensors().items()}


def compared(case: Case) -> dict[str, Any]:
    torch._dynamo.reset()
    want, tensors = train(case)
    counter = CompileCounterWithBackend("aot_eager")
    got, found = train(case, counter)
    gc.collect()
    return {
        "numbers": got == want,
        "tensors": [name for name in tensors if not torch.equal(found[name], tensors[name])],
        "graphs": counter.frame_count,
        "tapes": len(operator._tapes),
    }


def all_compared() -> dict[str, Any]:
    return {name: compared(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run(WORLD, all_compared)


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_block_gives_the_same_bits(outcomes, name):
    for outcome in outcomes:
        assert outcome[name]["numbers"] and not outcome[name]["tensors"], outcome[name]
        assert outcome[name]["tapes"] == 0, "what was recorded for a backward was not freed"


def test_blocks_share_one_graph_each_without_a_break(outcomes):
    """A block with experts and one without, in training and in validation: breaks
    are refused by fullgraph=True, and other blocks compile nothing."""
    graphs = {name: outcome["graphs"] for name, outcome in outcomes[0].items()}
    assert graphs == dict.fromkeys(CASES, 4)


# --- the operator, in one process -----------------------------------------------------------------


@pytest.fixture
def layer() -> WholeMoE:
    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=16, expert_size=8, num_experts=4, num_experts_per_tok=2, shared_expert_size=8
    )
    mesh = Mesh(plan_mesh(1, num_experts=4), torch.device("cpu"))
    return expert_parallel(MoE(config), mesh, whole=True)


def called(layer: WholeMoE, x_TD: torch.Tensor, output_sums: bool = False):
    gates_TK = torch.rand(5, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    choice_TK = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 1], [1, 3]])
    routing = Routing.from_topk(choice_TK, gates_TK, 4)
    weights = [layer.experts.w1, layer.experts.w2, *layer.shared.parameters()]
    found = experts_operator(layer.number, x_TD, routing, weights, output_sums)
    want = layer.experts(x_TD, routing, layer.shared, output_sums)
    return found, want, [x_TD, gates_TK, *weights]


def test_the_operator_is_the_layer(layer):
    x_TD = torch.randn(5, 16, requires_grad=True)
    (got, got_sums), (want, want_sums), inputs = called(layer, x_TD, output_sums=True)
    assert torch.equal(got, want) and torch.equal(got_sums, want_sums)
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (got, want)]
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want) and want.abs().max() > 0


def test_what_is_recorded_goes_with_the_output(layer):
    before = len(operator._tapes)
    y_TD, _, _ = called(layer, torch.randn(5, 16, requires_grad=True))
    assert len(operator._tapes) == before + 1
    del y_TD
    assert len(operator._tapes) == before
    with torch.no_grad():
        called(layer, torch.randn(5, 16))
    assert len(operator._tapes) == before


def test_memory_of_inputs_and_outputs_may_be_used_again(layer):
    """As compiled code does with tensors of its own, once they are not needed any more."""
    x_TD = torch.randn(5, 16, requires_grad=True)
    y_TD, want, inputs = called(layer, x_TD.clone())
    cotangent_TD = torch.randn(5, 16)
    grads = torch.autograd.grad(want, [x for x in inputs if x.is_leaf], cotangent_TD)
    with torch.no_grad():
        inputs[0].fill_(7.0)
        y_TD.fill_(7.0)
    found = torch.autograd.grad(y_TD, [x for x in inputs if x.is_leaf], cotangent_TD)
    assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(layer, dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x_TD = torch.randn(5, 16, dtype=dtype, requires_grad=True)
        got, want, inputs = called(layer.to(dtype), x_TD * 1)  # casts of leaves are cached
    assert got.dtype == want.dtype and torch.equal(got, want)
    grads = [torch.autograd.grad(y.float().square().sum(), inputs) for y in (got, want)]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*grads, strict=True))


def test_a_second_backward_is_refused(layer):
    y_TD, _, _ = called(layer, torch.randn(5, 16, requires_grad=True))
    y_TD.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward"):
        y_TD.sum().backward()
