"""Process groups of meshes: how many there are, what they are called, and which axes share one."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.plan import Parallel, Plan
from weft.topology.mesh import AXES, EXPERT_AXES, build_counts_group, build_expert_mesh, build_mesh

RANKS = 4
# Plan of four ranks; groups of a rank with and without sharing; names of the groups on an accelerator.
LAYOUTS: dict[str, tuple[dict[str, Any], int, int, set[str]]] = {
    "ep in tp": ({"tp": 2, "ep": 2}, 4, 2, {"mesh_dp_shard+edp_shard", "mesh_tp+ep"}),
    "ep in cp": ({"cp": 2, "ep": 2}, 4, 2, {"mesh_dp_shard+edp_shard", "mesh_cp_ring+ep"}),
    "ep of all data ranks": ({"ep": 4}, 2, 2, {"default_pg", "mesh_ep"}),  # tokens do not wait for weights
    "ep of data ranks": ({"tp": 2, "ep": 2, "zero": 0}, 4, 2, {"mesh_dp_replicate+edp_replicate", "mesh_tp+ep"}),
    "ep across tp": ({"tp": 2, "ep": 4}, 3, 3, {"mesh_dp_shard", "mesh_tp", "mesh_ep"}),
    "pipeline": ({"pp": 2, "tp": 2, "ep": 2}, 4, 2, {"mesh_pp", "mesh_tp+ep"}),
    "experts on all ranks": ({"tp": 4}, 2, 2, {"mesh_tp", "default_pg"}),
    "replicas": (
        {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
        4,
        3,
        {"mesh_dp_replicate+edp_replicate", "mesh_tp", "mesh_edp_shard"},
    ),
}


def meshes(
    rank: int, ranks: int, parallel: dict[str, Any], device_type: str
) -> tuple[list[str], list[float], list[float]]:
    """Names of the distinct groups with several ranks; and the sums of the ranks along each axis, found and expected."""
    plan = resolved(Plan(parallel=Parallel(**parallel)), ranks)
    mesh = build_mesh(plan, device_type, ranks)
    expert_mesh = build_expert_mesh(plan, mesh)
    groups, found, expected = set(), [], []
    for own, axes in ((mesh, AXES), (expert_mesh, EXPERT_AXES)):
        for axis in axes:
            group, total = own.get_group(axis), torch.tensor([float(rank + 1)])
            assert group.size() == own[axis].size()
            assert group.rank() == own.get_local_rank(axis)
            if group.size() > 1:
                groups.add(group)
                dist.all_reduce(total, group=group)
                found.append(total.item())
                expected.append(float(sum(other + 1 for other in own[axis].mesh.tolist())))
    counts = build_counts_group(expert_mesh) if plan.parallel.ep > 1 else None
    assert counts not in groups, "small messages have a group of their own"
    return [group.group_desc for group in groups], found, expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_axes_with_the_same_ranks_share_a_group_on_accelerators(layout: str) -> None:
    parallel, _, number, names = LAYOUTS[layout]
    for own_names, found, expected in run_ranks(RANKS, meshes, parallel, "cuda"):
        assert set(own_names) == names
        assert len(own_names) == number
        assert found == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_axes_have_groups_of_their_own_on_the_cpu(layout: str) -> None:
    """Traffic is told apart by axis."""
    parallel, number, _, _ = LAYOUTS[layout]
    for own_names, found, expected in run_ranks(RANKS, meshes, parallel, "cpu"):
        assert len(set(own_names)) == len(own_names) == number - (parallel.get("pp", 1) > 1)
        assert all(name.startswith("mesh_") for name in own_names)
        assert found == expected


def options_of_groups(rank: int, ranks: int, parallel: dict[str, Any]) -> dict[str, bool]:
    """High priority of the messages of each group, by its name."""
    found, make = {}, dist.new_group

    def new_group(*arguments: Any, pg_options: Any = None, **keywords: Any) -> Any:
        found[keywords.get("group_desc")] = bool(pg_options and pg_options.is_high_priority_stream)
        return make(*arguments, **keywords)

    nccl = SimpleNamespace(Options=SimpleNamespace)
    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
    ):
        plan = resolved(Plan(parallel=Parallel(**parallel)), ranks)
        build_counts_group(build_expert_mesh(plan, build_mesh(plan, "cuda", ranks)))
    return found


def test_messages_for_which_computation_waits_go_before_it() -> None:
    """A message that is launched beside a matmul would else begin after it."""
    for found in run_ranks(RANKS, options_of_groups, {"tp": 2, "ep": 4}):
        assert found == {None: False, "mesh_dp_shard": False, "mesh_tp": True, "mesh_ep": True, "expert_counts": True}


def mesh_of_a_bound_group(rank: int, ranks: int) -> list[int]:
    """Shape of a mesh where a library has bound the default group to a device."""
    world: Any = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", rank)
    try:
        mesh = build_mesh(resolved(Plan(), ranks), "cuda", ranks)
        return [mesh.get_group(axis).size() for axis in AXES]
    finally:
        world.bound_device_id = None


def test_axes_of_one_rank_split_no_group_that_is_bound_to_a_device() -> None:
    """torch splits a bound group for each group that a rank is not in, which the other ranks must then do as well."""
    assert run_ranks(2, mesh_of_a_bound_group) == [[1, 1, 2, 1, 1, 1]] * 2
