"""The routing value: both orders of the matrix, its checks, its compact form."""

import pytest
import torch

import moe.routing
from moe import Routing
from moe.routing import id_dtype

EXPERT_TK = [[1, 2], [2, 0], [-1, -1], [3, 1]]
GATE_TK = [[0.7, 0.3], [0.6, 0.4], [0.0, 0.0], [0.9, 0.1]]


def small() -> Routing:
    return Routing.from_topk(torch.tensor(EXPERT_TK), torch.tensor(GATE_TK), 5)


def ragged() -> Routing:
    """Token 0 has one expert, token 1 none, token 2 three, and one pair is padding."""
    return Routing.from_pairs(
        torch.tensor([0, 2, 2, 2, 3]),
        torch.tensor([4, 1, 0, 4, 7]),
        torch.tensor([0.5, 0.25, 0.125, 1.0, 9.0]),
        num_tokens=3,
        num_experts=5,
    )


def random_topk(T: int, E: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(T, E).argsort(dim=1)[:, :K].int(), torch.rand(T, K)


def test_topk_by_expert():
    routing = small().validate()
    assert routing.counts_E.tolist() == [1, 2, 2, 1, 0]
    assert routing.offsets_E1.tolist() == [0, 1, 3, 5, 6, 6]
    assert routing.token_R.tolist() == [1, 0, 3, 0, 1, 3, 0, 0]  # stable by token; two unused rows
    assert routing.slot_R.tolist() == [3, 0, 7, 1, 2, 6, 0, 0]
    assert routing.row_S.tolist() == [1, 3, 4, 0, -1, -1, 5, 2]
    assert routing.token_S.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (routing.num_tokens, routing.num_experts, routing.slots_per_token) == (4, 5, 2)


def test_dense_and_views_say_the_same():
    want = torch.zeros(4, 5)
    for t, (experts, gates) in enumerate(zip(EXPERT_TK, GATE_TK)):
        for e, gate in zip(experts, gates):
            if e >= 0:
                want[t, e] = gate
    routing = small()
    assert torch.equal(routing.dense(), want)
    indptr, expert, gate = routing.csr()
    by_token = torch.zeros(4, 5)
    for t in range(4):
        for s in range(indptr[t], indptr[t + 1]):
            if expert[s] >= 0:
                by_token[t, expert[s]] = gate[s]
    assert torch.equal(by_token, want)
    indptr, token, gate = routing.csc()
    by_expert = torch.zeros(4, 5)
    for e in range(5):
        for r in range(indptr[e], indptr[e + 1]):
            by_expert[token[r], e] = gate[r]
    assert torch.equal(by_expert, want)
    assert gate[int(indptr[-1]) :].tolist() == [0.0, 0.0]


def test_pairs():
    routing = ragged().validate()
    assert routing.slot_offsets_T1.tolist() == [0, 1, 1, 4]
    assert routing.expert_S.tolist() == [4, 1, 0, 4, -1]
    assert routing.token_S.tolist() == [0, 2, 2, 2, 3]
    assert routing.counts_E.tolist() == [1, 1, 0, 0, 2]
    assert routing.dense().tolist() == [[0, 0, 0, 0, 0.5], [0] * 5, [0.125, 0.25, 0, 0, 1.0]]
    assert routing.slots_per_token is None
    assert routing.csr()[0].tolist() == [0, 1, 1, 4]


def test_pairs_of_a_topk_choice_are_the_topk_routing():
    expert_TK, gate_TK = random_topk(33, 9, 4)
    a = Routing.from_topk(expert_TK, gate_TK, 9)
    token_P = torch.arange(33).repeat_interleave(4)
    b = Routing.from_pairs(token_P, expert_TK.reshape(-1), gate_TK.reshape(-1), 33, 9)
    for name in ("gates_S", "expert_S", "row_S", "token_R", "slot_R", "offsets_E1"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(b.slot_offsets_T1, a.csr()[0])


@pytest.mark.parametrize(("T", "E", "K"), [(1, 1, 1), (0, 3, 2), (77, 5, 5), (199, 60, 8)])
def test_sizes(T, E, K):
    routing = Routing.from_topk(*random_topk(T, E, K), E).validate()
    assert int(routing.counts_E.sum()) == T * K
    assert routing.dense().shape == (T, E)
    assert int((routing.dense() > 0).sum()) == T * K
    empty = torch.zeros(0)
    ragged = Routing.from_pairs(empty.int(), empty.int(), empty, T, E).validate()
    assert ragged.slot_offsets_T1.tolist() == [0] * (T + 1)


def test_gates_carry_gradient():
    gate_TK = torch.tensor(GATE_TK, requires_grad=True)
    routing = Routing.from_topk(torch.tensor(EXPERT_TK), gate_TK, 5)
    weight_TE = torch.arange(20.0).view(4, 5)
    (dense,) = torch.autograd.grad((routing.dense() * weight_TE).sum(), gate_TK)
    assert dense.tolist() == [[1, 2], [7, 5], [0, 0], [18, 16]]
    weight_R = torch.arange(1.0, 9.0)
    (rows,) = torch.autograd.grad((routing.gates_R * weight_R).sum(), gate_TK)
    assert rows.tolist() == [[2, 4], [5, 1], [0, 0], [6, 3]]  # weight of each slot's row


# ------------------------------------------------------------------------------ checks


def test_validate_names_ids():
    routing = Routing.from_topk(torch.tensor([[0, 9], [5, -3]]), torch.ones(2, 2), 5)
    with pytest.raises(ValueError, match=r"\[-3, 5, 9\] are out of range; allowed: -1 .* 0 to 4"):
        routing.validate()


def test_debug_checks_at_construction(monkeypatch):
    bad = torch.tensor([[0, 9]])
    Routing.from_topk(bad, torch.ones(1, 2), 5)  # no read-back, hence no check, by default
    monkeypatch.setattr(moe.routing, "DEBUG", True)
    with pytest.raises(ValueError, match=r"\[9\] are out of range"):
        Routing.from_topk(bad, torch.ones(1, 2), 5)
    with pytest.raises(ValueError, match=r"sorted by token: token 1 at 1 is followed by 0"):
        Routing.from_pairs(torch.tensor([0, 1, 0]), torch.zeros(3).int(), torch.ones(3), 2, 5)
    with pytest.raises(ValueError, match=r"token ids \[4\] are out of range; allowed: 0 to 1"):
        Routing.from_pairs(torch.tensor([0, 4]), torch.zeros(2).int(), torch.ones(2), 2, 5)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        (
            "expert_S",
            lambda t: t.index_fill(0, torch.tensor([1]), 1),
            "token 0 holds expert 1 twice",
        ),
        ("offsets_E1", lambda t: t + torch.tensor([0, 0, 1, 0, 0, 0]), "offsets_E1 gives counts"),
        ("token_R", lambda t: t.flip(0), r"token_R\[0\] is 0, should be 1"),
        ("slot_R", lambda t: t.roll(1), r"slot_R\[0\] is 0, should be 3"),
        ("row_S", lambda t: t.roll(1), r"row_S\[0\] is 2, should be 1"),
        ("gates_S", lambda t: t / 0 * 0, "gates_S holds NaN"),
        ("gates_S", lambda t: t[:-1], "slot arrays differ in length: gates_S 7"),
        ("slot_R", lambda t: t[:4], "4 rows are allocated for 6 pairs"),
        ("num_tokens", lambda t: 3, "expert_S has 8 slots, 3 tokens of 2 slots need 6"),
    ],
)
def test_validate_finds_every_broken_part(field, change, message):
    routing = small()
    values = {name: getattr(routing, name) for name in Routing.__dataclass_fields__}
    values[field] = change(values[field])
    with pytest.raises(ValueError, match=message):
        Routing(**values).validate()


