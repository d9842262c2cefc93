"""scripts/scaling.py: bytes that can be counted by hand, and what follows from them."""

import pytest

from models.config import ModelConfig
from parallel.mesh import plan_mesh
from scripts import scaling
from training.estimate import cost

MODEL = ModelConfig(
    family="olmoe", vocab_size=100, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, intermediate_size=4,
)  # fmt: skip
EXPERTS, COUNTS = 8 * 3 * 8 * 4, {"dense": 1000, "expert": 8 * 3 * 8 * 4, "router": 64}
MACHINE = cost.Machine(flops=1e12, inside=1.0, between=1.0)  # so that seconds are bytes


@pytest.mark.parametrize(("ranks", "k", "rows"), [(2, 2, 0.75), (4, 8, 2.70), (8, 8, 4.59)])
def test_copies_of_a_token(ranks, k, rows):
    assert cost.copies(4096, k, ranks) == pytest.approx(rows, abs=0.01)


def test_copies_with_few_experts_are_exact():
    # One of 2 ranks, 2 of 4 experts: no expert of the other in 1 of 6 choices.
    assert cost.copies(4, 2, 2) == pytest.approx(5 / 6)
    assert cost.copies(4, 2, 1) == 0


def test_parameters_are_counted_by_kind():
    found = cost.parameters(MODEL)
    assert (found["expert"], found["router"]) == (EXPERTS, 64)


def test_bytes_of_both_placements():
    tokens, rows = 10, 4 * 10 * 2 * 8  # four trips of 8 bf16 numbers
    across = cost.step_cost(MODEL, plan_mesh(4, 2, 2, num_experts=8), MACHINE, tokens, 4,
                               counts=COUNTS)  # fmt: skip
    # 8 bytes an element to gather twice and reduce; half of it is here already.
    assert across.inside == 8 * (1000 + EXPERTS / 2) / 2
    assert across.tokens == rows * cost.copies(8, 2, 2)
    # 8 bytes an element to sum two copies: half of the dense weights; routers over all four.
    assert across.between == across.tokens + 4 * 500 + 4 * 64 * 2 * 3 / 4
    inside = cost.step_cost(MODEL, plan_mesh(4, 2, 2, "within_node", 8), MACHINE, tokens, 4,
                               counts=COUNTS)  # fmt: skip
    assert inside.inside == 8 * 1000 / 2 + inside.tokens
    assert inside.between == 4 * 500 + 4 * EXPERTS / 2 + 4 * 64 * 2 * 3 / 4
    assert inside.best <= inside.worst and inside.compute == across.compute


def test_the_table(capsys):
    assert (
        scaling.main(["configs/olmoe_1b_7b.yaml", "--gpus", "8", "32", "--expert", "2", "8"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    placements = [tuple(line.split(" | ")[:3]) for line in lines[3:]]
    assert placements == [
        ("| 8", "within_node", "2"), ("| 8", "within_node", "8"), ("| 32", "across_nodes", "2"),
        ("| 32", "within_node", "2"), ("| 32", "within_node", "8"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "12"], "--gpus 12 is more than --per-node 8"),
        (["--per-node", "0"], "--per-node 0 must be at least 1"),
        (["--expert", "3", "--gpus", "16"], "--expert 3: no layout of --gpus 16 splits 64 experts"),
    ],
)
def test_a_table_that_would_be_empty_or_of_other_nodes_is_refused(words, told, capsys):
    with pytest.raises(SystemExit) as stop:
        scaling.main(["configs/olmoe_1b_7b.yaml", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and told in line
