"""Layouts: who is in which group, and what is refused before anything starts."""

from itertools import product

import pytest

from parallel.mesh import GROUPS, plan_mesh

LAYOUTS = [
    (4, 2, 2, "across_nodes"),
    (4, 4, 2, "across_nodes"),
    (4, 2, 1, "across_nodes"),
    (8, 2, 2, "within_node"),
    (8, 2, 4, "within_node"),
    (12, 6, 3, "across_nodes"),
    (1, 1, 1, "across_nodes"),
    (64, 8, 8, "across_nodes"),
]


@pytest.mark.parametrize(("world", "nodes", "expert", "placement"), LAYOUTS)
def test_groups_cut_the_world(world, nodes, expert, placement):
    plan = plan_mesh(world, nodes, expert, placement, num_experts=24)
    sizes = {
        "shard": plan.local,
        "replica": plan.nodes,
        "expert": expert,
        "expert_shard": plan.expert_shard,
        "expert_replica": plan.expert_replica,
    }
    for name in GROUPS:
        groups = plan.members(name)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(world)), name
        assert {len(ranks) for ranks in groups} == {sizes[name]}, name
        assert all(ranks == sorted(ranks) for ranks in groups), name


@pytest.mark.parametrize(("world", "nodes", "expert", "placement"), LAYOUTS)
def test_every_expert_shard_is_held_by_exactly_its_replicas(world, nodes, expert, placement):
    """(expert part, shard) names what a rank holds; each is held once per replica, none is lost."""
    plan = plan_mesh(world, nodes, expert, placement, num_experts=24)
    held = {}
    for rank in range(world):
        what = (plan.place(rank, "expert"), plan.place(rank, "expert_shard"))
        held.setdefault(what, []).append(rank)
    assert set(held) == set(product(range(expert), range(plan.expert_shard)))
    assert sorted(held.values()) == sorted(plan.members("expert_replica"))


@pytest.mark.parametrize(("world", "nodes", "expert", "placement"), LAYOUTS)
def test_experts_travel_and_shard_where_the_placement_says(world, nodes, expert, placement):
    plan = plan_mesh(world, nodes, expert, placement, num_experts=24)
    node = [rank // plan.local for rank in range(world)]
    local = [rank % plan.local for rank in range(world)]
    for ranks in plan.members("expert_shard"):
        assert len({node[r] for r in ranks}) == 1, ranks
    for ranks in plan.members("expert"):
        if placement == "across_nodes":
            assert len({local[r] for r in ranks}) == 1, ranks
            assert [node[r] for r in ranks] == list(range(node[ranks[0]], node[ranks[0]] + expert))
        else:
            assert len({node[r] for r in ranks}) == 1, ranks
            first = local[ranks[0]]
            assert [local[r] for r in ranks] == list(range(first, first + expert))


def test_two_nodes_of_two_by_hand():
    plan = plan_mesh(4, nodes=2, expert=2, num_experts=8)
    assert plan.members("shard") == [[0, 1], [2, 3]]
    assert plan.members("expert") == plan.members("replica") == [[0, 2], [1, 3]]
    assert plan.members("expert_shard") == [[0, 1], [2, 3]]
    assert plan.expert_replica == 1
    assert [plan.place(rank, "expert") for rank in range(4)] == [0, 0, 1, 1]


def test_defaults_take_the_hosts_and_name_the_degrees_that_fit():
    plan = plan_mesh(32, hosts=4, num_experts=6)
    assert (plan.nodes, plan.local, plan.expert, plan.degrees) == (4, 8, 1, [1, 2])
    assert plan_mesh(32, hosts=4, num_experts=[6, 9]).degrees == [1]
    assert plan_mesh(32, hosts=4).degrees == [1]  # a dense model
    inside = plan_mesh(32, hosts=4, num_experts=16, placement="within_node")
    assert inside.degrees == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world": 4, "nodes": 3}, r"parallel\.nodes=3 .* 4 processes; allowed: 1, 2, 4"),
        ({"world": 4, "nodes": 0}, r"parallel\.nodes=0 "),
        ({"world": 8, "nodes": 2, "hosts": 4}, r"parallel\.nodes=2 on 4 hosts .*allowed: 4, 8"),
        ({"world": 6, "hosts": 4}, r"6 processes on 4 hosts"),
        (
            {"world": 4, "nodes": 2, "expert": 4, "num_experts": 8},
            r"parallel\.expert=4 does not divide parallel\.nodes=2: .*allowed: 1, 2$",
        ),
        (
            {"world": 8, "nodes": 2, "expert": 4, "num_experts": 8},
            r"allowed: 1, 2 \(or parallel\.expert_placement=within_node\)$",
        ),
        (
            {"world": 8, "nodes": 4, "expert": 4, "num_experts": 8, "placement": "within_node"},
            r"parallel\.expert=4 does not divide the 2 ranks of a node; allowed: 1, 2 "
            r"\(or parallel\.expert_placement=across_nodes\)$",
        ),
        (
            {"world": 8, "nodes": 4, "expert": 4, "num_experts": 6},
            r"parallel\.expert=4 does not divide num_experts=6; allowed: 1, 2$",
        ),
        (
            {"world": 8, "nodes": 4, "expert": 4, "num_experts": [8, 6]},
            r"num_experts=6; allowed: 1, 2$",
        ),
        ({"world": 4, "nodes": 2, "expert": 2}, r"parallel\.expert=2, but .* no experts"),
        (
            {"world": 4, "placement": "everywhere"},
            r"expert_placement='everywhere' is unknown; allowed: across_nodes, within_node",
        ),
    ],
)
def test_impossible_sizes_are_refused_with_the_numbers(settings, message):
    with pytest.raises(ValueError, match=message):
        plan_mesh(**settings)


def test_description_names_every_degree():
    text = plan_mesh(16, nodes=4, expert=2, num_experts=8).describe()
    assert text == (
        "4 node(s) × 4 local: dense weights sharded 4-fold, 4 replicas; experts split over 2 "
        "(across_nodes), each part sharded 4-fold, 2 replicas"
    )
