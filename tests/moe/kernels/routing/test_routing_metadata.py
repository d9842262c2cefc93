"""The counting sort of slots by expert and the tile list, against plain loops over Python lists."""

import pytest
import torch

from moe.kernels.common.backend import INTERPRET
from moe.kernels.common.row_tiles import max_tiles, tile_schedule
from moe.kernels.routing import routing_metadata as module
from moe.kernels.routing.routing_metadata import routing_metadata

triton_only = pytest.mark.skipif(
    not INTERPRET, reason="kernels on a CPU need Triton's interpreter; tests/gpu has the others"
)
BACKENDS = ["reference", pytest.param("triton", marks=triton_only)]


def by_hand(experts, tokens, E, R):
    """The same arrays by appending to one list per expert."""
    lists = [[s for s, e in enumerate(experts) if e == i] for i in range(E)]
    slots = [s for some in lists for s in some]
    offsets = [0]
    for some in lists:
        offsets.append(offsets[-1] + len(some))
    rows = [-1] * len(experts)
    for row, slot in enumerate(slots):
        rows[slot] = row
    tail = [0] * (R - len(slots))
    return offsets, rows, slots + tail, [tokens[s] for s in slots] + tail


def check(experts, E, backend, R=None, **source):
    ids = torch.tensor(experts, dtype=torch.int32)
    S = len(experts)
    if "slots_per_token" in source:
        tokens = [s // source["slots_per_token"] for s in range(S)]
    elif "token_S" in source:
        tokens = source["token_S"].tolist()
    else:
        bounds = source["slot_offsets_T1"].tolist()
        tokens = [max(t for t in range(len(bounds) - 1) if bounds[t] <= s) for s in range(S)]
    meta = routing_metadata(ids, E, max_rows=R, backend=backend, **source)
    for got, want in zip(meta, by_hand(experts, tokens, E, S if R is None else R)):
        assert got.tolist() == want
        assert got.dtype == torch.int32
    return meta


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("S", "E", "low"),
    [(0, 4, 0), (1, 1, 0), (6, 3, -1), (33, 1, -1), (64, 5, 0), (130, 60, -1), (40, 96, 0)],
)
def test_sizes(S, E, low, backend):
    experts = torch.randint(low, E, (S,)).tolist()
    check(experts, E, backend, slots_per_token=1)
    check(experts, E, backend, R=S + 7, token_S=torch.arange(S) // 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "experts", [[2] * 40, [-1] * 40, [0, 3] * 20, list(range(4)) * 10, [7, -5, 1, 4, 3, 0, 99, 1]]
)
def test_one_expert_none_and_ids_out_of_range(experts, backend):
    check(experts, 4, backend, slots_per_token=2, R=50)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged(backend):
    bounds = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)  # token 1 has no slot
    check([2, 0, 1, 1, 0, 2, 1, 0, 3], 4, backend, slot_offsets_T1=bounds)


@pytest.mark.parametrize("backend", BACKENDS)
def test_int64_and_strided_ids(backend):
    ids = torch.randint(0, 5, (12, 4))
    a = routing_metadata(ids[:, ::2], 5, slots_per_token=2, backend=backend)
    b = routing_metadata(ids[:, ::2].contiguous().int(), 5, slots_per_token=2, backend="reference")
    for x, y in zip(a, b):
        assert torch.equal(x, y)