def test_shapes_are_checked_always():
    with pytest.raises(ValueError, match=r"share one shape \[T, K\], got \(3, 2\) and \(3, 1\)"):
        Routing.from_topk(torch.zeros(3, 2).int(), torch.zeros(3, 1), 4)
    with pytest.raises(ValueError, match=r"share one shape \[P\], got \(3,\), \(2,\) and \(3,\)"):
        Routing.from_pairs(torch.zeros(3).int(), torch.zeros(2).int(), torch.zeros(3), 4, 4)


# ------------------------------------------------------------------------------ compact


def test_id_dtype():
    sizes = (2, 255, 256, 257, 65536, 65537)
    u8, u16, i32 = torch.uint8, torch.uint16, torch.int32
    assert [id_dtype(E) for E in sizes] == [u8, u8, u8, u16, u16, i32]


@pytest.mark.parametrize("E", [5, 255, 256, 257, 896, 65536, 65537])
def test_compact_round_trip(E):
    expert_TK = torch.stack(
        [torch.tensor([0, E - 1]), torch.tensor([-1, -1]), torch.tensor([E - 1, 1])]
    )
    routing = Routing.from_topk(expert_TK, torch.rand(3, 2), E)
    back = routing.compact(torch.float32).expand().validate()
    assert torch.equal(back.expert_S, routing.expert_S)
    some_S = routing.expert_S >= 0
    assert torch.equal(back.gates_S[some_S], routing.gates_S[some_S])
    assert torch.equal(back.row_S, routing.row_S)


def test_compact_bytes():
    routing = Routing.from_topk(*random_topk(64, 256, 8), 256)
    compact = routing.compact()
    assert compact.expert_S.nbytes + compact.gates_S.nbytes == 64 * 8 * (1 + 2)
    wide = Routing.from_topk(*random_topk(64, 512, 8), 512).compact(torch.float32)
    assert wide.expert_S.nbytes + wide.gates_S.nbytes == 64 * 8 * (2 + 4)
    error = (compact.expand().gates_S - routing.gates_S).abs().max()
    assert 0 < error <= 2**-9  # bf16 keeps 8 bits of numbers below 1


def test_compact_of_ragged():
    routing = ragged()
    back = routing.compact(torch.float32).expand().validate()
    assert torch.equal(back.dense(), routing.dense())
    assert torch.equal(back.slot_offsets_T1, routing.slot_offsets_T1)
    assert back.slots_per_token is None


def test_expand_with_live_gates():
    live_S = torch.rand(8, requires_grad=True)
    routing = small().compact().expand(live_S)
    assert routing.gates_S.grad_fn is not None
    routing.dense().sum().backward()
    assert live_S.grad.tolist() == [1, 1, 1, 1, 0, 0, 1, 1]
