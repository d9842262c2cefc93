"""The process groups of a mesh, for real over gloo."""

import torch
import torch.distributed as dist

from parallel.mesh import GROUPS, build_mesh, plan_mesh
from tests.distributed.launch import run

PLANS = [
    (2, 2, "across_nodes"),
    (4, 2, "across_nodes"),
    (1, 2, "within_node"),
    (2, 1, "across_nodes"),
]


def _groups_sum_over_their_members():
    rank = dist.get_rank()
    for nodes, expert, placement in PLANS:
        plan = plan_mesh(4, nodes, expert, placement, num_experts=8)
        mesh = build_mesh(plan, torch.device("cpu"), timeout_s=60)
        for name in GROUPS:
            mine = next(ranks for ranks in plan.members(name) if rank in ranks)
            total = torch.tensor(2.0**rank)
            dist.all_reduce(total, group=mesh.group(name))
            assert total.item() == sum(2.0**r for r in mine), (name, mine, total)
            assert dist.get_rank(mesh.group(name)) == mesh.place(name)
        assert mesh.groups["shard"] is not mesh.groups["expert_shard"]
        for kind, replica, shard in (
            ("dense", "replica", "shard"),
            ("expert", "expert_replica", "expert_shard"),
        ):
            found = mesh.meshes[kind]
            assert found.mesh_dim_names == (replica, shard)
            assert list(found.get_coordinate()) == [mesh.place(replica), mesh.place(shard)]
            assert found.get_group(shard) is mesh.groups[shard]
        first = mesh.place("expert") * 8 // expert
        assert list(mesh.local_experts(8)) == list(range(first, first + 8 // expert))
    return True


def test_groups_of_several_layouts():
    assert run(4, _groups_sum_over_their_members) == [True] * 4


def _wrong_world():
    dist.barrier()  # all are connected before the first one leaves
    try:
        build_mesh(plan_mesh(4, 2, 2, num_experts=8), torch.device("cpu"))
    except ValueError as error:
        return str(error)


def test_a_plan_for_another_world_is_refused_before_any_group_exists():
    assert run(2, _wrong_world) == ["the plan is for 4 processes, 2 are running"] * 2


def test_one_process_needs_no_groups():
    mesh = build_mesh(plan_mesh(1, num_experts=8), torch.device("cpu"))
    assert mesh.groups == {}
    assert mesh.local_experts(8) == range(8)