@triton_only
def test_several_programs(monkeypatch):
    monkeypatch.setattr(module, "_ONE_PROGRAM_SLOTS", 8)
    monkeypatch.setattr(module, "words_per_step", lambda experts: 4)
    experts = torch.randint(-1, 6, (700,)).tolist()
    check(experts, 6, "triton", slots_per_token=2, R=1500)
    check(sorted(experts), 6, "triton", token_S=torch.arange(700) // 5)


@triton_only
@pytest.mark.parametrize("most", [8, 4096])
def test_next_rows_in_memory(monkeypatch, most):
    """By several programs and by one; experts that fill a step of 64 slots, and many."""
    monkeypatch.setattr(module, "_ONE_PROGRAM_SLOTS", most)
    few, many = (torch.randint(-1, high, (150,)).tolist() for high in (3, 1025))
    check(few, 1025, "triton", slots_per_token=2, R=170)
    check(many, 1025, "triton", token_S=torch.arange(150) // 5)


@triton_only
def test_several_steps_of_one_program(monkeypatch):
    monkeypatch.setattr(module, "words_per_step", lambda experts: 2)
    check(torch.randint(-1, 6, (150,)).tolist(), 6, "triton", slots_per_token=2, R=160)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_and_rows_are_inverse(backend):
    meta = routing_metadata(torch.randint(0, 9, (90,)), 9, slots_per_token=3, backend=backend)
    assert torch.equal(meta.row_S[meta.slot_R.long()], torch.arange(90, dtype=torch.int32))
    # stable: inside an expert the slots ascend
    for e in range(9):
        mine = meta.slot_R[meta.offsets_E1[e] : meta.offsets_E1[e + 1]]
        assert (mine.diff() > 0).all()


# ------------------------------------------------------------------------------------------ tiles


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [[5, 0, 9, 3, 0, 2], [0, 0], [16], [1] * 40, [7, 8, 9, 0, 64]])
@pytest.mark.parametrize("tile", [1, 4, 128])
def test_tiles(counts, tile, backend):
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    rows = sum(counts) + 5  # more allocated than used
    want = []
    for e, n in enumerate(counts):
        first = int(offsets[e])
        want += [(e, first + i, first + min(i + tile, n)) for i in range(0, n, tile)]
    tiles = tile_schedule(offsets, tile, rows, backend=backend)
    assert tiles.count.item() == len(want)
    used = [tuple(int(x[i]) for x in tiles[:3]) for i in range(len(want))]
    assert used == want
    assert (tiles.expert_B[len(want) :] == -1).all()
    assert torch.equal(tiles.start_B[len(want) :], tiles.end_B[len(want) :])
    assert len(tiles.expert_B) == max_tiles(len(counts), tile, rows) >= len(want)


@pytest.mark.parametrize("experts", [1, 2, 5])
@pytest.mark.parametrize("tile", [1, 3, 4])
def test_tile_bound_is_reached_and_never_passed(experts, tile):
    most = {}
    for code in range(8**experts):
        counts = [code // 8**e % 8 for e in range(experts)]
        n = sum(-(-c // tile) for c in counts)
        most[sum(counts)] = max(most.get(sum(counts), 0), n)
    for rows, n in most.items():
        assert n <= max_tiles(experts, tile, rows)
    rows = 7  # every split of 7 rows over the experts was seen
    assert most[rows] == max_tiles(experts, tile, rows)


# --------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"slots_per_token": None}, "exactly one"),
        ({"token_S": torch.zeros(6, dtype=torch.int32)}, "exactly one"),
        ({"slots_per_token": 4}, "slots_per_token=4 .* 6 slots"),
        ({"slots_per_token": None, "token_S": torch.zeros(5)}, "token_S has 5"),
        ({"max_rows": 5}, "max_rows=5"),
        ({"expert_S": torch.zeros(6)}, "expert_S .*float32"),
    ],
)
def test_refused(change, message):
    args = {"expert_S": torch.zeros(6, dtype=torch.int32), "num_experts": 3, "slots_per_token": 2}
    args.update(change)
    with pytest.raises(ValueError, match=message):
        routing_metadata(args.pop("expert_S"), args.pop("num_experts"), **args)


@pytest.mark.parametrize(("tile", "rows"), [(0, 4), (4, -1)])
def test_refused_tiles(tile, rows):
    with pytest.raises(ValueError, match=f"{0 if tile == 0 else -1}"):
        tile_schedule(torch.tensor([0, 2], dtype=torch.int32), tile, rows)


# -------------------------------------------------------------------------------------- operators


@triton_only
def test_operators():
    checks = ("test_schema", "test_faketensor")
    ids = torch.randint(-1, 3, (8,), dtype=torch.int32)
    ops = torch.ops.tessera
    torch.library.opcheck(ops.routing_metadata.default, (ids, 3, 2, None, 10), test_utils=checks)
    offsets = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    row = torch.tensor([2, -1, 0, 3, 1, -1], dtype=torch.int32)
    torch.library.opcheck(ops.slots_of_rows.default, (row, offsets, 2), test_utils=checks)
    torch.library.opcheck(ops.routing_metadata.default, (ids, 3, None, ids, 8), test_utils=checks)
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    torch.library.opcheck(ops.tile_schedule.default, (offsets, 4, 9), test_utils=checks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend):
    def make(ids):
        meta = routing_metadata(ids, 5, slots_per_token=2, max_rows=40, backend=backend)
        return (*meta, *tile_schedule(meta.offsets_E1, 4, 40, backend=backend)[:4])

    ids = torch.randint(-1, 5, (30,), dtype=torch.int32)
    compiled = torch.compile(make, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(ids), make(ids)):
        assert torch.equal(got, want)
