"""The cost of a layout: bytes that can be counted by hand."""

import pytest

from models.config import ModelConfig
from parallel.mesh import plan_mesh
from training.estimate import cost, counts

MODEL = ModelConfig(
    family="olmoe", vocab_size=100, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, intermediate_size=4,
)  # fmt: skip
EXPERTS, COUNTS = 8 * 3 * 8 * 4, {"dense": 1000, "expert": 8 * 3 * 8 * 4, "router": 64}
MACHINE = cost.Machine(flops=1e12, intra_node=1.0, inter_node=1.0)  # so that seconds are bytes


@pytest.mark.parametrize(("ranks", "k", "rows"), [(2, 2, 0.75), (4, 8, 2.70), (8, 8, 4.59)])
def test_copies_of_a_token(ranks, k, rows):
    assert cost.copies(4096, k, ranks) == pytest.approx(rows, abs=0.01)


def test_copies_with_few_experts_are_exact():
    # One of 2 ranks, 2 of 4 experts: no expert of the other in 1 of 6 choices.
    assert cost.copies(4, 2, 2) == pytest.approx(5 / 6)
    assert cost.copies(4, 2, 1) == 0


def test_parameters_are_counted_by_kind():
    found = counts.parameter_counts(MODEL)
    assert (found["expert"], found["router"]) == (EXPERTS, 64)
    assert counts.active_parameters(MODEL, found) == sum(found.values()) - EXPERTS * 6 // 8


def test_what_a_process_keeps():
    """Two nodes of two, experts over both: a quarter of them, half of the dense weights."""
    assert counts.held(COUNTS, plan_mesh(4, 2, 2, num_experts=8)) == EXPERTS // 4 + 500 + 64
    assert counts.held(COUNTS, plan_mesh(4, 2, 1, num_experts=8)) == EXPERTS // 2 + 500 + 64


def test_bytes_of_both_placements():
    tokens, rows = 10, 4 * 10 * 2 * 8  # four trips of 8 bf16 numbers
    across = cost.step_cost(MODEL, plan_mesh(4, 2, 2, num_experts=8), MACHINE, tokens, 4,
                               counts=COUNTS)  # fmt: skip
    # 8 bytes an element to gather twice and reduce; half of it is here already.
    assert across.intra_node == 8 * (1000 + EXPERTS / 2) / 2
    assert across.tokens == rows * cost.copies(8, 2, 2)
    # 8 bytes an element to sum two copies: half of the dense weights; routers over all four.
    assert across.inter_node == across.tokens + 4 * 500 + 4 * 64 * 2 * 3 / 4
    within = cost.step_cost(MODEL, plan_mesh(4, 2, 2, "within_node", 8), MACHINE, tokens, 4,
                               counts=COUNTS)  # fmt: skip
    assert within.intra_node == 8 * 1000 / 2 + within.tokens
    assert within.inter_node == 4 * 500 + 4 * EXPERTS / 2 + 4 * 64 * 2 * 3 / 4
    assert within.best <= within.worst and within.compute == across.compute
